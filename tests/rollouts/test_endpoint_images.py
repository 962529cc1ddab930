"""Images in requests to the endpoint: read from data URLs, sampled, told apart, and part of the trajectory."""

from __future__ import annotations

import base64
import io

import httpx
import numpy as np
import pytest
from scripted_engines import ScriptedEngines
from tiny_vision import picture, token_id
from transformers import AutoTokenizer

from gdpo_nemo.config.sections import ImagesConfig
from gdpo_nemo.data.contexts import to_score
from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.image_reader import ImageReader
from gdpo_nemo.data.images import read_image
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.generation.requests import Completion, Sampling
from gdpo_nemo.rollouts.agents import follow
from gdpo_nemo.rollouts.context import Transcript, check_trajectory
from gdpo_nemo.rollouts.endpoint.conversations import fingerprint
from gdpo_nemo.rollouts.endpoint.server import Endpoint
from gdpo_nemo.rollouts.endpoint.service import Budgets, Service

SAMPLING = Sampling(1.0, 1.0, -1, 16)
PAD = token_id("<|image_pad|>")
LIMIT = 3


def url(seed: int, width: int = 64, height: int = 64) -> str:
    buffer = io.BytesIO()
    picture(width, height, seed).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def sha256(seed: int, width: int = 64, height: int = 64) -> str:
    return read_image(url(seed, width, height), ImagesConfig()).sha256


def shown(*urls: str, text: str = "What is it?", role: str = "user", kind: str = "image_url") -> dict:
    parts = [{"type": kind, "image_url": {"url": u} if kind == "image_url" else u} for u in urls]
    return {"role": role, "content": [*parts, {"type": "text" if kind == "image_url" else "input_text", "text": text}]}


class Engines(ScriptedEngines):
    """Engines that always say the same, with a sampled placeholder in it."""

    async def sample(self, request, sampling, engine=None):
        self.requests.append((request, sampling, engine))
        ids = np.array([104, PAD, 105, token_id("<|im_end|>")], np.int32)
        return Completion(ids, np.full(4, -1.0, np.float32), "stop", ((self.version, 4),)), 0


@pytest.fixture
def endpoint(vision_folder):
    tokenizer = AutoTokenizer.from_pretrained(vision_folder)
    reader = ImageReader(ImagesConfig(max_pixels=100_000, max_per_prompt=LIMIT), vision_folder, tokenizer)
    engines = Engines()
    talk = Conversation(tokenizer, True, images=reader)
    made = Endpoint(Service(engines, talk, Budgets(4, 80, 400), images=reader), "127.0.0.1", 0)
    made.engines = engines
    with made.service.phase(SAMPLING, 5):
        yield made
    made.close()
    engines.close()


def post(endpoint, path: str = "/v1/chat/completions", **body) -> httpx.Response:
    return httpx.post(endpoint.url + path, json=body, timeout=60)


def said(endpoint, messages: list[dict]) -> dict:
    reply = post(endpoint, messages=messages)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]


def played(endpoint, *items: dict):
    """The trajectory of an agent whose response has these items."""
    t = Transcript(Prompt("p", np.array([1], np.int32), "", "agents"), 0)
    follow(t, {"output": list(items)}, endpoint.service.history)
    made = t.trajectory(endpoint.service.conversation)
    check_trajectory(made, t.prompt, 400, "test")
    (sequence,) = to_score([made])
    return sequence


def hashes(images) -> list[str]:
    return [placed.image.sha256 for placed in images]


def assert_at_placeholders(token_ids: np.ndarray, images) -> None:
    """The images are on all placeholders but the sampled ones, which follow the letter 104."""
    expected = [i for i in np.flatnonzero(token_ids == PAD) if token_ids[i - 1] != 104]
    assert expected == [i for placed in images for i in range(placed.start, placed.stop)]


def without_ids(message: dict) -> dict:
    return {key: value for key, value in message.items() if not key.endswith("token_ids")}


@pytest.mark.parametrize("keep", [dict, without_ids])
def test_twin_conversations_continue_with_their_own_images(endpoint, keep):
    """All texts and all tokens of both conversations are equal."""
    answers = {}
    for seed in (1, 2):
        messages = [shown(url(seed))]
        first = said(endpoint, messages)
        messages += [keep(first), shown(url(seed + 2), url(seed, 96, 64), role="tool", text="a crop")]
        answers[seed] = first, said(endpoint, messages)
    requests = [request for request, _, _ in endpoint.engines.requests]
    assert np.array_equal(requests[0].prompt_ids, requests[2].prompt_ids)
    assert np.array_equal(requests[1].prompt_ids, requests[3].prompt_ids)
    assert len({request.seed for request in requests}) == 4
    assert endpoint.service.counts["spliced"] == 2 and endpoint.service.counts["edited"] == 0
    for seed, (first, second) in answers.items():
        expected = [sha256(seed), sha256(seed + 2), sha256(seed, 96, 64)]
        requested = [hashes(request.images) for request in requests[2 * seed - 2 : 2 * seed]]
        assert requested == [expected[:1], expected]
        for request in requests:
            assert_at_placeholders(request.prompt_ids, request.images)
        sequence = played(endpoint, {"type": "message", **first}, {"type": "message", **second})
        assert hashes(sequence.images) == expected
        assert_at_placeholders(np.concatenate([sequence.prompt_ids, sequence.completion_ids]), sequence.images)
        assert [placed.tokens for placed in sequence.images] == [4, 4, 6]


