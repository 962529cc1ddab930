"""Worlds of the scheduler, closed when the test is over, and one engine and rank for all slow tests of the folder."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from engines_in_process import without_ray
from scheduler_world import World

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def world(monkeypatch):
    """``world(*overrides, **arguments)``: another ``World``, or an object of its subclass ``kind``."""
    without_ray(monkeypatch)
    made = []

    def make(*overrides, kind=World, **arguments):
        made.append(kind(*overrides, **arguments))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory) -> Path:
    """A small model over bytes, with a chat template, that mostly writes tool calls."""
    folder = tmp_path_factory.mktemp("bytes") / "model"
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("calling_model.py")), str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=REPOSITORY)
    return folder


@pytest.fixture(scope="session")
def vision_folder(tmp_path_factory) -> Path:
    """A tiny model with a vision tower, its processor and its chat template."""
    from tiny_vision import write_tiny_vision

    return write_tiny_vision(tmp_path_factory.mktemp("vision"), "qwen3_vl")


@pytest.fixture(scope="session")
def stage(byte_model):
    """Not imported by this file: quick tests of the folder need neither Ray's actors nor transformers."""
    from stage import Stage, stage_config

    from gdpo_nemo.cluster.session import session

    config = stage_config(byte_model)
    _standing.enter_context(session(config.cluster))
    made = Stage(config, byte_model)
    _standing.callback(made.policy.close)
    _standing.callback(made.fleet.close)
    return made


_standing = contextlib.ExitStack()
"""Ranks, engine and Ray session of `stage`, until the last test of this folder."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """A process has one Ray session at a time, and the next folder's tests may want another."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        _standing.close()


@pytest.fixture
def resting_endpoint(stage):
    """An endpoint between two batches, whose conversations have four turns and 80 tokens in a context of 400."""
    from gdpo_nemo.rollouts.endpoint.server import Endpoint
    from gdpo_nemo.rollouts.endpoint.service import Budgets, Service

    made = Endpoint(Service(stage.fleet, stage.conversation, Budgets(4, 80, 400)), "127.0.0.1", 0)
    yield made
    made.close()


@pytest.fixture
def endpoint(resting_endpoint):
    """The endpoint during a batch, with turns of at most 24 tokens."""
    from stage import SHORT

    with resting_endpoint.service.phase(SHORT, 5):
        yield resting_endpoint
