"""Encoding of the words that changed in a buffer since an older version of it."""

from __future__ import annotations

import torch


def encode(new: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return (encoded difference, uint8 [bytes]; number of changed words). The size is at most about that of ``new``.

    Args:
        new: int16 [words].
        old: int16 [words], on the same device.
    """
    raise NotImplementedError


def apply(words: torch.Tensor, encoded: torch.Tensor) -> None:
    """Change ``words``, int16 [words], in place from the old to the new version.

    Raises:
        ValueError: if ``encoded`` is not a difference of so many words.
    """
    raise NotImplementedError
