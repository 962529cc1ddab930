"""``gdpo-nemo parity`` and ``gdpo-nemo convert`` as a user calls them: real ranks in a Ray session of their own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gdpo_nemo.commands.cli import main

pytestmark = pytest.mark.slow


@pytest.fixture
def gdpo_nemo(capfd):
    """``gdpo_nemo(*arguments)``: exit status, stdout and stderr of the command line."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        status = main([str(argument) for argument in arguments])
        return status, *capfd.readouterr()

    return call


def test_a_model_comes_back_bit_for_bit_through_a_checkpoint_of_another_layout(gdpo_nemo, digit_model, tmp_path):
    status, out, err = gdpo_nemo("convert", "--to", "checkpoint", digit_model, tmp_path / "c", "--layout", "tensor=2")
    assert status == 0, (out, err)
    checkpoint = tmp_path / "c" / "step_0"
    assert out.strip() == str(checkpoint)
    back = ("convert", "--to", "hf", checkpoint, tmp_path / "hf")
    status, out, err = gdpo_nemo(*back, "--layout", "pipeline=2")
    assert status == 2 and "--model" in err
    status, out, err = gdpo_nemo(*back, "--model", digit_model)
    assert status == 0, (out, err)
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == (digit_model / "model.safetensors").read_bytes()
    assert "Weights of a checkpoint after 0 steps" in (tmp_path / "hf" / "README.md").read_text()
    status, out, err = gdpo_nemo(*back, "--model", digit_model)
    assert status == 2 and "is not empty" in err
    shard = max(checkpoint.glob("*.distcp"), key=lambda file: file.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    status, out, err = gdpo_nemo(*back[:-1], tmp_path / "damaged", "--model", digit_model)
    assert (status, out) == (1, "") and f"{checkpoint} is damaged ({shard.name} has changed)" in err
    assert not (tmp_path / "damaged").exists()


@pytest.fixture(scope="module")
def record(digit_model, tmp_path_factory) -> Path:
    """A rollouts file whose second sample's log-probs are those of other weights."""
    rng = np.random.default_rng(3)
    rows = [
        dict(prompt_ids=[1, 2, 3], completion_ids=rng.integers(0, 12, 20).tolist(), logprobs=[-9.0] * 20, advantage=a)
        for a in (0.5, -0.5)
    ]
    file = tmp_path_factory.mktemp("record") / "step_0001.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_parity_of_one_rank_a_layout_and_vllm_holds_and_catches_a_false_record(gdpo_nemo, digit_model, record):
    status, out, err = gdpo_nemo(
        "parity", "--model", digit_model, "--layout", "tensor=2,sequence", "--engine", "--record", record, "--json"
    )
    assert status == 1, (out, err)
    found = json.loads(out)
    assert found["tokens"] == 40 and not found["passed"]
    by_name = {c["name"]: c for c in found["comparisons"]}
    assert set(by_name) == {"layout", "alone, not packed", "vLLM", "recorded by the sampler"}
    recorded = by_name.pop("recorded by the sampler")
    assert recorded["max_abs"] > 1 and recorded["causes"][0].startswith("other weights")
    assert all(c["max_abs"] < 1e-5 and not c["causes"] for c in by_name.values())
    assert max(found["updates"].values()) < 1e-5


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--layout", "tensor=3"], "possible: 1, 2, 4"),
        (["--layout", "tensr=2"], "'tensr=2' is not one of"),
        (["--record", "nowhere.jsonl"], "nowhere.jsonl does not exist"),
    ],
)
def test_incomparable_models_are_refused_in_one_line(gdpo_nemo, digit_model, arguments, message):
    status, out, err = gdpo_nemo("parity", "--model", digit_model, *arguments)
    assert status == 2 and message in err and err.count("\n") == 1
