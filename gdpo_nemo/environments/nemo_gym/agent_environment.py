"""The ``nemo_gym_agent`` environment: NeMo Gym agents play whole episodes with the policy and return the rewards."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gdpo_nemo.algorithms.rubrics import Criterion
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.environments.base import Environment, read_options
from gdpo_nemo.environments.http_client import Cookies, HttpClient, api_key, base_url
from gdpo_nemo.environments.nemo_gym.checks import WELL_FORMED, read_checks, well_formed
from gdpo_nemo.environments.nemo_gym.rows import ROW, choose_server, read_row
from gdpo_nemo.environments.nemo_gym.settings import read_rules, rewards_of, step_rewards_of
from gdpo_nemo.environments.server_replies import Failure, FailureKind, check_measurement
from gdpo_nemo.utils.errors import ConfigError, RunError, nearest

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 8.0


@dataclass(frozen=True)
class Played:
    """Result of one episode that an agent played."""

    response: Mapping[str, Any]
    """The agent's response, not yet validated. The output items of the response contain the tokens of every turn."""
    rewards: Mapping[str, float | None]
    step_rewards: Sequence[Mapping[str, float | None]] = ()
    """Rewards of each turn of the policy, or empty if the reply contains only totals."""
    criteria: Mapping[str, Criterion] = field(default_factory=dict)
    """Criteria of the families of rewards, by component."""


