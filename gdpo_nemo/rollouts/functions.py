"""Choice of each environment's rollout method, and the scheduler's interface to run this method."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.records import Prompt, Trajectory
from gdpo_nemo.data.replies import reply_parser
from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.execution.pools import EnvironmentExecutor
from gdpo_nemo.environments.registry import load_environments
from gdpo_nemo.generation.requests import CompletionBatch, SampleRequest, Sampling
from gdpo_nemo.rollouts.agents import AgentEnvironment, play_with_agents
from gdpo_nemo.rollouts.context import RolloutContext, RolloutFunction, checked
from gdpo_nemo.rollouts.credit import longest_completion
from gdpo_nemo.rollouts.trl_functions import load_rollout_function
from gdpo_nemo.rollouts.turns import EpisodeJob, Limits, play_episode
from gdpo_nemo.utils.errors import ConfigError, GdpoError, RunError, first_line
from gdpo_nemo.utils.exits import exits_contained

if TYPE_CHECKING:
    from gdpo_nemo.cluster.fleet import EngineFleet
    from gdpo_nemo.data.image_reader import ImageReader
    from gdpo_nemo.data.tokenizer import Tokenizer
    from gdpo_nemo.rollouts.endpoint.server import Endpoint

SampleAll = Callable[[Sequence[SampleRequest]], CompletionBatch]
"""Function that samples completions and blocks until all are complete.

Any thread may call the function except the thread of the fleet's event loop.
"""


class RolloutKind(StrEnum):
    """Method to produce the trajectories of an environment."""

    SAMPLE = "sample"
    """Sample one completion per trajectory."""
    EPISODE = "episode"
    """Run the built-in loop over the turns of a Python environment, in one coroutine per trajectory."""
    CALL = "call"
    """Call a blocking function that produces complete groups: a custom function or ``play_with_agents``."""


@dataclass(frozen=True)
class RolloutMethod:
    """Rollout method of one environment."""

    kind: RolloutKind
    function: RolloutFunction | None = None
    """Function to call. The function is None unless ``kind`` is ``CALL``."""
    has_tools: bool = False
    """True if the environment offers tools for every prompt."""
    agents: Environment | None = None
    """Environment whose agents play with the endpoint, or None."""


@dataclass(frozen=True)
class SamplingJob:
    """Sampling settings of one call. Training and validation have different settings."""

    sampling: Sampling
    samples: int
    seed: Callable[[int, int, int], int]
    """Function that maps (prompt index in the call, sample index, turn) to the seed of a completion."""
    version: int = 0
    """See ``RolloutContext.version``."""


class RolloutRunner:
    """Produces the trajectories of ``EPISODE`` and ``CALL`` environments, and runs the endpoint if it is enabled.

    Args:
        images: reader of images in observations and requests, or None if the policy reads only text.

    Raises:
        ConfigError: in the same cases as ``rollout_methods``.
        RunError: if the endpoint cannot listen.
    """

    def __init__(
        self,
        config: Config,
        fleet: EngineFleet,
        pool: EnvironmentExecutor,
        tokenizer: Tokenizer,
        images: ImageReader | None = None,
    ):
        self._config = config
        self._fleet = fleet
        self._pool = pool
        self._methods = rollout_methods(config)
        self._agents = [method.agents for method in self._methods.values() if method.agents is not None]
        chat = config.data.train.chat
        has_template = bool(getattr(tokenizer, "chat_template", None))
        template_kwargs = config.data.train.chat_template_kwargs
        replies = reply_parser(config, tokenizer)
        chat = has_template if chat is None else chat
        self._conversation = Conversation(tokenizer, chat, template_kwargs, replies, images)
        self._images = images
        if config.rollout.endpoint.enabled or any(method.has_tools for method in self._methods.values()):
            replies.load()
        self._limits = Limits(
            max_turns=config.rollout.turns.max_turns,
            max_tokens=longest_completion(config),
            max_new_tokens=config.policy.generation.max_new_tokens,
            max_sequence=config.policy.max_total_sequence_length,
            max_images=config.data.images.max_per_prompt,
        )
        self.endpoint = self._start_endpoint() if config.rollout.endpoint.enabled else None

    def _start_endpoint(self) -> Endpoint:
        # Import FastAPI only here, because runs without agents do not need it.
        from gdpo_nemo.rollouts.endpoint.server import Endpoint
        from gdpo_nemo.rollouts.endpoint.service import Budgets, Service

        limits = self._limits
        budgets = Budgets(limits.max_turns, limits.max_tokens, limits.max_sequence)
        shared = self._config.rollout.max_staleness > 0
        service = Service(self._fleet, self._conversation, budgets, shared, self._images)
        settings = self._config.rollout.endpoint
        token = None
        if settings.api_key_env is not None:
            token = os.environ.get(settings.api_key_env)
            if not token:
                raise ConfigError(
                    f"rollout.endpoint.api_key_env: the environment variable {settings.api_key_env} is not set"
                )
        endpoint = Endpoint(service, settings.host, settings.port, token, settings.allowed_hosts)
        for agents in self._agents:
            agents.use_run_folder(Path(self._config.run.dir))
            agents.use_endpoint(endpoint.url, token)
        return endpoint

    def kind(self, environment: str) -> RolloutKind:
        """Return the rollout method of an environment's prompts."""
        return self._methods[environment].kind

    async def episode(self, prompt: Prompt, sample_index: int, job: EpisodeJob) -> Trajectory:
        """Produce one trajectory of an ``EPISODE`` environment, turn by turn.

        Raises the same exceptions as ``play_episode``.
        """
        return await play_episode(prompt, sample_index, job, self._limits, self._conversation)

    def call(self, prompts: Sequence[Prompt], job: SamplingJob, sample: SampleAll) -> list[list[Trajectory]]:
        """Produce and check the trajectories for prompts of ``CALL`` environments. The call blocks until all
        trajectories are complete.

        Several threads may call this method concurrently. If the prompts require several functions, the functions run
        one after the other.

        Args:
            sample: function that samples completions for the rollout functions.

        Raises:
            RunError: if a function raises an exception or returns an invalid result, or the engines failed permanently.
        """
        # By id, because a function may be an object that cannot be hashed.
        parts: dict[int, tuple[RolloutFunction, list[int]]] = {}
        for index, prompt in enumerate(prompts):
            function = self._function(prompt)
            parts.setdefault(id(function), (function, []))[1].append(index)
        made: dict[int, list[Trajectory]] = {}
        for function, indices in parts.values():
            chosen = [prompts[index] for index in indices]
            context = self._context(job, indices, partial(_sample, sample, [p for p in chosen if p.images]))
            made.update(zip(indices, _run(function, chosen, context)))
        return [made[index] for index in range(len(prompts))]

    def _function(self, prompt: Prompt) -> RolloutFunction:
        method = self._methods[prompt.environment]
        if method.function is None:
            raise ValueError(f"environment {prompt.environment} is a {method.kind}, not a call")
        return method.function

    def _context(self, job: SamplingJob, indices: Sequence[int], sample: SampleAll) -> RolloutContext:
        """Return the context of one function.

        Args:
            indices: indices of the function's prompts in the call.
        """

        return RolloutContext(
            samples=job.samples,
            seed=lambda i, j, turn: job.seed(indices[i], j, turn),
            sample=sample,
            conversation=self._conversation,
            pool=self._pool,
            max_turns=self._limits.max_turns,
            max_tokens=self._limits.max_tokens,
            max_new_tokens=self._limits.max_new_tokens,
            max_sequence=self._limits.max_sequence,
            sampling=job.sampling,
            version=job.version,
            endpoint=self.endpoint,
        )

    def close(self) -> None:
        """Stop the agents and the endpoint."""
        for agents in self._agents:
            agents.close()
        if self.endpoint is not None:
            self.endpoint.close()


