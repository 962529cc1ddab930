"""What one step costs the driver: 8,192 trajectories of 4,000 tokens through its real code, on a real Ray session.

    uv run tests/benchmarks/driver.py [--check]

Advantages, training sequences, packing, the shares of the data-parallel ranks through the object store, their
log-probs back to the tokens, metrics. Lengths are log-normal; a quarter of the groups has tokens of an environment
between its turns, and two of ten groups give no signal. The ranks are actors that read their whole share and answer
with made-up log-probs of the right size: what is measured is the driver, not Megatron. With ``--check`` the status is 1
above 3 s of the driver's processor time a step (other programs may share the cores; wall time, the readers' included,
is shown beside it) or 4 GB of its resident memory (the high-water mark, trajectories and what it maps of the object
store included).
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gdpo_nemo.algorithms import LossSettings
from gdpo_nemo.cluster.fork_server import thread_environment
from gdpo_nemo.cluster.policy_group import PolicyGroup
from gdpo_nemo.cluster.session import gather, ray, session
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.packing import attention_cost
from gdpo_nemo.data.records import Group, Outcome, Prompt, TokenValues, Trajectory, UpdateResult
from gdpo_nemo.data.shares import FlatValues, Share
from gdpo_nemo.models.family_checks import describe
from gdpo_nemo.rollouts.credit import advantages_of, updates_of
from gdpo_nemo.rollouts.metrics import check_failures, rollout_metrics, update_metrics

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
SECONDS = 3.0
BYTES = 4e9
SHAPE_7B = dict(model_type="qwen2", hidden_size=3584, num_attention_heads=28, num_key_value_heads=4,
                intermediate_size=18944, num_hidden_layers=28, vocab_size=152064)  # fmt: skip


class Reader:
    """Stands for a rank: it reads all that it is sent, and answers at full size."""

    def __init__(self, data_rank: int):
        self.data_rank = data_rank

    def train(self, share: Share, settings: LossSettings) -> UpdateResult:
        """A result with the numbers of the real one's kind."""
        tokens = float(_read(share))
        sums = dict.fromkeys(("tokens", "entropy", "ratio", "parity_abs", "parity_kl"), tokens)
        return UpdateResult(0.1, 1.0, 1e-6, False, sums, dict.fromkeys(("ratio", "parity_abs", "parity_prob"), 1.0))

    def logprobs(self, share: Share, reference: bool, temperature: float | None) -> FlatValues:
        """-1 for every token that the policy wrote."""
        _read(share)
        offsets = [np.arange(n) if s.loss_mask is None else np.flatnonzero(s.loss_mask)
                   for s, n in zip(share.sequences(), share.completion_lengths.tolist())]  # fmt: skip
        owner = np.repeat(np.arange(len(offsets)), [len(o) for o in offsets])
        found = TokenValues(owner, np.concatenate(offsets), np.full(len(owner), -1.0, np.float32))
        return share.flat(found, complete=True)


def _read(share: Share) -> int:
    """Touch every byte of the arrays; returns the completion tokens."""
    for values in (share.prompt_ids, share.completion_ids, *share.columns.values()):
        np.max(values)
    return len(share.completion_ids)


class Driver(PolicyGroup):
    """The policy group as it is, before readers instead of ranks."""

    def __init__(self, config: Config):
        self.config = config.policy
        self.layout = config.policy.megatron_cfg
        self.timeout_s = 600.0
        self._quadratic = attention_cost(describe(SHAPE_7B))
        self._sharing = None
        ranks = self.layout.data_parallel_size or 1
        actor = ray.remote(Reader).options(num_cpus=0, runtime_env={"env_vars": thread_environment(1)})
        self.ranks = [actor.remote(rank) for rank in range(ranks)]
        self._data_ranks = list(range(ranks))
        gather([rank.__ray_ready__.remote() for rank in self.ranks], "starting readers", 300.0)


