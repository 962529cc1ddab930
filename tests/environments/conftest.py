import pytest

from real_nemo_gym import RealGym


@pytest.fixture(scope="session")
def real_gym(tmp_path_factory):
    """Five resources servers of nemo-gym 0.4.0, the one of examples/nemo_gym_plugin, and their head server."""
    log = tmp_path_factory.mktemp("nemo_gym") / "log"
    names = ("example_tool_call_multireward", "mcqa", "reasoning_gym", "format_verification", "example_session_state_mgmt")
    gym = RealGym(*names, "tagged_sum", log=log)
    yield gym
    gym.close()
