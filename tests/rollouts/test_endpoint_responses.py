"""/v1/responses: the same conversations as /v1/chat/completions, in the items of the Responses API."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest

from gdpo_nemo.data.records import Prompt
from gdpo_nemo.generation.requests import Completion, Sampling
from gdpo_nemo.rollouts.agents import follow
from gdpo_nemo.rollouts.context import Transcript
from gdpo_nemo.rollouts.endpoint.conversations import TOKEN_FIELDS, Turn, fingerprint
from gdpo_nemo.rollouts.endpoint.requests import Refused, read_object, read_responses, response_of
from gdpo_nemo.rollouts.endpoint.service import Budgets

SAMPLING = Sampling(0.5, 1.0, -1, 80)
TOOL = {
    "type": "function",
    "name": "get_counter_value",
    "description": "",
    "parameters": {"type": "object"},
    "strict": True,
}
CHAT_TOOL = {"type": "function", "function": {key: TOOL[key] for key in ("name", "description", "parameters")}}


def ask(endpoint, items, headers=None, **keys) -> httpx.Response:
    return httpx.post(f"{endpoint.url}/v1/responses", json={"input": items, **keys}, headers=headers, timeout=600)


def converse(endpoint, turns: int, keep=lambda item: item, headers=None) -> tuple[list[dict], list[dict]]:
    """A conversation of so many turns: (the items that the client holds in the end, the responses)."""
    items = [{"role": "user", "content": "begin"}]
    replies = []
    for turn in range(turns):
        reply = ask(endpoint, items, headers, tools=[TOOL])
        assert reply.status_code == 200, reply.text
        replies.append(reply.json())
        output = replies[-1]["output"]
        heard = {"type": "function_call_output", "call_id": output[-1].get("call_id", "-"), "output": f"result {turn}"}
        items += [*map(keep, output), heard]
    return items, replies


def chat(endpoint, turns: int) -> list[dict]:
    """The same conversation by /v1/chat/completions: the assistant's messages."""
    messages = [{"role": "user", "content": "begin"}]
    answers = []
    for turn in range(turns):
        body = {"messages": messages, "tools": [CHAT_TOOL]}
        reply = httpx.post(f"{endpoint.url}/v1/chat/completions", json=body, timeout=600).json()
        answers.append(reply["choices"][0]["message"])
        messages += [answers[-1], {"role": "tool", "content": f"result {turn}"}]
    return answers


@pytest.mark.slow
def test_both_routes_give_one_conversation_the_same_tokens(resting_endpoint):
    endpoint = resting_endpoint
    service = resting_endpoint.service
    service.budgets = Budgets(4, 400, 1000)  # room for whole calls
    with service.phase(SAMPLING, 9):
        answers = chat(endpoint, 4)
    with service.phase(SAMPLING, 9):
        _, replies = converse(endpoint, 4)
        assert service.counts["spliced"] == 3 and service.counts["edited"] == 0
        t = Transcript(Prompt("p", np.zeros(1, np.int32), "", "agents"), 0)
        follow(t, {"output": [item for reply in replies for item in reply["output"]]}, service.history)
    assert t.turns == 4
    assert [[item[key] for key in TOKEN_FIELDS] for item in (r["output"][-1] for r in replies)] == [
        [answer[key] for key in TOKEN_FIELDS] for answer in answers
    ]
    for reply, answer in zip(replies, answers):
        said = "".join(part["text"] for i in reply["output"] if i["type"] == "message" for part in i["content"])
        calls = [(i["name"], i["arguments"]) for i in reply["output"] if i["type"] == "function_call"]
        assert said == (answer["content"] or "")
        assert calls == [(c["function"]["name"], c["function"]["arguments"]) for c in answer.get("tool_calls", [])]
        assert reply["usage"]["output_tokens"] == len(answer["generation_token_ids"])
    assert any(i["type"] == "function_call" for reply in replies for i in reply["output"])


