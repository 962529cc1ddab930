"""Parameters of a model per rank, savings from shared prompts, and disk space of recorded samples."""

from __future__ import annotations

import math
from functools import cache, lru_cache
from itertools import groupby

from gdpo_nemo.config.layout import Layout, Resolved, stage_layers
from gdpo_nemo.config.schema import LoraConfig
from gdpo_nemo.config.sections import replays_router
from gdpo_nemo.data import prefixes
from gdpo_nemo.data.packing import attention_cost
from gdpo_nemo.models.architectures import last_name
from gdpo_nemo.models.description import ModelDescription
from gdpo_nemo.models.family_checks import describe
from gdpo_nemo.models.known_models import KNOWN
from gdpo_nemo.models.sources import ModelFacts
from gdpo_nemo.models.weights import COLUMNS, REPLICATED, TOWER, weight_table


def on_stage(model: ModelDescription, layout: Layout, stage: int) -> range:
    """Return the indices of the layers on a pipeline stage."""
    return stage_layers(model.layers, layout.pipeline, layout.first_layers, layout.last_layers)[stage]


def on_rank(model: ModelDescription, layout: Layout, stage: int) -> tuple[int, int]:
    """Return the numbers of (dense, expert) parameters on a rank of ``stage``, with tied copies and padding."""
    by_layer = _layer_parameters(model, layout.tensor, layout.expert, layout.expert_tensor)
    held = [by_layer[layer] for layer in on_stage(model, layout, stage)]
    last = stage == layout.pipeline - 1
    dense = sum(dense for dense, _ in held) + tables_on_rank(model, layout, stage) + last * model.hidden
    return dense + (tower_parameters(model) if stage == 0 else 0), sum(experts for _, experts in held)


@lru_cache(maxsize=16)
def tower_parameters(model: ModelDescription) -> int:
    """Return the number of parameters of the vision tower, which each rank of the first stage holds, or 0."""
    return sum(row.size for row in weight_table(model) if row.megatron.startswith(TOWER))


def tables_on_rank(model: ModelDescription, layout: Layout, stage: int) -> int:
    """Return the number of parameters of the embedding and the output layer on a rank of ``stage``."""
    first, last = stage == 0, stage == layout.pipeline - 1
    return (first + (last and not (model.tied and first))) * -(-model.vocabulary // layout.tensor) * model.hidden


@lru_cache(maxsize=256)
def matrices(model: ModelDescription) -> tuple[tuple[int, int, int], ...]:
    """Return (rows, columns, number of experts or 1) of each unsharded weight matrix of the layers."""
    found = []
    for (layer, _), group in groupby(weight_table(model), key=lambda row: (row.layer, row.megatron)):
        first, *others = group
        if layer is not None and len(first.shape) == 2 and not first.buffer:
            rows = first.shape[0] + sum(row.shape[0] for row in others)
            found.append((rows, first.shape[1], first.experts or 1))
    return tuple(found)


@lru_cache(maxsize=256)
def _layer_parameters(
    model: ModelDescription, tensor: int, expert: int, expert_tensor: int
) -> tuple[tuple[int, int], ...]:
    """Return each layer's numbers of (dense, expert) parameters on one rank of the parallel layout."""
    dense, experts = [0] * model.layers, [0] * model.layers
    for row in weight_table(model):
        if row.layer is None or row.buffer:
            continue
        size = row.size // (1 if row.split == REPLICATED else expert_tensor if row.experts else tensor)
        if row.experts:
            experts[row.layer] += row.experts // expert * size
        else:
            dense[row.layer] += size
    return tuple(zip(dense, experts))


def adapters(model: ModelDescription, layout: Layout, stage: int, lora: LoraConfig) -> tuple[int, int]:
    """Return the numbers of LoRA parameters on a rank of ``stage``, outside of experts and of experts.

    Every tensor rank holds the unsharded matrices.
    """
    targets = tuple(sorted(lora.target_modules))
    by_layer = _layer_adapters(model, layout.tensor, layout.expert, layout.expert_tensor, targets, lora.share_a)
    *layers, head = by_layer
    held = [layers[layer] for layer in on_stage(model, layout, stage)] + [head] * (stage == layout.pipeline - 1)
    return sum(dense for dense, _ in held) * lora.rank, sum(experts for _, experts in held) * lora.rank


@lru_cache(maxsize=256)
def _layer_adapters(
    model: ModelDescription, tensor: int, expert: int, expert_tensor: int, targets: tuple[str, ...], share_a: bool
) -> tuple[tuple[int, int], ...]:
    """Return the LoRA parameters of each layer, and of the output layer, on one rank per unit of LoRA rank.

    The numbers are those of ``adapters``: outside of experts and of experts.
    """
    dense, experts = [0] * (model.layers + 1), [0] * (model.layers + 1)
    for (layer, _), rows in groupby(weight_table(model), key=lambda row: (row.layer, row.megatron)):
        adapted = [row for row in rows if row.adapted and last_name(row.module) in targets]
        if not adapted:
            continue
        first, heights = adapted[0], sum(row.shape[0] for row in adapted)
        ranks = expert_tensor if first.experts else tensor
        width = first.shape[1]
        if first.split == COLUMNS:
            count = width // ranks + heights
        else:
            count = -(-heights // ranks) + width * (1 if share_a else len(adapted))
        index = -1 if layer is None else layer
        if first.experts:
            experts[index] += first.experts // expert * count
        else:
            dense[index] += count
    return tuple(zip(dense, experts))


def model_shape(resolved: Resolved) -> ModelDescription | None:
    """Return the description of the config's model without any download.

    Sources are the model's folder, its factory, the local hub cache and the table ``KNOWN``. Return None if none of
    them contains the model.
    """
    return shape_of(resolved.model, resolved.config.policy.model_name)


def shape_of(model: ModelFacts, name: str) -> ModelDescription | None:
    """Return the description of the model ``name``, or None if it is unknown."""
    return model.description or _known(name)


@cache
def _known(name: str) -> ModelDescription | None:
    fields = KNOWN.get(name) or KNOWN.get(name.removesuffix("-Instruct").removesuffix("-Base"))
    return describe(fields) if fields else None


def expected_saving(resolved: Resolved, prompt: float, completion: float) -> prefixes.Saving:
    """Return the savings from shared prompts in a step whose prompts and completions have these lengths, in tokens.

    See ``prefixes.expected_saving``. If the model is unknown, attention has no cost.
    """
    model = model_shape(resolved)
    return prefixes.expected_saving(resolved, prompt, completion, attention_cost(model) if model else 0.0)


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
