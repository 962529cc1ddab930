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
    """((version, tokens), ...): which weights drew the tokens, in order."""

    @property
    def version(self) -> int:
        """Of the oldest weights that drew in it."""
        return self.spans[0][0]


@dataclass
class CompletionBatch:
    """The completions of one call, in the order of its requests, and the weights they were drawn with."""

    completions: list[Completion]
    version: int
    seconds: float


class FinishedRequest(NamedTuple):
    """A completion of a request that was sampled together with others."""

    name: str
    """Of the request."""
    completion: Completion


@dataclass
class EngineReport:
    """What an engine has to say: requests that finished since its last report, and how busy it is."""

    finished: list[FinishedRequest]
    version: int
    """Of the weights that it holds."""
    running: int
    waiting: int
    """Requests that it samples, and those that have no slot yet."""
    kv_used: float
    """Share of the KV cache in use."""
    busy_s: float
    decoded_tokens: int
    recomputed_tokens: int
    """Since its start: seconds in decode steps, tokens sampled, and those computed again under new weights."""
