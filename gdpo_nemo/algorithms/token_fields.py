"""What a micro-batch brings to a loss beside the model's output, and sums over its sequences.

torch is imported for annotations alone: a configuration is checked with the registries of losses and corrections, and
must not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Reduce = Callable[["Tensor"], "Tensor"]
"""Sums a float64 [sequences] tensor over the ranks that share the sequences (context parallelism). Values only: it is
called on detached tensors, so no gradient has to pass through it."""


def required(values: Tensor | None, name: str) -> Tensor:
    """Return an optional tensor of ``TokenFields``. Raises ValueError: the micro-batch does not have it."""
    if values is None:
        raise ValueError(f"needs {name}, which was not given")
    return values


@dataclass(frozen=True)
class TokenFields:
    """What a micro-batch brings beside the model's output; every tensor is 1-D [tokens] in the same order.

    Tokens may belong to any sequences, in any order; with context parallelism each rank holds its own share.
    """

    advantages: Tensor
    """float32; the advantage of the token's sequence, or with credit by turn its own."""
    weights: Tensor
    """float32; `losses.token_weights` of the token's sequence, 0 for tokens that are not trained."""
    sequence_ids: Tensor
    """int64; number of the token's sequence within the micro-batch, the same on all ranks that share it."""
    num_sequences: int
    """Sequences in the micro-batch, counting those without a token on this rank."""
    old_logprobs: Tensor | None = None
    """float32; log-probs in the denominator of the ratio. None: those of this very forward pass (ratio 1). A loss and a
    correction always get a tensor."""
    sampler_logprobs: Tensor | None = None
    """float32; log-probs under which the tokens were drawn, NaN where they are not known."""
    reference_logprobs: Tensor | None = None
    """float32; log-probs of the reference model, for the KL penalty."""
    old_values: Tensor | None = None
    """float32; what the value head said before the step. None: there is no value head."""
    returns: Tensor | None = None
    """float32; what the values are to become, where there is a value head."""
    staleness: Tensor | None = None
    """int32; version that is trained minus the version that sampled the token. None: 0 everywhere. A loss and a
    correction of one's own always get a tensor."""
    pairs: Tensor | None = None
    """int64; number of the token's pair of completions within the micro-batch, from 1 to at most `num_sequences`,
    negative for the rejected one of the two. None: there are no pairs."""
    chosen: Tensor | None = None
    """bool; tokens that the driver chose by their covariance for the loss kl_cov. None: none."""
    reduce: Reduce | None = None
    """Of the ranks that share the sequences; None where each rank has whole ones."""

    def select(self, keep: Tensor) -> TokenFields:
        """The same fields at the tokens where the bool tensor `keep` is True."""
        tensors = {name: value[keep] for name, value in vars(self).items() if hasattr(value, "detach")}
        return replace(self, **tensors)

    def sequence_sums(self, values: Tensor) -> Tensor:
        """Sum of a per-token tensor over the token's sequence, on all ranks that share it: [tokens], detached.

        Added up in float64, so that the order of the additions, which a GPU does not fix, hardly reaches the result.
        """
        return self._sums(values)[self.sequence_ids]

    def sequence_means(self, values: Tensor) -> Tensor:
        """Mean of a per-token tensor over the trained tokens of the token's sequence: [tokens], detached."""
        count = self._sums(values.new_ones(len(values)))
        return (self._sums(values) / count.clamp(min=1.0))[self.sequence_ids]

    def _sums(self, values: Tensor) -> Tensor:
        """Sum over each sequence: [sequences]"""
        partial = values.detach().double().new_zeros(self.num_sequences)
        partial.index_add_(0, self.sequence_ids, values.detach().double())
        return (partial if self.reduce is None else self.reduce(partial)).to(values.dtype)
