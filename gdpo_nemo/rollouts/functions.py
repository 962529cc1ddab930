"""How the trajectories of each environment are made, and what the scheduler calls for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Sequence, cast

from gdpo_nemo.config.messages import first_line
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.records import Prompt, Trajectory
from gdpo_nemo.environments.execution.executor import EnvironmentExecutor
from gdpo_nemo.environments.registry import load_environments
from gdpo_nemo.errors import ConfigError, GdpoError, RunError
from gdpo_nemo.generation.requests import CompletionBatch, SampleRequest, Sampling
from gdpo_nemo.rollouts.agents import AgentEnvironment, play_with_agents
from gdpo_nemo.rollouts.context import RolloutContext, RolloutFunction, checked
from gdpo_nemo.rollouts.learning import longest_completion
from gdpo_nemo.rollouts.trl_rollouts import load_rollout_function
from gdpo_nemo.rollouts.turns import EpisodeJob, Limits, play_episode

if TYPE_CHECKING:
    from gdpo_nemo.cluster.fleet import EngineFleet
    from gdpo_nemo.endpoint.server import Endpoint

SampleAll = Callable[[Sequence[SampleRequest]], CompletionBatch]
"""Draws completions and waits for them, from any thread but the fleet's."""


class RolloutKind(StrEnum):
    """Who makes a trajectory."""

    SAMPLE = "sample"
    """One completion of an engine."""
    EPISODE = "episode"
    """The built-in turns of an environment in Python, a coroutine a trajectory."""
    CALL = "call"
    """A function that makes whole groups and blocks until it has: the config's own, or agents."""


@dataclass(frozen=True)
class RolloutMethod:
    """How the trajectories of one environment are made."""

    kind: RolloutKind
    function: RolloutFunction | None = None
    """Of a ``CALL``."""


@dataclass(frozen=True)
class SamplingJob:
    """The sampling settings of one call, which differ between training and validation."""

    sampling: Sampling
    samples: int
    seed: Callable[[int, int, int], int]
    """(prompt's place in the call, sample, turn) -> seed of that completion."""
    version: int = 0
    """As in ``RolloutContext``."""


class RolloutRunner:
    """Makes the trajectories that are no single completion, and runs the endpoint where the config wants one.

    Raises:
        ConfigError: see ``rollout_methods``. RunError: the endpoint cannot listen.
    """

    def __init__(self, config: Config, fleet: EngineFleet, pool: EnvironmentExecutor, tokenizer: Any):
        self._config = config
        self._fleet = fleet
        self._pool = pool
        self._methods = rollout_methods(config)
        chat = config.data.train.chat
        has_template = bool(getattr(tokenizer, "chat_template", None))
        template_kwargs = config.data.train.chat_template_kwargs
        self._conversation = Conversation(tokenizer, has_template if chat is None else chat, template_kwargs)
        self._limits = Limits(
            max_turns=config.rollout.turns.max_turns,
            max_tokens=longest_completion(config),
            max_new_tokens=config.policy.generation.max_new_tokens,
            max_sequence=config.policy.max_total_sequence_length,
        )
        self.endpoint = self._listening() if config.rollout.endpoint.enabled else None

    def _listening(self) -> Endpoint:
        # Imported here: runs without agents need no FastAPI.
        from gdpo_nemo.endpoint.server import Endpoint
        from gdpo_nemo.endpoint.service import Budgets, Service

        limits = self._limits
        budgets = Budgets(limits.max_turns, limits.max_tokens, limits.max_sequence)
        shared = self._config.rollout.max_staleness > 0
        service = Service(self._fleet, self._conversation, budgets, shared=shared)
        return Endpoint(service, self._config.rollout.endpoint.host, self._config.rollout.endpoint.port)

    def kind(self, environment: str) -> RolloutKind:
        """How the trajectories of an environment's prompts are made."""
        return self._methods[environment].kind

    async def episode(self, prompt: Prompt, sample_index: int, asked: EpisodeJob) -> Trajectory:
        """One trajectory of an ``EPISODE``, turn by turn. Raises as ``play_episode``."""
        return await play_episode(prompt, sample_index, asked, self._limits, self._conversation)

    def call(self, prompts: Sequence[Prompt], asked: SamplingJob, sample: SampleAll) -> list[list[Trajectory]]:
        """The trajectories of each prompt of a ``CALL``, checked; blocks. Several threads may call at once.

        Prompts of several functions are given to one after the other.

        Args:
            sample: what functions draw completions with.

        Raises:
            RunError: a function broke its contract; engines failed for good.
        """
        parts: dict[int, tuple[RolloutFunction, list[int]]] = {}
        for place, prompt in enumerate(prompts):
            function = self._function(prompt)
            parts.setdefault(id(function), (function, []))[1].append(place)
        made: dict[int, list[Trajectory]] = {}
        for function, own in parts.values():
            context = self._context(asked, own, sample)
            made.update(zip(own, _run(function, [prompts[place] for place in own], context)))
        return [made[place] for place in range(len(prompts))]

    def _function(self, prompt: Prompt) -> RolloutFunction:
        method = self._methods[prompt.environment]
        if method.function is None:
            raise ValueError(f"environment {prompt.environment} is a {method.kind}, not a call")
        return method.function

    def _context(self, asked: SamplingJob, places: Sequence[int], sample: SampleAll) -> RolloutContext:
        """The context of one function, whose prompts have these places in the call."""

        def draw(requests: Sequence[SampleRequest]) -> CompletionBatch:
            if not requests:
                raise RunError("a rollout function asked for no completion at all")
            return sample(requests)

        return RolloutContext(
            samples=asked.samples,
            seed=lambda i, j, turn: asked.seed(places[i], j, turn),
            sample=draw,
            conversation=self._conversation,
            pool=self._pool,
            max_turns=self._limits.max_turns,
            max_tokens=self._limits.max_tokens,
            max_new_tokens=self._limits.max_new_tokens,
            max_sequence=self._limits.max_sequence,
            sampling=asked.sampling,
            version=asked.version,
            endpoint=self.endpoint,
        )

    def close(self) -> None:
        """Stop the endpoint."""
        if self.endpoint is not None:
            self.endpoint.close()


