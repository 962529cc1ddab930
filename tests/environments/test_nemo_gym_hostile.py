"""Servers that do anything: each misdeed has one outcome, in bounded time, and touches no other trajectory."""

import asyncio
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from environment_samples import trajectory
from hostile_gym_server import SECRET, ClosingServer, Hosted, RepeatingServer, hostile_app

from gdpo_nemo.commands import cli
from gdpo_nemo.data.records import Outcome
from gdpo_nemo.environments.execution.pool import EnvironmentPool
from gdpo_nemo.environments.http_client import HttpClient
from gdpo_nemo.environments.nemo_gym import episodes
from gdpo_nemo.environments.nemo_gym.environment import NemoGym
from gdpo_nemo.environments.nemo_gym.rows import ROW
from gdpo_nemo.utils.errors import ConfigError, RunError

# Forty batches share two cores with their server, and these with others: what is not the misdeed must fit in with room
# to spare.
DEADLINE = 12.0
TIMEOUT = 5.0
ALLOWANCE = 60.0
RULES = [{"name": "correctness"}, {"name": "format"}]
LIMITS = {"deadline_s": DEADLINE, "request_timeout_s": TIMEOUT, "retries": 2, "max_reply_bytes": 2**20}

# misdeed: (kind of failure, or None; words of the detail; least and most seconds)
MISDEEDS = {
    "hang": ("timeout", "no reply within", TIMEOUT, DEADLINE),
    "drip": ("timeout", "no reply within", TIMEOUT, DEADLINE),
    "errors": ("server_error", "HTTP 500: boom Bearer *** (", 0.3, DEADLINE),
    "error_once": (None, "", 0.1, DEADLINE),
    "busy_once": (None, "", 0.2, DEADLINE),
    "busy_for_an_hour": ("rate_limited", "server requested a pause of 3600 s; deadline_s is 12", 0, 1.0),
    "busy_until_a_date": ("rate_limited", "server requested a pause of", 0, 1.0),
    "cut_short": ("connection", " attempts", 0.3, DEADLINE),
    "closed": ("connection", " attempts", 0.3, DEADLINE),
    "nobody": ("connection", " attempts", 0.3, DEADLINE),
    "big": ("too_large", "has 10000022 bytes, more than max_reply_bytes (1048576)", 0, 1.0),
    "big_unannounced": ("too_large", "larger than max_reply_bytes", 0, 1.0),
    "bomb": ("bad_reply", "compressed (gzip)", 0, 1.0),
    "deep": ("bad_reply", "nested more than 100 levels", 0, 1.0),
    "quotes": ("bad_reply", "nested more than 100 levels", 0, 1.0),
    "html": ("bad_reply", "not JSON: it begins with '<html>", 0, 1.0),
    "html_502": ("server_error", "HTTP 502: <html>", 0.3, DEADLINE),
    "redirect": ("redirect", "redirects are not followed", 0, 1.0),
    "empty": ("bad_reply", "not JSON", 0, 1.0),
    "no_content": ("bad_reply", "HTTP 204", 0, 1.0),
    "unprocessable": ("rejected", "HTTP 422: options: Field required", 0, 1.0),
    "a_list": ("bad_reply", "expected a JSON object as the reply, got list", 0, 1.0),
    "nan": ("bad_reply", "reward_components.correctness is not finite", 0, 1.0),
    "infinite": ("bad_reply", "reward_components.correctness is not finite", 0, 1.0),
    "overflow": ("bad_reply", "reward_components.correctness is not finite", 0, 1.0),
    "text": ("bad_reply", "reward_components.correctness is of type str, not a number", 0, 1.0),
    "object": ("bad_reply", "reward_components.correctness is of type dict, not a number", 0, 1.0),
    "components_list": ("missing_reward", "reward_components.correctness is not in the reply", 0, 1.0),
    "null": ("missing_reward", "reply has reward, reward_components.correctness, reward_components.format", 0, 1.0),
    "missing": ("missing_reward", "reply has reward, reward_components.format", 0, 1.0),
    "nan_beside": (None, "", 0, 1.0),
    "extra": (None, "", 0, 1.0),
    "fine_0_7": (None, "", 0, 1.0),
    "spans": (None, "", 0, 1.0),
    "spans_outside": ("bad_reply", "reward_spans: [0, 5] is not a range of the 4 characters", 0, 1.0),
    "spans_list": ("bad_reply", "expected an object of components as reward_spans, got list", 0, 1.0),
    "mask_sample": ("verifier", "mask_sample", 0, 1.0),
    "judge_0_5": ("verifier", "judge_failed: no key", 0, 1.0),
    "judge_0_7": ("verifier", "session_lost: restarted", 0, 1.0),
    "instance_mask": ("verifier", "mask_sample", 0, 1.0),
    "cookie_flood": ("bad_reply", "more than 16 cookies", 0, 1.0),
    "cookie_games": (None, "", 0, 1.0),
}  # fmt: skip


