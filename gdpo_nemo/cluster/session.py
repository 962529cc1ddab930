"""Ray session of a run: start and stop, waits with a time limit, and collection of logs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# Set this before the import of ray. Otherwise Ray would build a second environment for its workers under `uv run`.
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
# Do not change CUDA_VISIBLE_DEVICES for actors that request no GPU, such as engines that share the policy's GPUs.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Hide Ray's output about a lost process, which includes a hundred lines of state. ``log_to_driver`` does not hide this
# output. The run reports the loss in a sentence, and Ray's own logs are kept.
os.environ.setdefault("RAY_DEDUP_LOGS", "1")
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
# Ray runs its workers at niceness 15. On a busy machine, the run's verifiers would starve these workers, because
# verifiers have niceness 0.
os.environ.setdefault("RAY_worker_niceness", "0")
# Do not let Ray prestart a worker per core. These workers would be unused, because each actor of the run has its own
# runtime_env.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
# By default, Ray allows its processes 30 to 100 s to start, and its workers 60 s to register. These limits are too
# short on two cores with a load of 16.
for _name, _seconds in (
    ("gcs_server_port_wait_time_s", 300),
    ("raylet_start_wait_time_s", 1),  # limit of one query, which ``local_ray`` repeats
    ("gcs_server_request_timeout_seconds", 300),
    ("worker_register_timeout_seconds", 600),
    ("agent_register_timeout_ms", 600_000),
):
    os.environ.setdefault(f"RAY_{_name}", str(_seconds))

import ray as ray  # noqa: E402
from ray._private import auto_init_hook, ray_constants  # noqa: E402
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError  # noqa: E402

from gdpo_nemo.cluster import local_ray  # noqa: E402
from gdpo_nemo.cluster.worker_processes import worker_processes  # noqa: E402
from gdpo_nemo.config.placement import address_source, joined  # noqa: E402
from gdpo_nemo.config.schema import ClusterConfig  # noqa: E402
from gdpo_nemo.utils.errors import (  # noqa: E402
    START_AGAIN,
    ConfigError,
    EngineFailed,
    GdpoError,
    InfrastructureFailed,
    RunError,
    kind_of,
    message_line,
)
from gdpo_nemo.utils.progress import phase  # noqa: E402
from gdpo_nemo.utils.signals import hangups_held  # noqa: E402

# The variable above has no effect if user code has imported ray first. Under `uv run`, Ray would then run workers in a
# copy of the working directory, and the files that ranks write to a relative run.dir would be lost.
ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
from gdpo_nemo.utils.waits import WaitExpired, running, waiting  # noqa: E402

_POLL_S = 1.0
"""Interval in seconds at which a wait checks for dead workers and lost nodes."""
_NODE_LOSS_S = 20.0
"""Maximum time in seconds until Ray declares an unresponsive node dead (health-check settings: docs/cluster.md)."""


def cores(config: ClusterConfig) -> int:
    """Return the number of CPU cores that this run may use on this node."""
    return config.cpus_per_node or len(os.sched_getaffinity(0))


@contextlib.contextmanager
def session(config: ClusterConfig, lost: Callable[[str], None] | None = None) -> Iterator[None]:
    """Join the Ray cluster that the config or RAY_ADDRESS specifies, or start a cluster that ends with this process.

    Args:
        lost: function that a thread calls with a message if a server of a local session ends. Ray can then no longer be
            used.

    Raises:
        ConfigError: if the run requires several nodes, but no cluster is given.
        RunError: if the cluster cannot be joined, or if this process already has a Ray session.
    """
    # A thread that outlives the session may still call Ray, which would then start a cluster. The cleanup process would
    # end this cluster, and Ray ends the driver of a cluster that has ended. (RAY_ENABLE_AUTO_CONNECT is read when ray
    # is imported, which may already have happened.)
    auto_init_hook.enable_auto_connect = False
    if ray.is_initialized():
        raise RunError(
            "this process already has a Ray session; end it with ray.shutdown(), or train in another process"
        )
    address = joined(config)
    nodes = config.num_nodes + config.env_nodes
    if nodes > 1 and not address:
        raise ConfigError(
            f"cluster.address: a run on {nodes} nodes requires a Ray cluster; start one (`ray start`, or "
            "examples/slurm/run.sbatch) and set its address here or in RAY_ADDRESS"
        )
    arguments = (
        dict(address=address)
        if address
        # Without "local", Ray would join a cluster that already runs on this machine.
        else dict(
            address="local",
            num_cpus=cores(config),
            num_gpus=config.gpus_per_node,
            include_dashboard=False,
            _node_ip_address=local_ray.LOOPBACK,
        )
    )
    with worker_processes(config), contextlib.ExitStack() as stack:
        stack.callback(_disconnect)
        with phase("Ray"):
            _connect(arguments, address_source(config))
        if lost and not address:
            stack.enter_context(local_ray.watched(lost))
        yield


def _disconnect() -> None:
    _watched.clear()
    with _signal_handlers_restored():
        ray.shutdown()


def _connect(arguments: dict[str, Any], source: str) -> None:
    if arguments["address"] == "local":
        local_ray.start(lambda: _initialize(arguments))
        return
    try:
        _initialize(arguments)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InfrastructureFailed(
            f"{source}: no Ray cluster to join at {arguments['address']} ({message_line(error)})"
        ) from error


def _initialize(arguments: dict[str, Any]) -> None:
    try:
        with hangups_held(), _signal_handlers_restored():
            ray.init(log_to_driver=False, logging_level="ERROR", **arguments)
    except SystemExit as end:
        if end.code == signal.SIGTERM:  # Ray's handler exits with 15, but shells expect 143
            raise SystemExit(128 + signal.SIGTERM) from None
        raise


@contextlib.contextmanager
def _signal_handlers_restored() -> Iterator[None]:
    """Restore the handlers of SIGTERM and SIGINT after the block, because Ray replaces and resets them."""
    names = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    before = [signal.getsignal(name) for name in names]
    try:
        yield
    finally:
        for name, handler in zip(names, before):
            signal.signal(name, handler)


_watched: dict[str, str] = {}
"""Addresses of the nodes that this session requires, by Ray's id."""


