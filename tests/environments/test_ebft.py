"""EBFT's two rewards, against equation 7 written out and hidden states that transformers gives one by one."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from gdpo_nemo.data.records import Prompt, Trajectory
from gdpo_nemo.environments.registry import load_environment
from gdpo_nemo.environments.tasks.ebft import POOLS, feature_matching
from gdpo_nemo.utils.errors import ConfigError, RunError

LETTERS = "abcdefgh"
ANSWERS = {"one": ["abc", "ab", "hgf", ""], "two": ["a", "bcdefg"]}
GOLD = {"one": "abd", "two": "gg"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model of four layers, of which each letter is a token."""
    path = tmp_path_factory.mktemp("frozen")
    torch.manual_seed(0)
    shape = dict(hidden_size=16, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2)
    Qwen2ForCausalLM(Qwen2Config(vocab_size=10, intermediate_size=32, **shape)).save_pretrained(path)
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", *LETTERS])}
    Qwen2Tokenizer(vocabulary, merges=[], unk_token="<pad>", pad_token="<pad>", eos_token="<eos>").save_pretrained(path)
    return path


def ids(text: str) -> list[int]:
    return [LETTERS.index(letter) + 2 for letter in text]


def trajectories(ended: bool = True) -> list[Trajectory]:
    made = []
    for name, answers in ANSWERS.items():
        prompt = Prompt(name, np.array(ids("fed" + name[2:].replace("o", "h")), np.int32), "", "ebft",
                        {"answer": GOLD[name]})  # fmt: skip
        for index, answer in enumerate(answers):
            tokens = np.array(ids(answer) + [1] * ended, np.int32)
            made.append(Trajectory(prompt, index, tokens, np.zeros(len(tokens), np.float32), 0, answer, "stop"))
    return made


def hidden(folder, tokens, layers) -> np.ndarray:
    """[tokens, features], of one sequence without padding."""
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in layers], -1).double().numpy()


