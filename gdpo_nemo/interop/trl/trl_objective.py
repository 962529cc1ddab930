"""What several of TRL's fields make together: rewards and advantages, the loss, batches, the learning rate.

Held against ``GRPOTrainer`` of TRL 1.16: ``_generate_and_score_completions``, ``_compute_loss``, ``GRPOConfig``.
"""

from __future__ import annotations

import math
from typing import Any

from gdpo_nemo.interop.account import Account
from gdpo_nemo.interop.trl.trl_async import asynchronous
from gdpo_nemo.interop.trl.trl_run import TrlRun

_AGGREGATION = {
    "grpo": "sequence_mean",
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "dr_grpo": "constant",
    "cispo": "token_mean",
    "sapo": "sequence_mean",
    "luspo": "sequence_sum",
}
_SAPO = "examples/sapo.py:sapo"
_SCHEDULER = "policy.megatron_cfg.scheduler"
_MODES = {
    "token_truncate": ("truncate", "token"),
    "token_mask": ("mask", "token"),
    "sequence_truncate": ("truncate", "sequence"),
    "sequence_mask": ("mask", "sequence"),
}
ENDLESS = 1_000_000
"""Steps that no run reaches: its passes over the data end it."""


def learning(run: TrlRun, account: Account) -> None:
    """Fill the account with everything that the update is made of."""
    _rewards(run, account)
    _estimator(run, account)
    _loss(run, account)
    _off_policy(run, account)
    _batches(run, account)
    _length(run, account)
    _schedule(run, account)
    if run.asynchronous:
        asynchronous(run, account)


def _rewards(run: TrlRun, account: Account) -> None:
    weights = run.get("reward_weights") or [1.0] * len(run.rewards)
    if not run.rewards:
        account.blocks("reward_funcs", "the trainer gets no reward function")
        return
    if len(weights) != len(run.rewards):
        account.blocks("reward_weights", f"{len(weights)} weights for {len(run.rewards)} reward functions")
        weights = [1.0] * len(run.rewards)
    for reward in run.rewards:
        if reward.place is None:
            account.blocks(f"reward_funcs.{reward.name}", reward.problem)
    functions = {reward.name: reward.place for reward in run.rewards if reward.place is not None}
    if functions:
        account.set("env", {"functions": {"functions": functions}}, "reward_funcs, by their places")
    names = [reward.name for reward in run.rewards]
    account.set("gdpo.rewards", dict(zip(names, map(float, weights))), "reward_funcs and reward_weights")


def _estimator(run: TrlRun, account: Account) -> None:
    if run.get("multi_objective_aggregation") == "normalize_then_sum":
        account.set("gdpo.estimator", "gdpo", "multi_objective_aggregation normalize_then_sum")
        account.set("gdpo.preset", "trl", "its epsilon, and constant groups left to it")
        if run.samples_per_generation < run.samples_per_update:
            what = "the batch norm is over the whole update; there over each of the generations that it is made of"
            account.differs("steps_per_generation", what)
        return
    scale = {True: "group", False: "none"}.get(run.get("scale_rewards"), run.get("scale_rewards"))
    if scale == "group":
        account.set("gdpo.estimator", "grpo", "multi_objective_aggregation sum_then_normalize, scale_rewards group")
        account.set("gdpo.epsilon", 1e-4, "added to the deviation")
    elif scale == "none":
        account.set("gdpo.estimator", "dr_grpo", "scale_rewards none: rewards less their group's mean")
    else:
        account.set("gdpo.estimator", "grpo", "multi_objective_aggregation sum_then_normalize")
        account.set("gdpo.options", {"scale_rewards": "batch"}, "scale_rewards batch: divided by the batch's deviation")
        account.set("gdpo.epsilon", 1e-4, "added to the deviation")


# -- loss -------------------------------------------------------------------------------------------------------


