"""An update packed over an earlier one is the update alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.weights.manifest import pack, unpack

SHAPES = st.lists(st.tuples(st.integers(0, 40), st.sampled_from([torch.float32, torch.bfloat16])), max_size=8)


def drawn(shapes, seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (f"layer.{number}", torch.randn(size, 3, generator=generator).to(dtype))
        for number, (size, dtype) in enumerate(shapes)
    ]


@given(SHAPES, SHAPES)
def test_update_over_an_earlier_one_equals_one_in_new_memory(before, after):
    """Its padding, which is sent along, included; whether the earlier one was smaller or larger."""
    _, memory = pack(drawn(before, 0), 0)
    manifest, packed = pack(drawn(after, 1), 1, memory=memory)
    alone, expected = pack(drawn(after, 1), 1)
    assert manifest == alone
    np.testing.assert_array_equal(packed, expected)
    for (name, tensor), (sent, arrived) in zip(drawn(after, 1), unpack(manifest, packed), strict=True):
        assert name == sent and torch.equal(arrived, tensor)


def test_fitting_update_is_packed_in_place_and_does_not_change_the_weights():
    weights = drawn([(30, torch.float32), (7, torch.bfloat16)], 2)
    kept = [tensor.clone() for _, tensor in weights]
    _, memory = pack(weights, 0)
    for version in (1, 2):
        _, packed = pack(weights, version, memory=memory)
        assert np.shares_memory(packed, memory) and packed.nbytes == memory.nbytes
        memory = packed
    memory[:] = 255
    assert all(torch.equal(tensor, before) for (_, tensor), before in zip(weights, kept))


def test_a_changed_byte_is_refused_with_its_tensor():
    manifest, packed = pack(drawn([(3, torch.float32), (5, torch.bfloat16)], 0), 7)
    packed[manifest.entries[1].offset] ^= 1
    with pytest.raises(RunError, match=r"weight update 7: checksum of layer\.1 differs after transport"):
        list(unpack(manifest, packed))
