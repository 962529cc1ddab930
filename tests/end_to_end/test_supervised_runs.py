"""Supervised and preference training through the real program: they learn, resume exactly, and start no engine."""

from __future__ import annotations

import json
import signal

import pytest
import torch
from launch import Launch, rows, timeless
from transformers import AutoModelForCausalLM, AutoTokenizer

from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.examples import ExampleSource
from gdpo_nemo.data.records import Prompt

QUIET = ("logger.plot=false", "logger.tensorboard.enabled=false", "gdpo.num_prompts_per_step=16")
SFT = (*QUIET, "--config", "configs/sft_tiny_cpu.yaml")
STEPS = 9
STEPS_OF_SFT = 6
OF_PAIRS = (*QUIET, f"gdpo.max_num_steps={STEPS}", "gdpo.val_prompts=48", "--config", "configs/dpo_tiny_cpu.yaml")


def held_out(launch: Launch, key: str) -> dict[int, float]:
    return {row["step"]: row[f"validation/{key}"] for row in rows(launch.run_dir) if f"validation/{key}" in row}


def finished(launch: Launch) -> Launch:
    status, out, err = launch.finish()
    assert status == 0, (out, err)
    return launch


@pytest.fixture(scope="module")
def dpo(tmp_path_factory, digit_model):
    return finished(Launch(tmp_path_factory.mktemp("runs") / "dpo", digit_model, *OF_PAIRS))


def loop_of_transformers(model_folder) -> tuple[list[float], list[float]]:
    """Losses of the trained batches, and of the held-out rows before each and at the end: a plain loop with AdamW. Of
    our code it has the order of the rows alone."""
    config = load_config("configs/sft_tiny_cpu.yaml")
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)

    def source(split: str) -> ExampleSource:
        return ExampleSource(
            getattr(config.data, split), {}, tokenizer, split=split, seed=0, max_prompt_tokens=63, kind="sft"
        )

    files = [config.data.train.path, config.data.validation.path]
    answers = {row["prompt"]: row["answer"] for path in files for row in map(json.loads, open(path))}

    def loss_of(prompts: list[Prompt]) -> torch.Tensor:
        total, tokens = torch.zeros(()), 0
        for text in (prompt.text for prompt in prompts):
            asked, told = tokenizer.encode(text), [*tokenizer.encode(answers[text]), tokenizer.eos_token_id]
            logits = model(torch.tensor([asked + told])).logits[0, len(asked) - 1 : -1]
            total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(told), reduction="sum")
            tokens += len(told)
        return total / tokens

    train, held_out_rows = source("train"), source("validation").head(8)
    trained, validated = [], []
    for step in range(STEPS_OF_SFT + 1):
        with torch.no_grad():
            validated.append(float(loss_of(held_out_rows)))
        if step < STEPS_OF_SFT:
            loss = loss_of(train.batch(16 * step, 16))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            trained.append(float(loss.detach()))
    return trained, validated


def test_supervised_training_has_the_curves_of_a_loop_of_transformers(tmp_path, digit_model):
    launch = finished(Launch(tmp_path / "sft", digit_model, *SFT))
    losses = held_out(launch, "loss")
    assert list(losses) == [0, 3, 6] and losses[6] < 0.8 * losses[0]
    assert (launch.run_dir / "model" / "model.safetensors").stat().st_size and launch.left_behind() == []
    trained, validated = loop_of_transformers(digit_model)
    assert [row["loss"] for row in rows(launch.run_dir) if "loss" in row] == pytest.approx(trained, rel=1e-4)
    assert list(losses.values()) == pytest.approx(validated[::3], rel=1e-4)


def test_dpo_parts_held_out_pairs_from_log_two_on(dpo):
    losses = held_out(dpo, "loss")
    # Before the first update both models are one.
    assert losses[0] == pytest.approx(0.693147, abs=1e-5) and losses[STEPS] < 0.95 * losses[0]
    assert held_out(dpo, "margins")[0] == pytest.approx(0, abs=1e-5) and held_out(dpo, "margins")[STEPS] > 0.05
    trained = [row for row in rows(dpo.run_dir) if "rewards/margins" in row]
    assert trained[0]["rewards/margins"] == pytest.approx(0, abs=1e-5) and trained[-1]["rewards/margins"] > 0.05
    assert trained[-1]["rewards/accuracies"] > 0.6 and not any("time/sync" in row for row in trained)


def test_kto_raises_desirable_answers_above_undesirable_ones(tmp_path, digit_model):
    """KTO is the objective whose rows are not pairs; `tests/megatron/test_preference_updates.py` has the others."""
    launch = finished(Launch(tmp_path / "kto", digit_model, *OF_PAIRS, "algorithm.type=kto"))
    trained = [row for row in rows(launch.run_dir) if "rewards/chosen" in row and "rewards/rejected" in row]
    apart = {row["step"]: row["rewards/chosen"] - row["rewards/rejected"] for row in trained}
    assert apart[max(apart)] > apart[min(apart)] + 0.01
    losses = held_out(launch, "loss")
    assert losses[STEPS] < losses[0]


def test_dpo_resumes_bit_for_bit_after_sigterm(dpo, tmp_path, digit_model):
    first = Launch(tmp_path / "run", digit_model, *OF_PAIRS)
    first.wait_for_step(3)
    first.process.send_signal(signal.SIGTERM)
    status, out, err = first.finish()
    assert status == 128 + signal.SIGTERM, (out, err)
    finished(Launch(tmp_path / "run", digit_model, *OF_PAIRS))
    assert [timeless(row) for row in rows(tmp_path / "run")] == [timeless(row) for row in rows(dpo.run_dir)]
