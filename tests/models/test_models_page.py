"""The table of models in the documentation is what the declarations say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gdpo_nemo.commands.families import table
from gdpo_nemo.models.families import FAMILIES
from gdpo_nemo.models.known_models import KNOWN

REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = {
    "engines": "tests/megatron/test_engine_updates.py",
    "layouts": "tests/megatron/test_layout_parity.py",
    "round trip": "tests/megatron/test_hf_round_trip.py",
    "adapters": "tests/megatron/test_adapter_updates.py",
}


def test_the_table_of_models_is_that_of_the_declarations():
    page = (REPOSITORY / "docs" / "models.md").read_text()
    assert f"\n\n{table()}\n\n" in page, f"put this table into docs/models.md:\n{table()}"


def test_readme_names_every_family_and_the_comparison_their_number():
    readme = (REPOSITORY / "README.md").read_text().partition("## Models")[2].partition("All families")[0]
    named = set(re.findall(r"`(\w+)`", readme))
    assert named == {family.model_type for family in FAMILIES.values()}
    assert f"text, {len(named)} families" in (REPOSITORY / "docs" / "comparison.md").read_text()


@pytest.mark.parametrize("what", TESTS)
def test_tests_named_on_the_page_use_every_tiny_model(what):
    page = (REPOSITORY / "docs" / "models.md").read_text()
    source = (REPOSITORY / TESTS[what]).read_text()
    assert TESTS[what] in page
    assert "tiny_models.MODELS" in source or ("tiny_models.DENSE" in source and "tiny_models.MIXTURES" in source)


def test_no_name_on_the_hub_is_claimed_by_two_families():
    for name, content in KNOWN.items():
        claims = [family.model_type for family in FAMILIES.values() if re.fullmatch(family.hub_names, name)]
        assert claims == [content["model_type"]]
