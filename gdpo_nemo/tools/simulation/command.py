"""``gdpo-nemo simulate``: simulate the schedule of a config's rollouts and training before a run."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from gdpo_nemo.commands.arguments import Commands, add_config, say
from gdpo_nemo.config.layout import Layout, Resolved
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.schema import Config
from gdpo_nemo.models.description import ModelDescription
from gdpo_nemo.planning.fit import changed
from gdpo_nemo.planning.hardware import Device, assumed_rates, device, host, load_rates
from gdpo_nemo.planning.shape import model_shape
from gdpo_nemo.tools.simulation.records import KV, SCHEDULERS, Distribution, Scenario
from gdpo_nemo.tools.simulation.report import (
    Change,
    Row,
    candidates,
    describe_bottleneck,
    describe_changes,
    helpful_changes,
    limit,
    scaling,
    table,
)
from gdpo_nemo.tools.simulation.scenarios import Overrides, scaled, scenario_from
from gdpo_nemo.tools.simulation.simulation import simulate
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError

_MOST_STEPS = 10_000
_DESCRIPTION = """\
Simulate the rollouts and training of a config as discrete events. Speeds come from the plan's roofline model, from a
finished run (--run) or from options. The report shows seconds per step, waiting times, staleness, the bottleneck, and
changes that relieve it."""


def add(commands: Commands) -> None:
    """Register the command."""
    command = commands.add_parser(
        "simulate",
        help="simulate rollouts and training over time: waits, staleness and bottlenecks",
        description=_DESCRIPTION,
    )
    add_config(command)
    _add_scope(command)
    _add_speeds(command.add_argument_group("speeds, which replace the speeds of the roofline model or the run"))
    _add_schedule(command.add_argument_group("schedule settings, which replace the config's settings"))
    command.set_defaults(command=run)


def _add_scope(command: argparse.ArgumentParser) -> None:
    command.add_argument("--run", metavar="RUN_DIR", help="finished run that provides config, speeds and lengths")
    command.add_argument(
        "--gpu", default="h100", metavar="NAME", help="GPU type: a100, h100, h200 or b200 (default: %(default)s)"
    )
    command.add_argument("--link", type=_number(), metavar="GB/S", help="network bandwidth of one GPU to other nodes")
    command.add_argument("--calibration", metavar="FILE", help="file with speeds measured by `plan --calibrate`")
    command.add_argument("--staleness", type=_list(int, 0), metavar="S,...",
                         help="values of max_staleness to try (default: 0, 1, 2, 4 and the config's)")  # fmt: skip
    command.add_argument("--gpus", type=_list(int, 1), metavar="N,...", help="numbers of GPUs to try")
    command.add_argument("--split", type=_list(float, 0), metavar="FRACTION,...",
                         help="fractions of the GPUs that run engines (default: the config's value)")  # fmt: skip
    command.add_argument("--scheduler", type=_names, default=["continuous"], metavar="NAME,...",
                         help="continuous (individual groups) or barrier (whole batches, for comparison)")  # fmt: skip
    command.add_argument("--steps", type=_number(1, _MOST_STEPS, int), default=20,
                         help="number of steps to simulate, of which the second half is measured (default: "
                             "%(default)s)")  # fmt: skip
    command.add_argument(
        "--seed", type=_number(0, kind=int), default=0, help="random seed for lengths (default: %(default)s)"
    )
    command.add_argument(
        "--png", metavar="FILE", help="save a plot with step time over staleness and a timeline of a few steps"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _add_speeds(group: argparse._ArgumentGroup) -> None:
    for name, description in (
        ("--decode-ms", "milliseconds per decoding step"),
        ("--per-sequence-ms", "additional milliseconds per decoding step for each sequence"),
        ("--train-s", "training seconds per step"),
        ("--publish-s", "seconds per weight update"),
        ("--median", "median completion length in tokens"),
        ("--mean", "mean completion length in tokens, instead of the median"),
        ("--sigma", "standard deviation of the logarithm of completion lengths (default: 1)"),
        ("--cap", "maximum completion length in tokens"),
        ("--prompt", "prompt length in tokens"),
        ("--verify-s", "mean seconds to verify a sample"),
        ("--verify-sigma", "standard deviation of the logarithm of verification times (default: 0)"),
        ("--turn-s", "seconds between two turns of a sample"),
    ):
        group.add_argument(name, type=_number(), help=description)
    group.add_argument(
        "--verify-workers",
        type=_number(1, kind=int),
        help="number of samples verified in parallel (default: unlimited)",
    )
    group.add_argument("--turns", type=_number(1, kind=int), help="number of turns per sample")


def _add_schedule(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--window", type=_number(1, kind=int), metavar="W", help="rollout.window")
    group.add_argument("--depth", type=_depth, metavar="auto|GROUPS", help="rollout.depth")
    group.add_argument("--kv", choices=KV, help="rollout.kv")
    group.add_argument("--group-timeout-s", type=_number(), metavar="S", help="rollout.group_timeout_s")


# -- options -----------------------------------------------------------------------------------------------------------


def _number(least: float = 0, most: float = inf, kind: Callable[[str], float] = float) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {'a whole' if kind is int else 'a'} number") from None
        if not least <= value <= most or value == inf:
            limit = f"at least {least}" if most == inf else f"between {least} and {most}"
            raise argparse.ArgumentTypeError(f"must be {limit}, got {text}")
        return value

    return convert


def _list(kind: Callable[[str], float], least: float) -> Callable[[str], list[float]]:
    convert = _number(least, kind=kind)
    return lambda text: sorted({convert(part) for part in text.split(",")})


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in SCHEDULERS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(SCHEDULERS)}")
    return names


def _depth(text: str) -> int | str:
    return text if text == "auto" else int(_number(1, kind=int)(text))


# -- the command -------------------------------------------------------------------------------------------------------


class _Source:
    """Config, device, speeds and options from which scenarios are created, and the sample lengths of a run, if any."""

    def __init__(self, arguments: argparse.Namespace):
        names = Overrides.__dataclass_fields__
        overrides = {name: getattr(arguments, name) for name in names if getattr(arguments, name, None) is not None}
        self.overrides = Overrides(**overrides)
        self.lengths: Distribution | None = None
        self.arguments = arguments
        if arguments.run:
            self._load_run(arguments.run)
        else:
            self._load_config()

    def _load_config(self) -> None:
        arguments = self.arguments
        self.resolved = self._check(load_config(arguments.config, arguments.overrides))
        self.shape = None if self.overrides.complete else self._shape()
        self.device = self._device()
        assumed = assumed_rates(self.device)
        self.rates = load_rates(arguments.calibration) if arguments.calibration else assumed

    def _load_run(self, folder: str) -> None:
        from gdpo_nemo.planning.calibrate import calibrate, read_run, sampled_lengths

        run = read_run(folder, "--run")
        key_values = self.arguments.overrides
        config = load_config(Path(folder) / "config.yaml", key_values) if key_values else run.resolved.config
        self.resolved = self._check(config)
        self.shape = run.shape
        self.device = self._device()
        self.rates = calibrate([run], self.device, assumed_rates(self.device))
        if self.overrides.median is None and self.overrides.mean is None:
            self.lengths = sampled_lengths(run)

    @staticmethod
    def _check(config: Config) -> Resolved:
        resolved = validate(config, weights=False)
        if not resolved.algorithm.samples:
            raise ConfigError(
                f"algorithm.type: {config.algorithm.type} does not sample; simulate supports only algorithms "
                "that sample"
            )
        return resolved

    def _shape(self) -> ModelDescription:
        shape = model_shape(self.resolved)
        if shape is None:
            raise ConfigError(
                f"policy.model_name: the shape of {self.resolved.config.policy.model_name} is unknown; specify a "
                "folder that contains its config.json, or --decode-ms, --train-s and --publish-s"
            )
        return shape

    def _device(self) -> Device:
        gpu = bool(self.resolved.config.cluster.gpus_per_node)
        return device(self.arguments.gpu, self.arguments.link and self.arguments.link * 1e9) if gpu else host()

    def scenario(self, resolved: Resolved, **changes: Any) -> Scenario:
        """Return the validated scenario of a config. ``changes`` replace settings of the scenario."""
        scenario = scenario_from(resolved, self.shape, self.device, self.rates, self.overrides, self.lengths)
        scenario = scenario.changed(steps=self.arguments.steps, seed=self.arguments.seed, **changes)
        try:
            scenario.check()
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return scenario

    def describe(self) -> str:
        """Describe the origin of the speeds."""
        overrides = [name for name, value in vars(self.overrides).items() if value not in (None, 0.0)]
        words = [] if self.overrides.complete else [self.rates.describe()]
        return "; ".join([*words, *([f"given: {', '.join(overrides)}"] if overrides else [])])


def run(arguments: argparse.Namespace) -> int:
    """Run the requested simulations and print the results.

    Raises:
        ConfigError: if the config or the options are invalid.
    """
    if arguments.run and arguments.calibration:
        raise ConfigError("--calibration: conflicts with --run, which provides speeds; use one of these options")
    source = _Source(arguments)
    configs = _configs(source)
    rows = list(itertools.chain.from_iterable(_rows(source, config) for config in configs))
    shown = _detailed_row(source, rows)
    changes = [*candidates(shown.result), *_layouts(source, configs[-1], shown)]
    found = helpful_changes(shown.result, changes)
    lines = [*describe_bottleneck(shown), *describe_changes(shown.result, found)]
    scaling_lines = scaling([row for row in rows if _same_schedule(row, shown)]) if arguments.gpus else []
    if arguments.json:
        tried = [{"change": words, **other.figures()} for words, other in found]
        content = {"rows": [row.record() for row in rows], "account": describe_bottleneck(shown), "mends": tried}
        print(json.dumps({**content, "scaling": scaling_lines, "assumes": source.describe()}, indent=1))
    else:
        say(table(rows))
        say("\n".join(["", *lines, *scaling_lines, "", f"assumes    {source.describe()}"]))
    if arguments.png:
        _draw(arguments, source, rows, shown)
    return 0


def _configs(source: _Source) -> list[Resolved]:
    """Return the config for each requested number of GPUs and each split."""
    arguments = source.arguments
    if not arguments.gpus and not arguments.split:
        return [source.resolved]
    sizes = itertools.product(arguments.gpus or [None], arguments.split or [None])
    return [scaled(source.resolved, gpus, split) for gpus, split in sizes]


def _rows(source: _Source, resolved: Resolved) -> list[Row]:
    config = resolved.config
    configured = config.rollout.max_staleness
    bounds = source.arguments.staleness or sorted({0, 1, 2, 4, configured})
    rows = []
    for scheduler in source.arguments.scheduler:
        for staleness in bounds:
            rollout = replace(config.rollout, max_staleness=staleness)
            changes: dict[str, Any] = {"scheduler": scheduler}
            if staleness == 0:  # one batch in order, whatever window and depth are
                changes |= {"window": 1, "depth": "auto"}
            elif staleness != configured and not source.arguments.staleness and source.overrides.depth is None:
                changes |= {"depth": "auto"}
            variant = replace(resolved, config=replace(config, rollout=rollout))
            rows.append(_row(resolved.layout, source.scenario(variant, **changes)))
    return rows


def _row(layout: Layout, scenario: Scenario) -> Row:
    return Row(layout.devices + layout.idle_gpus if layout.gpus else 0, layout.engine_tensor, simulate(scenario))


def _detailed_row(source: _Source, rows: list[Row]) -> Row:
    """Return the run to describe: the last run with the config's staleness, otherwise the last run."""
    configured = source.resolved.config.rollout.max_staleness, source.arguments.scheduler[0]
    for row in reversed(rows):
        scenario = row.result.scenario
        if (scenario.max_staleness, scenario.scheduler) == configured:
            return row
    return rows[-1]