class NemoGymAgent(Environment):
    """Environment whose episodes are played by NeMo Gym agents (nemo-gym 0.4 to 0.7), through their route /run.

    The agents call the run's endpoint (``rollout.endpoint``) as their model. In the configuration of the agent's model
    server, set ``base_url`` to the endpoint's URL and enable ``return_token_id_information``.

    Options:
        agents: base URLs by agent name, as in a row's ``agent_ref``. A single agent gets all rows.
        rewards, check_sum, api_key_env: same as in ``nemo_gym``.
        well_formed: checks of the agents' responses, ``{repeated_reasoning, empty_answer, unwanted_tokens,
            think_tokens}`` (``checks.Checks``). With this option, the component ``well_formed`` is 1 for responses
            without a fault and 0 for others.
        global_config: NeMo Gym's configuration of the agents and their servers, with ``config_paths``. Only ``gdpo-nemo
            gym up``, which starts them, reads this option.
        concurrency (64): maximum number of episodes in flight.
        deadline_s (600): time limit of one episode in seconds, including retries.
        retries (1): maximum number of retries of an episode after a transport failure, a 5xx or a 429 reply.
        max_reply_bytes (64 MiB), max_json_depth (100): limits of a reply. A reply repeats all tokens in every turn.
    """

    instant = True

    plays_with_endpoint = True

    def __init__(self, options: Mapping[str, Any] | None = None):
        self._options = read_options(
            "nemo_gym_agent",
            options,
            agents={},
            rewards=None,
            check_sum=False,
            api_key_env=None,
            well_formed=None,
            global_config={},
            concurrency=64,
            deadline_s=600.0,
            retries=1,
            max_reply_bytes=64 * 2**20,
            max_json_depth=100,
        )
        if not self._options.agents:
            raise ConfigError("agents: must contain at least one agent, {name: url}")
        self.agents = {name: base_url(f"agents.{name}", url) for name, url in self._options.agents.items()}
        self.rules = read_rules(self._options.rewards)
        for rule in self.rules:
            for agent in (rule.servers or frozenset()) - self.agents.keys():
                raise ConfigError(
                    f"rewards.{rule.name}.servers: agents has no entry {agent!r}{nearest(agent, self.agents)}"
                )
        self.checks = read_checks(self._options.well_formed)
        self.open_rewards = not self.rules
        names = [rule.name for rule in self.rules] or ["reward"]
        if self.checks and WELL_FORMED in names:
            raise ConfigError(f"rewards: {WELL_FORMED!r} is the name of the component of the checks")
        self.reward_names: tuple[str, ...] = (*names, WELL_FORMED) if self.checks else tuple(names)
        for name in ("concurrency", "deadline_s", "max_reply_bytes", "max_json_depth"):
            if not getattr(self._options, name) > 0:
                raise ConfigError(f"{name}: must be greater than 0")

    def read_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a row of NeMo Gym's JSONL to prompt columns. Raises ConfigError if the row is invalid or matches no
        agent."""
        columns = read_row(row, agent=True)
        choose_server(row, self.agents)
        return columns

    def preflight(self, prompts: Sequence[Prompt]) -> None:
        """Check that every row matches an agent and that every agent responds.

        Raises:
            ConfigError: if a row matches no agent.
            RunError: if an agent does not respond.
        """
        for prompt in prompts:
            self._agent(prompt)
        asyncio.run(self._reach())

    def play(self, prompts: Sequence[Prompt], sampling: Mapping[str, float]) -> list[Played | Failure]:
        """Play one episode per prompt and return the results, in order.

        Args:
            prompts: prompts of the episodes. The same prompt may occur several times.
            sampling: temperature and top_p, which override the values in the rows.
        """
        return asyncio.run(self._play(prompts, sampling))

    def close(self) -> None:
        """Do nothing, because each call of ``play`` closes its connections."""

    async def _reach(self) -> None:
        client = self._client()
        try:
            for name, url in self.agents.items():  # noqa: B007 - the error names the agent that failed
                await client.reach(f"{url}/", 10.0)
        except Failure as failure:
            raise RunError(f"agent {name} at {url}: {failure}") from None
        finally:
            await client.close()

    async def _play(self, prompts: Sequence[Prompt], sampling: Mapping[str, float]) -> list[Played | Failure]:
        client = self._client()
        slots = asyncio.Semaphore(self._options.concurrency)
        last_sample: dict[str, int] = {}
        episodes = []
        for index, prompt in enumerate(prompts):
            sample = last_sample[prompt.id] = last_sample.get(prompt.id, -1) + 1
            body = run_body(prompt, index, sample, sampling)
            episodes.append(self._episode(client, slots, prompt, body))
        try:
            return await asyncio.gather(*episodes)
        finally:
            await client.close()

    async def _episode(
        self, client: HttpClient, slots: asyncio.Semaphore, prompt: Prompt, body: bytes
    ) -> Played | Failure:
        name = self._agent(prompt)
        loop = asyncio.get_running_loop()
        async with slots:
            deadline = loop.time() + self._options.deadline_s
            attempts = 0
            while True:
                attempts += 1
                try:
                    reply = await client.post(f"{self.agents[name]}/run", body, Cookies(), deadline - loop.time())
                    return self._read(reply, name)
                except Failure as failure:
                    if failure.retry_after_s is None:
                        pause = random.uniform(0.5, 1.0) * min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempts)
                    else:
                        pause = failure.retry_after_s
                    if not failure.retried or attempts > self._options.retries or loop.time() + pause >= deadline:
                        return Failure(
                            failure.kind, f"{name}: {failure.detail} ({attempts} attempts)", status=failure.status
                        )
                await asyncio.sleep(pause)

    def _read(self, reply: Mapping[str, Any], agent: str) -> Played:
        check_measurement(reply)
        response = reply.get("response")
        if not isinstance(response, Mapping):
            raise Failure(FailureKind.BAD_REPLY, "the reply has no response")
        rewards, criteria = rewards_of(reply, self.rules, agent, self._options.check_sum)
        steps = step_rewards_of(reply, self.rules, agent)
        trained = with_attempts(response, reply)
        output = response.get("output")
        if self.checks is not None:
            rewards[WELL_FORMED] = well_formed(output if isinstance(output, list) else (), self.checks)
        return Played(trained, rewards, steps, criteria)

    def _agent(self, prompt: Prompt) -> str:
        try:
            return choose_server(prompt.fields[ROW], self.agents)
        except ConfigError as error:
            raise ConfigError(f"row {prompt.id} {error}") from None

    def _client(self) -> HttpClient:
        chosen = self._options
        key = api_key(chosen.api_key_env)
        return HttpClient(chosen.concurrency, chosen.max_reply_bytes, chosen.max_json_depth, key)


def with_attempts(response: Mapping[str, Any], reply: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an agent's response with the output of the attempts in ``all_attempts`` before its own output.

    The response of ``proof_refinement_agent`` is the last attempt. A turn that is listed twice is trained once.

    Raises:
        Failure: BAD_REPLY if the attempts have no outputs.
    """
    items: list[Any] = []
    try:
        for attempt in reply.get("all_attempts") or ():
            items += attempt["response"]["output"]
    except (KeyError, TypeError):
        raise Failure(FailureKind.BAD_REPLY, "all_attempts is not a list of attempts with a response") from None
    output = response.get("output")
    return {**response, "output": [*items, *output]} if items and isinstance(output, list) else response


def run_body(prompt: Prompt, task: int, sample: int, sampling: Mapping[str, float]) -> bytes:
    """Return the request body for /run: the row with the run's sampling settings.

    Keys with the value null are removed from ``responses_create_params``, because the server rejects null for optional
    keys.
    """
    row = prompt.fields[ROW]
    parameters = {key: value for key, value in row["responses_create_params"].items() if value is not None}
    body = {
        **row,
        "responses_create_params": {**parameters, **sampling},
        "_ng_task_index": task,
        "_ng_rollout_index": sample,
    }
    return json.dumps(body).encode()
