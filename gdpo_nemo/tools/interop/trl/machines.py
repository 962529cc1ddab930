"""Translation of the model, adapters, GPUs, datasets, validation and files of a TRL run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from gdpo_nemo.config.allowed_values import LORA_TARGETS
from gdpo_nemo.config.model_checks import read_model_config
from gdpo_nemo.models.architectures import linear_layers
from gdpo_nemo.models.families import FAMILIES
from gdpo_nemo.tools.interop.nemo_rl.recipe import KnownModel, known_model, tower_adapters, tower_missing
from gdpo_nemo.tools.interop.translation import Findings
from gdpo_nemo.tools.interop.trl.defaults import LORA_CONFIG
from gdpo_nemo.tools.interop.trl.names import Unresolved
from gdpo_nemo.tools.interop.trl.rows import row_length
from gdpo_nemo.tools.interop.trl.run import Rows, TrlRun
from gdpo_nemo.utils.errors import ConfigError

_PROMPT_TOKENS = 1024
"""Maximum number of tokens in a prompt if neither the script nor the model sets a limit."""
_IGNORED = {
    "callbacks": "is not executed",
    "reward_processing_classes": "is not used",
    "data_collator": "is not executed; gdpo_nemo collates the rows",
    "compute_metrics": "is not executed",
    "preprocess_logits_for_metrics": "is not executed",
}
"""Arguments of the trainer that are ignored -> predicate for the report."""
_TRACKERS = ("wandb", "mlflow", "tensorboard")
_PEFT_TARGETS = ["q_proj", "v_proj"]
"""Default target modules of PEFT for the supported model families."""


def other_settings(run: TrlRun, findings: Findings) -> None:
    """Add all settings to the findings, except settings that define the training result."""
    _model(run, findings)
    if "model" in run.notes:
        findings.differs("model", run.notes["model"])
    _lengths(run, findings)
    _lora(run, findings)
    _cluster(run, findings)
    _data(run, findings)
    _validation(run, findings)
    _files(run, findings)
    _rollout(run, findings)
    for name, text in run.others.items():
        if name in _IGNORED:
            findings.differs(name, f"{text} {_IGNORED[name]}")
        elif name != "value_model":  # handled in ``actor_critic``
            findings.blocks(name, _MISSING.get(name, f"{text}: this argument is not supported"))


def _rollout(run: TrlRun, findings: Findings) -> None:
    """Translate ``rollout_func``, which receives a substitute for TRL's trainer."""
    if run.rollout is None:
        return
    if run.rollout.import_path is None:
        findings.blocks("rollout_func", run.rollout.problem)
        return
    findings.set(
        "rollout.function",
        run.rollout.import_path,
        "rollout_func; docs/turns.md lists the supported trainer attributes",
    )


_MISSING = {
    "quantization_config": "quantized models cannot be trained",
    "optimizers": "only AdamW is supported (policy.megatron_cfg.optimizer)",
    "formatting_func": "use a transform that returns the columns of a row (data.train.type: file.py:function)",
    "compute_loss_func": "write the loss as a custom algorithm (docs/advantages.md)",
}
"""Arguments of the trainer that are not supported -> reason."""


_NO_MODEL = "is not set; if the script reads the model from the command line, add model_name_or_path to the arguments"


def _model(run: TrlRun, findings: Findings) -> None:
    name = run.model
    if not isinstance(name, str):
        findings.blocks("model", f"the model's name cannot be read from {name}" if name else _NO_MODEL)
        name = "organisation/name"
    if isinstance(run.model, str):
        known = known_model(name)
        if known.refusal:
            findings.blocks("model", known.refusal)
        elif known.question:
            findings.asks("policy.model_name", known.question)
    if quantization := run.notes.get("quantization_config"):
        findings.blocks("quantization_config", f"{quantization}: {_MISSING['quantization_config']}")
    if run.images:
        _images(run, known_model(name), findings)
    findings.set("policy.model_name", name, "model")
    if isinstance(run.tokenizer, str) and run.tokenizer != name:
        findings.set("policy.tokenizer_name", run.tokenizer, "processing_class")
    elif isinstance(run.tokenizer, Unresolved):
        findings.differs(
            "processing_class", f"{run.tokenizer} is unknown until the script runs; the model's tokenizer is used"
        )
    half = bool(run.given.get("bf16", not run.get("fp16", False)) is not False)
    kwargs = run.get("model_init_kwargs", {})
    dtype = str(kwargs.get("dtype", kwargs.get("torch_dtype", ""))) if isinstance(kwargs, dict) else ""
    if half or "bfloat16" in dtype:
        why = "bf16 (TRL's default): bfloat16 computation, float32 main weights"
        findings.set("policy.precision", "bfloat16", why if half else "dtype")
    else:
        findings.set("policy.precision", "float32", "bf16 is off")


