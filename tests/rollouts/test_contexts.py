"""Trajectories of several contexts: each token is trained once, with the weight and gradient of an uncut history."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from character_tokenizer import character_tokenizer
from hypothesis import given, settings, strategies as st

from gdpo_nemo.algorithms import LossSettings, OffPolicySettings
from gdpo_nemo.algorithms.loss_selection import reads_whole_sequences
from gdpo_nemo.algorithms.policy_loss import policy_loss
from gdpo_nemo.commands.parity import _read_record
from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.contexts import by_trajectory, contexts_of, to_score
from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.images import Image, Images, PlacedImage
from gdpo_nemo.data.packing import Budget, TrainSequence, has_split_trajectory, pack_rows, with_gradient
from gdpo_nemo.data.prefixes import whole_layout
from gdpo_nemo.data.records import Group, Outcome, Prompt, Trajectory
from gdpo_nemo.data.shares import Share
from gdpo_nemo.generation.requests import Completion
from gdpo_nemo.megatron.micro_batch import make_micro_batch
from gdpo_nemo.observe.journal import Journal, read_journal
from gdpo_nemo.observe.sample_values import SampleValues
from gdpo_nemo.observe.samples import read_rollouts, write_rollouts
from gdpo_nemo.rollouts.agents import follow
from gdpo_nemo.rollouts.batches import Rollout, recorded_groups
from gdpo_nemo.rollouts.context import Transcript, check_trajectory
from gdpo_nemo.rollouts.credit import advantages_of, updates_of
from gdpo_nemo.rollouts.endpoint.conversations import History, Turn
from gdpo_nemo.rollouts.metrics import rollout_metrics
from gdpo_nemo.training.distillation import OnPolicyDistillation
from gdpo_nemo.training.gdpo import GDPO
from gdpo_nemo.training.ppo import PPO
from gdpo_nemo.utils.errors import RunError

DEMO = "configs/gdpo_turns_cpu.yaml"
VOCABULARY = 11
TALK = Conversation(character_tokenizer(), chat=False)


def config(*overrides: str):
    return load_config(DEMO, ["gdpo.rewards={a: 1}", "gdpo.num_generations_per_prompt=2", *overrides])


def completion(draw: np.random.Generator, version: int, before: np.ndarray) -> Completion:
    ids = draw.integers(0, VOCABULARY, draw.integers(1, 5)).astype(np.int32)
    logprobs = draw.normal(-2.4, 0.2, len(ids)).clip(max=-0.1).astype(np.float32)
    routing = chosen(np.concatenate([before, ids]))
    routing[-1] = -1
    return Completion(ids, logprobs, "stop", ((version, len(ids)),), routing)


def chosen(ids: np.ndarray) -> np.ndarray:
    """int8 [tokens, 2]: experts that depend on a token and all before it."""
    return np.stack([np.cumsum(ids) % 7, np.cumsum(ids * np.arange(1, len(ids) + 1)) % 5], 1).astype(np.int8)


def played(seed: int, moves: list[str | int], sample: int = 0) -> Trajectory:
    """A trajectory whose turn t + 1 makes ``moves[t]``.

    "on" continues the last turn, "cut" begins a context with exactly the tokens so far, "new" begins a context of other
    tokens, and a number returns to a turn. Turns of equal ``seed`` have equal tokens, whatever the moves. The entry
    "seen" of ``extra`` lists what the sampler would get for each turn.
    """
    t = Transcript(Prompt("p", np.arange(3, dtype=np.int32), "", "digit_turns"), sample)
    draw = np.random.default_rng([seed, sample])
    seen = [t.token_ids.tolist()]
    t.append_policy_tokens(completion(draw, 0, t.token_ids))
    for version, move in enumerate(moves, 1):
        heard = draw.integers(0, VOCABULARY, draw.integers(1, 4))
        if move == "cut":
            t.begin_context(np.concatenate([t.token_ids, heard]))
        elif move == "new":
            t.begin_context(heard)
        else:
            if isinstance(move, int):
                t.append_env_tokens([1, 2])  # dropped, because no turn continues them
                t.return_to(move)
            t.append_env_tokens(heard)
        seen.append(t.token_ids.tolist())
        t.append_policy_tokens(completion(draw, version, t.token_ids))
    t.rewards = {"a": float(draw.normal())}
    made = t.trajectory(TALK)
    made.extra["seen"] = seen
    check_trajectory(made, t.prompt, 200, "test")
    return made


def trained_tokens(trajectories, update) -> dict[tuple[int, int], tuple]:
    """For each trained token, by trajectory and number of the policy's token: all that its loss depends on."""
    found = {}
    for s in update:
        t = trajectories[s.trajectory]
        number = np.cumsum(np.ones(len(t.completion_ids), int) if t.loss_mask is None else t.loss_mask) - 1
        mask = np.ones(len(s.completion_ids), bool) if s.loss_mask is None else s.loss_mask
        for offset in np.flatnonzero(mask):
            key = s.trajectory, int(number[s.indices][offset])
            assert key not in found, "trained twice"
            before = np.concatenate([s.prompt_ids, s.completion_ids[:offset]]).tolist()
            turn = int(np.searchsorted(np.cumsum(t.turn_tokens), key[1], "right"))
            written = t.where_written(t.completion_ids)[sum(t.turn_tokens[:turn]) : key[1]]
            if s.routing is not None:
                assert np.array_equal(s.routing[: len(before)], chosen(np.array(before))), "other experts were chosen"
            assert "seen" not in t.extra or before == [*t.extra["seen"][turn], *written], "the sampler saw other tokens"
            values = (s.sampler_logprobs, s.old_logprobs, s.token_advantages(), s.staleness)
            found[key] = before, s.completion_ids[offset], s.weight, *(float(column[offset]) for column in values)
    assert len(found) == sum(t.num_policy_tokens for t in trajectories)
    return found


