"""What the tests run on ranks. Megatron is imported inside the functions: the test process itself never imports it."""

from __future__ import annotations

import pickle
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import numpy as np

from gdpo_nemo.config.schema import GenerationConfig, LoraConfig, PolicyConfig
from gdpo_nemo.config.sections import VisionConfig
from gdpo_nemo.data.packing import Budget, assign, assign_singly
from gdpo_nemo.data.shares import Share


@dataclass
class Updates:
    """What one rank saw of a few updates."""

    before: object
    """``TokenValues`` under the starting weights, where the rank reports."""
    steps: np.ndarray
    """float64 [updates, 3]: loss, gradient norm, mean entropy"""
    weights: dict | None
    """rank 0: all Hugging Face tensors afterwards"""


def build_policy(
    place,
    folder,
    precision="float32",
    temperature=1.0,
    keep_reference=False,
    updates=100,
    lora=None,
    optimizer=None,
    scheduler=None,
    scores=False,
    share_prompts=False,
    router_replay=False,
    train_tower=False,
):
    """A Policy on this rank; ``optimizer`` and ``scheduler`` hold fields of the sections that differ from the
    layout's."""
    from gdpo_nemo.megatron.policy import Policy

    if share_prompts or place.layout.attention_backend == "flex" or place.layout.transformer_engine:
        use_uncompiled_flex_attention()

    layout = replace(
        place.layout,
        optimizer=replace(place.layout.optimizer, **(optimizer or {})),
        scheduler=replace(place.layout.scheduler, **(scheduler or {})),
    )
    config = PolicyConfig(
        model_name=str(folder),
        precision=precision,
        megatron_cfg=layout,
        lora=lora or LoraConfig(),
        generation=GenerationConfig(temperature=temperature),
        share_prompts=share_prompts,
        router_replay=router_replay,
        vision=VisionConfig(train=train_tower),
    )
    return Policy(config, folder, place.runtime, updates, keep_reference=keep_reference, scores=scores)


def use_uncompiled_flex_attention() -> None:
    """Compute FlexAttention and its gradient operator by operator, as torch cannot compile its gradient for CPUs."""
    import torch.nn.attention.flex_attention as of_torch

    of_torch._validate_device = lambda *_: None  # refuses inputs on CPUs that require gradients
    of_torch._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True


def budget_of(layout, tokens) -> Budget:
    """The limits that the driver would pass for a layout, with a cost of attention that short sequences have."""
    from megatron.core import parallel_state

    return Budget(
        ranks=parallel_state.get_data_parallel_world_size(),
        tokens=tokens,
        stages=layout.pipeline_model_parallel_size if layout.virtual_pipeline_model_parallel_size else 1,
        multiple=2 * layout.context_parallel_size if layout.context_parallel_size > 1 else 1,
        quadratic=1e-3,
    )


def spread(place, batch, budget=80):
    """The micro-batches of this rank's share of the batch; without a budget each sequence is alone."""
    from megatron.core import parallel_state

    layout = place.layout
    limits = budget_of(layout, budget)
    if not budget:
        shares = assign_singly(len(batch), limits.ranks, limits.stages)
    else:
        shares = assign([len(s) for s in batch], limits)
    return shares[parallel_state.get_data_parallel_rank()]


def train(policy, batch, assignment, count, settings=None, shared=None) -> np.ndarray:
    """(loss, gradient norm, mean entropy) of ``count`` updates, of the sequences that the driver would send here."""
    from gdpo_nemo.algorithms.policy_loss import LossSettings

    share = pickle.loads(pickle.dumps(Share.of(batch, assignment, shared=shared)))
    rows = []
    for _ in range(count):
        result = policy.train(share.sequences(), share.micro_batches, settings or LossSettings())
        rows.append((result.loss, result.grad_norm, result.sums["entropy"] / result.sums["tokens"]))
    return np.array(rows)


