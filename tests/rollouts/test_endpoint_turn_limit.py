"""What happens when agents take more turns in one batch than the endpoint keeps."""

from __future__ import annotations

import numpy as np
import pytest

from gdpo_nemo.data.records import Prompt
from gdpo_nemo.generation.requests import Completion
from gdpo_nemo.rollouts.agents import BrokenEpisode, follow
from gdpo_nemo.rollouts.context import Transcript
from gdpo_nemo.rollouts.endpoint.conversations import History, Turn
from gdpo_nemo.utils.errors import RunError


def turn(number: int) -> Turn:
    completion = Completion(np.array([number], np.int32), np.array([-1.0], np.float32), "stop", ((0, 1),))
    return Turn(np.array([7, 8], np.int32), completion, 0, 1, 1, f"said {number}")


def reply(number: int) -> dict:
    return {"output": [{"prompt_token_ids": [7, 8], "generation_token_ids": [number]}]}


def transcript() -> Transcript:
    return Transcript(Prompt("p", np.array([1], np.int32), "", "agents", {}), 0)


def test_a_forgotten_turn_ends_the_run_with_a_sentence_and_fails_no_sample():
    history = History(limit=2)
    for number in (1, 2):
        history.keep("session", turn(number))
    with pytest.raises(BrokenEpisode, match="did not sample"):
        follow(transcript(), reply(9), history)  # made up: nothing was forgotten yet
    history.keep("session", turn(3))
    found = transcript()
    follow(found, reply(3), history)
    assert found.turns == 1
    with pytest.raises(RunError, match="more than 65,536 turns in a batch, the maximum number of stored turns"):
        follow(transcript(), reply(1), history)
    history.clear()
    with pytest.raises(BrokenEpisode, match="did not sample"):
        follow(transcript(), reply(1), history)
