"""Setup of a run, in an order that fails early and cheaply, and its teardown in reverse order.

``run_context`` runs in the driver's process; ``Trainer.fit`` runs inside its block. Order of events::

    check      require_libraries ─► check_free ─► start the fork server, which imports for ranks and engines
               ─► read_inputs (environments, model, tokenizer, data, preflight)
    own        lock run.dir ─► find_start ─► set_aside damaged checkpoints ─► record_config ─► log, status file
    processes  1 Ray's session, while a thread imports torch and others; reserve nodes (both skipped in a rebuild)
               2 environment workers or nodes (*)
               3 policy ranks: start, and begin to load the model unless they share devices with engines
               4 engines start (*), skipped in a rebuild; if they share devices: wait, sample the sync check, sleep
               5 wait for the policy's model ─► wait for all engines (*) ─► calibrate the sync check (*)
               6 load the checkpoint or the adapter into the policy ─► create the algorithm and load its state
               7 scheduler, transport, weight sync (*); otherwise PromptStream
    train      Stop.patient = True ─► Trainer.fit ─► RunComponents.finish

(*) only if the algorithm samples. Before ``patient`` is set, a signal ends the run immediately. Afterwards, a signal
ends the run at the end of a step.

| end of the block | action |
|---|---|
| GdpoError | if a wait timed out, examine it; ``RetainedSession.decide``: restart in this process, or fail |
| SystemExit | outcome "stopped", with the exit status of the signal |
| any | close transport, scheduler, engines, environments, Ray, status, log; a rebuild retains engines and Ray |
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from gdpo_nemo.cluster.fork_server import ENGINE, RANK
from gdpo_nemo.cluster.worker_processes import worker_processes
from gdpo_nemo.config.algorithm_choice import spec_of
from gdpo_nemo.config.data_files import splits_to_read
from gdpo_nemo.config.layout import Resolved, last_step, prompt_limit
from gdpo_nemo.config.model_checks import read_model_config
from gdpo_nemo.config.placement import joined
from gdpo_nemo.config.schema import Config
from gdpo_nemo.config.sections import PolicyConfig
from gdpo_nemo.config.transports import chosen_mode, chosen_transport
from gdpo_nemo.environments.execution.pools import EnvironmentPools
from gdpo_nemo.observe.diagnosis import examine
from gdpo_nemo.observe.display import active
from gdpo_nemo.observe.installation import require_libraries
from gdpo_nemo.observe.log import RunLog
from gdpo_nemo.observe.metrics import read_metrics
from gdpo_nemo.observe.ownership import check_free, owned
from gdpo_nemo.observe.run_files import RESTARTING, StatusFile
from gdpo_nemo.rollouts.batches import PromptStream
from gdpo_nemo.training.components import RunComponents, Stop
from gdpo_nemo.training.inputs import Inputs, read_inputs
from gdpo_nemo.training.recovery import Decision, RetainedSession
from gdpo_nemo.training.resume import Start, find_start, record_config, run_date, total_updates
from gdpo_nemo.training.supervisor import report
from gdpo_nemo.utils.errors import START_AGAIN, GdpoError, InfrastructureFailed
from gdpo_nemo.utils.progress import importing, phase
from gdpo_nemo.utils.signals import answered_by, raw_lines_in
from gdpo_nemo.utils.state import from_json
from gdpo_nemo.utils.waits import WaitExpired

if TYPE_CHECKING:  # These imports take seconds and would delay the message about an invalid config.
    from gdpo_nemo.cluster.fleet import EngineFleet
    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.cluster.reservation import Placement
    from gdpo_nemo.cluster.weight_sync import SyncCheck
    from gdpo_nemo.environments.execution.pools import EnvironmentExecutor


RAW_LINES = "driver.log"
"""File in the run folder for the output of Ray and other libraries on the driver's standard error."""


