"""Distributed checkpoints that Megatron-core's GPTModel writes go in, are trained, and come back to it."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import dist_cases
import peft
import pytest
import tiny_models
import torch
from transformers import AutoModelForCausalLM

from gdpo_nemo.commands import cli
from gdpo_nemo.models.hf_folder import differences

pytestmark = pytest.mark.slow

MODELS = ["qwen2-tied", "qwen3", "qwen3-moe", "qwen2-moe"]


def hf_logits(folder) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(dist_cases.tokens()).logits


@pytest.fixture(scope="module")
def made(on_ranks, model_folder, tmp_path_factory):
    """``made(model)``: a checkpoint by Megatron-core, its logits, and the Hugging Face folder that it gives."""
    done = {}

    def make(name):
        if name not in done:
            folder = tmp_path_factory.mktemp("gpt")
            (logits,) = on_ranks("TP1", dist_cases.save_gpt, model_folder(name), folder / "mcore")
            on_ranks("TP1", dist_cases.to_huggingface, folder / "mcore", folder / "hf", model_folder(name))
            done[name] = folder, logits
        return done[name]

    return make


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_of_megatron_core_gives_its_logits_in_transformers(name, made):
    folder, logits = made(name)
    torch.testing.assert_close(hf_logits(folder / "hf"), logits[..., : tiny_models.VOCABULARY], atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", ["TP2", "PP2"])
def test_checkpoints_of_every_layout_are_read(layout, on_ranks, model_folder, tmp_path):
    model = model_folder("qwen3")
    on_ranks(layout, dist_cases.save_gpt, model, tmp_path / "mcore")
    on_ranks("TP1", dist_cases.to_huggingface, tmp_path / "mcore", tmp_path / "hf", model)
    (again,) = on_ranks("TP1", dist_cases.load_gpt, model, tmp_path / "mcore" / "iter_0000007")
    torch.testing.assert_close(hf_logits(tmp_path / "hf"), again[..., : tiny_models.VOCABULARY], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name, layout", [*((name, "TP1") for name in MODELS), ("qwen3", "TP2"), ("qwen3", "PP2")])
def test_a_checkpoint_of_megatron_core_is_trained_and_comes_back(name, layout, made, on_ranks, tmp_path):
    source = made(name)[0] / "hf"
    arguments = (source, tiny_models.make_batch(), tmp_path / "hf", tmp_path / "mcore")
    steps = on_ranks(layout, dist_cases.train_and_export, *arguments)[0]
    assert len(steps) == 2
    trained = hf_logits(tmp_path / "hf")
    assert (trained - hf_logits(source)).abs().max() > 1e-4
    (again,) = on_ranks("TP1", dist_cases.load_gpt, source, tmp_path / "mcore" / "release")
    torch.testing.assert_close(again[..., : tiny_models.VOCABULARY], trained, atol=1e-5, rtol=0)
    on_ranks("TP1", dist_cases.to_huggingface, tmp_path / "mcore", tmp_path / "again", tmp_path / "mcore" / "hf")
    assert differences(tmp_path / "again", tmp_path / "hf") == []


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(hidden_size=64), "has hidden_size 32, but its config.json has 64"),
        (dict(num_hidden_layers=6), "has num_hidden_layers 4, "),
        (dict(vocab_size=200), "has a vocabulary of 99 tokens, but its config.json has 200"),
        (None, "which has no config.json; specify a Hugging Face folder of the same model (policy.tokenizer_name)"),
    ],
)
def test_dry_run_reports_mismatches_and_converts_nothing(changes, said, made, tmp_path, capsys):
    checkpoint = made("qwen3")[0] / "mcore"
    names = [f"policy.model_name={checkpoint}", "policy.model_factory=null", f"run.dir={tmp_path}/results/run"]
    if changes is not None:
        other = tiny_models.write_model("qwen3", tmp_path / "other", **changes)
        names.append(f"policy.tokenizer_name={other}")
    capsys.readouterr()
    assert cli.main(["train", "--dry-run", *names, "policy.max_total_sequence_length=64"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: policy.model_name: ") and said in err and err.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_weights_of_nemo_2_give_their_logits_in_transformers(on_ranks, model_folder, tmp_path):
    model = model_folder("qwen3")
    (logits,) = on_ranks("TP1", dist_cases.save_nemo_2, model, tmp_path / "nemo")
    on_ranks("TP1", dist_cases.to_huggingface, tmp_path / "nemo", tmp_path / "hf", model)
    torch.testing.assert_close(hf_logits(tmp_path / "hf"), logits[..., : tiny_models.VOCABULARY], atol=1e-5, rtol=0)


@pytest.mark.parametrize("what", ["common.pt", "a tensor", "a path"])
def test_nothing_in_a_checkpoint_is_run(what, made, convert, model_folder, tmp_path):
    """Only tensors are read: a pickle beside them is not opened, one in their place and a path outside are refused."""
    shutil.copytree(made("qwen3")[0] / "mcore", tmp_path / "mcore")
    inside = tmp_path / "mcore" / "iter_0000007"
    poison = pickle.dumps(Runs(tmp_path / "ran"))
    if what == "common.pt":
        (inside / "common.pt").write_bytes(poison)
    elif what == "a tensor":
        (file,) = inside.glob("*.distcp")
        file.write_bytes(poison.ljust(file.stat().st_size, b"\0"))
    else:
        index = (inside / ".metadata").read_bytes()
        (inside / ".metadata").write_bytes(index.replace(b"__0_0.distcp", b"../../x/pass"))
    status, said = convert("hf", tmp_path / "mcore", tmp_path / "hf", "--model", model_folder("qwen3"))
    if what == "common.pt":
        assert (status, said) == (0, "")
    else:
        assert status == 2 and said.count("\n") == 1 and not (tmp_path / "hf").exists(), said
        assert {"a tensor": "a checkpoint entry is not a tensor", "a path": "lists ../../x/pass"}[what] in said
    assert not (tmp_path / "ran").exists()


class Runs:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.fixture
def convert(on_ranks):
    """``convert(*arguments)``: exit status and stderr of ``gdpo-nemo convert --to`` in a process that has Megatron."""
    return lambda *arguments: on_ranks("TP1", dist_cases.convert, *map(str, arguments))[0]


def convert_here(*arguments: object) -> int:
    """Exit status of ``gdpo-nemo convert --to`` in this process: its ranks are processes of a Ray session."""
    return cli.main(["convert", "--to", *map(str, arguments)])


def test_the_command_writes_a_checkpoint_of_megatron_core_and_reads_it_again(convert, model_folder, tmp_path, capsys):
    model = model_folder("qwen3")
    assert convert_here("megatron", model, tmp_path / "mcore", "--layout", "tensor=2") == 0, capsys.readouterr().err
    assert convert("hf", tmp_path / "mcore", tmp_path / "back") == (0, "")
    assert differences(tmp_path / "back", model) == []
    assert not list(tmp_path.glob(".*"))


def test_a_checkpoint_of_a_lora_run_becomes_an_adapter_of_peft(on_ranks, convert, model_folder, tmp_path, capsys):
    model = model_folder("qwen3")
    on_ranks("TP1", dist_cases.lora_run, model, tiny_models.make_batch(), tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step_2"
    assert convert_here("peft", checkpoint, tmp_path / "adapter") == 0, capsys.readouterr().err
    assert convert("hf", tmp_path / "adapter", tmp_path / "merged") == (0, "")
    assert convert_here("hf", checkpoint, tmp_path / "exported") == 0, capsys.readouterr().err
    assert differences(tmp_path / "merged", tmp_path / "exported") == []
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(dist_cases.tokens()).logits
    torch.testing.assert_close(adapted, hf_logits(tmp_path / "merged"), atol=1e-5, rtol=0)
    status, said = convert("megatron", checkpoint, tmp_path / "mcore")
    assert status == 2 and "contains adapters; use --to hf first" in said
