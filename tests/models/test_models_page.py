"""The table of models in the documentation is what the declarations say."""

from __future__ import annotations

from pathlib import Path

import pytest

from gdpo_nemo.models.architectures import FAMILIES, Family, linear_layers

REPOSITORY = Path(__file__).resolve().parents[2]
HEADER = ["`model_type`", "MLP", "q, k, v", "rope scalings", "LoRA on", "layouts"]
TESTS = {
    "engines": "tests/megatron/test_engine_updates.py",
    "layouts": "tests/megatron/test_layout_parity.py",
    "round trip": "tests/megatron/test_hf_round_trip.py",
    "adapters": "tests/megatron/test_adapter_updates.py",
}


def row(family: Family) -> list[str]:
    """What the page says of a family."""
    modules = family.modules
    qkv = ["one matrix" if len(modules.qkv) == 1 else "three matrices"]
    qkv += [f"biases if `{family.qkv_bias}`" if isinstance(family.qkv_bias, str) else "biases"] * bool(family.qkv_bias)
    qkv += ["norms on q and k"] * family.qk_norm
    adapted = [name for name in linear_layers(family) if not family.experts or f"mlp.{name}" not in modules.mlp]
    return [
        f"`{family.model_type}`",
        "experts" if family.experts else "dense",
        ", ".join(qkv),
        ", ".join(kind for kind in family.rope_types if kind != "default") or "none",
        " ".join(f"`{name}`" for name in adapted),
        "TP PP CP DP" + " EP ETP" * bool(family.experts),
    ]


def test_the_table_of_models_is_that_of_the_declarations():
    rows = [HEADER, ["---"] * len(HEADER), *map(row, FAMILIES.values())]
    expected = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    page = (REPOSITORY / "docs" / "models.md").read_text()
    assert f"\n\n{expected}\n\n" in page, f"put this table into docs/models.md:\n{expected}"


@pytest.mark.parametrize("what", TESTS)
def test_what_the_page_calls_tested_takes_every_tiny_model(what):
    page = (REPOSITORY / "docs" / "models.md").read_text()
    source = (REPOSITORY / TESTS[what]).read_text()
    assert TESTS[what] in page
    assert "tiny_models.MODELS" in source or ("tiny_models.DENSE" in source and "tiny_models.MIXTURES" in source)
