"""Rollout functions that exceed the deadline of a group. Engines follow a script (scheduler_world)."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from engines_in_process import Script
from scheduler_world import eventually, places

from gdpo_nemo.data.records import Outcome
from gdpo_nemo.rollouts.ledger import LATE
from gdpo_nemo.utils.errors import RunError

pytestmark = pytest.mark.slow

FUNCTION = """
import threading
from gdpo_nemo.generation.requests import SampleRequest
from gdpo_nemo.rollouts.context import Transcript

hanging, release, refused = set(), threading.Event(), []

def drawn(prompts, context):
    groups = []
    for place, prompt in enumerate(prompts):
        talks = [Transcript(prompt, j) for j in range(context.samples)]
        asked = [SampleRequest(prompt.token_ids, context.seed(place, j, 0)) for j in range(context.samples)]
        for talk, completion in zip(talks, context.sample(asked).completions):
            talk.append_policy_tokens(completion)
        groups.append([talk.trajectory(context.conversation, context.version) for talk in talks])
    return groups

def function(prompts, context):
    if any(prompt.id in hanging for prompt in prompts):
        release.wait(600)
        try:
            return drawn(prompts, context)
        except Exception as error:
            refused.append(error)
            raise
    return drawn(prompts, context)
"""


@pytest.fixture
def function(tmp_path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(FUNCTION)
    return file


def module_of(w):
    return __import__("sys").modules[w.scheduler._maker._runner._methods["digit_sort"].function.__module__]


def options(function: Path, staleness: int) -> list[str]:
    limits = ["rollout.group_timeout_s=5", "rollout.min_valid=1.0", f"rollout.max_staleness={staleness}"]
    return [*limits, f"rollout.function={function}:function"]


def test_a_function_that_hangs_costs_its_own_group_which_is_dropped(world, function):
    w = world(*options(function, 1))
    own = module_of(w)
    own.hanging.add("1")
    rollout = w.train()
    assert places(rollout) == [0, 2, 3] and rollout.dropped == [(1, LATE)] and rollout.next_position == 4
    own.release.set()
    eventually(lambda: own.refused)  # it goes on, and draws nothing any more
    assert isinstance(own.refused[0], RunError) and "the call was abandoned" in str(own.refused[0])


def test_samples_of_a_late_call_end_and_make_room(world, function):
    script = Script(lambda engine, request: 600.0 if int(request.prompt_ids[0]) == 0 else 0.0)
    w = world(*options(function, 1), "policy.generation.vllm_cfg.max_num_seqs=2", script=script)
    rollout = w.train()
    assert places(rollout) == [1, 2, 3] and rollout.dropped == [(0, LATE)]
    assert len(script.now(0).aborted) == 2


def test_a_synchronous_call_that_is_late_leaves_its_groups_to_the_next_prompts(world, function):
    w = world(*options(function, 0))
    module_of(w).hanging.add("1")
    rollout = w.train()
    assert places(rollout) == [3, 4, 5] and rollout.dropped == [(0, LATE), (1, LATE), (2, LATE)]
    assert {t.outcome for t in rollout.trajectories} == {Outcome.OK}
    module_of(w).release.set()


def test_a_call_that_never_ends_keeps_no_process_from_its_end(world, function):
    w = world(*options(function, 1))
    module_of(w).hanging.add("1")
    w.train()
    left = [thread for thread in threading.enumerate() if thread.name == "calls"]
    assert left and all(thread.daemon for thread in left)
    module_of(w).release.set()
