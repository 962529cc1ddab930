"""Checks that a model's config.json is supported by its family."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gdpo_nemo.models.architectures import has_optional_experts, last_name, linear_layers, model_error
from gdpo_nemo.models.description import FULL, SLIDING, ModelDescription, TowerSizes
from gdpo_nemo.models.families import FAMILIES, Experts, Tower
from gdpo_nemo.utils.errors import ConfigError

ROPE_PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "proportional": (),
}
"""Supported types of rotary embeddings, and the numeric parameters that each requires.

The types dynamic and longrope are not supported, because their frequencies depend on the sequence length.
"""


SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
"""Fields that config.json must contain. For a missing field, transformers would use a default size."""


POSITIVE = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "rope_theta")
"""Numbers that must be finite and positive, if config.json contains them."""


MOST_LAYERS = 10_000
"""Largest number of layers. Many properties are lists with an element for each layer, before the sizes are checked."""


BIASES = ("attention_bias", "attention_out_bias", "mlp_bias", "use_bias", "mamba_proj_bias")
"""Fields that enable projection biases. Only the field named by ``Family.qkv_bias`` may be true."""


SWIGLU_ALPHA = 1.702
"""Supported factor in the sigmoid of a clamped SwiGLU (``Family.swiglu_limit``)."""


def describe(content: Mapping[str, Any]) -> ModelDescription:
    """Return the description of a model, after a check that the model is supported and its sizes are valid.

    Args:
        content: fields of config.json.

    Raises:
        ConfigError: if the family or a feature of the model is not supported, or a size is not a positive integer. The
            message lists the supported values.
    """
    _check_family(content)
    model = ModelDescription.of(content)
    _check_features(model)
    _check_sizes(model)
    if model.family.tower:
        _check_tower(model, model.family.tower)
    return model


def _check_features(model: ModelDescription) -> None:  # noqa: C901
    """Check that the family supports the model's features. Raises ConfigError."""
    family, fields = model.family, model.fields
    for key, feature in family.unsupported.items():
        if fields.get(key):
            raise model_error(f"{feature} ({key} {fields[key]!r}) are not supported for {family.model_type}")
    _check_window(model)
    _check_layers(model)
    activation = fields.get(family.activation_field, family.activation)
    if activation != family.activation:
        raise model_error(f"activation {activation!r} is not supported; supported: {family.activation}")
    for key in BIASES:
        if fields.get(key) and key != family.qkv_bias:
            raise model_error(f"{key} (projection biases) is not supported for {family.model_type}")
    if fields.get("qkv_bias") is False:
        raise model_error(f"qkv_bias: false is not supported for {family.model_type}")
    if family.biases and not model.qkv_bias:
        raise model_error(f"attention_bias: false is not supported for {family.model_type}")
    if fields.get("swiglu_alpha", SWIGLU_ALPHA) != SWIGLU_ALPHA:
        raise model_error(f"swiglu_alpha {fields['swiglu_alpha']} is not supported; supported: {SWIGLU_ALPHA}")
    _check_not_quantised(fields)
    for rope in _ropes(model):
        _check_rope(model, rope)
    if family.mamba:
        _check_mamba(fields)
    if family.delta and fields[family.delta.kernel] != 4:
        raise model_error(f"{family.delta.kernel} {fields[family.delta.kernel]!r} is not supported; supported: 4")


def _check_not_quantised(fields: Mapping[str, Any]) -> None:
    quantization = fields.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    key = "quantization_config" if quantization else "quantization"  # MLX writes the key quantization
    if quantization or fields.get("quantization"):
        by = method or ("MLX" if fields.get("quantization") else None)
        origin = f", these are by {by}" if by else ""
        raise model_error(
            f"quantised weights ({key}) are not supported{origin}; specify the folder of the unquantised model"
        )


