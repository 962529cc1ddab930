"""Several calls of agents before one endpoint: whose settings, turns and seeds are whose. Scripted completions."""

from __future__ import annotations

import asyncio
import copy
import json
import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from agents_for_tests import StepServer
from scripted_engines import TOKENIZER, ScriptedEngines

from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.records import Outcome, Prompt
from gdpo_nemo.data.replies import ReplyParser
from gdpo_nemo.environments.nemo_gym.agent_environment import NemoGymAgent
from gdpo_nemo.generation.requests import Sampling
from gdpo_nemo.rollouts.credit import turn_rows
from gdpo_nemo.rollouts.endpoint import service as service_module
from gdpo_nemo.rollouts.endpoint.server import Endpoint
from gdpo_nemo.rollouts.endpoint.service import Budgets, Service
from gdpo_nemo.rollouts.functions import RolloutKind, RolloutRunner, SamplingJob
from gdpo_nemo.utils.errors import RunError

REPOSITORY = Path(__file__).resolve().parents[2]
TALK = Conversation(TOKENIZER, chat=True)
WARM = Sampling(0.5, 1.0, -1, 24)
COLD = Sampling(0.0, 1.0, -1, 24)
HELLO = [{"role": "user", "content": "begin"}]


@pytest.fixture
def engines():
    made = ScriptedEngines()
    yield made
    made.close()


@pytest.fixture(params=[True], ids=["shared"])
def endpoint(engines, request):
    made = Endpoint(Service(engines, TALK, Budgets(4, 200, 2000), shared=request.param), "127.0.0.1", 0)
    yield made
    made.close()


alone = pytest.mark.parametrize("endpoint", [False], indirect=True, ids=["alone"])


def say(endpoint, messages, **keys) -> httpx.Response:
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return httpx.post(f"{endpoint.url}/v1/chat/completions", json={"messages": messages, **keys}, timeout=600)


def ids(reply: httpx.Response) -> list[int]:
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]["generation_token_ids"]


def begun(endpoint, sampling, entropy, during) -> threading.Thread:
    """A thread that runs ``during`` inside a phase."""

    def run():
        with endpoint.service.phase(sampling, entropy):
            during()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def queued(endpoint, count: int) -> None:
    """Wait until so many phases wait for others."""
    deadline = time.monotonic() + 120
    while len(endpoint.service._queue) != count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_phases_that_sample_alike_are_open_together_and_others_wait_in_turn(endpoint):
    """A validation, which samples otherwise, is not passed by for ever: training that comes later waits behind it."""
    order = []
    with endpoint.service.phase(WARM, 1):
        with endpoint.service.phase(WARM, 2):
            assert ids(say(endpoint, "x", temperature=0.5))
            assert say(endpoint, "x", temperature=0.0).status_code == 400
            check = begun(endpoint, COLD, 3, lambda: order.append(say(endpoint, "x", temperature=0.0).status_code))
            queued(endpoint, 1)
            later = begun(endpoint, WARM, 4, lambda: order.append(say(endpoint, "x", temperature=0.5).status_code))
            queued(endpoint, 2)
        assert order == []
    check.join()
    later.join()
    assert order == [200, 200] and say(endpoint, "x").json()["message"] == "no rollout is in flight"


@alone
def test_without_sharing_a_phase_waits_for_the_one_before(endpoint):
    order = []
    with endpoint.service.phase(WARM, 1):
        second = begun(endpoint, WARM, 2, lambda: order.append("second"))
        queued(endpoint, 1)
        order.append("first")
    second.join()
    assert order == ["first", "second"]


@alone
def test_seeds_of_a_step_depend_on_no_order_of_arrival(endpoint):
    """The same set of samples, whichever agent asks first, and in every run of the step."""

    def step(texts) -> dict[str, list]:
        with endpoint.service.phase(WARM, 5), ThreadPoolExecutor(4) as threads:
            answers = threads.map(lambda text: (text, ids(say(endpoint, text))), texts)
            found: dict[str, list] = {}
            for text, answer in answers:
                found.setdefault(text, []).append(answer)
            return {text: sorted(own) for text, own in found.items()}

    texts = ["a", "b", "a", "c", "a", "b"]
    first = step(texts)
    assert step(texts[::-1]) == first and len({tuple(own) for own in first["a"]}) == 3