def sample(value=0.5, misdeed="none", group="p", index=0, environment="gym", server=None, **fields):
    """A trajectory whose honest rewards are {correctness: value, format: 1}."""
    number = f"{group}/{index}/{misdeed}"
    row = {"responses_create_params": {"input": "say it"}, "value": value, "misdeed": misdeed, "id": number, **fields}
    if server:
        row["agent_ref"] = {"type": "responses_api_agents", "name": server}
    return trajectory("said", environment, group, index, **{ROW: row})


@pytest.fixture(scope="module")
def servers():
    elsewhere = Hosted(hostile_app())
    server = Hosted(hostile_app(elsewhere.url))
    closing = ClosingServer()
    yield server, elsewhere, closing
    for one in (server, elsewhere, closing):
        one.stop()


@pytest.fixture(scope="module")
def gym(servers):
    os.environ["GYM_TEST_KEY"] = SECRET
    server, _, closing = servers
    urls = {"main": server.url, "closed": closing.url, "nobody": "http://127.0.0.1:9"}
    gym = NemoGym({"servers": urls, "rewards": RULES, "api_key_env": "GYM_TEST_KEY", **LIMITS})
    yield gym
    gym.close()


@pytest.fixture(scope="module")
def judged(gym):
    """Per misdeed the verdicts of five trajectories, the third of which meets it, and the seconds they took; all at
    once."""

    def run(misdeed):
        server = misdeed if misdeed in ("closed", "nobody") else "main"
        batch = [sample(0.1 * i, group=misdeed, index=i, server="main") for i in range(5)]
        batch[2] = sample(0.7, misdeed, misdeed, 2, server=server)
        begin = time.monotonic()
        return gym.verify(batch), time.monotonic() - begin

    gym.verify([sample(server="main")])
    with ThreadPoolExecutor(len(MISDEEDS)) as threads:
        return dict(zip(MISDEEDS, threads.map(run, MISDEEDS)))


@pytest.mark.slow
@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_a_misdeed_has_one_outcome_in_bounded_time_and_changes_no_other_trajectory(judged, misdeed):
    kind, words, least, most = MISDEEDS[misdeed]
    verdicts, seconds = judged[misdeed]
    others = [0, 1, 3, 4]
    assert [verdicts[i].rewards for i in others] == [{"correctness": 0.1 * i, "format": 1.0} for i in others]
    assert all(verdicts[i].outcome is Outcome.OK for i in others)
    assert dict(verdicts[2].reward_spans) == ({"format": ((1, 3),)} if misdeed == "spans" else {})
    if kind is None:
        assert (verdicts[2].outcome, dict(verdicts[2].rewards)) == (Outcome.OK, {"correctness": 0.7, "format": 1.0})
    else:
        assert (verdicts[2].outcome, dict(verdicts[2].rewards)) == (Outcome.ENV_FAILED, {})
        assert verdicts[2].detail.startswith(f"{kind}: ") and words in verdicts[2].detail, verdicts[2].detail
        assert len(verdicts[2].detail) < 600 and verdicts[2].detail.isprintable()
    assert least <= seconds < most + ALLOWANCE, seconds


