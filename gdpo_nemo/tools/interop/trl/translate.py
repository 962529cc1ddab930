"""Translation of TRL scripts and arguments to gdpo_nemo configs, with a report on every field.

A script is read but never executed (``script.py``). Arguments are read from JSON or YAML files that TRL saves or that
`trl grpo --config` accepts. The first matching rule in ``keys.py`` translates a field. Fields that are not set get
TRL's defaults, which are written if they differ from gdpo_nemo's defaults. The translated config therefore behaves
as in TRL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gdpo_nemo.tools.interop.translation import Findings, RuleResult, Translation, assemble, short, write_text
from gdpo_nemo.tools.interop.trl.arguments import check_names, read_command_line
from gdpo_nemo.tools.interop.trl.defaults import MODEL_CONFIG, SCRIPT_ARGUMENTS
from gdpo_nemo.tools.interop.trl.keys import result_of
from gdpo_nemo.tools.interop.trl.machines import other_settings
from gdpo_nemo.tools.interop.trl.names import Unresolved
from gdpo_nemo.tools.interop.trl.objective import learning
from gdpo_nemo.tools.interop.trl.releases import (
    changed_before,
    older_arguments,
    older_fields,
    release_of,
    with_present_names,
)
from gdpo_nemo.tools.interop.trl.run import Reward, Rows, TrlRun
from gdpo_nemo.tools.interop.trl.script import lora_of_arguments, read_script, reward_model
from gdpo_nemo.tools.interop.trl.trainers import TRAINERS
from gdpo_nemo.utils.errors import ConfigError, first_line
from gdpo_nemo.utils.files import parse_json, parse_yaml, read_text

_BUILT_IN_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
"""Functions of ``trl.rewards`` that `trl grpo --reward_funcs` accepts by name."""
_ELSEWHERE = {
    "model": ("policy.model_name",),
    "reward_funcs": ("env", "gdpo.rewards"),
    "train_dataset": ("data.train.path",),
    "eval_dataset": ("data.validation.path",),
    "peft_config": ("policy.lora",),
    "rollout_func": ("rollout.function",),
    "tools": ("env", "rollout.turns"),
    "environment_factory": ("env", "rollout.turns"),
    "teacher_model": ("teacher.model_name",),
    "reward_model": ("env", "gdpo.rewards"),
    "ref_model": ("policy.model_name",),
    "processing_class": ("policy.tokenizer_name", "policy.model_name"),
}
"""Argument of the trainer -> gdpo_nemo keys that it determines."""
_NAMES = {"run.dir", "run.name", "logger", "logger.wandb.project"}
"""Keys that do not change the result."""
COMMANDS = {
    "grpo": "GRPOTrainer",
    "rloo": "RLOOTrainer",
    "sft": "SFTTrainer",
    "dpo": "DPOTrainer",
    "kto": "KTOTrainer",
    "reward": "RewardTrainer",
    "distillation": "DistillationTrainer",
}
"""Training command of `trl` -> its trainer."""


def translate_trl(
    sources: Sequence[str], out: str | None, processes: int = 1, options: Sequence[str] = ()
) -> Translation:
    """Translate a script, its arguments, or both.

    Args:
        sources: a .py file, or JSON and YAML files with arguments, or both. Later files take precedence. Instead of a
            script, the first source may be one of TRL's commands (``COMMANDS``).
        out: path of the config. Extracted rows and functions of the script are written next to the config. If ``out``
            is None, no file is written, and a config that requires such files is reported as ``cannot run``.
        processes: number of data-parallel processes with which TRL would be launched.
        options: command-line arguments of the script (``--NAME VALUE``), which take precedence over the files.

    Raises:
        ConfigError: if a source cannot be read, or contains an unknown field.
    """
    files = list(sources)
    command = files.pop(0) if files[0] in COMMANDS and not Path(files[0]).exists() else None
    scripts = [source for source in files if source.endswith((".py", ".ipynb"))]
    if len(scripts) > 1 or any(script.endswith(".ipynb") for script in scripts):
        raise ConfigError(f"{scripts[-1]}: only one script (.py) is supported, optionally with argument files")
    if scripts and command:
        raise ConfigError(f"{command}: only allowed with argument files; {scripts[0]} already defines its trainer")
    if processes < 1:
        raise ConfigError(f"--num-processes: must be at least 1, got {processes}")
    stem = str(Path(out or (files or [str(command)])[0]).with_suffix(""))
    arguments: dict[str, Any] = {}
    trainer = COMMANDS[command or "grpo"]
    for source in files:
        if source not in scripts:
            arguments |= _read_arguments(Path(source), None if scripts else trainer)
    given = read_command_line(options)
    if not scripts:
        _check_known("the command line", given, trainer)
    arguments |= given
    run = (
        read_script(scripts[0], arguments, stem, out is not None)
        if scripts
        else _run_of_arguments(arguments, trainer, stem)
    )
    run.processes = processes
    config = TRAINERS[run.trainer].config
    check_names(run.given, [*run.fields, *older_fields(config)], f"{config} does not have this field")
    run.release = release_of(config, {**arguments, **run.given})
    run.given = with_present_names(config, run.given)
    findings = Findings()
    _earlier_defaults(run, findings)
    learning(run, findings)
    other_settings(run, findings)
    if run.files and out is None:
        findings.blocks("--out", f"the config requires {', '.join(run.files)}, which --out writes to the same folder")
    for name, text in run.files.items() if out is not None else ():
        write_text(name, text)
    return assemble(_rule_results(run, findings), findings, "TRL", "from-trl")


def _earlier_defaults(run: TrlRun, findings: Findings) -> None:
    """Report unset fields whose default the release of an old script or file does not determine."""
    for key, ((major, minor), earlier) in changed_before(TRAINERS[run.trainer].config, run.release).items():
        rule = result_of(key, run.get(key), run)
        if key in run.given or rule is None or _is_idle(rule) or (key.startswith("vllm_") and not run.get("use_vllm")):
            continue
        findings.differs(
            key, f"the default was {short(earlier)} until TRL {major}.{minor}; {short(run.get(key))} is used; set {key}"
        )


def _rule_results(run: TrlRun, findings: Findings) -> dict[str, tuple[Any, RuleResult | None]]:
    """Return the results of the rules for all fields that are set, and for TRL's defaults that must be written."""
    results: dict[str, tuple[Any, RuleResult | None]] = {}
    for key, value in run.given.items():
        if isinstance(value, Unresolved):
            default = run.defaults.get(key)
            rule = result_of(key, default, run)
            matters = rule is None or not (_is_idle(rule) or (rule.elsewhere and set(rule.elsewhere) <= _NAMES))
            text = f"is only known when the script runs; TRL's default {default!r} is used"
            results[key] = (value, RuleResult(text=text, matters=matters))
        else:
            results[key] = (value, result_of(key, value, run))
    for key in run.fields:
        value = run.defaults[key]
        outcome = result_of(key, value, run)
        if key not in run.given and outcome is not None and (outcome.values or outcome.matters):
            outcome.text = f"{outcome.text}; TRL's default".removeprefix("; ")
            results[key] = (value, outcome)
    given = {"model": run.model, "reward_funcs": ", ".join(reward.name for reward in run.rewards) or None}
    given |= {"train_dataset": run.train.path, "peft_config": run.lora, "processing_class": run.tokenizer}
    given |= {"rollout_func": run.rollout.name if run.rollout else None, "teacher_model": run.teacher}
    given |= {"tools": ", ".join(tool.name for tool in run.tools) or None}
    given |= {"environment_factory": run.factory.name if run.factory else None}
    given |= {"ref_model": run.reference, "reward_model": run.reward_model}
    given |= {"eval_dataset": run.evaluation.path if run.evaluation else None, **run.others}
    for key, value in given.items():
        if value is not None and key not in results:
            results[key] = (value, _of_trainer(key, findings))
    return results


