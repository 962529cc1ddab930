"""Supervised, preference and on-policy distillation training through the real program: a chain of stages, each from the
last one's weights, that learns, resumes exactly, and starts no engine before it samples."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from launch import Launch, command_here, rows, timeless, train_here
from transformers import AutoModelForCausalLM, AutoTokenizer

from gdpo_nemo.algorithms import compute_advantages
from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.examples import ExampleSource
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.observe.samples import read_rollouts, rollout_path
from gdpo_nemo.training.checkpoints import model_fingerprint

pytestmark = pytest.mark.slow

QUIET = ("logger.plot=false", "logger.tensorboard.enabled=false", "gdpo.num_prompts_per_step=16")
STEPS = {"sft": 6, "dpo": 9, "distillation": 6}
REWARDED = (
    "{plugin: digit_sort, algorithm: {type: gdpo, gdpo: {estimator: grpo, rewards: {format: 1.0, length: 0.5}}, "
    "loss_fn: {reference_policy_kl_penalty: 0.01}}}"
)
OF_PAIRS = (f"gdpo.max_num_steps={STEPS['dpo']}", "gdpo.val_prompts=48")
KTO = (*QUIET, *OF_PAIRS, "--config", "configs/dpo_tiny_cpu.yaml", "algorithm.type=kto")


class Chain(Launch):
    """``gdpo-nemo chain`` of supervised training, preferences and distillation; ``run_dir`` is the second stage's. The
    teacher is the model that the chain starts from, and its pupil is on two tensor-parallel ranks. In the last stage,
    half of the prompts have an environment that trains rewards with GRPO instead."""

    def command(self, run_dir: Path, model: Path, overrides: tuple[str, ...]) -> list[str]:
        folders = [run_dir.with_name(name) for name in STEPS]
        return [
            *("-m", "gdpo_nemo", "chain", *(f"configs/{name}_tiny_cpu.yaml" for name in STEPS)),
            *(f"{number}:run.dir={folder}" for number, folder in enumerate(folders, start=1)),
            f"policy.model_name={model}",
            *QUIET,
            f"1:gdpo.max_num_steps={STEPS['sft']}",
            "1:gdpo.val_prompts=8",
            *(f"2:{override}" for override in OF_PAIRS),
            f"3:gdpo.max_num_steps={STEPS['distillation']}",
            "3:gdpo.num_prompts_per_step=8",
            "3:gdpo.val_prompts=8",
            f"3:teacher.model_name={model}",
            "3:policy.megatron_cfg.tensor_model_parallel_size=2",
            f"3:env.rewarded={REWARDED}",
            "3:data.train.environment=null",
            "3:data.mix={digit_sort: 0.5, rewarded: 0.5}",
            "gdpo.val_period=3",
            "checkpointing.save_period=1",
            "logger.console=plain",
            *overrides,
        ]


def held_out(run_dir: Path, key: str) -> dict[int, float]:
    return {row["step"]: row[f"validation/{key}"] for row in rows(run_dir) if f"validation/{key}" in row}


@pytest.fixture(scope="module")
def chain(tmp_path_factory, digit_model) -> Path:
    """The folder of a chain that SIGTERM stops in its second stage and that the same command then takes to its end."""
    folder = tmp_path_factory.mktemp("chain")
    first = Chain(folder / "dpo", digit_model)
    first.wait_for_step(3)
    first.process.send_signal(signal.SIGTERM)
    status, out, err = first.finish()
    assert status == 128 + signal.SIGTERM, (out, err)
    trained = (folder / "sft" / "metrics.jsonl").read_bytes()
    begun = rows(folder / "dpo")
    assert max(row["step"] for row in begun) < STEPS["dpo"], "it was stopped in its second stage"
    assert not (folder / "distillation").exists() and first.left_behind() == []

    shown = command_here(*first.command(folder / "dpo", digit_model, ())[2:])
    assert f"{folder / 'sft'}, finished" in shown and (folder / "sft" / "metrics.jsonl").read_bytes() == trained
    return folder


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
    for step in range(STEPS["sft"] + 1):
        with torch.no_grad():
            validated.append(float(loss_of(held_out_rows)))
        if step < STEPS["sft"]:
            loss = loss_of(train.batch(16 * step, 16))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            trained.append(float(loss.detach()))
    return trained, validated


def started_from(run_dir: Path) -> str:
    """Fingerprint of the model that a run's last checkpoint says it started from."""
    newest = run_dir / "checkpoints" / f"step_{STEPS[run_dir.name]}"
    return json.loads((newest / "state.json").read_text())["model"]


def test_a_stage_of_a_chain_starts_from_the_weights_of_the_one_before(chain, digit_model):
    sft, dpo, distillation = (chain / name for name in STEPS)
    for folder in (sft, dpo, distillation):
        trained = [row["step"] for row in rows(folder) if "loss" in row]
        assert trained == list(range(1, STEPS[folder.name] + 1))
    assert started_from(sft) == model_fingerprint(digit_model)
    assert started_from(dpo) == model_fingerprint(sft / "model") != started_from(sft)
    assert started_from(distillation) == model_fingerprint(dpo / "model") != started_from(dpo)
    assert (distillation / "model" / "model.safetensors").stat().st_size


