"""Script that isolates its process, and then executes a model-written program or the assertions that test it.

``sandbox.py`` starts this file with Python. The file imports only the standard library, because the sandbox contains
nothing else.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import fcntl
import importlib
import json
import operator
import os
import platform
import resource
import select
import signal
import sys
import types
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

TMP_BYTES = 2**24
"""Size of ``/tmp`` and maximum size of a file, in bytes."""
NOBODY = 65534
"""User and group id of programs, if the run's user may change ids."""
MAX_TOTAL_OUTPUT = 64
"""Maximum output of all runs of a program, as a multiple of the limit of one run."""
_MAX_MESSAGE_BYTES = 2**24
_MAX_FILES = 64
_MAX_THREADS = 64
_QUIET = 0x6
"""Flags MS_NOSUID and MS_NODEV of ``mount``."""


class IsolationError(Exception):
    """Raised if the process cannot be isolated."""


def _main() -> None:
    settings = json.loads(sys.argv[1])
    null = os.dup(0)  # /dev/null, opened outside for reading and writing
    # The kernel does not deliver signals from the namespace to its first process, except those with a handler.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if settings["readable"]:
        _isolate(settings["readable"], settings["maps"])
    _drop_privileges(settings["maps"] is not None)
    with open(settings["job"], encoding="utf-8") as file:
        job = json.load(file)
    state = _start_runs(job, settings, null)
    # From here on, this is the process of one run.
    _confine(settings["cpu_s"], settings["memory_bytes"])
    os.write(state, b"i")
    program = _compiled(job["source"]) if "source" in job else None
    if program is not None:
        os.write(state, b"c")
    os.dup2(null, 2)
    reader, writer = settings["pipes"] or (-1, -1)
    _close_except(0, 1, 2, reader, writer)
    sys.argv = ["program.py"]
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # the module site, which adds these, is not used
    sys.set_int_max_str_digits(0)
    if job["mode"] == "test":
        _test(job, _Peer(reader, writer))
    if program is None:
        os._exit(1)
    module = types.ModuleType("__main__" if job["mode"] == "run" else "solution")
    # Without a reference to this module, Python would clear its variables.
    sys.modules["sandbox"], sys.modules[module.__name__] = sys.modules["__main__"], module
    if job["mode"] == "serve":
        os.dup2(2, 1)
        _serve(program, module, reader, writer)
    exec(program, module.__dict__)


def _start_runs(job: Mapping[str, Any], settings: Mapping[str, Any], null: int) -> int:
    """Start a process for each input, one after the other, and report each run to ``sandbox.py``.

    The calling process is the first one of its process namespace and executes nothing of a program. It exits when
    the reader of its output has ended. The kernel ends all processes of the namespace together with it, so no program
    outlives the sandbox, whatever it does with its signals.

    Returns:
        In the process of a run: the file descriptor to report the letters i (isolated) and c (compiled). The calling
        process exits here.
    """
    spent_s, written, most = 0.0, 0, settings["output_bytes"]
    mounted = set(os.listdir("/tmp"))  # Python may be installed below /tmp
    for stdin in job.get("inputs", [""]):
        state_reader, state = os.pipe()
        output_reader, output_writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.dup2(sealed(stdin.encode("utf-8", "surrogatepass")), 0)
            os.dup2(output_writer, 1)
            return state
        _close_except(0, 1, 2, null, state_reader, output_reader)
        left = min(most, MAX_TOTAL_OUTPUT * most - written)
        output = _read_output(child, output_reader, left + 1)
        stopped = "output" if len(output) > left else ""
        if stopped:
            os.kill(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
        cpu_s, code = usage.ru_utime + usage.ru_stime, os.waitstatus_to_exitcode(status)
        # The kernel counts clock ticks for the limit, which may be far more than the CPU time that it reports.
        if cpu_s > settings["cpu_s"] or code == -signal.SIGXCPU:
            stopped = stopped or "cpu time"
        reached, output = os.read(state_reader, 2).decode(), output[:left]
        report = {"reached": reached, "code": code, "cpu_s": cpu_s, "stopped": stopped, "length": len(output)}
        _write_all(1, json.dumps(report).encode() + b"\n" + output)
        os.close(state_reader)
        os.close(output_reader)
        spent_s, written = spent_s + cpu_s, written + len(output)
        if stopped or "c" not in reached or spent_s > settings["total_cpu_s"] or not _empty("/tmp", mounted):
            break
    os._exit(0)


def _read_output(child: int, reader: int, count: int) -> bytes:
    """Read what a run prints until it ends or has printed ``count`` bytes."""
    ended = os.pidfd_open(child)
    poll = select.poll()
    for fd, events in ((1, 0), (reader, select.POLLIN), (ended, select.POLLIN)):
        poll.register(fd, events)
    content = b""
    while len(content) < count:
        ready = dict(poll.poll())
        if 1 in ready:  # the reader of this pipe has ended
            os._exit(1)
        if reader in ready:
            chunk = os.read(reader, count - len(content))
            content += chunk
            if not chunk:
                poll.unregister(reader)
        elif ended in ready:
            break
    return content


def _write_all(fd: int, content: bytes) -> None:
    while content:
        content = content[os.write(fd, content) :]


def _empty(folder: str, kept: Collection[str] = ()) -> bool:
    """Remove everything in a folder but the entries ``kept``. Return False if a program has made that impossible, such
    as by a very deep tree."""
    try:
        for entry in list(os.scandir(folder)):
            if entry.name in kept:
                continue
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)
                if not _empty(entry.path):
                    return False
                os.rmdir(entry.path)
            else:
                os.unlink(entry.path)
    except (OSError, RecursionError):
        return False
    return True