def exported(policy) -> dict:
    """All weights as plain arrays (float32 holds bfloat16 exactly). The pieces of all ranks are compared with them."""
    tensors = {name: tensor.detach().clone() for name, tensor in policy.weights()}
    if policy.adapters is None:
        check_pieces(policy.pieces, dict(policy.update()))
    return {name: tensor.float().numpy() for name, tensor in tensors.items()}


def check_pieces(pieces, tensors) -> None:
    """Check that the pieces of all ranks make up ``tensors``, bit by bit, and contain every element once; collective.

    Pieces of more than 2,000 bytes are cut, and at most three replicas send.
    """
    import torch
    import torch.distributed as dist

    from gdpo_nemo.weights.manifest import joined, weight_metadata
    from gdpo_nemo.weights.pieces import Piece, assembled

    with patch.multiple("gdpo_nemo.megatron.pieces", _CUT_BYTES=2000, _MOST_SENDERS=3):
        own = [Piece(name, values.detach().cpu().clone(), region) for name, values, region in pieces()]
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    if dist.get_rank():
        return
    joined([weight_metadata(sent, 0, rank=rank) for rank, sent in enumerate(by_rank)]).check_names(tensors)
    sent = list(chain.from_iterable(by_rank))
    times = assembled(piece._replace(values=torch.full(piece.values.shape, index)) for index, piece in enumerate(sent))
    for name, owners in times:  # a piece that another one overwrites has fewer elements left than it sent
        counts = Counter(owners.flatten().tolist())
        assert all(counts[i] == piece.values.numel() for i, piece in enumerate(sent) if piece.name == name), name
    for name, tensor in assembled(sent):
        expected = tensors[name].cpu()
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), name


def updates(
    place, folder, batch, count=2, budget=80, settings=None, logit_bytes=None, precision="float32", temperature=1.0
) -> Updates:
    """Log-probs of the batch, then ``count`` updates on it."""
    with limited_logits(logit_bytes):
        policy = build_policy(place, folder, precision, temperature)
        assignment = spread(place, batch, budget)
        before = policy.logprobs(batch, assignment)
        steps = train(policy, batch, assignment, count, settings)
    weights = exported(policy)
    return Updates(before, steps, weights if place.rank == 0 else None)


def first_updates(place, folder, batch, settings) -> dict[str, np.ndarray]:
    """By name, what an update of the loaded weights measures with each of ``settings``."""
    assignment = spread(place, batch)
    return {name: train(build_policy(place, folder), batch, assignment, 1, loss) for name, loss in settings.items()}


def in_contexts(place, folder, contexts, turns, loss) -> list[tuple]:
    """(steps, weights on rank 0) of an update of the sequences ``contexts``, without and with shared prefixes, and of
    ``turns``, the same turns as separate sequences. All sequences of a trajectory are in one micro-batch."""
    found = []
    for batch, sharing in ((contexts, None), (contexts, True), (turns, False)):
        _, mine, layout = share_of_units(place, batch, sharing)
        policy = build_policy(place, folder)
        steps = train(policy, batch, mine, 1, loss, layout.shared)
        weights = exported(policy)
        found.append((steps, weights if place.rank == 0 else None))
    return found


def packed_and_alone(place, folder, batch):
    """``updates``, and the steps of the first of them with every sequence in a micro-batch of its own, padded by
    itself."""
    packed = updates(place, folder, batch)
    policy = build_policy(place, folder)
    return packed, train(policy, batch, spread(place, batch, budget=None), 1)


@dataclass
class Measured:
    """What one rank saw of the same updates, with groups that share their tokens or without."""

    logprobs: list
    """(places in the batch, ``TokenValues`` of them), where the rank reports, before and after the updates; and under
    the reference's weights where there is one."""
    steps: np.ndarray
    """float64 [updates, 3]: loss, gradient norm, mean entropy"""
    saved: int
    """Tokens of the batch that are not computed."""


