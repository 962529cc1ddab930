"""``gdpo-nemo env``: a newcomer's way from nothing to an environment of one's own."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from environment_samples import HOSTILE

from gdpo_nemo.algorithms.rubrics import Criterion
from gdpo_nemo.commands import cli
from gdpo_nemo.commands.env.check import Check
from gdpo_nemo.data.records import Outcome, Verdict
from gdpo_nemo.environments.registry import BUILT_IN

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "tests" / "environments" / "hostile_functions.py"
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
NAME = "largest_digit"


def run(command, folder, *importable):
    """A process that finds gdpo_nemo and the given folders; its output when it succeeds."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*importable, ROOT])), "COLUMNS": "200"}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """A package made by ``env new``, and the folder that its wheel was installed to."""
    folder = tmp_path_factory.mktemp("plugins")
    assert cli.main(["env", "new", NAME, "--dir", str(folder)]) == 0
    wheel = run(["-c", BUILD, str(folder)], folder / NAME).splitlines()[-1]
    zipfile.ZipFile(folder / wheel).extractall(folder / "site")
    return folder / NAME, folder / "site"


def test_a_new_plugin_passes_its_own_test(plugin):
    package, _ = plugin
    assert "3 passed" in run(["-m", "pytest", "-q", "-p", "no:cacheprovider"], package)


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A folder with an installed plugin whose module is not there."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "broken-1.0.dist-info").mkdir()
    (folder / "broken-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (folder / "broken-1.0.dist-info" / "entry_points.txt").write_text(
        "[gdpo_nemo.environments]\nbroken = nowhere:Class\n"
    )
    return folder


def test_an_installed_plugin_is_found_by_its_entry_point_and_ready_to_train(plugin, broken):
    package, site = plugin
    program = (
        "import sys; from gdpo_nemo.commands.cli import main\n"
        f"assert main(['env', 'list']) == main(['env', 'check', {NAME!r}, '--rows', '2']) == 0\n"
        f"assert main(['train', '--dry-run', '--config', {str(package / f'{NAME}.yaml')!r}]) == 0\n"
        "assert not {'torch', 'ray', 'vllm', 'megatron'} & set(sys.modules)\n"
    )
    shown = run(
        ["-c", f"if __name__ == '__main__':\n  {program.replace(chr(10), chr(10) + '  ')}"], site.parent, site, broken
    )
    assert "plugin broken: cannot import nowhere: ModuleNotFoundError: No module named 'nowhere'" in shown
    assert "gdpo-nemo-largest-digit 0.1.0 (gdpo_nemo_largest_digit:LargestDigit)" in shown
    assert "no samples would be masked (6 verified)" in shown
    assert "# rewards    1 correctness + 0.5 brevity by gdpo" in shown


@pytest.mark.parametrize(
    "name, message",
    [("Bad-Name", "'Bad-Name' is not a valid environment name"), ("gsm8k", "the environment gsm8k already exists")],
)
def test_a_name_that_cannot_be_had_is_refused_and_nothing_is_overwritten(tmp_path, name, message, capsys):
    assert cli.main(["env", "new", name, "--dir", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())
    (tmp_path / "mine").mkdir()
    assert cli.main(["env", "new", "mine", "--dir", str(tmp_path)]) == 2
    assert "already exists" in capsys.readouterr().err and not list((tmp_path / "mine").iterdir())


def test_list_shows_every_environment_with_its_components_and_every_named_function(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["env", "list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in BUILT_IN)
    assert "correctness, format, length, all" in shown and "llm_judge" in shown and "score of a judge model" in shown


@pytest.fixture
def mine(tmp_path):
    """A config with an environment whose verifier does what the completion says, and one of functions."""
    rows = [{"prompt": "say", "answer": "good", "task": task} for task in ("hostile", "asking", "asking")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.yaml").write_text(
        f"defaults: configs/gdpo_tiny_cpu.yaml\n"
        f"data: {{train: {{path: "
        f"{tmp_path}/rows.jsonl, environment: null, environment_key: task}}, validation: null}}\n"
        f"env:\n"
        f"  hostile: {{plugin: '{HOSTILE}:Hostile'}}\n"
        f"  asking: {{plugin: functions, functions: {{up: '{PLACE}:asking', size: '{PLACE}:lengths'}}}}\n"
        f"gdpo: {{val_period: 0, val_at_start: false}}\n"
    )
    return str(tmp_path / "mine.yaml")


def test_check_shows_masked_samples_with_reasons_and_exits_1(mine, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["env", "check", "asking", "--config", mine, "--completion", "down"]) == 1
    shown = capsys.readouterr().out  # two rows are for it, each with its answer, an empty text, and ours
    assert "masked instead of getting a reward of 0: 2 of 6 samples (up: server is down" in shown


def test_few_of_many_reasons_are_printed():
    check = Check(("a",), 0.0, verdicts=[Verdict({}, Outcome.ENV_FAILED, f"reply {n % 5}") for n in range(9)])
    assert check.reasons == "reply 0; reply 1; reply 2; and 2 more"


def test_check_shows_the_score_of_a_family_instead_of_its_criteria():
    criteria = {"rubric/a": Criterion("a", 3.0), "rubric/b": Criterion("b", 1.0)}
    verdict = Verdict({"rubric/a": 1.0, "rubric/b": 0.0, "own": 0.5}, criteria=criteria)
    check = Check(("rubric/*",), 0.0, verdicts=[verdict])
    assert check.components == ["rubric/*", "own"] and verdict.component_rewards == {"rubric/*": 0.75, "own": 0.5}


def test_check_tells_a_reward_that_does_not_apply_from_one_that_failed(mine, capsys):
    assert cli.main(["env", "check", "hostile", "--config", mine, "--completion", "none"]) == 0
    shown = capsys.readouterr().out
    assert "no samples would be masked (3 verified)" in shown
    assert "length: does not apply to 1 of 3 samples" in shown and "other: does not apply to 3 of 3 samples" in shown


@pytest.mark.parametrize("component, said", [("steady", False), ("moving", True)])
def test_only_trained_components_must_be_equal_in_two_verifications(component, said, mine, tmp_path, capsys):
    (tmp_path / "logs_time.py").write_text(
        "import time\n"
        "def steady(completions, log_metric, log_extra, **_):\n"
        "    log_metric('seconds', time.perf_counter())\n"
        "    log_extra('at', [time.perf_counter() for _ in completions])\n"
        "    return [None if len(completion) % 2 else 1.0 for completion in completions]\n"
        "def moving(completions, **_):\n"
        "    return [time.perf_counter() for _ in completions]\n"
    )
    functions = f"env.asking.functions={{{component}: '{tmp_path}/logs_time.py:{component}'}}"
    assert cli.main(["env", "check", "asking", "--config", mine, functions]) == 0
    assert ("verified twice with different results" in " ".join(capsys.readouterr().out.split())) == said


def test_an_environment_with_turns_is_played_to_its_end(capsys):
    assert cli.main(["env", "check", "digit_turns", "--rows", "1", "--completion", "x"]) == 0
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if "digits/" in line]
    assert [[cell.strip() for cell in line[3:6]] for line in lines] == [
        ["1", "1", "1"],
        ["0", "0", "0"],
        ["0", "0", "0"],
    ]


@pytest.mark.parametrize(
    "arguments, status, message",
    [
        (
            ["hostile", "--completion", "raise"],
            1,
            "environment 'hostile': Hostile.verify raised ValueError: this sample",
        ),
        (["hostil"], 2, "env: 'hostil' not found; did you mean 'hostile'"),
        (["hostile", "--rows", "0"], 2, "--rows: must be between 1"),
        (
            ["gsm8k", "env.gsm8k={}"],
            2,
            "gsm8k does not provide prompts, and no row of data.train or data.validation",
        ),
    ],
)
def test_unverifiable_environment_gives_one_line_on_stderr(mine, arguments, status, message, capsys):
    assert cli.main(["env", "check", *arguments, "--config", mine]) == status
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


@pytest.mark.parametrize(
    "override, message",
    [
        (f"env.asking.functions.up={PLACE}:askin", "has no 'askin'; did you mean 'asking'"),
        ("env.asking.functions.up=nowhere.py:f", "env.asking.functions.up: file not found"),
        ("env.asking.functions.up=no_such_package.f", "package no_such_package not found"),
        ("env.asking.functions.up=lenght", "unknown reward function 'lenght'; did you mean 'length'"),
        (f"env.hostile.plugin={HOSTILE}:Hostil", "env.hostile: .* has no 'Hostil'; did you mean 'Hostile'"),
        ("env.hostile.plugin=hostil", "env.hostile: unknown environment 'hostil'"),
        ("env.asking.num_workers=0", "env.asking.num_workers: must be a number of processes"),
    ],
)
def test_dry_run_finds_missing_names_without_running_code(mine, override, message, capsys):
    assert cli.main(["train", "--dry-run", "--config", mine, override]) == 2
    assert re.search(message, capsys.readouterr().err)
