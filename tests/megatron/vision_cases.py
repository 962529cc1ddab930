"""Batches with images, the same updates by transformers' whole model, and what the tests run on ranks."""

from __future__ import annotations

import hashlib
import io
import pickle
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rank_cases import build_policy, exported
from tiny_vision import picture, token_id

from gdpo_nemo.data.image_processor import ImageProcessor
from gdpo_nemo.data.images import Image
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.data.shares import Share

PLACEHOLDER = token_id("<|image_pad|>")
UNUSED = 271
"""Token of no text, which stands for a sampled placeholder in transformers' model."""


def encoded(width: int, height: int, seed: int) -> Image:
    """Return a picture as PNG."""
    buffer = io.BytesIO()
    picture(width, height, seed).save(buffer, "png")
    data = buffer.getvalue()
    return Image(hashlib.sha256(data).hexdigest(), width, height, data)


def prompt_of(processor: ImageProcessor, rng, images: list[Image]):
    """Return expanded ids and placed images of a prompt with text around each image."""
    ids = list(rng.integers(0, 256, 3))
    for _ in images:
        ids += [token_id("<|vision_start|>"), PLACEHOLDER, token_id("<|vision_end|>"), *rng.integers(0, 256, 2)]
    return processor.place(np.array(ids, np.int32), images)


def make_batch(folder: Path, each: int = 3, seed: int = 0) -> list[TrainSequence]:
    """``each`` completions of prompts with no, one and two images of different sizes. One completion contains the
    placeholder token."""
    rng = np.random.default_rng(seed)
    processor = ImageProcessor(folder)
    first, second = encoded(64, 96, 1), encoded(128, 64, 2)
    batch = []
    for images in ([], [first], [second, first]):
        ids, placed = prompt_of(processor, rng, images)
        for _ in range(each):
            completion = rng.integers(0, 256, int(rng.integers(3, 9))).astype(np.int32)
            sampled = rng.normal(-5, 0.3, len(completion)).astype(np.float32)
            batch.append(TrainSequence(ids, completion, sampled, float(rng.normal()), images=placed))
    batch[-1].completion_ids[1] = PLACEHOLDER
    return weighted(batch)


def twins(folder: Path) -> list[TrainSequence]:
    """Samples of two prompts with equal token ids and different images."""
    processor = ImageProcessor(folder)
    batch = []
    for image in (encoded(64, 64, 3), encoded(64, 64, 4)):
        ids, placed = prompt_of(processor, np.random.default_rng(1), [image])
        for completion in ([1, 2, 3], [1, 5, 6, 7]):
            tokens = np.array(completion, np.int32)
            batch.append(TrainSequence(ids, tokens, np.full(len(tokens), -5, np.float32), 1.0, images=placed))
    return weighted(batch)


def weighted(batch: list[TrainSequence]) -> list[TrainSequence]:
    """Set the weights to the mean over all completion tokens."""
    tokens = sum(len(s.completion_ids) for s in batch)
    for s in batch:
        s.weight = 1 / tokens
    return batch


@dataclass
class Reference:
    """Log-probs and gradients of transformers' model."""

    logprobs: list[np.ndarray]
    """Log-probs of each sequence, float32 [completion tokens]."""
    gradients: dict[str, np.ndarray]
    """Gradients by the tensors' names in the Hugging Face folder."""

    def norm(self, prefix: str | None = None) -> float:
        """Return the norm of all gradients, without those of tensors with a prefix."""
        squares = [(g.astype(np.float64) ** 2).sum() for n, g in self.gradients.items() if not (prefix and prefix in n)]
        return float(np.sqrt(sum(squares)))


def of_transformers(folder: Path, batch: list[TrainSequence], dtype=torch.float32) -> Reference:
    """Return the gradients of the policy-gradient loss at the sampler's weights, one sequence at a time."""
    from transformers import AutoModelForImageTextToText
    from transformers.core_model_loading import revert_weight_conversion

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    processor = ImageProcessor(folder)
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        embedding[UNUSED] = embedding[PLACEHOLDER]
    found = []
    for s in batch:
        ids = torch.from_numpy(np.concatenate((s.prompt_ids, s.completion_ids)).astype(np.int64))
        kinds = torch.zeros_like(ids)
        for placed in s.images:
            kinds[placed.start : placed.stop] = 1
        read = torch.where((ids == PLACEHOLDER) & (kinds == 0), UNUSED, ids)
        inputs = {}
        if s.images:
            pixel_values, grids = processor.pixel_values([placed.image for placed in s.images])
            inputs = dict(pixel_values=pixel_values.to(dtype), image_grid_thw=grids)
        logits = model(input_ids=read[None], mm_token_type_ids=kinds[None], **inputs).logits[0].float()
        first = len(s.prompt_ids)
        chosen = logits.log_softmax(-1)[first - 1 : -1].gather(-1, ids[first:, None])[:, 0]
        (-s.weight * s.advantage * (chosen - chosen.detach()).exp().sum()).backward()
        found.append(chosen.detach().numpy())
    embedding.grad[PLACEHOLDER] += embedding.grad[UNUSED]
    embedding.grad[UNUSED] = 0
    gradients = {name: p.grad for name, p in model.named_parameters()}
    stored = revert_weight_conversion(model, gradients)
    return Reference(found, {name: value.float().numpy() for name, value in stored.items()})


