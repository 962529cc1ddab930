"""The OpenAI-compatible endpoint over HTTP: exact earlier tokens, refusals, stickiness."""

from __future__ import annotations

import asyncio
import copy
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from gdpo_nemo.algorithms import LossSettings
from gdpo_nemo.data.contexts import to_score
from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.generation.requests import Sampling
from gdpo_nemo.rollouts.agents import BrokenEpisode, follow
from gdpo_nemo.rollouts.context import Transcript, check_trajectory
from gdpo_nemo.rollouts.endpoint import server
from gdpo_nemo.rollouts.endpoint.server import Endpoint
from gdpo_nemo.rollouts.endpoint.service import Budgets, Service

pytestmark = pytest.mark.slow

FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
# Shows an assistant's message in full only while it is the last one: what templates do that drop old reasoning.
FORGETFUL = (
    "{% for message in messages %}{{ '<|start|>' + message.role + '\\n' }}"
    "{% if message.role != 'assistant' or loop.index0 == messages|map(attribute='role')|list|length - 2 %}"
    "{{ message.content }}{% else %}{{ '...' }}{% endif %}{{ '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)


def post(endpoint, messages, path="/v1/chat/completions", headers=None, **keys):
    body = {"model": "policy", "messages": messages, **keys}
    return httpx.post(endpoint.url + path, json=body, headers=headers, timeout=600)


def said(endpoint, messages, **keys) -> dict:
    """The assistant's message."""
    reply = post(endpoint, messages, **keys)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]


def converse(
    endpoint, turns: int, keep=lambda message: message, opening="begin", **keys
) -> tuple[list[dict], list[dict]]:
    """A conversation of so many turns: (what the client holds in the end, the assistant's messages with their
    tokens)."""
    messages = [{"role": "user", "content": opening}]
    answers = []
    for turn in range(turns):
        answers.append(said(endpoint, messages, **keys))
        messages += [keep(answers[-1]), {"role": "tool", "content": f"result {turn}"}]
    return messages, answers


def without_fields(message: dict) -> dict:
    return {key: value for key, value in message.items() if key not in FIELDS}


def response_of(answers) -> dict:
    return {"output": [{"type": "message", **answer} for answer in answers]}


def transcript() -> Transcript:
    return Transcript(Prompt("p", np.zeros(1, np.int32), "", "agents"), 0)


def test_turns_begin_with_the_exact_tokens_before_and_logprobs_are_megatrons(endpoint, stage):
    """Turns are cut in the middle of a call and never closed by the policy, so a renderer of text would drift."""
    _, answers = converse(endpoint, 3)
    for before, after in zip(answers, answers[1:]):
        seen = before["prompt_token_ids"] + before["generation_token_ids"]
        assert after["prompt_token_ids"][: len(seen)] == seen
    t = transcript()
    follow(t, response_of(answers), endpoint.service.history)
    assert t.turns == 3 and t.num_policy_tokens == sum(len(a["generation_token_ids"]) for a in answers)
    made = t.trajectory(stage.conversation, 0)
    sequence = TrainSequence(made.prompt.token_ids, made.completion_ids, made.logprobs, loss_mask=made.loss_mask)
    (found,) = stage.policy.logprobs([sequence])
    assert np.array_equal(np.isnan(found), ~made.loss_mask)
    assert np.abs(found - made.logprobs)[made.loss_mask].max() < 1e-4
    assert [p for a in answers for p in a["generation_log_probs"]] == made.logprobs[made.loss_mask].tolist()


def test_client_that_drops_the_token_fields_still_continues_the_sampled_tokens(endpoint):
    """Found by what was said, in the session that a header names; /tokenize shows the prompt that a turn would get."""
    header = {"x-session-id": "s1"}
    messages, answers = converse(endpoint, 3, keep=without_fields, headers=header)
    for before, after in zip(answers, answers[1:]):
        seen = before["prompt_token_ids"] + before["generation_token_ids"]
        assert after["prompt_token_ids"][: len(seen)] == seen
    shown = post(endpoint, messages[:-2], "/tokenize", header).json()
    assert shown["tokens"] == answers[2]["prompt_token_ids"] and shown["count"] == len(shown["tokens"])
    assert endpoint.service.counts["spliced"] == 2
    other = said(endpoint, messages[:3], headers={"x-session-id": "s2"})  # another session has no such turn
    assert (
        endpoint.service.counts["spliced"] == 2 and other["prompt_token_ids"][:9] == answers[0]["prompt_token_ids"][:9]
    )


