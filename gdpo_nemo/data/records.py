"""Record types of each stage from a prompt to an optimizer update."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from itertools import chain
from typing import Any

import numpy as np

from gdpo_nemo.algorithms.rubrics import Criterion, with_scores
from gdpo_nemo.data.images import Images
from gdpo_nemo.data.replies import Reply
from gdpo_nemo.data.state_keys import state_keys


class Outcome(StrEnum):
    """Outcome of a trajectory. Only OK and TRUNCATED trajectories are trained. All other trajectories are masked and
    counted."""

    OK = "ok"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    ENV_FAILED = "env_failed"


NOT_CONTIGUOUS = "not_contiguous"
"""First word of ``Trajectory.detail`` if a rollout function of TRL returns tokens that were not sampled one after the
other."""


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    id: str
    """Unique id, which is the same in every epoch and after a resume. Groups are formed only by this id."""
    token_ids: np.ndarray
    """int32 [prompt tokens]"""
    text: str
    """Rendered prompt with one placeholder per image, for logs and reward functions."""
    environment: str
    """Name of the environment that verifies the completions (empty if nothing is sampled)."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the row, which are passed to reward functions. Images are ``Image`` objects."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """Chat messages of the prompt (None if the prompt is not a conversation). The content of a message is text. If it
    contains images, it is a list of the parts ``{"type": "image"}``, in the order of ``images``, and
    ``{"type": "text", "text": ...}``."""
    images: Images = ()
    """Images of the prompt. ``token_ids`` contains all placeholders of each image."""
    answer_ids: np.ndarray | None = None
    """int32 [answer tokens]: continuation of the prompt in the source text. None unless ``data.<split>.strided`` is
    set."""

    @property
    def key(self) -> bytes:
        """Key that is equal for prompts with the same tokens and images."""
        return state_keys(self.token_ids, None, self.images).tobytes()


