"""Components of a run, which ``setup`` creates and ``Trainer`` uses, and the handler of stop signals."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpo_nemo.config.layout import Resolved
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.observe.log import RunLog
from gdpo_nemo.rollouts.batches import BatchStream
from gdpo_nemo.training.checkpoints import Checkpoints, RunState
from gdpo_nemo.training.supervisor import FIRST_ATTEMPT, Attempt
from gdpo_nemo.utils.signals import leave_lost_terminal

if TYPE_CHECKING:  # These imports take seconds and would delay the message about an invalid config.
    from gdpo_nemo.cluster.env_nodes import EnvironmentNodes
    from gdpo_nemo.cluster.fleet import EngineFleet
    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.cluster.weight_sync import WeightSync
    from gdpo_nemo.training.algorithm import Algorithm


@dataclass
class Stop:
    """Request to stop the run (SIGTERM, SIGINT or SIGHUP), and the exit status that results from it."""

    requested: bool = False
    status: int = 0
    patient: bool = False
    """True during training. A signal that arrives during training takes effect after the current step and a checkpoint.
    """

    def __call__(self, number: int, frame: object) -> None:
        """Handle a signal. The second signal, or a signal before training, ends the run immediately.

        A second SIGHUP is ignored, because the shell and the kernel each send a SIGHUP when a terminal is closed.
        """
        leave_lost_terminal()
        if number == signal.SIGHUP and self.status:
            return
        self.status = 128 + number
        if self.requested or not self.patient:
            raise SystemExit(self.status)
        self.requested = True


@dataclass
class RunComponents:
    """Components that ``Trainer`` uses. Policy, algorithm and stream are set after the run's processes have started."""

    resolved: Resolved
    run_dir: Path
    log: RunLog
    stop: Stop
    checkpoints: Checkpoints
    state: RunState
    prompt_limit: int | None = None
    """Maximum number of prompts of the whole run (``config.layout.prompt_limit``); None: no limit."""
    validation_prompts: list[Prompt] = field(default_factory=list)
    attempt: Attempt = FIRST_ATTEMPT
    """Current attempt of the run."""
    total_updates: int = 0
    """Number of optimizer updates of the whole run (``resume.total_updates``)."""
    policy: PolicyGroup = field(init=False)
    algorithm: Algorithm[Any, Any] = field(init=False)
    stream: BatchStream = field(init=False)
    sync: WeightSync | None = None
    """Weight sync to the engines. ``sync`` and ``fleet`` are None if the algorithm does not sample."""
    fleet: EngineFleet | None = None
    environments: EnvironmentNodes | None = None
    """Environment workers on dedicated nodes; None if they run on the driver's host."""

    @property
    def config(self) -> Config:
        """Config of the run."""
        return self.resolved.config

    def describe(self) -> dict[str, Any]:
        """Return the run's entries in the status file. May be called from another thread at any time."""
        from gdpo_nemo.cluster.session import log_folder

        attributes = vars(self)
        groups = {"policy rank": attributes.get("policy"), "engine": self.fleet, "environment node": self.environments}
        roles = {}
        for name, group in groups.items():
            for number, location in group.process_locations().items() if group else ():
                roles[f"{name} {number}"] = location
        logs = log_folder()
        return {
            "step": self.state.step,
            "version": self.sync.version if self.sync else None,
            "queues": self.stream.queues() if "stream" in attributes else {},
            "roles": roles,
            "logs": str(logs) if logs else None,
            "restarts": self.attempt.restarts,
        }

    def finish(self) -> None:
        """After the last step, export the final weights as a Hugging Face folder if this is configured."""
        if self.config.checkpointing.export_hf:
            self.policy.export(self.run_dir / "model")
            self.log.card(self.run_dir / "model", self.state.step)
