"""Arguments and output functions shared by several commands, and configs of policies outside a run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gdpo_nemo.config.layout import resolve_layout
from gdpo_nemo.config.model_checks import check_model, local_model_config
from gdpo_nemo.config.requirements import check_requirements
from gdpo_nemo.config.schema import Config, MegatronConfig
from gdpo_nemo.observe.display import NORMAL, QUIET, VERBOSE
from gdpo_nemo.utils.errors import ConfigError, printable, printable_lines
from gdpo_nemo.utils.source import DEMO as DEFAULT_CONFIG

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment


type Commands = argparse._SubParsersAction[argparse.ArgumentParser]
"""Type of the ``commands`` argument of each command's ``add`` function."""


class Parser(argparse.ArgumentParser):
    """Argument parser that prints one error line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Print the error line and exit with status 2."""
        self.exit(2, f"error: {printable(message)} (see {self.prog} --help)\n")


def add_config(command: argparse.ArgumentParser) -> None:
    """Add ``--config`` and ``section.key=value`` overrides."""
    command.add_argument(
        "--config",
        default=str(DEFAULT_CONFIG),
        metavar="FILE",
        help="config file (default: the demo, configs/gdpo_tiny_cpu.yaml)",
    )
    add_overrides(command)


def add_overrides(command: argparse.ArgumentParser, description: str = "changes to the config") -> None:
    """Add ``section.key=value`` arguments, which may be repeated and mixed with options."""
    command.add_argument("overrides", nargs="*", metavar="section.key=value", help=description)


def add_verbosity(command: argparse.ArgumentParser) -> None:
    """Add ``--quiet`` and ``--verbose``, which control how much output is shown."""
    group = command.add_mutually_exclusive_group()
    group.add_argument("--quiet", "-q", action="store_true", help="show only errors and the final summary")
    group.add_argument("--verbose", "-v", action="store_true", help="show every phase with its time")


def verbosity(arguments: argparse.Namespace) -> int:
    """Return the display level (QUIET, NORMAL or VERBOSE) that the user requested."""
    if arguments.quiet:
        return QUIET
    return VERBOSE if arguments.verbose else NORMAL


def add_layout(command: argparse.ArgumentParser) -> None:
    """Add ``--layout`` and ``--precision``, the parallel layout and data type of a policy."""
    command.add_argument(
        "--layout",
        default="",
        metavar="SIZES",
        help="parallel layout, for example tensor=2,pipeline=2,sequence (default: one rank)",
    )
    command.add_argument(
        "--precision",
        default="float32",
        choices=("float32", "bfloat16"),
        help="data type of the policy (default: %(default)s)",
    )


def between(kind: Callable[[str], float], low: float, high: float) -> Callable[[str], float]:
    """Return an argument type for numbers of ``kind`` from ``low`` to ``high``."""

    def number(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be between {low} and {high}, got {text}")
        return value

    return number


def rollout_file(path: str) -> str:
    """Return the path of a rollout file.

    Older runs have JSONL files. If ``path`` is a missing JSONL file and its Parquet file exists, return the Parquet
    path and print a note.
    """
    parquet = Path(path).with_suffix(".parquet")
    if not path.endswith(".jsonl") or Path(path).exists() or not parquet.exists():
        return path
    say(f"note: {path} was replaced by {parquet.name}", to_stderr=True)
    return str(parquet)


def terminal() -> Console:
    """Return a rich console for standard output.

    The console has 120 columns if the output is not a terminal and COLUMNS is not set. Control characters in the text
    are escaped, except control characters that rich generates for styles.
    """
    from rich.console import Console
    from rich.segment import Segment

    class Plain(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                text = segment.text if segment.control else printable_lines(segment.text)
                yield segment if text == segment.text else Segment(text, segment.style)

    # Names in tables may contain brackets or colons, which rich would read as styles and emoji.
    return Plain(markup=False, emoji=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)


def say(text: object, *, to_stderr: bool = False, end: str = "\n") -> None:
    """Print ``text`` and flush. Control characters are escaped, because a terminal would execute them."""
    print(printable_lines(str(text)), file=sys.stderr if to_stderr else sys.stdout, end=end, flush=True)


SIZES = {
    "tensor": "tensor_model_parallel_size",
    "pipeline": "pipeline_model_parallel_size",
    "virtual": "virtual_pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
    "data": "data_parallel_size",
}
FLAGS = {"sequence": "sequence_parallel", "distributed": "use_distributed_optimizer"}


def parse_layout(text: str) -> MegatronConfig:
    """Parse a layout such as ``tensor=2,pipeline=2,sequence``. An empty string means one rank.

    Raises:
        ConfigError: if a name is unknown or a size is not a positive number.
    """
    fields: dict[str, Any] = {"data_parallel_size": 1}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        if name in FLAGS and not value:
            fields[FLAGS[name]] = True
        elif name in SIZES and value.isdigit() and int(value) > 0:
            fields[SIZES[name]] = int(value)
        else:
            known = ", ".join([*(f"{size}=N" for size in SIZES), *FLAGS])
            raise ConfigError(f"--layout: {part.strip()!r} is not one of {known}")
    return MegatronConfig(**fields)


def standalone_config(
    model: str | Path, layout: str = "", precision: str = "float32", longest: int | None = None
) -> Config:
    """Return a config for the policy ``model`` in ``layout`` on this machine's GPUs or, without CUDA, its CPU.

    The config does not contain engines, so the policy may use every GPU. ``with_engine`` converts this config to the
    config of an engine.

    Args:
        longest: maximum sequence length in tokens. None means the model's context length.

    Raises:
        ConfigError: if the model does not exist, cannot be divided by the layout, or there are fewer GPUs than ranks.
    """
    import torch

    config = Config()
    config.policy.model_name = str(model)
    config.policy.precision = precision
    config.policy.megatron_cfg = parse_layout(layout)
    config.policy.generation.engines = 0
    config.gdpo.rewards = {"none": 1.0}
    content = local_model_config(config.policy)
    if content is None:
        raise ConfigError(f"{model}: model folder not found")
    positions = content.get("max_position_embeddings") or 4096
    config.policy.max_total_sequence_length = min(longest or positions, positions)
    if torch.cuda.is_available():
        config.cluster.gpus_per_node = torch.cuda.device_count()
    check_requirements(config)
    resolved = resolve_layout(config)
    check_model(config.policy, resolved)
    config.policy.megatron_cfg = replace(config.policy.megatron_cfg, data_parallel_size=resolved.data)
    return config


def with_engine(config: Config) -> Config:
    """Return the config of a single-rank engine on the same machine, for the same model and without a policy."""
    generation = replace(config.policy.generation, engines=1)
    return replace(config, policy=replace(config.policy, generation=generation))
