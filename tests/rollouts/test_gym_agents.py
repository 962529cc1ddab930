"""Agents of real nemo-gym 0.4.0, started by ``gdpo-nemo gym up``, play with our engines through the endpoint."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from real_nemo_gym import installed

from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.data.records import Outcome, Prompt
from gdpo_nemo.environments.nemo_gym.agent_environment import NemoGymAgent
from gdpo_nemo.environments.server_replies import FailureKind
from gdpo_nemo.generation.requests import Sampling
from gdpo_nemo.rollouts.agents import play_with_agents
from gdpo_nemo.rollouts.context import checked
from gdpo_nemo.rollouts.endpoint.server import Endpoint
from gdpo_nemo.rollouts.endpoint.service import Budgets, Service
from gdpo_nemo.tools.gym.agent_trial import play
from gdpo_nemo.utils.errors import RunError

pytestmark = pytest.mark.slow

SERVERS = ("example_session_state_mgmt", "example_multi_step")
SAMPLING = Sampling(0.5, 1.0, -1, 80)
EXPECTED = '{"name": "extract_synonym_values", "arguments": {"synonym_values": [711, 407]}}</tool_call>'
"""What the example rows of example_multi_step want to be called, and calling_model.py writes now and then."""
REWARDS = [
    {"name": "reward", "path": "reward"},
    {"name": "overlap", "path": "set_overlap", "missing": "mask", "servers": ["example_multi_step_agent"]},
]


@pytest.fixture(scope="module")
def endpoint(stage):
    service = Service(stage.fleet, stage.conversation, Budgets(5, 400, stage.config.policy.max_total_sequence_length))
    made = Endpoint(service, "127.0.0.1", 0)
    yield made
    made.close()


def instances(endpoint: str) -> dict:
    """Every server with two agents: one before a model server, and one whose model is the endpoint (/v1/responses)."""
    model = {"base_url": "${policy_base_url}", "api_key": "${policy_api_key}", "model": "${policy_model_name}",
             "return_token_id_information": True, "uses_reasoning_parser": False}  # fmt: skip
    place = urlsplit(endpoint)
    found = {
        "policy_model": {"responses_api_models": {"vllm_model": {"entrypoint": "app.py", **model}}},
        # The command does not start it, because the endpoint has this address.
        "direct": {"responses_api_models": {"vllm_model": {"entrypoint": "app.py", **model, "host": place.hostname,
                                                           "port": place.port}}},
    }  # fmt: skip
    for name in SERVERS:
        found[name] = {"resources_servers": {name: {"entrypoint": "app.py", "domain": "agent"}}}
        for suffix, model_server in (("agent", "policy_model"), ("direct_agent", "direct")):
            agent = dict(
                entrypoint="app.py",
                max_steps=8,
                resources_server={"type": "resources_servers", "name": name},
                model_server={"type": "responses_api_models", "name": model_server},
            )
            found[f"{name}_{suffix}"] = {"responses_api_agents": {"simple_agent": agent}}
    return found


def own_checkout(folder: Path, endpoint: str) -> Path:
    """A folder with a copy of one server, which precedes the installed server, and a file for ``config_paths``."""
    name = SERVERS[0]
    shutil.copytree(packages() / "resources_servers" / name, folder / "resources_servers" / name)
    with open(folder / "resources_servers" / name / "app.py", "a") as code:
        code.write("\nprint('served from the checkout', flush=True)\n")
    (folder / "agents.yaml").write_text(json.dumps(instances(endpoint)))
    return folder


@pytest.fixture(scope="module")
def agents(endpoint, tmp_path_factory):
    """URLs of the agents by name; their ports are those of the config, and SIGKILL of the command closes all."""
    folder = tmp_path_factory.mktemp("agents")
    names = [f"{server}_{suffix}" for server in SERVERS for suffix in ("agent", "direct_agent")]
    urls = {name: f"http://127.0.0.1:{port}" for name, port in zip(names, free_ports(len(names)))}
    gym = {"plugin": "nemo_gym_agent", "agents": urls, "global_config": {"config_paths": ["agents.yaml"]}}
    listening = {"enabled": True, "port": urlsplit(endpoint.url).port}
    config = {
        "env": {"gym": gym}, "gdpo": {"rewards": {"reward": 1.0}}, "rollout": {"endpoint": listening},
        "policy": {"model_name": "organisation/model"}, "data": {"train": {"path": "rows.jsonl"}},
    }  # fmt: skip
    (folder / "gym.yaml").write_text(json.dumps(config))
    options = ["--checkout", str(own_checkout(folder / "checkout", endpoint.url)), "--python", str(installed())]
    process = subprocess.Popen(
        [sys.executable, "-m", "gdpo_nemo", "gym", "up", "gym.yaml", *options, "--log-dir", "logs"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, env={**os.environ, "PYTHONWARNINGS":
        "ignore"},
    )  # fmt: skip
    lines: list[str] = []
    while not lines or not lines[-1].startswith("ready"):
        lines.append(process.stdout.readline())
        assert lines[-1], lines
    addresses = json.loads((folder / "logs" / "addresses.json").read_text())["gym"]
    assert addresses["agents"] == urls and set(addresses["servers"]) == set(SERVERS)
    assert set(addresses["models"]) == {"policy_model"}
    assert "served from the checkout" in (folder / "logs" / "gym.log").read_text()
    yield urls
    process.kill()
    process.wait()
    for url in (*urls.values(), *addresses["servers"].values()):
        wait_until_refused(urlsplit(url).port)


def wait_until_refused(port: int) -> None:
    """The servers end after SIGKILL of the command, which cannot end them itself."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except OSError as error:
            assert isinstance(error, ConnectionRefusedError), error
            return
        time.sleep(0.2)
    pytest.fail(f"a server still listens on port {port}")