def test_unrequested_message_of_a_server_is_not_the_reply_to_the_next_request():
    server = RepeatingServer()

    async def ask() -> list[dict]:
        client = HttpClient(1, 1 << 20, 50)
        try:
            replies = []
            for _ in range(3):
                server.repeated.clear()
                replies.append(await client.get(server.url, 60.0))
                await asyncio.to_thread(server.repeated.wait, 60.0)
                await asyncio.sleep(0.05)  # until the bytes are here
            return replies
        finally:
            await client.close()

    try:
        assert asyncio.run(ask()) == [{"reward": 1}, {"reward": 2}, {"reward": 3}]
    finally:
        server.stop()


def test_a_redirect_is_never_followed_and_no_secret_leaves(judged, servers):
    assert servers[1]._app.state.seen == []
    assert SECRET not in "".join(verdict.detail for verdicts, _ in judged.values() for verdict in verdicts)


def test_each_trajectory_returns_only_the_cookies_of_its_session(judged, servers):
    state = servers[0]._app.state
    sessions = [(number, cookies["session"]) for number, cookies in state.cookies]
    assert all(session.startswith(f"{number}-") for number, session in sessions)
    assert len({session for _, session in sessions}) == len(sessions)  # an attempt anew is a session anew
    flooded = [cookies for number, cookies in state.cookies if number.endswith("cookie_flood")]
    assert flooded == [] and all(len(cookies) <= 2 for _, cookies in state.cookies)


@pytest.mark.parametrize(
    "missing, misdeed, expected",
    [
        ("mask", "missing", {"correctness": None, "format": 1.0}),
        ("mask", "null", {"correctness": None, "format": 1.0}),
        ("zero", "missing", {"correctness": 0.0, "format": 1.0}),
        ("zero", "no_components", {"correctness": 0.0, "format": 0.0}),
    ],
)
def test_missing_component_is_handled_according_to_the_config(servers, missing, misdeed, expected):
    rules = [{**rule, "missing": missing} for rule in RULES]
    gym = NemoGym({"servers": {"main": servers[0].url}, "rewards": rules, **LIMITS})
    assert dict(gym.verify([sample(misdeed=misdeed)])[0].rewards) == expected
    gym.close()


def test_components_are_found_without_rules_and_a_lone_scalar_is_one(servers):
    gym = NemoGym({"servers": {"main": servers[0].url}, **LIMITS})
    found = [
        dict(v.rewards) for v in gym.verify([sample(misdeed=m) for m in ("none", "extra", "no_components", "booleans")])
    ]
    assert found[0] == {"correctness": 0.5, "format": 1.0, "reward": 1.5}
    assert found[1] == {**found[0], "surprise": 5.0} and found[2] == {"reward": 1.0}
    assert found[3] == {"correctness": 1.0, "format": 0.0, "reward": 1.0}
    [verdict] = gym.verify([sample(misdeed="components_list")])
    assert verdict.outcome is Outcome.ENV_FAILED and "reward_components, got list" in verdict.detail
    gym.close()


def test_components_are_compared_with_the_scalar_only_on_request(servers):
    gym = NemoGym({"servers": {"main": servers[0].url}, "check_sum": True, **LIMITS})
    fine, off = gym.verify([sample(misdeed="none"), sample(misdeed="extra", index=1)])
    assert fine.outcome is Outcome.OK and "reward is 1.5, but its components add up to 6.5" in off.detail
    gym.close()


