"""Environments of OpenEnv: what its own client sees, what the policy is told, and servers that do anything."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from hostile_openenv_server import HostileServer

from gdpo_nemo.data.records import Outcome, Prompt
from gdpo_nemo.environments.episodes import EpisodeStep
from gdpo_nemo.environments.execution.pool import EnvironmentPool
from gdpo_nemo.environments.execution.pools import EnvironmentPools
from gdpo_nemo.environments.openenv.episodes import OpenEnv
from gdpo_nemo.environments.openenv.messages import action_of, first_prompt, observation_text, reset_arguments
from gdpo_nemo.environments.openenv.settings import read_settings
from gdpo_nemo.environments.registry import load_environment
from gdpo_nemo.utils.errors import ConfigError, RunError

SERVER = Path(__file__).with_name("openenv_server.py")
DEADLINE = 60.0
TIMEOUT = 3.0
"""Of steps that are never answered."""


@pytest.fixture(scope="session")
def server():
    """Base URL of OpenEnv's server in a process of its own."""
    process = subprocess.Popen([sys.executable, str(SERVER)], stdout=subprocess.PIPE, text=True)
    yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    process.terminate()
    process.wait(DEADLINE)


@pytest.fixture(scope="module")
def pool(server):
    section = {
        "guess": {"plugin": "openenv", "url": f"{server}/guess", "action": "guess", "observation": "message"},
        "echo": {
            "plugin": "openenv",
            "url": f"{server}/echo",
            "action": "message",
            "observation": "echoed_message",
            "reset": {"task": {"column": "number"}, "level": 2},
        },
    }
    with EnvironmentPools(section, timeout_s=DEADLINE) as made:
        yield made


@pytest.fixture(scope="module")
def hostile():
    made = HostileServer()
    yield made
    made.stop()


@pytest.fixture
def fresh():
    """A hostile server whose connections are those of one test."""
    made = HostileServer()
    yield made
    made.stop()


def prompt_of(environment, name="p", messages=({"role": "user", "content": "hello"},), **fields) -> Prompt:
    return Prompt(name, np.zeros(3, np.int32), "hello", environment, fields, list(messages) if messages else None)


def reset(pool, prompt):
    (reply,) = pool.step([EpisodeStep(prompt, 0, 0)])
    return reply


def step(pool, prompt, state, text):
    """One reply; None for the text cuts the episode."""
    message = None if text is None else {"role": "assistant", "content": text, "finish_reason": "stop"}
    (reply,) = pool.step([EpisodeStep(prompt, 0, 1, state, message)])
    return reply


def play(pool, prompt, texts):
    """Replies of an episode, that to the reset first."""
    replies = [reset(pool, prompt)]
    for text in texts:
        if replies[-1].done or replies[-1].outcome is not Outcome.OK:
            break
        replies.append(step(pool, prompt, replies[-1].state, text))
    return replies


def one(url, **options):
    """A pool with an environment ``mine`` that echoes."""
    echo = {"plugin": "openenv", "url": url, "action": "message", "observation": "echoed_message"}
    return EnvironmentPool({"mine": {**echo, **options}}, timeout_s=DEADLINE)


def live(server) -> int:
    with urllib.request.urlopen(f"{server}/live", timeout=DEADLINE) as reply:
        return json.load(reply)["counted"]


def wait_until(found):
    end = time.monotonic() + DEADLINE
    while not found():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_rewards_and_observations_equal_those_of_openenvs_own_client(pool, server):
    prompt = prompt_of("guess", "row-7")
    arguments = reset_arguments(read_settings({"url": server, "action": "guess"}), prompt)
    ends = []
    for guesses in ([str(n) for n in range(1, 20, 4)], [str(n) for n in range(20)]):
        reply, *replies = play(pool, prompt, guesses)
        import openenv_server  # noqa: F401 - openenv does without its tools from then on
        from openenv.core import GenericEnvClient

        with GenericEnvClient(base_url=f"{server}/guess").sync() as client:
            first = client.reset(**arguments)
            results = [client.step({"guess": int(guess)}) for guess, _ in zip(guesses, replies)]
        assert reply.observation == [{"role": "user", "content": f"hello\n\n{first.observation['message']}"}]
        for mine, own in zip(replies, results, strict=True):
            assert mine.outcome is Outcome.OK and mine.rewards == {"reward": own.reward} and mine.done is own.done
            assert mine.observation == (None if own.done else own.observation["message"])
        ends.append(replies[-1].done)
    assert ends == [False, True]


