"""Small files of a run folder and their schemas: status, alerts, trace, config, journal and ledger."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from gdpo_nemo.utils import waits
from gdpo_nemo.utils.errors import ConfigError, RunError, printable, printable_lines
from gdpo_nemo.utils.files import parse_json, parse_yaml, read_bytes, read_text

STATUS = "status.json"
LATEST_S = 1e11
"""Upper bound on times in seconds since the epoch, which is in the year 5138."""
LAST_STEP = 10**9
LARGEST_COUNT = 10**12
LARGEST = 1e100
"""Largest absolute metric value that is shown or used. Sums and squares of values up to this bound are finite."""

Check = Callable[[Any], bool]


def is_number(value: Any) -> bool:
    """Return True if a JSON value is a number with an absolute value of at most ``LARGEST``. Booleans are accepted."""
    return isinstance(value, (int, float)) and -LARGEST <= value <= LARGEST


def is_step(value: Any) -> bool:
    """Return True if a JSON value is a valid number of steps."""
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
    entries = value.values() if isinstance(value, dict) else [None]
    return all(
        isinstance(entry, list) and len(entry) == 2 and _is_text(entry[0]) and _is_process(entry[1])
        for entry in entries
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
    """Return True if a JSON value is a valid prompt index or number of updates. The value -1 means not recorded."""
    return isinstance(value, int) and not isinstance(value, bool) and -1 <= value <= LARGEST_COUNT


def _lists_of(*checks: Check) -> Check:
    """Return a check that accepts a list of lists. Each inner list must contain one value per check, in order."""

    def is_part(part: Any) -> bool:
        if not isinstance(part, list) or len(part) != len(checks):
            return False
        return all(check(value) for check, value in zip(checks, part))

    return lambda value: isinstance(value, list) and all(map(is_part, value))


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_number, value.values()))


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_count, value))


_SAMPLE = (is_count, _lists_of(is_count, is_count), _is_text)
_SAMPLES_WITH_HASHES = _lists_of(*_SAMPLE, _is_text)
_SAMPLES_OF_OLD_RUNS = _lists_of(*_SAMPLE)


def _are_samples(value: Any) -> bool:
    return _SAMPLES_WITH_HASHES(value) or _SAMPLES_OF_OLD_RUNS(value)


JOURNAL_STEP: Mapping[str, Check] = {
    "step": is_step,
    "groups": _lists_of(is_count, _is_text, _are_samples),
    "dropped": _lists_of(is_count, _is_text),
    "position": is_count,
    "published": _optional(is_count),
    "total_updates": is_count,
}
JOURNAL_MORE: Mapping[str, Check] = {"again": _are_counts, "weights": _are_numbers}
LEDGER: Mapping[str, Check] = {"position": is_count, "retired": _are_counts}
LEDGER_MORE: Mapping[str, Check] = {"dropped": _lists_of(is_count, _is_text)}


def read_lines(path: Path) -> list[bytes]:
    """Read a file and split it at line feeds.

    The last element is the text after the last line feed: empty, or an incomplete line after a crash. The result is
    empty if the file does not exist.

    Raises:
        RunError: if the file cannot be read.
    """
    try:
        return read_bytes(path).split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None


def fault(
    record: Mapping[str, Any], required: Mapping[str, Check], more: Mapping[str, Check] | None = None
) -> str | None:
    """Return the first key that is missing or has an invalid value, or None if the record is valid.

    Unknown keys are accepted, because newer versions may write them.

    Args:
        required: checks of the required keys.
        more: checks of the optional keys.
    """
    for key, check in required.items():
        if key not in record or not check(record[key]):
            return key
    for key, check in (more or {}).items():
        if key in record and not check(record[key]):
            return key
    return None


def read_status(run_dir: str | Path) -> dict[str, Any] | None:
    """Read the status of a run and make its texts printable. Return None if the file does not exist.

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
        raise ConfigError(f"{path}: is not a valid run status ({error})") from None
    if not isinstance(status, dict):
        raise ConfigError(f"{path}: is not a valid run status")
    if (key := fault(status, _STATUS, _STATUS_MORE)) is not None:
        raise ConfigError(f"{path}: is not a valid run status ({key}: {repr(status.get(key))[:60]})")
    return dict(printable_texts(status))


