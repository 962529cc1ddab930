"""Description of a model: its family, the fields of its config.json, and the properties that follow from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from gdpo_nemo.models.architectures import has_optional_experts, model_error
from gdpo_nemo.models.families import FAMILIES, Family

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields with the number of experts. The field's name depends on the family."""
FULL = "full_attention"
"""Value of ``layer_types`` for layers whose queries attend to all earlier keys."""
SLIDING = "sliding_attention"
"""Value of ``layer_types`` for layers with a sliding window."""
KERNEL = 4
"""Length of the convolution in recurrent layers."""


class Heads(NamedTuple):
    """Heads of the attention in one layer."""

    size: int
    """Size of a head of queries and keys."""
    groups: int
    """Number of key and value heads."""
    keys_as_values: bool = False
    """True if the values are the projections of the keys (``Family.keys_as_values``)."""


class DeltaSizes(NamedTuple):
    """Sizes of a gated delta net layer: numbers of heads, and sizes of a head of keys and of values."""

    key_heads: int = 0
    value_heads: int = 0
    key: int = 0
    value: int = 0

    @property
    def sections(self) -> tuple[int, int, int, int, int, int]:
        """Rows of the input projections: queries, keys, values, gates, write strengths (beta) and decays (alpha)."""
        keys, values = self.key_heads * self.key, self.value_heads * self.value
        return keys, keys, values, values, self.value_heads, self.value_heads


class LatentSizes(NamedTuple):
    """Sizes of latent attention."""

    query: int
    """Size of the latent vectors of q (0: none)."""
    key_value: int
    """Size of the latent vectors of k and v."""
    rotated: int
    """Size of the rotated part of a head."""
    value: int
    """Size of a head's values."""


