"""``gdpo-nemo profile`` after sampling. Its engines are those of ``gdpo-nemo eval``, which tests/end_to_end runs."""

import html
import json

import pytest

from gdpo_nemo.algorithms.rubrics import Criterion
from gdpo_nemo.commands import cli
from gdpo_nemo.commands.arguments import terminal
from gdpo_nemo.commands.env.check import sample_of
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.schema import DatasetConfig, DifficultyConfig
from gdpo_nemo.data.records import Group
from gdpo_nemo.data.rows import load_rows
from gdpo_nemo.environments.execution.pools import EnvironmentPools
from gdpo_nemo.rollouts.batches import apply_verdicts
from gdpo_nemo.rollouts.credit import reward_columns
from gdpo_nemo.tools.profile.measure import profile_groups, verify_again, write
from gdpo_nemo.tools.profile.page import _EXPLAINED, _LEGENDS, heading, summary, write_page
from gdpo_nemo.utils.errors import ConfigError

pytestmark = pytest.mark.slow

FUNCTIONS = """
import random

def drawn(completions, **_):
    return [random.random() for _ in completions]

def right(completions, answer, **_):
    return [float(text == wanted) for text, wanted in zip(completions, answer)]
"""
# The share of right samples falls from the first row to the last.
SAMPLES = {"easy": "aaab", "medium": "aabb", "hard": "abbb", "impossible": "bbbb"}
ROWS = [{"id": row, "prompt": row, "answer": "a"} for row in SAMPLES]


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """The folder of a profile of two functions, one of them random, and what the terminal shows."""
    folder = tmp_path_factory.mktemp("profile")
    (folder / "functions.py").write_text(FUNCTIONS)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    functions = {name: f"{folder}/functions.py:{name}" for name in ("right", "drawn")}
    config = load_config("configs/gdpo_tiny_cpu.yaml", ["run.name=a<b>"])
    config.env = {"functions": {"functions": functions}}
    config.gdpo.rewards = {"right": 1.0, "drawn": 1.0}
    groups = []
    for row in ROWS:
        made = [sample_of(row, text, "functions", index) for index, text in enumerate(SAMPLES[row["id"]])]
        groups.append(Group(made[0].prompt, made))
    with EnvironmentPools(config.env) as pool:
        apply_verdicts([t for group in groups for t in group.trajectories], pool)
    measured = profile_groups(config, groups, 2, 1.0)
    write(folder / "out", measured)
    write_page(folder / "out" / "profile.html", measured)
    console = terminal()
    with console.capture() as capture:
        console.print(summary(measured, folder / "out"))
    return folder, capture.get()


def test_profile_names_a_random_function_and_times_each_function(profile):
    folder, shown = profile
    found = json.loads((folder / "out" / "profile.json").read_text())
    components = found["profile"]["components"]
    assert components["right"]["noise"] == 0 and components["drawn"]["noise"] > 0.3
    assert components["right"]["live"]["value"] == 0.75 and components["right"]["pass_rate"] == 6 / 16
    assert [finding["kind"] for finding in found["profile"]["findings"]] == ["noisy"]
    # A uniform number has the standard deviation 0.289.
    assert components["right"]["noise_std"] == 0 and 0.2 < components["drawn"]["noise_std"] < 0.38
    profile_file = folder / "out" / "profile.json"
    config = load_config(
        "configs/gdpo_tiny_cpu.yaml", ["gdpo.rewards={right: 1, drawn: 1}", f"gdpo.noise.from={profile_file}"]
    )
    assert config.gdpo.noise == {"right": 0.0, "drawn": components["drawn"]["noise_std"]}
    assert f"gdpo.noise='{{from: {profile_file}}}'" in shown.replace("\n", "")
    assert found["cost"]["verification_s_per_sample"].keys() == {"right", "drawn"}
    page = (folder / "out" / "profile.html").read_text()
    assert "drawn is noisy" in page and "drawn is noisy" in shown and "rloo" in page
    assert "<h1>Reward profile of a&lt;b&gt;</h1>" in page and "a<b>" not in page
    assert all(html.escape(legend) in page for legend in (_EXPLAINED, *_LEGENDS.values()))


FLAKY = """
from gdpo_nemo.data.records import Outcome, Verdict
from gdpo_nemo.environments.base import Environment

class Flaky(Environment):
    reward_names = ("right", "rubric/*")
    rewards = {"right": 1.0, "rubric/1": 1.0, "rubric/2": 0.5}

    def verify(self, trajectories):
        return [Verdict({}, Outcome.ENV_FAILED) if t.text == "b" else Verdict(self.rewards) for t in trajectories]
"""


