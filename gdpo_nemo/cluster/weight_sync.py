"""Weight updates: send the policy's weights to the engines, then compare log-probs of the policy and the engines.

A weight update consists of the following steps. Each step ends before the next step begins, except that send and
receive run concurrently. Steps with an asterisk (*) take place only if engines share the policy's devices.

* sleep*: before the update, ``sleep_engines`` calls ``fleet.sleep``. The engines release their memory.
* wake*: ``policy.release`` and ``fleet.wake("weights")`` give the engines memory for the weights.
* prepare: ``Transport.prepare`` creates a manifest of the version. With most transports, the ranks copy their weights.
* hold: ``fleet.update`` calls ``Engine.prepare_update``. Each engine checks the names in the manifest and stops between
  two steps. ``kv`` decides whether the engine drains its requests first.
* send: ``Transport.send`` starts the senders on the policy's ranks.
* receive: ``Engine.update_weights`` starts the receivers in the engine processes. The engines then continue.
* wake*: ``policy.release`` and ``fleet.wake("kv_cache")`` give the engines memory for their KV cache.
* check: ``SyncCheck.verify`` compares the log-probs of ``policy.logprobs`` and ``fleet.score``.

Hold, send and receive are repeated for live engines that did not receive the weights (``EngineFleet._deliver``). The
lock ``EngineFleet.delivering`` is held from prepare to receive, so that no weights are sent to a replaced engine in
between.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gdpo_nemo.cluster.fleet import EngineFleet
from gdpo_nemo.cluster.policy_group import PolicyGroup
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.images import Images, moved
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.generation.requests import SampleRequest, Sampling
from gdpo_nemo.utils.errors import NumericsFailed, RunError
from gdpo_nemo.weights.transports.base import Transport, errors_named
from gdpo_nemo.weights.transports.memory import MemoryTransport

METRICS = {
    "time/sync": ("s", "Sending the new weights to every engine, including time/wake and the sync check"),
    "time/sleep": ("s", "Engines releasing their memory before the update, if they share devices with the policy"),
    "time/sync_copy": ("s", "Preparing the new weights on the policy's ranks, part of time/sync"),
    "time/sync_send": ("s", "Stopping the engines, sending and loading the weights, part of time/sync"),
    "time/wake": ("s", "Engines reallocating memory for their weights and KV cache, part of time/sync"),
    "parity/probe": (
        "nats",
        "Mean |trainer log-prob - engine log-prob| on fixed sequences after a weight sync; verifies the new weights",
    ),
    "parity/probe_own_experts": (
        "nats",
        "parity/probe if the trainer chose its experts itself (policy.router_replay: sampler)",
    ),
}


class WeightSync:
    """Transfer of the policy's weights to every engine of the fleet.

    Args:
        sync_check: check of the log-probs after every update; None disables it.
        transport: transport of the policy's weights. None uses Ray's object store.
        shared: True if the engines share the policy's devices. In this case, the engines sleep from ``sleep_engines``
            to the next ``publish``.
        kv: treatment of requests in flight (``rollout.kv``).
    """

    def __init__(
        self,
        policy: PolicyGroup,
        fleet: EngineFleet,
        sync_check: SyncCheck | None,
        transport: Transport | None = None,
        shared: bool = False,
        kv: str = "drain",
    ):
        self.transport = transport or MemoryTransport(policy)
        self.version: int | None = None
        """Version of the last completed update, or None before the first update."""
        self._policy = policy
        self._fleet = fleet
        self._sync_check = sync_check
        self._shared = shared
        self._kv = kv
        self._slept: dict[str, float] = {}

    def publish(self, version: int) -> dict[str, float]:
        """Send the policy's current weights to the engines as ``version``, and return metrics.

        The metrics are ``time/sync`` and its parts, ``Transport.statistics``, and ``parity/probe`` if there is a sync
        check. On shared devices, the metrics include ``time/sleep`` (the duration of ``sleep_engines``) and
        ``time/wake`` (part of ``time/sync``).

        Raises:
            RunError: if the weights cannot be sent, or if the sync check fails.
        """
        start = time.monotonic()
        row = self._slept
        if self._shared:
            row["time/wake"] = self._wake("weights")
        with self._fleet.delivering():
            began = time.monotonic()
            with errors_named(type(self.transport), "prepare"):
                self.transport.prepare(version)
            prepared = time.monotonic()
            self._fleet.update(self.transport, version, self._kv)
            row["time/sync_copy"] = prepared - began
            row["time/sync_send"] = time.monotonic() - prepared
            row |= self.transport.statistics
        if self._shared:
            row["time/wake"] += self._wake("kv_cache")
        self.version = version
        self._slept = {}
        if self._sync_check is not None:
            row["parity/probe"] = self._sync_check.verify(self._policy, self._fleet, version)
            if self._sync_check.own_experts is not None:
                row["parity/probe_own_experts"] = self._sync_check.own_experts
        return {"time/sync": time.monotonic() - start, **row}

    def sleep_engines(self) -> None:
        """Make engines release their memory until the next ``publish``, if they share devices with the policy."""
        if self._shared:
            start = time.monotonic()
            self._fleet.sleep()
            self._slept = {"time/sleep": time.monotonic() - start}

    def _wake(self, what: str) -> float:
        start = time.monotonic()
        self._policy.release()
        self._fleet.wake(what)
        return time.monotonic() - start


PROMPTS = 4
"""Number of sequences of a sync check."""
_MAX_PROMPT = 128
"""Maximum number of prompt tokens, counted from the end of the prompt."""
_SAMPLED = 16
"""Maximum number of tokens that the model samples after the prompt."""
_UNIFORM = 8
"""Number of tokens that are sampled uniformly from the vocabulary."""
_MAX_TOKEN_DIFFERENCE = 1.0
"""Maximum log-prob difference, in nats, that a token contributes to the mean.

