"""Static page of a run's samples: ``index.html`` and data scripts that the page loads on demand.

The page works from disk, without a server or network. Completions are untrusted, so the page inserts them only as text.
The Content-Security-Policy allows only the page's script and the scripts that it loads.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from gdpo_nemo.config.changes import load_saved_config
from gdpo_nemo.config.schema import Config
from gdpo_nemo.observe.metrics import History, read_metrics
from gdpo_nemo.observe.sample_images import RecordedImages, with_labels
from gdpo_nemo.observe.samples import rollout_files, validation_files
from gdpo_nemo.tools.inspect.rows import (
    Components,
    Tokens,
    components_of,
    equal_completions,
    groups_of,
    largest_gaps,
    means_of,
    pieces_of,
    read_samples,
    summed_advantages,
    tokenizer_of,
    tokens_of,
)
from gdpo_nemo.tools.inspect.shards import FOLDER, Scripts, TextShards, TokenShards, packed, spans_of
from gdpo_nemo.tools.inspect.thumbnails import ThumbnailShards
from gdpo_nemo.utils.errors import ConfigError, RunError
from gdpo_nemo.utils.files import real_path, write_whole

PAGE = "index.html"
SCRIPTS = ("data.js", "state.js", "list.js", "tokens.js", "sample.js", "curves.js", "page.js")
"""Source files of the page's script, in the order of concatenation."""
_SNIPPET = 90
"""Number of characters of each completion in the list of samples."""
_KINDS = ("train", "validation")


@dataclass
class Index:
    """Index of all samples, which the page loads first. The index contains one column of numbers per property."""

    columns: dict[str, list[np.ndarray]] = field(default_factory=dict)
    components: list[dict[str, np.ndarray]] = field(default_factory=list)
    """Columns with rewards and terms of each file, named ``reward NAME`` and ``term NAME``."""
    names: dict[str, list[str]] = field(default_factory=lambda: {"outcome": [], "environment": [], "finish": []})
    """Names by kind of column. A code in such a column is the index of a name."""
    prompts: dict[str, int] = field(default_factory=dict)
    rewards: list[str] = field(default_factory=list)
    """Names of reward components, in order of first appearance."""
    snippets: list[str] = field(default_factory=list)
    rows: int = 0

    def add(self, **columns: np.ndarray) -> None:
        """Append the samples of a file."""
        for name, values in columns.items():
            self.columns.setdefault(name, []).append(values)

    def codes(self, kind: str, values: list[str]) -> np.ndarray:
        """Return the indices of ``values`` in ``names[kind]``, to which new values are added: uint16 [samples]."""
        names = self.names[kind]
        names.extend(sorted(set(values) - set(names)))
        code_of = dict(zip(names, range(len(names))))
        return np.array(list(map(code_of.__getitem__, values)), np.uint16)

    def packed(self) -> dict[str, list[str]]:
        """Return each column as [data type, bytes]. The names of component columns contain the component's number."""
        columns = dict(self.columns)
        for number, name in enumerate(self.rewards):
            for kind in ("reward", "term"):
                columns[f"{kind}{number}"] = self._component(f"{kind} {name}")
        found = {}
        for name, parts in columns.items():
            values = np.concatenate(parts)
            found[name] = [values.dtype.name, packed(values)]
        return found

    def _component(self, key: str) -> list[np.ndarray]:
        parts = []
        for found, steps in zip(self.components, self.columns["step"], strict=True):
            parts.append(found.get(key, np.full(len(steps), np.nan)).astype(np.float32))
        return parts


@dataclass(frozen=True)
class Samples:
    """Result of ``_write_samples``."""

    index: Index
    used: np.ndarray
    """int32 [distinct tokens]: ids of all tokens of the completions."""
    starts: dict[str, list[int]]
    """First row, or first image, of each shard, by kind of shard."""
    note: str
    """Description of images that are missing, or an empty string."""


@dataclass(frozen=True)
class Site:
    """Result of ``build``."""

    page: Path
    samples: int
    bytes: int
    """Size of the scripts on disk, in bytes."""
    note: str
    """Description of data that is missing on the page, or an empty string."""


