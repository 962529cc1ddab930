"""Checks of the objective: rewards, shaping, estimator, loss, PPO, preferences, distillation and strided prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gdpo_nemo.algorithms.component_weights import check_component_weights
from gdpo_nemo.algorithms.estimators import ESTIMATORS
from gdpo_nemo.algorithms.loss_selection import (
    Functions,
    check_loss,
    is_import_path,
    loss_entry,
    loss_import_paths,
    why_all_sequences,
)
from gdpo_nemo.algorithms.loss_settings import LossSettings
from gdpo_nemo.algorithms.noise import check_noise, error_rates
from gdpo_nemo.algorithms.preference_objectives import PREFERENCES
from gdpo_nemo.algorithms.rewards import check_shaping, named_components, rule_name
from gdpo_nemo.algorithms.selection import check_selection, run_estimator, select
from gdpo_nemo.algorithms.table import build_table, with_array_hint
from gdpo_nemo.algorithms.weighting import WeightingRule
from gdpo_nemo.algorithms.weighting_rules import read_rule, rule_of, weighs_criteria
from gdpo_nemo.config.algorithm_choice import (
    ALGORITHMS,
    TRAINED,
    AlgorithmSpec,
    check_example_type,
    old_logprobs_source,
    resolved_loss,
    spec_of,
    trains_stale_samples_as_new,
)
from gdpo_nemo.config.data_files import may_be_on_the_hub
from gdpo_nemo.config.environment_algorithms import own_configs, trained_configs
from gdpo_nemo.config.layout import Layout, samples_per_step
from gdpo_nemo.config.model_checks import check_model, read_model
from gdpo_nemo.config.schema import Config, GdpoConfig
from gdpo_nemo.config.sections import LoraConfig
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.import_path import ImportPath


def check_learning(config: Config, algorithm: AlgorithmSpec) -> None:
    """Check rewards, shaping, estimator, credit and loss.

    Raises:
        ConfigError: if a setting would fail or have no effect. The message contains the key and the remedy.
    """
    _check_loss(config, algorithm)
    if not algorithm.samples:
        return
    _check_shaping_rules(config.gdpo)
    check_reward_weights(config)
    _check_noise(config.gdpo)
    check_estimator(config.gdpo)
    _check_component_weights(config.gdpo)
    _check_weighting(config, algorithm)
    _check_credit(config, algorithm)
    _check_component_gradients(config)


def check_components(gdpo: GdpoConfig, known: Iterable[str]) -> None:
    """Check that the reward components in weights and shaping rules exist.

    Args:
        known: names of the components that the environments may return.

    Raises:
        ConfigError: if a component is unknown. The message contains the key and the available components.
    """
    try:
        names = check_shaping(gdpo.shaping, sorted(known))
    except ValueError as error:
        raise ConfigError(f"gdpo.shaping: {error}") from None
    for name in gdpo.rewards:
        if name not in names:
            raise ConfigError(
                f"gdpo.rewards.{name}: no environment returns this component; available: {', '.join(names)}"
            )


def check_weighted_components(config: Config, known: Mapping[str, Iterable[str] | None]) -> None:
    """Check that the environments return the components of ``gdpo.rewards`` and of the environments' algorithms.

    Args:
        known: for each environment, the components that it may return, or None if they are unknown.

    Raises:
        ConfigError: if a component is unknown.
    """
    if None not in known.values():
        check_components(config.gdpo, {component for names in known.values() for component in names or ()})
    for name, own in own_configs(config).items():
        names = known[name]
        if names is None:
            continue
        key = f"env.{name}.algorithm"
        others = [component for component in own.gdpo.rewards if component not in names]
        if others and own.gdpo.rewards == config.gdpo.rewards and not own.gdpo.shaping:
            raise ConfigError(
                f"{key}.gdpo.rewards: must be set, because gdpo.rewards contains {others[0]!r}, which this environment "
                "does not return"
            )
        try:
            check_components(own.gdpo, names)
        except ConfigError as error:
            raise error.within(key) from None


def kl_in_reward(gdpo: GdpoConfig) -> bool:
    """Return whether the reward includes a KL penalty, which needs log-probs of the initial model."""
    return gdpo.kl_in_reward is not None


def reference_passes(config: Config) -> int:
    """Return how often the initial model scores a sample of a step: for the KL in the loss, and for that in the reward.

    If environments have different algorithms, this is the largest number.
    """
    return max(bool(c.loss_fn.reference_policy_kl_penalty) + kl_in_reward(c.gdpo) for c in trained_configs(config))


def has_teacher(config: Config) -> bool:
    """Return whether a teacher scores the samples of the run or of an environment."""
    return any(spec_of(c).section == "teacher" for c in trained_configs(config))


def check_recorded_advantages(config: Config) -> None:
    """Check that the advantages can be computed again from recorded samples.

    Raises:
        ConfigError: if they depend on a model.
    """
    for name in own_configs(config):
        raise ConfigError(
            f"env.{name}.algorithm: not supported here, because the recorded samples of all environments are compared"
        )
    if kl_in_reward(config.gdpo):
        raise ConfigError("gdpo.kl_in_reward: requires log-probs of the initial model, which rollouts do not record")
    source = {"ppo": "a value head", "distillation": "a teacher"}.get(config.algorithm.type)
    if source:
        raise ConfigError(
            f"algorithm.type: {config.algorithm.type}'s advantages come from {source}, which rollouts do not record"
        )


def objective_notes(config: Config, algorithm: AlgorithmSpec) -> list[str]:
    """Return notes on valid settings that differ from the loss's paper or train stale samples without a correction."""
    return [*_loss_notes(config.loss_fn), *_stale_notes(config, algorithm)] if algorithm.samples else []


