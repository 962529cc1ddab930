"""Preference updates at every layout are those of one process of transformers, both answers in one micro-batch."""

from __future__ import annotations

from dataclasses import replace

import hf_reference
import layouts
import numpy as np
import pytest
import rank_cases
import torch
from hf_reference import relative_error
from tiny_models import VOCABULARY
from torch.nn.functional import logsigmoid

from gdpo_nemo.algorithms.preference_objectives import PreferenceSettings, PreferenceUpdate
from gdpo_nemo.data.packing import Budget, TrainSequence
from gdpo_nemo.data.prefixes import whole_layout

KL = 0.4


def make_pairs(single: bool = False) -> list[TrainSequence]:
    """Answers of many lengths, down to one token, with log-probs of a starting model; ``single``: one a prompt."""
    draw = np.random.default_rng(7)
    batch = []
    for number, (prompt, *answers) in enumerate([(9, 4, 12), (21, 6, 1), (3, 17, 8), (14, 2, 9), (6, 6, 6)], start=1):
        asked = draw.integers(0, VOCABULARY, prompt).astype(np.int32)
        for sign, length in zip((1, -1), answers):
            if single and sign != (1 if number % 2 else -1):
                continue
            batch.append(
                TrainSequence(
                    asked,
                    draw.integers(0, VOCABULARY, length).astype(np.int32),
                    np.full(length, np.nan, np.float32),
                    weight=1.0,
                    reference_logprobs=draw.normal(-4.5, 0.5, length).astype(np.float32),
                    pair=sign * number,
                )
            )
    return [batch[i] for i in draw.permutation(len(batch))]


def told(kind, batch, **options):
    chosen = sum(len(s.completion_ids) for s in batch if s.pair > 0)
    return PreferenceUpdate(kind, PreferenceSettings(**options), len({abs(s.pair) for s in batch}), chosen, KL)


def objective(kind, batch):
    """The loss of published formulas, of the answers' log-probs as autograd knows them."""
    beta = 0.1

    def loss(logprobs):
        won = {s.pair: v for s, v in zip(batch, logprobs) if s.pair > 0}
        lost = {-s.pair: v for s, v in zip(batch, logprobs) if s.pair < 0}
        start = {s.pair: float(s.reference_logprobs.astype(np.float64).sum()) for s in batch}
        nll = -torch.cat(list(won.values())).mean()
        if kind == "kto":
            each = [1 - torch.sigmoid(beta * (v.sum() - start[n] - KL)) for n, v in won.items()]
            each += [1 - torch.sigmoid(beta * (KL - v.sum() + start[-n])) for n, v in lost.items()]
            return torch.stack(each).mean()
        if kind == "orpo":
            odds = lambda v: v.mean() - torch.log1p(-v.mean().exp())  # noqa: E731
            return nll - beta * torch.stack([logsigmoid(odds(won[n]) - odds(lost[n])) for n in won]).mean()
        if kind == "simpo":  # beta 2, gamma 0.5
            return -torch.stack([logsigmoid(2.0 * (won[n].mean() - lost[n].mean()) - 0.5) for n in won]).mean()
        gaps = torch.stack([won[n].sum() - start[n] - lost[n].sum() + start[-n] for n in won])
        return -logsigmoid(beta * gaps).mean() + 0.5 * nll

    return loss


OPTIONS = {"dpo": dict(rpo_alpha=0.5), "orpo": {}, "simpo": {}, "kto": {}}


@pytest.fixture(scope="module")
def expected(model_folder):
    def run(kind):
        batch = make_pairs(kind == "kto")
        options = layouts.optimizer()
        return hf_reference.run(model_folder("qwen2"), batch, 2, options, objective=objective(kind, batch)).steps

    return {kind: run(kind) for kind in OPTIONS}


CASES = [
    ("TP1", "dpo"), ("TP1", "orpo"), ("TP1", "kto"), ("TP2+SP", "dpo"), ("PP2", "dpo"), ("CP2", "dpo"),
    ("CP2", "orpo"), ("CP2", "simpo"), ("CP2", "kto"), ("DP2+DIST", "dpo"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout, kind", CASES)
def test_preference_updates_equal_transformers_at_every_layout(on_ranks, model_folder, expected, layout, kind):
    batch = make_pairs(kind == "kto")
    update = told(kind, batch, **OPTIONS[kind])
    for sharing in (False, True) if kind == "dpo" else (False,):
        for steps, _, _, saved in on_ranks(layout, rank_cases.of_pairs, model_folder("qwen2"), batch, update, sharing):
            assert relative_error(steps, expected[kind]) < 1e-5
            assert (saved > 0) == sharing


@pytest.mark.slow
def test_metrics_of_pairs_do_not_depend_on_the_layout(on_ranks, model_folder):
    batch = make_pairs()
    update = told("dpo", batch)
    alone, cut = (
        on_ranks(layout, rank_cases.of_pairs, model_folder("qwen2"), batch, update, False)[0][1]
        for layout in ("TP1", "CP2")
    )
    assert cut.keys() == alone.keys() and alone["pairs"] == pytest.approx(5)
    for name, value in alone.items():
        assert cut[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("sharing", [False, True, None])
@pytest.mark.parametrize("ranks, multiple", [(1, 1), (3, 4)])
def test_both_answers_of_a_pair_are_in_one_micro_batch(sharing, ranks, multiple):
    draw = np.random.default_rng(3)
    batch = [replace(s, pair=s.pair + 5 * n * (1 if s.pair > 0 else -1)) for n in range(6) for s in make_pairs()]
    batch = [batch[i] for i in draw.permutation(len(batch))]
    layout = whole_layout(sharing, batch, Budget(ranks, 70, multiple=multiple, quadratic=1e-4))
    bins = [members for share in layout.assignment for members in share]
    assert sorted(i for members in bins for i in members) == list(range(len(batch)))
    assert len({len(share) for share in layout.assignment}) == 1
    for members in bins:
        pairs = [batch[i].pair for i in members]
        assert sorted(pairs) == sorted(-number for number in pairs)
        padded = sum(-(-(len(batch[i]) - layout.shared[i]) // multiple) * multiple for i in members)
        assert padded <= 70 or len(members) == 2
        for i, before in zip(members[1:], members):
            count = layout.shared[i]
            tokens = [np.concatenate((batch[j].prompt_ids, batch[j].completion_ids)) for j in (i, before)]
            assert (tokens[0][:count] == tokens[1][:count]).all() and not layout.shared[members[0]]
    assert (sum(layout.shared) > 0) == (sharing is not False)