def turn_by_turn(trajectories, update) -> list[TrainSequence]:
    """The same update with every turn as a separate sequence, whose prompt is what the policy saw."""
    parts = []
    for s in update:
        mask = np.ones(len(s.completion_ids), bool) if s.loss_mask is None else s.loss_mask
        for start, end in np.flatnonzero(np.diff(np.r_[False, mask, False])).reshape(-1, 2):
            columns = {name: getattr(s, name)[start:end] for name in ("sampler_logprobs", "old_logprobs", "staleness")}
            parts.append(
                TrainSequence(
                    np.concatenate([s.prompt_ids, s.completion_ids[:start]]),
                    s.completion_ids[start:end],
                    advantage=s.token_advantages()[start:end],
                    weight=s.weight,
                    trajectory=s.trajectory,
                    **columns,
                )  # fmt: skip
            )
    return parts


MODEL = (
    torch.manual_seed(0)
    and torch.nn.ModuleList(
        [torch.nn.Embedding(VOCABULARY, 6), torch.nn.GRU(6, 8, batch_first=True), torch.nn.Linear(8, VOCABULARY)]
    ).double()
)
LOSSES = {
    "clipped_pg": LossSettings(),
    "gspo": LossSettings(type="gspo"),
    "sequence importance": LossSettings(off_policy=OffPolicySettings(mode="truncate", level="sequence")),
    "sequence mask": LossSettings(off_policy=OffPolicySettings(sequence_mask_threshold=0.01)),
    "token importance": LossSettings(off_policy=OffPolicySettings(mode="truncate", level="token")),
}


