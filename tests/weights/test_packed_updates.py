"""An update in one buffer, for transports of users."""

from __future__ import annotations

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


@given(SHAPES)
def test_a_packed_update_gives_every_tensor_back(shapes):
    manifest, packed = pack(drawn(shapes, 1), 1)
    for (name, tensor), (sent, arrived) in zip(drawn(shapes, 1), unpack(manifest, packed), strict=True):
        assert name == sent and torch.equal(arrived, tensor)


def test_a_changed_byte_is_refused_with_its_tensor():
    manifest, packed = pack(drawn([(3, torch.float32), (5, torch.bfloat16)], 0), 7)
    packed[manifest.entries[1].offset] ^= 1
    with pytest.raises(RunError, match=r"weight update 7: checksum of layer\.1 differs after transport"):
        list(unpack(manifest, packed))