def _check_window(model: ModelDescription) -> None:
    family, window = model.family, model.window
    if window is not None and family.windows == "none":
        raise model_error(f"sliding-window attention ({window} tokens) is not supported for {family.model_type}")
    if window is not None:
        _check_size("sliding_window", window)
    first = model.fields.get("max_window_layers")
    if window is not None and family.windows == "late" and not isinstance(first, int):
        raise model_error(f"max_window_layers in the model's config.json must be an integer, got {repr(first)[:40]}")
    if model.fields.get("use_bidirectional_attention") not in (None, False, "vision"):  # vision: only tokens of images
        raise model_error("bidirectional attention (use_bidirectional_attention) is not supported")


def _check_layers(model: ModelDescription) -> None:
    family, fields = model.family, model.fields
    key = family.layer_types
    layers = fields.get(key) or []
    if not isinstance(layers, list):
        raise model_error(f"{key} must be a list of texts, got {str(layers)[:40]}")
    slides = family.windows in ("late", "periodic") and model.window is not None
    supported = [*family.layers, *[SLIDING] * slides]
    kinds = sorted({str(kind) for kind in layers} - set(supported))
    if family.layer_period:
        _check_size(family.layer_period, fields[family.layer_period])
        if len(layers) != fields.get("num_hidden_layers"):
            raise model_error(f"{key} must have a value for each of the model's layers (num_hidden_layers)")
    if kinds:
        raise model_error(
            f"layers of type {', '.join(kinds)} ({key}) are not supported; supported: {', '.join(supported)}"
        )


def _check_mamba(fields: Mapping[str, Any]) -> None:
    """Check that Megatron's Mamba-2 layer computes what the config describes. Raises ConfigError."""
    for key, supported in (("mamba_hidden_act", "silu"), ("conv_kernel", 4), ("use_conv_bias", True)):
        if fields[key] != supported:
            raise model_error(f"{key} {fields[key]!r} is not supported; supported: {supported}")


def _ropes(model: ModelDescription) -> list[dict[str, Any]]:
    """Return the parameters of all rotary embeddings of the model."""
    kinds = (FULL, SLIDING) if model.family.layer_rope else ("",)
    return [model.rope(kind) for kind in kinds] if model.family.rope_types else []


def _check_rope(model: ModelDescription, rope: Mapping[str, Any]) -> None:
    family, kind = model.family, rope["rope_type"]
    if kind not in family.rope_types:
        supported = ", ".join(family.rope_types)
        raise model_error(f"rope scaling {kind!r} is not supported for {family.model_type}; supported: {supported}")
    if rope.get("rope_theta") is not None:
        _check_positive("rope_theta", rope["rope_theta"])
    for key in ROPE_PARAMETERS[kind]:
        if not isinstance(rope.get(key), (int, float)):
            raise model_error(f"rope scaling {kind!r} requires the number {key}")
    beta = rope.get(family.query_scale) if family.query_scale else None
    if beta is not None and (isinstance(beta, bool) or not isinstance(beta, (int, float))):
        raise model_error(f"{family.query_scale} must be a number, got {repr(beta)[:40]}")


def _check_rotated_share(model: ModelDescription, rope: Mapping[str, Any]) -> None:
    """Check the share of a head that is rotated. It may depend on the head's size. Raises ConfigError."""
    family = model.family
    factor = rope.get("partial_rotary_factor", 1) if family.layer_rope else model.rotated_share
    if factor != 1 and not family.partial_rotary and rope["rope_type"] != "proportional":
        raise model_error("a partial rotary embedding (partial_rotary_factor) is not supported")
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor <= 1:
        raise model_error(f"partial_rotary_factor must be a number above 0 and at most 1, got {repr(factor)[:40]}")