def status_if_whole(run_dir: str | Path) -> dict[str, Any]:
    """Read the status of a run. Return an empty dictionary if the file is missing or invalid."""
    try:
        return read_status(run_dir) or {}
    except ConfigError:  # Another version wrote the file, or the file is being written.
        return {}


def read_run_config(run_dir: str | Path, shown: bool = True) -> dict[str, Any]:
    """Read the config of a run, which another version may have written, as nested dictionaries.

    Args:
        shown: True to make all texts printable for display. False to return the texts unchanged.

    Raises:
        ConfigError: if the folder has no config, or the file is not a valid config.
    """
    path = Path(run_dir) / "config.yaml"
    try:
        config = parse_yaml(read_text(path))
    except OSError as error:
        raise ConfigError(f"{run_dir} does not contain a run (config.yaml: {error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())[:80]}") from None
    sections = config.items() if isinstance(config, dict) else [(None, None)]
    if not all(isinstance(name, str) and isinstance(section, dict) for name, section in sections):
        raise ConfigError(f"{path} is not a config; a config must contain sections (run:, gdpo:, policy:, ...)")
    return dict(printable_texts(config)) if shown else config


def printable_texts(value: Any) -> Any:
    """Make all texts in a JSON or YAML value printable, including keys."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(str(key)): printable_texts(inner) for key, inner in value.items()}
    return [printable_texts(inner) for inner in value] if isinstance(value, list) else value


def shown_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Prepare a row of metrics for display: make names printable and omit invalid values.

    Invalid values are NaN and absolute values above ``LARGEST``.
    """
    return {printable(name): value for name, value in row.items() if is_number(value) and not math.isnan(value)}


RESTARTING = "restarting"
"""Outcome of a process whose run is about to restart."""

_PERIOD_S = 1.0


