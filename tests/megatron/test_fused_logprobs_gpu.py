"""The fused kernels on CUDA: equal to torch's functions, without a host sync, and how fast beside whole logits."""

from __future__ import annotations

import pytest
import torch
from fused_cases import reference_token_logprobs

from gdpo_nemo.megatron.logprobs import fused_token_logprobs, token_logprobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class OneRank:
    """A tensor-parallel group of one, which gathers nothing."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def inputs(tokens: int, size: int, vocabulary: int, dtype: torch.dtype):
    draw = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, size, device="cuda", generator=draw) * size**-0.5
    weight = torch.randn(vocabulary, size, device="cuda", generator=draw) * 2
    targets = torch.randint(0, vocabulary, (tokens,), device="cuda", generator=draw)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("vocabulary", [1003, 151669])
def test_values_and_gradients_equal_the_reference_on_cuda(dtype, limit, vocabulary):
    hidden, weight, targets = inputs(300, 896, vocabulary, dtype)
    logprobs, entropy = fused_token_logprobs(hidden, weight, targets, OneRank(), temperature=0.7)
    (logprobs.sum() + 0.1 * entropy.sum()).backward()
    found = hidden.grad, weight.grad
    # Of the same rounded inputs, in float32: what is left is the kernels' own error.
    hidden, weight = (x.detach().float().requires_grad_() for x in (hidden, weight))
    expected = reference_token_logprobs(hidden, weight, targets, temperature=0.7)
    (expected[0].sum() + 0.1 * expected[1].sum()).backward()
    torch.testing.assert_close(logprobs, expected[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(entropy, expected[1], atol=1e-4, rtol=0)
    assert error(found[0], hidden.grad) < limit
    assert error(found[1], weight.grad) < limit


def test_main_grad_accumulates_in_float32_on_cuda():
    hidden, weight, targets = inputs(300, 896, 1003, torch.bfloat16)
    weight = torch.nn.Parameter(weight.detach())
    weight.main_grad = torch.full(weight.shape, 2.0, device="cuda")
    weight.grad_added_to_main_grad = False
    fused_token_logprobs(hidden, weight, targets, OneRank())[0].sum().backward()
    plain = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    reference_token_logprobs(*plain, targets)[0].sum().backward()
    assert error(weight.main_grad - 2.0, plain[1].grad) < 1e-2


def test_forward_and_backward_wait_for_nothing():
    hidden, weight, targets = inputs(300, 896, 1003, torch.bfloat16)
    fused_token_logprobs(hidden, weight, targets, OneRank())[0].sum().backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        logprobs, entropy = fused_token_logprobs(hidden, weight, targets, OneRank(), entropy="value")
        logprobs.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("tokens, size, vocabulary", [(16384, 1536, 151936), (8192, 3584, 152064)])
def test_fused_logprobs_are_at_least_as_fast_as_whole_logits(tokens, size, vocabulary, capsys):
    hidden, weight, targets = inputs(tokens, size, vocabulary, torch.bfloat16)
    chunk = (256 << 20) // (4 * vocabulary)

    def whole():
        def one(h, t):
            return token_logprobs(h @ weight.t(), t, OneRank(), entropy="value")[0]

        parts = zip(hidden.split(chunk), targets.split(chunk))
        run = torch.utils.checkpoint.checkpoint
        torch.cat([run(one, h, t, use_reentrant=False, preserve_rng_state=False) for h, t in parts]).sum().backward()

    def fused():
        fused_token_logprobs(hidden, weight, targets, OneRank(), entropy="value")[0].sum().backward()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
        milliseconds = {run.__name__: timed(run) for run in (whole, fused)}
    products = 8 * tokens * size * vocabulary  # forward, again, and two gradients, 2 each
    with capsys.disabled():
        print(f"\n{tokens} x {size} x {vocabulary} on {torch.cuda.get_device_name()}: {milliseconds} ms,", end=" ")
        print(f"fused {products / milliseconds['fused'] / 1e9:.0f} TFLOP/s")
    assert milliseconds["fused"] < milliseconds["whole"]


def timed(run, rounds: int = 10) -> float:
    """Milliseconds of one run, the best of ``rounds``."""
    run()
    best = float("inf")
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best
