"""The generated pages of the documentation are what the command writes, and say all there is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gdpo_nemo.commands import cli
from gdpo_nemo.commands.reference import config_page, metrics_page, pages
from gdpo_nemo.config.load import all_keys
from gdpo_nemo.observe.metric_registry import metrics

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_pages_in_docs_equal_the_output_of_the_command(capsys):
    assert cli.main(["reference", "--check", "--out", str(DOCS)]) == 0, capsys.readouterr().err


def test_old_or_missing_page_is_named_and_rewritten(tmp_path, capsys):
    assert cli.main(["reference", "--check", "--out", str(tmp_path)]) == 1
    assert "reference_config.md" in (said := capsys.readouterr().err) and "reference_metrics.md" in said
    assert list(tmp_path.iterdir()) == []
    assert cli.main(["reference", "--out", str(tmp_path)]) == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == pages()
    (tmp_path / "reference_metrics.md").write_text("old")
    assert cli.main(["reference", "--check", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "reference_metrics.md" in said and "reference_config.md" not in said


def test_every_config_key_and_every_metric_has_a_row():
    page = config_page()
    headings = set(re.findall(r"^## `(.*)`$", page, re.M))
    for key in all_keys():
        section, _, name = key.rpartition(".")
        assert key in headings or f"\n| `{name}` | " in page.split(f"## `{section}`\n")[1].split("\n## ")[0], key
    assert all(f"\n| `{metric.pattern}` | {metric.unit} | " in metrics_page() for metric in metrics().values())


def test_rows_have_the_cells_of_their_head_and_links_a_heading():
    for page in pages().values():
        width = 0
        for line in page.splitlines():
            cells = len(re.findall(r"(?<!\\)\|", line))
            if line.startswith("| ---"):
                assert cells == width
            width = cells if line.startswith("| ") and width == 0 else width if line.startswith("| ") else 0
            assert not line.startswith("| ") or cells == width, line
        anchors = {head.replace(".", "") for head in re.findall(r"^## `(.*)`$", page, re.M)}
        assert set(re.findall(r"\]\(#(.*?)\)", page)) <= anchors


def test_types_choices_and_defaults_are_listed():
    page = config_page()
    assert "| `precision` | one of `float32`, `bfloat16` | `bfloat16` |" in page
    assert "or a custom function (`file.py:name`) | `gdpo` |" in page
    assert "| `preset` | one of `paper`, " in page and ", or null | `null` |" in page
    assert "| `adam_beta1` | number (0 or more and below 1) | `0.9` |" in page
    assert "## `env`\n" in page and "mapping of names to number (at least -1,000" in page


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md") if path.name != "README.md"))
def test_the_index_has_one_line_for_every_page(page):
    assert len(re.findall(rf"^\* \[.*\]\({page}\)", (DOCS / "README.md").read_text(), re.M)) == 1


@pytest.mark.slow
def test_the_command_imports_nothing_heavy():
    code = (
        "import sys; from gdpo_nemo.commands.cli import main; main(['explain', 'metric'])\n"
        f"assert main(['reference', '--check', '--out', {str(DOCS)!r}]) == 0\n"
        "assert not {'torch', 'ray', 'vllm', 'megatron', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
