"""``gdpo-nemo gym``: classes of a checkout's servers, checks before a start, and environments with the servers'
requirements."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from gdpo_nemo.commands.cli import main
from gdpo_nemo.tools.gym.agent_trial import cause, choose
from gdpo_nemo.tools.gym.environments import Environments
from gdpo_nemo.tools.gym.processes import Addressed, Served, end_all
from gdpo_nemo.tools.gym.scan import scan_checkout
from gdpo_nemo.utils.errors import ConfigError, RunError

HEAD = """\
from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer
from nemo_gym.config_types import ModelServerRef


class Settings(BaseResourcesServerConfig):
    FIELDS


class Server(SimpleResourcesServer):
    config: Settings

    async def verify(self, body):
        VERIFY


"""
RUN = "if __name__ == '__main__':\n    Server.run_webserver()\n"
TEXT = {"responses_create_params": {"input": [{"role": "user", "content": "1 + 1?"}]}, "expected_answer": "2"}
IMAGE = {"responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}}
TOOL = {"responses_create_params": {"input": "1 + 1?", "tools": [{"type": "function", "name": "add"}]}}


def server(checkout: Path, name: str, *, fields="pass", verify="return 1.0", extra="", row=TEXT, settings=None) -> Path:
    """Write a resources server in NeMo Gym's form."""
    folder = checkout / "resources_servers" / name
    for part in ("configs", "data"):
        (folder / part).mkdir(parents=True)
    code = HEAD.replace("FIELDS", fields).replace("VERIFY", verify) + extra + RUN
    (folder / "app.py").write_text(code)
    entry = {"entrypoint": "app.py", "domain": "other", **(settings or {})}
    (folder / "configs" / f"{name}.yaml").write_text(json.dumps({name: {"resources_servers": {name: entry}}}))
    (folder / "data" / "example.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def agent(checkout: Path, name: str, call: str) -> None:
    folder = checkout / "responses_api_agents" / name
    folder.mkdir(parents=True)
    (folder / "app.py").write_text(f"class Agent:\n    async def responses(self, body):\n        {call}\n")


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'nemo-gym'\nrequires-python = '>=3.12.1'\n")
    for kind in ("resources_servers", "responses_api_agents"):
        (tmp_path / kind).mkdir()
    return tmp_path


def test_scan_classifies_each_server_by_its_requirements(checkout, capsys):
    server(checkout, "adds")
    server(checkout, "calls", row=TOOL)
    server(checkout, "routes", extra="def setup(app):\n    app.post('/lookup')(lookup)\n\n\n")
    server(checkout, "graded", fields="grader: ModelServerRef")
    # An optional judge is needed if the configuration sets it.
    optional = "judge: ModelServerRef | None = None"
    server(checkout, "self_graded", fields=optional)
    server(checkout, "judged", fields=optional, settings={"judge": {"type": "responses_api_models", "name": "m"}})
    server(checkout, "looks", row=IMAGE)
    server(checkout, "keyed", fields="api_key: str")
    server(checkout, "preset", fields="api_key: str", settings={"api_key": "${oc.env:KEY,none}"})
    server(checkout, "unset", settings={"folder": "${oc.env:FOLDER}", "key": "${oc.select:KEY,null}"})
    server(checkout, "stepped", verify="raise NotImplementedError")
    server(checkout, "prompted_later", row={"responses_create_params": {"input": []}})
    server(checkout, "runs", extra="from runner import run\n\n\n")
    (checkout / "resources_servers/runs/runner.py").write_text("def run(text):\n    exec(text)\n")
    server(checkout, "installs", extra="import setup_it\n\n\n")
    (checkout / "resources_servers/installs/setup_it.py").write_text("import subprocess\nsubprocess.run(['git'])\n")
    (checkout / "resources_servers/base").mkdir()
    agent(
        checkout, "loops", "await self.client.post(server_name=self.config.model_server.name, url_path='/v1/responses')"
    )
    agent(checkout, "wraps", "subprocess.run(['harness'])")
    found = {one.name: one for one in scan_checkout(checkout)}
    assert {name: one.category for name, one in found.items()} == {
        "adds": "plain", "base": "refused", "calls": "tools", "graded": "needs a judge", "judged": "needs a judge",
        "installs": "plain", "keyed": "needs a configuration", "looks": "needs images", "preset": "plain",
        "prompted_later": "refused", "routes": "tools", "runs": "executes code", "self_graded": "plain",
        "stepped": "refused", "unset": "needs a configuration", "loops": "plain", "wraps": "refused",
    }  # fmt: skip
    assert found["runs"].needs == {"executes code": "exec in runner.py"}
    assert found["installs"].outside == ("subprocess.run in setup_it.py",)
    assert found["unset"].needs == {"needs a configuration": "FOLDER, KEY"}
    assert main(["gym", "scan", str(checkout), "--only", "s*", "--json", str(checkout / "scan.json")]) == 0
    assert "2 servers: 1 plain, 1 refused" in capsys.readouterr().out
    written = json.loads((checkout / "scan.json").read_text())
    assert [(one["name"], one["class"]) for one in written] == [("self_graded", "plain"), ("stepped", "refused")]
    for options in (["--limit", "0"], ["--rows", "0"], ["--only", "z*"]):
        assert main(["gym", "scan", str(checkout), *options]) == 2
        assert capsys.readouterr().err.startswith(f"error: {options[0]}: ")


def agent_config(checkout: Path, name: str, server: str, **settings) -> None:
    """Write a configuration of the agent ``loops`` in front of a server."""
    references = {
        "resources_server": {"type": "resources_servers", "name": server},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
    }
    entry = {"entrypoint": "app.py", **references, **settings}
    served = {"entrypoint": "app.py", **({"address": "${policy_base_url}"} if server == "unset" else {})}
    servers = {server: {"resources_servers": {server: served}}} if server != "gone" else {}
    content = {**servers, name: {"responses_api_agents": {"loops": entry}}}
    file = checkout / "responses_api_agents" / "loops" / "configs" / f"{name}.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))


@pytest.mark.slow
def test_scan_chooses_the_configuration_with_the_fewest_missing_parts_and_reports_them(checkout, capsys):
    model = checkout / "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"
    model.parent.mkdir(parents=True)
    model.write_text(json.dumps({"policy_model": {"responses_api_models": {"vllm_model": {"entrypoint": "app.py"}}}}))
    agent(
        checkout, "loops", "await self.client.post(server_name=self.config.model_server.name, url_path='/v1/responses')"
    )
    server(checkout, "adds", row={"responses_create_params": {"input": []}})  # the agent writes the prompt
    server(checkout, "keyed", fields="api_key: str")
    server(checkout, "unset", settings={"address": "${policy_base_url}"})
    judge = {"judge": {"type": "responses_api_models", "name": "judge_model"}}

    def chosen() -> tuple:
        found = {(one.kind, one.name): one for one in scan_checkout(checkout)}
        unset = {key: one.unset for key, one in found.items()}
        return choose("loops", found["responses_api_agents", "loops"].files, checkout, unset)

    def lacking(name: str, server: str, **settings) -> tuple[str, ...]:
        agent_config(checkout, name, server, **settings)
        one = chosen()
        (checkout / "responses_api_agents/loops/configs" / f"{name}.yaml").unlink()
        return one.lacking

    assert chosen().lacking == ("no configuration file defines the agent with its servers",)
    assert lacking("a", "gone") == ("a refers to gone, which the file does not define", "no example rows")
    assert lacking("b", "keyed") == ("keyed needs a configuration: api_key",)
    assert lacking("c", "adds", **judge) == ("c refers to judge_model, which the file does not define",)
    assert lacking("d", "unset") == ()  # the trial defines the address of the policy
    agent_config(checkout, "keyed_agent", "keyed")
    agent_config(checkout, "last", "adds")
    best = chosen()
    assert (best.file, best.name) == ("responses_api_agents/loops/configs/last.yaml", "last")
    assert best.needed == {"last", "adds", "policy_model"} and best.row == {"responses_create_params": {"input": []}}
    (checkout / "responses_api_agents/loops/configs/last.yaml").unlink()
    # Without an agent that can be started, no engine starts.
    options = ["--only", "loops", "--try", "--model", str(checkout), "--log-dir", str(checkout / "logs")]
    assert main(["gym", "scan", str(checkout), *options]) == 0
    assert "loops: skipped: keyed needs a configuration: api_key" in capsys.readouterr().out
    assert main(["gym", "scan", str(checkout), "--model", str(checkout)]) == 2
    assert capsys.readouterr().err == "error: --model: requires --try\n"


def test_the_trial_of_an_agent_names_the_exception_of_the_server_that_failed(tmp_path):
    logs = [tmp_path / name for name in ("agent.log", "server.log", "model.log")]
    begin = "ERROR: in ASGI application\nTraceback (most recent call last):\n    raise ValueError(\n"
    logs[0].write_text(f"{begin}aiohttp.client_exceptions.ClientResponseError: 500, message='Internal Server Error'\n")
    logs[1].write_text(f"{begin}RuntimeError: no data\n{begin}RuntimeError: data is not set\nINFO: POST /verify 500\n")
    logs[2].write_text("ready\n")
    assert cause(logs) == f"; {logs[1]}: RuntimeError: data is not set"
    assert cause([logs[0], logs[2]]) == ""


ENDS_AFTER_THE_OTHER = """\
#!/usr/bin/env bash
trap 'touch OWN; until [ -e OTHER ]; do sleep 0.05; done; exit 0' TERM
echo ready
while :; do sleep 0.05; done
"""


@pytest.mark.slow
def test_servers_are_asked_to_end_before_any_is_waited_for(tmp_path):
    processes = []
    for own, other in (("a", "b"), ("b", "a")):
        python = tmp_path / f"python_{own}"
        text = ENDS_AFTER_THE_OTHER.replace("OWN", str(tmp_path / own)).replace("OTHER", str(tmp_path / other))
        python.write_text(text)
        python.chmod(0o755)
        places = {"path": [], "folder": tmp_path, "log": tmp_path / f"{own}.log"}
        processes.append(Served(own, Addressed({}, {}), [], python, **places))
    while not all(process.log.read_text() for process in processes):
        for process in processes:
            process.check()
        time.sleep(0.05)
    end_all(processes)
    for process in processes:
        with pytest.raises(RunError, match="ended with status 0"):
            process.check()


CONFIG = {
    "gdpo": {"rewards": {"reward": 1.0}}, "policy": {"model_name": "organisation/model"},
    "data": {"train": {"path": "rows.jsonl"}}, "rollout": {"endpoint": {"enabled": True, "port": 8100}},
}  # fmt: skip


def dry(checkout: Path, env: dict, capsys) -> tuple[int, str]:
    (checkout / "run.yaml").write_text(json.dumps({**CONFIG, "env": {"gym": env}}))
    options = ["--checkout", str(checkout), "--venvs", str(checkout / "venvs"), "--dry-run"]
    status = main(["gym", "up", str(checkout / "run.yaml"), *options])
    return status, capsys.readouterr().out


@pytest.mark.slow
def test_dry_run_finds_files_references_ports_and_requirements(checkout, capsys, monkeypatch):
    folder = server(checkout, "adds")
    (folder / "requirements.txt").write_text("-e nemo-gym[dev] @ ../../\n")
    held = socket.create_server(("127.0.0.1", 0))
    port = held.getsockname()[1]
    servers = {"plugin": "nemo_gym", "servers": {"adds": f"http://127.0.0.1:{port}"}}
    status, said = dry(checkout, servers, capsys)
    assert status == 1 and f"\n  adds: cannot listen on 127.0.0.1:{port} (Address already in use)\n1 problem\n" in said
    held.close()
    status, said = dry(checkout, servers, capsys)
    assert (status, "adds: ready to start" in said) == (0, True), said
    assert not (checkout / "venvs").exists() or not list((checkout / "venvs").glob("*/bin"))
    (folder / "requirements.txt").write_text("./absent.whl\n")
    status, said = dry(checkout, servers, capsys)
    assert status == 1 and "\n  adds: uv pip failed" in said
    agents = {"plugin": "nemo_gym_agent", "agents": {"player": f"http://127.0.0.1:{port}"},
              "global_config": {"config_paths": ["agents.yaml"]}}  # fmt: skip
    assert "agents.yaml was not found" in dry(checkout, agents, capsys)[1]
    agent(checkout, "loops", "pass")
    entry = {"entrypoint": "main.py", "resources_server": {"type": "resources_servers", "name": "gone"}, "key": "???"}
    text = json.dumps({"player": {"responses_api_agents": {"loops": entry}}})
    (checkout / "agents.yaml").write_text(text)
    assert "main.py was not found" in dry(checkout, agents, capsys)[1]
    (checkout / "agents.yaml").unlink()
    (checkout / "work").mkdir()
    monkeypatch.chdir(checkout / "work")
    Path("agents.yaml").write_text(text.replace("main.py", "app.py"))
    status, said = dry(checkout, agents, capsys)
    assert "resources_server names the server gone, which no file" in said and "key is not set" in said


@pytest.mark.slow
def test_environment_is_made_once_per_requirements_and_needs_no_nemo_gym(checkout, monkeypatch, capsys):
    server(checkout, "adds")
    server(checkout, "calls")
    environments = Environments(checkout, checkout / "venvs", "3.12")
    for name in ("adds", "calls"):
        (checkout / "resources_servers" / name / "requirements.txt").write_text("# tools\n-e ../../\n")
    made = environments.python_of("resources_servers", "adds")
    assert made.is_file() and "installing the requirements of adds" in capsys.readouterr().out
    monkeypatch.setenv("PATH", "")  # without uv
    assert environments.python_of("resources_servers", "calls") == made
    (checkout / "resources_servers/calls/overrides.txt").write_text("a<2\n")
    with pytest.raises(ConfigError, match="uv was not found"):
        environments.python_of("resources_servers", "calls")


def test_requirements_are_those_of_nemo_gym_and_the_server(checkout):
    (checkout / "pyproject.toml").write_text(
        "[project]\nname = 'nemo-gym'\ndependencies = ['pydantic']\n"
        "[project.optional-dependencies]\nsandbox = ['boxes>=1']\ndev = ['pytest']\n"
    )
    folder = server(checkout, "adds")
    (folder / "requirements.txt").write_text("-e nemo-gym[dev,sandbox] @ ../..  # this\n\nnumpy==2.0 # exact\n")
    environments = Environments(checkout, checkout)
    assert environments.requirements("resources_servers", "adds").lines == ("pydantic", "boxes>=1", "numpy==2.0")
    (folder / "requirements.txt").unlink()
    (folder / "pyproject.toml").write_text(
        "[project]\nname = 'adds'\ndependencies = ['nemo-gym[dev]', 'maths']\n"
        "[tool.uv.sources]\nmaths = {git = 'https://example.org/maths.git', tag = 'v1'}\n"
    )
    found = environments.requirements("resources_servers", "adds")
    assert found.lines == ("pydantic", "maths @ git+https://example.org/maths.git@v1")
    assert found.outside == found.lines[1:]
    (checkout / "pyproject.toml").unlink()
    with pytest.raises(ConfigError, match="contains neither pyproject.toml nor nemo_gym"):
        environments = Environments(checkout, checkout)
        environments.requirements("resources_servers", "adds")
    (checkout / "nemo_gym-0.4.0.dist-info").mkdir()
    assert environments.requirements("resources_servers", "adds").lines[0] == "nemo-gym==0.4.0"


@pytest.mark.slow
def test_environment_that_lacks_a_requirement_is_refused(checkout):
    folder = server(checkout, "adds")
    (folder / "requirements.txt").write_text("./absent.whl\n")
    with pytest.raises(RunError, match="adds: uv pip failed"):
        Environments(checkout, checkout / "venvs", "3.12").python_of("resources_servers", "adds")
