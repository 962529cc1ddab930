"""Disturb runs for hours, and say what came of every fault.

    PYTHONPATH=tests/environments python tests/chaos/soak.py --faults 1000 --out results/soak

Runs follow each other in the variants below, with ``--per-run`` faults each, of kinds and at moments that the seed
draws; every one is a drill (``gdpo-nemo drill``). In two variants the verifier is
hostile besides: a process that hangs and dies (``hostile_verifier.py``), a NeMo Gym server that lies
(``lying_server.py``). What it did to a sample is a fault, too. ``soak.jsonl`` gets a line for each fault; the same
command goes on where it was stopped, and ``--faults 0`` shows the table of all that is there.
Status 0: nothing was lost, done twice, left behind or passed over in silence.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hostile_verifier import DEEDS, deed_of
from lying_server import LIES, lie_about, lying_server

from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.records import Outcome as Verdicts
from gdpo_nemo.observe.samples import read_rollouts, rollout_path
from gdpo_nemo.tools.drill.exercise import Drill, by_fault, drill, is_exact
from gdpo_nemo.tools.drill.faults import ENGINE_CORE, FAULTS, HOST, ROLES, SLOW, WRITER, kill_together
from gdpo_nemo.tools.drill.run import Outcome, trained

REPOSITORY = Path(__file__).resolve().parents[2]
HOSTILE = Path(__file__).with_name("hostile_verifier.py")
DEMO = ("gdpo.num_prompts_per_step=4", "rollout.env_workers=2")


@contextmanager
def _nothing(folder: Path) -> Iterator[list[str]]:
    yield []


@dataclass(frozen=True)
class Variant:
    """A kind of run."""

    changes: tuple[str, ...] = ()
    config: str = "gdpo_tiny_cpu.yaml"
    beside: Callable[[Path], AbstractContextManager[list[str]]] = _nothing
    """What has to be there while it runs, given the soak's folder; yields further overrides."""
    spoilt: Callable[[Mapping[str, Any]], str | None] | None = None
    """What the verifier did to a sample, from its record; None: nothing, or an honest verifier."""
    reasons: Mapping[str, str | None] = field(default_factory=dict)
    """A part of the reason for which such a sample is masked; None: it is not."""
    killed: Sequence[str] = ()
    """Roles of which processes are killed, alone or two at a moment; empty: the faults of a drill."""


VARIANTS = {
    "synchronous": Variant(DEMO),
    "two steps ahead": Variant((*DEMO, "rollout.max_staleness=2")),
    "LoRA": Variant((*DEMO, "policy.lora.rank=8", "policy.megatron_cfg.optimizer.lr=1e-3")),
    "saved beside training": Variant((*DEMO, "checkpointing.async_save=true")),
    "two steps ahead, saved beside training": Variant(
        (*DEMO, "rollout.max_staleness=2", "checkpointing.async_save=true")
    ),
    "a hostile verifier": Variant(
        (*DEMO, f"env.digit_sort.plugin={HOSTILE}:HostileDigitSort", "rollout.env_timeout_s=5"),
        spoilt=lambda sample: deed_of(sample["prompt_id"], sample["sample_index"]),
        reasons=DEEDS,
    ),
    "a lying server": Variant(
        ("gdpo.num_prompts_per_step=4",), "gdpo_nemo_gym_plugin.yaml", lying_server, lie_about, LIES
    ),
    "kills of any processes": Variant(
        (*DEMO, "rollout.max_staleness=2"), killed=[r for r in ROLES if r not in (ENGINE_CORE, HOST, WRITER)]
    ),
    "kills beside rollout hosts": Variant(
        (*DEMO, "rollout.max_staleness=2", "policy.generation.engines=9"),
        killed=[role for role in ROLES if role != ENGINE_CORE],
    ),
}
RECORD = "soak.jsonl"


