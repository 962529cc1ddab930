"""Check of an environment before a run: verify completions for a few rows in worker processes, without a model.

The completions come from the environment's ``examples(row)``, the row's ``answer`` column and the caller. An empty
completion is also verified. Token ids are the UTF-8 bytes of the text, unless the environment has a tokenizer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from gdpo_nemo.algorithms.rubrics import criteria_of
from gdpo_nemo.data.records import Outcome, Prompt, Trajectory, Verdict
from gdpo_nemo.data.replies import Reply, message_of, parse_hermes
from gdpo_nemo.data.rows import PROMPT_KEYS
from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.episodes import EpisodeReply, EpisodeStep
from gdpo_nemo.environments.execution.pools import EnvironmentPools
from gdpo_nemo.utils.errors import ConfigError, RunError, first_line

_ANY_TOOL = {"type": "function", "function": {"name": "f"}}
_TURNS = 9
"""Number of turns after which an episode is truncated."""


@dataclass
class Check:
    """Result of ``check_environment``."""

    reward_names: tuple[str, ...]
    start_s: float
    """Seconds until the first row is verified, including the start of the workers, imports and preparation."""
    samples: list[Trajectory] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    """Verification time of each sample in seconds.

    Samples of a row have equal times, because one call verifies them.
    """
    repeated: bool = True
    """True if two verifications of the first row gave equal results."""

    @property
    def components(self) -> list[str]:
        """Names of the declared reward components, followed by undeclared components that ``verify`` returned."""
        names = dict.fromkeys(self.reward_names)
        for verdict in self.verdicts:
            names.update(dict.fromkeys(verdict.component_rewards))
        return list(names)

    @property
    def failed(self) -> int:
        """Number of samples whose verification failed. A run would mask these samples."""
        return sum(verdict.outcome is Outcome.ENV_FAILED for verdict in self.verdicts)

    @property
    def reasons(self) -> str:
        """Up to three different reasons of failed verifications, as one line."""
        reasons = list(dict.fromkeys(verdict.detail for verdict in self.verdicts if verdict.detail))
        return "; ".join([*reasons[:3], *([f"and {len(reasons) - 3} more"] if len(reasons) > 3 else [])])


def sample_of(
    row: Mapping[str, Any], text: str, environment: str = "env", index: int = 0, key: str | None = None
) -> Trajectory:
    """Create the sample that ``verify`` receives for a dataset row and the completion ``text``.

    Token ids are the UTF-8 bytes of the text.

    Args:
        row: columns by name. As in a run, the fields passed to ``verify`` do not include ``id`` and the prompt column.
        index: index of the sample within its prompt.
        key: column with the prompt. None means the first existing column of messages, prompt, question and problem.

    Raises:
        ConfigError: if the row has no prompt.
    """
    key = key or next((name for name in PROMPT_KEYS if name in row), None)
    if key is None or key not in row:
        raise ConfigError(
            f"a row has no prompt column ({key or ', '.join(PROMPT_KEYS)}): its columns are {', '.join(row)}"
        )
    value = row[key]
    messages = value if isinstance(value, list) else None
    prompt_text = value if messages is None else "\n".join(str(message.get("content")) for message in messages)
    fields = {name: content for name, content in row.items() if name not in (key, "id")}
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    prompt_tokens = np.frombuffer(str(prompt_text).encode(), np.uint8).astype(np.int32)
    prompt = Prompt(str(row.get("id", "row")), prompt_tokens, str(prompt_text), environment, fields, messages)
    return Trajectory(prompt, index, tokens, np.zeros(len(tokens), np.float32), 0, text, "stop")


def refuse_agents(name: str, environment: Environment) -> None:
    """Raise ConfigError if the environment's episodes are played by agents, which require the model of a run."""
    if environment.plays_with_endpoint:
        raise ConfigError(
            f"{name}: its episodes require the model of a run, which this check does not load; "
            "train one step instead (gdpo.max_num_steps=1)"
        )


def check_environment(
    name: str,
    options: Mapping[str, Any],
    environment: Environment,
    rows: Sequence[Mapping[str, Any]],
    completions: Sequence[str] = (),
    *,
    workers: int = 1,
    timeout_s: float = 30.0,
    key: str | None = None,
) -> Check:
    """Verify completions for each row in a pool of worker processes, one row at a time.

    Args:
        name, options: the environment's name and options in the config section ``env``.
        environment: environment created with these options.
        rows: at least one row.
        completions: additional completions for each row.
        key: column with the prompt, as in ``sample_of``.

    In a multi-turn environment, the completion is used as the answer in each turn.

    Raises:
        RunError: if the environment's code fails or its servers are not reachable.
        ConfigError: if a row has no prompt, a server rejects it, or the environment requires the model of a run.
    """
    refuse_agents(name, environment)
    groups = []
    for row in rows:
        group = []
        for index, text in enumerate(_completions(environment, row, completions)):
            group.append(as_sampled(sample_of(row, text, name, index, key), environment))
        groups.append(group)
    if environment.has_preflight:
        try:
            environment.preflight([group[0].prompt for group in groups])
        finally:
            environment.close()
    with EnvironmentPools({name: options}, workers, timeout_s) as pool:
        verify = verifier_of(environment, pool)
        begin = time.perf_counter()
        first = verify(groups[0])
        check = Check(tuple(environment.reward_names), time.perf_counter() - begin)
        for group in groups:
            begin = time.perf_counter()
            check.verdicts += verify(group)
            check.samples += group
            check.latencies_s += [time.perf_counter() - begin] * len(group)
    check.repeated = list(map(_trained, first)) == list(map(_trained, check.verdicts[: len(first)]))
    return check


