"""Translation of TRL fields that depend on each other: rewards, advantages, loss, batches and learning rate.

Based on ``GRPOConfig`` and on the methods ``_generate_and_score_completions`` and ``_compute_loss`` of ``GRPOTrainer``
in TRL 1.16.
"""

from __future__ import annotations

import math
from typing import Any

from gdpo_nemo.tools.interop.translation import Findings
from gdpo_nemo.tools.interop.trl.defaults import asynchronous
from gdpo_nemo.tools.interop.trl.rows import answers
from gdpo_nemo.tools.interop.trl.run import TrlRun
from gdpo_nemo.tools.interop.trl.sampled import actor_critic, episodes, from_teacher, leave_one_out

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
_TURNS = 32
"""Maximum number of turns in a conversation with tools if TRL does not set a limit."""
ENDLESS = 1_000_000
"""Value of max_num_steps for runs whose length is set in epochs."""


def learning(run: TrlRun, findings: Findings) -> None:
    """Add the settings that define the training result to the findings."""
    if not run.samples:
        answers(run, findings)
    else:
        _of_samples(run, findings)
        _batches(run, findings)
    _length(run, findings)
    _schedule(run, findings)
    if run.asynchronous:
        asynchronous(run, findings)


def _of_samples(run: TrlRun, findings: Findings) -> None:
    """Set the rewards, the advantages and the loss of a trainer that samples."""
    if run.algorithm == "distillation":
        from_teacher(run, findings)
        return
    if run.algorithm == "ppo":
        actor_critic(run, findings)
        return
    _rewards(run, findings)
    if run.trainer == "RLOOTrainer":
        leave_one_out(run, findings)
        return
    _estimator(run, findings)
    _loss(run, findings)
    _off_policy(run, findings)


def _rewards(run: TrlRun, findings: Findings) -> None:
    if "reward_funcs" in run.notes:
        findings.differs("reward_funcs", run.notes["reward_funcs"])
    weights = run.get("reward_weights") or [1.0] * len(run.rewards)
    if not run.rewards:
        findings.blocks("reward_funcs", "the trainer has no reward function")
        return
    if len(weights) != len(run.rewards):
        if all(reward.import_path is not None for reward in run.rewards):  # otherwise the number is unknown
            findings.blocks("reward_weights", f"{len(weights)} weights for {len(run.rewards)} reward functions")
        weights = [1.0] * len(run.rewards)
    for reward in run.rewards:
        if reward.import_path is None:
            findings.blocks(f"reward_funcs.{reward.name}", reward.problem)
    functions = {reward.name: reward.entry for reward in run.rewards if reward.import_path is not None}
    if functions:
        options: dict[str, Any] = {"functions": functions}
        if any(reward.arguments for reward in run.rewards):
            options["num_workers"] = 1  # each worker would load a copy of the reward model
        if run.tools or run.factory:
            _tools(run, findings, options)
        else:
            findings.set("env", {"functions": options}, "import paths of reward_funcs")
    names = [reward.name for reward in run.rewards]
    findings.set("gdpo.rewards", dict(zip(names, map(float, weights))), "from reward_funcs and reward_weights")


def _tools(run: TrlRun, findings: Findings, options: dict[str, Any]) -> None:
    """Set the environment ``tools`` or ``tool_class`` with the reward functions, and the limits on turns."""
    for tool in (*run.tools, *([run.factory] if run.factory else [])):
        if tool.import_path is None:
            findings.blocks(f"tools.{tool.name}", tool.problem)
    if run.tools and run.factory:
        findings.blocks(
            "tools", "tools cannot be combined with environment_factory; make the tools methods of the factory's class"
        )
    rounds = run.get("max_tool_calling_iterations")
    if rounds is not None:
        options["max_tool_calling_iterations"] = rounds
    if run.factory:
        options.pop("num_workers", None)
        env = {"tool_class": {"make": run.factory.import_path, **options}}
        findings.set("env", env, "import paths of environment_factory and reward_funcs")
    else:
        options["tools"] = [tool.import_path for tool in run.tools if tool.import_path is not None]
        findings.set("env", {"tools": options}, "import paths of tools and reward_funcs")
    turns = _TURNS if rounds is None else rounds + 1
    findings.set(
        "rollout.turns.max_turns", turns, "max_tool_calling_iterations, plus the answer after the last tool result"
    )
    findings.set("rollout.turns.max_tokens", run.completion_length, "max_completion_length")
    what = f"limits only the policy's tokens, in at most {turns} turns; TRL also counts tool results"
    findings.differs("max_completion_length", what)