def test_no_seed_comes_twice_while_phases_overlap(endpoint, engines):
    """The oldest leaves, and another prompt's entropy takes its place."""
    service = endpoint.service
    first = service.phase(WARM, 1)
    second = service.phase(WARM, 2)
    first.__enter__()
    for _ in range(3):
        say(endpoint, "x")
    second.__enter__()
    for _ in range(3):
        say(endpoint, "x")
    first.__exit__(None, None, None)
    for _ in range(3):
        say(endpoint, "x")
    second.__exit__(None, None, None)
    seeds = [request.seed for request, _, _ in engines.requests]
    assert len(set(seeds)) == len(seeds) == 9


def test_turns_are_forgotten_when_no_open_phase_can_need_them(endpoint):
    service = endpoint.service
    first = service.phase(WARM, 1)
    first.__enter__()
    old = say(endpoint, "old").json()["choices"][0]["message"]
    second = service.phase(WARM, 2)
    second.__enter__()
    new = say(endpoint, "new").json()["choices"][0]["message"]
    whole = [np.array(m["prompt_token_ids"] + m["generation_token_ids"], np.int32) for m in (old, new)]
    assert all(service.history.turn(tokens) is not None for tokens in whole)
    first.__exit__(None, None, None)
    assert service.history.turn(whole[0]) is None and service.history.turn(whole[1]) is not None
    second.__exit__(None, None, None)
    assert service.history.turn(whole[1]) is None and not service.history._by_text


def test_a_turn_dropped_for_the_limit_counts_while_its_phase_is_open_only(endpoint):
    service = endpoint.service
    service.history._limit = 2
    with service.phase(WARM, 1):
        for text in "abc":
            say(endpoint, text)
        assert service.history.forgotten
        with service.phase(WARM, 2):
            assert service.history.forgotten
    with service.phase(WARM, 3):
        say(endpoint, "d")
        assert not service.history.forgotten


def test_a_conversation_asks_for_its_engine_and_takes_the_one_that_it_got(endpoint, engines):
    with endpoint.service.phase(WARM, 1):
        messages = [{"role": "user", "content": "begin"}]
        for _ in range(3):
            messages += [say(endpoint, messages).json()["choices"][0]["message"], {"role": "user", "content": "on"}]
            if len(messages) == 3:
                home = engines.requests[0][2]
                engines.dead = {1}  # where the first turn was: it asks for it, and stays where it is sent instead
    asked = [engine for _, _, engine in engines.requests]
    assert home is None and asked[:2] == [None, 1] and asked[2] == 0


def test_a_fleet_that_failed_answers_500_and_the_call_learns_of_it(endpoint, engines):
    async def fails(request, sampling, engine=None):
        raise RunError("no engine is left")

    engines.sample = fails
    with endpoint.service.phase(WARM, 1):
        reply = say(endpoint, "x")
    assert reply.status_code == 500 and reply.json()["message"] == "no engine is left"
    assert str(endpoint.service.failure) == "no engine is left"


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "leap")]
READ_TOOLS = Conversation(copy.deepcopy(TOKENIZER), chat=True, replies=ReplyParser(TOKENIZER, "none"))
READ_TOOLS.tokenizer.chat_template = "{{ (tools or [])|map(attribute='function.name')|join }}" + TOKENIZER.chat_template