def in_groups(place, folder, batch, sharing, budget=200, count=1, settings=None, **options) -> Measured:
    """Log-probs, ``count`` updates and log-probs of a batch, laid out as the driver lays it out for
    ``policy.share_prompts``; ``sharing`` may also be a list of the tokens that each sequence shares, in one
    micro-batch."""
    from megatron.core import parallel_state

    from gdpo_nemo.data.prefixes import Layout, choose_layout

    policy = build_policy(place, folder, share_prompts=sharing is not False, **options)
    if isinstance(sharing, list):
        layout = Layout([[list(range(len(batch)))]], sharing)
    else:
        layout = choose_layout(sharing, batch, budget_of(place.layout, budget))
    mine = layout.assignment[parallel_state.get_data_parallel_rank()]
    share = Share.of(batch, mine, shared=layout.shared)
    places = [i for members in mine for i in members]
    values = []

    def score(**how):
        found = policy.logprobs(share.sequences(), share.micro_batches, **how)
        if found is not None:
            values.append((places, found))

    score()
    steps = train(policy, batch, mine, count, settings, layout.shared)
    score()
    if options.get("keep_reference"):
        score(reference=True)
    return Measured(values, steps, sum(layout.shared))


def share_of_units(place, batch, sharing, budget=120):
    """The share of a batch of pairs or trajectories that the driver would send here, its micro-batches as places, and
    the layout."""
    from megatron.core import parallel_state

    from gdpo_nemo.data.prefixes import whole_layout

    layout = whole_layout(sharing, batch, budget_of(place.layout, budget))
    mine = layout.assignment[parallel_state.get_data_parallel_rank()]
    return pickle.loads(pickle.dumps(Share.of(batch, mine, shared=layout.shared))), mine, layout


def gradients_of_terms(place, folder, batch, terms, sharing):
    """``GradientProducts`` of the terms of an update; the distance of the sum of the first three gradients from the
    gradient of the loss, relative to it; the weights after the update, and without the gradients of terms before it."""
    import torch
    import torch.distributed as dist

    from gdpo_nemo.megatron.component_gradients import ComponentGradients

    optimizer = dict(lr=1e-5, weight_decay=0.0, adam_beta1=0.0)
    share, _, _ = share_of_units(place, batch, sharing)
    given = share.sequences(), share.micro_batches
    policy, plain = (build_policy(place, folder, optimizer=optimizer) for _ in range(2))
    for one in (policy, plain):
        one.train(*given, terms[0].loss)
    found = ComponentGradients(policy)
    found.add(*given, terms)
    whole = ComponentGradients(plain)
    plain.backward(*given, terms[0].loss)
    plain.built.optimizer.prepare_grads()
    distance = 0.0
    for part, ours, theirs in zip(whole._optimizers, found._weights, whole._weights):
        square = torch.zeros((), dtype=torch.float64)
        for mine, other in zip(ours, theirs):
            square += (sum(mine.gradients[:3]) - other.parameter.grad.flatten()).double().square().sum()
        dist.all_reduce(square, group=part.get_grad_stats_parallel_group())
        distance += float(square)
    result = policy.train(*given, terms[0].loss)
    products = found.products()
    plain.train(*given, terms[0].loss)
    return products, distance**0.5 / result.grad_norm, exported(policy), exported(plain)


@dataclass
class Scored:
    """What one rank saw of updates of a reward model."""

    before: object
    """(places in the batch, ``TokenValues``) of the scores, where the rank reports."""
    steps: np.ndarray
    """float64 [updates, 2]: loss, gradient norm"""
    resumed: np.ndarray
    """The last of them again, from the checkpoint before it."""