def _check_family(content: Mapping[str, Any]) -> None:
    """Check that the family is supported. Raises ConfigError."""
    kind = content.get("model_type")
    known = ", ".join(sorted(FAMILIES))
    if not isinstance(kind, str):
        raise model_error(f"the model's config.json has no model_type; supported: {known}")
    if kind not in FAMILIES:
        nested = " (a text model inside another model, text_config)" if "text_config" in content else ""
        raise model_error(f"model type {kind!r}{nested} is not supported; supported: {known}")
    for part, key in ((None, "num_hidden_layers"), ("text_config", "num_hidden_layers"), ("vision_config", "depth")):
        fields = content.get(part) if part else content
        layers = fields.get(key) if isinstance(fields, Mapping) else None
        if isinstance(layers, int) and layers > MOST_LAYERS:
            raise model_error(f"{key} must be at most {MOST_LAYERS:,}, got {repr(layers)[:40]}")
    names, architecture = content.get("architectures"), FAMILIES[kind].architecture
    if names and not isinstance(names, list):
        raise model_error(f"architectures in the model's config.json must be a list, got {names!r}")
    if names and architecture not in names:
        raise model_error(f"architecture {', '.join(map(str, names))} is not supported; supported: {architecture}")


def _check_sizes(model: ModelDescription) -> None:  # noqa: C901
    """Check that all sizes are positive integers that fit each other. Raises ConfigError."""
    family, content = model.family, model.fields
    for key in SIZES:
        _check_size(key, content.get(key))
    for key in ("num_key_value_heads", "head_dim", "max_position_embeddings"):
        if content.get(key) is not None:
            _check_size(key, content[key])
    for key in POSITIVE:
        if content.get(key) is not None:
            _check_positive(key, content[key])
    for rope in _ropes(model):
        _check_rotated_share(model, rope)
    heads, groups = content["num_attention_heads"], content.get("num_key_value_heads") or 1
    if heads % groups:
        raise model_error(f"num_attention_heads {heads} must be a multiple of num_key_value_heads {groups}")
    if family.global_heads:
        _check_heads(model, family.global_heads)
    if family.latent:
        for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank"):
            if key != "q_lora_rank" or content.get(key) is not None:
                _check_size(key, content.get(key))
        if content["v_head_dim"] > model.head_size:
            raise model_error("v_head_dim must be at most qk_nope_head_dim + qk_rope_head_dim")
        if model.key_value_heads != model.heads:
            raise model_error("num_key_value_heads must be equal to num_attention_heads with latent attention")
    if family.latent and family.latent.index:
        _check_index(content)
    if family.mamba:
        for key in (family.mamba.heads, family.mamba.head_size, family.mamba.groups, family.mamba.state):
            _check_size(key, content[key])
    if delta := family.delta:
        for key in (delta.key_heads, delta.value_heads, delta.key_size, delta.value_size):
            _check_size(key, content[key])
        sizes = model.delta
        if sizes.value_heads % sizes.key_heads:
            raise model_error(
                f"linear_num_value_heads {sizes.value_heads} must be a multiple of linear_num_key_heads "
                f"{sizes.key_heads}"
            )
    experts = family.experts
    if experts and not (has_optional_experts(family) and not model.moe_layers):
        _check_size(experts.count, model.experts)
        for key in (experts.width, experts.chosen):
            _check_size(key, content.get(key))
        _check_router(model, experts)


def _check_tower(model: ModelDescription, tower: Tower) -> None:
    """Check the fields of a vision tower. Raises ConfigError."""
    vision, hidden = model.fields.get("vision_config"), model.hidden
    if not isinstance(vision, Mapping):
        raise model_error(f"config.json of a {model.family.model_type} model must have the object vision_config")
    fields = {**tower.defaults, **vision}
    for key in (*TowerSizes._fields[:-2], *([tower.positions] if tower.positions else [])):
        _check_size(f"vision_config.{key}", fields.get(key))
    if fields["out_hidden_size"] != hidden:
        raise model_error(f"vision_config.out_hidden_size {fields['out_hidden_size']} must be hidden_size ({hidden})")
    if fields["hidden_size"] % (4 * fields["num_heads"]):
        raise model_error("vision_config.hidden_size must be a multiple of 4 * vision_config.num_heads")
    if tower.positions and math.isqrt(fields[tower.positions]) ** 2 != fields[tower.positions]:
        raise model_error(f"vision_config.{tower.positions} must be a square, got {fields[tower.positions]}")
    blocks = fields[tower.deepstack] if tower.deepstack else ()
    are_different = _are_sizes(blocks) and len(set(blocks)) == len(blocks) <= model.layers
    if not are_different or max(blocks, default=0) >= fields["depth"]:
        raise model_error(
            f"vision_config.{tower.deepstack} must contain different indices of the {fields['depth']} blocks, at most "
            f"one per layer of the text model, got {repr(blocks)[:40]}"
        )
    _check_axes(model, tower)


