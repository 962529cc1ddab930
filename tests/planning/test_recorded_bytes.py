"""The bytes of samples that plan and dry run announce are those that a run writes."""

from __future__ import annotations

import numpy as np
import pytest

from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.model_checks import resolve
from gdpo_nemo.data.records import Group, Prompt, Trajectory
from gdpo_nemo.observe.sample_values import SampleValues
from gdpo_nemo.observe.samples import write_rollouts
from gdpo_nemo.planning.report import dry_run_lines
from gdpo_nemo.planning.shape import recorded_bytes

WORDS = "the of and to sum is four then add each number we get that so answer equals because first second".split()


def batch(prompts: int, samples: int, tokens: int) -> list[Group]:
    """Completions of words with the ids that a vocabulary of 150,000 might give them."""
    random = np.random.default_rng(0)
    ids = random.integers(0, 150_000, 400).astype(np.int32)

    def sample(prompt: Prompt, number: int) -> Trajectory:
        chosen = np.minimum(random.zipf(1.3, tokens) - 1, 399)
        text = " ".join(WORDS[place % len(WORDS)] + str(place // len(WORDS)) for place in chosen.tolist())
        logprobs = -random.exponential(0.5, tokens).astype(np.float32)
        return Trajectory(prompt, number, ids[chosen], logprobs, 3, text, "stop", {"a": float(random.random() < 0.5)})

    made = [
        Prompt(f"p{n}", random.integers(0, 150_000, 60).astype(np.int32), f"What is {n}?", "e") for n in range(prompts)
    ]
    return [Group(prompt, [sample(prompt, number) for number in range(samples)]) for prompt in made]


@pytest.mark.parametrize("tokens", [24, 200, 1500])
@pytest.mark.parametrize("entropies", [False, True])
def test_a_steps_file_has_the_announced_bytes_within_a_third(tmp_path, tokens, entropies):
    groups = batch(16, 8, tokens)
    scored = [t.logprobs * np.float32(1.001) for group in groups for t in group.trajectories] if entropies else None
    terms = {"a": np.linspace(-1, 1, 128)}
    path = write_rollouts(tmp_path, 1, groups, SampleValues(terms["a"], scored, terms, entropies=scored))
    config = load_config(None, [f"rollout.save_entropies={str(entropies).lower()}"])
    assert (config.gdpo.num_prompts_per_step, config.gdpo.num_generations_per_prompt) == (16, 8)
    assert recorded_bytes(resolve(config), tokens) == pytest.approx(path.stat().st_size, rel=0.33)


def test_a_steps_file_with_the_samplers_experts_has_the_announced_bytes_within_a_third(tmp_path):
    """Qwen3-30B-A3B has 48 layers, in which 8 of 128 experts process a token."""
    groups = batch(2, 2, 400)
    random = np.random.default_rng(1)
    for t in (t for group in groups for t in group.trajectories):
        t.routing = random.integers(0, 128, (60 + 400, 48 * 8)).astype(np.int8)
    path = write_rollouts(tmp_path, 1, groups)
    sizes = ["gdpo.num_prompts_per_step=2", "gdpo.num_generations_per_prompt=2"]
    model = ["policy.model_name=Qwen/Qwen3-30B-A3B", "policy.model_factory=null"]
    announced = recorded_bytes(resolve(load_config(None, [*sizes, *model, "policy.router_replay=sampler"])), 400)
    assert announced == pytest.approx(path.stat().st_size, rel=0.33)
    assert announced > 20 * recorded_bytes(resolve(load_config(None, [*sizes, *model])), 400)


def test_dry_run_reports_the_number_of_written_samples_and_their_largest_size():
    def said(*overrides: str) -> str | None:
        limits = [
            "gdpo.max_num_steps=10",
            "policy.generation.max_new_tokens=100",
            "policy.max_total_sequence_length=150",
        ]
        return dict(dry_run_lines(resolve(load_config(None, [*limits, *overrides])))).get("samples")

    assert said() == "128 written per step, at most 99.2 kB per step, 992 kB for 10 steps"
    assert said("rollout.save_groups=2").startswith("16 written per step, at most 18.5 kB per step")
    # Of two turns no more than the sequence has room for.
    assert f"{(7000 + 128 * (20 + 150 * 7)) / 1e3:.3g} kB per step" in said("rollout.turns.max_turns=2")
    assert said("rollout.save_samples=false") is None
