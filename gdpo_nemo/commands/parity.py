"""``gdpo-nemo parity``: the same sequences through one rank, through a layout, and through vLLM.

Run it on a new machine, driver or version before a long run: what differs, by how much, at which tokens, and why.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator

import numpy as np

from gdpo_nemo.commands.arguments import add_layout, add_verbosity, rollout_file, verbosity
from gdpo_nemo.config.files import check_engines
from gdpo_nemo.config.layout import resolve_layout
from gdpo_nemo.config.placement import Places
from gdpo_nemo.config.schema import Config
from gdpo_nemo.config.standalone import standalone_config, with_engine
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.observe.display import shown
from gdpo_nemo.observe.installation import require_libraries
from gdpo_nemo.observe.parity_report import Comparison, compare, diagnose
from gdpo_nemo.phases import phase

if TYPE_CHECKING:
    from gdpo_nemo.cluster.fleet import EngineFleet
    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.data.results import UpdateResult

_TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.5, 2.0)


def add(commands) -> None:
    """Register the command."""
    command = commands.add_parser("parity", help="the same tokens through one rank, a layout, and vLLM")
    command.add_argument("--model", required=True, metavar="DIR", help="Hugging Face folder")
    command.add_argument(
        "--record", metavar="FILE", help="rollouts/step_N.parquet to replay; default: fixed random sequences"
    )
    command.add_argument("--engine", action="store_true", help="compare with vLLM, too")
    command.add_argument("--threshold", type=float, default=1e-4, help="largest difference that passes (%(default)s)")
    command.add_argument("--json", action="store_true", help="print JSON")
    add_layout(command)
    add_verbosity(command)
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare a layout and vLLM with one rank; exit status 1 where they differ by more than the threshold."""
    import json

    record = rollout_file(arguments.record) if arguments.record else None
    with shown(sys.stderr, verbosity(arguments)):
        found = measure_parity(
            arguments.model, arguments.layout, record, arguments.engine, arguments.precision, arguments.threshold
        )
    print(json.dumps(found.to_dict(), indent=1) if arguments.json else describe(found))
    return 0 if found.passed else 1


@dataclass
class ParityReport:
    """What ``measure_parity`` found. ``updates`` are relative differences of loss, gradient norm, and of the next
    loss."""

    model: str
    layout: str
    tokens: int
    threshold: float
    comparisons: list[Comparison] = field(default_factory=list)
    updates: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether everything is within the threshold; NaN is not."""
        return all(c.max_abs <= self.threshold for c in self.comparisons) and all(
            value <= self.threshold for value in self.updates.values()
        )

    def to_dict(self) -> dict:
        """For ``--json``."""
        return {**asdict(self), "passed": self.passed}


def measure_parity(
    model: str | Path,
    layout: str = "",
    record: str | Path | None = None,
    engine: bool = False,
    precision: str = "float32",
    threshold: float = 1e-4,
) -> ParityReport:
    """Compare ``layout`` (and with ``engine`` vLLM) with one rank.

    Args:
        layout: as ``standalone.parse_layout`` reads it.
        record: a file of ``rollouts/``, whose sampled tokens are replayed and whose log-probs are compared, too; None
            takes fixed random sequences.

    Raises:
        ConfigError: no such model, layout or record. RunError: ranks or engine failed.
    """
    with phase("imports"):
        from gdpo_nemo.cluster.session import session

    if not 0 <= threshold < float("inf"):
        raise ConfigError(f"--threshold: must be 0 or more and finite, got {threshold:g}")
    sequences, recorded = _recorded(record) if record else (None, None)
    longest = max(map(len, sequences)) + 1 if sequences else 256  # one more: vLLM scores a sequence only by going on
    one, many = (standalone_config(model, text, precision, longest) for text in ("", layout))
    if engine:
        require_libraries(one)
        check_engines(one)
    sequences = sequences or _fixed(_vocabulary(model), one.policy.max_total_sequence_length)
    room = one.policy.max_total_sequence_length
    if engine and any(len(s) >= room for s in sequences):
        raise ConfigError(f"--engine: vLLM cannot score sequences that fill the context of {room} tokens")
    report = ParityReport(str(model), layout or "one rank", sum(s.num_policy_tokens for s in sequences), threshold)
    with session(one.cluster):
        stand = _Parts(one, many if layout else None, str(model), engine)
        scores, updated = _away_from_one_rank(stand, sequences)
        if recorded is not None:
            scores["recorded by the sampler"] = recorded
        # Last: what the others differ in is looked into by more log-probs of one rank.
        with stand.use("one rank") as single:
            if not layout:
                scores[_ALONE] = single.logprobs(sequences, packed=False)
            size = many.policy.megatron_cfg.context_parallel_size
            report.comparisons = _comparisons(single, sequences, scores, threshold, size)
            if updated:
                report.updates = _differences(_two_updates(single, sequences), updated)
    return report


_ALONE = "alone, not packed"
_PLACES = ("layout", _ALONE, "vLLM", "recorded by the sampler")
"""What is compared with one rank, in the report's order."""


