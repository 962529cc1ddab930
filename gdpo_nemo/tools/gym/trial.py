"""``gdpo-nemo gym scan --try``: start servers one after the other, and verify answers to their example rows."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gdpo_nemo.data.records import Outcome, Prompt, Trajectory, Verdict
from gdpo_nemo.data.replies import parse_hermes
from gdpo_nemo.environments.nemo_gym.environment import NemoGym
from gdpo_nemo.environments.nemo_gym.rows import read_row
from gdpo_nemo.environments.server_replies import printable
from gdpo_nemo.tools.gym.processes import address
from gdpo_nemo.tools.gym.up import Source, start
from gdpo_nemo.utils.errors import ConfigError, GdpoError
from gdpo_nemo.utils.files import parse_json, read_text

_EXPECTED = ("answer", "target", "ground_truth", "label", "reference", "solution")
"""Columns with the right answer besides ``expected...``, in NeMo Gym's rows or in their ``verifier_metadata``."""
_MINIMAL = "0"
_DEADLINE_S = 120.0
_DETAIL = 200


def try_server(
    name: str, settings: Mapping[str, Any], folder: Path, *, limit: int, source: Source, logs: Path, timeout_s: float
) -> dict[str, Any]:
    """Start a resources server, verify answers to its example rows and its recorded answers, and end it.

    Args:
        settings: the server's entry in its configuration.
        folder: the server's code and data.
        limit: number of rows, and of recorded answers.
        timeout_s: seconds until the server answers.

    Returns:
        status, summary, seconds and, if the server has started, the reward components and each answer's rewards.
    """
    with attempted() as result, _served(name, settings, source, logs, timeout_s) as url:
        result |= verify_rows(name, url, example_rows(folder)[:limit], recorded_answers(folder)[:limit])
    return result


@contextlib.contextmanager
def attempted() -> Iterator[dict[str, Any]]:
    """Yield a result to fill. If the block raises ``GdpoError``, the result becomes ``did not start``."""
    begin = time.monotonic()
    result: dict[str, Any] = {}
    try:
        yield result
    except GdpoError as error:
        last = printable(str(error).rpartition(" | ")[2], _DETAIL)
        result |= {"status": "did not start", "summary": f"did not start: {last}", "detail": str(error)}
    result["seconds"] = round(time.monotonic() - begin, 1)


@contextlib.contextmanager
def _served(name: str, settings: Mapping[str, Any], source: Source, logs: Path, timeout_s: float) -> Iterator[str]:
    """Start a server and yield its URL. Raises RunError if it does not start."""
    entry = {"entrypoint": "app.py", "domain": "other", **settings, "datasets": None}
    # The empty list makes the process complete the config with NeMo Gym's own settings.
    addressed = address({name: {"resources_servers": {name: entry}}, "config_paths": []}, {})
    with contextlib.ExitStack() as stack:
        stack.callback(addressed.close)
        for process in start(name, name, addressed, source, logs):
            stack.callback(process.end)
            addressed.close()
            process.wait_until_ready(addressed.urls, time.monotonic() + timeout_s)
        yield addressed.urls[name]


def verify_rows(
    name: str, url: str, rows: list[dict[str, Any]], recorded: list[tuple[dict[str, Any], str, float]] | None = None
) -> dict[str, Any]:
    """Verify answers to the rows through the environment ``nemo_gym``.

    Args:
        recorded: row, answer and reward of recorded answers, which are verified again.
    """
    options = {"servers": {name: url}, "retries": 0, "deadline_s": _DEADLINE_S, "request_timeout_s": _DEADLINE_S}
    environment = NemoGym(options)
    try:
        samples: list[Trajectory] = []
        for i, row in enumerate(rows):
            samples += _samples(str(i), row, [_MINIMAL, *expected_answers(row)])
        count = len(samples)
        for i, (row, text, _) in enumerate(recorded or ()):
            samples += _samples(f"r{i}", row, [text])
        verdicts = environment.verify(samples)
    finally:
        environment.close()
    result = _summary(samples[:count], verdicts[:count])
    if recorded:
        different = []
        for (*_, reward), verdict in zip(recorded, verdicts[count:]):
            again = verdict.rewards.get("reward")
            if not math.isclose(again or 0.0, reward, abs_tol=1e-6) or not verdict.rewards:
                different.append({"recorded": reward, "reward": again, "detail": verdict.detail})
        result |= {"recorded": len(recorded), "different": different}
        result["summary"] += f"; {len(recorded) - len(different)} of {len(recorded)} recorded rewards equal"
    return result


