"""FlexAttention with shared prompts, without a GPU: ``flex_attention.py exact`` compiles the forward pass for this CPU
and compares it with SDPA; ``flex_attention.py sm90 [HEADS GROUPS SIZE]`` generates the Triton kernels for an H100 and
compiles them.

``sm90`` replaces parts of torch.cuda and of inductor, which would ask a driver. Its tensors are fake.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1] / "megatron")]
HEADS, GROUPS, SIZE = 12, 2, 128  # Qwen2.5-1.5B


def exact() -> None:
    """Packs of many lengths, with and without context parallelism, and how often torch compiled."""
    from torch._dynamo.utils import counters
    from torch.nn.attention.flex_attention import flex_attention

    from gdpo_nemo.megatron.flex_attention import block_mask, mask_arrays

    compiled: Any = torch.compile(flex_attention, dynamic=True)
    draw = np.random.default_rng(0)
    torch.manual_seed(0)
    worst, packs = 0.0, 0
    for ranks in (1, 2) * 8:
        lengths = (4 * draw.integers(1, 40, draw.integers(2, 9))).tolist()
        shared = [0, *(int(draw.integers(0, length + 1)) for length in lengths[:-1])]
        arrays = {k: torch.from_numpy(v.copy()) for k, v in mask_arrays(lengths, shared, ranks - 1, ranks).items()}
        mask = block_mask(arrays)
        rows, keys = (torch.arange(n) for n in mask.shape[-2:])
        query = torch.randn(1, HEADS, len(rows), SIZE)
        key, value = torch.randn(2, 1, GROUPS, len(keys), SIZE).unbind()
        dense = mask.mask_mod(None, None, rows[:, None], keys[None])
        with torch.no_grad():
            ours = compiled(query, key, value, block_mask=mask, enable_gqa=True)
        sdpa = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=dense, enable_gqa=True)
        worst, packs = max(worst, float((ours - sdpa).abs().max())), packs + 1
    print(f"{packs} packs, {counters['stats']['unique_graphs']} graphs, largest difference from SDPA {worst:.1e}")


def sm90(heads: int = HEADS, groups: int = GROUPS, size: int = SIZE) -> None:
    """Registers, stack and instructions of the kernels of the forward and the backward pass."""
    sources: list[str] = []
    mode = _pretend_h100(sources)
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.nn.attention.flex_attention import flex_attention

    from gdpo_nemo.megatron.flex_attention import block_mask, kernel_options, mask_arrays

    hop: Any = sys.modules["torch._higher_order_ops.flex_attention"]
    lengths, shared = [2048] + [256] * 8, [0] + [1024] * 8
    tokens = sum(lengths)
    index = [torch.empty((), dtype=torch.bfloat16, requires_grad=True), *torch.zeros(4, dtype=torch.int32)]
    forward, joint = hop.create_fw_bw_graph(lambda score, *_: score, tuple(index), ())
    with mode:
        arrays = {k: torch.from_numpy(v.copy()).cuda() for k, v in mask_arrays(lengths, shared, 0, 1).items()}
        mask = block_mask(arrays)
        query, out, grad = (torch.empty(1, heads, tokens, size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        key, value = (torch.empty(1, groups, tokens, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        lse, grad_lse = (torch.empty(1, heads, tokens, device="cuda") for _ in range(2))
        chosen = dict(block_mask=mask, enable_gqa=True, kernel_options=kernel_options(size))
        _generate(lambda: torch.compile(flex_attention, dynamic=True)(query, key, value, **chosen))
        fields = mask.as_tuple()[:-1]
        blocks = [field for field in fields if isinstance(field, torch.Tensor)]

        def attends(b, h, q, k, rows, ends):
            row = rows[q]
            return (k <= row) & (row < ends[k])

        def backward(query, key, value, out, lse, grad, grad_lse, rows, ends, *blocks):
            left = iter(blocks)
            tuple_ = (*(next(left) if isinstance(field, torch.Tensor) else field for field in fields), attends)
            options = dict(BACKEND="AUTO", PRESCALE_QK=False, ROWS_GUARANTEED_SAFE=False, BLOCKS_ARE_CONTIGUOUS=False,
                           WRITE_DQ=True, OUTPUT_LOGSUMEXP=True, OUTPUT_MAX=False)  # fmt: skip
            return hop.flex_attention_backward(query, key, value, out, lse, grad, grad_lse, forward, joint, tuple_,
                                               size**-0.5, options, (), (rows, ends))[:3]  # fmt: skip

        inputs = [query, key, value, out, lse, grad, grad_lse, arrays["mask.rows"], arrays["mask.ends"], *blocks]
        graph = make_fx(backward, tracing_mode="fake")(*inputs)
        with torch.no_grad():
            _generate(lambda: compile_fx(graph, inputs)(*inputs))
    for source in sources:
        _compile(source)


class _GeneratedError(Exception):
    """Raised instead of running a generated kernel."""


def _generate(call: Any) -> None:
    with contextlib.suppress(_GeneratedError):
        call()


def _pretend_h100(sources: list[str]) -> Any:
    """Return the mode of fake tensors of an H100 whose generated code is appended to ``sources`` and not run."""
    import fake_cuda
    import torch._inductor.fx_passes.joint_graph
    import torch._inductor.fx_passes.post_grad
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config, graph
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    mode = fake_cuda.install()
    h100 = SimpleNamespace(
        name="H100", major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536, warp_size=32,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, total_memory=80 << 30, gcnArchName="",
        shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, L2_cache_size=50 << 20,
    )  # fmt: skip
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda *_: h100
    cuda.is_initialized = lambda: True
    cuda._exchange_device = lambda *_: 0
    cuda._maybe_exchange_device = lambda *_: 0
    interface: Any = CudaInterface
    for name, found in dict(get_device_properties=h100, is_available=True, is_triton_capable=True, current_device=0,
                            raise_if_triton_unavailable=None, get_compute_capability=90).items():  # fmt: skip
        setattr(interface, name, staticmethod(lambda *_, found=found: found))
    interface.Worker.get_device_properties = staticmethod(lambda *_: h100)
    limits = dict(max_shared_mem=232448, multiprocessor_count=132, warpSize=32, max_num_regs=65536)
    driver.set_active(
        SimpleNamespace(
            utils=SimpleNamespace(get_device_properties=lambda *_: limits),
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda *_: 0,
            get_device_interface=lambda: torch.cuda,
        )
    )
    for passes in (torch._inductor.fx_passes.joint_graph, torch._inductor.fx_passes.post_grad):
        passes.lazy_init = lambda *_, **__: None  # patterns of SDPA, whose examples would be real tensors
    config.force_disable_caches = True

    def module(self: Any, code: Any) -> Any:
        def call(_: Any) -> None:
            raise _GeneratedError

        sources.append(code.value)
        return SimpleNamespace(call=call, __file__="none", key="", recursively_apply_fns=None, runner=None)

    graph.GraphLowering._compile_to_module_lines = module
    return mode


def _compile(source: str) -> None:
    """Compile the kernel from the template of FlexAttention, and print what its machine code needs."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for name, code in re.findall(r"async_compile\.triton\('(triton_tem\w+)', '''(.*?)''', device_str", source, re.S):
        settings, body = code.replace("\\'", "'").split("@triton.jit", 1)
        signature = eval(re.search(r"'signature': (\{.*?\})", settings)[1])  # noqa: S307 - inductor's text
        warps, stages = (int(re.search(rf"{key}=(\d+)", settings)[1]) for key in ("num_warps", "num_stages"))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{name}.py"
            file.write_text("import triton, triton.language as tl\nfrom torch._inductor.runtime.triton_helpers import "
                            "libdevice, math as tl_math\nfrom torch._inductor.runtime import triton_helpers\n"
                            f"@triton.jit{body}")  # fmt: skip
            spec = importlib.util.spec_from_file_location(name, file)
            generated = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(generated)
            aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
            kernel = triton.compile(
                ASTSource(getattr(generated, name), signature, constexprs={}, attrs=aligned),
                target=GPUTarget("cuda", 90, 32),
                options=dict(num_warps=warps, num_stages=stages),
            )
            cubin = Path(folder) / "cubin"
            cubin.write_bytes(kernel.asm["cubin"])
            tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
            usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
        registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
        counts = {text: kernel.asm["ptx"].count(text) for text in ("wgmma.mma_async", "cp.async.c", "mma.sync")}
        print(f"{name}: {warps} warps, {stages} stages, {kernel.metadata.shared} bytes of shared memory, {registers} "
              f"registers, {stack} bytes of stack, {counts}")  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:] == ["exact"]:
        exact()
    elif sys.argv[1:2] == ["sm90"] and len(sys.argv) in (2, 5):
        sm90(*map(int, sys.argv[2:]))
    else:
        sys.exit(__doc__)
