"""What a rank that interprets Triton computes for ``test_fused_logprobs.py``. Top-level functions, so that they can be
sent."""

from __future__ import annotations

import multiprocessing
import runpy
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_DEADLINE_S = 120.0


class InterpretingRanks:
    """Processes with ``TRITON_INTERPRET=1`` and gloo groups of the first 1, 2 and 3 of them, without Megatron.

    Processes of their own, because Triton decides when it is imported, by whomever, whether it interprets.
    """

    def __init__(self, folder):
        context = multiprocessing.get_context("spawn")
        self.ranks = []
        for rank in range(3):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, 3, f"file://{folder}/meeting", theirs), daemon=True)
            process.start()
            theirs.close()
            self.ranks.append((process, ours))

    def run(self, ranks: int, function: Callable, *arguments, **options) -> list:
        """``function(group, *arguments, **options)`` on each of the first ``ranks``: the results by rank."""
        for _, pipe in self.ranks[:ranks]:
            pipe.send((ranks, function, arguments, options))
        results = []
        for rank, (_, pipe) in enumerate(self.ranks[:ranks]):
            assert pipe.poll(_DEADLINE_S), f"rank {rank} does not answer"
            ok, value = pipe.recv()
            assert ok, f"rank {rank}: {value}"
            results.append(value)
        return results

    def close(self) -> None:
        """End all of them."""
        for process, pipe in self.ranks:
            pipe.close()
            process.kill()
            process.join()


def _serve(rank: int, ranks: int, meeting: str, pipe: Any) -> None:
    import os

    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _teach_bfloat16()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 3)}
    while True:
        try:
            size, function, arguments, options = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(groups[size], *arguments, **options)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _teach_bfloat16() -> None:
    """Let the interpreter multiply bfloat16, of which it keeps the bits as integers and would multiply those."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    stock = InterpreterBuilder.create_dot

    def as_float(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    InterpreterBuilder.create_dot = lambda self, a, b, *rest: stock(self, as_float(a), as_float(b), *rest)


class Case(NamedTuple):
    """Inputs of one evaluation, for all ranks: float32 but for the targets."""

    hidden: np.ndarray
    weight: np.ndarray
    targets: np.ndarray
    gradients: np.ndarray
    """[2, tokens], of log-probs and entropies."""
    vocabulary: int


def make_case(vocabulary: int, padded: int, tokens: int, size: int, seed: int = 0, spread: float = 1.0) -> Case:
    """A random case whose logits have standard deviation ``spread``."""
    draw = np.random.default_rng(seed)
    return Case(
        draw.normal(0, spread / np.sqrt(size), (tokens, size)).astype(np.float32),
        draw.normal(0, 1, (padded, size)).astype(np.float32),
        draw.integers(0, vocabulary, tokens),
        draw.normal(size=(2, tokens)).astype(np.float32),
        vocabulary,
    )


def fused(group, case: Case, temperature=1.0, entropy="gradient", precision="float32", main_grad=None, limit=None):
    """Log-probs, entropies, and the gradients of hidden states and of this rank's rows of the weight.

    ``main_grad``: what is in Megatron's buffer before; the weight's gradient is then read from there. ``limit``: bytes
    of a slice of the backward pass.
    """
    import torch

    from gdpo_nemo.megatron import logprobs as fused_logprobs

    dtype = getattr(torch, precision)
    hidden = torch.from_numpy(case.hidden).to(dtype).requires_grad_()
    weight = torch.nn.Parameter(torch.from_numpy(case.weight).chunk(group.size())[group.rank()].to(dtype).clone())
    if main_grad is not None:
        weight.main_grad = torch.full(weight.shape, main_grad)
        weight.grad_added_to_main_grad = False
    stock = fused_logprobs._GRADIENT_BYTES
    fused_logprobs._GRADIENT_BYTES = limit or stock
    try:
        logprobs, entropies = fused_logprobs.fused_token_logprobs(
            hidden,
            weight,
            torch.from_numpy(case.targets),
            group,
            temperature=temperature,
            vocab_size=case.vocabulary,
            entropy=entropy,
        )
        total = (logprobs * torch.from_numpy(case.gradients[0])).sum()
        if entropy == "gradient":
            total = total + (entropies * torch.from_numpy(case.gradients[1])).sum()
        total.backward()
    finally:
        fused_logprobs._GRADIENT_BYTES = stock
    by_weight = weight.grad if main_grad is None else weight.main_grad
    values = logprobs, entropies, hidden.grad, by_weight
    return tuple(None if value is None else value.detach().float().numpy() for value in values)


def reference_token_logprobs(hidden, weight, targets, *, temperature=1.0, vocab_size=None):
    """Compute ``fused_token_logprobs`` with torch's operators, for a whole weight and in its precision."""
    log_p = (hidden @ weight[:vocab_size].t() / temperature).log_softmax(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def reference(case: Case, temperature=1.0, entropy="gradient", precision="float64"):
    """The same of the whole weight, by torch's functions."""
    import torch

    dtype = getattr(torch, precision)
    hidden = torch.from_numpy(case.hidden).to(dtype).requires_grad_()
    weight = torch.from_numpy(case.weight).to(dtype).requires_grad_()
    logprobs, entropies = reference_token_logprobs(
        hidden, weight, torch.from_numpy(case.targets), temperature=temperature, vocab_size=case.vocabulary
    )
    total = (logprobs * torch.from_numpy(case.gradients[0])).sum()
    if entropy == "gradient":
        total = total + (entropies * torch.from_numpy(case.gradients[1])).sum()
    total.backward()
    return tuple(value.detach().numpy() for value in (logprobs, entropies, hidden.grad, weight.grad))


def launches(place) -> dict[tuple[str, str], tuple[int, int]]:
    """Kernel launches as ``benchmarks/logprob_launches.py`` counts them, (forward, backward) by model and path."""
    benchmark = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "logprob_launches.py"))
    return {
        (model, path): tuple(sum(counts.values()) for counts in benchmark["launches"](path == "fused", *shape))
        for model, shape in benchmark["SHAPES"].items()
        for path in ("fused", "logits")
    }


def updates(place, folder, batch, budget, settings=None, precision="float32"):
    """``rank_cases.updates`` with the fused kernels, and how often they ran."""
    import dataclasses

    import rank_cases

    from gdpo_nemo.megatron import logprobs as fused_logprobs

    layout = dataclasses.replace(place.layout, fused_logprobs=True)
    runs = []
    evaluate = fused_logprobs._evaluate

    def counted(*arguments):
        runs.append(arguments)
        return evaluate(*arguments)

    fused_logprobs._evaluate = counted
    try:
        there = dataclasses.replace(place, layout=layout)
        return rank_cases.updates(there, folder, batch, 2, budget, settings, precision=precision), len(runs)
    finally:
        fused_logprobs._evaluate = evaluate