_PUBLISHED_CLIPS = {
    "gspo": "gspo's paper (2507.18071) clips at 3e-4 and 4e-4, because the ratio of a whole sequence stays near 1; use "
    "ratio_clip_min: 3e-4, ratio_clip_max: 4e-4",
    "cispo": "cispo's paper (2506.13585) has no lower bound, and ScaleRL (2510.13786) has an upper bound of 5; use "
    "ratio_clip_min: 1.0, ratio_clip_max: 4.0",
}
"""Losses whose papers use different clip ranges than PPO, with the keys that set these ranges."""


def _loss_notes(loss: LossSettings) -> list[str]:
    default = LossSettings()
    changed = (loss.ratio_clip_min, loss.ratio_clip_max) != (default.ratio_clip_min, default.ratio_clip_max)
    if changed or loss.type not in _PUBLISHED_CLIPS:
        return []
    return [
        f"loss_fn.ratio_clip_min, ratio_clip_max: {default.ratio_clip_min:g} and {default.ratio_clip_max:g} are the "
        f"defaults of clipped_pg; {_PUBLISHED_CLIPS[loss.type]}"
    ]


def _stale_notes(config: Config, algorithm: AlgorithmSpec) -> list[str]:
    """Return a note if stale samples are trained without an off-policy correction."""
    if not trains_stale_samples_as_new(config, algorithm):
        return []
    if resolved_loss(config, algorithm).off_policy.correction != "none":
        return []
    buffer = config.rollout.replay_buffer
    age = buffer.max_age if buffer.groups else config.rollout.max_staleness
    loss = config.loss_fn
    custom = is_import_path(loss.type) and loss.off_policy.mode is None
    remedy = "use truncate, unless the custom loss includes a correction" if custom else "use null or truncate"
    return [
        f"loss_fn.off_policy.mode: none trains samples up to {age} steps old without a correction; {remedy} "
        "(sampler_gap/* measures the difference)"
    ]


def _check_shaping_rules(gdpo: GdpoConfig) -> None:
    """Check the shaping rules. The components that the rules name are assumed to exist. Raises ConfigError."""
    rules = gdpo.shaping
    try:
        check_shaping(rules, named_components(rules))
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"gdpo.shaping: {error}") from None
    for rule in rules:
        _check_import_path("gdpo.shaping", rule_name(rule))


