"""From the command to the first step: what is shown, in which order, and what is not imported before it is wanted."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gdpo_nemo.config.schema import Config
from gdpo_nemo.data import tokenizer as tokenizer_module
from gdpo_nemo.data.tokenizer import load_tokenizer
from gdpo_nemo.observe.display import NORMAL, QUIET, shown
from gdpo_nemo.training import inputs

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=64, intermediate_size=32, vocab_size=257,
    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, hidden_act="silu",
    rms_norm_eps=1e-6, tie_word_embeddings=True,
)  # fmt: skip


def model_folder(folder: Path, model_type: str = "qwen2", tokenizer_class: str = "Qwen2Tokenizer", **settings) -> Path:
    """A model of bytes: what a run reads of one before it starts a process."""
    folder.mkdir()
    save_file({"model.embed_tokens.weight": np.zeros((257, 64), np.float32)}, folder / "model.safetensors")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)} | {"<eos>": len(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": tokenizer_class, "eos_token": "<eos>", "pad_token": "<eos>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({**MODEL, "model_type": model_type}))
    return folder


def refused_run(folder: Path, *options: str) -> list[str]:
    """The command of a run whose prompts turn out to be too long, which is the last thing found before processes."""
    model = model_folder(folder / "model")
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "x" * 60, "answer": "1"}) + "\n")
    config = {
        "run": {"dir": str(folder / "run")},
        "policy": {"model_name": str(model), "model_factory": None, "max_total_sequence_length": 40},
        "data": {"train": {"path": str(folder / "rows.jsonl"), "environment": "digit_sort"}, "validation": None},
    }
    demo = yaml.safe_load((REPOSITORY / "configs" / "gdpo_tiny_cpu.yaml").read_text())
    config["policy"] = {**demo["policy"], **config["policy"], "generation": {"engines": 1, "max_new_tokens": 8}}
    config["gdpo"] = {**demo["gdpo"], "val_period": 0, "val_at_start": False, "val_prompts": None}
    config["env"] = demo["env"]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return [sys.executable, "-m", "gdpo_nemo", "train", "--config", str(folder / "config.yaml"), *options]


def in_terminal(command: list[str], **environment: str) -> tuple[int, str]:
    """Status and everything that a person's terminal gets."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, cwd=REPOSITORY, env={**os.environ, **environment}
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            part = os.read(master, 1 << 16)
        except OSError:  # every writer has gone
            break
        if not part:
            break
        shown += part
    os.close(master)
    return process.wait(), shown.decode(errors="replace").replace("\r\n", "\n")


@pytest.mark.slow
def test_a_terminal_names_the_phases_of_a_start_in_order_and_ends_with_the_error(tmp_path):
    status, shown = in_terminal(refused_run(tmp_path), TERM="xterm")
    lines = shown.split("\r\x1b[K")
    assert status == 2
    assert re.fullmatch(r"error: data.train: all 1 prompts are longer .*\n", lines[-1])
    names = [line.split("  ")[1] for line in lines[:-1] if line]
    order = ["config", "imports", "environments", "model", "tokenizer", "data"]
    seen = [name for name in dict.fromkeys(names) if name]
    assert seen == [name for name in order if name in seen] and "tokenizer" in seen


@pytest.mark.slow
def test_without_a_terminal_or_quietly_the_error_is_all_there_is(tmp_path):
    command = refused_run(tmp_path)
    done = subprocess.run([*command, "--quiet"], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    status, shown = in_terminal([*command, "--quiet"], TERM="xterm")
    assert status == 2 and shown == done.stderr


@pytest.mark.slow
def test_verbose_prints_the_duration_of_every_phase(tmp_path):
    done = subprocess.run([*refused_run(tmp_path), "-v"], capture_output=True, text=True, cwd=REPOSITORY)
    said = re.findall(r"^(\w+): \d+\.\d s$", done.stdout, re.MULTILINE)
    assert list(dict.fromkeys(said)) == ["config", "imports", "environments", "model", "tokenizer", "data"]


@pytest.mark.slow
def test_reading_of_config_and_data_imports_no_torch(tmp_path):
    model_folder(tmp_path / "model")
    code = (
        "import sys\nfrom gdpo_nemo.commands import cli\nfrom gdpo_nemo.training import api, setup\n"
        "from gdpo_nemo.config.load import load_config\n"
        "from gdpo_nemo.config.model_checks import resolve\nfrom gdpo_nemo.training.inputs import read_inputs\n"
        "config = load_config('configs/gdpo_tiny_cpu.yaml', ['policy.model_name=' + sys.argv[1]])\n"
        "assert 'transformers' not in sys.modules\nfound = read_inputs(resolve(config), ('train', 'validation'))\n"
        "assert len(found.prompts)\nprint(sorted({'torch', 'vllm', 'megatron', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model")], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("model_type, name", tokenizer_module._CLASSES)
@pytest.mark.parametrize("suffix", ["", "Fast"])
def test_a_tokenizer_is_the_one_that_auto_tokenizer_chooses(model_type, name, suffix, tmp_path):
    from transformers import AutoTokenizer

    folder = model_folder(tmp_path / "model", model_type, name + suffix)
    found = load_tokenizer(Config().policy, folder)
    expected = AutoTokenizer.from_pretrained(folder)
    assert type(found) is type(expected) and found.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    assert found.special_tokens_map == expected.special_tokens_map and found.get_vocab() == expected.get_vocab()
    assert found.init_kwargs == expected.init_kwargs
    texts = ["12345=", " two  spaces\n", "ünï <eos>"]
    assert found(texts)["input_ids"] == expected(texts)["input_ids"]


@pytest.mark.parametrize(
    "model_type, settings",
    [("mistral", {}), ("qwen2", {"tokenizer_class": "PreTrainedTokenizerFast"}), ("qwen2", {"auto_map": {"a": "b.C"}})],
)
def test_every_other_tokenizer_is_left_to_auto_tokenizer(model_type, settings, tmp_path):
    folder = model_folder(tmp_path / "model", model_type, **settings)
    assert tokenizer_module._known_class(folder) is None
    (folder / "tokenizer.json").unlink()
    assert tokenizer_module._known_class(folder) is None


@pytest.mark.slow
def test_output_of_a_factory_is_above_the_phases_and_absent_with_quiet(tmp_path, capfd):
    factory = tmp_path / "factory.py"
    factory.write_text(
        "from pathlib import Path\ndef make(folder, seed):\n    print('warming up', seed)\n    Path(folder).mkdir()\n"
    )
    config = Config()
    config.run.seed = 7
    config.policy.model_factory = f"{factory}:make"
    for level, said in ((NORMAL, "{} does not exist; creating it with factory.py:make\nwarming up 7\n"), (QUIET, "")):
        config.policy.model_name = str(tmp_path / str(level))
        with shown(sys.stdout, level):
            inputs._make_model(config)
        assert Path(config.policy.model_name).is_dir()
        assert capfd.readouterr().out == said.format(config.policy.model_name)