def watch_nodes(nodes: dict[str, str]) -> None:
    """Make every later ``gather`` fail if any of these nodes is lost.

    Args:
        nodes: addresses by Ray's id.
    """
    _watched.update(nodes)


def live_nodes() -> dict[str, dict[str, Any]]:
    """Return the nodes that are in the cluster by Ray's id."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def _check_nodes(what: str, patience_s: float = 0.0) -> None:
    """Raise RunError if a watched node has left the cluster or leaves it within ``patience_s``."""
    deadline = time.monotonic() + patience_s
    while _watched:
        lost = _watched.keys() - live_nodes().keys()
        if lost:
            names = ", ".join(sorted(_watched[node] for node in lost))
            raise InfrastructureFailed(f"{what}: node {names} is no longer in the cluster{START_AGAIN}")
        if time.monotonic() >= deadline:
            return
        time.sleep(_POLL_S)


def gather(refs: Sequence[ray.ObjectRef], what: str, timeout_s: float, owner: str = "workers") -> list[Any]:
    """Wait for all references and return their results in order. The first failure ends the wait at once.

    Args:
        what: description of the work, for messages.
        owner: name of the workers, for displaying the wait.

    Raises:
        RunError: if a worker fails or dies, or if the time limit is exceeded. A ``GdpoError`` that a worker raises
            keeps its type.
    """
    with waiting(what, owner, timeout_s):
        return _gather(refs, what, timeout_s)


def _gather(refs: Sequence[ray.ObjectRef], what: str, timeout_s: float) -> list[Any]:
    deadline = running.now() + timeout_s
    pending = list(refs)
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=_POLL_S, fetch_local=False)
        for ref in done:
            _raise_failure(ref, what)
        _check_nodes(what)
        if pending and running.now() > deadline:
            raise WaitExpired(f"{what}: {len(pending)} of {len(refs)} workers did not answer within {timeout_s:.0f} s")
    answers: list[Any] = ray.get(list(refs))
    return answers


def answered(refs: dict[int, ray.ObjectRef]) -> dict[int, Any]:
    """Return the results that are already available, by the keys of ``refs``, without waiting or starting Ray."""
    if not ray.is_initialized():
        return {}
    done = set(ray.wait(list(refs.values()), num_returns=len(refs), timeout=0)[0]) if refs else set()
    results = {}
    for key, ref in refs.items():
        if ref in done:
            with contextlib.suppress(RayError):  # a dead worker has no result
                results[key] = ray.get(ref)
    return results


def _raise_failure(ref: ray.ObjectRef, what: str) -> None:
    try:
        ray.get(ref)
    except RayError as error:
        if isinstance(error, _GONE):
            # The connection breaks before Ray declares the node dead. Wait for Ray, in order to report the node, not a
            # worker.
            _check_nodes(what, _NODE_LOSS_S if isinstance(error, ActorUnavailableError) else 0.0)
        raise _failure(error, what) from (None if _is_own_error(error) else error)


async def answer(ref: ray.ObjectRef, what: str, timeout_s: float, interval_s: float = _POLL_S) -> Any:
    """Wait on the event loop for the result of one call. Unlike ``gather``, do not check the nodes.

    Args:
        interval_s: time between two checks of the time limit.

    Raises:
        WorkerDied: if the worker died or is unreachable.
        WaitExpired: if the time limit is exceeded.
        RunError: if the call fails. A ``GdpoError`` that a worker raises keeps its type.
    """
    future = asyncio.wrap_future(ref.future())
    if not future.done() and not await _answered_within(future, timeout_s, interval_s):
        raise WaitExpired(f"{what}: no answer within {timeout_s:.0f} s")
    try:
        return future.result()
    except RayError as error:
        raise _failure(error, what) from (None if _is_own_error(error) else error)


def sendable(error: Exception, what: str) -> GdpoError:
    """Convert an exception for another process, which does not receive its causes."""
    result = error if isinstance(error, GdpoError) else RunError(f"{what}: {type(error).__name__}: {error}")
    vars(result)["kind"] = kind_of(error)
    return result


async def _answered_within(future: asyncio.Future[Any], timeout_s: float, interval_s: float) -> bool:
    deadline = running.now() + timeout_s
    while True:
        remaining = deadline - running.now()
        # Do not use wait_for: it would cancel the future, whose result Ray sets later. Wait in short intervals, because
        # the loop's timers include time in which this process was stopped.
        done, _ = await asyncio.wait([future], timeout=max(0.0, min(remaining, interval_s)))
        if done or remaining <= 0:
            return bool(done)


_GONE = (ActorDiedError, ActorUnavailableError)
_RAISED = re.compile(r"^(?:\w+\.)*(\w+): (.*)$", re.MULTILINE)
"""Line of a traceback with the type of an exception and the first line of its message."""


def one_has_ended(refs: Sequence[ray.ObjectRef], patience_s: float) -> bool:
    """Return whether the worker process of any of these calls has died or dies within ``patience_s``."""
    deadline = time.monotonic() + patience_s
    pending = list(refs)
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            return False
        try:
            ray.get(done)
        except _GONE:
            return True
    return False


def _is_own_error(error: RayError) -> bool:
    return isinstance(error, RayTaskError) and isinstance(error.cause, GdpoError)


def _failure(error: RayError, what: str) -> GdpoError:
    """Return the exception to raise for a failed call: the worker's GdpoError, or an error with a one-line message."""
    if isinstance(error, ActorDiedError) and error.actor_init_failed:
        # Ray passes on only the text of the traceback.
        kind, sentence = (_RAISED.findall(str(error)) or [("ActorDiedError", message_line(error))])[-1]
        if kind == EngineFailed.__name__:
            return WorkerDied(f"{what}: {sentence}")
        return InfrastructureFailed(f"{what}: {kind}: {sentence}")
    if isinstance(error, _GONE):
        return WorkerDied(f"{what}: a worker process died ({message_line(error)})")
    if isinstance(error, RayTaskError):
        cause = error.cause if isinstance(error.cause, BaseException) else error
        if isinstance(cause, EngineFailed):
            return WorkerDied(f"{what}: {cause}")
        if isinstance(cause, GdpoError):
            return cause
        sentence = f"{what}: {type(cause).__name__}: {message_line(cause)}"
        return InfrastructureFailed(sentence) if _is_network_error(cause) else RunError(sentence)
    return InfrastructureFailed(f"{what}: {message_line(error)}")


def _is_network_error(cause: BaseException) -> bool:
    """Return whether another rank may have caused the error. If a rank dies, its peers may report errors first."""
    kind = type(cause)
    text = str(cause)
    return kind.__module__.startswith("torch") and kind.__name__.startswith("Dist") or "gloo" in text or "NCCL" in text


class WorkerDied(InfrastructureFailed):
    """A worker process died or is unusable. The caller may replace the worker."""


def log_folder() -> Path | None:
    """Return the folder with the worker logs of this session, or None without a session."""
    # Ray has no public function for this folder.
    return Path(ray._private.worker._global_node.get_logs_dir_path()) if ray.is_initialized() else None


def keep_logs(run_dir: Path) -> Path | None:
    """Copy the worker logs of this session to ``logs/`` in the run folder.

    Returns:
        The folder with the copied logs, or None without logs.
    """
    source = log_folder()
    if source is None or not source.is_dir():
        return None
    target = run_dir / "logs"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True, exist_ok=True)
    for file in source.glob("worker-*"):
        if file.stat().st_size:
            shutil.copy2(file, target / file.name)
    return target
