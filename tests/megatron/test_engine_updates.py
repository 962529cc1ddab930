"""vLLM takes every family's weights under their declared names, and computes with them what transformers does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import engine_scores
import numpy as np
import pytest
import tiny_models
import torch

from gdpo_nemo.models.families import FAMILIES

# vLLM on CPUs has no attention for the smaller heads of the other tests.
WIDE = dict(hidden_size=128, num_attention_heads=4, intermediate_size=64)


def tiny_model(family: str) -> tuple[str, dict]:
    """The first tiny model of a family, and ``WIDE`` for it: heads of 32, where it says their size itself, too."""
    name = next(name for name, fields in tiny_models.MODELS.items() if fields["model_type"] == family)
    return name, WIDE | (dict(head_dim=32) if "head_dim" in tiny_models.MODELS[name] else {})


def save_tokenizer(folder: Path) -> None:
    """An engine does not start without one, though it gets token ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(tiny_models.VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2", unk_token="w0").save_pretrained(folder)


def by_transformers(folder: Path) -> np.ndarray:
    """float32 [tokens]: log-probs of ``engine_scores.sequences``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for ids in map(torch.from_numpy, engine_scores.sequences()):
        with torch.no_grad():
            scores = model(ids[None].long()).logits[0].log_softmax(-1)
        found.append(scores[:-1].gather(-1, ids[1:, None].long())[:, 0].numpy())
    return np.concatenate(found)


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    """The program that makes engines; its own complaints are in the file."""
    log = tmp_path_factory.mktemp("scorer") / "stderr"
    with open(log, "w") as file:
        program = [sys.executable, str(Path(engine_scores.__file__))]
        pipe = subprocess.PIPE
        process = subprocess.Popen(program, stdin=pipe, stdout=pipe, stderr=file, text=True)
    yield process, log
    process.stdin.close()
    process.wait(120)


def scored(scorer, family: str, folder: Path) -> tuple[int, str, dict, list[np.ndarray]]:
    """An engine's exit status and complaints, what it scored before and after an update, and what it should have."""
    process, log = scorer
    name, fields = tiny_model(family)
    older, newer = (tiny_models.write_model(name, folder / str(seed), seed, **fields) for seed in (7, 8))
    save_tokenizer(older)
    process.stdin.write(f"{folder}/scores.npz {older} {newer} {folder}/errors\n")
    process.stdin.flush()
    status = process.stdout.readline()
    assert status, log.read_text()[-4000:]
    errors = (folder / "errors").read_text()
    assert (folder / "scores.npz").exists(), errors[-4000:]
    expected = [by_transformers(older), by_transformers(newer)]
    assert np.abs(expected[1] - expected[0]).max() > 0.1
    return int(status), errors, dict(np.load(folder / "scores.npz")), expected


@pytest.mark.parametrize("family", [name for name in FAMILIES if tiny_model(name)[0] in tiny_models.DENSE])
def test_an_engine_scores_as_transformers_before_and_after_an_update(family, scorer, tmp_path):
    status, errors, scores, expected = scored(scorer, family, tmp_path)
    assert status == 0, errors[-4000:]
    np.testing.assert_allclose(scores["before"], expected[0], atol=2e-4, rtol=0)
    np.testing.assert_allclose(scores["after"], expected[1], atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", [name for name in FAMILIES if tiny_model(name)[0] in tiny_models.MIXTURES])
def test_a_mixture_is_right_as_loaded_and_its_update_on_a_cpu_is_not(family, scorer, tmp_path):
    """Why training of mixtures is refused on CPUs: when this fails, vLLM takes their updates, and it need not be."""
    status, errors, scores, expected = scored(scorer, family, tmp_path)
    np.testing.assert_allclose(scores["before"], expected[0], atol=2e-4, rtol=0)
    lost = status == 0 and np.abs(scores["after"] - expected[1]).max() > 0.1
    assert lost or "The size of tensor" in errors, errors[-4000:]