@pytest.mark.slow
def test_dropped_token_fields_are_restored_unless_the_client_edits_its_history(endpoint):
    bare = lambda item: {key: value for key, value in item.items() if key not in TOKEN_FIELDS}  # noqa: E731
    items, replies = converse(endpoint, 3, keep=bare, headers={"x-session-id": "s"})
    last = [reply["output"][-1] for reply in replies]
    for before, after in zip(last, last[1:]):
        seen = before["prompt_token_ids"] + before["generation_token_ids"]
        assert after["prompt_token_ids"][: len(seen)] == seen
    assert endpoint.service.counts["spliced"] == 2
    edited, _ = converse(endpoint, 1)
    edited[0]["content"] = "another question"
    assert ask(endpoint, edited).status_code == 200 and endpoint.service.counts["edited"] == 1
    edited[1]["generation_token_ids"] = [*edited[1]["generation_token_ids"][:-1], 7]
    refused = ask(endpoint, edited)
    assert refused.status_code == 400 and "not sampled" in refused.json()["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys, message",
    [
        ({"temperature": 1.0}, "temperature 1.0"),
        ({"top_p": 0.9}, "top_p 0.9"),
        ({"stream": 1}, "stream must be true or false"),
        ({"n": 2}, "n is not supported"),
        ({"tool_choice": "required"}, "tool_choice required"),
        ({"max_output_tokens": 0}, "max_tokens"),
        (
            {"previous_response_id": "resp_1"},
            "previous_response_id resp_1 is not supported: input must contain the whole",
        ),
        ({"background": True}, "background True"),
        ({"truncation": "auto"}, "truncation auto"),
        ({"text": {"format": {"type": "json_object"}}}, "text {"),
        ({"tools": [{"type": "web_search"}]}, "tools[0] is not a function"),
        ({"metadata": {"chat_template_kwargs": '{"enable_thinking": false}'}}, "metadata.chat_template_kwargs {"),
        ({"tools": 3}, "tools must be a list"),
        ({"instructions": 3}, "must be text"),
        ({"input": []}, "messages must be"),
        ({"input": 3}, "input must be a list"),
        ({"input": ["x"]}, "input[0] must be an object"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "messages[0].content[0] is an image, but the policy reads only text",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0] is of type 'item_reference'"),
        ({"input": [{"type": "function_call_output", "output": 3}]}, "input[0] contains no text"),
        ({"input": [{"role": "assistant", "content": "x"}, {"content": "y"}]}, "must be an object with a role"),
        ({"input": [{"role": "assistant", "content": "x", "prompt_token_ids": [1.5]}]}, "token ids"),
    ],
)
def test_unsupported_or_malformed_settings_are_refused_with_a_sentence(endpoint, keys, message):
    reply = httpx.post(f"{endpoint.url}/v1/responses", json={"input": "begin", **keys}, timeout=600)
    assert reply.status_code == 400 and message in reply.json()["message"], reply.text
    assert endpoint.service.counts["turns"] == 0


@pytest.mark.slow
def test_a_conversation_without_room_gets_an_incomplete_answer_without_tokens(endpoint):
    """The context is 400 tokens, the conversation 4 turns and 80 tokens."""
    items, replies = converse(endpoint, 4)
    assert sum(reply["usage"]["output_tokens"] for reply in replies) <= 80
    for asked in (items, "x" * 400):
        reply = ask(endpoint, asked, tools=[TOOL]).json()
        assert reply["status"] == "incomplete" and reply["incomplete_details"] == {"reason": "max_output_tokens"}
        (item,) = reply["output"]
        assert item["content"][0]["text"] == "" and not item.keys() & set(TOKEN_FIELDS)
    assert endpoint.service.counts["turns"] == 4


@pytest.mark.slow
def test_settings_that_change_nothing_are_taken_and_instructions_come_first(endpoint):
    neutral = {
        "temperature": 0.5,
        "top_p": 1,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "store": False,
    }
    reply = ask(endpoint, "begin", instructions="Be brief.", max_output_tokens=3, **neutral).json()
    assert reply["usage"]["output_tokens"] <= 3
    for role in ("system", "developer"):  # one role to templates
        chat = [{"role": role, "content": "Be brief."}, {"role": "user", "content": "begin"}]
        shown = httpx.post(f"{endpoint.url}/tokenize", json={"messages": chat}).json()["tokens"]
        assert reply["output"][-1]["prompt_token_ids"] == shown


@pytest.mark.parametrize(
    "content, calls, kinds",
    [
        ("<think>\nhm\n</think>\n\nyes", (), ["reasoning", "message"]),
        ("<think></think>yes ", (), ["reasoning", "message"]),
        ("<think>hm</think>", ("a", "b"), ["reasoning", "function_call", "function_call"]),
        (None, ("a",), ["function_call"]),
        ("so", ("a",), ["message", "function_call"]),
        ("", (), ["message"]),
        ("an <think>open", (), ["message"]),
    ],
)
def test_returned_items_become_the_original_messages(content, calls, kinds):
    """With and without the token fields; else an unchanged history would count as edited."""
    made = [{"id": f"call_{n}", "type": "function", "function": {"name": n, "arguments": '{"n": 1}'}} for n in calls]
    message = {"role": "assistant", "content": content, **({"tool_calls": made} if made else {})}
    turn = Turn(np.arange(3), Completion(np.arange(2), np.zeros(2, np.float32), "stop"), 0, 1, 2, "0" * 64)
    output = response_of(turn, message, {}, "1")["output"]
    assert [item["type"] for item in output] == kinds
    assert [all(key in item for key in TOKEN_FIELDS) for item in output] == [False] * (len(kinds) - 1) + [True]
    asked = {"role": "user", "content": "well?"}
    for items in (output, [{k: v for k, v in item.items() if k not in TOKEN_FIELDS} for item in output]):
        body = json.dumps({"input": [asked, *items, {"role": "user", "content": "and?"}]}).encode()
        request, _ = read_responses(body, SAMPLING, "")
        assert fingerprint(request.messages[:-1]) == fingerprint([asked, message]) and len(request.messages) == 3


@pytest.mark.parametrize("body", [rb'{"input": "a\ud83d"}', rb'{"\udc00": 1}', b'{"input": "\xed\xa0\xbd"}'])
def test_request_is_refused_if_it_holds_half_a_surrogate_pair(body):
    with pytest.raises(Refused, match="surrogate|can't decode") as refused:
        read_object(body)
    assert refused.value.status == 400
    assert read_object(rb'{"input": "\ud83d\ude00 \\ud83d"}') == {"input": "\U0001f600 \\ud83d"}
