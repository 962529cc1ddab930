"""Stand up everything a run needs, in an order that fails early and cheaply, and take it down whatever happens."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator

import psutil

from gdpo_nemo.checkpoints import Checkpoints, RunState
from gdpo_nemo.config.layout import last_step, prompt_limit, resolve_layout
from gdpo_nemo.config.placement import joined
from gdpo_nemo.config.schema import Config
from gdpo_nemo.config.transports import chosen_transport
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.data.splits import wanted_splits
from gdpo_nemo.endings import answered_by, leave_lost_terminal, raw_lines_in
from gdpo_nemo.environments.execution.dispatch import EnvironmentPools
from gdpo_nemo.errors import START_AGAIN, GdpoError, InfrastructureFailed, present
from gdpo_nemo.inputs import Inputs, read_inputs
from gdpo_nemo.kept import Kept
from gdpo_nemo.observe.diagnosis import examine
from gdpo_nemo.observe.display import active
from gdpo_nemo.observe.installation import require_libraries
from gdpo_nemo.observe.log import RunLog
from gdpo_nemo.observe.metrics import read_metrics
from gdpo_nemo.observe.ownership import check_free, owned
from gdpo_nemo.observe.status import RESTARTING, StatusFile
from gdpo_nemo.phases import phase
from gdpo_nemo.resume import find_start, record_config, total_updates
from gdpo_nemo.rollouts.prompt_stream import BatchStream, PromptStream
from gdpo_nemo.startup import importing
from gdpo_nemo.supervisor import current_attempt, report
from gdpo_nemo.waits import WaitExpired

if TYPE_CHECKING:  # their imports take seconds, which a config that is refused does not wait for
    from gdpo_nemo.algorithm import Algorithm
    from gdpo_nemo.cluster.env_nodes import EnvironmentNodes
    from gdpo_nemo.cluster.fleet import EngineFleet
    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.cluster.probe import Probe
    from gdpo_nemo.cluster.reservation import Placement
    from gdpo_nemo.cluster.weight_sync import WeightSync
    from gdpo_nemo.environments.execution.executor import EnvironmentExecutor


RAW_LINES = "driver.log"
"""File of the run folder with what Ray and others wrote on the driver's standard error."""


@dataclass
class Stop:
    """Whether somebody asked the run to end (SIGTERM, SIGINT, SIGHUP), and the exit status that follows."""

    requested: bool = False
    status: int = 0
    patient: bool = False
    """Set once training runs: a signal then waits for the end of the step and a checkpoint."""

    def __call__(self, number: int, frame: object) -> None:
        """Signal handler. A second signal, or one before training started, ends the run at once.

        Not a second SIGHUP: the shell and then the kernel send one each when a terminal goes away.
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
    """What ``Trainer`` works with. Policy, algorithm and stream are set once the run's processes are there."""

    config: Config
    run_dir: Path
    log: RunLog
    stop: Stop
    checkpoints: Checkpoints
    state: RunState
    prompt_limit: int | None = None
    """Prompts of the whole run (``config.layout.prompt_limit``)."""
    validation_prompts: list[Prompt] = field(default_factory=list)
    total_updates: int = 0
    """Optimizer updates of the whole run (``resume.total_updates``)."""
    policy: PolicyGroup = field(init=False)
    algorithm: Algorithm = field(init=False)
    stream: BatchStream = field(init=False)
    sync: WeightSync | None = None
    """None, as ``fleet``, where the algorithm does not sample."""
    fleet: EngineFleet | None = None
    environments: EnvironmentNodes | None = None
    """Where the environments have nodes of their own."""

    def describe(self) -> dict[str, Any]:
        """What the status file says of the run; called from another thread at any time."""
        from gdpo_nemo.cluster.session import log_folder

        there = vars(self)
        groups = {"policy rank": there.get("policy"), "engine": self.fleet, "environment node": self.environments}
        roles = {
            f"{name} {n}": place
            for name, group in groups.items()
            if group
            for n, place in group.process_locations().items()
        }
        logs = log_folder()
        return {
            "step": self.state.step,
            "version": self.sync.version if self.sync else None,
            "queues": self.stream.queues() if "stream" in there else {},
            "roles": roles,
            "logs": str(logs) if logs else None,
            "restarts": current_attempt().restarts,
        }

    def finish(self) -> None:
        """What follows the last step: the final weights as a Hugging Face folder."""
        if self.config.checkpointing.export_hf:
            present(self.policy, "the policy").export(self.run_dir / "model")
            self.log.card(self.run_dir / "model", self.state.step)