def sealed(content: bytes) -> int:
    """Return a file descriptor of a file in memory that cannot be changed."""
    fd = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    _write_all(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL)
    return fd


def _compiled(source: str) -> types.CodeType | None:
    with warnings.catch_warnings():  # a warning, such as of an invalid escape sequence, is not an error
        warnings.simplefilter("ignore")
        try:
            return compile(source, "program.py", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
            return None


def _close_except(*kept: int) -> None:
    start = 0
    for fd in [*sorted(fd for fd in kept if fd >= 0), 2**20]:
        if start < fd:  # os.closerange closes everything if the range is empty
            os.closerange(start, fd)
        start = fd + 1


_LIBC = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the C library. Raises IsolationError if the function fails."""
    converted = list(map(_converted, arguments))
    if getattr(_LIBC, name)(*converted) < 0:
        shown = " ".join(str(a) for a in arguments if isinstance(a, (int, str)))
        raise IsolationError(f"{name} {shown}: {os.strerror(ctypes.get_errno())}")


def _converted(argument: Any) -> Any:
    if isinstance(argument, int):
        return ctypes.c_long(argument)
    return os.fsencode(argument) if isinstance(argument, str) else argument


def _isolate(readable: Sequence[str], maps: tuple[int, int] | None) -> None:
    """Continue in a new process in new namespaces. The calling process waits for this process and exits with it.

    Args:
        maps: file descriptors to report this process to ``sandbox.py`` and to wait for it. If None, map the ids here.
    """
    user, group = os.getuid(), os.getgid()
    _call("unshare", 0x7C020000)  # CLONE_NEWUSER | NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS
    if maps:
        os.write(maps[0], json.dumps({"child-pid": os.getpid()}).encode())
        os.read(maps[1], 1)
    else:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{NOBODY} {user} 1")
        _write("/proc/self/gid_map", f"{NOBODY} {group} 1")
    child = os.fork()
    if child:
        _close_except(2)
        os._exit(bool(os.waitpid(child, 0)[1]))
    os.setsid()  # kill(0, ...) must not reach the process outside
    _mount(readable)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _drop_privileges(from_root: bool) -> None:
    """Limit ``/tmp``, and give up the capabilities and the user id that the isolation needed."""
    _call("sethostname", "sandbox", 7)
    _call("mount", "none", "/tmp", None, _QUIET | 0x28, "nr_inodes=1024")  # MS_REMOUNT | MS_NOEXEC
    if from_root:  # fails if sandbox.py could not map the users
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    _call("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())


def _mount(readable: Sequence[str]) -> None:
    """Replace the root of the file system by an empty one with the readable folders and ``/tmp``."""
    bind_recursively, private_recursively = 0x5000, 0x44000  # MS_BIND | MS_REC, MS_PRIVATE | MS_REC
    system_call = {"pivot_root": {"x86_64": 155, "aarch64": 41}[platform.machine()], "mount_setattr": 442}
    root = "/proc"  # an existing folder that contains none of the readable folders
    _call("mount", "none", "/", None, private_recursively, None)
    _call("mount", "tmpfs", root, "tmpfs", _QUIET, "size=1m,nr_inodes=4096,mode=755")
    os.umask(0o022)
    os.mkdir(f"{root}/tmp")  # before the readable folders, because Python may be installed below /tmp
    _call("mount", "tmpfs", f"{root}/tmp", "tmpfs", _QUIET, f"size={TMP_BYTES},mode=1777")
    for path in readable:
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        else:
            os.makedirs(root + path)
            _call("mount", path, root + path, None, bind_recursively, None)
    os.chdir(root)
    _call("syscall", system_call["pivot_root"], ".", ".")
    _call("umount2", ".", 2)  # MNT_DETACH
    os.chdir("/")
    read_only = (ctypes.c_uint64 * 4)(0x7)  # attr_set: MOUNT_ATTR_RDONLY | NOSUID | NODEV
    writable = (ctypes.c_uint64 * 4)(0, 0x1)  # attr_clr
    _call("syscall", system_call["mount_setattr"], -100, "/", 0x8000, read_only, 32)  # AT_FDCWD, AT_RECURSIVE
    _call("syscall", system_call["mount_setattr"], -100, "/tmp", 0, writable, 32)
    os.chdir("/tmp")


def _confine(cpu_s: int, memory_bytes: int) -> None:
    """Set the resource limits and the seccomp filter of this process."""
    # At the limit of CPU time, SIGXCPU ends a program. A program that ignores it is killed a second later.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    for kind, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, TMP_BYTES),
        (resource.RLIMIT_NOFILE, _MAX_FILES),
        (resource.RLIMIT_NPROC, _MAX_THREADS),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))
    _call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    program = _seccomp_filter(platform.machine())
    instructions = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    filter_ = Program(len(program) // 8, ctypes.addressof(instructions))
    _call("prctl", 22, 2, ctypes.byref(filter_), 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


# fork vfork execve execveat ptrace mount umount2 pivot_root unshare setns socket memfd_create memfd_secret shmget
# msgget semget mq_open add_key request_key keyctl bpf perf_event_open userfaultfd process_vm_readv process_vm_writev
# open_tree move_mount fsopen fsconfig fsmount mount_setattr io_uring_setup pidfd_getfd; aarch64 does not have fork
# and vfork
_REFUSED_CALLS = {
    "x86_64": "57 58 59 322 101 165 166 155 272 308 41 319 447 29 68 64 240 248 249 250 321 298 323 310 311 428 429 "
    "430 431 432 442 425 438",
    "aarch64": "221 281 117 40 39 41 97 268 198 279 447 194 186 190 180 217 218 219 280 241 282 270 271 428 429 430 "
    "431 432 442 425 438",
}
_CLONE = {"x86_64": 56, "aarch64": 220}
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def _seccomp_filter(machine: str) -> bytes:
    """Return the seccomp filter as BPF instructions.

    Threads may be started, processes may not. A program cannot change the limits of another process.
    """
    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000  # EPERM, ENOSYS

    def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return code.to_bytes(2, "little") + bytes((if_true, if_false)) + value.to_bytes(4, "little")

    code = [instruction(load, 4), instruction(equal, _ARCHITECTURE[machine], 1), instruction(end, kill)]
    code += [instruction(load, 0), instruction(at_least, 0x40000000, 0, 1), instruction(end, refuse)]  # the x32 ABI
    for number in map(int, _REFUSED_CALLS[machine].split()):
        code += [instruction(equal, number, 0, 1), instruction(end, refuse)]
    code += [instruction(equal, 435, 0, 1), instruction(end, unknown)]  # clone3: the C library then calls clone
    code += [instruction(equal, _PRLIMIT[machine], 0, 4), instruction(load, 16)]
    code += [instruction(equal, 0, 1), instruction(end, refuse), instruction(end, allow)]  # 0 is the process itself
    code += [instruction(equal, _CLONE[machine], 0, 3), instruction(load, 16)]
    code += [instruction(any_bit, 0x10000, 1), instruction(end, refuse), instruction(end, allow)]  # CLONE_THREAD
    return b"".join(code)


_LIBRARY = (
    "builtins.range",
    "collections.Counter",
    "collections.OrderedDict",
    "collections.deque",
    "datetime.date",
    "datetime.datetime",
    "datetime.time",
    "datetime.timedelta",
    "datetime.timezone",
    "decimal.Decimal",
    "fractions.Fraction",
)
"""Classes of the standard library whose objects are passed by their arguments."""
_VIEWS: dict[str, Callable[[list[Any]], Any]] = {
    "dict_keys": lambda items: dict.fromkeys(items).keys(),
    "dict_values": lambda items: dict(enumerate(items)).values(),
    "dict_items": lambda items: dict(items).items(),
}


def _encode(value: Any, objects: dict[int, Any] | None) -> Any:
    """Convert a value to JSON. Objects other than data are stored in ``objects`` and replaced by their id.

    A number or text of a subclass is passed as a plain number or text, without a call of the subclass's methods.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    for plain in (int, float, str):
        if isinstance(value, plain):
            return getattr(plain, f"__{plain.__name__}__")(value)
    if isinstance(value, _Remote):
        return ["object", value._index]
    data = _encode_data(value, objects)
    if data is not None:
        return data
    if objects is None:
        raise TypeError(f"{type(value).__name__} cannot be passed to the program")
    objects[id(value)] = value
    return ["object", id(value)]


def _encode_data(value: Any, objects: dict[int, Any] | None) -> Any:
    """Return a container or an object of the standard library as JSON, or None for any other object."""
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, type) and value.__module__ == "builtins" and value.__name__ in vars(builtins):
        return ["type", value.__name__]
    if name in _LIBRARY:
        return [name, [_encode(argument, objects) for argument in _arguments(name, value)]]
    if isinstance(value, dict):
        return ["dict", [[_encode(k, objects), _encode(v, objects)] for k, v in value.items()]]
    if name.startswith("builtins.dict_"):
        return [type(value).__name__, [_encode(item, objects) for item in value]]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ["namedtuple", [type(value).__name__, list(value._fields), [_encode(item, objects) for item in value]]]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [_encode(item, objects) for item in value]]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    return None


