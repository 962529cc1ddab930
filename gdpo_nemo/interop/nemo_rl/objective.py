"""What several keys of a recipe make together: estimator, rewards and their shaping, the loss, the learning rate."""

from __future__ import annotations

from typing import Any

from gdpo_nemo.config.families import FAMILIES, linear_layers
from gdpo_nemo.interop.account import Account
from gdpo_nemo.interop.nemo_rl.datasets import components, env_name
from gdpo_nemo.interop.nemo_rl.keys import adapted
from gdpo_nemo.interop.nemo_rl.recipe import Recipe

_MEGATRON = "policy.megatron_cfg"
_KV = {
    "drain": "without in_flight_weight_updates engines finish what they have first",
    "recompute": "weights arrive in flight, and recompute_kv_cache_after_weight_updates",
    "keep": "weights arrive in flight, and without recompute_kv_cache_after_weight_updates the cache stays",
}


def learning(recipe: Recipe, account: Account) -> None:
    """Fill the account with everything that the update is made of."""
    _estimator(recipe, account)
    _rewards(recipe, account)
    _loss(recipe, account)
    _off_policy(recipe, account)
    _schedule(recipe, account)
    _lora(recipe, account)


def _estimator(recipe: Recipe, account: Account) -> None:
    def setting(name: str) -> Any:
        return recipe.get(f"grpo.adv_estimator.{name}", recipe.get(f"grpo.{name}", True))

    name = recipe.get("grpo.adv_estimator.name", "grpo")
    normalize = setting("normalize_rewards")
    leave_one_out = setting("use_leave_one_out_baseline")
    options: dict[str, Any] = {"leave_one_out": True} if leave_one_out else {}
    if name == "gdpo":
        account.set("gdpo.estimator", "gdpo", "adv_estimator.name")
        account.set("gdpo.preset", "nemo_rl", "its numerics, dead groups in the batch's standard deviation included")
        if not normalize:
            if leave_one_out:
                what = "leave_one_out divides by the others' deviation"
                account.differs("grpo.adv_estimator.normalize_rewards", what)
            else:
                options = {"scale_rewards": "none"}
    elif name == "reinforce_plus_plus":
        _reinforce_plus_plus(recipe, account)
        return
    elif name == "grpo" and normalize:
        account.set("gdpo.estimator", "grpo", "normalize_rewards")
    elif name == "grpo":
        account.set(
            "gdpo.estimator", "rloo" if leave_one_out else "dr_grpo", "rewards less their baseline, not divided"
        )
        return
    else:
        account.set("gdpo.estimator", "grpo", f"in place of {name!r}")
        account.blocks("grpo.adv_estimator.name", f"there is no estimator {name!r}")
    if leave_one_out:
        account.set("gdpo.options", options, "use_leave_one_out_baseline: mean and deviation of the other members")
    elif options:
        account.set("gdpo.options", options, "normalize_rewards false: not divided by their group's deviation")


def _reinforce_plus_plus(recipe: Recipe, account: Account) -> None:
    """(r - group mean, or r), standardised over the tokens of the batch with the population's deviation."""
    options: dict[str, Any] = {
        "batch_unit": "token",
        "batch_rows": "scored",
        "ddof": 0,
        "batch_epsilon": 0.0,
        "residue": 0.0,
    }
    if recipe.get("grpo.adv_estimator.minus_baseline", True):
        account.set("gdpo.estimator", "dr_grpo", "reinforce_plus_plus: rewards less their group's mean")
        account.set("gdpo.batch_norm", True, "reinforce_plus_plus standardises over the batch")
    else:
        account.set("gdpo.estimator", "reinforce_plus_plus", "adv_estimator.name")
        options["minus_baseline"] = False
    account.set("gdpo.options", options, "reinforce_plus_plus weighs the batch by tokens")
    if recipe.get("grpo.overlong_filtering"):
        account.differs(
            "grpo.overlong_filtering", "truncated samples count in the batch's mean and deviation; there they do not"
        )
    if recipe.get("loss_fn.use_kl_in_reward") and recipe.get("loss_fn.reference_policy_kl_penalty"):
        account.differs(
            "loss_fn.use_kl_in_reward", "no KL of single tokens in the advantages, and there none in the loss"
        )


