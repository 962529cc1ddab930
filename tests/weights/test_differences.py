"""Differences between versions of words: they restore the new version, stay small, and damage is safe."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_streams import Launches

from gdpo_nemo.weights import difference
from gdpo_nemo.weights.difference import apply, encode

BLOCK = 65_536
LENGTHS = st.sampled_from([0, 1, 2, 4095, 9000, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 4 * BLOCK + 77])
DENSITIES = st.lists(st.sampled_from([0.0, 1e-5, 0.01, 0.06, 0.0625, 0.07, 0.5, 0.95, 1.0]), min_size=5, max_size=5)
STEPS = st.sampled_from([1, 127, 128, 129, 32767])
"""Largest change of a word. Larger ones than 127 need two bytes."""


def versions(words: int, densities: list[float], step: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (new, old) words, int16 [words]. A share of each block changes by up to ``step``, with wraps.

    The words have all bit patterns, so they include NaN and infinity in bfloat16.
    """
    draw = torch.Generator().manual_seed(seed)
    old = torch.randint(-(2**15), 2**15, (words,), dtype=torch.int16, generator=draw)
    shares = torch.tensor(densities).repeat_interleave(BLOCK)[:words]
    steps = torch.randint(-step, step + 1, (words,), dtype=torch.int16, generator=draw)
    return torch.where(torch.rand(words, generator=draw) < shares, old + steps, old), old


@pytest.mark.parametrize("on_cpu", [True, False])
@settings(max_examples=60, deadline=None)
@given(words=LENGTHS, densities=DENSITIES, step=STEPS, seed=st.integers(0, 99))
def test_apply_inverts_encode(on_cpu, words, densities, step, seed):
    new, old = versions(words, densities, step, seed)
    before = new.clone(), old.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(difference, "_is_on_cpu", lambda tensor: on_cpu)
        encoded, changed = encode(new, old)
        message = encoded.clone()
        assert torch.equal(new, before[0]) and torch.equal(old, before[1])
        apply(old, encoded)
    assert torch.equal(old, new) and torch.equal(encoded, message)
    assert changed == int((new != before[1]).sum())
    assert encoded.nbytes % 8 == 0 and encoded.nbytes <= 2 * words + 4 * -(-words // BLOCK) + 7


@settings(max_examples=20, deadline=None)
@given(densities=DENSITIES, step=STEPS)
def test_encoded_difference_does_not_depend_on_the_words_processed_together(densities, step):
    new, old = versions(4 * BLOCK + 77, densities, step)
    with pytest.MonkeyPatch.context() as patch:
        expected, _ = encode(new, old)
        for blocks in (1, 3):
            patch.setattr(difference, "_words_at_once", lambda words, blocks=blocks: blocks * BLOCK)
            assert torch.equal(encode(new, old)[0], expected)
            patched = old.clone()
            apply(patched, expected)
            assert torch.equal(patched, new)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, BLOCK), min_size=1, max_size=3), st.integers(0, 50))
def test_size_follows_from_the_number_of_changes(counts, escaped):
    """A block takes 3 bytes for each small change, but at most a bit for each word and a byte for each change."""
    new = torch.zeros(len(counts) * BLOCK, dtype=torch.int16)
    for block, count in zip(new.view(-1, BLOCK), counts):
        block[torch.randperm(BLOCK)[:count]] = 1
        block[block.nonzero().squeeze(1)[:escaped]] = -300
    encoded, changed = encode(new, torch.zeros_like(new))
    expected = sum(min(2 * BLOCK, min(2 * c, BLOCK // 8) + c + 2 * min(c, escaped)) for c in counts)
    assert changed == sum(counts)
    assert 0 <= encoded.nbytes - expected - 4 * len(counts) < 9


@settings(max_examples=150, deadline=None)
@given(st.data(), LENGTHS, DENSITIES, STEPS)
def test_damaged_difference_writes_only_to_the_words(data, words, densities, step):
    """The result is an error or wrong words, for which the bucket has checksums."""
    new, old = versions(words, densities, step)
    encoded, _ = encode(new, old)
    damaged = encoded.clone()
    for _ in range(data.draw(st.integers(0, 3)) if encoded.numel() else 0):
        near = data.draw(st.sampled_from([64, encoded.numel()]))
        damaged[data.draw(st.integers(0, min(near, encoded.numel()) - 1))] = data.draw(st.integers(0, 255))
    length = data.draw(st.sampled_from([encoded.numel(), 0, 3, encoded.numel() // 2, encoded.numel() + 8]))
    damaged = torch.cat([damaged, damaged.new_zeros(8)])[:length]
    memory = torch.full((words + 2 * BLOCK,), 7, dtype=torch.int16)
    memory[BLOCK : BLOCK + words] = old
    try:
        apply(memory[BLOCK : BLOCK + words], damaged)
    except ValueError:
        pass
    else:
        assert length == encoded.numel()
        assert torch.equal(memory[BLOCK : BLOCK + words], new) or not torch.equal(damaged, encoded)
    assert bool((memory[:BLOCK] == 7).all()) and bool((memory[BLOCK + words :] == 7).all())


@pytest.mark.parametrize("density", [0.01, 0.3])
def test_bucket_of_7b_takes_some_hundred_launches(density, monkeypatch):
    """Launches for 256 MiB on a GPU, which processes 128 blocks together, from those for two and for three parts."""
    monkeypatch.setattr(difference, "_is_on_cpu", lambda tensor: False)
    counted = []
    for parts in (2, 3):
        new, old = versions(parts * 128 * BLOCK, [density] * parts * 128, 200)
        with Launches() as encoding:
            encoded, _ = encode(new, old)
        with Launches() as applying:
            apply(old, encoded)
        counted.append((encoding.count, applying.count))
    for two, three in zip(*counted):
        assert three + (three - two) * 13 < 1000, counted
