"""An estimator of the user's own: a function handed over, or a place named in the config."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from gdpo_nemo.algorithms import Terms, compute_advantages, weighted_terms, z_scores
from gdpo_nemo.algorithms.estimators import gdpo
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.objective_checks import check_estimator
from gdpo_nemo.rollouts.credit import advantages_of
from gdpo_nemo.rollouts.user_functions import check_own_functions
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError, RunError

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
        (lambda table, settings: np.zeros(6), "must return Terms, got ndarray"),
        (lambda table, settings: Terms(np.zeros((1, 6)), np.ones(6, bool)), r"components \(1, 6\)"),
        (3, "an estimator must be a name or a function"),
    ],
)
def test_object_that_is_not_an_estimator_is_refused_with_a_reason(function, complaint):
    with pytest.raises(ValueError, match=complaint):
        compute_advantages(REWARDS, IDS, estimator=function)


def divides_by_the_deviation(table, settings):
    """What is most easily forgotten: a group that does not vary."""
    groups = table.groups
    mean = groups.rows(groups.sum(table.columns[0]) / groups.sizes)
    deviation = table.columns[0] - mean
    std = np.sqrt(groups.rows(groups.sum(deviation**2) / groups.sizes))
    terms = np.stack([deviation / std, *np.zeros((len(table.names) - 1, len(std)))])
    return Terms(terms, np.ones(len(std), bool))


def test_non_finite_terms_are_refused_with_estimator_component_group_and_value():
    rewards = {"correct": [0.0, 1.0, 1.0, 1.0], "short": [0.0] * 4}
    with pytest.raises(
        ValueError,
        match=r"divides_by_the_deviation returned nan for component 'correct' of group 7, whose reward is 1 \(2 ",
    ):
        compute_advantages(rewards, [3, 3, 7, 7], estimator=divides_by_the_deviation)
    rewards["correct"] = [0.0, 1.0, 1.0, 0.0]
    assert compute_advantages(rewards, [3, 3, 7, 7], estimator=divides_by_the_deviation).values.isfinite().all()


@pytest.mark.parametrize(
    "terms, complaint",
    [
        (lambda n: Terms(np.full((2, n), np.inf), np.ones(n, bool)), "returned inf for component 'correct'"),
        (lambda n: Terms(np.zeros((2, n)), np.ones(n, bool), total=np.full(n, np.nan)), "the sum nan in group 0"),
        (lambda n: Terms(np.full((2, n), 1e308), np.ones(n, bool)), "the sum inf in group 0"),
        (lambda n: Terms(np.zeros((2, n)), np.ones(n, bool), total=np.zeros(3)), r"total \(3,\) for 6 sequences"),
        (lambda n: Terms(np.tile([1e200, -1e200], (2, n // 2)), np.ones(n, bool)), "cannot standardise"),
    ],
)
def test_every_way_to_an_advantage_that_is_not_finite_is_refused(terms, complaint):
    with np.errstate(over="ignore"), pytest.raises(ValueError, match=complaint):
        compute_advantages(REWARDS, IDS, estimator=lambda table, settings: terms(len(table.valid)))


# -- named in the config ----------------------------------------------------------------------------------------


def config(estimator: str, *overrides: str):
    base = ["gdpo.num_generations_per_prompt=2", "gdpo.num_prompts_per_step=2", "gdpo.rewards={correct: 1, short: 1}"]
    return load_config(
        REPOSITORY / "configs" / "gdpo_tiny_cpu.yaml", [*base, f"gdpo.estimator={estimator}", *overrides]
    )


@pytest.mark.parametrize(
    "estimator, complaint",
    [
        ("nowhere.py:mine", "gdpo.estimator: nowhere.py not found"),
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
        check_own_functions(config(f"{EXAMPLE}:squashed", *overrides))


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


BROKEN_FOR_CONSTANT_GROUPS = """
import numpy as np
from gdpo_nemo.algorithms import Terms

def mine(table, settings):
    g = table.groups
    deviation = table.columns - np.stack([g.rows(g.sum(c) / g.sizes) for c in table.columns])
    std = np.stack([np.sqrt(g.rows(g.sum(d * d) / g.sizes)) for d in deviation])
    return Terms(deviation / std, np.ones(len(table.valid), bool))
"""


def test_an_own_estimator_that_gives_nan_is_refused_before_any_process_starts(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text(BROKEN_FOR_CONSTANT_GROUPS)
    with pytest.raises(
        ConfigError, match=r"gdpo.estimator: estimator mine returned nan for component 'correct' of group 1"
    ):
        check_own_functions(config(f"{file}:mine"))
    raising = tmp_path / "raising.py"
    raising.write_text("def mine(table, settings):\n    return {}['x']\n")
    with pytest.raises(ConfigError, match=r"gdpo.estimator: .*raising.py:mine raised KeyError"):
        check_own_functions(config(f"{raising}:mine"))


KINDS = """
import numpy as np
import torch
from gdpo_nemo import Terms, weighted_terms, z_scores

class Scaled:
    def __init__(self):
        self.calls = np.zeros(1)
    def __call__(self, table, settings, by=1.0):
        self.calls += by
        z, has_signal = z_scores(table, settings)
        return weighted_terms(z * self.calls, has_signal, table.weights)

class WithState(Scaled):
    def state(self): return {"calls": self.calls}
    def load_state(self, state): self.calls = state["calls"]

