"""What can be known of the fused log-prob kernels on a GPU without one: they compile, fit, and are few."""

from __future__ import annotations

import subprocess
from pathlib import Path

import fused_cases
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
# ptxas wants the architecture's own features named (wgmma, tcgen05); shared memory of one block in bytes.
DEVICES = {
    80: ("ptxas", "sm_80", 163 << 10),
    90: ("ptxas", "sm_90a", 227 << 10),
    100: ("ptxas-blackwell", "sm_100a", 227 << 10),
}
POINTERS = dict(targets="*i64", results="*fp32", by_logprob="*fp32", by_entropy="*fp32", statistics="*fp32")


@pytest.fixture
def assembled(tmp_path, monkeypatch):
    """``assembled(kernel, capability, types, constants, warps, stages)``: (PTX, shared bytes, what ptxas says)."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def assemble(kernel, capability, types, constants, warps, stages):
        names = kernel.arg_names
        types = {**POINTERS, **types, **dict.fromkeys(constants, "constexpr"), "scale": "fp32"}
        signature = {name: types.get(name, "i32") for name in names}
        aligned = {
            (place,): [["tt.divisibility", 16]]
            for place, (name, kind) in enumerate(signature.items())
            if kind.startswith("*") or name == "stride"
        }
        values = {(names.index(name),): value for name, value in constants.items()}
        done = triton.compile(
            ASTSource(kernel, signature, values, aligned),
            target=GPUTarget("cuda", capability, 32),
            options=dict(num_warps=warps, num_stages=stages),
        )
        program, architecture, _ = DEVICES[capability]
        source = tmp_path / "kernel.ptx"
        source.write_text(done.asm["ptx"])
        ptxas = Path(triton.__path__[0]) / "backends/nvidia/bin" / program
        command = [ptxas, "-v", "--gpu-name", architecture, source, "-o", tmp_path / "kernel.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        return done.asm["ptx"], done.metadata.shared, said

    return assemble


@pytest.mark.slow
@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize("dtype, pointer", [(torch.bfloat16, "*bf16"), (torch.float32, "*fp32")])
def test_kernels_fit_the_registers_and_shared_memory_of_every_gpu(assembled, capability, dtype, pointer):
    from gdpo_nemo.megatron import logprob_kernels as kernels

    tile = kernels.tile_for(dtype, divmod(capability, 10))
    sizes = dict(M=tile.rows, N=tile.columns, K=tile.depth, GROUP=kernels.ROWS_AT_ONCE)
    inputs = dict(hidden=pointer, weight=pointer)
    for kernel, out, more in (
        (kernels.part_statistics, "*fp32", dict(TILES=kernels.TILES_PER_PART)),
        (kernels.logit_gradients, pointer, {}),
    ):
        constants = {**sizes, **more, "HIDDEN": 3584, "ENTROPY": True}
        ptx, shared, said = assembled(kernel, capability, {**inputs, "out": out}, constants, tile.warps, tile.stages)
        assert shared <= DEVICES[capability][2]
        assert "0 bytes spill stores, 0 bytes spill loads" in said
        if (capability, dtype) == (90, torch.bfloat16):
            assert "wgmma.mma_async" in ptx, "the only instruction that reaches Hopper's full rate"


@pytest.mark.slow
def test_kernels_compile_without_entropy_and_for_any_hidden_size(assembled):
    from gdpo_nemo.megatron import logprob_kernels as kernels

    tile = kernels.tile_for(torch.bfloat16, (9, 0))
    sizes = dict(M=tile.rows, N=tile.columns, K=tile.depth, GROUP=kernels.ROWS_AT_ONCE)
    types = dict(hidden="*bf16", weight="*bf16")
    for kernel, out, more in (
        (kernels.part_statistics, "*fp32", dict(TILES=kernels.TILES_PER_PART)),
        (kernels.logit_gradients, "*bf16", dict(by_entropy=None)),
    ):
        constants = {**sizes, **more, "HIDDEN": 100, "ENTROPY": False}
        _, shared, _ = assembled(kernel, 90, {**types, "out": out}, constants, tile.warps, tile.stages)
        assert shared <= DEVICES[90][2]


@pytest.mark.slow
@pytest.mark.parametrize("finish", [False, True])
def test_the_parts_are_combined_on_every_gpu(assembled, finish):
    from gdpo_nemo.megatron import logprob_kernels as kernels

    constants = dict(FINISH=finish, ENTROPY=True, M=kernels.ROWS_COMBINED)
    for capability in DEVICES:
        _, _, said = assembled(kernels.combine_parts, capability, {"out": "*fp32"}, constants, 4, 3)
        assert "0 bytes spill stores" in said


@pytest.mark.slow
def test_a_micro_batch_launches_a_twentieth_and_waits_for_nothing(on_ranks):
    """On meta tensors, which have no value to wait for: a host sync of either path would raise."""
    (found,) = on_ranks("TP1", fused_cases.launches)
    for model in ("1.5b", "7b"):
        assert found[model, "fused"][0] == 3  # statistics, combination, both values in one tensor
        assert sum(found[model, "fused"]) * 20 < sum(found[model, "logits"])


@pytest.mark.parametrize(
    "capability, triton, wanted, expected",
    [
        (None, True, None, False),
        (None, True, False, False),
        (None, True, True, "no CUDA device was found"),
        ((9, 0), True, None, True),
        ((9, 0), True, False, False),
        ((9, 0), False, None, False),
        ((9, 0), False, True, "Triton is not installed"),
        ((7, 5), True, None, False),
        ((7, 5), True, True, "the GPU is older than Ampere"),
    ],
)
def test_kernels_are_chosen_only_if_they_can_run(monkeypatch, capability, triton, wanted, expected):
    from gdpo_nemo.megatron import logprobs
    from gdpo_nemo.utils.errors import ConfigError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(logprobs.importlib.util, "find_spec", lambda name: object() if triton else None)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=f"fused_logprobs: true is not supported, because {expected}"):
            logprobs.use_fused_logprobs(wanted)
    else:
        assert logprobs.use_fused_logprobs(wanted) is expected


@pytest.mark.parametrize("tied", [False, True])
def test_autograd_gets_a_placeholder_for_gradients_in_main_grad(tied):
    """Megatron's hook skips it, or adds it where the embedding's gradient comes by the same way: then it is 0."""
    from gdpo_nemo.megatron.logprobs import _placeholder_gradient

    weight = torch.nn.Parameter(torch.ones(5, 3))
    weight.zero_out_wgrad = tied
    found = _placeholder_gradient(weight)
    assert weight.grad_added_to_main_grad
    assert found.shape == weight.shape
    assert not tied or not found.any()


@pytest.mark.parametrize("micro_batch", [4096, 16384])
def test_plan_counts_the_memory_of_the_backward_pass(micro_batch):
    from gdpo_nemo.config.load import load_config
    from gdpo_nemo.config.model_checks import resolve
    from gdpo_nemo.megatron.logprobs import slice_width
    from gdpo_nemo.models.family_checks import describe
    from gdpo_nemo.models.known_models import KNOWN
    from gdpo_nemo.planning.memory import policy_memory

    recipe = ROOT / "configs/gdpo_gsm8k_qwen2.5_1.5b_8gpu.yaml"
    shape = describe(KNOWN["Qwen/Qwen2.5-1.5B"])
    planned, whole = (
        policy_memory(
            resolve(load_config(recipe, [f"policy.megatron_cfg.fused_logprobs={use}"])), shape, micro_batch
        ).logprobs
        for use in ("null", "false")
    )
    gradient = slice_width(micro_batch, shape.vocabulary, 2, 256) * 2
    assert planned == pytest.approx(micro_batch * (gradient + 6 * shape.hidden), rel=0.15)
    assert planned < whole


@pytest.mark.parametrize("tokens", [1, 100, 8192, 16384, 1 << 20])
def test_slices_of_the_vocabulary_are_alike_and_within_the_budget(tokens):
    from gdpo_nemo.megatron.logprobs import _GRADIENT_BYTES, slice_width

    for columns in (1, 255, 151669, 152064):
        width = slice_width(tokens, columns, 2, 256)
        assert 0 < width <= columns
        assert width == columns or width % 256 == 0
        assert width <= 256 or width * tokens * 2 <= _GRADIENT_BYTES
        slices = -(-columns // width)
        assert columns > (slices - 1) * width, "a slice is empty"