@dataclass(frozen=True)
class TrainerState:
    """Progress of the run when a batch is verified. This class contains the supported fields of TRL's
    ``trainer_state``."""

    global_step: int = 0
    """Number of optimizer updates before the batch is trained. A step has several updates if train_global_batch_size is
    set."""
    max_steps: int = 1
    """Number of optimizer updates in the whole run. The number is at least 1, because reward functions divide by it."""
    epoch: float = 0.0
    """Number of epochs before the batch, with fractions."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state.{name} is not supported; supported: global_step, max_steps, epoch")


@dataclass
class Trajectory:
    """One sampled completion of one or more turns, with all data for verification and training."""

    prompt: Prompt
    sample_index: int
    completion_ids: np.ndarray
    """int32 [completion tokens]: token ids exactly as sampled. They are never tokenized again. With several turns they
    include the environment's tokens before each turn."""
    logprobs: np.ndarray
    """float32 [completion tokens]: the sampler's log-probs. NaN for tokens of the environment."""
    policy_version: int
    """Number of optimizer steps of the weights that sampled the completion."""
    text: str
    """Completion decoded without special tokens, except those that mark tool calls and reasoning."""
    finish_reason: str
    """Finish reason of the engine: ``stop`` or ``length``."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """Reward of each component (None if the component does not apply)."""
    outcome: Outcome = Outcome.OK
    detail: str = ""
    """Error description (empty if no error occurred)."""
    loss_mask: np.ndarray | None = None
    """bool [completion tokens]: True for tokens that the policy wrote (None if it wrote all tokens)."""
    turns: int = 1
    """Number of turns of the policy."""
    trainer_state: TrainerState | None = None
    """Progress of the run, for reward functions that use it."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Extra columns from the verifier, saved with the sample."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics that the verifier logged in the call that scored the sample, by name."""
    turn_tokens: tuple[int, ...] = ()
    """Number of tokens that the policy wrote in each turn. Empty for a single turn, or if turns were not recorded."""
    turn_rewards: tuple[Mapping[str, float | None], ...] = ()
    """Part of ``rewards`` that each turn earned. A component that no turn lists is credited to the last turn. If the
    tuple is empty, the last turn earned all rewards."""
    turn_parents: tuple[int, ...] = ()
    """For each turn, the index of the turn that it continues, or -1. The first turn has -1 and continues the prompt.
    A later turn with -1 begins a new context, which consists of the environment's tokens before it. If the tuple is
    empty, every turn continues the previous one. See ``data.contexts``."""
    criteria: dict[str, Criterion] = field(default_factory=dict)
    """Criteria of the row's rubrics by component, such as ``rubric/polite`` (``algorithms.rubrics``)."""
    reward_tokens: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Completion tokens that a component is about, as ranges [start, end). A component without an entry is about the
    whole completion."""
    spans: tuple[tuple[int, int], ...] = ()
    """Version spans ((version, number of tokens), ...) of the policy's tokens, in order. Empty if all tokens have
    ``policy_version``."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """Turns after the prompt as chat messages of the policy and the environment, for verifiers. None for a single turn,
    or if turns were not recorded."""
    thinking_tokens: int = 0
    """Number of the policy's tokens that are reasoning. 0 unless a rule of ``gdpo.shaping`` has ``thinking: false``."""
    routing: np.ndarray | None = None
    """int8 or int16 [prompt and completion tokens, MoE layers * experts per token]: the experts that the sampler chose,
    or -1 if unknown (``Completion.routing``). None if they were not recorded."""
    images: Images = ()
    """Images of the environment's tokens in the completion. Positions count from the first token of the prompt."""
    reply: Reply | None = None
    """Text of a single turn, split into reasoning, content and tool calls. None if there was nothing to split."""

    @property
    def component_rewards(self) -> dict[str, float | None]:
        """Reward of each component, with one score for each family of criteria (``algorithms.rubrics``)."""
        return with_scores(self.rewards, self.criteria) if self.criteria else self.rewards

    @property
    def num_policy_tokens(self) -> int:
        """Number of completion tokens that the policy wrote."""
        return len(self.completion_ids) if self.loss_mask is None else int(np.count_nonzero(self.loss_mask))

    @property
    def num_contexts(self) -> int:
        """Number of training sequences (``data.contexts``): turns that no other turn continues."""
        return len(set(range(len(self.turn_parents))) - set(self.turn_parents)) or 1

    def where_written(self, values: np.ndarray) -> np.ndarray:
        """Return only the values of the tokens that the policy wrote, given values [completion tokens]."""
        return values if self.loss_mask is None else values[self.loss_mask]

    @property
    def trains(self) -> bool:
        """True if this trajectory is trained, so that it may have an advantage."""
        return self.outcome in (Outcome.OK, Outcome.TRUNCATED)


@dataclass
class Group:
    """Trajectories of one prompt id."""

    prompt: Prompt
    trajectories: list[Trajectory]
    position: int = -1
    """Prompt index: number of training prompts before this one since the start of the run (-1 for other prompts)."""
    packed: bytes | None = field(default=None, repr=False, compare=False)
    """Result of ``pack_trajectories`` for ``trajectories``, from a rollout host. None if a host did not make the group.
    """


def trajectories_of(groups: Iterable[Group]) -> list[Trajectory]:
    """Return the trajectories of all groups, in group order."""
    return list(chain.from_iterable(group.trajectories for group in groups))


_NOT_PACKED = ("prompt", "trainer_state", "completion_ids", "logprobs")
_PACKED = tuple(f for f in fields(Trajectory) if f.name not in _NOT_PACKED)
_DEFAULTS = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in _PACKED}
_DICTS = [name for name, default in _DEFAULTS.items() if isinstance(default, dict)]


def _is_default(name: str, value: Any) -> bool:
    default = _DEFAULTS[name]
    return type(value) is type(default) and bool(value == default)


def pack_trajectories(trajectories: Sequence[Trajectory]) -> bytes:
    """Serialize the trajectories of a group, without their prompt and trainer state.

    Tokens and log-probs of all trajectories are one array each, and columns with only default values are omitted.
    Reading a group therefore takes a third of the time that pickled trajectories would take.
    """
    columns: dict[str, list[Any]] = {}
    for name in _DEFAULTS:
        values = [getattr(t, name) for t in trajectories]
        if not all(_is_default(name, value) for value in values):
            columns[name] = values
    completions = [t.completion_ids for t in trajectories]
    logprobs = np.concatenate([t.logprobs for t in trajectories])
    data = (list(map(len, completions)), np.concatenate(completions), logprobs, columns)
    return pickle.dumps(data, pickle.HIGHEST_PROTOCOL)


