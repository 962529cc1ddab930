"""``gdpo-nemo parity``: compare log-probs from one rank, a parallel layout and vLLM, and diagnose differences."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gdpo_nemo.commands.arguments import (
    Commands,
    add_layout,
    add_verbosity,
    rollout_file,
    standalone_config,
    verbosity,
    with_engine,
)
from gdpo_nemo.config.layout import resolve_layout
from gdpo_nemo.config.model_checks import check_engines, read_model, read_model_config
from gdpo_nemo.config.placement import Places
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.contexts import to_score
from gdpo_nemo.data.images import Images
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.data.records import Prompt, Trajectory
from gdpo_nemo.observe.display import shown
from gdpo_nemo.observe.installation import require_libraries
from gdpo_nemo.observe.sample_images import RecordedImages, split_images
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.files import real_path
from gdpo_nemo.utils.progress import phase

if TYPE_CHECKING:
    from gdpo_nemo.cluster.fleet import EngineFleet
    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.data.records import UpdateResult


_TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.5, 2.0)


def add(commands: Commands) -> None:
    """Register the command."""
    command = commands.add_parser(
        "parity", help="compare log-probs of the same tokens from one rank, a parallel layout and vLLM"
    )
    command.add_argument("--model", required=True, metavar="DIR", help="Hugging Face folder")
    command.add_argument(
        "--record", metavar="FILE", help="rollouts/step_N.parquet to replay (default: fixed random sequences)"
    )
    command.add_argument("--engine", action="store_true", help="also compare with vLLM")
    command.add_argument(
        "--threshold", type=float, default=1e-4, help="largest allowed difference (default: %(default)s)"
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    add_layout(command)
    add_verbosity(command)
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare log-probs with the log-probs of one rank. The exit status is 1 if a difference exceeds the threshold."""
    import json

    record = rollout_file(arguments.record) if arguments.record else None
    with shown(sys.stderr, verbosity(arguments)):
        found = measure_parity(
            arguments.model,
            arguments.layout,
            record,
            engine=arguments.engine,
            precision=arguments.precision,
            threshold=arguments.threshold,
        )
    print(json.dumps(found.to_dict(), indent=1) if arguments.json else describe(found))
    return 0 if found.passed else 1