def _loss(run: TrlRun, account: Account) -> None:
    kind = run.get("loss_type")
    high = run.get("epsilon_high", run.get("epsilon"))
    if kind not in _AGGREGATION:
        account.blocks("loss_type", f"there is no loss {kind!r} here; known: {', '.join(_AGGREGATION)}")
        kind = "dapo"
    account.set("loss_fn.aggregation", _AGGREGATION[kind], f"loss_type {kind}")
    if kind == "dr_grpo":
        account.set("loss_fn.constant_length", run.get("max_completion_length"), "max_completion_length")
    sequences = run.get("importance_sampling_level") == "sequence"
    if kind == "cispo":
        _cispo(run, account, high, sequences)
    elif kind == "sapo":
        _sapo(run, account, sequences)
    else:
        if sequences:
            account.set("loss_fn.type", "gspo", "importance_sampling_level sequence")
        account.set("loss_fn.ratio_clip_min", float(run.get("epsilon")), "epsilon")
        account.set("loss_fn.ratio_clip_max", float(high), "epsilon_high, or epsilon where it is not set")
        _delta(run, account, high)
    _mean(run, account, kind)
    _reference(run, account)


def _cispo(run: TrlRun, account: Account, high: float, sequences: bool) -> None:
    account.set("loss_fn.type", "cispo", "loss_type cispo")
    account.set("loss_fn.ratio_clip_min", 1.0, "there the weight has no lower bound")
    if high < 1:
        why = f"epsilon_high {high} is the largest weight there, below 1; TRL recommends 5.0"
        account.blocks("epsilon_high", why)
    account.set("loss_fn.ratio_clip_max", float(max(high, 1.0)) - 1.0, "epsilon_high, which bounds the weight itself")
    if sequences:
        account.differs("importance_sampling_level", "cispo weighs tokens; there it weighs sequences")


def _sapo(run: TrlRun, account: Account, sequences: bool) -> None:
    account.set("loss_fn.type", _SAPO, "loss_type sapo")
    taus = {"tau_pos": float(run.get("sapo_temperature_pos")), "tau_neg": float(run.get("sapo_temperature_neg"))}
    account.set("loss_fn.options", taus, "sapo_temperature_pos, sapo_temperature_neg")
    if sequences:
        account.differs("importance_sampling_level", "sapo's gates are of tokens; there of sequences")


def _delta(run: TrlRun, account: Account, high: float) -> None:
    delta = run.get("delta")
    if delta is None:
        return
    account.set("loss_fn.ratio_clip_c", float(delta), "delta")
    if delta < 1 + high:
        account.differs("delta", "bounds the ratio of negative advantages alone; below 1 + epsilon_high there of all")


def _mean(run: TrlRun, account: Account, kind: str) -> None:
    """Where the mean over tokens is not that of one update."""
    if kind == "bnpo" and (run.get("gradient_accumulation_steps") > 1 or run.processes > 1):
        account.differs("loss_type", "the mean is over all tokens of an update; there of each process's micro-batch")
    if kind in ("dapo", "cispo") and run.updates > 1:
        what = "each update has the mean over its own tokens; there over an average update of the generation's"
        account.differs("steps_per_generation", what)


def _reference(run: TrlRun, account: Account) -> None:
    if not run.get("beta"):
        return
    account.set("loss_fn.kl_input_clamp_value", None, "not clamped there")
    if not run.get("use_bias_correction_kl"):
        return
    account.set("loss_fn.reference_policy_kl_gradient", "score", "use_bias_correction_kl")
    if run.updates > 1:
        what = "after a step's first update the KL's weight is 1 in value; there the ratio to the sampling weights"
        account.differs("use_bias_correction_kl", what)