def _trained(verdict: Verdict) -> str:
    """Return what a run trains with, as text, in which NaN equals NaN. Metrics and saved columns may differ between two
    verifications, for example the time of a call or the source of a judge's reply."""
    rewards = [sorted(turn.items()) for turn in (verdict.rewards, *verdict.turn_rewards)]
    return repr((verdict.outcome, rewards, sorted(verdict.reward_spans.items())))


def verifier_of(environment: Environment, pool: EnvironmentPools) -> Callable[[Sequence[Trajectory]], list[Verdict]]:
    """Return the function that verifies samples in the pool. In a multi-turn environment, it plays episodes."""
    return partial(_episodes, pool, environment.verifies) if environment.has_turns else pool.verify


def as_sampled(sample: Trajectory, environment: Environment) -> Trajectory:
    """Add what an engine adds: token ids if the environment reads them, and tool calls in the format of Hermes if the
    prompt has tools."""
    if (tokens := environment.token_ids(sample.text)) is not None:
        sample.completion_ids, sample.logprobs = tokens, np.zeros(len(tokens), np.float32)
        if (prompt := environment.token_ids(sample.prompt.text)) is not None:
            sample.prompt = replace(sample.prompt, token_ids=prompt)
    tools = sample.prompt.fields.get("tools") or ([_ANY_TOOL] if environment.offers_tools else None)
    if isinstance(tools, list) and tools:
        sample.reply = parse_hermes(sample.text, tools)
    return sample


def _episodes(pool: EnvironmentPools, verifies: bool, samples: Sequence[Trajectory]) -> list[Verdict]:
    """Play one episode per sample, in which each answer is the sample's text, and return its result.

    As in a run, episodes without rewards from their steps are verified at the end if ``verifies`` is true.
    """
    conversations: list[list[Mapping[str, Any]]] = [[] for _ in samples]
    replies = pool.step([EpisodeStep(sample.prompt, sample.sample_index, 0) for sample in samples])
    rewards: list[dict[str, float | None]] = [{} for _ in samples]
    for turn in range(1, _TURNS + 1):
        active = [i for i, reply in enumerate(replies) if not reply.done and reply.outcome is Outcome.OK]
        steps = [_step(samples[i], replies[i].state, turn) for i in active]
        for i, reply in zip(active, pool.step(steps) if steps else []):
            replies[i] = reply
            conversations[i] += _turn_messages(samples[i], reply) if turn < _TURNS else []
            for component, value in reply.rewards.items():
                before = rewards[i].get(component)
                rewards[i][component] = before if value is None else value + (before or 0.0)
    verdicts = []
    for sample, earned, reply in zip(samples, rewards, replies):
        given = earned if reply.outcome is Outcome.OK else {}
        criteria = criteria_of(sample.prompt.fields, given)
        verdicts.append(Verdict(given, reply.outcome, reply.detail, criteria=criteria))
    if not verifies:
        return verdicts
    unscored = [i for i, verdict in enumerate(verdicts) if verdict.outcome is Outcome.OK and not verdict.rewards]
    verified = pool.verify([replace(samples[i], messages=tuple(conversations[i]) or None) for i in unscored])
    for i, verdict in zip(unscored, verified):
        verdicts[i] = verdict
    return verdicts


def _turn_messages(sample: Trajectory, reply: EpisodeReply) -> list[Mapping[str, Any]]:
    """Return the sample's answer and the environment's reply as messages."""
    answer = reply.observation
    messages = [{"role": "user", "content": answer}] if isinstance(answer, str) else answer
    said = message_of(sample.reply or Reply(sample.text))
    return [said, *(messages or [])]


def _step(sample: Trajectory, state: bytes, turn: int) -> EpisodeStep:
    """Return the request for the next step, with the sample's answer. The request of the last turn ends the episode."""
    message: dict[str, Any] = {"role": "assistant", "content": sample.text, "finish_reason": sample.finish_reason}
    if sample.reply is not None:
        message["reply"] = sample.reply
    return EpisodeStep(sample.prompt, sample.sample_index, turn, state, None if turn == _TURNS else message)


def _completions(environment: Environment, row: Mapping[str, Any], extra: Sequence[str]) -> list[str]:
    """Return the distinct completions to verify for a row."""
    return list(dict.fromkeys([*candidates(environment, row), "", *extra]))


def candidates(environment: Environment, row: Mapping[str, Any]) -> list[str]:
    """Return the environment's examples for a row and the row's column ``answer``.

    Raises:
        RunError: if ``examples`` fails.
    """
    try:
        examples = list(map(str, environment.examples(row)))
    except Exception as error:  # user-defined method
        raise RunError(f"{environment.__class__.__name__}.examples raised {first_line(error)}") from error
    answer = row.get("answer")
    return [*examples, *([str(answer)] if isinstance(answer, (str, int, float)) else [])]
