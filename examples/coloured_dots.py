r"""Images with coloured dots, and three rewards: how many dots, in which colour, in which quarter of the image.

    uv run examples/run_gdpo.py --config configs/gdpo_dots_cpu.yaml
    uv run gdpo-nemo eval results/dots env.dots.images=shuffled --out results/dots_shuffled

The prompt is an image and the same word in every row, so only the image determines the right answer, such as
``three red top-left``. Each row draws its count, colour and place independently and uniformly, so an answer that does
not depend on the image earns 0.25 of each reward on average. With ``images: shuffled``, every row has the image of
another row. A model that looks at its image then falls to 0.25.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gdpo_nemo import ConfigError, Environment, Trajectory, Verdict, read_options

if TYPE_CHECKING:
    from PIL.Image import Image

QUESTION = "dots?"
WORDS = {
    "count": ("one", "two", "three", "four"),
    "colour": ("red", "green", "blue", "yellow"),
    "place": ("top-left", "top-right", "bottom-left", "bottom-right"),
}
"""Right words of an answer by component, in the order of the answer."""

RGB = dict(zip(WORDS["colour"], ((220, 40, 40), (40, 160, 60), (50, 80, 220), (230, 200, 40))))
"""RGB values of the dots by colour."""

_QUARTER = 32
"""Width and height of a quarter of the image in pixels, which is one image token of the demo's model."""
_CELL = _QUARTER // 2
_RADIUS = 6
_GREY = (190, 194)
"""Range of red, green and blue of the background. It makes images distinct, so that those of validation are held out.
A short warm-up learns the places slowly on a white background, and the counts slowly on a dark one."""


class ColouredDots(Environment):
    """Environment for images with one to four dots of one colour in one quarter of the image.

    Components: ``count``, ``colour`` and ``place`` (1 if this word of the answer is right), and ``all`` (1 if the whole
    answer is right, for reporting). An answer that is not three words, or is truncated, earns nothing.

    Option: ``images`` (own), or ``shuffled`` to give each row the image of another row.
    """

    reward_names = (*WORDS, "all")

    def __init__(self, options: Mapping[str, Any] | None = None):
        images = read_options("dots", options, images="own").images
        if images not in ("own", "shuffled"):
            raise ConfigError(f"environment dots: images must be own or shuffled, got {images!r}")
        self._shuffled = images == "shuffled"

    def rows(self, split: str, size: int | None, seed: int) -> list[Mapping[str, Any]]:
        """Return ``size`` rows (default: 1000), each with its image and the right word of each component."""
        rng = random.Random(f"{split} {seed}")
        rows = [_row(rng, f"{split}/{index}") for index in range(size or 1000)]
        if not self._shuffled:
            return rows
        images = [row["image"] for row in rows]
        return [{**row, "image": image} for row, image in zip(rows, images[1:] + images[:1])]

    def examples(self, row: Mapping[str, Any]) -> list[str]:
        """Return a right answer and a completion without reward."""
        return [right_answer(row), QUESTION]

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return one verdict per trajectory."""
        return [self._verdict(trajectory) for trajectory in trajectories]

    def _verdict(self, trajectory: Trajectory) -> Verdict:
        words = trajectory.text.split()
        complete = len(words) == len(WORDS) and trajectory.finish_reason == "stop"
        right = [trajectory.prompt.fields[name] for name in WORDS]
        rewards = {name: float(complete and word == wanted) for name, word, wanted in zip(WORDS, words, right)}
        rewards = {name: rewards.get(name, 0.0) for name in WORDS}
        return Verdict({**rewards, "all": float(words == right and complete)})


def right_answer(row: Mapping[str, Any]) -> str:
    """Return the right answer to a row."""
    return " ".join(row[name] for name in WORDS)


def _row(rng: random.Random, row_id: str) -> dict[str, Any]:
    labels = {name: rng.choice(words) for name, words in WORDS.items()}
    return {"id": row_id, "prompt": QUESTION, "image": _draw(rng, **labels), **labels}


def _draw(rng: random.Random, count: str, colour: str, place: str) -> Image:
    """Return an RGB image. Each dot lies in a different quarter of the place, near its centre."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (2 * _QUARTER, 2 * _QUARTER), tuple(rng.randint(*_GREY) for _ in range(3)))
    drawing = ImageDraw.Draw(image)
    below, right = divmod(WORDS["place"].index(place), 2)
    for index in rng.sample(range(4), WORDS["count"].index(count) + 1):
        row, column = divmod(index, 2)
        x = right * _QUARTER + column * _CELL + _CELL // 2 + rng.randint(-1, 1)
        y = below * _QUARTER + row * _CELL + _CELL // 2 + rng.randint(-1, 1)
        drawing.ellipse((x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS), fill=RGB[colour])
    return image
