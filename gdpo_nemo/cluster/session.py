"""The Ray session of one run: start, wait for work with a deadline, collect logs, stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

# Before ray is imported: it would otherwise build a second environment for its workers when it finds itself under `uv
# run`.
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
# Keep CUDA_VISIBLE_DEVICES of actors that ask for no GPU: engines that share the policy's GPUs are such actors.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Keeps what Ray prints of a lost process, a hundred lines of its state among it, from the terminal, which
# ``log_to_driver`` does not: the run says it in a sentence, and Ray's own logs are kept.
os.environ.setdefault("RAY_DEDUP_LOGS", "1")
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
# Ray runs its workers at niceness 15, so the run's own verifiers at 0 would starve them on a busy machine.
os.environ.setdefault("RAY_worker_niceness", "0")
# Each of our actors has its own runtime_env, so the workers that Ray prestarts, one per core, would never be used.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
# Ray allows its own processes 30 to 100 s to start, and its workers 60 s to register. On two cores with a load of 16
# that is too short.
for _name, _seconds in (
    ("gcs_server_port_wait_time_s", 300),
    ("raylet_start_wait_time_s", 120),
    ("gcs_server_request_timeout_seconds", 300),
    ("worker_register_timeout_seconds", 600),
    ("agent_register_timeout_ms", 600_000),
):
    os.environ.setdefault(f"RAY_{_name}", str(_seconds))

import ray  # noqa: E402
from ray._private import auto_init_hook  # noqa: E402
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError  # noqa: E402

from gdpo_nemo.cluster import local_ray  # noqa: E402
from gdpo_nemo.cluster.reaper import Reaper  # noqa: E402
from gdpo_nemo.config.messages import message_line  # noqa: E402
from gdpo_nemo.config.placement import joined  # noqa: E402
from gdpo_nemo.config.schema import ClusterConfig  # noqa: E402
from gdpo_nemo.endings import hangups_held  # noqa: E402
from gdpo_nemo.errors import (  # noqa: E402
    START_AGAIN,
    ConfigError,
    EngineFailed,
    GdpoError,
    InfrastructureFailed,
    RunError,
)
from gdpo_nemo.phases import phase  # noqa: E402
from gdpo_nemo.waits import WaitExpired, running, waiting  # noqa: E402

_POLL_S = 1.0
"""How often a wait looks for dead workers and lost nodes; a dead actor is noticed within this time."""
_NODE_LOSS_S = 20.0
"""Longest time in which Ray declares a silent node dead, with the health checks of docs/cluster.md."""


def cores(config: ClusterConfig) -> int:
    """CPU cores this run may use on this node."""
    return config.cpus_per_node or len(os.sched_getaffinity(0))


@contextlib.contextmanager
def session(config: ClusterConfig, lost: Callable[[str], None] | None = None) -> Iterator[None]:
    """Join the Ray cluster that the config or RAY_ADDRESS names, or else start one that ends with this process.

    Args:
        lost: called from a thread when a server of the session that was started here ends, with a sentence; Ray cannot
            be asked anything any more.

    Raises:
        ConfigError: several nodes are wanted and no cluster is named. RunError: there is no cluster at that address, or
        this process has a session already, of another run or of its own.
    """
    # A late call of a thread that outlived the session would otherwise start a cluster, whose processes the reaper then
    # ends as what the session left; and Ray ends a driver whose cluster is gone. (RAY_ENABLE_AUTO_CONNECT is read when
    # ray is imported, which the caller may have done before us.)
    auto_init_hook.enable_auto_connect = False
    if ray.is_initialized():
        raise RunError(
            "this process has a Ray session already; end it with ray.shutdown(), or train in another process"
        )
    address = joined(config)
    nodes = config.num_nodes + config.env_nodes
    if nodes > 1 and not address:
        raise ConfigError(
            f"cluster.address: a run on {nodes} nodes joins a Ray cluster; start one (`ray start`, or "
            "examples/slurm/run.sbatch) and name it here or in RAY_ADDRESS"
        )
    where = (
        dict(address=address)
        if address
        # "local": without it Ray would join any cluster that happens to run on this machine.
        else dict(
            address="local",
            num_cpus=cores(config),
            num_gpus=config.gpus_per_node,
            include_dashboard=False,
            _node_ip_address=local_ray.LOOPBACK,
        )
    )
    with _scratch() as scratch:
        reaper = Reaper(scratch)
        try:
            with phase("Ray"):
                _connect(where)
            with local_ray.watched(lost) if lost and not address else contextlib.nullcontext():
                yield
        finally:
            _watched.clear()
            with _signals_kept():
                ray.shutdown()
            reaper.close()


@contextlib.contextmanager
def _scratch() -> Iterator[str]:
    """Make a folder for temporary files of the run's processes; some stay (vLLM's sockets) even after a clean exit.

    The reaper removes it. Ray's own files stay where Ray keeps them. The folder is also the home directory if the user
    has none: Ray does not start without one, and libraries keep caches there.
    """
    before = {name: os.environ.get(name) for name in ("TMPDIR", "RAY_TMPDIR", "HOME", "HF_HOME")}
    # Short, because it holds Unix sockets, whose paths are limited to 107 characters.
    folder = tempfile.mkdtemp(prefix="gdpo-")
    os.environ["RAY_TMPDIR"] = before["RAY_TMPDIR"] or tempfile.gettempdir()
    os.environ["TMPDIR"] = folder
    _set_home(folder)
    try:
        yield folder
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def _set_home(folder: str) -> None:
    """Have ``folder`` for a home directory if the user's is missing or cannot be written. Models are still found."""
    home = os.path.expanduser("~")
    if os.path.isabs(home) and os.access(home, os.W_OK):
        return
    os.environ["HOME"] = folder
    models = os.path.join(home, ".cache", "huggingface")
    if os.path.isabs(home) and os.path.isdir(models):
        os.environ.setdefault("HF_HOME", models)


