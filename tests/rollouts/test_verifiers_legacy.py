"""Episodes that packages with the earlier API of verifiers play with the run's endpoint. Completions are scripted."""

import json
import os
import subprocess

import pytest
from local_server import JsonHandler, LocalServer
from package_venv import venv_with
from scripted_engines import ScriptedEngines, completion_of, letters
from verifiers_world import JOB, REPOSITORY, open_world

from gdpo_nemo.commands.cli import main
from gdpo_nemo.commands.env.scan import try_package
from gdpo_nemo.data.records import Outcome
from gdpo_nemo.utils.errors import ConfigError, RunError

pytestmark = pytest.mark.slow

OLD, NEW = "0.1.14", "0.3.1"
CALL = '<tool_call>{"name": "get_counter_value", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    with open_world(folder, OLD, package="legacy-package", rewards={"right": "mistaken"}, deadline_s=8.0) as made:
        yield made


def test_functions_are_components_and_functions_of_weight_0_are_metrics(single):
    environment = single.environment
    assert environment.reward_names == ("right", "short", "distinct")
    description = environment.preflight(())
    assert (description["version"], description["api"], description["tools"]) == (OLD, "legacy", False)
    assert [tuple(function.values()) for function in description["functions"]] == [
        *(("mistaken", 2.0, False), ("short", 1.0, False), ("distinct", 0.5, True)),
        *(("words", 0.0, False), ("num_turns", 0.0, False)),
    ]
    first = len(single.engines.requests)
    group = single.play("good")["good"]
    sampled = {completion_of(r, letters, 0).token_ids.tobytes(): r for r, _, _ in single.engines.requests[first:]}
    for t in group:
        assert t.trains and t.turns == 1, t.detail
        assert t.prompt.token_ids.tolist() == sampled[t.completion_ids.tobytes()].prompt_ids.tolist()
        is_distinct = float(group[0].text != group[1].text)
        assert t.rewards == {"right": 0.5, "short": pytest.approx(1 / (1 + len(t.text))), "distinct": is_distinct}
        assert t.metrics == {"words": float(bool(t.text)), "num_turns": 1.0}


MASKED = {
    "raises": "mistaken raised ZeroDivisionError: division by zero",
    "list": "mistaken returned '[1.0]' of type list, which is not a finite number",
    "text": "mistaken returned '0.5' of type str, which is not a finite number",
    "infinite": "mistaken returned 'inf' of type float, which is not a finite number",
    "own_loop": "mistaken raised RuntimeError: asyncio.run() cannot be called from a running event",
    "short_list": "distinct returned '[1.0]', which is not a list of 2 rewards",
    "no_list": "distinct returned '1.0', which is not a list of 2 rewards",
}


def test_exception_that_the_rubric_catches_masks_the_sample(single):
    played = single.play("none", "nan", "one_text", *MASKED)
    for mistake in ("none", "nan"):
        assert all(t.trains and t.rewards["right"] is None and t.rewards["short"] > 0 for t in played[mistake])
    for mistake, detail in MASKED.items():
        for t in played[mistake]:
            assert t.outcome is Outcome.ENV_FAILED and not t.rewards
            assert t.detail.startswith(f"verifier: legacy-package: reward function {detail}"), t.detail
    assert [t.trains for t in played["one_text"]] == [False, True]  # values of a group function are for one sample each


def test_failed_model_call_is_not_an_empty_reply(single):
    environment = single.environment
    url = environment._url
    try:
        environment._url = f"{url}/missing"
        [one, _] = single.play("good")["good"]
    finally:
        environment._url = url
    assert one.outcome is Outcome.ENV_FAILED and "ModelError: NotFoundError: Error code: 404" in one.detail, one.detail


def test_changed_row_stops_the_run(single):
    with pytest.raises(RunError, match=r"legacy-package: ValueError: row 0 of its dataset \(train\) has changed"):
        single.play("good", sha256="0")


@pytest.mark.parametrize(
    ("choice", "ids"),
    [
        ({"include": {"answer": ["good", "text"]}}, [0, 5]),
        ({"exclude": {"idx": ["1:", 0]}}, []),
        ({"include": {"idx": [2, "4:6"]}, "shuffle": True, "seed": 1}, [4, 5, 2]),
        ({"skip": 3, "limit": 2}, [3, 4]),
    ],
)
def test_rows_are_selected_by_column_and_position(single, choice, ids):
    worker = single.environment._loaded()
    future = worker.submit("rows", split="train", size=None, seed=0, choice=choice)
    rows = worker.result(future, 60)
    assert [row["id"] for row in rows] == [f"train/{index}" for index in ids]


def test_refuses_validation_on_training_rows_and_unknown_columns(single):
    environment = single.environment
    with pytest.raises(ConfigError, match=r"^select.validation: 14 tasks are also in the split train"):
        environment.rows("validation", None, 0)
    for choice, message in (
        ({"include": {"level": 1}}, "the dataset has no column 'level'; its columns are question, answer"),
        ({"filter": {}}, "select has no key 'filter'; use include, exclude, shuffle"),
    ):
        environment._options.select = {"test": choice}
        with pytest.raises(ConfigError, match=message):
            environment.rows("test", None, 0)
    environment._options.select = {}


def test_function_that_hangs_or_blocks_masks_its_samples_with_its_name(single):
    single.environment.close()
    single.environment._options.deadline_s = 1.0
    for t in single.play("hangs")["hangs"]:
        assert t.outcome is Outcome.ENV_FAILED
        assert "reward function mistaken did not return before the time limit of the episode" in t.detail, t.detail
    [one, _] = single.play("blocks")["blocks"]
    assert "the event loop was blocked by block (legacy_package.py:" in one.detail, one.detail
    single.environment.close()


