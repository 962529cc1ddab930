"""An engine that samples from prompts with images, compared with transformers."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from test_turns_with_images import LIMITS, Zoom
from tiny_vision import KINDS, picture, write_tiny_vision
from transformers import AutoTokenizer
from vision_reference import PLACEHOLDER, Reference, image

from gdpo_nemo.config.schema import VllmConfig
from gdpo_nemo.config.sections import ImagesConfig
from gdpo_nemo.data.contexts import to_score
from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.image_reader import ImageReader
from gdpo_nemo.data.images import Image, read_image
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.environments.episodes import advance
from gdpo_nemo.generation.engine import CPU_ENVIRONMENT, ENVIRONMENT, KV_AT_UPDATE, Engine, EngineOptions
from gdpo_nemo.generation.requests import Completion, SampleRequest, Sampling
from gdpo_nemo.rollouts.turns import EpisodeJob, play_episode
from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.weights.transports.memory import MemoryReceiver

pytestmark = pytest.mark.slow

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=24)
EXACT = 1e-5
"""Largest difference from transformers in float32, in nats."""
FIRST, SECOND, TWIN = image(112, 112, 1), image(70, 130, 2), image(112, 112, 3)


class Parts(NamedTuple):
    engine: Engine
    reference: Reference
    changed: Reference
    """The same model with another tower."""


@pytest.fixture(scope="module", params=KINDS)
def parts(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    reference = Reference(write_tiny_vision(folder / "model", request.param))
    changed = Reference(folder / "model", folder / "changed")
    with pytest.MonkeyPatch.context() as patch:
        own = {"OMP_NUM_THREADS": "1", "VLLM_CACHE_ROOT": str(folder / "cache")}
        for name, value in (ENVIRONMENT | CPU_ENVIRONMENT | own).items():
            patch.setitem(os.environ, name, value)
        config = VllmConfig(kv_cache_memory_bytes=64 << 20, max_num_seqs=8)
        options = EngineOptions(str(folder / "model"), config, "float32", 256, 0, on_cpu=True, images_per_prompt=2)
        engine = Engine(options)
        assert not (folder / "cache" / "modelinfos").exists(), "vLLM was imported again to inspect the model"
        yield Parts(engine, reference, changed)
        engine.close()


def off(reference: Reference, request: SampleRequest, completion: Completion) -> np.ndarray:
    """Differences of a completion's log-probs from transformers'."""
    token_ids = np.concatenate([request.prompt_ids, completion.token_ids])
    expected = reference.logprobs(token_ids, request.images)
    return np.abs(expected[len(request.prompt_ids) - 1 :] - completion.logprobs)


def request_of(reference: Reference, seed: int, *images: Image) -> SampleRequest:
    token_ids, placed = reference.prompt(seed, *images)
    return SampleRequest(token_ids, seed, images=placed)


def twin_of(request: SampleRequest) -> SampleRequest:
    """The same token ids with another image."""
    return replace(request, images=tuple(placed._replace(image=TWIN) for placed in request.images))


def test_sampled_logprobs_are_those_of_transformers(parts):
    """Again from cached prefixes, in which the image of a prompt with equal ids must not be found."""
    reference = parts.reference
    one = request_of(reference, 1, FIRST)
    requests = [request_of(reference, 0), one, twin_of(one), request_of(reference, 2, FIRST, SECOND)]
    requests.append(request_of(reference, 3, SECOND, FIRST, FIRST))  # more than images_per_prompt
    for _ in range(2):
        found = parts.engine.generate(requests, SAMPLING).completions
        for request, completion in zip(requests, found):
            assert off(reference, request, completion).max() < EXACT
    assert np.abs(reference.logprobs(one.prompt_ids, one.images)
                  - reference.logprobs(one.prompt_ids, twin_of(one).images)).max() > 0.1  # fmt: skip


def test_a_sampled_placeholder_is_text(parts):
    """Also before a later image, and in a prompt without images."""
    reference = parts.reference
    sampled = [5, PLACEHOLDER, PLACEHOLDER, 6]
    for images in ((), (FIRST,)):
        request = request_of(reference, 4, *images)
        later = request_of(reference, 5, *images)
        start = len(request.prompt_ids) + len(sampled)
        token_ids = np.concatenate([request.prompt_ids, sampled, later.prompt_ids]).astype(np.int32)
        placed = tuple(p._replace(start=p.start + start) for p in later.images)
        turn = SampleRequest(token_ids, 6, images=request.images + placed)
        (completion,) = parts.engine.generate([turn], SAMPLING).completions
        assert off(reference, turn, completion).max() < EXACT
        (scores,) = parts.engine.score([token_ids], [turn.images])
        assert np.abs(scores - reference.logprobs(token_ids, turn.images)).max() < EXACT


def test_logprobs_of_an_episode_with_images_are_those_of_transformers(parts):
    """Each observation of the environment shows another part of the first image."""
    folder = parts.reference.model.name_or_path
    tokenizer = AutoTokenizer.from_pretrained(folder)
    talk = Conversation(tokenizer, True, images=ImageReader(ImagesConfig(), folder, tokenizer))
    first = read_image(picture(128, 128, 1), ImagesConfig())
    parts_of_message = [{"type": "image", "image": first}, {"type": "text", "text": "?"}]
    text, ids, images = talk.prompt_with_images([{"role": "user", "content": parts_of_message}])
    prompt = Prompt("p", ids, text, "zoom", {"images": [first]}, None, images)

    async def sample(request):
        return parts.engine.generate([request], SAMPLING).completions[0]

    async def step(asked):
        return advance(Zoom(), asked)

    job = EpisodeJob(SAMPLING, lambda turn: 50 + turn, sample, step)
    made = asyncio.run(play_episode(prompt, 0, job, LIMITS, talk))
    (sequence,) = to_score([made])
    assert made.turns == 3 and len(sequence.images) == 3
    token_ids = np.concatenate([sequence.prompt_ids, sequence.completion_ids])
    expected = parts.reference.logprobs(token_ids, sequence.images)[len(sequence.prompt_ids) - 1 :]
    off_by = np.abs(expected - sequence.sampler_logprobs)[sequence.loss_mask]
    assert off_by.max() < EXACT


def test_an_image_without_data_must_be_known(parts):
    request = request_of(parts.reference, 7, image(60, 60, 9))
    (placed,) = request.images
    empty = replace(request, images=(placed._replace(image=replace(placed.image, data=b"")),))
    assert parts.engine.submit({"early": (empty, SAMPLING)}) == [placed.image.sha256]
    with pytest.raises(RunError, match="1 images have no data"):
        parts.engine.generate([empty], SAMPLING)
    assert parts.engine.submit({"first": (request, SAMPLING), "second": (empty, SAMPLING)}) == []
    assert parts.engine.submit({"third": (empty, SAMPLING)}) == []
    found = {}
    while len(found) < 3:
        found |= dict(parts.engine.poll(1.0).finished)
    assert len({completion.token_ids.tobytes() for completion in found.values()}) == 1


def test_another_number_of_tokens_is_refused_and_nothing_is_sampled(parts):
    request = request_of(parts.reference, 8, FIRST)
    (placed,) = request.images
    short = replace(request, images=(placed._replace(tokens=placed.tokens - 1),))
    message = (
        rf"vLLM needs {placed.tokens} tokens for an image of 112x112 pixels, but the prompt has {placed.tokens - 1}"
    )
    with pytest.raises(RunError, match=message):
        parts.engine.submit({"good": (request, SAMPLING), "bad": (short, SAMPLING)})
    assert parts.engine.poll(0.1).waiting == 0


def update(engine: Engine, reference: Reference, kv: str) -> int:
    manifest, buffer = reference.packed(engine.version + 1)
    engine.prepare_update(manifest, kv)
    return engine.update_weights(manifest, MemoryReceiver(), buffer)


@pytest.mark.parametrize("kv", KV_AT_UPDATE)
def test_images_are_processed_with_the_tower_of_an_update(parts, kv):
    """Image ``FIRST`` was sampled with the old tower, whose output vLLM keeps. Some requests have not started."""
    engine, old, new = parts
    longer = replace(SAMPLING, max_new_tokens=50)
    requests = {f"{kv} {n}": request_of(old, 10 + n, FIRST) for n in range(12)}
    engine.submit({name: (request, longer) for name, request in requests.items()})
    while engine.poll(0).decoded_tokens == 0:
        time.sleep(0.001)
    version = update(engine, new, kv)
    found = {}
    while len(found) < len(requests):
        found |= dict(engine.poll(1.0).finished)
    starts = set()
    for name, completion in found.items():
        starts.add(completion.version)
        cut = sum(tokens for span, tokens in completion.spans if span < version)
        if cut:
            assert off(old, requests[name], completion)[:cut].max() < EXACT
        if cut < len(completion.token_ids) and (kv == "recompute" or not cut):
            assert off(new, requests[name], completion)[cut:].max() < EXACT
    assert len(starts) == (1 if kv == "drain" else 2)
    request = request_of(old, 10, FIRST)
    (again,) = engine.generate([request], SAMPLING).completions
    assert off(new, request, again).max() < EXACT and off(old, request, again).max() > 0.1
    update(engine, old, "drain")
    (again,) = engine.generate([request], SAMPLING).completions
    assert off(old, request, again).max() < EXACT
