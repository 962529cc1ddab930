"""The layout of the package: imports go one way and without cycles, and files are neither long nor tiny."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from mutant_tables.table import MUTANTS

ROOT = Path(__file__).resolve().parents[1] / "gdpo_nemo"
ORDER = (
    {"utils"},
    {"algorithms"},
    {"models"},
    {"config"},
    {"weights", "data"},
    {"observe", "environments", "megatron", "generation"},
    {"cluster"},
    {"rollouts"},
    {"training"},
    {"planning"},
    {"tools", "commands"},
    {"__main__"},
)
"""A package imports only from the sets before its own, annotations included. `__init__` imports lazily from all.

Tools and commands import each other: a command may be a tool, and tools use the commands' arguments. Nothing else
imports either of them, so a reader of training may leave them out.
"""
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}

FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in ROOT.rglob("*.py")
    if path != ROOT / "__init__.py"
}
REPOSITORY_FILES = [
    path
    for folder in (ROOT, ROOT.parent / "tests", ROOT.parent / "examples", ROOT.parent / "docker")
    for path in folder.rglob("*.py")
]
SHORT = {
    "cluster.idle_agent": "started by path",
    "commands.health": "one command a file",
    "commands.report": "one command a file",
    "utils.trial_process": "started by path",
    "__main__": "started by name",
}
"""Files of fewer than 40 lines, and why each is not part of another one."""


def package(module: str) -> str:
    return module.split(".")[0]


@cache
def imported(module: str) -> set[str]:
    """Return the modules of the package that a module imports: at its top, in functions, or for annotations only."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gdpo_nemo."):
            origin = node.module.removeprefix("gdpo_nemo.")
            names = {f"{origin}.{alias.name}" for alias in node.names}
            found |= names & set(FILES) or {origin if origin in FILES else f"{origin}.__init__"}
    return found - {module}


def test_every_package_has_its_place_in_the_order():
    assert {package(module) for module in FILES} == set(LEVEL)


def test_imports_go_down_only():
    up = [
        f"{module} imports {other}"
        for module in FILES
        for other in imported(module)
        if package(other) != package(module)
        and LEVEL[package(other)] >= LEVEL[package(module)]
        and {package(module), package(other)} != {"tools", "commands"}
    ]
    assert up == []


def test_no_files_import_each_other():
    graphlib.TopologicalSorter({module: imported(module) for module in FILES}).prepare()  # raises CycleError


def test_package_has_few_folders():
    names = [path for path in ROOT.iterdir() if path.name not in ("__pycache__", "py.typed")]
    assert len(names) <= 18


@pytest.mark.parametrize("module", sorted(FILES))
def test_file_has_between_40_and_700_lines(module):
    lines = len(FILES[module].read_text().splitlines())
    assert lines <= 700
    if not module.endswith("__init__"):
        assert (lines < 40) == (module in SHORT)


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
POSITIONAL = 6
KERNELS = "megatron.logprob_kernels"
"""Triton passes all arguments of a kernel by position."""