def _is_idle(rule: RuleResult) -> bool:
    """Return whether a rule states that the field does not change the training result."""
    return not (rule.values or rule.same or rule.matters or rule.elsewhere)


def _of_trainer(key: str, findings: Findings) -> RuleResult:
    if key in findings.blockers or key in findings.differences:
        return RuleResult(text=findings.blockers.get(key) or findings.differences[key], matters=True)
    return RuleResult(elsewhere=_ELSEWHERE.get(key, ()))


# -- arguments without a script ---------------------------------------------------------------------------------


def _read_arguments(path: Path, trainer: str | None) -> dict[str, Any]:
    """Read the fields in a JSON or YAML file, and check their names unless ``trainer`` is None."""
    try:
        text = read_text(path)
        content = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: is neither JSON nor YAML ({first_line(error)})") from None
    if not isinstance(content, Mapping) or not content:
        raise ConfigError(f"{path}: expected a mapping with fields of {TRAINERS[trainer or 'GRPOTrainer'].config}")
    named = {str(key): value for key, value in content.items()}
    if trainer is not None:
        _check_known(str(path), named, trainer)
    return {k: v for k, v in named.items() if not k.startswith(_INTERNAL_PREFIXES) and k not in _NOT_ARGUMENTS}


_INTERNAL_PREFIXES = ("_", "distributed_state")
_NOT_ARGUMENTS = ("env", "deepspeed_plugin")
"""Names in TRL's saved files that are not arguments."""