@contextlib.contextmanager
def run_context(config: Config, begin: float | None = None, kept: Kept | None = None) -> Iterator[RunComponents]:
    """The parts of a run, ready to train; closed, with the reason in the log, when the block ends.

    Args:
        begin: when the user asked for it, in seconds since the epoch; None: when this process started.
        kept: parts of an attempt before this one, and where the caller finds whether some stay for another.
    """
    kept = kept or Kept()
    kept.goes_on = False
    # The processes of a joined cluster have their own working directory.
    run_dir = Path(config.run.dir).absolute() if joined(config.cluster) else Path(config.run.dir)
    stop = Stop()
    require_libraries(config)
    with answered_by(stop, signal.SIGINT), contextlib.ExitStack() as stack:
        check_free(run_dir)
        inputs = read_inputs(config, wanted_splits(config))
        limit = prompt_limit(config, len(inputs.prompts))
        owner = stack.enter_context(owned(run_dir))
        start = find_start(config, run_dir, inputs)
        start.checkpoints.set_aside()
        record_config(config, run_dir, start.state.step)
        last, reason = last_step(config, limit), current_attempt().reason
        log = RunLog(config, run_dir, start.state.step, last, owner.check, reason)
        outcome = ["failed"]
        stack.callback(lambda: log.close(outcome[0]))
        for line in (*inputs.refused, *start.damaged):
            log.alert(line)
        for line in (*([owner.predecessor] if owner.predecessor else []), *start.remarks):
            log.note(line)
        parts = RunComponents(config, run_dir, log, stop, start.checkpoints, start.state, limit, inputs.held_out)
        status = StatusFile(run_dir, parts.describe)
        stack.callback(lambda: status.close(outcome[0]))
        stack.enter_context(raw_lines_in(run_dir / RAW_LINES))
        try:
            kept.when_ray_is_lost = partial(_end_without_ray, parts, status)
            _start_processes(parts, stack, inputs, start.path, begin, kept)
            if start.changes:
                upcoming = present(parts.policy, "the policy").next_learning_rate()
                log.note(_learning_rates(run_dir, start.state.step, upcoming))
            if display := active():
                log.say(display.ready())
            stop.patient = True
            yield parts
            outcome[0] = "stopped" if stop.requested else "complete"
        except GdpoError as error:
            if isinstance(error, WaitExpired):  # before anything is closed: who is it that does not answer?
                status.write(error.waits)
                diagnosis = examine(run_dir)
                error.args = (f"{error}; {diagnosis.sentence} (see {diagnosis.folder})",)
            kept.decide(parts, error)
            if kept.goes_on:
                outcome[0] = RESTARTING
            log.alert(str(error))
            raise
        except SystemExit as end:
            outcome[0] = "stopped"
            raise SystemExit(stop.status or end.code) from None  # Ray, waiting, makes every exit a 1.


