"""A step on a GPU that is not there: where its tensors are, and what waits for what (see ``fake_cuda``)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def step():
    """What ``fake_step.py`` finds with an off-loaded optimizer and a KL reference. An operation whose tensors are on
    two devices would have ended it."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("fake_step.py")), "--offload"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_offloaded_optimizer_is_on_the_gpu_only_for_its_update(step):
    assert (step["resting"], step["updating"]) == (["cpu"], ["cuda"])


@pytest.mark.parametrize("what", ["update", "logprobs", "reference"])
def test_micro_batch_reaches_the_gpu_in_one_asynchronous_copy(step, what):
    assert (step[what]["micro_batch"]["copies"], step[what]["micro_batch"]["blocking"]) == (1, 0)


@pytest.mark.parametrize("what", ["update", "logprobs", "reference"])
def test_no_line_of_a_micro_batch_waits_for_the_gpu(step, what):
    waits = [line for line in step[what]["waits"] if "megatron/logprobs.py" not in line]
    assert not waits


def test_weights_of_the_reference_come_from_pinned_memory(step):
    copies = {what: step[what]["besides"]["copies"] for what in ("reference", "logprobs")}
    assert copies["reference"] > copies["logprobs"]
    assert step["reference"]["besides"]["blocking"] == step["logprobs"]["besides"]["blocking"] == 1


def test_bucket_is_stored_in_host_memory_by_an_asynchronous_copy(step):
    assert step["kept"] == {"copies": 1, "after what fills it": 1}
