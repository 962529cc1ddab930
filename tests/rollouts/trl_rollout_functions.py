"""Rollout functions as users of TRL write them, for servers in the manner of OpenEnv; see test_trl_functions.py."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import httpx
from trl.experimental.openenv import generate_rollout_completions

if TYPE_CHECKING:
    from trl import GRPOTrainer


class Client:
    """An environment behind HTTP: reset and step, as OpenEnv's clients have them."""

    def __init__(self):
        self.url = os.environ["OPENENV_URL"]

    def reset(self):
        return httpx.post(f"{self.url}/reset", json={}).json()

    def step(self, **action):
        return httpx.post(f"{self.url}/step", json={"action": action}).json()


def as_columns(outputs, **more):
    return {key: [o[key] for o in outputs] for key in ("prompt_ids", "completion_ids", "logprobs")} | more


def one_turn(prompts: list, trainer: GRPOTrainer) -> dict:
    """Each completion is sent to the environment, which says what it is worth."""
    outputs = generate_rollout_completions(trainer, prompts)
    client = Client()
    client.reset()
    texts = [trainer.processing_class.decode(o["completion_ids"], skip_special_tokens=True) for o in outputs]
    steps = [client.step(message=text) for text in texts]
    echoes = [step["observation"]["echoed_message"] for step in steps]
    return as_columns(outputs, env_reward=[step["reward"] for step in steps], echo=echoes, source="echo")


def several_turns(prompts, trainer):
    """Three turns by token ids, what the environment says between them masked."""
    tokenizer = trainer.processing_class
    made = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": [], "env_reward": []}
    for prompt in prompts:
        client = Client()
        client.reset()
        start = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        before = tokenizer(start)["input_ids"]
        ids, logprobs, mask, total = [], [], [], 0.0
        for turn in range(3):
            _, (drawn,), (found,), _ = trainer.vllm_generation.generate([before + ids], images=None, num_generations=1)
            ids += drawn
            logprobs += [top[0] for top in found]
            mask += [1] * len(drawn)
            step = client.step(message=tokenizer.decode(drawn, skip_special_tokens=True))
            total += step["reward"]
            said = tokenizer(f" env:{turn} ")["input_ids"]
            ids += said
            logprobs += [0.0] * len(said)
            mask += [0] * len(said)
        for key, value in zip(made, (before, ids, logprobs, mask, total)):
            made[key].append(value)
    return made


def limited(prompts, trainer):
    return as_columns(generate_rollout_completions(trainer, prompts, generation_overrides={"max_tokens": 2}))


def shortened(prompts, trainer):
    """Cuts what was drawn to its first two tokens."""
    outputs = generate_rollout_completions(trainer, prompts)
    return as_columns([{key: o[key][:2] if key != "prompt_ids" else o[key] for key in o} for o in outputs])


def by_text(prompts, trainer):
    return as_columns(generate_rollout_completions(trainer, ["plain text" for _ in prompts]))


def restarts(prompts, trainer):
    """Two prompts that do not go on from each other, glued together."""
    first = generate_rollout_completions(trainer, prompts)
    second = generate_rollout_completions(trainer, prompts)
    return as_columns([{key: one[key] + other[key] for key in one} for one, other in zip(first, second)])


def invents(prompts, trainer):
    """Puts a newline before each answer and calls it the policy's."""
    line = trainer.processing_class("\n")["input_ids"]
    outputs = generate_rollout_completions(trainer, prompts)
    for o in outputs:
        o["completion_ids"] = line + o["completion_ids"]
        o["logprobs"] = [0.0] * len(line) + o["logprobs"]
    return as_columns(outputs)


def hotter(prompts, trainer):
    return as_columns(generate_rollout_completions(trainer, prompts, generation_overrides={"temperature": 1.7}))


def once_per_prompt(prompts, trainer):
    return as_columns(generate_rollout_completions(trainer, prompts[:1]))


def no_logprobs(prompts, trainer):
    found = as_columns(generate_rollout_completions(trainer, prompts))
    del found["logprobs"]
    return found


def asks_too_much(prompts, trainer):
    return trainer.model_wrapped.generate(prompts)


def short_mask(prompts, trainer):
    found = as_columns(generate_rollout_completions(trainer, prompts))
    return found | {"env_mask": [[1] for _ in prompts]}


def of_long_ago(prompts, args, processing_class):
    return {}


async def awaited(prompts, trainer):
    return {}


def reward_from_env(completions, env_reward, echo, source, **columns):
    assert set(source) == {"echo"}
    said = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    assert echo == said, (echo, said)
    return [float(value) for value in env_reward]
