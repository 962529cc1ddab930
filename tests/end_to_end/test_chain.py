"""Stages of one chain through the real program: each starts from the last one's weights, and a stop loses nothing."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from launch import Launch, rows, timeless

from gdpo_nemo.checkpoints import model_fingerprint

STEPS = 3


class Chain(Launch):
    """``gdpo-nemo chain`` of supervised training, preferences and GDPO; ``run_dir`` is the second stage's."""

    def command(self, run_dir: Path, model: Path, overrides: tuple[str, ...]) -> list[str]:
        stages = [f"configs/{name}_tiny_cpu.yaml" for name in ("sft", "dpo", "gdpo")]
        folders = [run_dir.parent / name for name in ("sft", run_dir.name, "gdpo")]
        return [
            *("-m", "gdpo_nemo", "chain", *stages),
            *(f"{number}:run.dir={folder}" for number, folder in enumerate(folders, start=1)),
            f"policy.model_name={model}",
            f"gdpo.max_num_steps={STEPS}",
            "gdpo.num_prompts_per_step=4",
            "gdpo.val_period=0",
            "gdpo.val_at_start=false",
            "checkpointing.save_period=1",
            "3:checkpointing.metric_name=null",
            "logger.console=plain",
            *overrides,
        ]


def started_from(run_dir: Path) -> str:
    """Fingerprint of the model that a run's last checkpoint says it started from."""
    return json.loads((run_dir / "checkpoints" / f"step_{STEPS}" / "state.json").read_text())["model"]


def test_a_chain_that_is_stopped_goes_on_in_its_stage_and_hands_the_weights_on(tmp_path, digit_model):
    first = Chain(tmp_path / "dpo", digit_model)
    first.wait_for_step(1)
    first.process.send_signal(signal.SIGTERM)
    status, out, err = first.finish()
    assert status == 128 + signal.SIGTERM, (out, err)
    (sft, dpo, gdpo) = (tmp_path / name for name in ("sft", "dpo", "gdpo"))
    trained = (sft / "metrics.jsonl").read_bytes()
    begun = rows(dpo)
    assert len(begun) < STEPS and not gdpo.exists() and first.left_behind() == []

    second = Chain(tmp_path / "dpo", digit_model)
    status, out, err = second.finish()
    assert status == 0, (out, err)
    assert f"{sft}, finished" in out and (sft / "metrics.jsonl").read_bytes() == trained
    assert [timeless(row) for row in rows(dpo)[: len(begun)]] == [timeless(row) for row in begun]
    assert [row["step"] for row in rows(dpo)] == [row["step"] for row in rows(gdpo)] == [1, 2, 3]
    assert started_from(sft) == model_fingerprint(digit_model)
    assert started_from(dpo) == model_fingerprint(sft / "model") != started_from(sft)
    assert started_from(gdpo) == model_fingerprint(dpo / "model") != started_from(dpo)
    # DPO's reference is the model of the stage before: at the first step both are one.
    assert abs(rows(dpo)[0]["rewards/margins"]) < 1e-5
    assert (gdpo / "model" / "model.safetensors").stat().st_size and second.left_behind() == []
