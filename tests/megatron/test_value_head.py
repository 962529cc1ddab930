"""A policy with a value head: its values, updates and checkpoints are those of one process of transformers at every
layout, and what it exports is the policy alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import layouts
import numpy as np
import pytest
import tiny_models
import torch
import value_cases
from hf_reference import _adam, relative_error
from transformers import AutoModelForCausalLM

from gdpo_nemo.algorithms.ppo import ActorCriticSettings
from gdpo_nemo.data.packing import TrainSequence

pytestmark = pytest.mark.slow

SETTINGS = ActorCriticSettings(vf_coef=0.7, cliprange_value=0.2)


def make_values(count: int = 9, groups: bool = False) -> list[TrainSequence]:
    """Sequences with advantages, values and returns by token; some tokens are no action, one sequence does not count.
    ``groups``: three share each prompt."""
    batch = tiny_models.make_batch(count, seed=5)
    draw = np.random.default_rng(8)
    for place, s in enumerate(batch):
        n = len(s.completion_ids)
        s.advantage = draw.normal(0.2, 1, n).astype(np.float32)
        s.old_values = draw.normal(0.3, 0.5, n).astype(np.float32)
        s.returns = draw.normal(0.5, 1, n).astype(np.float32)
        if groups:
            s.prompt_ids = batch[place - place % 3].prompt_ids
        if place % 4 == 1 and n > 2:
            s.loss_mask = np.arange(n) % 3 != 1
            s.old_values[~s.loss_mask] = np.nan
    batch[3].weight = 0.0
    return batch


class Reference:
    """The same policy by transformers and torch."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.head = torch.nn.Linear(self.model.config.hidden_size, 1)
        with torch.no_grad():
            self.head.weight.copy_(torch.linspace(-0.4, 0.5, self.head.in_features)[None])
            self.head.bias.fill_(0.3)
        options = layouts.optimizer()
        self.adam = _adam(self.model, options)
        for group in _adam(self.head, options).param_groups:
            self.adam.add_param_group({**group, "lr": value_cases.HEAD_LR * options.lr})

    def columns(self, s: TrainSequence) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-prob, entropy and value of every action of a sequence."""
        ids = torch.from_numpy(np.concatenate((s.prompt_ids, s.completion_ids)).astype(np.int64))
        out = self.model(ids[None], output_hidden_states=True)
        before = slice(len(s.prompt_ids) - 1, len(ids) - 1)
        every = out.logits[0, before].log_softmax(-1)
        logprobs = every.gather(-1, ids[len(s.prompt_ids) :, None])[:, 0]
        values = self.head(out.hidden_states[-1][0, before])[:, 0]
        keep = torch.ones(len(logprobs), dtype=torch.bool) if s.loss_mask is None else torch.from_numpy(s.loss_mask)
        return logprobs[keep], -(every.exp() * every).sum(-1)[keep], values[keep]

    def update(self, batch: list[TrainSequence], settings: ActorCriticSettings) -> tuple[float, float, float, float]:
        self.adam.zero_grad()
        loss = torch.zeros(())
        losses, said = [], []
        for s in batch:
            if not s.weight:
                continue
            logprobs, _, values = self.columns(s)
            advantages, old, returns = (
                torch.from_numpy(s.where_written(part).copy()) for part in (s.advantage, s.old_values, s.returns)
            )
            near = old + (values - old).clamp(-settings.cliprange_value, settings.cliprange_value)
            each = 0.5 * torch.stack(((values - returns) ** 2, (near - returns) ** 2)).amax(0)
            loss = loss - s.weight * (advantages * (logprobs - logprobs.detach()).exp()).sum()
            loss = loss + settings.vf_coef * s.weight * each.sum()
            losses.append(each.detach())
            said.append(values.detach())
        loss.backward()
        parameters = [*self.model.parameters(), *self.head.parameters()]
        norm = torch.nn.utils.clip_grad_norm_(parameters, layouts.optimizer().clip_grad)
        self.adam.step()
        return loss.item(), norm.item(), torch.cat(losses).mean().item(), torch.cat(said).mean().item()


@dataclass
class Expected:
    before: list[np.ndarray]
    steps: np.ndarray
    weights: dict[str, torch.Tensor]
    head: np.ndarray


def expected(folder, batch) -> Expected:
    model = Reference(folder)
    with torch.no_grad():
        before = [torch.stack(model.columns(s), -1).numpy() for s in batch]
    steps = np.array([model.update(batch, SETTINGS) for _ in range(2)])
    head = torch.cat((model.head.weight.detach()[0], model.head.bias.detach()))
    return Expected(before, steps, model.model.state_dict(), head.numpy())


def said(ranks, batch) -> list[np.ndarray]:
    """What the ranks found for the actions of every sequence, [actions, 3]."""
    found = [np.full((len(s.completion_ids), 3), np.nan, np.float32) for s in batch]
    for places, values in (rank.before for rank in ranks if rank.before is not None):
        for sequence, offset, of_one in zip(*vars(values).values()):
            found[places[sequence]][offset] = of_one
    return [s.where_written(of_one) for s, of_one in zip(batch, found)]


def tied(weights: dict[str, torch.Tensor]) -> set[str]:
    """The output layer's name where it is the embedding."""
    head, embedding = (weights[name] for name in ("lm_head.weight", "model.embed_tokens.weight"))
    return {"lm_head.weight"} if head.data_ptr() == embedding.data_ptr() else set()


