"""A few kills of every role; ``kill_everything.py`` does hundreds."""

from __future__ import annotations

from kill_everything import ROLES, soak


def test_every_prompt_is_accounted_for_after_kills_of_every_role(tmp_path, digit_model):
    killed = soak(tmp_path / "run", 10, 3, [f"policy.model_name={digit_model}"])
    assert sum(killed.values()) == 10 and set(killed) == set(ROLES)