def test_a_template_that_rewrites_history_would_drift_and_does_not(stage):
    tokenizer = copy.deepcopy(stage.tokenizer)
    tokenizer.chat_template = FORGETFUL
    conversation = Conversation(tokenizer, chat=True)
    service = Service(stage.fleet, conversation, Budgets(4, 80, 400))

    class Direct:
        """The service without HTTP."""

        def say(self, messages):
            import json

            return asyncio.run(service.chat(json.dumps({"messages": messages}).encode()))["choices"][0]["message"]

    messages = [{"role": "user", "content": "begin"}]
    seen = []
    with service.phase(Sampling(0.5, 1.0, -1, 24), 5):
        for turn in range(3):
            answer = Direct().say(messages)
            assert answer["prompt_token_ids"][: len(seen)] == seen
            seen = answer["prompt_token_ids"] + answer["generation_token_ids"]
            messages += [answer, {"role": "tool", "content": f"result {turn}"}]
        # What the template makes of the same messages is something else: with it the second turn would be off-policy.
        _, naive = conversation.prompt([{"role": m["role"], "content": m["content"] or ""} for m in messages])
        assert naive[: len(seen)].tolist() != seen
        assert service.counts["spliced"] == 2 and service.counts["edited"] == 0


@pytest.mark.parametrize("place, what", [(0, "another question"), (1, "words that were not sampled")])
def test_an_agent_that_edits_its_history_begins_a_context_and_log_probs_are_megatrons(endpoint, stage, place, what):
    """A side conversation follows the edited turn; then the agent returns to the unedited history."""
    messages, answers = converse(endpoint, 2)
    edited = [*messages]
    edited[place] = {**messages[place], "content": what}
    answers.append(said(endpoint, edited))
    assert endpoint.service.counts["edited"] == 1  # rendered anew: the model reads what the client means
    answers.append(said(endpoint, [{"role": "user", "content": "summarise"}]))
    answers.append(said(endpoint, messages))
    t = transcript()
    follow(t, response_of([*answers, answers[0]]), endpoint.service.history)  # a turn that comes twice counts once
    made = t.trajectory(stage.conversation, 0)
    assert (made.turns, made.num_contexts, made.turn_parents) == (5, 3, (-1, 0, -1, -1, 1))
    check_trajectory(made, t.prompt, stage.config.policy.max_total_sequence_length, "agents")
    sequences = to_score([made])
    assert sum(s.num_policy_tokens for s in sequences) == sum(len(a["generation_token_ids"]) for a in answers)
    for s, found, gap in zip(sequences, stage.policy.logprobs(sequences), (0.02, 0.08, 0.14)):
        assert np.abs(found - s.sampler_logprobs)[s.loss_mask].max() < 1e-4
        s.advantage, s.weight, s.old_logprobs = 1.0, 0.1, s.sampler_logprobs - np.float32(gap)
    # A loss over whole sequences gets all contexts, even if they exceed the budget of a micro-batch.
    losses = []
    for budget in (1, 8192):
        stage.policy.config.micro_batch_tokens = budget
        losses.append(stage.policy.train(sequences, LossSettings(type="gspo")).loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_tokens_that_were_not_sampled_here_are_refused_and_never_read_as_a_turn(endpoint):
    messages, answers = converse(endpoint, 1)
    forged = {**answers[0], "generation_token_ids": [*answers[0]["generation_token_ids"][:-1], 7]}
    refused = post(endpoint, [messages[0], forged, messages[2]])
    assert refused.status_code == 400 and "not sampled" in refused.json()["message"]
    with pytest.raises(BrokenEpisode, match="did not sample"):
        follow(transcript(), response_of([forged]), endpoint.service.history)
    shifted = {
        **answers[0],
        "prompt_token_ids": answers[0]["prompt_token_ids"] + answers[0]["generation_token_ids"][:1],
    }
    shifted["generation_token_ids"] = answers[0]["generation_token_ids"][1:]
    with pytest.raises(BrokenEpisode, match="did not sample"):
        follow(transcript(), response_of([shifted]), endpoint.service.history)
    for output in (None, [], [{"type": "message", "generation_token_ids": "x" * 9}], ["?"]):
        with pytest.raises(BrokenEpisode, match="bad_reply|no turn"):
            follow(transcript(), {"output": output}, endpoint.service.history)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"temperature": 1.0}, "temperature 1.0"),
        ({"temperature": 0}, "temperature 0"),
        ({"top_p": 0.9}, "top_p 0.9"),
        ({"top_k": 5}, "top_k 5"),
        ({"n": 0}, "n must be"),
        ({"n": 9}, "n must be"),
        ({"n": 1.5}, "n must be"),
        ({"n": True}, "n must be"),
        ({"stream": "yes"}, "stream must be true or false"),
        ({"stop": 3}, "stop must be"),
        ({"stop": ["x", ""]}, "stop must be"),
        ({"stop": ["x"] * 17}, "stop must be"),
        ({"logit_bias": {"3": 9}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"seed": 3}, "seed"),
        ({"tool_choice": "required"}, "tool_choice required"),
        ({"tool_choice": ["auto"]}, "tool_choice ['auto']"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": "?"}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0] must have a function"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0] is an image"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [3]}]}, "tool_calls"),
        ({"messages": [{"role": "assistant", "content": "x", "prompt_token_ids": [1.5]}]}, "token ids"),
        ({"messages": [{"role": "user", "content": "x" * 400}]}, "context length"),
    ],
)
def test_unsupported_or_malformed_settings_are_refused_with_a_sentence(endpoint, keys, message):
    keys = {"messages": [{"role": "user", "content": "begin"}], **keys}
    reply = httpx.post(endpoint.url + "/v1/chat/completions", json=keys, timeout=600)
    assert reply.status_code == 400 and message in reply.json()["message"]
    assert endpoint.service.counts["turns"] == 0


