"""Checks of the model and tokenizer that a config names: local folders, the model factory, and properties."""

from __future__ import annotations

import math
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from gdpo_nemo.config.algorithm_choice import spec_of
from gdpo_nemo.config.data_files import check_data_file, is_broken_link, may_be_on_the_hub
from gdpo_nemo.config.layout import Layout, Resolved, check_router_replay, check_stages, resolve_layout, stage_layers
from gdpo_nemo.config.schema import Config, MegatronConfig
from gdpo_nemo.config.sections import LoraConfig, PolicyConfig
from gdpo_nemo.models.architectures import CPU_HEAD_SIZES
from gdpo_nemo.models.description import ModelDescription, with_text_fields
from gdpo_nemo.models.family_checks import check_adapted_layers
from gdpo_nemo.models.peft import PeftAdapter, check_fit, read_peft_adapter, read_shapes
from gdpo_nemo.models.sources import (
    Format,
    ModelFacts,
    Source,
    converted_fields,
    described_by,
    recognise,
    source_fields,
)
from gdpo_nemo.models.weight_files import (
    check_tensors,
    check_weight_files,
    has_weight_files,
    prediction_weights,
    tensor_shapes,
    tower_weights,
)
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.files import read_json_object
from gdpo_nemo.utils.import_path import ImportPath
from gdpo_nemo.utils.source import assigned_values, parse_file

FACTORY_CONFIGS = "MODEL_CONFIGS"
"""Name of a dictionary literal in the model factory's file: {function: fields of config.json}. The dictionary describes
the models that the file creates, and is read without executing the file."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
CPU_EXPERT_MULTIPLE = 32
"""Factor of the hidden size that vLLM's CPU kernels for experts require."""


def resolve(config: Config) -> Resolved:
    """Return a config with its algorithm, layout and model, without checking the config. ``validate`` also checks the
    config.

    Raises:
        ConfigError: if the algorithm, the layout or the model cannot be derived.
    """
    algorithm = spec_of(config)
    return Resolved(config, algorithm, resolve_layout(config, algorithm), read_model(config.policy))


def check_files(config: Config, layout: Layout, weights: bool = True) -> ModelFacts:
    """Check all local paths of a config, and return the facts about the model.

    Names that may refer to the Hugging Face Hub are checked later, when the run starts.

    Raises:
        ConfigError: if a file is missing, incomplete, or does not fit the layout.
    """
    check_creatable_folder("run.dir", config.run.dir)
    model = check_model(config.policy, layout, weights)
    if not config.cluster.gpus_per_node:
        check_engines(model)
    if spec_of(config).head == "score" and model.description and model.description.tower:
        raise ConfigError("policy.model_name: reward models with images are not supported; use a text model")
    if spec_of(config).samples and model.description is not None:
        _check_sampling(model.description, config)
    if weights:
        check_tokenizer(config.policy, model)
    _check_images(config, model.description)
    check_data_file("data.train", config.data.train)
    if config.data.validation:
        check_data_file("data.validation", config.data.validation)
    return model


def _check_images(config: Config, model: ModelDescription | None) -> None:
    """Check the section ``data.images``. Raises ConfigError."""
    images = config.data.images
    if images.folder is not None and not Path(os.path.expanduser(images.folder)).is_dir():
        raise ConfigError(f"data.images.folder: {images.folder} is not a folder")
    changed = [f.name for f in fields(images) if getattr(images, f.name) != f.default]
    if changed and model is not None and model.tower is None:
        name = config.policy.model_name
        raise ConfigError(
            f"data.images.{changed[0]}: has no effect because the model in {name} has no vision tower; remove it"
        )


def check_creatable_folder(key: str, folder: str | Path) -> None:
    """Check that ``folder`` exists or can be created. Raises ConfigError."""
    path = Path(folder).absolute()
    existing = next(p for p in (path, *path.parents) if os.path.lexists(p))
    if not existing.is_dir():
        raise ConfigError(f"{key}: {existing} is not a folder")