@dataclass
class ParityReport:
    """Result of ``measure_parity``. ``updates`` are relative differences of loss, gradient norm and the next loss."""

    model: str
    layout: str
    tokens: int
    threshold: float
    comparisons: list[Comparison] = field(default_factory=list)
    updates: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """True if all differences are within the threshold. NaN exceeds every threshold."""
        differences = [*(c.max_abs for c in self.comparisons), *self.updates.values()]
        return all(value <= self.threshold for value in differences)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary for ``--json``."""
        return {**asdict(self), "passed": self.passed}


def measure_parity(
    model: str | Path,
    layout: str = "",
    record: str | Path | None = None,
    engine: bool = False,
    precision: str = "float32",
    threshold: float = 1e-4,
) -> ParityReport:
    """Compare log-probs and updates of ``layout`` with one rank. If ``engine`` is true, also compare vLLM's log-probs.

    Args:
        layout: parallel layout in the format of ``arguments.parse_layout``.
        record: rollout file whose completions are scored and whose recorded log-probs are also compared. None means
            fixed random sequences.

    Raises:
        ConfigError: if the model, layout or record is invalid or missing.
        RunError: if a rank or the engine fails.
    """
    with phase("imports"):
        from gdpo_nemo.cluster.session import session

    if not 0 <= threshold < float("inf"):
        raise ConfigError(f"--threshold: must be 0 or more and finite, got {threshold:g}")
    sequences, recorded = _read_record(record) if record else (None, None)
    longest = max(map(len, sequences)) + 1 if sequences else 256  # vLLM must generate one token to score a sequence
    one, many = (standalone_config(model, text, precision, longest) for text in ("", layout))
    if engine and any(sequence.images for sequence in sequences or ()):
        raise ConfigError("--engine: vLLM cannot score sequences with images; compare the log-probs in --record")
    if engine:
        require_libraries(one.cluster)
        if not one.cluster.gpus_per_node:
            check_engines(read_model(one.policy))
    sequences = sequences or _random_sequences(_vocabulary(model), one.policy.max_total_sequence_length)
    max_length = one.policy.max_total_sequence_length
    if engine and any(len(s) >= max_length for s in sequences):
        raise ConfigError(
            f"--engine: vLLM cannot score sequences that fill the context of {max_length} tokens; use shorter sequences"
        )
    report = ParityReport(str(model), layout or "one rank", sum(s.num_policy_tokens for s in sequences), threshold)
    with session(one.cluster):
        participants = _Participants(one, many if layout else None, str(model), engine)
        scores, updated = _measure_others(participants, sequences)
        if recorded is not None:
            scores["recorded by the sampler"] = recorded
        # One rank runs last, because the diagnosis of differences requires further log-probs from it.
        with participants.use("one rank") as single:
            if not layout:
                scores[_NOT_PACKED] = single.logprobs(sequences, packed=False)
            size = many.policy.megatron_cfg.context_parallel_size
            report.comparisons = _comparisons(single, sequences, scores, threshold, size)
            if updated:
                report.updates = _differences(_two_updates(single, sequences), updated)
    return report


_NOT_PACKED = "alone, not packed"
_COMPARED_NAMES = ("layout", _NOT_PACKED, "vLLM", "recorded by the sampler")
"""Names of the log-probs that are compared with one rank, in the order of the report."""


class _Participants:
    """Policies and engines to compare, which are used one after the other in one Ray session.

    All of them start at once if there are enough devices. Otherwise, each policy or engine starts at its first use and
    stops afterwards.
    """

    def __init__(self, one: Config, many: Config | None, folder: str, engine: bool):
        from gdpo_nemo.cluster.fleet import EngineFleet
        from gdpo_nemo.cluster.policy_group import PolicyGroup
        from gdpo_nemo.cluster.reservation import Placement

        self._make: dict[str, Callable[[], Any]] = {}
        devices = 1
        if many:
            self._make["layout"] = lambda: PolicyGroup(many, folder, total_updates=2)
            devices += resolve_layout(many).policy_ranks
        if engine:
            not_packed = Placement(Places((), (0,)))  # Ray assigns a device to the engine
            self._make["vLLM"] = lambda: EngineFleet(with_engine(one), folder, not_packed)
            devices += 1
        self._make["one rank"] = lambda: PolicyGroup(one, folder, total_updates=2)
        start_all = devices <= one.cluster.gpus_per_node or not one.cluster.gpus_per_node
        self._started = {name: make() for name, make in self._make.items() if start_all}

    def __contains__(self, name: str) -> bool:
        return name in self._make

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[Any]:
        """Yield a policy or engine when it is ready, and stop it after the block."""
        part = self._started.pop(name, None) or self._make[name]()
        try:
            part.ready()
            with phase(f"log-probs by {name}"):
                yield part
        finally:
            part.close()


def _measure_others(
    participants: _Participants, sequences: list[TrainSequence]
) -> tuple[dict[str, list[np.ndarray]], list[UpdateResult]]:
    """Return the log-probs of all completion tokens from the layout and vLLM, and the results of two updates.

    The layout computes the updates. Without a layout, the list of updates is empty.
    """
    scores = {}
    updated = []
    if "layout" in participants:
        with participants.use("layout") as group:
            scores["layout"] = group.logprobs(sequences)
            scores[_NOT_PACKED] = group.logprobs(sequences, packed=False)
            updated = _two_updates(group, sequences)
    if "vLLM" in participants:
        with participants.use("vLLM") as fleet:
            scores["vLLM"] = _score(fleet, sequences)
    return scores, updated


def _comparisons(
    single: PolicyGroup,
    sequences: list[TrainSequence],
    scores: dict[str, list[np.ndarray]],
    threshold: float,
    context_size: int,
) -> list[Comparison]:
    """Compare ``scores`` with the log-probs of one rank, and diagnose differences above the threshold."""

    def policy_tokens(values: Iterable[np.ndarray]) -> list[np.ndarray]:
        return [s.where_written(v) for s, v in zip(sequences, values)]

    targets = policy_tokens(s.completion_ids for s in sequences)
    reference = policy_tokens(single.logprobs(sequences))
    measured_by_name = {name: policy_tokens(scores[name]) for name in _COMPARED_NAMES if name in scores}
    tempered: dict[float, list[np.ndarray]] = {}
    comparisons = []
    for name, measured in measured_by_name.items():
        found = compare(name, reference, measured, targets)
        if not found.max_abs <= threshold:
            tempered = tempered or {t: policy_tokens(single.logprobs(sequences, temperature=t)) for t in _TEMPERATURES}
            found.causes = diagnose(
                reference,
                measured,
                threshold,
                tempered=tempered,
                not_packed=measured_by_name[_NOT_PACKED] if name == "layout" else None,
                prompt_lengths=[len(s.prompt_ids) for s in sequences],
                context_size=context_size if name == "layout" else 1,
            )
        comparisons.append(found)
    return comparisons


def _two_updates(policy: PolicyGroup, sequences: list[TrainSequence]) -> list[UpdateResult]:
    from gdpo_nemo.algorithms import LossSettings

    return [policy.train(sequences, LossSettings()) for _ in range(2)]


def _differences(reference: list[UpdateResult], others: list[UpdateResult]) -> dict[str, float]:
    """Return the relative differences between the results of two updates."""
    pairs = {
        "loss": (reference[0].loss, others[0].loss),
        "grad_norm": (reference[0].grad_norm, others[0].grad_norm),
        "next_loss": (reference[1].loss, others[1].loss),
    }
    return {name: abs(a - b) / max(abs(a), 1e-12) for name, (a, b) in pairs.items()}


def _score(fleet: EngineFleet, sequences: list[TrainSequence]) -> list[np.ndarray]:
    token_ids = [np.concatenate([s.prompt_ids, s.completion_ids]) for s in sequences]
    scores = fleet.score(token_ids, [s.images for s in sequences])[0]
    return [values[len(s.prompt_ids) - 1 :] for s, values in zip(sequences, scores)]


def _vocabulary(model: str | Path) -> int:
    return int(read_model_config(Path(model) / "config.json")["vocab_size"])


def _random_sequences(vocabulary: int, longest: int, count: int = 12) -> list[TrainSequence]:
    """Return random sequences of different lengths with a fixed seed. The sequence weights average over all tokens."""
    rng = np.random.default_rng(0)
    longest = min(longest, 256) - 1
    lengths = np.linspace(max(4, longest // 8), longest, count).astype(int)
    trajectories = []
    for length in lengths:
        ids = rng.integers(0, vocabulary, length).astype(np.int32)
        prompt = max(1, length // 4)
        trajectories.append(_trajectory(ids[:prompt], ids[prompt:], np.zeros(length - prompt, np.float32)))
    return _weighted(trajectories, rng.normal(size=count))


def _read_record(path: str | Path) -> tuple[list[TrainSequence], list[np.ndarray]]:
    from gdpo_nemo.observe.sample_columns import values_of
    from gdpo_nemo.observe.samples import read_columns

    names = ("prompt_ids", "completion_ids", "logprobs", "loss_mask", "turn_tokens", "turn_parents", "routing")
    recorded = RecordedImages(real_path(path).parent.parent)
    try:
        table = read_columns(path, (*names, "images", "advantage"))
        rows = zip(*(values_of(table.column(name)) for name in (*names, "images")))
        trajectories = []
        for *values, images in rows:
            trajectories.append(_trajectory(**dict(zip(names, values)), images=recorded.placed(images)))
        advantages = values_of(table.column("advantage"))
    except FileNotFoundError:
        raise ConfigError(f"--record: {path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"--record: {path} cannot be read ({error.strerror})") from None
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"--record: {path} is not a rollout file ({type(error).__name__}: {error})") from None
    if not trajectories:
        raise ConfigError(f"--record: {path} is empty")
    sequences = _weighted(trajectories, np.array([value or 0.0 for value in advantages]))
    return sequences, [s.sampler_logprobs for s in sequences]


def _trajectory(
    prompt_ids: np.ndarray,
    completion_ids: np.ndarray,
    logprobs: np.ndarray,
    *,
    loss_mask: np.ndarray | None = None,
    turn_tokens: np.ndarray | None = None,
    turn_parents: np.ndarray | None = None,
    routing: np.ndarray | None = None,
    images: Images = (),
) -> Trajectory:
    """Create a trajectory from columns of a rollout file, without rewards."""
    own, later = split_images(images, len(prompt_ids))
    prompt = Prompt("", prompt_ids, "", "", images=own)
    trajectory = Trajectory(prompt, 0, completion_ids, logprobs, 0, "", "stop", images=later)
    trajectory.loss_mask = loss_mask
    if turn_tokens is not None:
        trajectory.turn_tokens = tuple(turn_tokens.tolist())
    if turn_parents is not None:
        trajectory.turn_parents = tuple(turn_parents.tolist())
    if routing is not None:
        trajectory.routing = routing.reshape(len(prompt_ids) + len(completion_ids), -1)
    return trajectory


def _weighted(trajectories: Sequence[Trajectory], advantages: np.ndarray) -> list[TrainSequence]:
    sequences = to_score(trajectories)
    for sequence in sequences:
        sequence.advantage = float(advantages[sequence.trajectory])
    total = sum(s.num_policy_tokens for s in sequences)
    for sequence in sequences:
        sequence.weight = 1.0 / total
    return sequences


def describe(report: ParityReport) -> str:
    """Format the report as text."""
    lines = [f"{report.model}, {report.layout}: {report.tokens} tokens, threshold {report.threshold:g}"]
    for c in report.comparisons:
        lines.append(f"  {c.name:<24} log-probs: max {c.max_abs:.3g}  mean {c.mean_abs:.3g}")
        if not c.causes:
            continue
        lines += [f"    cause: {cause}" for cause in c.causes]
        for worst in c.worst:
            place = f"sequence {worst['sequence']} token {worst['offset']} (id {worst['token']})"
            lines.append(f"    {place}: {worst['reference']:.6f} -> {worst['measured']:.6f}")
    if report.updates:
        lines.append("  updates, relative:       " + "  ".join(f"{k} {v:.3g}" for k, v in report.updates.items()))
    lines.append("parity holds" if report.passed else "parity does not hold")
    return "\n".join(lines)


_EXPLAINED = 0.1
"""A cause is reported if the difference that it does not explain is less than this fraction of the mean difference."""


@dataclass
class Comparison:
    """Differences between measured log-probs and the reference, over all completion tokens."""

    name: str
    max_abs: float
    mean_abs: float
    worst: list[dict[str, Any]] = field(default_factory=list)
    """Tokens with the largest differences: sequence, offset, token, reference, measured."""
    causes: list[str] = field(default_factory=list)


def compare(
    name: str,
    reference: Sequence[np.ndarray],
    measured: Sequence[np.ndarray],
    tokens: Sequence[np.ndarray],
    worst: int = 5,
) -> Comparison:
    """Compute the differences of log-probs. The arguments have one array [completion tokens] per sequence."""
    differences = np.abs(_flat(measured) - _flat(reference)).astype(np.float64)
    order = np.argsort(-np.nan_to_num(differences, nan=np.inf), kind="stable")[:worst]
    starts = np.cumsum([0, *map(len, reference)])
    rows = []
    for flat_index in order.tolist():
        sequence = int(np.searchsorted(starts, flat_index, side="right") - 1)
        offset = flat_index - int(starts[sequence])
        rows.append(
            dict(
                sequence=sequence,
                offset=offset,
                token=int(tokens[sequence][offset]),
                reference=float(reference[sequence][offset]),
                measured=float(measured[sequence][offset]),
            )
        )
    # A NaN must not be treated as agreement.
    largest = float("nan") if np.isnan(differences).any() else float(differences.max())
    return Comparison(name, largest, float(differences.mean()), rows)


def diagnose(
    reference: Sequence[np.ndarray],
    measured: Sequence[np.ndarray],
    threshold: float,
    *,
    tempered: Mapping[float, Sequence[np.ndarray]] | None = None,
    not_packed: Sequence[np.ndarray] | None = None,
    prompt_lengths: Sequence[int] | None = None,
    context_size: int = 1,
) -> list[str]:
    """Return the known causes that explain the differences. The list is empty if no difference exceeds ``threshold``.

    Args:
        tempered: log-probs of the reference at other temperatures, by temperature.
        not_packed: measured log-probs with one sequence per micro-batch.
        prompt_lengths, context_size: prompt lengths and context-parallel size, which determine the chunk boundaries.
    """
    differences = np.abs(_flat(measured) - _flat(reference))
    if np.isnan(differences).any():
        return ["NaN values"]
    if differences.max() <= threshold:
        return []
    causes = _shifted(reference, measured, differences.mean())
    for temperature, values in (tempered or {}).items():
        if np.abs(_flat(measured) - _flat(values)).mean() < _EXPLAINED * differences.mean():
            causes.append(f"temperature: measured at {temperature:g}")
    if not_packed is not None and np.abs(_flat(measured) - _flat(not_packed)).max() > threshold:
        causes.append("packing: a sequence's log-probs depend on other sequences in the micro-batch")
    if context_size > 1 and prompt_lengths is not None:
        at_boundary = _flat(_near_boundaries(measured, prompt_lengths, context_size)).astype(bool)
        exceeding = differences > threshold
        if at_boundary.any() and (exceeding & at_boundary).sum() > 0.8 * exceeding.sum():
            causes.append("chunk boundaries: only the tokens at the edges of context-parallel chunks differ")
    if not causes:
        causes = _renormalised(reference, measured, threshold)
    if not causes and (differences > threshold).mean() > 0.5:
        causes.append(
            "other weights: nearly all tokens differ, in both directions; one side has stale weights or another model"
        )
    return causes or ["no known cause fits"]


def _shifted(reference: Sequence[np.ndarray], measured: Sequence[np.ndarray], usual: float) -> list[str]:
    for step, direction in ((1, "ahead"), (-1, "behind")):
        shifted, others = [], []
        for m, r in zip(measured, reference):
            if len(r) > 1:
                shifted.append(m[:-1] if step > 0 else m[1:])
                others.append(r[1:] if step > 0 else r[:-1])
        if shifted and np.abs(_flat(shifted) - _flat(others)).mean() < _EXPLAINED * usual:
            return [f"one-position shift: measured values are one token {direction}"]
    return []


def _renormalised(reference: Sequence[np.ndarray], measured: Sequence[np.ndarray], threshold: float) -> list[str]:
    """Check for truncated sampling (top_p or top_k), which renormalizes probabilities and thus increases log-probs."""
    differences = _flat(measured) - _flat(reference)
    if differences.min() > -threshold and (differences > threshold).mean() > 0.2:
        return ["nucleus renormalisation: measured log-probs are higher throughout, as with top_p or top_k"]
    return []


def _near_boundaries(values: Sequence[np.ndarray], prompt_lengths: Sequence[int], size: int) -> list[np.ndarray]:
    """Return masks of the tokens that are predicted at the first or last position of a context-parallel chunk."""
    masks = []
    for completion, prompt in zip(values, prompt_lengths):
        total = prompt + len(completion)
        chunk = -(-total // (2 * size))
        source = np.arange(prompt - 1, total - 1)
        masks.append((source % chunk == chunk - 1) | (source % chunk == 0))
    return masks


def _flat(values: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.asarray(v, np.float64) for v in values])
