"""``gdpo-nemo parity``: the same sequences through one rank, through a layout, and through vLLM.

Run it on a new machine, driver or version before a long run: what differs, by how much, at which tokens, and why.
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from gdpo_nemo.commands.arguments import add_layout, rollout_file
from gdpo_nemo.config.files import check_engines
from gdpo_nemo.config.standalone import standalone_config
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.observe.installation import require_libraries
from gdpo_nemo.observe.parity_report import Comparison, compare, diagnose

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
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare a layout and vLLM with one rank; exit status 1 where they differ by more than the threshold."""
    import json

    record = rollout_file(arguments.record) if arguments.record else None
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
    if not threshold >= 0:
        raise ConfigError(f"--threshold: must be 0 or more, got {threshold:g}")
    sequences, recorded = _recorded(record) if record else (None, None)
    longest = max(map(len, sequences)) + 1 if sequences else 256  # one more: vLLM scores a sequence only by going on
    one, many = (standalone_config(model, text, precision, longest) for text in ("", layout))
    if engine:
        require_libraries(one)
        check_engines(one)
    sequences = sequences or _fixed(_vocabulary(model), one.policy.max_total_sequence_length)

    def written(values):
        return [s.where_written(v) for s, v in zip(sequences, values)]

    targets = written([s.completion_ids for s in sequences])
    report = ParityReport(str(model), layout or "one rank", sum(map(len, targets)), threshold)
    with _standing(one, many, str(model), engine) as (single, group, fleet):
        reference = written(single.logprobs(sequences))
        places = {"layout": written(group.logprobs(sequences))} if layout else {}
        alone = written((group if layout else single).logprobs(sequences, packed=False))
        places["alone, not packed"] = alone
        if fleet is not None:
            room = one.policy.max_total_sequence_length
            if any(len(s) >= room for s in sequences):
                raise ConfigError(f"--engine: vLLM cannot score sequences that fill the context of {room} tokens")
            places["vLLM"] = written(_scored(fleet, sequences))
        if recorded is not None:
            places["recorded by the sampler"] = written(recorded)
        tempered = None
        for name, measured in places.items():
            found = compare(name, reference, measured, targets)
            if not found.max_abs <= threshold:
                tempered = tempered or {t: written(single.logprobs(sequences, temperature=t)) for t in _TEMPERATURES}
                found.causes = diagnose(
                    reference,
                    measured,
                    threshold,
                    tempered=tempered,
                    alone=alone if name == "layout" else None,
                    prompt_lengths=[len(s.prompt_ids) for s in sequences],
                    context_size=many.policy.megatron_cfg.context_parallel_size if name == "layout" else 1,
                )
            report.comparisons.append(found)
        if layout:
            report.updates = _updates(single, group, sequences)
    return report


def _updates(single, group, sequences) -> dict[str, float]:
    """Two updates on both sides: relative differences."""
    from gdpo_nemo.algorithms import LossSettings

    rows = [[policy.train(sequences, LossSettings()) for _ in range(2)] for policy in (single, group)]
    pairs = {
        "loss": (rows[0][0].loss, rows[1][0].loss),
        "grad_norm": (rows[0][0].grad_norm, rows[1][0].grad_norm),
        "next_loss": (rows[0][1].loss, rows[1][1].loss),
    }
    return {name: abs(a - b) / max(abs(a), 1e-12) for name, (a, b) in pairs.items()}


@contextlib.contextmanager
def _standing(one, many, folder: str, engine: bool):
    from gdpo_nemo.cluster.fleet import EngineFleet
    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.cluster.session import session

    with session(one.cluster):
        single = PolicyGroup(one, folder, total_updates=2)
        group = (
            single
            if many.policy.megatron_cfg == one.policy.megatron_cfg
            else PolicyGroup(many, folder, total_updates=2)
        )
        fleet = EngineFleet(one, folder) if engine else None
        for part in (single, group, fleet):
            if part is not None:
                part.ready()
        yield single, group, fleet


def _scored(fleet, sequences: list[TrainSequence]) -> list[np.ndarray]:
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
