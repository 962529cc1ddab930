from importlib.util import find_spec

import pytest
from judge_server import JudgeServer
from real_nemo_gym import COMPILED, RealGym

# An extra of the project, since it needs a compiler; .ci/run installs it.
collect_ignore = [] if find_spec("reasoning_gym") else ["test_reasoning_gym.py"]


def pytest_report_header():
    """What is left out, and how to have it."""
    return (
        ["test_reasoning_gym.py is left out: `uv sync --extra reasoning-gym` installs what it tests"]
        if collect_ignore
        else []
    )


@pytest.fixture(scope="session")
def real_gym(tmp_path_factory):
    """Resources servers of nemo-gym 0.4.0, the one of examples/nemo_gym_plugin, and their head server."""
    log = tmp_path_factory.mktemp("nemo_gym") / "log"
    names = (
        "example_tool_call_multireward",
        "mcqa",
        "format_verification",
        "example_session_state_mgmt",
        "circle_count",
    )
    gym = RealGym(*names, *COMPILED, "tagged_sum", log=log)
    yield gym
    gym.close()


@pytest.fixture
def server():
    """OpenAI-compatible endpoint of a scripted judge on the loopback interface, for the tests of judges."""
    server = JudgeServer()
    yield server
    server.stop()
