"""Kernels' memory, host memory and MFU of a plan, by hand for Qwen2.5 0.5 B, 1.5 B and 7 B."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gdpo_nemo.config.layout import resolve_layout
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.model_checks import resolve
from gdpo_nemo.models.family_checks import describe
from gdpo_nemo.models.known_models import KNOWN
from gdpo_nemo.models.weights import active_parameters, parameters
from gdpo_nemo.planning.fit import _memory_savers, changed, memory_shortage
from gdpo_nemo.planning.hardware import Rates, device
from gdpo_nemo.planning.memory import (
    DIFFERENCE_SHARE,
    difference_bytes,
    engine_copy_bytes,
    host_memory,
    policy_memory,
    refit_bytes,
    resting_memory,
    transport_memory,
)
from gdpo_nemo.planning.report import plan_lines
from gdpo_nemo.planning.shape import model_shape, on_rank
from gdpo_nemo.planning.speed import (
    BANDWIDTH_SHARE,
    HOST_LAYER_S,
    LAUNCH_S,
    PRODUCT_SHARE,
    expected_lengths,
    micro_batch,
    optimizer_seconds,
    sync_work,
    training_work,
    utilisation,
)

ROOT = Path(__file__).resolve().parents[2]
GPU_CONFIG = ROOT / "configs" / "gdpo_gsm8k_qwen2.5_1.5b_8gpu.yaml"
# (hidden, layers, query width, key and value width, MLP width, vocabulary)
SIZES = {
    "0.5B": (896, 24, 896, 256, 4864, 151936),
    "1.5B": (1536, 28, 1536, 512, 8960, 151936),
    "7B": (3584, 28, 3584, 1024, 18944, 152064),
}


def config_of(size: str, *overrides: str):
    split = ["cluster.placement=separate", "policy.generation.engines=4"]
    return load_config(GPU_CONFIG, [f"policy.model_name=Qwen/Qwen2.5-{size}", *split, *overrides])


def shape_of(size: str):
    return describe(KNOWN[f"Qwen/Qwen2.5-{size}"])


_CHUNKS = "policy.megatron_cfg.fused_logprobs=false"
NOTED = replace(device("h200"), compute=990e12, bandwidth=4.3e12 / BANDWIDTH_SHARE)
"""A device that moves 4.3 TB/s where a plan counts on 90 % of its bandwidth."""


@pytest.mark.parametrize("size", SIZES)
def test_activations_on_gpus_are_three_mlp_widths_and_those_of_fused_attention(size):
    hidden, layers, query, key_value, ffn, _ = SIZES[size]
    tokens = 8192
    memory = policy_memory(resolve(config_of(size)), shape_of(size), tokens)
    a_layer = 2 * 2 * hidden + (query + key_value) + query + 3 * ffn
    ends = 6 * hidden  # the final norm of bfloat16, and the rows that are evaluated
    assert memory.activations == 2 * tokens * (layers * a_layer + ends)


def test_a_fourth_mlp_width_would_be_8_7_gb_at_7b_and_no_gpu_layer_keeps_it():
    hidden, layers, query, key_value, ffn, _ = SIZES["7B"]
    assert 2 * 8192 * layers * ffn == pytest.approx(8.7e9, rel=2e-3)
    for switch in ("policy.megatron_cfg.transformer_engine=false", "policy.megatron_cfg.attention_backend=sdpa"):
        local = policy_memory(resolve(config_of("7B", switch)), shape_of("7B"), 8192).activations
        attention = 1.15 * (2 * query + 2 * query)  # rectangles
        a_layer = 2 * 5 * hidden + attention + query + 3 * ffn
        assert local == pytest.approx(2 * 8192 * (layers * a_layer + 6 * hidden), rel=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_pinned_host_memory_contains_offloaded_tensors_and_the_reference(size):
    shape = shape_of(size)
    plain = config_of(size, "loss_fn.reference_policy_kl_penalty=0")
    assert host_memory(resolve(plain), shape) == 0
    ranks = resolve_layout(plain).data
    offloaded = changed(plain, megatron_cfg__optimizer__offload=True)
    assert host_memory(resolve(offloaded), shape) == 12 * parameters(shape) // ranks
    assert policy_memory(resolve(offloaded), shape).optimizer < policy_memory(resolve(plain), shape).optimizer
    with_reference = config_of(size, "loss_fn.reference_policy_kl_penalty=0.01")
    assert host_memory(resolve(with_reference), shape) == 2 * parameters(shape)
    assert (
        host_memory(resolve(config_of(size, "policy.lora.rank=16", "loss_fn.reference_policy_kl_penalty=0.01")), shape)
        == 0
    )
    assert (
        resting_memory(resolve(plain), shape) - resting_memory(resolve(offloaded), shape)
        == 12 * parameters(shape) // ranks
    )


def test_an_optimizer_of_half_the_size_is_counted_and_suggested():
    shape, keys = shape_of("7B"), "policy.megatron_cfg.optimizer"
    half = [f"{keys}.use_precision_aware_optimizer=true"]
    half += [f"{keys}.{name}=bfloat16" for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype")]
    plain, less = (policy_memory(resolve(config_of("7B", *changes)), shape) for changes in ([], half))
    assert less.gradients == plain.gradients / 2 and less.optimizer == pytest.approx(plain.optimizer * 8 / 12)
    assert less.weights == plain.weights and less.activations == plain.activations
    seconds = [optimizer_seconds(resolve(config_of("7B", *changes)), shape, device("h100")) for changes in ([], half)]
    assert seconds[1] == pytest.approx(seconds[0] * 20 / 30)
    suggested = list(_memory_savers(resolve(config_of("7B")), shape))
    with_gradients = [change for change in suggested if "megatron_cfg__optimizer__main_grads_dtype" in change]
    assert len(with_gradients) == 1
    planned = policy_memory(resolve(changed(config_of("7B"), **with_gradients[0])), shape)
    assert (planned.gradients, planned.optimizer) == (less.gradients, less.optimizer)


def test_host_memory_counts_sleeping_engines_and_weights_for_restarts():
    shape = shape_of("1.5B")
    shared = ("cluster.placement=colocated", "policy.generation.engines=8", "loss_fn.reference_policy_kl_penalty=0")
    assert host_memory(resolve(config_of("1.5B", *shared)), shape) == 2 << 30
    stale = resolve(config_of("1.5B", "rollout.max_staleness=1"))
    assert transport_memory(stale, shape) == refit_bytes(stale, shape) == 2 * parameters(shape)
    assert transport_memory(resolve(config_of("1.5B", "rollout.max_staleness=0")), shape) == 0
    assert "3.09 GB of host memory" in dict(plan_lines(stale, shape, device("h100"), Rates()))["refit"]


def test_differences_are_sent_over_the_link_and_loaded_from_copies_in_host_memory():
    shape, h100 = shape_of("1.5B"), device("h100")
    nodes = ("cluster.num_nodes=2", "policy.generation.engines=8")
    full, auto = (resolve(config_of("1.5B", *nodes, f"weights.mode={mode}")) for mode in ("full", "auto"))
    weights = refit_bytes(auto, shape)
    assert difference_bytes(auto, shape) == int(DIFFERENCE_SHARE * weights) and difference_bytes(full, shape) == 0
    assert (engine_copy_bytes(auto, shape), transport_memory(auto, shape)) == (weights, weights)
    assert engine_copy_bytes(full, shape) == transport_memory(full, shape) == 0
    work = sync_work(auto, shape, h100).ideal - weights / h100.host_link
    assert work == pytest.approx(DIFFERENCE_SHARE * sync_work(full, shape, h100).ideal)
    line = dict(plan_lines(auto, shape, h100, Rates()))["refit"]
    assert line.startswith("3.09 GB to each engine at first, then about 92.6 MB (3% is assumed) after every step")
    assert line.endswith("on the policy's hosts and 3.09 GB for each engine process (24.7 GB on a node with 8)")


def test_a_reference_that_stays_on_the_gpu_is_counted_there():
    shape = shape_of("1.5B")
    config = config_of("1.5B", "loss_fn.reference_policy_kl_penalty=0.01")
    away = policy_memory(resolve(config), shape)
    resting = resting_memory(resolve(config), shape)
    config.policy.offload_reference = False
    stays = policy_memory(resolve(config), shape)
    assert (
        stays.total - away.total
        == stays.reference
        == 2 * parameters(shape)
        == resting_memory(resolve(config), shape) - resting
    )
    assert host_memory(resolve(config), shape) == 0


def test_offloaded_tensors_travel_at_the_speed_of_the_link_to_the_host():
    shape = shape_of("7B")
    plain = config_of("7B", "loss_fn.reference_policy_kl_penalty=0")
    gpu = device("h100")
    lengths = expected_lengths(plain.policy, Rates())
    bare = training_work(resolve(plain), shape, gpu, lengths).ideal
    offloaded = changed(plain, megatron_cfg__optimizer__offload=True)
    more = training_work(resolve(offloaded), shape, gpu, lengths).ideal - bare
    assert more == pytest.approx(2 * host_memory(resolve(offloaded), shape) / (BANDWIDTH_SHARE * 64e9))
    way = optimizer_seconds(resolve(offloaded), shape, gpu) - optimizer_seconds(resolve(plain), shape, gpu)
    assert way == pytest.approx(more / resolve(offloaded).updates_per_step)
    assert device("a100").host_link == 32e9


@pytest.mark.parametrize(
    "size, tokens, half_peak_s, logprobs_s", [("7B", 8192, 0.755, 0.046), ("1.5B", 16384, 0.306, 0.092)]
)
def test_micro_batch_takes_the_measured_memory_of_the_kernels(size, tokens, half_peak_s, logprobs_s):
    """Without attention and without the fused kernel, which the figures leave out."""
    shape = shape_of(size)
    batch = micro_batch(resolve(config_of(size, _CHUNKS)), shape, NOTED, tokens, length=1e-9)
    head = 2 * shape.hidden * shape.vocabulary * tokens
    products = batch.products - head / (PRODUCT_SHARE * 990e12)
    assert products == pytest.approx(6 * active_parameters(shape) * tokens / (PRODUCT_SHARE * 990e12), rel=1e-6)
    embedding = 0 if shape.tied else shape.vocabulary * shape.hidden
    assert 6 * (active_parameters(shape) + embedding) * tokens / (0.5 * 990e12) == pytest.approx(half_peak_s, rel=0.01)
    assert batch.logprobs == pytest.approx(logprobs_s, rel=0.03)
    fused = micro_batch(resolve(config_of(size)), shape, NOTED, tokens, length=1e-9)
    assert fused.logprobs == pytest.approx(batch.logprobs * 6 / 156) and fused.products == batch.products


@pytest.mark.parametrize("size", SIZES)
def test_moves_and_launches_of_a_micro_batch_by_hand(size):
    hidden, layers, query, key_value, ffn, _ = SIZES[size]
    floats = 22 * hidden + 4 * (query + key_value // 2) + 8 * ffn
    batch = micro_batch(resolve(config_of(size)), shape_of(size), NOTED, 8192, 1024)
    assert batch.moves == pytest.approx(2 * floats * layers * 8192 / 4.3e12)
    assert batch.host == pytest.approx(layers * sum(HOST_LAYER_S))
    forward = micro_batch(resolve(config_of(size)), shape_of(size), NOTED, 8192, 1024, backward=False)
    assert forward.moves == pytest.approx(batch.moves / 2) and forward.gradients == 0
    unfused = config_of(size, "policy.megatron_cfg.transformer_engine=false")
    rotary = micro_batch(resolve(unfused), shape_of(size), NOTED, 16384, 1024).host - batch.host
    assert rotary == pytest.approx(24 * 16 * 2 * layers * LAUNCH_S)


@pytest.mark.parametrize("pass_", ["update", "log-probs"])
@pytest.mark.parametrize("size", ["0.5B", "1.5B"])
def test_micro_batches_take_as_long_as_measured_on_one_h200(size, pass_):
    """Milliseconds in docs/performance.md, "On one H200", by tokens and length of the sequences."""
    measured = {
        ("0.5B", "update"): (176, 207, 622),
        ("0.5B", "log-probs"): (90, 118, 173),
        ("1.5B", "update"): (219, 375, 1268),
        ("1.5B", "log-probs"): (97, 115, 351),
    }[size, pass_]
    resolved = resolve(config_of(size, "policy.share_prompts=false"))
    for (tokens, length), milliseconds in zip([(8192, 512), (16384, 4096), (32768, 32768)], measured, strict=True):
        batch = micro_batch(resolved, shape_of(size), device("h200"), tokens, length, pass_ == "update")
        planned = 1e3 * Rates().training.seconds(1, batch.seconds)
        assert 0.72 < planned / milliseconds < 1.08, (tokens, planned)


def test_plan_suggests_larger_log_prob_micro_batches_if_the_host_limits_them_and_they_fit():
    def suggestion(*overrides: str) -> str:
        resolved = resolve(config_of("1.5B", "policy.share_prompts=false", *overrides))
        shape = shape_of("1.5B")
        return dict(plan_lines(resolved, shape, device("h200"), Rates())).get("log-probs", "")

    small = ("policy.micro_batch_tokens=4096", "loss_fn.reference_policy_kl_penalty=0.01")
    assert "the host needs 101 ms" in suggestion(*small)
    assert "with policy.logprob_micro_batch_tokens=16384, training takes" in suggestion(*small)
    assert suggestion(*small, "policy.logprob_micro_batch_tokens=16384") == ""
    assert suggestion("policy.micro_batch_tokens=4096", "loss_fn.reference_policy_kl_penalty=0") == ""
    resolved = resolve(config_of("1.5B", *small))
    for budget in (8192, 1 << 17):
        larger = resolved.changed(changed(resolved.config, logprob_micro_batch_tokens=budget))
        shortage = memory_shortage(larger, shape_of("1.5B"), replace(device("h100"), memory=27e9))
        assert ("a policy rank needs" in shortage) == (budget > 8192), shortage


def mixture(experts: int):
    """Qwen3-30B-A3B on four nodes with ``experts`` expert-parallel ranks: (resolved config, shape)."""
    keys = (f"policy.megatron_cfg.expert_model_parallel_size={experts}", "policy.generation.engines=16",
            "cluster.num_nodes=4", "policy.megatron_cfg.recompute=none")  # fmt: skip
    config = load_config(GPU_CONFIG, ["policy.model_name=Qwen/Qwen3-30B-A3B", *keys])
    return resolve(config), describe(KNOWN["Qwen/Qwen3-30B-A3B"])


@pytest.mark.parametrize("experts, link", [(1, 1.0), (8, 450e9), (16, 50e9)])
def test_a_mixture_launches_a_product_an_expert_and_exchanges_tokens(experts, link):
    """Twice to the experts and twice back, at the speed of the network as soon as a node is too small."""
    resolved, shape = mixture(experts)
    batch = micro_batch(resolved, shape, device("h100"), 8192, 1024)
    launches = 24 + 28 + 128 // experts * 6
    assert batch.host == pytest.approx(48 * (sum(HOST_LAYER_S) + launches * LAUNCH_S))
    sent = 8 * 2048 * 2 * 8192 * (experts - 1) / experts
    assert batch.routing == pytest.approx(48 * (4 * sent / link + 2 * 30e-6))
    dense = micro_batch(resolve(config_of("1.5B")), shape_of("1.5B"), device("h100"), 8192, 1024)
    assert dense.routing == 0


def test_the_products_of_a_mixture_fill_their_tiles_with_more_tokens_an_expert():
    """512 tokens an expert with its own rank's tokens alone: a tile of 128 rows is half empty on average."""
    resolved, shape = mixture(1)
    few = micro_batch(resolved, shape, device("h100"), 8192, 1e-9).products
    many = micro_batch(mixture(8)[0], shape, device("h100"), 8192, 1e-9).products
    experts = 48 * 8 * 3 * 2048 * 768
    wasted = experts / active_parameters(shape) * 64 / 512
    assert few / many == pytest.approx((1 + wasted) / (1 + wasted / 8), rel=5e-3)  # the head besides


