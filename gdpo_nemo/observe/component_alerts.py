"""Which reward components train nothing, reported once it has lasted: an alert, or a note where the component is
solved."""

from __future__ import annotations

import re
from typing import Mapping, Sequence

from gdpo_nemo.observe.log import RunLog

PATIENCE = 3
"""Steps in a row that a component may be dead or ignored before the run says so."""


class ComponentAlerts:
    """Follows the components of one run; an alert is repeated only after its cause was absent for a step."""

    def __init__(self, log: RunLog):
        self._log = log
        self._steps: dict[str, int] = {}
        self._highest: dict[str, float] = {}
        self._noted: set[str] = set()

    def update(self, lines: Sequence[str], rewards: Sequence[Mapping[str, float | None]]) -> None:
        """Take in a recorded step: ``Diagnostics.alerts``, and the rewards of every sample."""
        for sample in rewards:
            for name, value in sample.items():
                if value is not None and not value <= self._highest.get(name, value - 1):
                    self._highest[name] = value
        # Up to its figures, a sentence names the component and what is wrong with it.
        active = {re.split(r"[(:]", line)[0]: line for line in lines}
        self._steps = {key: self._steps.get(key, 0) + 1 for key in active}
        for key, steps in self._steps.items():
            if steps == PATIENCE:
                self._say(active[key])

    def _say(self, line: str) -> None:
        constant = re.match(r"component (['\"])(.+)\1 is constant", line)
        name = constant[2] if constant else None
        if name is None or not self._log.history.solved(name, PATIENCE, self._highest.get(name)):
            self._log.alert(f"for {PATIENCE} steps, {line}")
        elif name not in self._noted:
            self._noted.add(name)
            self._log.note(
                f"component {name!r} is solved: for {PATIENCE} steps every sample has had the best value so far"
            )
