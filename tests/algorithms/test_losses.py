"""Losses of tokens: their values, and that no way of cutting a batch changes the gradient."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from gdpo_nemo.algorithms import LOSSES, LossSettings, OffPolicySettings, TokenFields, token_weights
from gdpo_nemo.algorithms.losses import KL_KINDS, kl_penalty, score_weight
from gdpo_nemo.algorithms.offpolicy import CORRECTIONS, LEVELS
from gdpo_nemo.algorithms.policy_loss import policy_loss

LENGTHS = [5, 0, 9, 3, 1, 7]


class Batch:
    """Six sequences (one without trained tokens) whose log-probs come from a small shared parameter."""

    def __init__(self, aggregation: str = "token_mean", seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        self.ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
        tokens = len(self.ids)
        weights = torch.from_numpy(token_weights(LENGTHS, aggregation, constant_length=10))
        self.features = normal(tokens, 4)
        self.parameter = (0.3 * normal(4)).requires_grad_()
        self.entropy_features = normal(tokens, 4)
        old = (self.features @ self.parameter).detach() - 1
        self.fields = TokenFields(
            advantages=normal(len(LENGTHS))[self.ids],
            weights=weights[self.ids],
            sequence_ids=self.ids,
            num_sequences=len(LENGTHS),
            old_logprobs=old + 0.2 * normal(tokens),
            sampler_logprobs=old + 0.3 * normal(tokens),
            reference_logprobs=old + 0.3 * normal(tokens),
        )

    def loss(self, settings: LossSettings, keep: torch.Tensor | None = None, reduce=None):
        """Loss of the tokens in `keep` (bool [tokens]) as a micro-batch of its own."""
        keep = torch.ones(len(self.ids), dtype=torch.bool) if keep is None else keep
        fields = self.fields.select(keep)
        logprobs = (self.features @ self.parameter - 1)[keep]
        entropy = (self.entropy_features @ self.parameter)[keep]
        return policy_loss(logprobs, entropy, fields, settings, reduce)

    def gradient(self, losses) -> torch.Tensor:
        return torch.autograd.grad(sum(losses), self.parameter)[0]


def full_settings(kind: str, aggregation: str, mode: str = "truncate", level: str = "geometric") -> LossSettings:
    return LossSettings(
        type=kind,
        aggregation=aggregation,
        constant_length=10,
        ratio_clip_c=3.0,
        reference_policy_kl_penalty=0.1,
        entropy_bonus=0.01,
        off_policy=OffPolicySettings(
            mode=mode, level=level, ratio_max=1.2, ratio_min=0.8, sequence_mask_threshold=0.05
        ),
    )


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("size", [1, 4])
def test_loss_and_gradient_are_invariant_to_micro_batch_size(kind, aggregation, size):
    batch = Batch(aggregation)
    settings = full_settings(kind, aggregation)
    whole, metrics = batch.loss(settings)
    parts = [batch.loss(settings, batch.ids // size == m) for m in range(6)]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    torch.testing.assert_close(batch.gradient([loss for loss, _ in parts]), batch.gradient([whole]))
    for name, value in metrics.sums.items():
        torch.testing.assert_close(sum(part.sums[name] for _, part in parts), value)
    for name, value in metrics.maxima.items():
        assert max(part.maxima[name] for _, part in parts if name in part.maxima) == value


@pytest.mark.parametrize("kind, level", [(k, x) for k in LOSSES for x in LEVELS if (k, x) != ("gspo", "token")])
def test_gradient_is_invariant_to_context_parallelism(kind, level):
    """Two ranks hold alternating tokens of every sequence; the sums they exchange are replayed from the other rank."""
    mode = "mask" if kind == "gspo" else "icepop"
    batch = Batch("sequence_mean")
    settings = full_settings(kind, "sequence_mean", mode, level)
    half = torch.arange(len(batch.ids)) % 2 == 0
    calls: list[list[torch.Tensor]] = [[], []]
    for rank, keep in enumerate((half, ~half)):
        batch.loss(settings, keep, reduce=lambda partial, rank=rank: calls[rank].append(partial) or partial)
    assert len(calls[0]) == len(calls[1])

    def summed_over_ranks(others):
        queue = iter(others)
        return lambda partial: partial + next(queue)

    # The first pass saw partial sums, so only the sums of inputs that do not depend on other sums may be replayed.
    parts = [
        batch.loss(settings, keep, summed_over_ranks(calls[1 - rank]))[0] for rank, keep in enumerate((half, ~half))
    ]
    whole, _ = batch.loss(settings)
    torch.testing.assert_close(sum(parts), whole, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(batch.gradient(parts), batch.gradient([whole]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", LOSSES)
def test_padding_and_order_of_tokens_do_not_matter(kind):
    batch = Batch()
    settings = full_settings(kind, "token_mean")
    whole, _ = batch.loss(settings)
    shuffle = torch.randperm(len(batch.ids) + 5, generator=torch.Generator().manual_seed(1))
    padded = {
        name: torch.cat([value, torch.full((5,), float("nan") if value.is_floating_point() else 0)]).to(value.dtype)[
            shuffle
        ]
        for name, value in vars(batch.fields).items()
        if isinstance(value, torch.Tensor)
    }
    padded["weights"] = padded["weights"].nan_to_num(0.0)
    nan = torch.full((5,), float("nan"), dtype=torch.float64)
    logprobs = torch.cat([batch.features @ batch.parameter - 1, nan])[shuffle]
    entropy = torch.cat([batch.entropy_features @ batch.parameter, nan])[shuffle]
    loss, metrics = policy_loss(logprobs, entropy, TokenFields(**padded, num_sequences=len(LENGTHS)), settings)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(batch.gradient([loss]), batch.gradient([whole]))
    assert metrics.sums["tokens"] == sum(LENGTHS)


@pytest.mark.parametrize("kind", LOSSES)
def test_tokens_left_out_by_the_caller_give_the_loss_that_a_mask_gives(kind):
    batch = Batch()
    settings = full_settings(kind, "token_mean")
    kept = batch.ids % 2 == 0
    batch.fields = replace(batch.fields, weights=batch.fields.weights * kept)
    masked, measured = batch.loss(settings)
    selected, entropy = ((features @ batch.parameter)[kept] for features in (batch.features, batch.entropy_features))
    loss, metrics = policy_loss(selected - 1, entropy, batch.fields.select(kept), settings, all_trained=True)
    assert torch.equal(loss, masked)
    assert torch.equal(batch.gradient([loss]), batch.gradient([masked]))
    assert metrics == measured


def test_token_weights_make_the_means_that_aggregations_name():
    losses = [np.arange(length) + 1.0 for length in LENGTHS]
    total = lambda weights: sum(w * loss.sum() for w, loss in zip(weights, losses, strict=True))  # noqa: E731
    trained = [loss for loss in losses if len(loss)]
    assert np.isclose(total(token_weights(LENGTHS, "token_mean")), np.concatenate(losses).mean())
    assert np.isclose(total(token_weights(LENGTHS, "sequence_mean")), np.mean([loss.mean() for loss in trained]))
    assert np.isclose(total(token_weights(LENGTHS, "sequence_sum")), np.mean([loss.sum() for loss in trained]))
    assert np.isclose(
        total(token_weights(LENGTHS, "constant", constant_length=8)), sum(x.sum() for x in losses) / (5 * 8)
    )
    for aggregation in ("token_mean", "sequence_mean", "sequence_sum", "constant"):
        assert token_weights(LENGTHS, aggregation, constant_length=8)[1] == 0
        assert (token_weights([0, 0], aggregation, constant_length=8) == 0).all()


def test_a_micro_batch_without_trained_tokens_has_loss_zero_and_a_backward_pass():
    batch = Batch()
    loss, metrics = batch.loss(full_settings("gspo", "token_mean"), torch.zeros(len(batch.ids), dtype=torch.bool))
    assert loss == 0 and metrics.sums["tokens"] == 0 and not metrics.maxima
    assert (batch.gradient([loss]) == 0).all()


def test_loss_is_the_corrected_policy_term_plus_kl_minus_entropy():
    logprobs, old, sampler, reference = (
        torch.tensor(x).double() for x in ([-1.0, -2], [-1.1, -1.9], [-1.3, -2.9], [-1, -1])
    )
    entropy, advantages, weights = (torch.tensor(x).double() for x in ([0.7, 0.2], [1.0, -0.5], [0.25, 0.25]))
    logprobs_of = dict(old_logprobs=old, sampler_logprobs=sampler, reference_logprobs=reference)
    fields = TokenFields(advantages, weights, torch.tensor([0, 0]), 1, **logprobs_of)
    settings = LossSettings(
        ratio_clip_min=1.0,
        ratio_clip_max=9.0,
        reference_policy_kl_penalty=0.1,
        reference_policy_kl_type="k1",
        entropy_bonus=0.01,
        off_policy=OffPolicySettings("truncate", "token", ratio_max=2.0),
    )
    loss, metrics = policy_loss(logprobs, entropy, fields, settings)
    importance = (old - sampler).exp().clamp(max=2.0)
    assert importance[0] < 2 and importance[1] == 2
    policy = -importance * (logprobs - old).exp() * advantages
    literal = policy + 0.1 * (logprobs - reference) - 0.01 * entropy
    torch.testing.assert_close(loss, (weights * literal).sum())
    sums = {name: round(value.item(), 6) for name, value in metrics.sums.items()}
    assert sums == {
        "tokens": 2,
        "ratio": round(np.exp(0.1) + np.exp(-0.1), 6),
        "clipped": 0,
        "clipped_low": 0,
        "importance_weight": round(np.exp(0.2) + 2, 6),
        "importance_masked": 0,
        "reference_kl": -1,
        "entropy": 0.9,
        "parity_abs": 1.2,
        "parity_prob": round(np.exp(-1.1) - np.exp(-1.3) + np.exp(-1.9) - np.exp(-2.9), 6),
        "parity_kl": round(np.exp(0.2) - 1.2 + np.e - 2, 6),
    }


def loss_of(kind, ids=None, **settings):
    """A built-in loss as a function of log-probs, old log-probs and advantages [tokens]; one token a sequence without
    ``ids``."""

    def function(logprobs, old, advantages):
        sequences = torch.arange(len(logprobs)) if ids is None else ids
        weights = torch.ones(len(logprobs))
        fields = TokenFields(advantages, weights, sequences, int(sequences.max()) + 1, old_logprobs=old)
        return LOSSES[kind].function(logprobs, fields, LossSettings(type=kind, **settings))

    return function


def gradient_of(function, *values):
    logprobs = torch.tensor(values[0], requires_grad=True)
    loss, metrics = function(logprobs, *(torch.tensor(v) for v in values[1:]))
    return loss, torch.autograd.grad(loss.sum(), logprobs)[0], metrics


def test_clip_stops_the_gradient_where_the_ratio_has_gone_far_enough():
    ratios = [0.5, 1.0, 1.25, 1.5, 0.5, 1.5]
    advantages = [1.0, 1.0, 1.0, 1.0, -1.0, -1.0]
    loss, gradient, metrics = gradient_of(loss_of("clipped_pg"), np.log(ratios), [0.0] * 6, advantages)
    expected = torch.tensor([-0.5, -1.0, -1.25, -1.28, 0.8, 1.5]).double()
    torch.testing.assert_close(loss.double(), expected)
    assert metrics["clipped"].tolist() == [0, 0, 0, 1, 1, 0]
    torch.testing.assert_close(gradient.double(), torch.tensor([-0.5, -1.0, -1.25, 0, 0, 1.5]).double())


def test_clips_are_counted_by_side_and_the_ratio_has_both_ends():
    ratios = torch.tensor([0.5, 1.0, 1.25, 1.5, 0.5, 1.5])
    advantages = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0])
    fields = TokenFields(advantages, torch.ones(6), torch.zeros(6, dtype=torch.int64), 1, old_logprobs=torch.zeros(6))
    _, metrics = policy_loss(ratios.log(), None, fields, LossSettings())
    assert (metrics.sums["clipped"], metrics.sums["clipped_low"]) == (2, 1)
    assert metrics.maxima["ratio"].item() == pytest.approx(1.5)
    assert metrics.maxima["ratio_negated"].item() == pytest.approx(-0.5)


def test_dual_clip_bounds_the_loss_of_bad_samples():
    loss, gradient, metrics = gradient_of(
        loss_of("clipped_pg", ratio_clip_c=3.0),
        np.log([10.0, 2.0, 10.0]), [0.0] * 3, [-1.0, -1.0, 1.0],
    )  # fmt: skip
    torch.testing.assert_close(loss.double(), torch.tensor([3.0, 2.0, -1.28]).double())
    assert gradient[0] == 0 and metrics["clipped"].tolist() == [1, 0, 1]


def test_on_policy_gradient_is_that_of_reinforce_for_every_ratio_loss():
    logprobs = [-1.0, -2.0, -0.5]
    advantages = [1.0, 1.0, -2.0]
    ids = torch.tensor([0, 0, 1])
    for function in (loss_of("clipped_pg"), loss_of("cispo"), loss_of("gspo", ids)):
        _, gradient, _ = gradient_of(function, logprobs, logprobs, advantages)
        torch.testing.assert_close(gradient, -torch.tensor(advantages))


def test_gspo_is_the_clipped_loss_of_the_sequence_ratio():
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([0, 0, 0, 1, 1, 2])
    lengths = torch.tensor([3.0, 2.0, 1.0])
    old = -torch.rand(6, generator=generator)
    logprobs = (old + 0.1 * torch.randn(6, generator=generator)).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 0.5])
    weights = (1 / (3 * lengths))[ids]
    loss, _ = loss_of("gspo", ids, ratio_clip_min=0.05, ratio_clip_max=0.05)(logprobs, old, advantages[ids])
    ratio = torch.stack([(logprobs - old)[ids == i].mean() for i in range(3)]).exp()
    literal = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.95, 1.05)).mean()
    torch.testing.assert_close((weights * loss).sum(), literal)
    ours, theirs = (torch.autograd.grad(x, logprobs, retain_graph=True)[0] for x in ((weights * loss).sum(), literal))
    torch.testing.assert_close(ours, theirs)


def test_cispo_keeps_a_bounded_gradient_where_the_clipped_loss_has_none():
    arguments = (np.log([5.0, 0.1]), [0.0, 0.0], [1.0, -1.0])
    _, clipped, _ = gradient_of(loss_of("clipped_pg"), *arguments)
    _, kept, metrics = gradient_of(loss_of("cispo"), *arguments)
    assert (clipped == 0).all()
    torch.testing.assert_close(kept.double(), torch.tensor([-1.28, 0.8]).double())
    assert metrics["clipped"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [
        ("k1", 0.5, 1.0),
        ("k2", 0.125, 0.5),
        ("mse", 0.125, 0.5),
        ("abs", 0.5, 1.0),
        ("k3", np.exp(-0.5) - 0.5, 1 - np.exp(-0.5)),
    ],
)
def test_kl_estimators_have_their_values_and_gradients(kind, value, slope):
    logprobs = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    kl = kl_penalty(logprobs, torch.tensor([-1.5, -1.0]).double(), kind)
    gradient = torch.autograd.grad(kl[0], logprobs)[0]
    assert np.isclose(kl[0].item(), value) and np.isclose(gradient[0].item(), slope) and kl[1] == 0


@pytest.mark.parametrize("kind, slope", [("k1", 1.5), ("k2", 0.125 + 0.5), ("k3", 0.5)])
def test_with_the_score_the_gradient_is_that_of_the_sampled_divergence(kind, slope):
    """d = 0.5: the estimator's own slope plus its value; for k3 that is d exactly."""
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    settings = LossSettings(
        reference_policy_kl_penalty=1.0, reference_policy_kl_type=kind, reference_policy_kl_gradient="score",
        kl_output_clamp_value=10.0,
    )  # fmt: skip
    assert np.isclose(kl_slope(logprobs, -1.5, settings), slope)


