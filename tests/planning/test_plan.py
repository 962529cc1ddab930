"""The plan before launch: its arithmetic against published sizes, its fits against known laws, its commands."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gdpo_nemo.commands import cli
from gdpo_nemo.config.layout import resolve_layout
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.model_checks import resolve
from gdpo_nemo.data.packing import Budget, TrainSequence, attention_cost
from gdpo_nemo.data.prefixes import shared_layout
from gdpo_nemo.models.family_checks import describe
from gdpo_nemo.models.known_models import KNOWN
from gdpo_nemo.models.weights import active_parameters, parameters
from gdpo_nemo.planning.calibrate import Observation, fit
from gdpo_nemo.planning.fit import (
    best_per_count,
    best_split,
    changed,
    gpu_counts,
    memory_shortage,
    smallest_change,
    sweep,
)
from gdpo_nemo.planning.hardware import CPU_RATES, Phase, Rates, device, host, load_rates, save_rates
from gdpo_nemo.planning.memory import (
    GPU_RESERVE,
    checkpoint_bytes,
    engine_memory,
    policy_memory,
    resting_memory,
    sampling_bytes,
)
from gdpo_nemo.planning.report import batch_arithmetic, dry_run_lines, plan_lines
from gdpo_nemo.planning.shape import expected_saving, model_shape, on_rank, tower_parameters
from gdpo_nemo.planning.speed import PRODUCT_SHARE, Lengths, Work, refit_bytes, step_time, training_work
from gdpo_nemo.utils.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
GPU_CONFIG = ROOT / "configs" / "gdpo_gsm8k_qwen2.5_1.5b_8gpu.yaml"
CPU_CONFIG = ROOT / "configs" / "gdpo_tiny_cpu.yaml"
SEPARATE = (
    "cluster.placement=separate", "policy.generation.engines=4",
    "policy.generation.vllm_cfg.gpu_memory_utilization=0.85",
)  # fmt: skip
"""Four GPUs that train and four that sample."""


def config_of(*overrides: str):
    return load_config(GPU_CONFIG, [*SEPARATE, *overrides])


# Millions of parameters as the models' publishers give them.
@pytest.mark.parametrize(
    "name, millions, active",
    [
        ("Qwen/Qwen2.5-0.5B", 494, None),
        ("Qwen/Qwen2.5-1.5B", 1544, None),
        ("Qwen/Qwen2.5-7B", 7616, None),
        ("Qwen/Qwen2.5-32B", 32764, None),
        ("meta-llama/Llama-3.1-8B", 8030, None),
        ("meta-llama/Llama-3.1-70B", 70554, None),
        ("Qwen/Qwen3-30B-A3B", 30532, 3300),
        ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", 8888, None),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31578, 3600),
        ("microsoft/phi-4", 14659, None),
        ("ByteDance-Seed/Seed-OSS-36B", 36151, None),
        ("google/gemma-4-31B-it", 30700, None),
        ("google/gemma-4-26B-A4B-it", 25200, None),
        ("Qwen/Qwen2.5-VL-3B-Instruct", 3755, None),
        ("Qwen/Qwen3-VL-8B-Instruct", 8767, None),
    ],
)
def test_parameters_are_those_the_publishers_give(name, millions, active):
    content = KNOWN[name]
    shape = describe(content)
    assert parameters(shape) / 1e6 == pytest.approx(millions, rel=2e-3)
    if active:  # the publisher counts the embedding, too
        assert (active_parameters(shape) + shape.vocabulary * shape.hidden) / 1e6 == pytest.approx(active, rel=0.03)


def test_attention_counts_the_heads_of_each_layer():
    """Gemma 4 31B: 50 layers with 16 key and value heads of 256, and 10 layers with 4 of 512 and without v_proj."""
    content = KNOWN["google/gemma-4-31B-it"]
    shape = describe(content)
    assert shape.cached(1) == 2 * (50 * 16 * 256 + 10 * 4 * 512)
    assert shape.cached(8) == 2 * (50 * 2 * 256 + 10 * 1 * 512)  # an engine rank has at least one head
    assert shape.kv_heads == 4
    queries = 50 * 32 * 256 + 10 * 32 * 512
    assert 60 * shape.query == queries
    assert attention_cost(shape) == pytest.approx(queries / active_parameters(shape), rel=1e-4)


def test_a_vision_tower_is_planned_on_the_first_stage_and_is_trained_only_if_the_config_says_so():
    name = "policy.model_name=Qwen/Qwen3-VL-4B-Instruct"
    stages = ["policy.megatron_cfg.pipeline_model_parallel_size=2", "cluster.gpus_per_node=8"]
    frozen, trained = (resolve(config_of(name, *stages, f"policy.vision.train={train}")) for train in (False, True))
    shape = model_shape(frozen)
    assert shape is not None
    tower = tower_parameters(shape)
    assert 4e8 < tower < 4.3e8
    first, last = (sum(on_rank(shape, frozen.layout, stage)) for stage in (0, 1))
    assert first - last == tower - shape.hidden  # both stages hold the tied embedding, and the last one norm more
    without, whole = (policy_memory(resolved, shape) for resolved in (frozen, trained))
    assert whole.weights == without.weights and whole.gradients - without.gradients == 4 * tower
    assert refit_bytes(trained, shape) - refit_bytes(frozen, shape) == 2 * tower
    assert checkpoint_bytes(trained, shape) - checkpoint_bytes(frozen, shape) == 12 * tower
    line = dict(plan_lines(frozen, shape, device("h100"), Rates()))["per rank"]
    assert "415 M in the vision tower, whose activations are not estimated" in line


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-30B-A3B"])
def test_ranks_hold_the_whole_model_and_nothing_but_its_copies(name):
    shape = describe(KNOWN[name])
    expert = 4 if shape.experts else 1
    config = config_of("policy.megatron_cfg.tensor_model_parallel_size=2",
    "policy.megatron_cfg.pipeline_model_parallel_size=2",
                       f"policy.megatron_cfg.expert_model_parallel_size={expert}",
                       "policy.megatron_cfg.expert_tensor_parallel_size=1",
                       "cluster.num_nodes=2", "policy.generation.engines=8")  # fmt: skip
    layout = resolve_layout(config)
    held = sum(2 * dense + expert * experts for dense, experts in (on_rank(shape, layout, stage) for stage in (0, 1)))
    # Norms, biases of nothing, routers are on both tensor ranks; a tied table is on both ends of the pipeline.
    copies = held - parameters(shape) - (shape.vocabulary * shape.hidden if shape.tied else 0)
    assert 0 <= copies < 2e-3 * parameters(shape)


def test_memory_shrinks_with_sharding():
    shape = describe(KNOWN["Qwen/Qwen2.5-7B"])
    plain = config_of(
        "policy.megatron_cfg.use_distributed_optimizer=false", "policy.megatron_cfg.overlap_param_gather=false"
    )
    memory = policy_memory(resolve(plain), shape)
    assert policy_memory(
        resolve(changed(plain, megatron_cfg__use_distributed_optimizer=True)), shape
    ).optimizer * 4 == pytest.approx(memory.optimizer, rel=1e-6)
    assert policy_memory(
        resolve(changed(plain, megatron_cfg__tensor_model_parallel_size=4)), shape
    ).weights == pytest.approx(memory.weights / 4, rel=1e-3)
    assert (
        policy_memory(resolve(changed(plain, megatron_cfg__recompute="full")), shape).activations
        < memory.activations / 10
    )
    assert policy_memory(resolve(changed(plain, micro_batch_tokens=8192)), shape).activations == pytest.approx(
        memory.activations / 2, rel=1e-6
    )
    engine = engine_memory(plain, shape, 80 * 10**9)
    assert engine.bytes_per_token == 2 * 28 * 4 * 128 * 2 and engine.sequences(1536) == engine.kv_cache // (
        1536 * engine.bytes_per_token
    )
    experts = dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, n_group=1, topk_group=1)
    content = KNOWN["Qwen/Qwen2.5-7B"] | experts | dict(model_type="deepseek_v3", num_key_value_heads=28)
    latent = describe(content | dict(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=64, v_head_dim=128))
    assert engine_memory(plain, latent, 80 * 10**9).bytes_per_token == 28 * (512 + 64) * 2
    on_cpu = replace(plain, cluster=replace(plain.cluster, gpus_per_node=0))  # computes keys and values of all heads
    assert engine_memory(on_cpu, latent, 0).bytes_per_token == 28 / 4 * engine.bytes_per_token


def test_a_teacher_takes_its_weights_on_every_rank_and_one_forward_pass():
    """Half of them at twice the tensor parallelism, and while colocated engines sample, too; nothing under another
    algorithm."""
    alone = config_of()
    shape, teacher = model_shape(resolve(alone)), describe(KNOWN["Qwen/Qwen2.5-7B"])
    taught = config_of("algorithm.type=distillation", "teacher.model_name=Qwen/Qwen2.5-7B")
    for tensor in (1, 2):
        pair = [changed(c, megatron_cfg__tensor_model_parallel_size=tensor) for c in (alone, taught)]
        before, after = (policy_memory(resolve(c), shape) for c in pair)
        assert after.teacher == after.total - before.total
        assert after.teacher == pytest.approx(2 * parameters(teacher) / tensor, rel=1e-3)
        assert resting_memory(resolve(pair[1]), shape) - resting_memory(resolve(pair[0]), shape) == after.teacher
    gpu, lengths = device("h100"), Lengths(100.0, 100.0, 200.0)
    seconds = [training_work(resolve(c), shape, gpu, lengths).ideal for c in (alone, taught)]
    tokens = resolve(alone).samples_per_step * 200 * expected_saving(resolve(alone), 100, 100).tokens
    arithmetic = 2 * active_parameters(teacher) * tokens / (resolve_layout(alone).policy_ranks * gpu.compute)
    # Norms and activations of short contexts besides.
    assert seconds[1] - seconds[0] == pytest.approx(arithmetic / PRODUCT_SHARE, rel=0.15)
    forgotten = config_of("teacher.model_name=Qwen/Qwen2.5-7B")
    assert policy_memory(resolve(forgotten), shape) == policy_memory(resolve(alone), shape)


def test_under_lora_only_the_adapters_travel():
    shape = model_shape(resolve(config_of()))
    tensor = "policy.megatron_cfg.tensor_model_parallel_size=2"
    assert refit_bytes(resolve(config_of(tensor)), shape) == 2 * parameters(shape)
    # What PEFT counts as trainable in Qwen2.5-1.5B with rank 16 on all linear layers.
    assert refit_bytes(resolve(config_of(tensor, "policy.lora.rank=16")), shape) == 2 * 18_464_768


@pytest.mark.parametrize("recipe", sorted(CPU_CONFIG.parent.glob("*_1gpu.yaml")), ids=lambda path: path.stem)
def test_recipes_for_one_gpu_fit_it_with_a_tenth_to_spare(recipe):
    resolved = resolve(load_config(recipe))
    gpu = device("h100")
    shape = model_shape(resolved)
    assert memory_shortage(resolved, shape, replace(gpu, memory=0.9 * gpu.memory)) == ""
    assert (resolved.layout.gpus, resolved.layout.colocated) == (1, True)


def test_a_checkpoint_holds_trained_weights_main_weights_and_moments_divided_among_the_ranks():
    shape = model_shape(resolve(config_of()))
    assert checkpoint_bytes(resolve(config_of()), shape) == (2 + 12) * parameters(shape)
    assert checkpoint_bytes(resolve(config_of("policy.lora.rank=16")), shape) == (2 + 12) * 18_464_768
    assert checkpoint_bytes(resolve(config_of("policy.precision=float32")), shape) == (4 + 8) * parameters(shape)
    in_background = resolve(config_of("checkpointing.async_save=true"))
    line = dict(plan_lines(in_background, shape, device("h100"), Rates()))["checkpoint"]
    assert "21.6 GB, of which each policy rank writes 5.4 GB, and reads as much at a resume: 21.6 s at " in line
    assert line.endswith("; 21.6 GB of host memory per node while the files are written")


def test_the_smallest_change_makes_it_fit_and_less_would_not():
    config = config_of("policy.model_name=Qwen/Qwen2.5-7B", "policy.micro_batch_tokens=6144")
    shape = model_shape(resolve(config))
    gpu = device("h100")
    assert "needs" in memory_shortage(resolve(config), shape, gpu)
    words = smallest_change(resolve(config), shape, gpu)
    keys = [word for word in words.split() if word.startswith("policy.")]
    assert (
        keys
        and memory_shortage(
            resolve(config_of("policy.model_name=Qwen/Qwen2.5-7B", "policy.micro_batch_tokens=6144", *keys)), shape, gpu
        )
        == ""
    )
    for left_out in keys if len(keys) > 1 else []:
        fewer = [key for key in keys if key != left_out]
        assert memory_shortage(
            resolve(config_of("policy.model_name=Qwen/Qwen2.5-7B", "policy.micro_batch_tokens=6144", *fewer)),
            shape,
            gpu,
        )
    assert (
        smallest_change(
            resolve(config_of("policy.model_name=meta-llama/Llama-3.1-70B")),
            describe(KNOWN["meta-llama/Llama-3.1-70B"]),
            device("a100"),
        )
        is None
    )


def test_best_split_is_at_least_as_fast_as_any_other():
    config = config_of()
    rates = Rates()
    gpu = device("h200")
    shape = model_shape(resolve(config))
    engines, seconds = best_split(resolve(config), shape, gpu, rates)
    others = [step_time(resolve(changed(config, generation__engines=n)), shape, gpu, rates).step for n in range(1, 8)]
    assert seconds == min(others) == others[engines - 1]


def test_generation_beside_training_hides_the_shorter_one():
    config = config_of()
    rates = Rates()
    gpu = device("h100")
    shape = model_shape(resolve(config))
    on_policy = step_time(resolve(config), shape, gpu, rates)
    stale = step_time(resolve(replace(config, rollout=replace(config.rollout, max_staleness=1))), shape, gpu, rates)
    assert on_policy.step == pytest.approx(on_policy.generation + on_policy.training + on_policy.sync)
    assert stale.step == pytest.approx(max(stale.generation, stale.training) + stale.sync)
    assert on_policy.policy_idle == pytest.approx(on_policy.generation / on_policy.step)


def test_plan_prints_the_cache_size_that_the_key_takes():
    """The key with the printed value gives the same plan; a smaller value leaves the GPU's other memory free."""
    shared = ("cluster.placement=colocated", "policy.generation.engines=8")
    gpu = device("h100")

    def lines(*overrides):
        config = config_of(*shared, *overrides)
        return dict(plan_lines(resolve(config), model_shape(resolve(config)), gpu, Rates()))

    printed = lines()["per engine"]
    (value,) = re.findall(r"gpu_kv_cache_memory_bytes: (\d+)", printed)
    key = "policy.generation.vllm_cfg.gpu_kv_cache_memory_bytes"
    assert lines(f"{key}={value}")["per engine"] == printed
    small = config_of(*shared, f"{key}={10**9}")
    shape = model_shape(resolve(small))
    engine = engine_memory(small, shape, int(gpu.memory))
    assert engine.kv_cache == 10**9
    assert sampling_bytes(small, engine, gpu.memory) == engine.weights + 10**9 + GPU_RESERVE < 0.2 * gpu.memory