def test_a_server_that_restarts_in_mid_batch_costs_no_verdict(servers):
    app = hostile_app()
    server = Hosted(app)
    gym = NemoGym({"servers": {"main": server.url}, "rewards": RULES, "concurrency": 8, "retries": 6, "deadline_s": 20})
    batch = [sample(i / 40, "slow", f"p{i // 4}", i % 4, seconds=0.2) for i in range(24)]
    straight = gym.verify(batch)
    assert 1 < app.state.most <= 8  # `concurrency`

    def restart():
        while len(app.state.seen) < 28 or not app.state.active:
            time.sleep(0.005)
        server.break_off()
        time.sleep(0.3)
        server.start()

    thread = threading.Thread(target=restart)
    thread.start()
    assert gym.verify(batch) == straight and {v.outcome for v in straight} == {Outcome.OK}
    thread.join()
    assert len(app.state.seen) > 2 * 24  # those that were broken off were asked again
    gym.close()
    server.stop()


def test_a_server_that_always_hangs_costs_two_deadlines_and_not_one_per_sample(servers, monkeypatch):
    monkeypatch.setattr(episodes, "GIVE_UP_AFTER", 4)
    options = {"concurrency": 4, "retries": 0, "request_timeout_s": 1.0, "deadline_s": 1.0}
    gym = NemoGym({"servers": {"main": servers[0].url}, "rewards": RULES, **options})
    verdicts = gym.verify([sample(misdeed="hang", group=f"p{i}") for i in range(40)])
    assert {v.outcome for v in verdicts} == {Outcome.ENV_FAILED}
    kinds = [v.detail.split(":")[0] for v in verdicts]
    # Those that wait for a place when the first ones fail are let in before the last of these has.
    assert kinds[:4] == ["timeout"] * 4 and kinds[8:] == ["not_tried"] * 32
    gym.close()


@pytest.mark.slow
def test_a_group_with_enough_verdicts_closes_and_cuts_stragglers_at_the_deadline(servers):
    timing = {
        "min_valid": 3,
        "straggler_grace_s": 1,
        "group_deadline_s": 8,
        "deadline_s": 600,
        "request_timeout_s": 600,
    }
    gym = NemoGym({"servers": {"main": servers[0].url}, "rewards": RULES, **timing})
    slow = {"misdeed": "slow", "seconds": 600}
    batch = [
        *(sample(0.1, group="quick", index=i) for i in range(4)),
        *(sample(0.1, group="enough", index=i, **(slow if i == 3 else {})) for i in range(4)),
        *(sample(0.1, group="short", index=i, **(slow if i >= 2 else {})) for i in range(4)),
    ]
    begin = time.monotonic()
    verdicts = gym.verify(batch)
    assert time.monotonic() - begin > 7.9
    ok = Outcome.OK
    aborted = Outcome.ABORTED
    failed = Outcome.ENV_FAILED
    assert [v.outcome for v in verdicts] == [ok] * 4 + [ok] * 3 + [aborted] + [ok] * 2 + [failed] * 2
    assert verdicts[7].detail == "straggler: cancelled, because its group had 3 valid members for 1 s"
    assert verdicts[10].detail == "straggler: cancelled, because its group reached group_deadline_s (8 s)"
    gym.close()


@pytest.mark.slow
def test_servers_verdicts_and_worker_verdicts_come_together_in_order(servers):
    section = {"gym": {"plugin": "nemo_gym", "servers": {"main": servers[0].url}, "rewards": RULES}, "digit_sort": {}}
    mixed = []
    for i in range(6):
        mixed.append(sample(i / 10, "errors" if i == 3 else "none", f"g{i}"))
        mixed.append(trajectory("<t></t><a>12</a>", "digit_sort", f"q{i}", digits="21"))
    section["gym"]["retries"] = 0
    with EnvironmentPool(section) as pool:
        verdicts = pool.verify(mixed)
        assert [v.rewards.get("correctness") for v in verdicts[::2]] == [0.0, 0.1, 0.2, None, 0.4, 0.5]
        assert all(v.rewards["all"] == 1.0 for v in verdicts[1::2])
        assert verdicts[6].outcome is Outcome.ENV_FAILED and set(verdicts[0].rewards) != set(verdicts[1].rewards)


