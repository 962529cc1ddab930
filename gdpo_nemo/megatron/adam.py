"""Adam with its step count in the parameter group.

torch's own Adam keeps a step tensor per parameter, which Megatron's distributed optimizer can neither shard nor
restore. TransformerEngine's and apex's FusedAdam keep it in the group; with the same layout here, checkpoints written
on a CPU and on a GPU are interchangeable. The arithmetic is torch's fused kernel.
"""

from __future__ import annotations

from inspect import unwrap

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw


class GroupStepAdam(torch.optim.Optimizer):
    """AdamW (``adam_w_mode``) or Adam with L2 decay. State per parameter: exp_avg, exp_avg_sq; per group: step."""

    # torch wraps these so that its compiler leaves them alone, and imports the compiler at the first call: 1 s of a
    # core on every rank. Nothing compiles this optimizer.
    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = unwrap(torch.optim.Optimizer.load_state_dict)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        **unused,
    ):
        self._update = adamw if adam_w_mode else adam
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=bias_correction)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            step = int(group.get("step", 0))
            group["step"] = step + 1
            for p in params:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
            self._update(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                # torch adds 1 to each itself. Filled in on the device, where a copy from the host would wait for it.
                list(torch.full((len(params),), float(step), device=params[0].device).unbind()),
                fused=True,
                foreach=False,
                amsgrad=False,
                maximize=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
            )