def _images(run: TrlRun, model: KnownModel, findings: Findings) -> None:
    """Set the training of the vision tower, and block a model whose tower is not supported."""
    if model.images:
        if run.lora is None:
            findings.set("policy.vision.train", True, "TRL trains all parameters")
        return
    if not (model.refusal or model.question):
        findings.blocks("images", f"the script reads images ({run.images}), and {tower_missing(run.model)}")


def _lengths(run: TrlRun, findings: Findings) -> None:
    if not run.samples:
        each = run.get("per_device_train_batch_size") * (2 if run.pairs else 1)
        each *= row_length(run, findings, _positions(run.model))
        findings.set("policy.micro_batch_tokens", each, "per_device_train_batch_size rows of full length")
        return
    completion = run.completion_length
    longest = run.get("vllm_max_model_length") if run.get("use_vllm") else None
    if run.get("max_prompt_length"):
        longest = run.get("max_prompt_length") + completion
        findings.differs("max_prompt_length", "longer prompts are skipped; TRL removes their beginning")
        findings.set("policy.max_total_sequence_length", longest, "sum of max_prompt_length and max_completion_length")
    elif longest:
        findings.set("policy.max_total_sequence_length", longest, "vllm_max_model_length")
    else:
        longest = min(completion + _PROMPT_TOKENS, _positions(run.model) or math.inf)
        why = f"{completion} for completions, {longest - completion} for prompts; TRL has no limit for prompts"
        findings.set("policy.max_total_sequence_length", longest, why)
    each = run.get("per_device_train_batch_size") * longest
    findings.set("policy.micro_batch_tokens", each, "per_device_train_batch_size sequences of full length")


def _positions(model: Any) -> int | None:
    """Return the maximum number of positions of a model in a local folder, or None if it is unknown."""
    file = Path(model) / "config.json" if isinstance(model, str) else None
    if file is None or not file.is_file():
        return None
    try:
        return read_model_config(file).get("max_position_embeddings")
    except ConfigError:  # another check reports the error for policy.model_name
        return None


def _lora(run: TrlRun, findings: Findings) -> None:
    if "peft_config" in run.notes:
        findings.blocks("peft_config", run.notes["peft_config"])
    if run.lora is None:
        return
    given = {**LORA_CONFIG, **run.lora}
    rank = given["r"]
    if not isinstance(rank, int):
        findings.blocks("peft_config.r", f"{rank} is unknown until the script runs")
        return
    alpha = given["lora_alpha"] * (math.sqrt(rank) if given["use_rslora"] else 1.0)
    findings.set("policy.lora.rank", rank, "peft_config.r")
    findings.set(
        "policy.lora.alpha", float(alpha), "peft_config.lora_alpha" + (" x sqrt(r)" * bool(given["use_rslora"]))
    )
    findings.set("policy.lora.dropout", float(given["lora_dropout"]), "peft_config.lora_dropout")
    targets = _targets(given["target_modules"], known_model(str(run.model)).model_type, findings)
    findings.set("policy.lora.target_modules", targets, "peft_config.target_modules")
    everywhere = given["target_modules"] == "all-linear"
    if different := tower_adapters(known_model(str(run.model)), None if everywhere else targets):
        findings.differs("peft_config.target_modules", different)
    for name, plain in (("use_dora", False), ("bias", "none"), ("init_lora_weights", True), ("modules_to_save", None)):
        if given[name] not in (plain, None, []):
            findings.differs(f"peft_config.{name}", f"{given[name]!r} is not supported")
    unknown = sorted(set(run.lora) - set(LORA_CONFIG) - {"task_type", "inference_mode"})
    if unknown:
        findings.differs("peft_config", f"not supported: {', '.join(unknown)}")


def _targets(modules: Any, model_type: str, findings: Findings) -> list[str]:
    if modules is None:
        return _PEFT_TARGETS
    if modules == "all-linear":
        family = FAMILIES.get(model_type)
        return [name for name in (linear_layers(family) if family else LORA_TARGETS) if name != "lm_head"]
    names = [modules] if isinstance(modules, str) else list(modules)
    known = [name for name in names if name in LORA_TARGETS]
    if len(known) < len(names):
        others = ", ".join(str(name) for name in names if name not in LORA_TARGETS)
        findings.differs(
            "peft_config.target_modules", f"adapters on {others} are not supported; known: {', '.join(LORA_TARGETS)}"
        )
    return known or _PEFT_TARGETS


