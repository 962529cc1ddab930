"""FlexAttention's mask of a pack with shared prefixes is that of its dense definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gdpo_nemo.megatron import flex_attention as ours
from gdpo_nemo.megatron.packing import local_positions


def random_pack(draw, longest: int, multiple: int = 1) -> tuple[list[int], list[int]]:
    """Lengths of unshared tokens, padded to ``multiple``, and how many tokens each sequence shares with its
    predecessor: any real tokens of it, at any depth."""
    lengths, shared = [], []
    whole = 0
    for _ in range(draw.integers(1, 12)):
        shared.append(int(draw.integers(0, whole + 1)) if draw.random() < 0.8 else 0)
        real = int(draw.integers(1, longest))
        lengths.append(-(-real // multiple) * multiple)
        whole = shared[-1] + real
    return lengths, shared


def dense(lengths, shared, rank=0, size=1, window=None) -> np.ndarray:
    """bool [local rows, keys]: each query attends to the last tokens of its own sequence at positions up to its own."""
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    mask = []
    keys = np.zeros(0, np.int64)
    for start, length, count in zip(bounds, lengths, shared):
        keys = np.concatenate((keys[:count], start + np.arange(length)))
        for position in local_positions(length, rank, size):
            row = np.zeros(bounds[-1], bool)
            end = count + position + 1
            row[keys[max(0, end - (window or end)) : end]] = True
            mask.append(row)
    return np.array(mask)


def tensors(arrays) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "block, size, window", [(3, 1, None), (128, 1, None), (8, 2, None), (5, 4, None), (3, 1, 7), (8, 2, 40)]
)
def test_the_mask_of_a_pack_is_that_of_its_dense_definition_in_every_block(monkeypatch, block, size, window):
    monkeypatch.setattr(ours, "_BLOCK", block)
    draw = np.random.default_rng(block)
    kinds = set()
    for _ in range(12):
        lengths, shared = random_pack(draw, 4 * block + 9, 2 * size if size > 1 else 1)
        rank = int(draw.integers(size))
        expected = dense(lengths, shared, rank, size, window)
        arrays = ours.mask_arrays(lengths, shared, rank, size, window)
        mask = ours.block_mask(tensors(arrays), windowed=window is not None)
        rows, keys = (torch.arange(n) for n in expected.shape)
        np.testing.assert_array_equal(mask.mask_mod(0, 0, rows[:, None], keys[None]), expected)
        assert mask.shape[-2:] == expected.shape
        for row in range(0, len(rows), block):
            for column in range(0, len(keys), block):
                cells = expected[row : row + block, column : column + block]
                kind = kind_of(mask, row // block, column // block)
                kinds.add(kind)
                assert kind != "empty" or not cells.any()
                assert kind != "full" or (cells.all() and cells.shape == (block, block))
                # With context parallelism or a window, an empty block may be evaluated.
                if size == 1 and window is None:
                    assert (kind == "empty") == (not cells.any())
                    assert (kind == "full") == (cells.all() and cells.shape == (block, block))
    assert kinds == {"empty", "evaluated", "full"}


def kind_of(mask, row: int, column: int) -> str:
    """The kind of a block, which both sides of the mask must agree on."""
    found = []
    for side, i, j in (("kv", row, column), ("q", column, row)):
        in_kind = {
            kind: j
            in getattr(mask, f"{p}{side}_indices")[0, 0, i, : int(getattr(mask, f"{p}{side}_num_blocks")[0, 0, i])]
            for kind, p in (("evaluated", ""), ("full", "full_"))
        }
        assert sum(in_kind.values()) <= 1
        found.append(next((kind for kind, holds in in_kind.items() if holds), "empty"))
    assert found[0] == found[1]
    return found[0]


def test_kernel_options_limit_the_stages_only_for_heads_wider_than_256():
    """With torch's three stages, the forward kernel of heads of 512 needs more shared memory than an H100 has."""
    from gdpo_nemo.megatron.flex_attention import kernel_options

    assert kernel_options(256) is None
    assert kernel_options(512)["fwd_num_stages"] == 2
