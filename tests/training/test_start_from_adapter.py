"""Where a policy's weights come from at the start of a run: a checkpoint, else the adapter, else the model."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from gdpo_nemo.config.model_checks import resolve
from gdpo_nemo.config.schema import Config
from gdpo_nemo.training import setup
from gdpo_nemo.training.recovery import RetainedSession


class Policy:
    """Writes down what it is asked."""

    def __init__(self, config, folder, *rest):
        self.asked = [f"model {folder}"]

    def ready(self):
        self.asked.append("ready")

    def load_checkpoint(self, folder):
        self.asked.append(f"checkpoint {folder}")

    def load_adapter(self, folder):
        self.asked.append(f"adapter {folder}")


class Algorithm:
    """One that samples nothing."""

    samples = False

    def __init__(self, *given):
        self.loaded = []

    def load_state(self, state):
        self.loaded.append(state)

    @staticmethod
    def needs_reference(config):
        return False


@pytest.mark.parametrize(
    "checkpoint, adapter, last",
    [
        (None, None, "ready"),
        (None, Path("/adapter"), "adapter /adapter"),
        (Path("/step_3"), Path("/adapter"), "checkpoint /step_3"),
    ],
)
def test_an_adapter_is_loaded_once_and_a_resume_goes_by_its_checkpoint(checkpoint, adapter, last, monkeypatch):
    monkeypatch.setattr("gdpo_nemo.cluster.session.session", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr("gdpo_nemo.cluster.reservation.reserve", lambda cluster, layout, folders: None)
    monkeypatch.setattr("gdpo_nemo.cluster.policy_group.PolicyGroup", Policy)
    for name in ("total_updates", "PromptStream"):
        monkeypatch.setattr(setup, name, lambda *given: None)
    inputs = SimpleNamespace(folder=Path("/base"), adapter=adapter, prompts=[], tokenizer=None, algorithm=Algorithm)
    log = SimpleNamespace(stopwatch=lambda name, begin: lambda lap: None)
    state = SimpleNamespace(position=0, algorithm={"kept": 1})
    resolved = resolve(Config())
    parts = SimpleNamespace(config=resolved.config, resolved=resolved, log=log, run_dir=Path("/run"), state=state)
    with contextlib.ExitStack() as stack:
        setup._start_processes(parts, stack, inputs, checkpoint, RetainedSession())
    assert parts.policy.asked[:2] == ["model /base", "ready"] and parts.policy.asked[-1] == last
    assert len(parts.policy.asked) == (2 if last == "ready" else 3)
    assert parts.algorithm.loaded == [{"kept": 1}]
