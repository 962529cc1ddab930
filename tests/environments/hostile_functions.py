"""Reward functions that are right, wrong, asynchronous or greedy; for the tests."""

import asyncio
import multiprocessing
import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from gdpo_nemo.environments.base import Failure, SpanReward


def lengths(completions, **columns):
    return [float(len(completion)) for completion in completions]


def matches(prompts, completions, completion_ids, answer):
    assert len(prompts) == len(completions) == len(completion_ids) == len(answer)
    return np.array([completion == gold for completion, gold in zip(completions, answer)])


def sometimes(completions, answer, **_):
    return [None if gold is None else float("nan") if gold == "nan" else 1.0 for gold in answer]


_arrived: list[str] = []


async def meeting(completions, **_):
    """Waits until it is called three times at once."""
    _arrived.append("here")
    async with asyncio.timeout(120):
        while len(_arrived) < 3:
            await asyncio.sleep(0.01)
    return [2.0] * len(completions)


def greedy(completions, answer, **_):
    answer.clear()
    completions.append("more")
    return [0.0] * (len(completions) - 1)


def content(prompts, completions, **_):
    return [
        float(len(p)) if c[0]["role"] == "assistant" and c[0]["content"] == "hello" else 0.0
        for p, c in zip(prompts, completions)
    ]


def scaled(completions, factor, **_):
    return [factor] * len(completions)


def short(completions, **_):
    return [1.0]


def raising(completions, **_):
    raise LookupError("no\nsuch thing")


async def raising_slowly(completions, **_):
    raise LookupError("not now")


def infinite(completions, **_):
    return [1.0] * (len(completions) - 1) + [float("-inf")]


def words(completions, **_):
    return ["good"] * len(completions)


def nothing(completions, **_):
    return None


def quitting(completions, **_):
    raise SystemExit(3)


class Callable:
    async def __call__(self, completions, **_):
        return [3.0] * len(completions)


instance = Callable()


def limited(completions, **_):
    """Limits itself by SIGALRM, as verifiers of mathematics do."""

    def expire(*_):
        raise TimeoutError

    rewards = []
    for completion in completions:
        signal.signal(signal.SIGALRM, expire)
        signal.setitimer(signal.ITIMER_REAL, 0.1 if completion == "slow" else 60.0)
        try:
            time.sleep(5 if completion == "slow" else 0)
            rewards.append(1.0)
        except TimeoutError:
            rewards.append(None)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return rewards


def untidy(completions, **_):
    """Leaves an armed timer and handlers behind, which would strike whatever runs next."""

    def strike(*_):
        raise KeyboardInterrupt("from the function before")

    clean = [signal.getsignal(number) is signal.SIG_DFL for number in (signal.SIGALRM, signal.SIGUSR1)]
    clean.append(signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0))
    if completions[0] == "arm":
        for number in (signal.SIGALRM, signal.SIGUSR1):
            signal.signal(number, strike)
        signal.setitimer(signal.ITIMER_REAL, 1000.0)
    return [float(all(clean))] * len(completions)


async def misbehaving(completions, **_):
    for completion in completions:
        if completion == "hang":
            await asyncio.sleep(1000)
        elif completion == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        elif completion == "crash":
            os.abort()
    return [float(len(completion)) for completion in completions]


def asking(completions, **_):
    return [Failure("server is down") if completion == "down" else 1.0 for completion in completions]


class Counting:
    """Built once, called often."""

    def __init__(self, step, start=0.0):
        self.value = start
        self.step = step

    def __call__(self, completions, **_):
        self.value += self.step
        return [self.value] * len(completions)


class Uncallable:
    pass


def down(completions, **_):
    return [Failure("server is down")] * len(completions)


async def where(completions, **_):
    """Name the event loop. A client that is created once belongs to one loop."""
    return [float(id(asyncio.get_running_loop()))] * len(completions)


def returns_a_coroutine(completions, **_):
    return where(completions)


class Loaded:
    """Has a client that ``load`` creates in the event loop."""

    async def load(self):
        self.client = asyncio.get_running_loop()

    async def __call__(self, completions, **_):
        return [float(asyncio.get_running_loop() is self.client)] * len(completions)


def gets_loop(completions, **_):
    """Return rewards as a function written for TRL, which calls functions in a thread with an event loop."""
    return [asyncio.get_event_loop().run_until_complete(asyncio.sleep(0, 1.0))] * len(completions)


def half(number):
    return number / 2


_KEPT = []


def pool_of_processes(completions, **_):
    """Keep a process pool and return the process ids of one of its workers for each start method."""
    if not _KEPT:
        _KEPT.extend(ProcessPoolExecutor(1, multiprocessing.get_context(method)) for method in ("fork", "forkserver"))
    return [_KEPT[len(completion) % 2].submit(os.getpid).result() for completion in completions]


def pooled(completions, **_):
    """Halve lengths in processes of every start method."""
    lengths = [len(completion) for completion in completions]
    for method in ("fork", "spawn", "forkserver"):
        with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
            halves = list(pool.map(half, lengths))
    return halves


def criteria(completions, found, **columns):
    """Rewards by id: those of the column ``found``, in which texts name other kinds of values."""
    special = {"span": SpanReward(1.0, [(0, 2)]), "failure": Failure("away")}
    rewards = []
    for row in found:
        values = {key: special.get(value, value) for key, value in row.items()} if isinstance(row, dict) else row
        rewards.append(values)
    return rewards
