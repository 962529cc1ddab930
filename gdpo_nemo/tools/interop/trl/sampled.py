"""Translation of TRL's RLOO, PPO and distillation trainers.

Based on ``RLOOTrainer`` and ``DistillationTrainer`` of TRL 1.16, ``trl.experimental.gkd.GKDTrainer``, and
``trl.experimental.ppo.PPOTrainer`` of TRL 1.10.
"""

from __future__ import annotations

from typing import Any

from gdpo_nemo.tools.interop.translation import Act, Findings, combined, expanded, fixed, idle, missing, to
from gdpo_nemo.tools.interop.trl.names import Unresolved
from gdpo_nemo.tools.interop.trl.run import TrlRun

_SEQUENCE = "the ratio of a sample is the product of its token ratios"
MEASURED = '''\
"""Reward for monitoring only; the teacher defines the training signal."""


def characters(completions, **columns):
    """Return the length of each answer in characters."""
    return [float(len(c if isinstance(c, str) else c[-1]["content"] or "")) for c in completions]
'''
"""Content of the reward file for distillation. Distillation does not train on rewards."""

_RLOO: list[tuple[str, Act]] = expanded([
    ("beta", combined("gdpo.kl_in_reward")),
    ("epsilon", combined("loss_fn.ratio_clip_min")),
    ("epsilon_high", combined("loss_fn.ratio_clip_max")),
    ("normalize_advantages", combined("gdpo.batch_norm")),
    ("reward_clip_range", missing("the sum of rewards is not clipped; gdpo.shaping can clip components")),
    ("token_level_kl", missing("the KL penalty is part of a sample's reward")),
    ("whiten_rewards", missing("whitening of token rewards is not supported")),
    ("missing_eos_penalty", missing("set the rule truncated in gdpo.shaping")),
    ("num_mini_batches", missing("set steps_per_generation", 1)),
    ("total_episodes", missing("set max_steps or num_train_epochs")),
    ("stop_token*", missing("answers end with the tokenizer's end token")),
    ("*_model_path", missing("pass the models to the trainer")),
    ("dataset_num_proc", idle("affects only how rows are read")),
    ("local_rollout_forward_batch_size", idle("affects only the batch size of forward passes")),
    ("num_sample_generations", idle("affects only printed samples; rollout.save_samples saves all samples")),
])  # fmt: skip
_DISTILLATION: list[tuple[str, Act]] = expanded([
    ("teacher_model_name_or_path", combined("teacher.model_name")),
    ("teacher_model_revision", missing("a Hub name always refers to the main revision")),
    ("teacher_model_init_kwargs", idle("the teacher uses the policy's precision")),
    ("beta", combined("algorithm.type")),
    ("lmbda", fixed(1.0, "all answers are sampled from the policy")),
    ("reverse_kl_top_1_mode", fixed("sampled", "the divergence is computed at the sampled tokens")),
    ("loss_top_k", fixed(1, "the divergence is computed at the sampled tokens")),
    ("loss_add_tail", idle("the divergence is computed at the sampled tokens")),
    ("use_teacher_server", missing("the teacher runs on the training ranks")),
    ("teacher_model_server_url", idle("the teacher runs on the training ranks")),
    ("seq_kd", missing("answers are not sampled from the teacher")),
    ("temperature top_p", fixed(1.0, "the teacher is compared with the policy's full distribution")),
    ("top_k", fixed(0, "the teacher is compared with the policy's full distribution")),
    ("max_new_tokens", to("policy.generation.max_new_tokens")),
    ("max_length", combined("policy.max_total_sequence_length")),
    ("num_generations", combined("gdpo.num_generations_per_prompt")),
    ("packing packing_strategy eval_packing padding_free completion_only_loss loss_type assistant_only_loss "
     "truncation_mode dataset_text_field dataset_kwargs pad_token dataset_num_proc dataset_batch_size "
     "num_of_sequences chars_per_token activation_offloading",
     idle("applies only to training on answers in the data")),
    ("eos_token", missing("answers end with the tokenizer's end token")),
    ("chat_template_path", missing("the tokenizer's chat template is used")),
])  # fmt: skip
_PPO: list[tuple[str, Act]] = expanded([
    ("num_ppo_epochs", to("gdpo.num_iterations")),
    ("num_mini_batches", combined("policy.train_global_batch_size")),
    ("total_episodes", combined("gdpo.max_num_steps")),
    ("response_length", to("policy.generation.max_new_tokens")),
    ("stop_token", idle("answers always end with the tokenizer's end token")),
    ("stop_token_id", missing("answers end with the tokenizer's end token")),
    ("missing_eos_penalty", combined("gdpo.shaping")),
    ("whiten_rewards", missing("whitening of token rewards is not supported")),
    ("kl_coef", combined("gdpo.kl_in_reward")),
    ("kl_estimator", fixed("k1", "the KL estimate of a token is log-prob minus reference log-prob")),
    ("cliprange", combined("loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max")),
    ("vf_coef", to("ppo.vf_coef", float)),
    ("cliprange_value", to("ppo.cliprange_value", float)),
    ("gamma", to("ppo.gamma", float)),
    ("lam", to("ppo.lam", float)),
    ("reward_model_path", combined("env", "gdpo.rewards")),
    ("sft_model_path", combined("policy.model_name")),
    ("dataset_num_proc", idle("affects only how rows are read")),
    ("local_rollout_forward_batch_size", idle("affects only the batch size of forward passes")),
    ("num_sample_generations", idle("affects only printed samples; rollout.save_samples saves all samples")),
    ("*_adapter_name", idle("affects only the names of adapters")),
    ("world_size num_total_batches micro_batch_size local_batch_size batch_size local_mini_batch_size mini_batch_size",
     idle("the trainer computes this value")),
])  # fmt: skip
RULES: dict[str, list[tuple[str, Act]]] = {
    "RLOOTrainer": _RLOO,
    "DistillationTrainer": _DISTILLATION,
    "GKDTrainer": [("shuffle_dataset", idle("rows are always shuffled")), *_DISTILLATION],
    "PPOTrainer": _PPO,
}
"""Trainer -> rules for its fields. For all other fields, the rules in ``keys.RULES`` apply."""


