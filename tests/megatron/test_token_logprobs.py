"""Vocabulary-parallel log-probs and entropies are those of log_softmax, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest
import rank_cases
import tiny_models
import torch
from hf_reference import relative_error

pytestmark = pytest.mark.slow

# (real vocabulary, padded vocabulary); in the last case one of two ranks holds padding only.
VOCABULARIES = [(100, 100), (99, 100), (3, 8)]


def random_case(vocabulary: int, padded: int, tokens: int = 37):
    rng = np.random.default_rng(vocabulary)
    logits = rng.normal(0, 4, (tokens, padded)).astype(np.float32)
    logits[0] += 300  # exp(300) is not a float32: the largest logit has to be taken off first
    targets = rng.integers(0, vocabulary, tokens)
    gradients = rng.normal(size=(2, tokens)).astype(np.float32)
    return logits, targets, gradients


def expected_values(logits, targets, gradients, vocabulary, temperature):
    x = torch.from_numpy(logits).double().requires_grad_()
    log_p = (x[:, :vocabulary] / temperature).log_softmax(-1)
    logprobs = log_p.gather(-1, torch.from_numpy(targets)[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (logprobs * torch.from_numpy(gradients[0]) + entropy * torch.from_numpy(gradients[1])).sum().backward()
    return logprobs.detach().numpy(), entropy.detach().numpy(), x.grad.numpy()


@pytest.mark.parametrize("layout", ["TP1", "TP2"])
@pytest.mark.parametrize("vocabulary, padded", VOCABULARIES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_log_softmax(on_ranks, layout, vocabulary, padded, temperature):
    logits, targets, gradients = random_case(vocabulary, padded)
    options = dict(temperature=temperature, vocab_size=vocabulary)
    results = on_ranks(layout, rank_cases.token_values, logits, targets, options, gradients)
    logprobs, entropy, grad = expected_values(logits, targets, gradients, vocabulary, temperature)
    for result in results:
        np.testing.assert_allclose(result[0], logprobs, atol=1e-4, rtol=0)
        np.testing.assert_allclose(result[1], entropy, atol=1e-4, rtol=0)
    np.testing.assert_allclose(np.concatenate([r[2] for r in results], -1), grad, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", ["TP1", "TP2"])
def test_the_chunk_size_changes_no_bit(on_ranks, layout):
    logits, targets, gradients = random_case(99, 100)
    whole, parts = (
        on_ranks(layout, rank_cases.token_values, logits, targets, dict(vocab_size=99, chunk=chunk), gradients)
        for chunk in (1000, 5)
    )
    for a, b in zip(whole, parts):
        for x, y in zip(a, b):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("layout", ["TP1", "TP2+SP"])
def test_recomputed_logits_train_like_stored_ones(on_ranks, model_folder, layout):
    batch = tiny_models.make_batch()
    arguments = (rank_cases.updates, model_folder("qwen2-tied"), batch, 2, 200, None)
    kept, recomputed = (on_ranks(layout, *arguments, limit) for limit in (None, 8 * 4 * 100))
    assert relative_error(recomputed[0].steps, kept[0].steps) < 1e-6


def test_sampling_temperature_is_part_of_the_policy(on_ranks, model_folder):
    import hf_reference
    import layouts

    batch = tiny_models.make_batch()
    folder = model_folder("qwen2")
    expected = hf_reference.run(folder, batch, 2, layouts.optimizer(), temperature=0.6)
    results = on_ranks("TP2", rank_cases.updates, folder, batch, 2, 80, None, None, "float32", 0.6)
    assert relative_error(results[0].steps, expected.steps) < 1e-5
