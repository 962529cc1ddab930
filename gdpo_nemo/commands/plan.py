"""``gdpo-nemo plan``: estimate memory, time and the best layout of a config."""

from __future__ import annotations

import argparse
from pathlib import Path

from gdpo_nemo.commands.arguments import Commands, add_config, say
from gdpo_nemo.config.load import load_config
from gdpo_nemo.planning.fit import Candidate, best_per_count
from gdpo_nemo.planning.hardware import Device, assumed_rates, device, host, load_rates, save_rates
from gdpo_nemo.planning.report import align_lines, describe, plan_lines
from gdpo_nemo.planning.shape import model_shape
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError

DECISIVE = ("fits", "change", "time", "split")
"""Subjects that are printed first, because they decide whether and how a run is started."""


def add(commands: Commands) -> None:
    """Register the command."""
    command = commands.add_parser(
        "plan", help="estimate memory, batches, time and the best layout of a config before a run"
    )
    add_config(command)
    command.add_argument(
        "--gpu", default="h100", metavar="NAME", help="GPU type: a100, h100, h200 or b200 (default: %(default)s)"
    )
    command.add_argument(
        "--link", type=float, metavar="GB/S", help="network bandwidth of one GPU to other nodes, in one direction"
    )
    command.add_argument(
        "--calibration", metavar="FILE", help="file with speeds measured by --calibrate, which replace assumed speeds"
    )
    command.add_argument(
        "--calibrate", nargs="+", metavar="RUN", help="measure the speeds of finished runs, and write them to --out"
    )
    command.add_argument("--sweep", type=int, metavar="N", help="rank layouts for up to N GPUs, and plot them to --out")
    command.add_argument("--out", metavar="FILE", help="output file (default: plan.png or calibration.json)")
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the estimates for a config, a ranking of layouts (``--sweep``), or the result of a calibration.

    Raises:
        ConfigError: if the config or the options are invalid, or the model's shape is unknown because the model is not
            downloaded.
    """
    _check_options(arguments)
    if arguments.calibrate:
        return _calibrate(arguments)
    config = load_config(arguments.config, arguments.overrides)
    resolved = validate(config, weights=False)
    if not resolved.algorithm.samples:
        raise ConfigError(
            f"algorithm.type: {config.algorithm.type} does not sample; plan supports only algorithms that sample"
        )
    shape = model_shape(resolved)
    if shape is None:
        raise ConfigError(
            f"policy.model_name: the shape of {config.policy.model_name} is unknown; specify a folder that contains "
            "its config.json, or create or download the model first"
        )
    target = _device(arguments, bool(config.cluster.gpus_per_node or arguments.sweep))
    rates = load_rates(arguments.calibration) if arguments.calibration else assumed_rates(target)
    if arguments.sweep:
        from gdpo_nemo.planning.fit import sweep, table

        found = sweep(resolved, shape, target, rates, arguments.sweep)
        if not found:
            raise ConfigError(
                f"--sweep: no layout of {config.policy.model_name} fits on up to {arguments.sweep} x {target.name}"
            )
        say(table(found, config.gdpo.max_num_steps))
        say(f"assumes    {rates.describe()}")
        title = f"{config.run.name} on {target.name}"
        say(f"figure     {_draw(found, config.gdpo.max_num_steps, title, arguments.out or 'plan.png')}")
        return 0
    lines = plan_lines(resolved, shape, target, rates)
    say(align_lines([line for line in lines if line[0] in DECISIVE]))
    say(describe(resolved, resolved.notes))
    say(align_lines([line for line in lines if line[0] not in DECISIVE]))
    return 0


def _check_options(arguments: argparse.Namespace) -> None:
    if arguments.sweep is not None and arguments.sweep < 1:
        raise ConfigError(f"--sweep: must be at least 1 GPU, got {arguments.sweep}")
    if arguments.link is not None and not 0 < arguments.link <= 1e6:
        raise ConfigError(f"--link: must be more than 0 and at most 1,000,000 GB/s, got {arguments.link:g}")


def _calibrate(arguments: argparse.Namespace) -> int:
    from gdpo_nemo.planning.calibrate import calibrate, read_run

    runs = [read_run(folder) for folder in arguments.calibrate]
    target = _device(arguments, bool(runs[0].resolved.config.cluster.gpus_per_node))
    rates = calibrate(runs, target, assumed_rates(target))
    path = arguments.out or "calibration.json"
    save_rates(rates, path)
    say(f"{path}: {rates.describe()}")
    return 0


def _device(arguments: argparse.Namespace, gpu: bool) -> Device:
    return device(arguments.gpu, arguments.link and arguments.link * 1e9) if gpu else host()


def _draw(candidates: list[Candidate], steps: int, title: str, path: str | Path) -> Path:
    """Plot seconds per step and the run's GPU hours over the number of GPUs. Return the path of the image."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    best = best_per_count(candidates)
    gpus = [c.gpus for c in best]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    perfect = [best[0].time.step * gpus[0] / n for n in gpus]
    left.plot(gpus, [c.time.step for c in best], "o-", label="fastest layout")
    left.plot(gpus, perfect, "--", color="grey", label="linear scaling")
    left.set(xscale="log", yscale="log")
    left.yaxis.set_major_formatter("{x:g}")
    left.set(xlabel="GPUs", ylabel="seconds per step")
    left.legend()
    right.semilogx(gpus, [c.gpu_seconds * steps / 3600 for c in best], "o-", base=2)
    right.set(xlabel="GPUs", ylabel=f"GPU hours for {steps} steps", ylim=(0, None))
    for axes in (left, right):
        axes.set_xticks(gpus, [str(n) for n in gpus])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    path = Path(path)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