def test_the_time_of_a_step_is_that_of_its_micro_batches():
    """The same model as for the MFU: a micro-batch, the optimizer and what the ranks exchange."""
    without = ("loss_fn.reference_policy_kl_penalty=0", "policy.megatron_cfg.overlap_grad_reduce=false")
    config = config_of("7B", *without, "policy.share_prompts=false")
    resolved, shape, gpu = resolve(config), shape_of("7B"), device("h100")
    lengths = expected_lengths(config.policy, Rates())
    work = training_work(resolved, shape, gpu, lengths)
    each = round(resolved.samples_per_step * lengths.total / resolved.layout.data / work.units)
    batch = micro_batch(resolved, shape, gpu, each, lengths.total)
    replicas = resolved.layout.data * resolved.layout.context
    reduced = 4 * sum(on_rank(shape, resolved.layout, 0)) * 2 * (replicas - 1) / replicas / gpu.nvlink
    rest = resolved.updates_per_step * (optimizer_seconds(resolved, shape, gpu) + reduced)
    assert work.ideal == pytest.approx(work.units * batch.seconds + rest)


def test_rotary_embedding_sequence_by_sequence_is_waited_for_at_small_models():
    """98 ms for 16 sequences of 28 layers: more than a small model's micro-batch computes."""
    unfused = config_of("0.5B", "policy.megatron_cfg.transformer_engine=false")
    slow = micro_batch(resolve(unfused), shape_of("0.5B"), NOTED, 8192, 256)
    fast = micro_batch(resolve(config_of("0.5B")), shape_of("0.5B"), NOTED, 8192, 256)
    assert slow.seconds == slow.host and slow.host - fast.host > fast.device
    shape = shape_of("1.5B")
    config = config_of("1.5B", "policy.megatron_cfg.transformer_engine=false")
    more = (
        micro_batch(resolve(config), shape, NOTED, 8192, 512).host
        - micro_batch(resolve(config_of("1.5B")), shape, NOTED, 8192, 512).host
    )
    assert more == pytest.approx(0.098, rel=0.02)