def vector(states: np.ndarray, prompt: int, how: str) -> np.ndarray:
    if how == "concat":
        return np.concatenate([states[len(states) * part // 4] for part in (1, 2, 3)])
    if how == "completion_mean":
        return states[prompt:].sum(0) / max(len(states) - prompt, 1)
    return states.sum(0) / len(states) if how == "mean_pooling" else states[-1]


@pytest.mark.parametrize("how", POOLS)
def test_the_rewards_are_equation_7_of_the_frozen_models_features(how, folder):
    environment = load_environment("ebft", {"model": str(folder), "embed_method": how, "feature_layers": [0.5, 1.0]})
    asked = trajectories()
    found = environment.verify(asked)
    for name, answers in ANSWERS.items():
        prompt = next(t.prompt for t in asked if t.prompt.id == name).token_ids.tolist()
        features = [vector(hidden(folder, prompt + ids(text), [2, 4]), len(prompt), how)
                    for text in [*answers, GOLD[name]]]  # fmt: skip
        *own, gold = [f / np.linalg.norm(f) if f.any() else f for f in features]
        for j, verdict in enumerate(v for v, t in zip(found, asked) if t.prompt.id == name):
            others = [own[j] @ own[k] for k in range(len(own)) if k != j]
            assert verdict.rewards["alignment"] == pytest.approx(2 * own[j] @ gold, abs=1e-5)
            assert verdict.rewards["diversity"] == pytest.approx(-2 * sum(others) / len(others), abs=1e-5)


def test_at_an_anchor_the_answer_is_the_texts_own_tokens_not_the_column_or_their_text_again(folder):
    """The tokens are such that no text could give them: the end stands between them."""
    environment = load_environment(
        "ebft", {"model": str(folder), "embed_method": "mean_pooling", "feature_layers": [1]}
    )
    context, gold, answer = ids("ab"), [*ids("c"), 1, *ids("d")], ids("hgf")
    prompt = Prompt("row@2", np.array(context, np.int32), "ab", "ebft", {"answer": "hgf"},
                    answer_ids=np.array(gold, np.int32))  # fmt: skip
    environment.preflight([prompt])
    asked = [Trajectory(prompt, n, np.array(tokens, np.int32), np.zeros(3, np.float32), 0, "", "length")
             for n, tokens in enumerate((answer, gold))]  # fmt: skip
    one, other = environment.verify(asked)
    mine, theirs = (hidden(folder, context + tokens, [4]).sum(0) for tokens in (answer, gold))
    cosine = mine @ theirs / np.linalg.norm(mine) / np.linalg.norm(theirs)
    assert one.rewards["alignment"] == pytest.approx(2 * cosine, abs=1e-5)
    assert one.rewards["diversity"] == pytest.approx(-2 * cosine, abs=1e-5)
    assert other.rewards["alignment"] == pytest.approx(2, abs=1e-6)
    assert load_environment("ebft", {"model": str(folder), "gold_key": "absent"}).preflight([prompt]) is None


def test_an_answer_of_the_data_itself_is_wholly_aligned_with_or_without_its_end(folder):
    environment = load_environment("ebft", {"model": str(folder)})
    asked = trajectories()
    same = Trajectory(asked[0].prompt, 0, np.array(ids("abd"), np.int32), np.zeros(3, np.float32), 0, "abd", "length")
    (verdict,) = environment.verify([same])
    assert verdict.rewards["alignment"] == pytest.approx(2) and verdict.rewards["diversity"] is None
    assert [v.rewards for v in environment.verify(asked)] == [
        v.rewards for v in environment.verify(trajectories(False))
    ]


def test_whitened_features_have_the_second_moment_one_and_the_alignment_stays_a_cosine():
    rng = np.random.default_rng(0)
    answers, gold = rng.normal(size=(3, 8)), rng.normal(size=8)
    alignment, diversity = feature_matching(answers, gold, whiten=True)
    # With fewer answers than features the whitened ones are orthonormal: nothing is left to be unlike.
    np.testing.assert_allclose(diversity, 0, atol=1e-12)
    left, singular, right = np.linalg.svd(answers, full_matrices=False)
    projected = (right @ gold) / singular
    np.testing.assert_allclose(alignment, 2 * left @ projected / np.linalg.norm(projected), atol=1e-12)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({}, "option model must be the folder"),
        ({"model": "x", "embed_method": "first"}, "embed_method must be one of last_token"),
        ({"model": "x", "feature_layers": []}, "feature_layers must be depths"),
        ({"model": "x", "feature_layers": [1.5]}, "feature_layers must be depths"),
        ({"model": "x", "feature_layers": [float("nan")]}, "feature_layers must be depths"),
        ({"model": "x", "feature_layers": [True]}, "feature_layers must be depths"),
        ({"model": "x", "ce_coef": 0.1}, "unknown option 'ce_coef'"),
        ({"model": "x", "mode": "strided"}, "unknown option 'mode'"),
    ],
)
def test_options_that_are_not_there_or_out_of_range_are_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_environment("ebft", options)


def test_a_model_or_an_answer_that_is_missing_is_found_before_a_run(folder, tmp_path):
    with pytest.raises(ConfigError, match="model: .* is not the folder of a Hugging Face model"):
        load_environment("ebft", {"model": str(tmp_path)}).preflight([])
    prompts = [t.prompt for t in trajectories()]
    with pytest.raises(RunError, match="no column 'gold'"):
        load_environment("ebft", {"model": str(folder), "gold_key": "gold"}).preflight(prompts)
    load_environment("ebft", {"model": str(folder)}).preflight(prompts)


def test_ebft_refuses_a_model_if_its_weights_are_incomplete_or_pickled(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "some")
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layers.3" not in name}
    save_file(kept, tmp_path / "some" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks \d+ of the model's tensors, for example model.layers.3"):
        load_environment("ebft", {"model": str(tmp_path / "some")}).prepare()
    (tmp_path / "some" / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "some" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="cannot load .*safetensors"):
        load_environment("ebft", {"model": str(tmp_path / "some")}).prepare()
