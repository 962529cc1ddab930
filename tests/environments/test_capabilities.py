"""What an environment can do is said by its class; a class that never heard of ``Environment`` is taken as it is."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from environment_samples import trajectory

from gdpo_nemo.config.schema import DatasetConfig
from gdpo_nemo.data.records import Verdict
from gdpo_nemo.data.rows import load_rows
from gdpo_nemo.environments import registry
from gdpo_nemo.environments.base import Environment, adapted, declared
from gdpo_nemo.environments.execution.pool import EnvironmentPool
from gdpo_nemo.environments.registry import BUILT_IN, announced_components, is_remote, load_environment
from gdpo_nemo.environments.tasks.digit_sort import DigitSort
from gdpo_nemo.environments.tasks.digit_turns import DigitTurns
from gdpo_nemo.utils.errors import ConfigError

PACKAGE = Path(registry.__file__).parents[1]
HERE = f"{Path(__file__)}:"
HOOKS = ("verifies", "has_turns", "makes_rows", "has_preflight")


def abilities(environment: Environment) -> set[str]:
    return {hook for hook in HOOKS if getattr(environment, hook)}


class Old:
    """As an author wrote it before there was a base class: the two members that are needed."""

    reward_names = ("a",)

    def __init__(self, options):
        self.made = dict(options)

    def verify(self, trajectories):
        return [Verdict({"a": float(len(t.text))}) for t in trajectories]


class OldWithAll(Old):
    """Everything that was found by its name."""

    open_rewards = remote = True
    system_prompt = "Be brief."
    told: list = []

    def rows(self, split, size, seed):
        return [{"prompt": "x"}]

    def examples(self, row):
        return ["an example"]

    def read_row(self, row):
        return {"prompt": row["text"]}

    def prepare(self):
        self.told.append("prepared")

    def preflight(self, prompts):
        self.open_rewards = False

    def close(self):
        self.told.append("closed")


class OldGame:
    reward_names = ("a",)

    def __init__(self, options):
        pass

    def episode(self):
        return "an episode"


class OldAgents:
    reward_names = ("a",)
    plays_with_endpoint = True

    def __init__(self, options):
        pass


class Slotted:
    """Has no room for what it was not built with."""

    __slots__ = ("reward_names",)

    def __init__(self, options):
        self.reward_names = ("a", "b")

    def verify(self, trajectories):
        return []


def made_by_a_function(options):
    return Old(options)


class New(Environment):
    reward_names = ("a",)

    def verify(self, trajectories):
        return [Verdict({"a": 1.0}) for _ in trajectories]


class NewInParts(New):
    """Methods inherited, and one that the object got by itself."""

    def __init__(self, options):
        self.rows = lambda split, size, seed: [{"prompt": "y"}]


class NotCallable:
    reward_names = ("a",)
    verify = None

    def __init__(self, options):
        pass


class Nothing(Environment):
    reward_names = ("a",)


def load(name: str, **options) -> Environment:
    return load_environment("mine", {"plugin": HERE + name, **options})


@pytest.mark.parametrize(
    "name, expected",
    [
        ("Old", {"verifies"}),
        ("OldWithAll", {"verifies", "makes_rows", "has_preflight"}),
        ("OldGame", {"has_turns"}),
        ("OldAgents", set()),
        ("Slotted", {"verifies"}),
        ("made_by_a_function", {"verifies"}),
        ("New", {"verifies"}),
        ("NewInParts", {"verifies", "makes_rows"}),
    ],
)
def test_capabilities_of_an_environment_follow_from_its_methods(name, expected):
    environment = load(name)
    assert isinstance(environment, Environment) and abilities(environment) == expected


def test_an_old_class_keeps_its_members_and_gets_the_defaults_of_the_others():
    old = load("Old", size=3)
    assert old.made == {"size": 3} and old.reward_names == ("a",) and type(old).__name__ != "Old"
    assert old.verify([trajectory("abc")])[0].rewards == {"a": 3.0}
    assert (old.open_rewards, old.system_prompt, old.remote, old.plays_with_endpoint) == (False, None, False, False)
    assert (old.examples({}), old.read_row({"a": 1}), old.prepare(), old.preflight([]), old.close()) == (
        (),
        {"a": 1},
        None,
        None,
        None,
    )
    assert old.__class__.__name__ == "Old"  # what messages call it


def test_an_old_class_with_every_member_is_asked_for_each_of_them():
    old = load("OldWithAll")
    assert old.open_rewards and old.system_prompt == "Be brief." and old.examples({}) == ["an example"]
    old.preflight([])
    assert not old.open_rewards  # as it is now, not as it was
    old.prepare()
    old.close()
    assert old.told[-2:] == ["prepared", "closed"]
    assert load_rows(DatasetConfig(), {"mine": old}, "train", 0) == [{"id": "train/0", "prompt": "x"}]


def test_an_environment_is_not_adapted_twice_and_a_subclass_not_at_all():
    new = New()
    assert adapted(new) is new
    old = adapted(Old({}))
    assert adapted(old) is old


def test_class_without_a_verifier_is_not_an_environment():
    for name in ("Nothing", "NotCallable"):
        with pytest.raises(
            ConfigError, match=r"is not an environment; define a method verify\(trajectories\) or episode\(\)"
        ):
            load(name)
    assert load("OldAgents").plays_with_endpoint


def test_classes_declare_their_capabilities_before_construction():
    assert declared(OldWithAll) == (("a",), True, False, False, False)
    assert declared(OldAgents).plays_with_endpoint and not declared(OldAgents).remote
    assert declared(made_by_a_function) == declared(DigitSort)._replace(instant=False)
    assert declared(made_by_a_function) == (None, False, False, False, False)
    assert declared(DigitTurns) == (("first", "second", "format"), False, False, False, True)
    assert is_remote("mine", {"plugin": HERE + "OldWithAll"}) and not is_remote("mine", {"plugin": HERE + "Old"})
    assert not is_remote("mine", {"plugin": "absent.py:Mine"})
    for name in ("OldWithAll", "OldAgents"):
        with pytest.raises(ConfigError, match="num_workers: has no effect"):
            load(name, num_workers=2)


@pytest.mark.slow
def test_an_old_class_verifies_in_the_worker_processes():
    with EnvironmentPool({"mine": {"plugin": HERE + "Old"}}, timeout_s=60.0) as pool:
        assert [verdict.rewards for verdict in pool.verify([trajectory("ab", "mine")])] == [{"a": 2.0}]


def test_dry_run_builds_only_instant_environments(monkeypatch):
    assert announced_components("digit_turns", {}) == ("first", "second", "format")
    monkeypatch.setattr(DigitTurns, "instant", False)
    assert announced_components("digit_turns", {}) is None
    assert announced_components("mine", {"plugin": HERE + "New"}) is None
    monkeypatch.setattr(New, "instant", True)
    assert announced_components("mine", {"plugin": HERE + "New"}) is None


@pytest.mark.parametrize("options", [3, ["a"], {"plugin": ["digit_sort"]}, {"plugin": 3}])
def test_options_of_the_wrong_type_are_also_refused_by_a_dry_run(options):
    with pytest.raises(ConfigError, match="^env.mine"):
        announced_components("mine", options)


def test_a_file_in_tasks_is_the_environment_of_its_name():
    files = {path.stem: path.read_text() for path in (PACKAGE / "environments" / "tasks").glob("*.py")}
    found = {name: re.findall(r"^class (\w+)\(Environment\)", text, re.M) for name, text in files.items()}
    assert all(len(classes) <= 1 for classes in found.values())
    named = {name for name, classes in found.items() if classes} - {"reward_functions"}
    assert named | {"functions", "nemo_gym", "nemo_gym_agent", "openenv", "verifiers"} == BUILT_IN.keys()


@pytest.mark.slow
def test_naming_an_environment_imports_no_other():
    code = (
        "import sys; from gdpo_nemo.environments.registry import BUILT_IN, environment_class\n"
        "tasks = lambda: {m for m in sys.modules if m in {p.split(':')[0] for p in BUILT_IN.values()}}\n"
        "assert not tasks(), tasks(); environment_class('gsm8k')\n"
        "assert tasks() == {'gdpo_nemo.environments.tasks.gsm8k'}, tasks()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_only_the_base_class_looks_up_capabilities_by_name():
    """``getattr(environment, "...")`` in one file alone: what there is to ask is an attribute of ``Environment``."""
    members = {name for name in vars(Environment) if not name.startswith("_")} | {"play"}
    asked = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
                if getattr(node.args[1], "value", None) in members:
                    asked.append(path.relative_to(PACKAGE).as_posix())
    assert set(asked) == {"environments/base.py"}
