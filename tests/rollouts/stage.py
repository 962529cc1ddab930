"""One policy rank and a vLLM engine on a byte model with a chat template, for all tests here that need them."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from transformers import AutoTokenizer

from gdpo_nemo.cluster.fleet import EngineFleet
from gdpo_nemo.cluster.policy_group import PolicyGroup
from gdpo_nemo.cluster.weight_sync import WeightSync
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.records import Trajectory
from gdpo_nemo.generation.requests import Sampling
from gdpo_nemo.rollouts.batches import sample_seed
from gdpo_nemo.rollouts.context import RolloutContext
from gdpo_nemo.rollouts.turns import EpisodeJob, Limits, play_episode

REPOSITORY = Path(__file__).resolve().parents[2]
LONGEST = 5120
"""Tokens: the prompts of example_multi_step have 4,050."""
TEMPERATURE = 0.5
"""Low enough for a model of seconds to spell a call."""
SHORT = Sampling(TEMPERATURE, 1.0, -1, 24)


class Stage:
    """What the tests share."""

    def __init__(self, config, model):
        self.config = config
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.policy = PolicyGroup(config, str(model), total_updates=2)
        self.fleet = EngineFleet(config, str(model))
        self.policy.ready()
        self.fleet.ready()
        WeightSync(self.policy, self.fleet, None).publish(0)
        self.sampling = Sampling(TEMPERATURE, 1.0, -1, config.policy.generation.max_new_tokens)
        self.conversation = Conversation(self.tokenizer, chat=True)

    def context(self, pool, samples, max_turns, max_tokens, endpoint=None, sampling=None) -> RolloutContext:
        """What rollout functions get; seeds depend on place, sample and turn alone."""
        return RolloutContext(
            samples=samples,
            seed=lambda i, j, turn: sample_seed(7, i, j, turn),
            sample=lambda requests: self.fleet.generate(requests, self.sampling),
            conversation=self.conversation,
            pool=pool,
            max_turns=max_turns,
            max_tokens=max_tokens,
            max_new_tokens=10,
            max_sequence=LONGEST,
            sampling=sampling or self.sampling,
            endpoint=endpoint,
        )

    def play(self, prompt, pool, samples=2, max_turns=4, max_tokens=None) -> list[Trajectory]:
        """The trajectories of one prompt of an environment with turns, on real engines and workers."""
        limits = Limits(max_turns, max_tokens or 10 * max_turns, 10, LONGEST)

        async def sample(request):
            return (await self.fleet.sample(request, self.sampling))[0]

        async def step(asked):
            return (await asyncio.to_thread(pool.step, [asked]))[0]

        async def all_of_them():
            jobs = [
                EpisodeJob(self.sampling, partial(sample_seed, 7, 0, j), sample, step, version=0)
                for j in range(samples)
            ]
            return await asyncio.gather(
                *(play_episode(prompt, j, job, limits, self.conversation) for j, job in enumerate(jobs))
            )

        return asyncio.run_coroutine_threadsafe(all_of_them(), self.fleet.loop).result()


def stage_config(model: Path) -> Config:
    """The config of the stage: one rank, one engine, and updates that change nothing."""
    config = load_config(
        REPOSITORY / "configs" / "gdpo_turns_cpu.yaml",
        [
            f"policy.model_name={model}",
            f"policy.max_total_sequence_length={LONGEST}",
            f"policy.generation={{engines: 1, max_new_tokens: 10, temperature: {TEMPERATURE}}}",
            "policy.generation.vllm_cfg.max_num_seqs=16",
            "policy.megatron_cfg.optimizer.lr=0",  # an update changes nothing, so engines and policy stay alike
        ],
    )
    config.policy.megatron_cfg.data_parallel_size = 1
    return config