def build(
    run_dir: str | Path, out: str | Path, live: bool = False, report: Callable[[str], None] | None = None
) -> Site:
    """Write the page of a run to the folder ``out``.

    Args:
        live: True to let the page check for new data every few seconds.
        report: called with a progress message after each file.

    Raises:
        ConfigError: if the run has no samples.
        RunError: if a file of the run is damaged, or the page cannot be written.
    """
    run_dir = Path(run_dir)
    out = Path(out)
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: not a run folder")
    files = _files(run_dir)
    if not files:
        raise ConfigError(f"{run_dir}: no samples found; set rollout.save_samples to write samples")
    config, note = _config(run_dir)
    try:
        with Scripts(out / FOLDER) as scripts:
            weights = dict(config.gdpo.rewards) if config else {}
            found = _write_samples(run_dir, files, scripts, weights, report)
            index = found.index
            note = note or _write_vocabulary(scripts, run_dir, config, found.used)
            note = "; ".join(filter(None, (note, found.note)))
            scripts.write("snippets", index.snippets)
            scripts.write("index", _index(run_dir, index, found.starts, live))
            scripts.write("stamp", _stamp(files))
        _write_page(out / PAGE, real_path(run_dir).name)
        size = sum(path.stat().st_size for path in (out / FOLDER).glob("*.js"))
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error.strerror or error})") from None
    return Site(out / PAGE, index.rows, size, note)


def stamp_of(run_dir: str | Path) -> str:
    """Return a hash that changes when the run's rollout files change."""
    return _stamp(_files(Path(run_dir)))


def _files(run_dir: Path) -> list[tuple[int, int, Path]]:
    """Return (index in ``_KINDS``, step, path) of each rollout file."""
    found = []
    for kind, files in enumerate((rollout_files(run_dir), validation_files(run_dir))):
        found += [(kind, step, path) for step, path in files]
    return found


def _stamp(files: list[tuple[int, int, Path]]) -> str:
    stats = []
    for kind, step, path in files:
        with contextlib.suppress(FileNotFoundError):  # a resumed run may remove files
            found = path.stat()
            stats.append((kind, step, found.st_mtime_ns, found.st_size))
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]


def _config(run_dir: Path) -> tuple[Config | None, str]:
    try:
        return load_saved_config(run_dir / "config.yaml"), ""
    except ConfigError as error:
        return None, f"{error}; the page shows neither token texts nor GRPO advantages"


def _write_samples(
    run_dir: Path,
    files: list[tuple[int, int, Path]],
    scripts: Scripts,
    weights: dict[str, float],
    report: Callable[[str], None] | None,
) -> Samples:
    """Write the shards."""
    index = Index()
    texts = TextShards(scripts)
    tokens = TokenShards(scripts)
    images = ThumbnailShards(scripts, run_dir)
    used = np.zeros(0, np.int32)
    for number, (kind, step, path) in enumerate(files, 1):
        table = read_samples(path)
        if table.num_rows:
            found = tokens_of(table, path)
            components = components_of(table)
            _add_components(index, components)
            _add_numbers(index, table, found, components.rewards, weights, kind=kind, step=step)
            _add_texts(texts, table, index, components, images)
            tokens.add(found)
            used = np.union1d(used, found.ids)
        if report:
            report(f"{number} of {len(files)} files, {index.rows:,} samples")
    texts.close()
    tokens.close()
    images.close()
    if not index.rows:
        raise ConfigError(f"{files[0][2].parent}: no samples found")
    starts = {"text": texts.starts, "tokens": tokens.starts, "images": images.starts}
    missing = f"{images.missing} images are missing or damaged" if images.missing else ""
    return Samples(index, used.astype(np.int32), starts, missing)


def _add_components(index: Index, components: Components) -> None:
    columns = {}
    for kind, found in (("reward", components.rewards), ("term", components.terms)):
        for name, values in found.items():
            columns[f"{kind} {name}"] = values
            if name not in index.rewards:
                index.rewards.append(name)
    index.components.append(columns)


def _add_numbers(
    index: Index,
    table: Any,
    tokens: Tokens,
    rewards: dict[str, np.ndarray],
    weights: dict[str, float],
    *,
    kind: int,
    step: int,
) -> None:
    count = table.num_rows
    groups = groups_of(table)
    outcomes = table.column("outcome").to_pylist()
    prompts = [index.prompts.setdefault(name, len(index.prompts)) for name in table.column("prompt_id").to_pylist()]
    index.add(
        kind=np.full(count, kind, np.uint8),
        step=np.full(count, step, np.int32),
        group=groups,
        sample=table.column("sample_index").to_numpy().astype(np.int32),
        prompt=np.array(prompts, np.int32),
        outcome=index.codes("outcome", outcomes),
        environment=index.codes("environment", table.column("environment").to_pylist()),
        finish=index.codes("finish", table.column("finish_reason").to_pylist()),
        turns=table.column("turns").to_numpy().astype(np.int32),
        length=tokens.lengths.astype(np.int32),
        equal=equal_completions(table, groups),
        advantage=table.column("advantage").to_numpy(zero_copy_only=False).astype(np.float32),
        grpo=summed_advantages(rewards, groups, outcomes, weights),
        logprob=means_of(tokens.logprobs, tokens),
        gap=largest_gaps(tokens),
    )
    index.rows += count