def test_colocated_policy_and_engine_fill_one_gpu_in_turn():
    shared = (
        "cluster.placement=colocated",
        "policy.generation.engines=8",
        "policy.generation.vllm_cfg.gpu_memory_utilization=0.8",
        "policy.micro_batch_tokens=4096",
    )
    config = config_of(*shared)
    rates = Rates()
    gpu = device("h100")
    shape = model_shape(resolve(config))
    layout = resolve_layout(config)
    assert (layout.policy_ranks, layout.engine_ranks, layout.devices, layout.idle_gpus) == (8, 8, 8, 0)
    time = step_time(resolve(config), shape, gpu, rates)
    assert time.step == pytest.approx(time.generation + time.training + time.sync)
    assert time.idle(layout) == pytest.approx(0)
    half = config_of(*shared, "policy.generation.engines=4")
    slower = step_time(resolve(half), shape, gpu, rates)
    assert slower.idle(resolve_layout(half)) == pytest.approx(slower.generation / 2 / slower.step)

    for candidate in sweep(resolve(config), shape, gpu, rates, 8):
        assert candidate.tensor * candidate.pipeline * candidate.data == candidate.gpus
        assert candidate.engines * candidate.engine_tensor == candidate.gpus and candidate.idle == pytest.approx(0)

    stays = resting_memory(resolve(config), shape)
    fullest = policy_memory(resolve(config), shape)
    assert stays == fullest.weights + fullest.optimizer + fullest.reserve, "gradients are given back"
    least = replace(gpu, memory=stays / 0.2)  # what stays and 80 % of the device are then all of it
    assert memory_shortage(resolve(config), shape, least) == ""
    assert "during sampling, a policy rank keeps" in memory_shortage(
        resolve(config), shape, replace(least, memory=least.memory * 0.99)
    )
    assert "to 80% of the GPU" in dict(dry_run_lines(resolve(config)))["shared"] and "shared" not in dict(
        dry_run_lines(resolve(config_of()))
    )
    offloaded = changed(config, megatron_cfg__optimizer__offload=True)
    assert stays - resting_memory(resolve(offloaded), shape) == fullest.optimizer
    assert memory_shortage(resolve(offloaded), shape, replace(least, memory=least.memory * 0.99)) == ""
    assert "optimizer.offload=true" in smallest_change(
        resolve(config), shape, replace(least, memory=least.memory * 0.99)
    )