@pytest.mark.parametrize("returns_ids", [True, False])
def test_policy_reads_the_tools_of_the_request_if_an_agent_changes_them(endpoint, returns_ids):
    """With other tools, the turn begins a new context. With the same tools, it continues."""
    service = endpoint.service
    service.conversation = READ_TOOLS
    messages = [{"role": "user", "content": "begin"}]
    with service.phase(WARM, 1):
        for tools, spliced in ((TOOLS[:1], 0), (TOOLS[:1], 1), (TOOLS, 1), (TOOLS, 2), (None, 2)):
            message = say(endpoint, messages, tools=tools).json()["choices"][0]["message"]
            prompt = TOKENIZER.decode(message["prompt_token_ids"])
            assert prompt.startswith("".join(tool["function"]["name"] for tool in tools or []) + "<|start|>user")
            assert service.counts["spliced"] == spliced
            said = message if returns_ids else {"role": "assistant", "content": message["content"]}
            messages += [said, {"role": "user", "content": "go on"}]
        assert service.counts["edited"] == (2 if returns_ids else 0)


@pytest.mark.parametrize("path, keys, samples", [
    ("/v1/chat/completions", {"messages": HELLO, "n": 2}, 2),
    ("/v1/chat/completions", {"messages": HELLO, "stream": True}, 1),
    ("/v1/responses", {"input": HELLO}, 1),
    ("/v1/responses", {"input": HELLO, "stream": True}, 1),
    ("/v1/messages", {"messages": HELLO}, 1),
    ("/v1/messages", {"messages": HELLO, "stream": True}, 1),
])  # fmt: skip
def test_sampling_stops_if_the_client_closes_its_connection(endpoint, engines, path, keys, samples):
    events: queue.Queue[str] = queue.Queue()

    async def sample(request, sampling, engine=None):
        events.put("begun")
        try:
            await asyncio.Event().wait()
        finally:
            events.put("dropped")

    engines.sample = sample
    with endpoint.service.phase(WARM, 1):
        place = urlsplit(endpoint.url)
        with closing(HTTPConnection(place.hostname, place.port)) as connection:
            connection.request("POST", path, json.dumps(keys))
            assert [events.get(timeout=60) for _ in range(samples)] == ["begun"] * samples
        assert [events.get(timeout=60) for _ in range(samples)] == ["dropped"] * samples
        assert httpx.get(f"{endpoint.url}/health").json() == {"status": "ok"}
        assert endpoint.service.counts["turns"] == 0


@pytest.mark.parametrize("work", ["service.read_chat", "conversation.prompt_with_images", "conversation.replies.parse"])
def test_large_request_of_one_client_does_not_delay_another(endpoint, monkeypatch, work):
    """Reading, rendering and parsing of the first request end after the reply to the second request."""
    owner, name = {
        "service.read_chat": (service_module, "read_chat"),
        "conversation.prompt_with_images": (TALK, "prompt_with_images"),
        "conversation.replies.parse": (TALK.replies, "parse"),
    }[work]
    usual = getattr(owner, name)
    begun, other_is_served = threading.Event(), threading.Event()

    def slow(*arguments):
        if not begun.is_set():
            begun.set()
            assert other_is_served.wait(60)
        return usual(*arguments)

    monkeypatch.setattr(owner, name, slow)
    with endpoint.service.phase(WARM, 1), ThreadPoolExecutor(1) as threads:
        large = threads.submit(say, endpoint, "large")
        assert begun.wait(60)
        assert ids(say(endpoint, "small"))
        other_is_served.set()
        assert ids(large.result())


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def runner_of(engines, port: int, staleness: int, agents: str = "") -> RolloutRunner:
    plugin = f"{Path(__file__).with_name('agents_for_tests.py')}:Talkers"
    agents = agents or f"{{plugin: '{plugin}', port: {port}}}"
    overrides = [
        f"env.agents={agents}",
        f"env.others={agents}",
        "env.digit_sort={}",
        f"rollout.max_staleness={staleness}",
    ]
    overrides += [f"rollout.endpoint={{enabled: true, port: {port}}}", "policy.max_total_sequence_length=2000"]
    overrides += ["policy.generation.max_new_tokens=24"]
    config = load_config(REPOSITORY / "configs" / "gdpo_turns_cpu.yaml", overrides)
    return RolloutRunner(config, engines, None, TOKENIZER)