def own_expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the expressions of a statement, without those of the statements in its body."""
    waiting = list(ast.iter_child_nodes(statement))
    while waiting:
        node = waiting.pop()
        if not isinstance(node, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield node
            waiting.extend(ast.iter_child_nodes(node))


def hard_to_read(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the rule of each place in a file that breaks a rule."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, COMPREHENSIONS):
            inner = [each for each in ast.walk(node) if isinstance(each, COMPREHENSIONS)]
            if len(inner) > 1:
                yield node.lineno, "no comprehension in a comprehension"
        if isinstance(node, ast.stmt):
            comprehensions = [each for each in own_expressions(node) if isinstance(each, COMPREHENSIONS)]
            if sum(any(clause.ifs for clause in each.generators) for each in comprehensions) > 1:
                yield node.lineno, "at most one conditional comprehension in a statement"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names = {argument.arg for argument in node.args.posonlyargs + node.args.args}
            if len(names - {"self", "cls"}) > POSITIONAL:
                yield node.lineno, f"at most {POSITIONAL} positional parameters"


@pytest.mark.parametrize("module", sorted(FILES))
def test_file_has_no_expression_that_is_hard_to_read(module):
    found = list(hard_to_read(FILES[module]))
    if module == KERNELS:
        assert {rule for _, rule in found} == {f"at most {POSITIONAL} positional parameters"}
    else:
        assert found == []


def test_every_command_is_a_file_or_a_folder_that_registers_itself():
    from gdpo_nemo.commands import cli

    listed = {module.__name__.removeprefix("gdpo_nemo.") for module in cli.COMMANDS}
    registering = {module for module, path in FILES.items() if "\ndef add(commands" in path.read_text()}
    assert listed == registering
    assert all(re.fullmatch(r"commands\.\w+|(commands|tools)\.\w+\.command", name) for name in listed)


NOT_OURS = {"file.py", "mine_rewards.py", "mine_rows.py", "module.py"}
"""Files of a reader's own that pages name."""
PAGES = sorted([*ROOT.parent.glob("*.md"), *(ROOT.parent / "docs").glob("*.md")])


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.stem)
def test_files_modules_and_links_that_a_page_names_exist(page):
    import gdpo_nemo

    text = page.read_text()
    files = [str(path.relative_to(ROOT.parent)) for path in REPOSITORY_FILES]
    missing = [
        name
        for name in re.findall(r"`([\w./-]+\.py)(?::[^`]*)?`", text)
        if name not in NOT_OURS and "NAME" not in name and not any(f"/{file}".endswith(f"/{name}") for file in files)
    ]
    for name in re.findall(r"\bgdpo_nemo((?:\.\w+)+)", text):
        first, *rest = name[1:].split(".")
        if first not in gdpo_nemo.__all__ and not any(name[1:] == m or name[1:].startswith(f"{m}.") for m in FILES):
            if not (ROOT / first / "/".join(rest)).is_dir():
                missing.append(f"gdpo_nemo{name}")
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in link and not (page.parent / link).exists():
            missing.append(link)
    assert missing == []


OUTSIDE = sorted(
    path
    for folder in ("examples", "tests/benchmarks", "tests/browser", "tests/chaos")
    for path in (ROOT.parent / folder).glob("*.py")
)


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: path.stem)
def test_scripts_import_names_that_exist(path):
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


def test_there_are_at_most_200_mutants():
    """Each mutant quotes a line of the package, which a refactoring has to follow."""
    assert len(MUTANTS) <= 200


OTHER_TESTS = {
    "benchmarks": "measurements, started by hand",
    "browser": "the inspector's page in Chromium",
    "chaos": "whole runs into which faults are injected",
    "compat": "comparisons with checkouts of other projects, started by hand or weekly",
    "docker": "the images' recipes and constraints (docker/)",
    "end_to_end": "whole runs",
    "examples": "scripts of examples/",
    "gpu": "measurements of a machine with a GPU",
    "mutant_tables": "changes that tests/mutants.py makes",
    "slurm": "jobs on a Slurm of this machine (examples/slurm/)",
}
"""Folders of tests/ that are not named after a package, and their content."""


def test_a_folder_of_tests_has_the_name_of_its_package():
    folders = {path.parent.name for path in (ROOT.parent / "tests").glob("*/*.py")}
    assert folders - {path.name for path in ROOT.iterdir()} == set(OTHER_TESTS)


def test_every_mutant_changes_a_text_that_occurs_once():
    """`tests/mutants.py` runs weekly; a change of the package that a mutant no longer fits is seen here."""
    counts = {mutant.describe(): (ROOT.parent / mutant.path).read_text().count(mutant.text) for mutant in MUTANTS}
    assert {text: count for text, count in counts.items() if count != 1} == {}


def test_every_mutant_names_tests_that_exist():
    missing = []
    for test in {test for mutant in MUTANTS for test in mutant.tests}:
        file, _, case = test.partition("::")
        defined = re.findall(r"^def (test_\w+)", (ROOT.parent / file).read_text(), re.MULTILINE)
        if case and case.partition("[")[0] not in defined:
            missing.append(test)
    assert missing == []
