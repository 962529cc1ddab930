"""Requests that an engine draws while new weights arrive, and how far their log-probs are from its own scores."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from gdpo_nemo.cluster.fleet import EngineFleet
from gdpo_nemo.cluster.policy_group import PolicyGroup
from gdpo_nemo.cluster.session import ray
from gdpo_nemo.generation.requests import Completion, SampleRequest, Sampling
from gdpo_nemo.models.hf_folder import open_weights, weight_names
from gdpo_nemo.weights.manifest import Manifest, pack
from gdpo_nemo.weights.transports.base import Transport
from gdpo_nemo.weights.transports.memory import MemoryReceiver, MemoryTransport

PROMPT = 40
LONG = Sampling(1.0, 1.0, -1, 80)
SHORT = 8
_EMBEDDING = "model.embed_tokens.weight"
_EOS = 1
_ATTEMPTS = 20


class Drawn(NamedTuple):
    """A request's completion."""

    spans: list[tuple[int, int]]
    """(0 for the old weights or 1 for the new ones, tokens)"""
    tokens: int
    off: list[float]
    """The largest difference of each span's log-probs from the scores of its own version."""


def packed(policy: PolicyGroup, version: int) -> tuple[Manifest, np.ndarray]:
    """Return the policy's weights as one buffer."""
    transport = MemoryTransport(policy)
    transport.prepare(version)
    receiver, stored = transport.receiver(0, transport.store(False))
    with receiver.opened(transport.manifest, True, *ray.get(list(stored))) as opened:
        return pack(opened.receive(transport.manifest, torch.device("cpu"), 0), version)


class FolderWeights(Transport):
    """The weights of a folder times a factor. With these weights, the model rarely samples the EOS token."""

    def __init__(self, folder: Path, factor: float):
        self._folder = folder
        self._factor = factor

    def prepare(self, version: int) -> None:
        """Pack the weights without a policy."""
        read = open_weights(self._folder)
        tensors = {name: read(name) * self._factor for name in weight_names(self._folder)}
        tensors[_EMBEDDING][_EOS] = 0.0  # the output layer is tied to the embedding
        manifest, buffer = pack(tensors.items(), version)
        self.manifest, self.buffer = ray.put(manifest), ray.put(buffer)

    def send(self, engines):
        """Make each engine load from the buffer."""
        receiver = MemoryReceiver()
        return [engine.update_weights.remote(self.manifest, receiver, self.buffer) for engine in engines.values()], []


def across_update(fleet: EngineFleet, folder: Path, kv: str, versions: count[int]) -> list[Drawn]:
    """Draw 16 requests of one prompt, half of which have not begun when new weights arrive, and four afterwards.

    On a busy machine, the new weights may arrive too late. The function then repeats with unused ``versions``.
    """
    newer = FolderWeights(folder, 1.7)
    for _ in range(_ATTEMPTS):
        old, new, again = next(versions), next(versions), next(versions)
        _publish(fleet, FolderWeights(folder, 1.0), old)
        newer.prepare(new)
        prompt = np.random.default_rng(old).integers(2, 12, PROMPT).astype(np.int32)
        # Requests 1 to 7 run during the update, so they are long. Request 0 is short, because the engine reports the
        # number of running requests when a request finishes.
        wanted = [SampleRequest(prompt, seed, None if 0 < seed < 8 else SHORT) for seed in range(20)]
        drawing = fleet.spawn(fleet.sample_all(wanted[:16], LONG))
        while fleet.clients[0].report.running < 4 and not drawing.done():
            time.sleep(0.001)
        with fleet.delivering():
            fleet.update(newer, new, kv)
        completions = [*drawing.result(300).completions, *fleet.generate(wanted[16:], LONG).completions]
        mixed = sum(len(completion.spans) == 2 for completion in completions)
        only_new = sum(completion.spans[0][0] == new for completion in completions)
        if kv == "drain" or (mixed >= 4 and only_new >= 8):
            break
    sequences = [np.concatenate([prompt, completion.token_ids]) for completion in completions]
    scores = {new: fleet.score(sequences)[0]}
    _publish(fleet, FolderWeights(folder, 1.0), again)
    scores[old] = fleet.score(sequences)[0]
    return [
        Drawn(
            [(version - old, tokens) for version, tokens in completion.spans],
            len(completion.token_ids),
            _off(completion, {version: found[place][PROMPT - 1 :] for version, found in scores.items()}),
        )
        for place, completion in enumerate(completions)
    ]


def _publish(fleet: EngineFleet, weights: FolderWeights, version: int) -> None:
    with fleet.delivering():
        weights.prepare(version)
        fleet.update(weights, version)


def _off(completion: Completion, scores: dict[int, np.ndarray]) -> list[float]:
    start = 0
    found = []
    for version, tokens in completion.spans:
        span = slice(start, start + tokens)
        found.append(float(np.abs(completion.logprobs[span] - scores[version][span]).max()))
        start += tokens
    return found
