"""Scripts of TRL's asynchronous trainer: how old samples may be, when weights are published, what the ratio is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from gdpo_nemo.config.algorithm_choice import resolved_loss, spec_of
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.rollout_checks import steps_ahead
from gdpo_nemo.tools.interop.translation import DIFFERS
from gdpo_nemo.tools.interop.trl.defaults import ASYNC_GRPO_CONFIG, GRPO_CONFIG, WITHOUT_A_FIELD
from gdpo_nemo.tools.interop.trl.keys import result_of
from gdpo_nemo.tools.interop.trl.run import TrlRun
from gdpo_nemo.tools.interop.trl.translate import translate_trl
from gdpo_nemo.training.validation import validate

SCRIPT = """\
from datasets import load_dataset
from peft import LoraConfig
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

def short(completions, **kwargs):
    return [-float(len(c)) for c in completions]

def main():
    config = AsyncGRPOConfig(output_dir="out", max_steps=4, {config})
    trainer = AsyncGRPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", short, config, load_dataset("a/b", split="train"){trainer})
    trainer.train()

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ours(folder: Path, config: str = "", trainer: str = ""):
    """(translation, its config) of a script with these arguments."""
    (folder / "script.py").write_text(SCRIPT.format(config=config, trainer=trainer))
    translation = translate_trl(["script.py"], "ours.yaml")
    (folder / "ours.yaml").write_text(translation.to_text("script.py"))
    made = load_config(folder / "ours.yaml")
    assert validate(made) is not None
    return translation, made


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_fields_of_the_asynchronous_trainer_are_those_of_the_installed_class():
    from trl.experimental.async_grpo import AsyncGRPOConfig

    theirs = {}
    for field in dataclasses.fields(AsyncGRPOConfig):
        made = None if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = made if field.default is dataclasses.MISSING else field.default
        theirs[field.name] = getattr(value, "value", value)
    others = {key: value for key, value in theirs.items() if key not in GRPO_CONFIG or value != GRPO_CONFIG[key]}
    assert others == ASYNC_GRPO_CONFIG
    assert not set(WITHOUT_A_FIELD) & set(theirs)
    run = TrlRun({}, "AsyncGRPOTrainer")
    assert [key for key in theirs if result_of(key, theirs[key], run) is None] == []
    assert [key for key in theirs if result_of(key, theirs[key], run).matters] == []


@pytest.mark.parametrize(
    "config, staleness, every, ahead, kv",
    [
        ("", 4, 1, 4, "keep"),
        ("max_staleness=1", 1, 1, 1, "keep"),
        # A version is a publication there: one that is 2 versions old is up to 3 * 3 - 1 steps old.
        ("max_staleness=2, weight_sync_steps=3", 8, 3, 6, "keep"),
        ("max_staleness=0", 0, 1, 0, "recompute"),
        ("max_staleness=0, weight_sync_steps=2", 1, 2, 0, "recompute"),
    ],
)
def test_ages_in_versions_become_ages_in_steps(folder, config, staleness, every, ahead, kv):
    made = ours(folder, config)[1]
    rollout = made.rollout
    assert (rollout.max_staleness, rollout.sync_every, rollout.kv) == (staleness, every, kv)
    assert steps_ahead(made) == ahead


def test_the_update_is_that_of_the_asynchronous_trainer(folder):
    translation, made = ours(folder, "per_device_train_batch_size=16, epsilon_high=0.28")
    assert (made.gdpo.estimator, made.gdpo.epsilon, made.gdpo.options) == ("grpo", 1e-8, {"ddof": 0})
    loss = resolved_loss(made, spec_of(made))
    assert (loss.old_logprobs, loss.aggregation, loss.off_policy.mode) == ("sampler", "token_mean", "none")
    assert (loss.ratio_clip_min, loss.ratio_clip_max) == (0.2, 0.28)
    assert made.policy.generation.max_new_tokens == 2048
    assert made.policy.megatron_cfg.scheduler.lr_decay_style == "constant"
    assert (made.cluster.placement, made.cluster.gpus_per_node, made.policy.generation.engines) == ("separate", 2, 1)
    assert made.gdpo.num_prompts_per_step == 2
    assert translation.status == DIFFERS and set(translation.differences) == {"max_staleness"}


def test_samples_in_flight_are_finished_by_the_adapter_that_began_them(folder):
    translation, made = ours(folder, "gradient_accumulation_steps=2", ", peft_config=LoraConfig(r=8)")
    assert (made.rollout.kv, made.policy.lora.rank) == ("drain", 8)
    assert set(translation.differences) == {"max_staleness", "gradient_accumulation_steps"}