def leave_one_out(run: TrlRun, findings: Findings) -> None:
    """Add the advantages and the loss of RLOO to the findings."""
    findings.set("gdpo.estimator", "rloo", run.trainer)
    if run.get("beta"):
        findings.set("gdpo.kl_in_reward", float(run.get("beta")), "beta; in TRL the KL penalty is part of the reward")
    if run.get("normalize_advantages"):
        findings.set("gdpo.batch_norm", True, "normalize_advantages")
        findings.set("gdpo.epsilon", 1e-4, "epsilon added to the standard deviation")
        findings.differs("normalize_advantages", "the batch statistics exclude zero-variance groups")
    findings.set("loss_fn.aggregation", "sequence_sum", f"{_SEQUENCE}, whose gradient is the sum over the tokens")
    findings.set("loss_fn.ratio_clip_min", float(run.get("epsilon")), "epsilon")
    high = run.get("epsilon_high", run.get("epsilon"))
    findings.set("loss_fn.ratio_clip_max", float(high), "epsilon_high, or epsilon if it is not set")
    if run.updates > 1:
        findings.differs(
            "steps_per_generation", f"after the first update of a step, token ratios are clipped; in TRL {_SEQUENCE}"
        )


def from_teacher(run: TrlRun, findings: Findings) -> None:
    """Set the teacher of a distillation, and report the differences from TRL's divergence."""
    findings.set("algorithm.type", "distillation", run.trainer)
    teacher = run.teacher if run.teacher is not None else run.get("teacher_model_name_or_path")
    if isinstance(teacher, str):
        findings.set("teacher.model_name", teacher, "teacher_model")
    else:
        why = (
            f"the teacher's name cannot be read from {teacher}"
            if teacher
            else "is not specified (teacher_model_name_or_path)"
        )
        findings.blocks("teacher_model", why)
    what = "the reverse KL at the sampled tokens is trained by policy gradient; TRL trains"
    kind = {0.0: "the forward KL", 1.0: "the reverse KL"}.get(
        run.get("beta"), f"the Jensen-Shannon divergence (beta {run.get('beta')})"
    )
    findings.differs("beta", f"{what} {kind} over the whole vocabulary")
    findings.set("gdpo.num_generations_per_prompt", 2, "the smallest supported group size")
    findings.differs("num_generations", "two answers per prompt instead of one")
    file = f"{run.stem}_rewards.py"
    run.files[file] = MEASURED
    findings.set("env", {"functions": {"functions": {"characters": f"{file}:characters"}}}, "measured")
    findings.set("gdpo.rewards", {"characters": 1.0}, "for monitoring only; the teacher defines the training signal")
    findings.set("policy.generation.temperature", 1.0, "the teacher is compared with the policy's full distribution")


