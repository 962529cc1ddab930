"""Images reach reward functions as PIL images, judges and servers as data URLs, and workers once per prompt."""

from __future__ import annotations

import base64
import hashlib
import io
import pickle
from dataclasses import replace

import numpy as np
import pytest
from environment_samples import trajectory
from PIL import Image as Pillow
from reward_server import RewardServer

from gdpo_nemo.data.images import Image, PlacedImage
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.environments.execution.pool import EnvironmentPool
from gdpo_nemo.environments.images import filled
from gdpo_nemo.environments.registry import load_environment
from gdpo_nemo.environments.tasks.reward_functions import Functions
from gdpo_nemo.environments.tasks.reward_model import Scorer
from gdpo_nemo.utils.errors import RunError


def image(seed: int, size: int = 24, kind: str = "PNG") -> Image:
    """Encoded random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Pillow.fromarray(pixels).save(buffer, kind)
    return Image(hashlib.sha256(buffer.getvalue()).hexdigest(), size, size, buffer.getvalue())


def asked(text: str, *images: Image, name: str = "p", index: int = 0, **fields):
    """A sample of a prompt with images, whose row has them in the column ``images``."""
    parts: list = [{"type": "image"} for _ in images]
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [*parts, {"type": "text", "text": "?"}]},
    ]
    made = trajectory(text, "functions", name, index, messages=messages, images=list(images), **fields)
    placed = tuple(PlacedImage(image, number, 1) for number, image in enumerate(images))
    return replace(made, prompt=replace(made.prompt, images=placed))


def red(image: Image) -> int:
    """Red of the first pixel."""
    return Pillow.open(io.BytesIO(image.data)).getpixel((0, 0))[0]


def paints(completions, images, prompts, **columns):
    """Look at the images, then paint over them."""
    found = []
    for row, prompt in zip(images, prompts):
        parts = prompt[1]["content"]
        assert [part["type"] for part in parts] == [*["image"] * len(row), "text"]
        assert all(part["image"] is picture for part, picture in zip(parts, row))
        assert prompt[0] == {"role": "system", "content": [{"type": "text", "text": "s"}]}
        found.append(float(sum(picture.getpixel((0, 0))[0] for picture in row)))
    for picture in {id(picture): picture for row in images for picture in row}.values():
        picture.paste((0, 0, 0), (0, 0, 24, 24))
    return found


async def looks(images):
    return [float(sum(picture.getpixel((0, 0))[0] for picture in row)) for row in images]


def same(images, completions):
    """Return whether the samples of a prompt get the same object, which is decoded once."""
    return [float(len({id(row[0]) for row in images})) for _ in completions]


def later(completions, prompts):
    (prompt,), (completion,) = prompts, completions
    pictures = prompt[1]["content"][0]["image"], completion[1]["content"][0]["image"]
    return [1000 * pictures[0].getpixel((0, 0))[0] + pictures[1].getpixel((0, 0))[0]]


def as_before(image, prompts):
    return [float(image == [None] and prompts == [[{"role": "user", "content": "u"}]])]


PLACE = {"paints": f"{__file__}:paints", "looks": f"{__file__}:looks", "same": f"{__file__}:same"}


def test_functions_get_pil_images_that_no_other_function_has_changed():
    one, two = image(1), image(2, kind="JPEG")
    samples = [asked("a", one), asked("b", one, index=1), asked("c", two, one, name="q"), asked("d", two, name="r")]
    expected = [float(sum(red(placed.image) for placed in t.prompt.images)) for t in samples]
    with EnvironmentPool({"functions": {"functions": PLACE}}, workers=1) as pool:
        found = [verdict.rewards for verdict in pool.verify(samples)]
    assert found == [{"paints": value, "looks": value, "same": 2.0} for value in expected]


def test_images_of_a_prompt_are_sent_to_a_worker_once():
    large = image(3, size=200)
    prompt = asked("a", large).prompt
    shard = [replace(asked("a", large, index=k), prompt=prompt) for k in range(8)]
    assert len(large.data) > 100_000
    assert len(pickle.dumps(shard)) < 1.1 * len(large.data)


def test_images_of_later_turns_are_in_the_completions():
    one, two = image(1), image(2)
    heard = ({"role": "assistant", "content": "call"}, {"role": "tool", "content": [{"type": "image"}]})
    sample = replace(asked("a", one), messages=heard, images=(PlacedImage(two, 5, 1),))
    (verdict,) = Functions({"functions": {"red": f"{__file__}:later"}}).verify([sample])
    assert verdict.rewards == {"red": 1000 * red(one) + red(two)}
    with pytest.raises(ValueError, match="numbers of image parts and images differ"):
        filled(heard, ())
    with pytest.raises(ValueError, match="numbers of image parts and images differ"):
        filled(heard, (*sample.images, *sample.images))


def test_server_gets_images_as_data_urls():
    server = RewardServer()
    try:
        one, two = image(1), image(2, kind="JPEG")
        Functions({"functions": {"helpful": server.url}}).verify([asked("a", one), asked("b", two, name="q")])
    finally:
        server.stop()
    ((_, body),) = server.requests
    for number, (expected, kind) in enumerate([(one, "png"), (two, "jpeg")]):
        (url,) = body["columns"]["images"][number]
        head, _, content = url.partition(",")
        assert head == f"data:image/{kind};base64" and base64.b64decode(content) == expected.data
        assert body["prompts"][number][1]["content"][0] == {"type": "image", "image": url}


RUBRICS = {"scores": {"rubric": {"kind": "Is it kind?"}}, "row": {"rubric": "rubric"}, "ranking": {"ranking": True}}


@pytest.mark.parametrize("form", ["function", *RUBRICS])
def test_judge_sees_the_images_and_answers_again_for_another_image(server, form):
    options = {"base_url": server.url, "model": "judge-1"}
    if form == "function":
        options = {"functions": {"a": {"function": "llm_judge", "question": "Is it right?", **options}}}
        judge = Functions(options)
    else:
        rubric = {"rubric": "rubric"} if form == "ranking" else {}
        judge = load_environment("judge", {**rubric, **RUBRICS[form], **options})
    criteria = [{"id": "good", "criterion": "How often does it say good"}]
    for number, seed in enumerate((1, 2, 1)):
        answers = {"ranking": ("good", "bad"), "row": ("good",)}.get(form, ("say SCORE kind: 1\nSCORE: 1",))
        samples = [asked(text, image(seed), name=f"p{number}", rubric=criteria) for text in answers]
        judge.verify(samples)
    seen = []
    for _, _, body in server.requests:
        text, *parts = body["messages"][1]["content"]
        assert text["type"] == "text" and "image" not in text["text"]
        seen.append([base64.b64decode(part["image_url"]["url"].partition(",")[2]) for part in parts])
    orders = 2 if form == "ranking" else 1
    again = [[image(1).data]] if form == "function" else []  # which has no cache
    assert seen == [[image(1).data]] * orders + [[image(2).data]] * orders + again


def test_ranking_refuses_images_of_turns_and_reward_model_refuses_images(server):
    judge = load_environment("judge", {"rubric": "rubric", "ranking": True, "base_url": server.url, "model": "m"})
    rubric = [{"id": "good", "criterion": "Is it good"}]
    samples = [replace(asked(t, image(1), rubric=rubric), images=(PlacedImage(image(2), 4, 1),)) for t in "ab"]
    with pytest.raises(RunError, match="ranking: images after the prompt are not supported"):
        judge.verify(samples)
    scorer = object.__new__(Scorer)
    scorer._tokenizer = type("Tokenizer", (), {"chat_template": "x", "eos_token_id": 0})
    with pytest.raises(RunError, match="reward_model: images are not supported"):
        scorer._tokens(filled(samples[0].prompt.messages, samples[0].prompt.images), "a")


def test_text_rows_are_passed_as_before():
    prompt = Prompt("p", np.zeros(1, np.int32), "t", "e", {"image": None}, [{"role": "user", "content": "u"}])
    sample = replace(trajectory("a"), prompt=prompt)
    (verdict,) = Functions({"functions": {"as_before": f"{__file__}:as_before"}}).verify([sample])
    assert verdict.rewards == {"as_before": 1.0}
