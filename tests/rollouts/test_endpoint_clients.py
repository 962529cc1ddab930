"""Clients of agents at the endpoint: the packages openai and anthropic, and clients that are hostile."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from gdpo_nemo.generation.requests import Completion, Sampling
from gdpo_nemo.rollouts.endpoint import server
from gdpo_nemo.rollouts.endpoint.anthropic import message_reply, read_messages
from gdpo_nemo.rollouts.endpoint.conversations import Turn, fingerprint
from gdpo_nemo.rollouts.endpoint.requests import Refused
from gdpo_nemo.rollouts.endpoint.server import Endpoint
from gdpo_nemo.rollouts.endpoint.service import Budgets, Service

pytestmark = pytest.mark.slow

SAMPLING = Sampling(0.5, 1.0, -1, 80)
FUNCTION = {"name": "get_counter_value", "description": "", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
HELLO = [{"role": "user", "content": "begin"}]


@pytest.fixture
def roomy(resting_endpoint):
    """The endpoint during a batch, with room for whole calls."""
    resting_endpoint.service.budgets = Budgets(4, 400, 1000)
    with resting_endpoint.service.phase(SAMPLING, 9):
        yield resting_endpoint


@pytest.fixture
def client(roomy):
    import openai

    with openai.OpenAI(base_url=f"{roomy.url}/v1", api_key="none", max_retries=0, timeout=600) as made:
        yield made


def raw_of(stage, ids) -> str:
    return stage.conversation.text(np.array(ids))


def joined(chunks) -> tuple[dict, dict]:
    """The message of a stream of chat chunks, and the fields of its last chunk."""
    message: dict = {"role": "assistant", "content": ""}
    for chunk in chunks:
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                message.setdefault("tool_calls", []).append(
                    {"id": call.id, "type": "function", "function": call.function.model_dump(exclude_none=True)}
                )
            last = choice
    return message, {**(last.delta.model_extra or {}), "finish_reason": last.finish_reason}


def test_a_streamed_turn_is_the_sampled_turn_and_the_next_one_continues_it(client, roomy, stage):
    messages = list(HELLO)
    for turn in range(3):
        chunks = list(client.chat.completions.create(
            model="policy", messages=messages, tools=[TOOL], stream=True, stream_options={"include_usage": True}
        ))  # fmt: skip
        message, last = joined(chunks)
        ids = last["generation_token_ids"]
        reply = stage.conversation.replies.parse(raw_of(stage, ids), [TOOL])
        assert message["content"] == reply.content
        made = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
        assert made == list(reply.calls) and last["finish_reason"] in ("stop", "tool_calls", "length")
        assert chunks[-1].usage.completion_tokens == len(ids) == len(last["generation_log_probs"])
        messages += [message, {"role": "tool", "tool_call_id": "-", "content": f"result {turn}"}]
    assert roomy.service.counts["spliced"] == 2 and roomy.service.counts["edited"] == 0


def test_choices_are_samples_of_one_prompt_and_each_can_be_continued(client, roomy):
    reply = client.chat.completions.create(model="policy", messages=HELLO, n=4)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    fields = [choice.message.model_extra for choice in reply.choices]
    assert len({tuple(f["prompt_token_ids"]) for f in fields}) == 1
    assert len({tuple(f["generation_token_ids"]) for f in fields}) > 1
    assert reply.usage.completion_tokens == sum(len(f["generation_token_ids"]) for f in fields)
    for choice, kept in zip(reply.choices, fields):
        said = {**choice.message.model_dump(exclude_none=True), **kept}
        after = client.chat.completions.create(model="policy", messages=[*HELLO, said, {**HELLO[0], "content": "on"}])
        before = kept["prompt_token_ids"] + kept["generation_token_ids"]
        assert after.choices[0].message.model_extra["prompt_token_ids"][: len(before)] == before


def test_stop_strings_end_the_turn_and_are_cut_from_its_text(client, roomy, stage):
    stops = ["on", "CO", "ame"]  # one is in each text that the model writes
    choice = client.chat.completions.create(model="policy", messages=HELLO, stop=stops).choices[0]
    raw = raw_of(stage, choice.message.model_extra["generation_token_ids"])
    text = choice.message.content
    assert choice.finish_reason == "stop" and not any(stop in text for stop in stops)
    assert raw.startswith(text) and any(raw[len(text) :].startswith(stop) for stop in stops)
    said = {"role": "assistant", "content": text}
    client.chat.completions.create(model="policy", messages=[*HELLO, said, {**HELLO[0], "content": "on"}])
    assert roomy.service.counts["spliced"] == 1


def test_calls_remain_text_without_tool_choice_and_forced_calls_are_refused(client, stage):
    import openai

    messages = list(HELLO)
    for turn in range(3):
        choice = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL], tool_choice="none")
        message = choice.choices[0].message
        assert message.tool_calls is None and message.content == raw_of(
            stage, message.model_extra["generation_token_ids"]
        )
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": f"again {turn}"}]
    for forced in ("required", {"type": "function", "function": {"name": "get_counter_value"}}):
        with pytest.raises(openai.BadRequestError, match="a forced call would change the sampling"):
            client.chat.completions.create(model="policy", messages=HELLO, tools=[TOOL], tool_choice=forced)


def test_a_streamed_response_is_the_response(client, roomy):
    tool = {"type": "function", **FUNCTION, "strict": True}
    items: list = [*HELLO]
    for turn in range(3):
        events = list(client.responses.create(model="policy", input=items, tools=[tool], stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        whole = events[-1].response
        assert events[-1].type == f"response.{whole.status}"
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        calls = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
        assert text == whole.output_text
        assert calls == [item.arguments for item in whole.output if item.type == "function_call"]
        done = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
        assert done == [item.to_dict() for item in whole.output]
        items += [*done, {"type": "function_call_output", "call_id": "-", "output": f"result {turn}"}]
    assert roomy.service.counts["spliced"] == 2 and roomy.service.counts["edited"] == 0


def test_messages_of_anthropic_are_the_same_conversation_streamed_or_not(roomy, stage):
    import anthropic

    tool = {"name": FUNCTION["name"], "description": "", "input_schema": FUNCTION["parameters"]}
    settings = {"model": "policy", "max_tokens": 80, "system": "Be brief.", "tools": [tool]}
    messages: list = [{"role": "user", "content": "begin"}]
    with anthropic.Anthropic(base_url=roomy.url, api_key="none", max_retries=0, timeout=600) as client:
        for turn in range(3):
            if turn == 1:
                with client.messages.stream(messages=messages, **settings) as stream:
                    reply = stream.get_final_message()
            else:
                reply = client.messages.create(messages=messages, **settings)
                raw = raw_of(stage, reply.model_extra["generation_token_ids"])
                parsed = stage.conversation.replies.parse(raw, [TOOL])
                assert "".join(block.text for block in reply.content if block.type == "text") == parsed.content
            assert reply.stop_reason in ("end_turn", "tool_use", "max_tokens")
            calls = [block for block in reply.content if block.type == "tool_use"]
            assert (reply.stop_reason == "tool_use") == bool(calls) or reply.stop_reason == "max_tokens"
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": f"result {turn}"} for call in calls]
            messages.append({"role": "assistant", "content": [block.to_dict() for block in reply.content]})
            messages.append({"role": "user", "content": results or "go on"})
        with pytest.raises(anthropic.BadRequestError, match="a forced call would change the sampling"):
            client.messages.create(messages=messages[:1], tool_choice={"type": "any"}, **settings)
    assert roomy.service.counts["spliced"] == 2 and roomy.service.counts["edited"] == 0


def test_blocks_of_anthropic_become_the_original_message():
    function = {"name": "f", "arguments": '{"x": 1}'}
    said = {
        "role": "assistant",
        "content": "so",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    turn = Turn(np.arange(3), Completion(np.arange(2), np.zeros(2, np.float32), "stop"), 0, 1, 2, "0" * 64)
    reply = message_reply(turn, said, {}, "m")
    assert [block["type"] for block in reply["content"]] == ["thinking", "text", "tool_use"]
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "21"}]}
    blocks = [result, {"type": "text", "text": "and?"}]
    body = {
        "system": [{"type": "text", "text": "s"}],
        "messages": [*HELLO, {"role": "assistant", "content": reply["content"]}, {"role": "user", "content": blocks}],
    }
    request, _ = read_messages(json.dumps(body).encode(), SAMPLING, "")
    assert [m["role"] for m in request.messages] == ["system", "user", "assistant", "tool", "user"]
    assert fingerprint(request.messages[1:3]) == fingerprint([*HELLO, said])
    for wrong, sentence in (
        ({"messages": 3}, "messages must be a list"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "of type 'image', which is not supported"),
        ({"messages": HELLO, "thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
        ({"messages": HELLO, "tools": [{"type": "bash_20250124"}]}, "tools[0] is not a tool of the client"),
        ({"messages": HELLO, "tools": [{"name": 3}]}, "tools[0] must have a function with a name"),
        ({"messages": HELLO, "stop_sequences": [3]}, "stop must be"),
        ({"messages": HELLO, "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice required"),
    ):
        with pytest.raises(Refused) as refused:
            read_messages(json.dumps(wrong).encode(), SAMPLING, "")
        assert refused.value.status == 400 and sentence in refused.value.message


@pytest.fixture
def guarded(stage):
    made = Endpoint(
        Service(stage.fleet, stage.conversation, Budgets(4, 80, 400)), "127.0.0.1", 0, "secret", ["trainer"]
    )
    yield made
    made.close()


def test_a_client_needs_the_access_token_if_there_is_one(guarded):
    import anthropic
    import openai

    for key, error in (("secret", None), ("wrong", openai.AuthenticationError), ("sécret", openai.AuthenticationError)):
        header = {"authorization": f"Bearer {key}".encode()}
        assert httpx.get(f"{guarded.url}/v1/models", headers=header).status_code == (401 if error else 200)
    assert openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="secret").models.list().data[0].id == "policy"
    with pytest.raises(openai.AuthenticationError, match="access token"):
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0).models.list()
    with pytest.raises(anthropic.AuthenticationError, match="access token"):
        anthropic.Anthropic(base_url=guarded.url, api_key="wrong", max_retries=0).messages.create(
            model="policy", max_tokens=3, messages=HELLO
        )
    with pytest.raises(anthropic.BadRequestError, match="no rollout is in flight"):
        anthropic.Anthropic(base_url=guarded.url, api_key="secret", max_retries=0).messages.create(
            model="policy", max_tokens=3, messages=HELLO
        )


@pytest.mark.parametrize(
    "header, value, status",
    [
        ("host", "evil.example:8000", 403),  # a page whose name was rebound to this machine
        ("host", "", 403),
        ("host", "127.0.0.1.evil.example", 403),
        ("host", "localhost:80", 200),
        ("host", "10.1.2.3:8000", 200),
        ("host", "[::1]:8000", 200),
        ("host", "Trainer:8000", 200),
        ("origin", "https://evil.example", 403),
        ("origin", "null", 403),
        ("origin", "http://6.6.6.6", 403),
        ("origin", "http://10.1.2.3:8000", 403),
        ("origin", "http://[fe80::1]", 403),
        ("origin", "http://127.0.0.1.", 403),
        ("origin", "http://localhost:3000", 200),
        ("origin", "http://127.0.0.1:3000", 200),
        ("origin", "http://[::1]:3000", 200),
        ("origin", "http://trainer", 200),
    ],
)
def test_pages_of_other_sites_cannot_reach_the_endpoint(guarded, header, value, status):
    headers = {"authorization": "Bearer secret", header: value}
    reply = httpx.get(f"{guarded.url}/v1/models", headers=headers)
    assert reply.status_code == status
    if status == 403:
        assert "is not a name of this endpoint" in reply.json()["message"]


def answer_to(url: str, *parts: bytes) -> bytes:
    """Everything that the server answers until it closes the connection."""
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), timeout=300) as connection:
        for part in parts:
            connection.sendall(part)
        found = b""
        while part := connection.recv(65536):
            found += part
    return found


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"


@pytest.mark.parametrize(
    "sent, status, sentence",
    [
        (b"", 408, b"header of a request did not arrive"),
        (b"POST /v1/chat", 408, b"header of a request did not arrive"),
        (HEAD, 408, b"header of a request did not arrive"),
        (HEAD + b"content-length: 100\r\n\r\n{", 408, b"no further part of the request arrived"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n{", 408, b"no further part of the request arrived"),
        (HEAD + b"x: " + b"x" * 20_000_000, 400, b"Invalid HTTP request"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nno length" + b"x" * 1_000_000, 400, b"Invalid HTTP request"),
        (HEAD + b"content-length: -1\r\n\r\n", 400, b"Invalid HTTP request"),
        (b"\x16\x03\x01\x02\x00 no http\r\n\r\n", 400, b"Invalid HTTP request"),
        (HEAD + b"content-length: 3\r\n\r\n[1]", 400, b"must be a JSON object"),
        (HEAD + b"content-length: 4\r\n\r\n\xff\xfe\x00{", 400, b"not valid JSON"),
    ],
)
def test_half_sent_and_hostile_requests_get_a_status_and_a_sentence(endpoint, monkeypatch, sent, status, sentence):
    # What is sent must arrive before the time limit, except where nothing else comes.
    limits = {b"header of a request did not arrive": 0.2, b"no further part of the request arrived": 3.0}
    monkeypatch.setattr(server, "REQUEST_S", limits.get(sentence, 300.0))
    found = answer_to(endpoint.url, sent)
    assert found.startswith(f"HTTP/1.1 {status} ".encode()) and sentence in found
    assert httpx.get(f"{endpoint.url}/health").json() == {"status": "ok"}
