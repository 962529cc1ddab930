"""What the Triton kernels behind ``transformer_engine.pytorch.permutation`` do, in torch: tokens to experts and back.

Triton's interpreter would take minutes for them.
"""

from __future__ import annotations

import torch


def moe_permute(inp, routing_map, num_out_tokens=-1, max_token_num=-1, map_type="mask"):
    """[tokens, hidden] -> (rows by expert and then by token, the token of each row)."""
    assert map_type == "mask"
    rows = routing_map.bool().T.nonzero()[:, 1]
    return inp.index_select(0, rows), rows


def moe_permute_with_probs(inp, probs, routing_map, num_out_tokens=-1):
    """The same, and the probability of each row, between them."""
    experts, rows = routing_map.bool().T.nonzero(as_tuple=True)
    return inp.index_select(0, rows), probs[rows, experts], rows


def moe_unpermute(
    inp, row_id_map, merging_probs=None, restore_shape=None, map_type="mask", probs=None, pad_offsets=None
):
    """Add the rows of each token up."""
    assert merging_probs is None and probs is None and pad_offsets is None
    return inp.new_zeros(restore_shape).index_add(0, row_id_map, inp)


def moe_sort_chunks_by_index(inp, split_sizes, sorted_index):
    """Cut the rows into chunks and put these into another order."""
    chunks = inp.split(split_sizes.tolist())
    return torch.cat([chunks[i] for i in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(inp, probs, split_sizes, sorted_index):
    """The same with rows and probabilities."""
    return tuple(moe_sort_chunks_by_index(part, split_sizes, sorted_index) for part in (inp, probs))
