"""Which rollout function serves which environment, and the context it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Sequence

from gdpo_nemo.cluster.fleet import EngineFleet
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.records import Prompt, Trajectory
from gdpo_nemo.data.wording import first_line
from gdpo_nemo.environments.episodes import has_turns
from gdpo_nemo.environments.objects import load_object
from gdpo_nemo.environments.pool import EnvironmentPool
from gdpo_nemo.environments.registry import load_environments
from gdpo_nemo.errors import ConfigError, GdpoError, RunError
from gdpo_nemo.generation.requests import CompletionBatch, SampleRequest, Sampling
from gdpo_nemo.rollouts.context import RolloutContext, RolloutFunction, checked
from gdpo_nemo.rollouts.learning import longest_completion
from gdpo_nemo.rollouts.turns import play


@dataclass(frozen=True)
class Asked:
    """What differs between training and validation."""

    sampling: Sampling
    samples: int
    seed: Callable[[int, int, int], int]


class Engines:
    """The fleet as one batch of a rollout function sees it; counts the seconds that sampling takes."""

    def __init__(self, fleet: EngineFleet, sampling: Sampling):
        self._fleet, self._sampling, self.seconds = fleet, sampling, 0.0

    def sample(self, requests: Sequence[SampleRequest]) -> CompletionBatch:
        """Draw and wait."""
        batch = self._fleet.collect(self._fleet.submit(requests, self._sampling))
        self.seconds += batch.seconds
        return batch


def rollout_functions(config: Config) -> dict[str, RolloutFunction]:
    """The rollout function of each environment that needs one: the config's own for all, or ``play`` for those with turns.

    Raises:
        ConfigError: the function cannot be found; a budget of turns where nothing has turns.
    """
    if config.rollout.function is not None:
        try:
            function = load_object(config.rollout.function)
        except ConfigError as error:
            raise ConfigError(f"rollout.function: {error}") from error
        if not callable(function):
            raise ConfigError(f"rollout.function: {config.rollout.function} is not callable")
        return dict.fromkeys(config.env, function)
    found = {name: play for name, environment in load_environments(config.env).items() if has_turns(environment)}
    turns = config.rollout.turns
    if not found and (turns.max_turns != 1 or turns.max_tokens is not None):
        raise ConfigError("rollout.turns: has no effect, no environment of env has turns; remove it")
    return found


def context_of(config: Config, asked: Asked, sample, tokenizer: Any, pool: EnvironmentPool) -> RolloutContext:
    """The context of one batch."""
    chat = config.data.train.chat
    has_template = bool(getattr(tokenizer, "chat_template", None))
    return RolloutContext(
        samples=asked.samples,
        seed=asked.seed,
        sample=sample,
        conversation=Conversation(tokenizer, has_template if chat is None else chat),
        pool=pool,
        max_turns=config.rollout.turns.max_turns,
        max_tokens=longest_completion(config),
        max_new_tokens=config.policy.generation.max_new_tokens,
        max_sequence=config.policy.max_total_sequence_length,
    )


def run_rollout(function: RolloutFunction, prompts: Sequence[Prompt], context: RolloutContext) -> list[list[Trajectory]]:
    """What the function makes of the prompts, checked. Raises RunError."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        made = function(prompts, context)
    except GdpoError:
        raise
    except Exception as error:  # the function is the user's
        raise RunError(f"rollout.function {name} raised {first_line(error)}") from error
    return checked(made, prompts, context, f"rollout function {name}")


def needs_verdict(trajectory: Trajectory) -> bool:
    """Whether the environment has yet to say what a trajectory is worth."""
    return trajectory.trains and not trajectory.rewards
