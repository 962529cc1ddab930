"""A reward model's scores and updates are those of transformers' classifier at every layout; it is written as one."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import layouts
import numpy as np
import pytest
import rank_cases
import torch
from hf_reference import _adam, relative_error
from test_preference_updates import make_pairs, told
from tiny_models import hf_config
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from gdpo_nemo.megatron.classifier import write_classifier
from gdpo_nemo.training.supervised import _scored

CENTERING = 0.1


def classifier(folder):
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)


def scores(model, batch):
    """Of one text at a time, so that nothing is padded."""
    texts = [np.concatenate((s.prompt_ids, s.completion_ids)) for s in batch]
    return torch.cat([model(torch.from_numpy(text[None].astype(np.int64))).logits[:, 0] for text in texts])


def updates(folder, batch, count=2):
    """Loss and gradient norm of updates by torch, and the scores behind them."""
    model = classifier(folder)
    adam = _adam(model, layouts.optimizer())
    rows = []
    for _ in range(count):
        adam.zero_grad()
        found = scores(model, batch)
        won = {s.pair: score for s, score in zip(batch, found) if s.pair > 0}
        lost = {-s.pair: score for s, score in zip(batch, found) if s.pair < 0}
        a, b = (torch.stack([part[n] for n in sorted(won)]) for part in (won, lost))
        loss = (CENTERING * (a + b) ** 2 - logsigmoid(a - b)).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), layouts.optimizer().clip_grad)
        adam.step()
        rows.append((loss.item(), norm.item()))
    return np.array(rows), scores(model, batch).detach()


@pytest.fixture(scope="module")
def trained(on_ranks, model_folder, tmp_path_factory):
    """``trained(layout, model)``: what the ranks saw, and the folder that they wrote."""

    def run(layout, model="qwen2", sharing=False):
        out = tmp_path_factory.mktemp("scores")
        batch = [replace(s, reference_logprobs=None) for s in make_pairs()]
        update = told("reward_model", batch, center_rewards_coefficient=CENTERING)
        case = partial(rank_cases.of_scores, sharing=sharing)
        return on_ranks(layout, case, model_folder(model), _scored(batch), update, out), out

    return run


CASES = [
    ("TP1", "qwen2"), ("TP2", "qwen2"), ("TP2+SP", "qwen2"), ("PP2", "qwen2-tied"), ("CP2", "qwen2"),
    ("DP2+OVERLAP", "qwen2-tied"), ("DP2xEP2", "qwen3-moe"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout, model", CASES)
def test_a_reward_model_is_transformers_classifier_at_every_layout(trained, layout, model):
    batch = make_pairs()
    ranks, out = trained(layout, model)
    with torch.no_grad():
        start = scores(classifier(out / "start"), batch)
        end = scores(classifier(out / "end"), batch)
    steps, expected = updates(out / "start", batch)
    for rank in ranks:
        assert relative_error(rank.steps, steps) < 1e-5
        assert (rank.resumed == rank.steps[1]).all()
    torch.testing.assert_close(end, expected, rtol=1e-4, atol=1e-5)
    said = np.full(len(batch), np.nan)
    for places, values in (rank.before for rank in ranks if rank.before is not None):
        for sequence, _, value in zip(*vars(values).values()):
            said[places[sequence]] = value
    np.testing.assert_allclose(said, start, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_answers_that_share_their_prompt_have_the_same_scores(trained):
    (alone,), _ = trained("TP1")
    (together,), _ = trained("TP1", sharing=True)
    assert relative_error(together.steps, alone.steps) < 1e-5


def test_a_classifier_pads_with_no_token_that_ends_an_answer(tmp_path):
    """Or transformers would read the score of a text that is padded before its end."""
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<end>", *"abcde"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    source = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<end>", pad_token="<end>")
    source.save_pretrained(tmp_path / "source")
    config = hf_config("qwen2")
    torch.manual_seed(3)
    scored = copy.deepcopy(config)
    scored.num_labels = 1
    weights = AutoModelForSequenceClassification.from_config(scored).state_dict()
    write_classifier(tmp_path / "out", weights.items(), config, tmp_path / "source")
    model = classifier(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.pad_token_id == model.config.pad_token_id == 0
    texts = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in ("ab", "edcba")]
    padded = tokenizer.pad({"input_ids": texts}, return_tensors="pt")
    with torch.no_grad():
        found = model(**padded).logits[:, 0]
        expected = torch.cat([model(torch.tensor([text])).logits[:, 0] for text in texts])
    torch.testing.assert_close(found, expected)