@pytest.mark.slow
def test_samples_of_a_row_get_one_task_and_other_rows_another(pool):
    def told(name):
        replies = pool.step([EpisodeStep(prompt_of("echo", name, number=3), j, 0) for j in range(3)])
        return {json.loads(reply.observation[0]["content"].partition("\n\n")[2])["seed"] for reply in replies}

    first, other = told("p"), told("q")
    assert len(first) == len(other) == 1 and first != other and told("p") == first
    assert isinstance(first.pop(), int)


@pytest.mark.slow
def test_reset_is_given_constants_and_columns_of_the_row(pool):
    reply = reset(pool, prompt_of("echo", number=[7]))
    given = json.loads(reply.observation[0]["content"].partition("\n\n")[2])
    assert given["task"] == [7] and given["level"] == 2
    with pytest.raises(RunError, match="environment 'echo': reset.task: row p has no column 'number'"):
        reset(pool, prompt_of("echo"))


@pytest.mark.parametrize(
    "mode, messages, wanted",
    [
        ("row", "u", None),
        ("both", "u", "u:hello\n\n{}"),
        ("both", "su", "s:be brief u:hello\n\n{}"),
        ("both", "s", "s:be brief u:{}"),
        ("observation", "u", "{}"),
        ("observation", "su", "s:be brief u:{}"),
        ("both", "", "hello\n\n{}"),
    ],
)
def test_the_first_prompt_is_that_of_row_or_reset_or_both(mode, messages, wanted):
    known = {"s": {"role": "system", "content": "be brief"}, "u": {"role": "user", "content": "hello"}}
    settings = read_settings({"url": "http://h", "action": "a", "observation": "x", "first_prompt": mode})
    found = first_prompt(settings, prompt_of("e", messages=[known[key] for key in messages]), {"x": "now"})
    if isinstance(found, list):
        found = " ".join(f"{message['role'][0]}:{message['content']}" for message in found)
    assert found == (wanted and wanted.format("now"))


@pytest.mark.parametrize(
    "chosen, text",
    [
        ("message", "more"),
        ("parts.length", "4"),
        ("none", ""),
        (["message", "parts.length"], "message: more\nparts.length: 4"),
        ("{message}, {parts.length} in all", "more, 4 in all"),
        (None, '{"message": "more", "parts": {"length": 4}}'),
    ],
)
def test_an_observation_is_shown_as_a_field_fields_a_template_or_json(chosen, text):
    settings = read_settings({"url": "http://h", "action": "a", "observation": chosen})
    observation = {"message": "more", "parts": {"length": 4}, "none": None, "metadata": {"m": 1}}
    assert observation_text(settings, observation) == text


@pytest.mark.slow
def test_text_of_the_policy_is_put_into_the_configured_field_of_the_action(server):
    prompt = prompt_of("mine")
    with one(f"{server}/echo", action={"message": "{text}", "loud": True}) as pool:
        assert play(pool, prompt, ["hear {this}"])[1].observation == "HEAR {THIS}"
    settings = read_settings({"url": "http://h", "action": {"tool_name": "say", "arguments": {"all": ["{text}", 1]}}})
    assert action_of(settings, "x") == {"tool_name": "say", "arguments": {"all": ["x", 1]}}