# -- rewards ----------------------------------------------------------------------------------------------------


def _rewards(recipe: Recipe, account: Account) -> None:
    found = components(recipe)
    if found is None:
        _no_environment(recipe, account)
        return
    plugin, options, names = found
    weights = recipe.get("grpo.adv_estimator.reward_weights") or [1.0] * len(names)
    if len(weights) != len(names):
        account.blocks(
            "grpo.adv_estimator.reward_weights", f"{len(weights)} weights for the components {', '.join(names)}"
        )
        weights = [1.0] * len(names)
    rewards = {name: float(weight) for name, weight in zip(names, weights)}
    account.set("env", {plugin: options}, f"in place of {env_name(recipe)}")
    if plugin == "gsm8k" and not options:
        account.differs(
            f"env.{env_name(recipe)}.math_verify_impl",
            "the answer in the tags is compared; there the whole text is searched",
        )
    rules = [*_scaling(recipe, names), *_lengths(recipe, account, names)]
    if rules:
        account.set("gdpo.shaping", rules, "reward_scaling and reward_shaping")
    workers = recipe.get(f"env.{env_name(recipe)}.num_workers")
    if workers:
        account.set("rollout.env_workers", workers, f"env.{env_name(recipe)}.num_workers")
    account.set("gdpo.rewards", rewards, f"components of {env_name(recipe)}")
    account.set("gdpo.group_by", "prompt", "NeMo-RL's groups are samples of equal prompt tokens")
    if recipe.get("grpo.use_dynamic_sampling"):
        multiple = float(recipe.get("grpo.batch_multiplier", 1.0))
        account.set(
            "gdpo.dynamic_sampling.batch_multiplier", multiple, "batch_multiplier; every round is a whole batch"
        )
        if recipe.get("grpo.use_leave_one_out_baseline"):
            account.set(
                "gdpo.dynamic_sampling.leave_one_out",
                True,
                "grpo.use_leave_one_out_baseline judges samples, not groups",
            )
    if recipe.get("grpo.use_dynamic_sampling") and any("overlong" in rule or "truncated" in rule for rule in rules):
        account.set("gdpo.dynamic_sampling.before_shaping", True, "NeMo-RL judges unshaped_total_reward")


def _no_environment(recipe: Recipe, account: Account) -> None:
    name = env_name(recipe)
    why = f"there is no environment {name!r}: name yours under env and its components under gdpo.rewards"
    if name == "nemo_gym":
        why = "NeMo Gym's servers have to be started and named under env.nemo_gym.servers; the rewards come from them"
        weights = recipe.get("grpo.adv_estimator.reward_weights")
        if weights:
            why += f"; gdpo.rewards gets reward_weights {weights}, in the order of the components' names"
    keys = ("data.*env_name", "data.*processor", "env.should_use_nemo_gym", "grpo.adv_estimator.reward_weights")
    account.blocks(f"env.{name}", why, *keys)


def _scaling(recipe: Recipe, names: tuple[str, ...]) -> list[dict[str, Any]]:
    section = "grpo.reward_scaling"
    if not recipe.get(f"{section}.enabled"):
        return []
    source, target = (
        [recipe.get(f"{section}.{side}_{end}", default) for end, default in (("min", 0.0), ("max", 1.0))]
        for side in ("source", "target")
    )
    return [
        rule
        for name in names
        for rule in ({"component": name, "clip": source}, {"component": name, "linear": {"from": source, "to": target}})
    ]


