"""``gdpo-nemo simulate``: the schedule of a config's rollouts and training, before it is run."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Callable

from gdpo_nemo.commands.arguments import add_config, say
from gdpo_nemo.config.algorithm_choice import samples
from gdpo_nemo.config.layout import resolve_layout
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.planning.fit import changed
from gdpo_nemo.planning.hardware import CPU_RATES, Device, Rates, device, host, load_rates
from gdpo_nemo.planning.scenarios import Given, scaled, scenario_of
from gdpo_nemo.planning.shape import Shape, model_shape
from gdpo_nemo.planning.simulation import simulate
from gdpo_nemo.planning.simulation_records import KV, SCHEDULERS, Draw, Scenario
from gdpo_nemo.planning.simulation_report import (
    Change,
    Row,
    account,
    candidates,
    limit,
    mend_lines,
    mends,
    scaling,
    table,
)
from gdpo_nemo.validation import validate

_MOST_STEPS = 10_000
_DESCRIPTION = """\
Play a config's rollouts and training as events, on the plan's roofline, on the speeds of a finished run (--run) or on
speeds given one by one: seconds per step, who waits, how stale samples are, what sets the pace, what would mend it."""


def add(commands) -> None:
    """Register the command."""
    command = commands.add_parser(
        "simulate",
        help="rollouts and training in time: who waits for whom, at which staleness",
        description=_DESCRIPTION,
    )
    add_config(command)
    _add_what(command)
    _add_speeds(command.add_argument_group("speeds, in place of the roofline's or the run's"))
    _add_schedule(command.add_argument_group("schedule, in place of the config's"))
    command.set_defaults(command=run)


def _add_what(command) -> None:
    command.add_argument("--run", metavar="RUN_DIR", help="config, speeds and lengths of a finished run")
    command.add_argument(
        "--gpu", default="h100", metavar="NAME", help="a100, h100, h200 or b200 (default: %(default)s)"
    )
    command.add_argument("--link", type=_number(), metavar="GB/S", help="network of one GPU to other nodes")
    command.add_argument("--calibration", metavar="FILE", help="speeds that `plan --calibrate` measured")
    command.add_argument("--staleness", type=_list(int, 0), metavar="S,...",
                         help="bounds to try (default: 0,1,2,4 and the config's)")  # fmt: skip
    command.add_argument("--gpus", type=_list(int, 1), metavar="N,...", help="numbers of GPUs to try")
    command.add_argument("--split", type=_list(float, 0), metavar="SHARE,...",
                         help="shares of the GPUs that sample (default: the config's)")  # fmt: skip
    command.add_argument("--scheduler", type=_names, default=["continuous"], metavar="NAME,...",
                         help="continuous (groups one by one), barrier (whole batches; for comparison)")  # fmt: skip
    command.add_argument("--steps", type=_number(1, _MOST_STEPS, int), default=20,
                         help="steps to play; the second half is measured (default: %(default)s)")  # fmt: skip
    command.add_argument("--seed", type=_number(0, kind=int), default=0, help="of the lengths (default: %(default)s)")
    command.add_argument("--png", metavar="FILE", help="draw seconds over staleness, and some steps in time")
    command.add_argument("--json", action="store_true", help="print one JSON object in place of text")


def _add_speeds(group) -> None:
    for name, what in (
        ("--decode-ms", "milliseconds of a decoding step"),
        ("--per-sequence-ms", "milliseconds that each sequence adds to it"),
        ("--train-s", "seconds of a step's training"),
        ("--publish-s", "seconds of a publication"),
        ("--median", "median tokens of a completion"),
        ("--mean", "mean tokens of a completion, in place of the median"),
        ("--sigma", "spread of their logarithm (default: 1)"),
        ("--cap", "longest completion in tokens"),
        ("--prompt", "tokens of a prompt"),
        ("--verify-s", "mean seconds that judging a sample takes"),
        ("--verify-sigma", "spread of their logarithm (default: 0)"),
        ("--turn-s", "seconds between two turns"),
    ):
        group.add_argument(name, type=_number(), help=what)
    group.add_argument("--verify-workers", type=_number(1, kind=int), help="samples judged at once (default: all)")
    group.add_argument("--turns", type=_number(1, kind=int), help="turns of a sample")


def _add_schedule(group) -> None:
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


def _list(kind: Callable[[str], float], least: float) -> Callable[[str], list]:
    one = _number(least, kind=kind)
    return lambda text: sorted({one(part) for part in text.split(",")})


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
    """Where scenarios come from: a config, on a device, with rates, options and perhaps a run's lengths."""

    def __init__(self, arguments: argparse.Namespace):
        names = Given.__dataclass_fields__
        given = {name: getattr(arguments, name) for name in names if getattr(arguments, name, None) is not None}
        self.given = Given(**given)
        self.lengths: Draw | None = None
        self.arguments = arguments
        if arguments.run:
            self._measured(arguments.run)
        else:
            self._assumed()

    def _assumed(self) -> None:
        arguments = self.arguments
        self.config = load_config(arguments.config, arguments.overrides)
        self._check()
        self.shape = None if self.given.complete else self._shape()
        self.device = self._device()
        assumed = CPU_RATES if self.device.name == host().name else Rates()
        self.rates = load_rates(arguments.calibration) if arguments.calibration else assumed

    def _measured(self, folder: str) -> None:
        from gdpo_nemo.planning.calibrate import calibrate, read_run, sampled_lengths

        run = read_run(folder, "--run")
        overrides = self.arguments.overrides
        self.config = load_config(Path(folder) / "config.yaml", overrides) if overrides else run.config
        self._check()
        self.shape = run.shape
        self.device = self._device()
        self.rates = calibrate([run], self.device, CPU_RATES if self.device.name == host().name else Rates())
        if self.given.median is None and self.given.mean is None:
            self.lengths = sampled_lengths(run)

    def _check(self) -> None:
        validate(self.config)
        if not samples(self.config):
            raise ConfigError(
                f"algorithm.type: {self.config.algorithm.type} does not sample; the simulation is of runs that do"
            )

    def _shape(self) -> Shape:
        shape = model_shape(self.config)
        if shape is None:
            raise ConfigError(
                f"policy.model_name: the shape of {self.config.policy.model_name} is not known here; give a folder "
                "that holds its config.json, or --decode-ms, --train-s and --publish-s"
            )
        return shape

    def _device(self) -> Device:
        gpu = bool(self.config.cluster.gpus_per_node)
        return device(self.arguments.gpu, self.arguments.link and self.arguments.link * 1e9) if gpu else host()

    def scenario(self, config: Config, **changes) -> Scenario:
        """Of ``config``, checked."""
        scenario = scenario_of(config, self.shape, self.device, self.rates, self.given, self.lengths)
        scenario = scenario.changed(steps=self.arguments.steps, seed=self.arguments.seed, **changes)
        try:
            scenario.check()
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return scenario

    def describe(self) -> str:
        """What the seconds rest on."""
        given = [name for name, value in vars(self.given).items() if value not in (None, 0.0)]
        words = [] if self.given.complete else [self.rates.describe()]
        return "; ".join([*words, *([f"given: {', '.join(given)}"] if given else [])])