def prompt_of(name: str, environment: str) -> Prompt:
    messages = [{"role": "user", "content": name}]
    text, tokens = TALK.prompt(messages)
    return Prompt(name, tokens, text, environment, {}, messages)


def called(runner, prompts, first: int):
    asked = SamplingJob(WARM, 2, lambda i, j, turn: 1000 * (first + i) + 10 * j + turn)
    return runner.call(prompts, asked, None)


@pytest.mark.slow
def test_one_call_may_hold_prompts_of_several_agents_and_kinds_mix(engines, port):
    runner = runner_of(engines, port, 0)
    try:
        kinds = {name: runner.kind(name) for name in ("agents", "others", "digit_sort", "digit_turns")}
        assert list(kinds.values()) == [RolloutKind.CALL, RolloutKind.CALL, RolloutKind.SAMPLE, RolloutKind.EPISODE]
        prompts = [prompt_of(f"p{n}", "others" if n % 2 else "agents") for n in range(4)]
        made = called(runner, prompts, 0)
        assert [[(t.prompt.id, t.sample_index) for t in group] for group in made] == [
            [(f"p{n}", 0), (f"p{n}", 1)] for n in range(4)
        ]
        assert all(t.trains and t.turns == 2 and t.rewards == {"answered": 1.0} for group in made for t in group)
        again = called(runner, prompts, 0)
        assert [outlines(group) for group in again] == [outlines(group) for group in made]
    finally:
        runner.close()


STEPS = {
    "numbers": ({"reward": 2.0, "step_rewards": [0.5, 1.5]}, {"reward": 2.0}, ({"reward": 0.5}, {"reward": 1.5})),
    "outcome": ({"reward": 2.0, "step_rewards": [0.5, None]}, {"reward": 2.0}, ({"reward": 0.5}, {"reward": 1.5})),
    "components": (
        {"reward": 1.0, "reward_components": {"call": 1.0, "end": 0.5}, "step_rewards": [{"call": 1.0}, {"form": 2.0}]},
        {"reward": 1.0, "call": 1.0, "end": 0.5, "form": 2.0},
        ({"call": 1.0}, {"form": 2.0, "call": 0.0}),
    ),
    "none": ({"reward": 1.0}, {"reward": 1.0}, ()),
    "attempts": ({"reward": 1.0, "attempts": True}, {"reward": 1.0}, ()),
}
BAD_STEPS = {
    "3 entries, but the policy took 2 turns": {"step_rewards": [1, 2, 3]},
    "expected a list as step_rewards, got dict": {"step_rewards": {"0": 1}},
    "step_rewards is of type str, not a number": {"step_rewards": ["1", 2]},
    "is not finite": {"step_rewards": [{"a": 1e999}, None]},
    "all_attempts is not a list of attempts with a response": {"all_attempts": [{"reward": 1.0}]},
    "attempts); the endpoint refused 4 requests of this batch, the last one because seed 3 is not supported": {
        "sampling": {"seed": 3}
    },
}