def _cluster(run: TrlRun, findings: Findings) -> None:
    if run.get("use_cpu") or run.get("no_cuda"):
        findings.set("cluster.gpus_per_node", 0, "use_cpu")
        return
    if not run.samples:
        findings.set("cluster.gpus_per_node", run.processes, "one GPU per process")
        return
    tensor = run.get("vllm_tensor_parallel_size") if run.get("use_vllm") else 1
    if run.get("use_vllm") and run.get("vllm_mode") == "server":
        why = "one GPU per training process, plus vLLM's GPUs"
        findings.set("cluster.gpus_per_node", run.processes + tensor, why)
        findings.set("policy.generation.engines", 1, "vllm_mode server: one engine on separate GPUs")
        return
    findings.set("cluster.gpus_per_node", run.processes, "one GPU per process")
    findings.set("cluster.placement", "colocated", "sampling and training use the same GPUs")
    findings.set("policy.generation.engines", max(1, run.processes // tensor), "engines run on the training GPUs")


# -- data -------------------------------------------------------------------------------------------------------


def _data(run: TrlRun, findings: Findings) -> None:
    if run.train.problem:
        findings.blocks("train_dataset", run.train.problem)
    _split(run, run.train, "train", findings)


def _split(run: TrlRun, rows: Rows, split: str, findings: Findings) -> None:
    section = f"data.{split}"
    why = "train_dataset" if split == "train" else "eval_dataset"
    if rows.path is None:
        return
    findings.set(f"{section}.path", rows.path, why)
    if rows.split and rows.split != split:
        findings.set(f"{section}.split", rows.split, why)
    if rows.size is not None:
        findings.set(f"{section}.size", rows.size, f"{why}.select")
    if rows.columns:
        findings.set(f"{section}.columns", dict(rows.columns), f"{why}.rename_column")
    if run.samples:
        findings.set(f"{section}.prompt_key", "prompt", "TRL uses this column")
    findings.set(f"{section}.chat", False, "TRL applies the chat template to messages only; text is passed unchanged")


def _validation(run: TrlRun, findings: Findings) -> None:
    if run.evaluation is None or not run.validates:
        return
    if run.evaluation.problem:
        findings.differs("eval_dataset", f"validation is off: {run.evaluation.problem}")
        return
    _split(run, run.evaluation, "validation", findings)
    if run.eval_strategy == "epoch":
        findings.differs("eval_strategy", "validation runs every 10 steps; TRL validates after each epoch")
        findings.set("gdpo.val_period", 10, "replaces eval_strategy epoch")
    else:
        period = run.steps_of("eval_steps" if run.get("eval_steps") else "logging_steps")
        findings.set("gdpo.val_period", period or 10, "eval_steps, or logging_steps if it is not set")
    if not run.samples:
        return
    samples = run.get("num_generations_eval", run.get("num_generations"))
    findings.set("gdpo.val_generations_per_prompt", samples, "num_generations_eval, or num_generations")
    findings.set("gdpo.val_temperature", float(run.get("temperature")), "temperature")
    for name, usual in (("top_p", 1.0), ("top_k", -1)):
        findings.set(f"gdpo.val_{name}", run.get(name) or usual, name)


def _files(run: TrlRun, findings: Findings) -> None:
    folder = run.get("output_dir")
    if folder:
        findings.set("run.dir", str(folder), "output_dir; checkpoints are in its subfolder checkpoints")
    if folder or run.get("run_name"):
        findings.set(
            "run.name", str(run.get("run_name", Path(str(folder)).name)), "run_name, or the name of output_dir"
        )
    strategy = run.word("save_strategy")
    if strategy == "no":
        findings.set("checkpointing.enabled", False, "save_strategy no")
    elif strategy == "steps" and (period := run.steps_of("save_steps")):
        findings.set("checkpointing.save_period", period, "save_steps, converted to steps")
    trackers = run.get("report_to", [])
    trackers = [trackers] if isinstance(trackers, str) else list(trackers)
    for name in _TRACKERS[:2]:
        if name in trackers or "all" in trackers:
            findings.set(f"logger.{name}.enabled", True, "report_to")
    if "wandb" in trackers and "project" in run.given:
        findings.set("logger.wandb.project", run.get("project"), "project")