@pytest.mark.slow
def test_a_policy_that_writes_json_writes_the_action_beside_fixed_fields(server):
    with one(f"{server}/echo", action_format="json", action={"loud": True}, invalid_action_reward=-0.5) as pool:
        said = ['{"message": "a", "loud": false}', "{", "[1]", '{"massage": "a"}', "[" * 5000, '{"message": "end"}']
        _, right, *wrong, end = play(pool, prompt_of("mine"), said)
    assert right.observation == "A" and right.rewards == {"reward": 0.1} and end.done
    assert all(r.outcome is Outcome.OK and r.rewards == {"reward": -0.5} and not r.done for r in wrong)
    assert [r.observation for r in wrong[:2]] == ["Invalid action: it must be a JSON object."] * 2
    assert "massage" in wrong[2].observation


@pytest.mark.slow
def test_an_action_that_the_servers_check_refuses_is_the_policys_mistake(pool):
    _, wrong, right = play(pool, prompt_of("guess"), ["seven", "30"])
    assert wrong.outcome is Outcome.OK and wrong.rewards == {"reward": 0.0} and not wrong.done
    assert wrong.observation.startswith("Invalid action: guess: ") and "integer" in wrong.observation
    assert right.observation == "less" and right.rewards == {"reward": -0.1}


@pytest.mark.slow
def test_an_action_that_the_config_makes_wrong_is_a_failure_not_a_reward(server):
    for action, word in (("massage", "massage"), ({"message": "{text}", "volume": 3}, "volume")):
        with one(f"{server}/echo", action=action) as pool:
            _, reply = play(pool, prompt_of("mine"), ["a"])
        assert reply.outcome is Outcome.ENV_FAILED and reply.rewards == {}
        assert reply.detail.startswith("rejected: VALIDATION_ERROR") and word in reply.detail


@pytest.mark.slow
def test_no_reward_is_none_and_an_empty_observation_is_an_empty_line(pool):
    _, nothing, yes, null = play(pool, prompt_of("echo", number=1), ["nothing", "yes", "null"])
    assert nothing.rewards == {"reward": None} and yes.rewards == {"reward": 1.0} and null.observation == "\n"


@pytest.mark.slow
def test_exception_of_the_environment_masks_the_trajectory(pool):
    _, reply = play(pool, prompt_of("echo", number=1), ["raise"])
    assert reply.outcome is Outcome.ENV_FAILED
    assert reply.detail == "server_error: EXECUTION_ERROR: the environment broke"


@pytest.mark.slow
def test_an_episode_that_is_over_at_its_reset_is_a_failure(server):
    with one(f"{server}/echo", reset={"over": True}) as pool:
        reply = reset(pool, prompt_of("mine"))
    assert reply.outcome is Outcome.ENV_FAILED and "ended at its reset" in reply.detail


@pytest.mark.slow
def test_a_server_without_a_free_session_is_asked_again_then_is_a_failure(server):
    prompt = prompt_of("mine")
    with one(f"{server}/narrow", retries=2) as pool, one(f"{server}/narrow", retries=50) as patient:
        first = reset(pool, prompt)
        refused = reset(pool, prompt)
        assert refused.outcome is Outcome.ENV_FAILED
        assert refused.detail.startswith("rate_limited: CAPACITY_REACHED") and "3 attempts" in refused.detail
        waiting = threading.Thread(target=lambda: waited.append(reset(patient, prompt)))
        waited = []
        waiting.start()
        step(pool, prompt, first.state, None)
        waiting.join(DEADLINE)
        assert [reply.outcome for reply in waited] == [Outcome.OK]


@pytest.mark.slow
def test_512_episodes_at_once_need_no_thread_each_and_leave_no_session(server):
    prompts = [prompt_of("mine", f"p{i}") for i in range(512)]
    with one(f"{server}/counted") as pool:
        reset(pool, prompts[0])
        before = threading.active_count()

        async def begin():
            replies = await asyncio.gather(*(pool.step_one(EpisodeStep(prompt, 0, 0)) for prompt in prompts))
            return replies, threading.active_count()

        replies, threads = asyncio.run(begin())
        assert all(reply.outcome is Outcome.OK for reply in replies) and threads <= before + 1
        assert live(server) == 513
        said = {"role": "assistant", "content": "end", "finish_reason": "stop"}
        ends = pool.step([EpisodeStep(p, 0, 1, r.state, said) for p, r in zip(prompts, replies)])
        assert all(reply.done for reply in ends)
        wait_until(lambda: live(server) == 1)
    wait_until(lambda: live(server) == 0)


