"""The rank pool, the tiny models and their reference runs, shared by all tests of the Megatron policy."""

from __future__ import annotations

from functools import cache

import hf_reference
import layouts
import pytest
import tiny_models
from rank_pool import RankPool


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    """Rank processes that live as long as the session."""
    pool = RankPool(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def on_ranks(pool):
    """``on_ranks(layout name, function, *arguments)``: the function's results by rank."""

    def run(name: str, function, *arguments, **options):
        layout = layouts.parse(name)
        return pool.run(function, layout.ranks, layout.config, *arguments, **options)

    return run


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """``model_folder(name)``: the folder of a tiny model, written once."""
    return cache(lambda name: tiny_models.write_model(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def reference(model_folder):
    """``reference(model)``: three updates on the standard batch by transformers and torch."""

    @cache
    def run(name: str) -> hf_reference.Run:
        return hf_reference.run(model_folder(name), tiny_models.make_batch(), 3, layouts.optimizer())

    return run