def test_twice_the_bandwidth_and_arithmetic_take_half_the_ideal_time():
    config = config_of("policy.model_name=Qwen/Qwen2.5-7B")  # the GPU, not the host, determines its time
    shape = model_shape(resolve(config))
    gpu = device("h100")
    twice = replace(gpu, compute=2 * gpu.compute, bandwidth=2 * gpu.bandwidth, nvlink=2 * gpu.nvlink)
    ideal = Rates(generation=Phase(0.0, 1.0), training=Phase(0.0, 1.0), sync=Phase(0.0, 1.0))
    assert step_time(resolve(config), shape, twice, ideal).step == pytest.approx(
        step_time(resolve(config), shape, gpu, ideal).step / 2, rel=0.05
    )


def test_a_calibration_recovers_the_law_its_observations_follow(tmp_path):
    law = Phase(0.004, 2.5)
    works = [Work(units, ideal) for units, ideal in ((30, 0.1), (30, 0.4), (90, 0.2), (60, 1.0))]
    found = fit([Observation(work, law.seconds(work.units, work.ideal)) for work in works], Phase(1.0, 1.0))
    assert (found.fixed, found.factor) == pytest.approx((law.fixed, law.factor))
    # One step in four that something held up does not move it.
    disturbed = [
        Observation(work, law.seconds(work.units, work.ideal) * (3 if i % 4 == 0 else 1))
        for i, work in enumerate(works * 3)
    ]
    assert fit(disturbed[1:], Phase(1.0, 1.0)).factor == pytest.approx(law.factor, rel=1e-3)
    # Observations of one kind cannot tell the two apart: the assumed law is scaled.
    alike = [Observation(Work(n, 0.01 * n), 3 * Phase(1.0, 1.0).seconds(n, 0.01 * n)) for n in (10, 20, 40)]
    assert fit(alike, Phase(1.0, 1.0)) == Phase(pytest.approx(3.0), pytest.approx(3.0))
    rates = Rates(generation=found, verify=0.25, measured=["a run"])
    save_rates(rates, tmp_path / "rates.json")
    assert load_rates(tmp_path / "rates.json") == rates
    (tmp_path / "other.json").write_text(json.dumps({"generation": 3}))
    with pytest.raises(ConfigError, match="not a calibration file"):
        load_rates(tmp_path / "other.json")