def gradient(sequences: list[TrainSequence], loss: LossSettings) -> torch.Tensor:
    """The gradient of a causal model's weights from one micro-batch."""
    rows = pack_rows(sequences, range(len(sequences)))
    batch = make_micro_batch(rows, sequences, (0, 1), torch.device("cpu"), attention=None, with_fields=True)
    embedding, recurrent, head = MODEL
    logprobs = []
    for s in sequences:
        ids = torch.from_numpy(np.concatenate([s.prompt_ids, s.completion_ids]).astype(np.int64))
        scores = head(recurrent(embedding(ids[None]))[0])[0].log_softmax(-1)
        logprobs.append(scores[:-1].gather(-1, ids[1:, None])[len(s.prompt_ids) - 1 :, 0])
    of_rows = torch.stack([logprobs[i][k] for i, k in zip(rows.sequence, rows.offset)]).float()
    of_rows = of_rows if batch.trained is None else of_rows[batch.trained]
    total, _ = policy_loss(of_rows, None, batch.fields, loss)
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, list(MODEL.parameters()))])


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def update_of(trajectories, aggregation="token_mean", by_turn=False) -> list[TrainSequence]:
    """The update of the trajectories, with the staleness of each token, which the custom loss reads."""
    loss = ["loss_fn.type=examples/sapo.py:sapo", f"loss_fn.aggregation={aggregation}", "loss_fn.old_logprobs=sampler"]
    advantages = np.linspace(0.5, 2.0, len(trajectories))
    if by_turn:
        advantages = []
        for t in trajectories:
            spread = np.zeros(len(t.completion_ids), np.float32)
            spread[slice(None) if t.loss_mask is None else t.loss_mask] = np.linspace(0.3, 2, t.num_policy_tokens)
            advantages.append(spread)
    (update,) = updates_of(trajectories, advantages, config("rollout.max_staleness=9", *loss), version=9)
    return update


MOVES = st.lists(st.sampled_from(["on", "cut"]), min_size=1, max_size=5)
SEEDS = st.integers(0, 10**6)


@settings(max_examples=12, deadline=None)
@given(SEEDS, MOVES, MOVES, st.sampled_from(["token_mean", "sequence_mean", "sequence_sum", "constant"]), st.booleans())
def test_update_does_not_depend_on_where_the_history_was_cut(seed, first, second, aggregation, by_turn):
    """With equal contexts, all inputs of a token's loss are equal, and so is the gradient of every kind of loss."""
    cut = [played(seed, first, 0), played(seed, second, 1)]
    whole = [played(seed, ["on"] * len(moves), sample) for sample, moves in enumerate((first, second))]
    assert [t.num_contexts for t in cut] == [1 + moves.count("cut") for moves in (first, second)]
    ours, theirs = (update_of(trajectories, aggregation, by_turn) for trajectories in (cut, whole))
    assert trained_tokens(cut, ours) == trained_tokens(whole, theirs)
    for name, loss in LOSSES.items():
        assert difference(gradient(ours, loss), gradient(theirs, loss)) < 1e-6, name


@st.composite
def trees(draw) -> list[str | int]:
    count = draw(st.integers(1, 6))
    return [draw(st.one_of(st.sampled_from(["on", "new", "cut"]), st.integers(0, turn))) for turn in range(count)]


@settings(max_examples=12, deadline=None)
@given(SEEDS, trees(), trees())
def test_tree_of_contexts_trains_each_turn_once_after_the_tokens_that_its_sampler_saw(seed, first, second):
    trajectories = [played(seed, first, 0), played(seed, second, 1)]
    update = update_of(trajectories)
    apart = turn_by_turn(trajectories, update)
    assert len(apart) == sum(t.turns for t in trajectories)
    assert len(update) == sum(t.num_contexts for t in trajectories)
    found = trained_tokens(trajectories, update)
    weights = {weight for _, _, weight, *_ in found.values()}
    assert weights == {1 / len(found)}
    for (number, _), (_, _, _, _, _, advantage, _) in found.items():
        assert advantage == pytest.approx([0.5, 2.0][number])
    for name, loss in LOSSES.items():
        assert difference(gradient(update, loss), gradient(apart, loss)) < 1e-6, name


@pytest.mark.parametrize("aggregation", ["sequence_mean", "sequence_sum", "constant"])
def test_trajectory_of_many_contexts_weighs_as_much_as_one_of_a_single_context(aggregation):
    """Both trajectories have equal turns: the sum of their weights must not depend on the number of sequences."""
    t = played(3, ["on", "on", "on"])
    other = replace(played(3, ["new", "new", "new"]), sample_index=1)
    update = update_of([t, other], aggregation)
    assert len(update) == 1 + 4 and len({s.weight for s in update}) == 1
    weights = [sum(s.weight * s.num_policy_tokens for s in update if s.trajectory == i) for i in (0, 1)]
    assert weights[0] == pytest.approx(weights[1])
    if aggregation == "sequence_mean":
        assert weights[0] == pytest.approx(0.5)


