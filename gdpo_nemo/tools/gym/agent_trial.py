"""``gdpo-nemo gym scan --try --model``: start agents one after the other, and let each play one example row.

The agents sample from the model through an endpoint, as in a run with the environment ``nemo_gym_agent``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gdpo_nemo.config.model_checks import read_model_config
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.environments.nemo_gym.agent_environment import NemoGymAgent
from gdpo_nemo.environments.nemo_gym.checkout import KINDS, Instance, Unknown, config_contents, instances_of
from gdpo_nemo.environments.nemo_gym.rows import read_row
from gdpo_nemo.environments.server_replies import printable
from gdpo_nemo.tools.gym.processes import Served, end_all, last_exception
from gdpo_nemo.tools.gym.trial import attempted
from gdpo_nemo.tools.gym.up import Source, Wanted, start, wanted_address
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.files import parse_json, read_text

if TYPE_CHECKING:
    from gdpo_nemo.rollouts.context import RolloutContext

_SERVERS, _AGENTS, _MODELS = KINDS
_MODEL = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"
"""Configuration of the model server ``_POLICY``, which forwards requests to the endpoint."""
_POLICY = "policy_model"
POLICY_KEYS = ("policy_base_url", "policy_api_key", "policy_model_name")
"""Names that ``gdpo-nemo gym up`` and the trials define for agents."""
_CONTEXT, _REPLY, _TURNS = 8192, 256, 8
"""Maximum tokens of an episode, maximum tokens of a turn, and maximum number of turns."""
_CACHE = 2**30
"""Bytes of the engine's KV cache on a CPU."""
_DEADLINE_S = 300.0
_DETAIL = 200


Unset = Mapping[tuple[str, str], Sequence[str]]
"""Settings without a value, by (kind, folder) of a server."""


class Playable(NamedTuple):
    """An agent in a configuration file, with the servers that it refers to."""

    file: str
    """Path in the checkout."""
    name: str
    """Instance name of the agent."""
    needed: frozenset[str]
    """Names of the agent and all servers that it refers to, also through other servers."""
    row: dict[str, Any] | None
    lacking: tuple[str, ...]
    """Reasons why the agent cannot be started (empty if it can)."""


@dataclass
class Trials:
    """Starts agents with the servers that they refer to.

    Args:
        timeout_s: seconds until all servers of an agent answer.
    """

    checkout: Path
    source: Source
    logs: Path
    timeout_s: float

    def run(self, chosen: Playable, context: RolloutContext | None) -> dict[str, Any]:
        """Start an agent and the servers that it refers to, let it play its row, and end the servers.

        Returns:
            status, summary, seconds, and the result of the episode.
        """
        if chosen.lacking or chosen.row is None or context is None or context.endpoint is None:
            return {"status": "skipped", "summary": f"skipped: {'; '.join(chosen.lacking)}"}
        with attempted() as result, self._served(chosen, context.endpoint.url) as (url, logs):
            result |= play(chosen.name, url, chosen.row, context)
            if result["status"] == "failed":
                result["summary"] += cause(logs)
        return {"config": chosen.file, **result}

    @contextlib.contextmanager
    def _served(self, chosen: Playable, endpoint: str) -> Iterator[tuple[str, list[Path]]]:
        """Start the servers and yield the agent's URL and all logs. Raises RunError if one does not start."""
        policy = dict(zip(POLICY_KEYS, (f"{endpoint}/v1", "none", "policy")))
        content = {"config_paths": [chosen.file, _MODEL], **policy, "error_on_almost_servers": False}
        wanted = Wanted(content, only=chosen.needed)
        addressed = wanted_address(wanted, self.source)
        with contextlib.ExitStack() as stack:
            stack.callback(addressed.close)
            processes: list[Served] = []
            stack.callback(end_all, processes)
            processes.extend(start(chosen.name, chosen.name, addressed, self.source, self.logs))
            addressed.close()
            deadline = time.monotonic() + self.timeout_s
            for process in processes:
                process.wait_until_ready(addressed.urls, deadline)
            yield addressed.urls[chosen.name], [process.log for process in processes]


def cause(logs: Sequence[Path]) -> str:
    """Return the first exception in the logs of servers, as the end of a sentence (empty if there is none).

    A failed agent replies only that its server failed.
    """
    for log in logs:
        if text := last_exception(log.read_text(errors="replace")):
            return f"; {log}: {printable(text, _DETAIL)}"
    return ""


def play(agent: str, url: str, row: dict[str, Any], context: RolloutContext) -> dict[str, Any]:
    """Let an agent play one episode of a row, and return its turns, sampled tokens and rewards, or its failure."""
    from gdpo_nemo.rollouts.agents import play_with_agents

    environment = NemoGymAgent({"agents": {agent: url}, "retries": 0, "deadline_s": _DEADLINE_S})
    columns = environment.read_row(row)
    prompt = Prompt("0", np.zeros(1, np.int32), "", "nemo_gym_agent", columns, columns["messages"])
    [[played]] = play_with_agents(environment, [prompt], context)
    tokens = int(played.num_policy_tokens)
    result = {"turns": played.turns, "tokens": tokens, "rewards": dict(played.rewards), "detail": played.detail}
    if not played.trains:
        detail = printable(played.detail, _DETAIL)
        return {"status": "failed", "summary": f"episode failed: {detail}", **result}
    rewards = ", ".join(f"{name} {value:g}" for name, value in played.component_rewards.items() if value is not None)
    return {"status": "played", "summary": f"played: {played.turns} turns, {tokens} tokens, {rewards}", **result}