class _Parts:
    """Policies and engines that are measured one after another in a Ray session.

    All start at once where there are devices for all of them, otherwise each when it is used, alone on the machine.
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
            alone = Placement(Places((), (0,)))  # Ray gives it a device of its own
            self._make["vLLM"] = lambda: EngineFleet(with_engine(one), folder, alone)
            devices += 1
        self._make["one rank"] = lambda: PolicyGroup(one, folder, total_updates=2)
        together = devices <= one.cluster.gpus_per_node or not one.cluster.gpus_per_node
        self._started = {name: make() for name, make in self._make.items() if together}

    def __contains__(self, name: str) -> bool:
        return name in self._make

    @contextlib.contextmanager
    def use(self, name: str) -> Iterator[Any]:
        """The part when it is ready; it ends with the block."""
        part = self._started.pop(name, None) or self._make[name]()
        try:
            part.ready()
            with phase(f"log-probs by {name}"):
                yield part
        finally:
            part.close()


def _away_from_one_rank(
    stand: _Parts, sequences: list[TrainSequence]
) -> tuple[dict[str, list[np.ndarray]], list[UpdateResult]]:
    """Log-probs of all completion tokens by the layout and by vLLM, as far as they are there, and two updates of the
    layout."""
    scores = {}
    updated = []
    if "layout" in stand:
        with stand.use("layout") as group:
            scores["layout"] = group.logprobs(sequences)
            scores[_ALONE] = group.logprobs(sequences, packed=False)
            updated = _two_updates(group, sequences)
    if "vLLM" in stand:
        with stand.use("vLLM") as fleet:
            scores["vLLM"] = _scored(fleet, sequences)
    return scores, updated


def _comparisons(
    single: PolicyGroup,
    sequences: list[TrainSequence],
    scores: dict[str, list[np.ndarray]],
    threshold: float,
    context_size: int,
) -> list[Comparison]:
    """Every one of ``scores`` beside those of one rank, with the causes of what exceeds the threshold."""

    def written(values: Iterable[np.ndarray]) -> list[np.ndarray]:
        return [s.where_written(v) for s, v in zip(sequences, values)]

    targets = written(s.completion_ids for s in sequences)
    reference = written(single.logprobs(sequences))
    places = {name: written(scores[name]) for name in _PLACES if name in scores}
    tempered: dict[float, list[np.ndarray]] = {}
    comparisons = []
    for name, measured in places.items():
        found = compare(name, reference, measured, targets)
        if not found.max_abs <= threshold:
            tempered = tempered or {t: written(single.logprobs(sequences, temperature=t)) for t in _TEMPERATURES}
            found.causes = diagnose(
                reference,
                measured,
                threshold,
                tempered=tempered,
                alone=places[_ALONE] if name == "layout" else None,
                prompt_lengths=[len(s.prompt_ids) for s in sequences],
                context_size=context_size if name == "layout" else 1,
            )
        comparisons.append(found)
    return comparisons


def _two_updates(policy: PolicyGroup, sequences: list[TrainSequence]) -> list[UpdateResult]:
    from gdpo_nemo.algorithms import LossSettings

    return [policy.train(sequences, LossSettings()) for _ in range(2)]


def _differences(ours: list[UpdateResult], others: list[UpdateResult]) -> dict[str, float]:
    """Relative, of two updates on both sides."""
    pairs = {
        "loss": (ours[0].loss, others[0].loss),
        "grad_norm": (ours[0].grad_norm, others[0].grad_norm),
        "next_loss": (ours[1].loss, others[1].loss),
    }
    return {name: abs(a - b) / max(abs(a), 1e-12) for name, (a, b) in pairs.items()}


def _scored(fleet: EngineFleet, sequences: list[TrainSequence]) -> list[np.ndarray]:
    scores = fleet.score([np.concatenate([s.prompt_ids, s.completion_ids]) for s in sequences])[0]
    return [values[len(s.prompt_ids) - 1 :] for s, values in zip(sequences, scores)]


def _vocabulary(model: str | Path) -> int:
    import json

    return json.loads((Path(model) / "config.json").read_text())["vocab_size"]


def _fixed(vocabulary: int, longest: int, count: int = 12) -> list[TrainSequence]:
    """Random sequences of varied lengths, the same at every call; their weights form the mean over the tokens."""
    rng = np.random.default_rng(0)
    longest = min(longest, 256) - 1
    lengths = np.linspace(max(4, longest // 8), longest, count).astype(int)
    drawn = [rng.integers(0, vocabulary, n).astype(np.int32) for n in lengths]
    return _weighted(
        [(ids[: max(1, len(ids) // 4)], ids[max(1, len(ids) // 4) :]) for ids in drawn], rng.normal(size=count)
    )


def _recorded(path: str | Path) -> tuple[list[TrainSequence], list[np.ndarray]]:
    from gdpo_nemo.observe.rollouts import read_columns
    from gdpo_nemo.observe.sample_columns import values_of

    names = ("prompt_ids", "completion_ids", "logprobs", "loss_mask", "advantage")
    try:
        table = read_columns(path, names)
        prompts, completions, logprobs, masks, advantages = (values_of(table.column(name)) for name in names)
    except FileNotFoundError:
        raise ConfigError(f"--record: {path} does not exist") from None
    except OSError as error:
        raise ConfigError(f"--record: {path} cannot be read ({error.strerror})") from None
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"--record: {path} is not a rollouts file ({type(error).__name__}: {error})") from None
    if not prompts:
        raise ConfigError(f"--record: {path} is empty")
    pairs = list(zip(prompts, completions))
    return _weighted(pairs, np.array([value or 0.0 for value in advantages]), masks), logprobs


def _weighted(pairs, advantages, masks=None) -> list[TrainSequence]:
    sequences = [
        TrainSequence(prompt, completion, np.zeros(len(completion), np.float32), float(a), loss_mask=mask)
        for (prompt, completion), a, mask in zip(pairs, advantages, masks or [None] * len(pairs))
    ]
    total = sum(s.num_policy_tokens for s in sequences)
    for sequence in sequences:
        sequence.weight = 1.0 / total
    return sequences


def describe(report: ParityReport) -> str:
    """The report as text."""
    lines = [f"{report.model}, {report.layout}: {report.tokens} tokens, threshold {report.threshold:g}"]
    for c in report.comparisons:
        lines.append(f"  {c.name:<24} log-probs: max {c.max_abs:.3g}  mean {c.mean_abs:.3g}")
        lines += [f"    cause: {cause}" for cause in c.causes]
        if c.causes:
            lines += [
                f"    sequence {w['sequence']} token {w['offset']} (id {w['token']}): {w['reference']:.6f} -> "
                f"{w['measured']:.6f}"
                for w in c.worst
            ]
    if report.updates:
        lines.append("  updates, relative:       " + "  ".join(f"{k} {v:.3g}" for k, v in report.updates.items()))
    lines.append("parity holds" if report.passed else "parity does not hold")
    return "\n".join(lines)
