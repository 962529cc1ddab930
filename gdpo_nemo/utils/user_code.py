"""Loading of user-defined classes and functions, with an optional test import in a separate process."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Iterable, Iterator, Mapping, NoReturn, Sequence

from gdpo_nemo.utils.errors import ConfigError, first_line, nearest
from gdpo_nemo.utils.files import real_path
from gdpo_nemo.utils.signals import STOPPED
from gdpo_nemo.utils.source import find_file
from gdpo_nemo.utils.user_modules import module_of
from gdpo_nemo.utils.waits import work_done

PICKLE = ".pkl"
"""Suffix of a file that contains a pickled dictionary of objects by name. The Python function ``train`` writes such a
file for functions without an import path."""


_ROW_FORMATS = "gdpo_nemo.data.row_formats."
_RENAMED = {
    "gdpo_nemo.interop.axolotl.data.": _ROW_FORMATS,  # up to version 0.1
    "gdpo_nemo.interop.nemo_rl.rows.": _ROW_FORMATS,
    "gdpo_nemo.tools.interop.axolotl.data.": _ROW_FORMATS,
    "gdpo_nemo.tools.interop.nemo_rl.rows.": _ROW_FORMATS,
    "gdpo_nemo.environments.tasks.gsm8k.solved_row": f"{_ROW_FORMATS}gsm8k",
}
"""Current beginning of an import path, by an earlier one. Configs of translators and of run folders name functions that
convert rows by the name of their time."""


def is_reference(text: str) -> bool:
    """Return True if the text has the form of an import path.

    The forms are ``file.py:name``, ``pkg.mod:name``, ``pkg.mod.name`` and ``file.pkl:name``.
    """
    return ":" in text or "." in text


def load_object(reference: str) -> Any:
    """Return the object at ``file.py:name``, ``pkg.mod:name``, ``pkg.mod.name`` or ``file.pkl:name``.

    A Python file (``find_file``) is imported as a module of ``user_modules``.

    Raises:
        ConfigError: if the module or the name does not exist, or the import fails.
    """
    dotted = reference.replace(":", ".")
    for before, now in _RENAMED.items():
        if dotted.startswith(before):
            reference = now + dotted.removeprefix(before)
    location, _, name = reference.rpartition(":") if ":" in reference else reference.rpartition(".")
    if not location or not name:
        raise ConfigError(f"{reference!r} does not name an object; write file.py:name or package.module.name")
    if location.endswith(PICKLE):
        return _unpickled(location, name)
    file = file_of_module(location)
    module = _load_module(location) if file is None else _load_file(file)
    if not hasattr(module, name):
        names = [known for known in vars(module) if not known.startswith("_")]
        raise ConfigError(f"{location} has no {name!r}{nearest(name, names)}")
    return getattr(module, name)


def file_of_module(module: str) -> str | None:
    """Return the file to load for the module part of an import path, or None for an installed package.

    The module is a ``.py`` file, or a dotted name such as ``pkg.rewards`` if ``pkg/rewards.py`` exists.
    """
    if module.endswith(".py"):
        return module
    file = module.replace(".", "/") + ".py"
    top = module.partition(".")[0]
    if top in sys.modules or find_file(file) is None:
        return None
    return None if importlib.util.find_spec(top) else file


def _unpickled(file: str, name: str) -> Any:
    """Return an object from a pickled dictionary. The file is trusted, because it can run code like a module."""
    try:
        with os_exit_blocked():
            objects = pickle.loads(Path(file).read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"no such file: {file}") from None
    except BaseException as error:  # unpickling imports modules, which may raise any exception
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ConfigError(
            f"cannot read the objects in {file}: {first_line(error)}; these objects require the modules and the Python "
            "version that they were written with"
        ) from error
    if not isinstance(objects, dict):
        raise ConfigError(f"{file} contains {type(objects).__name__}, not a dictionary of objects by name")
    if name not in objects:
        raise ConfigError(f"{file} has no {name!r}{nearest(name, objects)}")
    return objects[name]


def load_functions(key: str, import_paths: Iterable[str], classes: bool = False) -> dict[str, Callable[..., Any]]:
    """Load user-defined functions and return them by import path.

    Args:
        key: config key that contains the import paths, for messages.
        classes: True if a path may name a class. The result then contains a new instance, which may have state.

    Raises:
        ConfigError: if a function cannot be loaded, or a class does not fit.
    """
    found = {}
    for import_path in import_paths:
        try:
            found[import_path] = load_object(import_path)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from error
        if isinstance(found[import_path], type):
            if not classes:
                raise ConfigError(f"{key}: {import_path} is a class; this key requires a function")
            found[import_path] = _instance(key, import_path, found[import_path])
        if not callable(found[import_path]):
            raise ConfigError(f"{key}: {import_path} is not callable")
    return found


def _instance(key: str, import_path: str, cls: type) -> Any:
    """Return an instance of a class that is used like a function. Raises ConfigError if the class does not fit."""
    missing = {"state", "load_state"} - set(dir(cls))
    if len(missing) == 1:
        raise ConfigError(f"{key}: {import_path} must define {missing.pop()}, because it defines the other of the pair")
    try:
        with exits_contained():
            return cls()
    except Exception as error:
        raise ConfigError(f"{key}: {import_path}() raised {first_line(error)}") from error


def has_state(function: Callable[..., Any]) -> bool:
    """Return True if a custom function is an object with the methods ``state`` and ``load_state``."""
    return hasattr(function, "state") and hasattr(function, "load_state")


def absolute_import_path(name: str) -> str:
    """Make the file path in ``file.py:name`` absolute, so that other processes can use the import path.

    Any other name is returned unchanged.
    """
    file, colon, function = name.rpartition(":")
    found = find_file(file) if file.endswith(".py") else None
    return f"{real_path(found)}{colon}{function}" if found else name


_real_exit = os._exit
_blocked = threading.local()


def _exit(status: int) -> NoReturn:
    if getattr(_blocked, "pid", None) == os.getpid():
        raise SystemExit(f"it calls os._exit({status!r})")
    _real_exit(status)


os._exit = _exit


@contextlib.contextmanager
def os_exit_blocked() -> Iterator[None]:
    """Make ``os._exit`` raise SystemExit in this block and thread, so that user code cannot end the process silently.

    Forked processes can still exit with ``os._exit``.
    """
    before = getattr(_blocked, "pid", None)
    _blocked.pid = os.getpid()
    try:
        yield
    finally:
        _blocked.pid = before


class ExitRaised(Exception):
    """Replaces SystemExit and other exceptions that are not subclasses of Exception. See ``exits_contained``."""


@contextlib.contextmanager
def exits_contained() -> Iterator[None]:
    """Convert exceptions of user code that would end the process, or the event loop that waits for the user code.

    Such exceptions are SystemExit and other exceptions that are not subclasses of Exception. ``os._exit`` raises
    SystemExit. The exceptions of signal handlers, which run in the main thread, propagate.

    Raises:
        ExitRaised: in place of these exceptions.
    """
    try:
        with os_exit_blocked():
            yield
    except Exception:
        raise
    except BaseException as error:
        by_signal = isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code in STOPPED)
        if by_signal and threading.current_thread() is threading.main_thread():
            raise
        raise ExitRaised(first_line(error)) from error


def _not_importable(module: str, error: BaseException) -> ConfigError:
    reason = str(error) if isinstance(error, ConfigError) else first_line(error)
    return ConfigError(f"cannot import {module}: {reason}")


def _load_module(name: str) -> ModuleType:
    try:
        if name.partition(".")[0] != __package__.partition(".")[0]:
            try_import(name)
        with os_exit_blocked():
            return importlib.import_module(name)
    except BaseException as error:  # user code may raise any exception
        if isinstance(error, KeyboardInterrupt):
            raise
        raise _not_importable(name, error) from error


def _load_file(file: str) -> ModuleType:
    path = find_file(file)
    if path is None:
        raise ConfigError(f"no such file: {file}")
    name = module_of(real_path(path))
    try:
        try_import(name)
        with os_exit_blocked():
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError as error:
                if not provide_trl_module(error):
                    raise
                return importlib.import_module(name)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise _not_importable(file, error) from error


IDLE_S = 10.0
"""Seconds without CPU time or I/O after which an import is considered stuck."""
LONGEST_S = 300.0
"""Maximum seconds of an import. Workers have the same limit for constructing their environments."""
_LOOK_S = 0.5

_TRIAL = Path(__file__).with_name("trial_process.py")
"""Script of the child process, which receives this process's search path."""

