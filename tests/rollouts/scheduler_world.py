"""A scheduler, its fleet and its clients as they are, over engines that follow a script."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from engines_in_process import InProcessFleet, Script

from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.records import Prompt, Verdict
from gdpo_nemo.rollouts.ledger import RunPosition
from gdpo_nemo.rollouts.scheduler import RolloutScheduler

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
SMALL = [
    "gdpo.rewards={correctness: 1}",
    "gdpo.num_prompts_per_step=3",
    "gdpo.num_generations_per_prompt=2",
    "gdpo.max_num_steps=5",
]


class Tokenizer:
    chat_template = None
    all_special_ids: tuple[int, ...] = ()
    all_special_tokens: tuple[str, ...] = ()

    def batch_decode(self, ids, **_):
        return ["text"] * len(ids)

    def decode(self, ids, **_):
        return "text"


class World:
    """Prompts are numbered by their place; those in ``dead`` reward both samples alike."""

    def __init__(
        self, *overrides, dead=(), position=0, step=0, limit=None, saved=None, script=None, make_fleet=InProcessFleet
    ):
        self.config = load_config(DEMO, [*SMALL, *overrides])
        self.dead = set(dead)
        self.hanging: set[int] = set()
        """Prompts whose verdict does not come before ``release``."""
        self.release = threading.Event()
        self.script = script or Script()
        self.fleet = make_fleet(self.config, self.script)
        self.fleet.publish(step)
        self.recoveries: Counter[str] = Counter()
        """What the environments replaced or repeated and nobody was told of yet."""
        pool = SimpleNamespace(verify=self.verify, take_recoveries=self.take_recoveries)
        self.step = step
        self.scheduler = RolloutScheduler(
            self.config,
            RunPosition(saved or {}, position, step, limit, (step * 2, 10)),
            prompts=self,
            fleet=self.fleet,
            pool=pool,
            tokenizer=Tokenizer(),
        )

    def __len__(self) -> int:
        return 12

    def batch(self, position, count):
        return [self.prompt(position + i) for i in range(count)]

    def prompt(self, place):
        return Prompt(str(place), np.array([place], np.int32), "", "digit_sort", {"digits": "12345"})

    def verify(self, trajectories):
        if any(int(t.prompt.token_ids[0]) in self.hanging for t in trajectories):
            self.release.wait(600)
        return [self.verdict(t) for t in trajectories]

    def take_recoveries(self):
        taken, self.recoveries = self.recoveries, Counter()
        return taken

    def verdict(self, t):
        return Verdict({"correctness": float(t.sample_index) * (int(t.prompt.token_ids[0]) not in self.dead)})

    def train(self, kv="drain"):
        """A step: its batch, and the weights behind it."""
        self.scheduler.schedule(self.step)
        rollout = self.scheduler.get_batch(self.step)
        self.step += 1
        self.fleet.publish(self.step, kv)
        return rollout

    def submitted(self) -> list[list[int]]:
        return [seeds for engine in self.script.engines for seeds in engine.batches]

    def close(self):
        self.release.set()
        self.scheduler.close()
        self.fleet.close()


def places(rollout):
    return [int(group.prompt.id) for group in rollout.groups]


def eventually(condition, limit_s=120.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.002)
