"""The images' recipe names nothing that is not there. tests/docker/cpu_target.py runs the CPU target's steps."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from gdpo_nemo.commands import cli

_spec = importlib.util.spec_from_file_location("dockerfile", Path(__file__).with_name("dockerfile.py"))
dockerfile = importlib.util.module_from_spec(_spec)
sys.modules["dockerfile"] = dockerfile  # where its dataclass looks for its module
_spec.loader.exec_module(dockerfile)

ROOT = dockerfile.ROOT
ARGUMENTS, STAGES = dockerfile.read()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_everything_copied_exists_and_reaches_the_builder():
    ignored = (ROOT / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    seen = 0
    for stage in STAGES.values():
        for arguments in stage.all("COPY"):
            origin, sources, _ = dockerfile.copied(arguments)
            seen += 1
            if origin:
                assert origin in STAGES
            else:
                assert all((ROOT / source).exists() for source in sources), arguments
                assert set(sources) <= allowed
    assert seen > 8 and all((ROOT / name).exists() for name in allowed)


def test_stages_arguments_groups_and_packages_are_those_of_the_project():
    text = dockerfile.DOCKERFILE.read_text()
    for stage in STAGES.values():
        assert stage.base in STAGES or stage.base.strip("${}") in ARGUMENTS
    for group in re.findall(r"--group (\w+)", text):
        assert group in PROJECT["dependency-groups"]
    for extra in re.findall(r"--extra (\S+)", text):
        assert extra in PROJECT["project"]["optional-dependencies"]
    assert any("transformer-engine" in line for line in PROJECT["dependency-groups"]["gpu"])
    own = {name for stage in STAGES.values() for name in (a.partition("=")[0] for a in stage.all("ARG"))}
    assert set(re.findall(r"\$\{(\w+)\}", text)) - {"version"} <= set(ARGUMENTS) | own
    python = re.search(r"python:3\.(\d+)-slim", ARGUMENTS["PYTHON_IMAGE"])[1]
    assert f">=3.{python}" in PROJECT["project"]["requires-python"]


def test_version_and_linter_are_the_same_everywhere():
    version, tested = PROJECT["project"]["version"], PROJECT["tool"]["uv"]["constraint-dependencies"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text()
    [ruff] = re.findall(r"rev: v(\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert f"ruff=={ruff}" in tested


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_images_run_as_a_user_that_may_write_only_its_folder(target):
    stage = STAGES[target]
    words = [word for word, _ in stage.steps]
    assert stage.all("USER") == ["gdpo"] and "useradd" in stage.all("RUN")[0]
    assert "RUN" not in words[words.index("USER") :] and "COPY" not in words[words.index("USER") :]
    # Dependencies come before the program, so that a change of the program does not install them again.
    build = [rest for word, rest in STAGES[f"{target}-build"].steps if word in ("RUN", "COPY")]
    dependencies = [
        rest
        for step in dockerfile.lineage(STAGES, f"{target}-build")
        for word, rest in step.steps
        if word in ("RUN", "COPY")
    ]
    place = next(
        i for i, rest in enumerate(dependencies) if re.search(r"uv sync|uv pip install .*--requirements", rest)
    )
    assert place < next(i for i, rest in enumerate(dependencies) if rest.startswith("gdpo_nemo"))
    assert "--editable ." in build[-1]


def test_every_command_of_the_page_exists(capsys):
    text = (ROOT / "docker" / "README.md").read_text().replace("\\\n", " ")
    built = set()
    for line in re.findall(r"^docker build (.+)$", text, re.M):
        assert (ROOT / re.search(r"-f (\S+)", line)[1]).is_file()
        target = re.search(r"--target (\S+)", line)[1]
        assert target in STAGES and "FROM" not in target
        built.add(re.search(r"-t (\S+)", line)[1])
    runs = re.findall(r"^docker run .+? (gdpo_nemo:\w+)\s+(gdpo-nemo .+)$", text, re.M)
    assert len(runs) == 2 and {image for image, _ in runs} == built
    for _, command in runs:
        program, *arguments = command.replace("/opt/gdpo_nemo", str(ROOT)).split()
        assert program in PROJECT["project"]["scripts"]
        assert cli.main([*arguments, "--dry-run"]) == 0
    capsys.readouterr()
    for path in re.findall(r"`((?:docker|tests)/[\w./]+)`", text):
        assert (ROOT / path).exists()


@pytest.mark.slow
def test_the_health_check_fails_on_a_run_that_stands_still(tmp_path):
    script = ROOT / "docker" / "healthcheck.sh"
    program = tmp_path / "bin" / "gdpo-nemo"
    program.parent.mkdir()
    program.write_text(
        f"#!/bin/sh\nexec {sys.executable} "
        '-c "import sys; from gdpo_nemo.commands.cli import main; sys.exit(main())" "$@"\n'
    )
    program.chmod(0o755)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n')

    def status(**variables) -> int:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            **variables,
        }
        return subprocess.run([script], env=environment, capture_output=True).returncode

    assert status() == 0 and status(GDPO_RUN_DIR=str(tmp_path)) == 0
    old = time.time() - 4000
    os.utime(metrics, (old, old))
    assert status(GDPO_RUN_DIR=str(tmp_path)) == 1 and status(GDPO_RUN_DIR=str(tmp_path), GDPO_MAX_AGE_S="5000") == 0
    program.write_text("#!/bin/sh\nexit 1\n")
    assert status() == 1
