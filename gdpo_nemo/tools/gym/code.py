"""Properties of a NeMo Gym server's code: config fields, routes, and calls that run programs. No code is executed."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from gdpo_nemo.environments.nemo_gym.checkout import KINDS
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.files import read_text

_MOST_FILES = 200
_ROUTES = ("/", "/seed_session", "/verify", "/aggregate_metrics", "/close_session", "/reverify_mode", "/run")
"""Routes of every server, which are not tools."""
_TOKENS = ("generation_token_ids", "prompt_token_ids")
_PROCESSES = ("create_subprocess_exec", "create_subprocess_shell", "system", "popen")


class Code:
    """The entry point of a server, and the files of the checkout that it imports.

    Raises:
        ConfigError: if the entry point is not valid Python.
    """

    def __init__(self, checkout: Path, entrypoint: Path):
        self._checkout = checkout
        self._folder = entrypoint.parent
        self.files: dict[Path, ast.Module] = {}
        waiting = [entrypoint]
        while waiting and len(self.files) < _MOST_FILES:
            file = waiting.pop()
            if file not in self.files:
                self.files[file] = _parse(file)
                waiting += self._imported(file)

    @cached_property
    def nodes(self) -> list[tuple[str, ast.AST]]:
        """All (file name, syntax node)."""
        return [(file.name, node) for file, tree in self.files.items() for node in ast.walk(tree)]

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """Classes by name. A class of the entry point hides classes with the same name in other files."""
        return {node.name: node for _, node in reversed(self.nodes) if isinstance(node, ast.ClassDef)}

    @cached_property
    def server(self) -> list[ast.ClassDef]:
        """The class that the entry point runs, and its bases in the checkout (empty if it runs none)."""
        entry = next(iter(self.files.values()))
        name = ""
        for node in ast.walk(entry):
            match node:
                case ast.Call(func=ast.Attribute(attr="run_webserver", value=ast.Name(id=last))):
                    name = last
        return self._with_bases(name) if name else []

    def fields(self) -> dict[str, tuple[str, bool]]:
        """Return (annotation, True if it has no default) of the fields in the server's config class by name."""
        annotations = [s.annotation for one in self.server for s in _annotated(one) if _name(s.target) == "config"]
        found: dict[str, tuple[str, bool]] = {}
        for base in self._with_bases(_name(annotations[0])) if annotations else ():
            for statement in _annotated(base):
                found.setdefault(
                    _name(statement.target), (ast.unparse(statement.annotation), _required(statement.value))
                )
        return found

    def method(self, name: str) -> bool:
        """Return whether the server class or a base in the checkout implements a method."""
        for one in self.server:
            for node in one.body:
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                    return not isinstance(node.body[-1], ast.Raise)
        return False

    def routes(self) -> list[str]:
        """Return the routes that a server adds for tools."""
        found = set()
        for call in self._posts():
            if call.args and not isinstance(call.args[0], ast.Starred):
                found.add(ast.unparse(call.args[0]).strip("f'\""))
        return sorted(text for text in found if text.startswith("/") and text not in _ROUTES)

    def _posts(self) -> Iterator[ast.Call]:
        """Yield the calls of methods ``post``."""
        for _, node in self.nodes:
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "post":
                yield node

    def runs_programs(self, prepares: bool = False) -> str:
        """Return the first call that executes code or starts a program (empty if there is none).

        Args:
            prepares: True for calls in files ``setup_*.py``, which install or download what a server needs.
        """
        for file, node in self.nodes:
            if file.startswith("setup_") != prepares:
                continue
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [getattr(node, "module", "") or "", *(alias.name for alias in node.names)]
                if any(name.startswith("nemo_gym.sandbox") for name in names):
                    return f"a sandbox in {file}"
            if isinstance(node, ast.Call):
                text = ast.unparse(node.func)
                if "(" in text:
                    continue
                if text in ("exec", "eval") or text.startswith("subprocess.") or text.rpartition(".")[2] in _PROCESSES:
                    return f"{text} in {file}"
        return ""

    def samples_from_model_server(self) -> bool:
        """Return whether an agent sends requests to its model server, whose replies contain the tokens, or reads
        tokens."""
        for _, node in self.nodes:
            if getattr(node, "value", "") in _TOKENS or getattr(node, "attr", "") in _TOKENS:
                return True
        for call in self._posts():
            for keyword in call.keywords:
                if keyword.arg == "server_name" and "model_server" in ast.unparse(keyword.value):
                    return True
        return False

    def _with_bases(self, name: str) -> list[ast.ClassDef]:
        found: list[ast.ClassDef] = []
        waiting = [name]
        while waiting:
            one = self.classes.get(waiting.pop(0))
            if one is not None and one not in found:
                found.append(one)
                waiting += [_name(base) for base in one.bases]
        return found

    def _imported(self, file: Path) -> Iterator[Path]:
        """Yield the files of the checkout that a file imports, without NeMo Gym's own package."""
        for node in ast.walk(self.files[file]):
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            level, modules = 0, [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                name, level = node.module or "", node.level
                modules = [name, *(f"{name}.{part}".strip(".") for part in modules)]
            for module in modules:
                for root in self._roots(file, module, level):
                    path = root.joinpath(*module.split(".")) if module else root
                    yield from filter(Path.is_file, (path.with_suffix(".py"), path / "__init__.py"))

    def _roots(self, file: Path, module: str, level: int) -> list[Path]:
        if level:
            return [file.parents[level - 1]] if level <= len(file.parents) else []
        if module.split(".")[0] in KINDS:
            return [self._checkout]
        return [] if module.split(".")[0] == "nemo_gym" else [self._folder]


def _parse(file: Path) -> ast.Module:
    try:
        with warnings.catch_warnings():  # of invalid escape sequences
            warnings.simplefilter("ignore")
            return ast.parse(read_text(file))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file.name} is not valid Python: {error}") from None


def _annotated(one: ast.ClassDef) -> list[ast.AnnAssign]:
    return [statement for statement in one.body if isinstance(statement, ast.AnnAssign)]


def _name(node: ast.AST) -> str:
    return str(getattr(node, "id", getattr(node, "attr", "")))


def _required(value: ast.expr | None) -> bool:
    """Return whether a field with this default must be set."""
    if not isinstance(value, ast.Call) or _name(value.func) != "Field":
        return value is None
    named = {keyword.arg for keyword in value.keywords}
    first = value.args[0] if value.args else None
    ellipsis = first is not None and ast.unparse(first) == "..."
    return not named & {"default", "default_factory"} and (first is None or ellipsis)
