"""TRL's further trainers that sample: RLOO, PPO, and distillation from a teacher.

Compared with ``RLOOTrainer`` and ``DistillationTrainer`` of TRL 1.16, ``trl.experimental.gkd.GKDTrainer``, and
``trl.experimental.ppo.PPOTrainer`` of TRL 1.10.
"""

from __future__ import annotations

from typing import Any

from gdpo_nemo.interop.account import Account
from gdpo_nemo.interop.rules import Act, combined, fixed, idle, missing, to
from gdpo_nemo.interop.trl.static_names import Unresolved
from gdpo_nemo.interop.trl.trl_run import TrlRun

_SEQUENCE = "the ratio of a sample is the product of its tokens' ratios"
MEASURED = '''\
"""A reward for the config beside it, which is measured and not trained: the teacher alone says what is."""


def characters(completions, **columns):
    """Return the length of each answer in characters."""
    return [float(len(c if isinstance(c, str) else c[-1]["content"] or "")) for c in completions]
'''
"""Text of the file that a run with a teacher and without rewards needs."""

_RLOO: list[tuple[str, Act]] = [
    ("beta", combined("gdpo.kl_in_reward")),
    ("epsilon", combined("loss_fn.ratio_clip_min")),
    ("epsilon_high", combined("loss_fn.ratio_clip_max")),
    ("normalize_advantages", combined("gdpo.batch_norm")),
    ("reward_clip_range", missing("the sum of the rewards is not clipped; gdpo.shaping clips components")),
]
_DISTILLATION: list[tuple[str, Act]] = [
    ("teacher_model_name_or_path", combined("teacher.model_name")),
    ("teacher_model_revision", missing("the teacher is a folder, or the main revision of the hub")),
    ("teacher_model_init_kwargs", idle("the teacher has the policy's precision")),
    ("beta", combined("algorithm.type")),
    ("lmbda", fixed(1.0, "all answers are the policy's own")),
    ("seq_kd", missing("the teacher writes no answers")),
    ("temperature", fixed(1.0, "the teacher is compared with the model's own distribution")),
    ("top_p", fixed(1.0, "the teacher is compared with the model's own distribution")),
    ("top_k", fixed(0, "the teacher is compared with the model's own distribution")),
    ("max_new_tokens", to("policy.generation.max_new_tokens")),
    ("max_length", combined("policy.max_total_sequence_length")),
    ("num_generations", combined("gdpo.num_generations_per_prompt")),
    *((name, idle("of answers that the data has"))
      for name in ("packing", "packing_strategy", "eval_packing", "padding_free", "completion_only_loss", "loss_type",
                   "assistant_only_loss", "truncation_mode", "dataset_text_field", "dataset_kwargs", "pad_token",
                   "dataset_num_proc", "activation_offloading")),
    ("eos_token", missing("an answer ends with the tokenizer's own end token")),
    ("chat_template_path", missing("the tokenizer's own chat template is used")),
]  # fmt: skip
_PPO: list[tuple[str, Act]] = [
    ("num_ppo_epochs", to("gdpo.num_iterations")),
    ("num_mini_batches", combined("policy.train_global_batch_size")),
    ("total_episodes", combined("gdpo.max_num_steps")),
    ("response_length", to("policy.generation.max_new_tokens")),
    ("stop_token", idle("an answer ends with the tokenizer's own end token")),
    ("stop_token_id", missing("an answer ends with the tokenizer's own end token")),
    ("missing_eos_penalty", combined("gdpo.shaping")),
    ("whiten_rewards", missing("rewards of tokens are not whitened")),
    ("kl_coef", combined("gdpo.kl_in_reward")),
    ("kl_estimator", fixed("k1", "the KL of a token is the difference of its log-probs")),
    ("cliprange", combined("loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max")),
    ("vf_coef", to("ppo.vf_coef", float)),
    ("cliprange_value", to("ppo.cliprange_value", float)),
    ("gamma", to("ppo.gamma", float)),
    ("lam", to("ppo.lam", float)),
    ("reward_model_path", combined("env", "gdpo.rewards")),
    ("sft_model_path", combined("policy.model_name")),
    ("dataset_num_proc", idle("how rows are read")),
    ("local_rollout_forward_batch_size", idle("how much is computed at once")),
    ("num_sample_generations", idle("what is printed; rollout.save_samples keeps all samples")),
    ("*_adapter_name", idle("names of adapters")),
    ("world_size", idle("worked out by the trainer")),
    ("num_total_batches", idle("worked out by the trainer")),
    ("*_batch_size", idle("worked out by the trainer")),
]
RULES: dict[str, list[tuple[str, Act]]] = {
    "RLOOTrainer": _RLOO,
    "DistillationTrainer": _DISTILLATION,
    "GKDTrainer": [("shuffle_dataset", idle("rows are shuffled anyway")), *_DISTILLATION],
    "PPOTrainer": [(key, act) for key, act in _PPO if key != "*_batch_size"]
    + [(key, idle("worked out by the trainer")) for key in ("micro_batch_size", "local_batch_size", "batch_size",
                                                          "local_mini_batch_size", "mini_batch_size")],
}  # fmt: skip
"""Trainer -> rules of its fields. Fields that are not listed have the rule of ``trl_keys.RULES``."""


