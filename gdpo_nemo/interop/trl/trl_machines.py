"""The model, its adapters, the machines, data, validation, files of a TRL run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from gdpo_nemo.config.choices import LORA_TARGETS
from gdpo_nemo.config.files import read_model_config
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.interop.account import Account
from gdpo_nemo.interop.nemo_rl.known_models import known_model
from gdpo_nemo.interop.trl.static_names import Unresolved
from gdpo_nemo.interop.trl.trl_defaults import LORA_CONFIG
from gdpo_nemo.interop.trl.trl_rows import row_length
from gdpo_nemo.interop.trl.trl_run import Rows, TrlRun

_ROOM = 1024
"""Tokens left for the prompt where nothing limits it."""
_IGNORED = {
    "callbacks": "is not run",
    "reward_processing_classes": "is not run",
    "data_collator": "is not run; rows are put together here",
    "compute_metrics": "is not run",
    "preprocess_logits_for_metrics": "is not run",
}
_TRACKERS = ("wandb", "mlflow", "tensorboard")
_PEFT_TARGETS = ["q_proj", "v_proj"]
"""What PEFT adapts in models of these families where target_modules is not set."""


def surroundings(run: TrlRun, account: Account) -> None:
    """Fill the account with everything but the update."""
    _model(run, account)
    _lengths(run, account)
    _lora(run, account)
    _cluster(run, account)
    _data(run, account)
    _validation(run, account)
    _files(run, account)
    _rollout(run, account)
    for name, text in run.others.items():
        if name in _IGNORED:
            account.differs(name, f"{text} {_IGNORED[name]}")
        elif name != "value_model":  # PPO's, of which ``actor_critic`` speaks
            account.blocks(name, _MISSING.get(name, f"{text} cannot be given to a run"))


def _rollout(run: TrlRun, account: Account) -> None:
    """``rollout_func``, which is called here with what stands for TRL's trainer."""
    if run.rollout is None:
        return
    if run.rollout.place is None:
        account.blocks("rollout_func", run.rollout.problem)
        return
    account.set("rollout.function", run.rollout.place, "rollout_func; its trainer has what docs/turns.md lists")


_MISSING = {
    "quantization_config": "models are not quantised for training",
    "optimizers": "AdamW trains; policy.megatron_cfg.optimizer",
    "formatting_func": "write the rows that it makes as data.train.type: file.py:function",
    "compute_loss_func": "write it as an algorithm of your own (docs/advantages.md)",
}


_NO_MODEL = "is not named; where the command line names it, give a file of its arguments too (model_name_or_path)"


def _model(run: TrlRun, account: Account) -> None:
    name = run.model
    if not isinstance(name, str):
        account.blocks("model", f"{name} does not tell the model's name" if name else _NO_MODEL)
        name = "organisation/name"
    if isinstance(run.model, str):
        known = known_model(name)
        if known.refusal:
            account.blocks("model", known.refusal)
        elif known.question:
            account.asks("policy.model_name", known.question)
    if quantised := run.notes.get("quantization_config"):
        account.blocks("quantization_config", f"{quantised}: {_MISSING['quantization_config']}")
    if run.images:
        account.blocks("images", f"the script reads images ({run.images}); models here read text")
    account.set("policy.model_name", name, "model")
    if isinstance(run.tokenizer, str) and run.tokenizer != name:
        account.set("policy.tokenizer_name", run.tokenizer, "processing_class")
    elif isinstance(run.tokenizer, Unresolved):
        account.differs("processing_class", f"{run.tokenizer} is not known before it is run; the model's is taken")
    half = bool(run.given.get("bf16", not run.get("fp16", False)) is not False)
    kwargs = run.get("model_init_kwargs", {})
    dtype = str(kwargs.get("dtype", kwargs.get("torch_dtype", ""))) if isinstance(kwargs, dict) else ""
    if half or "bfloat16" in dtype:
        why = "bf16, which is TRL's default: products in bfloat16, main weights in float32"
        account.set("policy.precision", "bfloat16", why if half else "dtype")
    else:
        account.set("policy.precision", "float32", "bf16 is off")


