"""Before a run takes any GPU: are the servers there, do they take our rows, do they give the configured rewards?"""

from __future__ import annotations

from typing import Sequence

import numpy as np

from gdpo_nemo.data.failures import Failure, FailureKind
from gdpo_nemo.data.records import Prompt, Trajectory
from gdpo_nemo.environments.http_client import HttpClient
from gdpo_nemo.environments.nemo_gym.episode import Verifier
from gdpo_nemo.environments.nemo_gym.gym_rows import ROW
from gdpo_nemo.environments.nemo_gym.server_settings import Settings
from gdpo_nemo.errors import ConfigError, RunError

_ANSWER = "preflight"
_OURS = (FailureKind.REJECTED, FailureKind.MISSING_REWARD, FailureKind.BAD_REPLY)
"""Failures that the configuration or the rows are to blame for, as far as the first one goes."""


async def preflight(
    settings: Settings, client: HttpClient, verifier: Verifier, prompts: Sequence[Prompt]
) -> dict[str, tuple[str, ...]]:
    """Components by server, from one row each, answered with a dummy.

    Servers of the options are reached even where no prompt goes to them; the head server may know others, which are
    none of this run's business.

    Raises:
        ConfigError: a server refuses the row (422 with its field), or a configured path is not in its reply.
        RunError: a server cannot be reached or fails.
    """
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(verifier.routes.server_of(prompt.fields[ROW]), prompt)
    for server in dict.fromkeys([*settings.servers, *first]):
        try:
            await client.reach(f"{verifier.routes.servers[server]}/", settings.limits.request_timeout_s)
        except Failure as failure:
            raise RunError(f"server {server} at {verifier.routes.servers[server]}: {failure}") from None
    return {server: await _components(settings, verifier, server, prompt) for server, prompt in first.items()}


async def _components(settings: Settings, verifier: Verifier, server: str, prompt: Prompt) -> tuple[str, ...]:
    nothing = np.zeros(0, np.int32)
    trajectory = Trajectory(prompt, 0, nothing, nothing.astype(np.float32), 0, _ANSWER, "stop")
    try:
        rewards = await verifier.rewards(trajectory, server)
    except Failure as failure:
        message = f"server {server} at {verifier.routes.servers[server]}, row of prompt {prompt.id}: {failure}"
        raise (ConfigError if failure.kind in _OURS else RunError)(message) from None
    if settings.rules:
        return tuple(name for name, value in rewards.items() if value is not None)
    return tuple(rewards)
