"""One episode as a coroutine: what it samples, what it is told, when it ends. Real workers, scripted completions."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from scripted_engines import TOKENIZER, completion_of, letters

from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.records import Outcome, Prompt
from gdpo_nemo.environments.execution.pool import EnvironmentPool
from gdpo_nemo.generation.requests import Sampling
from gdpo_nemo.rollouts.turns import EpisodeJob, Limits, play_episode
from gdpo_nemo.utils.errors import RunError

pytestmark = pytest.mark.slow

PLUGINS = Path(__file__).with_name("episodes_for_tests.py")
TALK = Conversation(TOKENIZER, chat=True)
SAMPLING = Sampling(1.0, 1.0, -1, 10)
WIDE = Limits(max_turns=4, max_tokens=40, max_new_tokens=10, max_sequence=2000)


@pytest.fixture(scope="module")
def pool():
    section = {
        "guessing": {"plugin": f"{PLUGINS}:Guessing"},
        "opened": {"plugin": f"{PLUGINS}:Guessing", "opening": "begin"},
        "awkward": {"plugin": f"{PLUGINS}:Awkward"},
    }
    with EnvironmentPool(section, workers=2, timeout_s=2.0) as made:
        yield made


def prompt_of(environment: str, name: str = "p", **fields) -> Prompt:
    messages = [{"role": "user", "content": f"hello {name}"}]
    text, ids = TALK.prompt(messages)
    return Prompt(name, ids, text, environment, fields, messages)


def job(pool, script=letters, versions=None, log=None) -> EpisodeJob:
    """Completions by the script, the n-th by the n-th of ``versions``."""
    turns = iter(versions or ())

    async def sample(request):
        if log is not None:
            log.append(request)
        return completion_of(request, script, next(turns, 3))

    async def step(asked):
        return (await asyncio.to_thread(pool.step, [asked]))[0]

    return EpisodeJob(SAMPLING, lambda turn: 100 + turn, sample, step, version=9)


def played(prompt, asked, limits=WIDE, sample_index=0):
    return asyncio.run(play_episode(prompt, sample_index, asked, limits, TALK))


def parts(trajectory) -> list[np.ndarray]:
    """What policy and environment wrote, in turns."""
    return np.split(trajectory.completion_ids, np.flatnonzero(np.diff(trajectory.loss_mask.astype(int))) + 1)


def test_each_turn_continues_from_the_exact_tokens_of_earlier_turns(pool):
    log = []
    t = played(prompt_of("guessing"), job(pool, log=log))
    assert t.turns == 4 and [request.seed for request in log] == [100, 101, 102, 103]
    whole = np.concatenate([t.prompt.token_ids, t.completion_ids])
    for request in log:
        assert request.prompt_ids.dtype == np.int32
        assert np.array_equal(request.prompt_ids, whole[: len(request.prompt_ids)])
    said = parts(t)
    assert len(said) == 7 and t.num_policy_tokens == sum(map(len, said[::2]))
    assert t.turn_tokens == tuple(map(len, said[::2]))
    lengths = [float(len(TOKENIZER.decode(wrote, skip_special_tokens=True))) for wrote in said[::2]]
    assert t.turn_rewards == tuple({"length": length, "turns": 1.0} for length in lengths)
    for turn, (wrote, heard) in enumerate(zip(said[::2], said[1::2])):
        length = len(TOKENIZER.decode(wrote, skip_special_tokens=True))
        rest = f"\n<|start|>tool\n{turn + 1}:{length}<|end|>\n<|start|>user\non<|end|>\n<|start|>assistant\n"
        assert TOKENIZER.decode(heard) == ("" if wrote[-1] == TOKENIZER.eos_token_id else "<|end|>") + rest
    assert np.array_equal(np.isnan(t.logprobs), ~t.loss_mask)
    assert t.rewards["turns"] == 4.0 and t.completion_ids.dtype == np.int32 and t.logprobs.dtype == np.float32


def test_spans_name_the_weights_of_each_policy_token_and_neighbours_are_one(pool):
    t = played(prompt_of("guessing"), job(pool, versions=[4, 4, 5, 7]))
    wrote = [len(part) for part in parts(t)[::2]]
    assert t.spans == ((4, wrote[0] + wrote[1]), (5, wrote[2]), (7, wrote[3]))
    assert t.policy_version == 4 and sum(n for _, n in t.spans) == t.num_policy_tokens


def test_budgets_of_turns_and_tokens_truncate_and_the_environment_has_the_last_word(pool):
    two = played(prompt_of("guessing"), job(pool), Limits(2, 40, 10, 2000))
    few = played(prompt_of("guessing"), job(pool, lambda r: ("abcdefgh", "length")), Limits(4, 13, 10, 2000))
    for t in (two, few):
        assert t.outcome is Outcome.TRUNCATED and t.finish_reason == "length" and t.loss_mask[-1]
        written = sum(len(TOKENIZER.decode(part, skip_special_tokens=True)) for part in parts(t)[::2])
        assert t.rewards == {"turns": float(t.turns), "length": written - 1.0}  # cut() gives -1
    assert two.turns == 2 and few.turns == 2 and few.num_policy_tokens == 13


def test_an_observation_without_room_is_left_out_and_ends_the_episode(pool):
    """Tokens would be left for a turn that answers nothing."""
    prompt = prompt_of("guessing")
    log = []
    limits = Limits(4, 40, 10, len(prompt.token_ids) + 30)
    t = played(prompt, job(pool, lambda r: ("abc", "stop"), log=log), limits)
    assert len(log) == t.turns == 1 and t.loss_mask.all() and len(t.completion_ids) == 4
    assert t.outcome is Outcome.TRUNCATED and t.rewards == {"length": 3.0 - 1.0, "turns": 1.0}


def test_the_first_prompt_may_come_from_reset(pool):
    t = played(prompt_of("opened"), job(pool))
    assert t.prompt.text == "<|start|>user\nbegin<|end|>\n<|start|>assistant\n" and t.prompt.id == "p"


def test_a_failing_step_masks_its_trajectory_and_one_without_a_turn_has_a_version(pool):
    failed = played(prompt_of("awkward", what="fail", when=2), job(pool))
    assert failed.outcome is Outcome.ENV_FAILED and failed.detail == "the server is down"
    assert failed.turns == 2 and failed.policy_version == 3 and failed.rewards == {"ok": 1.0}
    with EnvironmentPool({"shut": {"plugin": f"{PLUGINS}:Shut"}}, timeout_s=5.0) as shut:
        unstarted = played(prompt_of("shut"), job(shut))
    assert unstarted.outcome is Outcome.ENV_FAILED and unstarted.turns == 0 and unstarted.spans == ()
    assert unstarted.policy_version == 9 and len(unstarted.completion_ids) == 0


def test_an_authors_mistake_ends_the_episode_with_a_sentence(pool):
    with pytest.raises(RunError, match="my mistake"):
        played(prompt_of("awkward", what="raise_error", when=1), job(pool))


def test_a_prompt_of_reset_that_leaves_no_room_is_refused_with_a_sentence(pool):
    with pytest.raises(RunError, match="environment 'guessing': prompt p, sample 0: the policy wrote no token"):
        played(prompt_of("guessing"), job(pool), Limits(4, 40, 10, 5))


def test_a_slow_step_holds_up_no_other_trajectory(pool):
    """The episodes of one loop take their turns independently: one worker hangs for its 2 s, the other goes on."""
    ends = []

    async def note(prompt):
        t = await play_episode(prompt, 0, job(pool), WIDE, TALK)
        ends.append((prompt.id, t.outcome))

    async def both():
        slow = prompt_of("awkward", "slow", what="hang", when=2)
        await asyncio.gather(note(slow), *(note(prompt_of("guessing", f"quick{n}")) for n in range(3)))

    asyncio.run(both())
    assert ends[-1] == ("slow", Outcome.ENV_FAILED) and len(ends) == 4
