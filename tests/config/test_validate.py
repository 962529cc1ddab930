"""Validation: each impossible or idle combination is refused by name; derived numbers are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bad_input import EMBEDDING_ONLY

from gdpo_nemo.config import requirements
from gdpo_nemo.config.data_files import may_be_on_the_hub
from gdpo_nemo.config.effects import EFFECTS, SWITCHED_OFF
from gdpo_nemo.config.layout import resolve_layout
from gdpo_nemo.config.load import all_keys, load_config, save_config
from gdpo_nemo.config.model_checks import check_model, resolve
from gdpo_nemo.config.requirements import REQUIREMENTS
from gdpo_nemo.config.schema import Config
from gdpo_nemo.models.weights import parameters
from gdpo_nemo.planning.report import describe
from gdpo_nemo.planning.shape import model_shape
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SAPO = f"{CONFIGS.parent}/examples/sapo.py:sapo"
GPUS = ["cluster.gpus_per_node=8"]
MEGATRON = "policy.megatron_cfg"
VLLM = "policy.generation.vllm_cfg"


def refused(path: Path, *overrides: str) -> str:
    config = load_config(path, overrides)
    with pytest.raises(ConfigError) as caught:
        validate(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (["gdpo.num_generations_per_prompt=1"], "gdpo.num_generations_per_prompt: must be at least 2"),
        (["gdpo.rewards={correctness: 0, format: 0}"], "gdpo.rewards: every weight is 0"),
        (["gdpo.rewards.format=.inf"], "gdpo.rewards.format: must be at least -1,000,000,000,000 and at most"),
        (["policy.train_global_batch_size=48"], "policy.train_global_batch_size: 48 does not divide the 128 samples"),
        (["policy.generation.max_new_tokens=1024"], "policy.generation.max_new_tokens: 1024 leaves no room"),
        (["policy.micro_batch_tokens=512"], "policy.micro_batch_tokens: 512 is below"),
        (["policy.logprob_micro_batch_tokens=512"], "policy.logprob_micro_batch_tokens: 512 is below"),
        (["policy.generation.top_p=0"], "policy.generation.top_p"),
        (["policy.generation.temperature=0"], "policy.generation.temperature: must be more than 0"),
        (["run.dir=' '"], "run.dir: must not be empty"),
        (["gdpo.rewards={total: 1}"], "gdpo.rewards: 'total' is not a valid component name"),
        (
            [
                f"{MEGATRON}.scheduler.lr_decay_style=linear",
                f"{MEGATRON}.scheduler.lr_decay_steps=5",
                f"{MEGATRON}.scheduler.lr_warmup_steps=5",
            ],
            f"{MEGATRON}.scheduler.lr_decay_steps: 5 must be more than",
        ),
        (["logger.aliases=[nemo_rl, openrlhf]"], "logger.aliases: 'openrlhf' is not one of nemo_rl, trl"),
        (["logger.completions_period=0"], "logger.completions_period: must be at least 1"),
        (["logger.num_completions=-1"], "logger.num_completions: must be 0 or more"),
        (["gdpo.max_num_steps=0"], "gdpo.max_num_steps: must be at least 1"),
        (["run.date=yesterday"], "run.date: must be a date such as 2026-11-28, got 'yesterday'"),
        *(
            (["gdpo.component_gradient_period=1", *why], f"gdpo.component_gradient_period: {message}")
            for why, message in (
                (["loss_fn.type=target_po"], "cannot split the gradient: loss_fn.type target_po is not linear"),
                (["loss_fn.type=kl_cov"], "cannot split the gradient: loss_fn.type kl_cov selects tokens"),
                (["gdpo.credit=span"], "cannot split the gradient: gdpo.credit span has different components"),
                ([f"loss_fn.type={SAPO}"], f"cannot split the gradient: loss_fn.type {SAPO} is a custom loss"),
                (["algorithm.type=ppo"], "has no effect with algorithm ppo"),
            )
        ),
        (["gdpo.max_num_epochs=0"], "gdpo.max_num_epochs: must be at least 1"),
        (
            ["gdpo.dynamic_sampling={enabled: true, batch_multiplier: 0.5}"],
            "gdpo.dynamic_sampling.batch_multiplier: must be at least 1",
        ),
        (
            ["gdpo.dynamic_sampling={enabled: true, batch_multiplier: .inf}"],
            "gdpo.dynamic_sampling.batch_multiplier: must be at most",
        ),
        (["gdpo.dynamic_sampling.batch_multiplier=2"], "gdpo.dynamic_sampling.batch_multiplier: has no effect"),
        (["policy.lora={rank: 4, target_modules: [lm_hed]}"], "did you mean lm_head?"),
        (
            [*GPUS, "policy.precision=bfloat16", "policy.lora.rank=4", f"{MEGATRON}.fp8=hybrid"],
            f"{MEGATRON}.fp8: conflicts with policy.lora",
        ),
        (
            ["gdpo.val_pass_at_k=[1, 2]"],
            "gdpo.val_pass_at_k: 2 exceeds gdpo.val_generations_per_prompt (1)",
        ),
        (["gdpo.val_pass_at_k=[0]"], "gdpo.val_pass_at_k[0]: must be at least 1 and at most"),
        (["gdpo.val_period=5"], "gdpo.val_period: requires data.validation, which is null"),
        (["data.train.environment=toi"], "data.train.environment: 'toi' is not defined in env, did you mean toy?"),
        (["env.other={}", "data.train.environment=null"], "data.train.environment: must be set"),
        (["env.toy=3"], "env.toy: expected options"),
        (["env.toy={min_valid: 17}"], "env.toy.min_valid: 17 exceeds the 8 samples of a group"),
        ([f"{MEGATRON}.sequence_parallel=true"], f"{MEGATRON}.sequence_parallel: requires"),
        (
            [f"{MEGATRON}.virtual_pipeline_model_parallel_size=2"],
            f"{MEGATRON}.virtual_pipeline_model_parallel_size: requires",
        ),
        ([f"{MEGATRON}.transformer_engine=true"], f"{MEGATRON}.transformer_engine: requires GPUs"),
        (["policy.share_prompts=often"], "policy.share_prompts: 'often' is not a valid value"),
        (["policy.share_prompts=1"], "policy.share_prompts: 1 is not a valid value"),
        (
            [f"{MEGATRON}.attention_backend=flex"],
            f"{MEGATRON}.attention_backend: flex requires GPUs",
        ),
        ([f"{MEGATRON}.fused_logprobs=true"], f"{MEGATRON}.fused_logprobs: requires GPUs"),
        (
            [*GPUS, f"{MEGATRON}.fused_logprobs=true", "policy.lora={rank: 4, target_modules: [q_proj, lm_head]}"],
            f"{MEGATRON}.fused_logprobs: not supported with an adapter on lm_head",
        ),
        ([f"{MEGATRON}.attention_backend=flash"], f"{MEGATRON}.attention_backend: flash requires GPUs"),
        ([f"{MEGATRON}.expert_model_parallel_size=3"], f"{MEGATRON}.expert_model_parallel_size: 3"),
        ([*GPUS, f"{MEGATRON}.tensor_model_parallel_size=8"], "the policy needs 8 GPUs"),
        (
            [*GPUS, f"{MEGATRON}.tensor_model_parallel_size=2", f"{MEGATRON}.data_parallel_size=4"],
            "the policy needs 8 GPUs",
        ),
        ([*GPUS, f"{MEGATRON}.tensor_model_parallel_size=4"], "leave 7, which is not a multiple of the 4 ranks"),
        ([*GPUS, "cluster.num_nodes=2", f"{VLLM}.tensor_parallel_size=16"], "does not fit on a node of 8 GPUs"),
        (["policy.model_name=no/such/folder"], "policy.model_name: no/such/folder is neither a folder nor a hub name"),
        (["policy.model_factory=absent.py:make"], "policy.model_factory: absent.py not found"),
        (
            ["policy.model_name=Qwen/Q", "policy.model_factory=examples/make_tiny_model.py:make_tiny_model"],
            "policy.model_name: Qwen/Q has the form of a hub name, but policy.model_factory would create a model",
        ),
        (["policy.tokenizer_name=../nowhere"], "policy.tokenizer_name"),
        (["data.train.path=absent.jsonl"], "data.train.path: absent.jsonl not found"),
    ],
)
def test_impossible_settings_are_refused_by_name(minimal, overrides, expected):
    assert expected in refused(minimal, *overrides)


@pytest.mark.parametrize(
    "overrides, key",
    [
        ([], f"{VLLM}.gpu_memory_utilization=0.5"),
        (GPUS, f"{VLLM}.kv_cache_memory_bytes=1000000"),
        ([], f"{VLLM}.gpu_kv_cache_memory_bytes=1000000"),
        ([], f"{VLLM}.head_dtype=model"),
        ([*GPUS, "policy.precision=float32"], f"{VLLM}.head_dtype=model"),
        (["loss_fn.type=target_po"], "loss_fn.ratio_clip_c=3.0"),
        ([], "loss_fn.target_temperature=0.5"),
        ([], "loss_fn.constant_length=10"),
        ([], "loss_fn.reference_policy_kl_type=k1"),
        ([], "loss_fn.off_policy.ratio_max=4.0"),
        (["loss_fn.off_policy.mode=truncate"], "loss_fn.off_policy.ratio_min=0.5"),
        ([], f"{MEGATRON}.scheduler.lr_decay_steps=10"),
        ([], f"{MEGATRON}.overlap_param_gather=true"),
        ([], f"{MEGATRON}.optimizer.muon_momentum=0.9"),
        ([], f"{MEGATRON}.optimizer.muon_tp_mode=blockwise"),
        ([], "gdpo.dynamic_sampling.max_rounds=9"),
        ([], "checkpointing.keep_best=3"),
        (["policy.generation.verify_weights=false"], "policy.generation.parity_limit=0.5"),
        ([], "data.train.prompt_key=text"),
        ([], "data.train.environment_key=task"),
        ([], "policy.offload_reference=false"),
        ([*GPUS, "policy.lora.rank=8"], "policy.offload_reference=false"),
    ],
)
def test_a_key_without_effect_is_refused_and_its_default_is_not(minimal, overrides, key):
    assert refused(minimal, *overrides, key).startswith(f"{key.partition('=')[0]}: has no effect")
    validate(load_config(minimal, overrides))


def test_disabled_validation_accepts_its_settings_and_notes_them(minimal):
    changes = ["data.validation={environment: toy}", "gdpo.val_prompts=8", "gdpo.val_period=5"]
    assert validate(load_config(minimal, changes)).notes == ()
    notes = validate(load_config(minimal, [*changes, "gdpo.val_period=0"])).notes
    assert any(note.startswith("gdpo.val_prompts: has no effect") for note in notes)


def test_an_address_without_a_port_to_listen_at_is_noted(minimal):
    notes = validate(load_config(minimal, ["logger.prometheus.host=0.0.0.0"])).notes
    assert "logger.prometheus.host: has no effect while logger.prometheus.port is null" in notes


@pytest.mark.parametrize(
    "overrides, ranks, data, idle",
    [
        ([], 1, 1, 0),
        ([f"{MEGATRON}.tensor_model_parallel_size=2", f"{MEGATRON}.data_parallel_size=3"], 6, 3, 0),
        ([*GPUS, "policy.generation.engines=4"], 4, 4, 0),
        (
            [
                *GPUS,
                "policy.generation.engines=2",
                f"{VLLM}.tensor_parallel_size=2",
                f"{MEGATRON}.pipeline_model_parallel_size=2",
            ],
            4,
            2,
            0,
        ),
        ([*GPUS, f"{MEGATRON}.tensor_model_parallel_size=2", f"{MEGATRON}.data_parallel_size=3"], 6, 3, 1),
        ([*GPUS, "cluster.num_nodes=2", f"{MEGATRON}.context_parallel_size=3"], 15, 5, 0),
    ],
)
def test_policy_and_engines_share_the_gpus_without_overlap(minimal, overrides, ranks, data, idle):
    config = load_config(minimal, overrides)
    layout = resolve_layout(config)
    assert (layout.policy_ranks, layout.data, layout.idle_gpus) == (ranks, data, idle)
    assert any("stay idle" in note for note in validate(config).notes) == bool(idle)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    shape = {
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_hidden_layers": 6,
        "max_position_embeddings": 1024,
    }
    sizes = {"model_type": "llama", "hidden_size": 384, "intermediate_size": 512, "vocab_size": 99}
    (folder / "config.json").write_text(json.dumps({**sizes, **shape}))
    (folder / "model.safetensors").write_bytes(EMBEDDING_ONLY)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    "key, expected",
    [
        (
            f"{MEGATRON}.tensor_model_parallel_size=3",
            "3 does not divide the model's 4 key-value heads; possible: 1, 2, 4",
        ),
        (f"{MEGATRON}.tensor_model_parallel_size=8", "8 does not divide the model's 12 heads; possible: 1, 2, 4"),
        (f"{MEGATRON}.pipeline_model_parallel_size=4", "4 does not divide the model's 6 layers; possible: 1, 2, 3, 6"),
        (f"{VLLM}.tensor_parallel_size=5", "5 does not divide the model's 12 heads"),
        ("policy.max_total_sequence_length=2048", "2048 exceeds the 1024 positions of the model"),
    ],
)
def test_local_model_is_compared_with_the_layout(minimal, model, key, expected):
    name = f"policy.model_name={model}"
    validate(load_config(minimal, [name]))
    assert expected in refused(minimal, name, key)


def test_impossible_expert_parallelism_is_refused_with_the_possible_sizes(minimal):
    said = refused(minimal, f"{MEGATRON}.expert_model_parallel_size=3", f"{MEGATRON}.data_parallel_size=4")
    assert (
        "3 x expert tensor 1 = 3 does not divide the 4 ranks" in said
        and "possible values with this expert tensor size: 1, 2, 4" in said
    )


_AWARE = "optimizer.use_precision_aware_optimizer=true"
_MUON = "optimizer.type=muon"


@pytest.mark.parametrize(
    "keys, expected",
    [
        (["fp8=hybrid"], "requires GPUs and the layers of TransformerEngine"),
        (["recompute_layers=2"], "requires recompute: full"),
        (["recompute=full", "recompute_layers=0"], "recompute_layers: must be at least 1"),
        (["optimizer.offload=true"], "requires policy.precision bfloat16"),
        (["optimizer.exp_avg_dtype=bfloat16"], "exp_avg_dtype: requires use_precision_aware_optimizer: true"),
        (["optimizer.main_grads_dtype=bfloat16"], "main_grads_dtype: requires use_precision_aware_optimizer: true"),
        ([_AWARE], "use_precision_aware_optimizer: requires policy.megatron_cfg.use_distributed_optimizer: true"),
        ([_AWARE, "use_distributed_optimizer=true"], "requires policy.precision: bfloat16"),
        (
            [_MUON, "use_distributed_optimizer=true"],
            "use_distributed_optimizer: conflicts with policy.megatron_cfg.opt",
        ),
        ([_MUON, _AWARE], "requires policy.megatron_cfg.use_distributed_optimizer: true"),
        (["recompute_modules=[mlp]"], "recompute_modules: requires recompute: selective"),
        (["recompute=full", "recompute_modules=[mlp]"], "recompute_modules: requires recompute: selective"),
        (["recompute=selective", "recompute_modules=[]"], "must not be empty; use recompute: none"),
        (["recompute=selective", "recompute_modules=[mlp,moe_act]"], "must be among core_attn, mlp (got 'moe_act')"),
    ],
)
def test_switches_that_could_do_nothing_are_refused(minimal, keys, expected):
    assert expected in refused(minimal, "policy.precision=float32", *(f"{MEGATRON}.{key}" for key in keys))


def test_optimizer_of_half_the_size_is_refused_if_it_has_no_effect(minimal):
    keys = [f"{MEGATRON}.{_AWARE}", f"{MEGATRON}.use_distributed_optimizer=true", "policy.precision=bfloat16"]
    assert "requires TransformerEngine's Adam, on GPUs" in refused(minimal, *keys)
    gpus = [*keys, "cluster.gpus_per_node=8"]
    validate(load_config(minimal, gpus))
    assert "requires TransformerEngine's" in refused(minimal, *gpus, f"{MEGATRON}.transformer_engine=false")
    said = refused(minimal, *gpus, f"{MEGATRON}.optimizer.offload=true")
    assert "use_precision_aware_optimizer: conflicts with policy.megatron_cfg.optimizer.offload" in said


def test_muon_requires_its_package_and_has_no_effects_by_component(minimal, monkeypatch):
    key = f"{MEGATRON}.{_MUON}"
    config = load_config(minimal, [key, f"{MEGATRON}.optimizer.muon_fp32_matmul_prec=high"])
    validate(config)
    said = refused(minimal, key, "gdpo.component_gradient_period=10")
    assert said.startswith("gdpo.component_gradient_period: conflicts with policy.megatron_cfg.optimizer.type muon")
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    assert "optimizer.type: muon requires the package emerging-optimizers" in refused(minimal, key)
    validate(load_config(minimal))


def test_the_chunks_of_an_interleaved_pipeline_divide_the_layers(minimal, model):
    stages = [f"policy.model_name={model}", f"{MEGATRON}.pipeline_model_parallel_size=3"]
    chunks = f"{MEGATRON}.virtual_pipeline_model_parallel_size"
    validate(load_config(minimal, [*stages, f"{chunks}=2"]))
    said = refused(minimal, *stages, f"{chunks}=4")
    assert f"{chunks}: 4 does not divide the model's 2 layers in each of 3 stages; possible: 1, 2" in said


def test_an_output_layer_that_is_the_embedding_takes_no_adapter(minimal, model):
    adapters = [f"policy.model_name={model}", "policy.lora={rank: 4, target_modules: [q_proj, lm_head]}"]
    validate(load_config(minimal, adapters))
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**content, "tie_word_embeddings": True}))
    assert "the model's lm_head is tied to the embedding" in refused(minimal, *adapters)


def test_experts_need_a_model_that_has_some(minimal, model):
    experts = [
        f"policy.model_name={model}",
        f"{MEGATRON}.expert_model_parallel_size=2",
        f"{MEGATRON}.data_parallel_size=2",
    ]
    assert "has no experts" in refused(minimal, *experts)
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**content, **EXPERTS}))
    validate(load_config(minimal, [*experts, "policy.router_replay=sampler"]))
    validate(load_config(minimal, [*experts, "policy.router_replay=off"]))
    engines = "policy.generation.vllm_cfg.tensor_parallel_size=2"
    said = refused(minimal, *experts, "policy.router_replay=sampler", engines)
    assert "sampler requires policy.generation.vllm_cfg.tensor_parallel_size=1 on CPUs, got 2" in said
    (model / "config.json").write_text(json.dumps({**content, **EXPERTS, "hidden_size": 80, "head_dim": 32}))
    assert "requires a hidden size that is a multiple of 32 for models with experts, got 80" in refused(
        minimal, *experts
    )
    validate(load_config(minimal, [*experts, "cluster.gpus_per_node=4"]))


def test_a_model_folder_without_weights_or_config_is_refused(minimal, model):
    name = f"policy.model_name={model}"
    (model / "model.safetensors").unlink()
    assert "has no weights" in refused(minimal, name)
    (model / "config.json").write_text("{")
    assert "is not valid JSON" in refused(minimal, name)
    (model / "config.json").unlink()
    assert "has no config.json" in refused(minimal, name)


def test_an_absent_model_needs_a_factory_whose_function_exists(minimal, tmp_path):
    (tmp_path / "factory.py").write_text("def make(folder, seed): pass\n")
    absent = f"policy.model_name={tmp_path / 'absent'}"
    assert "is neither a folder nor a hub name" in refused(minimal, absent)
    validate(load_config(minimal, [absent, f"policy.model_factory={tmp_path / 'factory.py'}:make"]))
    assert "has no function build" in refused(minimal, absent, f"policy.model_factory={tmp_path / 'factory.py'}:build")


def test_model_of_a_factory_is_compared_with_the_layout(minimal, tmp_path):
    demo = [
        f"policy.model_name={tmp_path / 'absent'}",
        "policy.model_factory=examples/make_tiny_model.py:make_tiny_model",
    ]
    demo += ["policy.max_total_sequence_length=64", "policy.generation.max_new_tokens=32"]
    three = f"{MEGATRON}.tensor_model_parallel_size=3"
    assert "3 does not divide the model's 4 heads; possible: 1, 2, 4" in refused(minimal, *demo, three)
    assert "exceeds the 128 positions of the model" in refused(minimal, *demo, "policy.max_total_sequence_length=256")
    assert parameters(model_shape(resolve(load_config(minimal, demo)))) == 1_053_952


@pytest.mark.parametrize(
    "text, expected",
    [
        ("MODEL_CONFIGS = {'make': dict(model_type='qwen2')}", "must be a literal"),
        ("MODEL_CONFIGS = {'make': 3}", "must map make to the fields of config.json"),
        ("MODEL_CONFIGS = {'make': {'model_type': 'gpt2'}}", "model type 'gpt2' is not supported"),
    ],
)
def test_declaration_of_a_model_by_its_factory_is_checked(minimal, tmp_path, text, expected):
    (tmp_path / "factory.py").write_text(f"{text}\ndef make(folder, seed): pass\n")
    absent = [f"policy.model_name={tmp_path / 'absent'}", f"policy.model_factory={tmp_path / 'factory.py'}:make"]
    assert expected in refused(minimal, *absent)


@pytest.mark.parametrize(
    "name",
    ["~nobody/x", "a/../b", "org/", "/x", "o rg/x", "o/..", "./x", "o/a--b", "o/a..b", "o/x.git", "o/-x", "o/x.",
     "o/.x", "org/\u00e4", "org/" + "x" * 97, "org/x\x1b[31m", "org/x\n", "org/x\0", "o/x/y", "", "-o/x"],
)  # fmt: skip
def test_name_that_the_hub_does_not_allow_is_not_a_hub_name(name):
    assert not may_be_on_the_hub(name)


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen2.5-0.5B", "01-ai/Yi-6B", "a_b/c_d", "o/" + "x" * 94, "o/_x", "microsoft/phi-4"]
)
def test_a_name_that_the_hub_allows_is_a_hub_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert may_be_on_the_hub(name)


def test_an_empty_data_file_is_refused_and_a_hub_name_is_left_to_the_run(minimal, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    assert "is empty" in refused(minimal, f"data.train.path={tmp_path / 'empty.jsonl'}")
    assert validate(load_config(minimal, ["data.train.path=openai/gsm8k"])).notes == ()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("gdpo_*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_valid_and_so_is_its_resolved_form(path, tmp_path):
    factory = tmp_path / "factory.py"
    factory.write_text("def make(folder, seed): pass\n")
    local = [] if "gpu" in path.stem else [f"policy.model_factory={factory}:make"]
    config = load_config(path, local)
    assert validate(config).notes == ()
    save_config(config, tmp_path / "config.yaml")
    assert validate(load_config(tmp_path / "config.yaml")).notes == ()


def test_the_plan_works_the_batch_arithmetic_out(minimal):
    config = load_config(minimal, ["policy.train_global_batch_size=32", "policy.generation.top_p=0.9"])
    plan = describe(resolve(config), validate(config).notes)
    assert "16 prompts x 8 samples = 128 samples = 4 optimizer updates of 32" in plan
    assert "100 steps = 12800 samples, 400 updates" in plan
    assert "note       policy.generation: with top_p" in plan


@pytest.mark.parametrize(
    "turns, tokens",
    [([], 36), (["max_turns=3"], 108), (["max_turns=3", "max_tokens=50"], 50)],
    ids=["one", "three", "budget"],
)
def test_null_constant_length_has_its_documented_value(turns, tokens):
    from gdpo_nemo.commands.explain import explain
    from gdpo_nemo.rollouts.credit import longest_completion

    config = load_config(CONFIGS / "gdpo_tiny_cpu.yaml", [f"rollout.turns.{key}" for key in turns])
    assert longest_completion(config) == tokens
    said = " ".join(explain("loss_fn.constant_length").split())
    assert (
        "rollout.turns.max_tokens" in said and "policy.generation.max_new_tokens times rollout.turns.max_turns" in said
    )


STAGES = f"{MEGATRON}.pipeline_model_parallel_size=4"
FIRST, LAST = (f"{MEGATRON}.num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ([STAGES, f"{FIRST}=2"], "first_pipeline_stage: 2 of the model's 6 layers leave 4 for the 3 other stages"),
        ([STAGES, f"{FIRST}=2", f"{LAST}=3"], "2 and 3 of the model's 6 layers leave 1 for the 2 other stages"),
        (
            [f"{MEGATRON}.pipeline_model_parallel_size=2", f"{FIRST}=2", f"{LAST}=3"],
            "have 2 and 3 layers, but the model has 6",
        ),
        ([STAGES, f"{FIRST}=0"], "first_pipeline_stage: must be at least 1"),
        ([f"{FIRST}=2"], "num_layers_in_first_pipeline_stage: has no effect while"),
        (
            [STAGES, f"{FIRST}=3", f"{MEGATRON}.virtual_pipeline_model_parallel_size=2"],
            "conflicts with virtual_pipeline",
        ),
        ([STAGES], "or set num_layers_in_first_pipeline_stage"),
        ([f"{MEGATRON}.freeze_moe_router=true"], "freeze_moe_router: has no effect because the model in"),
        ([f"{MEGATRON}.moe_router_dtype=float64"], "moe_router_dtype: has no effect because the model in"),
        (["policy.router_replay=sampler"], "policy.router_replay: has no effect because the model in"),
        (["policy.router_replay=true"], "policy.router_replay: True is not a valid value (accepted: off, sampler)"),
    ],
)
def test_an_uneven_pipeline_has_to_hold_the_models_layers(minimal, model, overrides, expected):
    assert expected in refused(minimal, f"policy.model_name={model}", *overrides)


@pytest.fixture
def image_model(model: Path) -> Path:
    """A model with four layers, of which two add features of images."""
    text = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rope_parameters": {"rope_theta": 1e4, "mrope_section": [4, 6, 6], "mrope_interleaved": True},
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 256,
        "deepstack_visual_indexes": [0, 1],
    }
    content = {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision,
        "image_token_id": 500,
        "video_token_id": 501,
    }
    (model / "config.json").write_text(json.dumps(content))
    (model / "model.safetensors").unlink()
    return model


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (
            [STAGES],
            "has 1 layers, but the model adds features of images to its first 2",
        ),
        (
            [f"{MEGATRON}.pipeline_model_parallel_size=2", f"{MEGATRON}.virtual_pipeline_model_parallel_size=2"],
            "use fewer stages, or set num_layers_in_first_pipeline_stage to at least 2",
        ),
        (
            [*GPUS, f"{MEGATRON}.attention_backend=flash"],
            "flash is not supported for a model with rotary positions in images (M-RoPE); use auto or flex",
        ),
    ],
)
def test_settings_that_an_image_model_does_not_support_are_refused(minimal, image_model, overrides, expected):
    config = load_config(minimal, [f"policy.model_name={image_model}", *overrides])
    with pytest.raises(ConfigError) as caught:
        check_model(config.policy, resolve_layout(config), weights=False)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "override, expected", [("policy.lora.rank=4", "policy.lora"), (f"{MEGATRON}.optimizer.type=muon", "muon")]
)
def test_a_tower_is_not_trained_with_adapters_or_muon(minimal, override, expected):
    message = refused(minimal, "policy.vision.train=true", override)
    assert message.startswith("policy.vision.train: conflicts with policy") and expected in message


def test_a_tower_that_does_not_exist_cannot_be_trained(minimal, model):
    expected = "policy.vision.train: the model in"
    assert expected in refused(minimal, f"policy.model_name={model}", "policy.vision.train=true")


@pytest.mark.parametrize(
    "ends, layers",
    [([f"{FIRST}=3"], [3, 1, 1, 1]), ([f"{FIRST}=2", f"{LAST}=2"], [2, 1, 1, 2]), ([f"{LAST}=3"], [1, 1, 1, 3])],
)
def test_plan_places_every_config_that_passes_the_check(minimal, model, ends, layers):
    from gdpo_nemo.config.layout import stage_layers

    config = load_config(minimal, [f"policy.model_name={model}", STAGES, *ends])
    validate(config)
    layout = resolve_layout(config)
    placed = stage_layers(6, layout.pipeline, layout.first_layers, layout.last_layers)
    assert [len(stage) for stage in placed] == layers
    assert [layer for stage in placed for layer in stage] == list(range(6))


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ([f"{MEGATRON}.scheduler.lr_warmup_init=1.0e-7"], "lr_warmup_init: has no effect while"),
        ([f"{MEGATRON}.scheduler.lr_hold_updates=4"], "lr_hold_updates: has no effect with a constant learning rate"),
        ([f"{MEGATRON}.scheduler.lr_hold_updates=0"], "lr_hold_updates: must be at least 1, got 0"),
        (
            [f"{MEGATRON}.scheduler.lr_warmup_steps=5", f"{MEGATRON}.scheduler.lr_warmup_init=1"],
            "lr_warmup_init: 1.0 is above optimizer.lr (1e-06)",
        ),
        (["loss_fn.reference_policy_kl_gradient=score"], "reference_policy_kl_gradient: has no effect while"),
        (["loss_fn.kl_output_clamp_value=0"], "loss_fn.kl_output_clamp_value: must be more than 0"),
        (["data.train.prompt_template=Solve this"], "data.train.prompt_template: must contain {prompt}"),
        (
            [f"{MEGATRON}.freeze_moe_router=true", "policy.lora.rank=8"],
            "freeze_moe_router: has no effect with policy.lora",
        ),
    ],
)
def test_settings_that_a_recipe_of_nemo_rl_brings_are_checked_like_all(minimal, overrides, expected):
    assert expected in refused(minimal, *overrides)


@pytest.mark.parametrize("rule", [*EFFECTS, *SWITCHED_OFF, *REQUIREMENTS], ids=lambda rule: rule.keys.split()[0])
def test_keys_of_a_rule_exist(rule):
    assert set(rule.keys.split()) <= set(all_keys())


@pytest.mark.parametrize("rule", REQUIREMENTS, ids=lambda rule: rule.keys.split()[0])
def test_message_of_a_requirement_refers_to_keys_that_exist(rule):
    assert rule.why.format(value=1, default=1, c=Config())
