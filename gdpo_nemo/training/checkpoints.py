"""Checkpoints of a run: atomic writing, verification, and pruning by age and metric.

Order of events, on the driver unless noted::

    Trainer.save ─► finalize_checkpoint: complete a pending checkpoint first
                 ─► begin: create .writing_step_N/ with state.json and config.yaml; ranks start to write the policy
    async_save: the ranks write while steps train; after each step, finalize_checkpoint(wait=False) checks for the end
    otherwise:  finalize_checkpoint follows at once
    finish ─► wait for the files ─► files.json ─► sync the tree to disk ─► rename to step_N/ ─► sync the folder
           ─► prune: remove older checkpoints and left-over .writing_step_* folders
    resume: find_start ─► newest: verify, newest first, until one is undamaged; set_aside renames damaged ones

    .writing_step_N ─► step_N ─► removed (not the newest, not among the last keep_last or the best keep_best)
         │                └────► damaged_step_N (skipped at a resume)
         └─► removed (a file could not be written, or the process died before the rename)

``step_N/`` contains the policy's files, ``state.json`` (state of the driver) and ``files.json`` (size and CRC-32 of
every file). A folder without a complete ``files.json`` is a damaged checkpoint. All files of a checkpoint are on disk
before it is renamed, and its name is on disk before an older checkpoint is removed. A power failure therefore leaves at
least one complete checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gdpo_nemo.observe.run_files import LEDGER, LEDGER_MORE, fault
from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.utils.files import parse_json, read_text, sync_folder, sync_tree

_FILES = "files.json"
_READERS = 8
"""Number of files that are read concurrently for their checksums."""
_STATE = "state.json"
_NAME = re.compile(r"step_(\d+)")


UPDATES_UNKNOWN = -1
"""Value of ``RunState.updates`` for a checkpoint that was written before the number of updates was saved."""


@dataclass
class RunState:
    """Driver state that is needed to resume a run exactly."""

    step: int = 0
    """Number of completed steps."""
    position: int = 0
    """Number of prompts that these steps have consumed."""
    updates: int = 0
    """Number of optimizer updates in these steps, including skipped updates. ``UPDATES_UNKNOWN`` in older
    checkpoints."""
    data: str = ""
    """Fingerprint of the training prompts."""
    model: str = ""
    """Fingerprint of the model that the run started from."""
    ledger: dict[str, Any] = field(default_factory=dict)
    """``rollouts.ledger.LedgerState`` as a dictionary.

    Empty if prompts are used in order, and in older checkpoints.
    """
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the most recent validation. One of these metrics may rank the checkpoints."""
    algorithm: dict[str, Any] = field(default_factory=dict)
    """Result of ``Algorithm.state``. Empty if the algorithm has no state, and in older checkpoints."""
    goals_met: int = 0
    """Number of consecutive validations, up to the most recent one, that met all goals (``gdpo.stop_when``)."""


class Checkpoints:
    """Checkpoints of a run.

    Args:
        folder: ``checkpoints/`` in the run folder.
        keep_last: number of most recent checkpoints to keep.
        keep_best: number of best checkpoints to keep.
        metric: metric that ranks the checkpoints. None: keep only the most recent checkpoints.
        direction: 1 if larger values of the metric are better, otherwise -1.
    """

    def __init__(self, folder: str | Path, keep_last: int, keep_best: int, metric: str | None, direction: int = 1):
        self.folder = Path(folder)
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._metric = metric
        self._direction = direction
        self._begun: tuple[Path, Path] | None = None
        self._damaged: list[Path] = []

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, oldest first."""
        return [step for step in self._folder_steps() if (self.path(step) / _FILES).is_file()]

    def _folder_steps(self) -> list[int]:
        """Return the steps of all folders named like a checkpoint, oldest first."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint after ``step`` steps."""
        return self.folder / f"step_{step}"

    def save(self, state: RunState, write: Callable[[Path], None]) -> Path:
        """Write a complete checkpoint. Older checkpoints are removed only after the new checkpoint is complete.

        Args:
            write: called with the checkpoint folder, to which it writes the policy's files.

        Raises:
            RunError: if the checkpoint cannot be written. Earlier checkpoints are not lost.
        """
        self.begin(state, write)
        return self.finish(lambda: None)

    @property
    def pending(self) -> bool:
        """True if a checkpoint was started and is not complete yet."""
        return self._begun is not None

    def begin(self, state: RunState, write: Callable[[Path], None]) -> None:
        """Begin a checkpoint, which ``finish`` completes.

        Args:
            write: called with the checkpoint folder. The function may return before the policy's files are written.

        Raises:
            RunError: if the checkpoint cannot be written. Earlier checkpoints are not lost.
        """
        final = self.path(state.step)
        temporary = self.folder / f".writing_step_{state.step}"
        with self._all_or_nothing(final, temporary):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            (temporary / _STATE).write_text(json.dumps(asdict(state), indent=1))
            write(temporary)
        self._begun = final, temporary

    def finish(self, wait: Callable[[], None]) -> Path:
        """Complete the checkpoint that ``begin`` has started, and return its folder.

        Args:
            wait: function that returns when the policy's files are written.

        Raises:
            RunError: if the checkpoint cannot be written. Earlier checkpoints are not lost.
        """
        if self._begun is None:
            raise RuntimeError("no checkpoint was started")
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
            remaining = f"; step {self.steps()[-1]} is the last complete checkpoint" if self.steps() else ""
            step = final.name.removeprefix("step_")
            raise RunError(f"checkpoint of step {step} could not be written: {error}{remaining}") from error

    def newest(self, report_damage: Callable[[str], None]) -> tuple[Path, RunState] | None:
        """Return folder and state of the newest undamaged checkpoint, or None.

        Args:
            report_damage: called with one sentence for each damaged checkpoint.
        """
        for step in reversed(self._folder_steps()):
            folder = self.path(step)
            damage = _damage(folder)
            if damage is None:
                return folder, read_state(folder)
            report_damage(f"checkpoint {folder} is damaged ({damage}) and is skipped")
            self._damaged.append(folder)
        return None

    def set_aside(self) -> None:
        """Rename the damaged checkpoints that ``newest`` has found.

        Otherwise they would be considered newer than the run's next checkpoints, which would be pruned instead.

        Raises:
            RunError: if a folder cannot be renamed.
        """
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
            ranked = sorted((self._direction * value, step) for value, step in ranked if value is not None)
            keep.update(step for _, step in ranked[-self._keep_best :])
        for step in steps:
            if step not in keep and step != steps[-1]:
                shutil.rmtree(self.path(step), ignore_errors=True)
        for leftover in self.folder.glob(".writing_step_*"):
            shutil.rmtree(leftover, ignore_errors=True)