def choose(agent: str, files: Sequence[str], checkout: Path, unset: Unset) -> Playable:
    """Return the configuration of an agent that lacks the least.

    Args:
        agent: folder of the agent's code.
        files: configuration files with the agent, as paths in the checkout.
    """
    found: list[Playable] = []
    for file in files:
        found += _playable(agent, file, checkout, unset)
    if not found:
        return Playable("", "", frozenset(), None, ("no configuration file defines the agent with its servers",))
    return min(found, key=lambda one: len(one.lacking))


def _playable(agent: str, file: str, checkout: Path, unset: Unset) -> Iterator[Playable]:
    """Yield the instances of an agent in a configuration file."""
    try:
        contents = list(config_contents([file, _MODEL], checkout))
    except (Unknown, ConfigError) as error:
        yield Playable(file, "", frozenset(), None, (str(error),))
        return
    instances = instances_of(contents)
    for name, (kind, implementation, settings) in instances.items():
        if (kind, implementation) != (_AGENTS, agent) or not settings.get("entrypoint"):
            continue
        needed, lacking = _needed(name, instances)
        for one in needed:
            values = [value for value in unset.get(instances[one][:2], ()) if value not in POLICY_KEYS]
            if values:
                lacking.append(f"{one} needs a configuration: {', '.join(values)}")
        row = None
        try:
            row = _row([name, *needed], instances, checkout)
            read_row(row, agent=True)
        except ConfigError as error:
            lacking.append(str(error))
        yield Playable(file, name, frozenset(needed), row, tuple(lacking))


def _needed(agent: str, instances: Mapping[str, Instance]) -> tuple[list[str], list[str]]:
    """Return the servers that an agent refers to, itself first, and the references that cannot be followed."""
    needed, lacking = [agent], []
    for name in needed:  # grows
        for kind, target in _references(instances[name].settings):
            if target not in instances:
                lacking.append(f"{name} refers to {target}, which the file does not define")
            elif kind == _MODELS and target != _POLICY:
                lacking.append(f"{name} needs the model {target}")
            elif target not in needed:
                needed.append(target)
    return needed, lacking


def _references(value: object) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) of the servers that settings refer to."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        if value.get("type") in KINDS and isinstance(value.get("name"), str):
            yield value["type"], value["name"]
        for one in value.values():
            yield from _references(one)


def _row(names: Sequence[str], instances: Mapping[str, Instance], checkout: Path) -> dict[str, Any]:
    """Return the first row of the agent's example data, or of the example data of a server that it refers to.

    Raises ConfigError if there is none, or if the file is not JSON Lines.
    """
    listed: list[Any] = []
    beside: list[str] = []
    for name in names:
        kind, folder, settings = instances[name]
        for one in settings.get("datasets") or ():
            if isinstance(one, dict) and one.get("type") == "example":
                listed.append(one.get("jsonl_fpath"))
        beside += map(str, sorted((checkout / kind / folder / "data").glob("*example.jsonl")))
    for path in [*listed, *beside]:
        if isinstance(path, str) and (checkout / path).is_file():
            try:
                return dict(parse_json(next(line for line in read_text(checkout / path).splitlines() if line.strip())))
            except (ValueError, TypeError, StopIteration):
                raise ConfigError(f"{path} is not valid JSON Lines") from None
    raise ConfigError("no example rows")


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[RolloutContext]:
    """Start an engine and an endpoint for a model, and yield the context of episodes, with one sample per prompt.

    Raises:
        ConfigError: if the folder does not contain a supported model.
        RunError: if the engine does not start.
    """
    from gdpo_nemo.cluster.session import session
    from gdpo_nemo.environments.execution.pools import EnvironmentPools
    from gdpo_nemo.rollouts.context import RolloutContext
    from gdpo_nemo.rollouts.endpoint.server import Endpoint
    from gdpo_nemo.rollouts.endpoint.service import Budgets, Service
    from gdpo_nemo.tools.chat.speakers import Speaker, on_this_machine, read_source, sampling_of, weights_of

    source = read_source(folder, None, None, [f"policy.generation.vllm_cfg.kv_cache_memory_bytes={_CACHE}"])
    policy = source.config.policy
    longest = read_model_config(source.base / "config.json").get("max_position_embeddings")
    context = policy.max_total_sequence_length = min(longest or _CONTEXT, _CONTEXT)
    on_this_machine([source])
    sampling = sampling_of(policy, None, min(_REPLY, context // 2))
    with session(source.config.cluster), contextlib.ExitStack() as stack:
        speaker = Speaker(source, weights_of(source), None, sampling, 1)
        stack.callback(speaker.close)
        speaker.ready()
        speaker.replies.load()
        endpoint = Endpoint(
            Service(speaker.fleet, speaker.conversation, Budgets(_TURNS, context, context)), "127.0.0.1", 0
        )
        stack.callback(endpoint.close)
        pool = EnvironmentPools({})
        stack.callback(pool.close)
        yield RolloutContext(
            samples=1,
            seed=lambda index, sample, turn: source.config.run.seed + turn,
            sample=lambda requests: speaker.fleet.generate(requests, sampling),
            conversation=speaker.conversation,
            pool=pool,
            max_turns=_TURNS,
            max_tokens=context,
            max_new_tokens=sampling.max_new_tokens,
            max_sequence=context,
            sampling=sampling,
            endpoint=endpoint,
        )