def test_mfu_falls_with_the_size_and_stays_below_that_of_products():
    gpu = device("h100")
    found = {}
    for size in SIZES:
        config = config_of(size)
        found[size] = utilisation(resolve(config), model_shape(resolve(config)), gpu, Rates())
    order = [found[size].training for size in ("0.5B", "1.5B", "7B")]
    assert order == sorted(order) and all(0.1 < value < 0.7 for value in order)
    assert all(value.generation < value.training for value in found.values())
    full = changed(config_of("7B"), megatron_cfg__recompute="full")
    modules = dict(megatron_cfg__recompute="selective", megatron_cfg__recompute_modules=["mlp"])
    slower = [
        utilisation(resolve(config), shape_of("7B"), gpu, Rates()).training
        for config in (full, changed(config_of("7B"), **modules))
    ]
    assert slower[0] < slower[1] < order[2]


def test_plan_prints_mfu_and_host_memory_with_gpus():
    gpu = device("h100")
    lines = dict(
        plan_lines(resolve(config_of("7B", "policy.megatron_cfg.optimizer.offload=true")), shape_of("7B"), gpu, Rates())
    )
    assert lines["mfu"].startswith("training ") and "the host needs" in lines["mfu"]
    assert "of pinned host memory per policy rank" in lines["host"]
    cpu = load_config(ROOT / "configs" / "gdpo_tiny_cpu.yaml", [])
    assert not {"mfu", "host"} & dict(plan_lines(resolve(cpu), shape_of("0.5B"), gpu, Rates())).keys()
