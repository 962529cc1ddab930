"""Disturb runs of the demo for hours, and say what came of every fault.

    python tests/chaos/soak.py --faults 1000 --out results/soak

Runs follow each other in the variants below, with ``--per-run`` faults each, of kinds and at moments that the seed
draws; every one is a drill (``gdpo-nemo drill``), held against an undisturbed run. In one variant the verifier is
hostile besides (``hostile_verifier.py``), and what it did to a sample is a fault, too. ``soak.jsonl`` gets a line for
each fault; the same command goes on where it was stopped, and ``--faults 0`` shows the table of all that is there.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

from hostile_verifier import DEEDS, deed_of

from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.records import Outcome as Verdicts
from gdpo_nemo.drill.drilled_run import Outcome, trained
from gdpo_nemo.drill.exercise import Drill, by_fault, drill, is_exact
from gdpo_nemo.drill.faults import FAULTS, SLOW
from gdpo_nemo.observe.rollouts import read_rollouts, rollout_path

REPOSITORY = Path(__file__).resolve().parents[2]
HOSTILE = Path(__file__).with_name("hostile_verifier.py")
DEMO = ("gdpo.num_prompts_per_step=4", "rollout.env_workers=2")
VARIANTS = {
    "synchronous": (),
    "two steps ahead": ("rollout.max_staleness=2",),
    "LoRA": ("policy.lora.rank=8", "policy.megatron_cfg.optimizer.lr=1e-3"),
    "saved beside training": ("checkpointing.async_save=true",),
    "two steps ahead, saved beside training": ("rollout.max_staleness=2", "checkpointing.async_save=true"),
    "a hostile verifier": (f"env.digit_sort.plugin={HOSTILE}:HostileDigitSort", "rollout.env_timeout_s=5"),
}
RECORD = "soak.jsonl"


def soak(
    out: Path, faults: int, per_run: int, seed: int, overrides: list[str], patience_s: float
) -> list[dict[str, Any]]:
    """Go on until ``faults`` are recorded in ``out``; returns the records."""
    out.mkdir(parents=True, exist_ok=True)
    record = out / RECORD
    while len(done := read(record)) < faults:
        number = 1 + max((row["run"] for row in done), default=-1)
        variant, changes = list(VARIANTS.items())[number % len(VARIANTS)]
        print(f"run {number} ({variant}), {len(done)} faults so far", flush=True)
        rows = one_run(out / f"run_{number}", variant, number, changes, overrides, per_run, seed, patience_s)
        with open(record, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        if all(row["wrong"] is None for row in rows):
            shutil.rmtree(out / f"run_{number}")
    return done


def one_run(folder, variant, number, changes, overrides, per_run, seed, patience_s) -> list[dict[str, Any]]:
    """A drill; a record for each fault, and one more for what was wrong in the end."""
    shutil.rmtree(folder, ignore_errors=True)  # of a soak that was stopped
    draw = random.Random(f"{seed}/{number}")
    quick = [fault for name, fault in FAULTS.items() if name not in SLOW]
    kinds = [*draw.choices(quick, k=per_run - 1), FAULTS[draw.choice(SLOW[:2])]]
    config = str(REPOSITORY / "configs" / "gdpo_tiny_cpu.yaml")
    what = Drill(config, [*DEMO, *changes, *overrides], kinds, folder, draw.randrange(2**31), 2, patience_s)
    peaceful = folder.with_name(f"undisturbed_{'_'.join(variant.split())}_{what.steps}")
    what = replace(what, compared=peaceful)
    exact = is_exact(load_config(config, what.changes))
    result = drill(what, exact, lambda line: print(line, flush=True))
    about = {"run": number, "variant": variant}
    outcomes = [outcome for outcome in result.outcomes if outcome.victim]
    if any("hostile_verifier" in change for change in changes):
        outcomes += verifier_faults(what.disturbed)
    rows = [{**about, **outcome.record()} for outcome in outcomes]
    wrong = [{**about, **Outcome("the whole run", str(folder), wrong=sentence).record()} for sentence in result.wrong]
    return rows + wrong


def verifier_faults(run_dir: Path) -> list[Outcome]:
    """What ``hostile_verifier`` did to samples of the run, and whether exactly these were masked, with the reason."""
    found = []
    took = {step: row["time/step"] for step, row in trained(run_dir).items()}
    for step in took:
        for sample in read_rollouts(rollout_path(run_dir, step)):
            deed = deed_of(sample["prompt_id"], sample["sample_index"], sample["completion"])
            reason = DEEDS.get(deed) if deed else None
            failed = sample["outcome"] == Verdicts.ENV_FAILED
            told = (reason or "") in sample["detail"]
            # Where too many of those that it came with have failed, a sample is not tried alone.
            right = (failed == (reason is not None) and told) or "not tried alone" in sample["detail"]
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
    parser.add_argument("--out", type=Path, default=Path("results/soak"))
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # which ends the run, too
    rows = soak(asked.out, asked.faults, asked.per_run, asked.seed, asked.overrides, asked.patience)
    print(table(rows))
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
