"""Each rank writes, copies and reads its own share of a checkpoint."""

from __future__ import annotations

import io

import checkpoint_cases
import numpy as np
import pytest
import tiny_models
from hypothesis import given, settings, strategies as st

SHAPES = st.lists(st.integers(1, 5), max_size=4)


@settings(max_examples=50)
@given(SHAPES, st.data())
def test_blocks_of_consecutive_ranges_are_the_elements_in_order(shape, data):
    from gdpo_nemo.megatron.checkpoint_shards import blocks

    tensor = np.arange(int(np.prod(shape))).reshape(shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, tensor.size), max_size=4)))
    found = []
    for start, stop in zip([0, *cuts], [*cuts, tensor.size]):
        parts = list(blocks(shape, start, stop))
        assert len(parts) <= max(2 * len(shape) - 1, 1)
        for offsets, sizes in parts:
            part = tensor[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))]
            assert part.shape == tuple(sizes)
            found += part.ravel().tolist()
    assert found == tensor.ravel().tolist()


def test_copy_in_a_shared_block_is_written_without_the_other_parts_of_the_block():
    import torch

    from gdpo_nemo.megatron.checkpoint_shards import with_own_storage

    block = torch.arange(10_000, dtype=torch.bfloat16)
    copy = with_own_storage(block[4096:4100].view(2, 2))
    file = io.BytesIO()
    torch.save(copy, file)
    assert file.tell() < 4096
    assert torch.equal(torch.load(io.BytesIO(file.getvalue())), block[4096:4100].view(2, 2))
    block[4096] = 7  # no copy
    assert copy[0, 0] == 7


@pytest.fixture(scope="module")
def larger_model(tmp_path_factory):
    """Model of 1.1 million parameters, so that the headers in the files do not count."""
    shape = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, vocab_size=1024)
    return tiny_models.write_model("qwen3", tmp_path_factory.mktemp("larger"), **shape)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["DP4+DIST", "DP8+DIST", "TP2xDP2+SP+DIST"])
def test_a_rank_copies_writes_and_reads_its_share_of_a_checkpoint(on_ranks, larger_model, tmp_path, layout):
    arguments = (larger_model, tiny_models.make_batch(), tmp_path / "checkpoint")
    for rank in on_ranks(layout, checkpoint_cases.checkpoint_bytes, *arguments):
        assert rank["copied"] < 1.2 * rank["share"]
        assert rank["written"] < 1.2 * rank["share"]
        assert rank["read"] < 1.2 * rank["share"]
