"""``gdpo-nemo plan``: from command-line options to what is printed and written."""

from __future__ import annotations

import argparse

from gdpo_nemo.commands.arguments import add_config, say
from gdpo_nemo.config.algorithm_choice import samples
from gdpo_nemo.config.description import describe
from gdpo_nemo.config.load import load_config
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.planning.hardware import CPU_RATES, Device, Rates, device, host, load_rates, save_rates
from gdpo_nemo.planning.plan_report import full, text
from gdpo_nemo.planning.shape import model_shape
from gdpo_nemo.validation import validate


def add(commands) -> None:
    """Register the command."""
    command = commands.add_parser(
        "plan", help="memory, batches, time and the best layout of a config, before it is run"
    )
    add_config(command)
    command.add_argument(
        "--gpu", default="h100", metavar="NAME", help="a100, h100, h200 or b200 (default: %(default)s)"
    )
    command.add_argument("--link", type=float, metavar="GB/S", help="network of one GPU to other nodes, one direction")
    command.add_argument(
        "--calibration", metavar="FILE", help="speeds that --calibrate measured, in place of assumed ones"
    )
    command.add_argument(
        "--calibrate", nargs="+", metavar="RUN", help="measure speeds on finished runs and write them to --out"
    )
    command.add_argument("--sweep", type=int, metavar="N", help="rank layouts for up to N GPUs and draw them to --out")
    command.add_argument("--out", metavar="FILE", help="default: plan.png, calibration.json")
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan of a config, a sweep, or what a calibration measured.

    Raises:
        ConfigError: of the config or the options; also where the model's shape is not known without a download.
    """
    _check(arguments)
    if arguments.calibrate:
        return _calibrate(arguments)
    config = load_config(arguments.config, arguments.overrides)
    notes = validate(config)
    if not samples(config):
        raise ConfigError(f"algorithm.type: {config.algorithm.type} does not sample; the plan is of runs that do")
    shape = model_shape(config)
    if shape is None:
        raise ConfigError(
            f"policy.model_name: the shape of {config.policy.model_name} is not known here; give a folder that holds "
            "its config.json, or make or download the model first"
        )
    on = _device(arguments, bool(config.cluster.gpus_per_node or arguments.sweep))
    rates = load_rates(arguments.calibration) if arguments.calibration else _assumed(on)
    if arguments.sweep:
        from gdpo_nemo.planning.sweep import draw, sweep, table

        found = sweep(config, shape, on, rates, arguments.sweep)
        if not found:
            raise ConfigError(
                f"--sweep: no layout of {config.policy.model_name} fits {arguments.sweep} x {on.name} or fewer"
            )
        say(table(found, config.gdpo.max_num_steps))
        say(f"assumes    {rates.describe()}")
        say(
            f"figure     "
            f"{draw(found, config.gdpo.max_num_steps, f'{config.run.name} on {on.name}', arguments.out or 'plan.png')}"
        )
        return 0
    say(describe(config, notes))
    say(text(full(config, shape, on, rates)))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.sweep is not None and arguments.sweep < 1:
        raise ConfigError(f"--sweep: must be at least 1 GPU, got {arguments.sweep}")
    if arguments.link is not None and not 0 < arguments.link <= 1e6:
        raise ConfigError(f"--link: must be more than 0 and at most a million GB/s, got {arguments.link:g}")


def _calibrate(arguments: argparse.Namespace) -> int:
    from gdpo_nemo.planning.calibrate import calibrate, read_run

    runs = [read_run(folder) for folder in arguments.calibrate]
    on = _device(arguments, bool(runs[0].config.cluster.gpus_per_node))
    rates = calibrate(runs, on, _assumed(on))
    path = arguments.out or "calibration.json"
    save_rates(rates, path)
    say(f"{path}: {rates.describe()}")
    return 0


def _device(arguments: argparse.Namespace, gpu: bool) -> Device:
    return device(arguments.gpu, arguments.link and arguments.link * 1e9) if gpu else host()


def _assumed(on: Device) -> Rates:
    return CPU_RATES if on.name == host().name else Rates()