def run(arguments: argparse.Namespace) -> int:
    """Simulate what is asked and print it.

    Raises:
        ConfigError: of the config or the options.
    """
    if arguments.run and arguments.calibration:
        raise ConfigError("--calibration: --run brings its own speeds; give one of them")
    source = _Source(arguments)
    configs = _configs(source)
    rows = [row for config in configs for row in _rows(source, config)]
    shown = _shown(source, rows)
    changes = [*candidates(shown.result), *_layouts(source, configs[-1], shown)]
    found = mends(shown.result, changes)
    lines = [*account(shown), *mend_lines(shown.result, found)]
    grown = scaling([row for row in rows if _like(row, shown)]) if arguments.gpus else []
    if arguments.json:
        tried = [{"change": words, **other.account()} for words, other in found]
        content = {"rows": [row.record() for row in rows], "account": account(shown), "mends": tried}
        print(json.dumps({**content, "scaling": grown, "assumes": source.describe()}, indent=1))
    else:
        say(table(rows))
        say("\n".join(["", *lines, *grown, "", f"assumes    {source.describe()}"]))
    if arguments.png:
        _draw(arguments, source, rows, shown)
    return 0


def _configs(source: _Source) -> list[Config]:
    """The config on every number of GPUs and at every split."""
    arguments = source.arguments
    if not arguments.gpus and not arguments.split:
        return [source.config]
    return [
        scaled(source.config, gpus, split) for gpus in arguments.gpus or [None] for split in arguments.split or [None]
    ]