def test_supervised_training_has_the_curves_of_a_loop_of_transformers(chain, digit_model):
    losses = held_out(chain / "sft", "loss")
    assert list(losses) == [0, 3, 6] and losses[6] < 0.8 * losses[0]
    trained, validated = loop_of_transformers(digit_model)
    assert [row["loss"] for row in rows(chain / "sft") if "loss" in row] == pytest.approx(trained, rel=1e-4)
    assert list(losses.values()) == pytest.approx(validated[::3], rel=1e-4)


def test_dpo_parts_held_out_pairs_from_log_two_on(chain):
    """The reference is the model of the stage before: before the first update both models are one."""
    dpo = chain / "dpo"
    losses, margins = held_out(dpo, "loss"), held_out(dpo, "margins")
    assert losses[0] == pytest.approx(0.693147, abs=1e-5) and losses[9] < 0.95 * losses[0]
    assert margins[0] == pytest.approx(0, abs=1e-5) and margins[9] > 0.05
    trained = [row for row in rows(dpo) if "rewards/margins" in row]
    assert trained[0]["rewards/margins"] == pytest.approx(0, abs=1e-5) and trained[-1]["rewards/margins"] > 0.05
    assert trained[-1]["rewards/accuracies"] > 0.6 and not any("time/sync" in row for row in trained)


def test_dpo_resumes_bit_for_bit_after_sigterm(chain, tmp_path):
    options = (*QUIET, *OF_PAIRS, "--config", "configs/dpo_tiny_cpu.yaml")
    train_here(tmp_path / "run", chain / "sft" / "model", *options)
    assert [timeless(row) for row in rows(chain / "dpo")] == [timeless(row) for row in rows(tmp_path / "run")]


def test_kto_raises_desirable_answers_above_undesirable_ones(tmp_path, digit_model):
    """KTO is the objective whose rows are not pairs; `tests/megatron/test_preference_updates.py` has the others."""
    run_dir = tmp_path / "kto"
    train_here(run_dir, digit_model, *KTO)
    trained = [row for row in rows(run_dir) if "rewards/chosen" in row and "rewards/rejected" in row]
    apart = {row["step"]: row["rewards/chosen"] - row["rewards/rejected"] for row in trained}
    assert apart[max(apart)] > apart[min(apart)] + 0.01
    losses = held_out(run_dir, "loss")
    assert losses[9] < losses[0]


def test_environments_of_one_step_are_trained_by_a_teacher_and_by_rewards(chain):
    run_dir = chain / "distillation"
    for row in (row for row in rows(run_dir) if "loss" in row):
        assert row["rollout/groups/digit_sort"] == row["rollout/groups/rewarded"] == 4
        assert row["teacher/kl"] > 0 and row["policy/rewarded/reference_kl"] >= 0 and row["parity/max_abs"] < 1e-4
        samples = [s for s in read_rollouts(rollout_path(run_dir, row["step"])) if s["environment"] == "rewarded"]
        expected = compute_advantages(
            {
                "format": [sample["rewards"]["format"] for sample in samples],
                "length": [sample["rewards"]["length"] for sample in samples],
            },
            np.unique([sample["prompt_id"] for sample in samples], return_inverse=True)[1],
            weights={"format": 1.0, "length": 0.5},
            estimator="grpo",
        )
        assert [s["advantage"] for s in samples] == pytest.approx(expected.values.tolist(), rel=1e-12, abs=1e-12)


def test_the_kl_to_the_teacher_falls_on_held_out_prompts(chain):
    found = held_out(chain / "distillation", "teacher_kl")
    assert list(found) == [0, 3, 6]
    assert found[0] > 0.1 and found[6] < 0.7 * found[0]


def test_advantage_of_a_token_is_its_gap_to_the_teacher_of_transformers(chain, digit_model):
    """The recorded samples of the first step, under the teacher of transformers."""
    teacher = AutoModelForCausalLM.from_pretrained(digit_model, dtype=torch.float32)
    gaps = []
    for sample in read_rollouts(rollout_path(chain / "distillation", 1)):
        if sample["environment"] == "rewarded":
            continue
        ids = torch.tensor([[*sample["prompt_ids"], *sample["completion_ids"]]])
        written = len(sample["completion_ids"])
        with torch.no_grad():
            scores = teacher(ids).logits[0].log_softmax(-1)[-written - 1 : -1]
        taught = scores.gather(1, ids[0, -written:, None]).squeeze(1).numpy()
        gaps.append(taught - np.array(sample["logprobs"], np.float32))
        assert sample["advantage"] == pytest.approx(float(gaps[-1].mean()), abs=1e-4)
    first = next(row for row in rows(chain / "distillation") if "loss" in row)
    assert first["teacher/kl"] == pytest.approx(-float(np.concatenate(gaps).mean()), abs=1e-4)
    assert not [key for key in first if key.startswith("advantage/others/")] and "reward/correctness/mean" in first