@pytest.mark.parametrize("reference, slope", [(-1.0 + 2.45, -2.45), (-1.0 + 2.6, 0.0)])
def test_an_estimate_beyond_the_output_clamp_has_no_gradient(reference, slope):
    """k3 of a log-ratio of -2.45 is 8.1, of -2.6 it is 9.9 and more than 9."""
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    settings = LossSettings(
        reference_policy_kl_penalty=1.0, reference_policy_kl_gradient="score", kl_output_clamp_value=9.0
    )
    assert np.isclose(kl_slope(logprobs, reference, settings), slope)


def test_an_importance_weight_multiplies_the_estimate():
    """Weight exp(-1 + 1.2) over d = 0.5, where k1's slope is weight x (1 + d)."""
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    settings = LossSettings(
        reference_policy_kl_penalty=2.0, reference_policy_kl_type="k1", reference_policy_kl_gradient="importance"
    )
    assert np.isclose(kl_slope(logprobs, -1.5, settings, sampler=-1.2), 2.0 * np.exp(0.2) * 1.5)


def test_the_input_clamp_takes_the_gradient_of_estimate_and_weight():
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    settings = LossSettings(
        reference_policy_kl_penalty=1.0, reference_policy_kl_gradient="score", kl_input_clamp_value=1.0
    )
    assert kl_slope(logprobs, -3.0, settings) == 0.0