def read_state(folder: Path) -> RunState:
    """Read the driver state from a checkpoint folder.

    Raises:
        RunError: if it cannot be read.
    """
    try:
        saved = parse_json(read_text(folder / _STATE))
        if saved.get("updates") is None:
            saved["updates"] = UPDATES_UNKNOWN
        state = RunState(**saved)
        if not _is_state(state):
            raise ValueError("a value has the wrong type")
        return state
    except (AttributeError, OSError, ValueError, TypeError) as error:
        raise RunError(f"checkpoint {folder} is damaged ({_STATE} is not readable: {type(error).__name__})") from None


def _is_state(state: RunState) -> bool:
    """Return True if all fields have the right type and all counts are at least their minimum."""
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
    """Check the size and checksum of all files of a checkpoint.

    Raises:
        RunError: if a file is missing, truncated or changed.
    """
    damage = _damage(folder)
    if damage is not None:
        raise RunError(f"checkpoint {folder} is damaged ({damage})")


def _write_listing(folder: Path) -> None:
    names = _files_in(folder)
    sums = _crc32_of([folder / name for name in names])
    listing = {name: [(folder / name).stat().st_size, checksum] for name, checksum in zip(names, sums, strict=True)}
    (folder / _FILES).write_text(json.dumps(listing, indent=1))


def _files_in(folder: Path) -> list[str]:
    """Return the sorted names of all files in the folder.

    Skips files named .nfs*, which a network file system creates for files that are removed while they are open.
    """
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(str(path.relative_to(folder)) for path in files if not path.name.startswith(".nfs"))


def _read_listing(folder: Path) -> dict[str, tuple[int, int]] | None:
    """Return size and CRC-32 by file name from ``files.json``, or None if it is invalid."""
    try:
        listing = {name: (size, checksum) for name, (size, checksum) in parse_json(read_text(folder / _FILES)).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    valid = all(type(number) is int for number in itertools.chain.from_iterable(listing.values()))
    inside = all(not Path(name).is_absolute() and ".." not in Path(name).parts for name in listing)
    return listing if valid and inside else None


def _damage(folder: Path) -> str | None:
    """Describe the first damaged file of a checkpoint. None if the checkpoint is undamaged.

    An unlisted file is also treated as damage, because it could be read in place of another file.
    """
    listing = _read_listing(folder)
    if listing is None:
        return f"{_FILES} is not readable"
    if _STATE not in listing:
        return f"{_FILES} does not list {_STATE}"
    unlisted = sorted(set(_files_in(folder)) - {*listing, _FILES})
    if unlisted:
        return f"{_FILES} does not list {unlisted[0]}"
    for name, (size, _) in listing.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} of {size} bytes"
    found = _crc32_of([folder / name for name in listing])
    for name, (_, checksum) in listing.items():
        try:
            if next(found) != checksum:
                return f"{name} has changed"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def _crc32_of(files: Sequence[Path]) -> Iterator[int]:
    """Yield the CRC-32 of each file, in order. Threads read the files concurrently, because each rank writes a file."""
    with ThreadPoolExecutor(_READERS) as pool:
        yield from pool.map(_crc32, files)


def _crc32(file: Path) -> int:
    value = 0
    with open(file, "rb") as stream:
        while chunk := stream.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value


def model_fingerprint(folder: str | Path) -> str:
    """Return a checksum of a Hugging Face folder. The checksum covers config.json, and the name, size, beginning and
    end of each weight file."""
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