def free_ports(count: int) -> list[int]:
    """Ports below those that the kernel gives to outgoing connections, which could take them at any moment."""
    ports: list[int] = []
    for port in range(15_000 + os.getpid() % 10_000, 32_768):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
        if len(ports) == count:
            break
    return ports


def packages() -> Path:
    """The folder of real nemo-gym with its servers."""
    [found] = installed().parent.parent.glob("lib/python3.*/site-packages")
    return found


def prompts_of(environment, server: str, count: int, agent: str = "agent") -> list[Prompt]:
    lines = (packages() / "resources_servers" / server / "data" / "example.jsonl").read_text().splitlines()[:count]
    rows = [
        {**json.loads(line), "agent_ref": {"type": "responses_api_agents", "name": f"{server}_{agent}"}}
        for line in lines
    ]
    fields = [environment.read_row(row) for row in rows]
    return [
        Prompt(f"{server}/{i}", np.zeros(1, np.int32), "", "agents", f, f["messages"]) for i, f in enumerate(fields)
    ]


def test_turns_of_real_agents_are_the_sampled_tokens_masked_and_rewarded_by_name(stage, endpoint, agents):
    """One batch of both servers; only example_multi_step has the component ``overlap``."""
    environment = NemoGymAgent({"agents": agents, "rewards": REWARDS})
    prompts = [*prompts_of(environment, SERVERS[0], 2), *prompts_of(environment, SERVERS[1], 2)]
    environment.preflight(prompts)
    context = stage.context(None, samples=8, max_turns=5, max_tokens=400, endpoint=endpoint, sampling=SAMPLING)
    groups = checked(play_with_agents(environment, prompts, context), prompts, context, "agents")
    counter, multi_step = ([t for group in pair for t in group] for pair in (groups[:2], groups[2:]))
    assert len(counter) == 16 and all(t.trains for t in counter), [t.detail for t in counter]
    assert all(t.rewards["overlap"] is None and t.rewards["reward"] in (0.0, 1.0) for t in counter)
    check_multi_step(stage, multi_step)
    assert endpoint.service.counts["edited"] == 0
    played = [t for t in counter + multi_step if t.trains]
    for several in (counter, multi_step):
        assert max(t.turns for t in several) >= 3
    for t in played:
        parts = np.split(t.completion_ids, np.flatnonzero(np.diff(t.loss_mask.astype(int))) + 1)
        assert len(parts) == 2 * t.turns - 1
        for heard in parts[1::2]:  # what a tool answered, in the template's words
            assert "<|start|>tool\n" in stage.tokenizer.decode(heard)
    sequences = [TrainSequence(t.prompt.token_ids, t.completion_ids, t.logprobs, loss_mask=t.loss_mask) for t in played]
    for sequence, found in zip(sequences, stage.policy.logprobs(sequences)):
        assert np.array_equal(np.isnan(found), ~sequence.loss_mask)
        assert np.abs(found - sequence.sampler_logprobs)[sequence.loss_mask].max() < 1e-4


def check_multi_step(stage, trajectories) -> None:
    """Rewards follow from what the policy wrote, tools have answered it, and a call that cannot be read is no
    reward."""
    for t in trajectories:
        assert t.trains or not t.rewards and t.detail.startswith("server_error"), (
            t.detail
        )  # its verifier reads any arguments
    played = [t for t in trajectories if t.trains]
    assert len(played) >= len(trajectories) / 2
    for t in played:
        right = EXPECTED in stage.tokenizer.decode(t.completion_ids[t.loss_mask])
        assert t.rewards == {"reward": float(right), "overlap": float(right)}
    assert {t.rewards["reward"] for t in played} == {0.0, 1.0}
    heard = [stage.tokenizer.decode(t.completion_ids[~t.loss_mask]) for t in played]
    assert any('{"synonym_value":407}' in text for text in heard) and any('{"success":true}' in text for text in heard)


