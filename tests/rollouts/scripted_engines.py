"""What stands in for the engines where a test is about turns, phases and seeds: a script says what is sampled.

Everything around it is real: the event loop in a thread of its own, requests, versions, the endpoint over HTTP.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gdpo_nemo.generation.requests import Completion, CompletionBatch, SampleRequest, Sampling

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from make_tiny_model import byte_tokenizer  # noqa: E402

TOKENIZER = byte_tokenizer()
Script = Callable[[SampleRequest], tuple[str, str]]
"""request -> (text, finish reason)"""


def letters(request: SampleRequest) -> tuple[str, str]:
    """A few letters that follow from prompt and seed; every third answer is cut before its end."""
    rng = np.random.default_rng([request.seed, *request.prompt_ids[-8:].tolist()])
    text = "".join(chr(97 + n) for n in rng.integers(0, 26, rng.integers(1, 8)))
    return text, "length" if rng.integers(3) == 0 else "stop"


def completion_of(request: SampleRequest, script: Script, version: int) -> Completion:
    """What the script says, as tokens with log-probs, within the request's limit."""
    text, finish = script(request)
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    ids += [TOKENIZER.eos_token_id] if finish == "stop" else []
    most = request.max_tokens or len(ids)
    finish = finish if len(ids) <= most else "length"
    ids = ids[:most]
    logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 8
    return Completion(np.array(ids, np.int32), logprobs, finish, ((version, len(ids)),))


class ScriptedEngines:
    """The fleet's interface, as far as rollouts know it."""

    def __init__(self, script: Script = letters, engines: int = 2):
        self.script = script
        self.version = 0
        self.requests: list[tuple[SampleRequest, Sampling, int | None]] = []
        self.dead: set[int] = set()
        self.gate = threading.Event()
        """Open: requests are answered."""
        self.gate.set()
        self._engines = engines
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    async def sample(
        self, request: SampleRequest, sampling: Sampling, engine: int | None = None
    ) -> tuple[Completion, int]:
        self.requests.append((request, sampling, engine))
        while not self.gate.is_set():
            await asyncio.sleep(0.005)
        chosen = len(self.requests) % self._engines if engine is None or engine in self.dead else engine
        return completion_of(request, self.script, self.version), chosen

    def generate(self, requests, sampling: Sampling, engine: int | None = None) -> CompletionBatch:
        async def all_of_them():
            return await asyncio.gather(*(self.sample(request, sampling, engine) for request in requests))

        drawn = asyncio.run_coroutine_threadsafe(all_of_them(), self.loop).result()
        return CompletionBatch([completion for completion, _ in drawn], self.version, 0.0)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
