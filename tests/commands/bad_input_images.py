"""Cases of test_bad_input.py with images in rows of a vision-language model: each names row and column."""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bad_input import BINARY, Damage
from PIL import Image
from tiny_vision import picture, write_tiny_vision

LOOK = "train --dry-run --config {d}/good.yaml policy.model_name={d}/seeing policy.max_total_sequence_length=256"
TRAIN = "train --config {d}/good.yaml policy.model_name={d}/seeing policy.max_total_sequence_length=256"
SFT = (
    "train --dry-run --config {d}/pairs.yaml algorithm.type=sft policy.model_name={d}/seeing "
    "policy.max_total_sequence_length=256 data.train.path={d}/rows.jsonl data.validation=null"
)
PLACE = {"type": "image"}


@functools.cache
def _model() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory()
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        write_tiny_vision(Path(folder.name), "qwen3_vl")
    return folder


def png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def rows(*wrong: dict[str, Any] | Callable[[Path], dict[str, Any]]) -> Damage:
    """A model with a tower, a good row with an image, and wrong rows after it."""

    def change(d: Path) -> None:
        shutil.copytree(_model().name, d / "seeing")
        (d / "a.png").write_bytes(png(picture(64, 64, 0)))
        found = [{"question": "1+1?", "answer": "#### 2", "image": "a.png", "completion": "2"}]
        for row in wrong:
            found.append({"question": "2+2?", "answer": "#### 4", **(row(d) if callable(row) else row)})
        (d / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))

    return change


def messages(*parts: Any) -> dict[str, Any]:
    return {"question": [{"role": "user", "content": list(parts)}]}


def file(content: bytes, name: str = "b.png") -> Callable[[Path], dict[str, Any]]:
    def make(d: Path) -> dict[str, Any]:
        (d / name).write_bytes(content)
        return {"image": name}

    return make


def link(d: Path) -> dict[str, Any]:
    (d / "link.png").symlink_to("/etc/passwd")
    return {"image": "link.png"}


GOOD = png(picture(64, 64, 1))
URL = "data:image/png;base64," + base64.b64encode(GOOD).decode()
SEEN = "data.train: row 1: "
IMAGE = SEEN + "column 'image': the image "
IMAGES = [
    (LOOK, rows({"image": "b.png"}), IMAGE + "is not a file in {d}"),
    (LOOK, rows({"image": "../b.png"}), IMAGE + "is not a file in {d}"),
    (LOOK, rows(link), IMAGE + "is outside the folder {d}"),
    (LOOK, rows(file(GOOD[:-50])), IMAGE + "is damaged"),
    (LOOK, rows(file(BINARY)), IMAGE + "is not an image"),
    (LOOK, rows(file(b"")), IMAGE + "is not an image"),
    (LOOK, rows(file(png(Image.new("1", (9000, 9000))))), IMAGE + "has 9000 x 9000 pixels; the maximum is 16777216"),
    (LOOK + " data.images.max_pixels=4000", rows(), "row 0: column 'image': the image has 64 x 64 pixels"),
    (LOOK, rows(file(png(Image.new("RGB", (1, 201))))), IMAGE + "has 1 x 201 pixels; each side needs at least 4"),
    (LOOK, rows(file(png(Image.new("RGB", (4000, 10))))), IMAGE + "has 4000 x 10 pixels; the aspect ratio"),
    (LOOK, rows({"image": "http://127.0.0.1:9/a.png"}), IMAGE + "is an address"),
    (LOOK + " data.images.download=true", rows({"image": "http://127.0.0.1:9/"}), IMAGE + "cannot be downloaded"),
    (LOOK, rows({"image": 7}), IMAGE + "must be an image"),
    (LOOK, rows({"image": {"bytes": None, "path": None}}), IMAGE + "must be an image"),
    (LOOK, rows({"images": ["a.png", "b.png"]}), SEEN + "column 'images': image 1 is not a file"),
    (LOOK, rows({"images": [URL] * 9}), SEEN + "9 images (column 'images'), but data.images.max_per_prompt is 8"),
    (LOOK + " data.images.max_per_prompt=1", rows({"images": [URL] * 2}), SEEN + "2 images (column 'images')"),
    (LOOK, rows({**messages(PLACE, PLACE), "image": URL}), SEEN + "2 placeholders of images, but 1 image (column 'i"),
    (LOOK, rows(messages(PLACE)), SEEN + "1 placeholder of images, but 0 images (no column"),
    (LOOK, rows({**messages(PLACE), "images": [URL, URL]}), SEEN + "1 placeholder of images, but 2 images"),
    (LOOK, rows({"question": "<|image_pad|>"}), SEEN + "column 'question': a text contains the placeholder"),
    (LOOK, rows(messages({"type": "image_url", "image_url": {"url": "a"}})), "row 1: column 'question': the image"),
    (LOOK, rows({"video": "a.mp4"}), SEEN + "contains video, but only text and images are supported"),
    (LOOK, rows(messages({"type": "audio"})), SEEN + "contains audio, but only text and images are supported"),
    (LOOK + " data.images.folder={d}/nowhere", rows(), "data.images.folder: {d}/nowhere is not a folder"),
    (LOOK + " data.images.folder={d}/empty", rows(), "row 0: column 'image': the image is not a file in {d}/empty"),
    (LOOK + " data.images.max_pixels=0", rows(), "data.images.max_pixels"),
    (LOOK + " data.images.max_per_promt=1", rows(), "data.images.max_per_promt"),
    (LOOK.replace("seeing", "model") + " data.images.max_per_prompt=1", None, "has no vision tower"),
    (LOOK.replace("seeing", "model"), rows(), "row 0: contains image, but only text is supported"),
    (TRAIN, rows({**messages(PLACE, PLACE), "image": URL}), SEEN + "2 placeholders of images, but 1 image"),
    (SFT + " data.train.prompt_key=question", rows({"completion": "x", "image": "b.png"}), IMAGE + "is not a file"),
    (SFT + " data.train.prompt_key=question", rows({"completion": "<|image_pad|>"}), SEEN + "column 'completion'"),
    (SFT, rows({"messages": [{"role": "user", "content": [PLACE]}]}), "data.train: row 1: "),
    ("env check gsm8k --config {d}/good.yaml", rows({"image": "b.png"}), IMAGE + "is not a file"),
]
