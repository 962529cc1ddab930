"""Answer with the code of a key: ``+47=`` is answered by ``<a>282</a>``.

The code is not in the prompt. Only the tool ``book_look_up`` returns it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import verifiers.v1 as vf

from code_book.servers.book import BookToolset, code_of

KEYS = 100


class CodeBookTaskConfig(vf.TaskConfig):
    """Options of an episode."""

    max_turns: int = 3
    """Number of turns after which the episode ends."""


class CodeBookConfig(vf.TasksetConfig):
    """Options of the tasks."""

    seed: int = 0
    """Seed of the order of the tasks."""
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()
    task: CodeBookTaskConfig = CodeBookTaskConfig()


class CodeBookData(vf.TaskData):
    """One row: the key that the prompt asks for."""

    key: str


class CodeBookTask(vf.Task[CodeBookData, vf.State, CodeBookTaskConfig]):
    """Scoring of one episode."""

    @vf.stop
    async def long_enough(self, trace: vf.Trace) -> bool:
        """End episodes that call the tool again and again."""
        return trace.num_turns >= self.config.max_turns

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        """Return 1 if the last reply is the code in its tags."""
        return float(trace.last_reply == f"<a>{code_of(self.data.key)}</a>")

    @vf.reward(weight=0.5)
    async def right_key(self, trace: vf.Trace) -> float:
        """Return 1 if a call asks for the key of the task."""
        return float(self.data.key in self._asked(trace))

    @vf.reward(weight=0.25)
    async def one_call(self, trace: vf.Trace) -> float:
        """Return 1 for exactly one call, whatever it asks for."""
        return float(len(self._asked(trace)) == 1)

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        """Return the number of calls."""
        return float(len(self._asked(trace)))

    def _asked(self, trace: vf.Trace) -> list[str]:
        """Return the keys of all calls. Arguments that are not a JSON object with a key count as an empty key."""
        keys = []
        for message in trace.assistant_messages:
            for call in message.tool_calls or ():
                try:
                    arguments = json.loads(call.arguments)
                except json.JSONDecodeError:
                    arguments = None
                keys.append(str(arguments.get("key", "")) if isinstance(arguments, dict) else "")
        return keys


class CodeBookTaskset(vf.Taskset[CodeBookTask, CodeBookConfig]):
    """One task for each of the 100 keys, and one tool server for all of them."""

    @classmethod
    def toolsets(cls, config: CodeBookConfig) -> list[vf.Toolset]:
        """Return the tool servers."""
        return [BookToolset(config.tools)]

    def load(self) -> Iterator[CodeBookTask]:
        """Yield the tasks."""
        for number in random.Random(self.config.seed).sample(range(KEYS), KEYS):
            key = f"{number:02d}"
            yield CodeBookTask(CodeBookData(id=key, prompt=f"+{key}=", key=key), self.config.task)
