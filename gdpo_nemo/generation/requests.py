"""Inputs and outputs of an engine. This module does not import vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from gdpo_nemo.data.images import Images


@dataclass(frozen=True)
class SampleRequest:
    """Request for one completion. With equal weights, equal prompts and seeds give equal completions."""

    prompt_ids: np.ndarray
    """Token ids of the prompt. Shape: int32 [tokens]."""
    seed: int
    """Seed of the sampler."""
    max_tokens: int | None = None
    """Maximum number of tokens of this completion, or None for ``Sampling.max_new_tokens``. The smaller of the two
    limits applies."""
    images: Images = ()
    """Images of the prompt, whose placeholders ``prompt_ids`` contains."""
    decodes: bool = False
    """True if the engine should also return the text of the completion."""
    group: int | None = None
    """Requests of the same group are reported together, when all of them have finished. None: report each by itself."""
    samples: ClassVar[int] = 1
    """Number of samples of the request, see ``EngineRequest``."""


class EngineRequest(Protocol):
    """Request that an engine client sends: a ``SampleRequest``, or all samples of a group to a rollout host."""

    @property
    def prompt_ids(self) -> np.ndarray:
        """Token ids of the prompt. Shape: int32 [tokens]."""

    @property
    def samples(self) -> int:
        """Number of samples of the request."""


@dataclass(frozen=True)
class Sampling:
    """Sampling settings shared by all requests of a call."""

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    """Maximum number of tokens of a completion."""
    stop_strings: tuple[str, ...] = ()
    """Strings after which a completion ends. The completion includes the stop string."""


@dataclass
class Completion:
    """One sampled completion."""

    token_ids: np.ndarray
    """Sampled token ids, including the stop token. Shape: int32 [tokens]."""
    logprobs: np.ndarray
    """Log-probs of the tokens under the sampled distribution, after temperature, top_p and top_k. Shape: float32
    [tokens]."""
    finish_reason: str
    """``stop`` or ``length``."""
    spans: tuple[tuple[int, int], ...] = ()
    """Version spans in order, as pairs of weight version and number of tokens. The spans together cover all tokens.

    A completion has several spans if the weights were updated while it was sampled.
    """
    routing: np.ndarray | None = None
    """Experts that the engine chose for each token of prompt and completion, in the layers with experts. Shape: int8 or
    int16 [tokens, MoE layers * experts per token].

    The value is -1 for tokens that the engine did not process, such as the last token of the completion. None if the
    engine does not record its routing.
    """
    text: str | None = None
    """Decoded text (``ReplyParser.text``), or empty if the engine has no tokenizer. None if the request did not ask for
    it."""

    @property
    def version(self) -> int:
        """Oldest weight version that sampled a token. Raises IndexError for a completion without tokens."""
        return self.spans[0][0]


@dataclass
class CompletionBatch:
    """Completions of one call of ``Engine.generate``."""

    completions: list[Completion]
    """Completions in the order of the requests."""
    version: int
    """Oldest weight version that sampled a token."""
    seconds: float
    """Duration of the call."""


class FinishedRequest(NamedTuple):
    """A finished request and its completion."""

    name: str
    """Name of the request in ``Engine.submit``."""
    completion: Any
    """The ``Completion``. From a rollout host, the packed group or the ``GdpoError`` of a group."""


@dataclass(frozen=True)
class EngineReport:
    """Report of ``Engine.poll``: finished requests, load, and counters since the start of the engine."""

    finished: list[FinishedRequest]
    """Requests that have finished since the last poll."""
    version: int
    """Version of the engine's weights."""
    running: int
    """Number of unfinished requests that have sampled at least one token."""
    waiting: int
    """Number of requests that have not sampled a token, including requests that wait for a weight update."""
    kv_used: float
    """Fraction of the KV cache that the running requests use, from 0 to 1.

    This fraction is an upper bound, because shared prefixes are counted once per request.
    """
    busy_s: float
    """Total time of the engine steps in seconds."""
    decoded_tokens: int
    """Total number of sampled tokens, including the tokens of aborted requests."""
    recomputed_tokens: int
    """Total number of tokens whose keys and values were discarded at weight updates (``kv=recompute``)."""
    kept: int = 0
    """Number of finished requests that are not reported yet, because other requests of their group are unfinished."""