def _sample(sample: SampleAll, prompts: Sequence[Prompt], requests: Sequence[SampleRequest]) -> CompletionBatch:
    """Sample the completions of a rollout function.

    Args:
        prompts: prompts of the call that have images.

    Raises:
        RunError: if ``requests`` is empty, or a request has the tokens of a prompt without its images. The policy would
            be trained with images that the engine has not seen.
    """
    if not requests:
        raise RunError("the rollout function requested no completion")
    for prompt in prompts:
        count = len(prompt.token_ids)
        for request in requests:
            if not request.images and np.array_equal(request.prompt_ids[:count], prompt.token_ids):
                raise RunError(
                    f"a request has the tokens of prompt {prompt.id}, but not its images; pass images=prompt.images, "
                    "or Transcript.images in later turns"
                )
    return sample(requests)


def rollout_methods(config: Config) -> dict[str, RolloutMethod]:
    """Return the rollout method of each environment, by name. A custom function applies to all environments.

    Raises:
        ConfigError: if the function cannot be loaded or agents have no endpoint. Also raised if turn limits or the
            endpoint are configured but no environment uses them.
    """
    environments = load_environments(config.env)
    with_agents = {name for name, e in environments.items() if e.plays_with_endpoint}
    if with_agents and not config.rollout.endpoint.enabled:
        raise ConfigError(
            f"rollout.endpoint.enabled: must be true, because the agents of env.{min(with_agents)} require it"
        )
    if config.rollout.function is not None:
        custom = RolloutMethod(RolloutKind.CALL, load_rollout_function(config.rollout.function))
        return dict.fromkeys(config.env, custom)
    methods = {name: _built_in(environment) for name, environment in environments.items()}
    turns = config.rollout.turns
    one_turn = all(method.kind is RolloutKind.SAMPLE for method in methods.values())
    if one_turn and (turns.max_turns != 1 or turns.max_tokens is not None):
        raise ConfigError("rollout.turns: has no effect, because no environment of env has turns; remove it")
    if config.rollout.endpoint.enabled and not with_agents:
        raise ConfigError(
            "rollout.endpoint: has no effect without an environment of agents or a rollout.function; remove it"
        )
    return methods


def _built_in(environment: Any) -> RolloutMethod:
    if environment.plays_with_endpoint:
        play = partial(play_with_agents, cast(AgentEnvironment, environment))
        return RolloutMethod(RolloutKind.CALL, play, agents=environment)
    kind = RolloutKind.EPISODE if environment.has_turns else RolloutKind.SAMPLE
    return RolloutMethod(kind, has_tools=environment.offers_tools)


def _run(function: RolloutFunction, prompts: Sequence[Prompt], context: RolloutContext) -> list[list[Trajectory]]:
    """Call a rollout function and return its validated result.

    Raises:
        RunError: if the function raises an exception or returns an invalid result.
    """
    name = getattr(function, "__name__", "of agents")
    try:
        with exits_contained():
            made = function(prompts, context)
    except GdpoError:
        raise
    except Exception as error:  # user code
        raise RunError(f"rollout function {name} raised {first_line(error)}") from error
    return checked(made, prompts, context, f"rollout function {name}")


def needs_verdict(trajectory: Trajectory) -> bool:
    """Return True if the environment must still verify the trajectory, because it has no rewards yet."""
    return trajectory.trains and not trajectory.rewards
