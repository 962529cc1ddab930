"""Programs on E2B's machines: its real client and protocol, with a server on this machine in place of the service."""

import importlib
import sys

import pytest
from e2b_server import KEY, e2b_server
from package_venv import venv_with
from test_code import ADD, MBPP, STDIO, rewards, verdict_of

from gdpo_nemo.data.records import Outcome
from gdpo_nemo.environments.tasks.code import Code
from gdpo_nemo.utils.errors import ConfigError

pytestmark = pytest.mark.slow


@pytest.fixture
def server(monkeypatch):
    [packages] = (venv_with("e2b==2.63.0").parents[1] / "lib").glob("python*/site-packages")
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    importlib.invalidate_caches()
    with e2b_server() as running:
        monkeypatch.setenv("E2B_API_KEY", KEY)
        monkeypatch.setenv("E2B_HTTP_VERSION", "1.1")
        for name in ("E2B_API_URL", "E2B_SANDBOX_URL"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{running.server_port}")
        yield running


def test_programs_on_remote_machines_get_the_rewards_of_local_ones(server):
    assert rewards(ADD, MBPP, sandbox="e2b") == (1, 1, 1)
    assert server.requests == ["/v2/sandboxes", "/files", "/process.Process/Start", "/sandboxes/m1"]
    assert rewards("def add(a, b):\n    return 3\n", MBPP, sandbox="e2b") == (1, 0.5, 0)
    assert rewards("print(int(input()) + 1)", STDIO, sandbox="e2b") == (1, 1, 1)
    # The job is in the folder of the copied files, which the program does not see.
    look = "import os\nprint(*os.listdir('/tmp'), os.path.exists('/proc/self'), os.path.exists('job.json'))"
    looked = {"prompt": "Look.", "tests": [{"input": "", "output": "False False"}]}
    assert rewards(look, looked, sandbox="e2b") == (1, 1, 1)


@pytest.mark.parametrize(
    "path, status, reason",
    [
        ("/v2/sandboxes", 401, "AuthenticationException"),
        ("/files", 429, "RateLimitException"),
        ("/process.Process/Start", 502, "Exception"),
        ("/process.Process/Start", None, "SandboxUnreachableException"),  # the connection ends
    ],
)
def test_failures_of_the_service_mask_the_sample(server, path, status, reason):
    server.failures[path] = status
    verdict = verdict_of(ADD, MBPP, sandbox="e2b")
    assert verdict.outcome is Outcome.ENV_FAILED and not verdict.rewards
    assert "the remote sandbox failed" in verdict.detail and reason in verdict.detail
    assert (server.requests[-1] == "/sandboxes/m1") == (path != "/v2/sandboxes")  # the machine was ended


def test_a_failure_of_the_sandbox_on_the_remote_machine_masks_the_sample(server):
    invalid = verdict_of(ADD, {**MBPP, "test_list": ["assert ("]}, sandbox="e2b")
    assert invalid.outcome is Outcome.ENV_FAILED
    assert "on the remote machine: the tests of the row are invalid" in invalid.detail


def test_a_missing_key_or_client_is_refused_before_the_run(server, monkeypatch):
    monkeypatch.delenv("E2B_API_KEY")
    with pytest.raises(ConfigError, match="set the environment variable E2B_API_KEY"):
        Code({"sandbox": "e2b"})
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(ConfigError, match="pip install e2b"):
        Code({"sandbox": "e2b"})