def _estimator(run: TrlRun, findings: Findings) -> None:
    if run.get("multi_objective_aggregation") == "normalize_then_sum":
        findings.set("gdpo.estimator", "gdpo", "multi_objective_aggregation normalize_then_sum")
        findings.set("gdpo.preset", "trl", "TRL's numerics, in which epsilon also applies to zero-variance groups")
        if run.samples_per_generation < run.samples_per_update:
            what = "batch normalization covers the whole update; TRL normalizes each generation batch separately"
            findings.differs("steps_per_generation", what)
        return
    scale = {True: "group", False: "none"}.get(run.get("scale_rewards"), run.get("scale_rewards"))
    if scale == "group":
        findings.set("gdpo.estimator", "grpo", "multi_objective_aggregation sum_then_normalize, scale_rewards group")
        findings.set("gdpo.epsilon", 1e-4, "epsilon added to the standard deviation")
    elif scale == "none":
        findings.set("gdpo.estimator", "dr_grpo", "scale_rewards none: rewards minus the group's mean")
    else:
        findings.set("gdpo.estimator", "grpo", "multi_objective_aggregation sum_then_normalize")
        findings.set(
            "gdpo.options",
            {"scale_rewards": "batch"},
            "scale_rewards batch: division by the batch's standard deviation",
        )
        findings.set("gdpo.epsilon", 1e-4, "epsilon added to the standard deviation")


# -- loss -------------------------------------------------------------------------------------------------------


def _loss(run: TrlRun, findings: Findings) -> None:
    kind = run.get("loss_type")
    high = run.get("epsilon_high", run.get("epsilon"))
    if kind not in _AGGREGATION:
        findings.blocks("loss_type", f"the loss {kind!r} is not supported; known: {', '.join(_AGGREGATION)}")
        kind = "dapo"
    findings.set("loss_fn.aggregation", _AGGREGATION[kind], f"loss_type {kind}")
    if kind == "dr_grpo":
        findings.set("loss_fn.constant_length", run.get("max_completion_length"), "max_completion_length")
    sequences = run.get("importance_sampling_level") == "sequence"
    if kind == "cispo":
        _cispo(run, findings, high, sequences)
    elif kind == "sapo":
        _sapo(run, findings, sequences)
    else:
        if sequences:
            findings.set("loss_fn.type", "gspo", "importance_sampling_level sequence")
        findings.set("loss_fn.ratio_clip_min", float(run.get("epsilon")), "epsilon")
        findings.set("loss_fn.ratio_clip_max", float(high), "epsilon_high, or epsilon if it is not set")
        _delta(run, findings, high)
    _mean(run, findings, kind)
    _reference(run, findings)


def _cispo(run: TrlRun, findings: Findings, high: float, sequences: bool) -> None:
    findings.set("loss_fn.type", "cispo", "loss_type cispo")
    findings.set("loss_fn.ratio_clip_min", 1.0, "in TRL the importance weight has no lower bound")
    if high < 1:
        why = f"epsilon_high {high} is the maximum importance weight in TRL and must be at least 1; TRL recommends 5.0"
        findings.blocks("epsilon_high", why)
    findings.set(
        "loss_fn.ratio_clip_max", float(max(high, 1.0)) - 1.0, "epsilon_high, the upper bound of the importance weight"
    )
    if sequences:
        findings.differs("importance_sampling_level", "cispo weights are per token; TRL's weights are per sequence")


def _sapo(run: TrlRun, findings: Findings, sequences: bool) -> None:
    findings.set("loss_fn.type", _SAPO, "loss_type sapo")
    taus = {"tau_pos": float(run.get("sapo_temperature_pos")), "tau_neg": float(run.get("sapo_temperature_neg"))}
    findings.set("loss_fn.options", taus, "sapo_temperature_pos, sapo_temperature_neg")
    if sequences:
        findings.differs("importance_sampling_level", "sapo gates are per token; TRL's gates are per sequence")


def _delta(run: TrlRun, findings: Findings, high: float) -> None:
    delta = run.get("delta")
    if delta is None:
        return
    findings.set("loss_fn.ratio_clip_c", float(delta), "delta")
    if delta < 1 + high:
        findings.differs(
            "delta",
            "limits the ratio only for negative advantages; TRL always limits the ratio if delta < 1 + epsilon_high",
        )


def _mean(run: TrlRun, findings: Findings, kind: str) -> None:
    """Report a difference if TRL does not average the loss over the tokens of a single update."""
    if kind == "bnpo" and (run.get("gradient_accumulation_steps") > 1 or run.processes > 1):
        findings.differs(
            "loss_type", "the loss is the mean over all tokens of an update; TRL averages per process and micro-batch"
        )
    if kind in ("dapo", "cispo") and run.updates > 1:
        what = "the loss is divided by the update's tokens; TRL divides by the mean over the generation batch's updates"
        findings.differs("steps_per_generation", what)


def _reference(run: TrlRun, findings: Findings) -> None:
    if not run.get("beta"):
        return
    findings.set("loss_fn.kl_input_clamp_value", None, "TRL does not clamp the KL estimate")
    if not run.get("use_bias_correction_kl"):
        return
    findings.set("loss_fn.reference_policy_kl_gradient", "score", "use_bias_correction_kl")
    if run.updates > 1:
        what = "the KL penalty's importance weight is always 1; in TRL it is the ratio to the sampling policy"
        findings.differs("use_bias_correction_kl", what)