def _same_schedule(row: Row, shown: Row) -> bool:
    first, second = row.result.scenario, shown.result.scenario
    return (first.max_staleness, first.scheduler) == (second.max_staleness, second.scheduler)


def _layouts(source: _Source, resolved: Resolved, shown: Row) -> list[Change]:
    """Return changes of the layout on the same GPUs: wider engines, and more or fewer engines."""
    config = resolved.config
    layout = resolved.layout
    scenario = shown.result.scenario
    if not layout.gpus or layout.colocated or source.shape is None:
        return []
    found = []
    tensor = 2 * layout.engine_tensor
    wide = source.overrides.decode_ms is None and tensor <= config.cluster.gpus_per_node and layout.engines > 1
    if wide and source.shape.heads % tensor == 0:
        engines = layout.engines // 2
        other = changed(config, generation__engines=engines, generation__vllm_cfg__tensor_parallel_size=tensor)
        words = f"{engines} engines with tensor_parallel_size {tensor}"
        found.append((words, resolved.changed(other)))
    found += _splits(resolved, more=limit(shown.result) in ("engines", "tail"))
    chosen = {name: getattr(scenario, name) for name in ("scheduler", "max_staleness", "window", "depth")}
    return [Change(words, source.scenario(other, **chosen)) for words, other in found]


