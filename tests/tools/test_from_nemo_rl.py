"""NeMo-RL recipes translated: nothing is lost on the way, and what comes out is a config that runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from gdpo_nemo.commands import cli
from gdpo_nemo.config.load import load_config
from gdpo_nemo.tools.interop.nemo_rl.recipe import DEFAULTS, Recipe, open_recipe, read_recipe
from gdpo_nemo.tools.interop.nemo_rl.translate import apply_rules, translate
from gdpo_nemo.tools.interop.translation import (
    ADDED,
    ALREADY,
    CANNOT_RUN,
    DIFFERENT,
    DIFFERS,
    NO_EFFECT,
    TRANSLATED,
    UNKNOWN,
    Translation,
    values_to_write,
)
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError

RECIPES = Path(__file__).with_name("nemo_rl")
EVERY_KEY = RECIPES / "every_key.yaml"

# The canonical list of NeMo-RL's Megatron GRPO keys; a * stands for keys whose names vary.
CANONICAL = """
grpo: num_prompts_per_step num_generations_per_prompt max_rollout_turns max_num_epochs max_num_steps normalize_rewards
 use_leave_one_out_baseline val_period val_start_at val_at_start val_at_end max_val_samples val_batch_size
 val_num_generations_per_prompt stop_at_validation_metric stop_at_validation_threshold overlong_filtering
 advantage_clip_low
 advantage_clip_high seed use_dynamic_sampling dynamic_sampling_max_gen_batches batch_multiplier reward_shaping
 reward_scaling
 adv_estimator seq_logprob_error_threshold invalid_tool_call_advantage malformed_thinking_advantage async_grpo
loss_fn: reference_policy_kl_penalty reference_policy_kl_type kl_input_clamp_value kl_output_clamp_value
 use_on_policy_kl_approximation use_kl_in_reward ratio_clip_min ratio_clip_max ratio_clip_c use_cispo
 sequence_level_importance_ratios token_level_loss disable_ppo_ratio force_on_policy_ratio
 use_importance_sampling_correction
 truncated_importance_sampling_type truncated_importance_sampling_ratio truncated_importance_sampling_ratio_min
 positive_example_nll_weight
policy: model_name tokenizer.name tokenizer.chat_template_kwargs train_global_batch_size train_micro_batch_size
 logprob_batch_size
 max_total_sequence_length precision logprob_chunk_size sequence_packing dynamic_batching
 make_sequence_length_divisible_by
 max_grad_norm optimizer scheduler refit_buffer_size_gb
policy.megatron_cfg: enabled tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
 expert_model_parallel_size expert_tensor_parallel_size sequence_parallel num_layers_in_first_pipeline_stage
 num_layers_in_last_pipeline_stage pipeline_dtype activation_checkpointing recompute_granularity recompute_modules
 empty_unused_memory_level freeze_moe_router moe_router_dtype apply_rope_fusion bias_activation_fusion defer_fp32_logits
 optimizer.lr optimizer.min_lr optimizer.adam_beta1 optimizer.use_distributed_optimizer
 optimizer.use_precision_aware_optimizer
 optimizer.optimizer_cpu_offload scheduler.lr_decay_style scheduler.lr_decay_iters scheduler.lr_warmup_iters
 scheduler.lr_warmup_init distributed_data_parallel_config.grad_reduce_in_fp32
 distributed_data_parallel_config.overlap_grad_reduce distributed_data_parallel_config.overlap_param_gather fp8_cfg peft
 env_vars force_reconvert_from_hf model_overrides
policy.generation: backend max_new_tokens temperature top_p top_k val_temperature stop_token_ids stop_strings
 vllm_cfg.async_engine vllm_cfg.precision vllm_cfg.tensor_parallel_size vllm_cfg.pipeline_parallel_size
 vllm_cfg.expert_parallel_size vllm_cfg.gpu_memory_utilization vllm_cfg.max_model_len vllm_cfg.enforce_eager
 vllm_cfg.expose_http_server vllm_kwargs colocated refit_transport port_range_low
data: max_input_seq_length shuffle num_workers train.dataset_name train.split validation.dataset_name default.input_key
 default.output_key default.prompt_file default.system_prompt_file default.processor default.env_name
cluster: num_nodes gpus_per_node segment_size master_port_range_low
checkpointing: enabled checkpoint_dir metric_name higher_is_better keep_top_k save_period checkpoint_must_save_by
 save_optimizer
 ft_save_period ft_keep_latest_k pretrained_checkpoint