@pytest.mark.slow
def test_a_step_that_is_cancelled_or_an_episode_that_is_left_closes_its_session(server):
    prompt = prompt_of("mine")
    with one(f"{server}/counted") as pool:
        replies = [reset(pool, prompt) for _ in range(2)]

        async def give_up():
            said = {"role": "assistant", "content": "wait", "finish_reason": "stop"}
            task = asyncio.create_task(pool.step_one(EpisodeStep(prompt, 0, 1, replies[0].state, said)))
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.wait([task])
            return task.cancelled()

        assert live(server) == 2 and asyncio.run(give_up())
        wait_until(lambda: live(server) == 1)
        pool.abandon(EpisodeStep(prompt, 1, 1, replies[1].state))
        wait_until(lambda: live(server) == 0)
        late = step(pool, prompt, replies[0].state, "a")
        assert late.outcome is Outcome.ENV_FAILED and late.detail.startswith("connection: ")


@pytest.mark.slow
def test_sessions_end_with_their_idle_time_with_the_pool_and_with_a_cut(server):
    prompt = prompt_of("mine")
    with one(f"{server}/counted", idle_timeout_s=0.2) as pool:
        silent = reset(pool, prompt)
        wait_until(lambda: live(server) == 0)
        late = step(pool, prompt, silent.state, "a")
        assert late.outcome is Outcome.ENV_FAILED and "idle_timeout_s" in late.detail
    with one(f"{server}/counted") as pool:
        cut = step(pool, prompt, reset(pool, prompt).state, None)
        assert cut.done and cut.outcome is Outcome.OK and cut.rewards == {"reward": None}
        wait_until(lambda: live(server) == 0)
        for _ in range(3):
            reset(pool, prompt)
        assert live(server) == 3
    wait_until(lambda: live(server) == 0)
    with pytest.raises(RunError, match="closed"):
        reset(pool, prompt)


@pytest.mark.slow
def test_a_session_outlives_the_servers_pings_while_the_policy_writes(pool):
    """The server pings every 0.5 s and gives up 10 s after one that is not answered."""
    prompt = prompt_of("echo", number=1)
    begun = reset(pool, prompt)
    time.sleep(12.0)
    assert step(pool, prompt, begun.state, "still here").observation == "still here"


MISDEEDS = {
    "nan": "bad_reply: the reward is not finite",
    "infinite": "bad_reply: the reward is not finite",
    "overflow": "bad_reply: the reward is not finite",
    "reward_text": "bad_reply: the reward is of type str, not a number",
    "no_json": "bad_reply: the reply is not JSON",
    "a_list": "bad_reply: expected a JSON object as the answer, got list",
    "deep": "bad_reply: the reply is nested more than 100",
    "long_number": "bad_reply: the reply is not JSON",
    "no_type": "bad_reply: expected an observation from the server, got None",
    "observation_list": "bad_reply: expected an object as the observation, got list",
    "done_text": "bad_reply: done must be true or false, not 'yes'",
    "missing": "bad_reply: observation.echoed_message is not in the reply; the reply has other",
    "long_observation": "too_large: an observation has 1048577 characters, more than the limit of 1048576",
    "big": "too_large: the answer is larger than max_reply_bytes",
    "error_without_data": "server_error: None: None",
    "error_code_object": "server_error: {'a': 1}",
    "bytes": "bad_reply: expected a text message from the server, got bytes",
    "no_frame": "bad_reply: not a valid WebSocket message: Received frame",
    "hang": "timeout: no answer to step within 3 s",
    "drip": "timeout: no answer to step within 3 s",
    "closes": "connection: the server closed the connection",
    "cuts": "connection: the server closed the connection",
    "cuts_in_the_middle": "connection: the server closed the connection",
}