def test_batches_are_worked_out_in_one_line():
    config = config_of(
        "policy.train_global_batch_size=128", "gdpo.num_prompts_per_step=64", "policy.micro_batch_tokens=3072"
    )
    assert batch_arithmetic(resolve(config)) == (
        "64 prompts x 16 samples = 1024 samples = 8 optimizer updates of 128 = at most 16 micro-batches of at most "
        "3072 tokens on each of 4 data-parallel ranks"
    )


@pytest.mark.slow
def test_a_sweep_ranks_layouts_that_fit_up_to_1024_gpus():
    config = config_of("policy.model_name=Qwen/Qwen2.5-32B")
    gpu = device("h100")
    shape = model_shape(resolve(config))
    found = sweep(resolve(config), shape, gpu, Rates(), 1024)
    best = best_per_count(found)
    assert [c.gpus for c in best] == [n for n in gpu_counts(1024, 8) if n >= best[0].gpus] and best[0].gpus > 2
    assert all(c.time.step == min(o.time.step for o in found if o.gpus == c.gpus) for c in best)
    assert all(c.tensor * c.pipeline * c.data + c.engines * c.engine_tensor == c.gpus for c in found)


def test_command_prints_the_plan_plots_the_sweep_and_refuses_in_one_line(tmp_path, capsys):
    assert cli.main(["plan", "--config", str(GPU_CONFIG), "--gpu", "b200", *SEPARATE]) == 0
    shown = capsys.readouterr().out
    for subject in (
        "device",
        "mesh",
        "arithmetic",
        "per rank",
        "per engine",
        "fits",
        "refit",
        "time",
        "split",
        "assumes",
    ):
        assert f"\n{subject} " in f"\n{shown}"
    assert [line.split()[0] for line in shown.splitlines()[:3]] == ["fits", "time", "split"]
    figure = tmp_path / "sweep.png"
    assert cli.main(["plan", "--config", str(GPU_CONFIG), "--sweep", "16", "--out", str(figure), *SEPARATE]) == 0
    assert figure.read_bytes().startswith(b"\x89PNG") and "16 GPUs" in capsys.readouterr().out
    for arguments, named in (
        (["--gpu", "h1000"], "did you mean h100?"),
        (["--sweep", "4096"], "between 2 and 1024"),
        (["policy.model_name=nobody/unknown"], "shape of nobody/unknown is unknown"),
        (["--calibration", str(tmp_path / "none.json")], "none.json not found"),
        (["--calibrate", str(tmp_path)], "is not a run folder"),
    ):
        assert cli.main(["plan", "--config", str(GPU_CONFIG), *SEPARATE, *arguments]) == 2
        error = capsys.readouterr().err
        assert named in error and error.count("\n") == 1


