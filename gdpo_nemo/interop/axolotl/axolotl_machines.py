"""The model, its adapters, the machines and the files of a config of axolotl."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from gdpo_nemo.config.choices import LORA_TARGETS
from gdpo_nemo.interop.account import Account
from gdpo_nemo.interop.axolotl.axolotl_config import AxolotlConfig
from gdpo_nemo.interop.nemo_rl.known_models import known_model

_ALL_LINEAR = [name for name in LORA_TARGETS if name != "lm_head"]
_PEFT_TARGETS = ["q_proj", "v_proj"]
"""Modules that PEFT adapts in models of these families by default."""


def surroundings(config: AxolotlConfig, account: Account) -> None:
    """Fill the account with everything but the update and the rows."""
    _model(config, account)
    _lengths(config, account)
    _adapter(config, account)
    _cluster(config, account)
    _files(config, account)
    _template(config, account)
    if config.get("nemo_gym_enabled"):
        why = "start its servers and name them: env.gym: {plugin: nemo_gym, servers: ...} (docs/environments.md)"
        account.blocks("nemo_gym_enabled", why)
        account.blockers.pop("trl.reward_funcs", None)
        account.blockers.pop("datasets", None)


def _model(config: AxolotlConfig, account: Account) -> None:
    name = str(config.get("lora_model_dir") or config.get("base_model"))
    if not config.get("lora_model_dir"):
        known = known_model(name)
        if known.refusal:
            account.blocks("base_model", known.refusal)
        elif known.question:
            account.asks("policy.model_name", known.question)
    account.set("policy.model_name", name, "lora_model_dir" if config.get("lora_model_dir") else "base_model")
    half = config.get("bf16", config.get("bfloat16", "auto")) is not False
    half = half and not any(config.get(name) for name in ("fp16", "float16", "float32"))
    why = "products in bfloat16, main weights in float32" if half else "bf16 is off"
    account.set("policy.precision", "bfloat16" if half else "float32", why)
    if config.get("gradient_checkpointing"):
        account.set("policy.megatron_cfg.recompute", "full", "gradient_checkpointing")


def _lengths(config: AxolotlConfig, account: Account) -> None:
    longest = config.sequence
    why = "sequence_len"
    if config.samples and config.get("ebft.mode") != "strided":
        longest += config.completion
        why = "sequence_len of the prompt, and max_completion_length"
        limit = config.get("vllm.max_model_len")
        if limit and config.get("trl.use_vllm"):
            longest = min(longest, limit)
            why += ", at most vllm.max_model_len"
    account.set("policy.max_total_sequence_length", longest, why)
    account.set("policy.micro_batch_tokens", config.micro_batch * longest, "micro_batch_size of the longest sequences")


def _adapter(config: AxolotlConfig, account: Account) -> None:
    kind = config.get("adapter")
    if kind is None:
        return
    if kind not in ("lora", "qlora"):
        account.blocks("adapter", f"{str(kind)[:40]!r} is not lora or qlora")
        return
    rank = config.get("lora_r", 8)
    root = bool(config.get("peft_use_rslora"))
    alpha = config.get("lora_alpha", 8) * (math.sqrt(rank) if root else 1.0)
    account.set("policy.lora.rank", rank, "lora_r")
    account.set("policy.lora.alpha", float(alpha), "lora_alpha" + " x sqrt(r)" * root)
    account.set("policy.lora.dropout", float(config.get("lora_dropout", 0.0)), "lora_dropout")
    account.set("policy.lora.target_modules", _targets(config, account), "lora_target_modules, lora_target_linear")


def _targets(config: AxolotlConfig, account: Account) -> list[str]:
    wanted = config.get("lora_target_modules")
    names = [wanted] if isinstance(wanted, str) else list(map(str, wanted or ()))
    if config.get("lora_target_linear") or names == ["all-linear"]:
        others = [name for name in names if name not in (*_ALL_LINEAR, "all-linear")]
        names = [*_ALL_LINEAR, *others]
    known = [name for name in names if name in LORA_TARGETS]
    unknown = [name for name in names if name not in LORA_TARGETS]
    if unknown:
        what = f"{', '.join(unknown)[:80]}: no adapter; known: {', '.join(LORA_TARGETS)}"
        account.differs("lora_target_modules", what)
    return known or (_PEFT_TARGETS if not names else _ALL_LINEAR)


def _cluster(config: AxolotlConfig, account: Account) -> None:
    if not config.samples:
        account.set("cluster.gpus_per_node", config.processes, "a GPU for each process; --num-processes")
        return
    uses = bool(config.get("trl.use_vllm"))
    tensor = config.get("vllm.tensor_parallel_size", 1) if uses else 1
    if uses and config.get("trl.vllm_mode") == "server":
        engines = config.get("vllm.data_parallel_size", 1)
        why = "the processes that train, and vLLM's GPUs"
        account.set("cluster.gpus_per_node", config.processes + tensor * engines, why)
        account.set("policy.generation.engines", engines, "vllm_mode server: engines beside the trainer")
        return
    account.set("cluster.gpus_per_node", config.processes, "a GPU for each process; --num-processes")
    account.set("cluster.placement", "colocated", "sampling and training share the GPUs")
    account.set("policy.generation.engines", max(1, config.processes // tensor), "on the GPUs that train")


def _files(config: AxolotlConfig, account: Account) -> None:
    folder = str(config.get("output_dir", "./model-out"))
    account.set("run.dir", folder, "output_dir; checkpoints are in its folder checkpoints")
    account.set("run.name", str(config.get("wandb_name", Path(folder).name)), "wandb_name, or that of output_dir")
    period = config.get("save_steps")
    if config.get("save_strategy") == "no":
        account.set("checkpointing.enabled", False, "save_strategy no")
    elif isinstance(period, int) and period > 0:
        account.set("checkpointing.save_period", period, "save_steps")
    if config.get("wandb_project") or config.get("use_wandb"):
        account.set("logger.wandb.enabled", True, "wandb_project or use_wandb")
    if config.get("wandb_project"):
        account.set("logger.wandb.project", str(config.get("wandb_project")), "wandb_project")


def _template(config: AxolotlConfig, account: Account) -> None:
    arguments: Any = config.get("trl.chat_template_kwargs") or config.get("chat_template_kwargs")
    if arguments:
        account.set("data.train.chat_template_kwargs", dict(arguments), "chat_template_kwargs")
