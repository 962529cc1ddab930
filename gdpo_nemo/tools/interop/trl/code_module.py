"""Extraction of reward functions and data code from a script into a module that a run can import.

Extraction is needed if importing the script would start training, or if a required object has no name at module level.
Statements are copied in order, with their dependencies. Nothing is executed. An object that the script fills from the
command line becomes a namespace with its values.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gdpo_nemo.tools.interop.trl.arguments import called_name, nodes_of
from gdpo_nemo.tools.interop.trl.names import Parsed, Resolver, stored, used
from gdpo_nemo.tools.interop.trl.trainers import TRAINERS
from gdpo_nemo.utils.errors import ConfigError

TRAINING = (*TRAINERS, "parse_args_and_config", "parse_args_into_dataclasses", "parse_args")
"""Functions that extracted code must not call, because these functions train or read the command line."""
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass
class CodeModule:
    """Module under construction.

    Args:
        source: source text of the script.
        title: name of the script, for the module's docstring.
    """

    source: str
    title: str
    resolver: Resolver
    _wanted: set[str] = field(default_factory=set)
    _added: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self._wanted or self._added)

    def add_name(self, name: str) -> None:
        """Add a module-level name of the script with its dependencies. Raises ConfigError if the code would start
        training or read the command line."""
        self.check(self.statements({name}))
        self._wanted.add(name)

    def add_value(self, name: str, expression: ast.expr) -> None:
        """Add the assignment ``name = expression``, preceded by the local statements that the expression needs."""
        expression = self.resolver.constants(expression)
        local, outer = self._local(expression)
        self._add([*map(ast.unparse, local), f"{name} = {ast.unparse(expression)}"], outer)

    def add_function(self, name: str, expression: ast.expr) -> None:
        """Add a function ``name()`` that evaluates the expression and returns its value."""
        expression = self.resolver.constants(expression)
        local, outer = self._local(expression)
        body = "\n".join([*map(ast.unparse, local), f"return {ast.unparse(expression)}"])
        self._add([f"def {name}():", textwrap.indent(body, "    ", bool)], outer)

    def text(self) -> str:
        """Return the source text of the module."""
        kept = self.statements(self._wanted)
        objects = list(filter(None, map(self._namespace, sorted(self._wanted))))
        if objects:
            objects.insert(0, "from types import SimpleNamespace")
        future = [s for s in self.resolver.module.body if isinstance(s, ast.ImportFrom) and s.module == "__future__"]
        parts = [*map(self._source, future), *objects, *map(self._source, kept)]
        heading = f'"""Taken from {self.title} by `gdpo-nemo config from-trl`."""'
        return "\n\n".join([heading, *parts, *self._added]) + "\n"

    def _add(self, lines: Sequence[str], outer: set[str]) -> None:
        self.check(self.statements(outer))
        self._wanted |= outer
        self._added.append("\n".join(lines))

    def _local(self, expression: ast.expr) -> tuple[list[ast.stmt], set[str]]:
        """Return the local statements that the expression needs, and the module-level names that they use.

        For an expression at module level, all statements except definitions and imports count as local, so that only
        the needed statements are copied.
        """
        inside = self.resolver.function
        plain = []
        for statement in self.resolver.module.body if inside is None else inside.body:
            if inside or not isinstance(statement, (*DEFINITIONS, ast.Import, ast.ImportFrom)):
                plain.append(self.resolver.constants(statement))
        local = _dependencies(plain, used(expression), self._is_parsed, expression.lineno)
        self.check(local)
        outer = used(expression).union(*map(used, local))
        return local, outer.difference(*(_bound(statement) for statement in local if not _completes(statement)))

    def statements(self, names: set[str]) -> list[ast.stmt]:
        """Return the script's module-level statements that bind the names, with their dependencies."""
        return _dependencies(self.resolver.module.body, names, self._is_parsed)

    def _is_parsed(self, name: str) -> bool:
        """Return whether a name refers to an object that the script fills from the command line."""
        return isinstance(self.resolver.value(ast.Name(name, ast.Load())), Parsed)

    def _namespace(self, name: str) -> str:
        """Return an assignment of a namespace with the values of a parsed object (empty for other names)."""
        owner = self.resolver.value(ast.Name(name, ast.Load()))
        if not isinstance(owner, Parsed):
            return ""
        values = ", ".join(f"{field}={value!r}" for field, value in self.resolver.fields(owner).items())
        return f"{name} = SimpleNamespace({values})"

    def check(self, statements: Sequence[ast.stmt]) -> None:
        """Raise ConfigError if the statements would start training or read the command line."""
        for statement in statements:
            called = set(map(called_name, nodes_of(statement, ast.Call)))
            is_definition = isinstance(statement, DEFINITIONS)
            if called & set(TRAINING) and not is_definition:
                raise ConfigError(f"the code depends on line {statement.lineno}, which {_reason(called)}")

    def _source(self, statement: ast.stmt) -> str:
        if statement.col_offset:
            return ast.unparse(statement)
        first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))])
        return "\n".join(self.source.splitlines()[first - 1 : statement.end_lineno])


def _reason(called: set[str]) -> str:
    return "builds the trainer" if called & set(TRAINERS) else "reads the command line"


def _dependencies(
    body: Sequence[ast.stmt], names: set[str], is_known: Callable[[str], bool], before: int | None = None
) -> list[ast.stmt]:
    """Return the statements that bind the names, with their dependencies, in order.

    A name may be used before its definition, for example in functions that call each other. The search is therefore
    repeated until no statement is added.

    Args:
        is_known: function that returns True for names whose statements are not needed.
        before: line number. Only statements above the line are considered.
    """
    kept: set[int] = set()
    needed = {name for name in names if not is_known(name)}
    while True:
        new: set[int] = set()
        reads: set[str] = set()
        for index, statement in enumerate(body):
            above = before is None or statement.lineno < before
            if index not in kept and above and _bound(statement) & needed:
                new.add(index)
                reads |= used(statement)
        if not new:
            return [body[index] for index in sorted(kept)]
        kept |= new
        needed |= {name for name in reads - needed if not is_known(name)}


def _completes(statement: ast.stmt) -> bool:
    """Return whether a statement assigns to an attribute or an item of an object."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return bool(targets) and isinstance(targets[0], (ast.Attribute, ast.Subscript))


def _bound(statement: ast.stmt) -> set[str]:
    if isinstance(statement, DEFINITIONS):
        return {statement.name}
    if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
        return set()
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
    if isinstance(target, (ast.Attribute, ast.Subscript)):
        base = target.value
        return {base.id} if isinstance(base, ast.Name) else set()
    return stored(statement)