@contextlib.contextmanager
def run_context(resolved: Resolved, retained: RetainedSession | None = None) -> Iterator[RunComponents]:
    """Yield the components of a run, ready to train. When the block ends, they are closed and the reason is logged.

    Args:
        retained: the current attempt, and parts of the previous one. After the block, its ``decision`` states whether
            to restart.
    """
    config = resolved.config
    retained = retained or RetainedSession()
    retained.begin()
    # The processes of a joined cluster have other working directories.
    run_dir = Path(config.run.dir).absolute() if joined(config.cluster) else Path(config.run.dir)
    stop = Stop()
    require_libraries(config.cluster)
    with answered_by(stop, signal.SIGINT), contextlib.ExitStack() as stack:
        check_free(run_dir)
        config.run.date = run_date(config, run_dir)
        stack.push(retained.end_session)
        if retained.placement is None:
            ahead = (RANK, ENGINE) if spec_of(config).samples else (RANK,)
            retained.session.enter_context(worker_processes(config.cluster, ahead))
        inputs = read_inputs(resolved, splits_to_read(config))
        limit = prompt_limit(config.gdpo, len(inputs.prompts))
        owner = stack.enter_context(owned(run_dir))
        start = find_start(resolved, run_dir, inputs)
        start.checkpoints.set_aside()
        record_config(config, run_dir, start.state.step)
        attempt = retained.attempt
        last = last_step(config.gdpo, limit)
        log = RunLog(config, run_dir, start.state.step, last, owner.check, attempt.reason)
        outcome = ["failed"]
        stack.callback(lambda: log.close(outcome[0]))
        _log_findings(log, inputs, start, owner.predecessor)
        parts = RunComponents(
            resolved, run_dir, log, stop, start.checkpoints, start.state, limit, inputs.held_out, attempt
        )
        status = StatusFile(run_dir, parts.describe)
        stack.callback(lambda: status.close(outcome[0]))
        stack.enter_context(raw_lines_in(run_dir / RAW_LINES))
        try:
            retained.handle_lost_ray(partial(_end_without_ray, parts, status))
            _start_processes(parts, stack, inputs, start.path, retained)
            if start.changes:
                upcoming = parts.policy.next_learning_rate()
                log.note(_learning_rates(run_dir, start.state.step, upcoming))
            if display := active():
                log.say(display.ready())
            stop.patient = True
            yield parts
            outcome[0] = "stopped" if stop.requested else "complete"
        except GdpoError as error:
            if isinstance(error, WaitExpired):
                _diagnose(error, status, run_dir)
            if retained.decide(parts, error) is Decision.RESTART:
                outcome[0] = RESTARTING
            log.alert(str(error))
            raise
        except SystemExit as end:
            outcome[0] = "stopped"
            raise SystemExit(stop.status or end.code) from None  # While waiting, Ray changes every exit status to 1.


def _log_findings(log: RunLog, inputs: Inputs, start: Start, predecessor: str | None) -> None:
    """Log what was found in the inputs, the checkpoints and the run folder."""
    for line in (*inputs.alerts, *start.damaged):
        log.alert(line)
    if predecessor:
        log.note(predecessor)
    for line in start.remarks:
        log.note(line)


def _diagnose(error: WaitExpired, status: StatusFile, run_dir: Path) -> None:
    """Add to the error what the run's processes do. Call this before any process is closed."""
    status.write(error.waits)
    diagnosis = examine(run_dir)
    error.args = (f"{error}; {diagnosis.sentence} (see {diagnosis.folder})",)