@pytest.fixture(scope="module")
def misdone(hostile):
    """Per misdeed the reply to the step that meets it; all at once, and with as many episodes that do not."""
    prompts = [prompt_of("mine", misdeed) for misdeed in (*MISDEEDS, *["fine"] * len(MISDEEDS))]
    with one(hostile.url, timeout_s=TIMEOUT, max_reply_bytes=2 * 2**20) as pool:
        begun = pool.step([EpisodeStep(prompt, 0, 0) for prompt in prompts])
        said = [{"role": "assistant", "content": prompt.id, "finish_reason": "stop"} for prompt in prompts]
        replies = pool.step([EpisodeStep(p, 0, 1, b.state, m) for p, b, m in zip(prompts, begun, said)])
    return dict(zip(MISDEEDS, replies)), replies[len(MISDEEDS) :]


@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_a_misdeed_masks_its_own_trajectory_with_one_line(misdone, misdeed):
    reply = misdone[0][misdeed]
    assert reply.outcome is Outcome.ENV_FAILED and reply.rewards == {} and reply.state == b""
    assert reply.detail.startswith(MISDEEDS[misdeed]) and "\n" not in reply.detail


def test_misdeeds_touch_no_other_trajectory(misdone):
    assert all(reply.outcome is Outcome.OK and reply.rewards == {"reward": 1.0} for reply in misdone[1])


@pytest.mark.parametrize("misdeed", ["flood", "twice"])
def test_unrequested_message_ends_the_session(fresh, misdeed):
    prompt = prompt_of("mine")
    with one(fresh.url, timeout_s=TIMEOUT) as pool:
        _, first = play(pool, prompt, [misdeed])
        wait_until(lambda: step(pool, prompt, first.state, "fine").outcome is Outcome.ENV_FAILED)
        wait_until(lambda: not fresh.sockets)


def test_halves_of_characters_are_shown_as_question_marks(hostile):
    with one(hostile.url) as pool:
        assert play(pool, prompt_of("mine"), ["half_characters"])[1].observation == "a?b"


def test_a_lost_connection_is_not_stepped_again_on_a_new_session(hostile):
    resets = hostile.resets
    with one(hostile.url) as pool:
        begun, lost = play(pool, prompt_of("mine"), ["cuts"])
        again = step(pool, prompt_of("mine"), begun.state, "fine")
    assert lost.outcome is again.outcome is Outcome.ENV_FAILED and hostile.resets == resets + 1


@pytest.mark.parametrize(
    "url, words",
    [
        ("{}/moved", "redirect: HTTP 302; redirects are not followed"),
        ("{}/absent", "rejected: expected a WebSocket at {}/absent/ws, got HTTP 404"),
        ("{}/locked", "rejected: expected a WebSocket at {}/locked/ws, got HTTP 403"),
        ("http://127.0.0.1:9", "connection: "),
    ],
)
def test_a_server_that_is_not_there_or_not_one_is_a_failure(hostile, url, words):
    with one(url.format(hostile.url), retries=1) as pool:
        reply = reset(pool, prompt_of("mine"))
    assert reply.outcome is Outcome.ENV_FAILED and reply.detail.startswith(words.format(hostile.url))


