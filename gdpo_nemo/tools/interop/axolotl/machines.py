"""Translation of the model, the adapters, the GPUs and the files of an axolotl config."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from gdpo_nemo.config.allowed_values import LORA_TARGETS
from gdpo_nemo.tools.interop.axolotl.config import AxolotlConfig
from gdpo_nemo.tools.interop.nemo_rl.recipe import KnownModel, known_model, tower_adapters, tower_missing
from gdpo_nemo.tools.interop.translation import Findings

_ALL_LINEAR = [name for name in LORA_TARGETS if name != "lm_head"]
_PEFT_TARGETS = ["q_proj", "v_proj"]
"""Default target modules of PEFT for the supported model families."""
_TEXT_MODEL = re.compile(
    r"(model\.)?(language_model\.)?(model\.)?layers\.\[\\d\]\+\.(\(_checkpoint_wrapped_module\.\)\?)?"
    r"\(mlp\|(cross_attn\|)?self_attn\)\.\(up\|down\|gate\|q\|k\|v\|o\)_proj"
)
"""Matches the pattern of axolotl's examples that selects the layers of the text model in an image model."""
_TEXT_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def other_settings(config: AxolotlConfig, findings: Findings) -> None:
    """Add the settings for the model, adapters, GPUs and files to the findings."""
    _model(config, findings)
    _lengths(config, findings)
    _adapter(config, findings)
    _cluster(config, findings)
    _files(config, findings)
    _template(config, findings)
    if config.get("nemo_gym_enabled"):
        why = "start the servers and list them in env.gym: {plugin: nemo_gym, servers: ...} (docs/environments.md)"
        findings.blocks("nemo_gym_enabled", why)
        findings.blockers.pop("trl.reward_funcs", None)
        findings.blockers.pop("datasets", None)


def _model(config: AxolotlConfig, findings: Findings) -> None:
    name = str(config.get("lora_model_dir") or config.get("base_model"))
    if not config.get("lora_model_dir"):
        known = known_model(name)
        if known.refusal:
            findings.blocks("base_model", known.refusal)
        elif known.question:
            findings.asks("policy.model_name", known.question)
        elif config.get("processor_type"):
            _images(known, config, findings)
    findings.set("policy.model_name", name, "lora_model_dir" if config.get("lora_model_dir") else "base_model")
    half = config.get("bf16", config.get("bfloat16", "auto")) is not False
    half = half and not any(config.get(name) for name in ("fp16", "float16", "float32"))
    why = "bfloat16 computation, float32 main weights" if half else "bf16 is off"
    findings.set("policy.precision", "bfloat16" if half else "float32", why)
    if config.get("gradient_checkpointing"):
        findings.set("policy.megatron_cfg.recompute", "full", "gradient_checkpointing")


def _images(model: KnownModel, config: AxolotlConfig, findings: Findings) -> None:
    """Set the training of the vision tower, and block a model whose tower is not supported."""
    if not model.images:
        findings.blocks("processor_type", f"rows with images: {tower_missing(str(config.get('base_model')))}")
        return
    findings.differs("sequence_len", "longer rows are skipped; axolotl does not limit the length of rows with images")
    if not (config.get("adapter") or config.get("freeze_mm_modules")):
        findings.set("policy.vision.train", True, "axolotl trains all parameters")


def _lengths(config: AxolotlConfig, findings: Findings) -> None:
    longest = config.sequence
    why = "sequence_len"
    if config.samples and config.get("ebft.mode") != "strided":
        longest += config.completion
        why = "sequence_len for the prompt plus max_completion_length"
        limit = config.get("vllm.max_model_len")
        if limit and config.get("trl.use_vllm"):
            longest = min(longest, limit)
            why += ", at most vllm.max_model_len"
    findings.set("policy.max_total_sequence_length", longest, why)
    findings.set("policy.micro_batch_tokens", config.micro_batch * longest, "micro_batch_size sequences of full length")


