"""The sync check on bfloat16 with large logits, without Ray and engines: a small model computed in two ways, as a
policy of one rank and an engine of two do it, and faults in the engine's weights."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gdpo_nemo.cluster.weight_sync import MARGIN, SyncCheck, _end_of
from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.images import Image, PlacedImage
from gdpo_nemo.utils.errors import RunError

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
VOCABULARY = 2048
LAYERS = 4
OLD_LIMIT = 0.1
"""Of the largest difference of a token; it ended sound runs."""
Weights = dict[str, torch.Tensor]


class OfTwoRanks(torch.nn.Linear):
    """A row-parallel layer: each rank rounds its half of the sum to bfloat16 before they are added."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = self.in_features // 2
        return x[..., :half] @ self.weight[:, :half].T + x[..., half:] @ self.weight[:, half:].T


class Model:
    """Policy and fleet in one, as far as the sync check knows them."""

    def __init__(self, weights: Weights, split: bool):
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.1,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(config).to(torch.bfloat16)
        if split:
            for module in self.model.modules():
                if type(module) is torch.nn.Linear:
                    module.__class__ = OfTwoRanks
        if weights:
            self.load(weights)

    def load(self, weights: Weights) -> None:
        self.model.load_state_dict(weights)

    def weights(self) -> Weights:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    @torch.no_grad()
    def logits(self, ids: np.ndarray) -> torch.Tensor:
        return self.model(torch.tensor(ids[None], dtype=torch.int64)).logits[0].float()

    def _scored(self, ids: np.ndarray) -> np.ndarray:
        logprobs = self.logits(ids).log_softmax(-1)
        return logprobs[:-1].gather(1, torch.tensor(ids[1:, None], dtype=torch.int64))[:, 0].numpy()

    def score(self, sequences, images):
        """As a fleet: two engines with the same weights."""
        found = [self._scored(ids) for ids in sequences]
        return {0: found, 1: found}

    def logprobs(self, sequences, temperature):
        """As a policy."""
        assert temperature == 1.0
        whole = [(np.concatenate([s.prompt_ids, s.completion_ids]), len(s.completion_ids)) for s in sequences]
        return [self._scored(ids)[-length:] for ids, length in whole]

    def generate(self, requests, sampling, engine):
        """As a fleet."""
        completions = []
        for request in requests:
            ids = request.prompt_ids
            draw = torch.Generator().manual_seed(request.seed)
            for _ in range(sampling.max_new_tokens):
                following = torch.multinomial(self.logits(ids)[-1].softmax(-1), 1, generator=draw)
                ids = np.append(ids, following.numpy().astype(np.int32))
            completions.append(SimpleNamespace(token_ids=ids[len(request.prompt_ids) :], routing=None))
        return SimpleNamespace(completions=completions)


@pytest.fixture(scope="module")
def start() -> Weights:
    """Logits up to 32, where bfloat16 has steps of an eighth."""
    weights = Model({}, split=False).weights()
    draw = torch.Generator().manual_seed(1)
    head = torch.randn(weights["lm_head.weight"].shape, generator=draw) * 0.7
    return weights | {"lm_head.weight": head.to(torch.bfloat16)}


@pytest.fixture(scope="module")
def config():
    return load_config(REPOSITORY / "configs" / "gdpo_tiny_cpu.yaml", ["policy.precision=bfloat16"])


@pytest.fixture
def sides(start, config):
    """(policy, engines, sync check) after the start."""
    policy = Model(start, split=False)
    engines = Model(start, split=True)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, 40).astype(np.int32) for _ in range(4)]
    sync_check = SyncCheck.sampled(engines, prompts, VOCABULARY, 128)
    sync_check.calibrate(policy, config)
    return policy, engines, sync_check


@pytest.mark.parametrize(
    "length,most,images,tokens,starts",
    [
        (300, 200, [], 128, []),
        (300, 200, [(10, 20), (250, 20)], 128, [78]),
        (300, 200, [(150, 20), (170, 20)], 130, [0]),  # more tokens for the last image
        (300, 120, [(150, 20), (170, 20)], 110, []),  # it does not fit
        (20, 200, [(2, 8)], 20, [2]),
        (20, 9, [(2, 8), (10, 8)], 2, []),
        (20, 9, [(0, 20)], 1, []),  # nothing follows the image
    ],
)
def test_a_shortened_prompt_keeps_its_last_image_and_divides_none(length, most, images, tokens, starts):
    placed = tuple(PlacedImage(Image("a" * 64, 8, 8, b""), *image) for image in images)
    prompt = np.arange(length, dtype=np.int32)
    found, moved = _end_of(prompt, placed, most)
    assert found.tolist() == prompt[-tokens:].tolist() and [image.start for image in moved] == starts