def _check_import_path(key: str, name: str) -> None:
    """Check that the file of an import path defines the function, without executing the file. Raises ConfigError."""
    path = ImportPath(name)
    if path.is_in_file:
        path.find_function(key, classes=key.startswith("gdpo."))


def check_estimator(gdpo: GdpoConfig, function: Callable[..., Any] | None = None) -> None:
    """Check that the estimator supports the preset, options and other settings.

    Args:
        function: function that ``gdpo.estimator`` imports. None: only check that an import path exists.

    Raises:
        ConfigError: if a setting is not supported.
    """
    for name in ("batch_norm", "epsilon", "noise"):
        if name in gdpo.options:
            raise ConfigError(f"gdpo.options.{name}: not an option; set gdpo.{name}")
    if gdpo.turn_baseline == "group" and gdpo.options.get("leave_one_out"):
        raise ConfigError(
            "gdpo.options.leave_one_out: conflicts with gdpo.turn_baseline group, whose baseline already leaves out "
            "the sample; remove it"
        )
    if function is None and is_import_path(gdpo.estimator):
        _check_import_path("gdpo.estimator", gdpo.estimator)
        return
    options = {**gdpo.options, "noise": gdpo.noise} if gdpo.noise else gdpo.options
    try:
        check_selection(function or gdpo.estimator, gdpo.preset, gdpo.batch_norm, gdpo.epsilon, options, gdpo.rewards)
    except ValueError as error:
        key = "gdpo.preset" if gdpo.preset else "gdpo.estimator"
        if gdpo.options:
            key = "gdpo.options"
        raise ConfigError(f"{key}: {error}") from None
    except Exception as error:
        if function is None:
            raise
        raise ConfigError(f"gdpo.estimator: {gdpo.estimator} raised {with_array_hint(error)}") from error


def _check_noise(gdpo: GdpoConfig) -> None:
    """Check ``gdpo.noise``. Raises ConfigError."""
    if not gdpo.noise:
        return
    try:
        check_noise(gdpo.noise, gdpo.rewards)
    except ValueError as error:
        raise ConfigError(f"gdpo.{error}") from None
    rates = error_rates(gdpo.noise)
    entry = ESTIMATORS.get(gdpo.estimator)
    if entry is not None and entry.sums_rewards and len(rates) < len(gdpo.noise):
        name = next(name for name in gdpo.noise if name not in rates)
        raise ConfigError(f"gdpo.noise.{name}: has no effect with {gdpo.estimator}, which sums the rewards; remove it")
    for rule in gdpo.shaping:
        if rule["component"] in rates:
            raise ConfigError(
                f"gdpo.noise.{rule['component']}: error rates conflict with its rule in gdpo.shaping, after which the "
                "rewards are not those of the verifier; use the standard deviation of the shaped reward"
            )


def _check_component_weights(gdpo: GdpoConfig) -> None:
    """Check ``gdpo.constraints`` and ``gdpo.schedules``. Raises ConfigError."""
    try:
        check_component_weights(gdpo.rewards, gdpo.constraints, gdpo.schedules)
    except ValueError as error:
        raise ConfigError(f"gdpo.{error}") from None
    # A weight may reach 0, so the estimator must also accept the weights without it.
    changed = {*gdpo.constraints, *gdpo.schedules}
    if changed:
        check_estimator(replace(gdpo, rewards={name: w * (name not in changed) for name, w in gdpo.rewards.items()}))


def _check_weighting(config: Config, algorithm: AlgorithmSpec) -> None:
    """Check ``gdpo.weighting``. Raises ConfigError if the rule is invalid, has no effect or lacks what it reads."""
    gdpo = config.gdpo
    try:
        name = rule_of(gdpo.weighting)
        rule = read_rule(gdpo.weighting, gdpo.rewards)
    except ValueError as error:
        raise ConfigError(f"gdpo.{error}") from None
    if not name:
        return
    _check_import_path("gdpo.weighting", name)
    if len(gdpo.rewards) < 2 and not weighs_criteria(gdpo.rewards, gdpo.weighting):
        raise ConfigError("gdpo.weighting: requires at least two components in gdpo.rewards")
    if rule is not None:
        _check_rule(config, algorithm, rule)


