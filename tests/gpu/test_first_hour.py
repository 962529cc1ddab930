"""The driver of the first hour, without a GPU: options, time limits, what it writes, and its steps on tiny shapes."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def _module(name: str):
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", HERE / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their module
    spec.loader.exec_module(module)
    return module


first_hour = _module("first_hour")


def step(code: str, limit_s: float = 60.0, name: str = "one"):
    return first_hour.Step(name, limit_s, ("-c", code), "a step of a test")


FINDING = 'import json, os; f = open(os.environ["FINDINGS"], "a"); print(json.dumps({row}), file=f, flush=True);'


def finding(**row) -> str:
    return FINDING.format(row=row)


@pytest.mark.slow
@pytest.mark.parametrize("ends, status", [("time.sleep(600)", "timeout"), ("sys.exit(3)", "failed")])
def test_step_that_hangs_or_fails_leaves_no_process_and_keeps_its_results(tmp_path, monkeypatch, ends, status):
    """Its grandchild is in a session of its own, as the processes of a run are, and deaf to SIGTERM."""
    monkeypatch.setattr(first_hour, "_END_S", 1.0)
    pids, folder = tmp_path / "pids", tmp_path / "folder"
    deaf = "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    note = f"print(os.getpid(), file=open({str(pids)!r}, 'a', 1));"
    grandchild = f"{deaf} {note} print('up', flush=True); time.sleep(600)"
    child = (
        f"{deaf} {note} import subprocess; p = subprocess.Popen([sys.executable, '-c', {grandchild!r}], "
        "start_new_session=True, stdout=subprocess.PIPE); p.stdout.readline()"
    )
    code = finding(name="before", value=1) + (
        f"{deaf} import tempfile; print(tempfile.mkdtemp(), file=open({str(folder)!r}, 'w', 1));"
        f"import subprocess; subprocess.run([sys.executable, '-c', {child!r}]);"
        f"print('the last word', flush=True); {ends}"
    )
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    class Spoken(subprocess.Popen):
        def wait(self, timeout=None):
            """The time limit begins with the last word, however long the processes take to start."""
            while "the last word" not in (tmp_path / "one.log").read_text():
                time.sleep(0.05)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Spoken)
    outcome = first_hour.run_step(step(code, limit_s=0.5 if status == "timeout" else 240.0), tmp_path)
    assert outcome.status == status
    assert [row["name"] for row in outcome.findings] == ["before"] and outcome.error == "the last word"
    assert len(pids.read_text().split()) == 2
    assert not any(psutil.pid_exists(int(pid)) for pid in pids.read_text().split())
    assert not Path(folder.read_text().strip()).exists()
    assert other.poll() is None, "a process that is not the step's"
    other.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    "code, status, error",
    [
        (finding(name="a", value=1, limit=2, passed=True), "ok", ""),
        (finding(name="a", value=3, limit=2, passed=False), "exceeded", ""),
        (finding(name="skipped", value="needs 2 GPUs"), "skipped", "needs 2 GPUs"),
        ("raise ValueError('no such kernel')", "failed", "ValueError: no such kernel"),
        ("import os; os.kill(os.getpid(), 11)", "failed", ""),
    ],
)
def test_a_step_is_ok_only_if_it_ends_and_nothing_exceeds_its_limit(tmp_path, code, status, error):
    outcome = first_hour.run_step(step(code), tmp_path)
    assert (outcome.status, outcome.error) == (status, error)


@pytest.mark.slow
def test_a_finding_that_was_cut_off_is_left_out_and_those_of_an_earlier_start_are_gone(tmp_path):
    (tmp_path / "one.jsonl").write_text('{"name": "old", "value": 1}\n')
    code = finding(name="whole", value=1) + 'f.write(\'{"name": "half", "va\')'
    assert [row["name"] for row in first_hour.run_step(step(code), tmp_path).findings] == ["whole"]


@pytest.mark.slow
def test_json_and_markdown_are_complete_after_every_step_and_list_failures(tmp_path, monkeypatch, capsys):
    seen = []
    reading = f"import pathlib; print(pathlib.Path({str(tmp_path / 'first_hour.md')!r}).read_text())"
    monkeypatch.setattr(
        first_hour,
        "steps",
        lambda cpu, model: [
            step(finding(name="a | b", value=0.123456, unit="s", limit=0.1, passed=False, key=True), name="first"),
            step(reading + "; raise SystemExit('it | broke')", name="second"),
        ],
    )
    monkeypatch.setattr(first_hour, "machine", lambda: seen.append(1) or {"device": "none"})
    assert first_hour.main(["--out", str(tmp_path)]) == 1 and seen == [1]
    whole = json.loads((tmp_path / "first_hour.json").read_text())
    assert [row["status"] for row in whole["steps"]] == ["exceeded", "failed"]
    text = (tmp_path / "first_hour.md").read_text()
    assert "| a \\| b | 0.1235 | s | 0.1 | **exceeded** |" in text and "failed: it \\| broke" in text
    assert "| first |" in (tmp_path / "second.log").read_text(), "written before the second step began"
    assert all(line.replace("\\|", "").count("|") in (0, 6) for line in text.splitlines())
    out = capsys.readouterr().out
    assert "| a \\| b 0.1235 s |" in text and all(line in out for line in text.splitlines() if "a step of a" in line)
    assert str(tmp_path / "first_hour.md") in out


@pytest.mark.parametrize("arguments", [["--only", "nothing"], ["--skip", "basics", "speed"], ["--bogus"]])
def test_a_wrong_option_is_refused_with_the_steps_there_are(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        first_hour.main(arguments)
    err = capsys.readouterr().err
    assert end.value.code == 2 and ("there are basics, " in err or "unrecognized" in err)


def test_steps_take_25_minutes_on_one_gpu_and_an_hour_with_all_of_them(capsys):
    """And each is a measurement that exists, in the same order without a GPU."""
    known = [step for step in first_hour.steps(False) if not step.several_gpus]
    assert sum(step.limit_s for step in known if not step.extra) <= 25 * 60
    assert sum(step.limit_s for step in known) <= 3600
    assert first_hour.main(["--list", "--all"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [step.name for step in first_hour.steps(False)] == [step.name for step in first_hour.steps(True)]
    assert first_hour.main(["--list"]) == 0
    usual = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert usual == [step.name for step in first_hour.steps(False) if not step.extra] and "eight" in usual
    source = (HERE / "measure.py").read_text()
    for found in first_hour.steps(False):
        if found.command[0].endswith("measure.py"):
            assert f'"{found.command[1]}": ' in source


def test_gpu_tests_step_names_every_marked_file_and_lists_its_requirements(capsys):
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()}
    assert {ROOT / name for name in first_hour.GPU_TESTS} == marked - {Path(__file__).resolve()}
    (step,) = (step for step in first_hour.steps(False) if step.name == "gpu-tests")
    assert set(first_hour.GPU_TESTS) < set(step.command) and "tests" not in step.command
    assert first_hour.main(["--list", "--only", "gpu-tests"]) == 0
    assert "needs pytest, pytest-xdist, hypothesis, filelock" in capsys.readouterr().out


def test_run_folders_remain_in_the_output_folder_if_a_step_fails(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    standing = _module("standing")
    monkeypatch.setenv("FINDINGS", str(tmp_path / "colocated.jsonl"))
    with pytest.raises(SystemExit), standing.kept_on_failure() as folder:
        (folder / "killed.log").write_text("the error")
        raise SystemExit("the run ended with status 1")
    assert (tmp_path / "colocated" / "killed.log").read_text() == "the error"
    with standing.kept_on_failure() as folder:
        assert list(folder.iterdir()) == []
    assert list(tmp_path.iterdir()) == []
    assert "with kept_on_failure() as folder" in inspect.getsource(_module("runs").colocated)


@pytest.mark.slow
def test_driver_needs_only_the_standard_library():
    """-S: without site-packages; the script finds its folder wherever it is called from."""
    done = subprocess.run(
        [sys.executable, "-S", str(HERE / "first_hour.py"), "--list"], cwd="/", capture_output=True, text=True
    )
    assert done.returncode == 0 and "basics" in done.stdout, done.stderr
    environment = {**os.environ, "PYTHON": sys.executable}
    script = ["bash", str(HERE / "first_hour.sh"), "--list", "--only", "noise"]
    done = subprocess.run(script, cwd="/", env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split()[0] == "noise"


BLOCKED = """
import os, runpy, sys
from importlib.machinery import PathFinder
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        absent = name.split(".")[0] in ("ray", "vllm", "datasets", "pydantic", "wandb", "pytest")
        return None if absent else PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