def of_scores(place, folder, batch, told, out, sharing=False) -> Scored:
    """Two updates of a reward model, which is written as a classifier before them (``out/start``) and behind them
    (``out/end``), with a checkpoint between the two."""
    import torch.distributed as dist

    from gdpo_nemo.megatron.checkpoint import load_checkpoint, save
    from gdpo_nemo.megatron.classifier import write_classifier

    policy = build_policy(place, folder, scores=True)
    share, mine, _ = share_of_units(place, batch, sharing)

    def write(name):
        tensors = [(key, tensor.clone()) for key, tensor in policy.weights()]
        if place.rank == 0:
            write_classifier(out / name, tensors, policy.built.hf_config, folder)
        dist.barrier()

    def update(policy):
        result = policy.train(share.sequences(), share.micro_batches, told)
        return result.loss, result.grad_norm

    write("start")
    found = policy.logprobs(share.sequences(), share.micro_batches)
    before = None if found is None else ([i for members in mine for i in members], found)
    steps = [update(policy)]
    save(policy, out / "checkpoint")
    again = build_policy(place, folder, scores=True)
    load_checkpoint(again, out / "checkpoint")
    resumed = update(again)
    steps.append(update(policy))
    write("end")
    return Scored(before, np.array(steps), np.array(resumed))


@dataclass
class Following:
    """Hugging Face tensors of a run whose reference follows its policy."""

    start: dict
    policy: dict
    """Of the policy when the reference took a quarter of it."""
    reference: dict
    """Of the reference after that."""
    resumed: bool
    """Whether the reference, after one more update and change, is the same from a checkpoint, bit for bit."""


def following(place, folder, batch, out) -> Following:
    """An update, a change of the reference, a checkpoint, and the same again with and without it."""
    from gdpo_nemo.megatron.checkpoint import load_checkpoint, save
    from gdpo_nemo.megatron.conversion import export_hf

    assignment = spread(place, batch)

    def built():
        policy = build_policy(place, folder, keep_reference=True)
        policy.config = replace(policy.config, sync_ref_model=True)
        return policy

    def reference(policy):
        with policy.params_synced(), policy.reference.as_parameters():
            return {
                name: tensor.float().numpy().copy() for name, tensor in export_hf(policy.chunks, policy.built.hf_config)
            }

    def step(policy):
        train(policy, batch, assignment, 1)
        policy.sync_reference(0.25)

    policy = built()
    start = exported(policy)
    step(policy)
    found = Following(start, exported(policy), reference(policy), False)
    save(policy, out / "checkpoint")
    again = built()
    load_checkpoint(again, out / "checkpoint")
    for one in (policy, again):
        step(one)
    mine, theirs = reference(policy), reference(again)
    found.resumed = all(np.array_equal(mine[name], theirs[name]) for name in mine)
    return found


def of_pairs(place, folder, batch, told, sharing, budget=120, count=2):
    """``count`` preference updates of a batch of pairs, laid out as the driver lays them out, from the log-probs of the
    starting weights as those of the reference: (steps as ``train`` returns them, sums of the first update, rank's
    micro-batches as places, tokens not computed)."""
    policy = build_policy(place, folder)
    share, mine, layout = share_of_units(place, batch, sharing, budget)
    results = [policy.train(share.sequences(), share.micro_batches, told) for _ in range(count)]
    steps = np.array([(r.loss, r.grad_norm, r.sums["entropy"] / r.sums["tokens"]) for r in results])
    return steps, results[0].sums, mine, sum(layout.shared)


@contextmanager
def limited_logits(limit):
    """Bytes of logits that are computed at once; None: as it is."""
    from gdpo_nemo.megatron import model

    stock = model._LOGIT_BYTES
    model._LOGIT_BYTES = limit or stock
    try:
        yield
    finally:
        model._LOGIT_BYTES = stock


def by_sequence(shares, batch) -> list[np.ndarray]:
    """The ranks' ``TokenValues`` put together: float32 [completion tokens] per sequence; NaN where no rank spoke."""
    out = [np.full(len(s.completion_ids), np.nan, np.float32) for s in batch]
    for share in shares:
        for sequence, offset, value in zip(*vars(share).values()) if share is not None else ():
            assert np.isnan(out[sequence][offset]), "two ranks report the same token"
            out[sequence][offset] = value
    return out


