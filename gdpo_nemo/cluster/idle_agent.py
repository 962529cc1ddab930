"""Stub for Ray's dashboard agent, which the raylet requires but this project does not use.

A raylet ends when its agent ends, but the agent keeps running when its raylet is killed. The stub therefore exits after
its raylet. The stub uses only the standard library, because it runs without site-packages.
"""

from __future__ import annotations

import os
import time

_POLL_S = 1.0


def wait_for_parent_exit() -> None:
    """Return after the parent process has ended."""
    # Read the raylet's process id from the environment, because the raylet may already have ended.
    raylet = int(os.environ.get("RAY_RAYLET_PID") or os.getppid())
    while os.getppid() == raylet:
        time.sleep(_POLL_S)


if __name__ == "__main__":
    wait_for_parent_exit()