def kl_slope(logprobs, reference: float, settings: LossSettings, sampler: float = -1.0) -> float:
    """Slope of the loss of one token whose advantage is 0."""
    one = torch.ones(1, dtype=torch.float64)
    fields = TokenFields(
        advantages=0 * one, weights=one, sequence_ids=torch.zeros(1, dtype=torch.int64), num_sequences=1,
        sampler_logprobs=sampler * one, reference_logprobs=reference * one,
    )  # fmt: skip
    return torch.autograd.grad(policy_loss(logprobs, None, fields, settings)[0], logprobs)[0].item()


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_estimators_agree_with_the_exact_divergence_on_average(kind):
    logits = torch.tensor([0.1, 1.0, -0.5]).double()
    reference = torch.tensor([0.5, 0.0, 0.2]).double()
    p = logits.log_softmax(0)
    q = reference.log_softmax(0)
    exact = (p.exp() * (p - q)).sum()
    torch.testing.assert_close((p.exp() * kl_penalty(p, q, kind)).sum(), exact)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs", "mse"])
def test_extreme_log_ratios_stay_finite(kind):
    logprobs = torch.tensor([-200.0, 0.0], requires_grad=True)
    kl = kl_penalty(logprobs, torch.tensor([0.0, -200.0]), kind)
    loss, _ = loss_of("clipped_pg")(logprobs, torch.tensor([0.0, -200.0]), torch.tensor([-1.0, -1.0]))
    total = (kl + loss).sum()
    assert total.isfinite() and torch.autograd.grad(total, logprobs)[0].isfinite().all()


