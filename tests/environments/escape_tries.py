"""Attempts to get out of a sandbox, by category. An attempt has succeeded if it ends without an exception.

``PREAMBLE`` defines the names that the attempts use. ``OUTSIDE``, ``PORT``, ``CHECKOUT``, ``HOME`` and ``PID`` are
replaced by a folder, a port, paths and a process outside.

An attempt that gets out must not change the machine: Python's library is opened for writing and not written.
"""

PREAMBLE = """
import builtins, ctypes, errno, fcntl, gc, os, resource, select, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"
def c(name, *arguments):
    result = getattr(libc, name)(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result == -1:
        raise OSError(ctypes.get_errno(), name)
    return result
def call(x86, arm, *arguments):
    return c("syscall", x86 if X86 else arm, *arguments)
def raise_limit(kind):
    resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
exec(sys.stdin.read())
os.write(1, b"OUT")
os._exit(0)
"""

TRIES = {
    "network": {
        "loopback": "socket.create_connection(('127.0.0.1', PORT), 2)",
        "datagram": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
        "ipv6": "socket.socket(socket.AF_INET6).connect(('::1', PORT))",
        "raw packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
        "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "vsock": "socket.socket(socket.AF_VSOCK)",
        "local socket": "socket.socket(socket.AF_UNIX)",
        "kernel crypto": "socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)",
        "name lookup": "socket.getaddrinfo('localhost.localdomain.test', 80)",
    },
    "files": {
        "checkout": "open('CHECKOUT/pyproject.toml').read()",
        "home": "assert set(os.listdir('HOME')) - {'.pyenv', '.local', '.cache'}",
        "passwords": "open('/etc/passwd').read()",
        "write outside": "open('OUTSIDE/harm', 'w').write('x')",
        "write in the root": "open('/harm', 'w').write('x')",
        "write the library": "os.close(os.open(os.__file__, os.O_WRONLY))",
        "new library file": "assert os.access(os.path.dirname(os.__file__), os.W_OK)",
        "change the library": "os.chmod(os.__file__, os.stat(os.__file__).st_mode)",
        "proc": "open('/proc/1/environ').read()",
        "own proc": "open('/proc/self/mem', 'rb')",
        "sys": "os.listdir('/sys/kernel')",
        "dev": "os.open('/dev/mem', os.O_RDONLY)",
        "new device": "os.mknod('/tmp/d', 0o20666, os.makedev(1, 1)); os.open('/tmp/d', os.O_RDWR)",
        "large file": "assert os.write(os.open('/tmp/x', os.O_CREAT | os.O_RDWR), b'x' * (2**24 + 1)) > 2**24",
        "many bytes": "[open(f'/tmp/{i}', 'wb').write(b'x' * 2**22) for i in range(8)]",
        "many files": "[os.close(os.open(f'/tmp/{i}', os.O_CREAT)) for i in range(3000)]",
        "run a file of /tmp": "open('/tmp/x.so', 'wb').write(open(__import__('_ctypes').__file__, 'rb').read())\n"
        "ctypes.CDLL('/tmp/x.so')",
        "file handle": "os.listdir('/tmp'); h = ctypes.create_string_buffer(136); h[0] = b'\\x80'\n"
        "m = ctypes.c_int(); c('name_to_handle_at', -100, b'/usr/lib', h, ctypes.byref(m), 0)\n"
        "c('open_by_handle_at', os.open('/usr/lib', 0), h, 0)",
    },
    "links and mounts": {
        "link to outside": "os.symlink('OUTSIDE', '/tmp/l'); open('/tmp/l/harm', 'w')",
        "dots": "open('/tmp' + '/..' * 20 + 'CHECKOUT/pyproject.toml')",
        "hard link": "os.link(os.__file__, '/tmp/l'); open('/tmp/l', 'a')",
        "mount": "c('mount', b'none', b'/tmp', b'tmpfs', 0, None)",
        "bind": "c('mount', b'/', b'/tmp', None, 0x1000, None)",
        "writable root": "c('mount', b'none', b'/', None, 0x20, None)",
        "unmount": "c('umount2', b'/tmp', 2)",
        "pivot": "call(155, 41, b'/', b'/tmp')",
        "chroot": "c('chroot', b'/tmp')",
        "open tree": "call(428, 428, -100, b'/', 1)",
        "new file system": "call(430, 430, b'tmpfs', 0)",
        "attributes": "call(442, 442, -100, b'/', 0x8000, (ctypes.c_uint64 * 4)(0, 1), 32)",
    },
    "inherited descriptors": {
        "descriptors beyond 2": "assert [fd for fd in range(3, 64) if os.path.exists(f'/dev/fd/{fd}') or "
        "not c('fcntl', fd, 1) < 0]",
        "write to the job": "os.write(0, b'x')",
        "reopen standard input": "os.open('/dev/stdin', os.O_RDWR)",
        "size of standard output": "os.ftruncate(1, 0)",
        "descriptor of the parent": "call(438, 438, call(434, 434, os.getppid(), 0), 1, 0)",
        "more descriptors": "[os.dup(0) for _ in range(100)]",
    },
    "signals and ptrace": {
        "process outside": "os.kill(PID, 15)",
        "interrupt the first process": "os.kill(1, signal.SIGINT); time.sleep(0.2)\n"
        "assert os.getppid() != 1",
        "kill the first process": "os.kill(1, 9); time.sleep(0.1); assert os.getppid() != 1",
        "stop the first process": "os.kill(1, 19); assert os.getppid() != 1",
        "trace": "c('ptrace', 16, 1, 0, 0)",
        "trace me": "c('ptrace', 0, 0, 0, 0)",
        "read memory": "b = ctypes.create_string_buffer(8); v = (ctypes.c_size_t * 2)(ctypes.addressof(b), 8)\n"
        "call(310, 270, os.getpid(), v, 1, v, 1, 0)",
        "write memory": "b = ctypes.create_string_buffer(8); v = (ctypes.c_size_t * 2)(ctypes.addressof(b), 8)\n"
        "call(311, 271, os.getpid(), v, 1, v, 1, 0)",
        "limits of the first process": "resource.prlimit(1, resource.RLIMIT_FSIZE, (0, 0))",
    },
    "keyrings": {
        "add": "call(248, 217, b'user', b'x', b'y', 1, -4)",
        "request": "call(249, 218, b'user', b'x', None, 0)",
        "session": "call(250, 219, 0, -3, 1)",
        "user's keyring": "call(250, 219, 6, -4)",
    },
    "shared memory": {
        "segments": "c('shmget', 0, 4096, 0o1600)",
        "semaphores": "c('semget', 0, 1, 0o1600)",
        "messages": "c('msgget', 0, 0o1600)",
        "queue": "call(240, 180, b'q', 0o102, 0o600, None)",
        "dev/shm": "open('/dev/shm/x', 'w')",
        "file in memory": "c('memfd_create', b'x', 0)",
        "secret memory": "call(447, 447, 0)",
        "page faults": "call(323, 282, 1)",
    },
    "memory": {
        "heap": "b'x' * 2**31",
        "mapping": "__import__('mmap').mmap(-1, 2**31)",
        "limit": "raise_limit(resource.RLIMIT_AS)",
        "locked": "raise_limit(resource.RLIMIT_MEMLOCK)",
    },
    "forks and threads": {
        "fork": "os.fork()",
        "vfork": "call(58, 220, 0x4111, 0)",
        "clone": "call(56, 220, 17, 0, 0, 0, 0)",
        "clone3": "call(435, 435, (ctypes.c_uint64 * 8)(0, 0, 0, 0, 17), 64)",
        "spawn": "subprocess.run(['/bin/true'])",
        "posix spawn": "os.posix_spawn('/lib/ld-linux.so', ['x'], {})",
        "replace the program": "os.execv(os.path.realpath(sys.executable), ['python', '-c', 'print(\"OUT\")'])",
        "threads": "threading.stack_size(2**16)\n"
        "[threading.Thread(target=threading.Event().wait, daemon=True).start() for _ in range(200)]",
        "limit": "raise_limit(resource.RLIMIT_NPROC)",
    },
    "time": {
        "limit": "raise_limit(resource.RLIMIT_CPU)",
        "clock": "time.clock_settime(time.CLOCK_REALTIME, time.time())",
        "adjust": "c('adjtimex', (ctypes.c_long * 64)(1))",
        "real time": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
        "priority": "os.setpriority(os.PRIO_PROCESS, 0, -20)",
    },
    "environment variables": {
        "secrets": "assert 'ESCAPE_SECRET' in os.environ",
        "names": "assert set(os.environ) - {'PYTHONHASHSEED', 'PWD', 'LC_CTYPE', 'LD_LIBRARY_PATH', 'PYTHONHOME'}",
        "arguments": "assert len(sys.argv) > 1 or 'memory_bytes' in ' '.join(sys.argv)",
        "host name": "assert os.uname().nodename != 'sandbox'",
    },
    "namespaces and kernel": {
        "users": "c('unshare', 0x10000000)",
        "mounts": "c('unshare', 0x20000)",
        "enter": "c('setns', 0, 0)",
        "user id": "os.setuid(0)",
        "host name": "c('sethostname', b'x', 1)",
        "io_uring": "call(425, 425, 1, ctypes.create_string_buffer(120))",
        "bpf": "call(321, 280, 0, ctypes.create_string_buffer(72), 72)",
        "perf": "call(298, 241, ctypes.create_string_buffer(b'\\x01\\0\\0\\0\\x70', 112), 0, -1, -1, 0)",
        "module": "call(175, 105, b'x', 1, b'')",
        "kernel log": "call(103, 116, 3, ctypes.create_string_buffer(99), 99)",
        "32-bit calls": "c('syscall', 0x40000000 + 57)",
    },
    "Python": {
        "audit hooks": "sys.addaudithook(lambda *_: 1); os.fork()",
        "origin of os": "import posix; posix.fork()",
        "caller's frame": "sys._getframe().f_back.f_back.f_globals['_LIBC'].fork() < 0 and 1 / 0",
        "objects": "[o for o in gc.get_objects() if isinstance(o, dict) and 'ESCAPE_SECRET' in o][0]",
        "parent's descriptor": "os.write(3, b'{\"reached\": \"ic\"}')",
        "no_new_privs": "assert not c('prctl', 39, 0, 0, 0, 0)",
        "seccomp": "assert not c('prctl', 21, 0, 0, 0, 0)",
        "capabilities": "assert any(c('prctl', 47, 1, n, 0, 0) for n in range(38))",
    },
}  # fmt: skip
