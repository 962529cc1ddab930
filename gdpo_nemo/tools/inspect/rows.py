"""Samples of a rollout file as arrays: index columns, tokens, and the texts of single tokens."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gdpo_nemo.algorithms.rubrics import Criterion, criterion_id, family_name, restored, with_scores
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.records import Outcome
from gdpo_nemo.data.tokenizer import Tokenizer, load_tokenizer
from gdpo_nemo.observe.samples import read_columns
from gdpo_nemo.utils.errors import ConfigError, RunError, first_line

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Tokens:
    """Tokens of all completions of a file, concatenated."""

    lengths: np.ndarray
    """int64 [samples]: number of tokens of each completion."""
    ids: np.ndarray
    """int32 [tokens]"""
    logprobs: np.ndarray
    """float32 [tokens]: log-probs from the sampler. Tokens that the policy did not generate have NaN."""
    trainer: np.ndarray | None
    """float32 [tokens]: log-probs from the trainer, NaN where missing. None if no sample has trainer log-probs."""
    entropies: np.ndarray | None
    """float32 [tokens]: entropies in nats, NaN where missing. None if no sample has entropies."""
    written: np.ndarray
    """bool [tokens]: True if the policy generated the token."""

    @property
    def rows(self) -> np.ndarray:
        """int64 [tokens]: index of the sample to which each token belongs."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)


def read_samples(path: Path) -> pa.Table:
    """Return all columns of a rollout file. Raises RunError if the file is invalid or cannot be read."""
    from gdpo_nemo.observe.sample_columns import SCHEMA

    try:
        return read_columns(path, SCHEMA.names)
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path}: is not a rollout file ({first_line(error)})") from None


def tokens_of(table: pa.Table, path: Path) -> Tokens:
    """Return the tokens of all samples. Raises RunError if a sample's numbers of tokens and log-probs differ."""
    ids, lengths, _ = _flat(table.column("completion_ids"), np.int32)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    found = {}
    for name, kind, unset in (
        ("logprobs", np.float32, np.nan),
        ("trainer_logprobs", np.float32, np.nan),
        ("entropies", np.float32, np.nan),
        ("loss_mask", np.bool_, True),
    ):
        values, counts, not_null = _flat(table.column(name), kind)
        if (counts[not_null] != lengths[not_null]).any():
            raise RunError(f"{path}: is not a rollout file ({name}: must have one value for each token)")
        found[name] = np.full(len(ids), unset, kind)
        found[name][not_null[rows]] = values
    trainer, entropies = _unless_missing(found["trainer_logprobs"]), _unless_missing(found["entropies"])
    return Tokens(lengths, ids, found["logprobs"], trainer, entropies, found["loss_mask"])


def _unless_missing(values: np.ndarray) -> np.ndarray | None:
    return None if np.isnan(values).all() else values


