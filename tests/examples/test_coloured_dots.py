"""The environment of examples/coloured_dots.py: its images, its rewards, and images of other rows."""

import importlib
from itertools import islice

import numpy as np
import pytest

from gdpo_nemo.data.image_processor import decoded
from gdpo_nemo.data.records import Prompt, Trajectory
from gdpo_nemo.environments.registry import load_environment
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.source import REPOSITORY

PLUGIN = f"{REPOSITORY / 'examples' / 'coloured_dots.py'}:ColouredDots"
RGB = {"red": (220, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220), "yellow": (230, 200, 40)}
COUNTS = ("one", "two", "three", "four")
CORNERS = {
    (False, False): "top-left",
    (False, True): "top-right",
    (True, False): "bottom-left",
    (True, True): "bottom-right",
}
DOT = 137
"""Number of pixels of a dot."""
COMPONENTS = ("count", "colour", "place")


def dots(**options):
    return load_environment("dots", {"plugin": PLUGIN, **options})


def seen(image):
    """Return the words that describe an image, from its pixels."""
    pixels = np.asarray(image)
    assert pixels.shape == (64, 64, 3)
    (colour,) = [name for name, rgb in RGB.items() if (pixels == rgb).all(-1).any()]
    mask = (pixels == RGB[colour]).all(-1)
    ((below, right_half),) = {(y >= 32, x >= 32) for y, x in zip(*np.nonzero(mask))}
    return COUNTS[round(mask.sum() / DOT) - 1], colour, CORNERS[below, right_half]


def right(row):
    return tuple(row[name] for name in COMPONENTS)


def test_image_shows_the_words_of_its_row():
    rows = dots().rows("train", 300, 0)
    assert [seen(row["image"]) for row in rows] == [right(row) for row in rows]
    assert {row["prompt"] for row in rows} == {"dots?"} and len({row["id"] for row in rows}) == 300
    assert all(len({row[name] for row in rows}) == 4 for name in COMPONENTS)


def test_rows_depend_on_split_and_seed_only():
    def images(*arguments):
        return [row["image"].tobytes() for row in dots().rows(*arguments)]

    train = images("train", 50, 0)
    assert train == images("train", 50, 0) and images("train", 20, 0) == train[:20]
    assert not set(train) & {*images("train", 50, 1)}


def test_images_are_distinct_and_those_of_validation_are_held_out():
    images = [row["image"].tobytes() for split in ("train", "validation") for row in dots().rows(split, 1000, 0)]
    assert len(set(images)) >= 1995


def test_shuffled_images_agree_with_a_quarter_of_the_words():
    own, shuffled = (dots(images=images).rows("validation", 1000, 0) for images in ("own", "shuffled"))
    assert [right(row) for row in own] == [right(row) for row in shuffled]
    assert {row["image"].tobytes() for row in own} == {row["image"].tobytes() for row in shuffled}
    agreement = np.mean([np.equal(seen(row["image"]), right(row)) for row in shuffled], axis=0)
    assert agreement == pytest.approx([0.25] * 3, abs=0.04)
    with pytest.raises(ConfigError, match="must be own or shuffled"):
        dots(images="none")


@pytest.mark.parametrize(
    ("text", "finish", "rewards"),
    [
        ("three red top-left", "stop", (1, 1, 1, 1)),
        ("two red top-left", "stop", (0, 1, 1, 0)),
        ("three blue top-right", "stop", (1, 0, 0, 0)),
        ("red three top-left", "stop", (0, 0, 1, 0)),
        ("three red top-left", "length", (0, 0, 0, 0)),
        ("three red", "stop", (0, 0, 0, 0)),
        ("three red top-left top-left", "stop", (0, 0, 0, 0)),
        ("", "stop", (0, 0, 0, 0)),
    ],
)
def test_each_word_is_a_reward_of_a_complete_answer(text, finish, rewards):
    fields = {"count": "three", "colour": "red", "place": "top-left"}
    prompt = Prompt("dots/0", np.array([6], np.int32), "dots?", "dots", fields, None)
    trajectory = Trajectory(prompt, 0, np.array([7, 1], np.int32), np.zeros(2, np.float32), 0, text, finish)
    (verdict,) = dots().verify([trajectory])
    assert tuple(verdict.rewards.values()) == rewards and tuple(verdict.rewards) == (*COMPONENTS, "all")


def test_half_of_the_words_of_warm_up_texts_describe_the_image(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))
    makers = importlib.import_module("make_tiny_model")
    tokenizer = makers.dots_tokenizer()
    makers._write_random(tmp_path, tokenizer, 0, makers.MODEL_CONFIGS["make_dots_model"])
    makers._write_dots_processor(tmp_path, tokenizer)
    rows = list(islice(makers._dots_rows(0, tokenizer, tmp_path), 500))
    (placeholder,) = tokenizer.encode("<|image_pad|>", add_special_tokens=False)
    for row in rows:
        ((image, start, tokens),) = row.images
        assert row.prompt.count(placeholder) == tokens == 4 and row.prompt[start : start + 4] == [placeholder] * 4
        assert len(row.completion) == 4 and row.completion[-1] == makers.EOS
    texts = [tokenizer.decode(row.completion[:-1]).split() for row in rows]
    share = np.mean([np.equal(text, seen(decoded(row.images[0].image))) for text, row in zip(texts, rows)], axis=0)
    assert share == pytest.approx([0.35 + 0.65 / 4] * 3, abs=0.07)