def test_agent_that_returns_to_its_history_after_a_sub_agent_has_one_sequence_for_both_parts():
    """The main agent's turns 0, 1 and 4 are one sequence, the sub-agent's turns 2 and 3 another one."""
    t = played(5, ["on", "new", "on", 1])
    assert t.turn_parents == (-1, 0, -1, 2, 1)
    sub, main = contexts_of(t)
    assert np.array_equal(main.prompt_ids, t.prompt.token_ids)
    assert int(main.loss_mask.sum()) == sum(t.turn_tokens[k] for k in (0, 1, 4))
    assert int(sub.loss_mask.sum()) == sum(t.turn_tokens[k] for k in (2, 3))
    row = rollout_metrics([t], version=9)
    assert row["rollout/contexts"] == 2 and row["rollout/turns"] == 5
    assert row["rollout/tokens"] == sum(t.turn_tokens)


def test_turn_of_an_agent_continues_the_longest_earlier_turn_and_is_trained_once():
    """The agent's third request is a sub-agent's, the fourth one returns, and the reply repeats the second turn."""
    history, items = History(), []
    for prompt, written in (([1, 2], [3]), ([1, 2, 3, 9], [4]), ([7], [8]), ([1, 2, 3, 9, 4, 9], [5])):
        ids = np.array(written, np.int32)
        sampled = Completion(ids, np.full(1, -1, np.float32), "stop", ((0, 1),))
        history.keep("", Turn(np.array(prompt, np.int32), sampled, 0, 1, 1, str(prompt)))
        items.append({"prompt_token_ids": prompt, "generation_token_ids": written})
    t = Transcript(Prompt("p", np.zeros(1, np.int32), "", "agents"), 0)
    follow(t, {"output": [*items, items[1]]}, history)
    made = t.trajectory(TALK)
    assert made.turn_parents == (-1, 0, -1, 1) and made.completion_ids.tolist() == [3, 9, 4, 7, 8, 9, 5]
    sub, main = to_score([made])
    assert (sub.prompt_ids.tolist(), sub.completion_ids.tolist()) == ([7], [8])
    assert (main.prompt_ids.tolist(), main.completion_ids.tolist()) == ([1, 2], [3, 9, 4, 9, 5])
    assert main.loss_mask.tolist() == [True, False, True, False, True]


def test_every_turn_of_every_context_gets_the_advantage_that_credit_assigns():
    """With credit by turn, returns follow the order of sampling: a sub-agent's turn has the later rewards of its
    caller."""
    group = Group(Prompt("p", np.arange(3, dtype=np.int32), "", "digit_turns"), [])
    for sample in range(2):
        t = played(7, ["on", "new", 1], sample)
        t.turn_rewards = tuple({"a": float(sample * 2 + k)} for k in range(4))
        t.rewards = {"a": sum(earned["a"] for earned in t.turn_rewards)}
        group.trajectories.append(t)
    settings = config("gdpo.credit=turn", "gdpo.discount=0.5", "gdpo.batch_norm=false")
    found = advantages_of([group], settings)
    (update,) = updates_of(group.trajectories, found.of_sequences(group.trajectories), settings)
    assert len(update) == 4
    for s in update:
        t = group.trajectories[s.trajectory]
        expected = np.repeat(found.by_turn[s.trajectory].astype("f4"), t.turn_tokens)
        spread = np.zeros(len(t.completion_ids), "f4")
        spread[t.loss_mask] = expected
        np.testing.assert_array_equal(s.advantage, spread[s.indices])
    of_sequence = advantages_of([group], config())
    (update,) = updates_of(group.trajectories, of_sequence.values.numpy(), config())
    for s in update:
        assert s.advantage == of_sequence.values[s.trajectory]


# -- images ------------------------------------------------------------------------------------------------------------

PAD, MARK = 10, 100
"""Placeholder token, which the policy also samples, and the token before the first image. It grows by 1 per image."""


def with_images(draw: np.random.Generator, first: int) -> tuple[np.ndarray, Images]:
    """0 to 2 images of 1 to 3 placeholders among other tokens of the environment, each after its own mark."""
    tokens, images = [1], []
    for number in range(first, first + int(draw.integers(0, 3))):
        count = int(draw.integers(1, 4))
        image = Image(f"{number:064x}", count, 1, b"")
        tokens += [MARK + number]
        images.append(PlacedImage(image, len(tokens), count))
        tokens += [*[PAD] * count, *draw.integers(0, VOCABULARY, draw.integers(0, 2))]
    return np.array(tokens, np.int32), tuple(images)