def _arguments(name: str, value: Any) -> Sequence[Any]:
    """Return the arguments that create an equal object of a class in ``_LIBRARY``."""
    if name == "collections.deque":
        return list(value), value.maxlen
    return [list(value.items())] if name == "collections.OrderedDict" else list(value.__reduce__()[1])


def _decode(value: Any, from_index: Callable[[int], Any]) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind == "object":
        return from_index(int(content))
    if kind == "type" and isinstance(found := getattr(builtins, content), type):
        return found
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    if kind == "dict":
        return {_decode(k, from_index): _decode(v, from_index) for k, v in content}
    if kind == "namedtuple":
        name, fields, content = content
        collections = importlib.import_module("collections")
        return collections.namedtuple(name, fields)(*(_decode(item, from_index) for item in content))
    items = [_decode(item, from_index) for item in content]
    if kind in _VIEWS:
        return _VIEWS[kind](items)
    if kind in _LIBRARY:
        module, _, name = kind.partition(".")
        return getattr(importlib.import_module(module), name)(*items)
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *arguments, **named: function(*arguments, **named),
    "getattr": getattr,
    "setattr": setattr,
    "iter": iter,
    "next": next,
    "len": len,
    "str": str,
    "repr": repr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "contains": operator.contains,
    "bool": bool,
    "hash": hash,
    **{name: getattr(operator, f"__{name}__") for name in ("add", "sub", "mul", "truediv", "neg", "abs")},
}
"""Operations on objects of the program that a test may request."""
_COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
"""Operations on two objects of the program."""