def _flat(column: pa.ChunkedArray, kind: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Flatten a column of lists. Return the values, the length of each list, and a mask of lists that are not null."""
    values = [np.zeros(0, kind)]
    lengths = [np.zeros(0, np.int64)]
    not_null = [np.zeros(0, bool)]
    for chunk in column.chunks:
        ends = chunk.offsets.to_numpy()
        values.append(chunk.values.to_numpy(zero_copy_only=False)[ends[0] : ends[-1]].astype(kind))
        lengths.append(np.diff(ends).astype(np.int64))
        not_null.append(chunk.is_valid().to_numpy(zero_copy_only=False))
    return np.concatenate(values), np.concatenate(lengths), np.concatenate(not_null)


def map_columns(column: pa.ChunkedArray) -> dict[str, np.ndarray]:
    """Split a column of maps into one column per name: float64 [samples], NaN for a missing name or value."""
    found: dict[str, np.ndarray] = {}
    start = 0
    for chunk in column.chunks:
        ends = chunk.offsets.to_numpy()
        rows = start + np.repeat(np.arange(len(chunk)), np.diff(ends))
        names = chunk.keys[ends[0] : ends[-1]].dictionary_encode()
        values = chunk.items[ends[0] : ends[-1]].to_numpy(zero_copy_only=False).astype(np.float64)
        codes = names.indices.to_numpy()
        for code, name in enumerate(names.dictionary.to_pylist()):
            has_name = codes == code
            found.setdefault(name, np.full(len(column), np.nan))[rows[has_name]] = values[has_name]
        start += len(chunk)
    return found


@dataclass(frozen=True)
class Components:
    """Rewards and terms of the samples of a file, in which a family of criteria is one component with its score."""

    rewards: dict[str, np.ndarray]
    """float64 [samples] by component, NaN for a missing reward."""
    terms: dict[str, np.ndarray]
    """float64 [samples] by component, NaN for an unknown term."""
    rubrics: list[str]
    """JSON of each sample's criteria by component. Empty without a rubric."""
    verdicts: list[list[Any] | None]
    """[reward, term, first token, end, first token, end, ...] of each criterion of a sample, in the rubric's order."""


def components_of(table: pa.Table) -> Components:
    """Return the components of the samples of a file."""
    rubrics = [text or "" for text in table.column("criteria").to_pylist()]
    if not any(rubrics):
        columns = (map_columns(table.column("rewards")), map_columns(table.column("terms")))
        return Components(*columns, rubrics, [None] * len(rubrics))
    from gdpo_nemo.observe.sample_columns import values_of

    scores: list[dict[str, float | None]] = []
    totals: list[dict[str, float | None]] = []
    verdicts: list[list[Any] | None] = []
    rows = zip(*(values_of(table.column(name)) for name in ("rewards", "terms")))
    quotes = table.column("reward_tokens").to_pylist()
    known = {text: restored(json.loads(text or "{}")) for text in set(rubrics)}
    for text, (rewards, given), spans in zip(rubrics, rows, quotes):
        criteria, terms = known[text], given or {}
        scores.append(with_scores(rewards, criteria))
        totals.append({name: term for name, term in terms.items() if name not in criteria})
        verdicts.append(_verdicts(criteria, rewards, terms, json.loads(spans or "{}")) if criteria else None)
    return Components(_by_name(scores), _by_name(totals), rubrics, verdicts)


def _verdicts(
    criteria: Mapping[str, Criterion],
    rewards: Mapping[str, float | None],
    terms: Mapping[str, float | None],
    spans: Mapping[str, Sequence[Sequence[int]]],
) -> list[Any]:
    """Return an entry of ``Components.verdicts``."""
    found = []
    for name in criteria:
        found.append([rewards.get(name), terms.get(name), *itertools.chain.from_iterable(spans.get(name, ()))])
    return found


def rubric_of(text: str) -> list[list[Any]]:
    """Return [family, id, text, weight, required] of each criterion, from an entry of ``Components.rubrics``."""
    found = []
    for name, criterion in restored(json.loads(text or "{}")).items():
        found.append([family_name(name), criterion_id(name), criterion.text, criterion.weight, criterion.required])
    return found


def _by_name(rows: Sequence[Mapping[str, float | None]]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for index, row in enumerate(rows):
        for name, value in row.items():
            found.setdefault(name, np.full(len(rows), np.nan))[index] = np.nan if value is None else value
    return found


def groups_of(table: pa.Table) -> np.ndarray:
    """Return the index of each sample's group in the file: int32 [samples].

    A new group starts when the prompt or its index changes, or the sample index does not increase.
    """
    if not table.num_rows:
        return np.zeros(0, np.int32)
    codes = _codes(table.column("prompt_id"))
    indices = table.column("position").to_numpy()
    samples = table.column("sample_index").to_numpy()
    new = (codes[1:] != codes[:-1]) | (indices[1:] != indices[:-1]) | (samples[1:] <= samples[:-1])
    return np.concatenate(([0], np.cumsum(new))).astype(np.int32)


def equal_completions(table: pa.Table, groups: np.ndarray) -> np.ndarray:
    """For each sample, count the equal completions in its group, including its own: int32 [samples]."""
    texts = _codes(table.column("completion")).astype(np.int64)
    pairs = groups * (int(texts.max(initial=0)) + 1) + texts
    _, place, count = np.unique(pairs, return_inverse=True, return_counts=True)
    return count[place].astype(np.int32)


def summed_advantages(
    rewards: Mapping[str, np.ndarray], groups: np.ndarray, outcomes: list[str], weights: Mapping[str, float]
) -> np.ndarray:
    """Return the advantages of GRPO for the weighted sum of the recorded rewards: float32 [samples].

    Shaping and KL in the reward are not applied. The advantages are NaN if no reward has a weight.
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
    """Return each sample's mean over its policy tokens, ignoring NaN: float32 [samples].

    The mean of no values is NaN.
    """
    counted = tokens.written & ~np.isnan(values)
    count = np.bincount(tokens.rows[counted], minlength=len(tokens.lengths))
    total = np.bincount(tokens.rows[counted], values[counted].astype(np.float64), len(tokens.lengths))
    return np.where(count > 0, total / np.maximum(count, 1), np.nan).astype(np.float32)


def largest_gaps(tokens: Tokens) -> np.ndarray:
    """Return each sample's largest difference of log-probs between trainer and sampler: float32 [samples].

    The difference is NaN if trainer or sampler log-probs are missing.
    """
    gaps = np.full(len(tokens.lengths), -1.0)
    if tokens.trainer is not None:
        gap = np.abs(tokens.trainer.astype(np.float64) - tokens.logprobs)
        known = tokens.written & ~np.isnan(gap)
        np.maximum.at(gaps, tokens.rows[known], gap[known])
    return np.where(gaps < 0, np.nan, gaps).astype(np.float32)


def _codes(column: pa.ChunkedArray) -> np.ndarray:
    codes: np.ndarray = column.combine_chunks().dictionary_encode().indices.to_numpy()
    return codes


_REPLACEMENT = "\ufffd"


def tokenizer_of(run_dir: Path, config: Config) -> tuple[Tokenizer | None, str]:
    """Return (tokenizer of a run, ""), or (None, reason) if the tokenizer is not available.

    The tokenizer is read from the exported model or, if there is none, from the run's initial model. Files are not
    downloaded.
    """
    start = config.policy.tokenizer_name or config.policy.model_name
    folders = [run_dir / "model", *([Path(start)] if start else [])]
    without_name = replace(config, policy=replace(config.policy, tokenizer_name=None))
    for folder in folders:
        if (folder / "tokenizer_config.json").is_file() or (folder / "tokenizer.json").is_file():
            try:
                return load_tokenizer(without_name.policy, folder), ""
            except ConfigError as error:
                return None, str(error)
    return None, f"no tokenizer in {' or '.join(map(str, folders))}"


def pieces_of(ids: np.ndarray, tokenizer: Tokenizer) -> list[Any]:
    """Return the text of each token.

    The text of a token that is only part of a character is a list of bytes. The text of an unknown token is None.
    """
    size = len(tokenizer)
    known = [int(token) for token in ids if 0 <= token < size]
    names = dict(zip(known, tokenizer.convert_ids_to_tokens(known)))
    return [_piece(int(token), names.get(int(token)), tokenizer) for token in ids]


def _piece(token: int, name: str | None, tokenizer: Tokenizer) -> Any:
    if name is None:
        return None
    text: str = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if _REPLACEMENT in text:
        return _bytes_of(name) or text
    # SentencePiece removes the space before the first word of a decoded text.
    return " " + text if name.startswith("\u2581") and not text.startswith(" ") else text


def _bytes_of(name: str) -> list[int] | None:
    """Return the bytes of a token that is not a complete character, or None if the bytes cannot be determined.

    In byte-level BPE, the token's name contains one character per byte. In SentencePiece, the name has the form
    ``<0xE2>``.
    """
    if name.startswith("<0x") and name.endswith(">"):
        return [int(name[3:-1], 16)]
    alphabet = _byte_alphabet()
    return [alphabet[letter] for letter in name] if alphabet.keys() >= set(name) else None


def _byte_alphabet() -> dict[str, int]:
    """Map GPT-2's characters to bytes. Printable bytes are their own characters.

    Other bytes have the characters 256, 257, ... in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters = itertools.count(256)
    return {chr(byte if byte in printable else next(characters)): byte for byte in range(256)}
