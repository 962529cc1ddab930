"""One engine for the tests of this folder, in this process, and two sets of weights for it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MAX_MODEL_LEN = 256


@pytest.fixture(scope="session")
def engine_model(tmp_path_factory) -> Path:
    """A random Qwen2 of two layers over bytes."""
    sys.path.insert(0, str(EXAMPLES))
    import make_tiny_model

    folder = tmp_path_factory.mktemp("engine") / "model"
    make_tiny_model.make_random_model(str(folder), seed=0)
    return folder


@pytest.fixture(scope="session")
def vllm_cache(tmp_path_factory) -> Path:
    """The folder of vLLM's caches, empty when the engine starts."""
    return tmp_path_factory.mktemp("vllm_cache")


@pytest.fixture(scope="session")
def engine(engine_model, vllm_cache, tmp_path_factory):
    """In one process, as on CPUs. The model's folder has no tokenizer."""
    from gdpo_nemo.config.schema import VllmConfig
    from gdpo_nemo.generation.engine import CPU_ENVIRONMENT, ENVIRONMENT, Engine, EngineOptions

    with pytest.MonkeyPatch.context() as patch:
        own = {"OMP_NUM_THREADS": "1", "VLLM_CACHE_ROOT": str(vllm_cache)}
        for name, value in (ENVIRONMENT | CPU_ENVIRONMENT | own).items():
            patch.setitem(os.environ, name, value)
        config = VllmConfig(kv_cache_memory_bytes=64 << 20, max_num_seqs=8)
        bare = tmp_path_factory.mktemp("bare")
        for name in ("config.json", "model.safetensors"):
            (bare / name).symlink_to(engine_model / name)
        options = EngineOptions(
            str(bare), config, "float32", MAX_MODEL_LEN, 0, on_cpu=True, tokenizer=str(engine_model)
        )
        engine = Engine(options, replies=())
        yield engine
        engine.close()
