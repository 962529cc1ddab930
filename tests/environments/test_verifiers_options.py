"""Options of the environment ``verifiers`` and names of its components, without a worker process."""

import math

import pytest

from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.registry import _check_origins as check_origins, announced_components, load_environment
from gdpo_nemo.environments.server_replies import Failure
from gdpo_nemo.environments.verifiers.environment import Verifiers
from gdpo_nemo.environments.verifiers.worker import score
from gdpo_nemo.utils.errors import ConfigError

EPISODE = {"turns": [], "rewards": {}, "problems": {}, "metrics": {}, "error": None, "incomplete": False}


def described(*functions: str, is_open: bool = False, weight: float = 1.0, **options) -> Verifiers:
    environment = Verifiers({"package": "a", **options})
    environment._use({"functions": [{"name": name, "weight": weight} for name in functions], "open": is_open})
    return environment


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "package: must be the name of a package"),
        ({"package": "a", "pakage": "b"}, "unknown option 'pakage'"),
        ({"package": "a", "deadline_s": 0}, "deadline_s: must be greater than 0"),
        ({"package": "a", "rewards": {"x": "f", "y": "f"}}, "rewards: two components have the same function"),
        ({"package": "a", "rewards": {"x": ["f"]}}, "rewards.x: must be the name of a reward function"),
        ({"package": "a", "select": {"valid": {}}}, "select: unknown split 'valid'"),
        ({"package": "a", "venv": "/missing"}, "venv: not a virtual environment, because /missing/bin/python"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        load_environment("mine", {"plugin": "verifiers", **options}).preflight([])


def test_functions_are_components_by_default_and_renamed_by_rewards():
    assert described("f", "g").reward_names == ("f", "g")
    renamed = described("f", "g", rewards={"x": "g"})
    assert renamed.reward_names == ("x", "f") and renamed.component_origins == {"f": "a"}
    with pytest.raises(ConfigError, match=r"rewards.x: no reward function 'gg'; did you mean 'g'\?"):
        described("f", "g", rewards={"x": "gg"})
    with pytest.raises(ConfigError, match="rewards: a component has the name of another reward function"):
        described("f", "g", rewards={"f": "g"})
    with pytest.raises(ConfigError, match="a has no reward function with a weight"):
        described("f", weight=0.0)
    assert described("f", weight=0.0, rewards={"f": "f"}).reward_names == ("f",)


def test_components_are_unknown_before_the_package_is_loaded():
    assert announced_components("mine", {"plugin": "verifiers", "package": "a"}) is None


def test_results_are_rewards_metrics_or_failures():
    episode = {**EPISODE, "rewards": {"f": None, "h": 2.0}, "metrics": {"m": 1.0}, "incomplete": True}
    played = described("f")._result({**episode, "rewards": {"f": None}})
    assert played.rewards == {"f": None} and played.response["incomplete_details"]
    keyed = described(is_open=True, rewards={"x": "h"})._result(episode)
    assert keyed.rewards == {"f": None, "x": 2.0} and keyed.metrics == {"m": 1.0}
    failure = described("f")._result(episode)
    assert isinstance(failure, Failure) and "h is not the name of a reward function" in failure.detail
    assert isinstance(described(is_open=True)._result(EPISODE), Failure)  # no reward at all
    failure = described("f")._result({**EPISODE, "rewards": {"f": 0.0}, "error": "ProviderError: no answer"})
    assert isinstance(failure, Failure) and "no answer" in failure.detail


def test_components_with_one_name_and_different_origins_are_refused():
    class Own(Environment):
        reward_names = ("f",)

    check_origins({"one": described("f"), "two": described("f")})  # the same package twice
    for environments in ({"one": described("f"), "own": Own()}, {"own": Own(), "one": described("f")}):
        with pytest.raises(ConfigError, match=r"^env.one.rewards: 'f' is also a component of env.own; rename it"):
            check_origins(environments)
    check_origins({"one": described("f", rewards={"f": "f"}), "own": Own()})
    check_origins({"one": described("f", rewards={"x": "f"}), "own": Own()})


def test_scores_are_finite_numbers_or_not_applicable():
    assert [score(value) for value in (True, 2, 0.5, None, math.nan)] == [1.0, 2.0, 0.5, None, None]
    for value in ("0.5", b"1", [1.0], {}, math.inf, -math.inf, object()):
        with pytest.raises(ValueError, match="which is not a finite number"):
            score(value)


def test_rows_of_a_file_are_refused():
    with pytest.raises(ConfigError, match="is from a file"):
        described("f").read_row({"prompt": "hello"})