def _off_policy(run: TrlRun, findings: Findings) -> None:
    """Set the handling of the importance weight exp(trainer - vLLM log-prob), which TRL uses if vLLM generates the
    samples."""
    if not run.get("use_vllm"):
        return
    if not run.get("vllm_importance_sampling_correction"):
        findings.set("loss_fn.off_policy.mode", "none", "vllm_importance_sampling_correction is false")
        return
    name = run.get("vllm_importance_sampling_mode")
    if name not in _MODES:
        findings.blocks("vllm_importance_sampling_mode", f"must be one of {', '.join(_MODES)}, got {name!r}")
        return
    mode, level = _MODES[name]
    given = run.given.get("vllm_importance_sampling_clip_max", 3.0)
    low = run.get("vllm_importance_sampling_clip_min")
    findings.set("loss_fn.off_policy.mode", mode, f"vllm_importance_sampling_mode {name}")
    findings.set("loss_fn.off_policy.level", level, f"vllm_importance_sampling_mode {name}")
    findings.set(
        "loss_fn.off_policy.ratio_max", math.inf if given is None else float(given), "vllm_importance_sampling_clip_max"
    )
    if low is not None and mode == "mask":
        findings.set("loss_fn.off_policy.ratio_min", float(low), "vllm_importance_sampling_clip_min")
    elif low is not None:
        findings.differs("vllm_importance_sampling_clip_min", "the mode truncate does not support a lower bound")


# -- batches, length, learning rate -----------------------------------------------------------------------------


def _batches(run: TrlRun, findings: Findings) -> None:
    group = run.get("num_generations", 1)
    step = run.samples_per_step
    if step % group or run.samples_per_generation % group:
        many = f"{run.samples_per_generation} samples of {run.processes} process{'es' * (run.processes > 1)}"
        findings.blocks(
            "num_generations",
            f"{many} are not a multiple of the group size {group}; set the number of processes with --num-processes",
        )
    why = f"{step} samples per step in groups of {group}; {run.processes} process{'es' * (run.processes > 1)} assumed"
    findings.set("gdpo.num_prompts_per_step", max(1, step // group), why)
    if step % run.samples_per_update:
        findings.differs(
            "steps_per_generation", "is not a multiple of gradient_accumulation_steps; each step is one update"
        )
    elif run.updates > 1:
        findings.set(
            "policy.train_global_batch_size", run.samples_per_update, f"{run.updates} updates per generation batch"
        )


def _length(run: TrlRun, findings: Findings) -> None:
    if (steps := episodes(run)) is not None:
        findings.set(
            "gdpo.max_num_steps", steps, f"total_episodes, converted to steps of {run.samples_per_update} samples"
        )
        return
    total = run.total_updates
    if total is not None:
        why = "max_steps" if run.get("max_steps") > 0 else f"num_train_epochs with {len(run.train.rows or [])} rows"
        why += f", in steps of {run.updates} updates" if run.updates > 1 else ""
        findings.set("gdpo.max_num_steps", max(1, -(-total // run.updates)), why)
        return
    epochs = run.get("num_train_epochs")
    findings.set("gdpo.max_num_epochs", max(1, round(epochs)), "num_train_epochs")
    findings.set("gdpo.max_num_steps", ENDLESS, "the run ends after num_train_epochs")
    if epochs != round(epochs):
        findings.differs("num_train_epochs", f"{max(1, round(epochs))} whole epochs instead of {epochs}")


def _schedule(run: TrlRun, findings: Findings) -> None:
    """Set the learning-rate schedule, counted in updates. As in transformers, the warmup starts at 0."""
    style = run.word("lr_scheduler_type")
    extra: dict[str, Any] = dict(run.get("lr_scheduler_kwargs", {}) or {})
    shapes = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
    shapes["cosine_with_min_lr"] = "cosine"
    if style not in shapes:
        findings.differs("lr_scheduler_type", f"the learning rate is constant; the schedule {style} is not supported")
    findings.set(f"{_SCHEDULER}.lr_decay_style", shapes.get(style, "constant"), f"lr_scheduler_type {style}")
    if style == "cosine_with_min_lr":
        rate = extra.pop("min_lr", None)
        share = extra.pop("min_lr_rate", None)
        low = rate if rate is not None else run.get("learning_rate") * (share or 0.0)
        findings.set("policy.megatron_cfg.optimizer.min_lr", float(low), "lr_scheduler_kwargs")
    if extra:
        findings.differs("lr_scheduler_kwargs", f"{', '.join(sorted(extra))}: not supported by the schedule")
    key = "warmup_ratio" if run.get("warmup_ratio") else "warmup_steps"
    updates = run.updates_of(key)
    if updates is None:
        findings.differs(key, "no warmup, because the number of updates depends on the dataset; set "
                        f"{_SCHEDULER}.lr_warmup_steps")  # fmt: skip
    elif updates and style != "constant":
        findings.set(f"{_SCHEDULER}.lr_warmup_steps", updates, key)
        findings.set(f"{_SCHEDULER}.lr_warmup_init", 0.0, "TRL uses a learning rate of 0 for the first update")
