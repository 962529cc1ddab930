"""Why two sets of log-probs of the same tokens differ: the known causes, each recognised by its signature. Pure
arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

import numpy as np

_EXPLAINED = 0.1
"""A cause is named when assuming it leaves less than this share of the mean difference."""


@dataclass
class Comparison:
    """Log-probs of one place against those of the reference, over all completion tokens."""

    name: str
    max_abs: float
    mean_abs: float
    worst: list[dict[str, Any]] = field(default_factory=list)
    """The tokens that differ most: sequence, offset, token, reference, measured."""
    causes: list[str] = field(default_factory=list)


def compare(
    name: str,
    reference: Sequence[np.ndarray],
    measured: Sequence[np.ndarray],
    tokens: Sequence[np.ndarray],
    worst: int = 5,
) -> Comparison:
    """Differences per token. All arguments: one array [completion tokens] per sequence."""
    sizes = [len(r) for r in reference]
    gaps = np.abs(_flat(measured) - _flat(reference)).astype(np.float64)
    order = np.argsort(-np.nan_to_num(gaps, nan=np.inf), kind="stable")[:worst]
    starts = np.cumsum([0, *sizes])
    rows = []
    for place in order.tolist():
        sequence = int(np.searchsorted(starts, place, side="right") - 1)
        offset = place - int(starts[sequence])
        rows.append(
            dict(
                sequence=sequence,
                offset=offset,
                token=int(tokens[sequence][offset]),
                reference=float(reference[sequence][offset]),
                measured=float(measured[sequence][offset]),
            )
        )
    # NaN must not pass for agreement.
    largest = float("nan") if np.isnan(gaps).any() else float(gaps.max())
    return Comparison(name, largest, float(gaps.mean()), rows)


def diagnose(
    reference: Sequence[np.ndarray],
    measured: Sequence[np.ndarray],
    threshold: float,
    *,
    tempered: Mapping[float, Sequence[np.ndarray]] | None = None,
    alone: Sequence[np.ndarray] | None = None,
    prompt_lengths: Sequence[int] | None = None,
    context_size: int = 1,
) -> list[str]:
    """The known causes that explain the difference; empty where there is none above ``threshold``.

    Args:
        tempered: the reference at other temperatures.
        alone: the measured side, with every sequence in a micro-batch of its own.
        prompt_lengths, context_size: with context parallelism, to find the chunk boundaries.
    """
    gaps = np.abs(_flat(measured) - _flat(reference))
    if np.isnan(gaps).any():
        return ["values that are no numbers"]
    if gaps.max() <= threshold:
        return []
    causes = _shifted(reference, measured, gaps.mean())
    for temperature, values in (tempered or {}).items():
        if np.abs(_flat(measured) - _flat(values)).mean() < _EXPLAINED * gaps.mean():
            causes.append(f"temperature: measured at {temperature:g}")
    if alone is not None and np.abs(_flat(measured) - _flat(alone)).max() > threshold:
        causes.append("packing: a sequence's log-probs depend on its neighbours in the micro-batch")
    if context_size > 1 and prompt_lengths is not None:
        near = _flat(_near_boundaries(measured, prompt_lengths, context_size)).astype(bool)
        bad = gaps > threshold
        if near.any() and (bad & near).sum() > 0.8 * bad.sum():
            causes.append(
                "chunk boundaries: the tokens at the edges of context-parallel chunks differ, the others do not"
            )
    if not causes:
        causes = _renormalised(reference, measured, threshold)
    if not causes and (gaps > threshold).mean() > 0.5:
        causes.append("other weights: nearly all tokens differ, both ways; one side is stale or another model")
    return causes or ["no known cause fits"]


def _shifted(reference: Sequence[np.ndarray], measured: Sequence[np.ndarray], usual: float) -> list[str]:
    for step, direction in ((1, "ahead"), (-1, "behind")):
        pairs = [(m[:-1], r[1:]) if step > 0 else (m[1:], r[:-1]) for m, r in zip(measured, reference) if len(r) > 1]
        if pairs and np.abs(_flat([m for m, _ in pairs]) - _flat([r for _, r in pairs])).mean() < _EXPLAINED * usual:
            return [f"one-position shift: measured values are one token {direction}"]
    return []


def _renormalised(reference: Sequence[np.ndarray], measured: Sequence[np.ndarray], threshold: float) -> list[str]:
    """Sampling from a truncated distribution divides probabilities by the mass that is left: log-probs only rise."""
    gaps = _flat(measured) - _flat(reference)
    if gaps.min() > -threshold and (gaps > threshold).mean() > 0.2:
        return ["nucleus renormalisation: measured log-probs are higher throughout, as with top_p or top_k"]
    return []


def _near_boundaries(values: Sequence[np.ndarray], prompt_lengths: Sequence[int], size: int) -> list[np.ndarray]:
    """Whether a token or the one it is predicted from is the first or last of a context-parallel chunk."""
    marks = []
    for completion, prompt in zip(values, prompt_lengths):
        total = prompt + len(completion)
        chunk = -(-total // (2 * size))
        source = np.arange(prompt - 1, total - 1)
        marks.append((source % chunk == chunk - 1) | (source % chunk == 0))
    return marks


def _flat(values: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.asarray(v, np.float64) for v in values])
