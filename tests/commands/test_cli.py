"""The command line as a user meets it: exit statuses, one line on stderr, nothing heavy imported."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from gdpo_nemo import train
from gdpo_nemo.algorithms.estimators import ESTIMATORS
from gdpo_nemo.commands import cli
from gdpo_nemo.training import model_factory
from gdpo_nemo.utils.errors import ConfigError, RunError

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "vllm", "megatron", "ray", "transformers", "matplotlib", "tensorboard")


def launch(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / "run_gdpo.py"), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, named",
    [
        (["gdpo.num_generation_per_prompt=8"], ["gdpo.num_generation_per_prompt", "gdpo.num_generations_per_prompt"]),
        (["gdpo.max_num_steps=many"], ["gdpo.max_num_steps", "integer", "many"]),
        (["--config", "configs/gdpo_tiny_cpu.yml"], ["configs/gdpo_tiny_cpu.yml", "not found", "gdpo_tiny_cpu.yaml"]),
        (["--dryrun"], ["--dryrun"]),
    ],
)
def test_wrong_input_exits_2_with_one_line_on_stderr(arguments, named):
    result = launch(*arguments)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr
    assert all(text in result.stderr for text in named)


@pytest.mark.slow
def test_dry_run_and_explain_import_nothing_heavy_and_answer_in_seconds(minimal):
    program = (
        "import sys; from gdpo_nemo.commands.cli import main\n"
        f"assert main(['train', '--dry-run', '--config', {str(minimal)!r}, 'run.name=x']) == 0\n"
        "assert main(['explain', 'gdpo.estimator']) == 0\n"
        f"sys.exit(' '.join(m for m in {HEAVY!r} if m in sys.modules) or 0)\n"
    )
    started = _childrens_processor_s()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert _childrens_processor_s() - started < 8


def _childrens_processor_s() -> float:
    """Of the processes that have ended; a machine with other work does not change it much."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_overrides_may_precede_and_follow_options(minimal, capsys):
    arguments = ["run.name=a", "--config", str(minimal), "gdpo.max_num_steps=5", "--dry-run", "run.name=b"]
    assert cli.main(["train", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "name: b" in shown and "max_num_steps: 5" in shown and "dir: results/b" in shown


def test_the_status_of_a_run_is_the_status_of_the_program(minimal, monkeypatch, capsys):
    outcomes = iter([0, 143, RunError("engine 0 died\nat step 3"), KeyboardInterrupt()])

    class Trainer:
        @staticmethod
        def run(config, begin=None):
            outcome = next(outcomes)
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

    monkeypatch.setitem(sys.modules, "gdpo_nemo.training.trainer", Trainer)
    assert [cli.main(["train", "--config", str(minimal)]) for _ in range(4)] == [0, 143, 1, 130]
    assert capsys.readouterr().err == "error: engine 0 died at step 3\n"


@pytest.mark.slow
def test_explain_knows_every_key_of_the_schema_and_the_nearest_to_any_other(capsys):
    from gdpo_nemo.config.load import all_keys

    for key in ["", *all_keys()]:
        assert cli.main(["explain", key]) == 0
        last = capsys.readouterr().out.rstrip().splitlines()[-1].split()[0]
        assert last not in ("default", "accepts"), f"{key} has no docstring"
    assert cli.main(["explain", "gdpo.options"]) == 0
    described = capsys.readouterr().out
    assert all(name in described for entry in ESTIMATORS.values() for name in entry.options)
    assert cli.main(["explain", "gdpo.rewards.format"]) == 0
    assert capsys.readouterr().out.startswith("gdpo.rewards\n")
    assert cli.main(["explain", "gdpo.estimater"]) == 2
    assert "gdpo.estimator" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("module", ["gdpo_nemo", "gdpo_nemo.commands.cli"])
def test_the_package_and_its_command_line_run_as_modules(module):
    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600
        )

    wrong = run("explain", "gdpo.estimater")
    assert wrong.returncode == 2 and "gdpo.estimator" in wrong.stderr
    assert run("explain", "gdpo.estimator").stdout.startswith("gdpo.estimator")


def test_the_versions_are_those_of_the_installation(capsys):
    from importlib.metadata import version

    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    first, second = capsys.readouterr().out.splitlines()
    assert end.value.code == 0 and first == f"gdpo-nemo {version('gdpo-nemo')}"
    assert f"megatron-core {version('megatron-core')}" in second and "ray" in second


@pytest.mark.slow
def test_a_model_factory_does_not_warn_of_a_cuda_toolkit_on_a_machine_without_a_gpu(tmp_path):
    """Where there is a GPU that torch does not see, the warning stays."""
    factory = tmp_path / "factory.py"
    factory.write_text(
        "def make(folder, seed):\n    import torch.utils.cpp_extension\n    print('made', folder, seed)\n"
    )
    environment = {**os.environ, "CUDA_HOME": "/usr", "CUDA_VISIBLE_DEVICES": ""}
    arguments = [str(factory), "make", "model", "3", str(tmp_path / "error")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", model_factory.__name__, *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout == "made model 3\n"
    gpus = any(Path("/dev").glob("nvidia[0-9]*"))
    assert ("No CUDA runtime" in done.stderr) == gpus


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("entry", ["command line", "library"])
def test_every_entry_hides_the_warning_of_a_cuda_toolkit_unless_there_is_a_gpu(entry, gpu, monkeypatch, capsys):
    logger = logging.getLogger("torch.utils.cpp_extension")
    monkeypatch.setattr(logger, "level", logging.WARNING)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self / "nvidia0"] if gpu else []))
    if entry == "library":
        with pytest.raises(ConfigError):
            train({"gdpo": 3})
    else:
        assert cli.main(["explain", "run.name"]) == 0
    assert logger.level == (logging.WARNING if gpu else logging.ERROR)
