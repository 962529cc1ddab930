"""Recipes of different kind, after NeMo-RL's own: each comes to what it is, with the values that make it so.

What their keys mean was read in NVIDIA-NeMo/RL at 7ea279ab; the place is named where a meaning may surprise.
"""

from __future__ import annotations

from functools import lru_cache, reduce
from math import inf
from pathlib import Path

import pytest

from gdpo_nemo.commands import cli
from gdpo_nemo.config.effects import keys_without_effect
from gdpo_nemo.config.load import load_config
from gdpo_nemo.tools.interop.nemo_rl.keys import adapted
from gdpo_nemo.tools.interop.nemo_rl.recipe import known_model
from gdpo_nemo.tools.interop.nemo_rl.translate import translate
from gdpo_nemo.tools.interop.translation import CANNOT_RUN, DIFFERENT, DIFFERS, SAME, Translation
from gdpo_nemo.training.validation import validate

FOLDER = Path(__file__).with_name("nemo_rl")

STATUS = {
    "base": SAME,
    "megatron": SAME,
    "async_untruncated": SAME,
    "async_in_flight": SAME,
    "single_controller": SAME,
    "ready_first": DIFFERS,
    "mixture_seq_mask": SAME,
    "gspo_four_updates": SAME,
    "dapo": DIFFERS,
    "gdpo_gsm8k": SAME,
    "uneven_pipeline": SAME,
    "lora": SAME,
    "reinforce_plus_plus": SAME,
    "reinforce_without_baseline": SAME,
    "gdpo_without_deviation": SAME,
    "kernels": DIFFERS,
    "sft": SAME,
    "dpo": SAME,
    "rm": SAME,
    "ppo": DIFFERS,
    "distillation": DIFFERS,
    "gym": CANNOT_RUN,
    "gym_weights": CANNOT_RUN,
    "puzzle": CANNOT_RUN,
    "images": DIFFERS,
    "images_sglang": CANNOT_RUN,
}

DIFFERENCES = {
    "ready_first": {"async_rl.sampler.name"},
    "dapo": {"env.math.math_verify_impl"},
    "kernels": {"policy.generation.vllm_cfg.env_vars.VLLM_USE_FLASHINFER_MOE_FP16"},
    "ppo": {"value", "ppo.adv_estimator.gae_lambda_value"},  # all keys of the value model are one difference
    "distillation": {"loss_fn", "distillation.num_generations_per_prompt"},
    "images": {"groups"},  # prompts of equal tokens with different images
}

BLOCKERS = {
    "gym": {"env.nemo_gym"},
    "gym_weights": {"env.nemo_gym"},
    "puzzle": {"env.sliding_puzzle_game"},
    "images_sglang": {"env.clevr-cogent", "policy.generation.backend"},
}

