"""Rollout functions of a user, by dotted path: one that keeps the contract, and some that do not."""

from __future__ import annotations

import os

from gdpo_nemo.environments.tasks.digit_turns import Sorting
from gdpo_nemo.generation.requests import SampleRequest
from gdpo_nemo.rollouts.context import Transcript


def best_of_hints(prompts, context):
    """Two turns: the answer, a fixed remark, the answer again. The environment verifies the whole text."""
    made = []
    for place, prompt in enumerate(prompts):
        talks = [Transcript(prompt, j) for j in range(context.samples)]
        for turn in range(2):
            seeds = [context.seed(place, talk.sample_index, turn) for talk in talks]
            batch = context.sample([SampleRequest(talk.token_ids, seed) for talk, seed in zip(talks, seeds)])
            for talk, completion in zip(talks, batch.completions):
                talk.append_policy_tokens(completion)
                if turn == 0:
                    talk.append_env_tokens(context.conversation.continuation(prompt.messages, "again", talk.ids[-1]))
        made.append([talk.trajectory(context.conversation, batch.version) for talk in talks])
    return made


def compacts(prompts, context):
    """digit_turns by an agent that asks a sub-agent about its first answer, and then answers in a shortened history.

    Samples of odd index return to the first turn instead, whose two answers are then one context.
    """
    talks = [Transcript(prompt, j) for prompt in prompts for j in range(context.samples)]
    games = [Sorting(always_two=True) for _ in talks]
    hints = []

    def sample(turn):
        requests = [
            SampleRequest(t.token_ids, context.seed(i // context.samples, t.sample_index, turn))
            for i, t in enumerate(talks)
        ]
        completions = context.sample(requests).completions
        for t, completion in zip(talks, completions):
            t.append_policy_tokens(completion)
        texts = [context.conversation.text(completion.token_ids) for completion in completions]
        return [{"content": text, "finish_reason": c.finish_reason} for text, c in zip(texts, completions)]

    for talk, game, message in zip(talks, games, sample(0)):
        game.reset(talk.prompt.fields)
        hint, rewards, _ = game.step(message)
        hints.append(context.conversation.continuation(None, hint, -1))
        talk.add_rewards(rewards)
        talk.begin_context(talk.ids)
    sample(1)
    for talk, hint in zip(talks, hints):
        if talk.sample_index % 2:
            talk.return_to(0)
            talk.append_env_tokens(hint)
        else:
            talk.begin_context([*talk.prompt.token_ids, *hint])
    for talk, game, message in zip(talks, games, sample(2)):
        talk.add_rewards(game.step(message)[1])
    made = [talk.trajectory(context.conversation) for talk in talks]
    return [made[i : i + context.samples] for i in range(0, len(made), context.samples)]


def forgets_a_sample(prompts, context):
    return [group[:-1] for group in best_of_hints(prompts, context)]


def drops_logprobs(prompts, context):
    made = best_of_hints(prompts, context)
    made[0][0].logprobs[made[0][0].loss_mask] = 0.5
    return made


def masks_everything(prompts, context):
    made = best_of_hints(prompts, context)
    made[0][1].loss_mask[:] = False
    return made


def raises(prompts, context):
    return 1 / 0


def leaves(prompts, context):
    os._exit(0)


def claims_other_spans(prompts, context):
    made = best_of_hints(prompts, context)
    made[0][1].spans = ((0, 1),)
    return made


def asks_for_nothing(prompts, context):
    return context.sample([])