def _check_axes(model: ModelDescription, tower: Tower) -> None:
    """Check the rotary embedding by axes, and the placeholders of images. Raises ConfigError."""
    rope, size = model.rope(), model.rotary_size() // 2
    sections: Any = rope.get("mrope_section")
    if not _are_sizes(sections) or len(sections) != 3 or sum(sections) != size:
        raise model_error(
            f"mrope_section must contain three numbers of frequencies, together {size}, got {repr(sections)[:40]}"
        )
    if bool(rope.get("mrope_interleaved")) != tower.interleaved:
        raise model_error(f"mrope_interleaved must be {str(tower.interleaved).lower()} for {model.family.model_type}")
    for key in ("image_token_id", "video_token_id"):
        token: Any = model.fields.get(key)
        if type(token) is not int or not 0 <= token < model.vocabulary:
            raise model_error(f"{key} must be a token id below vocab_size, got {repr(token)[:40]}")


def _are_sizes(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(type(value) is int and value >= 0 for value in values)


def _check_index(content: Mapping[str, Any]) -> None:
    """Check the fields of sparse indices. Raises ConfigError."""
    for key in ("index_topk", "index_n_heads", "index_head_dim", "q_lora_rank"):
        _check_size(key, content.get(key))
    for key in ("index_topk_freq", "index_skip_topk_offset"):
        if not isinstance(content.get(key, 1), int):
            raise model_error(f"{key} in the model's config.json must be an integer, got {repr(content[key])[:40]}")
    for key, supported in (("indexer_types", ("full", "shared")), ("index_topk_pattern", ("F", "S"))):
        kinds = content.get(key) or ()
        has_all = isinstance(kinds, (list, str)) and len(kinds) == content["num_hidden_layers"]
        if kinds and not (has_all and all(kind in supported for kind in kinds)):
            raise model_error(f"{key} must contain {' or '.join(supported)} for each layer")


def _check_heads(model: ModelDescription, keys: tuple[str, str]) -> None:
    """Check the sizes of heads that depend on the type of a layer. Raises ConfigError."""
    content = model.fields
    size, groups = keys
    _check_size("sliding_window", content.get("sliding_window"))
    _check_size(size, content.get(size, model.head_size))
    if content.get(groups) is not None:
        _check_size(groups, content[groups])
    layers = content["num_hidden_layers"]
    kinds = content.get("layer_types")
    if kinds and len(kinds) != layers:
        raise model_error(f"layer_types must have {layers} values (num_hidden_layers), got {len(kinds)}")
    overrides = content.get("per_layer_config")
    if overrides is not None:
        indices = set(map(str, range(layers)))
        fields: list[Any] = list(overrides.values()) if isinstance(overrides, dict) else [None]
        known = {"head_dim", "num_key_value_heads"}
        if not all(isinstance(layer, dict) and known.issuperset(layer) for layer in fields):
            raise model_error("per_layer_config may contain only head_dim and num_key_value_heads of layers")
        if unknown := [layer for layer in overrides if (layer.lstrip("0") or "0") not in indices]:
            raise model_error(f"per_layer_config has fields of layer {unknown[0][:40]}, which does not exist")
        for layer in fields:
            for key, value in layer.items():
                _check_size(f"per_layer_config.{key}", value)
    by_kind = {(window is None, heads) for window, heads in zip(model.windows, model.layer_heads)}
    if len(by_kind) != len({has_window for has_window, _ in by_kind}):
        raise model_error("per_layer_config must be equal in all layers of one type")


def _check_router(model: ModelDescription, experts: Experts) -> None:
    """Check the fields of a router with sigmoid scores, groups and shared experts. Raises ConfigError."""
    fields = model.fields
    for key in (*(experts.groups or ()), experts.shared, experts.shared_width, experts.period, experts.latent_size):
        if key and fields.get(key) is not None:
            _check_size(key, fields[key])
    if experts.first_dense and fields.get(experts.first_dense):
        _check_size(experts.first_dense, fields[experts.first_dense])
    dense = (fields.get(experts.dense_layers) if experts.dense_layers else None) or []
    if not isinstance(dense, list):
        raise model_error(f"{experts.dense_layers} must be a list of layers, got {repr(dense)[:40]}")
    kinds = fields.get(experts.kinds) if experts.kinds else None
    if kinds is not None and (
        not isinstance(kinds, list)
        or len(kinds) != fields["num_hidden_layers"]
        or not {"dense", "sparse"}.issuperset(map(str, kinds))
    ):
        raise model_error(f"{experts.kinds} must contain dense or sparse for each layer")
    scaling = fields.get(experts.scaling) if experts.scaling else None
    if scaling is not None and (isinstance(scaling, bool) or not isinstance(scaling, (int, float)) or scaling <= 0):
        raise model_error(f"{experts.scaling} must be a positive number, got {repr(scaling)[:40]}")
    chosen = model.active_experts
    if experts.sigmoid and (chosen == 1 or (experts.normalized and not fields.get(experts.normalized, True))):
        unequal = f"{experts.normalized} false, or " if experts.normalized else ""
        raise model_error(
            f"weights of experts that do not sum to 1 ({unequal}num_experts_per_tok 1) are not supported for "
            f"{fields['model_type']}"
        )
    groups, group_limit = model.expert_groups
    # A group's score is the sum of its two highest scores. Megatron sums num_experts_per_tok / topk_group scores.
    if groups > 1 and (model.experts % groups or group_limit > groups or chosen != 2 * group_limit):
        raise model_error(
            f"{groups} groups of experts (n_group) with topk_group {group_limit} are not supported; n_group must "
            f"divide the {model.experts} experts, and topk_group must be half of num_experts_per_tok ({chosen})"
        )


_LARGEST_SIZE = 2**31
"""Maximum value of a size in config.json. This maximum limits loops over layers and experts."""


def _check_positive(key: str, value: Any) -> None:
    # A comparison with NaN is false.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _LARGEST_SIZE:
        raise model_error(f"{key} in the model's config.json must be a positive number, got {repr(value)[:40]}")


def _check_size(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LARGEST_SIZE:
        raise model_error(f"{key} in the model's config.json must be a positive integer, got {repr(value)[:40]}")


def check_adapted_layers(targets: Sequence[str], model: ModelDescription) -> None:
    """Check that LoRA adapters can be added to the target modules.

    Args:
        targets: last parts of module names, as in ``policy.lora.target_modules``.

    Raises:
        ConfigError: if the model has no such module, or adapters are not supported for it.
    """
    key = "policy.lora.target_modules"
    family = model.family
    known = linear_layers(family)
    if family.latent:
        factored = model.fields.get("q_lora_rank") is not None
        absent = last_name(family.latent.query if factored else family.latent.query_up)
        known = tuple(name for name in known if name != absent)
    missing = [name for name in targets if name not in known]
    if missing:
        raise ConfigError(
            f"{key}: a model of type {family.model_type} has no {', '.join(missing)}; its linear layers: "
            f"{', '.join(known)}"
        )
    head = last_name(family.modules.head)
    if model.tied and head in targets:
        raise ConfigError(
            f"{key}: the model's {head} is tied to the embedding (tie_word_embeddings) and gets no adapter; omit it"
        )