def soak(
    out: Path, faults: int, per_run: int, seed: int, overrides: list[str], patience_s: float, variants: Sequence[str]
) -> list[dict[str, Any]]:
    """Go on until ``faults`` are recorded in ``out``; returns the records."""
    out.mkdir(parents=True, exist_ok=True)
    record = out / RECORD
    while len(done := read(record)) < faults:
        number = 1 + max((row["run"] for row in done), default=-1)
        variant = variants[number % len(variants)]
        print(f"run {number} ({variant}), {len(done)} faults so far", flush=True)
        rows = one_run(out / f"run_{number}", variant, number, overrides, per_run, seed, patience_s)
        with open(record, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        if all(row["wrong"] is None for row in rows):
            shutil.rmtree(out / f"run_{number}")
    return done


def one_run(folder, name, number, overrides, per_run, seed, patience_s) -> list[dict[str, Any]]:
    """A drill; a record for each fault, and one more for what was wrong in the end."""
    shutil.rmtree(folder, ignore_errors=True)  # of a soak that was stopped
    draw = random.Random(f"{seed}/{number}")
    variant = VARIANTS[name]
    quick = [fault for name, fault in FAULTS.items() if name not in SLOW]
    kinds = [*draw.choices(quick, k=per_run - 1), FAULTS[draw.choice(SLOW[:2])]]
    if variant.killed:
        kinds = [kill_together(*draw.sample(variant.killed, draw.choice((1, 2)))) for _ in range(per_run)]
    config = str(REPOSITORY / "configs" / variant.config)
    with variant.beside(folder.parent) as more:
        changes = [*variant.changes, *more, *overrides]
        what = Drill(config, changes, kinds, folder, draw.randrange(2**31), 2, patience_s)
        peaceful = folder.with_name(f"undisturbed_{'_'.join(name.split())}_{what.steps}")
        what = replace(what, compared=peaceful)
        what = replace(what, exact=is_exact(load_config(config, what.changes)))
        result = drill(what, lambda line: print(line, flush=True))
    about = {"run": number, "variant": name}
    outcomes = [outcome for outcome in result.outcomes if outcome.victim or outcome.wrong]
    if variant.spoilt:
        outcomes += verifier_faults(what.disturbed, variant.spoilt, variant.reasons)
    rows = [{**about, **outcome.record()} for outcome in outcomes]
    wrong = [{**about, **Outcome("the whole run", str(folder), wrong=sentence).record()} for sentence in result.wrong]
    return rows + wrong


def verifier_faults(
    run_dir: Path, spoilt: Callable[[Mapping[str, Any]], str | None], reasons: Mapping[str, str | None]
) -> list[Outcome]:
    """What a verifier did to samples of the run, and whether exactly these were masked, with the reason."""
    found = []
    took = {step: row["time/step"] for step, row in trained(run_dir).items()}
    for step in took:
        for sample in read_rollouts(rollout_path(run_dir, step)):
            deed = spoilt(sample)
            reason = reasons[deed] if deed else None
            failed = sample["outcome"] == Verdicts.ENV_FAILED
            told = (reason or "") in sample["detail"]
            # Where too many of those that it came with have failed, a sample is not retried individually.
            right = (failed == (reason is not None) and told) or "not retried individually" in sample["detail"]
            if deed or not right:
                victim = f"sample {sample['sample_index']} of {sample['prompt_id']}"
                wrong = None if right else f"{sample['outcome']} {sample['detail']}"
                found.append(Outcome(deed or "verifier-nothing", victim, step, took[step], wrong=wrong))
    return found


def read(record: Path) -> list[dict[str, Any]]:
    """The faults so far."""
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def table(rows: list[dict[str, Any]]) -> str:
    """Times, median and longest seconds to the next step by fault, and what was wrong."""
    outcomes = [Outcome(**{key: row[key] for key in Outcome.__dataclass_fields__}) for row in rows]
    lines = ["| fault | times | next step after, median | longest |", "|---|---|---|---|"]
    for name, times, median, longest in by_fault(outcomes):
        if median is not None:
            lines.append(f"| {name} | {times} | {median:.1f} s | {longest:.1f} s |")
    runs = Counter(row["variant"] for row in {row["run"]: row for row in rows}.values())
    lines += ["", ", ".join(f"{count} x {variant}" for variant, count in runs.items())]
    wrong = [row for row in rows if row["wrong"]]
    lines += [f"run {row['run']} ({row['variant']}), {row['fault']}: {row['wrong']}" for row in wrong]
    return "\n".join([*lines, f"{len(rows) - len(wrong)} of {len(rows)} faults as they should be"])


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--per-run", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=900.0, help="longest wait for a step, in seconds")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("results/soak"))
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # which ends the run, too
    rows = soak(asked.out, asked.faults, asked.per_run, asked.seed, asked.overrides, asked.patience, asked.variants)
    print(table(rows))
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
