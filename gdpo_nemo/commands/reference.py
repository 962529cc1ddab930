"""The pages of ``docs`` that are generated: every config key from the schema, every metric from its entry.

``gdpo-nemo reference`` writes them; ``--check`` says whether they are what it would write.
"""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path
from typing import Iterable, Iterator, Sequence

from gdpo_nemo.commands.arguments import say
from gdpo_nemo.commands.config_docs import Key, keys_of
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError, RunError
from gdpo_nemo.observe.drift_checks import DRIFTS
from gdpo_nemo.observe.metric_registry import OWN, Metric, metrics

_NOTE = "<!-- Written by `gdpo-nemo reference` from the sources; a change here would be lost. -->"


def add(commands) -> None:
    """Register the command."""
    command = commands.add_parser("reference", help="write the generated pages of the documentation")
    command.add_argument("--out", type=Path, default=Path("docs"), metavar="DIR", help="the folder (docs)")
    command.add_argument("--check", action="store_true", help="write nothing; status 1 where a page is not up to date")
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the pages, or compare them."""
    if not arguments.out.is_dir():
        raise ConfigError(f"--out: {arguments.out} is no folder")
    if arguments.check:
        stale = stale_pages(arguments.out)
        if stale:
            raise RunError(f"{', '.join(map(str, stale))}: not up to date; run gdpo-nemo reference to write it")
        return 0
    for name, text in pages().items():
        path = arguments.out / name
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror}") from None
        say(path)
    return 0


def stale_pages(folder: Path) -> list[Path]:
    """The pages that are missing or differ from what would be written. Raises RunError for one that cannot be read."""
    stale = []
    for name, text in pages().items():
        path = folder / name
        try:
            if not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != text:
                stale.append(path)
        except OSError as error:
            raise RunError(f"{path} cannot be read: {error.strerror}") from None
    return stale


def pages() -> dict[str, str]:
    """Every generated page by its file name."""
    return {"reference_config.md": config_page(), "reference_metrics.md": metrics_page()}


def config_page() -> str:
    """All keys of a config, a table for each section."""
    sections = list(_sections(Config, "", ""))
    index = [f"* [`{path}`](#{_anchor(path)})" for path, *_ in sections]
    body = [part for path, about, keys in sections for part in _section(path, about, keys)]
    return _page(
        "Config reference",
        "Every key with its type, its default and what it does; `gdpo-nemo explain KEY` prints the same. A config "
        "names only what differs from the defaults. How files inherit and are overridden: [recipes](recipes.md).",
        "\n".join(index),
        *body,
    )


def metrics_page() -> str:
    """All metrics, a table for each group, and what is judged."""
    groups = groupby(metrics().values(), key=lambda metric: metric.group)
    body = []
    for group, members in groups:
        rows = [(f"`{m.pattern}`", m.unit, _cell(m.about)) for m in members]
        body += [f"## `{group}/`" if group else "## The update", _table(("metric", "unit", "meaning"), rows)]
    judged = [
        (f"`{m.pattern}`", _where(m), m.bounds + (" (a warning)" if m.advisory else ""), _cell(m.why), _cell(m.remedy))
        for m in metrics().values()
        if m.judged
    ] + [
        (f"`{d.check.metric}`", "every step", d.check.bounds + " (a warning)", _cell(d.why), _cell(d.remedy))
        for d in DRIFTS
    ]
    return _page(
        "Metrics reference",
        "The keys of `metrics.jsonl`, of which every tracker shows the same; `gdpo-nemo explain metric/KEY` prints one "
        "of them. `NAME` stands for a reward component or an environment. A training row has the keys of one step, a "
        "validation row `step` and `validation/`. What is not measured in a run, and what is not finite, is absent: "
        f"never 0. Metrics under `{OWN}` are what reward functions of yours give to `log_metric`.",
        *body,
        "## Is a run healthy?",
        "`gdpo-nemo health RUN_DIR` judges by these where the config has no checks of its own (`health.checks`) for "
        "the run's rewards. Values are means over five steps. A run says by itself where it leaves what is judged at "
        "every step (`health.alerts`), and may end there (`health.stop_on`).",
        _table(("metric", "judged", "sound", "because", "try"), judged),
    )


def _page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", _NOTE, *parts]) + "\n"


def _sections(section: type, path: str, about: str) -> Iterator[tuple[str, str, list[Key]]]:
    """(path, meaning, keys that are no sections) of a section and all in it, in the order of the schema. A key that
    stands at the top level by itself is a section of one key."""
    keys = keys_of(section, path)
    plain = [key for key in keys if key.section is None]
    if path:
        yield path, about, plain
    for key in keys:
        if key.section is not None:
            null = " Null: there is none." if key.type.endswith("or null") else ""
            yield from _sections(key.section, key.path, key.about + null)
        elif not path:
            yield key.path, "", [key]


def _section(path: str, about: str, keys: Sequence[Key]) -> list[str]:
    rows = [(f"`{key.name}`", _type(key), f"`{key.default}`", _cell(key.about)) for key in keys]
    return [
        f"## `{path}`",
        *([_prose(about)] if about else []),
        *([_table(("key", "type", "default", "meaning"), rows)] if rows else []),
    ]


def _type(key: Key) -> str:
    if not key.choices:
        return _cell(f"{key.type} ({key.range})" if key.range else key.type)
    own = ", or one of your own (`file.py:name`)" if key.takes_own else ""
    null = ", or null" if key.type.endswith("or null") else ""
    return "one of " + ", ".join(f"`{choice}`" for choice in key.choices) + own + null


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(text: str) -> str:
    """Prose that does not end its cell."""
    return _prose(text).replace("|", r"\|")


def _prose(text: str) -> str:
    """A docstring as Markdown: its code in single backticks, and no tag outside of code."""
    parts = text.replace("``", "`").split("`")
    return "`".join(
        part if index % 2 else part.replace("<", "&lt;").replace("*", r"\*") for index, part in enumerate(parts)
    )


def _anchor(path: str) -> str:
    """How GitHub links to a heading."""
    return path.replace(".", "")


def _where(metric: Metric) -> str:
    return "every step" if metric.at == "every" else f"at the {metric.at}"
