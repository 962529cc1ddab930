"""What ``measure.py policy`` looks at, one function each: packing, reference, checkpoint, off-loading, LoRA on one
rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from standing import Model, Stand, assigned, batch_of, logprobs, one_by_one, record, timed

BF16 = "bfloat16"


def packing(stand: Stand, model: Model, batch: list[Any], folder: Path) -> None:
    """Packed or each sequence alone, the same log-probs."""
    built = stand.policy(model, BF16)
    packed = logprobs(built, batch, assigned(batch, sum(map(len, batch))))
    alone = logprobs(built, batch, one_by_one(batch))
    record("packed against alone, mean difference of log-probs", float(np.abs(packed - alone).mean()), "nats", 0.02)
    record("packed against alone, largest", float(np.abs(packed - alone).max()), "nats")
    again = logprobs(built, batch, assigned(batch, sum(map(len, batch))))
    record("the same pass twice, largest difference", float(np.abs(packed - again).max()), "nats")


def _train(built, batch) -> Any:
    from gdpo_nemo.algorithms import LossSettings

    return built.train(batch, assigned(batch, sum(map(len, batch))), LossSettings())


def _weights(built) -> dict[str, Any]:
    return {name: tensor.detach().cpu().clone() for name, tensor in built.weights()}


def _unequal(first: dict[str, Any], second: dict[str, Any]) -> int:
    """Tensors that differ in any bit."""
    import torch

    return len(first.keys() ^ second.keys()) + sum(not torch.equal(first[n], second[n]) for n in first.keys() & second)


def reference(stand: Stand, model: Model, batch: list[Any], folder: Path) -> None:
    """The reference is the start, before and after an update, and leaves the weights alone."""
    built = stand.policy(model, BF16, keep_reference=True)
    micro_batches = assigned(batch, sum(map(len, batch)))
    before = logprobs(built, batch, micro_batches)
    _train(built, batch)
    trained = _weights(built)
    after = logprobs(built, batch, micro_batches, reference=True)
    record(
        "reference after an update against the start, largest difference",
        float(np.abs(after - before).max()),
        "nats",
        1e-3,
    )
    record("tensors that a pass under the reference changed", _unequal(trained, _weights(built)), "", 0)
    seconds = timed(stand, lambda: built.logprobs(batch, micro_batches, reference=True), 2)
    plain = timed(stand, lambda: built.logprobs(batch, micro_batches), 2)
    record("swapping the reference in and out", float(np.median(seconds) - np.median(plain)), "s")


def checkpoint(stand: Stand, model: Model, batch: list[Any], folder: Path) -> None:
    """A checkpoint gives back every bit, and the next update is the one that follows without it."""
    from gdpo_nemo.megatron.checkpoint import load_checkpoint, save

    built = stand.policy(model, BF16)
    _train(built, batch)
    save(built, folder / "checkpoint")
    expected = _weights(built)
    after = _train(built, batch)
    other = stand.policy(model, BF16)
    load_checkpoint(other, folder / "checkpoint")
    record("tensors that a checkpoint gives back changed", _unequal(expected, _weights(other)), "", 0)
    found = _train(other, batch)
    record("next loss after resuming, difference", abs(found.loss - after.loss), "", 1e-4)
    record("next gradient norm after resuming", abs(found.grad_norm / after.grad_norm - 1), "relative", 1e-3)


def offloading(stand: Stand, model: Model, batch: list[Any], folder: Path) -> None:
    """Off-loaded or not, the same updates; what it frees and how long it takes."""
    import torch

    rows = {}
    for offload in (False, True):
        built = stand.policy(model, BF16, offload=offload)
        with built.optimizer_on_device():
            pass
        rows[offload] = [_train(built, batch) for _ in range(2)], _weights(built)
        if stand.on_gpu:
            stand.settle()
            record(
                f"memory between updates, optimizer.offload {offload}".lower(),
                torch.cuda.memory_allocated() / 1e9,
                "GB",
            )
        if offload:

            def there_and_back(built=built) -> None:
                with built.optimizer_on_device():
                    pass

            record("optimizer to the GPU and back", float(np.median(timed(stand, there_and_back, 3))), "s")
        del built
        stand.free()
    record("tensors that off-loading changed", _unequal(rows[False][1], rows[True][1]), "", 0)


def lora(stand: Stand, model: Model, batch: list[Any], folder: Path) -> None:
    """Fresh adapters change nothing, and without them the model is the start."""
    built = stand.policy(model, BF16, lora=8)
    micro_batches = assigned(batch, sum(map(len, batch)))
    before = logprobs(built, batch, micro_batches)
    plain = logprobs(stand.policy(model, BF16), batch, micro_batches)
    record("fresh adapters against none, mean difference", float(np.abs(before - plain).mean()), "nats", 0.02)
    _train(built, batch)
    gap = np.abs(logprobs(built, batch, micro_batches, reference=True) - before)
    record("reference under LoRA against the start, largest difference", float(gap.max()), "nats", 1e-3)


def shared_prompts(stand: Stand, model: Model, batch: list[Any], folder: Path) -> None:
    """Prompts computed once for their samples: the same log-probs and update, its speed, and FlexAttention's cost."""
    from gdpo_nemo.algorithms import LossSettings
    from gdpo_nemo.data.packing import Budget
    from gdpo_nemo.data.prefixes import shared_layout

    prompt, completion, samples = (1024, 192, 16) if stand.on_gpu else (48, 12, 4)
    common = batch_of([4 * prompt], model.shape[5])[0].prompt_ids
    whole = [replace(s, prompt_ids=common) for s in batch_of([completion * 4 // 3] * samples, model.shape[5])]
    layout = shared_layout(whole, Budget(1, prompt + completion * samples))
    for sequence, count in zip(whole, layout.shared):
        sequence.shared = count
    alone = [replace(sequence, shared=0) for sequence in whole]
    budget = assigned(whole, 4 * (prompt + completion))
    kernel = "auto" if stand.on_gpu else "flex"
    built = stand.policy(model, BF16, share=True, attention_backend=kernel)
    plain = stand.policy(model, BF16, attention_backend=kernel)
    record("shared prompts, share of tokens saved", sum(layout.shared) / sum(map(len, whole)))
    gap = np.abs(logprobs(built, whole, layout.assignment[0]) - logprobs(plain, alone, budget))
    record("shared prompts against none, mean difference of log-probs", float(gap.mean()), "nats", 0.02)
    if not stand.on_gpu:
        return  # torch cannot compute the gradient of FlexAttention on CPUs
    ours, theirs = (p.train(s, b, LossSettings()) for p, s, b in (
        (built, whole, layout.assignment[0]), (plain, alone, budget)))  # fmt: skip
    record("shared prompts, gradient norm", abs(ours.grad_norm / theirs.grad_norm - 1), "relative", 0.03)
    seconds = [
        float(np.median(timed(stand, lambda p=p, s=s, b=b: p.train(s, b, LossSettings()), 5)))
        for p, s, b in ((built, whole, layout.assignment[0]), (plain, alone, budget))
    ]
    record("update with shared prompts, times as fast", seconds[1] / seconds[0])
    _cost_of_flex_attention(stand, built)


def _cost_of_flex_attention(stand: Stand, built: Any) -> None:
    """Seconds of both kernels on one long sequence, forward and backward."""
    import torch
    from megatron.core.transformer.enums import AttnMaskType

    from gdpo_nemo.data.prefixes import FLEX_COST
    from gdpo_nemo.megatron.flex_attention import FlexAttention, block_mask, mask_arrays
    from gdpo_nemo.megatron.micro_batch import to_device
    from gdpo_nemo.megatron.packing import packing_of

    core = next((m for m in built.chunks[0].modules() if isinstance(m, FlexAttention)), None)
    if core is None:
        record("FlexAttention / TransformerEngine", "TransformerEngine is not installed")
        return
    length, device = 8192, stand.runtime.device
    model = built.built.hf_config
    heads, groups = model.num_attention_heads, model.num_key_value_heads
    size = model.hidden_size // heads
    shapes = [(length, count, size) for count in (heads, groups, groups)]
    query, key, value = (torch.randn(s, dtype=torch.bfloat16, device=device, requires_grad=True) for s in shapes)
    arrays = to_device(core.arrays([length], 0, 1, [0]) | mask_arrays([length], [0], 0, 1), device)
    seconds = []
    for mask in (block_mask(arrays), None):
        packing = packing_of([length], arrays)
        packing.block_mask = mask

        def work(packing=packing) -> None:
            core(query, key, value, None, AttnMaskType.causal, packed_seq_params=packing).float().sum().backward()

        seconds.append(float(np.median(timed(stand, work, 10))))
    record("FlexAttention / TransformerEngine, forward and backward", seconds[0] / seconds[1], "", FLEX_COST, key=True)


CHECKS = (packing, reference, checkpoint, offloading, lora, shared_prompts)
