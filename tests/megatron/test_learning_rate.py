"""Learning rates of whole runs, compared with transformers' schedules and with Megatron's as NeMo-RL advances them."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from gdpo_nemo.config.schema import MegatronConfig, OptimizerConfig, PolicyConfig, SchedulerConfig

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


THEIRS = {
    "constant": ("constant_with_warmup", {}),
    "linear": ("linear", {}),
    "cosine": ("cosine", {}),
    "cosine with min": ("cosine_with_min_lr", {"min_lr": LR / 5}),
}


def rates_of_transformers(style, warmup, horizon):
    from transformers import get_scheduler

    optimizer, (name, options) = adam(), THEIRS[style]
    theirs = get_scheduler(name, optimizer, warmup, horizon, options)
    found = []
    for _ in range(horizon):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    return found


@pytest.mark.parametrize("style", THEIRS)
def test_rates_are_those_of_transformers_for_every_warmup_and_horizon(style):
    from gdpo_nemo.megatron.optimizer import make_schedule

    for horizon in (1, 2, 4, 7, 50):
        for warmup in range(min(horizon, 8)):
            section = SchedulerConfig(style.partition(" ")[0], warmup, 0.0 if warmup else None)
            options = OptimizerConfig(lr=LR, min_lr=LR / 5 if style == "cosine with min" else 0.0)
            ours = make_schedule(adam(), MegatronConfig(optimizer=options, scheduler=section), horizon)
            expected = rates_of_transformers(style, warmup, horizon)
            assert rates_of(ours, horizon) == pytest.approx(expected, rel=1e-9, abs=1e-18), (horizon, warmup)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("init", [None, 0.0, LR / 2, LR])
def test_rate_of_a_group_is_its_multiple_of_the_policys_rate_and_never_negative(style, init):
    """Megatron gives each group the policy's initial rate, but its own peak rate."""
    from gdpo_nemo.megatron.optimizer import make_schedule

    multipliers = (1.0, 10.0, 3.0, 0.5, 0.0)
    for warmup in range(4):
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=LR)
        options = OptimizerConfig(lr=LR, min_lr=LR / 10)
        for multiplier in multipliers[1:]:
            group = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 1.0}
            group |= {"max_lr": multiplier * options.lr, "min_lr": multiplier * options.min_lr}
            optimizer.add_param_group(group)
        section = SchedulerConfig(lr_decay_style=style, lr_warmup_steps=warmup, lr_warmup_init=init)
        schedule = make_schedule(optimizer, MegatronConfig(optimizer=options, scheduler=section), 9)
        for update in range(12):
            found = [group["lr"] for group in optimizer.param_groups]
            assert found == pytest.approx([m * schedule.rate() for m in multipliers], rel=1e-12), (warmup, update)
            assert min(found) >= 0
            schedule.tick(False)


def test_a_run_resumes_with_the_rate_that_follows():
    section = dict(lr_decay_style="cosine", lr_decay_steps=9)
    whole = rates_of(schedule_of(**section), 9)
    for made in range(9):
        schedule, resumed = schedule_of(**section), schedule_of(**section)
        assert schedule.rate() == schedule.next_rate() == LR  # also the rate that is reported if update 1 is skipped
        rates_of(schedule, made)
        resumed.load_state_dict(schedule.state_dict())
        assert rates_of(resumed, 9 - made) == whole[made:]


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("updates", [1, 16])
@pytest.mark.parametrize("warmup", [0, 10])
def test_rates_are_those_of_nemo_rl_if_the_updates_of_a_step_share_one_rate(style, updates, warmup):
    """There a step is one call of train: its updates have the rate before the tick, which counts samples."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    samples, decay, start, least = 32, 25, 2e-7, 1e-7
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
    assert len(set(whole)) == 10 and LR == whole[0] == whole[3] != whole[4]
    assert rates_of(schedule_of(**section), 40, skipped=(5, 6)) == whole
    # Without steps to keep together, a skipped update is none.
    section["lr_hold_updates"] = 1
    assert rates_of(schedule_of(**section), 40, skipped=(5,))[6:] == rates_of(schedule_of(**section), 39)[5:]


@pytest.mark.parametrize("horizon", [None, 4, 6])
@pytest.mark.parametrize("hold", [1, 2])
def test_note_names_the_first_update_without_a_rate(horizon, hold):
    from gdpo_nemo.config.validate import _learning_rate_notes
    from gdpo_nemo.megatron.optimizer import make_schedule

    for style, least, warmup, init in product(("constant", "linear"), (0.0, 1e-7), (0, 1, 3), (None, 1e-7)):
        section = SchedulerConfig(style, warmup, init if warmup else None, horizon, hold)
        layout = MegatronConfig(optimizer=OptimizerConfig(lr=LR, min_lr=least), scheduler=section)
        rates = rates_of(make_schedule(adam(), layout, 6), 6)
        note = " ".join(_learning_rate_notes(PolicyConfig(megatron_cfg=layout), 6))
        if 0 not in rates:
            assert note == ""
        else:
            assert f"update {rates.index(0) + 1} of 6" in note or ("the last update" in note and rates.index(0) == 5)