@dataclass
class Measured:
    """Results of one rank."""

    before: object
    """``TokenValues`` under the starting weights, where the rank reports."""
    gradients: dict[str, np.ndarray]
    """unsharded, by the names in the folder"""
    norm: float
    images: float
    """images that the towers processed"""
    saved: int
    """tokens that are not computed"""
    buffers: set[str]
    """data types of the tower's rotary frequencies"""


def shared_out(place, policy, batch, sharing, budget=60):
    """Return the sequences and micro-batches that the driver would send here, their indices in the batch, and the
    number of shared tokens.

    Ranks after the first stage get no data of images. With communication in the background, only the first of two
    data-parallel ranks gets sequences with images.
    """
    from megatron.core import parallel_state
    from rank_cases import budget_of

    from gdpo_nemo.data.prefixes import Layout, choose_layout

    layout = choose_layout(sharing, batch, budget_of(place.layout, budget))
    if place.layout.overlap_grad_reduce:
        in_order = [i for micro_batches in layout.assignment for members in micro_batches for i in members]
        with_images = [i for i in in_order if batch[i].images]
        layout = Layout([[with_images], [[i for i in in_order if not batch[i].images]]], layout.shared)
    mine = layout.assignment[parallel_state.get_data_parallel_rank()]
    share = Share.of(batch, mine, shared=layout.shared)
    if not policy.is_first_stage:
        share = share.with_image_data(None)
    share = pickle.loads(pickle.dumps(share))
    return (share.sequences(), share.micro_batches), [i for members in mine for i in members], sum(layout.shared)


def measured(place, folder, batch, sharing, train_tower=True, precision="float32") -> Measured:
    """Return log-probs and gradients of a batch, laid out as the driver lays it out for ``policy.share_prompts``."""
    from gdpo_nemo.algorithms import LossSettings

    policy = build_policy(place, folder, precision, share_prompts=sharing, train_tower=train_tower)
    work, places, saved = shared_out(place, policy, batch, sharing)
    before = in_batch(policy.logprobs(*work), places)
    policy.backward(*work, LossSettings())
    gradients = gradients_of(policy)
    result = policy.train(*work, LossSettings())
    towers = [chunk.tower for chunk in policy.chunks if chunk.pre_process]
    buffers = {str(buffer.dtype) for tower in towers for buffer in tower.buffers()}
    return Measured(before, gradients, result.grad_norm, result.sums["tower_images"], saved, buffers)


def in_batch(found, places):
    """Return ``TokenValues`` whose sequences are indices in the batch, or None if the rank does not report."""
    return found and replace(found, sequence=np.array(places)[found.sequence])


@dataclass
class Steps:
    """Log-probs before and after each of two updates, of the policy and of its reference, and what towers did."""

    policy: list
    reference: list
    teacher: object
    """Log-probs of the starting weights as a teacher."""
    images: list[float]
    """images that the towers processed, by update"""
    distinct: int
    """sum over the micro-batches of this rank of their distinct images"""
    changed: set[str]
    """names of the tensors that the updates changed"""


def steps(place, folder, batch, train_tower, lora=None) -> Steps:
    """Run two updates, each after log-probs of policy and reference."""
    from gdpo_nemo.algorithms import LossSettings

    policy = build_policy(place, folder, keep_reference=True, train_tower=train_tower, lora=lora)
    start = exported(policy)
    work, places, _ = shared_out(place, policy, batch, False)
    found = Steps([], [], None, [], 0, set())

    def score():
        found.policy.append(in_batch(policy.logprobs(*work), places))
        found.reference.append(in_batch(policy.logprobs(*work, reference=True), places))

    for _ in range(2):
        score()
        found.images.append(policy.train(*work, LossSettings()).sums["tower_images"])
    score()
    policy.load_teacher(folder)
    with policy.using_teacher():
        found.teacher = in_batch(policy.logprobs(*work), places)
    sequences, micro_batches = work
    for members in micro_batches:
        found.distinct += len({placed.image for i in members for placed in sequences[i].images})
    end = exported(policy)
    found.changed = {name for name, tensor in start.items() if not np.array_equal(tensor, end[name])}
    return found


def cached(place) -> list[int]:
    """Return the indices of four images that a cache for three finds, if the first was read before the last came."""
    from gdpo_nemo.megatron.vision import FeatureCache

    images = [encoded(32, 32, seed) for seed in range(4)]
    cache = FeatureCache(3 * 40)
    for image in images:
        cache.find(images[:1])
        cache.add(image.sha256, torch.zeros(5, 2, 1))
    found = cache.find(images)
    return [index for index, image in enumerate(images) if image.sha256 in found]


def gradients_of(policy) -> dict[str, np.ndarray]:
    """Return the unsharded gradients on every rank, by the names in the folder. The weights stay as they are."""
    parameters = [p for chunk in policy.chunks for p in chunk.parameters()]
    weights = [p.data for p in parameters]
    for p in parameters:
        p.data = p.main_grad.to(p.dtype) if p.requires_grad else torch.zeros_like(p)
    # Not `exported`: with a distributed optimizer, each replica has the sum of only some gradients.
    gradients = {name: tensor.detach().float().numpy().copy() for name, tensor in policy.weights()}
    for p, weight in zip(parameters, weights):
        p.data = weight
    return gradients