def _check_known(source: str, arguments: Mapping[str, Any], trainer: str) -> None:
    config = TRAINERS[trainer].config
    known = [*TRAINERS[trainer].defaults, *older_arguments(config), *SCRIPT_ARGUMENTS, *MODEL_CONFIG]
    known += ["datasets", *_NOT_ARGUMENTS]
    command = next(name for name, of in COMMANDS.items() if of == trainer)
    given = [key for key in arguments if not key.startswith(_INTERNAL_PREFIXES)]
    check_names(given, known, f"not an option of {config} or `trl {command}`", f"{source}: ")


def _run_of_arguments(arguments: Mapping[str, Any], trainer: str, stem: str) -> TrlRun:
    """Return the run that a command in ``COMMANDS`` would start with these arguments."""
    fields = (*TRAINERS[trainer].defaults, *older_fields(TRAINERS[trainer].config))
    run = TrlRun({key: value for key, value in arguments.items() if key in fields}, trainer=trainer, stem=stem)
    run.model = arguments.get("model_name_or_path")
    run.lora = lora_of_arguments(arguments)
    dtype = arguments.get("dtype", arguments.get("torch_dtype"))
    if dtype is not None:
        run.given.setdefault("model_init_kwargs", {"dtype": dtype})
    if arguments.get("load_in_4bit") or arguments.get("load_in_8bit"):
        run.notes["quantization_config"] = "load_in_4bit or load_in_8bit"
    run.rewards = [_named(str(name)) for name in arguments.get("reward_funcs") or ()]
    if arguments.get("reward_model_name_or_path"):
        run.rewards.insert(0, reward_model(str(arguments["reward_model_name_or_path"])))
    _rows_of_arguments(run, arguments)
    return run


def _rows_of_arguments(run: TrlRun, arguments: Mapping[str, Any]) -> None:
    name = arguments.get("dataset_name")
    if arguments.get("datasets"):
        run.train = Rows(problem="dataset mixtures are not supported; set data.train.path to a list")
    elif name is None:
        run.train = Rows(problem="the arguments do not specify a dataset (dataset_name)")
    else:
        configuration = arguments.get("dataset_config")
        path = f"{name}:{configuration}" if configuration else name
        run.train = Rows(path=path, split=arguments.get("dataset_train_split", "train"))
        if str(run.get("eval_strategy")) != "no":
            run.evaluation = Rows(path=path, split=arguments.get("dataset_test_split", "test"))


def _named(name: str) -> Reward:
    """Return a reward function, given its name or import path as in `trl grpo --reward_funcs`."""
    if name in _BUILT_IN_REWARDS:
        return Reward(name, f"trl.rewards.{name}")
    if "." in name:
        return Reward(name.rpartition(".")[2], name)
    return Reward(
        name, problem="is not an importable function; write a function that returns get_soft_overlong_punishment(...)"
    )