def assert_images_follow_their_marks(token_ids: np.ndarray, images: Images) -> None:
    marked = [int(token) - MARK for token in token_ids if token >= MARK]
    assert [int(placed.image.sha256, 16) for placed in images] == marked
    for number, placed in zip(marked, images):
        assert token_ids[placed.start - 1] == MARK + number
        assert placed.tokens == placed.image.width
        assert token_ids[placed.start : placed.stop].tolist() == [PAD] * placed.tokens


@settings(max_examples=40, deadline=None)
@given(SEEDS, trees())
def test_images_are_on_their_placeholders_in_each_request_and_each_training_sequence(seed, moves):
    draw = np.random.default_rng(seed)
    ids, images = with_images(draw, 0)
    t = Transcript(Prompt("p", ids, "", "digit_turns", images=images), 0)
    number = len(images)
    for turn, move in enumerate(["on", *moves]):
        if isinstance(move, int):
            t.append_env_tokens(*with_images(draw, 900))  # dropped, because no turn continues them
            t.return_to(move)
        heard, images = with_images(draw, number)
        number += len(images)
        if move == "cut" and turn:
            images = t.images + tuple(placed._replace(start=placed.start + len(t)) for placed in images)
            t.begin_context(np.concatenate([t.token_ids, heard]), images)
        elif move == "new" and turn:
            t.begin_context(heard, images)
        else:
            t.append_env_tokens(heard, images)
        assert_images_follow_their_marks(t.token_ids, t.images)
        t.append_policy_tokens(completion(draw, turn, t.token_ids))
    made = t.trajectory(TALK)
    check_trajectory(made, t.prompt, 500, "test")
    update = update_of([made, replace(made, sample_index=1)])
    assert len(update) == 2 * made.num_contexts
    for s in [*update, *to_score([made])]:
        assert_images_follow_their_marks(np.concatenate([s.prompt_ids, s.completion_ids]), s.images)


def test_images_among_the_tokens_of_the_policy_are_refused():
    t = played(1, ["on"])
    image = Image("0" * 64, 1, 1, b"")
    for start in (0, 3, len(t.completion_ids) + 3):  # of the prompt, of the policy, after the end
        with pytest.raises(RunError, match="images must be among the environment's tokens"):
            check_trajectory(replace(t, images=(PlacedImage(image, start, 1),)), t.prompt, 200, "test")


# -- losses over whole trajectories -----------------------------------------------------------------------------------


def test_losses_over_whole_sequences_get_all_contexts_in_one_micro_batch_and_one_sequence_id():
    assert [name for name, loss in LOSSES.items() if reads_whole_sequences(loss)] == [
        "gspo", "sequence importance", "sequence mask",
    ]  # fmt: skip
    assert reads_whole_sequences(LossSettings(type="examples/sapo.py:sapo"))
    trajectories = [played(n, ["new", "on", "new"], n % 2) for n in range(6)]
    update = update_of(trajectories)
    assert has_split_trajectory(update) and not has_split_trajectory([*update[::3]])
    alone = [replace(s, trajectory=-1) for s in update[:2]]
    layout = whole_layout(False, [*update, *alone], Budget(ranks=2, tokens=30))
    owners = [{(i if i >= len(update) else -1 - update[i].trajectory) for i in m} for r in layout.assignment for m in r]
    assert sum(map(len, owners)) == len(set().union(*owners)) == 6 + 2
    for micro_batches in layout.assignment:
        share = Share.of([*update, *alone], micro_batches)
        for members in share.micro_batches:
            sequences = share.sequences()
            rows = pack_rows(sequences, members)
            fields = make_micro_batch(
                rows, sequences, (0, 1), torch.device("cpu"), attention=None, with_fields=True
            ).fields
            lengths = fields.sequence_sums(torch.ones(len(fields.weights)))
            for number, length in zip(rows.sequence, lengths.tolist()):
                t = sequences[number].trajectory
                expected = trajectories[t].num_policy_tokens if t >= 0 else sequences[number].num_policy_tokens
                assert length == expected