_trials_enabled = False


@contextlib.contextmanager
def imports_tried() -> Iterator[None]:
    """Test every import of user code in the block in a child process first.

    Only the process that the user starts needs this test. If user code ends a worker or a rank, other processes replace
    this process or report the failure.
    """
    global _trials_enabled
    before, _trials_enabled = _trials_enabled, True
    try:
        yield
    finally:
        _trials_enabled = before


def try_import(name: str) -> None:
    """Import a module in a child process.

    Has no effect unless ``imports_tried`` is active. Exceptions of the test import are ignored.

    Raises:
        ConfigError: if the import ends the child process, or is stuck. The error message does not name the module.
    """
    if not _trials_enabled or name in sys.modules:
        return
    reader, writer = os.pipe()
    arguments = [name, writer, sys.path, sys.argv]
    process = subprocess.Popen(
        [sys.executable, "-P", str(_TRIAL), json.dumps(arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(writer,),
        start_new_session=True,
    )
    os.close(writer)
    try:
        _wait(process, reader)
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):  # kill the group, with all processes that the import started
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], reader: int) -> None:
    """Wait until the import has ended.

    Raises:
        ConfigError: if the import ends the process, is stuck, or takes too long.
    """
    begin = changed = time.monotonic()
    work = None
    # Do not wait for the end of the pipe, because a process started by the import may keep the pipe open.
    while not select.select([reader], [], [], _LOOK_S)[0] and process.poll() is None:
        now = time.monotonic()
        if (done := work_done(process.pid)) != work:
            work, changed = done, now
        if now - changed > IDLE_S:
            raise ConfigError(
                f"its import is stuck: no CPU time or I/O for {IDLE_S:.0f} s (move code that waits into a function)"
            )
        if now - begin > LONGEST_S:
            raise ConfigError(f"its import has not finished after {LONGEST_S:.0f} s")
    if select.select([reader], [], [], 0)[0] and os.read(reader, 1):
        return
    code = process.wait()
    how = f"is killed by {signal.Signals(-code).name}" if code < 0 else f"exits with status {code}"
    raise ConfigError(f"a process that imports it {how}")


