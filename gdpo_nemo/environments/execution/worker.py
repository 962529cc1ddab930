"""The side of the environment pool that runs in the worker process.

A worker builds every environment once, verifies one shard at a time, and ends with the driver. It must not import
torch: a killed worker has to be replaced within a second or two.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any, Iterator, Mapping, NoReturn, Sequence

import numpy as np

from gdpo_nemo.config.messages import first_line
from gdpo_nemo.data.records import Trajectory, Verdict
from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.episodes import EpisodeReply, EpisodeStep, advance
from gdpo_nemo.environments.registry import load_environment
from gdpo_nemo.environments.verdicts import checked_verdicts
from gdpo_nemo.errors import GdpoError

STARTUP_LIMIT_S = 300.0
"""Seconds a worker may take to build its environments."""
_GRACE_S = 10.0
"""Beyond the time limit: the driver kills first, and this timer only where there is no driver any more."""
_POLL_S = 0.5
# Signals that a verifier may handle; math-verify's time limit, for one, is a SIGALRM.
LEFT = 96
"""Exit status of a worker whose verifier called ``os._exit(0)``."""
_SIGNALS = (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Fault:
    """A mistake in an environment's code or configuration, as one line for the user. It stops the run."""

    message: str


_environments: dict[str, Environment | Fault] = {}


def start(section: Mapping[str, Mapping[str, Any]], driver: int) -> None:
    """Prepare this process: build the environments of the config section ``env`` and tie its life to the driver's.

    An environment that cannot be built is remembered as a Fault and reported by the first task that needs it: an
    exception here would only break the pool without saying why.
    """
    threading.Thread(target=_end_with, args=(driver,), daemon=True).start()
    # A terminal that closes signals every process of the group; the driver handles it and ends the workers itself.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.dup2(2, 1)  # what reward functions print must not reach the driver's console or a pipe on its output
    faulthandler.dump_traceback_later(STARTUP_LIMIT_S, exit=True)
    for name, options in section.items():
        try:
            environment = load_environment(name, options)
            environment.prepare()
            _environments[name] = environment
        except GdpoError as error:
            _environments[name] = Fault(str(error))
        except Exception as error:
            _environments[name] = Fault(f"environment {name!r} could not be prepared: {first_line(error)}")
    faulthandler.cancel_dump_traceback_later()


def verify(name: str, trajectories: Sequence[Trajectory], time_limit_s: float, seed: int) -> list[Verdict] | Fault:
    """Return the checked verdicts of one environment on one shard, or the Fault that its author has to fix."""
    environment = _environments[name]
    if isinstance(environment, Fault):
        return environment
    # The driver enforces the limit. This timer needs neither the driver nor the interpreter lock, so that even code
    # stuck inside a C extension does not outlive a driver that was killed.
    faulthandler.dump_traceback_later(time_limit_s + _GRACE_S, exit=True)
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        _seed(seed, name, trajectories)
        with _leaving_named():
            verdicts = environment.verify(trajectories)
        return checked_verdicts(tuple(environment.reward_names), trajectories, verdicts)
    except GdpoError as error:
        return Fault(f"environment {name!r}: {error}")
    except BaseException as error:  # a reward function that calls sys.exit() is as wrong as one that raises
        # __class__ and not type(): it is the author's class where an adapter stands around the object
        return Fault(f"environment {name!r}: {environment.__class__.__name__}.verify raised {first_line(error)}")
    finally:
        faulthandler.cancel_dump_traceback_later()
        _restore(handlers)


@contextlib.contextmanager
def _leaving_named() -> Iterator[None]:
    """Have ``os._exit(0)`` of a verifier end this process with LEFT: the pool takes a worker that ended with 0 for one
    that is at rest, and its task for one that is late."""
    leave = os._exit
    here = os.getpid()

    def named(status: int) -> NoReturn:
        leave(LEFT if status == 0 and os.getpid() == here else status)

    os._exit = named
    try:
        yield
    finally:
        os._exit = leave


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    """Disarm the timer and restore the signal handlers that a verifier changed, so that none fires in the next one."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def step(name: str, steps: Sequence[EpisodeStep], time_limit_s: float, seed: int) -> list[EpisodeReply] | Fault:
    """Run one step of every episode; return the replies, or the Fault that the environment's author has to fix."""
    environment = _environments[name]
    if isinstance(environment, Fault):
        return environment
    faulthandler.dump_traceback_later(time_limit_s + _GRACE_S, exit=True)
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    replies = []
    try:
        for asked in steps:
            # A reset uses one seed for all samples of a prompt: a group must answer the same question.
            _seed(seed, name, [asked], f"/{asked.turn}" if asked.turn else None)
            with _leaving_named():
                replies.append(advance(environment, asked))
        return replies
    except GdpoError as error:
        return Fault(f"environment {name!r}: {error}")
    except BaseException as error:
        return Fault(f"environment {name!r}: its episode raised {first_line(error)}")
    finally:
        faulthandler.cancel_dump_traceback_later()
        _restore(handlers)


def _seed(seed: int, name: str, trajectories: Sequence[Trajectory | EpisodeStep], turn: str | None = "") -> None:
    """Seed Python's and NumPy's global generators, so that a random reward is the same again after a resume.

    ``turn`` None leaves the sample's number out.
    """
    first = trajectories[0]
    sample = "" if turn is None else f"{first.sample_index}{turn}"
    digest = hashlib.sha256(f"{seed}/{name}/{first.prompt.id}/{sample}".encode()).digest()
    random.seed(digest)
    np.random.seed(int.from_bytes(digest[:4], "little"))


def _end_with(driver: int) -> None:
    """End this process soon after the driver, however that ended."""
    # The parent changes to init or a subreaper when the driver dies, kill -9 included; no signal is needed.
    while os.getppid() == driver:
        time.sleep(_POLL_S)
    os._exit(1)
