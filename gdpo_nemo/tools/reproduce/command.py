"""``gdpo-nemo reproduce``: run an experiment of the GDPO paper with GDPO and GRPO, and compare it with the paper.

Each run is a chain: a warm-up on the scale ``cpu``, then reinforcement learning with one estimator and seed. The same
command continues after an interruption, because ``gdpo-nemo chain`` skips finished runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_nemo.commands import chain
from gdpo_nemo.commands.arguments import Commands, add_verbosity, say
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.source import find_file

if TYPE_CHECKING:
    from gdpo_nemo.config.layout import Resolved
    from gdpo_nemo.tools.reproduce.page import Arms

MODELS = {
    "tool_calling": "tool_calling_qwen2.5_1.5b",
    "gsm8k": "gsm8k_qwen2.5_1.5b",
    "math_length": "math_length_r1_1.5b",
}
"""Names of the GPU recipes without ``gdpo_`` and the number of GPUs, by task."""
WARM_UPS = {"tool_calling": "sft_tool_calling", "gsm8k": "sft_gsm8k", "math_length": "sft_gsm8k"}
SCALES = ("cpu", "1gpu", "8gpu")
CONTROLS = {
    "tool_calling": ("gdpo.preset=null", "gdpo.estimator=grpo", "gdpo.kl_in_reward=0.001"),
    "gsm8k": ("gdpo.preset=null", "gdpo.estimator=grpo", "gdpo.epsilon=1.0e-4"),
    "math_length": ("gdpo.preset=null", "gdpo.estimator=grpo"),
}
"""Overrides of the GRPO control by task, as in ``configs/grpo_*_8gpu.yaml``."""


def add(commands: Commands) -> None:
    """Register the command."""
    command = commands.add_parser(
        "reproduce",
        help="run an experiment of the GDPO paper with GDPO and GRPO, and compare the results with the paper's",
    )
    command.add_argument("task", choices=tuple(MODELS), help="experiment")
    command.add_argument(
        "--scale", choices=SCALES, default="cpu", help="size of model and batches (default: %(default)s)"
    )
    command.add_argument(
        "--seeds", type=_seeds, default=(0, 1, 2), metavar="N,N,...", help="random seeds of the runs (default: 0,1,2)"
    )
    command.add_argument("--train", metavar="PATH", help="training rows: file or hub name (default: the recipe's)")
    command.add_argument("--held-out", metavar="PATH", help="held-out rows: file or hub name (default: the recipe's)")
    command.add_argument("--out", metavar="DIR", help="folder for runs and page (default: results/TASK_SCALE)")
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="validate all runs, print their number and hours (with --verbose, their configs and plans), and exit",
    )
    add_verbosity(command)
    command.add_argument(
        "overrides",
        nargs="*",
        metavar="[N:]section.key=value",
        help="config changes for all runs; 1: changes the warm-up, which only the scale cpu has",
    )
    command.set_defaults(command=run)


def _seeds(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(int(part) for part in text.split(","))
    except ValueError:
        seeds = ()
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise argparse.ArgumentTypeError(f"expected different numbers from 0 on, separated by commas, got {text!r}")
    return seeds


def run(arguments: argparse.Namespace) -> int:
    """Train all runs that are not finished, and write the page."""
    task, scale = arguments.task, arguments.scale
    out = Path(arguments.out or f"results/{task}_{scale}")
    arms: dict[str, list[Path]] = {"grpo": [], "gdpo": []}
    changes = {"train": arguments.train, "held_out": arguments.held_out, "overrides": arguments.overrides}
    planned = []
    for seed in arguments.seeds:
        for arm, folders in arms.items():
            folder = out / f"{arm}_seed{seed}"
            words = words_of(task, scale, arm, seed, out, **changes)
            if arguments.dry_run and not arguments.verbose:
                planned.append(chain.check_stages(chain.read_stages(words)))
                chain.check_stage_inputs(planned[-1])
            elif status := chain.run(argparse.Namespace(**{**vars(arguments), "overrides": words})):
                return status
            folders.append(folder)
    if arguments.dry_run:
        if planned:
            say(_summary(planned))
        return 0
    return _write(task, scale, out, arms)


def _summary(planned: Sequence[Sequence[tuple[chain.Stage, Resolved]]]) -> str:
    """Return the number of runs, their devices, and the hours that ``gdpo-nemo plan`` estimates for them.

    The warm-up is not included, because the plan estimates only runs that sample.
    """
    from gdpo_nemo.planning.fit import memory_shortage
    from gdpo_nemo.planning.hardware import assumed_rates, device, host
    from gdpo_nemo.planning.report import align_lines
    from gdpo_nemo.planning.shape import model_shape
    from gdpo_nemo.planning.speed import step_time

    gpus = planned[0][-1][1].layout.gpus
    target = device("h100") if gpus else host()
    hours, shortage = {}, ""
    for run in planned:
        stage, resolved = run[-1]
        shape = model_shape(resolved)
        if shape is not None and not stage.finished:
            seconds = step_time(resolved, shape, target, assumed_rates(target)).step
            hours[stage.config.run.name] = seconds * resolved.config.gdpo.max_num_steps / 3600
            shortage = shortage or memory_shortage(resolved, shape, target)
    total = sum(hours.values())
    finished = sum(run[-1][0].finished for run in planned)
    time = f"{total:.3g} h = {total * (gpus or 1):.3g} {'GPU' if gpus else 'machine'} hours, at assumed speeds"
    if len(hours) < len(planned) - finished:
        time = "unknown, because the shape of the model is unknown"
    warm_up = "" if len(planned[0]) == 1 else ", each after the same warm-up, whose time is not included"
    lines = [
        ("runs", f"{len(planned)}, {finished} finished, one after the other{warm_up}"),
        ("devices", f"{gpus} x {target.name}" if gpus else target.name),
        ("time", time),
        ("fits", f"no: {shortage}" if shortage else "yes"),
        *(("run", f"{name}: {each:.3g} h") for name, each in hours.items()),
        ("details", "add --verbose for the config and plan of each run"),
    ]
    return align_lines(lines)


def words_of(
    task: str,
    scale: str,
    arm: str,
    seed: int,
    out: Path,
    *,
    train: str | None = None,
    held_out: str | None = None,
    overrides: Sequence[str] = (),
) -> list[str]:
    """Return the arguments of ``gdpo-nemo chain`` for one run. Raises ConfigError if an override is invalid."""
    files = [recipe(task, scale)]
    if scale == "cpu":
        files.insert(0, _config(f"{WARM_UPS[task]}_smollm2_cpu"))
    last = len(files)
    words = [f"{last}:run.dir={out / f'{arm}_seed{seed}'}", f"{last}:run.name={arm}_seed{seed}"]
    words.append(f"{last}:run.seed={seed}")
    if arm == "grpo":
        words += [f"{last}:{word}" for word in CONTROLS[task]]
    if last == 2:
        words.append(f"1:run.dir={out / 'warm_up'}")
    if train is not None:
        words += [f"{number}:data.train.path={train}" for number in range(1, last + 1)]
    if held_out is not None:
        words.append(f"{last}:data.validation.path={held_out}")
    for word in overrides:
        number, _, rest = word.partition(":")
        if number.isdigit() and int(number) > last:
            raise ConfigError(f"{word}: stage {number} does not exist; on the scale {scale}, the last stage is {last}")
        words.append(word if number.isdigit() and "=" in rest else f"{last}:{word}")
    return [*files, *words]


def recipe(task: str, scale: str) -> str:
    """Return the config file of an experiment with GDPO."""
    return _config(f"gdpo_{task}_smollm2_cpu" if scale == "cpu" else f"gdpo_{MODELS[task]}_{scale}")


def _config(name: str) -> str:
    file = find_file(f"configs/{name}.yaml")
    if file is None:
        raise ConfigError(f"configs/{name}.yaml: not found in the working directory or the installation")
    return str(file)


def _write(task: str, scale: str, out: Path, arms: Arms) -> int:
    from gdpo_nemo.tools.reproduce import page

    results = page.results_of(task, arms)
    for sentence in page.verdicts(results):
        say(sentence)
    say(page.write(task, scale, out, arms, recipe(task, "8gpu")))
    return 0
