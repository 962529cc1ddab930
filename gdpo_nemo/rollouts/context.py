"""Interface of rollout functions: arguments, result, and validation of the result.

``rollout.function: file.py:function`` replaces the built-in loop with a custom function. The function is called as
``function(prompts, context)`` in a thread of the driver process. For each prompt, in order, the function returns a list
of ``context.samples`` trajectories. If ``rollout.max_staleness`` is 0, a call receives the prompts of a whole batch.
Otherwise a call receives one prompt, and several calls run concurrently in separate threads. A call that exceeds
``rollout.group_timeout_s`` is abandoned: its samples are aborted, and ``context.sample`` raises an error after the
timeout.

``Transcript`` builds a trajectory. The transcript stores every token exactly as sampled, so that ids, mask and
log-probs always match. Trajectories without rewards are verified by the prompt's environment. The function may call
``context.sample`` any number of times. The function must not store prompts or completions for a later call. Equal
arguments and weights must give equal results. Otherwise, a resumed run differs from an uninterrupted run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gdpo_nemo.algorithms.rubrics import Criterion, criteria_of
from gdpo_nemo.data.contexts import among, contexts_of, path_to, turn_slices
from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.images import Images, PlacedImage, moved
from gdpo_nemo.data.records import Outcome, Prompt, Trajectory
from gdpo_nemo.environments.execution.pools import EnvironmentExecutor
from gdpo_nemo.generation.requests import Completion, CompletionBatch, SampleRequest, Sampling
from gdpo_nemo.utils.errors import ConfigError, RunError

if TYPE_CHECKING:
    from gdpo_nemo.rollouts.endpoint.server import Endpoint

_ROUNDING = 1e-4
"""Tolerance for log-probs that are above 0 because of rounding."""


@dataclass(frozen=True)
class RolloutContext:
    """Context that a rollout function receives for one call."""

    samples: int
    """Number of trajectories per prompt."""
    seed: Callable[[int, int, int], int]
    """Function that maps (prompt index in the call, sample index, turn) to the seed of a completion."""
    sample: Callable[[Sequence[SampleRequest]], CompletionBatch]
    """Function that samples completions on the engines with ``sampling``. The call blocks until all completions are
    complete."""
    conversation: Conversation
    """Conversion of messages to the tokens of a prompt or a continuation."""
    pool: EnvironmentExecutor
    """Pool of the environments in the config, which run in worker processes."""
    max_turns: int
    max_tokens: int
    """Maximum number of tokens that the policy may write in one trajectory."""
    max_new_tokens: int
    """Maximum number of tokens that the policy may write in one turn."""
    max_sequence: int
    """Maximum number of tokens of prompt and completion together."""
    sampling: Sampling
    """Sampling settings of the batch, such as the temperature."""
    version: int = 0
    """Version of the weights published when the call began. Trajectories without policy tokens get this version."""
    endpoint: Endpoint | None = None
    """Endpoint for agents, or None if ``rollout.endpoint.enabled`` is false.

    The endpoint serves requests only inside ``endpoint.service.phase``.
    """


class RolloutFunction(Protocol):
    """Signature of a rollout function. The module docstring describes the arguments and the result."""

    def __call__(self, prompts: Sequence[Prompt], context: RolloutContext) -> list[list[Trajectory]]:
        """Return one list of trajectories per prompt, in the order of ``prompts``."""
        ...


class Transcript:
    """Builder of one trajectory, turn by turn."""

    def __init__(self, prompt: Prompt, sample_index: int):
        self.prompt = prompt
        self.sample_index = sample_index
        self.turns = 0
        self.finish_reason = "stop"
        self.rewards: dict[str, float | None] = {}
        self.criteria: Mapping[str, Criterion] = {}
        """Criteria of the families of rewards by component, if they are not in the row."""
        self.metrics: dict[str, float] = {}
        """Metrics of the environment, by name."""
        self.outcome = Outcome.OK
        self.detail = ""
        self.messages: list[Mapping[str, Any]] = []
        """Messages after the prompt, for verifiers. The list is empty if the rollout function does not record
        messages."""
        self._ids: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._is_policy: list[bool] = []
        """One value for each array in ``_ids``. True if the policy wrote the tokens of the array."""
        self._spans: list[tuple[int, int]] = []
        self._turn_tokens: list[int] = []
        self._turn_rewards: dict[int, dict[str, float | None]] = {}
        """Rewards by turn, counted from 0. Rewards added before the policy's first turn belong to the first turn."""
        self._parents: list[int] = []
        self._turn_ends: list[int] = []
        """Number of arrays in ``_ids`` at the end of each turn."""
        self._follows = -1
        """Turn that the next turn continues, or -1 if it is the first turn of its context."""
        self._context: list[np.ndarray] = []
        """Tokens that the next turn continues, without the prompt."""
        self._has_prompt = True
        """True if the context of the next turn begins with the prompt."""
        self._length = 0
        """Number of tokens in ``_context``."""
        self._rows: list[np.ndarray] = []
        """For each array in ``_ids``, the indices of its tokens in the prompt and all tokens after it."""
        self._context_rows: list[np.ndarray] = []
        """Entries of ``_rows`` for the arrays in ``_context``."""
        self._routing: list[tuple[np.ndarray, np.ndarray]] = []
        """For each turn with ``Completion.routing``, the indices of its tokens, and the routing."""
        self._policy_tokens = 0
        self._images: Images = ()
        """Images of the environment's tokens, with positions in the prompt and all tokens after it."""

    def __len__(self) -> int:
        return len(self.prompt.token_ids) * self._has_prompt + self._length

    @property
    def num_policy_tokens(self) -> int:
        """Number of tokens that the policy wrote."""
        return self._policy_tokens

    @property
    def ids(self) -> np.ndarray:
        """All tokens after the prompt, of all contexts. Shape: int32 [tokens]."""
        return _concatenate(self._ids, np.int32)

    @property
    def logprobs(self) -> np.ndarray:
        """Log-probs of ``ids`` from the sampler, NaN for environment tokens. Shape: float32 [tokens]."""
        return _concatenate(self._logprobs, np.float32)

    @property
    def mask(self) -> np.ndarray:
        """True for each token of ``ids`` that the policy wrote. Shape: bool [tokens]."""
        return np.repeat(np.array(self._is_policy, bool), list(map(len, self._ids)))

    @property
    def token_ids(self) -> np.ndarray:
        """Tokens that the next turn continues: the prompt and the turns so far, unless a new context began.

        Shape: int32 [tokens].
        """
        prompt = [self.prompt.token_ids] if self._has_prompt else []
        return _concatenate([*prompt, *self._context], np.int32)

    @property
    def images(self) -> Images:
        """Images of ``token_ids``."""
        images = self.prompt.images + self._images
        return among(images, np.concatenate(self._rows_of_context())) if images else ()

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Version spans of the policy's tokens in order, as pairs of weight version and number of tokens."""
        return tuple(self._spans)

    @property
    def version(self) -> int | None:
        """Version of the oldest weights that wrote policy tokens. The value is None before the policy's first turn."""
        return min((version for version, _ in self._spans), default=None)

    def append_policy_tokens(self, completion: Completion, version: int | None = None) -> None:
        """Append a turn of the policy.

        Args:
            version: version of the weights that sampled the completion. This version is only used if the completion has
                no version spans.
        """
        spans = completion.spans
        if not spans and version is not None:
            spans = ((version, len(completion.token_ids)),)
        for span_version, tokens in spans:
            if self._spans and self._spans[-1][0] == span_version:
                tokens += self._spans.pop()[1]
            self._spans.append((span_version, tokens))
        self._append(completion.token_ids, completion.logprobs, is_policy=True)
        if completion.routing is not None:
            self._routing.append((np.concatenate(self._rows_of_context()), completion.routing))
        self._parents.append(self._follows)
        self._turn_ends.append(len(self._ids))
        self._follows = self.turns
        self.turns += 1
        self._turn_tokens.append(len(completion.token_ids))
        self.finish_reason = completion.finish_reason

    def append_env_tokens(self, token_ids: Sequence[int] | np.ndarray, images: Images = ()) -> None:
        """Append environment tokens, which are never trained.

        Args:
            images: images of these tokens. Positions count from the first of these tokens.
        """
        self._images += moved(images, len(self.prompt.token_ids) + sum(map(len, self._ids)))
        self._append(token_ids, np.full(len(token_ids), np.nan), is_policy=False)

    def begin_context(self, token_ids: Sequence[int] | np.ndarray, images: Images = ()) -> None:
        """Begin a new context, which the next turn continues instead of the turns so far.

        Use this method if the history was shortened or rewritten, or if a sub-agent starts. The trajectory then has
        another training sequence, with the same advantage. Environment tokens after the last turn are dropped.

        Args:
            token_ids: all tokens before the next turn. They are never trained.
            images: images of these tokens.

        Raises:
            ValueError: before the first turn, whose context is the prompt.
        """
        if not self.turns:
            raise ValueError("the context of the first turn is the prompt; change Transcript.prompt instead")
        self._drop_tokens_after_last_turn()
        self._follows = -1
        self._context = []
        self._context_rows = []
        self._has_prompt = False
        self._length = 0
        self.append_env_tokens(token_ids, images)

    def return_to(self, turn: int) -> None:
        """Return to an earlier turn, which the next turn continues. Environment tokens after the last turn are dropped.

        Args:
            turn: index of the turn, counted from 0 over all contexts.

        Raises:
            ValueError: if the transcript has no such turn.
        """
        if not 0 <= turn < self.turns:
            raise ValueError(f"turn {turn} does not exist; the transcript has {self.turns} turns")
        self._drop_tokens_after_last_turn()
        path = path_to(turn, self._parents)
        starts = [0, *self._turn_ends]
        self._follows = turn
        self._context = []
        self._context_rows = []
        for k in path:
            arrays = slice(starts[k], starts[k + 1])
            self._context += self._ids[arrays]
            self._context_rows += self._rows[arrays]
        self._has_prompt = path[0] == 0
        self._length = sum(map(len, self._context))

    def _drop_tokens_after_last_turn(self) -> None:
        end = self._turn_ends[-1] if self._turn_ends else 0
        for pieces in (self._ids, self._logprobs, self._is_policy, self._rows):
            del pieces[end:]
        length = len(self.prompt.token_ids) + sum(map(len, self._ids))
        self._images = tuple(placed for placed in self._images if placed.start < length)

    def _rows_of_context(self) -> list[np.ndarray]:
        """Return the indices of ``token_ids`` in the prompt and all tokens after it, in several arrays."""
        prompt = [np.arange(len(self.prompt.token_ids))] if self._has_prompt else []
        return [*prompt, *self._context_rows]

    def _append(self, ids: Sequence[int] | np.ndarray, logprobs: np.ndarray, is_policy: bool) -> None:
        start = len(self.prompt.token_ids) + sum(map(len, self._ids))
        self._ids.append(np.asarray(ids, np.int32))
        self._context.append(self._ids[-1])
        self._rows.append(start + np.arange(len(ids)))
        self._context_rows.append(self._rows[-1])
        self._logprobs.append(np.asarray(logprobs, np.float32))
        self._is_policy.append(is_policy)
        self._length += len(ids)
        self._policy_tokens += len(ids) * is_policy

    def add_rewards(self, rewards: Mapping[str, float | None]) -> None:
        """Add rewards to the totals of the trajectory and of its latest turn.

        A reward of None does not change the totals of its component.
        """
        earned = self._turn_rewards.setdefault(max(0, self.turns - 1), {})
        for name, value in rewards.items():
            for totals in (self.rewards, earned):
                before = totals.get(name)
                totals[name] = before if value is None else value + (before or 0.0)

    def set_rewards(
        self, rewards: Mapping[str, float | None], steps: Sequence[Mapping[str, float | None]] = ()
    ) -> None:
        """Set the rewards of a finished trajectory and of its turns.

        If a component's total differs from the sum of its steps, the difference belongs to the last turn. If only the
        steps contain a component, its total is their sum.

        Args:
            rewards: totals by component.
            steps: rewards of each turn, or empty if the turns have no rewards.

        Raises:
            ValueError: if ``steps`` does not have one entry per turn, or a reward is not in the row's rubric.
        """
        if steps and len(steps) != self.turns:
            raise ValueError(f"step_rewards has {len(steps)} entries, but the policy took {self.turns} turns")
        try:
            criteria_of(self.prompt.fields, rewards)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        self.rewards = dict(rewards)
        self._turn_rewards = {turn: dict(earned) for turn, earned in enumerate(steps)}
        names: dict[str, None] = {}
        for earned in steps:
            names |= dict.fromkeys(name for name, value in earned.items() if value is not None)
        for name in names:
            values = [earned.get(name) or 0.0 for earned in steps]
            total = self.rewards.get(name)
            if total is None:
                self.rewards[name] = math.fsum(values)
            else:
                self._turn_rewards[self.turns - 1][name] = total - math.fsum(values[:-1])

    def _routing_of_tokens(self) -> np.ndarray | None:
        """Return ``Trajectory.routing``. A token that several turns processed has the choice of the first of them."""
        if not self._routing:
            return None
        first = self._routing[0][1]
        routing = np.full((len(self.prompt.token_ids) + len(self.ids), first.shape[1]), -1, first.dtype)
        for rows, choices in self._routing:
            new = routing[rows, 0] < 0
            routing[rows[new]] = choices[new]
        return routing

    def _rewards_by_turn(self) -> tuple[dict[str, float | None], ...]:
        """Return the rewards of each turn. Return an empty tuple if ``add_rewards`` was never called."""
        if not self._turn_rewards:
            return ()
        return tuple(self._turn_rewards.get(turn, {}) for turn in range(self.turns))

    def trajectory(self, conversation: Conversation, version: int = 0) -> Trajectory:
        """Return the finished trajectory. ``version`` is its weight version if the policy wrote no tokens."""
        if self.outcome is Outcome.OK and self.finish_reason == "length":
            self.outcome = Outcome.TRUNCATED
        ids = self.ids
        oldest = self.version
        replies = conversation.replies
        written = [part for part, is_policy in zip(self._ids, self._is_policy) if is_policy]
        continues = self._parents == list(range(-1, self.turns - 1))
        return Trajectory(
            prompt=self.prompt,
            sample_index=self.sample_index,
            completion_ids=ids,
            logprobs=self.logprobs,
            policy_version=version if oldest is None else oldest,
            text=conversation.text(ids),
            finish_reason=self.finish_reason,
            rewards=self.rewards,
            criteria=criteria_of(self.prompt.fields, self.rewards, self.criteria),
            outcome=self.outcome,
            detail=self.detail,
            metrics=self.metrics,
            loss_mask=self.mask,
            turns=self.turns,
            turn_tokens=tuple(self._turn_tokens),
            turn_rewards=self._rewards_by_turn(),
            turn_parents=() if continues else tuple(self._parents),
            spans=self.spans,
            routing=self._routing_of_tokens(),
            images=self._images,
            messages=tuple(self.messages) or None,
            thinking_tokens=sum(map(replies.thinking_tokens, written)) if replies.counts_thinking else 0,
        )


