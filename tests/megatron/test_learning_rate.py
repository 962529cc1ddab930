"""The learning rate of every update, against the schedules of Megatron-core and torch, ticked as NeMo-RL ticks them."""

from __future__ import annotations

import pytest
import torch

from gdpo_nemo.config.schema import MegatronConfig, OptimizerConfig, SchedulerConfig

LR = 2e-6


def adam():
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=LR)


def schedule_of(min_lr=0.0, **section):
    from gdpo_nemo.megatron.optimizer import make_schedule

    layout = MegatronConfig(optimizer=OptimizerConfig(lr=LR, min_lr=min_lr), scheduler=SchedulerConfig(**section))
    return make_schedule(adam(), layout, 400)


def rates_of(schedule, updates, skipped=()):
    """The rate of each update, as ``Policy.train`` ticks them."""
    found = []
    for update in range(updates):
        coming = schedule.next_rate()
        schedule.tick(update in skipped)
        found.append(schedule.optimizer.param_groups[0]["lr"])
        assert update in skipped or found[-1] == coming
    return found


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("updates", [1, 16])
def test_rates_are_those_of_nemo_rl_if_the_updates_of_a_step_share_theirs(style, updates):
    """There a step is one call of train: its updates have the rate before the tick, which counts samples."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    samples, warmup, decay, start, least = 32, 10, 25, 2e-7, 1e-7
    theirs = OptimizerParamScheduler(
        adam(), init_lr=start, max_lr=LR, min_lr=least, lr_warmup_steps=warmup * samples,
        lr_decay_steps=decay * samples, lr_decay_style=style, start_wd=0.0, end_wd=0.0, wd_incr_steps=0,
        wd_incr_style="constant",
    )  # fmt: skip
    expected = []
    for _ in range(30):
        expected += [theirs.optimizer.param_groups[0]["lr"]] * updates
        theirs.step(increment=samples)
    ours = schedule_of(
        least, lr_decay_style=style, lr_warmup_steps=warmup * updates, lr_warmup_init=start,
        lr_decay_steps=decay * updates, lr_hold_updates=updates,
    )  # fmt: skip
    assert rates_of(ours, 30 * updates) == pytest.approx(expected, rel=1e-9)


def test_a_skipped_update_moves_no_later_rate_into_another_step():
    section = dict(lr_decay_style="linear", lr_decay_steps=40, lr_hold_updates=4)
    whole = rates_of(schedule_of(**section), 40)
    assert len(set(whole)) == 10 and whole[0] == whole[3] != whole[4]
    assert rates_of(schedule_of(**section), 40, skipped=(5, 6)) == whole
    # Without steps to keep together, a skipped update is none.
    section["lr_hold_updates"] = 1
    assert rates_of(schedule_of(**section), 40, skipped=(5,))[6:] == rates_of(schedule_of(**section), 39)[5:]