def layers_held(place, folder) -> list[int]:
    """Numbers of the Hugging Face layers whose weights this rank has."""
    policy = build_policy(place, folder)
    return [(layer.layer_number - 1) // 2 for chunk in policy.chunks for layer in chunk.decoder.layers]


def round_trips(place, folders, batch_bytes=256 << 20) -> dict:
    """Load and export every model in ``folders``: {model: {Hugging Face name: array}} (rank 0). The pieces of all ranks
    are compared with the result."""
    import torch
    from transformers import AutoConfig

    from gdpo_nemo.megatron.conversion import export_hf, load_hf
    from gdpo_nemo.megatron.model import build_chunks
    from gdpo_nemo.megatron.pieces import RankPieces
    from gdpo_nemo.models.hf_folder import open_weights

    out = {}
    for name, folder in folders.items():
        hf = AutoConfig.from_pretrained(folder)
        _, chunks = build_chunks(hf, place.layout, torch.float32)
        load_hf(chunks, open_weights(folder), hf)
        with patch("gdpo_nemo.megatron.conversion._BATCH_BYTES", batch_bytes):
            tensors = [(key, tensor.clone()) for key, tensor in export_hf(chunks, hf)]
        check_pieces(partial(RankPieces, chunks, hf, tower=True), dict(tensors))
        out[name] = [(key, tensor.numpy()) for key, tensor in tensors]
    return out if place.rank == 0 else {}


def update_names(place, folder, targets=(), train_tower=False) -> list[str]:
    """Names of the tensors of an update, with adapters on the modules of ``targets``."""
    lora = LoraConfig(rank=2, target_modules=list(targets)) if targets else None
    policy = build_policy(place, folder, lora=lora, train_tower=train_tower)
    tensors = dict(policy.update())
    check_pieces(policy.pieces, tensors)
    return list(tensors)


def exported_at_once(place, folder) -> int:
    """The most tensors of an export that live at the same time."""
    import torch
    from transformers import AutoConfig

    from gdpo_nemo.megatron.conversion import export_hf
    from gdpo_nemo.megatron.model import build_chunks

    hf = AutoConfig.from_pretrained(folder)
    _, chunks = build_chunks(hf, place.layout, torch.float32)
    with patch("gdpo_nemo.megatron.conversion._BATCH_BYTES", 1):
        return most_alive((tensor for _, tensor in export_hf(chunks, hf)), lambda tensor: 1)


def most_alive(tensors, size) -> int:
    """The largest sum of sizes of those ``tensors`` that live at the same time."""
    import gc
    import weakref

    gc.collect()
    seen = []
    most = 0
    for tensor in tensors:
        seen.append(weakref.ref(tensor))
        most = max(most, sum(size(alive) for ref in seen if (alive := ref()) is not None))
    return most


def bytes_sent(place, hf, cut_bytes) -> tuple[int, int, int]:
    """Return, for a bfloat16 model, the bytes that this rank sends, the bytes of its largest piece, and the most bytes
    of pieces that live at the same time outside of the weights."""
    import torch

    from gdpo_nemo.megatron.model import build_chunks
    from gdpo_nemo.megatron.pieces import RankPieces

    _, chunks = build_chunks(hf, place.layout, torch.bfloat16)
    weights = {parameter.untyped_storage().data_ptr() for chunk in chunks for parameter in chunk.parameters()}

    def copied(tensor):
        return 0 if tensor.untyped_storage().data_ptr() in weights else tensor.nbytes

    with patch("gdpo_nemo.megatron.pieces._CUT_BYTES", cut_bytes):
        pieces = RankPieces(chunks, hf, tower=True)
    sizes = [values.nbytes for _, values, _ in pieces]
    return sum(sizes), max(sizes), most_alive((values for _, values, _ in pieces), copied)


def token_values(place, logits, targets, options, gradients):
    """``token_logprobs`` on this rank's columns: log-probs, entropies, and the gradient of their weighted sum."""
    import torch
    from megatron.core import parallel_state

    from gdpo_nemo.megatron.logprobs import token_logprobs

    columns = torch.from_numpy(logits).chunk(place.ranks, -1)[place.rank].clone().requires_grad_()
    group = parallel_state.get_tensor_model_parallel_group()
    logprobs, entropy = token_logprobs(columns, torch.from_numpy(targets), group, **options)
    by_logprob, by_entropy = (torch.from_numpy(g) for g in gradients)
    (logprobs * by_logprob + entropy * by_entropy).sum().backward()
    return logprobs.detach().numpy(), entropy.detach().numpy(), columns.grad.numpy()


def reference_logprobs(place, folder, batch):
    """Starting log-probs, then one update, then the reference's log-probs; and the weights before and after the
    last."""
    policy = build_policy(place, folder, keep_reference=True)
    assignment = spread(place, batch)
    start = policy.logprobs(batch, assignment)
    train(policy, batch, assignment, 1)
    moved = policy.logprobs(batch, assignment)
    before = exported(policy)
    reference = policy.logprobs(batch, assignment, reference=True)
    return start, moved, reference, before, exported(policy)


def teacher_logprobs(place, folder, teacher, batch):
    """Log-probs of the policy, of a teacher beside it, and of the policy again; then the steps of two updates, between
    which the teacher is asked once more."""
    policy = build_policy(place, folder)
    policy.load_teacher(teacher)
    assignment = spread(place, batch)
    own = policy.logprobs(batch, assignment)
    with policy.using_teacher():
        taught = policy.logprobs(batch, assignment)
    again = policy.logprobs(batch, assignment)
    steps = [train(policy, batch, assignment, 1)]
    with policy.using_teacher():
        policy.logprobs(batch, assignment)
    return own, taught, again, np.concatenate([*steps, train(policy, batch, assignment, 1)])


def poisoned_update(place, folder, batch, poisoned):
    """An update, one on ``poisoned``, an update: their results, and the weights around the poisoned one."""
    from gdpo_nemo.algorithms.policy_loss import LossSettings

    policy = build_policy(place, folder)
    assignment = spread(place, batch)
    first = train(policy, batch, assignment, 1)
    before = exported(policy)
    result = policy.train(poisoned, assignment, LossSettings())
    after = exported(policy)
    return result.skipped, before, after, np.concatenate([first, train(policy, batch, assignment, 1)])


def changed_in_torch(place) -> list[str]:
    """Names in torch that are other objects than before Megatron was made importable."""
    import rank_pool

    now = rank_pool.torch_names()
    return sorted(name for name, value in place.torch_before.items() if now.get(name) is not value)


def gloo_threads(place) -> int:
    """Number of gloo's polling threads in this process."""
    return sum(task.read_text() == "gloo_tcp_loop\n" for task in Path("/proc/self/task").glob("*/comm"))


def gradients_released(place, folder, batch):
    """Steps of updates between which the gradients' buffers are freed, and the bytes that were left of them."""
    policy = build_policy(place, folder)
    assignment = spread(place, batch)
    steps = []
    left = 0
    for _ in range(2):
        steps.append(train(policy, batch, assignment, 1))
        policy.release_gradients()
        buffers = [buffer for wrapped in policy.built.wrapped for buffer in wrapped.buffers]
        left += sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)
    return np.concatenate(steps), left


def step_that_waits_for_nothing(place, folder, batch, offload):
    """On a GPU: three updates in bfloat16, in the last two of which a micro-batch that waits for the GPU raises; the
    weights afterwards, and how far release() lowers the memory in use."""
    import torch

    policy = build_policy(place, folder, "bfloat16", optimizer=dict(offload=offload))
    assignment = spread(place, batch)
    train(policy, batch, assignment, 1)  # compiles, and takes the memory that stays
    schedule = policy._forward_backward

    def strict(**arguments):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return schedule(**arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    policy._forward_backward = strict
    steps = train(policy, batch, assignment, 2)
    policy.logprobs(batch, assignment)
    before = torch.cuda.memory_allocated()
    policy.release()
    return steps, exported(policy), before - torch.cuda.memory_allocated()
