"""The inspector's page in Chromium: it shows what the files say, and does nothing that a model wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromium
import inspector_in_chromium
import inspector_runs
import pytest

from gdpo_nemo.tools.inspect import builder

pytestmark = [pytest.mark.slow, pytest.mark.browser]


@pytest.fixture(scope="module")
def browser(pytestconfig) -> Iterator[Any]:
    """Chromium, fetched into pytest's cache, where it stays."""
    with chromium.browser(chromium.fetched(pytestconfig.cache.mkdir("chromium"))) as found:
        yield found


def site(run: Path) -> Path:
    return builder.build(run, run.parent / f"site_{run.name}").page


def test_filters_search_permalinks_keys_and_tokens_agree_with_the_files(browser, tmp_path):
    run = inspector_runs.large_run(tmp_path / "run", samples=192, step_size=64, tokens=20)
    inspector_in_chromium.check_run(browser, run, site(run))


def test_conversation_marks_the_writer_and_token_values_equal_the_file(browser, tmp_path):
    run = inspector_runs.turns_run(tmp_path / "turns")
    assert inspector_in_chromium.check_turns(browser, run, site(run)) == 2
    inspector_in_chromium.check_images(browser, site(inspector_runs.image_run(tmp_path / "images")))


def test_no_head_of_the_list_is_cut_on_a_phone(browser, tmp_path):
    names = ("correctness", "well_formedness_of_the_answer", "a")
    run = inspector_runs.large_run(tmp_path / "run", samples=64, step_size=64, tokens=20, rewards=names)
    inspector_in_chromium.check_heads(browser, site(run))


def test_harmful_model_output_is_shown_as_text_and_fetches_nothing(browser, tmp_path):
    inspector_in_chromium.check_hostile(browser, tmp_path)
