"""Which rollout function serves which environment, and the context it is given."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Collection, Mapping, Sequence, cast

from gdpo_nemo.cluster.fleet import EngineFleet
from gdpo_nemo.config.messages import first_line
from gdpo_nemo.config.objects import load_object
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
from gdpo_nemo.rollouts.turns import play

if TYPE_CHECKING:
    from gdpo_nemo.endpoint.server import Endpoint


@dataclass(frozen=True)
class SamplingJob:
    """The sampling settings of one call, which differ between training and validation."""

    sampling: Sampling
    samples: int
    seed: Callable[[int, int, int], int]


class RolloutRunner:
    """Runs rollout functions, and the endpoint where the config wants one.

    Raises:
        ConfigError: see ``rollout_functions``. RunError: the endpoint cannot listen.
    """

    def __init__(self, config: Config, fleet: EngineFleet, pool: EnvironmentExecutor, tokenizer: Any):
        self._config = config
        self._fleet = fleet
        self._pool = pool
        self._functions = rollout_functions(config)
        chat = config.data.train.chat
        has_template = bool(getattr(tokenizer, "chat_template", None))
        template_kwargs = config.data.train.chat_template_kwargs
        self._conversation = Conversation(tokenizer, has_template if chat is None else chat, template_kwargs)
        self.endpoint = self._listening() if config.rollout.endpoint.enabled else None

    def _listening(self) -> Endpoint:
        # Imported here: runs without agents need no FastAPI.
        from gdpo_nemo.endpoint.router import EngineRouter
        from gdpo_nemo.endpoint.server import Endpoint
        from gdpo_nemo.endpoint.service import Budgets, Service

        config = self._config
        router = EngineRouter(self._fleet, config.policy.generation.engines)
        turns = config.rollout.turns.max_turns
        sequence = config.policy.max_total_sequence_length
        service = Service(router, self._conversation, Budgets(turns, longest_completion(config), sequence))
        return Endpoint(service, config.rollout.endpoint.host, config.rollout.endpoint.port)

    def plays(self, prompt: Prompt) -> bool:
        """Whether a rollout function makes the trajectories of this prompt."""
        return prompt.environment in self._functions

    def play(self, prompts: Sequence[Prompt], asked: SamplingJob) -> tuple[list[list[Trajectory]], float]:
        """Trajectories of each prompt, checked, and the seconds that the engines took. Raises RunError."""
        engines = _Engines(self._fleet, asked.sampling)
        config = self._config
        context = RolloutContext(
            samples=asked.samples,
            seed=asked.seed,
            sample=engines.sample,
            conversation=self._conversation,
            pool=self._pool,
            max_turns=config.rollout.turns.max_turns,
            max_tokens=longest_completion(config),
            max_new_tokens=config.policy.generation.max_new_tokens,
            max_sequence=config.policy.max_total_sequence_length,
            sampling=asked.sampling,
            endpoint=self.endpoint,
        )
        made = _run(self._functions[prompts[0].environment], prompts, context)
        through_endpoint = self.endpoint.service.router.seconds if self.endpoint else 0.0
        return made, engines.seconds + through_endpoint

    def close(self) -> None:
        """Stop the endpoint."""
        if self.endpoint is not None:
            self.endpoint.close()


class _Engines:
    """The fleet as one batch of a rollout function sees it; counts the seconds that sampling takes."""

    def __init__(self, fleet: EngineFleet, sampling: Sampling):
        self._fleet = fleet
        self._sampling = sampling
        self.seconds = 0.0

    def sample(self, requests: Sequence[SampleRequest]) -> CompletionBatch:
        """Draw and wait."""
        if not requests:
            raise RunError("a rollout function asked for no completion at all")
        batch = self._fleet.collect(self._fleet.submit(requests, self._sampling))
        self.seconds += batch.seconds
        return batch


def rollout_functions(config: Config) -> dict[str, RolloutFunction]:
    """The rollout function of each environment that needs one: the config's own for all, or the built-in ones.

    Raises:
        ConfigError: the function cannot be found; agents without an endpoint; budgets of turns where nothing has turns.
    """
    environments = load_environments(config.env)
    with_agents = {name for name, e in environments.items() if e.plays_with_endpoint}
    if with_agents and not config.rollout.endpoint.enabled:
        raise ConfigError(f"rollout.endpoint.enabled: must be true, the agents of env.{min(with_agents)} play with it")
    if config.rollout.function is not None:
        return dict.fromkeys(config.env, _own_function(config.rollout.function))
    found: dict[str, RolloutFunction] = {
        name: partial(play_with_agents, cast(AgentEnvironment, environment)) if name in with_agents else play
        for name, environment in environments.items()
        if name in with_agents or environment.has_turns
    }
    turns = config.rollout.turns
    if not found and (turns.max_turns != 1 or turns.max_tokens is not None):
        raise ConfigError("rollout.turns: has no effect, no environment of env has turns; remove it")
    if config.rollout.endpoint.enabled and not with_agents:
        raise ConfigError(
            "rollout.endpoint: has no effect without an environment of agents or a rollout.function; remove it"
        )
    return found


def check_one_kind(functions: Mapping[str, RolloutFunction], names: Collection[str], split: str) -> None:
    """Refuses a split whose rows go to environments that are played in unlike ways: one way makes a whole batch.

    Args:
        functions: as ``rollout_functions`` gives them.
        names: the environments of the split's rows.

    Raises:
        ConfigError: names two of them.
    """
    kinds: dict[int, str] = {}
    for name in sorted(names):
        kinds.setdefault(id(functions.get(name)), name)
    if len(kinds) > 1:
        one, other = list(kinds.values())[:2]
        raise ConfigError(
            f"data.{split}.environment_key: rows of {one} and of {other} cannot share a batch; environments with "
            "turns and without, or of different agents, need runs of their own"
        )


def _own_function(reference: str) -> RolloutFunction:
    try:
        function = load_object(reference)
    except ConfigError as error:
        raise ConfigError(f"rollout.function: {error}") from error
    if not callable(function):
        raise ConfigError(f"rollout.function: {reference} is not callable")
    own: RolloutFunction = function
    return own


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
