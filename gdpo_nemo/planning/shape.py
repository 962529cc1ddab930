"""The sizes of a model from its Hugging Face configuration, and how many of its parameters each rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping

from gdpo_nemo.config.architectures import (
    has_qkv_bias,
    head_size,
    key_value_heads,
    mixture_layers,
    num_experts,
)
from gdpo_nemo.config.families import FAMILIES, Modules, last_name
from gdpo_nemo.config.files import known_model_config
from gdpo_nemo.config.layout import Layout
from gdpo_nemo.config.schema import Config, LoraConfig
from gdpo_nemo.config.stages import stage_layers

_QWEN25 = dict(model_type="qwen2", vocab_size=151936, num_key_value_heads=2)
_QWEN25_1_5B = _QWEN25 | dict(
    hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, intermediate_size=8960, tie_word_embeddings=True
)
_QWEN25_7B = _QWEN25 | dict(
    vocab_size=152064, hidden_size=3584, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
    intermediate_size=18944, tie_word_embeddings=False,
)  # fmt: skip
KNOWN: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": _QWEN25
    | dict(hidden_size=896, num_hidden_layers=24, num_attention_heads=14, intermediate_size=4864,
    tie_word_embeddings=True),
    "Qwen/Qwen2.5-1.5B": _QWEN25_1_5B,
    "Qwen/Qwen2.5-3B": _QWEN25
    | dict(hidden_size=2048, num_hidden_layers=36, num_attention_heads=16, intermediate_size=11008,
    tie_word_embeddings=True),
    "Qwen/Qwen2.5-7B": _QWEN25_7B,
    "Qwen/Qwen2.5-32B": _QWEN25
    | dict(
        vocab_size=152064, hidden_size=5120, num_hidden_layers=64, num_attention_heads=40, num_key_value_heads=8,
        intermediate_size=27648, tie_word_embeddings=False,
    ),
    "Qwen/Qwen3-30B-A3B": dict(
        model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, intermediate_size=6144, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, tie_word_embeddings=False,
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _QWEN25_1_5B | dict(tie_word_embeddings=False),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _QWEN25_7B,
    "microsoft/phi-4": dict(
        model_type="phi3", vocab_size=100352, hidden_size=5120, num_hidden_layers=40, num_attention_heads=40,
        num_key_value_heads=10, intermediate_size=17920, tie_word_embeddings=False,
    ),
    "ByteDance-Seed/Seed-OSS-36B": dict(
        model_type="seed_oss", vocab_size=155136, hidden_size=5120, num_hidden_layers=64, num_attention_heads=80,
        num_key_value_heads=8, head_dim=128, intermediate_size=27648, tie_word_embeddings=False,
    ),
    "meta-llama/Llama-3.1-8B": dict(
        model_type="llama", vocab_size=128256, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, intermediate_size=14336, tie_word_embeddings=False,
    ),
    "meta-llama/Llama-3.1-70B": dict(
        model_type="llama", vocab_size=128256, hidden_size=8192, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, intermediate_size=28672, tie_word_embeddings=False,
    ),
}  # fmt: skip
"""Shapes of models that recipes name, as their published config.json has them; instruction-tuned ones are alike."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder-only model."""

    layers: int
    hidden: int
    heads: int
    groups: int
    """Key-value heads."""
    head_size: int
    ffn: int
    """Intermediate size of a dense MLP."""
    vocabulary: int
    tied: bool
    """Whether input embedding and head are one matrix."""
    experts: int = 0
    active_experts: int = 0
    expert_ffn: int = 0
    mixture_layers: tuple[int, ...] = ()
    """Numbers of the layers whose MLP is a mixture."""
    qkv_bias: bool = False
    qk_norm: bool = False
    modules: Modules = Modules()
    """Names of the linear layers, which decide what an adapter is beside."""

    @property
    def query(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_size

    @property
    def key_value(self) -> int:
        """Width of keys and values together."""
        return 2 * self.groups * self.head_size

    @property
    def parameters(self) -> int:
        """All parameters, as a checkpoint holds them."""
        dense, experts = self._layers(1, range(self.layers), 1, 1)
        return dense + experts + self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def active_parameters(self) -> int:
        """Parameters that one token is multiplied with, the head among them, the embedding not."""
        dense, experts = self._layers(1, range(self.layers), 1, 1)
        share = self.active_experts / self.experts if self.experts else 0
        return int(dense + experts * share) + self.vocabulary * self.hidden

    def _layers(self, tensor: int, layers: range, expert: int, expert_tensor: int) -> tuple[int, int]:
        """(dense, expert) parameters of the layers on one rank."""
        width = self.query + self.key_value
        attention = self.hidden + self.hidden * width // tensor + self.query * self.hidden // tensor
        attention += width // tensor * self.qkv_bias + 2 * self.head_size * self.qk_norm
        mixtures = sum(layer in self.mixture_layers for layer in layers)
        mlp = self.hidden + 3 * self.hidden * self.ffn // tensor
        router = self.hidden + self.hidden * self.experts
        dense = len(layers) * attention + (len(layers) - mixtures) * mlp + mixtures * router
        if not mixtures:
            return dense, 0
        return dense, mixtures * self.experts // expert * (3 * self.hidden * self.expert_ffn // expert_tensor)

    def on_rank(self, layout: Layout, stage: int) -> tuple[int, int]:
        """(dense, expert) parameters of a rank of pipeline stage ``stage``, tied copies and padding counted."""
        layers = self.on_stage(layout, stage)
        dense, experts = self._layers(layout.tensor, layers, layout.expert, layout.expert_tensor)
        table = -(-self.vocabulary // layout.tensor) * self.hidden
        first = stage == 0
        last = stage == layout.pipeline - 1
        tables = first + (last and not (self.tied and first))
        return dense + tables * table + last * self.hidden, experts

    def adapters(self, layout: Layout, stage: int, lora: LoraConfig) -> int:
        """Parameters of LoRA's adapters on a rank of ``stage``; the whole side of each pair is on every tensor rank."""
        wanted = set(lora.target_modules)
        layer = sum(
            self._adapters_beside(fused, widths, wanted, layout.tensor, lora.share_a)
            for fused, widths in (
                (self.modules.qkv, (self.query, self.key_value // 2, self.key_value // 2)),
                (self.modules.gate_up, (self.ffn, self.ffn)),
            )
        )
        for module, width in ((self.modules.attention_output, self.query), (self.modules.down, self.ffn)):
            layer += (last_name(module) in wanted) * (width // layout.tensor + self.hidden)
        head = 0
        if last_name(self.modules.head) in wanted and stage == layout.pipeline - 1:
            head = self.hidden + -(-self.vocabulary // layout.tensor)
        return (len(self.on_stage(layout, stage)) * layer + head) * lora.rank

    def _adapters_beside(
        self, modules: tuple[str, ...], widths: tuple[int, ...], wanted: set[str], tensor: int, share_a: bool
    ) -> int:
        """Parameters, per unit of rank, of the adapters beside one matrix of Megatron's: its ``modules`` of Hugging
        Face, one for each of the ``widths`` or one for all."""
        rows = dict(zip(modules, widths)) if len(modules) > 1 else {modules[0]: sum(widths)}
        adapted = [width for module, width in rows.items() if last_name(module) in wanted]
        return sum(adapted) // tensor + self.hidden * (min(1, len(adapted)) if share_a else len(adapted))

    def on_stage(self, layout: Layout, stage: int) -> range:
        """The model's layers on a pipeline stage."""
        return stage_layers(self.layers, layout.pipeline, layout.first_layers, layout.last_layers)[stage]


def shape_from(content: Mapping[str, Any]) -> Shape:
    """The shape in a Hugging Face ``config.json``."""
    heads = content["num_attention_heads"]
    hidden = content["hidden_size"]
    layers = content["num_hidden_layers"]
    family = FAMILIES[content["model_type"]]
    experts = num_experts(content)
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        groups=key_value_heads(content),
        head_size=head_size(content),
        ffn=content["intermediate_size"],
        vocabulary=content["vocab_size"],
        tied=bool(content.get("tie_word_embeddings", False)),
        experts=experts,
        active_experts=content["num_experts_per_tok"] if experts else 0,
        expert_ffn=content[family.experts.width] if experts and family.experts else 0,
        mixture_layers=tuple(layer for layer, mixture in enumerate(mixture_layers(content)) if mixture),
        qkv_bias=has_qkv_bias(content),
        qk_norm=family.qk_norm,
        modules=family.modules,
    )


def model_shape(config: Config) -> Shape | None:
    """The shape of the config's model without any download: its folder, what its factory says, the hub's
    cache here, or the table ``KNOWN``.

    None where none of them has it.
    """
    content = known_model_config(config) or _known(config.policy.model_name)
    return shape_from(content) if content else None


def _known(name: str) -> dict[str, Any] | None:
    return KNOWN.get(name) or KNOWN.get(name.removesuffix("-Instruct").removesuffix("-Base"))