def test_agents_whose_model_server_is_the_endpoint_itself_play_the_same_episodes(stage, endpoint, agents):
    """/v1/responses against NeMo Gym's own model server before /v1/chat/completions: the same tokens, masks and
    rewards."""
    environment = NemoGymAgent({"agents": agents, "retries": 0})
    kinds = ("agent", "direct_agent")
    context = stage.context(None, samples=8, max_turns=2, max_tokens=400, endpoint=endpoint, sampling=SAMPLING)
    endpoint.service.budgets = Budgets(2, 400, stage.config.policy.max_total_sequence_length)  # which cuts some
    played = []
    for kind in kinds:
        prompts = [prompt for server in SERVERS for prompt in prompts_of(environment, server, 1, kind)]
        groups = checked(play_with_agents(environment, prompts, context), prompts, context, kind)
        assert endpoint.service.counts["edited"] == 0 and endpoint.service.counts["spliced"] > 0
        played.append([sorted(map(outline, group)) for group in groups])
    assert played[0] == played[1]
    endings = {(turns, finish) for group in played[1] for *_, turns, finish, _ in group}
    assert {(1, "stop"), (2, "stop"), (2, "length")} <= endings


def outline(t) -> tuple:
    """What was trained of a trajectory, without log-probs, which another batch of the engines rounds otherwise."""
    rewards = tuple(sorted(t.rewards.items()))
    return t.completion_ids.tolist(), t.loss_mask.tolist(), rewards, t.turns, t.finish_reason, t.outcome.value


def test_prompt_without_room_is_masked_and_other_agents_continue(stage, endpoint, agents):
    """Rows of example_multi_step are longer than this budget."""
    environment = NemoGymAgent({"agents": agents, "retries": 0})
    prompts = [*prompts_of(environment, SERVERS[1], 1), *prompts_of(environment, SERVERS[0], 1)]
    endpoint.service.budgets = Budgets(5, 400, 1400)
    context = stage.context(None, samples=2, max_turns=5, max_tokens=400, endpoint=endpoint, sampling=SAMPLING)
    long, short = checked(play_with_agents(environment, prompts, context), prompts, context, "agents")
    assert all(t.outcome is Outcome.ENV_FAILED and "no turn of the policy" in t.detail and not t.rewards for t in long)
    assert all(t.trains for t in short), [t.detail for t in short]


def test_the_trial_of_an_agent_reports_its_episode_or_its_failure(stage, endpoint, agents):
    """``gdpo-nemo gym scan --try --model`` plays one row with the agent."""
    name = f"{SERVERS[0]}_agent"
    row = json.loads((packages() / "resources_servers" / SERVERS[0] / "data/example.jsonl").read_text().splitlines()[0])
    context = stage.context(None, samples=1, max_turns=5, max_tokens=400, endpoint=endpoint, sampling=SAMPLING)
    endpoint.service.budgets = Budgets(5, 400, stage.config.policy.max_total_sequence_length)
    played = play(name, agents[name], row, context)
    assert played["status"] == "played" and played["turns"] >= 1 and played["tokens"] >= 1
    assert played["summary"].startswith(f"played: {played['turns']} turns, {played['tokens']} tokens, reward ")
    failed = play(name, "http://127.0.0.1:9", row, context)
    assert failed["status"] == "failed" and failed["summary"].startswith(f"episode failed: connection: {name}: ")


def test_a_dead_or_slow_agent_fails_its_trajectory_and_preflight_reports_it(stage, endpoint, agents):
    name = f"{SERVERS[0]}_agent"
    gone = NemoGymAgent({"agents": {name: "http://127.0.0.1:9"}, "retries": 0})
    slow = NemoGymAgent({"agents": {name: agents[name]}, "deadline_s": 0.001})
    context = stage.context(None, samples=1, max_turns=5, max_tokens=400, endpoint=endpoint, sampling=SAMPLING)
    for environment, kind in ((gone, FailureKind.CONNECTION), (slow, FailureKind.TIMEOUT)):
        prompts = prompts_of(environment, SERVERS[0], 1)
        ((trajectory,),) = play_with_agents(environment, prompts, context)
        assert trajectory.outcome is Outcome.ENV_FAILED and trajectory.detail.startswith(f"{kind}: {name}")
    with pytest.raises(RunError, match="agent example_session_state_mgmt_agent at http://127.0.0.1:9: connection"):
        gone.preflight(prompts_of(gone, SERVERS[0], 1))
