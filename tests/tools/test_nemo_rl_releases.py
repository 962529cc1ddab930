"""Recipes of NeMo-RL's releases: data, environment and loss are those of the release that a recipe belongs to.

What each release does was read in NVIDIA-NeMo/RL at v0.4.0, v0.5.0, v0.6.0, v0.7.0 and 7ea279ab (main).
"""

from __future__ import annotations

from copy import deepcopy
from functools import reduce
from typing import Any

import pytest
import yaml

from gdpo_nemo.commands import cli
from gdpo_nemo.config.load import load_config
from gdpo_nemo.tools.interop.nemo_rl.recipe import open_recipe
from gdpo_nemo.tools.interop.nemo_rl.translate import translate
from gdpo_nemo.tools.interop.translation import (
    ADDED,
    CANNOT_RUN,
    DIFFERENT,
    DIFFERS,
    NO_EFFECT,
    SAME,
    UNKNOWN,
    Translation,
)
from gdpo_nemo.training.validation import validate

SHARED = {
    "grpo": {"num_prompts_per_step": 32, "num_generations_per_prompt": 16, "max_num_epochs": 1, "max_num_steps": 100,
             "normalize_rewards": True, "use_leave_one_out_baseline": True, "val_period": 10, "max_val_samples": 256,
             "val_batch_size": 256},
    "loss_fn": {"reference_policy_kl_penalty": 0.01, "ratio_clip_min": 0.2, "ratio_clip_max": 0.2,
                "use_on_policy_kl_approximation": False, "use_importance_sampling_correction": False,
                "truncated_importance_sampling_ratio": None, "token_level_loss": True},
    "policy": {"model_name": "Qwen/Qwen2.5-1.5B", "train_global_batch_size": 512, "max_total_sequence_length": 512,
               "generation": {"backend": "vllm", "max_new_tokens": 512, "temperature": 1.0}},
    "env": {"math": {"num_workers": 8, "math_verify_impl": "hf_math_verify"}},
}  # fmt: skip
FLAT = {"dataset_name": "OpenMathInstruct-2", "prompt_file": "p.txt", "system_prompt_file": None, "shuffle": True,
        "num_workers": 1, "max_input_seq_length": 512}  # fmt: skip
KL = {"reference_policy_kl_type": "k3", "kl_input_clamp_value": 20.0, "kl_output_clamp_value": 10.0}
DEFAULT = {"processor": "math_hf_data_processor", "env_name": "math"}
SECTIONS = {"train": {"dataset_name": "OpenMathInstruct-2", "split_validation_size": 0.05}, "validation": None,
            "default": {**DEFAULT, "prompt_file": "p.txt"}, "max_input_seq_length": 512}  # fmt: skip
OF_0_6 = {"data": SECTIONS, "loss_fn": KL, "grpo": {"val_at_end": False, "seq_logprob_error_threshold": None}}
OF_0_7 = {**OF_0_6, "grpo": {**OF_0_6["grpo"], "advantage_clip_low": None, "invalid_tool_call_advantage": None}}
SHAPES: dict[str, dict[str, Any]] = {
    "0.4": {"data": FLAT, "env": {"dapo": {"num_workers": 8, "math_verify_impl": "dapo_math_verify"}}},
    "0.5": {"data": {**FLAT, **DEFAULT}, "loss_fn": KL},
    "0.6": OF_0_6,
    "0.7": OF_0_7,
    "main": {**OF_0_7, "grpo": {**OF_0_7["grpo"], "val_start_at": -1}},
}
"""Release -> keys of its base config by which it is recognized."""
KL_GRADIENT = {"0.4": "estimator", "0.5": "estimator", "0.6": "estimator", "0.7": "score", "main": "score"}
"""ClippedPGLossFn differentiates the sampling probability of KL estimates since 0.7."""


