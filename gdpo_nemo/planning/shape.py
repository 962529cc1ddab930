"""Parameters of a model per rank, savings from shared prompts, and disk space of recorded samples."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Iterable, Mapping

from gdpo_nemo.config.layout import Layout, Resolved, stage_layers
from gdpo_nemo.config.schema import LoraConfig
from gdpo_nemo.config.sections import replays_router
from gdpo_nemo.data import prefixes
from gdpo_nemo.data.packing import attention_cost
from gdpo_nemo.models.architectures import (
    DeltaSizes,
    Heads,
    delta_linear,
    delta_sizes,
    expert_latent,
    has_qk_norm,
    has_qkv_bias,
    index_parameters,
    is_tied,
    last_name,
    latent_widths,
    layer_heads,
    layer_symbols,
    mamba_linear,
    mamba_sections,
    num_experts,
    shared_width,
    with_defaults,
)
from gdpo_nemo.models.families import FAMILIES, Modules
from gdpo_nemo.models.sources import ModelFacts
from gdpo_nemo.planning.known_models import KNOWN

_KERNEL = 4
"""Length of the convolution in recurrent layers."""


@dataclass(frozen=True)
class Shape:
    """Dimensions of a decoder-only model."""

    layers: int
    hidden: int
    heads: int
    layer_heads: tuple[Heads, ...]
    """Heads of the attention of each layer."""
    ffn: int
    """Intermediate size of a dense MLP."""
    vocabulary: int
    tied: bool
    """True if the input embedding and the head share one matrix."""
    experts: int = 0
    active_experts: int = 0
    expert_ffn: int = 0
    symbols: tuple[str, ...] = ()
    """Megatron's Hybrid layers of each layer (see ``architectures.layer_symbols``)."""
    gated: bool = True
    """True if MLPs and experts have a gate."""
    mamba: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    """Rows of the sections of a Mamba-2 layer's input projection (see ``architectures.mamba_sections``)."""
    mamba_state: int = 0
    """State size of each channel of a Mamba-2 layer."""
    mamba_linear: tuple[str, ...] = ()
    delta: DeltaSizes = DeltaSizes(0, 0, 0, 0)
    """Sizes of a gated delta net layer."""
    delta_linear: tuple[str, ...] = ()
    """Linear modules of a gated delta net layer (see ``architectures.delta_linear``)."""
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_norm_of_layer: bool = False
    sinks: bool = False
    biases: bool = False
    """True if the attention's output, routers and experts have biases."""
    latent: tuple[int, int, int, int] | None = None
    """With latent attention: widths of the latent vectors of q (0: none) and of k and v, of the rotated part of a head,
    and of a head's values."""
    indices: tuple[int, ...] = ()
    """Number of parameters of each layer's sparse index, which are not trained."""
    shared_ffn: int = 0
    """Intermediate size of the shared experts, which process all tokens."""
    expert_latent: int = 0
    """Size of the latent vectors that the routed experts process, or 0 if they process hidden states."""
    expert_modules: tuple[str, ...] = ()
    """Linear modules of an expert that may have adapters."""
    shared_modules: tuple[str, ...] = ()
    """Linear modules of the shared experts that may have adapters."""
    dense_beside: bool = False
    """True if the shared experts are a dense MLP with its own norms (``Experts.beside``)."""
    shared_scale: bool = False
    """True if each MoE layer has a linear layer with one output that scales the output of the shared experts."""
    output_gate: bool = False
    """True if each query head has a gate of the same size."""
    modules: Modules = Modules()
    """Names of the modules: of linear layers, to which adapters are added, and of norms after attention and MLP."""

    @property
    def post_norms(self) -> int:
        """Number of norms of a layer's outputs of attention and MLP."""
        return bool(self.modules.post_attention_norm) + bool(self.modules.post_mlp_norm)

    @property
    def kv_heads(self) -> int:
        """Greatest common divisor of the numbers of key and value heads of the layers."""
        return math.gcd(*(heads.groups for heads in self.layer_heads))

    @property
    def query(self) -> float:
        """Total width of all query heads, averaged over the layers with attention."""
        return self.heads * self._mean(heads.size for heads in self._attention)

    @property
    def key_value(self) -> float:
        """Total width of keys and values, averaged over the layers with attention."""
        return 2 * self._mean(heads.groups * heads.size for heads in self._attention)

    @property
    def _attention(self) -> list[Heads]:
        return [heads for heads, symbols in zip(self.layer_heads, self.symbols) if "*" in symbols]

    @staticmethod
    def _mean(values: Iterable[int]) -> float:
        found = list(values)
        return sum(found) / max(1, len(found))

    def cached(self, tensor: int) -> int:
        """Return the number of elements of keys and values that one of ``tensor`` ranks of an engine stores per
        token."""
        return 2 * sum(max(1, heads.groups // tensor) * heads.size for heads in self._attention)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts."""
        return tuple(layer for layer, symbols in enumerate(self.symbols) if "E" in symbols)

    def count(self, symbol: str) -> int:
        """Return the number of Hybrid layers of a kind: ``*``, ``-``, ``E``, ``M`` or ``G``."""
        return "".join(self.symbols).count(symbol)

    def share(self, symbol: str) -> float:
        """Return the number of Hybrid layers of a kind per layer."""
        return self.count(symbol) / self.layers

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP or an expert."""
        return 3 if self.gated else 2

    @property
    def expert_hidden(self) -> int:
        """Size of the inputs and outputs of a routed expert."""
        return self.expert_latent or self.hidden

    @property
    def mamba_channels(self) -> int:
        """Channels of a Mamba-2 layer's convolution."""
        return sum(self.mamba[1:4])

    @property
    def delta_channels(self) -> int:
        """Channels of a gated delta net layer's convolution."""
        return sum(self.delta.sections[:3])

    @property
    def recurrent_state(self) -> int:
        """Floats that a sequence's recurrent layers keep while an engine samples it, independent of its length."""
        mamba = self.mamba[1] * self.mamba_state + (_KERNEL - 1) * self.mamba_channels
        delta = self.delta.sections[2] * self.delta.key + (_KERNEL - 1) * self.delta_channels
        return self.count("M") * mamba + self.count("G") * delta

    @property
    def parameters(self) -> int:
        """Number of all parameters, as in a checkpoint."""
        dense, experts = self._layers(1, range(self.layers), 1, 1)
        return dense + experts + self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def active_parameters(self) -> int:
        """Number of parameters used per token, including the head but not the embedding."""
        dense, experts = self._layers(1, range(self.layers), 1, 1)
        active = self.active_experts / self.experts if self.experts else 0
        return int(dense + experts * active) + self.vocabulary * self.hidden

    def _layers(self, tensor: int, layers: range, expert: int, expert_tensor: int) -> tuple[int, int]:
        """Return the numbers of (dense, expert) parameters of ``layers`` on one rank of the parallel layout."""
        attending = [self.layer_heads[layer] for layer in layers if "*" in self.symbols[layer]]
        attention = sum(self._attention_parameters(heads, tensor) for heads in attending)
        symbols = "".join(self.symbols[layer] for layer in layers)
        matrices = self.mlp_matrices * self.hidden
        mlp = self.hidden + matrices * self.ffn // tensor
        router = self.hidden + (self.hidden + self.biases) * self.experts + matrices * self.shared_ffn // tensor
        router += self.hidden * (self.shared_scale + 2 * self.expert_latent)
        # three more norms, a factor of each of the router's inputs, and a factor of each expert's weight
        router += (4 * self.hidden + self.experts) * self.dense_beside
        inner, heads = self.mamba[0], self.mamba[-1]
        mamba = self.hidden * (sum(self.mamba) + inner) + (_KERNEL + 1) * self.mamba_channels + 3 * heads + inner
        sections = self.delta.sections
        delta = self.hidden * (sum(sections) + sections[2]) + _KERNEL * self.delta_channels + 2 * sections[-1]
        sizes = {"-": mlp, "E": router, "M": self.hidden + mamba // tensor}
        sizes["G"] = self.hidden + self.delta.value + delta // tensor
        dense = attention + sum(size * symbols.count(symbol) for symbol, size in sizes.items())
        dense += sum(self.indices[layer] for layer in layers)
        per_expert = self.mlp_matrices * self.expert_hidden * self.expert_ffn // expert_tensor
        per_expert += (2 * self.expert_ffn + self.hidden) * self.biases
        return dense, symbols.count("E") * self.experts // expert * per_expert

    def _attention_parameters(self, heads: Heads, tensor: int) -> int:
        """Return the number of parameters of a layer's attention on one rank, with the norms of a layer's outputs."""
        query, key = self.heads * heads.size, heads.groups * heads.size
        width = query * (1 + self.output_gate) + key * (1 if heads.keys_as_values else 2)
        count = self.hidden * width // tensor + query * self.hidden // tensor
        norms = (query + key) // tensor if self.qk_norm_of_layer else 2 * heads.size
        count += width // tensor * self.qkv_bias + norms * self.qk_norm
        if self.latent:
            count = self._latent_parameters(heads, tensor)
        count += self.heads // tensor * self.sinks + self.hidden * self.biases
        return count + self.hidden * (1 + self.post_norms)

    def _latent_parameters(self, heads: Heads, tensor: int) -> int:
        """Return the number of parameters of latent attention on one rank. The projections to latent vectors are
        replicated."""
        q, key_value, rotated, value = self.latent or (0, 0, 0, 0)
        up = self.heads * (heads.size - rotated + value)
        replicated = (q and (self.hidden + 1) * q) + self.hidden * (key_value + rotated) + key_value
        split = (q or self.hidden) * self.heads * heads.size + key_value * up + self.heads * value * self.hidden
        return replicated + split // tensor

    def on_rank(self, layout: Layout, stage: int) -> tuple[int, int]:
        """Return the numbers of (dense, expert) parameters on a rank of ``stage``, with tied copies and padding."""
        layers = self.on_stage(layout, stage)
        dense, experts = self._layers(layout.tensor, layers, layout.expert, layout.expert_tensor)
        table = -(-self.vocabulary // layout.tensor) * self.hidden
        first = stage == 0
        last = stage == layout.pipeline - 1
        tables = first + (last and not (self.tied and first))
        return dense + tables * table + last * self.hidden, experts

    def adapters(self, layout: Layout, stage: int, lora: LoraConfig) -> tuple[int, int]:
        """Return the numbers of LoRA parameters on a rank of ``stage``, outside of experts and of experts.

        Every tensor rank holds the unsharded matrices.
        """
        targets = set(lora.target_modules)
        held = self.on_stage(layout, stage)
        symbols = "".join(self.symbols[layer] for layer in held)
        width = 0
        fused: list[tuple[int, tuple[str, ...], tuple[int, ...]]] = []
        by_columns: list[tuple[int, str, int]] = []
        attention = Counter(self.layer_heads[layer] for layer in held if "*" in self.symbols[layer])
        for heads, count in attention.items():
            output, key = self.heads * heads.size, heads.groups * heads.size
            if self.latent:
                output, latent = self._latent_adapters(heads, targets, layout.tensor)
                width += count * latent
            else:
                matrices = 2 if heads.keys_as_values else 3
                rows = (output * (1 + self.output_gate), key, key)[:matrices]
                fused.append((count, self.modules.qkv[:matrices], rows))
            by_columns.append((count, self.modules.attention_output, output))
        if self.mamba_linear:
            fused.append((symbols.count("M"), self.mamba_linear[:1], (sum(self.mamba),)))
            by_columns.append((symbols.count("M"), self.mamba_linear[1], self.mamba[0]))
        if self.delta_linear:
            *projections, delta_out = self.delta_linear
            sections = self.delta.sections
            first = 3 if len(projections) > 2 else 4
            rows = (sum(sections[:first]), *(sections[3:] if first == 3 else (sum(sections[4:]),)))
            fused.append((symbols.count("G"), tuple(projections), rows))
            by_columns.append((symbols.count("G"), delta_out, sections[2]))
        width += sum(
            count * self._adapter_width(modules, widths, targets, layout.tensor, lora.share_a)
            for count, modules, widths in fused
        )
        for count, module, inputs in by_columns:
            if last_name(module) in targets:
                width += count * (inputs // layout.tensor + self.hidden)
        head = 0
        if last_name(self.modules.head) in targets and stage == layout.pipeline - 1:
            head = self.hidden + -(-self.vocabulary // layout.tensor)
        width += symbols.count("-") * self._mlp_adapters(self.modules.mlp, self.ffn, targets, layout.tensor, lora)
        experts = 0
        mixtures = symbols.count("E")
        if self.shared_modules:
            width += mixtures * self._mlp_adapters(self.shared_modules, self.shared_ffn, targets, layout.tensor, lora)
        if self.expert_modules:
            each = self._mlp_adapters(
                self.expert_modules, self.expert_ffn, targets, layout.expert_tensor, lora, self.expert_hidden
            )
            experts = mixtures * self.experts // layout.expert * each
        return (width + head) * lora.rank, experts * lora.rank

    def _mlp_adapters(
        self,
        modules: tuple[str, ...],
        ffn: int,
        targets: set[str],
        tensor: int,
        lora: LoraConfig,
        hidden: int | None = None,
    ) -> int:
        """Return the number of LoRA parameters of an MLP with the intermediate size ``ffn``, per unit of LoRA rank.

        ``hidden`` is the size of its inputs and outputs (None for the model's hidden size).
        """
        hidden = hidden or self.hidden
        *gate_up, down = modules
        widths = (ffn,) * (1 + self.gated)
        count = self._adapter_width(tuple(gate_up), widths, targets, tensor, lora.share_a, hidden) if ffn else 0
        return count + (ffn // tensor + hidden) * (ffn > 0 and last_name(down) in targets)

    def _latent_adapters(self, heads: Heads, targets: set[str], tensor: int) -> tuple[int, int]:
        """Return the width of the output projection's input, and the number of LoRA parameters of the other modules of
        latent attention per unit of LoRA rank."""
        q, key_value, rotated, value = self.latent or (0, 0, 0, 0)
        query, query_up, key_value_up = (last_name(module) in targets for module in self.modules.qkv)
        adapted = query_up if q else query
        count = adapted * ((q or self.hidden) + self.heads * heads.size // tensor)
        count += key_value_up * (key_value + self.heads * (heads.size - rotated + value) // tensor)
        return self.heads * value, count

    def _adapter_width(
        self,
        modules: tuple[str, ...],
        widths: tuple[int, ...],
        targets: set[str],
        tensor: int,
        share_a: bool,
        hidden: int | None = None,
    ) -> int:
        """Return the number of LoRA parameters for one Megatron matrix, per unit of LoRA rank.

        ``modules`` are the matrix's Hugging Face modules: one module per width in ``widths``, or a single fused module.
        ``hidden`` is as in ``_mlp_adapters``.
        """
        rows = dict(zip(modules, widths)) if len(modules) > 1 else {modules[0]: sum(widths)}
        adapted = [width for module, width in rows.items() if last_name(module) in targets]
        return sum(adapted) // tensor + (hidden or self.hidden) * (min(1, len(adapted)) if share_a else len(adapted))

    def on_stage(self, layout: Layout, stage: int) -> range:
        """Return the indices of the layers on a pipeline stage."""
        return stage_layers(self.layers, layout.pipeline, layout.first_layers, layout.last_layers)[stage]


def shape_from(content: Mapping[str, Any]) -> Shape:
    """Return the model shape from the content of a Hugging Face ``config.json``."""
    content = with_defaults(content)
    heads = content["num_attention_heads"]
    hidden = content["hidden_size"]
    layers = content["num_hidden_layers"]
    family = FAMILIES[content["model_type"]]
    experts = num_experts(content)
    mixture = family.experts if experts else None
    adapted = (mixture.gate, mixture.up, mixture.down) if mixture and not mixture.only_stacked else ()
    expert_modules = tuple(module for module in adapted if module)
    dense_beside = bool(mixture and mixture.beside)
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        layer_heads=tuple(layer_heads(content)),
        ffn=content["intermediate_size"],
        vocabulary=content["vocab_size"],
        tied=is_tied(content),
        experts=experts,
        active_experts=content["num_experts_per_tok"] if experts else 0,
        expert_ffn=content[mixture.width] if mixture else 0,
        expert_latent=expert_latent(content),
        expert_modules=expert_modules,
        shared_modules=family.modules.mlp if dense_beside else expert_modules,
        dense_beside=dense_beside,
        symbols=tuple(layer_symbols(content)),
        gated=family.gated_mlp,
        mamba=mamba_sections(content) if family.mamba else (0, 0, 0, 0, 0),
        mamba_state=content[family.mamba.state] if family.mamba else 0,
        mamba_linear=mamba_linear(family),
        delta_linear=delta_linear(family),
        delta=delta_sizes(content) or DeltaSizes(0, 0, 0, 0),
        qkv_bias=has_qkv_bias(content),
        qk_norm=has_qk_norm(content),
        qk_norm_of_layer=family.qk_norm_of_layer,
        sinks=family.sinks is not None,
        biases=family.biases,
        shared_ffn=shared_width(content),
        shared_scale=bool(experts and family.experts and family.experts.shared_scale),
        output_gate=family.output_gate,
        latent=latent_widths(content),
        indices=index_parameters(content),
        modules=family.modules,
    )


def model_shape(resolved: Resolved) -> Shape | None:
    """Return the shape of the config's model without any download.

    Sources are the model's folder, its factory, the local hub cache and the table ``KNOWN``. Return None if none of
    them contains the shape.
    """
    return shape_of(resolved.model, resolved.config.policy.model_name)


def shape_of(model: ModelFacts, name: str) -> Shape | None:
    """Return the shape of the model ``name``, or None if the shape is unknown."""
    content = model.fields or _known(name)
    return shape_from(content) if content else None


def _known(name: str) -> dict[str, Any] | None:
    return KNOWN.get(name) or KNOWN.get(name.removesuffix("-Instruct").removesuffix("-Base"))


def expected_saving(resolved: Resolved, prompt: float, completion: float) -> prefixes.Saving:
    """Return the savings from shared prompts in a step whose prompts and completions have these lengths, in tokens.

    See ``prefixes.expected_saving``. If the model's shape is unknown, attention has no cost.
    """
    content = resolved.model.fields or _known(resolved.config.policy.model_name)
    return prefixes.expected_saving(resolved, prompt, completion, attention_cost(content) if content else 0.0)


_PER_FILE = 7000.0
"""Bytes of a rollout file without samples, for names and statistics of its columns."""
_PER_SAMPLE = 20.0
_PER_TOKEN = 7.0
"""Compressed bytes per completion token: id, text and the sampler's log-prob.

The demo, whose vocabulary is small, needs 5.5 bytes.
"""
_PER_FLOAT = 3.6
"""Compressed bytes per token of each optional column: the trainer's log-prob and the entropy."""


def groups_saved(resolved: Resolved) -> int:
    """Return the number of groups per step whose samples are written."""
    config = resolved.config
    if not (resolved.algorithm.samples and config.rollout.save_samples):
        return 0
    groups = config.gdpo.num_prompts_per_step
    return groups if config.rollout.save_groups is None else min(groups, config.rollout.save_groups)


def recorded_bytes(resolved: Resolved, tokens: float) -> float:
    """Return the bytes of one step's rollout file if completions have ``tokens`` tokens on average."""
    rollout = resolved.config.rollout
    optional_columns = (rollout.save_trainer_logprobs or rollout.save_entropies) + rollout.save_entropies
    count = groups_saved(resolved) * resolved.sequences_per_prompt
    per_token = _PER_TOKEN + optional_columns * _PER_FLOAT + _routing_bytes(resolved)
    return _PER_FILE + count * (_PER_SAMPLE + tokens * per_token) if count else 0.0


def _routing_bytes(resolved: Resolved) -> float:
    """Return the compressed bytes of the sampler's experts per token, which are about evenly distributed."""
    policy = resolved.config.policy
    shape = shape_of(resolved.model, policy.model_name) if replays_router(policy) else None
    if shape is None or not shape.experts:
        return 0.0
    return len(shape.moe_layers) * shape.active_experts * math.log2(shape.experts) / 8
