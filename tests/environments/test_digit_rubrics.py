"""Tests of the environment of ``examples/digit_rubrics.py``, in which each row has a rubric."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gdpo_nemo.algorithms.rubrics import read_rubric
from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.records import Group, Prompt, Trajectory
from gdpo_nemo.environments.base import checked_verdicts
from gdpo_nemo.environments.registry import load_environment
from gdpo_nemo.rollouts.credit import advantages_of, reward_columns
from gdpo_nemo.utils.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = REPOSITORY / "configs" / "gdpo_rubric_cpu.yaml"
TEXTS = ("<t></t><a>12379</a>", "<t>........</t><a>39172</a>", "<t>....<a>12379</a>", "")


@pytest.fixture(scope="module")
def environment():
    return load_environment("rubrics", {"plugin": f"{REPOSITORY}/examples/digit_rubrics.py:DigitRubrics"})


def group(environment, rubric) -> Group:
    """A group with a sample for each of `TEXTS`, scored with a rubric."""
    prompt = Prompt("digits/39172", np.arange(2, dtype=np.int32), "39172=", "rubrics", {"rubric": rubric})
    tokens = np.arange(3, dtype=np.int32)
    samples = [
        Trajectory(prompt, k, tokens, tokens.astype(np.float32), 0, text, "stop") for k, text in enumerate(TEXTS)
    ]
    for sample, verdict in zip(
        samples, checked_verdicts(environment.reward_names, samples, environment.verify(samples))
    ):
        sample.rewards, sample.criteria = dict(verdict.rewards), dict(verdict.criteria)
    return Group(prompt, samples)


@pytest.mark.parametrize("split", ["train", "test"])
def test_rows_have_3_to_12_criteria_with_faults_and_required_ones(environment, split):
    rubrics = [read_rubric(row["rubric"]) for row in environment.rows(split, 300, 0)]
    assert {len(rubric) for rubric in rubrics} == set(range(3, 13))
    criteria = [criterion for rubric in rubrics for criterion in rubric.values()]
    assert {criterion.weight for criterion in criteria} == {1.0, 2.0, -1.0}
    assert 0.01 < np.mean([criterion.required for criterion in criteria]) < 0.1
    assert environment.rows(split, 300, 0) == environment.rows(split, 300, 0)


@pytest.mark.parametrize(
    "criterion, rewards",
    [
        ("the answer is 12379", (1, 0, 1, 0)),
        ("the answer is close to 12379", (1, 0.2, 1, 0)),
        ("the answer is close to 12397", (0.6, 0, 0.6, 0)),
        ("the answer begins with 1", (1, 0, 1, 0)),
        ("the answer ends with 2", (0, 1, 0, 0)),
        ("the text begins with <t>", (1, 1, 1, 0)),
        ("the text ends with </a>", (1, 1, 1, 0)),
        ("the text has the form <t>...</t><a>...</a>", (1, 1, 0, 0)),
        ("the text has few dots, at most 4", (1, 8 / 9, 1, 1)),
        ("the text has 4 dots", (0, 0, 1, 0)),
        ("the text has at least 8 dots", (0, 1, 0, 0)),
        ("the text contains 7", (1, 1, 1, 0)),
    ],
)
def test_a_criterion_is_checked_by_code(environment, criterion, rewards):
    samples = group(environment, [{"id": "only", "criterion": criterion}]).trajectories
    assert [sample.rewards["rubric/only"] for sample in samples] == pytest.approx(rewards)


def test_a_criterion_without_a_check_is_refused(environment):
    with pytest.raises(ConfigError, match="criterion 'is polite' has no check"):
        group(environment, [{"id": "polite", "criterion": "is polite"}])


def test_the_score_is_that_of_the_family_and_its_advantages_differ(environment):
    row = next(row for row in environment.rows("train", 300, 0) if len(row["rubric"]) == 12)
    made = group(environment, row["rubric"])
    by_criterion = load_config(CONFIG, ["gdpo.num_generations_per_prompt=4"])
    by_score = load_config(CONFIG, ["gdpo.num_generations_per_prompt=4", "gdpo.rewards={score: 1}"])
    columns = reward_columns(made.trajectories, by_criterion)
    np.testing.assert_allclose(columns["score"], columns["rubric/*"])
    first, second = (advantages_of([made], config).values.numpy() for config in (by_criterion, by_score))
    assert np.abs(first - second).max() > 0.1


def test_reported_means_count_absent_faults_as_met(environment):
    rubric = [
        {"id": "dots", "criterion": "the text has 4 dots"},
        {"id": "brief", "criterion": "the text has few dots, at most 0"},
        {"id": "seven", "criterion": "the text contains 7", "weight": -1},
    ]
    samples = group(environment, rubric).trajectories
    assert [sample.rewards["mean"] for sample in samples] == pytest.approx([1 / 3, 7 / 27, 17 / 27, 2 / 3])
    assert [sample.rewards["met"] for sample in samples] == pytest.approx([1 / 3, 0, 1 / 3, 2 / 3])
    assert [sample.rewards["dots"] for sample in samples] == [0, 0, 1, 0]
