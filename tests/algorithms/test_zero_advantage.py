"""Sequences of advantage or weight 0 may be left out of an update where the gradient stays what it is; else it is
refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from gdpo_nemo.algorithms import CORRECTIONS, LOSSES, LossSettings, OffPolicySettings, TokenFields, token_weights
from gdpo_nemo.algorithms.loss_selection import loss_import_paths, why_all_sequences
from gdpo_nemo.algorithms.policy_loss import policy_loss
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.objective_checks import check_skipping
from gdpo_nemo.rollouts.user_functions import check_own_functions
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.import_path import load_functions

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
OWN = ("examples/sapo.py:sapo", "examples/vespo.py:vespo", "examples/custom_correction.py:by_age")
SAYS_NOTHING = """
def loss(logprobs, fields, settings):
    return -(fields.advantages - fields.advantages.mean()) * logprobs


def weights(log_gap, fields, settings):
    return log_gap.exp() / log_gap.exp().mean()
"""


def loss_settings(type: str, mode: str, **further) -> LossSettings:
    level = "sequence" if LOSSES.get(type) and LOSSES[type].by_sequence else "token"
    return LossSettings(type=type, off_policy=OffPolicySettings(mode=mode, level=level, ratio_min=0.5), **further)


def batch_of(advantages, lengths, aggregation: str, seed: int) -> tuple[torch.Tensor, TokenFields]:
    """Log-probs with a gradient, and the fields of sequences of those advantages; length 0: masked, of weight 0."""
    random = np.random.default_rng(seed)
    tokens = np.maximum(lengths, 2)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(tokens))
    weights = token_weights(lengths, aggregation, constant_length=9)
    logprobs = torch.tensor(-1 - random.random(len(owner)))
    near = [logprobs + torch.tensor(0.3 * random.normal(size=len(owner))) for _ in range(3)]
    fields = TokenFields(
        advantages=torch.tensor(advantages, dtype=torch.float64)[owner],
        weights=torch.tensor(weights)[owner],
        sequence_ids=owner,
        num_sequences=len(lengths),
        old_logprobs=near[0],
        sampler_logprobs=near[1],
        reference_logprobs=near[2],
    )
    return logprobs.requires_grad_(), fields


def gradient(logprobs, fields, settings, keep) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss, and gradient of all log-probs, of an update of the tokens ``keep`` alone."""
    functions = load_functions("loss_fn", loss_import_paths(settings))
    entropy = -logprobs[keep]
    loss, _ = policy_loss(logprobs[keep], entropy, fields.select(keep), settings, functions=functions)
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0] if loss.requires_grad else torch.zeros_like(logprobs)


advantages_and_lengths = st.lists(
    st.tuples(st.sampled_from([0.0, 0.0, 1.0, -0.7, 2.5]), st.integers(0, 6)), min_size=1, max_size=8
)


def test_kl_cov_is_the_only_built_in_loss_that_reads_sequences_of_advantage_0():
    """Its KL holds chosen tokens of any advantage."""
    assert {name for name, entry in LOSSES.items() if not entry.skips_zero_advantage} == {"kl_cov"}
    assert "type kl_cov may read every sequence" in why_all_sequences(loss_settings("kl_cov", "none"))


@pytest.mark.parametrize(
    "type, mode",
    [*product([name for name in LOSSES if name != "kl_cov"], CORRECTIONS), *((name, "none") for name in OWN[:2])],
)
@given(rows=advantages_and_lengths, aggregation=st.sampled_from(["token_mean", "sequence_mean", "constant"]),
       threshold=st.sampled_from([None, 0.05]), seed=st.integers(0, 99))  # fmt: skip
def test_without_sequences_of_advantage_0_the_gradient_is_the_same(type, mode, rows, aggregation, threshold, seed):
    if type == "gspo" and mode == "icepop":
        return  # refused: see `check_loss`
    advantages, lengths = (np.array(column) for column in zip(*rows))
    settings = loss_settings(type, mode, ratio_clip_c=3.0)
    settings = replace(settings, off_policy=replace(settings.off_policy, sequence_mask_threshold=threshold))
    assert why_all_sequences(settings, load_functions("loss_fn", loss_import_paths(settings))) is None
    logprobs, fields = batch_of(advantages, lengths, aggregation, seed)
    whole = gradient(logprobs, fields, settings, torch.ones(len(logprobs), dtype=torch.bool))
    part = gradient(logprobs, fields, settings, (fields.advantages != 0) & (fields.weights != 0))
    for got, expected in zip(part, whole):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("key", ["reference_policy_kl_penalty", "entropy_bonus"])
def test_terms_that_read_every_sequence_have_a_gradient_at_advantage_0_and_forbid_it(key):
    settings = loss_settings("clipped_pg", "none", **{key: 0.1})
    logprobs, fields = batch_of([0.0, 1.0], [3, 4], "token_mean", 0)
    _, whole = gradient(logprobs, fields, settings, torch.ones(len(logprobs), dtype=torch.bool))
    assert whole[:3].abs().max() > 1e-3 and key in why_all_sequences(settings)
    with pytest.raises(ConfigError, match=f"policy.skip_zero_advantage: would change the gradient: loss_fn.{key}"):
        check_skipping(load_config(DEMO, ["policy.skip_zero_advantage=true", f"loss_fn.{key}=0.1"]))


@pytest.mark.parametrize("key, name", [("type", "loss"), ("off_policy.mode", "weights")])
def test_custom_function_must_declare_that_it_skips_zero_advantages(tmp_path, key, name):
    file = tmp_path / "own.py"
    config = ["policy.skip_zero_advantage=true", f"loss_fn.{key}={file}:{name}", "loss_fn.old_logprobs=trainer"]
    file.write_text(SAYS_NOTHING)
    with pytest.raises(ConfigError, match=f"loss_fn.{key} .*must set FUNCTION.skips_zero_advantage = True"):
        check_own_functions(load_config(DEMO, config))
    check_own_functions(load_config(DEMO, config[1:]))
    says = tmp_path / "says.py"
    says.write_text(SAYS_NOTHING + f"\n\n{name}.skips_zero_advantage = True\n")
    check_own_functions(load_config(DEMO, [config[0], f"loss_fn.{key}={says}:{name}", config[2]]))