def actor_critic(run: TrlRun, findings: Findings) -> None:
    """Add PPO's reward model, KL penalty, loss and minibatches to the findings."""
    findings.set("algorithm.type", "ppo", run.trainer)
    findings.set("gdpo.num_generations_per_prompt", 1, "one sample per prompt")
    model = run.reward_model if run.reward_model is not None else run.get("reward_model_path")
    if isinstance(model, Unresolved) or not model:
        findings.blocks("reward_model", f"the reward model's name cannot be read from {model}")
    else:
        findings.set(
            "env", {"reward_model": {"plugin": "reward_model", "model": model, "num_workers": 1}}, "reward_model"
        )
        findings.set("gdpo.rewards", {"score": 1.0}, "reward_model")
    if run.get("kl_coef"):
        findings.set("gdpo.kl_in_reward", float(run.get("kl_coef")), "kl_coef")
    for side in ("min", "max"):
        findings.set(f"loss_fn.ratio_clip_{side}", float(run.get("cliprange")), "cliprange")
    findings.set("loss_fn.aggregation", "token_mean", "mean over the tokens of a minibatch")
    findings.differs(
        "value_model",
        "the value head on the policy starts at 0; TRL's value model starts as a copy of the reward model",
    )
    if run.lora is not None:
        findings.blocks("peft_config", "ppo trains the whole model, because adapters do not include its value head")
    if run.get("missing_eos_penalty"):
        findings.differs(
            "missing_eos_penalty",
            "answers without an end token are not penalized; set the rule truncated in gdpo.shaping",
        )
    if run.reference is not None and str(run.reference) != str(run.model):
        findings.blocks(
            "ref_model", f"{run.reference} is not supported; the reference model is always the initial model"
        )
    _mini_batches(run, findings)


def _mini_batches(run: TrlRun, findings: Findings) -> None:
    parts = run.get("num_mini_batches")
    if parts == 1:
        return
    if run.samples_per_update % parts:
        findings.blocks("num_mini_batches", f"{run.samples_per_update} samples are not a multiple of {parts}")
        return
    findings.set("policy.train_global_batch_size", run.samples_per_update // parts, "num_mini_batches")
    if run.get("gradient_accumulation_steps") > 1:
        what = f"{parts} updates per batch; TRL updates after gradient_accumulation_steps micro-batches"
        findings.differs("num_mini_batches", what)


def episodes(run: TrlRun) -> int | None:
    """Return PPO's ``total_episodes``, converted to steps, or None if it is not set."""
    total: Any = run.get("total_episodes") if run.algorithm == "ppo" else None
    return None if total is None else max(1, -(-int(total) // run.samples_per_update))