VISION = "gdpo_nemo.environments.tasks.vision_rewards"
M = "policy.megatron_cfg"
S = "policy.megatron_cfg.scheduler"
VALUES = {
    "base": {
        # Mean and deviation of the other members (calculate_baseline_and_std_per_prompt).
        "gdpo.estimator": "grpo",
        "gdpo.options": {"leave_one_out": True, "equal_peers": "raw"},
        # exp(x - x.detach()) weighs every KL estimate, which is clamped at 20 before and at 10 after (calculate_kl).
        "loss_fn.reference_policy_kl_gradient": "score",
        "loss_fn.kl_output_clamp_value": 10.0,
        # train_test_split of one million rows; one epoch of what is left in steps of 32.
        "data.train.split": "train_1M[:95%]",
        "data.validation.split": "train_1M[95%:]",
        "gdpo.max_num_steps": 29687,
        "data.train.prompt_template": "Answer the question below, and box the result as \\boxed{}.\n{prompt}\n",
        "data.train.system_prompt": "",
        # torch's LinearLR; DTensor's optimizer and not the one under megatron_cfg.
        f"{S}.lr_warmup_steps": 50,
        f"{S}.lr_warmup_init": 5e-7,
        f"{M}.optimizer.lr": 5e-6,
        f"{M}.use_distributed_optimizer": True,
    },
    "megatron": {
        f"{S}.lr_warmup_steps": 13,
        f"{S}.lr_warmup_init": 2e-7,
        f"{S}.lr_hold_updates": 1,
        f"{M}.overlap_grad_reduce": True,
        f"{M}.overlap_param_gather": True,
    },
    "async_untruncated": {
        "rollout.max_staleness": 1,
        # Without in-flight updates the collector waits for what is under way (prepare_for_refit).
        "rollout.kv": "drain",
        "rollout.window": 1,
        "loss_fn.old_logprobs": "trainer",
        "loss_fn.off_policy.mode": "truncate",
        "loss_fn.off_policy.ratio_max": inf,
        "cluster.placement": "separate",
    },
    "async_in_flight": {
        "loss_fn.off_policy.ratio_max": 2.0,
        "loss_fn.off_policy.mode": "truncate",
        "rollout.kv": "keep",
        "rollout.window": 1,
    },
    "single_controller": {
        # Weights always arrive in flight (SingleControllerActor._sync_weights).
        "rollout.max_staleness": 2,
        "rollout.kv": "recompute",
        "rollout.window": 1,
        "loss_fn.old_logprobs": "trainer",
        "cluster.placement": "separate",
    },
    # One version is ReadyFirstSamplerConfig's default.
    "ready_first": {"rollout.max_staleness": 1, "rollout.kv": "keep", "rollout.window": None},
    "mixture_seq_mask": {
        # The geometric mean decides who stays; those keep the weights of their tokens.
        "loss_fn.off_policy.mode": "icepop",
        "loss_fn.off_policy.level": "geometric",
        "loss_fn.off_policy.ratio_max": 1.002,
        "loss_fn.off_policy.ratio_min": 0.999,
        "policy.router_replay": "sampler",
        f"{M}.freeze_moe_router": True,
        f"{M}.moe_router_dtype": "fp64",
        f"{M}.sequence_parallel": True,
    },
    "gspo_four_updates": {
        "loss_fn.type": "gspo",
        "loss_fn.aggregation": "sequence_mean",
        "loss_fn.off_policy.level": "sequence",
        "loss_fn.off_policy.ratio_max": 5.0,
        # 13 steps of 4 updates: the schedule ticks once a step there (megatron_policy_worker.train).
        f"{S}.lr_warmup_steps": 52,
        f"{S}.lr_hold_updates": 4,
        f"{S}.lr_decay_steps": None,
    },
    "dapo": {
        "loss_fn.ratio_clip_c": 10.0,
        "gdpo.dynamic_sampling.before_shaping": True,
        "loss_fn.ratio_clip_max": 0.28,
        "loss_fn.reference_policy_kl_penalty": 0.0,
        "data.train.path": "BytedTsinghua-SIA/DAPO-Math-17k",
        "data.train.columns": {"answer": "reward_model.ground_truth"},
        "gdpo.shaping": [
            {"component": "correctness", "clip": [0.0, 1.0]},
            {"component": "correctness", "linear": {"from": [0.0, 1.0], "to": [-1.0, 1.0]}},
            {"component": "correctness", "overlong": {"buffer": 64, "penalty": 1, "max_length": 512}},
        ],
    },
    "gdpo_gsm8k": {
        "gdpo.preset": "nemo_rl",
        # Weights stand in the order of the sorted names.
        "gdpo.rewards": {"correctness": 2.0, "format": 0.5, "integer": 1.0},
        "env": {"gsm8k": {"strict": True}},
        "data.train.path": "openai/gsm8k:main",
        "data.validation.split": "test",
        # GDPOAdvantageEstimator has no KL, and use_kl_in_reward takes it out of the loss.
        "gdpo.shaping": [],
        "loss_fn.reference_policy_kl_penalty": 0.0,
        "gdpo.max_num_steps": 233,
    },
    "uneven_pipeline": {
        f"{M}.num_layers_in_first_pipeline_stage": 11,
        f"{M}.num_layers_in_last_pipeline_stage": 11,
        f"{S}.lr_decay_style": "cosine",
        f"{S}.lr_decay_steps": 1000,
        "gdpo.val_generations_per_prompt": 16,
        "gdpo.val_prompts": 16,
        # DeepScalerDataset ignores split_validation_size.
        "data.train.split": "train",
        "gdpo.max_num_steps": 2 * (40315 // 32),
    },
    "lora": {
        "policy.lora.init": "xavier",
        "policy.lora.rank": 16,
        "policy.lora.alpha": 64.0,
        "policy.lora.target_modules": ["q_proj", "v_proj"],
    },
    "reinforce_plus_plus": {
        "gdpo.estimator": "dr_grpo",
        "gdpo.batch_norm": True,
        "gdpo.options": {
            "batch_unit": "token",
            "batch_rows": "scored",
            "ddof": 0,
            "batch_epsilon": 0.0,
            "residue": 0.0,
        },
        # REINFORCE has no ratio and so nothing to clip: what stands here is our default.
        "loss_fn.ratio_clip_max": 0.28,
    },
    "reinforce_without_baseline": {
        "gdpo.estimator": "reinforce_plus_plus",
        "gdpo.options": {
            "batch_unit": "token",
            "batch_rows": "scored",
            "ddof": 0,
            "batch_epsilon": 0.0,
            "residue": 0.0,
            "minus_baseline": False,
        },
    },
    "kernels": {},
    "sft": {
        "algorithm.type": "sft",
        "gdpo.num_prompts_per_step": 128,
        "gdpo.max_num_steps": 14842,  # two epochs of 95 % of a million rows, without the incomplete last batch
        "gdpo.val_prompts": 128,  # val_batches of val_global_batch_size
        "data.train.path": "nvidia/OpenMathInstruct-2",
        "data.train.prompt_key": "problem",
        "data.train.columns": {"completion": "generated_solution"},
        "data.train.prompt_template": "Answer the question below, and box the result as \\boxed{}.\n{prompt}\n",
        "data.train.train_on": "last",
        "data.validation.split": "train_1M[95%:]",
        "data.validation.columns": {"completion": "generated_solution"},
        f"{M}.optimizer.lr": 2e-5,
    },
    "dpo": {
        "algorithm.type": "dpo",
        "gdpo.num_prompts_per_step": 64,  # of pairs (preference samples)
        "gdpo.max_num_steps": 150,
        "gdpo.max_num_epochs": 1,
        "gdpo.val_prompts": None,  # val_batches -1
        "preference.beta": 0.2,
        "preference.rpo_alpha": 0.01,
        "preference.length_normalize": False,
        "policy.micro_batch_tokens": 4 * 1024,  # two pairs
        "data.train.type": "gdpo_nemo.data.row_formats:helpsteer3",
        "data.validation.split": "validation",
        f"{S}.lr_warmup_steps": 10,
    },
    "rm": {
        "algorithm.type": "reward_model",
        "gdpo.max_num_steps": 1_000_000,  # -1
        "gdpo.max_num_epochs": 1,
        "gdpo.val_prompts": 64,
        "data.train.columns": {"rejected": "worse"},
        "data.validation.type": "gdpo_nemo.data.row_formats:preference",
    },
    "ppo": {
        "algorithm.type": "ppo",
        "gdpo.num_generations_per_prompt": 1,
        "gdpo.num_iterations": 2,
        "gdpo.max_num_epochs": None,  # -1
        "ppo.gamma": 1.0,
        "ppo.lam": 0.95,
        "ppo.vf_coef": 0.5,
        "ppo.cliprange_value": None,
        "ppo.whiten_advantages": True,
        "loss_fn.ratio_clip_max": 0.28,
        "rollout.max_staleness": 1,
        "rollout.kv": "drain",
        "gdpo.rewards": {"correctness": 1.0},
        "policy.generation.engines": 4,
    },
    "distillation": {
        "algorithm.type": "distillation",
        "teacher.model_name": "Qwen/Qwen3-4B",
        "gdpo.num_prompts_per_step": 32,  # 32 x 2 samples instead of 64 x 1
        "gdpo.num_generations_per_prompt": 2,
        "policy.train_global_batch_size": 64,
        "policy.megatron_cfg.tensor_model_parallel_size": 2,  # of the policy, not of the teacher
        "gdpo.val_generations_per_prompt": 16,
    },
    "gdpo_without_deviation": {"gdpo.preset": "nemo_rl", "gdpo.options": {"scale_rewards": "none"}},
    "images": {
        "gdpo.rewards": {"exact_alnum": 0.8, "format": 0.2},
        "env": {"functions": {"functions": {"exact_alnum": f"{VISION}.same_text", "format": f"{VISION}.has_tags"}}},
        "gdpo.group_by": "prompt",
        "checkpointing.metric_name": "validation/exact_alnum",
        # clevr.py: each split is a dataset.
        "data.train.path": "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex",
        "data.validation.path": "MMInstruction/Clevr_CoGenT_ValA",
        "data.validation.split": "train",
        "data.train.type": "gdpo_nemo.data.row_formats:clevr",
        "data.images.max_per_prompt": 1,
        # Bridge's Qwen25VLModelProvider trains everything without freeze_config.
        "policy.vision.train": True,
    },
}


@lru_cache
def translated(name: str) -> Translation:
    return translate(FOLDER / f"{name}.yaml")


def loaded(name: str, folder: Path):
    path = folder / "ours.yaml"
    path.write_text(translated(name).to_text(name))
    return load_config(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", STATUS)
def test_recipe_has_the_expected_translation(name):
    translation = translated(name)
    assert translation.status == STATUS[name], translation.summary()
    assert set(translation.differences) >= DIFFERENCES.get(name, set()) and set(translation.blockers) == BLOCKERS.get(
        name, set()
    )
    if STATUS[name] != CANNOT_RUN:
        assert set(translation.differences) == DIFFERENCES.get(name, set())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, status in STATUS.items() if status != CANNOT_RUN])