def rollout_methods(config: Config) -> dict[str, RolloutMethod]:
    """How the trajectories of each environment are made: by the config's own function for all, or the built-in way.

    Raises:
        ConfigError: the function cannot be found; agents without an endpoint; budgets of turns where nothing has turns.
    """
    environments = load_environments(config.env)
    with_agents = {name for name, e in environments.items() if e.plays_with_endpoint}
    if with_agents and not config.rollout.endpoint.enabled:
        raise ConfigError(f"rollout.endpoint.enabled: must be true, the agents of env.{min(with_agents)} play with it")
    if config.rollout.function is not None:
        own = RolloutMethod(RolloutKind.CALL, load_rollout_function(config.rollout.function))
        return dict.fromkeys(config.env, own)
    methods = {name: _built_in(environment) for name, environment in environments.items()}
    turns = config.rollout.turns
    one_turn = all(method.kind is RolloutKind.SAMPLE for method in methods.values())
    if one_turn and (turns.max_turns != 1 or turns.max_tokens is not None):
        raise ConfigError("rollout.turns: has no effect, no environment of env has turns; remove it")
    if config.rollout.endpoint.enabled and not with_agents:
        raise ConfigError(
            "rollout.endpoint: has no effect without an environment of agents or a rollout.function; remove it"
        )
    return methods


def _built_in(environment: Any) -> RolloutMethod:
    if environment.plays_with_endpoint:
        return RolloutMethod(RolloutKind.CALL, partial(play_with_agents, cast(AgentEnvironment, environment)))
    return RolloutMethod(RolloutKind.EPISODE if environment.has_turns else RolloutKind.SAMPLE)


def _run(function: RolloutFunction, prompts: Sequence[Prompt], context: RolloutContext) -> list[list[Trajectory]]:
    """What the function makes of the prompts, checked. Raises RunError."""
    name = getattr(function, "__name__", "of agents")
    try:
        made = function(prompts, context)
    except GdpoError:
        raise
    except Exception as error:  # the function is the user's
        raise RunError(f"rollout function {name} raised {first_line(error)}") from error
    return checked(made, prompts, context, f"rollout function {name}")


def needs_verdict(trajectory: Trajectory) -> bool:
    """Whether the environment has yet to say what a trajectory is worth."""
    return trajectory.trains and not trajectory.rewards