@pytest.mark.slow
def test_step_rewards_of_an_agents_server_are_credited_to_their_turns(engines, port):
    server = StepServer(port)
    runner = runner_of(engines, port, 0, f"{{plugin: nemo_gym_agent, agents: {{gym: '{server.url}'}}}}")
    environment = NemoGymAgent({"agents": {"gym": server.url}})
    replies = [
        *(reply for reply, _, _ in STEPS.values()),
        *({"reward": 1.0, **bad} for bad in BAD_STEPS.values()),
    ]
    try:
        prompts = []
        for number, reply in enumerate(replies):
            message = {"role": "user", "content": json.dumps(reply)}
            fields = environment.read_row({"responses_create_params": {"input": [message]}})
            text, tokens = TALK.prompt(fields["messages"])
            prompts.append(Prompt(f"p{number}", tokens, text, "agents", fields, fields["messages"]))
        made = called(runner, prompts, 0)
    finally:
        runner.close()
        server.stop()
    for group, (_, totals, turns) in zip(made, STEPS.values()):
        assert [(t.trains, t.turns, t.rewards, t.turn_rewards) for t in group] == [(True, 2, totals, turns)] * 2
    for group, detail in zip(made[len(STEPS) :], BAD_STEPS):
        assert [(t.outcome, t.trains) for t in group] == [(Outcome.ENV_FAILED, False)] * 2
        assert all(detail in t.detail for t in group), [t.detail for t in group]
    rows = turn_rows([group[0] for group in made[: len(STEPS)]], ["reward", "call"], discount=0.5)
    assert rows.columns["reward"].tolist() == [1.25, 1.5, 1.25, 1.5, 0.5, 1.0, 0.5, 1.0, 0.5, 1.0]
    assert rows.columns["call"][4:6].tolist() == [1.0, 0.0]


@pytest.mark.slow
def test_turn_that_more_episodes_contain_than_requests_sampled_is_not_trained(engines, port):
    """The cache answers samples of two prompts. Requests may also sample equal tokens, which are all trained."""
    engines.script = lambda request: ("same", "stop")
    plugin = f"{Path(__file__).with_name('agents_for_tests.py')}:CachedTalkers"
    runner = runner_of(engines, port, 0, f"{{plugin: '{plugin}', port: {port}}}")
    try:
        cached = [t for group in called(runner, [prompt_of(n, "agents") for n in "ab"], 0) for t in group]
    finally:
        runner.close()
    runner = runner_of(engines, port, 0)
    try:
        ((one, other),) = called(runner, [prompt_of("a", "agents")], 0)
    finally:
        runner.close()
    assert [t.outcome for t in cached] == [Outcome.ENV_FAILED] * 3 + [Outcome.OK]
    assert not any(t.rewards for t in cached[:3])
    assert {t.detail for t in cached[:3]} == {
        "bad_reply: 3 episodes contain turn 1, but it was sampled once; disable response caches between agent and "
        "endpoint"
    }
    assert one.trains and other.trains and outlines([one]) == outlines([other])


def outlines(group) -> list:
    return sorted(t.completion_ids.tolist() for t in group)


@pytest.mark.slow
def test_groups_called_at_once_are_in_flight_together_and_their_samples_differ(engines, port):
    runner = runner_of(engines, port, 1)
    try:
        engines.version = 7
        engines.gate.clear()
        with ThreadPoolExecutor(3) as threads:
            calls = [threads.submit(called, runner, [prompt_of("same", "agents")], n) for n in range(3)]
            deadline = time.monotonic() + 120
            while len(engines.requests) < 6:  # the first turns of all three
                assert time.monotonic() < deadline
                time.sleep(0.01)
            engines.gate.set()
            made = [call.result()[0] for call in calls]
        samples = [t for group in made for t in group]
        assert all(t.trains and t.spans == ((7, t.num_policy_tokens),) for t in samples)
        assert len({t.completion_ids.tobytes() for t in samples}) == 6
    finally:
        runner.close()


def test_turn_requested_in_an_earlier_batch_is_not_used_in_the_next(endpoint, engines):
    """Of the same tokens, the next batch would be given its log-probs and its version."""
    service = endpoint.service
    answers: list[httpx.Response] = []
    engines.gate.clear()
    with service.phase(WARM, 1):
        late = threading.Thread(target=lambda: answers.append(say(endpoint, "x")))
        late.start()
        deadline = time.monotonic() + 120
        while not engines.requests:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    with service.phase(WARM, 2):
        engines.gate.set()
        late.join(120)
        assert [(reply.status_code, reply.json()["message"]) for reply in answers] == [(400, "no rollout is in flight")]
        assert service.history.count == 0 and not service.counts["turns"]
        assert ids(say(endpoint, "x"))