def trained(weights: Weights, seed: int, size: float = 2e-3) -> Weights:
    """The weights after some updates: every matrix has moved by ``size`` of its own."""
    draw = torch.Generator().manual_seed(seed)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        change = torch.randn(tensor.shape, generator=draw) * size * tensor.float().abs().mean()
        return (tensor.float() + change).to(tensor.dtype)

    return {name: moved(tensor) for name, tensor in weights.items()}


def test_bfloat16_with_large_logits_passes_the_check_after_every_update(sides, start):
    (policy, engines, sync_check) = sides
    whole = [np.concatenate([s.prompt_ids, s.completion_ids]) for s in sync_check.sequences]
    assert float(policy.logits(whole[0]).abs().max()) > 24
    apart = np.abs(sync_check.by_policy(policy) - sync_check.by_engines(engines)[0])
    assert apart.max() > OLD_LIMIT and sync_check.limit == MARGIN * sync_check.floor
    for version in range(8):
        now = trained(start, version, size=2e-3 * version)
        policy.load(now)
        engines.load(now)
        assert sync_check.verify(policy, engines, version) < sync_check.limit / 2


def _layers_swapped(now: Weights) -> Weights:
    def other(name: str) -> str:
        return name.replace(".1.", ".x.").replace(".2.", ".1.").replace(".x.", ".2.")

    return {name: now[other(name)] for name in now}


def _heads_swapped(now: Weights) -> Weights:
    """The rows of two heads of every layer's queries: an export that takes Megatron's fused rows apart wrongly."""
    size = 128 // 4
    order = torch.tensor([1, 0, 2, 3])

    def swapped(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(4, size, -1)[order].reshape(tensor.shape)

    return {name: swapped(tensor) if "q_proj" in name else tensor for name, tensor in now.items()}


def _gates_and_ups_swapped(now: Weights) -> Weights:
    def other(name: str) -> str:
        return name.replace("gate_", "x_").replace("up_", "gate_").replace("x_", "up_")

    return {name: now[other(name)] for name in now}


def _rows_shifted(now: Weights) -> Weights:
    """The embedding by one row: a vocabulary that was padded at the wrong end."""
    return now | {"model.embed_tokens.weight": now["model.embed_tokens.weight"].roll(1, 0)}


FAULTS = {
    "two layers swapped": _layers_swapped,
    "rows of two heads swapped": _heads_swapped,
    "gate and up swapped": _gates_and_ups_swapped,
    "embedding shifted by a row": _rows_shifted,
    "one matrix missing": lambda now: now | {"model.layers.1.mlp.down_proj.weight": torch.zeros(128, 256)},
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_engines_weights_ends_the_run_despite_the_noise(sides, start, name):
    (policy, engines, sync_check) = sides
    now = trained(start, 1)
    policy.load(now)
    engines.load(FAULTS[name](copy.copy(now)))
    with pytest.raises(RunError, match="engine 0 does not hold the weights of version 9: its log-probs differ by 0"):
        sync_check.verify(policy, engines, 9)


def with_adapters(weights: Weights, reach: float) -> Weights:
    """With B A added to every linear layer, whose entries are ``reach`` on average."""
    draw = torch.Generator().manual_seed(3)

    def merged(tensor: torch.Tensor) -> torch.Tensor:
        a = torch.randn(8, tensor.shape[1], generator=draw)
        b = torch.randn(tensor.shape[0], 8, generator=draw)
        return (tensor.float() + reach * (b @ a) / 8**0.5).to(tensor.dtype)

    return {name: merged(t) if ".layers." in name and t.dim() == 2 else t for name, t in weights.items()}


def test_adapters_that_did_not_arrive_and_old_weights_end_the_run_once_they_matter(sides, start):
    """What changes log-probs by less than the rounding does is left to names and checksums."""
    (policy, engines, sync_check) = sides
    for now in (with_adapters(start, 0.03), trained(start, 5, size=0.3)):
        policy.load(now)
        engines.load(start)
        with pytest.raises(RunError, match="engine 0 does not hold the weights of version 2"):
            sync_check.verify(policy, engines, 2)
        engines.load(now)
        # Processors with and without bfloat16 units round differently; half of the limit was too little on one.
        assert sync_check.verify(policy, engines, 2) < sync_check.limit * 2 / 3
    policy.load(with_adapters(start, 1e-5))
    engines.load(start)
    assert sync_check.verify(policy, engines, 3) < sync_check.limit


def test_models_that_differ_from_the_start_are_refused_and_a_given_limit_holds(start, config, monkeypatch):
    policy = Model(start, split=False)
    engines = Model(_layers_swapped(start), split=True)
    prompts = [np.arange(20, dtype=np.int32) + 50 * number for number in range(4)]
    sync_check = SyncCheck.sampled(engines, prompts, VOCABULARY, 128)
    with pytest.raises(RunError, match=r"policy and engines disagree .* 0.25 is allowed in bfloat16"):
        sync_check.calibrate(policy, config)
    given = copy.deepcopy(config)
    given.policy.generation.parity_limit = 5.0
    sync_check.calibrate(policy, given)
    assert sync_check.limit == 5.0