def _check_rule(config: Config, algorithm: AlgorithmSpec, rule: WeightingRule) -> None:
    """Check that the other settings fit the properties of a built-in weighting rule. Raises ConfigError."""
    gdpo = config.gdpo
    most = rule.most_components or len(gdpo.rewards)
    known = algorithm.head != "value" and not is_import_path(gdpo.estimator)
    why = {
        f"supports at most {most} components in gdpo.rewards": len(gdpo.rewards) > most,
        "requires gdpo.group_by: row for a family of criteria": (
            gdpo.group_by == "prompt" and weighs_criteria(gdpo.rewards, gdpo.weighting)
        ),
        "requires gdpo.component_gradient_period, such as 10": (
            rule.reads_gradients and not gdpo.component_gradient_period
        ),
        "requires the advantages of an estimator, which PPO does not have": (
            rule.reads_advantages and algorithm.head == "value"
        ),
        f"multiplies all weights by one factor, which gdpo.estimator {gdpo.estimator} cancels; use gdpo.batch_norm: "
        "false, or the estimator dr_grpo or rloo": rule.is_common and known and _cancels_common_factor(gdpo),
    }
    for reason, refused in why.items():
        if refused:
            raise ConfigError(f"gdpo.weighting: {rule.name} {reason}")
    if rule.can_be_zero and known:
        # All factors but one may be 0.
        only = next(iter(gdpo.rewards))
        check_estimator(replace(gdpo, rewards={name: weight * (name == only) for name, weight in gdpo.rewards.items()}))


def _cancels_common_factor(gdpo: GdpoConfig) -> bool:
    """Return True if twice the weights of all components give the same advantages."""
    entry, settings, options = select(gdpo.estimator, gdpo.preset, gdpo.batch_norm, gdpo.epsilon, gdpo.options)
    if settings.batch_norm:
        return True
    draw = np.random.default_rng(0)
    columns = {name: draw.random(8) for name in gdpo.rewards}
    values = {}
    for factor in (1.0, 2.0):
        weights = {name: factor * (weight or 1.0) for name, weight in gdpo.rewards.items()}
        table = build_table(columns, [0, 0, 0, 0, 1, 1, 1, 1], weights, lengths=[4] * 8)
        values[factor] = run_estimator(entry, table, settings, options, gdpo.estimator).values
    return bool(np.allclose(values[1.0], values[2.0], rtol=1e-3))


def _check_loss(config: Config, algorithm: AlgorithmSpec) -> None:
    loss = config.loss_fn
    if old_logprobs_source(config) == "sampler" and loss.off_policy.correction != "none":
        because = "loss_fn.old_logprobs is sampler" if loss.old_logprobs else "rollout.max_staleness is above 0"
        raise ConfigError(
            f"loss_fn.off_policy.mode: has no effect because the ratio uses the sampler's log-probs ({because}); set "
            "loss_fn.old_logprobs: trainer, or mode: none"
        )
    try:
        check_loss(resolved_loss(config, algorithm))
    except ValueError as error:
        raise ConfigError(f"loss_fn.{error}") from None
    if not loss_import_paths(loss):
        check_skipping(config)
    _check_import_path("loss_fn.type", loss.type)
    _check_import_path("loss_fn.off_policy.mode", loss.off_policy.correction)


def check_skipping(config: Config, functions: Functions | None = None) -> None:
    """Check that ``policy.skip_zero_advantage`` does not change the gradient. Raises ConfigError."""
    if config.policy.skip_zero_advantage and (why := why_all_sequences(config.loss_fn, functions)):
        raise ConfigError(f"policy.skip_zero_advantage: would change the gradient: {why}")


