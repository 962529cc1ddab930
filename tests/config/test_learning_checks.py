"""Rewards, shaping, estimator options and loss: what would fail or do nothing at the first step is refused before
it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gdpo_nemo.config.load import load_config, to_yaml
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
CONDITION = "{component: format, condition: {on: correctness, ge: 1.0}}"


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(load_config(path, overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "rules, expected",
    [
        ("[{component: format, clipp: [0, 1]}]", "did you mean 'clip'?"),
        ("[{component: formt, clip: [0, 1]}]", "did you mean 'format'?"),
        ("[{clip: [0, 1]}]", "write `component: name` and exactly one transformation"),
        ("[{component: format, clip: [1, 0]}]", "limits must be ascending"),
        ("[{component: format, clip: 3}]", "gdpo.shaping: shaping rule"),
        ("[{component: format, condition: {on: correctnes, ge: 1.0}}]", "did you mean 'correctness'?"),
        ("[{component: format, condition: {on: correctness}}]", "a condition requires `on` and one of"),
        ("[{component: format, condition: {on: correctness, ge: high}}]", "gdpo.shaping: shaping rule"),
        (f"[{CONDITION}, {{component: correctness, condition: {{on: format, ge: 1.0}}}}]", "form a cycle"),
        ("[{component: brief, length: {full: 20, zero: 10}}]", "requires `full`, and `zero` above it"),
        ("[{component: long, overlong: {bufer: 5}}]", "did you mean 'buffer'?"),
        ("[{component: [format], clip: [0, 1]}]", "gdpo.shaping"),
    ],
)
def test_a_shaping_rule_that_would_fail_on_the_first_batch_is_refused(minimal, rules, expected):
    message = refused(minimal, f"gdpo.shaping={rules}")
    assert message.startswith("gdpo.shaping: ") and expected in message


def test_a_weight_needs_a_component_that_an_environment_gives_or_a_rule_creates(minimal):
    assert "gdpo.rewards.brief: no environment returns this component" in refused(minimal, "gdpo.rewards.brief=1.0")
    validate(load_config(minimal, ["gdpo.rewards.brief=1.0", "gdpo.shaping=[{component: brief, length: {full: 20}}]"]))


def test_only_instant_environments_are_built_for_their_components(minimal, tmp_path):
    author = tmp_path / "author.py"
    author.write_text("raise RuntimeError('the dry run imported me')\n")
    plugin = [f"env.toy.plugin={author}:Environment", "gdpo.rewards={anything: 1.0}"]
    assert validate(load_config(minimal, plugin)).notes == ()
    assert "gdpo.shaping" in refused(minimal, *plugin, "gdpo.shaping=[{component: anything, clip: [1, 0]}]")


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (["gdpo.preset=verl", "gdpo.estimator=grpo"], "gdpo.preset: preset 'verl' is a variant of gdpo"),
        (
            ["gdpo.preset=nemo_rl", "gdpo.rewards.format=0"],
            "gdpo.preset: this variant of gdpo requires at least two components",
        ),
        (["gdpo.options={gama: 0.5}", "gdpo.estimator=sa_mrpo"], "did you mean 'gamma'?"),
        (["gdpo.options={gamma: 0.5}"], "gdpo.options: unknown option 'gamma' of gdpo"),
        (["gdpo.options={gamma: much}", "gdpo.estimator=sa_mrpo"], "option 'gamma' must be like 0.5, got 'much'"),
        (["gdpo.options={bounds: {formt: [0, 1]}}", "gdpo.estimator=sa_mrpo"], "did you mean 'format'?"),
        (["gdpo.options={bounds: 3}", "gdpo.estimator=sa_mrpo"], "gdpo.options: "),
        (["gdpo.options={mode: soft}", "gdpo.estimator=gd2po"], "mode must be 'hard' or 'snr'"),
        (["gdpo.options={asymmetric: 1}", "gdpo.estimator=dara"], "option 'asymmetric' must be like False"),
        (["gdpo.options={epsilon: 0.1}"], "gdpo.options.epsilon: not an option; set gdpo.epsilon"),
        (["gdpo.options={missing: ignore}"], "gdpo.options: missing='ignore'"),
        (["gdpo.options={ddof: 2}"], "ddof must be 0 or 1"),
        (["gdpo.options={batch_rows: kept}"], "has no effect as kept with gdpo, which drops no samples; use scored"),
        (["gdpo.options={batch_unit: token}", "gdpo.estimator=grpo"], "has no effect without the batch norm"),
        (["gdpo.options={leave_one_out: true}", "gdpo.estimator=dr_grpo"], "which normalises the sum"),
        (["gdpo.epsilon=0.001", "gdpo.estimator=dr_grpo"], "gdpo.epsilon: has no effect"),
    ],
)
def test_estimators_presets_and_options_must_fit_each_other(minimal, overrides, expected):
    assert expected in refused(minimal, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["gdpo.estimator=sa_mrpo", "gdpo.options={gamma: 1, bounds: {correctness: [-3, 3]}}"],
        ["gdpo.estimator=gd2po", "gdpo.options={mode: snr, tau: 0.3, batch_unit: token}"],
        ["gdpo.estimator=grpo", "gdpo.batch_norm=true", "gdpo.options={batch_epsilon: 0.001}"],
        ["gdpo.preset=nemo_rl", "gdpo.options={leave_one_out: true}"],
        [f"gdpo.shaping=[{CONDITION}, {{component: correctness, scale: 2.0}}]"],
        ["gdpo.kl_in_reward=0.001"],
        ["gdpo.kl_in_reward=0.001", "gdpo.dynamic_sampling.enabled=true"],
        ["gdpo.preset=nemo_rl", "gdpo.dynamic_sampling={enabled: true, leave_one_out: true}"],
        ["rollout.endpoint.enabled=true", "rollout.turns.max_turns=32", "gdpo.num_prompts_per_step=256"],
        ["rollout.turns.max_turns=33", "gdpo.num_prompts_per_step=256"],
    ],
)
def test_consistent_settings_are_accepted(minimal, overrides):
    assert validate(load_config(minimal, overrides)).notes == ()


@pytest.mark.parametrize(
    "overrides, named",
    [
        (
            ["loss_fn.off_policy.mode=truncate", "loss_fn.old_logprobs=sampler"],
            ["loss_fn.off_policy.mode", "loss_fn.old_logprobs is sampler"],
        ),
        (
            ["loss_fn.off_policy.mode=icepop", "rollout.max_staleness=1"],
            ["loss_fn.off_policy.mode", "rollout.max_staleness", "loss_fn.old_logprobs: trainer"],
        ),
        (
            ["loss_fn.off_policy.mode=mask", "loss_fn.off_policy.ratio_min=2.0"],
            ["loss_fn.off_policy.ratio_min: must be below"],
        ),
        (
            ["loss_fn.type=gspo", "loss_fn.off_policy.mode=truncate"],
            ["loss_fn.off_policy: per-token weights", "level sequence or geometric"],
        ),
        (
            ["loss_fn.type=gspo", "loss_fn.off_policy.mode=icepop", "loss_fn.off_policy.level=sequence"],
            ["loss_fn.off_policy", "icepop"],
        ),
        (
            ["loss_fn.type=target_po", "policy.train_global_batch_size=4"],
            ["policy.train_global_batch_size: 4 splits groups of 8", "target_po", "gdpo.num_generations_per_prompt"],
        ),
        (["loss_fn.type=target_po", "loss_fn.aggregation=sequence_mean"], ["loss_fn.aggregation: has no effect"]),
        (["loss_fn.type=cispo", "loss_fn.ratio_clip_c=3.0"], ["loss_fn.ratio_clip_c: has no effect"]),
        (
            ["gdpo.dynamic_sampling={enabled: true, batch_multiplier: 2}", "rollout.max_staleness=1"],
            ["gdpo.dynamic_sampling.batch_multiplier", "rollout.max_staleness 0, got 1", "one at a time"],
        ),
        (
            ["gdpo.dynamic_sampling={enabled: true, leave_one_out: true}", "gdpo.options={leave_one_out: true}"],
            ["gdpo.dynamic_sampling.leave_one_out: replaces the only sample", "reproduce NeMo-RL", "equal_peers: raw"],
        ),
        (
            [
                "gdpo.dynamic_sampling={enabled: true, leave_one_out: true}",
                "gdpo.preset=nemo_rl",
                "rollout.max_staleness=1",
            ],
            ["gdpo.dynamic_sampling.leave_one_out", "rollout.max_staleness 0, got 1", "only as a whole"],
        ),
        (["gdpo.kl_in_reward=0"], ["gdpo.kl_in_reward: must be more than 0"]),
        (["gdpo.kl_in_reward=-1"], ["gdpo.kl_in_reward: must be more than 0"]),
        (
            ["gdpo.shaping=[{component: kl, kl: {coefficient: 0.001}}]", "gdpo.rewards.kl=1.0"],
            ["gdpo.shaping", "would remove its coefficient", "kl_in_reward"],
        ),
        (
            ["rollout.endpoint.enabled=true", "rollout.turns.max_turns=33", "gdpo.num_prompts_per_step=256"],
            [
                "rollout.turns.max_turns: a step of 256 prompts x 8 samples x 33 turns has up to 67,584 turns",
                "remembers only 65,536",
                "gdpo.num_prompts_per_step or gdpo.num_generations_per_prompt",
            ],
        ),
        (
            [
                "rollout.endpoint.enabled=true",
                "rollout.turns.max_turns=8",
                "data.validation={split: test}",
                "gdpo.val_period=1",
                "gdpo.val_prompts=4096",
                "gdpo.val_generations_per_prompt=3",
            ],
            ["a validation of 4,096 prompts x 3 samples x 8 turns has up to 98,304 turns", "gdpo.val_prompts"],
        ),
        (["loss_fn.reference_policy_kl_penalty=-0.1"], ["loss_fn.reference_policy_kl_penalty: must be 0 or more"]),
    ],
)
def test_combinations_of_the_loss_that_cannot_work_name_every_key_involved(minimal, overrides, named):
    message = refused(minimal, *overrides)
    assert all(text in message for text in named), message


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss_fn.off_policy.mode=truncate"],
        ["loss_fn.off_policy.mode=icepop", "rollout.max_staleness=1", "loss_fn.old_logprobs=trainer"],
        ["loss_fn.type=target_po", "policy.train_global_batch_size=16"],
        ["loss_fn.type=target_po", "loss_fn.aggregation=sequence_mean", "loss_fn.entropy_bonus=0.001"],
        ["gdpo.dynamic_sampling.enabled=true"],
        ["gdpo.dynamic_sampling.enabled=true", "rollout.max_staleness=1"],
        ["loss_fn.reference_policy_kl_penalty=0.1", "loss_fn.reference_policy_kl_type=mse"],
    ],
)
def test_combinations_of_the_loss_that_work_are_accepted(minimal, overrides):
    assert validate(load_config(minimal, overrides)).notes == ()


def test_a_kl_loss_whose_gradient_vanishes_on_average_is_noted(minimal):
    kl = ["loss_fn.reference_policy_kl_penalty=0.1", "loss_fn.reference_policy_kl_type=k1"]
    assert any("k1 in the loss" in note for note in validate(load_config(minimal, kl)).notes)


@pytest.mark.parametrize("kind, low, high", [("gspo", "3e-4", "4e-4"), ("cispo", "1.0", "4.0")], ids=["gspo", "cispo"])
def test_a_loss_with_the_clips_of_another_is_noted_with_its_published_ones(minimal, kind, low, high):
    """The note's own remedy is accepted and ends it."""
    (note,) = validate(load_config(minimal, [f"loss_fn.type={kind}"])).notes
    assert note.startswith("loss_fn.ratio_clip_min, ratio_clip_max: 0.2 and 0.28 are the defaults of clipped_pg; ")
    assert note.endswith(f"use ratio_clip_min: {low}, ratio_clip_max: {high}")
    remedy = [f"loss_fn.ratio_clip_min={low}", f"loss_fn.ratio_clip_max={high}"]
    assert validate(load_config(minimal, [f"loss_fn.type={kind}", *remedy])).notes == ()
    assert validate(load_config(minimal, [f"loss_fn.type={kind}", remedy[1]])).notes == ()
    assert validate(load_config(minimal, ["loss_fn.type=clip_cov"])).notes == ()