def _connect(where: dict[str, Any]) -> None:
    if where["address"] == "local":
        local_ray.start(lambda: _initialize(where))
        return
    try:
        _initialize(where)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InfrastructureFailed(
            f"cluster.address: no Ray cluster to join at {where['address']} ({message_line(error)})"
        ) from error


def _initialize(where: dict[str, Any]) -> None:
    try:
        with hangups_held(), _signals_kept():
            ray.init(log_to_driver=False, logging_level="ERROR", **where)
    except SystemExit as end:
        if end.code == signal.SIGTERM:  # Ray's handler exits with the bare number, 15; shells expect 143
            raise SystemExit(128 + signal.SIGTERM) from None
        raise


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the handlers of SIGTERM and SIGINT after the block: Ray replaces them at its start and resets them at its
    end."""
    names = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    before = [signal.getsignal(name) for name in names]
    try:
        yield
    finally:
        for name, handler in zip(names, before):
            signal.signal(name, handler)


_watched: dict[str, str] = {}
"""Nodes of a joined cluster that this session uses: Ray's id -> address."""


def watch_nodes(nodes: dict[str, str]) -> None:
    """End every later wait when one of these nodes (Ray's id -> address) is lost."""
    _watched.update(nodes)


def _check_nodes(what: str, patience_s: float = 0.0) -> None:
    """Raise RunError if a watched node is gone, or is declared dead within ``patience_s``."""
    deadline = time.monotonic() + patience_s
    while _watched:
        lost = _watched.keys() - {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        if lost:
            names = ", ".join(sorted(_watched[node] for node in lost))
            raise InfrastructureFailed(f"{what}: node {names} is no longer in the cluster{START_AGAIN}")
        if time.monotonic() >= deadline:
            return
        time.sleep(_POLL_S)


def thread_environment(threads: int) -> dict[str, str]:
    """Variables that give a process ``threads`` compute threads that sleep while they wait.

    OpenMP threads spin by default; with several ranks a node they would take the cores from the one that computes.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONWARNINGS": "ignore",
    }


def gather(refs: Sequence[ray.ObjectRef], what: str, timeout_s: float, owner: str = "workers") -> list[Any]:
    """Wait for all ``refs`` of ``owner`` and return their results in order; the first failure ends the wait at once.

    Raises:
        RunError: a worker died or the deadline passed; an exception of ours inside a worker is raised as itself.
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
    return ray.get(list(refs))


def answered(refs: dict[int, ray.ObjectRef]) -> dict[int, Any]:
    """The results that have arrived; does not wait, and does not start a Ray session."""
    if not ray.is_initialized():
        return {}
    done = set(ray.wait(list(refs.values()), num_returns=len(refs), timeout=0)[0]) if refs else set()
    found = {}
    for key, ref in refs.items():
        if ref in done:
            with contextlib.suppress(RayError):  # a dead worker has no location
                found[key] = ray.get(ref)
    return found


def _raise_failure(ref: ray.ObjectRef, what: str) -> None:
    try:
        ray.get(ref)
    except RayError as error:
        if isinstance(error, _GONE):
            # A connection breaks before Ray declares its node dead. Wait for that, to name the node and not a worker.
            _check_nodes(what, _NODE_LOSS_S if isinstance(error, ActorUnavailableError) else 0.0)
        raise _failure(error, what) from (None if _of_ours(error) else error)


async def answer(ref: ray.ObjectRef, what: str, timeout_s: float) -> Any:
    """The result of one call, for the event loop; unlike ``gather`` it does not look at nodes.

    Raises:
        WorkerDied: the worker died or cannot be reached. WaitExpired: no answer in time. RunError: as of ``gather``.
    """
    future = asyncio.wrap_future(ref.future())
    if not await _answered_within(future, timeout_s):
        raise WaitExpired(f"{what}: no answer within {timeout_s:.0f} s")
    try:
        return future.result()
    except RayError as error:
        raise _failure(error, what) from (None if _of_ours(error) else error)


async def _answered_within(future: asyncio.Future[Any], timeout_s: float) -> bool:
    deadline = running.now() + timeout_s
    while True:
        left = deadline - running.now()
        # Not wait_for: it would cancel the future that Ray still fills. In turns: the loop's timers count the time for
        # which this process was stopped.
        done, _ = await asyncio.wait([future], timeout=max(0.0, min(left, _POLL_S)))
        if done or left <= 0:
            return bool(done)


_GONE = (ActorDiedError, ActorUnavailableError)


def one_has_ended(refs: Sequence[ray.ObjectRef], patience_s: float) -> bool:
    """Whether the process behind one of these calls has ended, or does so within that time."""
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


def _of_ours(error: RayError) -> bool:
    return isinstance(error, RayTaskError) and isinstance(error.cause, GdpoError)


def _failure(error: RayError, what: str) -> GdpoError:
    """What a failed call raises here: an exception of ours as itself, any other as a sentence."""
    if isinstance(error, _GONE):
        return WorkerDied(f"{what}: a worker process died ({message_line(error)})")
    if isinstance(error, RayTaskError):
        cause = error.cause if isinstance(error.cause, BaseException) else error
        if isinstance(cause, EngineFailed):
            return WorkerDied(f"{what}: {cause}")
        if isinstance(cause, GdpoError):
            return cause
        sentence = f"{what}: {type(cause).__name__}: {message_line(cause)}"
        return InfrastructureFailed(sentence) if _of_the_network(cause) else RunError(sentence)
    return InfrastructureFailed(f"{what}: {message_line(error)}")


def _of_the_network(cause: BaseException) -> bool:
    """Whether a process tells of its peers and not of itself: where a rank dies, the others may be heard first."""
    kind = type(cause)
    text = str(cause)
    return kind.__module__.startswith("torch") and kind.__name__.startswith("Dist") or "gloo" in text or "NCCL" in text


class WorkerDied(InfrastructureFailed):
    """A worker process died, or is of no use any more; the caller replaces it where it can."""


def log_folder() -> Path | None:
    """The folder of this session's worker logs; None without a session."""
    # Ray has no public call for this folder.
    return Path(ray._private.worker._global_node.get_logs_dir_path()) if ray.is_initialized() else None


def keep_logs(run_dir: Path) -> Path | None:
    """Copy the worker logs of this session into ``logs/`` of the run; returns that folder, or None if there are
    none."""
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
