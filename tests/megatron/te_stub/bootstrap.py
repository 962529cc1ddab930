"""TransformerEngine's real Python over ``extension``, for a process of its own: megatron-core asks at its import
whether there is TransformerEngine."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from te_stub import extension, permutation

from gdpo_nemo.megatron.cpu_shim import _Loader

_NOT_CALLED = ("onnx", "onnxscript", "nvdlfw_inspect", "einops")
"""Dependencies of its export and debugging tools, which it imports and a policy never calls."""
_PYTHON = "transformer_engine.pytorch"


class _Finder(importlib.abc.MetaPathFinder):
    """Turns ``torch.cuda.X`` into ``torch.cpu.X`` in TransformerEngine's functions, as ``cpu_shim`` does in
    Megatron's."""

    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith(_PYTHON):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _OnCpu(spec.loader.name, spec.loader.path)
        return spec


class _OnCpu(_Loader):
    def get_code(self, fullname):
        return _asking_for_cpu_tensors(super().get_code(fullname))


def _asking_for_cpu_tensors(code: types.CodeType) -> types.CodeType:
    inner = tuple(_asking_for_cpu_tensors(c) if isinstance(c, types.CodeType) else c for c in code.co_consts)
    names = tuple("is_cpu" if name == "is_cuda" else name for name in code.co_names)
    return code.replace(co_consts=inner, co_names=names)


def install(folder: str | Path) -> None:
    """Make ``transformer_engine`` importable from ``folder``, where its wheel was unpacked. Before megatron.core."""
    sys.path.append(str(folder))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # so that it loads no CUDA libraries, which a CPU build of torch lacks
    os.environ["NVTE_TORCH_COMPILE"] = "0"
    os.environ["NVTE_MASKED_SOFTMAX_FUSION"] = "0"
    sys.meta_path.insert(0, _Finder())
    _complete_torch_cpu()
    absent = [name for name in _NOT_CALLED if importlib.util.find_spec(name) is None]
    for name in absent:
        sys.modules[name] = MagicMock(name=name, __spec__=ModuleSpec(name, None))
    # Its package loads the extension at import; so patch that below a bare package of the same name, and drop this one.
    bare = types.ModuleType("transformer_engine")
    bare.__path__ = [str(Path(folder) / "transformer_engine")]
    sys.modules["transformer_engine"] = bare
    common: Any = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = _load
    del sys.modules["transformer_engine"]
    engine: Any = importlib.import_module("transformer_engine")
    engine.common = common
    engine.pytorch = importlib.import_module(_PYTHON)
    _use_one_device()
    _use_torch_for_experts()
    for name in absent:  # nobody else is to find them
        del sys.modules[name]


def _complete_torch_cpu() -> None:
    """What TransformerEngine asks torch.cuda and torch.cpu lacks, as of one H100."""
    cpu: Any = torch.cpu
    version: Any = torch.version
    version.cpu = "13.0"
    properties = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="NVIDIA H100 80GB HBM3")
    cpu.get_device_properties = lambda device=None: properties
    cpu.get_device_capability = lambda device=None: (9, 0)
    cpu.nvtx = MagicMock(name="torch.cuda.nvtx")
    cpu.is_current_stream_capturing = lambda: False
    cpu.get_rng_state = torch.get_rng_state


def _use_one_device() -> None:
    """The CPU has no index."""
    from transformer_engine.pytorch import utils

    def canonicalize_device(device):
        return torch.device("cpu")

    # Its code, since other modules hold the function.
    utils.canonicalize_device.__code__ = canonicalize_device.__code__


def _use_torch_for_experts() -> None:
    from transformer_engine.pytorch import permutation as stock

    for name, function in vars(permutation).items():
        if name.startswith("moe_"):
            setattr(stock, name, function)


def _load(framework: str) -> None:
    sys.modules[f"transformer_engine_{framework}"] = extension