def test_a_key_opens_the_server_and_is_in_no_message(hostile, monkeypatch):
    monkeypatch.setenv("OPENENV_TEST_KEY", "let-me-in")
    with one(f"{hostile.url}/locked", api_key_env="OPENENV_TEST_KEY") as pool:
        assert reset(pool, prompt_of("mine")).outcome is Outcome.OK
    monkeypatch.delenv("OPENENV_TEST_KEY")
    with one(f"{hostile.url}/locked", api_key_env="OPENENV_TEST_KEY") as pool:
        with pytest.raises(RunError, match="OPENENV_TEST_KEY is not set"):
            reset(pool, prompt_of("mine"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, line",
    [
        ({"action": "massage"}, r"action: the server's actions have no field 'massage'.*message"),
        ({"action": {"loud": "{text}"}}, "action: the server's actions also require the field 'message'"),
        ({"observation": "echo"}, "observation: the server's observations have no field 'echo'"),
        ({"observation": ["echoed_message", "part.x"]}, "no field 'part'.*parts"),
        ({"reset": {"n": {"column": "nmber"}}}, r"reset.n: row p has no column 'nmber'.*number"),
    ],
)
def test_preflight_names_a_field_or_column_that_is_not_there(server, options, line):
    environment = OpenEnv({"url": f"{server}/echo", "action": "message", **options})
    with pytest.raises(ConfigError, match=line):
        environment.preflight([prompt_of("echo", number=1)])
    environment.close()


@pytest.mark.slow
def test_preflight_passes_a_server_with_and_without_schemas_and_refuses_none(server, fresh):
    for url in (f"{server}/echo", fresh.url):
        environment = OpenEnv({"url": url, "action": "message", "observation": "echoed_message"})
        environment.preflight([prompt_of("echo")])
        environment.close()
    nobody = OpenEnv({"url": "http://127.0.0.1:9", "action": "message"})
    with pytest.raises(RunError, match="server at http://127.0.0.1:9: connection"):
        nobody.preflight([prompt_of("echo")])
    nobody.close()
    wait_until(lambda: not fresh.sockets)


@pytest.mark.parametrize(
    "options, line",
    [
        ({}, "url: must be a URL"),
        ({"url": "127.0.0.1:8000"}, "url: must be a URL"),
        ({"url": "http://h"}, "action: must be the field"),
        ({"url": "http://h", "action": {"message": "text"}}, "action: must be the field"),
        (
            {"url": "http://h", "action": {"m": "{text}"}, "action_format": "json"},
            r"action: must contain only fixed fields with action_format json, .* got \{'m': '\{text\}'\}",
        ),
        ({"url": "http://h", "action": "m", "action_format": "jason"}, "action_format: 'jason' is not one of text"),
        ({"url": "http://h", "action": "m", "observatoin": "x"}, "unknown option 'observatoin'.*observation"),
        ({"url": "http://h", "action": "m", "observation": 3}, "observation: must be"),
        ({"url": "http://h", "action": "m", "observation": []}, "observation: must be"),
        ({"url": "http://h", "action": "m", "reset": {"a": {"row": "b"}}}, "reset.a: must be a value"),
        ({"url": "http://h", "action": "m", "first_prompt": "none"}, "first_prompt: 'none' is not one of"),
        ({"url": "http://h", "action": "m", "timeout_s": 0}, "timeout_s: must be a number of at least"),
        ({"url": "http://h", "action": "m", "retries": -1}, "retries: must be a number of at least 0"),
        ({"url": "http://h", "action": "m", "reward": ""}, "reward: must be a text"),
        (
            {"url": "http://h", "action": "m", "invalid_action_reward": float("inf")},
            "option invalid_action_reward must be at most",
        ),
        ({"url": "http://h", "action": "m", "num_workers": 2}, "num_workers: has no effect"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_refused_in_one_line(options, line):
    with pytest.raises(ConfigError, match=line) as error:
        load_environment("mine", {"plugin": "openenv", **options})
    assert "\n" not in str(error.value)


def test_urls_of_websockets_are_taken_and_rows_need_a_prompt():
    options = {"url": "ws://127.0.0.1:8000/", "action": "m", "reward": "won"}
    environment = load_environment("mine", {"plugin": "openenv", **options})
    assert environment.settings.url == "http://127.0.0.1:8000" and environment.reward_names == ("won",)
    assert environment.has_turns and environment.has_preflight and not environment.makes_rows
    playing = load_environment("mine", {"plugin": "openenv", **options, "prompt": "Play."})
    rows = playing.rows("train", 3, 1)
    assert playing.makes_rows and [row["prompt"] for row in rows] == ["Play."] * 3
    assert len({row["id"] for row in (*rows, *playing.rows("validation", 3, 1))}) == 6
