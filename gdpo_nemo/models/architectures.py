"""Properties of a model that are read from the fields of its config.json."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple

from gdpo_nemo.models.families import FAMILIES, Experts, Family
from gdpo_nemo.utils.errors import ConfigError


def last_name(module: str) -> str:
    """Return the last part of a module name, which selects modules for LoRA: ``q_proj`` for ``self_attn.q_proj``."""
    return module.rpartition(".")[2]


def linear_layers(family: Family) -> tuple[str, ...]:
    """Return the last parts of the names of the linear modules that may have adapters. The output layer comes last."""
    modules = family.modules
    mlp: tuple[str, ...] = modules.mlp
    if (experts := family.experts) and not experts.beside:  # dense layers have the same names as experts
        mlp = () if experts.only_stacked else tuple(filter(None, (experts.gate, experts.up, experts.down)))
    recurrent = (*mamba_linear(family), *delta_linear(family))
    names = (*modules.qkv, modules.attention_output, *mlp, *recurrent, modules.head)
    return tuple(dict.fromkeys(map(last_name, names)))


def mamba_linear(family: Family) -> tuple[str, ...]:
    """Return the linear modules of a Mamba-2 layer, relative to the layer."""
    return (f"{family.mamba.mixer}.in_proj", f"{family.mamba.mixer}.out_proj") if family.mamba else ()


def delta_linear(family: Family) -> tuple[str, ...]:
    """Return the linear modules of a gated delta net layer, relative to the layer. The output projection is last."""
    delta = family.delta
    return tuple(f"{delta.mixer}.{module}" for module in (*delta.projections, "out_proj")) if delta else ()


CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Attention head sizes supported by vLLM's CPU kernels."""

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields with the number of experts. The field's name depends on the family."""


FULL = "full_attention"
"""Value of ``layer_types`` for layers whose queries attend to all earlier keys."""
SLIDING = "sliding_attention"
"""Value of ``layer_types`` for layers with a sliding window."""


_TEXT_MODELS = {"mistral3": ("mistral", "ministral3")}
"""Types of text models by type of their image model, if they are not this type with ``_text``. The first is the default
of transformers."""