def _start_processes(
    parts: RunComponents,
    stack: contextlib.ExitStack,
    inputs: Inputs,
    checkpoint: Path | None,
    retained: RetainedSession,
) -> None:
    """Start Ray and the policy's ranks. If the algorithm samples, also start engines and environments concurrently."""
    from gdpo_nemo.cluster.session import keep_logs, session

    resolved = parts.resolved.with_ranks()
    config = resolved.config
    begin = retained.attempt.begin
    lap = parts.log.stopwatch("start", psutil.Process().create_time() if begin is None else begin)
    lap("imports, config, data")
    if retained.placement is None:
        with _preloaded_imports():
            retained.session.enter_context(session(config.cluster, retained.ray_is_lost))
    stack.push(retained.end_session)
    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.cluster.reservation import reserve
    from gdpo_nemo.rollouts.host import uses_hosts

    lap("Ray")
    stack.push(lambda kind, error, trace: point_to_logs(error, keep_logs, parts.run_dir))
    folder = inputs.folder.absolute()
    with phase("nodes"):
        shared = [parts.run_dir, folder, *([Path.cwd()] if inputs.algorithm.samples and uses_hosts(config) else [])]
        placement = retained.placement = retained.placement or reserve(config.cluster, resolved.layout, shared)
    pool = _start_environments(parts, stack, config, placement) if inputs.algorithm.samples else None
    parts.total_updates = horizon = total_updates(resolved, parts.state, len(inputs.prompts))
    reference = inputs.algorithm.needs_reference(config)
    parts.policy = policy = PolicyGroup(config, str(folder), horizon, placement, reference)
    sampling = (
        _Sampling(parts, stack, policy, inputs, config, placement=placement, retained=retained, lap=lap)
        if pool
        else None
    )
    if sampling:
        sampling.start_colocated_engines()
    policy.ready()
    lap("policy, concurrent with engines" if sampling else "policy")
    if sampling:
        sampling.wait_for_engines()
    if checkpoint is not None:
        policy.load_checkpoint(checkpoint)
        lap("checkpoint")
    elif inputs.adapter is not None:  # The sync check above needs equal weights in policy and engines.
        policy.load_adapter(inputs.adapter)
        lap("adapter")
    parts.algorithm = inputs.algorithm(parts.config, policy, inputs.tokenizer, parts.log)
    parts.algorithm.load_state(from_json(parts.state.algorithm))
    if sampling and pool:
        sampling.connect(stack, pool)
    else:
        parts.stream = PromptStream(config, inputs.prompts, parts.state.position)


