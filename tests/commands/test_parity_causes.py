"""Each known cause of disagreement, provoked with a real model, is named; agreement is not blamed on anything."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gdpo_nemo.commands.parity import compare, diagnose

LENGTHS = [(5, 20), (3, 31), (9, 12), (4, 27)]


@pytest.fixture(scope="module")
def model():
    """A small random Qwen2 of transformers, and sequences for it."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, initializer_range=0.4,
    )  # fmt: skip
    sequences = [torch.randint(0, 64, (p + c,)) for p, c in LENGTHS]
    return AutoModelForCausalLM.from_config(config).eval(), sequences


@torch.no_grad()
def score(model, temperature=1.0, top_p=1.0, separate=True):
    """Log-probs of the completions as float32 arrays; not ``separate``: sequences in one row that see each other."""
    network, sequences = model
    if separate:
        logits = [network(ids[None]).logits[0] for ids in sequences]
    else:
        logits = network(torch.cat(sequences)[None]).logits[0].split([len(ids) for ids in sequences])
    out = []
    for ids, row, (prompt, _) in zip(sequences, logits, LENGTHS):
        p = (row / temperature).softmax(-1)
        if top_p < 1:
            order = p.sort(-1, descending=True)
            kept = order.values.cumsum(-1) - order.values < top_p
            mass = torch.where(kept, order.values, 0.0).sum(-1, keepdim=True)
            p = p / mass
        out.append(p.log()[prompt - 1 : -1].gather(-1, ids[prompt:, None])[:, 0].numpy())
    return out


def causes(model, measured, **known):
    return diagnose(score(model), measured, 1e-4, **known)


def test_agreement_has_no_cause(model):
    rounded = [v + np.float32(3e-6) for v in score(model)]
    assert causes(model, rounded) == []


def test_a_shift_by_one_token_is_named_with_its_direction(model):
    ahead = [np.append(v[1:], v[-1]) for v in score(model)]
    behind = [np.append(v[0], v[:-1]) for v in score(model)]
    assert "one token ahead" in causes(model, ahead)[0]
    assert "one token behind" in causes(model, behind)[0]


def test_another_temperature_is_named(model):
    tempered = {t: score(model, temperature=t) for t in (0.8, 1.2, 1.5)}
    assert causes(model, score(model, temperature=1.2), tempered=tempered) == ["temperature: measured at 1.2"]


def test_renormalisation_over_a_nucleus_is_named(model):
    (cause,) = causes(model, score(model, top_p=0.7))
    assert cause.startswith("nucleus renormalisation")


def test_sequences_that_see_their_neighbours_in_a_pack_are_named(model):
    found = causes(model, score(model, separate=False), not_packed=score(model))
    assert any(cause.startswith("packing") for cause in found)


def test_faults_at_context_parallel_chunk_edges_are_named(model):
    """The label of a chunk's last token taken from the wrong chunk: what rolling labels locally does."""
    measured = [v.copy() for v in score(model)]
    for values, (prompt, completion) in zip(measured, LENGTHS):
        chunk = -(-(prompt + completion) // 4)
        for edge in range(chunk - 1, prompt + completion - 1, chunk):
            if edge >= prompt - 1:
                values[edge - prompt + 1] -= 2.0
    known = dict(prompt_lengths=[p for p, _ in LENGTHS], context_size=2)
    (cause,) = causes(model, measured, **known)
    assert cause.startswith("chunk boundaries")


def test_other_weights_are_named(model):
    import copy

    network, sequences = model
    stale = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in stale.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    (cause,) = causes(model, score((stale, sequences)))
    assert cause.startswith("other weights")


def test_worst_tokens_are_found_at_their_positions_and_nan_is_worst(model):
    reference = score(model)
    measured = [v.copy() for v in reference]
    measured[2][7] += 0.5
    tokens = [ids[p:].numpy() for ids, (p, _) in zip(model[1], LENGTHS)]
    found = compare("x", reference, measured, tokens)
    assert found.max_abs == pytest.approx(0.5, abs=1e-6)
    assert (found.worst[0]["sequence"], found.worst[0]["offset"]) == (2, 7)
    assert found.worst[0]["token"] == int(tokens[2][7])
    measured[0][3] = np.nan
    found = compare("x", reference, measured, tokens)
    assert np.isnan(found.max_abs) and (found.worst[0]["sequence"], found.worst[0]["offset"]) == (0, 3)
    assert causes(model, measured) == ["NaN values"]
