"""A step on a pretrained model, from its fetch to its export, held against transformers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gdpo_nemo.commands.cli import main
from gdpo_nemo.observe.samples import read_rollouts, rollout_path

pytestmark = [pytest.mark.slow, pytest.mark.real_model]


@pytest.fixture(scope="module")
def one_step(smollm2, tmp_path_factory) -> Path:
    """The folder of a run of one step of ``configs/gdpo_smollm2_cpu.yaml`` on a quarter of its batch."""
    run = tmp_path_factory.mktemp("real") / "run"
    overrides = (
        f"policy.model_name={smollm2}",
        f"run.dir={run}",
        "gdpo.max_num_steps=1",
        "gdpo.num_prompts_per_step=1",
        "gdpo.val_period=0",
        "gdpo.val_at_start=false",
        "checkpointing.metric_name=null",
        "checkpointing.enabled=false",  # of the model and its optimizer, 1.6 GB
    )
    assert main(["train", "--config", "configs/gdpo_smollm2_cpu.yaml", *overrides]) == 0
    return run


def logprobs_of(model, sample) -> torch.Tensor:
    """Log-probs of the sample's completion, [tokens], by a plain forward pass."""
    prompt, completion = list(sample["prompt_ids"]), list(sample["completion_ids"])
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(completion)), torch.tensor(completion)]


def metrics(run: Path) -> dict:
    """The metrics of the run's only step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if "loss" in row]
    return row


def test_engine_and_trainer_agree_with_transformers(one_step, smollm2):
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    samples = read_rollouts(rollout_path(one_step, 1))
    assert len(samples) == 8
    for sample in samples[::3]:
        engine = torch.tensor(sample["logprobs"])
        torch.testing.assert_close(engine, logprobs_of(model, sample), atol=1e-3, rtol=0)
    assert metrics(one_step)["parity/max_abs"] < 1e-3  # between trainer and engine


def test_the_real_tokenizer_and_chat_template_make_the_prompts(one_step, smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for sample in read_rollouts(rollout_path(one_step, 1)):
        text = tokenizer.decode(sample["prompt_ids"])
        assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
        assert text.endswith("Answer with just the number.<|im_end|>\n<|im_start|>assistant\n")
        assert set(sample["rewards"]) == {"correct", "only", "ends", "brief"}


def test_the_step_changes_the_exported_model_and_little_of_it(one_step, smollm2):
    assert metrics(one_step)["grad_norm"] > 0
    before = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).state_dict()
    after = AutoModelForCausalLM.from_pretrained(one_step / "model", dtype=torch.float32).state_dict()
    assert before.keys() == after.keys()
    # Adam's first step moves every weight that has a gradient by the learning rate, 1e-5.
    moved = {name: float((after[name] - before[name]).abs().max()) for name in before}
    assert min(moved.values()) > 0 and max(moved.values()) < 2e-5
