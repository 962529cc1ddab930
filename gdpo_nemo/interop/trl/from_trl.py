"""TRL's scripts and arguments as configs of this project, with what became of every key.

A script is read, never run (``trl_script.py``); arguments come from the JSON or YAML that TRL saves, or that `trl grpo
--config` takes. Each field that is given meets the first rule of the table (``trl_keys.py``); TRL's default stands for
the others, and is written where ours is another, so that the config means what TRL would do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping, Sequence

import yaml

from gdpo_nemo.config.messages import first_line
from gdpo_nemo.config.reading import parse_json, parse_yaml, read_text
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.interop.account import Account
from gdpo_nemo.interop.rules import RuleResult
from gdpo_nemo.interop.translation import Translation, assembled, write_text
from gdpo_nemo.interop.trl.script_arguments import did_you_mean, read_command_line
from gdpo_nemo.interop.trl.script_models import lora_of_arguments, reward_model
from gdpo_nemo.interop.trl.static_names import Unresolved
from gdpo_nemo.interop.trl.trl_defaults import MODEL_CONFIG, SCRIPT_ARGUMENTS
from gdpo_nemo.interop.trl.trl_keys import said_of
from gdpo_nemo.interop.trl.trl_machines import surroundings
from gdpo_nemo.interop.trl.trl_objective import learning
from gdpo_nemo.interop.trl.trl_run import Reward, Rows, TrlRun
from gdpo_nemo.interop.trl.trl_script import read_script
from gdpo_nemo.interop.trl.trl_trainers import OLDER, TRAINERS

_BUILT_IN_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
"""Names that `trl grpo --reward_funcs` knows, from ``trl.rewards``."""
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
"""Arguments of the trainer -> the keys here that they make."""
_NAMES = {"run.dir", "run.name", "logger", "logger.wandb.project"}
"""Keys that change no result."""
COMMANDS = {
    "grpo": "GRPOTrainer",
    "rloo": "RLOOTrainer",
    "sft": "SFTTrainer",
    "dpo": "DPOTrainer",
    "kto": "KTOTrainer",
    "reward": "RewardTrainer",
    "distillation": "DistillationTrainer",
}
"""Commands of `trl` that train -> their trainer."""


def translate_trl(
    sources: Sequence[str], out: str | None, processes: int = 1, options: Sequence[str] = ()
) -> Translation:
    """Translate a script, its arguments, or both.

    Args:
        sources: a .py file and/or JSON and YAML files of arguments; later ones win. Instead of a script, one of
            TRL's commands (``COMMANDS``) may come first.
        out: path of the config to be written; rows and functions out of the script are written beside it. None:
            nothing is written, and a run that needs such files is one that cannot run.
        processes: data-parallel processes that TRL would be launched with.
        options: what the script's own command line would be given (``--NAME VALUE``), after the files.

    Raises:
        ConfigError: a source cannot be read, or has a field that neither TRL nor the script knows.
    """
    files = list(sources)
    command = files.pop(0) if files[0] in COMMANDS and not Path(files[0]).exists() else None
    scripts = [source for source in files if source.endswith((".py", ".ipynb"))]
    if len(scripts) > 1 or any(script.endswith(".ipynb") for script in scripts):
        raise ConfigError(f"{scripts[-1]}: one script (.py) can be translated, with files of its arguments")
    if scripts and command:
        raise ConfigError(f"{command}: names the trainer of arguments; {scripts[0]} has its own")
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
    run = read_script(scripts[0], arguments, stem) if scripts else _run_of_arguments(arguments, trainer, stem)
    run.processes = processes
    _check_fields(run)
    account = Account()
    learning(run, account)
    surroundings(run, account)
    if run.files and out is None:
        account.blocks("--out", f"the config goes with {', '.join(run.files)}, which --out writes beside it")
    for name, text in run.files.items() if out is not None else ():
        write_text(name, text)
    return assembled(_said(run, account), account, "TRL", "from-trl")


def _said(run: TrlRun, account: Account) -> dict[str, tuple[Any, RuleResult | None]]:
    """The rules' answers: all for what is given, and those defaults of TRL's that have a value or an effect here."""
    said: dict[str, tuple[Any, RuleResult | None]] = {}
    for key, value in run.given.items():
        if isinstance(value, Unresolved):
            default = run.defaults.get(key)
            rule = said_of(key, default, run)
            matters = rule is None or not (_is_idle(rule) or (rule.elsewhere and set(rule.elsewhere) <= _NAMES))
            text = f"is worked out when the script runs; TRL's default {default!r} stands"
            said[key] = (value, RuleResult(text=text, matters=matters))
        else:
            said[key] = (value, said_of(key, value, run))
    for key in run.fields:
        value = run.defaults[key]
        outcome = said_of(key, value, run)
        if key not in run.given and outcome is not None and (outcome.values or outcome.matters):
            outcome.text = f"{outcome.text}; TRL's default".removeprefix("; ")
            said[key] = (value, outcome)
    given = {"model": run.model, "reward_funcs": ", ".join(reward.name for reward in run.rewards) or None}
    given |= {"train_dataset": run.train.path, "peft_config": run.lora, "processing_class": run.tokenizer}
    given |= {"rollout_func": run.rollout.name if run.rollout else None, "teacher_model": run.teacher}
    given |= {"tools": ", ".join(tool.name for tool in run.tools) or None}
    given |= {"environment_factory": run.factory.name if run.factory else None}
    given |= {"ref_model": run.reference, "reward_model": run.reward_model}
    given |= {"eval_dataset": run.evaluation.path if run.evaluation else None, **run.others}
    for key, value in given.items():
        if value is not None and key not in said:
            said[key] = (value, _of_trainer(key, account))
    return said


def _is_idle(rule: RuleResult) -> bool:
    """Return whether the field does not change the result."""
    return not (rule.values or rule.same or rule.matters or rule.elsewhere)


def _of_trainer(key: str, account: Account) -> RuleResult:
    if key in account.blockers or key in account.differences:
        return RuleResult(text=account.blockers.get(key) or account.differences[key], matters=True)
    return RuleResult(elsewhere=_ELSEWHERE.get(key, ()))


def _check_fields(run: TrlRun) -> None:
    known = [*run.fields, *OLDER]
    for key in run.given:
        if key not in known:
            raise ConfigError(f"{key}: {TRAINERS[run.trainer].config} has no such field{did_you_mean(key, known)}")


# -- arguments without a script ---------------------------------------------------------------------------------


def _read_arguments(path: Path, trainer: str | None) -> dict[str, Any]:
    """The fields in a JSON or YAML file. None as the trainer: a script decides what is known."""
    try:
        text = read_text(path)
        content = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: is neither JSON nor YAML ({first_line(error)})") from None
    if not isinstance(content, Mapping) or not content:
        raise ConfigError(f"{path}: expected fields of {TRAINERS[trainer or 'GRPOTrainer'].config} and their values")
    named = {str(key): value for key, value in content.items()}
    if trainer is not None:
        _check_known(str(path), named, trainer)
    return {key: value for key, value in named.items() if not key.startswith(_SAVED) and key not in _NOT_ARGUMENTS}


_SAVED = ("_", "distributed_state")
_NOT_ARGUMENTS = ("env", "deepspeed_plugin")
"""Names that TRL saves with the arguments and that are not arguments."""


def _check_known(what: str, arguments: Mapping[str, Any], trainer: str) -> None:
    known = [*TRAINERS[trainer].defaults, *OLDER, *SCRIPT_ARGUMENTS, *MODEL_CONFIG, "datasets", *_NOT_ARGUMENTS]
    command = next(name for name, of in COMMANDS.items() if of == trainer)
    for key in arguments:
        if key not in known and not key.startswith(_SAVED):
            config = TRAINERS[trainer].config
            raise ConfigError(f"{what}: {key}: neither {config} nor `trl {command}` has it{did_you_mean(key, known)}")


def _run_of_arguments(arguments: Mapping[str, Any], trainer: str, stem: str) -> TrlRun:
    """Return the run that `trl grpo`, or another of ``COMMANDS``, would make of these arguments."""
    fields = (*TRAINERS[trainer].defaults, *OLDER)
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
        run.train = Rows(problem="a mixture of data sets; write data.train.path as a list")
    elif name is None:
        run.train = Rows(problem="the arguments name no data set (dataset_name)")
    else:
        configuration = arguments.get("dataset_config")
        path = f"{name}:{configuration}" if configuration else name
        run.train = Rows(path=path, split=arguments.get("dataset_train_split", "train"))
        if str(run.get("eval_strategy")) != "no":
            run.evaluation = Rows(path=path, split=arguments.get("dataset_test_split", "test"))


def _named(name: str) -> Reward:
    """A function by the name or place that `trl grpo --reward_funcs` takes."""
    if name in _BUILT_IN_REWARDS:
        return Reward(name, f"trl.rewards.{name}")
    if "." in name:
        return Reward(name.rpartition(".")[2], name)
    return Reward(name, problem="is no function with a place; write one that returns get_soft_overlong_punishment(...)")
