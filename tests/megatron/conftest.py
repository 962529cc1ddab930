"""The rank pool, the tiny models and their reference runs, shared by all tests of the Megatron policy."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import hf_reference
import layouts
import pytest
import rank_cases
import tiny_models
import tiny_vision
from rank_pool import RankPool


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    """Rank processes that live as long as the session has tests of this folder."""
    pool = RankPool(tmp_path_factory.mktemp("ranks"))
    _pools.append(pool)
    yield pool
    pool.close()


_pools: list[RankPool] = []


def pytest_runtest_teardown(nextitem):
    """End the ranks after the last test of this folder: their groups poll while they wait, 3 s of CPU a minute."""
    if nextitem is None or nextitem.path.parent != Path(__file__).parent:
        for pool in _pools:
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

    @cache
    def write(name: str):
        folder = tmp_path_factory.mktemp(name)
        if name in tiny_vision.KINDS:
            return tiny_vision.write_tiny_vision(folder, name)
        return tiny_models.write_model(name, folder)

    return write


@pytest.fixture(scope="session")
def reference(model_folder):
    """``reference(model)``: two updates on the standard batch by transformers and torch."""

    @cache
    def run(name: str) -> hf_reference.Run:
        return hf_reference.run(model_folder(name), tiny_models.make_batch(), 2, layouts.optimizer())

    return run


@pytest.fixture(scope="session")
def table(request):
    """``table[model, layout] = (packed, alone)``: largest relative differences, written for ``--layout-table``."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    yield found
    path = request.config.getoption("--layout-table")
    if path:
        write_table(Path(path), layout_table(found))


def layout_table(found: dict[tuple[str, str], tuple[float, float]]) -> str:
    """Return a table with a row per layout: the number of models, and their largest differences."""
    lines = ["| layout | models | packed | each sequence alone |", "|---|---|---|---|"]
    for layout in sorted({layout for _, layout in found}):
        pairs = [pair for (_, other), pair in found.items() if other == layout]
        packed, alone = (max(ways) for ways in zip(*pairs))
        lines.append(f"| {layout} | {len(pairs)} | {packed:.1e} | {alone:.1e} |")
    return "\n".join(lines)


def write_table(path: Path, table: str) -> None:
    """Replace a file from the first line of the table on. The text above this line is not changed."""
    above = path.read_text().partition(table.splitlines()[0])[0] if path.is_file() else ""
    path.write_text(f"{above}{table}\n")


@pytest.fixture(scope="session")
def packed_and_alone(on_ranks, model_folder, reference, table):
    """``packed_and_alone(layout, model)`` compares two updates of the packed batch, and one with every sequence alone,
    with transformers and torch: loss, gradient norm and entropy to 1e-5. Returns the weights after the packed ones."""

    def compare(layout: str, model: str) -> dict:
        expected = reference(model).steps
        results = on_ranks(layout, rank_cases.packed_and_alone, model_folder(model), tiny_models.make_batch())
        table[model, layout] = tuple(
            max(hf_reference.relative_error(steps, expected[: len(steps)]) for steps in ways)
            for ways in zip(*((packed.steps, alone) for packed, alone in results))
        )
        assert max(table[model, layout]) < 1e-5
        return results[0][0].weights

    return compare