env: math
logger: log_dir wandb_enabled
"""


def verdicts(translation: Translation) -> dict[str, str]:
    return {line.key: line.status for line in translation.lines}


def leaves(node, prefix=""):
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def config_of(translation: Translation, folder: Path):
    path = folder / "ours.yaml"
    path.write_text(translation.to_text("a recipe"))
    return load_config(path)


def test_every_canonical_key_is_translated_or_listed_and_the_result_is_valid(tmp_path):
    translation = translate(EVERY_KEY)
    found = verdicts(translation)
    canonical = []
    for section in CANONICAL.strip().replace("\n ", " ").splitlines():
        prefix, _, names = section.partition(": ")
        canonical += [f"{prefix}.{name}" for name in names.split()]
    absent = [key for key in canonical if not any(k == key or k.startswith(key + ".") for k in found)]
    assert len(canonical) > 150 and not absent
    assert [line for line in translation.lines if line.status == UNKNOWN] == []
    named = {line.key for line in translation.lines if line.status != ADDED}
    assert named == set(leaves(read_recipe(EVERY_KEY))) | set(DEFAULTS)
    assert translation.status == DIFFERS
    validate(config_of(translation, tmp_path))


def test_values_arrive_at_keys_of_the_same_meaning(tmp_path):
    config = config_of(translate(EVERY_KEY), tmp_path)
    megatron = config.policy.megatron_cfg
    generation = config.policy.generation
    assert (config.gdpo.estimator, config.gdpo.num_prompts_per_step, config.gdpo.num_generations_per_prompt) == (
        "grpo",
        24,
        12,
    )
    assert config.gdpo.rewards == {"correctness": 1.0, "format": 1.0, "integer": 1.0}
    assert {"component": "integer", "linear": {"from": [-1.0, 3.0], "to": [0.0, 1.0]}} in config.gdpo.shaping
    assert {
        "component": "correctness",
        "overlong": {"buffer": 100, "penalty": 0.7, "max_length": 700},
    } in config.gdpo.shaping
    assert (config.gdpo.dynamic_sampling.enabled, config.gdpo.dynamic_sampling.max_rounds) == (True, 6)
    assert (
        config.loss_fn.off_policy.mode,
        config.loss_fn.off_policy.ratio_max,
        config.loss_fn.off_policy.ratio_min,
    ) == ("icepop", 4.0, 0.3)
    assert (config.loss_fn.ratio_clip_c, config.loss_fn.reference_policy_kl_type, config.loss_fn.mask_truncated) == (
        3.0,
        "k2",
        True,
    )
    # DTensor's optimizer and sizes are not Megatron's.
    assert (megatron.optimizer.lr, megatron.optimizer.adam_beta2, megatron.optimizer.clip_grad) == (2.5e-6, 0.95, 0.8)
    assert (megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size, megatron.recompute) == (
        2,
        2,
        "selective",
    )
    # A step there is two updates here: 24 x 12 samples in batches of 144.
    assert (megatron.scheduler.lr_decay_steps, megatron.scheduler.lr_warmup_steps) == (180, 10)
    assert (config.policy.micro_batch_tokens, config.policy.train_global_batch_size) == (1536, 144)
    assert (config.policy.lora.rank, config.policy.lora.target_modules) == (
        24,
        ["q_proj", "k_proj", "v_proj", "down_proj"],
    )
    assert (generation.engines, generation.vllm_cfg.tensor_parallel_size, generation.max_new_tokens) == (2, 2, 512)
    assert (config.env, config.data.validation.split, config.rollout.env_workers) == (
        {"gsm8k": {"strict": True}},
        "test",
        6,
    )
    assert (config.run.dir, config.checkpointing.keep_best, config.checkpointing.keep_last) == (
        "results/from_there",
        2,
        3,
    )
    assert not config.logger.tensorboard.enabled
    optimizer = megatron.optimizer
    assert (optimizer.use_precision_aware_optimizer, optimizer.exp_avg_dtype) == (True, "bfloat16")
    assert optimizer.exp_avg_sq_dtype == optimizer.main_grads_dtype == "float32"
    assert (config.gdpo.val_temperature, config.gdpo.val_top_p, config.gdpo.val_top_k) == (0.3, 0.8, -1)


@pytest.mark.slow
@pytest.mark.parametrize("stale, placement, engines", [(False, "colocated", 4), (True, "separate", 2)])
def test_engines_that_share_gpus_there_share_them_here_if_none_runs_ahead(tmp_path, stale, placement, engines):
    changes = [
        "policy.generation.colocated.enabled=true",
        f"grpo.async_grpo.enabled={stale}",
        "grpo.use_dynamic_sampling=false",
    ]
    path = tmp_path / "recipe.yaml"
    OmegaConf.save(OmegaConf.merge({"defaults": str(EVERY_KEY)}, OmegaConf.from_dotlist(changes)), path)
    translation = translate(path)
    config = config_of(translation, tmp_path)
    validate(config)
    assert (config.cluster.placement, config.policy.generation.engines) == (placement, engines)


@pytest.mark.slow
@pytest.mark.parametrize("name, mode, precision", [("muon", None, None), ("dist_muon", "distributed", "high")])
def test_muon_is_translated_with_the_defaults_of_megatron_core(tmp_path, name, mode, precision):
    prefix = "policy.megatron_cfg.optimizer."
    fields = {"optimizer": name, "muon_momentum": 0.9, "muon_tp_mode": mode, "muon_fp32_matmul_prec": precision}
    path = tmp_path / "recipe.yaml"
    OmegaConf.save(
        OmegaConf.create({"defaults": str(EVERY_KEY), "policy": {"megatron_cfg": {"optimizer": fields}}}), path
    )
    translation = translate(path)
    config = config_of(translation, tmp_path)
    validate(config)
    megatron = config.policy.megatron_cfg
    optimizer = megatron.optimizer
    assert (optimizer.type, optimizer.muon_momentum) == ("muon", 0.9) and not megatron.use_distributed_optimizer
    assert optimizer.muon_tp_mode == (mode or "blockwise")
    assert optimizer.muon_fp32_matmul_prec == (precision or "medium")
    assert verdicts(translation)[f"{prefix}use_distributed_optimizer"] == NO_EFFECT
    assert verdicts(translate(EVERY_KEY))[f"{prefix}optimizer"] == ALREADY


def test_parents_are_merged_and_a_marked_section_replaces_the_inherited_one(tmp_path):
    translation = translate(RECIPES / "gdpo.yaml")
    config = config_of(translation, tmp_path)
    assert translation.status == DIFFERS and config.gdpo.estimator == "gdpo" and config.gdpo.preset == "nemo_rl"
    assert config.gdpo.options == {"leave_one_out": True}
    # Weights stand in the order of the sorted names; the shaped sum is nothing that gdpo sees there.
    assert config.gdpo.rewards == {"correctness": 2.0, "format": 0.5, "integer": 1.0}
    assert not any("overlong" in rule for rule in config.gdpo.shaping)
    assert config.data.validation is None and config.gdpo.val_period == 0
    assert (config.data.train.path, config.data.train.columns) == ("organisation/rows", {"answer": "gold"})
    assert verdicts(translation)["grpo.val_period"] == NO_EFFECT


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, key, expected",
    [
        ("grpo.num_prompts_per_stepp=3", "grpo.num_prompts_per_stepp", UNKNOWN),
        ("grpo.max_rollout_turns=5", "grpo.max_rollout_turns", TRANSLATED),
        ("grpo.val_start_at=5", "grpo.val_start_at", DIFFERENT),
        ("grpo.val_start_at=0", "grpo.val_start_at", ALREADY),
        ("loss_fn.use_importance_sampling_correction=false", "loss_fn.use_importance_sampling_correction", ALREADY),
        ("loss_fn.use_importance_sampling_correction=false", "loss_fn.truncated_importance_sampling_ratio", NO_EFFECT),
        ("policy.megatron_cfg.fp8_cfg={enabled: true, fp8: e4m3}", "policy.megatron_cfg.fp8_cfg.fp8", TRANSLATED),
        (
            "policy.megatron_cfg.fp8_cfg={enabled: true, fp8_param: true}",
            "policy.megatron_cfg.fp8_cfg.fp8_param",
            DIFFERENT,
        ),
        ("policy.generation.backend=sglang", "policy.generation.backend", TRANSLATED),
        ("env.math.something=1", "env.math.something", DIFFERENT),
        ("loss_fn.reference_policy_kl_penalty=0.0", "loss_fn.reference_policy_kl_type", NO_EFFECT),
    ],
)
def test_each_value_gets_the_verdict_it_deserves(tmp_path, change, key, expected):
    recipe = OmegaConf.merge({"defaults": str(EVERY_KEY)}, OmegaConf.from_dotlist([change]))
    path = tmp_path / "recipe.yaml"
    OmegaConf.save(recipe, path)
    translation = translate(path)
    assert verdicts(translation)[key] == expected
    # The recipe has adapters, which do not go with matrices in 8 bits.
    assert (translation.status == CANNOT_RUN) == ("sglang" in change or "e4m3" in change)
    assert ("policy.generation.backend" in translation.blockers) == ("sglang" in change)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, kv, differing",
    [
        ("grpo.async_grpo.enabled=true", "drain", []),
        ("grpo.async_grpo={enabled: true, in_flight_weight_updates: true}", "keep", []),
        (
            "grpo.async_grpo={enabled: true, in_flight_weight_updates: true, "
            "recompute_kv_cache_after_weight_updates: true}",
            "recompute",
            [],
        ),
        ("grpo.async_grpo={enabled: true, recompute_kv_cache_after_weight_updates: true}", "drain", []),
        ("async_rl.max_inflight_prompts=8", "keep", []),
        ("async_rl.sampler={name: weight_fifo}", "keep", ["async_rl.sampler.name"]),
        (
            "async_rl={recompute_kv_cache_after_weight_updates: true, sampler: {name: windowed, "
            "sample_freshest_first: true}}",
            "recompute",
            ["async_rl.sampler.name", "async_rl.sampler.sample_freshest_first"],
        ),
    ],
)
def test_new_weights_reach_samples_in_flight_as_in_nemo_rl(tmp_path, change, kv, differing):
    path = tmp_path / "recipe.yaml"
    changes = OmegaConf.from_dotlist([change, "grpo.use_dynamic_sampling=false"])
    OmegaConf.save(OmegaConf.merge({"defaults": str(EVERY_KEY)}, changes), path)
    translation = translate(path)
    config = config_of(translation, tmp_path)
    validate(config)
    assert config.rollout.kv == kv
    assert [
        key for key, verdict in verdicts(translation).items() if "async" in key and verdict == DIFFERENT
    ] == differing


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_key_reported_as_translated_is_in_the_written_file(name):
    translation = translate(RECIPES / f"{name}.yaml")
    written = set(leaves(translation.content))
    for line in translation.lines:
        assert (line.status == TRANSLATED) == bool(line.targets), line
        assert "covered by the keys listed under added" not in line.text, line
        for target in (line.key,) if line.status == ADDED else line.targets:
            assert any(f"{key}.".startswith(f"{target}.") or target.startswith(f"{key}.") for key in written), line


OTHERS = {
    "grpo.adv_estimator.name": ["grpo", "gdpo"],
    "grpo.max_num_epochs": [0],
    "loss_fn.truncated_importance_sampling_type": ["tis", "icepop"],
    "policy.megatron_cfg.recompute_granularity": ["full", "selective"],
    "policy.megatron_cfg.scheduler.lr_decay_style": ["constant", "cosine"],
    "policy.megatron_cfg.peft.lora_A_init_method": ["kaiming", "xavier"],
    "data.default.processor": ["a_gdpo_processor", "math_hf_data_processor"],
}
"""Keys of which not every value means something -> some that do."""


def others(key, value):
    """Values unlike ``value``."""
    if key in OTHERS:
        return OTHERS[key]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value * 2 + 1, value / 2 if isinstance(value, float) else value // 2, 1]
    if isinstance(value, list):
        return [[item + 1 if isinstance(item, (int, float)) else item for item in value], value[1:]]
    return [f"{value}_other"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["base", "every_key", "gdpo", "async_in_flight", "uneven_pipeline", "lora", "dapo", "gdpo_gsm8k"]
)
def test_another_value_of_a_key_that_is_taken_over_is_written_or_named(name):
    """A key that is called translated and whose value nobody reads is not taken over."""
    recipe = open_recipe(RECIPES / f"{name}.yaml")

    def outcome(flat):
        said, findings = apply_rules(Recipe(flat, recipe.path))
        return values_to_write(said, findings), findings.differences, findings.blockers

    before = outcome(recipe.flat)
    unread = []
    for line in translate(RECIPES / f"{name}.yaml").lines:
        value = recipe.flat.get(line.key)
        if line.status == TRANSLATED and value is not None:
            if all(outcome({**recipe.flat, line.key: other}) == before for other in others(line.key, value)):
                unread.append(line)
    assert unread == []


def test_command_prints_a_config_and_lists_missing_values(tmp_path, capsys):
    out = tmp_path / "ours.yaml"
    assert cli.main(["config", "from-nemo-rl", str(EVERY_KEY), "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith("runs but differs in ")
    assert cli.main(["train", "--config", str(out), "--dry-run"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["gdpo"]["num_prompts_per_step"] == 24

    unusual = tmp_path / "unusual.yaml"
    unusual.write_text(f"defaults: {EVERY_KEY}\ndata: {{default: {{env_name: code, processor: null}}}}\n")
    assert cli.main(["config", "from-nemo-rl", str(unusual)]) == 1
    captured = capsys.readouterr()
    assert "# cannot run:\n#   env.code: environment 'code' is not supported" in captured.out
    assert captured.err.startswith("cannot run:\n  env.code: ")


@pytest.mark.parametrize(
    "text, named",
    [
        ("defaults: absent.yaml\n", "absent.yaml: recipe not found, which is listed under defaults in recipe.yaml"),
        ("eval: {seed: 3}\n", "expected one of the sections grpo, ppo, distillation, sft, dpo, rm"),
        ("defaults: recipe.yaml\n", "inherits from itself"),
        ("grpo: {seed: '${nowhere.at.all}'}\n", "nowhere"),
        ("grpo: {seed: '${div:1,0}'}\n", "by zero"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_one_line(tmp_path, text, named):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        translate(path)