def test_recipe_reported_as_runnable_passes_the_dry_run_with_its_values(name, tmp_path):
    config = loaded(name, tmp_path)
    validate(config)
    assert keys_without_effect(config) == []
    found = {key: reduce(getattr, key.split("."), config) for key in VALUES[name]}
    assert found == VALUES[name]


def test_without_a_partner_overlap_param_gather_is_not_written(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"defaults: {FOLDER / 'megatron.yaml'}\n"
        "policy: {megatron_cfg: {distributed_data_parallel_config: {overlap_grad_reduce: false}}}\n"
    )
    content = translate(path).content["policy"]["megatron_cfg"]
    assert "overlap_param_gather" not in content and "overlap_grad_reduce" not in content


def test_distribution_that_is_cut_only_for_sampling_is_named(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"defaults: {FOLDER / 'megatron.yaml'}\npolicy: {{generation: {{top_k: 50}}}}\ndata: {{default: "
        f"{{prompt_file: null}}}}\n"
    )
    assert set(translate(path).differences) == {"policy.generation.top_k"}


@pytest.mark.parametrize(
    "model, adapters, expected, differences",
    [
        ("Qwen/Qwen3-8B-Base", "dtensor_cfg: {lora_cfg: {enabled: true, dim: 8, match_all_linear: true}}",
         dict(target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]),
         set()),
        ("Qwen/Qwen3-4B", "dtensor_cfg: {lora_cfg: {enabled: true, dim: 8, match_all_linear: true}}", {},
         {"policy.dtensor_cfg.lora_cfg.match_all_linear"}),
        ("Qwen/Qwen3-8B-Base", "dtensor_cfg: {enabled: false}, megatron_cfg: {enabled: true, peft: {enabled: true, "
                               "dim: 8}}",
         dict(share_a=True), set()),
        ("Qwen/Qwen3-8B-Base", "dtensor_cfg: {enabled: false}, megatron_cfg: {enabled: true, peft: {enabled: true, "
                               "dim: 8,"
         " target_modules: ['*.linear_proj']}}", dict(target_modules=["o_proj"]), set()),
    ],
)  # fmt: skip
def test_adapters_are_on_the_layers_that_have_them_there(tmp_path, model, adapters, expected, differences):
    """Every linear layer is the output layer too, which in a small Qwen is the embedding; a fused layer has one A."""
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"defaults: {FOLDER / 'base.yaml'}\npolicy: {{model_name: {model}, {adapters}}}\ndata: {{default: "
        f"{{prompt_file: null}}}}\n"
    )
    translation = translate(path)
    found = translation.content["policy"]["lora"]
    assert {key: found[key] for key in ("target_modules", "share_a") if key in found} == expected
    assert set(translation.differences) == differences and not translation.blockers