def test_parity_is_measured_against_the_trainer_even_if_the_sampler_is_old_policy():
    logprobs = torch.tensor([-1.0, -2.0])
    sampler = torch.tensor([-1.5, float("nan")])
    ids = torch.tensor([0, 0])
    fields = TokenFields(
        torch.ones(2), torch.ones(2) / 2, ids, 1, old_logprobs=sampler.nan_to_num(-2.0), sampler_logprobs=sampler
    )
    _, metrics = policy_loss(logprobs, None, fields, LossSettings(old_logprobs="sampler"))
    assert metrics.sums["parity_abs"] == 0.5 and metrics.maxima["parity_abs"] == 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reference_policy_kl_penalty": 0.1}, "requires reference_logprobs"),
        ({"entropy_bonus": 0.1}, "requires the entropy"),
        ({"off_policy": {"mode": "mask"}}, "require sampler_logprobs"),
        ({"type": "ppo"}, "type: unknown 'ppo'"),
        ({"aggregation": "mean"}, "aggregation: unknown 'mean'"),
        ({"reference_policy_kl_type": "k4"}, "reference_policy_kl_type: unknown 'k4'"),
        ({"ratio_clip_c": 0.5}, "ratio_clip_c: must be more than 1"),
        ({"target_temperature": 0.0}, "target_temperature: must be more than 0"),
        ({"off_policy": {"mode": "tis"}}, "off_policy.mode: unknown 'tis'"),
        ({"off_policy": {"level": "word"}}, "off_policy.level: unknown 'word'"),
        ({"old_logprobs": "sampler", "off_policy": {"mode": "mask"}}, "off_policy.mode: has no effect"),
        ({"off_policy": {"ratio_min": 3.0}}, "off_policy.ratio_min: must be below"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    fields = TokenFields(torch.ones(2), torch.ones(2), torch.tensor([0, 0]), 1)
    policy_loss(torch.zeros(2), None, fields, LossSettings())
    off_policy = OffPolicySettings(**settings.get("off_policy", {}))
    with pytest.raises(ValueError, match=message):
        policy_loss(torch.zeros(2), None, fields, LossSettings(**{**settings, "off_policy": off_policy}))


@pytest.mark.parametrize(("arguments", "message"), [
    ((LENGTHS, "mean"), "unknown aggregation"),
    ((LENGTHS, "constant"), "positive constant_length"),
    (([-1, 2], "token_mean"), "non-negative"),
])  # fmt: skip
def test_bad_weights_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        token_weights(*arguments)


@pytest.mark.parametrize("length", [0, -1, None])
def test_token_weights_refuse_a_constant_length_below_1(length):
    assert token_weights([3, 0], "constant", constant_length=1).tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="positive constant_length"):
        token_weights([3, 0], "constant", constant_length=length)


