"""The checkpoint folder of a run: written under a temporary name, renamed, checked before use, pruned by age and
metric.

``checkpoints/step_N/`` holds the policy's files, ``state.json`` (what the driver knows) and ``files.json`` (size and
CRC-32 of every file). A folder without a whole ``files.json`` is a damaged checkpoint. All files and names of a
checkpoint are on the disk before it gets its name, and the name is before an older one is removed, so that a loss of
power leaves one of them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator

from gdpo_nemo.config.disk_sync import sync_folder, sync_tree
from gdpo_nemo.config.reading import parse_json, read_text
from gdpo_nemo.errors import RunError
from gdpo_nemo.observe.run_files import LEDGER, LEDGER_MORE, fault

_FILES = "files.json"
_STATE = "state.json"
_NAME = re.compile(r"step_(\d+)")


UPDATES_UNKNOWN = -1
"""``RunState.updates`` of a checkpoint that was written before updates were recorded."""


@dataclass
class RunState:
    """What the driver has to know to go on exactly."""

    step: int = 0
    """Steps done."""
    position: int = 0
    """Prompts consumed by those steps."""
    updates: int = 0
    """Optimizer updates of those steps, skipped ones included; ``UPDATES_UNKNOWN`` in a state without that number."""
    data: str = ""
    """Fingerprint of the training prompts."""
    model: str = ""
    """Fingerprint of the model the run started from."""
    ledger: dict[str, Any] = field(default_factory=dict)
    """``rollouts.ledger.LedgerState`` as a dictionary; empty where prompts are dealt in order, and in older
    checkpoints."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The newest value of the metric that ranks checkpoints."""
    algorithm: dict[str, Any] = field(default_factory=dict)
    """``Algorithm.state``; empty where it has none, and in older checkpoints."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: ``checkpoints/`` of the run.
        metric: name by which the best are kept, larger is better; None keeps by age only.
    """

    def __init__(self, folder: str | Path, keep_last: int, keep_best: int, metric: str | None):
        self.folder = Path(folder)
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._metric = metric
        self._begun: tuple[Path, Path] | None = None
        self._damaged: list[Path] = []

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, oldest first."""
        return [step for step in self._named() if (self.path(step) / _FILES).is_file()]

    def _named(self) -> list[int]:
        """Steps of all folders that are named as a checkpoint, oldest first."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        """Folder of the checkpoint after ``step`` steps."""
        return self.folder / f"step_{step}"

    def save(self, state: RunState, write: Callable[[Path], None]) -> Path:
        """Write a checkpoint; ``write(folder)`` adds the policy's files. The previous ones stay until this one is
        whole.

        Raises:
            RunError: it could not be written; nothing that was there before is lost.
        """
        self.begin(state, write)
        return self.finish(lambda: None)

    @property
    def pending(self) -> bool:
        """Whether a checkpoint was begun and is not whole yet."""
        return self._begun is not None

    def begin(self, state: RunState, write: Callable[[Path], None]) -> None:
        """Start a checkpoint; ``write(folder)`` need only start the policy's files. Raises as ``save``."""
        final = self.path(state.step)
        temporary = self.folder / f".writing_step_{state.step}"
        with self._all_or_nothing(final, temporary):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            (temporary / _STATE).write_text(json.dumps(asdict(state), indent=1))
            write(temporary)
        self._begun = final, temporary

    def finish(self, wait: Callable[[], None]) -> Path:
        """Make the checkpoint that was begun a whole one; ``wait()`` returns when its files are there. Raises as
        ``save``."""
        if self._begun is None:
            raise RuntimeError("no checkpoint was begun")
        (final, temporary) = self._begun
        self._begun = None
        with self._all_or_nothing(final, temporary):
            wait()
            _write_listing(temporary)
            sync_tree(temporary)
            if final.exists():
                shutil.rmtree(final)
            os.replace(temporary, final)
            sync_folder(self.folder)
            sync_folder(self.folder.parent)
        self._prune()
        return final

    @contextlib.contextmanager
    def _all_or_nothing(self, final: Path, temporary: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, RunError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            kept = f"; step {self.steps()[-1]} is the last good one" if self.steps() else ""
            step = final.name.removeprefix("step_")
            raise RunError(f"checkpoint of step {step} could not be written: {error}{kept}") from error

    def newest(self, complain: Callable[[str], None]) -> tuple[Path, RunState] | None:
        """The newest checkpoint whose files are as they were written; ``complain`` hears of each that is not."""
        for step in reversed(self._named()):
            folder = self.path(step)
            damage = _damage(folder)
            if damage is None:
                return folder, read_state(folder)
            complain(f"checkpoint {folder} is damaged ({damage}) and is passed over")
            self._damaged.append(folder)
        return None

    def set_aside(self) -> None:
        """Rename what ``newest`` passed over, or it would count as newer than what the run saves next, which would be
        pruned for it. Raises RunError: it cannot be renamed."""
        for folder in self._damaged:
            names = (f"damaged_{folder.name}" + (f"_{number}" if number else "") for number in itertools.count())
            free = next(folder.with_name(name) for name in names if not folder.with_name(name).exists())
            try:
                os.rename(folder, free)
            except OSError as error:
                raise RunError(f"{folder} cannot be renamed to {free.name}: {error.strerror or error}") from None
        self._damaged = []

    def _prune(self) -> None:
        steps = self.steps()
        keep = set(steps[-self._keep_last :] if self._keep_last else [])
        if self._metric and self._keep_best:
            ranked = [(read_state(self.path(s)).metrics.get(self._metric), s) for s in steps]
            ranked = sorted((value, step) for value, step in ranked if value is not None)
            keep.update(step for _, step in ranked[-self._keep_best :])
        for step in steps:
            if step not in keep and step != steps[-1]:
                shutil.rmtree(self.path(step), ignore_errors=True)
        for leftover in self.folder.glob(".writing_step_*"):
            shutil.rmtree(leftover, ignore_errors=True)


def read_state(folder: Path) -> RunState:
    """The driver's state in a checkpoint folder. Raises RunError: it cannot be read."""
    try:
        saved = parse_json(read_text(folder / _STATE))
        if saved.get("updates") is None:
            saved["updates"] = UPDATES_UNKNOWN
        state = RunState(**saved)
        if not _is_state(state):
            raise ValueError("a number, text or dictionary in the place of another")
        return state
    except (AttributeError, OSError, ValueError, TypeError) as error:
        raise RunError(f"checkpoint {folder} is damaged ({_STATE} is not readable: {type(error).__name__})") from None


def _is_state(state: RunState) -> bool:
    """Whether every field has the type that it should have, and no count is below what it can be."""
    counts = ((state.step, 0), (state.position, 0), (state.updates, UPDATES_UNKNOWN))
    texts = (state.data, state.model)
    return (
        all(type(count) is int and least <= count for count, least in counts)
        and all(isinstance(text, str) for text in texts)
        and isinstance(state.ledger, dict)
        and (not state.ledger or fault(state.ledger, LEDGER, LEDGER_MORE) is None)
        and isinstance(state.algorithm, dict)
        and isinstance(state.metrics, dict)
        and all(isinstance(value, (int, float)) for value in state.metrics.values())
    )


def check_whole(folder: Path) -> None:
    """Hold every file of a checkpoint against what was written. Raises RunError: one is missing, torn or changed."""
    damage = _damage(folder)
    if damage is not None:
        raise RunError(f"checkpoint {folder} is damaged ({damage})")


def _write_listing(folder: Path) -> None:
    listing = {name: [(folder / name).stat().st_size, _crc32(folder / name)] for name in _files_in(folder)}
    (folder / _FILES).write_text(json.dumps(listing, indent=1))


def _files_in(folder: Path) -> list[str]:
    """Names of all that is no folder, in order. A network file system's remains of files removed while open do not
    count."""
    there = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(str(path.relative_to(folder)) for path in there if not path.name.startswith(".nfs"))


def _read_listing(folder: Path) -> dict[str, tuple[int, int]] | None:
    """Size and CRC-32 by name; None where that is not what the file holds."""
    try:
        listing = {name: (size, checksum) for name, (size, checksum) in parse_json(read_text(folder / _FILES)).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    whole = all(type(number) is int for pair in listing.values() for number in pair)
    inside = all(not Path(name).is_absolute() and ".." not in Path(name).parts for name in listing)
    return listing if whole and inside else None


def _damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None. The list has every file of the folder, or a file could be added
    that is read in the place of another."""
    listing = _read_listing(folder)
    if listing is None:
        return f"{_FILES} is not readable"
    if _STATE not in listing:
        return f"{_FILES} does not list {_STATE}"
    strangers = sorted(set(_files_in(folder)) - {*listing, _FILES})
    if strangers:
        return f"{_FILES} does not list {strangers[0]}"
    for name, (size, checksum) in listing.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} of {size} bytes"
        try:
            if _crc32(file) != checksum:
                return f"{name} has changed"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def _crc32(file: Path) -> int:
    value = 0
    with open(file, "rb") as stream:
        while chunk := stream.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value


def model_fingerprint(folder: str | Path) -> str:
    """A checksum of a Hugging Face folder: its configuration, and name, size and both ends of every weight file."""
    folder = Path(folder)
    value = zlib.crc32((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        value = zlib.crc32(f"{file.name} {size}".encode(), value)
        with open(file, "rb") as stream:
            value = zlib.crc32(stream.read(1 << 16), value)
            stream.seek(max(0, size - (1 << 16)))
            value = zlib.crc32(stream.read(), value)
    return f"{value:08x}"
