"""Several environments with unlike components in one YAML and one batch, from the file of rows to the advantages."""

import json
from pathlib import Path

import numpy as np
import pytest
from character_tokenizer import character_tokenizer
from environment_samples import trajectory

from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.prompts import PromptSource
from gdpo_nemo.data.records import Group, Trajectory
from gdpo_nemo.environments.execution.pools import EnvironmentPools
from gdpo_nemo.environments.registry import load_environments
from gdpo_nemo.rollouts.batches import apply_verdicts
from gdpo_nemo.rollouts.credit import advantages_of
from gdpo_nemo.training.validation import validate

pytestmark = pytest.mark.slow

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
PLACE = Path(__file__).with_name("hostile_functions.py")

YAML = f"""
defaults: {DEMO}
data: {{train: {{path: ROWS, environment_key: task, shuffle: false}}, validation: null}}
env:
  digit_sort: {{}}
  mathematics: {{plugin: gsm8k, strict: true, num_workers: 1}}
  words: {{plugin: functions, functions: {{size: "{PLACE}:lengths", format: {{function: regex, pattern: "[ab]+"}}}}}}
gdpo: {{rewards: {{correctness: 1.0, format: 1.0, size: 0.5}}, val_period: 0, val_at_start: false}}
checkpointing: {{metric_name: null}}
"""
ROWS = [
    {"prompt": "42153=", "task": "digit_sort", "digits": "42153"},
    {"prompt": "6*7=", "task": "mathematics", "answer": "#### 42"},
    {"prompt": "say", "task": "words"},
]
COMPLETIONS = {
    "digit_sort": ["<t></t><a>12345</a>", "12345", "<t></t><a>1</a>", "1"],
    "mathematics": ["42", "<think>x</think>\n<answer>42</answer>", "41", "40"],
    "words": ["ab", "abc", "bbbb", ""],
}
REWARDS = {
    "correctness": {"digit_sort": [1, 1, 0, 0], "mathematics": [1, 1, 0, 0]},
    "format": {"digit_sort": [1, 0, 1, 0], "mathematics": [0, 1, 0, 0], "words": [1, 0, 1, 0]},
    "size": {"words": [2, 3, 4, 0]},
}


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    """The config, and its judged groups by environment."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "mixed.yaml").write_text(YAML.replace("ROWS", str(folder / "rows.jsonl")))
    config = load_config(folder / "mixed.yaml")
    validate(config)
    data = config.data.train
    environments = load_environments(config.env)
    prompts = PromptSource(
        data, environments, character_tokenizer(), split="train", seed=0, max_prompt_tokens=900
    ).head()
    groups = [
        Group(prompt, [_sample(prompt, i, text) for i, text in enumerate(COMPLETIONS[prompt.environment])])
        for prompt in prompts
    ]
    with EnvironmentPools(config.env, timeout_s=20.0) as pool:
        apply_verdicts([t for group in groups for t in group.trajectories], pool)
    return config, groups


def _sample(prompt, index, text) -> Trajectory:
    made = trajectory(text, index=index)
    made.prompt = prompt
    return made


def z(values):
    values = np.asarray(values, np.float64)
    return (values - values.mean()) / (values.std(ddof=1) + 1e-6)


def test_each_sample_is_verified_by_the_environment_of_its_row(batch):
    _, groups = batch
    for group in groups:
        name = group.prompt.environment
        for component, by_environment in REWARDS.items():
            given = [trajectory.rewards.get(component) for trajectory in group.trajectories]
            assert given == by_environment.get(name, [None] * 4), (name, component)


def test_advantages_normalise_a_component_only_over_samples_that_have_it(batch):
    config, groups = batch
    found = advantages_of(groups, config).values.numpy()
    sums = []
    for group in groups:
        name = group.prompt.environment
        terms = [config.gdpo.rewards[c] * z(by[name]) for c, by in REWARDS.items() if name in by]
        sums += list(np.sum(terms, axis=0))
    assert found == pytest.approx((np.array(sums) - np.mean(sums)) / (np.std(sums, ddof=1) + 1e-6), abs=1e-9)


def test_a_failing_environment_leaves_the_advantages_of_the_others_unchanged(batch):
    config, groups = batch
    others = groups[1:]
    alone = advantages_of(others, config).values.numpy()
    failed = list(groups[0].trajectories)
    with EnvironmentPools(
        {"digit_sort": {"plugin": "functions", "functions": {"correctness": f"{PLACE}:down"}}}
    ) as pool:
        apply_verdicts(failed, pool)
    beside = advantages_of(groups, config).values.numpy()
    assert {trajectory.outcome.value for trajectory in failed} == {"env_failed"}
    assert list(beside[:4]) == [0.0] * 4 and beside[4:] == pytest.approx(alone, abs=1e-12)
