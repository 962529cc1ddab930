"""On-policy distillation through the real program: a disturbed model finds back to the one that it was made from."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from launch import STEPS, rows, train_here
from safetensors.torch import load_file, save_file

from gdpo_nemo.observe.samples import read_rollouts, rollout_path


@pytest.fixture(scope="module")
def distilled(tmp_path_factory, digit_model) -> Path:
    """The folder of ``STEPS`` steps of a disturbed copy of the model on two tensor-parallel ranks; the teacher is the
    model itself."""
    scratch = tmp_path_factory.mktemp("distilled")
    shutil.copytree(digit_model, scratch / "student")
    torch.manual_seed(0)
    weights = load_file(digit_model / "model.safetensors")
    disturbed = {n: w + 2.0 * w.std() * torch.randn_like(w) if w.dim() == 2 else w for n, w in weights.items()}
    save_file(disturbed, scratch / "student" / "model.safetensors", {"format": "pt"})
    train_here(
        scratch / "run",
        scratch / "student",
        *("--config", "configs/distillation_tiny_cpu.yaml"),
        f"teacher.model_name={digit_model}",
        "policy.megatron_cfg.tensor_model_parallel_size=2",
        "gdpo.num_prompts_per_step=8",
        *("logger.plot=false", "logger.tensorboard.enabled=false"),
    )
    return scratch / "run"


def test_the_kl_to_the_teacher_falls_on_held_out_prompts(distilled):
    found = {row["step"]: row["validation/teacher_kl"] for row in rows(distilled) if "loss" not in row}
    assert list(found) == [0, 3, STEPS]
    assert found[0] > 0.1 and found[STEPS] < 0.7 * found[0]


def test_a_token_is_trained_with_what_the_teacher_would_have_given_it(distilled, digit_model):
    """The recorded samples of the first step, under the teacher of transformers."""
    from transformers import AutoModelForCausalLM

    teacher = AutoModelForCausalLM.from_pretrained(digit_model, dtype=torch.float32)
    gaps = []
    for sample in read_rollouts(rollout_path(distilled, 1)):
        ids = torch.tensor([[*sample["prompt_ids"], *sample["completion_ids"]]])
        written = len(sample["completion_ids"])
        with torch.no_grad():
            scores = teacher(ids).logits[0].log_softmax(-1)[-written - 1 : -1]
        taught = scores.gather(1, ids[0, -written:, None]).squeeze(1).numpy()
        gaps.append(taught - np.array(sample["logprobs"], np.float32))
        assert sample["advantage"] == pytest.approx(float(gaps[-1].mean()), abs=1e-4)
    first = next(row for row in rows(distilled) if "loss" in row)
    assert first["teacher/kl"] == pytest.approx(-float(np.concatenate(gaps).mean()), abs=1e-4)
    assert not [key for key in first if key.startswith("advantage/")] and "reward/correctness/mean" in first
