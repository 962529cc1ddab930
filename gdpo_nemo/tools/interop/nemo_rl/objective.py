"""Translation of recipe keys that depend on each other: estimator, rewards, shaping, loss and learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gdpo_nemo.environments.nemo_gym.checkout import Unknown
from gdpo_nemo.models.architectures import linear_layers
from gdpo_nemo.models.families import FAMILIES
from gdpo_nemo.tools.interop.nemo_rl import gym
from gdpo_nemo.tools.interop.nemo_rl.algorithms import actor_critic, from_rows, from_teacher
from gdpo_nemo.tools.interop.nemo_rl.datasets import ENVIRONMENTS, components, env_name, has_images, image_rewards
from gdpo_nemo.tools.interop.nemo_rl.keys import adapted
from gdpo_nemo.tools.interop.nemo_rl.penalties import penalties
from gdpo_nemo.tools.interop.nemo_rl.recipe import ALGORITHMS, Recipe
from gdpo_nemo.tools.interop.translation import Findings

_MEGATRON = "policy.megatron_cfg"
_KV = {
    "drain": "without in_flight_weight_updates, engines finish running samples before a weight update",
    "recompute": "in-flight weight updates recompute the KV cache (recompute_kv_cache_after_weight_updates)",
    "keep": "in-flight weight updates keep the KV cache without recompute_kv_cache_after_weight_updates",
}


def learning(recipe: Recipe, findings: Findings) -> None:
    """Add the settings that define the training result to the findings."""
    if recipe.section != "grpo":
        findings.set("algorithm.type", ALGORITHMS[recipe.section], f"the recipe has a section {recipe.section}")
    for part in _PARTS.get(recipe.section, (from_rows,)):
        part(recipe, findings)
    _schedule(recipe, findings)
    _lora(recipe, findings)
    if has_images(recipe):
        _images(recipe, findings)


def _images(recipe: Recipe, findings: Findings) -> None:
    if recipe.model.images and not recipe.lora and not recipe.freezes_tower:
        findings.set("policy.vision.train", True, "NeMo-RL trains the vision tower unless freeze_config freezes it")
    if not recipe.rows:
        what = "prompts of a group have equal images; NeMo-RL compares only tokens, which contain the size of an image"
        findings.differs("groups", what)


def _estimator(recipe: Recipe, findings: Findings) -> None:
    def setting(name: str) -> Any:
        return recipe.get(f"grpo.adv_estimator.{name}", recipe.get(f"grpo.{name}", True))

    name = recipe.get("grpo.adv_estimator.name", "grpo")
    normalize = setting("normalize_rewards")
    leave_one_out = setting("use_leave_one_out_baseline")
    options: dict[str, Any] = {"leave_one_out": True} if leave_one_out else {}
    if name == "gdpo":
        findings.set("gdpo.estimator", "gdpo", "adv_estimator.name")
        findings.set(
            "gdpo.preset", "nemo_rl", "NeMo-RL's numerics; the batch's standard deviation includes zero-variance groups"
        )
        if not normalize:
            options["scale_rewards"] = "none"
    elif name == "reinforce_plus_plus":
        _reinforce_plus_plus(recipe, findings)
        return
    elif name == "grpo" and normalize:
        findings.set("gdpo.estimator", "grpo", "normalize_rewards")
        options |= {"equal_peers": "raw"} if leave_one_out else {}
    elif name == "grpo":
        findings.set(
            "gdpo.estimator",
            "rloo" if leave_one_out else "dr_grpo",
            "rewards minus their baseline, without normalization",
        )
        return
    else:
        findings.set("gdpo.estimator", "grpo", f"instead of {name!r}")
        findings.blocks("grpo.adv_estimator.name", f"the estimator {name!r} is not supported")
    if leave_one_out:
        findings.set(
            "gdpo.options",
            options,
            "use_leave_one_out_baseline: mean and standard deviation of the group's other samples",
        )
    elif options:
        findings.set("gdpo.options", options, "normalize_rewards false: no division by the group's standard deviation")


def _reinforce_plus_plus(recipe: Recipe, findings: Findings) -> None:
    """Set the estimator reinforce_plus_plus. This estimator standardizes rewards, optionally minus the group's mean,
    over the batch's tokens."""
    options: dict[str, Any] = {
        "batch_unit": "token",
        "batch_rows": "scored",
        "ddof": 0,
        "batch_epsilon": 0.0,
        "residue": 0.0,
    }
    if recipe.get("grpo.adv_estimator.minus_baseline", True):
        findings.set("gdpo.estimator", "dr_grpo", "reinforce_plus_plus: rewards minus the group's mean")
        findings.set("gdpo.batch_norm", True, "reinforce_plus_plus standardizes rewards over the batch")
    else:
        findings.set("gdpo.estimator", "reinforce_plus_plus", "adv_estimator.name")
        options["minus_baseline"] = False
    findings.set("gdpo.options", options, "reinforce_plus_plus weights samples by their number of tokens")
    if recipe.get("grpo.overlong_filtering"):
        findings.differs(
            "grpo.overlong_filtering", "the batch statistics include truncated samples; NeMo-RL excludes them"
        )
    if recipe.get("loss_fn.use_kl_in_reward") and recipe.get("loss_fn.reference_policy_kl_penalty"):
        findings.differs(
            "loss_fn.use_kl_in_reward",
            "a token-level KL penalty in the advantages, which replaces the penalty in the loss, is not supported",
        )