def _add_texts(
    shards: TextShards, table: Any, index: Index, components: Components, thumbnails: ThumbnailShards
) -> None:
    from gdpo_nemo.observe.sample_columns import with_half_pairs

    names = ("prompt_id", "prompt", "completion", "detail")
    texts = with_half_pairs({name: table.column(name).to_pylist() for name in names}, table.column("not_utf8"))
    images, prompts = _images(table, texts["prompt"], thumbnails)
    columns = (
        texts["prompt_id"],
        prompts,
        components.rubrics,
        *(texts[name] for name in names[2:]),
        table.column("extra").to_pylist(),
        _by_sample(components.rewards, index.rewards, table.num_rows),
        _by_sample(components.terms, index.rewards, table.num_rows),
        components.verdicts,
        table.column("advantage").to_pylist(),
        table.column("policy_version").to_pylist(),
        map(spans_of, table.column("spans").to_pylist()),
        images,
    )
    for row in zip(*columns, strict=True):
        shards.add(*row)
    index.snippets.extend(text[:_SNIPPET] for text in texts["completion"])


def _images(table: Any, prompts: list[str], thumbnails: ThumbnailShards) -> tuple[list[list[int] | None], list[str]]:
    """Return the places of each sample's images, and the prompts with labels in place of placeholders."""
    import pyarrow.compute as pc

    rows = table.column("images").to_pylist()
    lengths = pc.list_value_length(table.column("prompt_ids")).to_pylist()
    recorded = RecordedImages()
    places, shown = [], []
    for row, length, prompt in zip(rows, lengths, prompts, strict=True):
        places.append(thumbnails.places(row, length))
        shown.append(with_labels(prompt, recorded.placed(row)))
    return places, shown


def _by_sample(columns: dict[str, np.ndarray], names: list[str], count: int) -> list[list[float | None] | None]:
    """Return the values of each sample in the order of ``names``. None for a sample without values."""
    rows: list[list[float | None] | None] = []
    for row in range(count):
        values = [float(columns[name][row]) if name in columns else math.nan for name in names]
        shown = [None if math.isnan(value) else value for value in values]
        rows.append(shown if any(value is not None for value in shown) else None)
    return rows


def _write_vocabulary(scripts: Scripts, run_dir: Path, config: Config | None, used: np.ndarray) -> str:
    """Write the texts of the tokens. Return a note if the texts are unknown, otherwise an empty string."""
    tokenizer, reason = tokenizer_of(run_dir, config) if config else (None, "")
    pieces = pieces_of(used, tokenizer) if tokenizer is not None else []
    scripts.write("vocabulary", {"ids": packed(used), "pieces": pieces})
    return f"{reason}: tokens are shown as IDs" if reason else ""


def _index(run_dir: Path, index: Index, starts: dict[str, list[int]], live: bool) -> dict[str, Any]:
    curves = _curves(run_dir)
    return {
        "run": real_path(run_dir).name,
        "rows": index.rows,
        "kinds": _KINDS,
        "rewards": index.rewards,
        "names": [index.names["outcome"], index.names["environment"], index.names["finish"]],
        "columns": index.packed(),
        "starts": [starts["text"], starts["tokens"], starts["images"]],
        "curves": curves,
        "live": live,
    }


def _curves(run_dir: Path) -> list[dict[str, Any]]:
    """Return the curves of mean rewards by component, entropy, completion length and gradient norm."""
    history = History.of(read_metrics(run_dir))
    keys = [(name, f"reward/{name}/mean") for name in history.components]
    keys += [("entropy", "policy/entropy"), ("tokens", "rollout/mean_length"), ("gradient norm", "grad_norm")]
    found = []
    for name, key in keys:
        points = [point for point in zip(*history.curve(key)) if math.isfinite(point[1])]
        if len(points) > 1:
            steps, values = zip(*points)
            found.append({"name": name, "steps": steps, "values": values})
    return found


def _write_page(path: Path, run: str) -> None:
    from jinja2 import Environment

    folder = resources.files("gdpo_nemo.tools.inspect") / "page"
    style = (folder / "page.css").read_text("utf-8")
    script = "'use strict';\n(() => {\n" + "".join((folder / n).read_text("utf-8") for n in SCRIPTS) + "})();\n"
    template = Environment(autoescape=True).from_string((folder / "page.html.j2").read_text("utf-8"))
    page = template.render(run=run, style=style, script=script, policy=_policy(style, script))
    write_whole(path, page.encode("utf-8", "replace"))


def _policy(style: str, script: str) -> str:
    """Return the page's Content-Security-Policy.

    ``strict-dynamic`` lets the page's script load data scripts. 'self' would not allow scripts on disk.
    """

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {digest(script)} 'strict-dynamic'; style-src {digest(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
