"""Run as a program: what vLLM's CUDA platform makes of an engine's arguments, on a machine without a GPU.

``cuda_platform.py OUT``: for every tiny model of ``tiny_models``, what vLLM decided goes to OUT, JSON, and for every
mixture, how its weights were reloaded. vLLM's own code decides and loads. In place of what the CPU build lacks there
are: an NVML that knows one H100, and empty modules for the C extensions, of which nothing is called but the questions
whether a kernel exists.
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

    CudaPlatform.num_compute_units = classmethod(lambda platform, device_id=0: 132)
    platforms._current_platform = CudaPlatform()
    import vllm._custom_ops as ops
    from vllm.device_allocator import cumem
    from vllm.triton_utils import triton

    # vLLM reads the configurations of Mamba kernels when it is imported, and its Triton without a GPU is empty.
    triton.Config = lambda kwargs, **options: types.SimpleNamespace(kwargs=kwargs, **options)
    for name in ("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8",
                 "cutlass_scaled_mm_supports_fp4", "cutlass_group_gemm_supported"):  # fmt: skip
        assert hasattr(ops, name), name
        setattr(ops, name, lambda capability: True)
    cumem.cumem_available = True
    from vllm.model_executor.layers import sparse_attn_indexer

    sparse_attn_indexer.has_deep_gemm = lambda: True  # asked for, and not called


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


def engine_config(folder: Path) -> Any:
    """vLLM's config of an engine."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    return EngineArgs(**arguments_of(folder), skip_tokenizer_init=True).create_engine_config(UsageContext.LLM_CLASS)


def decided(folder: Path) -> dict[str, Any]:
    """vLLM's decisions for the model in a folder."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend
    from vllm.v1.sample.ops.topk_topp_sampler import flashinfer_sampler_supported

    config = engine_config(folder)
    model = config.model_config
    with set_current_vllm_config(config):
        cache = config.cache_config.cache_dtype
        sparse = hasattr(model.hf_config, "index_topk")
        size = model.get_head_size()
        attention = get_attn_backend(size, model.dtype, cache, use_mla=model.use_mla, use_sparse=sparse)
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
        "FlashInfer's sampler": flashinfer_sampler_supported(),
    }


def reloaded(folder: Path) -> dict[str, Any]:
    """Reload CPU tensors by vLLM's usual way and with ``experts_loaded_together``. Return the tensor operations, the
    CPU seconds, and whether all parameters are equal and kept their memory."""
    import time
    from contextlib import nullcontext
    from unittest.mock import patch

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from vllm.config import CompilationMode, set_current_vllm_config
    from vllm.model_executor.model_loader.reload.layerwise import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype

    from gdpo_nemo.models.hf_folder import open_weights, weight_names
    from gdpo_nemo.weights import vllm_receiver

    class Operations(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            self.count += not function.is_view
            return function(*arguments, **(named or {}))

    read = open_weights(str(folder))
    weights = [(name, read(name).bfloat16()) for name in weight_names(str(folder))]
    config = engine_config(folder)
    config.compilation_config.mode = CompilationMode.NONE  # the CPU build lacks the kernels that fusions ask for
    found: dict[str, Any] = {"tensors": len(weights)}
    with set_current_vllm_config(config):
        # Sparse attention creates a tensor on the platform's device.
        on_cpu = patch.object(type(current_platform), "device_type", "cpu")
        with set_default_torch_dtype(torch.bfloat16), on_cpu:
            model = initialize_model(config, model_config=config.model_config)
        record_metadata_for_reloading(model)
        together = getattr(vllm_receiver, "experts_loaded_together", nullcontext)  # older checkouts have none
        ways = {"usual": nullcontext(), "together": together(model)}
        memory = [{name: p.data_ptr() for name, p in model.named_parameters()}]
        loaded = []
        for name, way in ways.items():
            for p in model.parameters():
                p.data.zero_()
            vllm_receiver.name_loaders(model)
            initialize_layerwise_reload(model)
            start = time.process_time()
            with Operations() as operations, way:
                model.load_weights(iter(weights))
            found[name] = {"operations": operations.count, "cpu_s": time.process_time() - start}
            finalize_layerwise_reload(model, config.model_config)
            loaded.append([p.detach().clone() for p in model.parameters()])
            memory.append({name: p.data_ptr() for name, p in model.named_parameters()})
        found["equal"] = all(map(torch.equal, *loaded)) and all(bool(p.any()) for p in loaded[0])
        # Latent attention gets further parameters when it is loaded for the first time.
        found["memory kept"] = all(before.items() <= after.items() for before, after in zip(memory, memory[1:]))
    return found


def join_group(scratch: str) -> None:
    """Make this process the only one of vLLM's groups."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform

    # The kernels' own layout of the experts is made by a CUDA kernel.
    UnquantizedFusedMoEMethod.process_weights_after_loading = lambda self, layer: None
    # Gated delta nets create a tensor on this device.
    type(current_platform).current_device = staticmethod(lambda: "cpu")
    for name in ("silu_and_mul", "relu_squared"):  # looked up, and not called
        torch.library.define(f"_C::{name}", "(Tensor(a!) out, Tensor input) -> ()")
    store = f"file://{scratch}/store"
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, store, 0, backend="gloo")
        parallel_state.initialize_model_parallel(1, 1, backend="gloo")
    torch.manual_seed(0)


def published_heads(name: str) -> dict[str, int]:
    """Return the head sizes for which vLLM has kernels of latent attention and of Gemma 4, or nothing for others."""
    import tiny_models

    fields = tiny_models.MODELS[name]
    if "global_head_dim" in fields:
        return dict(head_dim=256, global_head_dim=512)
    sizes = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    return sizes if "kv_lora_rank" in fields else {}


def main(out: str) -> None:
    """See the top of the file."""
    os.environ["VLLM_DISABLE_SHARED_EXPERTS_STREAM"] = "1"  # a stream needs a GPU
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "megatron"), str(ROOT / "tests" / "models")]
    from gdpo_nemo.generation.engine import ENVIRONMENT

    os.environ |= ENVIRONMENT
    import tiny_models
    import tiny_vision
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from gdpo_nemo.generation.vllm_core import _register_model

    use_cuda_platform()
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in tiny_models.MODELS:
            folder = Path(scratch) / name
            config = tiny_models.hf_config(name, **published_heads(name))
            config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
            config.save_pretrained(folder)
            _register_model(str(folder))  # or vLLM would look at each class in a process of its own
            found[name] = {**decided(folder), "family": config.model_type}
        for name in tiny_vision.KINDS:
            folder = tiny_vision.write_tiny_vision(Path(scratch) / name, name)
            _register_model(str(folder))
            found[name] = {**decided(folder), "family": name}
        join_group(scratch)
        # vLLM's Gemma 4 imports fusions of kernels that the CPU build lacks.
        for name in (mixture for mixture in tiny_models.MIXTURES if mixture != "gemma4-moe"):
            folder = tiny_models.write_model(name, Path(scratch) / name, **published_heads(name))
            found[name]["reload"] = reloaded(folder)
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
