"""Whether a machine is fit for a run: what is wrong is found before anything is started."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from bad_input import EMBEDDING_ONLY
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from gdpo_nemo.commands import cli
from gdpo_nemo.commands.arguments import DEFAULT_CONFIG
from gdpo_nemo.observe import installation
from gdpo_nemo.observe.installation import check_installation

ROOT = Path(__file__).resolve().parents[2]
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2,
    "vocab_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    # The runs of other tests prove the imports of Megatron and vLLM, which take 12 CPU seconds.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(installation, "_MODULES", {package: package for package in ("ray", "transformers")})
        return _checks(tmp_path_factory)


def _checks(tmp_path_factory):
    return {check.name: check for check in check_installation(tmp_path_factory.mktemp("runs"))}


@pytest.mark.slow
def test_this_machine_passes_and_every_check_reports_its_finding(checks):
    assert [name for name, check in checks.items() if check.passed is False and name != "GPUs"] == []
    assert "megatron-core 0.19.2" in checks["packages"].text and "vllm" in checks["engine"].text
    assert all(check.text for check in checks.values())


def test_a_folder_that_takes_no_files_is_found(tmp_path):
    (tmp_path / "file").write_text("in the way")
    (check,) = installation._folder(tmp_path / "file" / "runs")
    assert check.passed is False and "file/runs" in check.text


def test_a_low_limit_of_open_files_is_found():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        assert installation._open_files().passed is False
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_absent_package_is_named(monkeypatch):
    monkeypatch.setattr(installation, "_REQUIRED", ("torch", "no-such-package"))
    packages, _ = installation._packages()
    assert packages.passed is False and packages.text == "missing: no-such-package"


def test_default_installation_builds_no_package_that_needs_a_compiler():
    """uv leaves its mark on what it built here; a wheel that holds machine code says that it is no pure Python."""
    built = {
        d.name: "Root-Is-Purelib: false" in d.read_text("WHEEL")
        for d in _default_installation()
        if d.read_text("uv_build.json")
    }
    assert "antlr4-python3-runtime" in built and [name for name, compiled in built.items() if compiled] == []


def _default_installation() -> list[metadata.Distribution]:
    """What `uv run` installs: the dependencies, the groups dev and cpu, and all that these ask for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    wanted = [*project["project"]["dependencies"], *groups["cpu"], *groups["trackers"]]
    wanted += [text for text in groups["dev"] if isinstance(text, str)]
    found = {}
    while wanted:
        requirement = Requirement(wanted.pop())
        extras = requirement.extras or {""}
        key = (canonicalize_name(requirement.name), frozenset(extras))
        if key in found or not (distribution := _installed(requirement.name)):
            continue  # what a marker leaves out, or uv's overrides
        found[key] = distribution
        needed = [Requirement(text) for text in distribution.requires or ()]
        wanted += [str(r) for r in needed if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in extras)]
    return list(found.values())


def _installed(name: str):
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def test_a_missing_library_ends_a_run_with_one_line_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(installation, "_LIBRARIES", {"libc.so.6": "libc6", "libabsent.so.9": "libabsent9"})
    line = (
        "this machine lacks libabsent.so.9, which CPU engines require; on Debian and Ubuntu: apt-get install libabsent9"
    )
    assert cli.main(["train", f"run.dir={tmp_path / 'run'}", f"policy.model_name={tmp_path / 'model'}"]) == 1
    assert capsys.readouterr().err == f"error: {line}\n" and list(tmp_path.iterdir()) == []
    assert cli.main(["train", "--dry-run"]) == 0
    assert f"# note       {line}" in capsys.readouterr().out
    gpus = str(ROOT / "configs" / "gdpo_gsm8k_qwen2.5_1.5b_8gpu.yaml")
    assert cli.main(["train", "--dry-run", "--config", gpus]) == 0
    assert "libabsent" not in capsys.readouterr().out


def test_a_run_without_an_engine_installed_ends_at_once_with_the_extra_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(installation, "_ENGINES", ("no-such-engine",))
    assert cli.main(["train", f"run.dir={tmp_path / 'run'}", f"policy.model_name={tmp_path / 'model'}"]) == 1
    assert "install gdpo-nemo[cpu]" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_eval_and_parity_name_a_missing_library_before_they_start_a_process(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(installation, "_LIBRARIES", {"libabsent.so.9": "libabsent9"})
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    (tmp_path / "model.safetensors").write_bytes(EMBEDDING_ONLY)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert cli.main(["eval", str(tmp_path), "--config", str(DEFAULT_CONFIG)]) == 1
    assert "apt-get install libabsent9" in capsys.readouterr().err
    assert cli.main(["parity", "--model", str(tmp_path), "--engine"]) == 1
    assert "apt-get install libabsent9" in capsys.readouterr().err


@pytest.mark.slow
def test_system_requirements_are_checked_before_any_installation():
    """-S: a Python without site-packages, such as the one that has still to download them."""
    command = [sys.executable, "-S", "-m", "gdpo_nemo.observe.installation"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == "" and "libraries" in done.stdout and "disk" in done.stdout
    assert done.returncode == int("FAILED" in done.stdout)


def test_the_doctor_takes_the_python_versions_that_the_project_takes():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = SpecifierSet(project["requires-python"])
    assert [f"3.{minor}" for minor in range(8, 20) if f"3.{minor}" in allowed] == [
        ".".join(map(str, installation._PYTHON))
    ]
    assert (ROOT / ".python-version").read_text().strip() == "3.12" and "Python 3.12," in (
        ROOT / "README.md"
    ).read_text()
