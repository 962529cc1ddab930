"""Readers of the small files of a run folder, each with one schema: ``status.json``, ``config.yaml``, alerts, rows,
journal, ledger.

Commands look at folders that other programs, other versions and other people wrote. A file is read here once for all of
them: what does not fit its schema is refused in one line, and texts come back printable, so that no file acts on the
terminal that shows it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Callable, Mapping

import yaml

from gdpo_nemo.config.reading import parse_json, parse_yaml, read_text
from gdpo_nemo.errors import ConfigError, printable

STATUS = "status.json"
LATEST_S = 1e11
"""Seconds since the epoch that a time may be: the year 5138."""
LAST_STEP = 10**9
LARGEST_COUNT = 10**12
LARGEST = 1e100
"""Largest metric that is shown or computed with; sums and squares of such numbers are still finite."""

Check = Callable[[Any], bool]


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a finite number that can be computed with; true and false count as 1 and 0."""
    return isinstance(value, (int, float)) and -LARGEST <= value <= LARGEST


def is_step(value: Any) -> bool:
    """Return whether a JSON value is a count of steps."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LAST_STEP


def _is_time(value: Any) -> bool:
    return is_number(value) and not isinstance(value, bool) and 0 <= value <= LATEST_S


def _is_process(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _is_wait(value: Any) -> bool:
    return isinstance(value, dict) and fault(value, _WAIT) is None


def _are_waits(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_wait, value))


def _are_roles(value: Any) -> bool:
    places = value.values() if isinstance(value, dict) else [None]
    return all(
        isinstance(place, list) and len(place) == 2 and _is_text(place[0]) and _is_process(place[1]) for place in places
    )


def _are_queues(value: Any) -> bool:
    return isinstance(value, dict) and all(is_number(depth) or _is_text(depth) for depth in value.values())


_WAIT: Mapping[str, Check] = {"what": _is_text, "owner": _is_text, "since": _is_time, "deadline": _optional(_is_time)}
_STATUS: Mapping[str, Check] = {"time": _is_time, "host": _is_text, "driver": _is_process, "waits": _are_waits}
_STATUS_MORE: Mapping[str, Check] = {
    "outcome": _optional(_is_text),
    "reason": _optional(_is_text),
    "step": _optional(is_step),
    "version": _optional(is_number),
    "restarts": _optional(is_step),
    "queues": _are_queues,
    "roles": _are_roles,
    "logs": _optional(_is_text),
}
ALERT: Mapping[str, Check] = {"step": is_step, "text": _is_text}
ALERT_MORE: Mapping[str, Check] = {"time": _is_time, "level": _is_text}


def is_count(value: Any) -> bool:
    """Return whether a JSON value is a position or a number of updates; -1 says that it was not recorded."""
    return isinstance(value, int) and not isinstance(value, bool) and -1 <= value <= LARGEST_COUNT


def _lists_of(*checks: Check) -> Check:
    """A list of lists, each of which has one value for each check."""
    return lambda value: (
        isinstance(value, list)
        and all(
            isinstance(part, list) and len(part) == len(checks) and all(check(v) for check, v in zip(checks, part))
            for part in value
        )
    )


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_count, value))


_SAMPLES = _lists_of(is_count, _lists_of(is_count, is_count), _is_text)
JOURNAL_STEP: Mapping[str, Check] = {
    "step": is_step,
    "groups": _lists_of(is_count, _is_text, _SAMPLES),
    "dropped": _lists_of(is_count, _is_text),
    "position": is_count,
    "published": _optional(is_count),
    "total_updates": is_count,
}
JOURNAL_MORE: Mapping[str, Check] = {"again": _are_counts}
LEDGER: Mapping[str, Check] = {"position": is_count, "retired": _are_counts}
LEDGER_MORE: Mapping[str, Check] = {"dropped": _lists_of(is_count, _is_text)}


def fault(
    record: Mapping[str, Any], required: Mapping[str, Check], more: Mapping[str, Check] | None = None
) -> str | None:
    """Return the first key that is missing or whose value does not fit the schema; None if all do.

    Keys that the schema does not name are those of a newer version, and fit.
    """
    for key, check in required.items():
        if key not in record or not check(record[key]):
            return key
    for key, check in (more or {}).items():
        if key in record and not check(record[key]):
            return key
    return None


def read_status(run_dir: str | Path) -> dict[str, Any] | None:
    """Return the status of a run, its texts printable; None if the run has not written it yet.

    Raises:
        ConfigError: if the file cannot be read or does not fit the schema.
    """
    path = Path(run_dir) / STATUS
    try:
        status = parse_json(read_text(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError(f"{path}: is not the status of a run ({error})") from None
    if not isinstance(status, dict):
        raise ConfigError(f"{path}: is not the status of a run")
    if (key := fault(status, _STATUS, _STATUS_MORE)) is not None:
        raise ConfigError(f"{path}: is not the status of a run ({key}: {repr(status.get(key))[:60]})")
    return dict(printable_texts(status))


def status_if_whole(run_dir: str | Path) -> dict[str, Any]:
    """Return the status of a run; empty if there is none that fits, for a view that is drawn again anyway."""
    try:
        return read_status(run_dir) or {}
    except ConfigError:  # of another version, or being written
        return {}


def read_run_config(run_dir: str | Path, shown: bool = True) -> dict[str, Any]:
    """Return the config of a run as plain nested mappings. It may be of another version.

    Args:
        shown: make its texts printable. False: they are compared or used, and are those of the file.

    Raises:
        ConfigError: if the folder has no config, or the file is not one.
    """
    path = Path(run_dir) / "config.yaml"
    try:
        config = parse_yaml(read_text(path))
    except OSError as error:
        raise ConfigError(f"{run_dir} holds no run (config.yaml: {error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())[:80]}") from None
    sections = config.items() if isinstance(config, dict) else [(None, None)]
    if not all(isinstance(name, str) and isinstance(section, dict) for name, section in sections):
        raise ConfigError(f"{path} is not a config: it must hold sections (run:, gdpo:, policy:, ...)")
    return dict(printable_texts(config)) if shown else config


def printable_texts(value: Any) -> Any:
    """Return a JSON or YAML value with every text in it, keys included, made printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(key)): printable_texts(inner) for key, inner in value.items()}
    return [printable_texts(inner) for inner in value] if isinstance(value, list) else value


def shown_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of metrics as it can be shown: names printable, without numbers beyond ``LARGEST``, NaN included."""
    return {printable(name): value for name, value in row.items() if is_number(value) and not math.isnan(value)}