def unpack_trajectories(data: bytes, prompt: Prompt, state: TrainerState | None = None) -> list[Trajectory]:
    """Return the trajectories of a prompt from the result of ``pack_trajectories``."""
    lengths, completion_ids, logprobs, columns = pickle.loads(data)
    common = {**_DEFAULTS, "prompt": prompt, "trainer_state": state}
    dicts = [name for name in _DICTS if name not in columns]
    trajectories = []
    start = 0
    for length, *row in zip(lengths, *columns.values()):
        # Copying a dictionary takes less time than __init__.
        values = common.copy()
        values.update(zip(columns, row))
        for name in dicts:
            values[name] = {}
        values["completion_ids"] = completion_ids[start : start + length]
        values["logprobs"] = logprobs[start : start + length]
        trajectory = Trajectory.__new__(Trajectory)
        trajectory.__dict__ = values
        trajectories.append(trajectory)
        start += length
    return trajectories


@dataclass(frozen=True)
class Verdict:
    """Reward result of an environment for one completion."""

    rewards: Mapping[str, float | None]
    """Reward of each component by name (None if the component does not apply)."""
    outcome: Outcome = Outcome.OK
    detail: str = ""
    """Error description (empty if no error occurred)."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Extra columns to save with the sample, as plain values."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the verification call, which are the same for all samples that it scored."""
    turn_rewards: Sequence[Mapping[str, float | None]] = ()
    """Part of ``rewards`` that each turn of the policy earned, for ``gdpo.credit: turn``. If the tuple is empty, the
    last turn earned all rewards."""
    reward_spans: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    """Characters of ``Trajectory.text`` that a component is about, as ranges [start, end), for ``gdpo.credit: span``. A
    component without an entry is about the whole text."""
    criteria: Mapping[str, Criterion] = field(default_factory=dict)
    """All criteria of the row's rubrics by component, if the row's column with the family's name does not contain them
    (``algorithms.rubrics``)."""

    @property
    def component_rewards(self) -> Mapping[str, float | None]:
        """Reward of each component, with one score for each family of criteria (``algorithms.rubrics``)."""
        return with_scores(self.rewards, self.criteria) if self.criteria else self.rewards


@dataclass
class UpdateResult:
    """Result of one optimizer update, reduced over all ranks."""

    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    """True if the loss or the gradient was not finite. No weight was changed."""
    sums: dict[str, float]
    """Sums over the completion tokens of the update, by name. The entry ``tokens`` is the number of tokens."""
    maxima: dict[str, float]
    """Maxima over the completion tokens of the update, by name."""
    packing: dict[str, float] = field(default_factory=dict)
    """Packing metrics of the update (``data.packing.measure``)."""
    sequences: int = 0
    """Number of sequences in the update."""
    skipped_sequences: int | None = None
    """Number of sequences in the update that ``policy.skip_zero_advantage`` skipped (None if this option is off)."""


@dataclass
class GradientProducts:
    """Products of gradients at the same weights with each other and with the update that followed.

    The order of the gradients is that of the requests.
    """

    products: np.ndarray
    """float64 [gradients, gradients]"""
    scaled: np.ndarray
    """float64 [gradients, gradients]: a . P b, where -P b is the change of the weights that Adam makes in this and
    later updates because of a gradient b of this update that was not clipped. P has the second moments before this
    update, because those after it depend on b. 0 before the first update."""
    moved: np.ndarray
    """float64 [gradients]: products with the change of the weights."""
    earlier: int
    """Number of updates before this update."""


@dataclass
class TokenValues:
    """Per-token values, such as log-probs, of the completion tokens that the policy sampled."""

    sequence: np.ndarray
    """int64 [tokens]: index of the token's sequence"""
    offset: np.ndarray
    """int64 [tokens]: index of the token in its completion"""
    values: np.ndarray
    """float32 [tokens] or [tokens, values per token]"""