def test_skipping_advantages_of_0_keeps_all_contexts_of_a_trajectory_that_is_trained():
    update = update_of([played(1, ["new"]), played(2, ["new"])], by_turn=True)
    update[0].advantage = np.zeros_like(update[0].advantage)
    update[2].advantage, update[3].advantage = 0.0, 0.0
    assert with_gradient(update) == update[:2]


def test_target_po_uses_the_summed_log_probs_of_a_trajectory():
    """Cut or not, the coefficients are those of the whole trajectories."""
    found = []
    for move in ("on", "cut"):
        trajectories = [played(4, [move, move], sample) for sample in range(2)]
        algorithm = GDPO(config("loss_fn.type=target_po"), None, None, None)
        algorithm.policy = SimpleNamespace(logprobs=lambda update: [s.sampler_logprobs * 0.9 for s in update])
        (update,) = updates_of(trajectories, np.array([1.0, -1.0]), algorithm.config)
        algorithm._apply_target_po(update)
        found.append({s.trajectory: s.advantage for s in update})
        assert len(update) == (2 if move == "on" else 6)
    assert found[0] == pytest.approx(found[1], rel=1e-6) and found[0][0] != 0


# -- scores and records -----------------------------------------------------------------------------------------------


def test_scores_of_sequences_are_put_back_where_the_trajectory_has_the_tokens():
    trajectories = [played(1, ["new", 0]), played(2, ["on"], 1), played(3, [0, 0])]
    sequences = to_score(trajectories)
    found = by_trajectory(sequences, [s.sampler_logprobs for s in sequences], trajectories)
    for number, t in enumerate(trajectories):
        np.testing.assert_array_equal(t.where_written(found[number]), t.where_written(t.logprobs))
    assert set(by_trajectory(sequences[:2], [s.sampler_logprobs for s in sequences[:2]], trajectories)) == {0}
    assert by_trajectory(sequences, [None] * len(sequences), trajectories) == {}


class Policy:
    """Log-probs and values that depend only on a token and the tokens before it."""

    def logprobs(self, sequences, reference=False, teacher=False):
        return [column[:, 0] for column in self.logprobs_and_values(sequences, 1.5 if reference or teacher else 1.0)]

    def logprobs_and_values(self, sequences, entropies=False):
        found = []
        for s in sequences:
            ids = np.concatenate([s.prompt_ids, s.completion_ids]).astype(np.float64)
            sums = np.cumsum(np.sin(ids + 1))[len(s.prompt_ids) - 1 : -1]
            columns = np.stack([-1 - np.cos(sums) ** 2 * (entropies or 1.0), np.sin(sums)], 1).astype(np.float32)
            columns[s.loss_mask == False] = np.nan  # noqa: E712 - the mask may be None
            found.append(columns)
        return found

    def load_teacher(self, folder):
        pass


@pytest.mark.parametrize("kind", ["ppo", "distillation", "kl_in_reward"])
def test_algorithms_that_score_tokens_do_not_depend_on_where_the_history_was_cut(kind, monkeypatch):
    monkeypatch.setattr("gdpo_nemo.training.distillation.teacher_folder", lambda section: None)
    made = []
    for move in ("on", "cut"):
        trajectories = [played(n, [move, move, "on"], n) for n in range(2)]
        extra = {"ppo": ["algorithm.type=ppo"], "distillation": [], "kl_in_reward": ["gdpo.kl_in_reward=0.1"]}[kind]
        chosen = config("rollout.save_trainer_logprobs=true", *extra)
        written = []
        log = SimpleNamespace(step=lambda row, groups, values: written.append(values), alert=print, note=print)  # noqa: B023
        algorithm = {"ppo": PPO, "distillation": OnPolicyDistillation}.get(kind, GDPO)(chosen, Policy(), None, log)
        prepared = algorithm.prepare(Rollout([Group(trajectories[0].prompt, trajectories)], 1, version=3))
        (update,) = algorithm.updates(prepared)
        assert len(update) == (2 if move == "on" else 6)
        algorithm.record({"step": 1}, prepared)
        (recorded,) = written
        tokens = {}
        for s in update:
            t = trajectories[s.trajectory]
            number = np.cumsum(t.loss_mask)[s.indices]
            columns = [s.token_advantages(), *([s.old_values, s.returns] if kind == "ppo" else [])]
            for k in np.flatnonzero(s.loss_mask):
                tokens[s.trajectory, number[k]] = [float(column[k]) for column in columns]
        scores = [t.where_written(values).tolist() for t, values in zip(trajectories, recorded.trainer_logprobs)]
        made.append((tokens, recorded.advantages.tolist(), scores))
    assert set(made[0][0]) == set(made[1][0])
    for key, values in made[0][0].items():
        assert made[1][0][key] == pytest.approx(values, rel=1e-5)
    assert made[0][1] == pytest.approx(made[1][1], rel=1e-5) and any(made[0][1])
    assert made[0][2] == made[1][2]