# -- rewards ----------------------------------------------------------------------------------------------------


def _rewards(recipe: Recipe, findings: Findings) -> None:
    found = components(recipe)
    if found is None:
        _no_environment(recipe, findings)
        return
    plugin, options, names = found
    of_images = [weight for _, weight in image_rewards(recipe).values()]
    weights = of_images or recipe.get("grpo.adv_estimator.reward_weights") or [1.0] * len(names)
    if len(weights) != len(names):
        findings.blocks(
            "grpo.adv_estimator.reward_weights", f"{len(weights)} weights for the components {', '.join(names)}"
        )
        weights = [1.0] * len(names)
    rewards = {name: float(weight) for name, weight in zip(names, weights)}
    findings.set("env", {plugin: options}, f"replaces {env_name(recipe)}")
    if plugin == gym.NAME:
        gym.set_rollouts(recipe, gym.find_gym(recipe), findings)
    if plugin == "gsm8k" and not options:
        findings.differs(
            f"env.{env_name(recipe)}.math_verify_impl",
            "only the answer inside the answer tags is compared; NeMo-RL searches the whole completion",
        )
    shaping = [*_scaling(recipe, names), *_lengths(recipe, findings, names)]
    rules, coefficients = penalties(recipe, findings, options, shaping)
    rewards |= coefficients
    if rules:
        findings.set("gdpo.shaping", rules, "from reward_scaling, reward_shaping and the penalties")
    workers = recipe.get(f"env.{env_name(recipe)}.num_workers")
    if workers:
        findings.set("rollout.env_workers", workers, f"env.{env_name(recipe)}.num_workers")
    findings.set("gdpo.rewards", rewards, f"components of {env_name(recipe)}")
    findings.set("gdpo.group_by", "prompt", "NeMo-RL groups samples by their prompt tokens")
    if recipe.get("grpo.use_dynamic_sampling"):
        multiple = float(recipe.get("grpo.batch_multiplier", 1.0))
        findings.set(
            "gdpo.dynamic_sampling.batch_multiplier", multiple, "batch_multiplier; each round samples a whole batch"
        )
        if recipe.get("grpo.use_leave_one_out_baseline"):
            _partial_groups(findings)
    lengths = any("overlong" in rule or "truncated" in rule for rule in rules)
    if recipe.get("grpo.use_dynamic_sampling") and lengths and not recipe.before("0.7"):
        findings.set("gdpo.dynamic_sampling.before_shaping", True, "NeMo-RL filters by unshaped_total_reward")


def _partial_groups(findings: Findings) -> None:
    """Reproduce NeMo-RL's filter of samples, if the estimator also reproduces its leave-one-out scores."""
    what = "drops the only sample that differs from its group, and trains the others with advantage 0"
    options, _ = findings.values.get("gdpo.options", ({}, ""))
    if "gdpo.preset" in findings.values or "equal_peers" in options:
        findings.set("gdpo.dynamic_sampling.leave_one_out", True, f"grpo.use_leave_one_out_baseline {what}")
    else:
        findings.differs("grpo.use_leave_one_out_baseline", f"whole groups are replaced; NeMo-RL {what}")


