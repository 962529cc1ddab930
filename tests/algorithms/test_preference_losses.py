"""Preference losses equal those of TRL's own trainers, value and gradient, however their pairs are cut."""

from __future__ import annotations

import importlib
from collections import defaultdict
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st

from gdpo_nemo.algorithms.losses import TokenFields
from gdpo_nemo.algorithms.preference_losses import preference_loss
from gdpo_nemo.algorithms.preference_objectives import PREFERENCES, PreferenceSettings, PreferenceUpdate

CPU = torch.device("cpu")
ALONE = SimpleNamespace(device=CPU, gather_for_metrics=lambda values: values, gather=lambda values: values)
SEEDS = st.integers(0, 10_000)


class Batch:
    """Random log-probs of both completions of some pairs; of single completions where ``kto``."""

    def __init__(self, seed: int, kto: bool = False):
        draw = torch.Generator().manual_seed(seed)
        self.count = int(torch.randint(2, 7, (), generator=draw))
        size = self.count if kto else 2 * self.count
        self.lengths = torch.randint(1, 9, (size,), generator=draw)
        self.liked = torch.rand(self.count, generator=draw) < 0.5 if kto else torch.arange(size) < self.count
        number = torch.arange(size) % self.count + 1
        self.owner = torch.repeat_interleave(torch.arange(size), self.lengths)
        tokens = len(self.owner)
        spread = lambda: torch.rand(tokens, generator=draw, dtype=torch.float64) * 3  # noqa: E731
        self.logprobs = -0.01 - spread()
        self.reference = -0.01 - spread()
        self.chosen_tokens = int(self.lengths[self.liked].sum())
        self.fields = TokenFields(
            advantages=torch.ones(tokens),
            weights=torch.ones(tokens),
            sequence_ids=self.owner,
            num_sequences=size,
            reference_logprobs=self.reference,
            pairs=torch.where(self.liked, number, -number)[self.owner],
        )

    def sums(self, values):
        return torch.zeros(len(self.lengths), dtype=values.dtype).index_add(0, self.owner, values)

    def padded(self, values):
        """[completions, 1 + longest]: values as a collator of TRL has them, behind one token of prompt; their mask."""
        width = int(self.lengths.max())
        mask = torch.arange(width)[None] < self.lengths[:, None]
        rows = torch.zeros(mask.shape, dtype=values.dtype).masked_scatter(mask, values)
        return rows, torch.cat([torch.zeros(len(mask), 1, dtype=torch.bool), mask], 1).long()

    def update(self, kind, kl=0.0, **options):
        return PreferenceUpdate(kind, PreferenceSettings(**options), self.count, self.chosen_tokens, kl)


def ours(batch, update, keep=None, reduce=None):
    """Value and gradient [tokens] of the loss of the tokens in ``keep``."""
    leaf = batch.logprobs.clone().requires_grad_()
    keep = torch.ones(len(leaf), dtype=torch.bool) if keep is None else keep
    loss, metrics = preference_loss(leaf[keep], None, batch.fields.select(keep), update, reduce)
    loss.backward()
    return loss.detach(), leaf.grad, metrics.sums


def theirs(batch, function):
    leaf = batch.logprobs.clone().requires_grad_()
    loss = function(leaf)
    loss.backward()
    return loss.detach(), leaf.grad


def check_equal(mine, other):
    for value, expected in zip(mine, other):
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-9)


@cache
def trl_class(name):
    """A trainer of TRL, imported when it is needed: seconds of every process that collects this file."""
    places = {"CPOTrainer": "trl.experimental.cpo", "ORPOTrainer": "trl.experimental.orpo"}
    return getattr(importlib.import_module(places.get(name, "trl")), name)