def _check_credit(config: Config, algorithm: AlgorithmSpec) -> None:
    """Check that ``gdpo.credit: turn`` or span is not combined with settings that need one reward or advantage of the
    whole trajectory. Raises ConfigError."""
    gdpo = config.gdpo
    if gdpo.credit == "sequence":
        return
    by_turn = gdpo.credit == "turn"
    whole = {
        "gdpo.shaping": by_turn and bool(gdpo.shaping),
        "gdpo.kl_in_reward": by_turn and kl_in_reward(config.gdpo) and algorithm.head != "value",
        f"loss_fn.type {config.loss_fn.type}": loss_entry(config.loss_fn.type).by_group,
        "loss_fn.off_policy.sequence_mask_threshold": config.loss_fn.off_policy.sequence_mask_threshold is not None,
    }
    for what, is_set in whole.items():
        if is_set:
            unit = "rewards" if by_turn else "single advantages"
            raise ConfigError(f"gdpo.credit: {gdpo.credit} has no {unit} of whole trajectories, which {what} requires")


def _check_component_gradients(config: Config) -> None:
    """Check that the gradient is the sum of one gradient per component, and that computing them changes no state.
    Raises ConfigError."""
    if not config.gdpo.component_gradient_period:
        return
    loss = config.loss_fn.type
    why = {
        f"algorithm.type {config.algorithm.type} may change the updates": config.algorithm.type not in ALGORITHMS,
        "gdpo.credit span has different components in different tokens": config.gdpo.credit == "span",
        f"loss_fn.type {loss} is a custom loss, which may not be linear in the advantage": is_import_path(loss),
        f"loss_fn.type {loss} is not linear in the advantage": loss_entry(loss).by_group,
        f"loss_fn.type {loss} selects tokens by the whole advantage": loss_entry(loss).by_covariance,
        "policy.megatron_cfg.fp8 scales tensors by the values of earlier passes": config.policy.megatron_cfg.fp8,
    }
    for reason, refused in why.items():
        if refused:
            raise ConfigError(f"gdpo.component_gradient_period: cannot split the gradient: {reason}; set it to 0")


def check_algorithm(config: Config, algorithm: AlgorithmSpec, layout: Layout) -> None:
    """Run the additional check of the config's algorithm, if it declares one. Raises ConfigError."""
    if algorithm.check:
        ImportPath(algorithm.check).load()(config, algorithm, layout)


def check_ppo(config: Config, algorithm: AlgorithmSpec, layout: Layout) -> None:
    """Check that PPO supports the settings. Raises ConfigError."""
    try:
        config.ppo.check()
    except ValueError as error:
        raise ConfigError(f"ppo.{error}") from None


def check_supervised(config: Config, algorithm: AlgorithmSpec, layout: Layout) -> None:
    """Check the settings of an algorithm that trains on answers in the data, such as sft or dpo. Raises ConfigError."""
    kind = algorithm.rows
    assert kind is not None
    name = config.algorithm.type
    for split in ("train", "validation"):
        data = getattr(config.data, split)
        if data is None:
            continue
        if data.path is None:
            raise ConfigError(f"data.{split}.path: must be set, because algorithm {name} trains on answers in the data")
        check_example_type(split, data.type, kind)
        if data.train_on not in TRAINED:
            raise ConfigError(f"data.{split}.train_on: unknown {data.train_on!r}; known: {', '.join(TRAINED)}")
        if data.train_on != "assistant" and kind != "sft":
            raise ConfigError(
                f"data.{split}.train_on: has no effect with {name}, which compares whole answers; remove it"
            )


def check_preferences(config: Config, algorithm: AlgorithmSpec, layout: Layout) -> None:
    """Check that an algorithm of the section ``preference`` supports the settings. Raises ConfigError."""
    check_supervised(config, algorithm, layout)
    name = config.algorithm.type
    try:
        config.preference.check(name)
    except ValueError as error:
        raise ConfigError(f"preference.{error}") from None
    size = config.policy.train_global_batch_size or samples_per_step(config.gdpo, algorithm)
    if algorithm.rows == "pairs" and size % 2:
        raise ConfigError(f"policy.train_global_batch_size: {size} splits a pair of answers; use an even number")
    if PREFERENCES[name].estimates_kl and size < 2:
        raise ConfigError(
            f"gdpo.num_prompts_per_step: must be at least 2 with {name}, which estimates its KL from the other answers "
            "of an update"
        )


