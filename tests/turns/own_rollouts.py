"""Rollout functions of a user, by dotted path: one that keeps the contract, and some that do not."""

from __future__ import annotations

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


def claims_other_spans(prompts, context):
    made = best_of_hints(prompts, context)
    made[0][1].spans = ((0, 1),)
    return made


def asks_for_nothing(prompts, context):
    return context.sample([])