def trainer(**options):
    """What a loss of TRL reads of its trainer."""
    usual = dict(
        model=SimpleNamespace(training=True), accelerator=ALONE, ld_alpha=None, precompute_ref_logps=True,
        aux_loss_enabled=False, f_divergence_type="reverse_kl", use_weighting=False, _total_train_tokens=0,
        _tp_size=1, _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip
    return SimpleNamespace(**{**usual, **options})


def model_of(values):
    """A model of TRL's whose head gives these log-probs [completions, tokens]."""
    zeros = torch.zeros_like(values)
    return lambda **inputs: SimpleNamespace(log_probs=values, entropy=zeros, mean_logits=zeros, is_top1=zeros > 0)


def dpo_of_trl(batch, **options):
    def loss(leaf):
        rows, mask = batch.padded(leaf)
        reference = batch.sums(batch.reference).chunk(2)
        inputs = dict(input_ids=mask, attention_mask=mask, completion_mask=mask)
        inputs.update(ref_chosen_logps=reference[0], ref_rejected_logps=reference[1])
        names = options["loss_types"]
        own = trainer(**{"loss_weights": [1.0] * len(names), **options})
        return trl_class("DPOTrainer")._compute_loss(own, model_of(rows), inputs, False)

    return theirs(batch, loss)


@pytest.mark.parametrize("loss_type, smoothing", [
    ("sigmoid", 0.0), ("sigmoid", 0.1), ("hinge", 0.0), ("ipo", 0.0), ("robust", 0.0), ("robust", 0.2),
])  # fmt: skip
@given(seed=SEEDS, beta=st.floats(0.05, 2.0))
def test_dpo_and_its_variants_equal_trl(loss_type, smoothing, seed, beta):
    batch = Batch(seed)
    # TRL's sigmoid takes no label smoothing any more: cDPO is its CPO's, of log-ratios.
    if smoothing and loss_type == "sigmoid":
        own = SimpleNamespace(accelerator=ALONE, alpha=0.0, beta=beta, label_smoothing=smoothing, loss_type="sigmoid")
        ratios = lambda leaf: batch.sums(leaf - batch.reference).chunk(2)  # noqa: E731
        expected = theirs(batch, lambda leaf: trl_class("CPOTrainer").cpo_loss(own, *ratios(leaf))[0].mean())
    else:
        expected = dpo_of_trl(batch, loss_types=[loss_type], beta=beta, label_smoothing=smoothing)
    check_equal(ours(batch, batch.update("dpo", loss_type=loss_type, beta=beta, label_smoothing=smoothing)), expected)


@given(seed=SEEDS, alpha=st.floats(0.0, 2.0))
def test_the_cross_entropy_beside_dpo_equals_trls_sft_term(seed, alpha):
    batch = Batch(seed)
    expected = dpo_of_trl(
        batch, loss_types=["sigmoid", "sft"], loss_weights=[1.0, alpha], beta=0.1, label_smoothing=0.0
    )
    check_equal(ours(batch, batch.update("dpo", rpo_alpha=alpha)), expected)


@given(seed=SEEDS)
def test_dpo_of_mean_logprobs_equals_trls_sigmoid_norm(seed):
    batch = Batch(seed)
    expected = dpo_of_trl(batch, loss_types=["sigmoid_norm"], beta=0.7, label_smoothing=0.0)
    check_equal(ours(batch, batch.update("dpo", beta=0.7, length_normalize=True)), expected)


@given(seed=SEEDS)
def test_dpo_without_a_reference_gives_both_answers_the_same_one(seed):
    batch = Batch(seed)
    free = ours(batch, batch.update("dpo", reference_free=True))
    batch.fields.reference_logprobs.zero_()
    check_equal(free[:2], ours(batch, batch.update("dpo"))[:2])


@pytest.mark.parametrize(
    "kind, loss_type", [("cpo", "sigmoid"), ("cpo", "hinge"), ("cpo", "ipo"), ("simpo", "sigmoid")]
)
@given(seed=SEEDS, beta=st.floats(0.05, 3.0), smoothing=st.sampled_from([0.0, 0.15]))
def test_cpo_and_simpo_equal_trl(kind, loss_type, seed, beta, smoothing):
    batch = Batch(seed)
    smoothing = smoothing if loss_type == "sigmoid" else 0.0
    name = "simpo" if kind == "simpo" else loss_type
    own = SimpleNamespace(
        accelerator=ALONE, alpha=0.0, beta=beta, label_smoothing=smoothing, loss_type=name, simpo_gamma=0.5
    )

    def loss(leaf):
        sums = batch.sums(leaf)
        found = sums / batch.lengths if name in ("ipo", "simpo") else sums
        nll = -leaf[batch.fields.pairs > 0].mean()
        return trl_class("CPOTrainer").cpo_loss(own, *found.chunk(2))[0].mean() + (nll if kind == "cpo" else 0.0)

    update = batch.update(kind, loss_type=loss_type, beta=beta, label_smoothing=smoothing)
    check_equal(ours(batch, update), theirs(batch, loss))


@given(seed=SEEDS, beta=st.floats(0.05, 1.0))
def test_orpo_equals_trl(seed, beta):
    batch = Batch(seed)
    own = SimpleNamespace(accelerator=ALONE, beta=beta)

    def loss(leaf):
        means = (batch.sums(leaf) / batch.lengths).chunk(2)
        nll = -leaf[batch.fields.pairs > 0].mean()
        # TRL computes in float32, which is not enough for 1e-6.
        with_doubles = [SimpleNamespace(float=lambda v=v: v, to=lambda device, v=v: v) for v in means]
        return nll - trl_class("ORPOTrainer").odds_ratio_loss(own, *with_doubles)[0].mean()

    check_equal(ours(batch, batch.update("orpo", beta=beta)), theirs(batch, loss))


@given(seed=SEEDS, shift=st.floats(-20, 20))
def test_kto_equals_trl_with_its_estimate_of_the_kl(seed, shift):
    batch = Batch(seed, kto=True)
    mismatched = torch.randn(batch.count, dtype=torch.float64) + shift
    kl = max(float(mismatched.mean()), 0.0)

    def loss(leaf):
        rows, mask = batch.padded(leaf)
        inputs = dict(label=batch.liked, input_ids=mask, attention_mask=mask, completion_mask=mask)
        inputs.update(ref_logps=batch.sums(batch.reference), ref_KL_logps=torch.zeros_like(mismatched))
        own = trainer(
            calculate_KL=True, loss_type="kto", beta=0.3, desirable_weight=1.5, undesirable_weight=0.5,
            _compute_kl_logps=lambda model, batch: mismatched,
        )  # fmt: skip
        return trl_class("KTOTrainer")._compute_loss(own, model_of(rows), inputs, False)

    update = batch.update("kto", kl=kl, beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)
    check_equal(ours(batch, update), theirs(batch, loss))


@given(seed=SEEDS, centering=st.sampled_from([None, 0.01, 1.0]))
def test_the_loss_of_a_reward_model_equals_trl(seed, centering):
    """A completion's one score takes the place of its log-probs."""
    batch = Batch(seed)
    batch.lengths = torch.ones_like(batch.lengths)
    batch.owner = torch.arange(2 * batch.count)
    draw = torch.Generator().manual_seed(seed)
    batch.logprobs = torch.randn(2 * batch.count, generator=draw, dtype=torch.float64) * 3
    number = batch.owner % batch.count + 1
    batch.fields = TokenFields(
        torch.ones(2 * batch.count), torch.ones(2 * batch.count), batch.owner, 2 * batch.count,
        pairs=torch.where(batch.liked, number, -number),
    )  # fmt: skip
    own = trainer(args=SimpleNamespace(center_rewards_coefficient=centering))

    def loss(leaf):
        scores = lambda **inputs: SimpleNamespace(logits=leaf[:, None])  # noqa: E731
        scores.training = True
        own.model = scores
        return trl_class("RewardTrainer").compute_loss(own, scores, {"attention_mask": torch.ones(2 * batch.count, 1)})

    mine = ours(batch, batch.update("reward_model", center_rewards_coefficient=centering))
    check_equal(mine, theirs(batch, loss))
    metrics = own._metrics["train"]
    assert mine[2]["rewards_accuracies"].item() / batch.count == pytest.approx(metrics["accuracy"][-1])
    assert mine[2]["rewards_margins"].item() / batch.count == pytest.approx(metrics["margin"][-1])
    both = (mine[2]["rewards_chosen"] + mine[2]["rewards_rejected"]).item() / (2 * batch.count)
    assert both == pytest.approx(metrics["mean_reward"][-1])


def share_of_sums(batch, update, mine):
    """What a rank with these tokens brings to the sums."""
    found = []

    def note(partial):
        found.append(partial.clone())
        return partial

    ours(batch, update, mine, note)
    return found[0]


@pytest.mark.parametrize("kind", PREFERENCES)
@given(seed=SEEDS)
def test_cutting_pairs_into_micro_batches_and_over_ranks_changes_nothing(kind, seed):
    """Context-parallel ranks hold some tokens of every completion, and one may hold none of a pair."""
    batch = Batch(seed, kto=kind == "kto")
    update = batch.update(kind, kl=0.3)
    whole = ours(batch, update)
    draw = torch.Generator().manual_seed(seed)
    cut = batch.fields.pairs.abs() % 2 == 0
    rank = torch.rand(len(batch.owner), generator=draw) < 0.4
    parts = []
    for micro_batch in (cut, ~cut):
        total = sum(share_of_sums(batch, update, micro_batch & mine) for mine in (rank, ~rank))
        reduce = partial(lambda total, own: total.clone(), total)
        parts += [ours(batch, update, micro_batch & mine, reduce) for mine in (rank, ~rank)]
    gradient = sum(torch.zeros_like(whole[1]) if part[1] is None else part[1] for part in parts)
    check_equal((sum(part[0] for part in parts), gradient), whole[:2])
    for name, value in whole[2].items():
        torch.testing.assert_close(sum(part[2][name] for part in parts), value, rtol=1e-9, atol=1e-9)


def test_metrics_are_those_of_trl():
    batch = Batch(3)
    sums = ours(batch, batch.update("dpo", beta=0.1))[2]
    won, lost = (0.1 * batch.sums(batch.logprobs - batch.reference)).chunk(2)
    assert sums["chosen"].item() == pytest.approx(batch.count) and sums["tokens"].item() == len(batch.owner)
    assert sums["rewards_chosen"].item() == pytest.approx(won.sum().item())
    assert sums["rewards_margins"].item() == pytest.approx((won - lost).sum().item())
    assert sums["rewards_accuracies"].item() == pytest.approx((won > lost).sum().item())
    assert sums["logps_rejected"].item() == pytest.approx(batch.sums(batch.logprobs).chunk(2)[1].sum().item())


def test_a_certain_answer_has_a_finite_loss_and_gradient():
    batch = Batch(5)
    batch.logprobs[:] = 0.0
    for kind in PREFERENCES:
        loss, gradient, _ = ours(batch, batch.update(kind))
        assert loss.isfinite() and gradient.isfinite().all(), kind


@pytest.mark.parametrize("kind, options, key", [
    ("simpo", dict(loss_type="ipo"), "loss_type"),
    ("dpo", dict(beta=0.0), "beta"),
    ("dpo", dict(beta=float("nan")), "beta"),
    ("dpo", dict(label_smoothing=0.5, loss_type="robust"), "label_smoothing"),
    ("dpo", dict(label_smoothing=0.1, loss_type="ipo"), "label_smoothing"),
    ("kto", dict(label_smoothing=0.1), "label_smoothing"),
    ("orpo", dict(reference_free=True), "reference_free"),
    ("kto", dict(length_normalize=True), "length_normalize"),
    ("kto", dict(rpo_alpha=1.0), "rpo_alpha"),
    ("dpo", dict(rpo_alpha=-1.0), "rpo_alpha"),
    ("dpo", dict(simpo_gamma=1.0), "simpo_gamma"),
    ("cpo", dict(desirable_weight=2.0), "desirable_weight"),
    ("dpo", dict(center_rewards_coefficient=0.01), "center_rewards_coefficient"),
    ("reward_model", dict(center_rewards_coefficient=float("nan")), "center_rewards_coefficient"),
    ("reward_model", dict(center_rewards_coefficient=-0.1), "center_rewards_coefficient"),
    ("reward_model", dict(beta=0.5), "beta"),
    ("reward_model", dict(length_normalize=True), "length_normalize"),
    ("reward_model", dict(loss_type="hinge"), "loss_type"),
])  # fmt: skip
def test_options_that_mean_nothing_to_an_objective_are_refused(kind, options, key):
    with pytest.raises(ValueError, match=f"^{key}:"):
        PreferenceSettings(**options).check(kind)
