"""Recurrent layers compute every sequence of a pack as if it were alone, from its first token on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_flex_attention import random_pack, tensors

from gdpo_nemo.megatron import recurrence as ours
from gdpo_nemo.megatron.packing import packing_arrays, packing_of

GROUPS, HEADS, SIZE, STATE = 2, 3, 4, 5


class NoContext:
    """The group of a single context-parallel rank."""

    def size(self) -> int:
        return 1


def inputs(draw: torch.Generator, sequences: int, length: int) -> dict[str, torch.Tensor]:
    """Random float64 inputs of ``state_space_scan``."""
    shape = (sequences, length, GROUPS)
    sample = dict(generator=draw, dtype=torch.float64)
    return dict(
        x=torch.randn(*shape, HEADS, SIZE, **sample),
        step=torch.randn(*shape, HEADS, **sample).exp(),
        decay=-torch.rand(GROUPS, HEADS, **sample),
        b=torch.randn(*shape, STATE, **sample),
        c=torch.randn(*shape, STATE, **sample),
        skip=torch.randn(GROUPS, HEADS, **sample),
    )


def token_by_token(x, step, decay, b, c, skip):
    """The recurrence by its definition."""
    state = torch.zeros(len(x), GROUPS, HEADS, SIZE, STATE, dtype=x.dtype)
    out = []
    for t in range(x.size(1)):
        added = (step[:, t, ..., None] * x[:, t])[..., None] * b[:, t, :, None, None, :]
        state = (decay * step[:, t]).exp()[..., None, None] * state + added
        out.append((state * c[:, t, :, None, None, :]).sum(-1) + skip[..., None] * x[:, t])
    return torch.stack(out, 1)


def delta_inputs(draw: torch.Generator, sequences: int, length: int) -> dict[str, torch.Tensor]:
    """Random float64 inputs of ``gated_delta_scan``."""
    given = inputs(draw, sequences, length)
    key, query = (torch.nn.functional.normalize(given[name], dim=-1) for name in "bc")
    return dict(query=query, key=key, value=given["x"], strength=given["step"].sigmoid(), decay=-given["step"])


def delta_token_by_token(query, key, value, strength, decay):
    """The gated delta rule by its definition."""
    state = torch.zeros(len(value), GROUPS, HEADS, STATE, SIZE, dtype=value.dtype)
    out = []
    for t in range(value.size(1)):
        state = decay[:, t].exp()[..., None, None] * state
        k, q = (x[:, t, :, None, :, None] for x in (key, query))
        missing = value[:, t] - (state * k).sum(-2)
        state = state + k * (strength[:, t, ..., None] * missing)[..., None, :]
        out.append((state * q).sum(-2))
    return torch.stack(out, 1)


SCANS = {
    "mamba": (inputs, token_by_token, ours.state_space_scan),
    "delta": (delta_inputs, delta_token_by_token, ours.gated_delta_scan),
}


@pytest.mark.parametrize("length, chunk", [(1, 4), (3, 4), (4, 4), (13, 4), (9, 64)])
@pytest.mark.parametrize("kind", SCANS)
def test_a_scan_in_chunks_equals_the_recurrence_and_its_gradient(kind, length, chunk):
    sample, by_definition, scan_in_chunks = SCANS[kind]
    given = sample(torch.Generator().manual_seed(length), 2, length)
    found = []
    for scan, dtype, options in (
        (by_definition, torch.float64, {}),
        (scan_in_chunks, torch.float32, dict(chunk=chunk)),
    ):
        leaves = {name: value.to(dtype, copy=True).requires_grad_() for name, value in given.items()}
        out = scan(**leaves, **options)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape).to(dtype)).sum().backward()
        found.append([out.detach(), *(leaf.grad for leaf in leaves.values())])
    for expected, got in zip(*found):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_no_state_passes_between_sequences_except_from_shared_prompts(seed):
    """Check outputs and gradients of a convolution and a scan, for packs with and without shared tokens."""
    lengths, shared = random_pack(np.random.default_rng(seed), 9)
    if seed % 2:
        shared = [0] * len(lengths)
    width = GROUPS * STATE
    draw = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(width, 1, 4, generator=draw), torch.randn(width, generator=draw)
    whole = torch.randn(sum(lengths), width, generator=draw)

    def mixed(x):
        x = ours.causal_convolution(x, weight, bias).unflatten(-1, (GROUPS, STATE))
        step = x.mean(-1, keepdim=True).exp()
        return ours.state_space_scan(
            x[..., None, :], step, -torch.ones(GROUPS, 1), x, x, torch.ones(GROUPS, 1), chunk=4
        )

    packed, alone = whole.clone().requires_grad_(), whole.clone().requires_grad_()
    packing = packing_of(lengths, tensors(packing_arrays(lengths, 0, 1, rectangles=True, shared=shared)))
    found = ours.over_sequences(mixed, packed, packing, NoContext())
    expected = []
    path = torch.zeros(0, dtype=torch.int64)
    for start, length, count in zip(np.cumsum([0, *lengths]), lengths, shared):
        path = torch.cat((path[:count], torch.arange(start, start + length)))
        expected.append(mixed(alone[path][None])[0, count:])
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-5, atol=1e-6)
    for out in (found, torch.cat(expected)):
        out.square().sum().backward()
    torch.testing.assert_close(packed.grad, alone.grad, rtol=1e-4, atol=1e-4)