@pytest.mark.parametrize(
    "grpo, expected",
    [
        (
            "use_dynamic_sampling: true, batch_multiplier: 1.5",
            dict(max_num_steps=1000, max_num_epochs=3, batch_multiplier=1.5),
        ),
        ("use_dynamic_sampling: true", dict(max_num_steps=1000, max_num_epochs=3, batch_multiplier=1.0)),
        (
            "use_dynamic_sampling: false",
            dict(max_num_steps=3 * (7473 // 64), max_num_epochs=None, batch_multiplier=None),
        ),
    ],
)
def test_the_run_ends_with_its_epochs_and_dynamic_sampling_takes_whole_batches(tmp_path, grpo, expected):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"defaults: {FOLDER / 'gdpo_gsm8k.yaml'}\n"
        f"grpo: {{{grpo}, max_num_steps: 1000, max_num_epochs: 3, num_prompts_per_step: 64}}\n"
    )
    translation = translate(path)
    content = translation.content["gdpo"]
    found = dict(content, batch_multiplier=content.get("dynamic_sampling", {}).get("batch_multiplier"))
    assert {key: found.get(key) for key in expected} == expected and not set(translation.differences) & {
        "grpo.max_num_epochs"
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "base, change, expected, status",
    [
        # math_environment.py, HFVerifyWorker; utils.py, calculate_baseline_and_std_per_prompt: equal prompt tokens are
        # one group.
        ("base", "", {"env": {"math": {"math_verify_impl": "hf_math_verify", "time_limit_s": 5}}, "gdpo.group_by":
        "prompt"}, SAME),
        # grpo.py, dynamic_sampling: the deviation of the key of grpo, not of adv_estimator, decides by sample.
        ("base", "grpo: {use_dynamic_sampling: true, batch_multiplier: 1.5}",
         {"gdpo.dynamic_sampling.leave_one_out": True, "gdpo.dynamic_sampling.batch_multiplier": 1.5}, SAME),
        ("base", "grpo: {use_dynamic_sampling: true, batch_multiplier: 1.5, normalize_rewards: false}",
         {"gdpo.estimator": "rloo", "gdpo.dynamic_sampling.leave_one_out": False}, {"grpo.use_leave_one_out_baseline"}),
        ("base", "grpo: {use_dynamic_sampling: true, use_leave_one_out_baseline: false}",
        {"gdpo.dynamic_sampling.leave_one_out": False}, SAME),
        # Without normalize_rewards, the mean of the others is only subtracted.
        ("gdpo_without_deviation", "grpo: {adv_estimator: {use_leave_one_out_baseline: true}}",
        {"gdpo.options": {"leave_one_out": True, "scale_rewards": "none"}},
        {"data.train.system_prompt_file", "data.validation.system_prompt_file"}),
        # grpo.py, setup asserts.
        ("base", "grpo: {batch_multiplier: 1.5}", {"gdpo.dynamic_sampling.batch_multiplier": None},
        {"grpo.batch_multiplier"}),
        # grpo.py, validate: whole batches.
        ("base", "grpo: {max_val_samples: 16, val_batch_size: 5}", {"gdpo.val_prompts": 15}, SAME),
        ("base", "grpo: {max_val_samples: 16, val_batch_size: 32}", {"gdpo.val_prompts": 16}, {"grpo.val_batch_size"}),
        # draft/hidden_capture.py and loss/utils.py detach what the draft model sees.
        ("megatron", "policy: {draft: {enabled: true, model_name: x, loss_weight: 1.0}}", {}, SAME),
        # Stale samples without a correction, which a null mode would add here.
        ("single_controller", "loss_fn: {use_importance_sampling_correction: false}",
         {"rollout.max_staleness": 2, "loss_fn.old_logprobs": "trainer", "loss_fn.off_policy.mode": "none"}, SAME),
    ],
)  # fmt: skip
def test_silently_changed_keys_have_their_meaning_or_are_named(tmp_path, base, change, expected, status):
    path = tmp_path / "recipe.yaml"
    prompts = "" if change.startswith("data") else "data: {default: {prompt_file: null}}"
    path.write_text(f"defaults: {FOLDER / base}.yaml\n{change}\n{prompts}\n")
    translation = translate(path)
    ours = tmp_path / "ours.yaml"
    ours.write_text(translation.to_text("recipe"))
    config = load_config(ours)
    assert {key: reduce(getattr, key.split("."), config) for key in expected} == expected
    assert (translation.status, set(translation.differences)) == (
        (SAME, set()) if status == SAME else (DIFFERS, status)
    )


GEOMETRY = """
data:
  _override_: true
  train: {dataset_name: geometry3k}
  default: {prompt_file: null, processor: vlm_hf_data_processor, env_name: geometry3k}
env: {geometry3k: {reward_functions: [{name: format, weight: 1}, {name: math_expr, weight: 9, kwargs: {tag: b}}]}}
"""


@pytest.mark.parametrize(
    "change, expected, differences",
    [
        (GEOMETRY, {
            "data.train.path": "hiyouga/geometry3k",
            "gdpo.rewards": {"math_expr": 0.9, "format": 0.1},
            "env": {"functions": {"functions": {
                "math_expr": {"function": f"{VISION}.same_expression", "tag": "b"}, "format": f"{VISION}.has_tags"}}},
            "gdpo.max_num_steps": 2101 // 8,
        }, set()),
        ("policy: {megatron_cfg: {freeze_config: {freeze_vision_model: true, freeze_vision_projection: true}}}",
         {"policy.vision.train": False}, set()),
        ("policy: {megatron_cfg: {freeze_config: {freeze_vision_model: true, freeze_vision_projection: false}}}",
         {"policy.vision.train": False}, {"policy.megatron_cfg.freeze_config.freeze_vision_projection"}),
        ("policy: {megatron_cfg: {freeze_config: {freeze_language_model: true}}}", {},
         {"policy.megatron_cfg.freeze_config.freeze_language_model"}),
        ("policy: {megatron_cfg: {peft: {enabled: true, dim: 8, target_modules: ['*.linear_proj']}}}",
         {"policy.vision.train": False}, set()),
        ("policy: {megatron_cfg: {peft: {enabled: true, dim: 8, target_modules: []}}}", {"policy.vision.train": False},
         {"policy.megatron_cfg.peft.target_modules"}),
    ],
)  # fmt: skip
def test_settings_of_images_have_their_meaning_or_are_named(tmp_path, change, expected, differences):
    path = tmp_path / "recipe.yaml"
    prompts = "" if "_override_" in change else "data: {default: {prompt_file: null}}"
    path.write_text(f"defaults: {FOLDER / 'images.yaml'}\n{change}\n{prompts}\n")
    translation = translate(path)
    (tmp_path / "ours.yaml").write_text(translation.to_text("recipe"))
    config = load_config(tmp_path / "ours.yaml")
    assert {key: reduce(getattr, key.split("."), config) for key in expected} == expected
    assert set(translation.differences) == {"groups"} | differences


@pytest.mark.parametrize(
    "change, key, why",
    [
        ("policy: {model_name: Qwen/Qwen3.5-35B-A3B-Base}", "policy.model_name", "supported only without images"),
        ("policy: {model_name: google/gemma-3-4b-it}", "policy.model_name", "supported only without images"),
        ("policy: {model_name: nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16}", "policy.model_name", "audio"),
        ("data: {train: {dataset_name: avqa}}", "data.train.dataset_name", "contains audio"),
        ("data: {validation: {dataset_name: daily-omni}}", "data.validation.dataset_name", "contains video"),
        ("data: {train: {dataset_name: mmpr-tiny}}", "data.train.dataset_name", "images in an archive"),
        ("env: {clevr-cogent: {reward_functions: [{name: mine, weight: 1.0}]}}", "env.clevr-cogent", "not supported"),
        ("env: {clevr-cogent: {reward_functions: [{name: format}]}}", "env.clevr-cogent", "not supported"),
    ],
)
def test_images_and_rewards_without_an_equivalent_cannot_run(tmp_path, change, key, why):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"defaults: {FOLDER / 'images.yaml'}\n{change}\n")
    translation = translate(path)
    assert set(translation.blockers) == {key} and why in translation.blockers[key]