def local_model_config(policy: PolicyConfig) -> dict[str, Any] | None:
    """Return the content of the model's ``config.json`` if model_name is a folder, otherwise None.

    Raises:
        ConfigError: if the file is missing or is not a JSON object.
    """
    folder = Path(policy.model_name)
    if not folder.is_dir():
        return None
    if not (folder / "config.json").exists():
        raise ConfigError(f"policy.model_name: {folder} has no config.json{_remake(policy)}")
    return read_model_config(folder / "config.json")


def read_model_config(path: Path) -> dict[str, Any]:
    """Read a model's ``config.json``, with the text model's fields at the top level. Raises ConfigError."""
    return with_text_fields(read_json_object(path, "policy.model_name"))


def model_source(policy: PolicyConfig) -> Source | None:
    """Return the source of ``policy.model_name`` if it has another format than Hugging Face's, otherwise None.

    Raises:
        ConfigError: if the format is not supported.
    """
    return recognise(Path(os.path.expanduser(policy.model_name)))


def companion(policy: PolicyConfig, source: Source) -> str | None:
    """Return the tokenizer folder that also describes a Megatron-core or NeMo 2 checkpoint; None for other formats."""
    return policy.tokenizer_name if source.format in (Format.MEGATRON, Format.NEMO_2) else None


def read_model(policy: PolicyConfig) -> ModelFacts:
    """Return the facts about the model that are available on this machine.

    The facts are read from the model's folder, from the description in the file of ``policy.model_factory``, or from
    the hub cache. Raises ConfigError.
    """
    source = model_source(policy)
    if source is not None:
        return ModelFacts(source, source_fields(source, "policy.model_name", companion(policy, source)))
    return ModelFacts(None, _known_fields(policy))


def _known_fields(policy: PolicyConfig) -> dict[str, Any] | None:
    """Return the content of config.json for a model in Hugging Face's format; None if it is not known."""
    if Path(policy.model_name).is_dir():
        return local_model_config(policy)
    if policy.model_factory:
        return _factory_config(policy.model_factory)
    file = next(iter(_cached_configs(policy.model_name)), None)
    return converted_fields(read_model_config(file)) if file else None


def _factory_config(reference: str) -> dict[str, Any] | None:
    """Return the entry of ``function`` in the factory file's MODEL_CONFIGS, or None if the file has none. Raises
    ConfigError."""
    key = "policy.model_factory"
    function = ImportPath(reference).name
    path = ImportPath(reference).find_function(key)
    for node in parse_file(key, path).body:
        values = dict(assigned_values(node))
        if FACTORY_CONFIGS not in values:
            continue
        configs = values[FACTORY_CONFIGS]
        if not isinstance(configs, dict):
            raise ConfigError(
                f"{key}: {FACTORY_CONFIGS} in {path} must be a literal {{function: fields of config.json}}"
            )
        content = configs.get(function)
        if content is not None and not isinstance(content, dict):
            raise ConfigError(f"{key}: {FACTORY_CONFIGS} in {path} must map {function} to the fields of config.json")
        return content
    return None