def _rows(source: _Source, config: Config) -> list[Row]:
    own = config.rollout.max_staleness
    bounds = source.arguments.staleness or sorted({0, 1, 2, 4, own})
    rows = []
    for scheduler in source.arguments.scheduler:
        for staleness in bounds:
            rollout = replace(config.rollout, max_staleness=staleness)
            changes: dict = {"scheduler": scheduler}
            if staleness == 0:  # one batch in order, whatever the others leave room for
                changes |= {"window": 1, "depth": "auto"}
            elif staleness != own and not source.arguments.staleness and source.given.depth is None:
                changes |= {"depth": "auto"}
            rows.append(_row(config, source.scenario(replace(config, rollout=rollout), **changes)))
    return rows


def _row(config: Config, scenario: Scenario) -> Row:
    layout = resolve_layout(config)
    return Row(layout.devices + layout.idle_gpus if layout.gpus else 0, layout.engine_tensor, simulate(scenario))


def _shown(source: _Source, rows: list[Row]) -> Row:
    """The run that is explained: the config's own staleness on the most GPUs, or else the last one."""
    own = [
        row
        for row in rows
        if row.result.scenario.max_staleness == source.config.rollout.max_staleness
        and row.result.scenario.scheduler == source.arguments.scheduler[0]
    ]
    return (own or rows)[-1]


def _like(row: Row, shown: Row) -> bool:
    one, other = row.result.scenario, shown.result.scenario
    return (one.max_staleness, one.scheduler) == (other.max_staleness, other.scheduler)


def _layouts(source: _Source, config: Config, shown: Row) -> list[Change]:
    """The same GPUs divided otherwise: wider engines, more and fewer engines."""
    layout = resolve_layout(config)
    scenario = shown.result.scenario
    if not layout.gpus or layout.colocated or source.shape is None:
        return []
    found = []
    tensor = 2 * layout.engine_tensor
    wide = source.given.decode_ms is None and tensor <= config.cluster.gpus_per_node and layout.engines > 1
    if wide and source.shape.heads % tensor == 0:
        engines = layout.engines // 2
        other = changed(config, generation__engines=engines, generation__vllm_cfg__tensor_parallel_size=tensor)
        found.append((f"engines of tensor_parallel_size {tensor}, {engines} of them", other))
    found += _splits(config, more=limit(shown.result) in ("engines", "tail"))
    chosen = {name: getattr(scenario, name) for name in ("scheduler", "max_staleness", "window", "depth")}
    return [Change(words, source.scenario(other, **chosen)) for words, other in found]


def _splits(config: Config, more: bool) -> list[tuple[str, Config]]:
    """The next two splits of the same GPUs with more engines, or with fewer."""
    layout = resolve_layout(config)
    gpus = layout.devices + layout.idle_gpus
    found: dict[int, tuple[str, Config]] = {}
    for share in (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875):
        try:
            other = scaled(config, gpus, share)
        except ConfigError:
            continue  # no room for a replica or an engine
        engines = other.policy.generation.engines
        if engines != layout.engines and (engines > layout.engines) == more:
            found[engines] = f"policy.generation.engines={engines} ({share:.1%} of the GPUs sample)", other
    return [found[engines] for engines in sorted(found, reverse=not more)[:2]]


def _draw(arguments: argparse.Namespace, source: _Source, rows: list[Row], shown: Row) -> None:
    from gdpo_nemo.planning.simulation_plot import draw

    traced = simulate(shown.result.scenario.changed(trace=True))
    on = f"{shown.gpus} x {source.device.name}" if shown.gpus else source.device.name
    try:
        path = draw(rows, traced, f"{source.config.run.name}, simulated on {on}", arguments.png)
    except OSError as error:
        raise ConfigError(f"--png: {arguments.png} cannot be written ({error.strerror})") from None
    if not arguments.json:
        say(f"figure     {path}")
