"""Episodes on real engines, real workers and a Megatron policy: ids, masks and log-probs of every turn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gdpo_nemo.data.packing import TrainSequence, pack_rows
from gdpo_nemo.data.records import Outcome, Prompt
from gdpo_nemo.environments.episodes import EpisodeStep
from gdpo_nemo.environments.execution.pool import EnvironmentPool
from gdpo_nemo.utils.errors import RunError

pytestmark = pytest.mark.slow

PLUGINS = Path(__file__).with_name("episodes_for_tests.py")


@pytest.fixture(scope="module")
def pool():
    section = {
        "guessing": {"plugin": f"{PLUGINS}:Guessing"},
        "opened": {"plugin": f"{PLUGINS}:Guessing", "opening": "begin"},
        "awkward": {"plugin": f"{PLUGINS}:Awkward"},
    }
    with EnvironmentPool(section, workers=1, timeout_s=2.0) as made:
        yield made


def chat_prompt(stage, environment, text="hello") -> Prompt:
    messages = [{"role": "user", "content": text}]
    rendered = stage.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = np.array(stage.tokenizer(rendered)["input_ids"], np.int32)
    return Prompt("p", ids, rendered, environment, {"prompt": text}, messages)


@pytest.fixture(scope="module")
def four_turns(stage, pool):
    return stage.play(chat_prompt(stage, "guessing"), pool, samples=4)


def test_only_policy_tokens_are_unmasked_and_the_others_are_text_of_the_template(four_turns, stage):
    """Token by token: behind each turn the environment's part closes the turn (if the policy did not) and says its
    words."""
    end = stage.tokenizer.eos_token_id
    closed = []
    for trajectory in four_turns:
        assert trajectory.turns == 4 and trajectory.outcome in (Outcome.OK, Outcome.TRUNCATED)
        assert np.array_equal(np.isnan(trajectory.logprobs), ~trajectory.loss_mask)
        edges = np.flatnonzero(np.diff(trajectory.loss_mask.astype(int))) + 1
        parts = np.split(trajectory.completion_ids, edges)
        assert len(parts) == 7  # four turns of the policy, three of the environment
        for turn in range(3):
            wrote = parts[2 * turn]
            heard = parts[2 * turn + 1]
            length = len(stage.tokenizer.decode(wrote, skip_special_tokens=True))
            said = f"\n<|start|>tool\n{turn + 1}:{length}<|end|>\n<|start|>user\non<|end|>\n<|start|>assistant\n"
            ended = wrote[-1] == end
            closed.append(ended)
            assert stage.tokenizer.decode(heard) == ("" if ended else "<|end|>") + said
            assert ended or len(wrote) == 10
        assert trajectory.num_policy_tokens == sum(map(len, parts[::2])) == trajectory.loss_mask.sum()
        assert trajectory.rewards["turns"] == 4.0
    assert not all(
        closed
    )  # at least one turn was cut before its end, so that both cases were seen or the harder one was


def test_logprobs_of_four_turns_are_those_of_one_megatron_forward_pass(four_turns, stage):
    sequences = [
        TrainSequence(t.prompt.token_ids, t.completion_ids, t.logprobs, loss_mask=t.loss_mask) for t in four_turns
    ]
    for sequence, found in zip(sequences, stage.policy.logprobs(sequences)):
        assert np.array_equal(np.isnan(found), ~sequence.loss_mask)
        assert np.abs(found - sequence.sampler_logprobs)[sequence.loss_mask].max() < 1e-4
    shifted = replace(sequences[0], completion_ids=np.roll(sequences[0].completion_ids, 1))
    (wrong,) = stage.policy.logprobs([shifted])
    assert np.abs(wrong - shifted.sampler_logprobs)[shifted.loss_mask].max() > 0.1


def test_gradient_does_not_depend_on_masked_tokens(four_turns, stage):
    """Sampler log-probs, old log-probs and reference log-probs of observations are never read; their tokens are
    context."""
    from gdpo_nemo.algorithms import LossSettings

    written = sum(t.num_policy_tokens for t in four_turns)

    def losses(fill):
        sequences = []
        for place, t in enumerate(four_turns):
            values = np.where(t.loss_mask, t.logprobs, fill).astype(np.float32)
            sequence = TrainSequence(
                t.prompt.token_ids, t.completion_ids, values, 1.0 - place, 1.0 / written, loss_mask=t.loss_mask
            )
            sequence.old_logprobs = sequence.reference_logprobs = values
            sequences.append(sequence)
        return stage.policy.train(sequences, LossSettings(reference_policy_kl_penalty=0.1))

    first = losses(np.nan)
    other = losses(-3.0)
    assert first.sums["tokens"] == written and not first.skipped and first.grad_norm > 0
    assert (first.loss, first.grad_norm) == (other.loss, other.grad_norm)
    assert first.maxima["parity_abs"] == other.maxima["parity_abs"] < 1e-4


def test_packing_trains_exactly_the_unmasked_tokens_on_every_context_rank():
    rng = np.random.default_rng(0)
    sequences = []
    for prompt, completion in ((3, 9), (1, 14), (6, 2)):
        ids = rng.integers(0, 99, prompt + completion).astype(np.int32)
        mask = rng.random(completion) < 0.5
        sequences.append(TrainSequence(ids[:prompt], ids[prompt:], np.zeros(completion, np.float32), loss_mask=mask))

    def halves(length, rank, size):
        chunks = np.split(np.arange(length), 2 * size)
        return np.concatenate([chunks[rank], chunks[2 * size - 1 - rank]])

    for size in (1, 2):
        seen = []
        for rank in range(size):
            rows = pack_rows(sequences, [0, 1, 2], context_rank=rank, context_size=size, positions=halves)
            seen += zip(rows.sequence.tolist(), rows.offset.tolist(), rows.targets.tolist())
        wanted = [
            (i, o, int(s.completion_ids[o])) for i, s in enumerate(sequences) for o in np.flatnonzero(s.loss_mask)
        ]
        assert sorted(seen) == sorted(wanted)


def test_budgets_end_an_episode_as_truncated_and_the_environment_has_the_last_word(stage, pool):
    two_turns = stage.play(chat_prompt(stage, "guessing"), pool, max_turns=2)
    few_tokens = stage.play(chat_prompt(stage, "guessing"), pool, max_tokens=13)
    for trajectory in (*two_turns, *few_tokens):
        assert trajectory.outcome is Outcome.TRUNCATED and trajectory.loss_mask[-1]
        parts = np.split(trajectory.completion_ids, np.flatnonzero(np.diff(trajectory.loss_mask.astype(int))) + 1)
        written = [len(stage.tokenizer.decode(part, skip_special_tokens=True)) for part in parts[::2]]
        # cut() adds -1 to what the steps gave.
        assert trajectory.rewards == {"turns": trajectory.turns, "length": sum(written) - 1}
    assert all(t.turns == 2 for t in two_turns) and all(t.num_policy_tokens == 13 for t in few_tokens)


def test_the_first_prompt_may_come_from_reset_and_equal_seeds_replay_a_batch(stage, pool):
    first, again = (stage.play(chat_prompt(stage, "opened"), pool, samples=6, max_turns=2) for _ in range(2))
    assert first[0].prompt.text == "<|start|>user\nbegin<|end|>\n<|start|>assistant\n"
    for one, other in zip(first, again):
        assert np.array_equal(one.completion_ids, other.completion_ids)
        first_turn = np.isnan(one.logprobs).argmax()  # number of tokens before the first message of the environment
        assert first_turn > 0 and np.array_equal(one.logprobs[:first_turn], other.logprobs[:first_turn])
        # The last bit of a later turn's log-prob varies, probably with what vLLM computes in the same step.
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=2e-6)
    assert len({t.completion_ids.tobytes() for t in first}) > 1


def test_a_step_that_hangs_dies_or_fails_masks_its_trajectory_and_no_other(pool, tmp_path):
    dying = {"what": "die_once", "when": 2, "flag": str(tmp_path / "flag")}
    troubles = [{}, {"what": "hang", "when": 2}, {"what": "fail", "when": 1}, dying]
    prompts = [Prompt(f"p{i}", np.zeros(1, np.int32), "", "awkward", row) for i, row in enumerate(troubles)]
    states = [reply.state for reply in pool.step([EpisodeStep(p, 0, 0) for p in prompts])]
    said = {"role": "assistant", "content": "x", "finish_reason": "stop"}
    replies = pool.step([EpisodeStep(p, 0, 0, s, said) for p, s in zip(prompts, states)])
    assert [r.outcome for r in replies] == [Outcome.OK, Outcome.OK, Outcome.ENV_FAILED, Outcome.OK]
    assert replies[2].detail == "the server is down" and replies[2].rewards == {}
    # The step during which a worker died is done again from the state before it, as if nothing had been.
    (died,) = pool.step([EpisodeStep(prompts[3], 0, 1, replies[3].state, said)])
    assert died.rewards == {"ok": 1.0} and died.observation == "go on" and (tmp_path / "flag").exists()
    fine, hung = pool.step([EpisodeStep(prompts[i], 0, 1, replies[i].state, said) for i in (0, 1)])
    assert fine.rewards == {"ok": 1.0} and hung.rewards == {}
    assert hung.outcome is Outcome.ENV_FAILED and "exceeded 2 s" in hung.detail


@pytest.mark.parametrize("what, line", [("raise_error", "my mistake"), ("keep_a_lock", "cannot be pickled")])
def test_an_authors_mistake_in_an_episode_stops_the_run_with_its_line(pool, what, line):
    prompt = Prompt("p", np.zeros(1, np.int32), "", "awkward", {"what": what, "when": 1})
    (reply,) = pool.step([EpisodeStep(prompt, 0, 0)])
    with pytest.raises(RunError, match=line):
        pool.step(
            [EpisodeStep(prompt, 0, 0, reply.state, {"role": "assistant", "content": "", "finish_reason": "stop"})]
        )