class TowerSizes(NamedTuple):
    """Sizes of a vision tower, under the names of their fields in ``vision_config``."""

    depth: int
    """Number of blocks."""
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    """Size of the embeddings, which is the text model's hidden size."""
    patch_size: int
    """Height and width of a patch in pixels."""
    spatial_merge_size: int
    """Height and width in patches of the square that becomes one embedding."""
    temporal_patch_size: int
    """Number of frames of a patch. An image fills all of them."""
    in_channels: int
    positions: int
    """Number of learned position embeddings, or 0."""
    deepstack: tuple[int, ...]
    """Indices of the blocks whose outputs are added to those of the text model's first layers."""

    @property
    def patch(self) -> int:
        """Number of values in a patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merged(self) -> int:
        """Size of the hidden states that become one embedding."""
        return self.hidden_size * self.spatial_merge_size**2


@dataclass(frozen=True, eq=False)
class ModelDescription:
    """Properties of a decoder-only model. ``family_checks.describe`` returns the description of a supported model."""

    family: Family
    fields: Mapping[str, Any]
    """Fields of config.json, or of the text model in an image model (see ``with_defaults``)."""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> ModelDescription:
        """Return the description of a model whose other fields may be invalid. The family must be supported.

        Args:
            content: fields of config.json.
        """
        family = FAMILIES[content["model_type"]]
        return cls(family, with_defaults(family, content))

    def _enabled(self, field: bool | str) -> bool:
        """Return the value of a boolean field, if the family has a field instead of a fixed value."""
        return bool(self.fields.get(field)) if isinstance(field, str) else field

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.fields["num_hidden_layers"])

    @property
    def hidden(self) -> int:
        """Size of the hidden states."""
        return int(self.fields["hidden_size"])

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return int(self.fields["num_attention_heads"])

    @property
    def ffn(self) -> int:
        """Intermediate size of a dense MLP."""
        return int(self.fields["intermediate_size"])

    @property
    def vocabulary(self) -> int:
        """Number of tokens of the vocabulary."""
        return int(self.fields["vocab_size"])

    @property
    def tied(self) -> bool:
        """True if the output layer shares its weight with the embedding."""
        return bool(self.fields.get("tie_word_embeddings"))

    # Layers

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """Megatron's Hybrid layers of each layer: ``M``, ``G``, ``*``, ``-`` and ``E`` (see ``Family.layers``)."""
        family = self.family
        types = self.fields[family.layer_types] if len(family.layers) > 1 else [*family.layers] * self.layers
        mlps = ["E" if has_experts else "-" for has_experts in self._layers_with_experts()]
        return tuple(family.layers[kind].replace("?", mlp) for kind, mlp in zip(types, mlps))

    def _layers_with_experts(self) -> list[bool]:
        experts, fields = self.family.experts, self.fields
        layers = range(self.layers)
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

    @property
    def hf_layers(self) -> list[int]:
        """Index of the layer of each Hybrid layer."""
        layers: list[int] = []
        for layer, symbols in enumerate(self.symbols):
            layers += [layer] * len(symbols)
        return layers

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts."""
        return tuple(layer for layer, symbols in enumerate(self.symbols) if "E" in symbols)

    @property
    def is_recurrent(self) -> bool:
        """True if the model has recurrent layers (Mamba-2 or gated delta net)."""
        return bool({"M", "G"} & set("".join(self.symbols)))

    def count(self, symbol: str) -> int:
        """Return the number of Hybrid layers of a kind: ``*``, ``-``, ``E``, ``M`` or ``G``."""
        return "".join(self.symbols).count(symbol)

    def share(self, symbol: str) -> float:
        """Return the number of Hybrid layers of a kind per layer."""
        return self.count(symbol) / self.layers

    # Attention

    @property
    def window(self) -> Any:
        """Size of the sliding window, even if no layer uses it. None if the model has none or disables it."""
        return self.fields.get("sliding_window") if self.fields.get("use_sliding_window", True) else None

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer, the number of keys that a query attends to, or None for all keys."""
        kind, window, count = self.family.windows, self.window, self.layers
        if kind == "all":
            return (window,) * count
        if kind == "none" or window is None:
            return (None,) * count
        if kinds := self.fields.get("layer_types"):
            sliding = [layer_kind == SLIDING for layer_kind in kinds]
        elif kind == "late":
            sliding = [layer >= self.fields["max_window_layers"] for layer in range(count)]
        else:
            sliding = [(layer + 1) % self.fields["sliding_window_pattern"] != 0 for layer in range(count)]
        if self.family.last_layer_full:
            sliding[-1:] = [False]
        return tuple(window if is_sliding else None for is_sliding in sliding)

    @property
    def head_size(self) -> int:
        """Size of one head of queries and keys."""
        fields = self.fields
        if self.family.latent:
            return int(fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"])
        return int(fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"])

    @property
    def key_value_heads(self) -> int:
        """Number of key and value heads."""
        return int(self.fields.get("num_key_value_heads") or self.fields["num_attention_heads"])

    @cached_property
    def layer_heads(self) -> tuple[Heads, ...]:
        """Heads of each layer's attention, also for layers without attention."""
        fields, family = self.fields, self.family
        common = Heads(self.head_size, self.key_value_heads)
        if family.global_heads is None:
            return (common,) * self.layers
        shared = bool(family.keys_as_values and fields.get(family.keys_as_values))
        size, groups = (fields.get(field) for field in family.global_heads)
        other = {"head_dim": size, **({"num_key_value_heads": groups} if shared and groups else {})}
        layers = {layer: other for layer, window in enumerate(self.windows) if window is None}
        if (overrides := fields.get("per_layer_config")) is not None:
            layers = {int(layer): fields_of_layer for layer, fields_of_layer in overrides.items()}
        found = []
        for layer, window in enumerate(self.windows):
            own = layers.get(layer, {})
            size, groups = own.get("head_dim", common.size), own.get("num_key_value_heads", common.groups)
            found.append(Heads(size, groups, shared and window is None))
        return tuple(found)

    @property
    def _attention(self) -> list[Heads]:
        return [heads for heads, symbols in zip(self.layer_heads, self.symbols) if "*" in symbols]

    @property
    def kv_heads(self) -> int:
        """Greatest common divisor of the numbers of key and value heads of the layers."""
        return math.gcd(*(heads.groups for heads in self.layer_heads))

    @cached_property
    def query(self) -> float:
        """Total width of all query heads, averaged over the layers with attention."""
        sizes = [heads.size for heads in self._attention]
        return self.heads * (sum(sizes) / max(1, len(sizes)))

    @cached_property
    def key_value(self) -> float:
        """Total width of keys and values, averaged over the layers with attention."""
        widths = [heads.groups * heads.size for heads in self._attention]
        return 2 * (sum(widths) / max(1, len(widths)))

    def cached(self, tensor: int) -> int:
        """Return the number of elements of keys and values that one of ``tensor`` ranks of an engine stores per
        token."""
        return 2 * sum(max(1, heads.groups // tensor) * heads.size for heads in self._attention)

    @property
    def qk_norm(self) -> bool:
        """True if the heads of queries and keys have norms."""
        return self._enabled(self.family.qk_norm)

    @property
    def qkv_bias(self) -> bool:
        """True if the projections of queries, keys and values have biases."""
        return self._enabled(self.family.qkv_bias)

    @property
    def output_gate(self) -> bool:
        """True if each query head has a gate of the same size."""
        return self.family.output_gate

    @cached_property
    def latent(self) -> LatentSizes | None:
        """Sizes of latent attention (None if the model has no latent attention)."""
        if self.family.latent is None:
            return None
        keys = "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim"
        return LatentSizes(*(int(self.fields[key] or 0) for key in keys))

    @property
    def index(self) -> tuple[int, int] | None:
        """Number and size of the heads of a layer's sparse index (None if the model has none)."""
        latent = self.family.latent
        return (self.fields["index_n_heads"], self.fields["index_head_dim"]) if latent and latent.index else None

    @cached_property
    def indexed_layers(self) -> list[bool]:
        """For each layer, True if it has a sparse index. Other layers of such models use that of an earlier layer."""
        layers, fields = range(self.layers), self.fields
        if self.index is None:
            return [False for _ in layers]
        if kinds := fields.get("indexer_types") or fields.get("index_topk_pattern"):
            return [kind in ("full", "F") for kind in kinds]
        period, first = max(fields.get("index_topk_freq", 1), 1), fields.get("index_skip_topk_offset", 2)
        return [max(layer - first + 1, 0) % period == 0 for layer in layers]

    @property
    def score_cap(self) -> float | None:
        """Soft cap of the attention scores (None if the model has none)."""
        return self.fields.get(self.family.score_cap) if self.family.score_cap else None

    @property
    def logit_cap(self) -> float | None:
        """Soft cap c of the logits x, c * tanh(x / c) (None if the model has none)."""
        return self.fields.get(self.family.logit_cap) if self.family.logit_cap else None

    @property
    def special_attention(self) -> str | None:
        """Property of the model for which FlexAttention replaces TransformerEngine's attention, or None."""
        properties = {
            "sliding windows": any(self.windows),
            "a soft cap of attention scores": self.score_cap is not None,
            "attention sinks": self.family.sinks,
            "several rotary embeddings": self.family.layer_rope,
            "queries that positions scale": self.query_scale,
            "rotary positions in images (M-RoPE)": self.family.tower,
        }
        return next((name for name, is_present in properties.items() if is_present), None)

    # Rotary embedding

    def rope(self, layers: str = "") -> dict[str, Any]:
        """Return the parameters of the rotary embedding, including ``rope_type``.

        They are read from ``rope_parameters``, or from the older field ``rope_scaling``.

        Args:
            layers: value of ``layer_types`` whose parameters are returned, if the parameters depend on it.
        """
        parameters = self.fields.get("rope_parameters") or self.fields.get("rope_scaling") or {}
        if layers and isinstance(parameters, Mapping):
            # The older field applies only to layers without a window.
            is_nested = FULL in parameters or SLIDING in parameters
            parameters = parameters.get(layers) or {} if is_nested else parameters if layers == FULL else {}
        if not isinstance(parameters, Mapping):
            raise model_error(f"the rotary parameters in the model's config.json must be an object, got {parameters!r}")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind is None or (kind == "mrope" and self.family.tower):
            kind = "default"
        return {**parameters, "rope_type": kind}

    @property
    def rotated_share(self) -> Any:
        """Value of ``partial_rotary_factor``, of which transformers also reads the older place."""
        factor = self.rope().get("partial_rotary_factor", self.fields.get("partial_rotary_factor"))
        size = self.fields.get(self.family.rotary_size or "")
        if factor is None and isinstance(size, int):
            return size / self.head_size
        return 1 if factor is None else factor

    def rotary_size(self, layers: str = "") -> int:
        """Return the number of elements of a head that the rotary embedding rotates.

        Args:
            layers: value of ``layer_types`` whose heads are used, if the embedding depends on it.
        """
        if self.latent:
            return self.latent.rotated
        kinds = [FULL if window is None else SLIDING for window in self.windows]
        heads = self.layer_heads[kinds.index(layers) if layers else 0]
        return int(heads.size * self.rotated_share)

    @property
    def rotates_pairs(self) -> bool:
        """True if the rotary embedding rotates neighbouring elements (``Family.rotary_pairs``)."""
        return self._enabled(self.family.rotary_pairs)

    @property
    def query_scale(self) -> tuple[float, int] | None:
        """Beta and n of ``Family.query_scale``, or None if positions do not scale the queries."""
        rope = self.rope()
        beta = rope.get(self.family.query_scale) if self.family.query_scale else None
        return (beta, rope["original_max_position_embeddings"]) if beta else None

    # Vision tower

    @cached_property
    def tower(self) -> TowerSizes | None:
        """Sizes of the vision tower (None if the model is a text model)."""
        tower = self.family.tower
        if tower is None:
            return None
        fields = {**tower.defaults, **self.fields["vision_config"]}
        positions = fields[tower.positions] if tower.positions else 0
        deepstack = tuple(fields[tower.deepstack]) if tower.deepstack else ()
        sizes: dict[str, Any] = {name: fields[name] for name in TowerSizes._fields[:-2]}
        return TowerSizes(**sizes, positions=positions, deepstack=deepstack)

    @cached_property
    def rotary_axes(self) -> tuple[int, ...] | None:
        """For each rotary frequency, the axis of the positions that it rotates by: 0 time, 1 rows, 2 columns of images.

        None if the model is a text model, whose positions have one axis.
        """
        if self.family.tower is None:
            return None
        sections: list[int] = self.rope()["mrope_section"]
        if not self.family.tower.interleaved:
            return (0,) * sections[0] + (1,) * sections[1] + (2,) * sections[2]
        axes = [0] * sum(sections)
        for axis in (1, 2):
            for index in range(axis, min(3 * sections[axis], len(axes)), 3):
                axes[index] = axis
        return tuple(axes)

    # MLPs and experts

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP or an expert."""
        return 3 if self.family.gated_mlp else 2

    @property
    def post_norms(self) -> int:
        """Number of norms of a layer's outputs of attention and MLP."""
        modules = self.family.modules
        return bool(modules.post_attention_norm) + bool(modules.post_mlp_norm)

    @cached_property
    def experts(self) -> int:
        """Number of experts in an MoE layer, or 0 for a dense model."""
        family = self.family
        if not family.experts or (has_optional_experts(family) and not self.moe_layers):
            return 0
        return next((self.fields[key] for key in EXPERT_COUNTS if self.fields.get(key)), 0)

    def _of_experts(self, name: str) -> int:
        """Return the value of the field of config.json that ``Experts`` names, or 0 without it or without experts."""
        field = getattr(self.family.experts, name, None)
        return int(self.fields.get(field) or 0) if field and self.experts else 0

    @property
    def active_experts(self) -> int:
        """Number of experts per token, or 0 for a dense model."""
        return self._of_experts("chosen")

    @property
    def expert_ffn(self) -> int:
        """Intermediate size of an expert, or 0 for a dense model."""
        return self._of_experts("width")

    @property
    def shared_ffn(self) -> int:
        """Intermediate size of the shared experts, which process all tokens, or 0 if the model has none."""
        return self._of_experts("shared_width") or self._of_experts("shared") * self.expert_ffn

    @property
    def expert_latent(self) -> int:
        """Size of the latent vectors that the routed experts process, or 0 if they process hidden states."""
        return self._of_experts("latent_size")

    @property
    def expert_hidden(self) -> int:
        """Size of the inputs and outputs of a routed expert."""
        return self.expert_latent or self.hidden

    @property
    def expert_groups(self) -> tuple[int, int]:
        """Number of groups of experts, and of groups from which a token's experts are chosen: (1, 1) if the experts are
        not grouped."""
        experts = self.family.experts
        if experts is None or experts.groups is None:
            return 1, 1
        groups, chosen = (self.fields.get(field) or 1 for field in experts.groups)
        return int(groups), int(chosen)

    # Recurrent layers

    @cached_property
    def mamba(self) -> tuple[int, int, int, int, int]:
        """Rows of a Mamba-2 layer's input projection: gate, input, B and C of each group, step sizes."""
        mamba, fields = self.family.mamba, self.fields
        if mamba is None:
            return 0, 0, 0, 0, 0
        inner = fields[mamba.heads] * fields[mamba.head_size]
        states = fields[mamba.groups] * fields[mamba.state]
        return inner, inner, states, states, fields[mamba.heads]

    @property
    def mamba_state(self) -> int:
        """State size of each channel of a Mamba-2 layer."""
        return int(self.fields[self.family.mamba.state]) if self.family.mamba else 0

    @property
    def mamba_channels(self) -> int:
        """Channels of a Mamba-2 layer's convolution."""
        return sum(self.mamba[1:4])

    @cached_property
    def delta(self) -> DeltaSizes:
        """Sizes of a gated delta net layer. They are 0 if the family has no such layers."""
        delta = self.family.delta
        if delta is None:
            return DeltaSizes()
        keys = delta.key_heads, delta.value_heads, delta.key_size, delta.value_size
        return DeltaSizes(*(self.fields[key] for key in keys))

    @property
    def delta_by_key_head(self) -> bool:
        """True if the rows of a gated delta net's projections are ordered by key head (``DeltaNet.by_key_head``)."""
        return self.family.delta is not None and self.family.delta.by_key_head

    @property
    def delta_channels(self) -> int:
        """Channels of a gated delta net layer's convolution."""
        return sum(self.delta.sections[:3])

    @property
    def recurrent_state(self) -> int:
        """Floats that a sequence's recurrent layers keep while an engine samples it, independent of its length."""
        mamba = self.mamba[1] * self.mamba_state + (KERNEL - 1) * self.mamba_channels
        delta = self.delta.sections[2] * self.delta.key + (KERNEL - 1) * self.delta_channels
        return self.count("M") * mamba + self.count("G") * delta


def with_defaults(family: Family, content: Mapping[str, Any]) -> dict[str, Any]:
    """Add transformers' defaults for the family to the fields of a config.json. Return the result.

    If the family has different types of layers, their types and their number are also added. The fields of the text
    model in an image model are at the top level of the result.
    """
    fields = {**family.defaults, **with_text_fields(content)}
    if family.layer_period and fields.get(family.layer_types) is None:
        period, layers = fields[family.layer_period], fields.get("num_hidden_layers")
        first, second = family.layers
        if isinstance(period, int) and period > 0 and isinstance(layers, int):
            fields[family.layer_types] = [first if layer % period else second for layer in range(1, layers + 1)]
    if family.pattern is None:
        return fields
    key, types = family.pattern
    if content.get(family.layer_types) is None and isinstance(pattern := content.get(key), str):
        fields[family.layer_types] = [types.get(letter, letter) for letter in pattern]
    found = fields[family.layer_types]
    return {**fields, "num_hidden_layers": len(found) if isinstance(found, list) else 0}


def with_text_fields(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json. If the family has a tower, the text model's fields are at the top level.

    Older folders of image models do not have a separate object for the text model.
    """
    kind = content.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None or family.tower is None:
        return dict(content)
    text = content.get("text_config")
    own = {key: value for key, value in content.items() if key != "text_config"}
    text = dict(text) if isinstance(text, Mapping) else {}
    tied = bool(own.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    shared = {key: own.get(key) for key in ("model_type", "architectures", "quantization_config")}
    return {**own, **text, **shared, "tie_word_embeddings": tied}