def _off_policy(run: TrlRun, account: Account) -> None:
    """exp(trainer - vLLM), which TRL corrects for where vLLM samples."""
    if run.get("use_vllm") and run.get("vllm_importance_sampling_correction") is False:
        account.set("loss_fn.off_policy.mode", "none", "vllm_importance_sampling_correction False")
        return
    if not run.get("use_vllm") or not run.get("vllm_importance_sampling_correction"):
        return
    name = run.get("vllm_importance_sampling_mode")
    if name not in _MODES:
        account.blocks("vllm_importance_sampling_mode", f"is none of {', '.join(_MODES)}: {name!r}")
        return
    mode, level = _MODES[name]
    given = run.given.get("vllm_importance_sampling_clip_max", 3.0)
    low = run.get("vllm_importance_sampling_clip_min")
    account.set("loss_fn.off_policy.mode", mode, f"vllm_importance_sampling_mode {name}")
    account.set("loss_fn.off_policy.level", level, f"vllm_importance_sampling_mode {name}")
    account.set(
        "loss_fn.off_policy.ratio_max", math.inf if given is None else float(given), "vllm_importance_sampling_clip_max"
    )
    if low is not None and mode == "mask":
        account.set("loss_fn.off_policy.ratio_min", float(low), "vllm_importance_sampling_clip_min")
    elif low is not None:
        account.differs("vllm_importance_sampling_clip_min", "truncate has no lower bound")


# -- batches, length, learning rate -----------------------------------------------------------------------------


def _batches(run: TrlRun, account: Account) -> None:
    group = run.get("num_generations")
    step = run.samples_per_step
    if step % group or run.samples_per_generation % group:
        many = f"{run.samples_per_generation} samples of {run.processes} process{'es' * (run.processes > 1)}"
        account.blocks("num_generations", f"{many} are no whole groups of {group}; --num-processes says how many")
    why = f"{step} samples a step in groups of {group}; {run.processes} process{'es' * (run.processes > 1)} assumed"
    account.set("gdpo.num_prompts_per_step", max(1, step // group), why)
    if step % run.samples_per_update:
        account.differs("steps_per_generation", "is no multiple of gradient_accumulation_steps; a step is one update")
    elif run.updates > 1:
        account.set("policy.train_global_batch_size", run.samples_per_update, f"{run.updates} updates a generation")


def _length(run: TrlRun, account: Account) -> None:
    total = run.total_updates
    if total is not None:
        why = "max_steps" if run.get("max_steps") > 0 else f"num_train_epochs of {len(run.train.rows or [])} rows"
        why += f", in steps of {run.updates} updates" if run.updates > 1 else ""
        account.set("gdpo.max_num_steps", max(1, -(-total // run.updates)), why)
        return
    epochs = run.get("num_train_epochs")
    account.set("gdpo.max_num_epochs", max(1, round(epochs)), "num_train_epochs")
    account.set("gdpo.max_num_steps", ENDLESS, "num_train_epochs ends the run")
    if epochs != round(epochs):
        account.differs("num_train_epochs", f"{max(1, round(epochs))} whole passes; there {epochs}")


def _schedule(run: TrlRun, account: Account) -> None:
    """transformers' schedules begin the warm-up at 0 and reach the rate after its updates; both count updates."""
    style = str(run.get("lr_scheduler_type")).rpartition(".")[2].lower()
    extra: dict[str, Any] = dict(run.get("lr_scheduler_kwargs", {}) or {})
    shapes = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
    shapes["cosine_with_min_lr"] = "cosine"
    if style not in shapes:
        account.differs("lr_scheduler_type", f"the learning rate is constant; there it follows {style}")
    account.set(f"{_SCHEDULER}.lr_decay_style", shapes.get(style, "constant"), f"lr_scheduler_type {style}")
    if style == "cosine_with_min_lr":
        rate = extra.pop("min_lr", None)
        share = extra.pop("min_lr_rate", None)
        low = rate if rate is not None else run.get("learning_rate") * (share or 0.0)
        account.set("policy.megatron_cfg.optimizer.min_lr", float(low), "lr_scheduler_kwargs")
    if extra:
        account.differs("lr_scheduler_kwargs", f"{', '.join(sorted(extra))} of the schedule cannot be set")
    key = "warmup_ratio" if run.get("warmup_ratio") else "warmup_steps"
    updates = run.updates_of(key)
    if updates is None:
        account.differs(key, "no warm-up: a share of a number of updates that depends on the data set; set "
                        f"{_SCHEDULER}.lr_warmup_steps")  # fmt: skip
    elif updates and style != "constant":
        account.set(f"{_SCHEDULER}.lr_warmup_steps", updates, key)
        account.set(f"{_SCHEDULER}.lr_warmup_init", 0.0, "the first update has a rate of 0 there")