SEQUENCE_CORRECTIONS = [(mode, level) for mode in ("truncate", "mask") for level in ("sequence", "geometric")]


def test_gspo_with_the_mean_of_sums_is_luspo_as_trl_has_it():
    """TRL's lines of loss_type luspo, at the level of sequences: each one's clipped loss times its length, then their
    mean."""
    batch = Batch("sequence_sum")
    fields = batch.fields
    got, _ = batch.loss(LossSettings(type="gspo", aggregation="sequence_sum"))
    lengths = [length for length in LENGTHS if length]
    logprobs = batch.features @ batch.parameter - 1
    ratios = (logprobs - fields.old_logprobs).split(lengths)
    coef = torch.stack([part.mean().exp() for part in ratios])
    advantages = torch.stack([part[0] for part in fields.advantages.split(lengths)])
    per_token = -torch.min(coef * advantages, coef.clamp(1 - 0.2, 1 + 0.28) * advantages)
    theirs = (per_token * torch.tensor(lengths)).mean()
    torch.testing.assert_close(got, theirs)
    torch.testing.assert_close(batch.gradient([got]), batch.gradient([theirs]))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
@pytest.mark.parametrize("mode, level", [("none", "token"), *SEQUENCE_CORRECTIONS])
def test_gspo_has_the_gradient_of_its_sequence_form_under_every_correction_it_takes(mode, level, aggregation):
    """The oracle clips one ratio per sequence, s = exp(mean log r), as the paper's eq. 5 and 7 have it, and
    differentiates that."""
    correction = OffPolicySettings(mode=mode, level=level, ratio_max=1.05, ratio_min=0.95)
    batch = Batch(aggregation)
    fields = batch.fields
    got = batch.gradient([batch.loss(LossSettings(type="gspo", off_policy=correction))[0]])
    logprobs = batch.features @ batch.parameter - 1
    losses = []
    for i in np.flatnonzero(LENGTHS):
        rows = fields.sequence_ids == i
        ratio = (logprobs - fields.old_logprobs)[rows].mean().exp()
        gap = (fields.old_logprobs - fields.sampler_logprobs)[rows]
        rho = {"token": torch.zeros(()), "sequence": gap.sum(), "geometric": gap.mean()}[level].exp()
        if mode != "none":
            rho = rho.clamp(max=1.05) if mode == "truncate" else rho * (0.95 <= rho <= 1.05)
        advantage = fields.advantages[rows][0]
        clipped = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
        losses.append(fields.weights[rows].sum() * rho * clipped)
    torch.testing.assert_close(got, batch.gradient(losses), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "off_policy", [{"mode": "truncate"}, {"mode": "mask"}, *({"mode": "icepop", "level": x} for x in LEVELS)]
)
def test_gspo_refuses_corrections_that_would_make_it_another_loss(off_policy):
    settings = LossSettings(type="gspo", off_policy=OffPolicySettings(**off_policy))
    with pytest.raises(ValueError, match="off_policy: per-token weights .* conflict with the sequence-level loss"):
        Batch("token_mean").loss(settings)


