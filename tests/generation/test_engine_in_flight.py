"""An engine that samples while weights, requests and questions come in: in one process, against its own scores."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from gdpo_nemo.errors import RunError
from gdpo_nemo.generation.requests import Completion, SampleRequest, Sampling
from gdpo_nemo.weights.buckets import PeerLost
from gdpo_nemo.weights.manifest import pack, unpack
from gdpo_nemo.weights.model_folder import open_weights, weight_names
from gdpo_nemo.weights.transports.memory import MemoryReceiver
from gdpo_nemo.weights.transports.transport import Receiver

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=40)
SWITCH = 12
"""Decode steps before weights arrive in the tests that say when."""


class Weights:
    """Versions of the model's weights: even ones are the folder's, odd ones others."""

    def __init__(self, folder):
        read = open_weights(str(folder))
        self.tensors = {name: read(name) for name in weight_names(str(folder))}
        self.version = 0

    def packed(self, other: bool):
        """(manifest, buffer) of the next version of a kind."""
        self.version += 1 + (self.version + 1 + other) % 2
        factor = 1.7 if other else 1.0
        return pack(((name, tensor * factor) for name, tensor in self.tensors.items()), self.version)


@pytest.fixture(scope="session")
def weights(engine_model) -> Weights:
    return Weights(engine_model)


@pytest.fixture
def load(engine, weights):
    """Give the engine a kind of weights; returns their version. The engine starts and ends every test with the old."""

    def load(other: bool, kv: str = "drain") -> int:
        manifest, buffer = weights.packed(other)
        engine.prepare_update(manifest, kv)
        return engine.update_weights(manifest, MemoryReceiver(), buffer)

    load(False)
    yield load
    load(False)


def requests(count: int, length: int = 6, seed: int = 3) -> dict[str, tuple[SampleRequest, Sampling]]:
    rng = np.random.default_rng(seed)
    prompts = rng.integers(2, 250, (count, length)).astype(np.int32)
    return {f"r{i}": (SampleRequest(prompt, 100 + i), SAMPLING) for i, prompt in enumerate(prompts)}


def collect(engine, count: int, limit_s: float = 60.0) -> dict[str, Completion]:
    """Poll until ``count`` requests are done; each must come once."""
    found: dict[str, Completion] = {}
    end = time.monotonic() + limit_s
    while len(found) < count:
        assert time.monotonic() < end, f"{len(found)} of {count}"
        for name, completion in engine.poll(0.5).finished:
            assert name not in found
            found[name] = completion
    return found


@contextlib.contextmanager
def held_at(engine, steps: int, kv: str):
    """Ask for a hold during step number ``steps`` from now; yields the future of the hold."""
    core, pump = engine._core, engine._pump
    step = core.step
    reached: Future[None] = Future()
    done = 0

    def counted():
        nonlocal done
        done += 1
        if done == steps:
            pump._put(partial(pump._ask_hold, kv, reached), [reached])
        return step()

    core.step = counted
    try:
        yield reached
    finally:
        core.step = step


def switched(engine, weights, wanted, kv: str, other: bool = True) -> dict[str, Completion]:
    """Draw requests; after ``SWITCH`` steps weights arrive."""
    manifest, buffer = weights.packed(other)
    with held_at(engine, SWITCH, kv) as reached:
        engine.submit(wanted)
        reached.result(60)
    engine.update_weights(manifest, MemoryReceiver(), buffer)
    return collect(engine, len(wanted))


def scored(engine, wanted, drawn) -> dict[str, np.ndarray]:
    """The log-probs that the engine's present weights give to the tokens of completions."""
    names = list(wanted)
    prompts = {name: request.prompt_ids for name, (request, _) in wanted.items()}
    scores = engine.score([np.concatenate([prompts[name], drawn[name].token_ids]) for name in names])
    return {name: score[len(prompts[name]) - 1 :] for name, score in zip(names, scores)}


def same(left: dict[str, Completion], right: dict[str, Completion]) -> bool:
    return left.keys() == right.keys() and all(
        np.array_equal(left[name].token_ids, right[name].token_ids)
        and np.array_equal(left[name].logprobs, right[name].logprobs)
        for name in left
    )


def first_span(completion: Completion) -> int:
    """Tokens of the first version."""
    return completion.spans[0][1]


def test_after_recompute_every_token_has_the_logprob_of_its_own_version(engine, weights, load):
    wanted = requests(6)
    drawn = switched(engine, weights, wanted, "recompute")
    by_new = scored(engine, wanted, drawn)
    load(False)
    by_old = scored(engine, wanted, drawn)
    assert max(np.abs(by_new[name] - by_old[name]).max() for name in wanted) > 0.1
    for name, completion in drawn.items():
        (old, cut), (new, _) = completion.spans
        assert new == old + 1 and sum(tokens for _, tokens in completion.spans) == len(completion.token_ids)
        assert cut == SWITCH
        assert np.abs(completion.logprobs[:cut] - by_old[name][:cut]).max() < 1e-4
        assert np.abs(completion.logprobs[cut:] - by_new[name][cut:]).max() < 1e-4