def merged(base, new):
    out = dict(base)
    for key, value in new.items():
        out[key] = merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a recipe in the shape of a release, with changes, and returns its path."""

    def at(release: str, change: dict[str, Any]):
        (tmp_path / "p.txt").write_text("Solve: {}")
        (tmp_path / "s.txt").write_text("Be brief.")
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(reduce(merged, (deepcopy(SHARED), SHAPES[release], change))))
        return path

    return at


def value_of(translation: Translation, key: str) -> Any:
    node = translation.content
    for name in key.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    return node


def line_of(translation: Translation, key: str):
    return next(line for line in translation.lines if line.key == key and line.status != ADDED)


@pytest.mark.slow
@pytest.mark.parametrize("release", SHAPES)
def test_recipe_of_a_release_trains_the_data_and_loss_of_that_release(release, write, tmp_path):
    translation = translate(write(release, {}))
    assert (translation.status, translation.source) == (SAME, f"read as a recipe of NeMo-RL {release} (by its keys)")
    assert translation.source in translation.summary()
    ours = tmp_path / "ours.yaml"
    ours.write_text(translation.to_text("recipe"))
    config = load_config(ours)
    validate(config)
    train, validation = config.data.train, config.data.validation
    assert (train.path, train.split, train.prompt_key) == ("nvidia/OpenMathInstruct-2", "train_1M[:95%]", "problem")
    assert (train.columns, train.environment, validation.split) == (
        {"answer": "expected_answer"}, "math", "train_1M[95%:]")  # fmt: skip
    assert (train.prompt_template, validation.prompt_template, train.system_prompt) == (*["Solve: {prompt}"] * 2, "")
    assert config.loss_fn.reference_policy_kl_gradient == KL_GRADIENT[release]
    assert config.loss_fn.kl_output_clamp_value == (None if release == "0.4" else 10.0)


@pytest.mark.parametrize(
    "release, data, expected",
    [
        ("0.4", {"dataset_name": "DeepScaler"},
         {"train.path": "agentica-org/DeepScaleR-Preview-Dataset", "validation.path": "HuggingFaceH4/aime_2024"}),
        ("0.5", {"dataset_name": "DAPOMath17K"},
         {"train.path": "BytedTsinghua-SIA/DAPO-Math-17k", "validation.path": "BytedTsinghua-SIA/AIME-2024",
          "validation.columns": {"answer": "reward_model.ground_truth"}}),
        ("0.5", {"dataset_name": "ResponseDataset", "train_data_path": "me/rows", "val_data_path": "me/held",
                 "input_key": "q", "output_key": "gold", "train_split": "part", "val_split": "test"},
         {"train.path": "me/rows", "train.split": "part", "train.prompt_key": "q", "train.columns": {"answer": "gold"},
          "validation.path": "me/held", "validation.split": "test", "validation.prompt_key": "q"}),
        ("0.5", {"dataset_name": "openmathinstruct2", "split": "train_2M", "output_key": "answer"},
         {"train.path": "nvidia/OpenMathInstruct-2", "train.split": "train_2M[:95%]", "train.columns": None}),
        # OpenMathInstruct2Dataset(seed=seed) reads no other key; the processor ignores the system prompt.
        ("0.5", {"split": "train_5M", "output_key": "gold", "system_prompt_file": "s.txt"},
         {"train.split": "train_1M[:95%]", "train.columns": {"answer": "expected_answer"}, "train.system_prompt": ""}),
        ("0.6", {"default": {"system_prompt_file": "s.txt"}}, {"train.system_prompt": "Be brief."}),
        # update_single_dataset_config fills in every key of data.default.
        ("0.6", {"train": {"split_validation_size": None}, "default": {"split": "train_5M", "output_key": "gold"}},
         {"train.split": "train_5M[:95%]", "train.columns": {"answer": "gold"}}),
        ("0.6", {"train": {"dataset_name": "DeepScaler", "split": "other", "output_key": "x"}},
         {"train.split": "train", "train.columns": None}),
    ],
)  # fmt: skip
def test_dataset_of_a_release_has_the_rows_and_columns_of_its_class(release, data, expected, write):
    translation = translate(write(release, {"data": data}))
    assert translation.status == SAME, translation.summary()
    assert {key: value_of(translation, f"data.{key}") for key in expected} == expected


@pytest.mark.parametrize(
    "release, data, samples",
    [
        ("0.4", {"dataset_name": "DeepScaler"}, 16),
        ("0.6", {"validation": {"dataset_name": "AIME2024"}}, 16),
        ("0.6", {"validation": {"dataset_name": "AIME2024", "repeat": 4}}, 4),
        ("main", {"validation": {"dataset_name": "AIME2024"}}, 1),
        ("main", {"validation": {"dataset_name": "DAPOMathAIME2024", "repeat": 4}}, 1),
    ],
)
def test_validation_rows_are_repeated_as_by_the_class_of_the_release(release, data, samples, write):
    whole = {} if release == "0.4" else {"train": {"split_validation_size": 0}}
    translation = translate(write(release, {"data": merged(whole, data)}))
    assert value_of(translation, "gdpo.val_generations_per_prompt") == samples


def test_loss_before_0_7_truncates_weights_and_filters_shaped_rewards(write):
    change = {
        "grpo": {"use_dynamic_sampling": True, "reward_shaping": {"enabled": True, "overlong_buffer_length": 64,
                                                                 "overlong_buffer_penalty": 1.0,
                                                                 "max_response_length": 512}},
        "loss_fn": {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 2.0,
                    "use_on_policy_kl_approximation": True},
    }  # fmt: skip
    found = {release: translate(write(release, change)) for release in ("0.5", "0.7")}
    for translation in found.values():
        assert value_of(translation, "loss_fn.off_policy.ratio_max") == 2.0
    assert "loss_fn.use_on_policy_kl_approximation" in found["0.5"].differences
    assert "loss_fn.use_on_policy_kl_approximation" not in found["0.7"].differences
    before_shaping = {release: value_of(t, "gdpo.dynamic_sampling.before_shaping") for release, t in found.items()}
    assert before_shaping == {"0.5": None, "0.7": True}


@pytest.mark.parametrize("release", SHAPES)
@pytest.mark.parametrize("options", [{}, {"tools": 3, "num_workers": 2}])
def test_custom_environment_beside_inherited_math_blocks_by_name(release, options, write):
    translation = translate(write(release, {"env": {"word_game": options}}))
    assert (translation.status, set(translation.blockers)) == (CANNOT_RUN, {"env.word_game"})
    assert "is custom code" in translation.blockers["env.word_game"] and "env" not in translation.content
    assert all(line.status != NO_EFFECT for line in translation.lines if line.key == "env.word_game.tools")


def test_unused_environments_of_nemo_rl_do_not_block_and_reward_models_do(write):
    unused = {"geometry3k": {"num_workers": 8}, "dapo": {"math_verify_impl": "dapo_math_verify"}}
    assert translate(write("main", {"env": unused})).status == SAME
    model = {"env": {"reward_model": {"model_name": "x"}}}
    assert set(translate(write("0.4", model)).blockers) == {"env.reward_model"}
    assert translate(write("0.5", model)).status == SAME  # env_name selects math


@pytest.mark.parametrize("where", ["train", "default"])
def test_answer_in_the_column_answer_is_not_a_difference(where, write):
    rows = {"train": {"dataset_name": "ResponseDataset", "data_path": "me/rows", "split_validation_size": 0}}
    translation = translate(write("main", {"data": merged(rows, {where: {"output_key": "answer"}})}))
    assert translation.status == SAME, translation.summary()


REPORTED = {
    "data.train.my_filter": "hard",
    "data.curriculum": True,
    "data.default.processor": "my_processor",
    "env.should_shuffle_tools": True,
    "grpo.length_penalty_coeff": 0.1,
    "grpo.adv_estimator.my_option": 2,
    "grpo.reward_shaping.length_penalty_coeff": 0.1,
    "reward_penalties.penalize_malformed_think_tag": True,
    "policy.generation.bad_words": ["no"],
    "policy.generation.vllm_cfg.my_sampler": "x",
    "policy.tokenizer.add_bos": True,
    "checkpointing.warm_start": "x",
}
"""Keys that affect the result or are not keys of NeMo-RL."""


@pytest.mark.parametrize("release", SHAPES)
def test_every_key_is_reported_and_no_pattern_hides_an_unknown_one(release, write):
    """Patterns such as data.* must not call a key without effect that the translator does not know."""
    change: dict[str, Any] = {"grpo": {"reward_shaping": {"enabled": True, "overlong_buffer_length": 64}}}
    for key, value in REPORTED.items():
        if release in ("0.4", "0.5") and key.startswith(("data.train.", "data.default.")):
            continue
        for name in reversed(key.split(".")):
            value = {name: value}
        change = merged(change, value)
    path = write(release, change)
    translation = translate(path)
    flat = open_recipe(path).flat
    assert [line.key for line in translation.lines if line.status != ADDED] == list(flat)
    silent = {key for key in REPORTED if key in flat and key not in translation.differences}
    assert translation.status == DIFFERS and not silent
    assert all(line_of(translation, key).status in (UNKNOWN, DIFFERENT) for key in REPORTED
               if key in flat and key != "data.default.processor")  # fmt: skip


def test_release_option_takes_precedence_over_the_keys(write, tmp_path, capsys):
    path = write("0.6", {})
    ours = tmp_path / "ours.yaml"
    assert cli.main(["config", "from-nemo-rl", str(path), "--release", "0.7", "--out", str(ours)]) == 0
    assert "read as a recipe of NeMo-RL 0.7 (--release)" in capsys.readouterr().out
    assert load_config(ours).loss_fn.reference_policy_kl_gradient == "score"