def _splits(resolved: Resolved, more: bool) -> list[tuple[str, Resolved]]:
    """Return the two closest splits of the same GPUs with more or, if ``more`` is false, fewer engines."""
    layout = resolved.layout
    gpus = layout.devices + layout.idle_gpus
    found: dict[int, tuple[str, Resolved]] = {}
    for share in (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875):
        try:
            other = scaled(resolved, gpus, share)
        except ConfigError:
            continue  # too few GPUs for a replica or an engine
        engines = other.layout.engines
        if engines != layout.engines and (engines > layout.engines) == more:
            found[engines] = f"policy.generation.engines={engines} ({share:.1%} of the GPUs for sampling)", other
    return [found[engines] for engines in sorted(found, reverse=not more)[:2]]


def _draw(arguments: argparse.Namespace, source: _Source, rows: list[Row], shown: Row) -> None:
    from gdpo_nemo.tools.simulation.report import draw

    traced = simulate(shown.result.scenario.changed(trace=True))
    on = f"{shown.gpus} x {source.device.name}" if shown.gpus else source.device.name
    try:
        path = draw(rows, traced, f"{source.resolved.config.run.name}, simulated on {on}", arguments.png)
    except OSError as error:
        raise ConfigError(f"--png: {arguments.png} cannot be written ({error.strerror})") from None
    if not arguments.json:
        say(f"figure     {path}")