def _start_processes(
    parts: RunComponents,
    stack: contextlib.ExitStack,
    inputs: Inputs,
    checkpoint: Path | None,
    begin: float | None,
    kept: Kept,
) -> None:
    """Ray and the policy's ranks; engines and verifiers beside them, where the algorithm samples."""
    from gdpo_nemo.cluster.session import keep_logs, session

    config = with_ranks(parts.config)
    lap = parts.log.stopwatch("start", psutil.Process().create_time() if begin is None else begin)
    lap("imports, config, data")
    if kept.placement is None:
        with _imported_meanwhile():
            kept.session.enter_context(session(config.cluster, kept.ray_is_lost))
    stack.push(kept.end_session)
    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.cluster.reservation import reserve

    lap("Ray")
    stack.push(lambda kind, error, trace: point_to_logs(error, keep_logs, parts.run_dir))
    folder = inputs.folder.absolute()
    with phase("nodes"):
        placement = kept.placement = kept.placement or reserve(config, [parts.run_dir, folder])
    pool = _start_environments(parts, stack, config, placement) if inputs.algorithm.samples else None
    parts.total_updates = horizon = total_updates(config, parts.state, len(inputs.prompts))
    reference = inputs.algorithm.needs_reference(config)
    parts.policy = policy = PolicyGroup(config, str(folder), horizon, placement, reference)
    sampling = _Sampling(parts, stack, policy, inputs, config, placement, kept, lap) if pool else None
    if sampling:
        sampling.engines_that_share()
    policy.ready()
    lap("policy, beside the engines" if sampling else "policy")
    if sampling:
        sampling.all_engines()
    if checkpoint is not None:
        policy.load_checkpoint(checkpoint)
        lap("checkpoint")
    elif inputs.adapter is not None:  # not before the probe, which wants the weights that the engines have
        policy.load_adapter(inputs.adapter)
        lap("adapter")
    parts.algorithm = inputs.algorithm(parts.config, policy, inputs.tokenizer, parts.log)
    parts.algorithm.load_state(parts.state.algorithm)
    if sampling and pool:
        sampling.connect(stack, pool)
    else:
        parts.stream = PromptStream(config, inputs.prompts, parts.state.position)


def _end_without_ray(parts: RunComponents, status: StatusFile, sentence: str) -> None:
    """End this process at once, with the sentence everywhere that a failed run leaves one.

    Taking the run down in order asks Ray, which does not answer or aborts the process; the reaper ends what is left.
    """
    from gdpo_nemo.cluster.session import keep_logs

    error = InfrastructureFailed(sentence + START_AGAIN)
    report(error)
    status.write([], outcome="failed", reason=str(error))
    with contextlib.suppress(OSError):
        point_to_logs(error, keep_logs, parts.run_dir)
    parts.log.alert(str(error))
    parts.log.abandon("failed")
    with contextlib.suppress(OSError):
        print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(1)


_WANTED_SOON = (
    "gdpo_nemo.cluster.fleet",
    "gdpo_nemo.cluster.policy_group",
    "gdpo_nemo.rollouts.scheduler",
    "gdpo_nemo.cluster.probe",
    "gdpo_nemo.cluster.weight_sync",
    "gdpo_nemo.algorithms.advantages",
)


@contextlib.contextmanager
def _imported_meanwhile() -> Iterator[None]:
    """Import what the next phases need, torch above all, in a thread while the block waits for other processes."""

    def load() -> None:
        # What fails here fails again, and is reported, where it is wanted.
        with contextlib.suppress(Exception), importing(freeze=False):
            for name in _WANTED_SOON:
                importlib.import_module(name)

    thread = threading.Thread(target=load, name="imports", daemon=True)
    thread.start()
    yield
    with phase("imports"):
        thread.join()


def with_ranks(config: Config) -> Config:
    """The config with the number of its ranks, which the policy needs; the run's own keeps what the user wrote, which a
    resume is compared with. Raises ConfigError."""
    layout = resolve_layout(config)
    megatron = replace(config.policy.megatron_cfg, data_parallel_size=layout.data)
    return replace(config, policy=replace(config.policy, megatron_cfg=megatron))


def _start_environments(
    parts: RunComponents, stack: contextlib.ExitStack, config: Config, placement: Placement
) -> EnvironmentExecutor:
    """Worker processes here, or on nodes of their own."""
    from gdpo_nemo.cluster.env_nodes import EnvironmentNodes

    pool: EnvironmentExecutor
    if config.cluster.env_nodes:
        parts.environments = EnvironmentNodes(config, placement)
        pool = parts.environments
    else:
        pool = EnvironmentPools(config.env, config.rollout.env_workers, config.rollout.env_timeout_s, config.run.seed)
    stack.callback(pool.close)
    return pool


