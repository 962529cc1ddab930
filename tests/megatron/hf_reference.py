"""The same updates in one process of transformers and torch.optim.AdamW, on a right-padded batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from gdpo_nemo.config.schema import OptimizerConfig
from gdpo_nemo.data.packing import TrainSequence


@dataclass
class Run:
    """A few updates: values before the first one, what each measured, and the weights after the last one."""

    logprobs: list[np.ndarray]
    """per sequence, float32 [completion tokens]"""
    steps: np.ndarray
    """float64 [updates, 3]: loss, gradient norm, mean entropy"""
    weights: dict[str, torch.Tensor]


def load(folder):
    """The model in ``folder`` in float32. transformers' SDPA would ignore soft caps."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def run(
    folder,
    batch: list[TrainSequence],
    steps: int,
    options: OptimizerConfig,
    temperature: float = 1.0,
    objective: Callable[[list[torch.Tensor]], torch.Tensor] | None = None,
) -> Run:
    """``steps`` on-policy policy-gradient updates of the model in ``folder``, or of another ``objective`` of the
    completions' log-probs."""
    from transformers.core_model_loading import revert_weight_conversion

    model = load(folder)
    adam = _adam(model, options)
    first = None
    rows = []
    for _ in range(steps):
        adam.zero_grad()
        loss, entropy, logprobs = _loss(model, batch, temperature, objective)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad)
        adam.step()
        rows.append((loss.item(), norm.item(), entropy))
        first = first or logprobs
    stored = revert_weight_conversion(model, model.state_dict())  # under the names in files
    return Run(first, np.array(rows), {name: p.detach() for name, p in stored.items()})


def _adam(model, options: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW whose decay leaves norms and biases alone."""
    exempt = {name for name, p in model.named_parameters() if p.dim() == 1 or name.endswith("bias")}
    groups = [
        {"params": [p for name, p in model.named_parameters() if (name in exempt) == is_exempt], "weight_decay": decay}
        for is_exempt, decay in ((False, options.weight_decay), (True, 0.0))
    ]
    betas = (options.adam_beta1, options.adam_beta2)
    return torch.optim.AdamW(groups, lr=options.lr, betas=betas, eps=options.adam_eps)


def _loss(model, batch, temperature, objective=None):
    lengths = [len(s) for s in batch]
    ids = torch.zeros(len(batch), max(lengths), dtype=torch.int64)
    for row, s in zip(ids, batch):
        row[: len(s)] = torch.from_numpy(np.concatenate([s.prompt_ids, s.completion_ids]).astype(np.int64))
    mask = torch.arange(ids.size(1))[None] < torch.tensor(lengths)[:, None]
    scores = (model(ids, attention_mask=mask.long()).logits / temperature).log_softmax(-1)
    loss = torch.zeros(())
    entropy = 0.0
    values = []
    for row, targets, s in zip(scores, ids, batch):
        p = len(s.prompt_ids)
        n = len(s)
        chosen = row[p - 1 : n - 1]
        logprobs = chosen.gather(-1, targets[p:n, None])[:, 0]
        advantages = torch.from_numpy(s.token_advantages().copy())
        loss = loss - s.weight * (advantages * (logprobs - logprobs.detach()).exp()).sum()
        entropy -= float((chosen.detach().exp() * chosen.detach()).sum())
        values.append(logprobs)
    loss = loss if objective is None else objective(values)
    return loss, entropy / sum(len(s.completion_ids) for s in batch), [found.detach().numpy() for found in values]


def relative_error(ours, theirs) -> float:
    """Largest relative difference of two arrays of measurements."""
    return float(np.max(np.abs(np.asarray(ours) - theirs) / np.abs(theirs)))