def _serve(program: types.CodeType, module: types.ModuleType, reader: int, writer: int) -> NoReturn:
    """Load the program, and execute the requested operations until the tests end."""
    objects: dict[int, Any] = {}
    try:
        exec(program, module.__dict__)
        with os.fdopen(reader, "rb") as requests:
            for line in requests:
                operation, encoded, named = json.loads(line)
                try:
                    arguments = _decode(encoded, objects.__getitem__)
                    if operation == "name":
                        result = module.__dict__[arguments[0]]
                    else:
                        function = _OPERATIONS.get(operation) or _COMPARISONS[operation]
                        result = function(*arguments, **_decode(named, objects.__getitem__))
                    reply = ["value", _encode(result, objects), _encode(arguments, objects)]
                except (Exception, SystemExit) as error:
                    built_in = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
                    reply = ["error", built_in.__name__, _encode(error.args, objects)]
                os.write(writer, json.dumps(reply).encode() + b"\n")
    except BaseException:  # the program may raise anything, such as SystemExit
        os._exit(1)
    os._exit(0)


class _Peer:
    """Connection of the tests to the program."""

    def __init__(self, reader: int, writer: int):
        self._reader = os.fdopen(reader, "rb")
        self._writer = writer

    def request(self, operation: str, *arguments: Any, **named: Any) -> Any:
        """Execute an operation in the program's process. Raises the exception that the program raised, or its nearest
        built-in base class."""
        message = json.dumps([operation, _encode(list(arguments), None), _encode(named, None)])
        os.write(self._writer, message.encode() + b"\n")
        line = self._reader.readline(_MAX_MESSAGE_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError("the program has ended")
        kind, *content = json.loads(line)
        if kind == "error":
            known = getattr(builtins, str(content[0]), None)
            error = known if isinstance(known, type) and issubclass(known, (Exception, SystemExit)) else RuntimeError
            raise error(*_decode(content[1], lambda index: _Remote(self, index)))
        result, changed = (_decode(value, lambda index: _Remote(self, index)) for value in content)
        for argument, new in zip(arguments[1:], changed[1:]):  # functions may sort or fill their arguments
            if type(argument) is type(new) is list:
                argument[:] = new
            elif type(argument) is type(new) and isinstance(argument, (dict, set)):
                argument.clear()
                argument.update(new)
        return result


class _Remote:
    """Object in the program's process, such as a function or an instance of its classes.

    The program compares two of its objects, but not one of them with a value of the test.
    """

    def __init__(self, peer: _Peer, index: int):
        self.__dict__.update(_peer=peer, _index=index)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.request("getattr", self, name)


def _forward(operation: str) -> Callable[..., Any]:
    return lambda self, *arguments, **named: self._peer.request(operation, self, *arguments, **named)


def _forward_comparison(operation: str) -> Callable[..., Any]:
    def compare(self: _Remote, other: object) -> Any:
        return self._peer.request(operation, self, other) if isinstance(other, _Remote) else NotImplemented

    return compare


for _operation in set(_OPERATIONS) - {"getattr"}:
    setattr(_Remote, f"__{_operation}__", _forward(_operation))
for _operation in _COMPARISONS:
    setattr(_Remote, f"__{_operation}__", _forward_comparison(_operation))


def _test(job: Mapping[str, Any], peer: _Peer) -> NoReturn:
    """Execute the tests and write a JSON list of booleans, or a text if the tests are invalid.

    The setup may use the program's classes. It fails for a wrong program then, so the program does not pass the tests.
    """
    output = os.dup(1)
    os.dup2(2, 1)
    result: list[bool] | str
    scope: dict[str, Any] = {"__name__": "tests"}
    fetched: dict[str, Any] = {}
    wanted: list[tuple[str, bool]] = []
    try:
        setup = compile(job["setup"], "setup.py", "exec")
        tests = [compile(test, "test.py", "exec") for test in job["tests"]]
        wanted = _names_from_program(job)
        for name, is_module in wanted:
            try:
                fetched[name] = __import__(name) if is_module else peer.request("name", name)
            except Exception:  # tests that use the name fail with NameError
                continue
        scope.update(fetched)
        exec(setup, scope)
    except BaseException as error:  # the setup may raise anything
        from_program = {name for name, is_module in wanted if not is_module}
        if from_program and from_program & _names(ast.parse(job["setup"])):
            result = [False] * len(job["tests"])
        else:
            result = f"the tests of the row are invalid ({type(error).__name__}: {str(error)[:200]})"
    else:
        if job["names"] is not None:  # the setup of HumanEval defines an empty function of the same name
            scope.update(fetched)
        result = [_passes(test, scope) for test in tests]
    _write_all(output, json.dumps(result).encode())
    os._exit(0)


def _passes(test: types.CodeType, scope: dict[str, Any]) -> bool:
    try:
        exec(test, scope)
        return True
    except BaseException:  # the test may raise anything, such as SystemExit
        return False


def _names_from_program(job: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Return the names that setup and tests use without defining them, and whether a name is a module of Python's
    library.

    Names of built-ins and modules are not taken from the program, because it could replace them.
    """
    if job["names"] is not None:
        return [(name, False) for name in job["names"]]
    nodes: list[ast.AST] = []
    for text in (job["setup"], *job["tests"]):
        nodes += ast.walk(ast.parse(text))
    defined = {*vars(builtins), "__name__"}
    modules = set()
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            defined.add(node.id)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            modules.add(node.value.id)
    modules &= sys.stdlib_module_names
    free = dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name) and node.id not in defined)
    return [(name, name in modules) for name in free]


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


if __name__ == "__main__":
    _main()