def _concatenate(pieces: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(pieces).astype(dtype, copy=False) if pieces else np.zeros(0, dtype)


def checked(made: object, prompts: Sequence[Prompt], context: RolloutContext, name: str) -> list[list[Trajectory]]:
    """Validate the result of a rollout function and return it.

    Args:
        made: result of the function.
        name: name of the function, for messages.

    Raises:
        RunError: if the result is not one list of ``context.samples`` trainable trajectories per prompt.
    """
    if not isinstance(made, list) or len(made) != len(prompts):
        raise RunError(f"{name}: must return one list of trajectories per prompt ({len(prompts)})")
    for prompt, trajectories in zip(prompts, made):
        if not isinstance(trajectories, list) or not all(isinstance(t, Trajectory) for t in trajectories):
            raise RunError(f"{name}: must return lists of Trajectory; create them with Transcript.trajectory")
        if [t.sample_index for t in trajectories] != list(range(context.samples)):
            raise RunError(f"{name}: prompt {prompt.id}: must return samples 0 to {context.samples - 1} in order")
        for trajectory in trajectories:
            check_trajectory(trajectory, prompt, context.max_sequence, name)
    return made


def check_trajectory(trajectory: Trajectory, prompt: Prompt, max_sequence: int, name: str) -> None:
    """Check that a trajectory of ``prompt`` can be trained.

    Args:
        name: name of the rollout function or environment, for messages.

    Raises:
        RunError: if ids, log-probs, mask, turns or version spans are inconsistent, or the sequence is too long.
    """
    fault = _fault(trajectory, prompt, max_sequence)
    if fault:
        raise RunError(f"{name}: prompt {prompt.id}, sample {trajectory.sample_index}: {fault}")


def _fault(t: Trajectory, prompt: Prompt, max_sequence: int) -> str | None:  # noqa: C901
    count = len(t.completion_ids)
    if t.prompt.id != prompt.id:
        return f"belongs to prompt {t.prompt.id}"
    if len(t.logprobs) != count or (t.loss_mask is not None and len(t.loss_mask) != count):
        return "ids, log-probs and mask differ in length"
    if not t.trains:
        return None
    if not t.num_policy_tokens:
        return f"the policy wrote no token, but the outcome is {t.outcome}"
    if t.turn_tokens and sum(t.turn_tokens) != t.num_policy_tokens:
        return "the token counts of the turns do not add up to the number of tokens that the policy wrote"
    if t.turn_rewards and len(t.turn_rewards) != len(t.turn_tokens):
        return f"has rewards for {len(t.turn_rewards)} turns, but tokens for {len(t.turn_tokens)}"
    if t.spans and sum(tokens for _, tokens in t.spans) != t.num_policy_tokens:
        return "the version spans do not add up to the number of tokens that the policy wrote"
    if t.turn_parents and (fault := _fault_of_parents(t)):
        return fault
    if any(not _is_from_environment(placed, t) for placed in t.images):
        return "images must be among the environment's tokens of the completion"
    longest = max(len(c.prompt_ids) + len(t.completion_ids[c.indices]) for c in contexts_of(t))
    if longest > max_sequence:
        return f"has {longest} tokens, more than policy.max_total_sequence_length"
    policy_logprobs = t.logprobs if t.loss_mask is None else t.logprobs[t.loss_mask]
    # A comparison with NaN is False, so NaN also fails this check.
    if not np.all(policy_logprobs <= _ROUNDING) or not np.isfinite(policy_logprobs).all():
        return "log-probs of tokens that the policy wrote must be finite and at most 0"
    return None


def _is_from_environment(placed: PlacedImage, t: Trajectory) -> bool:
    """Return whether all placeholders of an image are tokens of the environment in the completion."""
    prompt = len(t.prompt.token_ids)
    inside = prompt <= placed.start < placed.stop <= prompt + len(t.completion_ids)
    return inside and t.loss_mask is not None and not t.loss_mask[placed.start - prompt : placed.stop - prompt].any()


def _fault_of_parents(t: Trajectory) -> str | None:
    if len(t.turn_parents) != len(t.turn_tokens) or not all(t.turn_tokens):
        return "has turn_parents, which require turn_tokens of all turns, each with at least one token"
    if t.turn_parents[0] != -1 or not all(-1 <= parent < turn for turn, parent in enumerate(t.turn_parents)):
        return f"turn_parents must be -1 or the index of an earlier turn, got {list(t.turn_parents)}"
    for turn, tokens in enumerate(turn_slices(t)):
        if turn and t.turn_parents[turn] < 0 and (t.loss_mask is None or t.loss_mask[tokens.start]):
            return f"turn {turn + 1} begins a new context without environment tokens before it"
    return None