def _no_environment(recipe: Recipe, findings: Findings) -> None:
    name = env_name(recipe)
    what = "is not supported" if name in ENVIRONMENTS else "is custom code of the program that the recipe is for"
    why = f"environment {name!r} {what}; set a custom environment in env and its components in gdpo.rewards"
    if name == gym.NAME:
        why = f"the NeMo Gym agents and their rewards are unknown: {_unknown(recipe)}"
        weights = recipe.get("grpo.adv_estimator.reward_weights")
        if weights:
            why += f"; reward_weights {weights} belong to the components sorted by name, and are not translated"
    keys = ("data.*env_name", "data.*processor", "env.should_use_nemo_gym", "env.nemo_gym*", f"env.{name}.*",
            "grpo.adv_estimator.reward_weights")  # fmt: skip
    findings.blocks(f"env.{name}", why, *keys)


def _unknown(recipe: Recipe) -> str:
    try:
        gym.find_gym(recipe)
    except Unknown as reason:
        return str(reason)
    return ""


def _scaling(recipe: Recipe, names: tuple[str, ...]) -> list[dict[str, Any]]:
    section = "grpo.reward_scaling"
    if not recipe.get(f"{section}.enabled"):
        return []
    source, target = (
        [recipe.get(f"{section}.{side}_min", 0.0), recipe.get(f"{section}.{side}_max", 1.0)]
        for side in ("source", "target")
    )
    rules: list[dict[str, Any]] = []
    for name in names:
        rules.append({"component": name, "clip": source})
        rules.append({"component": name, "linear": {"from": source, "to": target}})
    return rules


