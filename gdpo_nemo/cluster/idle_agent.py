"""Stands where a raylet wants an agent for the dashboard, and does nothing.

A raylet ends when its agent does, and leaves it behind when it is killed. Standard library only: this runs without
site-packages.
"""

from __future__ import annotations

import os
import time

_LOOK_S = 1.0


def wait_for_orphanhood() -> None:
    """Return once the process that started this one is gone."""
    # Of the environment, where the raylet puts it: it may have died before this line.
    raylet = int(os.environ.get("RAY_RAYLET_PID") or os.getppid())
    while os.getppid() == raylet:
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    wait_for_orphanhood()