def _cached_configs(name: str) -> list[Path]:
    """Return the paths of config.json in all cached snapshots of a model from the hub."""
    # Path.expanduser would raise if the user has no home folder.
    home = Path(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    return sorted((hub / f"models--{name.replace('/', '--')}").glob("snapshots/*/config.json"))


def check_model(policy: PolicyConfig, layout: Layout, weights: bool = True) -> ModelFacts:  # noqa: C901
    """Check that the model exists, has a supported architecture, and can be sharded in the configured layout.

    Args:
        weights: True if the folder must contain weights.

    Returns:
        The facts about the model that are available on this machine.

    Raises:
        ConfigError: if a check fails.
    """
    name = policy.model_name
    folder = Path(policy.model_name)
    if policy.model_factory:
        ImportPath(policy.model_factory).find_function("policy.model_factory")
        # A config that inherits a factory would train a random model under the name of a pretrained one.
        if may_be_on_the_hub(name):
            raise ConfigError(
                f"policy.model_name: {name} has the form of a hub name, but policy.model_factory would create a model "
                f"in this folder; set policy.model_factory to null, or write ./{name}"
            )
    elif is_broken_link(folder):
        raise ConfigError(f"policy.model_name: {name} is a broken symbolic link")
    elif not folder.exists() and not may_be_on_the_hub(name):
        raise ConfigError(
            f"policy.model_name: {name} is neither a folder nor a hub name (organisation/model); set "
            "policy.model_factory to create it"
        )
    model = read_model(policy)
    source = model.source
    if source is None and folder.exists() and not folder.is_dir():
        raise ConfigError(f"policy.model_name: {name} is neither a folder nor a model file in a supported format")
    description = model.description
    if source is not None:
        _check_adapter(source, policy)
    elif folder.is_dir() and (weights or has_weight_files(folder)):
        check_weight_files(folder, _remake(policy))
        if description is not None:
            check_tensors(folder, description.family)
    if description is not None:
        _check_shape(description, policy, layout)
    return model


def _check_adapter(source: Source, policy: PolicyConfig) -> None:
    """Check that a PEFT adapter fits its base model and the section policy.lora. Raises ConfigError."""
    if source.format is not Format.PEFT:
        return
    key = "policy.model_name"
    adapter = read_peft_adapter(source.path, key)
    base = described_by(source, key)
    if policy.lora.rank:
        check_continued(adapter, policy.lora, base, key)
    elif base is not None:
        check_fit(read_shapes(adapter, key, base), base, key)


def check_continued(adapter: PeftAdapter, lora: LoraConfig, base: Path | None, key: str) -> None:
    """Check that a LoRA run can start from the matrices of a PEFT adapter.

    Args:
        base: Hugging Face folder of the base model. None: not available yet, so shapes and layers are not checked.
        key: config key of the adapter, for messages.

    Raises:
        ConfigError: if rank, alpha, modules or sharing differ, or the adapter does not fit ``base``.
    """
    shapes = read_shapes(adapter, key, base)
    folder = adapter.folder
    ranks = sorted({rank for rank, _, _ in shapes.values()})
    if ranks != [lora.rank]:
        raise _unequal("rank", lora.rank, " and ".join(map(str, ranks)), folder)
    alpha = adapter.scale(lora.rank) * lora.rank
    if not math.isclose(alpha, lora.alpha, rel_tol=1e-9):
        why = f" (rsLoRA: {adapter.alpha:g} x the square root of {lora.rank})" if adapter.rslora else ""
        raise _unequal("alpha", f"{lora.alpha:g}", f"{alpha:.10g}{why}", folder)
    names = {module.rpartition(".")[2] for module in shapes}
    if names != set(lora.target_modules):
        raise _unequal("target_modules", ", ".join(sorted(lora.target_modules)), ", ".join(sorted(names)), folder)
    if lora.share_a:
        raise _unequal("share_a", "true", "a separate matrix A for each module", folder)
    if base is None:
        return
    check_fit(shapes, base, key)
    weights = tensor_shapes(base, key)
    content = read_json_object(base / "config.json", key)
    trained = weights.keys() - {*prediction_weights(weights, content), *tower_weights(weights, content)}
    modules = (name.removesuffix(".weight") for name in trained if name.endswith(".weight"))
    missing = sorted(module for module in modules if module.rpartition(".")[2] in names and module not in shapes)
    if missing:
        raise ConfigError(
            f"policy.lora.target_modules: the adapter {folder} has no matrices for {missing[0]}, which the run would "
            "train"
        )


def _unequal(name: str, expected: object, found: str, folder: Path) -> ConfigError:
    return ConfigError(f"policy.lora.{name}: must match the adapter {folder} ({found}), got {expected}")


def check_engines(model: ModelFacts) -> None:
    """Check that vLLM on CPU supports the model's sizes, if they are known. Raises ConfigError."""
    found = model.description
    if found is None:
        return
    size = next((heads.size for heads in found.layer_heads if heads.size not in CPU_HEAD_SIZES), None)
    if size is not None:
        raise ConfigError(
            f"policy.model_name: vLLM on CPUs does not support attention heads of size {size}; supported "
            f"sizes: {', '.join(map(str, CPU_HEAD_SIZES))}"
        )
    if found.experts and found.hidden % CPU_EXPERT_MULTIPLE:
        sizes = f"a hidden size that is a multiple of {CPU_EXPERT_MULTIPLE} for models with experts, got {found.hidden}"
        raise ConfigError(f"policy.model_name: vLLM on CPUs requires {sizes}")


def _check_sampling(model: ModelDescription, config: Config) -> None:
    """Check that vLLM accepts new weights of the model, has the policy's sliding windows, and has kernels for its
    precision. Raises ConfigError."""
    family = model.family
    if not family.engine_updates:
        raise ConfigError(
            f"policy.model_name: vLLM loses new weights of {family.model_type} models; train them without engines, for "
            "example with sft"
        )
    if family.latent and not model.rotates_pairs:
        raise ConfigError(
            "policy.model_name: vLLM ignores rope_interleave: false in config.json; train the model without engines, "
            "for example with sft"
        )
    if model.index and not config.cluster.gpus_per_node:
        raise ConfigError(
            f"policy.model_name: vLLM on CPUs does not support sparse attention ({family.model_type}); train the model "
            "without engines, for example with sft"
        )
    if model.tied and not family.engine_ties:
        raise ConfigError(
            f"policy.model_name: vLLM ignores tie_word_embeddings of {family.model_type} models; train the model "
            "without engines, for example with sft"
        )
    lacks_gate = model.experts > 0 and not family.gated_mlp
    if lacks_gate and not config.cluster.gpus_per_node:
        raise ConfigError(
            f"policy.model_name: vLLM on CPUs does not support experts without a gate ({family.model_type}); train the "
            "model without engines, for example with sft"
        )
    if family.delta and not config.cluster.gpus_per_node and config.policy.precision != "bfloat16":
        raise ConfigError(
            "policy.precision: vLLM on CPUs computes gated delta net layers only in bfloat16; set policy.precision: "
            "bfloat16"
        )
    if family.windows == "late" and model.window is not None and not all(model.windows):
        # vLLM's Qwen models have one window for all layers.
        raise ConfigError(
            "policy.model_name: vLLM does not support a sliding window in only some layers (max_window_layers, "
            f"layer_types) of {family.model_type}; set use_sliding_window: false in config.json"
        )


def _check_shape(model: ModelDescription, policy: PolicyConfig, layout: Layout) -> None:  # noqa: C901
    """Check that the layout divides the model's heads, layers and experts, and that the context is long enough. Raises
    ConfigError."""
    heads, experts, family = model.heads, model.experts, model.family
    groups = sorted({own.groups for own in model.layer_heads})
    megatron = "policy.megatron_cfg"
    counts = [(heads, "heads"), *((count, "key-value heads") for count in groups)]
    if mamba := family.mamba:
        counts += [(model.fields[mamba.heads], "Mamba heads"), (model.fields[mamba.groups], "Mamba groups")]
    if family.delta:
        counts.append((model.delta.key_heads, "key heads of gated delta nets"))
    _check_divides(f"{megatron}.tensor_model_parallel_size", layout.tensor, counts)
    if model.is_recurrent and policy.megatron_cfg.fp8:
        kind = "Mamba-2" if mamba else "gated delta net"
        raise ConfigError(f"{megatron}.fp8: not supported for models with {kind} layers")
    check_stages(model.layers, policy.megatron_cfg)
    _check_tower(model, policy)
    _check_divides("policy.generation.vllm_cfg.tensor_parallel_size", layout.engine_tensor, [(heads, "heads")])
    if layout.expert > 1 and not experts:
        raise ConfigError(f"{megatron}.expert_model_parallel_size: the model in {policy.model_name} has no experts")
    if experts:
        _check_divides(f"{megatron}.expert_model_parallel_size", layout.expert, [(experts, "experts")])
        if layout.expert_tensor > 1 and family.biases:
            raise ConfigError(f"{megatron}.expert_tensor_parallel_size: must be 1, because the experts have biases")
    for name in ("freeze_moe_router", "moe_router_dtype"):
        if getattr(policy.megatron_cfg, name) and not experts:
            raise ConfigError(
                f"{megatron}.{name}: has no effect because the model in {policy.model_name} has no experts; remove it"
            )
    check_router_replay(policy, layout, has_experts=bool(experts))
    if policy.lora.rank:
        check_adapted_layers(policy.lora.target_modules, model)
    _check_attention(model, policy.megatron_cfg)
    if experts and layout.tensor > 1 and not policy.megatron_cfg.sequence_parallel:
        raise ConfigError(f"{megatron}.sequence_parallel: must be true for a model with experts and tensor parallelism")
    length = policy.max_total_sequence_length
    largest = model.fields["index_topk"] if model.index else length
    if length > largest:
        raise ConfigError(
            f"policy.max_total_sequence_length: {length} exceeds the {largest} keys of the model's sparse attention "
            f"(index_topk); use at most {largest}"
        )
    longest = model.fields.get("max_position_embeddings")
    if longest is not None and longest < length:
        raise ConfigError(f"policy.max_total_sequence_length: {length} exceeds the {longest} positions of the model")


def _check_tower(model: ModelDescription, policy: PolicyConfig) -> None:
    """Check that the first pipeline stage has all layers to which features of images are added. Raises ConfigError."""
    if model.tower is None:
        if policy.vision.train:
            raise ConfigError(f"policy.vision.train: the model in {policy.model_name} has no vision tower; remove it")
        return
    megatron, levels = policy.megatron_cfg, len(model.tower.deepstack)
    stages = megatron.pipeline_model_parallel_size * (megatron.virtual_pipeline_model_parallel_size or 1)
    counts = (megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage)
    first = stage_layers(model.layers, stages, *(counts if stages > 1 else (None, None)))[0]
    if len(first) < levels:
        raise ConfigError(
            f"policy.megatron_cfg.pipeline_model_parallel_size: the first of {stages} (virtual) stages has "
            f"{len(first)} layers, but the model adds features of images to its first {levels}; use fewer stages, or "
            f"set num_layers_in_first_pipeline_stage to at least {levels}"
        )


def _check_attention(model: ModelDescription, megatron: MegatronConfig) -> None:
    """Check that the kernels in the config support the model's attention and logits. Raises ConfigError."""
    special = model.special_attention
    if special and megatron.attention_backend in ("flash", "fused", "unfused"):
        raise ConfigError(
            f"policy.megatron_cfg.attention_backend: {megatron.attention_backend} is not supported for a model with "
            f"{special}; use auto or flex"
        )
    if megatron.fused_logprobs and model.logit_cap is not None:
        raise ConfigError(
            "policy.megatron_cfg.fused_logprobs: true is not supported for a model with a soft cap of its logits; "
            "remove it"
        )


def _check_divides(key: str, size: int, counts: list[tuple[int, str]]) -> None:
    common = math.gcd(*(count for count, _ in counts))
    for count, what in counts:
        if count % size:
            works = [n for n in range(1, common + 1) if common % n == 0]
            raise ConfigError(
                f"{key}: {size} does not divide the model's {count} {what}; possible: {', '.join(map(str, works))}"
            )


def check_tokenizer(policy: PolicyConfig, model: ModelFacts) -> None:
    """Check that the tokenizer folder contains a tokenizer. Raises ConfigError.

    Without this check, transformers would create an empty tokenizer.
    """
    name = policy.tokenizer_name
    folder = Path(name or policy.model_name)
    if name is None and model.source is not None:
        return  # The conversion of the model creates the tokenizer.
    if folder.is_dir():
        if not any((folder / file).is_file() for file in TOKENIZER_FILES):
            raise ConfigError(
                f"policy.tokenizer_name: {folder} does not contain a tokenizer ({', '.join(TOKENIZER_FILES)})"
            )
    elif name is not None and is_broken_link(folder):
        raise ConfigError(f"policy.tokenizer_name: {name} is a broken symbolic link")
    elif name is not None and not may_be_on_the_hub(name):
        raise ConfigError(f"policy.tokenizer_name: {name} is neither a folder nor a hub name (organisation/model)")


def _remake(policy: PolicyConfig) -> str:
    return "; delete the folder so that it is created again" if policy.model_factory else ""
