"""A trajectory while it is being played: pieces of tokens, which weights wrote them, and what old callers pass."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from gdpo_nemo.algorithms.rubrics import Criterion
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.generation.requests import Completion
from gdpo_nemo.rollouts.context import Transcript


def completion(*ids: int, spans=()) -> Completion:
    return Completion(np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32), "stop", spans)


def begun() -> Transcript:
    return Transcript(Prompt("p", np.array([1, 2], np.int32), "", "e"), 0)


def test_ids_logprobs_and_mask_grow_together_and_may_be_read_at_any_time():
    t = begun()
    assert (len(t), len(t.ids), len(t.mask), t.num_policy_tokens, t.version) == (2, 0, 0, 0, None)
    t.append_policy_tokens(completion(3, 4, spans=((7, 2),)))
    assert t.ids[-1] == 4 and len(t) == 4
    t.append_env_tokens([5])
    t.append_policy_tokens(completion(6, spans=((8, 1),)))
    assert t.ids.tolist() == [3, 4, 5, 6] and t.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert t.mask.tolist() == [True, True, False, True] and np.isnan(t.logprobs).tolist() == [False, False, True, False]
    assert (t.ids.dtype, t.logprobs.dtype, t.mask.dtype) == (np.int32, np.float32, bool)
    assert (t.num_policy_tokens, t.turns, t.version, t.spans) == (3, 2, 7, ((7, 2), (8, 1)))


def test_spans_of_one_version_that_follow_each_other_are_one_across_turns():
    t = begun()
    for spans in (((3, 1), (4, 1)), ((4, 2),), ((5, 2),)):
        t.append_policy_tokens(completion(9, 9, spans=spans))
        t.append_env_tokens([1, 1])
    assert t.spans == ((3, 1), (4, 3), (5, 2)) and t.version == 3


def test_separate_version_applies_to_a_completion_without_versions():
    t = begun()
    t.append_policy_tokens(completion(3, 4), 6)
    t.append_policy_tokens(completion(5, spans=((8, 1),)), 2)
    assert t.spans == ((6, 2), (8, 1))


def test_criteria_of_an_agents_reply_are_those_of_the_trajectory():
    t = begun()
    t.append_policy_tokens(completion(3, 4))
    t.set_rewards({"rubric/C1": 1.0, "rubric/C2": None})
    t.criteria = {"rubric/C1": Criterion("Three sentences?", 2.0), "rubric/C2": Criterion("No letter e?")}
    conversation = SimpleNamespace(text=lambda ids: "ab", replies=SimpleNamespace(counts_thinking=False))
    assert t.trajectory(conversation).criteria == t.criteria