class Judge(JsonHandler):
    def do_POST(self):
        self._body()
        if self.server.stopped.is_set():
            return self._send(500, b"")
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "judge", "choices": [choice]}
        return self._send(200, json.dumps(reply).encode())


def test_group_plays_turns_tools_and_judges_with_the_components_of_the_row(tmp_path):
    judge = LocalServer(Judge, "/v1")
    args = {"kind": "group", "url": judge.url}
    select = {"validation": {"include": {"info.env_id": "tools"}}}
    options = {"package": "legacy_package", "args": args, "select": select, "deadline_s": 60.0}
    with open_world(tmp_path, NEW, ScriptedEngines(lambda request: (CALL, "stop")), **options) as world:
        environment = world.environment
        names = ("short", "polite", "reward", "used_tools")
        assert environment.reward_names == names
        assert environment.preflight(())["version"] == NEW
        played = world.play("good", "judged", "total", "breaks")
        for t in played["good"]:  # of the last environment, the one with tools
            assert t.trains and t.turns > 2, t.detail
            assert t.rewards == dict.fromkeys(names) | {"used_tools": t.turns - 1}
            assert t.outcome is Outcome.TRUNCATED and t.metrics["get_counter_value_calls"] == t.turns - 1
        assert all(t.rewards == dict.fromkeys(names) | {"polite": 1.0} for t in played["judged"])
        assert all(t.rewards == dict.fromkeys(names) | {"reward": 0.25} for t in played["total"])
        for t in played["breaks"]:
            assert t.outcome is Outcome.ENV_FAILED and "KeyError: 'round'" in t.detail
        world.rows["good"] = next(row for row in environment.rows("train", None, 0) if row["id"].endswith("/train/0"))
        for t in world.play("good")["good"]:
            assert t.trains and t.turn_parents == (-1, 0, -1), t.detail  # the third turn begins a context
        assert [row["id"] for row in environment.rows("validation", None, 0)] == ["legacy_package/eval/0"]
        judge.stopped.set()
        for t in world.play("judged")["judged"]:
            assert t.outcome is Outcome.ENV_FAILED and "reward function polite raised RuntimeError: Judge" in t.detail
    judge.stop()


TRY = """
import json, sys
import worker
sys.modules["gdpo_nemo_worker"] = worker
found = {}
for package in sys.argv[1:]:
    name, _, kind = package.partition(":")
    try:
        adapter = worker.load_adapter(name, {"kind": kind} if kind else {})
        found[package] = adapter.rows("train", None, 0, {})
    except Exception as error:
        found[package] = worker.one_line(error)
print(json.dumps(found))
"""
"""Program that tries several packages in one process, because verifiers takes seconds to import."""


def tried(version, *packages):
    folders = ("gdpo_nemo/environments/verifiers", "tests/environments")
    paths = {"PYTHONPATH": ":".join(str(REPOSITORY / folder) for folder in folders)}
    environment = {key: value for key, value in os.environ.items() if key != "OPENAI_API_KEY"} | paths
    command = [venv_with(f"verifiers=={version}"), "-c", TRY, *packages]
    return json.loads(subprocess.check_output(command, text=True, env=environment, stderr=subprocess.DEVNULL))


BAD = {
    "unscored": "ValueError: the rubric has no reward functions with a weight",
    "columns": "KeyError: 'question'",
    "clash": "ValueError: The features can't be aligned because the key answer of features",
    "needs_key": "OpenAIError: ",
    "downloads": "URLError: <urlopen error [Errno 111] Connection refused>",
    "unknown": "KeyError: 'unknown'",
}


def test_package_that_cannot_be_used_is_refused_with_the_reason():
    found = tried(OLD, *(f"legacy_package:{kind}" for kind in BAD), "legacy_package:empty", "missing-package")
    for kind, message in BAD.items():
        assert found[f"legacy_package:{kind}"].startswith(message), found
    assert found["legacy_package:empty"] == []
    assert found["missing-package"].startswith("ImportError: no module 'missing_package' in "), found


def test_package_for_another_version_of_verifiers_is_refused_with_the_version():
    [message] = tried("0.4.0", "legacy_package").values()
    assert message.startswith("ImportError: module 'verifiers' has no attribute") and "(verifiers 0.4.0)" in message


def test_scan_plays_packages_and_prints_components_and_the_config(single, capsys):
    venv = single.environment._options.venv
    context = single.runner._context(JOB, [0], None)
    lines = list(try_package("legacy-package", venv, 1, context))
    assert lines[0] == f"legacy-package: 2 of 2 episodes played, 1 to 1 turns, no tools (verifiers {OLD}, legacy API)"
    assert lines[1] == "  mistaken: component of weight 2, mean 0.5 of 2 samples"
    assert lines[3].startswith("  distinct: group component of weight 0.5, mean ")
    assert "  num_turns: metric, mean 1 of 2 samples" in lines
    assert '  gdpo: {"rewards": {"mistaken": 2.0, "short": 1.0, "distinct": 0.5}}' in lines
    assert main(["env", "scan", "verifiers", "missing-package", "--venv", venv]) == 1
    out = capsys.readouterr().out
    assert "missing-package: failed: package: missing-package could not be loaded: ImportError: no module" in out
    assert "0 of 1 packages loaded" in out