def test_recorded_contexts_are_read_back_for_replay_and_parity(tmp_path):
    trajectories = [played(1, ["new", "on", 0]), played(2, ["on"], 1)]
    other = replace(trajectories[1].prompt, token_ids=np.arange(4, dtype=np.int32))
    trajectories[1] = replace(trajectories[1], prompt=other, extra={}, routing=None)
    groups = [Group(trajectories[0].prompt, trajectories, position=0)]
    path = write_rollouts(tmp_path, 1, groups, SampleValues(np.array([0.5, -0.5])))
    records = read_rollouts(path)
    assert records[0]["turn_parents"] == [-1, -1, 1, 0] and "turn_parents" not in records[1]
    journal = Journal(tmp_path)
    journal.append(1, groups, position=1, published=0, total_updates=1)
    (entry,) = read_journal(tmp_path)
    (again,) = recorded_groups(entry, records, path.name)
    ours, theirs = update_of(again.trajectories), update_of(trajectories)
    assert trained_tokens(again.trajectories, ours) == trained_tokens(trajectories, theirs) and len(ours) == 3
    sequences, recorded = _read_record(path)
    for s, logprobs, expected in zip(sequences, recorded, theirs, strict=True):
        np.testing.assert_array_equal(s.completion_ids, expected.completion_ids)
        np.testing.assert_array_equal(s.where_written(logprobs), s.where_written(expected.sampler_logprobs))
        assert s.advantage == [0.5, -0.5][s.trajectory]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"turn_parents": (-1, 0)}, "turn_parents, which require turn_tokens of all turns"),
        ({"turn_parents": (0, -1, 1)}, "must be -1 or the index of an earlier turn"),
        ({"turn_parents": (-1, 1, 1)}, "must be -1 or the index of an earlier turn"),
        ({"loss_mask": None}, "turn 2 begins a new context without environment tokens"),
    ],
)
def test_trajectory_whose_contexts_are_inconsistent_is_refused(change, message):
    t = replace(played(1, ["new", "on"]), **change)
    if t.loss_mask is None:
        t.turn_tokens, t.spans = (1, 1, len(t.completion_ids) - 2), ()
        t.logprobs = np.full(len(t.completion_ids), -1, np.float32)
    with pytest.raises(RunError, match=message):
        check_trajectory(t, t.prompt, 200, "test")


def test_limit_of_the_context_length_applies_to_each_context():
    t = played(1, ["new"] * 6)
    longest = max(map(len, to_score([t])))
    assert len(t.completion_ids) > longest
    check_trajectory(t, t.prompt, longest, "test")
    with pytest.raises(RunError, match="more than policy.max_total_sequence_length"):
        check_trajectory(t, t.prompt, longest - 1, "test")


def test_context_cannot_begin_before_the_first_turn():
    t = Transcript(Prompt("p", np.arange(3, dtype=np.int32), "", "e"), 0)
    with pytest.raises(ValueError, match="context of the first turn is the prompt"):
        t.begin_context([1, 2])
    with pytest.raises(ValueError, match="turn 0 does not exist"):
        t.return_to(0)


def test_masked_trajectory_of_several_contexts_trains_none_of_them():
    broken = replace(played(1, ["new"]), outcome=Outcome.ENV_FAILED)
    update = update_of([broken, played(2, ["new"], 1)])
    assert [s.weight > 0 for s in update] == [False, False, True, True]
    assert all(s.advantage == 0.0 for s in update[:2])
