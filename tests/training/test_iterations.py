"""Several updates of the same samples, tokens chosen anew for each, an entropy weight that adapts, a reference that
follows: in the order that is promised, and the same after a resume."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from test_trainer import Recorder

from gdpo_nemo.algorithms.entropy import AdaptiveEntropy
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.model_checks import resolve
from gdpo_nemo.training.checkpoints import RunState
from gdpo_nemo.training.gdpo import GDPO
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"


def advantages(update):
    return [s.token_advantages().tolist() for s in update]


def test_every_iteration_trains_all_samples_against_the_logprobs_before_the_first():
    recorder = Recorder("gdpo.num_iterations=3", "policy.train_global_batch_size=2")
    recorder.trainer.step()
    assert recorder.calls.count("train") == 6 and recorder.calls.count("logprobs") == 2
    assert recorder.calls.index("logprobs") < recorder.calls.index("train")
    batches = [[id(s) for s in update] for update, _ in recorder.updates]
    assert batches == 3 * batches[:2] and batches[0] != batches[1]
    for update, _ in recorder.updates:
        assert all((s.old_logprobs == -1.0).all() for s in update)
    assert recorder.trainer.state.updates == 6


def test_one_iteration_of_one_update_asks_for_no_logprobs():
    recorder = Recorder()
    recorder.trainer.step()
    assert recorder.calls.count("train") == 1 and "logprobs" not in recorder.calls


def test_the_plan_counts_iterations_as_updates_of_the_same_size():
    config = load_config(DEMO, ["gdpo.num_iterations=3", "policy.train_global_batch_size=32"])
    validate(config)
    assert (resolve(config).updates_per_step, resolve(config).samples_per_update) == (12, 32)


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov", "target_po"])
def test_every_iteration_starts_from_the_unchanged_advantages(loss):
    overrides = {
        "clip_cov": ["loss_fn.clip_cov_ratio=0.3", "loss_fn.clip_cov_lb=-90", "loss_fn.clip_cov_ub=90"],
        "kl_cov": ["loss_fn.kl_cov_ratio=0.3"],
    }
    recorder = Recorder("gdpo.num_iterations=2", f"loss_fn.type={loss}", *overrides.get(loss, []))
    prepared = recorder.parts.algorithm.prepare(recorder.get_batch(0))
    before = advantages(prepared.updates[0])
    first, second = (list(update) for update in recorder.parts.algorithm.updates(prepared))
    assert advantages(prepared.updates[0]) == before and all(s.chosen is None for s in prepared.updates[0])
    if loss == "clip_cov":
        for update in (first, second):
            now = advantages(update)
            assert now != before and all(n in (0.0, b) for row, other in zip(now, before) for n, b in zip(row, other))
            assert sum(n != b for row, other in zip(now, before) for n, b in zip(row, other)) == 3  # of 12 tokens
    elif loss == "kl_cov":
        assert advantages(first) == before and sum(int(s.chosen.sum()) for s in second) == 3
    else:
        assert advantages(first) == advantages(second) != before


def test_tokens_are_chosen_by_the_weights_that_each_update_starts_from():
    recorder = Recorder("gdpo.num_iterations=2", "loss_fn.type=kl_cov", "policy.train_global_batch_size=2")
    recorder.trainer.step()
    # Those of the first update are those that the step began with; each later one asks anew.
    assert [call for call in recorder.calls if call in ("train", "logprobs")] == [
        "logprobs", "logprobs", "train", "logprobs", "train", "logprobs", "train", "logprobs", "train",
    ]  # fmt: skip


def adaptive(settings, entropies):
    """(weight applied, weight afterwards) of each update, as TRL's `_compute_loss` and its docstring say."""
    weight, last, rows = settings.entropy_bonus, float("inf"), []
    for entropy in entropies:
        applied = weight if last <= settings.entropy_target else 0.0
        step = settings.entropy_coef_delta if entropy <= settings.entropy_target else -settings.entropy_coef_delta
        weight = min(max(weight + step, settings.entropy_coef_min), settings.entropy_coef_max)
        last = entropy
        rows.append((applied, weight))
    return rows