def test_weights_of_a_gym_recipe_are_not_reported_as_translated():
    """There are no names to give them to before the servers have answered."""
    translation = translated("gym_weights")
    [line] = [line for line in translation.lines if line.key == "grpo.adv_estimator.reward_weights"]
    assert "rewards" not in translation.content["gdpo"]
    assert (line.status, line.targets) == (DIFFERENT, ()) and "env.nemo_gym cannot run" in line.text
    assert "give a checkout of NeMo Gym with --gym-checkout" in translation.summary()
    assert "belong to the components sorted by name, and are not translated" in translation.summary()


@pytest.mark.parametrize(
    "code, blockers",
    [
        ("from nemo_rl.algorithms.loss import NLLLossFn", {"program"}),
        ("from nemo_rl.algorithms.grpo import async_grpo_train", set()),
        ("import torch", set()),
    ],
)
def test_recipe_whose_project_trains_otherwise_cannot_run(tmp_path, code, blockers):
    (tmp_path / "configs").mkdir()
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    (tmp_path / "update.py").write_text(code + "\n")
    path = tmp_path / "configs" / "recipe.yaml"
    path.write_text(f"defaults: {FOLDER / 'base.yaml'}\ndata: {{default: {{prompt_file: null}}}}\n")
    assert set(translate(path).blockers) == blockers