def test_neutral_settings_are_taken_and_completions_stay_within_every_budget(endpoint):
    question = [{"role": "user", "content": "begin"}]
    reply = post(
        endpoint, question, temperature=0.5, top_p=1, n=1, stop=[], max_tokens=5, logprobs=True, seed=None
    ).json()
    (choice,) = reply["choices"]
    ids = choice["message"]["generation_token_ids"]
    assert len(ids) <= 5 and reply["usage"]["completion_tokens"] == len(ids)
    assert [c["token"] for c in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in ids]
    assert [c["logprob"] for c in choice["logprobs"]["content"]] == choice["message"]["generation_log_probs"]
    messages, answers = converse(endpoint, 4)  # at most 4 turns and 80 tokens
    assert sum(len(a["generation_token_ids"]) for a in answers) <= 80
    refused = post(endpoint, messages)
    assert refused.status_code == 400 and "max_tokens: the policy has" in refused.json()["message"]
    assert httpx.get(endpoint.url + "/v1/models").json()["data"][0]["id"] == "policy"


def test_requests_that_are_too_large_or_no_json_or_come_between_batches_are_refused(endpoint, stage, monkeypatch):
    url = endpoint.url + "/v1/chat/completions"
    assert httpx.post(url, content=b"{").status_code == 400
    assert httpx.post(url, content=b"[" * 500 + b"]" * 500).status_code == 400
    monkeypatch.setattr(server, "MAX_BODY_BYTES", 1000)
    assert httpx.post(url, content=b" " * 2000).status_code == 413
    monkeypatch.undo()
    idle = Endpoint(Service(stage.fleet, stage.conversation, Budgets(4, 80, 400)), "127.0.0.1", 0)
    assert post(idle, [{"role": "user", "content": "x"}]).status_code == 400
    idle.close()


def test_conversations_at_once_keep_their_turns_apart(endpoint):
    """That a conversation asks for its engine is in test_endpoint_agents.py, that many use all in tests/cluster."""
    with ThreadPoolExecutor(8) as threads:
        talks = list(threads.map(lambda i: converse(endpoint, 2, opening=f"begin {i}")[1], range(8)))
    history = endpoint.service.history
    for answers in talks:
        turns = [history.turn(np.array(a["prompt_token_ids"] + a["generation_token_ids"], np.int32)) for a in answers]
        assert [turn.turns for turn in turns] == [1, 2]


def test_samples_of_one_prompt_are_the_same_set_in_every_run_of_a_batch(endpoint, stage):
    def batch():
        with ThreadPoolExecutor(4) as threads:
            answers = threads.map(lambda _: said(endpoint, [{"role": "user", "content": "again"}]), range(4))
            return sorted(tuple(a["generation_token_ids"]) for a in answers)

    first = batch()
    endpoint.service._request_counts.clear()
    assert batch() == first
    assert len({endpoint.service._seed(np.arange(3)) for _ in range(100)}) == 100  # one prompt, other seeds