def test_weight_of_the_entropy_follows_trl_and_continues_after_a_resume(tmp_path):
    overrides = [
        "loss_fn.use_adaptive_entropy=true", "loss_fn.entropy_target=0.3", "loss_fn.entropy_coef_delta=0.1",
        "loss_fn.entropy_bonus=0.05", "loss_fn.entropy_coef_max=0.2",
    ]  # fmt: skip
    entropies = [0.5, 0.3, 0.2, 0.1, 0.1, 0.9, 0.2]

    class Measuring(Recorder):
        def train(self, update, loss):
            result = super().train(update, loss)
            return replace(result, sums={**result.sums, "entropy": 12 * entropies[len(self.updates) - 1]})

    whole = Measuring(*overrides)
    for _ in entropies:
        whole.trainer.step()
    expected = adaptive(whole.config.loss_fn, entropies)
    assert [loss.entropy_bonus for _, loss in whole.updates] == pytest.approx([applied for applied, _ in expected])
    assert max(applied for applied, _ in expected) == 0.2 and whole.updates[0][1].entropy_bonus == 0.0
    assert [row["policy/entropy_coefficient"] for row, *_ in whole.rows] == pytest.approx(
        [after for _, after in expected]
    )

    cut = Measuring(*overrides)
    for _ in range(3):
        cut.trainer.step()
    saved = asdict(replace(cut.trainer.state, algorithm=cut.parts.algorithm.state()))
    again = GDPO(cut.config, cut.parts.policy, None, cut.parts.log)
    again.load_state(RunState(**saved).algorithm)
    cut.trainer.algorithm = again
    for _ in range(4):
        cut.trainer.step()
    assert [loss.entropy_bonus for _, loss in cut.updates] == [loss.entropy_bonus for _, loss in whole.updates]


def test_an_entropy_that_is_not_a_number_moves_nothing():
    controller = AdaptiveEntropy(0.1, 0.2)
    controller.update(float("nan"), load_config(DEMO).loss_fn)
    assert controller == AdaptiveEntropy(0.1, 0.2)


def test_the_reference_follows_every_so_many_steps_behind_their_updates():
    recorder = Recorder(
        "policy.sync_ref_model=true", "policy.ref_model_sync_steps=2", "policy.ref_model_mixup_alpha=0.25",
        "loss_fn.reference_policy_kl_penalty=0.1",
    )  # fmt: skip
    recorder.parts.policy.sync_reference = lambda alpha: recorder.calls.append(f"sync {alpha}")
    for _ in range(4):
        recorder.trainer.step()
    kept = [call for call in recorder.calls if call in ("train", "sync 0.25", "reference")]
    assert kept == 2 * ["reference", "train", "reference", "train", "sync 0.25"]


REFUSED = [
    ("gdpo.num_iterations=0", "gdpo.num_iterations: must be at least 1"),
    ("policy.ref_model_sync_steps=5", "policy.ref_model_sync_steps: has no effect without policy.sync_ref_model"),
    ("policy.sync_ref_model=true", "policy.sync_ref_model: has no effect without a reference model"),
    ("policy.ref_model_mixup_alpha=0", "policy.ref_model_mixup_alpha: must be more than 0 and at most 1"),
    ("policy.ref_model_mixup_alpha=.nan", "policy.ref_model_mixup_alpha"),
    ("loss_fn.entropy_target=0.5", "loss_fn.entropy_target: has no effect without loss_fn.use_adaptive_entropy"),
    ("loss_fn.clip_cov_ratio=0.5", "loss_fn.clip_cov_ratio: has no effect unless loss_fn.type is clip_cov"),
    ("loss_fn.kl_cov_coef=.inf", "loss_fn.kl_cov_coef"),
]


@pytest.mark.parametrize("override, sentence", REFUSED)
def test_settings_that_do_nothing_or_make_no_sense_are_refused(override, sentence):
    with pytest.raises(ConfigError, match=sentence):
        validate(load_config(DEMO, [override]))


def test_under_lora_the_reference_cannot_follow():
    overrides = ["policy.lora.rank=4", "policy.sync_ref_model=true", "loss_fn.reference_policy_kl_penalty=0.1"]
    with pytest.raises(ConfigError, match="policy.sync_ref_model: not supported with policy.lora"):
        validate(load_config(DEMO, overrides))


def test_iterations_apply_only_to_samples():
    with pytest.raises(ConfigError, match="gdpo.num_iterations: has no effect with an algorithm that does not sample"):
        validate(load_config(DEMO.with_name("dpo_tiny_cpu.yaml"), ["gdpo.num_iterations=2"]))


def test_skipping_sequences_does_not_change_the_entropy():
    overrides = ["policy.skip_zero_advantage=true", "loss_fn.use_adaptive_entropy=true"]
    with pytest.raises(ConfigError, match="policy.skip_zero_advantage: would change the gradient"):
        validate(load_config(DEMO, overrides))