def text_fields(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the config.json fields of the text model inside an image model.

    Return None for other models, and if the text model's family is not supported.

    Args:
        content: fields of the image model's config.json.
    """
    inner = content.get("text_config")
    kinds = _TEXT_MODELS.get(str(content.get("model_type")), (f"{content.get('model_type')}_text",))
    if not isinstance(inner, dict) or inner.get("model_type", kinds[0]) not in kinds:
        return None
    kind = str(inner.get("model_type", kinds[0]))
    if kind not in FAMILIES:
        return None
    shared = {key: content[key] for key in ("tie_word_embeddings", "dtype", "torch_dtype") if key in content}
    quantised = {key: value for key, value in content.items() if key.startswith("quantization")}
    return {**shared, **inner, **quantised, "model_type": kind, "architectures": [FAMILIES[kind].architecture]}


def active_window(fields: Mapping[str, Any]) -> Any:
    """Return the size of the sliding window, or None if the model has none or disables it."""
    return fields.get("sliding_window") if fields.get("use_sliding_window", True) else None


def is_windowed(content: Mapping[str, Any]) -> bool:
    """Return whether config.json enables a sliding window, even if no layer uses it."""
    return active_window(with_defaults(content)) is not None


def layer_windows(content: Mapping[str, Any]) -> list[int | None]:
    """Return for each layer the number of keys that a query attends to, or None for all keys."""
    fields = with_defaults(content)
    windows = FAMILIES[fields["model_type"]].windows
    count = fields["num_hidden_layers"]
    window = active_window(fields)
    if windows == "all":
        return [window] * count
    if windows == "none" or window is None:
        return [None] * count
    if kinds := fields.get("layer_types"):
        sliding = [kind == SLIDING for kind in kinds]
    elif windows == "late":
        sliding = [layer >= fields["max_window_layers"] for layer in range(count)]
    else:
        sliding = [(layer + 1) % fields["sliding_window_pattern"] != 0 for layer in range(count)]
    if FAMILIES[fields["model_type"]].last_layer_full:
        sliding[-1:] = [False]
    return [window if is_sliding else None for is_sliding in sliding]


def with_defaults(content: Mapping[str, Any]) -> dict[str, Any]:
    """Add transformers' defaults for the family to the fields of a config.json. Return the result.

    If the family has different types of layers, their types and their number are also added.
    """
    family = FAMILIES[content["model_type"]]
    fields = {**family.defaults, **content}
    if family.layer_period and fields.get(family.layer_types) is None:
        period, layers = fields[family.layer_period], fields.get("num_hidden_layers")
        first, second = family.layers
        if isinstance(period, int) and period > 0 and isinstance(layers, int):
            fields[family.layer_types] = [first if layer % period else second for layer in range(1, layers + 1)]
    if family.experts and family.experts.chosen in fields:
        fields.setdefault("num_experts_per_tok", fields[family.experts.chosen])
    if family.pattern is None:
        return fields
    key, types = family.pattern
    if content.get(family.layer_types) is None and isinstance(pattern := content.get(key), str):
        fields[family.layer_types] = [types.get(letter, letter) for letter in pattern]
    found = fields[family.layer_types]
    return {**fields, "num_hidden_layers": len(found) if isinstance(found, list) else 0}


def has_optional_experts(family: Family) -> bool:
    """Return whether only some models of the family have experts."""
    return bool(family.experts and (family.pattern or family.experts.enabled))


def num_experts(content: Mapping[str, Any]) -> int:
    """Return the number of experts in an MoE layer, or 0 for a dense model."""
    family = FAMILIES[content["model_type"]]
    if not family.experts or (has_optional_experts(family) and not any(mixture_layers(content))):
        return 0
    fields = with_defaults(content)
    return next((fields[key] for key in EXPERT_COUNTS if fields.get(key)), 0)


def layer_symbols(content: Mapping[str, Any]) -> list[str]:
    """Return Megatron's Hybrid layers of each layer: ``M``, ``G``, ``*``, ``-`` and ``E`` (see ``Family.layers``)."""
    family = FAMILIES[content["model_type"]]
    fields = with_defaults(content)
    count = fields["num_hidden_layers"]
    types = fields[family.layer_types] if len(family.layers) > 1 else [*family.layers] * count
    mlps = ["E" if has_experts else "-" for has_experts in _layers_with_experts(fields, family.experts)]
    return [family.layers[kind].replace("?", mlp) for kind, mlp in zip(types, mlps)]


def _layers_with_experts(fields: Mapping[str, Any], experts: Experts | None) -> list[bool]:
    layers = range(fields["num_hidden_layers"])
    if experts is None or (experts.enabled and not fields.get(experts.enabled)):
        return [False for _ in layers]
    kinds = fields.get(experts.kinds) if experts.kinds else None
    if kinds is not None:
        return [kind == "sparse" for kind in kinds]
    dense = (fields.get(experts.dense_layers) if experts.dense_layers else None) or ()
    if experts.first_dense:
        dense = range(fields.get(experts.first_dense) or 0)
    period = (fields.get(experts.period) if experts.period else None) or 1
    return [layer not in dense and (layer + 1) % period == 0 for layer in layers]


def is_recurrent(content: Mapping[str, Any]) -> bool:
    """Return whether a supported model has recurrent layers (Mamba-2 or gated delta net)."""
    return content.get("model_type") in FAMILIES and bool({"M", "G"} & set("".join(layer_symbols(content))))


def mixture_layers(content: Mapping[str, Any]) -> list[bool]:
    """Return for each layer whether it is an MoE layer."""
    return ["E" in symbols for symbols in layer_symbols(content)]


def mamba_sections(content: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    """Return the rows of a Mamba-2 layer's input projection: gate, input, B and C of each group, step sizes."""
    fields = with_defaults(content)
    mamba = FAMILIES[fields["model_type"]].mamba
    if mamba is None:
        raise ValueError(f"{fields['model_type']} has no Mamba-2 layers")
    inner = fields[mamba.heads] * fields[mamba.head_size]
    states = fields[mamba.groups] * fields[mamba.state]
    return inner, inner, states, states, fields[mamba.heads]


class DeltaSizes(NamedTuple):
    """Sizes of a gated delta net layer: numbers of heads, and sizes of a head of keys and of values."""

    key_heads: int
    value_heads: int
    key: int
    value: int

    @property
    def sections(self) -> tuple[int, int, int, int, int, int]:
        """Rows of the input projections: queries, keys, values, gates, write strengths (beta) and decays (alpha)."""
        keys, values = self.key_heads * self.key, self.value_heads * self.value
        return keys, keys, values, values, self.value_heads, self.value_heads


def delta_sizes(content: Mapping[str, Any]) -> DeltaSizes | None:
    """Return the sizes of the model's gated delta net layers, or None if its family has no such layers."""
    fields = with_defaults(content)
    delta = FAMILIES[fields["model_type"]].delta
    if delta is None:
        return None
    return DeltaSizes(*(fields[key] for key in (delta.key_heads, delta.value_heads, delta.key_size, delta.value_size)))


def head_size(content: Mapping[str, Any]) -> int:
    """Return the size of one head of queries and keys."""
    fields = with_defaults(content)
    if FAMILIES[content["model_type"]].latent:
        return int(fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"])
    return int(with_defaults(content).get("head_dim") or content["hidden_size"] // content["num_attention_heads"])


def key_value_heads(content: Mapping[str, Any]) -> int:
    """Return the number of key and value heads."""
    return int(with_defaults(content).get("num_key_value_heads") or content["num_attention_heads"])


class Heads(NamedTuple):
    """Heads of the attention in one layer."""

    size: int
    """Size of a head of queries and keys."""
    groups: int
    """Number of key and value heads."""
    keys_as_values: bool = False
    """True if the values are the projections of the keys (``Family.keys_as_values``)."""


def layer_heads(content: Mapping[str, Any]) -> list[Heads]:
    """Return the heads of each layer's attention, also for layers without attention."""
    fields = with_defaults(content)
    family = FAMILIES[fields["model_type"]]
    common = Heads(head_size(fields), key_value_heads(fields))
    windows = layer_windows(fields)
    if family.global_heads is None:
        return [common] * len(windows)
    shared = bool(family.keys_as_values and fields.get(family.keys_as_values))
    size, groups = (fields.get(field) for field in family.global_heads)
    other = {"head_dim": size, **({"num_key_value_heads": groups} if shared and groups else {})}
    layers = {layer: other for layer, window in enumerate(windows) if window is None}
    if (overrides := fields.get("per_layer_config")) is not None:
        layers = {int(layer): fields_of_layer for layer, fields_of_layer in overrides.items()}
    own = [layers.get(layer, {}) for layer in range(len(windows))]
    return [
        Heads(
            of_layer.get("head_dim", common.size),
            of_layer.get("num_key_value_heads", common.groups),
            shared and window is None,
        )
        for of_layer, window in zip(own, windows)
    ]


def rotated_share(fields: Mapping[str, Any]) -> Any:
    """Return the value of ``partial_rotary_factor``, of which transformers also reads the older place."""
    factor = rope_of(fields).get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    size = fields.get(FAMILIES[fields["model_type"]].rotary_size or "")
    if factor is None and isinstance(size, int):
        return size / head_size(fields)
    return 1 if factor is None else factor


def rotary_size(content: Mapping[str, Any], layers: str = "") -> int:
    """Return the number of elements of a head that the rotary embedding rotates.

    Args:
        layers: value of ``layer_types`` whose heads are used, if the embedding depends on it.
    """
    fields = with_defaults(content)
    if FAMILIES[content["model_type"]].latent:
        return int(fields["qk_rope_head_dim"])
    kinds = [FULL if window is None else SLIDING for window in layer_windows(fields)]
    heads = layer_heads(fields)[kinds.index(layers) if layers else 0]
    return int(heads.size * rotated_share(fields))


def rotates_pairs(content: Mapping[str, Any]) -> bool:
    """Return whether the rotary embedding rotates neighbouring elements (``Family.rotary_pairs``)."""
    pairs = FAMILIES[content["model_type"]].rotary_pairs
    return bool(with_defaults(content).get(pairs)) if isinstance(pairs, str) else pairs


def query_scale(content: Mapping[str, Any]) -> tuple[float, int] | None:
    """Return beta and n of ``Family.query_scale``, or None if positions do not scale the queries."""
    key = FAMILIES[content["model_type"]].query_scale
    rope = rope_of(with_defaults(content))
    beta = rope.get(key) if key else None
    return (beta, rope["original_max_position_embeddings"]) if beta else None


def latent_widths(content: Mapping[str, Any]) -> tuple[int, int, int, int] | None:
    """Return the widths of the latent vectors of q (0: none) and of k and v, of the rotated part of a head, and of a
    head's values, or None if the model has no latent attention."""
    if FAMILIES[content["model_type"]].latent is None:
        return None
    fields = with_defaults(content)
    q, key_value, rotated, value = (
        int(fields[key] or 0) for key in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim")
    )
    return q, key_value, rotated, value


def index_size(content: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number and the size of the heads of a layer's sparse index: (0, 0) if the family has none."""
    fields = with_defaults(content)
    latent = FAMILIES[fields["model_type"]].latent
    return (fields["index_n_heads"], fields["index_head_dim"]) if latent and latent.index else (0, 0)


def indexed_layers(content: Mapping[str, Any]) -> list[bool]:
    """Return for each layer whether it has a sparse index. Other layers of such models use that of an earlier layer."""
    fields = with_defaults(content)
    layers = range(fields["num_hidden_layers"])
    if not any(index_size(fields)):
        return [False for _ in layers]
    if kinds := fields.get("indexer_types") or fields.get("index_topk_pattern"):
        return [kind in ("full", "F") for kind in kinds]
    period, first = max(fields.get("index_topk_freq", 1), 1), fields.get("index_skip_topk_offset", 2)
    return [max(layer - first + 1, 0) % period == 0 for layer in layers]


def index_parameters(content: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the number of parameters of each layer's sparse index."""
    heads, size = index_size(content)
    q, hidden = (with_defaults(content).get(key) or 0 for key in ("q_lora_rank", "hidden_size"))
    count = heads * size * q + (heads + size) * hidden + 2 * size
    return tuple(count * has_index for has_index in indexed_layers(content))


def has_qk_norm(content: Mapping[str, Any]) -> bool:
    """Return whether the heads of queries and keys have norms."""
    norm = FAMILIES[content["model_type"]].qk_norm
    return bool(with_defaults(content).get(norm)) if isinstance(norm, str) else norm


def shared_width(content: Mapping[str, Any]) -> int:
    """Return the intermediate size of the shared experts of an MoE layer, or 0 if it has none."""
    experts = FAMILIES[content["model_type"]].experts
    if experts is None or not num_experts(content):
        return 0
    fields = with_defaults(content)
    if experts.shared_width:
        return int(fields[experts.shared_width])
    return int(fields.get(experts.shared) or 0) * int(fields[experts.width]) if experts.shared else 0


def expert_latent(content: Mapping[str, Any]) -> int:
    """Return the size of the latent vectors that the routed experts process, or 0 if they process hidden states."""
    experts = FAMILIES[content["model_type"]].experts
    if experts is None or experts.latent_size is None or not num_experts(content):
        return 0
    return int(with_defaults(content).get(experts.latent_size) or 0)


def expert_groups(content: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of groups of experts, and of groups from which a token's experts are chosen: (1, 1) if the
    experts are not grouped."""
    experts = FAMILIES[content["model_type"]].experts
    if experts is None or experts.groups is None:
        return 1, 1
    groups, chosen = (with_defaults(content).get(field) or 1 for field in experts.groups)
    return int(groups), int(chosen)


def has_qkv_bias(content: Mapping[str, Any]) -> bool:
    """Return whether the projections of queries, keys and values have biases."""
    bias = FAMILIES[content["model_type"]].qkv_bias
    return bool(with_defaults(content).get(bias)) if isinstance(bias, str) else bias


def special_attention(content: Mapping[str, Any]) -> str | None:
    """Return a property of the model for which FlexAttention replaces TransformerEngine's attention, or None."""
    fields = with_defaults(content)
    family = FAMILIES[fields["model_type"]]
    properties = {
        "sliding windows": any(layer_windows(fields)),
        "a soft cap of attention scores": family.score_cap and fields.get(family.score_cap) is not None,
        "attention sinks": family.sinks,
        "several rotary embeddings": family.layer_rope,
        "queries that positions scale": query_scale(fields),
    }
    return next((name for name, is_present in properties.items() if is_present), None)


def has_logit_cap(content: Mapping[str, Any]) -> bool:
    """Return whether the model has a soft cap of its logits."""
    fields = with_defaults(content)
    field = FAMILIES[fields["model_type"]].logit_cap
    return field is not None and fields.get(field) is not None


def is_tied(content: Mapping[str, Any]) -> bool:
    """Return whether the output layer shares its weight with the embedding."""
    return bool(with_defaults(content).get("tie_word_embeddings"))


def rope_of(content: Mapping[str, Any], layers: str = "") -> dict[str, Any]:
    """Return the parameters of the rotary embedding, including ``rope_type``.

    They are read from ``rope_parameters``, or from the older field ``rope_scaling``.

    Args:
        layers: value of ``layer_types`` whose parameters are returned, if the parameters depend on it.
    """
    parameters = content.get("rope_parameters") or content.get("rope_scaling") or {}
    if layers and isinstance(parameters, Mapping):
        # The older field applies only to layers without a window.
        is_nested = FULL in parameters or SLIDING in parameters
        parameters = parameters.get(layers) or {} if is_nested else parameters if layers == FULL else {}
    if not isinstance(parameters, Mapping):
        raise model_error(f"the rotary parameters in the model's config.json must be an object, got {parameters!r}")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    return {**parameters, "rope_type": "default" if kind is None else kind}


def model_error(problem: str) -> ConfigError:
    """Return the error of a model that is not supported."""
    return ConfigError(f"policy.model_name: {problem}")