def make_groups(prompts: int, samples: int, tokens: int) -> list[Group]:
    """Groups of trajectories of ``tokens`` tokens in the mean, three rewards each."""
    draw = np.random.default_rng(0)
    lengths = draw.lognormal(0.0, 0.8, (prompts, samples))
    lengths = np.clip(lengths * tokens / lengths.mean(), 16, 8 * tokens).astype(int)
    groups = []
    for p in range(prompts):
        prompt = Prompt(
            f"row-{p}", draw.integers(0, 150_000, 256, dtype=np.int32), "q" * 1000, "math", {"answer": str(p)}
        )
        dead = p % 5 == 0
        made = []
        for s, length in enumerate(lengths[p].tolist()):
            mask = (np.arange(length) // 256) % 4 != 3 if p % 4 == 1 else None
            rewards = {"correct": float(0 if dead else draw.integers(2)), "format": 1.0, "brief": None if dead else 0.5}
            made.append(
                Trajectory(
                    prompt, s, draw.integers(0, 150_000, length, dtype=np.int32), -draw.random(length, np.float32), 0,
                    "x" * (4 * length), "stop", rewards,
                    Outcome.ENV_FAILED if draw.random() < 0.01 else Outcome.OK, loss_mask=mask,
                )
            )  # fmt: skip
        groups.append(Group(prompt, made))
    return groups


class Stages:
    """Wall and processor seconds of the driver by stage."""

    def __init__(self) -> None:
        self.spent: dict[str, tuple[float, float]] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begun = time.perf_counter(), time.process_time()
        yield
        self.spent[name] = time.perf_counter() - begun[0], time.process_time() - begun[1]

    @property
    def wall(self) -> float:
        return sum(wall for wall, _ in self.spent.values())

    @property
    def processor(self) -> float:
        return sum(processor for _, processor in self.spent.values())


def step(driver: Driver, groups: list[Group], config: Config) -> Stages:
    """The driver's part of a step: as ``GDPO.prepare`` with a reference model, ``Trainer.train`` and the metrics."""
    stages = Stages()
    trajectories = [t for group in groups for t in group.trajectories]
    with stages("check, advantages"):
        check_failures(trajectories, 0.2)
        advantages = advantages_of(groups, config)
    with stages("training sequences"):
        updates = updates_of(trajectories, advantages.values.numpy(), config, 0)
    with stages("log-probs of the reference"):
        for update in updates:
            for sequence, values in zip(update, driver.logprobs(update, reference=True), strict=True):
                sequence.reference_logprobs = values
    with stages("update"):
        results = [driver.train(update, config.loss_fn) for update in updates]
    with stages("metrics"):
        row = update_metrics(results, True) | advantages.diagnostics.metrics() | rollout_metrics(trajectories, 0)
        assert row["rollout/tokens"] == sum(t.num_policy_tokens for t in trajectories)
    return stages


def main() -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--ranks", type=int, default=4, help="data-parallel ranks")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="exit with 1 above the limits")
    arguments = parser.parse_args()
    config = load_config(DEMO, [
        "gdpo.rewards={correct: 1.0, format: 1.0, brief: 1.0}",
        f"gdpo.num_generations_per_prompt={arguments.samples}",
        f"gdpo.num_prompts_per_step={arguments.prompts}",
        "loss_fn.reference_policy_kl_penalty=0.01",
        "policy.micro_batch_tokens=32768",
        f"policy.megatron_cfg.data_parallel_size={arguments.ranks}",
    ])  # fmt: skip
    groups = make_groups(arguments.prompts, arguments.samples, arguments.tokens)
    tokens = sum(len(t.completion_ids) for group in groups for t in group.trajectories)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with session(config.cluster):
        driver = Driver(config)
        runs = [step(driver, groups, config) for _ in range(arguments.steps)]
        driver.close()
    best = min(runs, key=lambda stages: stages.wall)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{arguments.prompts * arguments.samples} trajectories, {tokens / 1e6:.1f} M tokens, {arguments.ranks} shares"
    )
    print(f"{'':30s} {'wall s':>8s} {'CPU s':>8s}")
    for name, spent in (*best.spent.items(), ("a step, best of " + str(arguments.steps), (best.wall, best.processor))):
        print(f"{name:30s} {spent[0]:8.2f} {spent[1]:8.2f}")
    print(f"every step, wall s: {', '.join(f'{stages.wall:.2f}' for stages in runs)}")
    print(f"resident memory: {peak / 1e9:.2f} GB, of which {held / 1e9:.2f} before the first step")
    missed = best.processor > SECONDS or peak > BYTES
    return int(arguments.check and missed)


if __name__ == "__main__":
    sys.exit(main())