def _end_without_ray(parts: RunComponents, status: StatusFile, sentence: str) -> None:
    """End this process immediately, and report the failure in all places in which a failed run reports it.

    A normal teardown would call Ray, which hangs or aborts the process. The cleanup process ends the remaining
    processes.
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


_PRELOADED = (
    "gdpo_nemo.cluster.fleet",
    "gdpo_nemo.cluster.policy_group",
    "gdpo_nemo.rollouts.scheduler",
    "gdpo_nemo.cluster.weight_sync",
    "gdpo_nemo.algorithms.advantages",
)


@contextlib.contextmanager
def _preloaded_imports() -> Iterator[None]:
    """Import the modules of the next phases, mainly torch, in a thread while the block waits for other processes."""

    def load() -> None:
        # If an import fails, the error occurs again where the module is used, and is reported there.
        with contextlib.suppress(Exception), importing(freeze=False):
            for name in _PRELOADED:
                importlib.import_module(name)

    thread = threading.Thread(target=load, name="imports", daemon=True)
    thread.start()
    yield
    with phase("imports"):
        thread.join()


def _start_environments(
    parts: RunComponents, stack: contextlib.ExitStack, config: Config, placement: Placement
) -> EnvironmentExecutor:
    """Start the environment workers on this machine or on dedicated nodes."""
    from gdpo_nemo.cluster.env_nodes import EnvironmentNodes

    pool: EnvironmentExecutor
    if config.cluster.env_nodes:
        parts.environments = EnvironmentNodes(config, placement, parts.run_dir)
        pool = parts.environments
    else:
        rollout = config.rollout
        pool = EnvironmentPools(config.env, rollout.env_workers, rollout.env_timeout_s, config.run.seed, parts.run_dir)
    stack.callback(pool.close)
    return pool


class _Sampling:
    """Components that only a sampling algorithm needs: engines, rollout stream and weight sync.

    The constructor starts the engines. Colocated engines measure the free memory when they start, so they are started
    before the policy loads its model. Other engines start concurrently with the policy.
    """

    def __init__(
        self,
        parts: RunComponents,
        stack: contextlib.ExitStack,
        policy: PolicyGroup,
        inputs: Inputs,
        config: Config,
        *,
        placement: Placement,
        retained: RetainedSession,
        lap: Callable[[str], None],
    ):
        from gdpo_nemo.cluster.fleet import EngineFleet
        from gdpo_nemo.rollouts.host import start_host, uses_hosts

        self._parts = parts
        self._policy = policy
        self._inputs = inputs
        self._config = config
        self._lap = lap
        self._shared = bool(placement.places.shared)
        self._retained = retained
        self._engines_are_new = retained.fleet is None
        devices = policy.devices() if self._shared else None
        folder = str(inputs.folder.absolute())
        hosts = partial(start_host, config, folder, placement) if uses_hosts(config) else None
        retained.fleet = retained.fleet or EngineFleet(config, folder, placement, devices, hosts)
        self._fleet = parts.fleet = retained.fleet
        stack.callback(retained.end_engines)

    def start_colocated_engines(self) -> None:
        """Wait until colocated engines have started, and put them to sleep."""
        if not self._shared:
            return
        self._fleet.ready()
        self._retained.sync_check = _sync_check(self._config.policy, self._inputs, self._fleet)
        self._fleet.sleep()
        self._lap("engines, before the policy")

    def wait_for_engines(self) -> None:
        """Wait for all engines, and compare their log-probs with the policy's. The policy and the engines have loaded
        the same model folder.

        Retained engines are not compared, because they have other weights and were compared with an earlier policy.
        """
        self._fleet.ready()
        self._lap("engines, after the policy")
        if not self._engines_are_new:
            return
        with phase("sync check"):
            if not self._shared:
                self._retained.sync_check = _sync_check(self._config.policy, self._inputs, self._fleet)
            if self._retained.sync_check is not None:
                self._retained.sync_check.calibrate(self._policy, self._config)
                self._lap("sync check")

    def connect(self, stack: contextlib.ExitStack, pool: EnvironmentExecutor) -> None:
        """Create the rollout stream and the weight sync to the engines."""
        from gdpo_nemo.cluster.weight_sync import WeightSync
        from gdpo_nemo.data.tokenizer import load_image_reader
        from gdpo_nemo.rollouts.ledger import RunPosition
        from gdpo_nemo.rollouts.scheduler import RolloutScheduler
        from gdpo_nemo.weights.transports.base import close_transport, make_transport

        parts = self._parts
        config = self._config
        inputs = self._inputs
        state = parts.state
        updates = (state.updates, parts.total_updates)
        parts.stream = RolloutScheduler(
            config,
            RunPosition(state.ledger, state.position, state.step, parts.prompt_limit, updates),
            prompts=inputs.prompts,
            fleet=self._fleet,
            pool=pool,
            tokenizer=inputs.tokenizer,
            images=load_image_reader(config.data.images, inputs.folder, inputs.tokenizer),
        )
        stack.callback(parts.stream.close)
        bucket = config.weights.bucket_mib << 20
        # Engines that restart while the policy trains need the last weights.
        keep = config.rollout.max_staleness > 0 or config.rollout.endpoint.enabled
        transport = make_transport(
            chosen_transport(config), self._policy, parts.run_dir / "weights", bucket, keep, chosen_mode(config)
        )
        stack.callback(close_transport, transport)
        kv = config.rollout.kv if config.rollout.max_staleness else "drain"
        parts.sync = WeightSync(self._policy, self._fleet, self._retained.sync_check, transport, self._shared, kv)


def _learning_rates(run_dir: Path, step: int, upcoming: float) -> str:
    """Describe the learning rates before and after resuming with a changed config."""
    last = next((row["lr"] for row in reversed(read_metrics(run_dir)) if "lr" in row), None)
    before = "" if last is None else f" (step {step}: {last:g})"
    return f"step {step + 1} trains with learning rate {upcoming:g}{before}"


def _sync_check(policy: PolicyConfig, inputs: Inputs, fleet: EngineFleet) -> SyncCheck | None:
    """Return the sync check for ``policy.generation.verify_weights`` on the first prompts, or None if it is
    disabled."""
    from gdpo_nemo.cluster.weight_sync import PROMPTS, SyncCheck

    if not policy.generation.verify_weights:
        return None
    prompts = inputs.prompts.head(PROMPTS)
    vocabulary = read_model_config(inputs.folder / "config.json")["vocab_size"]
    token_ids, images = [prompt.token_ids for prompt in prompts], [prompt.images for prompt in prompts]
    return SyncCheck.sampled(fleet, token_ids, vocabulary, policy.max_total_sequence_length, images)


def point_to_logs(error: BaseException | None, keep_logs: Callable[[Path], Path | None], run_dir: Path) -> bool:
    """After a failure, copy the workers' logs to the run folder and add their path to the error message."""
    if isinstance(error, GdpoError):
        try:
            folder = keep_logs(run_dir)
        except OSError as problem:  # A full disk may also be the cause of the run's error.
            error.args = (f"{error} (the worker logs could not be saved: {problem.strerror})",)
            return False
        if folder is not None:
            error.add_note(f"logs: {folder}")
            error.args = (f"{error} (worker logs: {folder})",)
    return False
