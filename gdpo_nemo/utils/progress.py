"""Named phases of this process with their progress, and faster, quieter imports of large libraries."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Progress:
    """Completed and total units of a task."""

    unit: str
    total: int
    done: int = 0

    def __str__(self) -> str:
        return f"{self.done:,} of {self.total:,} {self.unit}"


@dataclass
class Tally:
    """Progress of a batch of groups, as numbers of samples and scored groups."""

    samples: Progress
    groups: Progress

    @classmethod
    def of(cls, samples: int, groups: int) -> Tally:
        """Create a tally with no completed samples or groups."""
        return cls(Progress("samples", samples), Progress("groups scored", groups))

    def __str__(self) -> str:
        return f"{self.samples}, {self.groups}"


@dataclass(frozen=True, eq=False)
class Phase:
    """A phase in progress."""

    name: str
    since: float
    """Start time, in seconds of ``clock``."""
    detail: Callable[[], object]
    """Function that returns the progress for display, or an empty text.

    Other threads may call this function at any time.
    """


clock = time.monotonic
"""Clock that measures start times and durations of phases."""
# Phases are registered per process, like waits, so that code can report phases without a reference to the observers.
_phases: list[Phase] = []
_watchers: list[Callable[[Phase], None]] = []
_lock = threading.Lock()


@contextlib.contextmanager
def phase(name: str, detail: Callable[[], object] = str) -> Iterator[None]:
    """Register a phase for the duration of the block. ``Phase`` describes the argument ``detail``."""
    found = Phase(name, clock(), detail)
    with _lock:
        _phases.append(found)
    try:
        yield
    finally:
        with _lock:
            _phases.remove(found)
            watchers = list(_watchers)
        for watch in watchers:
            watch(found)


def current() -> list[Phase]:
    """Return the phases in progress, in order of their start."""
    with _lock:
        return list(_phases)


@contextlib.contextmanager
def watched(watcher: Callable[[Phase], None]) -> Iterator[None]:
    """Call ``watcher`` for every phase that ends while the block runs, in the thread that ran the phase."""
    with _lock:
        _watchers.append(watcher)
    try:
        yield
    finally:
        with _lock:
            _watchers.remove(watcher)


@contextlib.contextmanager
def importing(freeze: bool = True) -> Iterator[None]:
    """Turn off garbage collection in this block, and exclude the imported objects from later collections.

    The modules of vLLM and Megatron contain more than a million permanent objects. Scanning these objects repeatedly
    would take a fifth of an engine's startup time.

    Args:
        freeze: True to exclude all objects that exist at the end of the block from later collections (``gc.freeze``).
            Existing garbage in reference cycles is then never freed, so only processes of gdpo_nemo use this option.
    """
    with uncollected():
        try:
            yield
        finally:
            if freeze:
                gc.freeze()


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Exclude all existing objects from garbage collection in this block.

    A driver's modules contain half a million permanent objects. A step with many samples starts several collections,
    which would scan all of these objects.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Turn off garbage collection in this block. This is useful for code that creates many permanent objects."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def hidden(*names: str) -> Iterator[None]:
    """Make modules fail to import in this block, so that libraries treat them as not installed."""
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    absent: dict[str, Any] = dict.fromkeys(names)
    sys.modules.update(absent)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)


def quiet_torch() -> None:
    """Hide torch's warning about a missing CUDA runtime on a machine without a GPU.

    If torch finds `nvcc`, it warns in every process that imports its extension builder. On a machine with a GPU, the
    warning is still shown.
    """
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def import_transformers() -> None:
    """Import transformers, and skip three parts of the import that cost CPU time:

    * transformers reads the metadata of all installed packages (0.3 s), but uses only two or three entries. Instead,
      these entries are looked up individually.
    * transformers reads the files of all its models twice (0.3 s each). Here it reads them once.
    * The decorator that completes the docstring of a model's config imports the code for sampling (0.6 to 1.5 s).
      Instead, classes keep their own docstring.
    """
    if "transformers" in sys.modules:
        return
    name = "packages_distributions"
    read = getattr(importlib.metadata, name)
    setattr(importlib.metadata, name, lambda: _Providers(read))
    try:
        import_utils = importlib.import_module("transformers.utils.import_utils")
    finally:
        setattr(importlib.metadata, name, read)
    _read_models_once(import_utils)
    utils: Any = sys.modules["transformers.utils"]
    utils.auto_docstring = _keep_docstring


def _read_models_once(import_utils: Any) -> None:
    """Let ``transformers.models`` use the list of classes that the import of ``transformers`` has created."""
    define = import_utils.define_import_structure
    models = Path(import_utils.__file__).parents[1] / "models"
    found = define(models, prefix="models")  # the result is cached
    without_prefix: dict[Any, dict[str, Any]] = {}
    for backends, modules in found.items():
        without_prefix[backends] = {}
        for name, names in modules.items():
            if name.startswith("models."):
                without_prefix[backends][name.removeprefix("models.")] = names

    def define_import_structure(path: Any, prefix: str | None = None) -> Any:
        if prefix is None and Path(path) == models / "__init__.py":
            return without_prefix
        return define(path, prefix)

    import_utils.define_import_structure = define_import_structure


def _keep_docstring(obj: Any = None, **_: Any) -> Any:
    """Replace the decorator ``auto_docstring``, which may have arguments. Return classes and functions unchanged."""
    return (lambda found: found) if obj is None else obj


class _Providers(Mapping[str, list[str]]):
    """Lazy mapping from packages to the distributions that provide them.

    transformers prefers a distribution with the package's name. If this distribution is installed, ``get`` returns only
    its name. For flash-attn, ``get`` returns all names, because transformers compares the variants.
    """

    def __init__(self, read: Callable[[], Mapping[str, list[str]]]):
        self._read = read
        self._found: Mapping[str, list[str]] | None = None

    def get(self, key: str, default: Any = None) -> Any:
        """Return the names of the distributions that provide a package."""
        if self._found is None and not key.startswith("flash_attn"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return [importlib.metadata.distribution(key).metadata["Name"]]
        return self._all().get(key, default)

    def __getitem__(self, key: str) -> list[str]:
        return self._all()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> Mapping[str, list[str]]:
        if self._found is None:
            self._found = self._read()
        return self._found