_OPENENV_MODULE = "trl.experimental.openenv"


def generate_rollout_completions(
    trainer: Any,
    prompts: Sequence[Any],
    *,
    generation_overrides: Mapping[str, Any] | None = None,
    as_chat: bool | None = None,
) -> list[dict[str, Any]]:
    """Sample a completion for each prompt.

    In rollout functions, this function replaces TRL's function of the same name.

    Args:
        trainer: trainer object that the rollout function receives.
        prompts: texts, or lists of messages.
        generation_overrides: sampling parameters for this call.
        as_chat: True if the prompts are messages. None decides by the type of the first prompt.

    Returns:
        ``prompt_ids``, ``completion_ids``, ``logprobs`` and ``text`` for each prompt.
    """
    if not prompts:
        return []
    chat = as_chat if as_chat is not None else not isinstance(prompts[0], str)
    client = trainer.vllm_generation.vllm_client
    found = (client.chat if chat else client.generate)(list(prompts), **(generation_overrides or {}))
    texts = [trainer.processing_class.decode(ids, skip_special_tokens=True) for ids in found["completion_ids"]]
    return [
        {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": logprobs, "text": text}
        for prompt_ids, ids, logprobs, text in zip(
            found["prompt_ids"], found["completion_ids"], found["logprobs"], texts
        )
    ]


def provide_trl_module(missing: ModuleNotFoundError) -> bool:
    """Provide a substitute for ``trl.experimental.openenv`` if an import failed because TRL or this module is missing.

    Returns:
        True if the substitute was added and the import can be repeated.
    """
    if missing.name not in (_OPENENV_MODULE, "trl") or _OPENENV_MODULE in sys.modules:
        return False
    module = ModuleType(_OPENENV_MODULE)
    module.generate_rollout_completions = generate_rollout_completions  # type: ignore[attr-defined]
    sys.modules[_OPENENV_MODULE] = module
    return True