If a router selects a different expert because two experts are nearly tied, the token is an outlier although the weights
are equal.
"""
MARGIN = 4.0
"""Ratio of the limit to the initial difference. Rounding errors vary with the weights and may become larger."""
LEAST = {"float32": 1e-4, "bfloat16": 1e-2}
"""Minimum of the limit. If the initial difference is near 0, ``MARGIN`` would allow only a few rounding errors."""
MOST = {"float32": 1e-2, "bfloat16": 2.5e-1}
"""Maximum initial difference. Swapping two middle layers of a 135M model causes a difference of 0.4 to 0.6."""


class SyncCheck:
    """Comparison of the log-probs of policy and engines on fixed sequences.

    Args:
        sequences: sequences for which the log-probs are compared.
        limit: maximum mean difference in nats, or None until ``calibrate`` sets it.
    """

    def __init__(self, sequences: Sequence[TrainSequence], limit: float | None = None):
        self.sequences = list(sequences)
        self.limit = limit
        self.floor: float | None = None
        """Mean initial difference in nats, or None until ``calibrate`` measures it."""
        self.own_experts: float | None = None
        """Last result of ``verify`` if the policy chose its experts itself. None without router replay."""
        self._replays = False
        self._engine_logprobs: dict[int, np.ndarray] = {}

    @classmethod
    def sampled(
        cls,
        fleet: EngineFleet,
        prompts: Sequence[np.ndarray],
        vocabulary: int,
        longest: int,
        images: Sequence[Images] = (),
    ) -> SyncCheck:
        """Create a check from prompts for which an engine samples continuations, and record the engines' log-probs.

        The sampled continuations resemble the training data, but their probabilities approach 1, and they cover few
        tokens of the vocabulary. Tokens that are sampled uniformly from the vocabulary are therefore appended.

        Args:
            prompts: int32 [tokens] each.
            vocabulary: size of the vocabulary.
            longest: maximum number of tokens in the engines' context.
            images: images of each prompt, or empty if no prompt has images.
        """
        room = longest - 1  # vLLM samples an additional token when it scores a prompt
        most = max(1, room // 2)
        shortened = [_end_of(*prompt, most) for prompt in zip(prompts, images or [()] * len(prompts))]
        sampling = Sampling(1.0, 1.0, -1, max(1, min(_SAMPLED, room // 3)))
        requests = [SampleRequest(ids, seed, images=placed) for seed, (ids, placed) in enumerate(shortened)]
        completions = fleet.generate(requests, sampling, engine=0).completions
        rng = np.random.default_rng(0)
        sequences = []
        for (prompt, placed), continuation in zip(shortened, completions):
            sampled = continuation.token_ids
            uniform = rng.integers(0, vocabulary, min(_UNIFORM, room - len(prompt) - len(sampled))).astype(np.int32)
            completion = np.concatenate([sampled, uniform])
            logprobs = np.zeros(len(completion), np.float32)
            sequences.append(TrainSequence(prompt, completion, logprobs, images=placed))
        sync_check = cls(sequences)
        sync_check._engine_logprobs = sync_check.by_engines(fleet)
        sync_check._replays = any(completion.routing is not None for completion in completions)
        sync_check._record_routing(fleet, 0)
        return sync_check

    def _record_routing(self, fleet: EngineFleet, engine: int) -> None:
        """Give the sequences the experts that an engine chooses with its current weights."""
        if self._replays:
            requests = [SampleRequest(ids, 0, images=s.images) for ids, s in zip(self._token_ids(), self.sequences)]
            found = fleet.generate(requests, Sampling(1.0, 1.0, -1, 1), engine=engine).completions
            routed = []
            for sequence, completion in zip(self.sequences, found):
                # The engine also sampled a token, which is not part of the sequence.
                routing = None if completion.routing is None else completion.routing[: len(sequence)]
                routed.append(replace(sequence, routing=routing))
            self.sequences = routed

    def by_engines(self, fleet: EngineFleet) -> dict[int, np.ndarray]:
        """Return the engines' log-probs of all completion tokens, float32 [tokens], by engine number."""
        found = {}
        for engine, scores in fleet.score(self._token_ids(), [s.images for s in self.sequences]).items():
            of_completions = [values[-len(s.completion_ids) :] for s, values in zip(self.sequences, scores)]
            found[engine] = np.concatenate(of_completions)
        return found

    def _token_ids(self) -> list[np.ndarray]:
        return [np.concatenate([s.prompt_ids, s.completion_ids]) for s in self.sequences]

    def by_policy(self, policy: PolicyGroup) -> np.ndarray:
        """Return the policy's log-probs of all completion tokens, float32 [tokens], at the engines' temperature 1."""
        return np.concatenate(policy.logprobs(self.sequences, temperature=1.0))

    def calibrate(self, policy: PolicyGroup, config: Config) -> None:
        """Measure the log-prob difference between policy and engines before the first update, and set the limit.

        Raises:
            RunError: if the difference is too large for identical weights.
        """
        precision = config.policy.precision
        limit = config.policy.generation.parity_limit
        policy_logprobs = self.by_policy(policy)
        self.floor = max(difference(policy_logprobs, logprobs) for logprobs in self._engine_logprobs.values())
        max_floor = MOST[precision] if limit is None else limit
        if not self.floor <= max_floor:
            raise NumericsFailed(
                "policy and engines disagree on the model before the first update: their log-probs differ by "
                f"{self.floor:.3g} on average, {max_floor:g} is allowed in {precision}; `gdpo-nemo parity --engine` "
                "shows where (policy.generation.parity_limit)"
            )
        self.limit = max(LEAST[precision], MARGIN * self.floor) if limit is None else limit

    def verify(self, policy: PolicyGroup, fleet: EngineFleet, version: int) -> float:
        """Compare every engine with the policy, and return the largest mean difference.

        Raises:
            RunError: if a mean difference exceeds the limit, or if no limit is set.
        """
        if self.limit is None:
            raise RunError("the sync check has no limit yet; call calibrate before the first update")
        by_engine = self.by_engines(fleet)
        if self._replays:
            self.sequences = [replace(s, routing=None) for s in self.sequences]
            own = self.by_policy(policy)
            self.own_experts = max(difference(own, logprobs) for logprobs in by_engine.values())
            self._record_routing(fleet, next(iter(by_engine)))
        policy_logprobs = self.by_policy(policy)
        worst = 0.0
        for index, engine_logprobs in by_engine.items():
            mean = difference(policy_logprobs, engine_logprobs)
            if not mean <= self.limit:  # also fails for NaN
                raise NumericsFailed(
                    f"engine {index} does not hold the weights of version {version}: {self._sentence(mean)}"
                )
            worst = max(worst, mean)
        return worst

    def _sentence(self, mean: float) -> str:
        at_start = "" if self.floor is None else f"; {self.floor:.3g} at the start"
        return (
            f"its log-probs differ by {mean:.3g} from the trainer's on average (limit {self.limit:.3g}{at_start}; "
            "policy.generation.parity_limit)"
        )


def _end_of(prompt: np.ndarray, images: Images, most: int) -> tuple[np.ndarray, Images]:
    """Return the last tokens of a prompt and their images: at most ``_MAX_PROMPT`` tokens and its last image, which
    proves that the engines have the vision tower. An image is not divided."""
    start = len(prompt) - min(most, _MAX_PROMPT)
    if images and len(prompt) - images[-1].start <= most:
        start = min(start, images[-1].start)
    start = max([0, start, *(placed.stop for placed in images if placed.start < start)])
    if start == len(prompt):  # an image ends the prompt, and is too long
        return prompt[-1:], ()
    return prompt[start:], moved(tuple(placed for placed in images if placed.start >= start), -start)


def difference(policy_logprobs: np.ndarray, engine_logprobs: np.ndarray) -> float:
    """Return the mean absolute difference of log-probs [tokens], or NaN if any log-prob is NaN.

    The difference of each token is clipped to ``_MAX_TOKEN_DIFFERENCE``.
    """
    return float(np.minimum(np.abs(policy_logprobs.astype(np.float64) - engine_logprobs), _MAX_TOKEN_DIFFERENCE).mean())