def every_objective():
    """Settings of every loss, correction, level and KL estimator. Losses and estimators are combined by turns."""
    penalties = [
        {"reference_policy_kl_type": kind, "reference_policy_kl_gradient": gradient, **clamps}
        for kind, gradient, clamps in product(
            KL_KINDS,
            ("estimator", "score", "importance"),
            ({}, {"kl_input_clamp_value": None, "kl_output_clamp_value": 10.0}),
        )
    ]
    for number, (kind, mode, level) in enumerate(product(LOSSES, CORRECTIONS, LEVELS)):
        settings = full_settings(kind, "token_mean", mode, level)
        if kind == "gspo" and (mode == "icepop" or level == "token"):  # refused: unlike weights within a sequence
            settings = replace(settings, off_policy=OffPolicySettings(mode="none"))
        yield replace(settings, **penalties[number % len(penalties)])


def extreme(values: torch.Tensor, by_token: dict[int, float]) -> torch.Tensor:
    """The values, of which every tenth is replaced from each of these tokens on."""
    changed = values.clone()
    for first, value in by_token.items():
        changed[first::10] = value
    return changed


def test_tokens_without_weight_change_nothing_for_all_log_probs():
    batch = Batch()
    shift = extreme(torch.zeros(len(batch.ids)), {0: -1e30, 1: -np.inf, 2: np.inf, 3: np.nan, 4: 1e4})
    batch.fields = replace(batch.fields, weights=batch.fields.weights * (shift == 0))
    names = ("old_logprobs", "sampler_logprobs", "reference_logprobs", "advantages")
    far = replace(batch.fields, **{name: getattr(batch.fields, name) + shift for name in names})
    for settings in every_objective():
        found = []
        for fields, change in ((batch.fields, 0.0), (far, shift)):
            logprobs = batch.features @ batch.parameter - 1 + change
            loss, metrics = policy_loss(logprobs, batch.entropy_features @ batch.parameter, fields, settings)
            found.append((loss, batch.gradient([loss]), *metrics.sums.values(), *metrics.maxima.values()))
        assert all(value.isfinite().all() for value in found[0]), settings
        assert all(map(torch.equal, *found)), settings