class _Sampling:
    """What only an algorithm that samples needs: engines, the stream of rollouts, publication of weights.

    Constructing it starts the engines. Those that share the policy's devices measure free memory at their start, so
    they come before the policy; the others start beside it.
    """

    def __init__(
        self,
        parts: RunComponents,
        stack: contextlib.ExitStack,
        policy: PolicyGroup,
        inputs: Inputs,
        config: Config,
        placement: Placement,
        kept: Kept,
        lap: Callable[[str], None],
    ):
        from gdpo_nemo.cluster.fleet import EngineFleet

        self._parts = parts
        self._policy = policy
        self._inputs = inputs
        self._config = config
        self._lap = lap
        self._shared = bool(placement.places.shared)
        self._kept = kept
        self._engines_are_new = kept.fleet is None
        devices = policy.devices() if self._shared else None
        folder = str(inputs.folder.absolute())
        kept.fleet = kept.fleet or EngineFleet(config, folder, placement, devices)
        self._fleet = parts.fleet = kept.fleet
        stack.callback(kept.end_engines)

    def engines_that_share(self) -> None:
        """Wait for the engines that sit on the policy's devices, and send them to sleep."""
        if not self._shared:
            return
        self._fleet.ready()
        self._kept.probe = _probe(self._config, self._inputs, self._fleet)
        self._fleet.sleep()
        self._lap("engines, before the policy")

    def all_engines(self) -> None:
        """Wait for the engines; hold them against the policy, as both have loaded the model's folder now. (Those that
        were kept have other weights, and were held against a policy before.)"""
        self._fleet.ready()
        self._lap("engines, after the policy")
        if not self._engines_are_new:
            return
        with phase("probe"):
            if not self._shared:
                self._kept.probe = _probe(self._config, self._inputs, self._fleet)
            if self._kept.probe is not None:
                self._kept.probe.calibrate(self._policy, self._config)
                self._lap("probe")

    def connect(self, stack: contextlib.ExitStack, pool: EnvironmentExecutor) -> None:
        """The stream of rollouts, and the way of the weights to the engines."""
        from gdpo_nemo.cluster.weight_sync import WeightSync
        from gdpo_nemo.rollouts.scheduler import RolloutScheduler
        from gdpo_nemo.weights.transports.transport import close_transport, make_transport

        parts = self._parts
        config = self._config
        inputs = self._inputs
        parts.stream = RolloutScheduler(
            config,
            inputs.prompts,
            self._fleet,
            pool,
            inputs.tokenizer,
            parts.state.ledger,
            parts.state.position,
            parts.state.step,
            parts.prompt_limit,
            (parts.state.updates, total_updates(config, parts.state, len(inputs.prompts))),
        )
        stack.callback(parts.stream.close)
        bucket = config.weights.bucket_mib << 20
        # Engines may then have to start again while the policy trains.
        keep = config.rollout.max_staleness > 0 or config.rollout.endpoint.enabled
        transport = make_transport(chosen_transport(config), self._policy, parts.run_dir / "weights", bucket, keep)
        stack.callback(close_transport, transport)
        kv = config.rollout.kv if config.rollout.max_staleness else "drain"
        parts.sync = WeightSync(self._policy, self._fleet, self._kept.probe, transport, self._shared, kv)


def _learning_rates(run_dir: Path, step: int, upcoming: float) -> str:
    """The learning rate on both sides of a resume under a changed config."""
    last = next((row["lr"] for row in reversed(read_metrics(run_dir)) if "lr" in row), None)
    before = "" if last is None else f" (step {step}: {last:g})"
    return f"step {step + 1} trains with learning rate {upcoming:g}{before}"


def _probe(config: Config, inputs: Inputs, fleet: EngineFleet) -> Probe | None:
    """The probe of ``policy.generation.verify_weights``, from the first prompts; None where that is off."""
    from gdpo_nemo.cluster.probe import PROMPTS, Probe

    if not config.policy.generation.verify_weights:
        return None
    prompts = [prompt.token_ids for prompt in inputs.prompts.head(PROMPTS)]
    vocabulary = json.loads((inputs.folder / "config.json").read_text())["vocab_size"]
    return Probe.sampled(fleet, prompts, vocabulary, config.policy.max_total_sequence_length)


def point_to_logs(error: BaseException | None, keep_logs: Callable[[Path], Path | None], run_dir: Path) -> bool:
    """After a failure keep the workers' logs in the run folder and say so."""
    if isinstance(error, GdpoError):
        try:
            folder = keep_logs(run_dir)
        except OSError as problem:  # a full disk, which may be what the error is about
            error.args = (f"{error} (the worker logs could not be kept: {problem.strerror})",)
            return False
        if folder is not None:
            error.add_note(f"logs: {folder}")
            error.args = (f"{error} (worker logs: {folder})",)
    return False
