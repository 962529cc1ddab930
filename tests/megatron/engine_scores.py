"""Run as a program: what vLLM makes of tiny models, before an update of their weights and after it.

A line of standard input, ``OUT FOLDER NEWER ERRORS`` (paths without spaces), is one engine: it starts with FOLDER and
is given the weights of NEWER; its scores of ``sequences`` in both states go to OUT, an npz, what it has to complain of
to ERRORS, and its exit status to a line of standard output. Each engine is a fork of a process that has imported vLLM,
which takes longer than the rest.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import traceback
from pathlib import Path

import numpy as np


def sequences() -> list[np.ndarray]:
    """int32 token ids of two sequences."""
    rng = np.random.default_rng(5)
    return [rng.integers(0, 99, length).astype(np.int32) for length in (12, 19)]


def prompt_with_an_image(folder: str):
    """A prompt of text, an image and text."""
    from PIL import Image as Pillow

    from gdpo_nemo.data.image_processor import ImageProcessor
    from gdpo_nemo.data.images import Image
    from gdpo_nemo.generation.requests import SampleRequest

    stream = io.BytesIO()
    pixels = np.random.default_rng(3).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    Pillow.fromarray(pixels).save(stream, "PNG")
    image = Image(hashlib.sha256(stream.getvalue()).hexdigest(), 120, 90, stream.getvalue())
    config = json.loads(Path(folder, "config.json").read_text())
    places = [config[f"{name}_token_id"] for name in ("vision_start", "image", "vision_end")]
    ids = np.array([*sequences()[0], *places, *sequences()[0]], np.int32)
    prompt_ids, images = ImageProcessor(folder).place(ids, [image])
    return SampleRequest(prompt_ids, seed=1, images=images)


def score_images(engine, folder: str, newer: str) -> dict[str, np.ndarray]:
    """Sampled ids and their log-probs, of the text model and the tower of either folder.

    The engine has the newer weights. An update without the tower leaves it in place, and a tower that a sleeping engine
    has released is read from the engine's folder.
    """
    from gdpo_nemo.generation.requests import Sampling
    from gdpo_nemo.models.hf_folder import open_weights, tower_names, weight_names
    from gdpo_nemo.weights.manifest import pack
    from gdpo_nemo.weights.transports.memory import MemoryReceiver

    request = prompt_with_an_image(folder)
    names = [name for name in weight_names(folder) if name not in tower_names(folder)]

    def sample() -> np.ndarray:
        (completion,) = engine.generate([request], Sampling(1.0, 1.0, -1, 8)).completions
        return np.stack([completion.token_ids, completion.logprobs])

    found = {"newer newer": sample()}
    for version, (text, tower) in enumerate([(folder, "newer"), (newer, "older")], 2):
        if tower == "older":
            engine.sleep()
            engine.wake("weights")
        manifest, buffer = pack(((name, open_weights(text)(name)) for name in names), version)
        engine.update_weights(manifest, MemoryReceiver(), buffer)
        if tower == "older":
            engine.wake("kv_cache")
            engine._core._engine.reset_encoder_cache()
        found[f"{'older' if text == folder else 'newer'} {tower}"] = sample()
    return found


def score(out: str, folder: str, newer: str) -> None:
    """Score with an engine in both states."""
    from gdpo_nemo.config.schema import VllmConfig
    from gdpo_nemo.generation.engine import Engine, EngineOptions
    from gdpo_nemo.generation.requests import SampleRequest, Sampling
    from gdpo_nemo.models.hf_folder import open_weights, weight_names
    from gdpo_nemo.weights.manifest import pack
    from gdpo_nemo.weights.transports.memory import MemoryReceiver

    config = json.loads(Path(folder, "config.json").read_text())
    options = dict(on_cpu=True, records_routing=bool(config.get("num_experts_per_tok") or config.get("top_k_experts")))
    engine = Engine(EngineOptions(folder, VllmConfig(kv_cache_memory_bytes=64 << 20), "float32", 64, 0, **options))
    before = np.concatenate(engine.score(sequences()))
    np.savez(out, before=before)
    read = open_weights(newer)
    manifest, buffer = pack(((name, read(name)) for name in weight_names(newer)), 1)
    engine.update_weights(manifest, MemoryReceiver(), buffer)
    found = dict(before=before, after=np.concatenate(engine.score(sequences())))
    prompt = np.tile(sequences()[1], 2)  # of one block of the KV cache and more, which the second request finds there
    for number in range(2):
        (sampled,) = engine.generate([SampleRequest(prompt, number)], Sampling(1.0, 1.0, -1, 4)).completions
        if sampled.routing is not None:
            found |= {f"ids{number}": np.concatenate([prompt, sampled.token_ids]), f"routing{number}": sampled.routing}
    if "vision_config" in config:
        found |= score_images(engine, folder, newer)
    np.savez(out, **found)


def fork(out: str, folder: str, newer: str, errors: str) -> int:
    """Score in a process of its own, which cannot touch another engine's; its exit status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        with open(errors, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        score(out, folder, newer)
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it is belongs into ERRORS, and no child goes on in the loop below
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Answer line by line until standard input ends."""
    from gdpo_nemo.generation.engine import CPU_ENVIRONMENT, ENVIRONMENT

    os.environ.update(ENVIRONMENT | CPU_ENVIRONMENT)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    import vllm  # noqa: F401
    import vllm.entrypoints.llm  # noqa: F401
    import vllm.v1.worker.cpu_worker  # noqa: F401

    for line in sys.stdin:
        print(fork(*line.split()), file=answers, flush=True)


if __name__ == "__main__":
    main()
