"""vLLM takes every family's weights under their declared names, and computes with them what transformers does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import engine_scores
import hf_reference
import numpy as np
import pytest
import tiny_models
import tiny_vision
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from gdpo_nemo.data.image_processor import ImageProcessor
from gdpo_nemo.models.families import FAMILIES
from gdpo_nemo.models.family_checks import describe
from gdpo_nemo.models.hf_folder import differences, open_weights, weight_names, write_model

pytestmark = pytest.mark.slow

# vLLM on CPUs has no attention for the smaller heads of the other tests.
WIDE = dict(hidden_size=128, num_attention_heads=4, intermediate_size=64)


def tiny_model(family: str) -> tuple[str, dict]:
    """The first tiny model of a family, and ``WIDE`` for it: heads of 32, where it says their size itself, too."""
    name = next(name for name, fields in tiny_models.MODELS.items() if fields["model_type"] == family)
    sizes = dict(
        head_dim=32,
        global_head_dim=64,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        swiglu_limit=7.0,  # the only limit in vLLM's kernel
        rms_norm_eps=1e-6,  # vLLM reads it for the norms of latent vectors too, transformers does not
        rope_interleave=True,  # the only rotary embedding of latent attention in vLLM
    )
    return name, WIDE | {key: size for key, size in sizes.items() if key in tiny_models.MODELS[name]}


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
    is_tower = "vision_config" in json.loads((folder / "config.json").read_text())
    model = AutoModelForImageTextToText.from_pretrained(folder) if is_tower else hf_reference.load(folder)
    found = []
    for ids in map(torch.from_numpy, engine_scores.sequences()):
        with torch.no_grad():
            scores = model(ids[None].long()).logits[0].log_softmax(-1)
        found.append(scores[:-1].gather(-1, ids[1:, None].long())[:, 0].numpy())
    return np.concatenate(found)


def chosen_by_transformers(folder: Path, ids: np.ndarray) -> np.ndarray:
    """int64 [tokens, layers * experts per token]: the experts of each token, best first."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None].long(), output_router_logits=True).router_logits
    chosen = describe(model.config.to_dict()).active_experts
    return torch.cat([layer.topk(chosen).indices for layer in logits], -1).numpy()


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
    if FAMILIES[family].tower:
        source, newer = (tiny_vision.write_tiny_vision(folder / name, family, int(name)) for name in ("07", "8"))
        older = folder / "7"
        write_model(older, zip(weight_names(source), map(open_weights(source), weight_names(source))),
                    AutoConfig.from_pretrained(source), source)  # fmt: skip
        assert differences(source, older) == []
        AutoProcessor.from_pretrained(older)
    else:
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


STACKED = [name for name, family in FAMILIES.items() if family.experts and not family.engine_updates]

# vLLM's CPU build computes gated delta nets only in bfloat16, and no sparse attention.
OTHERS = [name for name, family in FAMILIES.items() if family.delta or (family.latent and family.latent.index)]


@pytest.mark.parametrize("family", STACKED)
def test_an_update_of_a_family_that_is_refused_on_cpus_ends_the_engine(family, scorer, tmp_path):
    """When this fails, vLLM takes the update, and the family need not be refused."""
    status, errors, _, _ = scored(scorer, family, tmp_path)
    assert status and "assert self.moe_kernel is not None" in errors, errors[-4000:]


def check_images(folder: Path, scores: dict[str, np.ndarray]) -> None:
    """Compare tokens sampled after an image with transformers, by the text model and the tower of either folder."""
    request = engine_scores.prompt_with_an_image(str(folder / "7"))
    pixel_values, grid = ImageProcessor(folder / "7").pixel_values([placed.image for placed in request.images])
    older, newer = (AutoModelForImageTextToText.from_pretrained(folder / seed) for seed in "78")
    towers = {"older": older.model.visual, "newer": newer.model.visual}
    for state in ("newer newer", "older newer", "newer older"):
        text, tower = state.split()
        model = older if text == "older" else newer
        model.model.visual = towers[tower]
        sampled, logprobs = scores[state]
        ids = np.concatenate([request.prompt_ids, sampled.astype(np.int32)])
        types = torch.zeros(1, len(ids), dtype=torch.int32)
        for _, start, tokens in request.images:
            types[0, start : start + tokens] = 1
        with torch.no_grad():
            logits = model(
                torch.from_numpy(ids)[None].long(), pixel_values=pixel_values, image_grid_thw=grid,
                mm_token_type_ids=types,
            ).logits[0]  # fmt: skip
        expected = logits.log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
        expected = expected.gather(-1, torch.from_numpy(ids[len(request.prompt_ids) :])[:, None].long())[:, 0]
        np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-5, rtol=0, err_msg=state)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in (*STACKED, *OTHERS)])
def test_an_engine_scores_as_transformers_before_and_after_an_update(family, scorer, tmp_path):
    status, errors, scores, expected = scored(scorer, family, tmp_path)
    assert status == 0, errors[-4000:]
    np.testing.assert_allclose(scores["before"], expected[0], atol=2e-4, rtol=0)
    np.testing.assert_allclose(scores["after"], expected[1], atol=2e-4, rtol=0)
    if FAMILIES[family].tower:
        check_images(tmp_path, scores)
    mixture = FAMILIES[family].experts
    for number in range(2 if mixture and not mixture.sigmoid else 0):
        ids, routing = scores[f"ids{number}"], scores[f"routing{number}"]
        experts = chosen_by_transformers(tmp_path / "8", ids)
        assert np.array_equal(routing[:-1], experts[:-1]) and (routing[-1] == -1).all()
