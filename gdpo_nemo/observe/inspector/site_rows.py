"""The samples of one file of rollouts as arrays: what the site's index says of each, and its tokens.

Nothing is done per token in Python: columns of lists come as their concatenation and the length of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping

import numpy as np

from gdpo_nemo.config.messages import first_line
from gdpo_nemo.data.records import Outcome
from gdpo_nemo.errors import RunError
from gdpo_nemo.observe.rollouts import read_columns

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Tokens:
    """The completions of a file, one behind the other."""

    lengths: np.ndarray
    """int64 [samples]"""
    ids: np.ndarray
    """int32 [tokens]"""
    logprobs: np.ndarray
    """float32 [tokens], the sampler's; NaN where the policy did not write."""
    trainer: np.ndarray | None
    """float32 [tokens], the trainer's; NaN where nobody computed it. None: of no sample."""
    entropies: np.ndarray | None
    """float32 [tokens], nats; NaN and None as of ``trainer``."""
    written: np.ndarray
    """bool [tokens]: the policy wrote it."""

    @property
    def rows(self) -> np.ndarray:
        """int64 [tokens]: the sample of each."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)


def read_samples(path: Path) -> pa.Table:
    """Every column of a file of rollouts. Raises RunError: it cannot be read, or is none."""
    from gdpo_nemo.observe.sample_columns import SCHEMA

    try:
        return read_columns(path, SCHEMA.names)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path}: is not a file of rollouts ({first_line(error)})") from None


def tokens_of(table: pa.Table, path: Path) -> Tokens:
    """The tokens of a table of samples. Raises RunError: a sample has another number of log-probs than tokens."""
    ids, lengths, _ = _flat(table.column("completion_ids"), np.int32)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    found = {}
    for name, kind, unset in (
        ("logprobs", np.float32, np.nan),
        ("trainer_logprobs", np.float32, np.nan),
        ("entropies", np.float32, np.nan),
        ("loss_mask", np.bool_, True),
    ):
        values, counts, there = _flat(table.column(name), kind)
        if (counts[there] != lengths[there]).any():
            raise RunError(f"{path}: is not a file of rollouts ({name}: not one for each token)")
        found[name] = np.full(len(ids), unset, kind)
        found[name][there[rows]] = values
    trainer, entropies = (
        None if np.isnan(values).all() else values for values in (found["trainer_logprobs"], found["entropies"])
    )
    return Tokens(lengths, ids, found["logprobs"], trainer, entropies, found["loss_mask"])


def _flat(column: pa.ChunkedArray, kind: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The lists' values, the length of each, and which are no null."""
    values = [np.zeros(0, kind)]
    lengths = [np.zeros(0, np.int64)]
    there = [np.zeros(0, bool)]
    for chunk in column.chunks:
        ends = chunk.offsets.to_numpy()
        values.append(chunk.values.to_numpy(zero_copy_only=False)[ends[0] : ends[-1]].astype(kind))
        lengths.append(np.diff(ends).astype(np.int64))
        there.append(chunk.is_valid().to_numpy(zero_copy_only=False))
    return np.concatenate(values), np.concatenate(lengths), np.concatenate(there)


def map_columns(column: pa.ChunkedArray) -> dict[str, np.ndarray]:
    """A column of maps as one column by name: float64 [samples], NaN where the name is missing or its value is."""
    found: dict[str, np.ndarray] = {}
    start = 0
    for chunk in column.chunks:
        ends = chunk.offsets.to_numpy()
        rows = start + np.repeat(np.arange(len(chunk)), np.diff(ends))
        names = chunk.keys[ends[0] : ends[-1]].dictionary_encode()
        values = chunk.items[ends[0] : ends[-1]].to_numpy(zero_copy_only=False).astype(np.float64)
        codes = names.indices.to_numpy()
        for code, name in enumerate(names.dictionary.to_pylist()):
            of_it = codes == code
            found.setdefault(name, np.full(len(column), np.nan))[rows[of_it]] = values[of_it]
        start += len(chunk)
    return found


def groups_of(table: pa.Table) -> np.ndarray:
    """int32 [samples]: the number of each sample's group within its file. A group ends where prompt or place change,
    or where the samples are counted anew."""
    if not table.num_rows:
        return np.zeros(0, np.int32)
    codes = _codes(table.column("prompt_id"))
    places = table.column("position").to_numpy()
    samples = table.column("sample_index").to_numpy()
    new = (codes[1:] != codes[:-1]) | (places[1:] != places[:-1]) | (samples[1:] <= samples[:-1])
    return np.concatenate(([0], np.cumsum(new))).astype(np.int32)


def equal_completions(table: pa.Table, groups: np.ndarray) -> np.ndarray:
    """int32 [samples]: how many of the sample's group have its completion, itself among them."""
    texts = _codes(table.column("completion")).astype(np.int64)
    pairs = groups * (int(texts.max(initial=0)) + 1) + texts
    _, place, count = np.unique(pairs, return_inverse=True, return_counts=True)
    return count[place].astype(np.int32)


def summed_advantages(
    rewards: Mapping[str, np.ndarray], groups: np.ndarray, outcomes: list[str], weights: Mapping[str, float]
) -> np.ndarray:
    """What GRPO would have given: float32 [samples], of the weighted sum of the rewards as they were recorded.

    Shaping and KL in the reward are not applied. NaN where no reward has a weight.
    """
    weighted = {name: values for name, values in rewards.items() if weights.get(name)}
    trained = np.isin(outcomes, (Outcome.OK, Outcome.TRUNCATED))
    known = [trained & ~np.isnan(values) for values in weighted.values()]
    if not known or not np.any(known):
        return np.full(len(groups), np.nan, np.float32)
    from gdpo_nemo.algorithms import compute_advantages

    found = compute_advantages(
        weighted,
        groups,
        weights={name: weights[name] for name in weighted},
        valid=trained,
        estimator="grpo",
        epsilon=1e-6,
    )
    values: np.ndarray = found.values.numpy().astype(np.float32)
    return values


def means_of(values: np.ndarray, tokens: Tokens) -> np.ndarray:
    """float32 [samples]: the mean over the tokens that the policy wrote and that have a value; NaN without any."""
    counted = tokens.written & ~np.isnan(values)
    count = np.bincount(tokens.rows[counted], minlength=len(tokens.lengths))
    total = np.bincount(tokens.rows[counted], values[counted].astype(np.float64), len(tokens.lengths))
    return np.where(count > 0, total / np.maximum(count, 1), np.nan).astype(np.float32)


def largest_gaps(tokens: Tokens) -> np.ndarray:
    """float32 [samples]: the largest |trainer - sampler| of a sample's tokens; NaN where one of the two is missing."""
    gaps = np.full(len(tokens.lengths), -1.0)
    if tokens.trainer is not None:
        gap = np.abs(tokens.trainer.astype(np.float64) - tokens.logprobs)
        known = tokens.written & ~np.isnan(gap)
        np.maximum.at(gaps, tokens.rows[known], gap[known])
    return np.where(gaps < 0, np.nan, gaps).astype(np.float32)


def _codes(column: pa.ChunkedArray) -> np.ndarray:
    codes: np.ndarray = column.combine_chunks().dictionary_encode().indices.to_numpy()
    return codes
