"""A checkpoint is continued under another optimizer or schedule: the config's value wins, and nothing else changes."""

from __future__ import annotations

import math

import checkpoint_cases
import numpy as np
import pytest
import tiny_models

pytestmark = pytest.mark.slow

# those of tests/megatron/layouts.py
LR = 1e-2
DECAY = 0.1
CASES = [("TP1", "qwen3", "float32"), ("TP2", "qwen3", "bfloat16"), ("DP2+DIST", "qwen3", "float32")]
CASES += [("DP2xEP2+DIST", "qwen3-moe", "float32"), ("DP2xEP2", "qwen3-moe", "float32")]


def continuations(on_ranks, folder, tmp_path, layout, starts, precision="float32"):
    """(weights of the checkpoint, one tuple per start) as rank 0 has them."""
    arguments = (folder, tiny_models.make_batch(), tmp_path / "checkpoint", starts, precision)
    return on_ranks(layout, checkpoint_cases.continuations, *arguments)[0]


@pytest.mark.parametrize("layout, model, precision", CASES)
def test_learning_rate_decay_and_adam_settings_of_the_config_win(
    on_ranks, model_folder, tmp_path, layout, model, precision
):
    starts = [
        {"optimizer": {"weight_decay": 0.0}},
        {"optimizer": {"weight_decay": 0.0, "lr": LR / 2}},
        {"optimizer": {"weight_decay": 0.3}},
        {"optimizer": {"adam_beta1": 0.5, "adam_beta2": 0.9, "adam_eps": 1e-2}},
    ]
    saved, found = continuations(on_ranks, model_folder(model), tmp_path, layout, starts, precision)
    assert [(lr, announced) for lr, announced, _, _ in found] == [(LR, LR), (LR / 2, LR / 2), (LR, LR), (LR, LR)]
    plain, half, decayed, other = (weights for *_, weights in found)
    if precision == "float32":  # bfloat16 weights are too coarse to tell a step from its half
        for name, before in saved.items():
            step = plain[name] - before
            np.testing.assert_allclose(half[name] - before, step / 2, atol=1e-6)
            shrunk = -LR * 0.3 * before if before.ndim > 1 else np.zeros_like(before)
            np.testing.assert_allclose(decayed[name] - plain[name], shrunk, atol=2e-6)
    assert {settings[:2] for settings in found[3][2]} == {((0.5, 0.9), 1e-2)}
    assert {settings[2] for *_, groups, _ in found for settings in groups} == {2}, (
        "Adam's count of updates did not go on"
    )
    assert any((other[name] != decayed[name]).any() for name in saved)


def cosine(update: int, horizon: int) -> float:
    return LR * 0.5 * (1 + math.cos(math.pi * (update - 1) / horizon))


SCHEDULES = {
    "a longer horizon": ({"updates": 10, "scheduler": {"lr_decay_style": "cosine"}}, cosine(2, 10)),
    "a horizon of its own": ({"scheduler": {"lr_decay_style": "cosine", "lr_decay_steps": 4}}, cosine(2, 4)),
    "another style": ({"updates": 10, "scheduler": {"lr_decay_style": "linear"}}, LR * 0.9),
    "a warm-up": ({"scheduler": {"lr_warmup_steps": 8}}, LR * 2 / 8),
    "a floor": (
        {"updates": 2, "scheduler": {"lr_decay_style": "linear"}, "optimizer": {"min_lr": 1e-3}},
        (LR + 1e-3) / 2,
    ),
}


@pytest.mark.parametrize("layout", ["TP1", "TP2+SP+DIST"])
def test_schedule_continues_after_the_completed_updates_with_the_settings_of_the_config(
    on_ranks, model_folder, tmp_path, layout
):
    """The checkpoint is of a constant schedule after one update, so what follows is each schedule's second update."""
    starts = [start for start, _ in SCHEDULES.values()]
    _, found = continuations(on_ranks, model_folder("qwen3"), tmp_path, layout, starts)
    for name, (_, expected), (lr, announced, *_) in zip(SCHEDULES, SCHEDULES.values(), found):
        assert lr == pytest.approx(expected, rel=1e-6), name
        assert announced == pytest.approx(expected, rel=1e-6), name