def test_a_dry_run_that_uses_every_check_imports_no_torch(minimal):
    overrides = [
        "gdpo.estimator=sa_mrpo",
        "gdpo.options={gamma: 0.7}",
        f"gdpo.shaping=[{CONDITION}, {{component: brief, length: {{full: 20}}}}]",
        "loss_fn.type=target_po",
        "gdpo.dynamic_sampling.enabled=true",
    ]
    program = (
        "import sys; from gdpo_nemo.commands.cli import main\n"
        f"assert main(['train', '--dry-run', '--config', {str(minimal)!r}, *{overrides!r}]) == 0\n"
        "sys.exit(' '.join(m for m in ('torch', 'ray', 'transformers', 'megatron', 'vllm') if m in sys.modules) or 0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_key_of_a_condition_keeps_its_spelling(tmp_path):
    """YAML 1.1 reads a bare ``on`` as true, which nobody would know for it."""
    config = load_config(None, [f"gdpo.shaping=[{CONDITION}]"])
    (tmp_path / "kept.yaml").write_text(to_yaml(config))
    assert "on: correctness" in to_yaml(config).replace("'", "") and "true: correctness" not in to_yaml(config)
    again = load_config(tmp_path / "kept.yaml")
    validate(again)
    assert to_yaml(again) == to_yaml(config)
