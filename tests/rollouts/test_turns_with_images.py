"""Episodes whose prompts and observations have images: what is sampled, sent to workers, trained and rewarded."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image as Pillow
from tiny_vision import picture, token_id
from transformers import AutoTokenizer

from gdpo_nemo.config.sections import ImagesConfig
from gdpo_nemo.data.contexts import to_score
from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.image_reader import ImageReader
from gdpo_nemo.data.images import Image, read_image
from gdpo_nemo.data.records import Outcome, Prompt, Trajectory
from gdpo_nemo.data.replies import Reply
from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.episodes import EpisodeStep, advance
from gdpo_nemo.environments.registry import load_environment
from gdpo_nemo.environments.tasks.tools import call_tools
from gdpo_nemo.generation.requests import Completion, SampleRequest, Sampling
from gdpo_nemo.rollouts.functions import _sample
from gdpo_nemo.rollouts.trl_functions import adapted
from gdpo_nemo.rollouts.turns import EpisodeJob, Limits, play_episode
from gdpo_nemo.utils.errors import RunError

PAD = token_id("<|image_pad|>")
SAMPLING = Sampling(1.0, 1.0, -1, 10)
LIMITS = Limits(max_turns=3, max_tokens=40, max_new_tokens=10, max_sequence=400, max_images=8)


class Zoom(Environment):
    """Each turn shows a smaller part of the row's image. The prompt is that of the row, or shows it again."""

    reward_names = ("size",)

    def __init__(self, again: bool = False):
        self.again = again

    def episode(self):
        return ZoomEpisode(self.again)


class ZoomEpisode:
    def __init__(self, again: bool):
        self.again = again
        self.size = 128

    def reset(self, row):
        (self.picture,) = row["images"]
        assert isinstance(self.picture, Pillow.Image) and self.picture.size == (128, 128)
        parts = [{"type": "image", "image": self.picture}, {"type": "text", "text": "Look."}]
        return [{"role": "user", "content": parts}] if self.again else None

    def step(self, message):
        self.size //= 2
        crop = self.picture.crop((0, 0, self.size, self.size))
        parts = [{"type": "text", "text": "a part: "}, {"type": "image", "image": crop}]
        return [{"role": "tool", "content": parts}], {"size": float(self.size)}, False


@pytest.fixture(scope="module")
def talk(vision_folder) -> Conversation:
    tokenizer = AutoTokenizer.from_pretrained(vision_folder)
    return Conversation(tokenizer, True, images=ImageReader(ImagesConfig(), vision_folder, tokenizer))


@pytest.fixture
def prompt(talk) -> Prompt:
    image = read_image(picture(128, 128, 1), ImagesConfig())
    messages = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]}]
    text, ids, images = talk.prompt_with_images(messages)
    return Prompt("p", ids, text, "zoom", {"images": [image], "answer": 1}, talk.messages(messages), images)


def played(prompt: Prompt, talk: Conversation, environment: Environment, limits: Limits = LIMITS):
    """The trajectory, the requests, and the number of bytes of each step that is sent to a worker."""
    requests: list[SampleRequest] = []
    sizes = []

    async def sample(request):
        requests.append(request)
        ids = np.array([104, PAD, token_id("<|im_end|>")], np.int32)
        return Completion(ids, np.full(3, -1.0, np.float32), "stop", ((0, 3),))

    async def step(asked: EpisodeStep):
        sent = pickle.dumps(asked)
        sizes.append(len(sent) - len(asked.state or b""))
        return pickle.loads(pickle.dumps(advance(environment, pickle.loads(sent))))

    job = EpisodeJob(SAMPLING, lambda turn: turn, sample, step)
    return asyncio.run(play_episode(prompt, 0, job, limits, talk)), requests, sizes


def assert_at_placeholders(token_ids: np.ndarray, images) -> None:
    """The images are on all placeholders but the sampled ones, which follow the token 104."""
    expected = [i for i in np.flatnonzero(token_ids == PAD) if token_ids[i - 1] != 104]
    assert expected == [i for placed in images for i in range(placed.start, placed.stop)]


@pytest.mark.parametrize("again", [False, True])
def test_images_of_observations_are_sampled_and_trained_at_their_placeholders(prompt, talk, again):
    t, requests, sizes = played(prompt, talk, Zoom(again))
    assert t.turns == 3 and t.outcome is Outcome.TRUNCATED and t.rewards == {"size": 64 + 32 + 16}
    whole = picture(128, 128, 1)
    crops = [read_image(whole.crop((0, 0, size, size)), ImagesConfig()) for size in (64, 32)]
    expected = [image.sha256 for image in (prompt.images[0].image, *crops)]
    for turn, request in enumerate(requests):
        assert [placed.image.sha256 for placed in request.images] == expected[: turn + 1]
        assert_at_placeholders(request.prompt_ids, request.images)
    (sequence,) = to_score([t])
    assert [placed.image.sha256 for placed in sequence.images] == expected
    assert_at_placeholders(np.concatenate([sequence.prompt_ids, sequence.completion_ids]), sequence.images)
    # The image of the row is sent to a worker only for the reset.
    assert sizes[0] > len(prompt.images[0].image.data) > 10 * max(sizes[1:])


def seen(completions, prompts, images):
    """The total width of all images in prompt, completion and column."""
    found = []
    for prompt, completion, column in zip(prompts, completions, images):
        parts = [part for message in [*prompt, *completion] for part in message["content"] if part["type"] == "image"]
        found.append(float(sum(part["image"].width for part in parts) + 1000 * len(column)))
    return found


