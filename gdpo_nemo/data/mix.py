"""Sources of the training rows and their fractions of the sampled prompts (``data.mix``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from gdpo_nemo.config.sections import DataConfig
from gdpo_nemo.utils.errors import ConfigError, nearest

SourceRow = tuple[str, str, Mapping[str, Any]]
"""(id, environment, columns) of a training row."""


def source_of_row(environment: str, columns: Mapping[str, Any], data: DataConfig) -> Any:
    """Return the source of a row: its environment, or the value in the column ``data.mix_key``."""
    return environment if data.mix_key is None else columns.get(data.mix_key)


def check_mix(data: DataConfig, rows: Iterable[SourceRow], *, complete: bool = True) -> Counter[str]:
    """Check that ``data.mix`` and the training rows name the same sources.

    Args:
        rows: training rows.
        complete: False if there are further rows, which may have further sources.

    Returns:
        Number of rows of each source.

    Raises:
        ConfigError: if a row has no source or a source that is not listed, or a source with a fraction has no row.
    """
    kind = "environment" if data.mix_key is None else data.mix_key
    counts: Counter[str] = Counter()
    for row_id, environment, columns in rows:
        source = source_of_row(environment, columns, data)
        if not isinstance(source, str):
            raise ConfigError(
                f"data.mix_key: row {row_id!r} of data.train has no text in the column {data.mix_key!r}"
                f"{nearest(str(data.mix_key), columns)}"
            )
        if source not in data.mix:
            raise ConfigError(
                f"data.mix: row {row_id!r} of data.train has the {kind} {source!r}, which is not listed; add it (0 "
                "leaves its rows out)"
            )
        counts[source] += 1
    for name, fraction in data.mix.items():
        if complete and fraction and not counts[name]:
            raise ConfigError(f"data.mix.{name}: no row of data.train has the {kind} {name!r}{nearest(name, +counts)}")
    return counts