def _adapter(config: AxolotlConfig, findings: Findings) -> None:
    kind = config.get("adapter")
    if kind is None:
        return
    if kind not in ("lora", "qlora"):
        findings.blocks("adapter", f"{str(kind)[:40]!r} is not lora or qlora")
        return
    rank = config.get("lora_r", 8)
    root = bool(config.get("peft_use_rslora"))
    alpha = config.get("lora_alpha", 8) * (math.sqrt(rank) if root else 1.0)
    findings.set("policy.lora.rank", rank, "lora_r")
    findings.set("policy.lora.alpha", float(alpha), "lora_alpha" + " x sqrt(r)" * root)
    findings.set("policy.lora.dropout", float(config.get("lora_dropout", 0.0)), "lora_dropout")
    findings.set("policy.lora.target_modules", _targets(config, findings), "lora_target_modules, lora_target_linear")


def _targets(config: AxolotlConfig, findings: Findings) -> list[str]:
    modules = config.get("lora_target_modules")
    names = [modules] if isinstance(modules, str) else list(map(str, modules or ()))
    if isinstance(modules, str) and _TEXT_MODEL.fullmatch(modules):
        return _TEXT_LAYERS
    if config.get("lora_target_linear") or names == ["all-linear"]:
        others = [name for name in names if name not in (*_ALL_LINEAR, "all-linear")]
        names = [*_ALL_LINEAR, *others]
    known = [name for name in names if name in LORA_TARGETS]
    unknown = [name for name in names if name not in LORA_TARGETS]
    if unknown:
        what = f"adapters on {', '.join(unknown)[:80]} are not supported; known: {', '.join(LORA_TARGETS)}"
        findings.differs("lora_target_modules", what)
    targets = known or (_PEFT_TARGETS if not names else _ALL_LINEAR)
    if different := tower_adapters(known_model(str(config.get("base_model"))), targets):
        findings.differs("lora_target_modules", different)
    return targets


def _cluster(config: AxolotlConfig, findings: Findings) -> None:
    if not config.samples:
        findings.set("cluster.gpus_per_node", config.processes, "one GPU per process (--num-processes)")
        return
    use_vllm = bool(config.get("trl.use_vllm"))
    tensor = config.get("vllm.tensor_parallel_size", 1) if use_vllm else 1
    if config.has_server:
        engines = config.get("vllm.data_parallel_size", 1)
        why = "one GPU per training process, plus vLLM's GPUs"
        findings.set("cluster.gpus_per_node", config.processes + tensor * engines, why)
        findings.set("policy.generation.engines", engines, "vllm_mode server: engines on separate GPUs")
        return
    findings.set("cluster.gpus_per_node", config.processes, "one GPU per process (--num-processes)")
    findings.set("cluster.placement", "colocated", "sampling and training use the same GPUs")
    findings.set("policy.generation.engines", max(1, config.processes // tensor), "engines run on the training GPUs")


def _files(config: AxolotlConfig, findings: Findings) -> None:
    folder = str(config.get("output_dir", "./model-out"))
    findings.set("run.dir", folder, "output_dir; checkpoints are in its subfolder checkpoints")
    findings.set("run.name", str(config.get("wandb_name", Path(folder).name)), "wandb_name, or the name of output_dir")
    period = config.get("save_steps")
    if config.get("save_strategy") == "no":
        findings.set("checkpointing.enabled", False, "save_strategy no")
    elif isinstance(period, int) and period > 0:
        findings.set("checkpointing.save_period", period, "save_steps")
    if config.get("wandb_project") or config.get("use_wandb"):
        findings.set("logger.wandb.enabled", True, "wandb_project or use_wandb")
    if config.get("wandb_project"):
        findings.set("logger.wandb.project", str(config.get("wandb_project")), "wandb_project")


def _template(config: AxolotlConfig, findings: Findings) -> None:
    arguments: Any = config.get("trl.chat_template_kwargs") or config.get("chat_template_kwargs")
    if arguments:
        findings.set("data.train.chat_template_kwargs", dict(arguments), "chat_template_kwargs")
