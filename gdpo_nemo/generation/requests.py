"""What goes into an engine and what comes out, without vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class SampleRequest:
    """One completion to draw. Equal prompts and seeds give equal completions under equal weights."""

    prompt_ids: np.ndarray
    """int32 [prompt tokens]"""
    seed: int
    max_tokens: int | None = None
    """Longest completion of this request, where it is below that of all; None: that of all."""


@dataclass(frozen=True)
class Sampling:
    """How to draw: the settings that all requests of a call share."""

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop_strings: tuple[str, ...] = ()


@dataclass
class Completion:
    """One drawn completion."""

    token_ids: np.ndarray
    """int32 [tokens], the stop token included"""
    logprobs: np.ndarray
    """float32 [tokens], of the distribution that was sampled"""
    finish_reason: str
    """stop or length"""
    spans: tuple[tuple[int, int], ...] = ()
    """(version of the weights, tokens that it drew), in order; together all tokens. More than one where weights arrived
    while it was drawn."""

    @property
    def version(self) -> int:
        """The oldest version in it. Only a completion of no tokens has none."""
        return self.spans[0][0]


@dataclass
class CompletionBatch:
    """The completions of one call, in the order of its requests, and the oldest weights that they were drawn with."""

    completions: list[Completion]
    version: int
    seconds: float


class FinishedRequest(NamedTuple):
    """A completion of a request that was sampled together with others."""

    name: str
    """Of the request."""
    completion: Completion


@dataclass(frozen=True)
class EngineReport:
    """What an engine says when it is polled. Counts and seconds are sums since it started."""

    finished: list[FinishedRequest]
    """Each is reported once."""
    version: int
    """Of the weights it holds."""
    running: int
    """Requests with a token or more."""
    waiting: int
    """Requests without, those that wait for an update included."""
    kv_used: float
    """Share of the KV cache that the running sequences fill, at most 1. Prefixes that they share are counted for each,
    so it may be less."""
    busy_s: float
    """Time in engine steps."""
    decoded_tokens: int
    """Sampled, those of aborted requests included."""
    recomputed_tokens: int
    """Whose keys and values weight updates threw away (``kv=recompute``)."""
