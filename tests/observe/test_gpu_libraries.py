"""What a machine lacks for training on GPUs is named before a run is started, with nothing imported that needs one."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from gdpo_nemo.commands import cli
from gdpo_nemo.observe import installation

WHOLE = dict.fromkeys(("transformer-engine", "transformer-engine-torch", "transformer-engine-cu13"), "2.20.2")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """``machine(packages, *files)``: what is installed, and files in its only folder of packages."""

    def of(packages: dict[str, str], *files: str) -> Path:
        monkeypatch.setattr(installation, "version", packages.get)
        monkeypatch.setattr(installation, "_site_packages", lambda: [tmp_path])
        monkeypatch.setattr(installation, "_CUDA_HOME", str(tmp_path / "no_toolkit"))
        for name in ("CUDA_HOME", "CUDA_PATH", "CPATH", "CPLUS_INCLUDE_PATH", "LD_LIBRARY_PATH", "CXX"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        for name in files:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch(mode=0o755)
        return tmp_path

    return of


def test_transformer_engine_without_bindings_reports_the_missing_build_requirements(machine):
    machine({"transformer-engine": "2.20.2", "transformer-engine-cu13": "2.20.2", "torch": "2.13.0", "pip": "26"})
    found = installation.transformer_engine()
    assert found.usable is False
    for name in ("C++ compiler", "setuptools", "wheel", "cudnn.h (nvidia-cudnn-cu13)", "nccl.h", "crt/host_config.h"):
        assert name in found.text
    assert "package torch" not in found.text and "package pip" not in found.text
    headers = ("cu13/include/cuda_runtime.h", "cu13/include/crt/host_config.h", "cudnn/include/cudnn.h")
    build = dict.fromkeys(("torch", "pip", "setuptools", "wheel"), "1")
    machine(build, "bin/c++", *(f"nvidia/{name}" for name in (*headers, "nccl/include/nccl.h")))
    assert [what for what in installation.missing_for_build() if "Python.h" not in what] == []


@pytest.mark.parametrize(
    "packages, usable, text",
    [
        ({}, None, "not installed"),
        (WHOLE, True, "transformer-engine-torch 2.20.2"),
        (WHOLE | {"transformer-engine-torch": "2.19.0"}, False, "versions differ"),
        ({k: v for k, v in WHOLE.items() if "cu13" not in k}, False, "without its kernels"),
    ],
)
def test_transformer_engine_is_whole_absent_or_named(machine, packages, usable, text):
    machine(packages)
    found = installation.transformer_engine()
    assert found.usable is usable and text in found.text


FAILING = {
    "raises": ("raise AttributeError('no attribute cudaLibrary_t\\nhint')", "AttributeError: no attribute"),
    "ends": ("raise SystemExit(3)", "SystemExit: 3"),
    "crashes": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "the import was killed by SIGSEGV"),
    "leaves": ("import os; os._exit(4)", "the import exited with status 4"),
}  # fmt: skip


@pytest.mark.slow
def test_imports_report_one_line_for_each_module_that_fails(monkeypatch, tmp_path):
    for name, (code, _) in FAILING.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = installation.import_errors([*FAILING, "json"])
    assert {name: reason.startswith(FAILING[name][1]) for name, reason in found.items()} == dict.fromkeys(FAILING, True)
    assert all("\n" not in reason for reason in found.values())


@pytest.mark.slow
def test_import_is_killed_with_its_children_at_the_deadline(monkeypatch, tmp_path):
    os.mkfifo(tmp_path / "alive")
    alive = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "stuck.py").write_text(
        "import subprocess, sys, time\n"
        f"pipe = open({str(tmp_path / 'alive')!r}, 'wb', buffering=0)\n"
        "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(1000)'], pass_fds=[pipe.fileno()])\n"
        "pipe.write(b'1')\n"
        "time.sleep(1000)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(installation, "_IMPORT_S", 0.0)
    wait = subprocess.Popen.wait

    def wait_after_start(child, timeout=None):
        if timeout is not None:
            assert timeout == 0.0
            assert select.select([alive], [], [], 60)[0] and os.read(alive, 1) == b"1"
        return wait(child, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_after_start)
    assert installation.import_errors(["stuck"]) == {"stuck": "the import did not finish within 0 s"}
    assert select.select([alive], [], [], 60)[0] and os.read(alive, 1) == b""  # the end: both processes are dead
    os.close(alive)


def test_flashinfer_needs_nvcc_and_ninja_for_its_kernels(machine, monkeypatch):
    folder = machine({"flashinfer-python": "0.7.0"}, "nvidia/cu13/bin/nvcc")
    found = installation.flashinfer()
    assert found.usable is None and "did not find nvcc and ninja" in found.text
    assert found.text.endswith(f"CUDA_HOME={folder / 'nvidia/cu13'} contains nvcc")
    monkeypatch.setenv("CUDA_HOME", str(folder / "nvidia" / "cu13"))
    assert "did not find ninja; " in installation.flashinfer().text
    machine({"flashinfer-python": "0.7.0"}, "bin/nvcc", "bin/ninja")
    assert installation.flashinfer().usable is True
    machine({})
    assert installation.flashinfer().usable is None


def test_another_nccl_than_the_installed_one_is_found(machine, monkeypatch):
    folder = machine({"nvidia-nccl-cu13": "2.29.7"}, "old/libnccl.so.2")
    assert installation.nccl("2.29.7").usable is True and installation.nccl(None).usable is None
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder / "old"))
    found = installation.nccl("2.19.3")
    assert found.usable is False and f"2.19.3, from LD_LIBRARY_PATH {folder / 'old'}, but 2.29.7" in found.text


def test_doctor_prints_a_line_for_each_module_and_fails_if_one_is_broken(machine, monkeypatch, tmp_path, capsys):
    machine({"transformer-engine": "2.20.2", **dict.fromkeys(("torch", "megatron-core", "ray", "vllm"), "1")})
    gpu = installation.Check("GPUs", True, "1 x H100")
    monkeypatch.setattr(installation, "_gpus", lambda: (gpu, "2.29.7"))
    monkeypatch.setattr(installation, "import_errors", lambda modules: {"megatron.core": "OSError: libcuda.so.1"})
    assert cli.main(["doctor", "--environment", str(tmp_path)]) == 1
    lines = {line[7:25].strip(): line for line in capsys.readouterr().out.splitlines()}
    assert lines["TransformerEngine"].startswith("FAILED") and lines["NCCL"].startswith("ok")
    assert lines["FlashInfer"].startswith("-")
    assert lines["imports"] == "FAILED imports           import megatron.core: OSError: libcuda.so.1"


def test_modules_that_require_the_driver_are_imported_only_on_a_gpu(machine, monkeypatch):
    machine(WHOLE | {"vllm": "0.32.0", "flashinfer-python": "0.7.0", "megatron-core": "0.19.2"})
    asked = []
    monkeypatch.setattr(installation, "import_errors", lambda modules: asked.append(modules) or {})
    (without,), (with_gpu,) = installation.check_imports(on_gpu=False), installation.check_imports(on_gpu=True)
    assert asked[0] == ["megatron.core", "flashinfer"] and without.passed
    assert asked[1] == [*asked[0], "vllm.v1.worker.gpu_worker", "transformer_engine.pytorch"]
    assert with_gpu.text.endswith("flashinfer, vllm.v1.worker.gpu_worker, transformer_engine.pytorch")


@pytest.mark.slow
def test_nothing_but_the_standard_library_is_imported():
    code = "import sys, gdpo_nemo.observe.installation; print('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout == "False\n"
