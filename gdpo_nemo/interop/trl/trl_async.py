"""TRL's ``AsyncGRPOTrainer``: what it has besides ``GRPOConfig``, and what it does that cannot be set.

Held against ``trl.experimental.async_grpo`` of TRL 1.16: ``AsyncGRPOConfig``, ``RolloutQueueDataset``,
``AsyncGRPOTrainer.compute_loss``, ``VLLMClient.pause``.
"""

from __future__ import annotations

from typing import Any

from gdpo_nemo.interop.account import Account
from gdpo_nemo.interop.rules import Act, combined, fixed, idle, where

TRAINER = "AsyncGRPOTrainer"
CONFIG = "AsyncGRPOConfig"

ASYNC_GRPO_CONFIG: dict[str, Any] = {
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "ignore_data_skip": True,
    "remove_unused_columns": True,
    "max_completion_length": 2048,
    "vllm_server_base_url": "http://localhost:8000",
    "dtype": "float32",
    "fork_threshold_tokens": 1024,
    "request_timeout": 600,
    "weight_sync_timeout": 1800,
    "token_budget": None,
    "max_inflight_tasks": -1,
    "max_staleness": 4,
    "queue_maxsize": 1024,
    "weight_sync_steps": 1,
    "heartbeat_stale_after_s": 300.0,
}
"""Fields of ``AsyncGRPOConfig`` that ``GRPOConfig`` lacks, or has with another default."""
WITHOUT_A_FIELD: dict[str, Any] = {
    "use_vllm": True,
    "vllm_mode": "server",
    "vllm_gpu_memory_utilization": None,
    "vllm_importance_sampling_correction": False,
    "loss_type": "dapo",
    "scale_rewards": "group",
    "beta": 0.0,
}
"""What it does in terms of ``GRPOConfig``, whose fields for it it lacks."""


def _of_async(act: Act) -> Act:
    return where(lambda run: run.asynchronous, act, idle(f"of {CONFIG}"))


RULES: list[tuple[str, Act]] = [
    ("max_staleness", _of_async(combined("rollout.max_staleness"))),
    ("weight_sync_steps", _of_async(combined("rollout.sync_every", "rollout.max_staleness"))),
    ("dtype", _of_async(fixed("float32", "main weights are in float32"))),
    ("max_inflight_tasks", idle("rollout.depth: groups under way are found by the run, within its bound")),
    ("queue_maxsize", idle("what waits is within the bound of rollout.max_staleness")),
    ("fork_threshold_tokens", idle("of tools and environments of several turns")),
    ("token_budget", idle("policy.micro_batch_tokens says how much is computed at once")),
    ("request_timeout", idle("rollout.generation_timeout_s")),
    ("weight_sync_timeout", idle("every wait has a deadline")),
    ("heartbeat_stale_after_s", idle("every wait has a deadline")),
]
"""Field -> its rule."""


def asynchronous(run: Any, account: Account) -> None:
    """Fill the account with what makes the run an asynchronous one. ``run`` is a ``TrlRun`` of this trainer.

    There a version is a publication, and a sample may be ``max_staleness`` of them old; the last one stands for
    ``weight_sync_steps`` - 1 further steps.
    """
    every = run.get("weight_sync_steps")
    versions = run.get("max_staleness")
    why = "max_staleness" if every == 1 else f"max_staleness {versions}, in versions of weight_sync_steps {every} steps"
    account.set("rollout.max_staleness", (versions + 1) * every - 1, why)
    if versions > 0 and run.lora is None:
        account.set("rollout.kv", "keep", "vLLM is paused with mode=keep there")
    elif versions > 0:
        account.set("rollout.kv", "drain", "a sample under way keeps the adapter that began it there")
    if every > 1:
        account.set("rollout.sync_every", every, "weight_sync_steps")
    account.set("loss_fn.old_logprobs", "sampler", "the ratio starts from vLLM's log-probs there")
    account.set("gdpo.epsilon", 1e-8, "added to the deviation")
    account.set("gdpo.options", {"ddof": 0}, "the deviation of the group there is the population's")
    account.differs(
        "max_staleness", "a step has whole groups, and none is begun that could be too old; there samples as they come"
    )
    if run.get("gradient_accumulation_steps") > 1:
        account.differs(
            "gradient_accumulation_steps", "the mean is over all tokens of an update; there of each micro-batch's"
        )
