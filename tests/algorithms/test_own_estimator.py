"""An estimator of the user's own: a function handed over, or a place named in the config."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from gdpo_nemo.algorithms import Terms, compute_advantages, weighted_terms, z_scores
from gdpo_nemo.algorithms.estimators import gdpo
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.validate import validate
from gdpo_nemo.errors import ConfigError, RunError
from gdpo_nemo.rollouts.learning import advantages_of, check_own_estimator

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = "examples/custom_estimator.py"
REWARDS = {"correct": [0.0, 1.0, 0.0, 0.0, 5.0, 0.0], "short": [1.0, 0.0, None, 0.5, 0.0, 1.0]}
IDS = [0, 0, 0, 1, 1, 1]


def example():
    spec = importlib.util.spec_from_file_location("custom_estimator", REPOSITORY / EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.squashed


def test_a_function_that_is_gdpo_gives_gdpos_advantages_bit_for_bit():
    def mine(table, settings):
        return gdpo(table, settings)

    own, named = (compute_advantages(REWARDS, IDS, estimator=estimator).values for estimator in (mine, "gdpo"))
    assert own.equal(named) and own.abs().max() > 0.5


def test_the_example_squashes_every_z_score():
    squashed = example()
    for limit in (2.0, 0.5):
        plain = compute_advantages(REWARDS, IDS, batch_norm=False).components.numpy()
        own = compute_advantages(REWARDS, IDS, estimator=squashed, batch_norm=False, limit=limit).components.numpy()
        np.testing.assert_allclose(own, limit * np.tanh(plain / limit), rtol=1e-12)


def test_an_own_estimators_options_are_its_further_parameters():
    with pytest.raises(ValueError, match="unknown option 'limt' of squashed; did you mean 'limit'"):
        compute_advantages(REWARDS, IDS, estimator=example(), limt=1.0)


@pytest.mark.parametrize(
    "function, complaint",
    [
        (lambda table: None, "must take"),
        (lambda table, settings, limit: None, "must take"),
        (lambda table, settings: np.zeros(6), "returned ndarray, not Terms"),
        (lambda table, settings: Terms(np.zeros((1, 6)), np.ones(6, bool)), r"components \(1, 6\)"),
        (3, "an estimator is a name or a function"),
    ],
)
def test_what_is_no_estimator_is_refused_with_a_reason(function, complaint):
    with pytest.raises(ValueError, match=complaint):
        compute_advantages(REWARDS, IDS, estimator=function)


# -- named in the config ----------------------------------------------------------------------------------------


def config(estimator: str, *overrides: str):
    base = ["gdpo.num_generations_per_prompt=2", "gdpo.num_prompts_per_step=2", "gdpo.rewards={correct: 1, short: 1}"]
    return load_config(REPOSITORY / "configs" / "gdpo_tiny_cpu.yaml", [*base, f"gdpo.estimator={estimator}", *overrides])


@pytest.mark.parametrize(
    "estimator, complaint",
    [
        ("nowhere.py:mine", "gdpo.estimator: nowhere.py does not exist"),
        (f"{EXAMPLE}:squashd", "has no function squashd"),
    ],
)
def test_a_place_without_an_estimator_is_refused_without_running_it(estimator, complaint):
    with pytest.raises(ConfigError, match=complaint):
        validate(config(estimator))


@pytest.mark.parametrize(
    "overrides, complaint",
    [
        (["gdpo.options={limt: 1.0}"], "gdpo.options: unknown option 'limt' of squashed"),
        (["gdpo.options={limit: much}"], "option 'limit' must be like 2.0"),
        (["gdpo.preset=trl"], "gdpo.preset: preset 'trl' is a variant of gdpo"),
    ],
)
def test_options_of_an_own_estimator_are_checked_before_any_process_starts(overrides, complaint):
    with pytest.raises(ConfigError, match=complaint):
        check_own_estimator(config(f"{EXAMPLE}:squashed", *overrides))


def groups():
    from gdpo_nemo.data.records import Group, Prompt, Trajectory

    made = []
    for number, rewards in enumerate(([(0.0, 1.0), (1.0, 0.0)], [(5.0, 1.0), (0.0, 0.5)])):
        prompt = Prompt(str(number), "mine", "", np.array([1], np.int32), {})
        made.append(
            Group(prompt, [
                Trajectory(prompt, j, np.array([2], np.int32), np.array([-1.0], np.float32), 0, "", "stop",
                           rewards=dict(correct=c, short=s))
                for j, (c, s) in enumerate(rewards)
            ])
        )  # fmt: skip
    return made


def test_a_run_takes_the_estimator_that_its_config_names():
    own = advantages_of(groups(), config(f"{EXAMPLE}:squashed", "gdpo.options={limit: 0.5}", "gdpo.batch_norm=false"))
    plain = advantages_of(groups(), config("gdpo", "gdpo.batch_norm=false"))
    np.testing.assert_allclose(own.components.numpy(), 0.5 * np.tanh(plain.components.numpy() / 0.5), rtol=1e-12)


def test_an_own_estimator_that_raises_ends_the_run_with_a_sentence(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("def mine(table, settings):\n    raise KeyError('no such thing')\n")
    with pytest.raises(RunError, match=r"gdpo.estimator: .*broken.py:mine raised KeyError"):
        advantages_of(groups(), config(f"{file}:mine"))


def test_the_parts_an_estimator_is_made_of_are_public():
    def mine(table, settings):
        z, live = z_scores(table, settings)
        return weighted_terms(z, live, table.weights)

    assert compute_advantages(REWARDS, IDS, estimator=mine).live.tolist() == [True] * 6
