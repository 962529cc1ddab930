"""Positions and rows of images in packs, compared with transformers and with a plain definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, strategies as st

from gdpo_nemo.data.image_rows import rope_positions
from gdpo_nemo.data.images import Image, PlacedImage
from gdpo_nemo.data.packing import TrainSequence, pack_rows

PLACEHOLDER = 7
sequences_of_parts = st.lists(
    st.one_of(st.integers(1, 6), st.tuples(st.integers(1, 4), st.integers(1, 5))), min_size=1, max_size=5
)
"""Lengths of texts, and (rows, columns) of images."""


def grid(image: Image) -> tuple[int, int]:
    """Return the size in tokens, of which the images of this file have one per pixel."""
    return image.height, image.width


def zigzag(length, rank, size):
    """Return the positions of a context-parallel rank: one chunk from each end."""
    if size == 1:
        return list(range(length))
    chunks = np.split(np.arange(length), 2 * size)
    return [*chunks[rank], *chunks[2 * size - 1 - rank]]


def make_sequence(parts, prompt: int | None = None, shared: int = 0) -> TrainSequence:
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, tuple):
            rows, columns = part
            image = Image(f"{rows:032x}{columns:032x}", columns, rows, b"")
            images.append(PlacedImage(image, len(ids), rows * columns))
            ids += [PLACEHOLDER] * (rows * columns)
        else:
            ids += [PLACEHOLDER, *range(100, 100 + part)][:part]  # texts may contain the token as well
    prompt = len(ids) - 1 if prompt is None else prompt
    tokens = np.array(ids, np.int32)
    return TrainSequence(
        tokens[:prompt],
        tokens[prompt:],
        np.zeros(len(ids) - prompt, np.float32),
        images=tuple(images),
        shared=shared,
    )


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def theirs(request):
    """transformers' function, of a model without memory."""
    import transformers

    names = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
    prefix = names[request.param]
    config = getattr(transformers, f"{prefix}Config")()
    config.text_config.num_hidden_layers = config.vision_config.depth = 1
    with torch.device("meta"):
        return getattr(transformers, f"{prefix}Model")(config)


@given(parts=sequences_of_parts)
def test_positions_equal_transformers(theirs, parts):
    s = make_sequence(parts)
    ids = np.concatenate((s.prompt_ids, s.completion_ids))
    kinds = np.zeros(len(ids), np.int32)
    for placed in s.images:
        kinds[placed.start : placed.stop] = 1
    # Neighbouring images would be one group of placeholders, but templates put tokens between them.
    assume(all(a.stop < b.start for a, b in zip(s.images, s.images[1:])))
    grids = torch.tensor([[1, 2 * p.image.height, 2 * p.image.width] for p in s.images]).view(-1, 3)
    expected, _ = theirs.get_rope_index(
        torch.from_numpy(ids)[None].long(), torch.from_numpy(kinds)[None], image_grid_thw=grids
    )
    assert np.array_equal(rope_positions(len(ids), s.images, grid), expected[:, 0].T.numpy())


@given(batch=st.lists(sequences_of_parts, min_size=1, max_size=4), size=st.sampled_from([1, 2]))
def test_rows_of_all_context_ranks_are_the_placeholders(batch, size):
    sequences = [make_sequence(parts) for parts in batch]
    found: list[tuple[int, str, int]] = []
    for rank in range(size):
        pack = pack_rows(
            sequences,
            range(len(sequences)),
            context_rank=rank,
            context_size=size,
            positions=zigzag,
            grid=grid,
        )
        places = []
        for i, length in enumerate(pack.padded_lengths):
            places += [(i, token) for token in zigzag(length, rank, size)]
        for (i, token), axes in zip(places, pack.rope_positions):
            s = sequences[i]
            if token < len(s):
                assert np.array_equal(axes, rope_positions(len(s), s.images, grid)[token])
        if pack.images is None:
            continue
        counts = [image.width * image.height for image in pack.images.images]
        cells = [(image.sha256, cell) for image, count in zip(pack.images.images, counts) for cell in range(count)]
        assert len(set(pack.images.images)) == len(counts)
        for row, cell in zip(pack.images.rows, pack.images.cells):
            found.append((*places[row], *cells[cell]))
    expected = []
    for i, s in enumerate(sequences):
        for placed in s.images:
            expected += [(i, placed.start + cell, placed.image.sha256, cell) for cell in range(placed.tokens)]
    assert sorted(found) == sorted(expected)


def test_shared_tokens_have_rows_only_in_the_first_sequence():
    parts = [2, (2, 3), 4]
    pack = pack_rows([make_sequence(parts), make_sequence([*parts, 3], shared=10)], [0, 1], grid=grid)
    assert pack.images.rows.tolist() == list(range(2, 8)) and len(pack.tokens) == 17
    expected = rope_positions(15, make_sequence([*parts, 3]).images, grid)
    assert np.array_equal(pack.rope_positions, np.concatenate((expected[:12], expected[10:])))


def test_an_empty_micro_batch_has_positions_and_no_images():
    pack = pack_rows([], [], context_size=2, total_multiple=4, positions=zigzag, grid=grid)
    assert pack.rope_positions.shape == (len(pack.tokens), 3) and pack.images is None


def test_a_number_of_placeholders_that_is_not_the_images_is_refused():
    s = make_sequence([1, (2, 3), 2])
    s.images = (s.images[0]._replace(tokens=5),)
    with pytest.raises(ValueError, match="2 x 3 tokens has 5 placeholders"):
        pack_rows([s], [0], grid=grid)