def measure(name):
    os.environ["FINDINGS"] = "FOLDER/" + name + ".jsonl"
    sys.argv = ["measure.py", name, "--cpu", "--rounds", "1"]
    runpy.run_path(MEASURE, run_name="__main__")
"""
ALONE = 'measure("weights")\n'
FORKED = """
os.environ["CUDA_VISIBLE_DEVICES"] = ""
from gdpo_nemo.megatron import runtime
runtime.prepare()
import gdpo_nemo.megatron.policy
for name in NAMES:
    child = os.fork()
    if not child:
        measure(name)
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit("failed: " + name)
"""
"""Each measurement in a fork of a process that has imported Megatron, which takes longer than most of them."""


def _measured(folder: Path, rest: str) -> Path:
    code = BLOCKED.replace("FOLDER", str(folder)).replace("MEASURE", repr(str(HERE / "measure.py"))) + rest
    (folder / "blocked.py").write_text(f"if __name__ == '__main__':\n{_indented(code)}")
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", str(folder / "blocked.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """The folder of what the measurements found that need no second process."""
    names = repr(["speed", "policy", "logprobs", "noise"])
    return _measured(tmp_path_factory.mktemp("measured"), FORKED.replace("NAMES", names))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["speed", "policy", "weights", "logprobs", "noise"])
def test_a_measurement_runs_on_a_cpu_without_ray_and_vllm_and_meets_its_limits(name, tmp_path, request):
    """basics is two processes of ``update``, which the others do the work of."""
    folder = _measured(tmp_path, ALONE) if name == "weights" else request.getfixturevalue("measured")
    rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    assert rows and [row for row in rows if row.get("passed") is False] == []


def _indented(code: str) -> str:
    return "".join(f"    {line}\n" for line in code.splitlines())


@pytest.mark.gpu
@pytest.mark.skipif(not list(Path("/dev").glob("nvidia[0-9]*")), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["basics", "policy", "weights", "logprobs"])
def test_a_measurement_meets_its_limits_on_this_gpu(name, tmp_path):
    known = {step.name: step for step in first_hour.steps(False)}
    outcome = first_hour.run_step(known[name], tmp_path)
    assert outcome.status == "ok", (outcome.error, [row for row in outcome.findings if row.get("passed") is False])
