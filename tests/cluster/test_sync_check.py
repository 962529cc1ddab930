"""Faults in an engine's weights that the sync check finds, and those that only checksums find, on a live engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from across_update import packed

from gdpo_nemo.algorithms import LossSettings
from gdpo_nemo.cluster.fleet import EngineFleet
from gdpo_nemo.cluster.policy_group import PolicyGroup
from gdpo_nemo.cluster.session import gather, session
from gdpo_nemo.cluster.weight_sync import LEAST, SyncCheck, WeightSync
from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.weights.manifest import pack, unpack
from gdpo_nemo.weights.transports.memory import MemoryReceiver

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
DOWN = "model.layers.1.mlp.down_proj.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
LEARNING_RATE = 2e-4
Weights = dict[str, torch.Tensor]


class Stage:
    """A policy that made one update after version 0, and an engine to which anything can be sent."""

    def __init__(self, config, model: Path):
        self.config = config
        self.policy = PolicyGroup(config, str(model), total_updates=10)
        self.fleet = EngineFleet(config, str(model))
        self.policy.ready()
        self.fleet.ready()
        prompts = [np.array([d + 2, 4, 9, 3, 7, 12], np.int32) for d in range(4)]
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        self.sync_check = SyncCheck.sampled(self.fleet, prompts, vocabulary, config.policy.max_total_sequence_length)
        self.sync_check.calibrate(self.policy, config)
        self.published = WeightSync(self.policy, self.fleet, self.sync_check).publish(0)
        self.old = self.weights()
        self._train()
        self.new = self.weights()

    def weights(self) -> Weights:
        manifest, buffer = packed(self.policy, 1)
        return {name: tensor.clone() for name, tensor in unpack(manifest, buffer)}

    def _train(self) -> None:
        rng = np.random.default_rng(0)
        drawn = [rng.integers(2, 12, 18).astype(np.int32) for _ in range(8)]
        self.policy.train(
            [TrainSequence(d[:6], d[6:], np.zeros(12, np.float32), advantage=1.0, weight=1 / 96) for d in drawn],
            LossSettings(),
        )

    def difference(self, weights: Weights) -> float:
        """Return the sync check's difference between the policy and an engine with ``weights``."""
        manifest, buffer = pack(weights.items(), 1)
        gather([self.fleet.clients[0].actor.update_weights.remote(manifest, MemoryReceiver(), buffer)], "updating", 120)
        limit = self.sync_check.limit
        self.sync_check.limit = np.inf
        try:
            return self.sync_check.verify(self.policy, self.fleet, 1)
        finally:
            self.sync_check.limit = limit


@pytest.fixture(scope="module")
def ray_session():
    with session(load_config(REPOSITORY / "configs" / "gdpo_tiny_cpu.yaml").cluster):
        yield


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def stage(request, ray_session, digit_model):
    overrides = [f"policy.model_name={digit_model}", f"policy.precision={request.param}"]
    overrides.append(f"policy.megatron_cfg.optimizer.lr={LEARNING_RATE}")
    config = load_config(REPOSITORY / "configs" / "gdpo_tiny_cpu.yaml", overrides)
    stage = Stage(config, digit_model)
    yield stage
    stage.fleet.close()
    stage.policy.close()


def _layers_swapped(new: Weights, old: Weights) -> Weights:
    def other(name: str) -> str:
        return (
            name.replace(".layers.0.", ".layers.x.")
            .replace(".layers.1.", ".layers.0.")
            .replace(".layers.x.", ".layers.1.")
        )

    return {name: new[other(name)] for name in new}


def _with(name: str, change: Callable[[torch.Tensor], torch.Tensor]):
    return lambda new, old: {**new, name: change(new[name])}


def _block_transposed(weight: torch.Tensor) -> torch.Tensor:
    size = min(weight.shape) // 2
    changed = weight.clone()
    changed[:size, :size] = weight[:size, :size].T
    return changed


def _a_little_off(weight: torch.Tensor) -> torch.Tensor:
    signs = torch.randint(0, 2, weight.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return weight + (LEARNING_RATE * signs).to(weight.dtype)


def _coarser(weights: Weights, kind: torch.dtype) -> Weights:
    return {name: tensor.to(kind).to(tensor.dtype) for name, tensor in weights.items()}


FAULTS = {
    "two layers swapped": (_layers_swapped, True, True),
    "a block of one tensor transposed": (_with(QUERY, _block_transposed), True, True),
    "one tensor missing, zeros in its place": (_with(DOWN, torch.zeros_like), True, True),
    "all rounded to 8 bits": (lambda new, old: _coarser(new, torch.float8_e4m3fn), True, True),
    "all stale by one update": (lambda new, old: old, True, True),
    "one tensor stale by one update": (lambda new, old: {**new, DOWN: old[DOWN]}, True, None),
    "one tensor off by the learning rate": (_with(DOWN, _a_little_off), True, False),
    "all rounded to bfloat16": (lambda new, old: _coarser(new, torch.bfloat16), True, False),
    "one tensor off in its last bit": (_with(DOWN, lambda t: torch.nextafter(t, torch.ones_like(t))), False, False),
}
"""By name: the fault, and whether it is larger than the rounding in float32 and in bfloat16; None: about as large."""


def test_equal_weights_pass_with_room_to_spare(stage):
    sync_check = stage.sync_check
    precision = stage.config.policy.precision
    assert (
        sync_check.limit == max(LEAST[precision], 4 * sync_check.floor) and len(sync_check.by_policy(stage.policy)) > 40
    )
    assert stage.published["parity/probe"] == pytest.approx(sync_check.floor, rel=0.5, abs=1e-6)
    assert sync_check.floor < {"float32": 1e-5, "bfloat16": 2e-2}[precision]
    assert stage.difference(stage.new) < sync_check.limit / 2


@pytest.mark.parametrize("name", FAULTS)
def test_sync_check_distinguishes_faults_from_rounding_and_checksums_find_the_others(stage, name):
    precision = stage.config.policy.precision
    (make, *seen) = FAULTS[name]
    wrong = make(stage.new, stage.old)
    larger = seen[precision == "bfloat16"]
    found = stage.difference(wrong)
    print(
        f"{precision:8s} {name:40s} {found:.2e} "
        f"(limit {stage.sync_check.limit:.1e}, equal weights {stage.sync_check.floor:.1e})"
    )
    assert larger is None or (found > stage.sync_check.limit) == larger, found
    if all(torch.equal(wrong[tensor], stage.new[tensor]) for tensor in wrong):
        assert (precision, name) == ("bfloat16", "all rounded to bfloat16")
        return
    manifest, _ = pack(stage.new.items(), 1)
    with pytest.raises(RunError, match="checksum of .* differs after transport"):
        dict(unpack(manifest, pack(wrong.items(), 1)[1]))


def test_fault_ends_the_run_with_a_sentence_that_contains_its_size(stage):
    stage.difference(_layers_swapped(stage.new, stage.old))
    with pytest.raises(
        RunError, match=r"engine 0 does not hold the weights of version 5: .* differ by 0\.\d+ .*at the start"
    ):
        stage.sync_check.verify(stage.policy, stage.fleet, 5)


def test_policy_and_engines_that_disagree_from_the_start_are_refused(stage, monkeypatch):
    monkeypatch.setattr(stage.config.policy.generation, "parity_limit", 1e-9)
    with pytest.raises(RunError, match="policy and engines disagree on the model before the first update"):
        stage.sync_check.calibrate(stage.policy, stage.config)