def test_extreme_log_probs_of_trained_tokens_leave_loss_gradient_and_metrics_finite():
    batch = Batch()
    fields = batch.fields
    # NaN: the sampler's log-prob is not known.
    batch.fields = replace(
        fields,
        old_logprobs=extreme(fields.old_logprobs, {0: -1e3, 1: -1e30}),
        sampler_logprobs=extreme(fields.sampler_logprobs, {2: -1e3, 3: -1e30, 4: np.nan}),
        reference_logprobs=extreme(fields.reference_logprobs, {5: -1e3, 6: -1e30}),
    )
    for settings in every_objective():
        loss, metrics = batch.loss(settings)
        values = [loss, batch.gradient([loss]), *metrics.sums.values(), *metrics.maxima.values()]
        assert all(value.isfinite().all() for value in values), settings


@pytest.mark.parametrize("kind", KL_KINDS)
def test_importance_of_an_unlikely_sample_has_neither_value_nor_gradient_in_float32(kind):
    """exp(-1 + 200) is infinite in float32. The second token has the weight exp(0.2), and d = 0.5."""
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    sampler, reference = torch.tensor([-200.0, -1.2]), torch.tensor([-1.5, -1.5])
    kl = kl_penalty(logprobs, reference, kind, weight=score_weight(logprobs, sampler))
    alone = logprobs[1:].detach().requires_grad_()
    expected = kl_penalty(alone, reference[1:], kind, weight=score_weight(alone, sampler[1:]))
    (gradient,) = torch.autograd.grad(kl.sum(), logprobs)
    assert kl.tolist() == [0, expected.item()]
    assert gradient.tolist() == [0, torch.autograd.grad(expected.sum(), alone)[0].item()]
    for penalty in (
        score_weight(logprobs, sampler),
        kl_penalty(logprobs, sampler, kind, input_clamp=None, output_clamp=1),
    ):
        (gradient,) = torch.autograd.grad(penalty[0], logprobs)
        assert gradient.tolist() == [0, 0] and penalty[0] in (0, 1)