def _summary(samples: list[Trajectory], verdicts: list[Verdict]) -> dict[str, Any]:
    answers = []
    valid = 0
    found: dict[str, list[float]] = {}
    failures: Counter[str] = Counter()
    for sample, verdict in zip(samples, verdicts):
        result = {"outcome": verdict.outcome.value, "rewards": dict(verdict.rewards), "detail": verdict.detail}
        answers.append({"row": sample.prompt.id, "answer": sample.text, **result})
        if verdict.outcome is not Outcome.OK:
            failures[printable(verdict.detail, _DETAIL)] += 1
            continue
        valid += 1
        for name, value in verdict.component_rewards.items():
            found.setdefault(name, []).extend([] if value is None else [value])
    parts = []
    for name, values in sorted(found.items()):
        parts.append(f"{name} {min(values, default=math.nan):g} to {max(values, default=math.nan):g}")
    parts += [f"{count} x {detail}" for detail, count in failures.most_common(2)]
    return {
        "status": "verified" if valid == len(verdicts) else "partly" if valid else "failed",
        "summary": f"{valid} of {len(verdicts)} verified: {'; '.join(parts)}",
        "components": sorted(found),
        "answers": answers,
    }


def _samples(name: str, row: Mapping[str, Any], answers: list[str]) -> Iterator[Trajectory]:
    """Yield a sample per distinct answer."""
    columns = read_row(row)
    prompt = Prompt(name, np.zeros(1, np.int32), "", "nemo_gym", columns, columns["messages"])
    empty = np.zeros(0, np.int32)
    tools = columns.get("tools")
    for number, text in enumerate(dict.fromkeys(answers)):
        sample = Trajectory(prompt, number, empty, empty.astype(np.float32), 0, text, "stop")
        if isinstance(tools, list) and tools:
            sample.reply = parse_hermes(text, tools)
        yield sample


def expected_answers(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the expected answer as it is and in a box, or the expected tool calls."""
    details = row.get("verifier_metadata")
    for columns in (row, details if isinstance(details, Mapping) else {}):
        for name in (*(name for name in columns if name.startswith("expected")), *_EXPECTED):
            value = columns.get(name)
            if value is None or value == "":
                continue
            if calls := list(filter(_is_call, value if isinstance(value, list) else [value])):
                yield "\n".join(f"<tool_call>{json.dumps(_call(call))}</tool_call>" for call in calls)
                return
            text = value if isinstance(value, str) else json.dumps(value)
            yield text
            yield f"\\boxed{{{text}}}"
            return


def _is_call(value: object) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("name"), str) and "arguments" in value


def _call(value: Mapping[str, Any]) -> dict[str, Any]:
    arguments = value["arguments"]
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    return {"name": value["name"], "arguments": arguments}


def example_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a server's ``data/example.jsonl`` (empty without the file).

    Raises ConfigError if the file is not JSON Lines.
    """
    return _json_lines(folder / "data" / "example.jsonl")


def recorded_answers(folder: Path) -> list[tuple[dict[str, Any], str, float]]:
    """Return row, answer and reward of the single-turn replies in a server's ``data/example_rollouts.jsonl``.

    The row is the example row with the same messages. Replies have other fields than rows.
    """
    rows = {messages: row for row in example_rows(folder) if (messages := _messages(row))}
    found = []
    for reply in _json_lines(folder / "data" / "example_rollouts.jsonl"):
        row = rows.get(_messages(reply))
        response, reward = reply.get("response"), reply.get("reward")
        items = response.get("output") if isinstance(response, dict) else None
        text = _text(items if isinstance(items, list) else [])
        if row is not None and text is not None and isinstance(reward, (int, float)):
            found.append((row, text, float(reward)))
    return found


def _messages(row: Mapping[str, Any]) -> str:
    """Return the messages of a row as text. The text is empty if the row is not valid."""
    try:
        return json.dumps(read_row(row)["messages"])
    except ConfigError:
        return ""


def _text(items: list[Any]) -> str | None:
    """Return the text of output items, or None if they are not a single turn."""
    parts = []
    for item in items:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "message" and isinstance(item["content"], list):
            parts += [str(part.get("text", "")) for part in item["content"]]
        elif kind == "function_call":
            parts.append(f"<tool_call>{json.dumps(_call(item))}</tool_call>")
        elif kind != "reasoning":
            return None
    return "".join(parts)


def _json_lines(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    try:
        return [parse_json(line) for line in read_text(file).splitlines() if line.strip()]
    except ValueError as error:
        raise ConfigError(f"data/{file.name} is not valid JSON Lines: {error}") from None
