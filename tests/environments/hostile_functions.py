"""Reward functions that are right, wrong, asynchronous or greedy; for the tests."""

import asyncio

import numpy as np


def lengths(completions, **columns):
    return [float(len(completion)) for completion in completions]


def matches(prompts, completions, completion_ids, answer):
    assert len(prompts) == len(completions) == len(completion_ids) == len(answer)
    return np.array([completion == gold for completion, gold in zip(completions, answer)])


def sometimes(completions, answer, **_):
    return [None if gold is None else float("nan") if gold == "nan" else 1.0 for gold in answer]


async def slowly(completions, **_):
    await asyncio.sleep(0.2)
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
