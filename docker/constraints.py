"""The tested version of every dependency: write the list, compare it with what is installed, try the newest.

    python docker/constraints.py write             resolve the newest of everything and list it
    uv run python docker/constraints.py check      every installed package has its listed version
    python docker/constraints.py newest COMMAND    run COMMAND with the newest; name the first package that breaks it

The list is `tool.uv.constraint-dependencies` of pyproject.toml, so `uv sync` and `uv run` install it on any machine
without a lock file, which would name a package index. `constraints-cpu.txt` and `constraints-gpu.txt` beside this file
are the same versions for pip and the images.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_NEEDED_TO_LOCK = ("pyproject.toml", "README.md", "LICENSE")
_LIST = re.compile(r"(?ms)^constraint-dependencies = \[$.*?^\]$")
_EXPORT = (
    "uv export --quiet --frozen --no-hashes --no-annotate --no-header --no-emit-project --extra reasoning-gym".split()
)
_GROUPS = {"cpu": [], "gpu": ["--no-default-groups", "--group", "gpu"]}
"""Name of a constraints file: the groups that it holds, as options of `uv export`."""
_HEADER = {
    "cpu": "# What the tests ran with on CPUs, their own packages included, by name and version alone:\n",
    "gpu": "# What the GPU image installs, for Linux on x86_64 and aarch64, by name and version alone:\n",
}

Versions = dict[str, tuple[str, ...]]
"""Name of a package: its version, or the lowest and the highest where the CPU and the GPU group differ."""


def write(folder: Path = ROOT) -> int:
    """Resolve the newest versions and write them to pyproject.toml and both constraints files of a checkout."""
    with tempfile.TemporaryDirectory() as scratch:
        project = Path(scratch)
        newest = resolve(folder, project, {})
        for group, options in _GROUPS.items():
            lines = _output([*_EXPORT, *options], project).splitlines()
            pinned = sorted({line.partition(" ;")[0].strip() for line in lines})
            text = _HEADER[group] + "#     python docker/constraints.py write\n" + "\n".join(pinned) + "\n"
            (folder / "docker" / f"constraints-{group}.txt").write_text(text)
    _set_list(folder / "pyproject.toml", [requirement(name, versions) for name, versions in newest.items()])
    print(f"{len(newest)} packages listed")
    return 0


def check(listed: Versions | None = None) -> int:
    """Compare the packages of the environment that runs this with the list; 1 if one differs or is missing there."""
    listed = listed_versions(ROOT) if listed is None else listed
    wrong = []
    # Not all of sys.path: setuptools puts the packages that it brings along there.
    folders = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    for distribution in importlib.metadata.distributions(path=folders):
        name = _canonical(distribution.metadata["Name"])
        if name != "gdpo-nemo" and distribution.version not in listed.get(name, ()):
            wanted = " or ".join(listed.get(name, ())) or "not listed"
            wrong.append(f"{name}: {distribution.version} is installed, {wanted} in pyproject.toml")
    print("\n".join(sorted(set(wrong))) or "every installed package has its listed version")
    return 1 if wrong else 0


def newest(command: Sequence[str]) -> int:
    """Run ``command`` with the newest versions in a scratch clone. Where it fails, name the first package to blame.

    The packages are released from the list one after the other, in the order of their names, by bisection: with all
    before the named one at their newest the command passes, with that one as well it fails. 0 if nothing breaks it.
    """
    tested = listed_versions(ROOT)
    with tempfile.TemporaryDirectory() as scratch:
        clone = Path(scratch) / "clone"
        _run(["git", "clone", "--quiet", str(ROOT), str(clone)], ROOT)
        latest = resolve(clone, Path(scratch), {})
        changed = [name for name in latest if latest[name] != tested.get(name)]
        print(f"{len(changed)} of {len(latest)} packages have a newer version")

        def breaks(count: int) -> bool:
            released = {name: _span(name, tested.get(name, ()), latest[name]) for name in changed[:count]}
            _set_list(clone / "pyproject.toml", [*released.values(), *_held(tested, released)])
            _run(["uv", "sync", "--quiet", "--upgrade", "--extra", "reasoning-gym"], clone)
            failed = subprocess.run(list(command), cwd=clone).returncode != 0
            print(f"{count} of {len(changed)} at their newest: {'fails' if failed else 'passes'}", flush=True)
            return failed

        first = first_breaking(len(changed), breaks)
    if first is None:
        return 0
    if first == 0:
        print("fails with the listed versions as well")
    else:
        name = changed[first - 1]
        print(f"{name} breaks it: {requirement(name, tested.get(name, ()))} passes, {'-'.join(latest[name])} fails")
    return 1


def first_breaking(count: int, breaks: Callable[[int], bool]) -> int | None:
    """Return the smallest number of newest packages that breaks, by bisection; None if all of them do not."""
    if not breaks(count):
        return None
    if count == 0 or breaks(0):
        return 0
    passes, fails = 0, count
    while fails - passes > 1:
        middle = (passes + fails) // 2
        if breaks(middle):
            fails = middle
        else:
            passes = middle
    return fails


def resolve(source: Path, scratch: Path, listed: Versions) -> Versions:
    """Lock a checkout's dependencies in ``scratch``, within ``listed``; return every package with its versions."""
    for name in _NEEDED_TO_LOCK:
        shutil.copy(source / name, scratch)
    _set_list(scratch / "pyproject.toml", [requirement(name, versions) for name, versions in listed.items()])
    _run(["uv", "lock", "--quiet"], scratch)
    found: dict[str, list[str]] = {}
    for package in tomllib.loads((scratch / "uv.lock").read_text())["package"]:
        if package["name"] != "gdpo-nemo":
            found.setdefault(package["name"], []).append(package["version"])
    return {name: tuple(versions) for name, versions in sorted(found.items())}


