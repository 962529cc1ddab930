"""The wheel, installed as a user installs it, away from the checkout."""

from __future__ import annotations

import ensurepip
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from gdpo_nemo.utils.source import REPOSITORY

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """``bin`` of an environment with the wheel, which sees the packages of this one and not its checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    [wheel] = folder.glob("gdpo_nemo-*.whl")
    [pip] = (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")  # runs without being installed
    command = [str(folder / "venv" / "bin" / "python"), f"{pip}/pip", "--isolated", "install", "--quiet", "--no-deps"]
    subprocess.run([*command, "--no-index", "--no-compile", str(wheel)], check=True)
    # A line in a .pth file is a folder of sys.path; .pth files inside of that folder, such as the checkout's, are not
    # read.
    [packages] = (folder / "venv" / "lib").glob("python3*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "venv" / "bin"


@pytest.fixture
def away(tmp_path, installed):
    """Run a program of the environment in an empty folder; its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}

    def run(program: str, *arguments: str, status: int = 0) -> str:
        command = [str(installed / program), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    return run


def test_the_package_is_the_installed_one_and_knows_its_version(away, installed):
    code = "import gdpo_nemo, sys; print(gdpo_nemo.__file__, gdpo_nemo.__version__, *sys.path, sep='\\n')"
    place, version, *path = away("python", "-c", code).splitlines()
    assert Path(place).is_relative_to(installed.parent) and (Path(place).parent / "py.typed").is_file()
    assert (Path(place).parent / "bundled/configs/schema.json").is_file()
    assert str(REPOSITORY) not in path
    assert away("gdpo-nemo", "--version").startswith(f"gdpo-nemo {version}\n")
    assert away("python", "-m", "gdpo_nemo", "--version").startswith(f"gdpo-nemo {version}\n")


def test_the_demo_and_the_configs_that_come_with_it_are_planned(away):
    assert "# model      results/models/digit_sort_0 (created by examples/make_tiny_model.py" in away(
        "gdpo-nemo", "train", "--dry-run"
    )
    config = ("--config", "configs/gdpo_gsm8k_qwen2.5_1.5b_8gpu.yaml")
    assert "Qwen/Qwen2.5-1.5B-Instruct" in away("gdpo-nemo", "plan", *config, "--gpu", "h100")
    wrong = away("gdpo-nemo", "plan", "--config", "configs/gdpo_tiny_cp.yaml", status=2)
    assert "did you mean configs/gdpo_tiny_cpu.yaml?" in wrong


def test_the_factory_of_the_demo_makes_its_model(away, tmp_path):
    code = (
        "import sys; from gdpo_nemo.utils.source import find_file; "
        "sys.path.insert(0, str(find_file('examples/make_tiny_model.py').parent)); import make_tiny_model; "
        "make_tiny_model.make_random_model('model', 0)"
    )
    away("python", "-W", "ignore", "-c", code)
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert "# model      model (" in away("gdpo-nemo", "train", "--dry-run", "policy.model_name=model")


def test_a_new_environment_passes_its_test_and_its_config_is_found(away):
    away("gdpo-nemo", "env", "new", "largest")
    assert "3 passed" in away("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "largest")
    place = "env.largest.plugin=largest/gdpo_nemo_largest.py:Largest"
    assert "largest" in away("gdpo-nemo", "train", "--config", "largest/largest.yaml", "--dry-run", place)


def test_commands_on_a_run_and_a_recipe_need_no_checkout(away, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    row = {"step": 1, "loss": 0.1, "grad_norm": 0.5, "parity/mean_abs": 0.0, "policy/entropy": 0.5}
    row |= {"policy/clip_fraction": 0.0, "rollout/env_failed": 0.0, "reward/a/mean": 0.5, "reward/a/dead_groups": 0.0}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert "grad_norm" in away("gdpo-nemo", "health", "run")
    away("gdpo-nemo", "report", "run")
    assert (run / "report.html").is_file()
    assert away("gdpo-nemo", "explain", "gdpo.estimator").startswith("gdpo.estimator")
    recipe = REPOSITORY / "tests" / "tools" / "nemo_rl" / "gdpo.yaml"
    assert "estimator: gdpo" in away("gdpo-nemo", "config", "from-nemo-rl", str(recipe))
