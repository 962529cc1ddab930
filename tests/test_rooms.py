"""The package's structure: imports go one way, and a file's name says what it is."""

from __future__ import annotations

import ast
import importlib.util
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "gdpo_nemo"
ORDER = (
    "errors", "waits", "phases", "startup", "endings", "algorithms", "config", "weights", "data", "observe",
    "environments", "supervisor", "generation", "megatron", "checkpoints", "formats",
    "cluster", "endpoint", "rollouts", "planning", "algorithm", "supervised", "distillation", "ppo", "validation",
    "inputs", "resume", "kept", "setup", "trainer", "rerun", "drill", "inline", "api", "interop", "commands", "cli",
    "__main__",
)  # fmt: skip
"""Packages and top-level modules; each imports from those before it only. docs/design.md has them with what they
are."""

FILES = [path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"]


def room(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imported(tree: ast.AST) -> set[str]:
    """Rooms that a module imports from while it runs: at its top or in a function, not for annotations alone."""
    checks = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    ]
    guarded = {id(node) for check in checks for node in ast.walk(check)}
    found = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "gdpo_nemo"
            and id(node) not in guarded
        ):
            found |= {node.module.split(".")[1]} if "." in node.module else {alias.name for alias in node.names}
    return found - {"__version__"}


def test_every_room_has_its_place_in_the_order():
    assert {room(path) for path in FILES} == set(ORDER)


def test_imports_go_down_only():
    up = {}
    for path in FILES:
        found = imported(ast.parse(path.read_text())) - {*ORDER[: ORDER.index(room(path))], room(path)}
        if found:
            up[str(path.relative_to(ROOT))] = found
    assert up == {}


def test_megatron_and_generation_do_not_know_each_other():
    for name, other in (("megatron", "generation"), ("generation", "megatron")):
        assert not any(other in imported(ast.parse(path.read_text())) for path in FILES if room(path) == name)


def test_no_two_files_have_one_name():
    names = Counter(path.name for path in FILES if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_every_command_is_a_file_that_registers_itself():
    from gdpo_nemo import cli

    listed = {module.__name__.rpartition(".")[2] for module in cli.COMMANDS}
    registering = {path.stem for path in (ROOT / "commands").glob("*.py") if "\ndef add(commands)" in path.read_text()}
    assert listed == registering


OUTSIDE = sorted(
    path
    for folder in ("examples", "tests/benchmarks", "tests/browser", "tests/chaos")
    for path in (ROOT.parent / folder).glob("*.py")
)


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: path.stem)
def test_what_no_other_test_may_run_imports_names_that_exist(path):
    missing = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gdpo_nemo":
            try:
                module = importlib.import_module(node.module)
            except ModuleNotFoundError as error:
                missing.append(str(error))
                continue
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                if not hasattr(module, alias.name) and importlib.util.find_spec(submodule) is None:
                    missing.append(submodule)
    assert missing == []