CASES = [
    ("TP1", "qwen2"), ("TP2", "qwen2"), ("TP2+SP", "qwen2-tied"), ("PP2", "qwen2-tied"), ("PP2xVPP2", "qwen2"),
    ("CP2", "qwen2"), ("DP2+OVERLAP", "qwen3"), ("PP2xDP2+DIST", "qwen2"), ("DP2xEP2", "qwen3-moe"),
    ("TP2xCP2+SP", "qwen2"),
]  # fmt: skip


@pytest.mark.parametrize("layout, model", CASES)
def test_values_and_updates_are_those_of_one_process_at_every_layout(on_ranks, model_folder, tmp_path, layout, model):
    batch = make_values()
    ranks = on_ranks(layout, value_cases.of_values, model_folder(model), batch, SETTINGS, tmp_path)
    theirs = expected(model_folder(model), batch)
    for ours, reference in zip(said(ranks, batch), theirs.before, strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-5, atol=2e-6)
    for rank in ranks:
        assert relative_error(rank.steps, theirs.steps) < 1e-5
        assert (rank.resumed == rank.steps[1]).all()
        if rank.head is not None:
            np.testing.assert_allclose(rank.head, theirs.head, rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(rank.head_of_resumed, rank.head)
        if rank.alone is not None:
            np.testing.assert_array_equal(rank.alone.values, rank.before[1].values[:, 0])
    assert any(rank.head is not None for rank in ranks)
    weights = ranks[0].weights
    # transformers keeps the experts of a layer in one tensor.
    named = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    assert named.keys() == {name for name in theirs.weights if ".experts." not in name} - tied(theirs.weights)
    for name, tensor in named.items():
        torch.testing.assert_close(torch.from_numpy(tensor), theirs.weights[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", [dict(sharing=True), dict(budget=None)], ids=["shared prompts", "each alone"])
def test_values_do_not_depend_on_how_sequences_are_packed(on_ranks, model_folder, tmp_path, how):
    batch = make_values(groups=True)
    (packed,) = on_ranks("TP1", value_cases.of_values, model_folder("qwen2"), batch, SETTINGS, tmp_path / "a")
    case = partial(value_cases.of_values, **how)
    (other,) = on_ranks("TP1", case, model_folder("qwen2"), batch, SETTINGS, tmp_path / "b")
    assert relative_error(other.steps, packed.steps) < 1e-6
    for one, two in zip(said([packed], batch), said([other], batch)):
        np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-6)


def test_values_are_computed_in_float32_in_a_model_of_bfloat16(on_ranks, model_folder, tmp_path):
    batch = make_values()
    case = partial(value_cases.of_values, precision="bfloat16")
    (found,) = on_ranks("TP1", case, model_folder("qwen2"), batch, SETTINGS, tmp_path)
    values = np.concatenate([part[:, 2] for part in said([found], batch)])
    in_bfloat16 = torch.from_numpy(values).bfloat16().float().numpy()
    assert np.isfinite(found.steps).all() and (values != in_bfloat16).mean() > 0.9
    exact = np.concatenate([part[:, 2] for part in expected(model_folder("qwen2"), batch).before])
    assert abs(values - exact).mean() < 0.02 and (found.resumed == found.steps[1]).all()


def test_the_value_loss_reaches_the_trunk_and_the_head(on_ranks, model_folder, tmp_path):
    """Or the layouts would agree about a head that nothing trains."""
    batch = make_values()
    (with_loss,) = on_ranks("TP1", value_cases.of_values, model_folder("qwen2"), batch, SETTINGS, tmp_path / "a")
    none = replace(SETTINGS, vf_coef=0.0)
    (without,) = on_ranks("TP1", value_cases.of_values, model_folder("qwen2"), batch, none, tmp_path / "b")
    assert abs(with_loss.head - without.head).max() > 1e-3
    name = "model.layers.0.self_attn.q_proj.weight"
    assert abs(with_loss.weights[name] - without.weights[name]).max() > 1e-4