def test_reward_functions_see_the_images_of_all_turns(prompt, talk):
    t, _, _ = played(prompt, talk, Zoom())
    functions = load_environment("functions", {"functions": {"seen": f"{__file__}:seen"}})
    (verdict,) = functions.verify([t])
    assert verdict.rewards == {"seen": 1000.0 + 128 + 64 + 32}


def test_episode_ends_as_truncated_if_another_image_does_not_fit(prompt, talk):
    t, requests, _ = played(prompt, talk, Zoom(), replace(LIMITS, max_images=2))
    assert t.outcome is Outcome.TRUNCATED and t.turns == 2 and len(t.images) == 1
    assert [len(request.images) for request in requests] == [1, 2]
    with pytest.raises(RunError, match="a prompt has 1 images, but data.images.max_per_prompt is 0"):
        played(prompt, talk, Zoom(True), replace(LIMITS, max_images=0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "an observation: the image must be an image"),
        ("/etc/hostname", "an observation: the image is neither base64 nor a data URL"),
        ("http://127.0.0.1:9/a.png", "an observation: the image is an address"),
        (b"GIF89a", "an observation: the image is"),
    ],
)
def test_observation_with_an_invalid_image_ends_the_run(prompt, talk, monkeypatch, given, message):
    parts = [{"type": "image", "image": given}]
    monkeypatch.setattr(ZoomEpisode, "step", lambda self, said: ([{"role": "user", "content": parts}], None, False))
    with pytest.raises(RunError, match=message):
        played(prompt, talk, Zoom())


def test_observation_with_an_image_ends_the_run_of_a_text_policy(prompt, talk):
    text_only = Conversation(talk.tokenizer, True)
    with pytest.raises(RunError, match="a message of an observation has content other than text"):
        played(prompt, text_only, Zoom())


# -- tools ------------------------------------------------------------------------------------------------------------


def draw(width: int):
    """Draw.

    Args:
        width: number of pixels.
    """
    return picture(width, 32, 0)


def describe():
    """Describe a drawing."""
    return [{"type": "text", "text": "here: "}, {"type": "image", "image": picture(32, 32, 1)}]


def many():
    """Return a list without images."""
    return [{"type": "text", "text": "a"}, 3]


class Canvas:
    """Object whose methods are tools. The reset adds the row's image, turned around, to the prompt."""

    def reset(self, images, prompt, **columns):
        assert prompt[-1]["content"][0]["image"] is images[0]
        self.picture = images[0]
        return [{"type": "image", "image": images[0].rotate(90)}, {"type": "text", "text": "Turned."}]

    def crop(self, width: int):
        """Crop.

        Args:
            width: number of pixels.
        """
        return self.picture.crop((0, 0, width, 32))


def cropped(completions, environments):
    (message,) = [message for message in completions[0] if message["role"] == "tool"]
    return [float(message["content"][0]["image"].width + environments[0].picture.width)]


def test_tools_return_pil_images_and_parts():
    tools = {"draw": draw, "describe": describe, "many": many}
    calls = [("draw", '{"width": 64}'), ("describe", "{}"), ("many", "{}"), ("draw", '{"width": 2}')]
    drawn, described, listed, small = (message["content"] for message in call_tools(tools, calls, 60))
    assert [type(part["image"]) for part in drawn] == [Image] and drawn[0]["image"].width == 64
    assert [part["type"] for part in described] == ["text", "image"]
    assert listed == "[{'type': 'text', 'text': 'a'}, 3]"
    assert small == "{'error': 'has 2 x 32 pixels; each side needs at least 4'}"


def test_tool_of_an_object_returns_an_image_and_its_reset_adds_one(prompt, talk):
    options = {"make": f"{__file__}:Canvas", "functions": {"cropped": f"{__file__}:cropped"}}
    canvas = load_environment("tool_class", options)
    try:
        begun = canvas.start_step(EpisodeStep(prompt, 0, 0)).result()
        _, ids, images = talk.prompt_with_images(begun.observation)
        assert [placed.image.width for placed in images] == [128, 128]
        assert images[0].image == prompt.images[0].image != images[1].image
        assert_at_placeholders(ids, images)
        said = {"role": "assistant", "content": "x", "reply": Reply("", calls=(("crop", '{"width": 64}'),))}
        heard = canvas.start_step(EpisodeStep(prompt, 0, 1, begun.state, said)).result()
        ids, images = talk.continuation_with_images(None, heard.observation, -1)
        assert [placed.image.width for placed in images] == [64]
        ended = canvas.start_step(EpisodeStep(prompt, 0, 2, begun.state, {**said, "reply": Reply("done")})).result()
        assert ended.done and ended.rewards == {"cropped": 64.0 + 128.0}
    finally:
        canvas.close()


# -- rollout functions ------------------------------------------------------------------------------------------------


def test_request_of_a_rollout_function_without_the_images_of_its_prompt_ends_the_run(prompt):
    sampled = []
    _sample(sampled.append, [prompt], [SampleRequest(prompt.token_ids, 0, images=prompt.images)])
    _sample(sampled.append, [prompt], [SampleRequest(np.zeros(3, np.int32), 0)])
    with pytest.raises(RunError, match="has the tokens of prompt p, but not its images; pass images=prompt.images"):
        _sample(sampled.append, [prompt], [SampleRequest(np.append(prompt.token_ids, 5), 0)])
    assert len(sampled) == 2


def test_rollout_function_of_trl_refuses_images(prompt):
    def play(prompts: list, trainer: object) -> dict[str, list[Trajectory]]:
        raise AssertionError

    with pytest.raises(RunError, match="rollout functions of TRL do not support images"):
        adapted(play)([prompt], None)
