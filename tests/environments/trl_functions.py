"""Reward functions in every form that TRL takes, each noting what it was called with."""

import functools

SEEN = {}


def _note(name, arguments):
    SEEN[name] = arguments
    return [float(len(str(c))) for c in arguments["completions"]]


def anything(**arguments):
    return _note("anything", arguments)


def by_name(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, answer, **columns):
    given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
    loggers = {"trainer_state": trainer_state, "log_extra": log_extra, "log_metric": log_metric}
    return _note("by_name", {**given, **loggers, "answer": answer, **columns})


async def awaited(completions, **columns):
    return _note("awaited", {"completions": completions, **columns})


class Object:
    def __call__(self, completions, **columns):
        return _note("Object", {"completions": completions, **columns})


class AsyncObject:
    async def __call__(self, completions, **columns):
        return _note("AsyncObject", {"completions": completions, **columns})


def _scaled(completions, factor, **columns):
    return [factor * value for value in _note("partial", {"completions": completions, **columns})]


instance = Object()
async_instance = AsyncObject()
partial = functools.partial(_scaled, factor=2.0)
async_partial = functools.partial(async_instance)


def none_for_some(completions, answer, **columns):
    return [None if wanted is None else 1.0 for wanted in answer]


def logging(completions, answer, trainer_state, log_extra, log_metric):
    log_extra("golden_answer", answer)
    log_extra("shape", [{"length": len(c), "nan": float("nan"), "kind": object} for c in completions])
    log_metric("accuracy", sum(c == a for c, a in zip(completions, answer)) / len(completions))
    log_metric("step_seen", trainer_state.global_step)
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)


def short_log(completions, log_extra):
    log_extra("column", [1])
    return [0.0] * len(completions)


def double_log(completions, log_extra):
    log_extra("column", list(completions))
    log_extra("column", list(completions))
    return [0.0] * len(completions)


def wordy_metric(completions, log_metric):
    log_metric("accuracy", "good")
    return [0.0] * len(completions)


def endless_metric(completions, log_metric):
    log_metric("accuracy", float("inf"))
    return [0.0] * len(completions)


def asks_history(completions, trainer_state):
    return [trainer_state.log_history] * len(completions)


def wants_environments(completions, environments):
    return [0.0] * len(completions)
