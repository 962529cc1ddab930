"""Pickles that would do something if anybody ran them: each would leave the file that it is given."""

from __future__ import annotations

import copyreg
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata


class _Calls:
    def __init__(self, function: Callable, *arguments: object):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


class Descendant(Metadata):
    """Looks like what an index holds, and runs code where it is given its state."""

    def __setstate__(self, state):
        Path(state["mark"]).write_text("ran")


def _text(value: str) -> bytes:
    data = value.encode()
    return pickle.SHORT_BINUNICODE + bytes([len(data)]) + data


def _by_name(module: str, name: str, *arguments: str) -> bytes:
    """A call of what the two names mean to STACK_GLOBAL, which follows dots in the second."""
    return b"\x80\x04" + _text(module) + _text(name) + b"\x93(" + b"".join(map(_text, arguments)) + b"tR."


def _nested_getattr(mark: Path) -> bytes:
    get = b"cbuiltins\ngetattr\n"
    system = get + b"(cos\npath\n" + _text("os") + b"tR"
    return b"\x80\x04" + get + b"(" + system + _text("system") + b"tR(" + _text(f"touch {mark}") + b"tR."


def _descendant(mark: Path) -> bytes:
    made = Descendant({})
    made.__dict__["mark"] = str(mark)
    return pickle.dumps(made)


def _registered(mark: Path) -> bytes:
    """A number in the place of a name; once looked up, the pickle module finds it in a cache and asks nobody."""
    if ("posix", "system") not in copyreg._extension_registry:
        copyreg.add_extension("posix", "system", 240)
    pickle.loads(b"\x80\x02\x82\xf0.")
    return b"\x80\x04\x82\xf0(" + _text(f"touch {mark}") + b"tR."


HOSTILE: dict[str, Callable[[Path], bytes]] = {
    "os.system by reduce": lambda mark: pickle.dumps(_Calls(os.system, f"touch {mark}")),
    "builtins.eval": lambda mark: pickle.dumps(_Calls(eval, f"open({str(mark)!r}, 'w')")),
    "nested getattr": _nested_getattr,
    "a function of torch that runs commands": lambda mark: _by_name("torch.utils.collect_env", "run", f"touch {mark}"),
    "dots through an allowed module": lambda mark: _by_name(
        "torch.distributed.checkpoint.metadata", "os.system", f"touch {mark}"
    ),
    "an instance by its class's name": lambda mark: b"(" + _text(f"touch {mark}") + b"ios\nsystem\n.",
    "a persistent id": lambda mark: b"\x80\x04P" + str(mark).encode() + b"\n.",
    "a registered number": _registered,
    "a subclass of an allowed class": _descendant,
    "a big allocation": lambda _: b"\x80\x05\x96" + struct.pack("<Q", 1 << 50) + b".",
    "a memo of many places": lambda _: b"\x80\x04Np" + str(1 << 50).encode() + b"\n.",
    "cut short": lambda mark: pickle.dumps({"state_dict_metadata": {str(n): n for n in range(100)}})[:200],
    "no pickle": lambda _: b"\xff\xfe words",
}
RUNNING = list(HOSTILE)[:6] + ["a registered number", "a subclass of an allowed class"]
"""Those that leave their file where ``pickle.loads`` gets them."""