def test_repeated_verification_that_fails_is_not_an_agreement(tmp_path):
    (tmp_path / "flaky.py").write_text(FLAKY)
    config = load_config("configs/gdpo_tiny_cpu.yaml")
    config.env = {"flaky": {"plugin": f"{tmp_path}/flaky.py:Flaky"}}
    config.gdpo.rewards = {"right": 1.0, "rubric/*": 1.0}
    samples = [sample_of(ROWS[1], text, "flaky", index) for index, text in enumerate(SAMPLES["medium"])]
    for sample in samples:
        sample.rewards = {"right": 1.0, "rubric/1": 1.0, "rubric/2": 0.0}
        sample.criteria = {"rubric/1": Criterion(), "rubric/2": Criterion()}
    again = verify_again(config, samples, 1, reward_columns(samples, config))
    assert again.verified.tolist() == [[text == "a" for text in SAMPLES["medium"]]] and again.failed == 2
    found = profile_groups(config, [Group(samples[0].prompt, samples)], 1, 1.0)
    assert found.failed == 2 and found.profile.components["right"].changed == 0
    # Of the two criteria, one changes by 0.5, which is a variance of 0.125. The score changes by half as much.
    assert found.profile.components["right"].noise_std == 0
    assert found.profile.components["rubric/*"].noise_std == pytest.approx((0.125 / 2) ** 0.5)
    assert "2 further verifications failed; they are left out of the noise" in heading(found)


def test_rows_of_a_profile_select_and_order_the_data(profile):
    folder, _ = profile
    records = [json.loads(line) for line in (folder / "out" / "rows.jsonl").read_text().splitlines()]
    assert [record["passes"]["right"] for record in records] == [0.75, 0.5, 0.25, 0.0]
    assert records[3]["live"] == ["drawn"] and records[3]["rewards"]["right"] == 0

    def rows(**chosen):
        difficulty = DifficultyConfig(path=str(folder / "out" / "rows.jsonl"), component="right", **chosen)
        dataset = DatasetConfig(path=str(folder / "rows.jsonl"), shuffle="order" not in chosen, difficulty=difficulty)
        return [row["id"] for row in load_rows(dataset, {}, "train", 0)]

    assert rows(min=0.1, max=0.5) == ["medium", "hard"]
    assert rows(order="hard_first") == ["impossible", "hard", "medium", "easy"]
    assert rows(order="easy_first", min=0.25) == ["easy", "medium", "hard"]


@pytest.mark.parametrize(
    "chosen, shuffle, message",
    [
        ({"min": 0.9}, True, "data.train.difficulty: no row has a pass rate from 0.9 to 1"),
        ({"component": "rigth"}, True, "difficulty.component: .* has no component 'rigth'; did you mean 'right'"),
        ({"order": "hard_first"}, True, "difficulty.order: conflicts with shuffle"),
        ({"order": "hardest"}, False, "difficulty.order: must be easy_first or hard_first, got 'hardest'"),
        ({"min": 0.9, "max": 0.1}, True, "difficulty.min: must be at most max .0.1., got 0.9"),
        ({"path": "absent"}, True, "difficulty.path: absent is not a file; create it with gdpo-nemo profile"),
        ({"path": "ROWS"}, True, "difficulty.path: .* is not the file rows.jsonl of a profile"),
    ],
)
def test_a_difficulty_that_selects_nothing_is_refused(profile, chosen, shuffle, message):
    folder, _ = profile
    path = str(folder / "rows.jsonl")
    chosen = {"path": str(folder / "out" / "rows.jsonl"), **chosen}
    chosen["path"] = chosen["path"].replace("ROWS", path)
    dataset = DatasetConfig(path=path, shuffle=shuffle, difficulty=DifficultyConfig(**chosen))
    with pytest.raises(ConfigError, match=message):
        load_rows(dataset, {}, "train", 0)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["configs/absent.yaml"], "absent.yaml"),
        (["configs/gdpo_tiny_cpu.yaml", "--rows", "0"], "argument --rows: must be between 1"),
        (["configs/gdpo_tiny_cpu.yaml", "--group", "1"], "argument --group: must be between 2"),
        (["configs/gdpo_tiny_cpu.yaml", "--out", "README.md"], "--out: README.md is not a folder"),
        (["configs/sft_tiny_cpu.yaml"], "algorithm.type: sft does not use rewards"),
    ],
)
def test_a_profile_that_cannot_be_is_refused_in_one_line(arguments, message, capsys):
    try:
        status = cli.main(["profile", *arguments])
    except SystemExit as error:
        status = error.code
    shown = capsys.readouterr().err
    assert status == 2 and message in shown and len(shown.splitlines()) == 1