def _lengths(run: TrlRun, account: Account) -> None:
    if not run.samples:
        each = run.get("per_device_train_batch_size") * (2 if run.pairs else 1)
        each *= row_length(run, account, _positions(run.model))
        account.set("policy.micro_batch_tokens", each, "per_device_train_batch_size of the longest rows")
        return
    completion = run.completion_length
    longest = run.get("vllm_max_model_length") if run.get("use_vllm") else None
    if run.get("max_prompt_length"):
        longest = run.get("max_prompt_length") + completion
        account.differs("max_prompt_length", "longer prompts are left out; there their beginning is cut off")
        account.set("policy.max_total_sequence_length", longest, "max_prompt_length and max_completion_length")
    elif longest:
        account.set("policy.max_total_sequence_length", longest, "vllm_max_model_length")
    else:
        longest = min(completion + _ROOM, _positions(run.model) or math.inf)
        why = (
            f"{completion} for completions and room for prompts of {longest - completion} tokens; TRL takes any prompt"
        )
        account.set("policy.max_total_sequence_length", longest, why)
    each = run.get("per_device_train_batch_size") * longest
    account.set("policy.micro_batch_tokens", each, "per_device_train_batch_size of the longest sequences")


def _positions(model: Any) -> int | None:
    file = Path(model) / "config.json" if isinstance(model, str) else None
    if file is None or not file.is_file():
        return None
    try:
        return read_model_config(file).get("max_position_embeddings")
    except ConfigError:  # policy.model_name is refused with the reason
        return None


def _lora(run: TrlRun, account: Account) -> None:
    if "peft_config" in run.notes:
        account.blocks("peft_config", run.notes["peft_config"])
    if run.lora is None:
        return
    given = {**LORA_CONFIG, **run.lora}
    rank = given["r"]
    if not isinstance(rank, int):
        account.blocks("peft_config.r", f"{rank} is not known before the script runs")
        return
    alpha = given["lora_alpha"] * (math.sqrt(rank) if given["use_rslora"] else 1.0)
    account.set("policy.lora.rank", rank, "peft_config.r")
    account.set(
        "policy.lora.alpha", float(alpha), "peft_config.lora_alpha" + (" x sqrt(r)" * bool(given["use_rslora"]))
    )
    account.set("policy.lora.dropout", float(given["lora_dropout"]), "peft_config.lora_dropout")
    account.set("policy.lora.target_modules", _targets(given["target_modules"], account), "peft_config.target_modules")
    for name, plain in (("use_dora", False), ("bias", "none"), ("init_lora_weights", True), ("modules_to_save", None)):
        if given[name] not in (plain, None, []):
            account.differs(f"peft_config.{name}", f"{given[name]!r} cannot be had")
    unknown = sorted(set(run.lora) - set(LORA_CONFIG) - {"task_type", "inference_mode"})
    if unknown:
        account.differs("peft_config", f"{', '.join(unknown)} of the adapters cannot be set")


def _targets(wanted: Any, account: Account) -> list[str]:
    if wanted is None:
        return _PEFT_TARGETS
    if wanted == "all-linear":
        return [name for name in LORA_TARGETS if name != "lm_head"]
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    known = [name for name in names if name in LORA_TARGETS]
    if len(known) < len(names):
        others = ", ".join(str(name) for name in names if name not in LORA_TARGETS)
        account.differs("peft_config.target_modules", f"{others} has no adapter; known: {', '.join(LORA_TARGETS)}")
    return known or _PEFT_TARGETS


