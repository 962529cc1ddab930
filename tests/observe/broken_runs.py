"""Runs of the demo that are broken on purpose, one fault each, and the metrics of them that the rules of health are
held to:

    uv run tests/observe/broken_runs.py --out /tmp/broken                  all of them, two to five minutes each
    uv run tests/observe/broken_runs.py --out /tmp/broken wrong_sign       one

writes ``runs/NAME.csv`` beside this file. Finished runs are not run again. ``runs/README.md`` says which are recorded.
"""

from __future__ import annotations

import argparse
import csv
import random
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from gdpo_nemo.algorithms import RewardTable, Settings, Terms
from gdpo_nemo.algorithms.estimators import gdpo
from gdpo_nemo.data.records import Prompt, Trajectory, Verdict
from gdpo_nemo.environments.tasks.digit_sort import DigitSort
from gdpo_nemo.generation.requests import SampleRequest
from gdpo_nemo.observe.metrics import read_metrics
from gdpo_nemo.rollouts.context import RolloutContext, Transcript

HERE = Path(__file__).resolve()
REPOSITORY = HERE.parents[2]
RUNS = HERE.parent / "runs"
LONG = 42
"""Steps of a run that is to show that it does not learn: the rule compares 20 with 20."""
SHORT = 10
"""Steps of one whose fault shows at once."""


def _place(name: str) -> str:
    return f"{HERE}:{name}"


FAULTS: dict[str, tuple[int, list[str]]] = {
    "wrong_sign": (LONG, [f"gdpo.estimator={_place('wrong_sign')}"]),
    "shuffled_advantages": (LONG, [f"gdpo.estimator={_place('shuffled')}"]),
    "noise_reward": (LONG, [f"env.digit_sort.plugin={_place('Noise')}"]),
    "lr_100": (LONG, ["policy.megatron_cfg.optimizer.lr=2.0e-2"]),
    "lr_10": (LONG, ["policy.megatron_cfg.optimizer.lr=2.0e-3"]),
    "only_short": (
        LONG,
        ["gdpo.rewards={length: 1.0}", "gdpo.estimator=grpo", "policy.megatron_cfg.optimizer.lr=1.0e-3"],
    ),
    "dead_component": (SHORT, [f"env.digit_sort.plugin={_place('NoFormat')}"]),
    "hung_verifier": (
        SHORT,
        [f"env.digit_sort.plugin={_place('Hanging')}", "rollout.env_timeout_s=1", "rollout.max_env_failure_share=0.9"],
    ),
    "off_by_one": (SHORT, [f"rollout.function={_place('shifted_logprobs')}"]),
    "truncated": (SHORT, ["policy.generation.max_new_tokens=16"]),
    "duplicates": (SHORT, ["policy.generation.temperature=0.1"]),
}
"""Steps, and what differs from the demo, by the name of a run."""

COLUMNS = (
    "step", "grad_norm", "reward/total/mean",
    *(f"reward/{name}/{key}" for name in ("correctness", "format", "length") for key in ("mean", "dead_groups")),
    "advantage/dead_groups", "policy/entropy", "policy/clip_fraction", "policy/clip_low", "policy/clip_high",
    "policy/ratio_min", "policy/ratio_max", "parity/mean_abs", "rollout/mean_length", "rollout/duplicates",
    "rollout/truncated", "rollout/env_failed", "rollout/aborted", "idle/trainer",
)  # fmt: skip


def wrong_sign(table: RewardTable, settings: Settings) -> Terms:
    """GDPO that pays for what it should punish."""
    terms = gdpo(table, settings)
    return Terms(-terms.components, terms.has_signal)


def shuffled(table: RewardTable, settings: Settings) -> Terms:
    """GDPO whose advantages belong to other samples of the batch."""
    terms = gdpo(table, settings)
    order = np.random.default_rng(len(table.names)).permutation(len(terms.has_signal))
    return Terms(terms.components[:, order], terms.has_signal[order])


class Noise(DigitSort):
    """Rewards that have nothing to do with the sample."""

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Heads or tails for each component."""
        verdicts = super().verify(trajectories)
        for trajectory, verdict in zip(trajectories, verdicts):
            coin = random.Random(f"{trajectory.prompt.id} {trajectory.sample_index} {trajectory.policy_version}")
            verdict.rewards.update({name: float(coin.random() < 0.5) for name in verdict.rewards})
        return verdicts


class NoFormat(DigitSort):
    """A component that never pays."""

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """``format`` is 0, whatever was written."""
        verdicts = super().verify(trajectories)
        for verdict in verdicts:
            verdict.rewards["format"] = 0.0
        return verdicts


class Hanging(DigitSort):
    """A verifier that does not answer for one prompt in eight."""

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Hang where the prompt's digits say so."""
        if any(zlib.crc32(trajectory.prompt.id.encode()) % 8 == 0 for trajectory in trajectories):
            time.sleep(3600)
        return super().verify(trajectories)


def shifted_logprobs(prompts: Sequence[Prompt], context: RolloutContext) -> list[list[Trajectory]]:
    """One turn, as the built-in loop samples it, but the sampler's log-probs belong to the token before: the mistake of
    a slice one place too far."""
    made = []
    for place, prompt in enumerate(prompts):
        talks = [Transcript(prompt, number) for number in range(context.samples)]
        batch = context.sample([SampleRequest(t.token_ids, context.seed(place, t.sample_index, 0)) for t in talks])
        for talk, completion in zip(talks, batch.completions):
            talk.append_policy_tokens(replace(completion, logprobs=np.roll(completion.logprobs, 1)))
        made.append([talk.trajectory(context.conversation, batch.version) for talk in talks])
    return made


def command(name: str, folder: Path, model: Path) -> list[str]:
    """The start of the program that trains the demo with the fault ``name``."""
    steps, overrides = FAULTS[name]
    return [
        sys.executable, str(REPOSITORY / "examples" / "run_gdpo.py"), f"run.dir={folder}",
        f"policy.model_name={model}", f"gdpo.max_num_steps={steps}", "gdpo.val_period=0", "gdpo.val_at_start=false",
        "gdpo.num_prompts_per_step=8", "checkpointing.enabled=false", "checkpointing.metric_name=null",
        "checkpointing.export_hf=false", "logger.plot=false", "logger.tensorboard.enabled=false",
        "logger.console=plain", "health.checks=[]", *overrides,
    ]  # fmt: skip


def write_table(folder: Path, path: Path) -> None:
    """The metrics of a run that rules judge, four figures each."""
    rows = [row for row in read_metrics(folder) if "loss" in row]
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = [name for name in COLUMNS if any(name in row for row in rows)]
        writer.writerow(names)
        writer.writerows([[f"{row[name]:.4g}" if name in row else "" for name in names] for row in rows])


def main() -> None:
    """Command line; see the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FAULTS)}; default: all")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    chosen = parser.parse_args()
    out = chosen.out.resolve()
    if not (out / "model").exists():
        maker = REPOSITORY / "examples" / "make_tiny_model.py"
        subprocess.run([sys.executable, str(maker), str(out / "model"), "--seed", "0"], check=True)
    for name in chosen.names or FAULTS:
        folder = out / name
        if not (folder / "report.html").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            with open(folder.with_suffix(".log"), "w") as log:
                start = command(name, folder, out / "model")
                status = subprocess.run(start, stdout=log, stderr=subprocess.STDOUT, cwd=REPOSITORY).returncode
            if status:
                sys.exit(f"{name} ended with status {status}; see {folder.with_suffix('.log')}")
        write_table(folder, RUNS / f"{name}.csv")
        print(name, flush=True)


if __name__ == "__main__":
    main()
