"""Batches of groups whose samples begin alike, in every way in which groups can."""

from __future__ import annotations

import numpy as np
from tiny_models import VOCABULARY

from gdpo_nemo.data.packing import TrainSequence


def sample(draw: np.random.Generator, prompt, completion, masked=None) -> TrainSequence:
    """A sequence with random log-probs and advantage; ``masked``: places of the completion that the policy did not
    write."""
    completion = np.asarray(completion, np.int32)
    mask = np.ones(len(completion), bool)
    mask[list(masked or [])] = False
    return TrainSequence(
        np.asarray(prompt, np.int32),
        completion,
        draw.normal(-4.5, 0.3, len(completion)).astype(np.float32),
        # Of one sign mostly: a loss that cancels to nothing has no relative error.
        advantage=float(draw.normal(1.0, 0.7)),
        old_logprobs=draw.normal(-4.5, 0.3, len(completion)).astype(np.float32),
        loss_mask=mask if masked else None,
    )


def weighted(batch: list[TrainSequence]) -> list[TrainSequence]:
    """The batch with the weights of the mean over all tokens that the policy wrote."""
    tokens = sum(s.num_policy_tokens for s in batch)
    for s in batch:
        s.weight = 1.0 / max(1, tokens)
    return batch


def make_groups(seed: int = 0) -> list[TrainSequence]:
    """Groups of each kind, their samples shuffled."""
    draw = np.random.default_rng(seed)

    def tokens(count):
        return draw.integers(0, VOCABULARY, count)

    long = tokens(21)
    twice = tokens(6)
    first_turn = tokens(7)
    batch = [sample(draw, long, tokens(n)) for n in (3, 11, 7, 1)]  # an ordinary group
    batch += [sample(draw, tokens(9), tokens(8))]  # of one sample
    prompt = tokens(8)
    batch += [sample(draw, prompt, twice) for _ in range(3)]  # equal completions
    batch += [sample(draw, prompt, []), sample(draw, prompt, twice[:4])]  # an empty one, and one that another goes on
    batch += [sample(draw, long[:1], tokens(n)) for n in (4, 5, 2)]  # a prompt of one token, with which another begins
    prompt = tokens(5)
    batch += [sample(draw, prompt, np.concatenate((prompt, tokens(n)))) for n in (4, 6)]  # the prompt again
    prompt = tokens(12)
    turns = np.concatenate((first_turn, tokens(5)))
    batch += [sample(draw, prompt, np.concatenate((turns, tokens(n))), masked=range(7, 12)) for n in (3, 6)]
    batch += [sample(draw, prompt, np.concatenate((first_turn, tokens(4))), masked=[9])]
    batch += [sample(draw, prompt, tokens(6), masked=range(6))]  # nothing of it is the policy's
    batch = weighted(batch)
    batch[2].weight = 0.0
    return [batch[i] for i in draw.permutation(len(batch))]