def _cluster(run: TrlRun, account: Account) -> None:
    if run.get("use_cpu") or run.get("no_cuda"):
        account.set("cluster.gpus_per_node", 0, "use_cpu")
        return
    if not run.samples:
        account.set("cluster.gpus_per_node", run.processes, "a GPU for each process")
        return
    tensor = run.get("vllm_tensor_parallel_size") if run.get("use_vllm") else 1
    if run.get("use_vllm") and run.get("vllm_mode") == "server":
        account.set("cluster.gpus_per_node", run.processes + tensor, "the processes that train, and vLLM's GPUs")
        account.set("policy.generation.engines", 1, "vllm_mode server: one engine beside the trainer")
        return
    account.set("cluster.gpus_per_node", run.processes, "a GPU for each process")
    account.set("cluster.placement", "colocated", "sampling and training share the GPUs")
    account.set("policy.generation.engines", max(1, run.processes // tensor), "on the GPUs that train")


# -- data -------------------------------------------------------------------------------------------------------


def _data(run: TrlRun, account: Account) -> None:
    if run.train.problem:
        account.blocks("train_dataset", run.train.problem)
    _split(run, run.train, "train", account)


def _split(run: TrlRun, rows: Rows, split: str, account: Account) -> None:
    section = f"data.{split}"
    why = "train_dataset" if split == "train" else "eval_dataset"
    if rows.path is None:
        return
    account.set(f"{section}.path", rows.path, why)
    if rows.split and rows.split != split:
        account.set(f"{section}.split", rows.split, why)
    if rows.size is not None:
        account.set(f"{section}.size", rows.size, f"{why}.select")
    if rows.columns:
        account.set(f"{section}.columns", dict(rows.columns), f"{why}.rename_column")
    if run.samples:
        account.set(f"{section}.prompt_key", "prompt", "TRL's column")
    account.set(f"{section}.chat", False, "TRL renders messages, and gives text to the model as it is")


def _validation(run: TrlRun, account: Account) -> None:
    strategy = str(run.get("evaluation_strategy", run.get("eval_strategy"))).rpartition(".")[2].lower()
    if run.evaluation is None or strategy == "no":
        return
    if run.evaluation.problem:
        account.differs("eval_dataset", f"nothing is validated: {run.evaluation.problem}")
        return
    _split(run, run.evaluation, "validation", account)
    if strategy == "epoch":
        account.differs("eval_strategy", "validated every 10 steps, there after each pass over the rows")
        account.set("gdpo.val_period", 10, "in place of eval_strategy epoch")
    else:
        period = run.steps_of("eval_steps" if run.get("eval_steps") else "logging_steps")
        account.set("gdpo.val_period", period or 10, "eval_steps, or logging_steps where that is not set")
    if not run.samples:
        return
    samples = run.get("num_generations_eval", run.get("num_generations"))
    account.set("gdpo.val_generations_per_prompt", samples, "num_generations_eval, or num_generations")
    account.set("gdpo.val_temperature", float(run.get("temperature")), "temperature")


def _files(run: TrlRun, account: Account) -> None:
    folder = run.get("output_dir")
    if folder:
        account.set("run.dir", str(folder), "output_dir; checkpoints are in its folder checkpoints")
    if folder or run.get("run_name"):
        account.set("run.name", str(run.get("run_name", Path(str(folder)).name)), "run_name, or that of output_dir")
    strategy = str(run.get("save_strategy")).rpartition(".")[2].lower()
    if strategy == "no":
        account.set("checkpointing.enabled", False, "save_strategy no")
    elif strategy == "steps" and (period := run.steps_of("save_steps")):
        account.set("checkpointing.save_period", period, "save_steps, in steps here")
    wanted = run.get("report_to", [])
    wanted = [wanted] if isinstance(wanted, str) else list(wanted)
    for name in _TRACKERS[:2]:
        if name in wanted or "all" in wanted:
            account.set(f"logger.{name}.enabled", True, "report_to")
    if "wandb" in wanted and "project" in run.given:
        account.set("logger.wandb.project", run.get("project"), "project")