def listed_versions(folder: Path) -> Versions:
    """Return the list of a checkout's pyproject.toml."""
    uv = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["uv"]
    pairs = [re.split(r"[=<>]=", line) for line in (text.replace(",", "") for text in uv["constraint-dependencies"])]
    return {name: tuple(versions) for name, *versions in pairs}


def requirement(name: str, versions: tuple[str, ...]) -> str:
    """Write a package's versions as a requirement: one exactly, two as the ends of a range."""
    if len(versions) < 2:
        return f"{name}=={versions[0]}" if versions else name
    return f"{name}>={versions[0]},<={versions[-1]}"


def _held(tested: Versions, released: dict[str, str]) -> list[str]:
    return [requirement(name, versions) for name, versions in tested.items() if name not in released]


def _span(name: str, tested: tuple[str, ...], latest: tuple[str, ...]) -> str:
    # A range and not the newest alone, which may need the newest of another package that is still held.
    return f"{name}>={tested[0]},<={latest[-1]}" if tested else f"{name}<={latest[-1]}"


def _set_list(pyproject: Path, requirements: list[str]) -> None:
    lines = "".join(f'    "{text}",\n' for text in sorted(requirements))
    text, count = _LIST.subn(f"constraint-dependencies = [\n{lines}]", pyproject.read_text())
    if count != 1:
        raise SystemExit(f"{pyproject}: constraint-dependencies of tool.uv not found")
    pyproject.write_text(text)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _run(command: list[str], folder: Path) -> None:
    if status := subprocess.run(command, cwd=folder).returncode:
        raise SystemExit(f"{shlex.join(command)}: exit status {status}")


def _output(command: list[str], folder: Path) -> str:
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> int:
    """Read the command line and run the command that it names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("write", help="resolve the newest versions and list them")
    commands.add_parser("check", help="compare the environment with the list")
    trial = commands.add_parser("newest", help="run a command with the newest versions; name what breaks it")
    trial.add_argument("run", nargs=argparse.REMAINDER, metavar="COMMAND", help="command to run in a scratch clone")
    arguments = parser.parse_args()
    if arguments.command == "write":
        return write()
    if arguments.command == "check":
        return check()
    return newest(arguments.run or ["uv", "run", "--extra", "reasoning-gym", "pytest"])


if __name__ == "__main__":
    sys.exit(main())
