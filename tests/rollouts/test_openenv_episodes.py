"""Episodes on OpenEnv's own server, played by the built-in turns: tokens, masks, rewards. Scripted completions."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scripted_engines import TOKENIZER, completion_of

from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.records import Outcome, Prompt
from gdpo_nemo.environments.execution.pool import EnvironmentPool
from gdpo_nemo.environments.execution.pools import EnvironmentPools
from gdpo_nemo.generation.requests import Sampling
from gdpo_nemo.rollouts.credit import turn_rows
from gdpo_nemo.rollouts.turns import EpisodeJob, Limits, play_episode

pytestmark = pytest.mark.slow

SERVER = Path(__file__).resolve().parents[1] / "environments" / "openenv_server.py"
EPISODES = Path(__file__).with_name("episodes_for_tests.py")
TALK = Conversation(TOKENIZER, chat=True)
LIMITS = Limits(max_turns=8, max_tokens=80, max_new_tokens=10, max_sequence=4000)


@pytest.fixture(scope="module")
def section():
    process = subprocess.Popen([sys.executable, str(SERVER)], stdout=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{int(process.stdout.readline())}/guess"
    yield {
        "guess": {"plugin": "openenv", "url": url, "action": "guess", "observation": "message"},
        "python": {"plugin": f"{EPISODES}:Guessing"},
    }
    process.terminate()
    process.wait(60)


def played(pool, environment, guesses, name="p", sample=0):
    """A trajectory whose turns say these, one after the other."""
    messages = [{"role": "user", "content": "guess"}]
    text, ids = TALK.prompt(messages)
    left = iter(guesses)

    async def draw(request):
        return completion_of(request, lambda _: (next(left), "stop"), 1)

    job = EpisodeJob(Sampling(1.0, 1.0, -1, 10), lambda turn: turn, draw, pool.step_one, abandon=pool.abandon)
    return play_episode(Prompt(name, ids, text, environment, {}, messages), sample, job, LIMITS, TALK)


def test_an_episode_on_a_server_is_one_sequence_with_its_observations_masked(section):
    with EnvironmentPool(section) as pool:
        t = asyncio.run(played(pool, "guess", ["1", "20", "x", "1", "20", "1", "20", "1"]))
    assert t.outcome is Outcome.OK and np.array_equal(np.isnan(t.logprobs), ~t.loss_mask)
    assert "guess\n\na number from 1 to 20" in t.prompt.text
    heard = TOKENIZER.decode(t.completion_ids[~t.loss_mask])
    assert heard.count("more") == 3 and heard.count("less") == 2 and heard.count("Invalid action") == 1
    # The sixth guess ends the game; what was no guess counted as a turn, and for nothing.
    assert t.turns == 7 and t.rewards == {"reward": pytest.approx(-0.6)}


def test_reward_of_each_step_on_a_server_is_credited_to_its_turn(section):
    search = ["1", "20", "8"]  # the number of this seed
    with EnvironmentPool({"guess": {**section["guess"], "reset": {"seed": 4}}}) as pool:
        found, invalid = (asyncio.run(played(pool, "guess", guesses)) for guesses in (search, ["x", *search]))
    assert found.turn_rewards[-1] == {"reward": 1.0}
    assert [turn["reward"] for turn in found.turn_rewards[:-1]] == [-0.1] * (found.turns - 1)
    assert invalid.turn_rewards[0] == {"reward": 0.0} and invalid.turn_rewards[1:] == found.turn_rewards
    now, all_later = (turn_rows([found], ["reward"], discount).columns["reward"] for discount in (0.0, 1.0))
    assert now.tolist() == [-0.1] * (found.turns - 1) + [1.0]
    assert all_later.tolist() == pytest.approx([1.1 - 0.1 * (found.turns - turn) for turn in range(found.turns)])


def test_episodes_of_servers_and_of_workers_run_in_one_batch(section):
    section = {**section, "python": {**section["python"], "num_workers": 1}}

    async def both(pool):
        jobs = [played(pool, name, ["1"] * 8, sample=j) for name in section for j in range(2)]
        return await asyncio.gather(*jobs)

    with EnvironmentPools(section, timeout_s=60.0) as pool:
        *guessed, one, two = asyncio.run(both(pool))
    assert [set(t.rewards) for t in guessed] == [{"reward"}] * 2 and guessed[0].rewards == guessed[1].rewards
    assert one.rewards == two.rewards == {"length": 4.0, "turns": 4.0}


def test_an_episode_given_up_while_the_policy_writes_is_abandoned(section):
    left = []

    async def give_up(pool):
        writes = asyncio.Event()

        async def draw(request):
            writes.set()
            await asyncio.sleep(3600)

        job = EpisodeJob(Sampling(1.0, 1.0, -1, 10), lambda turn: turn, draw, pool.step_one, abandon=left.append)
        text, ids = TALK.prompt("guess")
        task = asyncio.create_task(play_episode(Prompt("p", ids, text, "guess"), 0, job, LIMITS, TALK))
        await asyncio.wait_for(writes.wait(), 300)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    with EnvironmentPool(section) as pool:
        assert asyncio.run(give_up(pool))
    assert [step.prompt.environment for step in left] == ["guess"]
