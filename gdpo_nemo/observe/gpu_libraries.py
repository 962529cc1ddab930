"""What training on GPUs takes besides torch and vLLM: TransformerEngine, FlashInfer, NCCL.

Found without importing them and without a GPU; the standard library alone."""

from __future__ import annotations

import importlib.util
import os
import shutil
import site
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_CORE = "transformer-engine"
_BINDINGS = "transformer-engine-torch"
_KERNELS = ("transformer-engine-cu13", "transformer-engine-cu12")
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_HOW = "docs/installation.md says how"
_CUDA_HOME = "/usr/local/cuda"
_IMPORT_S = 600.0


@dataclass(frozen=True)
class Finding:
    """What was seen of a library; ``usable`` is None where runs do without it."""

    usable: bool | None
    text: str


def version(package: str) -> str | None:
    """Of an installed package; None: it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def transformer_engine(on_gpu: bool) -> Finding:
    """Whether the policy can take TransformerEngine's layers; with ``on_gpu`` it is imported, in another process."""
    core = version(_CORE)
    if core is None:
        return Finding(None, "not installed: on GPUs the policy takes Megatron's own layers, which are slower")
    found = {package: version(package) for package in (_CORE, *_KERNELS, _BINDINGS)}
    there = {package: number for package, number in found.items() if number}
    if _BINDINGS not in there:
        missing = missing_for_build()
        why = f"its build lacks {', '.join(missing)}; " if missing else "its build finds what it needs; "
        return Finding(False, f"{_CORE} {core} without {_BINDINGS}: {why}{_HOW}")
    if not any(package in there for package in _KERNELS):
        return Finding(False, f"{_CORE} {core} without its kernels, {' or '.join(_KERNELS)}; {_HOW}")
    names = ", ".join(f"{package} {number}" for package, number in there.items())
    if len(set(there.values())) > 1:
        return Finding(False, f"versions differ: {names}; install one for all")
    error = _import_error("transformer_engine.pytorch") if on_gpu else None
    return Finding(False, f"{_CORE} {core} does not import: {error}") if error else Finding(True, names)


def missing_for_build() -> list[str]:
    """What the build of TransformerEngine's torch bindings lacks on this machine."""
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
    absent = [name for name in headers if not any((folder / name).is_file() for folder in folders)]
    return [*missing, *(f"{name} ({headers[name]})" for name in absent)]


def _include_folders() -> list[Path]:
    """Where the build looks: the CUDA toolkit, the compiler's own folders, and the wheels of NVIDIA."""
    homes = [os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or _CUDA_HOME]
    given = [path for name in ("CPATH", "CPLUS_INCLUDE_PATH") for path in os.environ.get(name, "").split(":") if path]
    system = ["/usr/include", "/usr/local/include"]
    system += [f"/usr/include/{machine}-linux-gnu" for machine in ("x86_64", "aarch64")]
    wheels = [folder for place in _packages() for folder in (place / "nvidia").glob("*/include")]
    return [*(Path(home) / "include" for home in homes), *map(Path, [*given, *system]), *wheels]


def _packages() -> list[Path]:
    return [Path(sysconfig.get_paths()["purelib"]), *map(Path, site.getsitepackages())]


def _import_error(module: str) -> str | None:
    """The last line of what importing a module in a fresh process says; None: it imports."""
    command = [sys.executable, "-W", "ignore", "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_S)
    except subprocess.TimeoutExpired:
        return f"no answer within {_IMPORT_S:.0f} s"
    lines = done.stderr.strip().splitlines()
    return (lines[-1] if lines else f"status {done.returncode}") if done.returncode else None


def flashinfer() -> Finding:
    """Whether vLLM can use FlashInfer, whose kernels are compiled when they are first used: vLLM looks for the same."""
    installed = version("flashinfer-python")
    if installed is None:
        return Finding(None, "not installed: vLLM does without it")
    if importlib.util.find_spec("flashinfer_cubin"):
        return Finding(True, f"flashinfer-python {installed}, with compiled kernels")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which(os.path.join(home, "bin", "nvcc")) if home else shutil.which("nvcc")
    if not home and not nvcc:
        nvcc = shutil.which(os.path.join(_CUDA_HOME, "bin", "nvcc"))
    lacking = [name for name, path in (("nvcc", nvcc), ("ninja", shutil.which("ninja"))) if not path]
    if lacking:
        where = f" (CUDA_HOME is {home})" if home and not nvcc else ""
        wheel = next((path for p in _packages() for path in (p / "nvidia").glob("cu*/bin/nvcc")), None)
        hint = f"; CUDA_HOME={wheel.parents[1]} has one" if wheel and not nvcc else ""
        what = f"flashinfer-python {installed} compiles its kernels and finds no {' and no '.join(lacking)}{where}"
        return Finding(None, f"{what}: vLLM does without it{hint}")
    return Finding(True, f"flashinfer-python {installed}, compiles its kernels with {nvcc}")


def nccl(loaded: str | None) -> Finding:
    """Whether torch finds the NCCL that was installed with it; ``loaded`` is the version that torch reports."""
    installed = next((number for package in _NCCL if (number := version(package))), None)
    if loaded is None:
        return Finding(None, f"{installed or 'no package'} is installed; without a GPU torch loads none")
    if installed and not installed.startswith(loaded):
        paths = [p for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p and list(Path(p).glob("libnccl.so*"))]
        where = f", from LD_LIBRARY_PATH {paths[0]}" if paths else ""
        return Finding(False, f"torch loads {loaded}{where}, but {installed} was installed with it")
    return Finding(True, f"torch loads {loaded}")