def test_variable_of_experts_means_nothing_to_a_dense_model(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"defaults: {FOLDER / 'megatron.yaml'}\ndata: {{default: {{prompt_file: null}}}}\n"
        "policy: {generation: {vllm_cfg: {env_vars: {VLLM_USE_FLASHINFER_MOE_FP8: '0'}}}}\n"
    )
    assert translate(path).status == SAME


def test_more_positions_than_the_model_has_cannot_run(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"defaults: {FOLDER / 'base.yaml'}\npolicy: {{max_total_sequence_length: 2048, hf_config_overrides: "
        f"{{max_position_embeddings: 4096}}}}\n"
    )
    assert set(translate(path).blockers) == {"policy.hf_config_overrides.max_position_embeddings"}


def test_an_environment_variable_that_is_not_set_stays_an_interpolation():
    translation = translated("gym")
    assert translation.content["data"]["train"]["path"] == "${oc.env:GDPO_TEST_UNSET}/train.jsonl"
    assert translation.variables == ["GDPO_TEST_UNSET"] and "GDPO_TEST_UNSET" in translation.summary()


def test_defaults_of_nemo_rl_apply_to_omitted_keys(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("grpo: {max_num_steps: 5}\npolicy: {model_name: Qwen/Qwen3-8B, max_total_sequence_length: 512}\n")
    translation = translate(path)
    assert translation.content["loss_fn"]["ratio_clip_max"] == 0.2
    assert translation.content["loss_fn"]["reference_policy_kl_penalty"] == 0.01
    assert translation.content["gdpo"]["num_generations_per_prompt"] == 16


@pytest.mark.parametrize("name, status", [("base", 0), ("ready_first", 3), ("gym", 1)])
def test_exit_status_distinguishes_the_three_results_on_request(name, status, tmp_path, capsys):
    recipe = ["config", "from-nemo-rl", str(FOLDER / f"{name}.yaml"), "--out", str(tmp_path / "ours.yaml")]
    assert cli.main([*recipe, "--strict"]) == status
    assert cli.main(recipe) == (1 if status == 1 else 0)
    summary = capsys.readouterr().out
    assert {0: "same: ", 3: "runs but differs in 1 way", 1: "cannot run:"}[status] in summary
    assert (
        "no effect on the result" not in summary and "no effect on the result" in (tmp_path / "ours.yaml").read_text()
    )


@pytest.mark.parametrize(
    "name, family",
    [
        ("Qwen/Qwen3-30B-A3B", "qwen3_moe"),
        ("Qwen/Qwen3-1.7B", "qwen3"),
        ("Qwen/Qwen2.5-Math-1.5B-Instruct", "qwen2"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "qwen2"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral"),
        ("microsoft/phi-4", "phi3"),
        ("ByteDance-Seed/Seed-OSS-36B-Instruct", "seed_oss"),
        ("moonshotai/Moonlight-16B-A3B-Instruct", "deepseek_v3"),
        ("zai-org/GLM-4.5-Air", "glm4_moe"),
        ("zai-org/GLM-4.7-Flash", "glm4_moe_lite"),
        ("zai-org/GLM-Z1-9B-0414", "glm4"),
        ("zai-org/GLM-5.1", "glm_moe_dsa"),
        ("zai-org/GLM-4.6V", None),
        ("MiniMaxAI/MiniMax-M2.7", "minimax_m2"),
        ("MiniMaxAI/MiniMax-M1-80k", None),
        ("mistralai/Mistral-Medium-3.5-128B", "ministral3"),
        ("microsoft/Phi-4-mini-instruct", None),
        ("Qwen/Qwen2-57B-A14B-Instruct", "qwen2_moe"),
        ("Qwen/Qwen1.5-MoE-A2.7B-Chat", "qwen2_moe"),
        ("Qwen/Qwen2-57B-A14B-Instruct-GPTQ-Int4", None),
        ("mistralai/Mistral-Small-24B-Instruct-2501", None),
        ("deepseek-ai/DeepSeek-V3", "deepseek_v3"),
        ("deepseek-ai/DeepSeek-V3.1", None),
        ("Qwen/Qwen3.5-35B-A3B-Base", "qwen3_5_moe_text"),
        ("Qwen/Qwen3.5-9B", "qwen3_5_text"),
        ("Qwen/Qwen3-Next-80B-A3B-Thinking", "qwen3_next"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct-FP8", None),
        ("Qwen/Qwen2.5-VL-3B-Instruct", "qwen2_5_vl"),
        ("Qwen/Qwen3-VL-4B-Thinking", "qwen3_vl"),
        ("Qwen/Qwen2-VL-2B-Instruct", None),
        ("llava-hf/llava-1.5-7b-hf", None),
        ("HuggingFaceTB/SmolVLM2-2.2B-Instruct", None),
        ("Qwen/Qwen3-Omni-30B-A3B-Instruct", None),
        ("google/gemma-2-9b-it", "gemma2"),
        ("google/gemma-3-1b-it", "gemma3_text"),
        ("google/gemma-3-27b-it", "gemma3_text"),
        ("google/gemma-3n-E2B-it", None),
        ("google/gemma-4-31B-it", "gemma4_text"),
        ("google/gemma-4-26B-A4B-it", "gemma4_text"),
        ("google/gemma-4-E4B-it", None),
        ("openai/gpt-oss-20b", "gpt_oss"),
        ("gpt2", None),
        ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", "nemotron_h"),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", "nemotron_h"),
        ("nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16", "nemotron_h"),
        ("/path/to/model", None),
    ],
)
def test_a_name_tells_its_family(name, family):
    known = known_model(name)
    assert (known.refusal == "") == (family is not None) and (family is None or known.model_type == family)
    assert known.question == ""


@pytest.mark.parametrize(
    "name", ["HuggingFaceTB/SmolLM2-135M-Instruct", "unsloth/Qwen3-4B-unsloth-bnb-4bit", "organisation/model"]
)
def test_model_of_an_unknown_name_is_left_to_the_dry_run(name, tmp_path):
    known = known_model(name)
    assert known.refusal == "" and "until its config.json is read" in known.question
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"defaults: {FOLDER / 'base.yaml'}\npolicy: {{model_name: {name}}}\ndata: {{default: {{prompt_file: null}}}}\n"
    )
    translation = translate(path)
    assert (translation.status, set(translation.questions)) == (SAME, {"policy.model_name"})
    assert f"checked by the dry run:\n  policy.model_name: the family of {name} is unknown" in translation.summary()


@pytest.mark.parametrize(
    "model_type, expected",
    [
        ("", ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "o_proj"]),
        ("phi3", ["qkv_proj", "gate_up_proj", "o_proj"]),
    ],
)
def test_megatrons_layers_are_the_familys_layers_of_hugging_face(model_type, expected):
    assert adapted(["*.linear_qkv", "linear_fc1", "o_proj"], model_type) == expected


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_decay_without_a_warmup_is_the_same_schedule(tmp_path, style):
    """``tests/megatron/test_learning_rate.py`` compares the rates."""
    path = tmp_path / "recipe.yaml"
    schedule = f"{{lr_decay_style: {style}, lr_decay_iters: 10, lr_warmup_iters: 0}}"
    path.write_text(f"defaults: {FOLDER / 'megatron.yaml'}\npolicy: {{megatron_cfg: {{scheduler: {schedule}}}}}\n")
    translation = translate(path)
    assert not [key for key in translation.differences if "scheduler" in key]
    scheduler = translation.content["policy"]["megatron_cfg"]["scheduler"]
    assert scheduler["lr_decay_style"] == style and "lr_warmup_steps" not in scheduler
