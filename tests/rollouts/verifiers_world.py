"""A runner whose environment is a package for real verifiers in a process of its own. Completions are scripted."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from package_venv import venv_with
from scripted_engines import TOKENIZER, ScriptedEngines

from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.generation.requests import Sampling
from gdpo_nemo.rollouts.functions import RolloutRunner, SamplingJob

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = REPOSITORY / "configs" / "gdpo_turns_cpu.yaml"
TALK = Conversation(TOKENIZER, chat=True)
JOB = SamplingJob(Sampling(0.5, 1.0, -1, 96), 2, lambda i, j, turn: 100 * i + 10 * j + turn)


class World:
    """A runner with the environment ``chores``, and its rows by the last word of their prompt."""

    def __init__(self, engines: ScriptedEngines, folder: Path, version: str, **options: Any):
        venv = venv_with(f"verifiers=={version}").parent.parent
        options = {"plugin": "verifiers", "venv": str(venv), **options}
        overrides = [f"env={json.dumps({'chores': options})}"]
        overrides += [f"run.dir={folder}", "data.train.environment=chores", "data.validation.environment=chores"]
        overrides += ["policy.max_total_sequence_length=900", "policy.generation.max_new_tokens=96"]
        overrides += ["rollout.endpoint={enabled: true, port: 0}", "rollout.turns={max_turns: 8, max_tokens: 400}"]
        self.log = folder / f"verifiers_{options['package']}.log"
        self.engines = engines
        self.runner = RolloutRunner(load_config(CONFIG, overrides), engines, None, TOKENIZER)
        [self.environment] = self.runner._agents
        self.rows = {}
        for row in self.environment.rows("train", None, 0):
            self.rows[row["prompt"][-1]["content"].split()[-1]] = row

    def play(self, *mistakes: str, **changes) -> dict[str, list]:
        """Two samples of each task, by mistake. ``changes``: of the column with the task."""
        prompts = []
        for mistake in mistakes:
            row = self.rows[mistake]
            text, tokens = TALK.prompt(row["prompt"])
            fields = {"task": {**row["task"], **changes}}
            prompts.append(Prompt(row["id"], tokens, text, "chores", fields, row["prompt"]))
        return dict(zip(mistakes, self.runner.call(prompts, JOB, None)))


@contextlib.contextmanager
def open_world(folder: Path, version: str, engines: ScriptedEngines | None = None, **options: Any) -> Iterator[World]:
    """A world whose package is in tests/environments."""
    engines = engines or ScriptedEngines()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPOSITORY / "tests" / "environments"))
        made = World(engines, folder, version, **options)
        try:
            yield made
        finally:
            made.runner.close()
            engines.close()