def _lengths(recipe: Recipe, account: Account, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """What long samples lose. NeMo-RL shapes the sum of the rewards, so its gdpo sees nothing of it."""
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
        account.differs(f"{section}.stop_properly_penalty_coef", "a truncated sample's reward is not scaled")
        return []
    if not buffer:
        account.differs(section, "no overlong_buffer_length, so nothing is shaped")
        return []
    options = {"buffer": buffer, "penalty": recipe.get(f"{section}.overlong_buffer_penalty", 1.0)}
    if recipe.get(f"{section}.max_response_length"):
        options["max_length"] = recipe.get(f"{section}.max_response_length")
    longest = recipe.get("policy.max_total_sequence_length", 0)
    if min(longest, recipe.get("policy.generation.max_new_tokens", longest)) > options.get("max_length", longest):
        account.differs(section, "the penalty stops growing at max_response_length; there it goes on beyond it")
    return [{"component": names[0], "overlong": options}]


# -- loss -------------------------------------------------------------------------------------------------------


def _loss(recipe: Recipe, account: Account) -> None:
    if recipe.get("loss_fn.use_cispo"):
        account.set("loss_fn.type", "cispo", "use_cispo")
    if recipe.get("loss_fn.sequence_level_importance_ratios"):
        account.set("loss_fn.type", "gspo", "sequence_level_importance_ratios")
    if recipe.get("loss_fn.use_kl_in_reward"):
        account.set("loss_fn.reference_policy_kl_penalty", 0.0, "use_kl_in_reward takes the KL out of the loss")
    if recipe.kl_in_loss:
        on_policy = recipe.get("loss_fn.use_on_policy_kl_approximation")
        why = "use_on_policy_kl_approximation" if on_policy else "there every KL estimate has the score's gradient, too"
        account.set("loss_fn.reference_policy_kl_gradient", "importance" if on_policy else "score", why)
    if recipe.stale:
        account.set("rollout.max_staleness", recipe.staleness, "how old a trajectory may be")
        account.set("rollout.kv", recipe.kv, _KV[recipe.kv])
        if recipe.sampler in ("in_order", "weight_fifo"):
            account.set("rollout.window", 1, "a step trains the groups of its own prompts, or the oldest")
        account.set("loss_fn.old_logprobs", "trainer", "the ratio starts from the trainer's log-probs there")

    for name, all_tokens in (("top_p", 1.0), ("top_k", -1)):
        if recipe.get(f"policy.generation.{name}", all_tokens) != all_tokens:
            what = "the trainer's log-probs are of the whole distribution; there they are of the one that is sampled"
            account.differs(f"policy.generation.{name}", what)


def _off_policy(recipe: Recipe, account: Account) -> None:
    """exp(trainer - sampler) as a weight of the policy term: as it is, cut, or 0 outside the bounds."""
    if not recipe.get("loss_fn.use_importance_sampling_correction"):
        if recipe.stale:
            account.set("loss_fn.off_policy.mode", "none", "use_importance_sampling_correction is false")
        return
    prefix = "loss_fn.truncated_importance_sampling"
    sequences = recipe.get("loss_fn.sequence_level_importance_ratios")
    kind, high, low = (recipe.get(f"{prefix}_{name}") for name in ("type", "ratio", "ratio_min"))
    kind = None if high is None else kind
    mode = "truncate"
    level = "sequence" if sequences else "token"
    if kind == "icepop":
        mode = "mask" if sequences else "icepop"
    if kind == "seq-mask-tis":
        mode = "icepop"
        level = "geometric"
    account.set("loss_fn.off_policy.mode", mode, f"use_importance_sampling_correction, {kind or 'not truncated'}")
    account.set(
        "loss_fn.off_policy.level", level, "seq-mask-tis judges sequences" if level == "geometric" else "of the weights"
    )
    account.set(
        "loss_fn.off_policy.ratio_max", float("inf" if kind is None else high), "truncated_importance_sampling_ratio"
    )
    if low and mode != "truncate":
        account.set("loss_fn.off_policy.ratio_min", float(low), "truncated_importance_sampling_ratio_min")
    if low and kind == "tis":
        account.differs(f"{prefix}_ratio_min", "truncate has no lower bound")


# -- learning rate and adapters ---------------------------------------------------------------------------------


def _schedule(recipe: Recipe, account: Account) -> None:
    """Write the learning-rate schedule. NeMo-RL ticks behind all updates of a step (``MegatronPolicyWorker.train``),
    ours in front of each update; a rate counts from the first update on."""
    section = f"{_MEGATRON}.scheduler"
    style = "constant"
    if recipe.megatron:
        style = recipe.get(f"{section}.lr_decay_style", "constant")
        account.set(f"{section}.lr_decay_style", style, "lr_decay_style")
        if recipe.get(f"{section}.lr_decay_iters"):
            updates = recipe.get(f"{section}.lr_decay_iters") * recipe.updates
            account.set(f"{section}.lr_decay_steps", updates, _ticks("lr_decay_iters", recipe))
        warmup = recipe.get(f"{section}.lr_warmup_iters", 0)
        start = recipe.get(f"{section}.lr_warmup_init", 0.0)
    else:
        account.set(f"{_MEGATRON}.scheduler.lr_decay_style", "constant", "policy.scheduler, once it is warm")
        warmup, start = _torch_warmup(recipe, account)
    if warmup:
        account.set(f"{section}.lr_warmup_steps", warmup * recipe.updates, _ticks("the warm-up", recipe))
        account.set(f"{section}.lr_warmup_init", float(f"{start:.12g}"), "rate of the first update")
    elif style != "constant":
        account.differs(f"{section}.lr_decay_style", "without a warm-up the decay begins one update earlier")
    if recipe.updates > 1 and (warmup or style != "constant"):
        account.set(f"{section}.lr_hold_updates", recipe.updates, "the updates of a step share a rate there")


def _ticks(what: str, recipe: Recipe) -> str:
    return f"{what}, in steps there" + (f", and {recipe.updates} updates a step" if recipe.updates > 1 else "")


def _torch_warmup(recipe: Recipe, account: Account) -> tuple[int, float]:
    """(updates, first rate) of torch's LinearLR followed by a constant rate; other schedules are named as different."""
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
        account.differs("policy.scheduler", f"the learning rate is constant; there it follows {', '.join(kinds)}")
        return 0, 0.0
    return steps, lr * first.get("start_factor", 1 / 3)


def _every_linear_layer(recipe: Recipe, account: Account, key: str) -> None:
    tied = recipe.model.tied
    if tied is not False:
        why = "is the embedding" if tied else "may be the embedding"
        account.differs(key, f"the output layer, which {why} in this model, has no adapter; there it has one")
        return
    every = list(linear_layers(FAMILIES.get(recipe.model.model_type, FAMILIES["llama"])))
    account.set("policy.lora.target_modules", every, "match_all_linear, the output layer too")


def _lora(recipe: Recipe, account: Account) -> None:
    section = recipe.lora
    if not section:
        return
    account.set("policy.lora.rank", recipe.get(f"{section}.dim", 8), "adapters, and their dim")
    if recipe.get(f"{section}.alpha") is None:
        account.set("policy.lora.alpha", 32.0, "NeMo-RL's default")
    names = recipe.get(f"{section}.target_modules")
    if recipe.megatron and names == []:
        _every_linear_layer(recipe, account, f"{section}.target_modules")
    if recipe.megatron and (not names or {"linear_qkv", "linear_fc1"} & {name.rpartition(".")[2] for name in names}):
        account.set("policy.lora.share_a", True, "linear_qkv and linear_fc1 have one A")
    if not recipe.megatron and recipe.get(f"{section}.match_all_linear"):
        _every_linear_layer(recipe, account, f"{section}.match_all_linear")
    elif names:
        account.set("policy.lora.target_modules", adapted(names, recipe.model.model_type), "target_modules")
    key = f"{section}.lora_A_init" + ("_method" if recipe.megatron else "")
    kind = recipe.get(key, "xavier")
    account.set("policy.lora.init", "xavier" if kind == "xavier" else "uniform", key)
    if kind not in ("xavier", "uniform", "kaiming"):
        account.differs(key, f"A starts from a uniform distribution, there from {kind}")