def leave_one_out(run: TrlRun, account: Account) -> None:
    """RLOO: what its advantages and its loss are."""
    account.set("gdpo.estimator", "rloo", run.trainer)
    if run.get("beta"):
        account.set("gdpo.kl_in_reward", float(run.get("beta")), "beta, whose KL is in the reward there")
    if run.get("normalize_advantages"):
        account.set("gdpo.batch_norm", True, "normalize_advantages")
        account.set("gdpo.epsilon", 1e-4, "added to the deviation")
        account.differs("normalize_advantages", "the batch's mean and deviation are of the samples that carry signal")
    account.set("loss_fn.aggregation", "sequence_sum", f"{_SEQUENCE}, whose gradient is the sum of theirs")
    account.set("loss_fn.ratio_clip_min", float(run.get("epsilon")), "epsilon")
    high = run.get("epsilon_high", run.get("epsilon"))
    account.set("loss_fn.ratio_clip_max", float(high), "epsilon_high, or epsilon where it is not set")
    if run.updates > 1:
        account.differs("steps_per_generation", f"after a step's first update tokens are clipped; there {_SEQUENCE}")


def from_teacher(run: TrlRun, account: Account) -> None:
    """Distillation: the teacher, and what of TRL's divergence is trained."""
    account.set("algorithm.type", "distillation", run.trainer)
    teacher = run.teacher if run.teacher is not None else run.get("teacher_model_name_or_path")
    if isinstance(teacher, str):
        account.set("teacher.model_name", teacher, "teacher_model")
    else:
        why = f"{teacher} does not tell the teacher's name" if teacher else "is not named (teacher_model_name_or_path)"
        account.blocks("teacher_model", why)
    what = "the reverse KL at the sampled tokens, as a policy gradient; there"
    kind = {0.0: "the forward KL", 1.0: "the reverse KL"}.get(
        run.get("beta"), f"a Jensen-Shannon mix ({run.get('beta')})"
    )
    account.differs("beta", f"{what} {kind} of the whole distribution")
    account.set("gdpo.num_generations_per_prompt", 2, "the smallest group here")
    account.differs("num_generations", "two answers to each prompt; there one")
    file = f"{run.stem}_rewards.py"
    run.files[file] = MEASURED
    account.set("env", {"functions": {"functions": {"characters": f"{file}:characters"}}}, "measured")
    account.set("gdpo.rewards", {"characters": 1.0}, "measured; the teacher alone trains")
    account.set("policy.generation.temperature", 1.0, "of the model's own distribution")


def actor_critic(run: TrlRun, account: Account) -> None:
    """PPO: the reward model, the value head and the clipping."""
    account.set("algorithm.type", "ppo", run.trainer)
    account.set("gdpo.num_generations_per_prompt", 1, "one sample of a prompt")
    model = run.reward_model if run.reward_model is not None else run.get("reward_model_path")
    if isinstance(model, Unresolved) or not model:
        account.blocks("reward_model", f"{model} does not tell the reward model's name")
    else:
        account.set(
            "env", {"reward_model": {"plugin": "reward_model", "model": model, "num_workers": 1}}, "reward_model"
        )
        account.set("gdpo.rewards", {"score": 1.0}, "reward_model")
    if run.get("kl_coef"):
        account.set("gdpo.kl_in_reward", float(run.get("kl_coef")), "kl_coef")
    for side in ("min", "max"):
        account.set(f"loss_fn.ratio_clip_{side}", float(run.get("cliprange")), "cliprange")
    account.set("loss_fn.aggregation", "token_mean", "the mean over the tokens of a minibatch")
    account.differs("value_model", "the value head starts at 0 on the policy; there it is a copy of the reward model")
    if run.lora is not None:
        account.blocks("peft_config", "ppo trains the whole model; its value head would be no part of an adapter")
    if run.get("missing_eos_penalty"):
        account.differs("missing_eos_penalty", "an answer without its end costs nothing; see gdpo.shaping: truncated")
    if run.reference is not None and str(run.reference) != str(run.model):
        account.blocks("ref_model", f"{run.reference}: the reference is the model that training starts from")
    _mini_batches(run, account)


def _mini_batches(run: TrlRun, account: Account) -> None:
    parts = run.get("num_mini_batches")
    if parts == 1:
        return
    if run.samples_per_update % parts:
        account.blocks("num_mini_batches", f"{run.samples_per_update} samples are not a multiple of {parts}")
        return
    account.set("policy.train_global_batch_size", run.samples_per_update // parts, "num_mini_batches")
    if run.get("gradient_accumulation_steps") > 1:
        what = f"{parts} updates of a batch; there one after gradient_accumulation_steps micro-batches"
        account.differs("num_mini_batches", what)


def episodes(run: TrlRun) -> int | None:
    """Steps of PPO's ``total_episodes``; None if it is not set."""
    total: Any = run.get("total_episodes") if run.algorithm == "ppo" else None
    return None if total is None else max(1, -(-int(total) // run.samples_per_update))
