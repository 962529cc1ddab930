"""The learning rate of every update: Megatron's schedule, in ticks of one update.

Megatron's own loop ticks behind an update, so that the first one has the rate of tick 0. Here a tick comes before its
update (``Policy.train``): the first update has the rate of tick 1, which is above 0 in a warm-up from 0.
"""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from gdpo_nemo.config.schema import MegatronConfig


class UpdateSchedule(OptimizerParamScheduler):
    """Megatron's schedule, whose ticks are updates; ``hold`` updates share the rate of the first of them.

    NeMo-RL ticks once behind all updates of a step (``MegatronPolicyWorker.train``), so that they share one rate.
    """

    num_steps: int
    """Ticks so far."""

    def __init__(self, *arguments: Any, hold: int = 1, **options: Any):
        self._hold = hold
        super().__init__(*arguments, **options)

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Return the rate of the current update for a parameter group of the optimizer."""
        ticks = self.num_steps
        if ticks:
            self.num_steps = ticks - (ticks - 1) % self._hold
        try:
            return float(super().get_lr(param_group))
        finally:
            self.num_steps = ticks

    def tick(self, skipped: bool) -> None:
        """Count an update and set the rate of the next parameter step.

        A skipped update does not count, unless several share a rate: their first one would not be the first of a step
        again.
        """
        if not skipped or self._hold > 1:
            self.step(increment=1)

    def next_rate(self) -> float:
        """Return the learning rate of the next update."""
        self.num_steps += 1
        try:
            return self.get_lr(self.optimizer.param_groups[0])
        finally:
            self.num_steps -= 1


def make_schedule(optimizer: Any, layout: MegatronConfig, total_updates: int) -> UpdateSchedule:
    """Return the schedule of the section ``scheduler`` for an optimizer.

    Args:
        optimizer: Megatron's or torch's; its ``param_groups`` may have a ``max_lr`` and ``min_lr``.
        total_updates: updates of the whole run, at which a decay ends that names no other end.
    """
    o = layout.optimizer
    s = layout.scheduler
    warmup = s.lr_warmup_steps
    decay_steps = s.lr_decay_steps or max(total_updates, warmup + 1)
    init = 0.0
    if warmup and s.lr_warmup_init is not None:
        # The first update is tick 1. One tick more on the same line puts the wanted rate there, and lr after `warmup`
        # updates.
        init = s.lr_warmup_init - (o.lr - s.lr_warmup_init) / warmup
        warmup = warmup + 1
        decay_steps = decay_steps + 1
    return UpdateSchedule(
        optimizer,
        init_lr=init,
        max_lr=o.lr,
        min_lr=o.lr if s.lr_decay_style == "constant" else o.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay_steps,
        lr_decay_style=s.lr_decay_style,
        start_wd=o.weight_decay,
        end_wd=o.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # On loading a checkpoint keep these values, which the config gives, and take the number of updates alone.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        hold=s.lr_hold_updates,
    )
