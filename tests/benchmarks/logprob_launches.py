"""Kernel launches of the log-probs of one micro-batch, forward and backward, with whole logits and with the fused
kernels.

    python tests/benchmarks/logprob_launches.py

Counted on meta tensors, so no GPU is needed: every operation of torch's that is no view and no allocation is one
launch, so is every Triton kernel and every collective. A meta tensor has no values to wait for: a host sync would
raise.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

SHAPES = {
    # model: (tokens, hidden size, vocabulary)
    "1.5b": (16384, 1536, 151936),
    "7b": (8192, 3584, 152064),
}


class OneRank:
    """A tensor-parallel group of one."""

    def rank(self) -> int:
        """0."""
        return 0

    def size(self) -> int:
        """1."""
        return 1


class _Recorded:
    """A Triton kernel that is counted instead of launched."""

    def __init__(self, name: str, counts: Counter):
        self.name = name
        self.counts = counts

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.counts[self.name] += 1

        return launch


@contextmanager
def counted():
    """A Counter of what would be launched on a GPU, by name."""
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    from gdpo_nemo.megatron import logprob_kernels

    counts: Counter = Counter()

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if not func.is_view and not func.name().startswith(("aten::empty", "aten::new_empty", "aten::detach")):
                counts[func.name()] += 1
            return func(*args, **(kwargs or {}))

    with ExitStack() as stack:
        for name in ("part_statistics", "combine_parts", "logit_gradients"):
            stack.enter_context(mock.patch.object(logprob_kernels, name, _Recorded(name, counts)))
        collective = mock.patch.object(dist, "all_reduce", lambda *_, **__: counts.update(["all_reduce"]))
        stack.enter_context(collective)
        stack.enter_context(Mode())
        yield counts


def head(fused: bool, entropy: str) -> Any:
    """The part of ``PolicyModel`` that makes values of hidden states, without the model."""
    from types import SimpleNamespace

    from gdpo_nemo.megatron.model import PolicyModel

    class Head(SimpleNamespace):
        _evaluate = PolicyModel._evaluate
        _evaluate_chunk = PolicyModel._evaluate_chunk
        _head_adapter = PolicyModel._head_adapter
        _options = PolicyModel._options
        _columns = staticmethod(PolicyModel._columns)

    return Head(
        fused=fused,
        entropy=entropy,
        temperature=1.0,
        logit_cap=None,
        share_embeddings_and_output_weights=False,
        pg_collection=SimpleNamespace(tp=OneRank()),
    )


def launches(fused: bool, tokens: int, size: int, vocabulary: int, entropy: str = "value") -> tuple[Counter, Counter]:
    """(forward, backward) of one micro-batch in bfloat16 with a float32 main_grad, as Megatron's wrapper has it."""
    from types import SimpleNamespace

    import torch

    like = dict(dtype=torch.bfloat16, device="meta")
    hidden = torch.empty(tokens, size, **like, requires_grad=True)
    weight = torch.nn.Parameter(torch.empty(vocabulary, size, **like))
    setattr(weight, "main_grad", torch.empty(vocabulary, size, device="meta"))  # noqa: B010
    setattr(weight, "grad_added_to_main_grad", False)  # noqa: B010
    targets = torch.zeros(tokens, dtype=torch.int64, device="meta")
    model = head(fused, entropy)
    model.output_layer = SimpleNamespace(weight=weight)
    model.real_vocab_size = vocabulary
    with counted() as forward:
        values = model._evaluate(hidden, targets)
    gradient = torch.zeros_like(values)
    gradient[:, 0] = 1.0
    with counted() as backward:
        values.backward(gradient)
    return forward, backward


def main() -> None:
    """See the top of the file."""
    from gdpo_nemo.megatron import runtime

    runtime.prepare()
    print("| model | tokens | log-probs | forward | backward | at 4.5 us |")
    print("|---|---|---|---|---|---|")
    for name, (tokens, size, vocabulary) in SHAPES.items():
        for fused in (False, True):
            forward, backward = (sum(counts.values()) for counts in launches(fused, tokens, size, vocabulary))
            milliseconds = (forward + backward) * 4.5e-3
            path = "fused" if fused else "logits"
            print(f"| {name} | {tokens} | {path} | {forward} | {backward} | {milliseconds:.2f} ms |")


if __name__ == "__main__":
    main()