def _lengths(recipe: Recipe, findings: Findings, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the shaping rules for long samples. The list is empty for gdpo, because NeMo-RL shapes only the sum of
    rewards."""
    section = "grpo.reward_shaping"
    if recipe.get("grpo.adv_estimator.name") == "gdpo":
        return []
    buffer = recipe.get(f"{section}.overlong_buffer_length")
    if not recipe.get(f"{section}.enabled"):
        return []
    scale = recipe.get(f"{section}.stop_properly_penalty_coef")
    if scale == 0:
        return [{"component": name, "truncated": {"value": 0.0}} for name in names]
    if scale is not None:
        findings.differs(
            f"{section}.stop_properly_penalty_coef", "scaling the reward of truncated samples is not supported"
        )
        return []
    if not buffer:
        findings.differs(section, "reward shaping requires overlong_buffer_length")
        return []
    options = {"buffer": buffer, "penalty": recipe.get(f"{section}.overlong_buffer_penalty", 1.0)}
    if recipe.get(f"{section}.max_response_length"):
        options["max_length"] = recipe.get(f"{section}.max_response_length")
    longest = recipe.get("policy.max_total_sequence_length", 0)
    if min(longest, recipe.get("policy.generation.max_new_tokens", longest)) > options.get("max_length", longest):
        findings.differs(section, "the penalty is constant beyond max_response_length; in NeMo-RL it keeps growing")
    return [{"component": names[0], "overlong": options}]


# -- loss -------------------------------------------------------------------------------------------------------


def _loss(recipe: Recipe, findings: Findings) -> None:
    if recipe.get("loss_fn.use_cispo"):
        findings.set("loss_fn.type", "cispo", "use_cispo")
    if recipe.get("loss_fn.sequence_level_importance_ratios"):
        findings.set("loss_fn.type", "gspo", "sequence_level_importance_ratios")
    if recipe.get("loss_fn.use_kl_in_reward"):
        findings.set(
            "loss_fn.reference_policy_kl_penalty", 0.0, "use_kl_in_reward removes the KL penalty from the loss"
        )
    if recipe.kl_in_loss:
        _kl_gradient(recipe, findings)
    if recipe.stale:
        findings.set("rollout.max_staleness", recipe.staleness, "maximum age of a trajectory in steps")
        findings.set("rollout.kv", recipe.kv, _KV[recipe.kv])
        if recipe.sampler in ("in_order", "weight_fifo"):
            findings.set("rollout.window", 1, "groups are trained in prompt order")
        findings.set("loss_fn.old_logprobs", "trainer", "the trainer computes the old log-probs, as in NeMo-RL")
    _truncated_sampling(recipe, findings)


def _truncated_sampling(recipe: Recipe, findings: Findings) -> None:
    what = "the trainer uses log-probs of the full distribution; NeMo-RL uses those of the truncated distribution"
    if recipe.before("0.6"):
        what = (
            "the sampler reports log-probs of the truncated distribution; NeMo-RL uses those of the full distribution"
        )
        if not recipe.get("loss_fn.use_importance_sampling_correction"):
            return
    for name, all_tokens in (("top_p", 1.0), ("top_k", -1)):
        if recipe.get(f"policy.generation.{name}", all_tokens) != all_tokens:
            findings.differs(f"policy.generation.{name}", what)


def _kl_gradient(recipe: Recipe, findings: Findings) -> None:
    on_policy = recipe.get("loss_fn.use_on_policy_kl_approximation")
    key = "loss_fn.reference_policy_kl_gradient"
    if recipe.before("0.7"):
        findings.set(key, "estimator", "before 0.7, KL estimates do not include the score-function gradient")
        if on_policy:
            what = "KL estimates are not weighted by the ratio of the policy and the sampler"
            findings.differs("loss_fn.use_on_policy_kl_approximation", what)
    elif on_policy:
        findings.set(key, "importance", "use_on_policy_kl_approximation")
    else:
        findings.set(key, "score", "NeMo-RL's KL estimates include the score-function gradient")


def _off_policy(recipe: Recipe, findings: Findings) -> None:
    """Set the handling of the importance weight exp(trainer - sampler log-prob): unchanged, truncated, or 0 outside the
    bounds."""
    if not recipe.get("loss_fn.use_importance_sampling_correction"):
        if recipe.stale:
            findings.set("loss_fn.off_policy.mode", "none", "use_importance_sampling_correction is false")
        return
    prefix = "loss_fn.truncated_importance_sampling"
    sequences = recipe.get("loss_fn.sequence_level_importance_ratios")
    kind, high, low = (recipe.get(f"{prefix}_{name}") for name in ("type", "ratio", "ratio_min"))
    kind = None if high is None else kind or "tis"  # before 0.6, weights are always truncated
    mode = "truncate"
    level = "sequence" if sequences else "token"
    if kind == "icepop":
        mode = "mask" if sequences else "icepop"
    if kind == "seq-mask-tis":
        mode = "icepop"
        level = "geometric"
    findings.set("loss_fn.off_policy.mode", mode, f"use_importance_sampling_correction, {kind or 'not truncated'}")
    findings.set(
        "loss_fn.off_policy.level",
        level,
        "seq-mask-tis masks sequences" if level == "geometric" else "level of the importance weights",
    )
    findings.set(
        "loss_fn.off_policy.ratio_max", float("inf" if kind is None else high), "truncated_importance_sampling_ratio"
    )
    if low and mode != "truncate":
        findings.set("loss_fn.off_policy.ratio_min", float(low), "truncated_importance_sampling_ratio_min")
    if low and kind == "tis":
        findings.differs(f"{prefix}_ratio_min", "the mode truncate does not support a lower bound")


_PARTS: dict[str, tuple[Callable[[Recipe, Findings], None], ...]] = {
    "grpo": (_estimator, _rewards, _loss, _off_policy),
    "ppo": (actor_critic, _rewards, _loss, _off_policy),
    "distillation": (from_teacher, _rewards),
}
"""Section of an algorithm that samples -> translations of its keys."""


# -- learning rate and adapters ---------------------------------------------------------------------------------


def _schedule(recipe: Recipe, findings: Findings) -> None:
    """Set the learning-rate schedule.

    NeMo-RL advances the schedule after all updates of a step (``MegatronPolicyWorker.train``). Without a warmup, and
    with ``lr_warmup_init``, the first update of this project's schedule also uses the rate before any advance.
    """
    section = f"{_MEGATRON}.scheduler"
    style = "constant"
    if recipe.megatron:
        style = recipe.get(f"{section}.lr_decay_style", "constant")
        findings.set(f"{section}.lr_decay_style", style, "lr_decay_style")
        if recipe.get(f"{section}.lr_decay_iters"):
            updates = recipe.get(f"{section}.lr_decay_iters") * recipe.updates
            findings.set(f"{section}.lr_decay_steps", updates, _ticks("lr_decay_iters", recipe))
        warmup = recipe.get(f"{section}.lr_warmup_iters", 0)
        start = recipe.get(f"{section}.lr_warmup_init", 0.0)
    else:
        findings.set(
            f"{_MEGATRON}.scheduler.lr_decay_style", "constant", "learning rate of policy.scheduler after the warmup"
        )
        warmup, start = _torch_warmup(recipe, findings)
    if warmup:
        findings.set(f"{section}.lr_warmup_steps", warmup * recipe.updates, _ticks("the warmup", recipe))
        findings.set(f"{section}.lr_warmup_init", float(f"{start:.12g}"), "learning rate of the first update")
    if recipe.updates > 1 and (warmup or style != "constant"):
        findings.set(
            f"{section}.lr_hold_updates", recipe.updates, "NeMo-RL uses one learning rate for all updates of a step"
        )


def _ticks(what: str, recipe: Recipe) -> str:
    return f"{what}, converted from steps" + (f" with {recipe.updates} updates each" if recipe.updates > 1 else "")


def _torch_warmup(recipe: Recipe, findings: Findings) -> tuple[int, float]:
    """Return (warmup steps, first learning rate) of a LinearLR that is followed by a constant rate. Report other
    schedules as different."""
    parts = recipe.get("policy.scheduler", [])
    lr = recipe.get("policy.optimizer.kwargs.lr", 0.0)
    parts = [parts] if isinstance(parts, dict) else parts
    named = [(part.get("name", "").rpartition(".")[2], part.get("kwargs", {})) for part in parts if "name" in part]
    milestones: list[int] = next((part["milestones"] for part in parts if "milestones" in part), [])
    kinds = [kind for kind, _ in named]
    if not named or (kinds == ["ConstantLR"] and named[0][1].get("factor") in (1, 1.0)):
        return 0, 0.0
    first = named[0][1]
    straight = kinds[0] == "LinearLR" and first.get("end_factor", 1.0) == 1.0 and set(kinds[1:]) <= {"ConstantLR"}
    steps = first.get("total_iters", 5)
    if (
        not straight
        or any(k.get("factor", 1 / 3) != 1.0 for _, k in named[1:])
        or (milestones and milestones[0] != steps)
    ):
        findings.differs("policy.scheduler", f"the learning rate is constant; {', '.join(kinds)} cannot be translated")
        return 0, 0.0
    return steps, lr * first.get("start_factor", 1 / 3)


def _every_linear_layer(recipe: Recipe, findings: Findings, key: str) -> None:
    tied = recipe.model.tied
    if recipe.model.images:
        findings.differs(key, "the vision tower gets no adapters; in NeMo-RL its linear layers get adapters")
        return
    if tied is not False:
        why = "shares the embedding's weights" if tied else "may share the embedding's weights"
        findings.differs(key, f"the output layer {why} and gets no adapter; in NeMo-RL it gets an adapter")
        return
    every = list(linear_layers(FAMILIES.get(recipe.model.model_type, FAMILIES["llama"])))
    findings.set("policy.lora.target_modules", every, "match_all_linear, including the output layer")


def _lora(recipe: Recipe, findings: Findings) -> None:
    section = recipe.lora
    if not section:
        return
    findings.set("policy.lora.rank", recipe.get(f"{section}.dim", 8), f"{section}.dim")
    if recipe.get(f"{section}.alpha") is None:
        findings.set("policy.lora.alpha", 32.0, "NeMo-RL's default")
    names = recipe.get(f"{section}.target_modules")
    if recipe.megatron and names == []:
        _every_linear_layer(recipe, findings, f"{section}.target_modules")
    if recipe.megatron and (not names or {"linear_qkv", "linear_fc1"} & {name.rpartition(".")[2] for name in names}):
        findings.set(
            "policy.lora.share_a", True, "the fused layers linear_qkv and linear_fc1 each share one adapter matrix A"
        )
    if not recipe.megatron and recipe.get(f"{section}.match_all_linear"):
        _every_linear_layer(recipe, findings, f"{section}.match_all_linear")
    elif names:
        findings.set("policy.lora.target_modules", adapted(names, recipe.model.model_type), "target_modules")
    key = f"{section}.lora_A_init" + ("_method" if recipe.megatron else "")
    kind = recipe.get(key, "xavier")
    findings.set("policy.lora.init", "xavier" if kind == "xavier" else "uniform", key)
    if kind not in ("xavier", "uniform", "kaiming"):
        findings.differs(key, f"the adapter matrix A is initialized uniformly instead of with {kind}")