class WithoutLoad(Scaled):
    def state(self): return {}

class WithoutState(Scaled):
    def load_state(self, state): pass

class Forgetful(WithState):
    def state(self): return {"calls": np.zeros(1)}

class OfTensors(WithState):
    def state(self): return {"calls": torch.from_numpy(self.calls)}

class WithArguments(WithState):
    def __init__(self, calls): self.calls = calls

class NotCalled:
    pass

class Leaving(WithState):
    def __init__(self): raise SystemExit(0)

def tensors(table, settings):
    found = WithState()(table, settings)
    return Terms(torch.from_numpy(found.components), torch.from_numpy(found.has_signal))

def with_torch(table, settings):
    return weighted_terms(torch.tanh(table.columns), table.present, table.weights)
"""


@pytest.fixture
def kinds(tmp_path):
    file = tmp_path / "kinds.py"
    file.write_text(KINDS)
    return file


@pytest.mark.parametrize(
    "name, complaint",
    [
        ("WithoutLoad", "must define load_state, because it defines"),
        ("WithoutState", "must define state, because it defines"),
        ("Forgetful", "returns other values after its state was restored"),
        ("OfTensors", r"called again: ValueError: state\['calls'\]: cannot save Tensor"),
        ("WithArguments", r"WithArguments\(\) raised TypeError"),
        ("NotCalled", "is not callable"),
        ("Leaving", r"Leaving\(\) raised ExitRaised"),
        ("tensors", "returned a Tensor in Terms.components; use NumPy arrays"),
        ("with_torch", "raised TypeError: tanh.*rewards are NumPy arrays, so use NumPy functions"),
    ],
)
def test_a_class_or_result_that_does_not_fit_is_refused_before_any_process_starts(name, complaint, kinds):
    with pytest.raises(ConfigError, match=f"gdpo.estimator: .*{complaint}"):
        check_own_functions(config(f"{kinds}:{name}"))


def test_functions_whose_result_depends_on_earlier_calls_are_noted_unless_their_state_is_saved(kinds):
    check_estimator(config(f"{kinds}:WithState").gdpo)
    assert check_own_functions(config(f"{kinds}:WithState", "gdpo.options={by: 2.0}")) == []
    (note,) = check_own_functions(config(f"{kinds}:Scaled"))
    assert note.startswith(f"gdpo.estimator: {kinds}:Scaled returns different values for the same input")
    assert check_own_functions(config(f"{EXAMPLE}:squashed")) == check_own_functions(config(f"{EXAMPLE}:Fading")) == []


def test_state_changes_in_one_call_per_step_and_is_unknown_outside_of_steps(kinds):
    sampling = "gdpo.dynamic_sampling={enabled: true}"
    with pytest.raises(ConfigError, match="gdpo.dynamic_sampling.enabled: conflicts with gdpo.estimator: .*WithState"):
        check_own_functions(config(f"{kinds}:WithState", sampling))
    for repeating in ("gdpo.constraints={short: {at_least: 0.5}}", "gdpo.component_gradient_period=1", sampling):
        with pytest.raises(ConfigError, match="gdpo.* conflicts with gdpo.shaping: .*WithState, whose state must"):
            check_own_functions(
                config("gdpo", f"gdpo.shaping=[{{component: short, '{kinds}:WithState': {{}}}}]", repeating)
            )
    both = ", ".join(f"{{component: {name}, '{kinds}:WithState': {{}}}}" for name in ("short", "correct"))
    with pytest.raises(ConfigError, match="gdpo.shaping: another rule: conflicts with gdpo.shaping: .*WithState"):
        check_own_functions(config("gdpo", f"gdpo.shaping=[{both}]"))
    with pytest.raises(ConfigError, match="WithState has state, which is only known in the steps of a run"):
        advantages_of(groups(), config(f"{kinds}:WithState"))


@pytest.mark.parametrize("exit_call", ["raise SystemExit(0)", "import os; os._exit(0)", "raise GeneratorExit"])
def test_an_estimator_or_a_rule_that_ends_the_process_is_refused_by_name(exit_call, tmp_path):
    file = tmp_path / "leaving.py"
    file.write_text(f"def mine(first, second): {exit_call}")
    with pytest.raises(ConfigError, match=r"gdpo.estimator: .*leaving.py:mine raised ExitRaised"):
        check_own_functions(config(f"{file}:mine"))
    rule = f"gdpo.shaping=[{{component: correct, '{file}:mine': {{}}}}]"
    with pytest.raises(ConfigError, match=r"gdpo.shaping.*leaving.py:mine raised ExitRaised"):
        check_own_functions(config("grpo", rule))


def test_a_custom_estimator_that_returns_nan_ends_the_run_instead_of_masking(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text(BROKEN_FOR_CONSTANT_GROUPS)
    constant = groups()
    for t in constant[1].trajectories:
        t.rewards = {"correct": 1.0, "short": 0.25}
    with pytest.raises(RunError, match=r"advantages: estimator mine returned nan for component 'correct' of group 1"):
        advantages_of(constant, config(f"{file}:mine"))


def test_the_parts_an_estimator_is_made_of_are_public():
    def mine(table, settings):
        z, has_signal = z_scores(table, settings)
        return weighted_terms(z, has_signal, table.weights)

    assert compute_advantages(REWARDS, IDS, estimator=mine).has_signal.tolist() == [True] * 6
