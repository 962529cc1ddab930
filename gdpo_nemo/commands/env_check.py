"""Trying an environment before a run: a few rows verified in the real worker processes, without a model.

The completions are those an environment offers by ``examples(row)``, the row's ``answer`` column, an empty text, and
whatever the caller adds. A completion's tokens are its UTF-8 bytes here, for there is no tokenizer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Mapping, Sequence

import numpy as np

from gdpo_nemo.config.messages import first_line
from gdpo_nemo.data.records import Outcome, Prompt, Trajectory, Verdict
from gdpo_nemo.data.rows import PROMPT_KEYS
from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.episodes import EpisodeReply, EpisodeStep
from gdpo_nemo.environments.execution.dispatch import EnvironmentPools
from gdpo_nemo.errors import ConfigError, RunError

_TURNS = 9
"""Turns after which an episode is cut."""


@dataclass
class Check:
    """The verifier's verdict."""

    reward_names: tuple[str, ...]
    start_s: float
    """Seconds from nothing to the first verdict: workers start, import and prepare."""
    samples: list[Trajectory] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    """Seconds of each sample's row, all of whose samples are verified in one call."""
    repeated: bool = True
    """Whether the first row got the same verdicts twice."""

    @property
    def components(self) -> list[str]:
        """The announced components, then any others that came."""
        return list(
            dict.fromkeys([*self.reward_names, *(name for verdict in self.verdicts for name in verdict.rewards)])
        )

    @property
    def failed(self) -> int:
        """Samples that a run would mask."""
        return sum(verdict.outcome is Outcome.ENV_FAILED for verdict in self.verdicts)


def sample_of(
    row: Mapping[str, Any], text: str, environment: str = "env", index: int = 0, key: str | None = None
) -> Trajectory:
    """A completion ``text`` to a dataset row as ``verify`` receives it, with the UTF-8 bytes of the text for tokens.

    Args:
        row: columns by name; ``id`` and the prompt column are taken out, as in a run.
        index: number of the sample within its prompt.
        key: column with the prompt; None: the first of messages, prompt, question, problem.

    Raises:
        ConfigError: the row has no prompt.
    """
    key = key or next((name for name in PROMPT_KEYS if name in row), None)
    if key is None or key not in row:
        raise ConfigError(f"a row has no prompt column ({key or ', '.join(PROMPT_KEYS)}): it has {', '.join(row)}")
    value = row[key]
    messages = value if isinstance(value, list) else None
    shown = value if messages is None else "\n".join(str(message.get("content")) for message in messages)
    fields = {name: content for name, content in row.items() if name not in (key, "id")}
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    shown_tokens = np.frombuffer(str(shown).encode(), np.uint8).astype(np.int32)
    prompt = Prompt(str(row.get("id", "row")), shown_tokens, str(shown), environment, fields, messages)
    return Trajectory(prompt, index, tokens, np.zeros(len(tokens), np.float32), 0, text, "stop")


def check_environment(
    name: str,
    options: Mapping[str, Any],
    environment: Environment,
    rows: Sequence[Mapping[str, Any]],
    completions: Sequence[str] = (),
    workers: int = 1,
    timeout_s: float = 30.0,
    key: str | None = None,
) -> Check:
    """Verify every completion to every row, one row at a time, in a pool of worker processes.

    Args:
        name, options: the environment's entry in the section ``env``.
        environment: the same, built.
        rows: at least one.
        completions: tried on every row, besides the environment's own examples.
        key: column with the prompt, as for ``sample_of``.

    A completion to an environment with turns is given as the answer of every turn.

    Raises:
        RunError: a mistake in the environment's code, or servers that are not there.
        ConfigError: a row without a prompt or that a server refuses; an environment that nothing but a run can play.
    """
    if environment.plays_with_endpoint:
        raise ConfigError(f"{name}: its episodes need the model of a run, which this check has not")
    groups = [
        [
            sample_of(row, text, name, index, key)
            for index, text in enumerate(_completions(environment, row, completions))
        ]
        for row in rows
    ]
    if environment.has_preflight:
        try:
            environment.preflight([group[0].prompt for group in groups])
        finally:
            environment.close()
    with EnvironmentPools({name: options}, workers, timeout_s) as pool:
        verify = partial(_episodes, pool, environment.verifies) if environment.has_turns else pool.verify
        begin = time.perf_counter()
        first = verify(groups[0])
        check = Check(tuple(environment.reward_names), time.perf_counter() - begin)
        for group in groups:
            begin = time.perf_counter()
            check.verdicts += verify(group)
            check.samples += group
            check.latencies_s += [time.perf_counter() - begin] * len(group)
    check.repeated = first == check.verdicts[: len(first)]
    return check


def _episodes(pool: EnvironmentPools, verifies: bool, samples: Sequence[Trajectory]) -> list[Verdict]:
    """One verdict per sample: the rewards of an episode in which each turn is answered with the sample's text.

    Episodes whose steps gave no rewards are verified as a run would verify them.
    """
    talks: list[list[Mapping[str, Any]]] = [[] for _ in samples]
    replies = pool.step([EpisodeStep(sample.prompt, sample.sample_index, 0) for sample in samples])
    rewards: list[dict[str, float | None]] = [{} for _ in samples]
    for turn in range(1, _TURNS + 1):
        going = [i for i, reply in enumerate(replies) if not reply.done and reply.outcome is Outcome.OK]
        steps = [_step(samples[i], replies[i].state, turn) for i in going]
        for i, reply in zip(going, pool.step(steps) if steps else []):
            replies[i] = reply
            talks[i] += _spoken(samples[i], reply) if turn < _TURNS else []
            for component, value in reply.rewards.items():
                before = rewards[i].get(component)
                rewards[i][component] = before if value is None else value + (before or 0.0)
    verdicts = [
        Verdict(earned if reply.outcome is Outcome.OK else {}, reply.outcome, reply.detail)
        for earned, reply in zip(rewards, replies)
    ]
    if not verifies:
        return verdicts
    open_ones = [i for i, verdict in enumerate(verdicts) if verdict.outcome is Outcome.OK and not verdict.rewards]
    judged = pool.verify([replace(samples[i], messages=tuple(talks[i]) or None) for i in open_ones])
    for i, verdict in zip(open_ones, judged):
        verdicts[i] = verdict
    return verdicts


def _spoken(sample: Trajectory, reply: EpisodeReply) -> list[Mapping[str, Any]]:
    """The sample's turn and the answer to it as messages."""
    answer = reply.observation
    heard = [{"role": "user", "content": answer}] if isinstance(answer, str) else answer
    return [{"role": "assistant", "content": sample.text}, *(heard or [])]


def _step(sample: Trajectory, state: bytes, turn: int) -> EpisodeStep:
    """The sample's answer in this turn; after the last turn the episode is cut."""
    message = {"role": "assistant", "content": sample.text, "finish_reason": sample.finish_reason}
    return EpisodeStep(sample.prompt, sample.sample_index, turn, state, None if turn == _TURNS else message)


def _completions(environment: Environment, row: Mapping[str, Any], given: Sequence[str]) -> list[str]:
    """Distinct completions to try on a row."""
    try:
        own = [str(text) for text in environment.examples(row)]
    except Exception as error:  # the method is the user's
        raise RunError(f"{environment.__class__.__name__}.examples raised {first_line(error)}") from error
    answer = row.get("answer")
    texts = [*own, *([str(answer)] if isinstance(answer, (str, int, float)) else []), "", *given]
    return list(dict.fromkeys(texts))
