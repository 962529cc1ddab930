"""The list of tested versions: what holds it together, and how the package that breaks a run is found."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, strategies as st

ROOT = Path(__file__).resolve().parents[2]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("constraints", ROOT / "docker" / "constraints.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


constraints = _load()


@pytest.mark.slow
def test_every_installed_package_has_its_listed_version(capsys):
    assert constraints.check() == 0, capsys.readouterr().out


@pytest.mark.slow
def test_check_names_a_package_of_another_version_and_one_that_is_not_listed(capsys):
    listed = constraints.listed_versions(ROOT)
    del listed["rich"]
    assert constraints.check({**listed, "torch": ("2.12.0",)}) == 1
    (rich, torch) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"rich: \S+ is installed, not listed in pyproject.toml", rich)
    assert re.fullmatch(r"torch: 2.13.0\S* is installed, 2.12.0 in pyproject.toml", torch)


@pytest.mark.parametrize("group", ["cpu", "gpu"])
def test_constraints_files_hold_the_versions_of_the_list(group):
    listed = constraints.listed_versions(ROOT)
    lines = (ROOT / "docker" / f"constraints-{group}.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert len(pinned) > 200
    assert [name for name, version in pinned.items() if version not in listed.get(name, ())] == []


def test_no_package_of_the_list_is_free_to_move():
    """A range only where the groups cannot have one version, and then both of its ends are tested versions."""
    listed = constraints.listed_versions(ROOT)
    files = "".join((ROOT / "docker" / f"constraints-{group}.txt").read_text() for group in ("cpu", "gpu"))
    for name, versions in listed.items():
        assert versions, name
        if len(versions) > 1:
            assert all(f"\n{name}=={version}\n" in files for version in versions)


@given(st.integers(0, 300).flatmap(lambda count: st.tuples(st.just(count), st.none() | st.integers(0, count))))
def test_bisection_finds_the_first_package_that_breaks(case):
    (count, culprit) = case
    runs = []

    def breaks(newest: int) -> bool:
        runs.append(newest)
        return culprit is not None and newest >= culprit

    assert constraints.first_breaking(count, breaks) == culprit
    assert len(runs) <= 2 + count.bit_length()


def test_the_list_survives_being_written_and_read(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.uv]\nconstraint-dependencies = [\n]\nnext = 1\n")
    versions = {"a": ("1.0",), "b-c": ("78.1.1", "80.10.2"), "d": ("1!2.0.post1",)}
    requirements = [constraints.requirement(name, pair) for name, pair in versions.items()]
    constraints._set_list(tmp_path / "pyproject.toml", requirements)
    assert constraints.listed_versions(tmp_path) == versions
    assert (tmp_path / "pyproject.toml").read_text().endswith("]\nnext = 1\n")
