"""Run as a program: what vLLM's CUDA platform makes of an engine's arguments, on a machine without a GPU.

``cuda_platform.py OUT``: for every tiny model of ``tiny_models``, what vLLM decided goes to OUT, JSON. vLLM's own code
decides. In place of what the CPU build lacks there are: an NVML that knows one H100, and empty modules for the C
extensions, of which nothing is called but the questions whether a kernel exists.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXTENSIONS = ("_C_stable_libtorch", "vllm_flash_attn._vllm_fa2_C", "vllm_flash_attn._vllm_fa3_C")
H100 = {
    "nvmlInit": lambda: None,
    "nvmlShutdown": lambda: None,
    "nvmlDeviceGetCount": lambda: 1,
    "nvmlDeviceGetHandleByIndex": lambda index: index,
    "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
    "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(total=80 << 30, free=79 << 30, used=1 << 30),
    "nvmlDeviceGetName": lambda handle: "NVIDIA H100 80GB HBM3",
}


def use_cuda_platform() -> None:
    """Make CUDA the platform of vLLM in this process."""
    from vllm.third_party import pynvml

    for name, function in H100.items():
        setattr(pynvml, name, function)
    for name in EXTENSIONS:
        module = types.ModuleType(f"vllm.{name}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
    from vllm import platforms
    from vllm.platforms.cuda import CudaPlatform

    platforms._current_platform = CudaPlatform()
    import vllm._custom_ops as ops
    from vllm.device_allocator import cumem

    for name in ("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8",
                 "cutlass_scaled_mm_supports_fp4", "cutlass_group_gemm_supported"):  # fmt: skip
        assert hasattr(ops, name), name
        setattr(ops, name, lambda capability: True)
    cumem.cumem_available = True


def arguments_of(folder: Path) -> dict[str, Any]:
    """The arguments that an engine on a GPU gives to ``vllm.LLM``."""
    import vllm

    from gdpo_nemo.config.schema import VllmConfig
    from gdpo_nemo.generation.vllm_core import EngineOptions, VllmCore

    given: dict[str, Any] = {}

    class Asked(Exception):
        pass

    def ask(**arguments: Any) -> None:
        given.update(arguments)
        raise Asked

    vllm.LLM = ask
    try:
        VllmCore(EngineOptions(str(folder), VllmConfig(), "bfloat16", 128, 0, on_cpu=False, sleeps=True))
    except Asked:
        return given
    raise AssertionError("VllmCore did not start vLLM")


def decided(folder: Path) -> dict[str, Any]:
    """vLLM's decisions for the model in a folder."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.attention.selector import get_attn_backend

    config = EngineArgs(**arguments_of(folder), skip_tokenizer_init=True).create_engine_config(UsageContext.LLM_CLASS)
    model = config.model_config
    with set_current_vllm_config(config):
        attention = get_attn_backend(model.get_head_size(), model.dtype, config.cache_config.cache_dtype)
    return {
        "device": config.device_config.device_type,
        "attention": attention.get_name(),
        "graphs": config.compilation_config.cudagraph_mode.name,
        "sizes": len(config.compilation_config.cudagraph_capture_sizes),
        "chunked prefill": config.scheduler_config.enable_chunked_prefill,
        "asynchronous scheduling": config.scheduler_config.async_scheduling,
        "prefix cache": config.cache_config.enable_prefix_caching,
        "sleep": model.enable_sleep_mode,
        "head": str(model.head_dtype),
        "executor": str(config.parallel_config.distributed_executor_backend),
        "transfer": config.weight_transfer_config.backend,
    }


def main(out: str) -> None:
    """See the top of the file."""
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "megatron")]
    import tiny_models
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from gdpo_nemo.generation.vllm_core import _register_model

    use_cuda_platform()
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in tiny_models.MODELS:
            folder = Path(scratch) / name
            config = tiny_models.hf_config(name)
            config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
            config.save_pretrained(folder)
            _register_model(str(folder))  # or vLLM would look at each class in a process of its own
            found[name] = {**decided(folder), "family": config.model_type}
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
