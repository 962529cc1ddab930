"""Single-turn categories of the Berkeley Function Calling Leaderboard (BFCL), with replies as in ``tool_calling``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gdpo_nemo.data.records import Trajectory, Verdict
from gdpo_nemo.environments.base import Environment, read_options
from gdpo_nemo.environments.tasks.answers import column
from gdpo_nemo.environments.tasks.call_match import calls_match, first_acceptable
from gdpo_nemo.environments.tasks.tool_calling import formatted, made_calls
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.files import open_file, parse_json

_INSTRUCTIONS = """You solve the user's request, with the following tools if they help.

**Available Tools**
{tools}

First reason inside <think> and </think>. If a tool is needed, then write a <tool_call> block with one JSON object per \
line. Otherwise write a <response> block. A complete reply with calls is:
<think> the reasoning </think>
<tool_call>
{{"name": "name of a tool", "parameters": {{"name of a parameter": "its value"}}}}
</tool_call>
"parameters" is an empty object if a tool needs no parameters."""


class Bfcl(Environment):
    """Environment for BFCL's rows of the categories simple, multiple, parallel, irrelevance and live (Python).

    Components, each 0 or 1:
        ast: the calls are valid by BFCL's rules (``call_match``). Rows of the category irrelevance expect no
            readable call.
        format: the completion has a think block, and then calls, or for irrelevance a response.

    Options:
        answers (null): file of BFCL's folder ``possible_answer``. By default, each row has the column ``ground_truth``.
    """

    instant = True

    reward_names = ("ast", "format")

    def __init__(self, options: Mapping[str, Any] | None = None):
        self._file: str | None = read_options("bfcl", options, answers=None).answers
        self._answers: dict[str, Any] | None = None

    def read_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the row with a chat prompt that describes the tools. Raises ConfigError if a column is invalid."""
        if not {"id", "question", "function"} <= row.keys():
            raise ConfigError("must have the columns id, question and function of BFCL's rows")
        if not isinstance(row["question"], list) or len(row["question"]) != 1:
            raise ConfigError("has several turns, which bfcl does not support")
        tools = []
        for number, tool in enumerate(row["function"], 1):
            parameters = json.dumps(tool["parameters"]["properties"], ensure_ascii=False)
            tools.append(
                f"{number}. Name: {tool['name']}\nDescription: {tool['description']}\nParameters: {parameters}"
            )
        system = {"role": "system", "content": _INSTRUCTIONS.format(tools="\n".join(tools))}
        answers = self._answers_of(row) or []
        if not answers and "irrelevance" not in str(row["id"]):
            raise ConfigError(f"has no answer ({row['id']}); set the option answers of the environment bfcl")
        return {
            "id": str(row["id"]), "prompt": [system, *row["question"][0]],
            "function": json.dumps(row["function"]), "ground_truth": json.dumps(answers),
        }  # fmt: skip

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return one verdict per trajectory."""
        verdicts = []
        for trajectory in trajectories:
            functions = json.loads(column(trajectory.prompt, "function"))
            answers = json.loads(column(trajectory.prompt, "ground_truth"))
            text = trajectory.text.strip()
            made = made_calls(text)
            valid = calls_match(functions, made or [], answers)
            form = "<tool_call>" if answers else "<response>"
            verdicts.append(Verdict({"ast": float(valid), "format": formatted(form, text)}))
        return verdicts

    def examples(self, row: Mapping[str, Any]) -> list[str]:
        """Return a completion with the first acceptable values."""
        lines = []
        for answer in json.loads(str(row.get("ground_truth", "[]"))):
            for name, acceptable in answer.items():
                lines.append(json.dumps({"name": name, "parameters": first_acceptable(acceptable)}))
        return ["<think> ... </think>\n<tool_call>\n" + "\n".join(lines) + "\n</tool_call>"] if lines else []

    def _answers_of(self, row: Mapping[str, Any]) -> Any:
        if self._file is None:
            return row.get("ground_truth")
        if self._answers is None:
            self._answers = _read_answers(self._file)
        return self._answers.get(str(row["id"]))


def _read_answers(file: str) -> dict[str, Any]:
    """Read answers by id from JSON lines. Raises ConfigError if the file is missing or invalid."""
    try:
        with open_file(Path(file)) as lines:
            rows = [parse_json(line) for line in lines if line.strip()]
        return {str(row["id"]): row["ground_truth"] for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"environment bfcl: answers: {file} is not a file of BFCL's answers ({error})") from None
