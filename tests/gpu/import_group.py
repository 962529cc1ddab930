"""Import what a run on GPUs imports, on a machine without NVIDIA's driver.

    uv sync --no-default-groups --group gpu && uv run --no-sync python tests/gpu/import_group.py

Libraries of vLLM and TransformerEngine are linked with libcuda.so.1, a part of the driver. The script compiles a
libcuda.so.1 whose functions report that there is no device. Then it imports the modules that `gdpo-nemo doctor
--environment` imports on GPUs, and vLLM's extensions. It prints a line for each module that fails. The exit status is
1 if any fails. Requires a C compiler and nm.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from gdpo_nemo.observe import installation

_LINKED = ("vllm", "transformer_engine")
"""Packages with libraries that are linked with libcuda.so.1."""
_EXTENSIONS = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "cumem_allocator", "vllm_flash_attn._vllm_fa2_C")
"""vLLM's extensions that runs use. vLLM only prints a warning if their import fails."""
_NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE"""


def functions(libraries: Iterable[Path]) -> list[str]:
    """Return the functions of CUDA's driver that the libraries import, sorted by name."""
    listed = subprocess.run(
        ["nm", "--dynamic", "--undefined-only", *libraries], check=True, stdout=subprocess.PIPE, text=True
    )
    return sorted(set(re.findall(r"\bU (cu[A-Z]\w+)$", listed.stdout, re.M)))


def source(names: Iterable[str]) -> str:
    """Return the C source of a library in which every function reports that there is no device."""
    return "".join(f"int {name}(void) {{ return {_NO_DEVICE}; }}\n" for name in names)


def compile_stub(names: Iterable[str], folder: Path) -> Path:
    """Compile libcuda.so.1 with these functions into a folder."""
    library = folder / "libcuda.so.1"
    command = [
        os.environ.get("CC", "cc"),
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        "-x",
        "c",
        "-o",
        library,
        "-",
    ]
    subprocess.run(command, input=source(names), check=True, text=True)
    return library


def main() -> int:
    """Compile the stub, import the modules and print the result."""
    specs = [importlib.util.find_spec(package) for package in _LINKED]
    missing = [package for package, spec in zip(_LINKED, specs) if spec is None]
    if missing:
        print(f"{' and '.join(missing)}: not installed; see docs/installation.md", file=sys.stderr)
        return 2
    folders = [Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations or ()]
    names = functions(path for folder in folders for path in folder.rglob("*.so"))
    with tempfile.TemporaryDirectory() as scratch:
        compile_stub(names, Path(scratch))
        print(f"libcuda.so.1: {len(names)} functions", flush=True)
        os.environ["LD_LIBRARY_PATH"] = f"{scratch}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        extensions = [f"vllm.{name}" for name in _EXTENSIONS]
        return installation.print_checks(installation.check_imports(on_gpu=True, more=extensions))


if __name__ == "__main__":
    sys.exit(main())
