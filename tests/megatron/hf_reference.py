"""The same updates in one process of transformers and torch.optim.AdamW or ``Muon``, on a right-padded batch."""

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
    optimizers = [_adam(model, options)]
    if options.type == "muon":
        matrices = _matrices(model)
        owned = {id(p) for parts in matrices for p in parts}
        for group in optimizers[0].param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in owned]
        optimizers.append(Muon(matrices, options))
    first = None
    rows = []
    for _ in range(steps):
        model.zero_grad()
        loss, entropy, logprobs = _loss(model, batch, temperature, objective)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad)
        for optimizer in optimizers:
            optimizer.step()
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


def _matrices(model) -> list[list[torch.nn.Parameter]]:
    """The matrices between embedding and output layer; gate and up-projection of an MLP are one matrix."""
    found = []
    for name, p in model.named_parameters():
        if p.dim() == 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight")):
            if name.endswith("up_proj.weight"):
                found[-1].append(p)
            else:
                found.append([p])
    return found


class Muon:
    """Muon by its definition, in float64: ``matrices`` are lists of parameters whose rows form one matrix."""

    SETS = {
        "quintic": [
            (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ],
        "simple": [(3.4445, -4.7750, 2.0315)],
    }  # fmt: skip
    SCALES = {
        "spectral": lambda n, m: max(n, m),
        "shape_scaling": lambda n, m: max(1, n / m),
        "unit_rms_norm": np.divide,
    }

    def __init__(self, matrices: list[list[torch.nn.Parameter]], options: OptimizerConfig):
        self.options = options
        self.matrices = matrices
        self.momenta = [np.zeros((sum(len(p) for p in parts), parts[0].size(1))) for parts in matrices]

    def step(self) -> None:
        """Update every matrix."""
        o = self.options
        for parts, momentum in zip(self.matrices, self.momenta):
            gradient = np.concatenate([p.grad.double().numpy() for p in parts])
            momentum += (1 - o.muon_momentum) * (gradient - momentum)
            x = gradient + o.muon_momentum * (momentum - gradient) if o.muon_nesterov else momentum
            x = x / np.linalg.norm(x)
            sets = self.SETS[o.muon_coefficient_type]
            for i in range(o.muon_num_ns_steps):
                a, b, c = sets[i % len(sets)]
                square = x @ x.T
                x = a * x + (b * square + c * square @ square) @ x
            x = torch.from_numpy(x * o.muon_extra_scale_factor * self.SCALES[o.muon_scale_mode](*x.shape) ** 0.5)
            for p, update in zip(parts, x.split([len(p) for p in parts])):
                p.data = (p.data.double() * (1 - o.lr * o.weight_decay) - o.lr * update).float()


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
