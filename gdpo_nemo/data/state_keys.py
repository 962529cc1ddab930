"""Keys of token states: tokens whose keys, and all keys before them, are equal have the same states.

Work may be shared between sequences only where their states are equal. Under a causal mask, the state of a token
depends on the token ids up to the token, and on everything else that the model reads there. All code that shares states
compares these keys, and never token ids. ``prefixes`` is the only such code today: it decides which leading tokens of a
micro-batch are computed once.

Weights are not part of the key, because all sequences of a call are processed with the same weights.
"""

from __future__ import annotations

import numpy as np

from gdpo_nemo.data.images import Images

_SEED = 2510_11370
"""Seed of the multipliers. All processes use the same keys."""


def state_keys(token_ids: np.ndarray, routing: np.ndarray | None, images: Images = ()) -> np.ndarray:
    """Return the key of each token's state: uint64 [tokens].

    A key is the token id plus a hash of the other inputs of the model at this token, modulo 2^64. An absent input adds
    0. The hash is a sum of products with random odd multipliers, so different inputs have equal keys with a
    probability of less than 2^-50.

    To add an input, such as an adapter, add its hash with different multipliers.

    Args:
        token_ids: int32 [tokens].
        routing: [tokens, MoE layers * experts per token]: experts that the model must use, in all its layers, or -1 if
            it chooses them itself (``TrainSequence.routing``). None if it chooses the experts of all tokens.
        images: images of the sequence. The first 64 bits of an image's hash are added at each of its placeholders.
    """
    keys = token_ids.astype(np.uint64)
    if routing is not None:
        count = routing.shape[1]
        multipliers = np.random.default_rng(_SEED).integers(1 << 63, size=(count,), dtype=np.uint64) * 2 + 1
        for column in range(count):
            # A model's own choice depends only on the state before it, and adds 0.
            keys += (routing[:, column].astype(np.int64) + 1).astype(np.uint64) * multipliers[column]
    for placed in images:
        keys[placed.start : placed.stop] += np.uint64(int(placed.image.sha256[:16], 16))
    return keys


def common_tokens(a: np.ndarray, b: np.ndarray) -> int:
    """Return the number of leading tokens that two sequences have in common, given their keys."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def sort_key(keys: np.ndarray) -> bytes:
    """Return a sort key that orders sequences lexicographically by the keys of their tokens."""
    key: bytes = keys.astype(">u8").tobytes()
    return key