_KEY = "teacher.model_name"


def check_teacher(config: Config, algorithm: AlgorithmSpec, layout: Layout) -> None:
    """Check that distillation supports the settings and the teacher. Raises ConfigError."""
    name = config.teacher.model_name
    if not name:
        raise ConfigError(
            f"{_KEY}: must be set with algorithm {config.algorithm.type}: a Hugging Face folder or a hub name"
        )
    on_the_hub = not Path(name).exists() and may_be_on_the_hub(name)
    if not on_the_hub and not (Path(name) / "config.json").is_file():
        raise ConfigError(f"{_KEY}: {name} is not the folder of a Hugging Face model")
    policy = replace(config.policy, model_name=name, model_factory=None, tokenizer_name=None, lora=LoraConfig())
    try:
        fields = check_model(policy, layout).fields or {}
    except ConfigError as error:
        if error.key == "policy.model_name":
            raise ConfigError(f"{_KEY}: {error.problem}") from None
        raise error.within(_KEY) from None
    vocabulary = (read_model(config.policy).fields or {}).get("vocab_size", 0)
    # ``fields`` is empty if the config of a hub model is not available on this machine.
    if fields and fields.get("vocab_size", 0) < vocabulary:
        raise ConfigError(
            f"{_KEY}: {name} has {fields.get('vocab_size')} tokens, fewer than the policy's {vocabulary}; use a "
            "teacher with the same vocabulary"
        )


def check_strided(config: Config, algorithm: AlgorithmSpec) -> None:
    """Check that the settings in ``strided`` fit the other sections. Raises ConfigError."""
    policy = config.policy
    for split in ("train", "validation"):
        data = getattr(config.data, split)
        if data is None or data.strided is None:
            continue
        key = f"data.{split}.strided"
        context, answer = data.strided.context_length, data.strided.generate_max_len
        if context + answer > policy.max_total_sequence_length:
            raise ConfigError(
                f"{key}.context_length: {context} tokens and the following {answer} (generate_max_len) exceed "
                f"policy.max_total_sequence_length {policy.max_total_sequence_length}"
            )
        if algorithm.samples and policy.generation.max_new_tokens != answer:
            raise ConfigError(
                f"{key}.generate_max_len: must equal policy.generation.max_new_tokens "
                f"({policy.generation.max_new_tokens}), got {answer}"
            )


_PLUGINS = ("nemo_gym", "nemo_gym_agent")
"""Environment plugins whose option ``rewards`` may be a list of {name, weight}."""


def environment_weights(env: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weight of each reward component that environments list. The default is 1. Raises ConfigError if two
    environments list different weights."""
    weights: dict[str, Any] = {}
    for key, entry in _entries(env):
        name = entry["name"]
        weight = entry.get("weight", 1.0)
        if weights.setdefault(name, weight) != weight:
            raise ConfigError(
                f"{key}: weight {weight} of {name!r} differs from weight {weights[name]} in another environment"
            )
    return weights


def check_reward_weights(config: Config) -> None:
    """Check that the weights that environments list equal those in ``gdpo.rewards``. Raises ConfigError."""
    for key, entry in _entries(config.env):
        trained = config.gdpo.rewards.get(entry["name"], 0.0)
        if "weight" in entry and entry["weight"] != trained:
            raise ConfigError(
                f"{key}: weight {entry['weight']} of {entry['name']!r} conflicts with gdpo.rewards, which "
                f"has {trained}; remove one of them"
            )


def _entries(env: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (key, entry) for each listed reward with a name. Malformed entries are skipped, because the environment
    reports them."""
    for name, options in env.items():
        if not isinstance(options, Mapping) or options.get("plugin", name) not in _PLUGINS:
            continue
        entries = options.get("rewards")
        for index, entry in enumerate(entries if isinstance(entries, list) else ()):
            if isinstance(entry, Mapping) and isinstance(entry.get("name"), str):
                yield f"env.{name}.rewards[{index}]", entry