def test_a_plan_needs_only_a_config_json_and_a_run_needs_weights(tmp_path, capsys):
    fields = {**KNOWN["Qwen/Qwen2.5-1.5B"], "architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-6}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert cli.main(["plan", "--config", str(GPU_CONFIG), *SEPARATE]) == 0
    known = capsys.readouterr().out
    assert cli.main(["plan", "--config", str(GPU_CONFIG), f"policy.model_name={tmp_path}", *SEPARATE]) == 0
    described = capsys.readouterr().out
    assert [line for line in known.splitlines() if "model " not in line] == [
        line for line in described.splitlines() if "model " not in line
    ]
    assert cli.main(["train", "--dry-run", "--config", str(GPU_CONFIG), f"policy.model_name={tmp_path}"]) == 2
    assert "has no weights (*.safetensors)" in capsys.readouterr().err


def test_a_dry_run_shows_arithmetic_and_memory(capsys):
    assert cli.main(["train", "--dry-run", "--config", str(GPU_CONFIG), *SEPARATE]) == 0
    shown = capsys.readouterr().out
    for subject, words in dry_run_lines(resolve(config_of())):
        assert f"# {subject:<10} {words}" in shown
    assert (
        dict(plan_lines(resolve(config_of()), model_shape(resolve(config_of())), device("h100"), Rates()))["arithmetic"]
        == dict(dry_run_lines(resolve(config_of())))["arithmetic"]
    )


@pytest.mark.parametrize(
    "overrides, notes",
    [
        ([], []),
        (
            ["policy.generation.engines=500"],
            [
                "policy.generation.engines: 501 ranks (policy 1, engines 500) share 2 cores of this machine",
                "policy.generation.engines: the run's processes need at least 387 GB of memory, but this machine "
                "has 16 GB",
            ],
        ),
        (
            ["rollout.env_workers=4000"],
            ["rollout.env_workers: the run's processes need at least 121 GB of memory, but this machine has 16 GB"],
        ),
        (
            ["policy.megatron_cfg.data_parallel_size=2"],
            ["policy.megatron_cfg: 3 ranks (policy 2, engines 1) share 2 cores of this machine"],
        ),
        (["policy.generation.engines=500", "cluster.num_nodes=2"], []),
        (["policy.generation.engines=500", "cluster.address=auto"], []),
    ],
)
def test_dry_run_reports_memory_beyond_that_of_the_machine(overrides, notes, capsys, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("gdpo_nemo.planning.fit.host", lambda: replace(host(), memory=16e9))
    sizes = ["cluster.cpus_per_node=2", *overrides]
    assert cli.main(["train", "--dry-run", "--config", str(CPU_CONFIG), *sizes]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("# note")]
    found = [line.removeprefix("# note").strip() for line in shown]
    assert [line for line in found if "this machine" in line] == notes


@pytest.mark.parametrize("gpus, overrides, noted", [(4, [], True), (0, [], True), (8, [], False), (None, [], False),
                                                    (4, ["cluster.address=auto"], False)])  # fmt: skip
def test_the_dry_run_names_gpus_that_the_machine_does_not_have(gpus, overrides, noted, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("gdpo_nemo.planning.fit._local_gpus", lambda: gpus)
    note = ("note", f"cluster.gpus_per_node: the run requires 8 GPUs, but this machine has {gpus}")
    assert (note in dry_run_lines(resolve(config_of(*overrides)))) == noted


JUDGE = "judge: {plugin: judge, base_url: 'http://h/v1', model: m, rubric: {a: '?'}, votes: 3, temperature: 1}"
ROWS = JUDGE.replace("{a: '?'}", "a, calls: criterion")
RANKING = JUDGE.replace("votes", "ranking: true, votes")
FUNCTION = "{function: llm_judge, base_url: 'http://h/v1', model: m, question: '?', max_tokens: null}"


@pytest.mark.parametrize(
    "environment, overrides, said",
    [
        (JUDGE, [], "env.judge: at most 96 calls per step and 960 in the run; at most 58,368 and 583,680 tokens (96 "),
        (JUDGE, ["gdpo.dynamic_sampling={enabled: true, max_rounds: 2}"], "at most 192 calls per step and 1,920 in"),
        (JUDGE, ["gdpo.val_period=4", "gdpo.val_prompts=5"], "at most 96 calls per step and 1,005 in the run;"),
        (
            ROWS,
            [],
            "env.judge: for each criterion of a row, at most 96 calls per step and 960 in the run; at most 402,432",
        ),
        (RANKING, [], "at most 24 calls per step and 240 in the run; at most 116,736 and 1,167,360 tokens (768 of the"),
        (RANKING, ["gdpo.val_period=4", "gdpo.val_prompts=5"], "at most 24 calls per step and 330 in the run;"),
        (JUDGE, ["gdpo.val_at_start=true"], "at most 96 calls per step and 960 in the run, plus validations;"),
        (
            f"functions: {{functions: {{a: {FUNCTION}}}}}",
            [],
            "at most 32 calls per step and 320 in the run; the replies",
        ),
    ],
)
def test_dry_run_bounds_the_calls_of_judges(environment, overrides, said, tmp_path):
    (tmp_path / "run.yaml").write_text(
        "gdpo: {rewards: {a: 1.0}, num_prompts_per_step: 4, num_generations_per_prompt: 8, max_num_steps: 10}\n"
        "policy: {model_name: a/b, precision: float32, max_total_sequence_length: 96}\n"
        f"data: {{train: {{path: a/b}}, validation: {{path: a/c}}}}\nenv: {{{environment}}}\n"
    )
    limit = "policy.generation.max_new_tokens=16"
    config = load_config(tmp_path / "run.yaml", [limit, *overrides])
    assert said in dict(dry_run_lines(resolve(config)))["judge"]


def test_shared_prompts_are_planned_by_their_rows():
    """Tokens and pairs of the layout that the driver makes of samples of the expected lengths."""
    overrides = ["gdpo.num_prompts_per_step=4", "gdpo.num_generations_per_prompt=8", "policy.micro_batch_tokens=300"]
    config = load_config(CPU_CONFIG, [*overrides, "policy.max_total_sequence_length=300"])
    prompt, completion = 120, 40
    batch = [
        TrainSequence(np.full(prompt, group), np.array([sample, *[0] * (completion - 1)]), np.zeros(completion))
        for group in range(4)
        for sample in range(8)
    ]
    found = shared_layout(batch, Budget(1, 300))
    computed = sum(prompt + completion - n for n in found.shared) / (len(batch) * (prompt + completion))
    pairs = sum((prompt + completion) ** 2 - n**2 for n in found.shared) / (len(batch) * (prompt + completion) ** 2)
    for sharing, expected in ((True, (computed, pairs)), ("auto", (computed, pairs)), (False, (1, 1))):
        config.policy.share_prompts = sharing
        saving = expected_saving(resolve(config), prompt, completion)
        assert (saving.tokens, saving.attention) == pytest.approx(expected)
    config.gdpo.num_generations_per_prompt = 2
    for sharing, saved in ((True, 0.065), ("auto", 0)):
        config.policy.share_prompts = sharing
        assert 1 - expected_saving(resolve(config), 15, 100).tokens == pytest.approx(saved, abs=1e-3)


def test_auto_does_not_share_prompts_of_recurrent_layers_on_gpus(tmp_path):
    """Their kernels cannot continue from the state of a prompt."""
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["nvidia/NVIDIA-Nemotron-Nano-9B-v2"]))
    saved = []
    for sharing in ("auto", True):
        config = config_of(f"policy.model_name={tmp_path}", f"policy.share_prompts={sharing}")
        saved.append(1 - expected_saving(resolve(config), 500, 100).tokens)
    assert saved[0] == 0 < saved[1]


def test_plan_reports_the_saving_of_shared_prompts_and_includes_it_if_enabled():
    ways = [[f"policy.share_prompts={way}", "policy.micro_batch_tokens=100000"] for way in ("auto", "false")]
    on, off = (load_config(CPU_CONFIG, way) for way in ways)
    shape = model_shape(resolve(on))
    lengths = Lengths(200, 50, 100)
    fast, slow = (step_time(resolve(c), shape, host(), CPU_RATES, lengths).training for c in (on, off))
    assert fast < 0.6 * slow
    assert policy_memory(resolve(on), shape).total < policy_memory(resolve(off), shape).total
    line = dict(plan_lines(resolve(off), shape, host(), replace(CPU_RATES, prompt_share=1.0)))["sharing"]
    assert "for every sample (policy.share_prompts: false)" in line and "; without: " in line