class StatusFile:
    """Writer of the status file. A separate thread updates the file, even while all other threads wait.

    Args:
        describe: function that returns details of the run (step, version, roles, queues). The separate thread calls
            this function.
    """

    def __init__(self, run_dir: Path, describe: Callable[[], dict[str, Any]]):
        self._file = run_dir / STATUS
        self._describe = describe
        for torn in run_dir.glob(f"{self._file.stem}.[0-9a]*"):  # A process was killed while writing this file.
            torn.unlink(missing_ok=True)
        self._lock = threading.Lock()
        self._waits: list[waits.Wait] = []
        self._more: dict[str, Any] = {}
        self._begun = 0
        self._written = 0
        """Number of the status in the file. The two threads number their statuses in the order in which they begin."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="status", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        while True:
            self._write()
            if self._stop.wait(_PERIOD_S):
                return

    def write(self, waiting: list[waits.Wait], **more: Any) -> None:
        """Write the status now. Later statuses repeat ``waiting``, for example a wait that has expired, and ``more``.

        If writing fails, the file keeps its previous content.
        """
        with self._lock:
            self._waits, self._more = waiting, more
        self._write()

    def _write(self) -> None:
        with self._lock:
            self._begun = number = self._begun + 1
            waiting = [] if self._stop.is_set() else waits.current()
            status = {"waits": [asdict(wait) for wait in dict.fromkeys([*self._waits, *waiting])], **self._more}
        # Outside the lock, because this may take long, for example if Ray has been lost.
        status = dict(time=time.time(), host=socket.gethostname(), driver=os.getpid()) | self._describe() | status
        with self._lock:
            if number < self._written:
                return
            # If the disk is full, the run ends with a message when it writes metrics. An error of the status file must
            # not end the thread or hide this message.
            with contextlib.suppress(OSError):
                temporary = self._file.with_suffix(f".{threading.get_ident()}")
                temporary.write_text(json.dumps(status, indent=1))
                os.replace(temporary, self._file)
                self._written = number

    def close(self, outcome: str) -> None:
        """Stop the thread and write the final status with the outcome of the run."""
        self._stop.set()
        self._thread.join()
        self.write([], outcome=outcome)


def amend_status(run_dir: Path, **fields: Any) -> None:
    """Change the status of a run whose process has ended. Do nothing if the file is missing or cannot be changed."""
    file = run_dir / STATUS
    with contextlib.suppress(OSError, ValueError):
        status = parse_json(read_text(file))
        if isinstance(status, dict):
            temporary = file.with_suffix(".amended")
            temporary.write_text(json.dumps({**status, "waits": [], **fields}, indent=1))
            os.replace(temporary, file)


ALERTS = "alerts.jsonl"


def write_alert(run_dir: str | Path, step: int, text: str, level: str = "ALERT") -> None:
    """Append an alert to the alerts file.

    Args:
        level: ``ALERT`` or ``note``.

    Raises:
        OSError: if the file cannot be written.
    """
    text = printable_lines(text)
    line = json.dumps({"time": time.time(), "step": step, "level": level, "text": text}) + "\n"
    with open(Path(run_dir) / ALERTS, "ab+") as file:
        _remove_torn_line(file)
        file.write(line.encode())


def _remove_torn_line(file: BinaryIO) -> None:
    """Remove an incomplete last line, left by a full disk, because it would corrupt the next alert."""
    file.seek(0)
    written = file.read()
    complete = written.rfind(b"\n") + 1
    if complete < len(written):
        file.truncate(complete)


def read_alerts(run_dir: str | Path) -> list[dict[str, Any]]:
    """Read all alerts in order. An incomplete last line is ignored.

    Raises:
        RunError: if a line is not an alert, or the file cannot be read.
    """
    path = Path(run_dir) / ALERTS
    return [_alert(line, f"{path}, line {number}") for number, line in enumerate(read_lines(path)[:-1], start=1)]


def _alert(line: bytes, where: str) -> dict[str, Any]:
    try:
        alert = parse_json(line)
    except ValueError:
        alert = None
    if not isinstance(alert, dict) or fault(alert, ALERT, ALERT_MORE) is not None:
        raise RunError(f"{where}: not a valid alert")
    # Line feeds are not escaped, because they are harmless on a terminal.
    text = printable_lines(alert["text"])
    return {**printable_texts(alert), "text": text}


TRACE = "trace.json"


class TraceLog:
    """Writer of the trace file, with spans in named tracks. Times are in seconds since the epoch."""

    def __init__(self, run_dir: str | Path) -> None:
        path = Path(run_dir) / TRACE
        path.parent.mkdir(parents=True, exist_ok=True)
        earlier = read_trace(path)
        self._tracks = {e["args"]["name"]: e["tid"] for e in earlier if e.get("name") == "thread_name"}
        self._file = open(path, "w", encoding="utf-8")
        self._file.write("[\n")
        for event in earlier:
            self._write(event)
        self._file.flush()

    def add(self, track: str, name: str, start: float, end: float, **details: Any) -> None:
        """Add a span to ``track``. Viewers show ``details`` if the span is selected."""
        if track not in self._tracks:
            self._tracks[track] = len(self._tracks) + 1
            self._write(
                {"ph": "M", "pid": 1, "tid": self._tracks[track], "name": "thread_name", "args": {"name": track}}
            )
        times = {"ts": round(start * 1e6), "dur": max(0, round((end - start) * 1e6))}
        self._write({"ph": "X", "pid": 1, "tid": self._tracks[track], "name": name, **times, "args": details})
        self._file.flush()

    def close(self) -> None:
        """Complete the JSON array, so that strict JSON readers accept the file."""
        self._write({"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "gdpo_nemo"}}, last=True)
        self._file.close()

    def _write(self, event: dict[str, Any], last: bool = False) -> None:
        self._file.write(json.dumps(event) + ("\n]\n" if last else ",\n"))


def read_trace(path: str | Path) -> list[dict[str, Any]]:
    """Read the spans and track names of a trace, which may be incomplete.

    The result is empty if the file does not exist.
    """
    if not Path(path).exists():
        return []
    events = []
    for line in read_bytes(path).decode("utf-8", errors="replace").splitlines():
        try:
            event = parse_json(line.rstrip().rstrip(","))
        except ValueError:
            continue  # The line is a bracket, or incomplete after a crash.
        if isinstance(event, dict) and event.get("name") != "process_name":
            events.append(event)
    return events