def test_close_ends_a_running_verification():
    app = hostile_app()
    server = Hosted(app)
    pool = EnvironmentPool({"gym": {"plugin": "nemo_gym", "servers": {"main": server.url}}})
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(pool.verify, [sample(misdeed="hang")])
        while not app.state.active and not future.done():
            time.sleep(0.005)
        pool.close()
        with pytest.raises(RunError, match="environment 'gym': the environment was closed during verification"):
            future.result(120)
    server.stop()


@pytest.mark.parametrize(
    "url, misdeed, rules, error, message",
    [
        (
            "main",
            "none",
            [{"name": "style"}],
            ConfigError,
            "reward_components.style is not in the reply; the reply has reward",
        ),
        ("main", "unprocessable", RULES, ConfigError, "row of prompt p: rejected: HTTP 422: options: Field required"),
        ("strict", "none", RULES, ConfigError, "rejected: HTTP 422: expected_answer: Field required"),
        ("main", "nan", RULES, ConfigError, "correctness is not finite"),
        ("main", "errors", RULES, RunError, "server main at .*: server_error: HTTP 500"),
        ("nobody", "none", RULES, RunError, "server main at http://127.0.0.1:9: connection: "),
        ("closed", "none", RULES, RunError, "server main at .*: connection: "),
    ],
)
def test_preflight_reports_later_failures_in_one_line(servers, url, misdeed, rules, error, message):
    server, _, closing = servers
    urls = {
        "main": server.url,
        "closed": closing.url,
        "nobody": "http://127.0.0.1:9",
        "strict": server.url + "/elsewhere",
    }
    options = {**LIMITS, "retries": 0, "seed_session": url != "strict"}
    gym = NemoGym({"servers": {"main": urls[url]}, "rewards": rules, **options})
    with pytest.raises(error, match=message) as caught:
        gym.preflight([sample(misdeed=misdeed).prompt])
    assert "\n" not in str(caught.value) and SECRET not in str(caught.value)
    gym.close()


def test_preflight_finds_the_components_of_each_server(servers):
    gym = NemoGym({"servers": {"one": servers[0].url, "two": servers[1].url}, **LIMITS})
    prompts = [sample(server="one").prompt, sample(server="two", misdeed="no_components").prompt]
    assert gym.preflight(prompts) == {"one": ("correctness", "format", "reward"), "two": ("reward",)}
    assert gym.reward_names == ("correctness", "format", "reward")
    with pytest.raises(ConfigError, match="a row names the unknown agent 'thre'; known: one, two"):
        gym.preflight([sample(server="thre").prompt])
    gym.close()


@pytest.mark.parametrize("rows, expected", [(1, [0, 5]), (4, [0, 5, 1, 2])])
def test_env_check_tries_rows_of_each_server(servers, rows, expected, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    chosen = ["one"] * 5 + ["two"]
    lines = [sample(index=i, server=name).prompt.fields[ROW] for i, name in enumerate(chosen)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    urls = f"{{one: '{servers[0].url}', two: '{servers[1].url}'}}"
    (tmp_path / "run.yaml").write_text(
        f"defaults: configs/gdpo_tiny_cpu.yaml\n"
        f"data: {{train: {{path: {tmp_path}/rows.jsonl, environment: gym}}, validation: null}}\n"
        f"env: {{gym: {{plugin: nemo_gym, servers: {urls}}}}}\n"
    )
    assert cli.main(["env", "check", "gym", "--config", str(tmp_path / "run.yaml"), "--rows", str(rows)]) == 0
    shown = [line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if line.count("│") > 3]
    assert shown == [f"train/{row}" for row in expected]