def test_agent_that_sees_another_image_begins_a_new_context(endpoint):
    """The second prompt has the tokens of the first turn, but another image."""
    first = said(endpoint, [shown(url(1))])
    other = said(endpoint, [shown(url(2)), without_ids(first), {"role": "user", "content": "?"}])
    t = Transcript(Prompt("p", np.array([1], np.int32), "", "agents"), 0)
    follow(t, {"output": [{"type": "message", **first}, {"type": "message", **other}]}, endpoint.service.history)
    made = t.trajectory(endpoint.service.conversation)
    assert made.turn_parents == (-1, -1)
    assert [hashes(s.images) for s in to_score([made])] == [[sha256(1)], [sha256(2)]]


def test_order_of_twins_does_not_change_their_seeds(endpoint):
    seeds = []
    for order in ((1, 2), (2, 1)):
        for seed in order:
            said(endpoint, [shown(url(seed), text=f"{order}")])
        found = [request.seed for request, _, _ in endpoint.engines.requests[-2:]]
        seeds.append(found if order == (1, 2) else found[::-1])
    again = []
    for seed in (2, 1):  # with the text of the first order, as in a run with another order of agents
        endpoint.service._request_counts.clear()
        said(endpoint, [shown(url(seed), text="(1, 2)")])
        again.append(endpoint.engines.requests[-1][0].seed)
    assert again[::-1] == seeds[0] and len({*seeds[0], *seeds[1]}) == 4


def test_responses_take_images_in_messages_and_in_results_of_tools(endpoint):
    items = [shown(url(1), kind="input_image")]
    first = post(endpoint, "/v1/responses", input=items).json()
    result = shown(url(2), kind="input_image")["content"]
    items += [*first["output"], {"type": "function_call_output", "call_id": "c", "output": result}]
    second = post(endpoint, "/v1/responses", input=items).json()
    assert second["status"] == "completed"
    assert hashes(endpoint.engines.requests[1][0].images) == [sha256(1), sha256(2)]
    assert hashes(played(endpoint, *first["output"], *second["output"]).images) == [sha256(1), sha256(2)]
    items += [*second["output"], shown(url(3), url(4), kind="input_image")]
    third = post(endpoint, "/v1/responses", input=items).json()
    assert third["status"] == "incomplete" and len(endpoint.engines.requests) == 2
    t = Transcript(Prompt("p", np.array([1], np.int32), "", "agents"), 0)
    output = [*first["output"], *second["output"], *third["output"]]
    follow(t, {"output": output, "incomplete_details": third["incomplete_details"]}, endpoint.service.history)
    assert t.finish_reason == "length" and t.turns == 2


def test_tokenize_returns_the_numbers_of_a_reply(endpoint):
    messages = [shown(url(1))]
    counted = post(endpoint, "/tokenize", messages=messages).json()
    assert counted["tokens"] == said(endpoint, messages)["prompt_token_ids"]
    ids = endpoint.engines.requests[-1][0].prompt_ids
    differ = [i for i, (number, token) in enumerate(zip(counted["tokens"], ids)) if number != token]
    assert differ == np.flatnonzero(ids == PAD).tolist() and max(counted["tokens"]) < 2**53


DAMAGED = f"{url(1)[:60]}AAAA"


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (shown("http://127.0.0.1:9/a.png"), "must be a data URL, got 'http://127.0.0.1:9/a.png'"),
        (shown("/etc/passwd"), "must be a data URL"),
        (shown("file:///etc/passwd"), "must be a data URL"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "must be a data URL, got 'None'"),
        ({"role": "user", "content": [{"type": "image", "image": "x"}]}, "neither text nor an image"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "neither text nor an image"),
        (shown("data:image/png;base64,!!!!"), "invalid base64"),
        (shown("data:image/png,abc"), "without base64"),
        (shown(DAMAGED), "messages[0].content[0] is"),
        (shown(url(1, 400, 300)), "has 400 x 300 pixels; the maximum is 100000"),
        (shown(*[url(1)] * 4), "has 4 images, and the limit is 3 (data.images.max_per_prompt)"),
        (shown(url(1), role="assistant"), "the policy writes only text"),
    ],
)
def test_invalid_images_are_refused_in_one_line(endpoint, message, problem):
    reply = post(endpoint, messages=[message])
    text = reply.json()["message"]
    assert reply.status_code == 400 and problem in text and "\n" not in text
    assert endpoint.engines.requests == []


def test_images_are_refused_for_a_policy_that_reads_only_text(endpoint):
    endpoint.service._images = None
    reply = post(endpoint, messages=[shown(url(1))])
    assert reply.status_code == 400
    assert reply.json()["message"] == "messages[0].content[0] is an image, but the policy reads only text"


def test_images_of_a_conversation_are_decoded_once(endpoint):
    messages = [shown(url(1))]
    messages += [said(endpoint, messages), shown(url(2))]
    said(endpoint, messages)
    said(endpoint, [shown(url(1), text="another sample")])
    first, second, third = (request.images for request, _, _ in endpoint.engines.requests)
    assert first[0].image is second[0].image is third[0].image


def test_place_of_an_image_changes_the_fingerprint():
    image = read_image(url(1), ImagesConfig())
    part, text = {"type": "image", "image": image}, {"type": "text", "text": "a"}
    orders = ([part, text, text], [text, part, text], [text, text, part], [text, text])
    assert len({fingerprint([{"role": "user", "content": content}]) for content in orders}) == 4
