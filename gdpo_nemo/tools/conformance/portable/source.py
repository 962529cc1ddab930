"""Functions of a trainer, compiled out of its source files without importing the trainer.

An import would need all libraries of the trainer. In TRL and axolotl, the statements that compute advantages are a part
of a long method.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any


class PortError(Exception):
    """A port cannot be checked. The message is one line for the user."""


class Source:
    """Source files of a package.

    Args:
        package: name of the package.
        folder: checkout that contains the package, in its root or in ``src``. None: the installed package.

    Raises:
        PortError: if the package is not found.
    """

    def __init__(self, package: str, folder: Path | None = None) -> None:
        self.package = package
        self.checkout = folder
        if folder is None:
            spec = importlib.util.find_spec(package)
            # A folder without an __init__ file has no origin: it only happens to have the name of the package.
            if spec is None or spec.origin is None or not spec.submodule_search_locations:
                raise PortError(f"--port: package {package!r} is not installed; use --source with a checkout")
            self.root = Path(next(iter(spec.submodule_search_locations)))
            return
        candidates = [folder / package, folder / "src" / package]
        found = [path for path in candidates if path.is_dir()]
        if not found:
            raise PortError(f"--source: {folder} does not contain the package {package!r}")
        self.root = found[0]

    def version(self, distribution: str) -> str:
        """Return the version of the installed distribution, or the checkout's name."""
        if self.checkout is not None:
            return f"in {self.checkout.resolve().name}"
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return "of unknown version"

    def functions(self, file: str, *names: str, **namespace: Any) -> dict[str, Any]:
        """Return functions and classes of a file, without their decorators and annotations, and its literal constants.

        Args:
            file: path within the package.
            names: names of functions and classes. ``CLASS.METHOD`` is a method as a function.
            namespace: what their code uses.

        Raises:
            PortError: if the file does not define a name.
        """
        tree = self._tree(file)
        chosen: list[ast.stmt] = []
        for name in names:
            owner, _, method = name.rpartition(".")
            body = self._named(tree.body, owner, file).body if owner else tree.body  # type: ignore[attr-defined]
            node: Any = self._named(body, method, file)
            node.decorator_list = []
            chosen.append(node)
        annotations = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
        module = ast.fix_missing_locations(ast.Module([annotations, *self._constants(tree), *chosen], []))
        exec(compile(module, str(self.root / file), "exec"), namespace)
        return namespace

    def condition(self, file: str, test: str, occurrence: int = 0) -> Statement:
        """Return the ``if`` statement with the condition ``test``, at any depth of a file.

        Raises:
            PortError: if the file has fewer such statements than ``occurrence`` + 1.
        """
        found = []
        for node in ast.walk(self._tree(file)):
            if isinstance(node, ast.If) and ast.unparse(node.test) == test:
                found.append(node)
        found.sort(key=lambda node: node.lineno)
        if len(found) <= occurrence:
            raise self._changed(file, f"if {test}")
        return Statement(found[occurrence], str(self.root / file))

    def _constants(self, tree: ast.Module) -> list[ast.stmt]:
        """Return the assignments of numbers and texts at the top of a file, which functions may read."""
        return [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)]

    def _tree(self, file: str) -> ast.Module:
        try:
            return ast.parse((self.root / file).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise PortError(f"--port: {self.package}/{file} cannot be read ({type(error).__name__})") from None

    def _named(self, body: list[ast.stmt], name: str, file: str) -> ast.stmt:
        for node in body:
            if getattr(node, "name", None) == name:
                return node
        raise self._changed(file, name)

    def _changed(self, file: str, what: str) -> PortError:
        return PortError(
            f"--port: {self.package}/{file} does not contain {what!r}; this version of the trainer is not supported"
        )


class Statement:
    """A statement of a source file."""

    def __init__(self, node: ast.stmt, file: str) -> None:
        self._code = compile(ast.Module([node], []), file, "exec")

    def run(self, /, **namespace: Any) -> dict[str, Any]:
        """Execute the statement and return its variables."""
        exec(self._code, namespace)
        return namespace
