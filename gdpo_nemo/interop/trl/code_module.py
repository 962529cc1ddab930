"""A module with those parts of a script that a run needs: its reward functions, and how its rows are made.

Needed where the script cannot be imported because it trains when it is, or where what is wanted has no name in it.
Statements are taken as they stand, with what they use, in their order; nothing is run.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Sequence

from gdpo_nemo.errors import ConfigError
from gdpo_nemo.interop.trl.static_names import Resolver, stored, used
from gdpo_nemo.interop.trl.trl_trainers import TRAINERS

TRAINING = (*TRAINERS, "parse_args_and_config", "parse_args_into_dataclasses", "parse_args")
"""Calls that no part may make: they train, or read the command line."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


@dataclass
class CodeModule:
    """The module while it is put together.

    Args:
        source: text of the script.
        title: its name, for the heading.
    """

    source: str
    title: str
    resolver: Resolver
    _wanted: set[str] = field(default_factory=set)
    _added: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self._wanted or self._added)

    def add_name(self, name: str) -> None:
        """Take a name of the script's module in."""
        self._check(self._slice({name}))
        self._wanted.add(name)

    def add_value(self, name: str, expression: ast.expr) -> None:
        """Add ``name = expression``; what the expression uses of a function comes before it."""
        expression = self.resolver.constants(expression)
        local, outer = self._local(expression)
        lines = [*(ast.unparse(statement) for statement in local), f"{name} = {ast.unparse(expression)}"]
        self._add(lines, outer)

    def add_function(self, name: str, expression: ast.expr) -> None:
        """Add a function ``name()`` that returns the expression, worked out when it is called."""
        expression = self.resolver.constants(expression)
        local, outer = self._local(expression)
        body = [line for statement in local for line in ast.unparse(statement).splitlines()]
        lines = [f"def {name}():", *(f"    {line}" for line in body), f"    return {ast.unparse(expression)}"]
        self._add(lines, outer)

    def text(self) -> str:
        """The module."""
        kept = self._slice(self._wanted)
        future = [s for s in self.resolver.module.body if isinstance(s, ast.ImportFrom) and s.module == "__future__"]
        parts = [self._source(statement) for statement in [*future, *kept]]
        heading = f'"""Taken from {self.title} by `gdpo-nemo config from-trl`."""'
        return "\n\n".join([heading, *parts, *self._added]) + "\n"

    def _add(self, lines: Sequence[str], outer: set[str]) -> None:
        self._check(self._slice(outer))
        self._wanted |= outer
        self._added.append("\n".join(lines))

    def _local(self, expression: ast.expr) -> tuple[list[ast.stmt], set[str]]:
        """Statements of the function that the expression needs, and the names that these take from the module.

        In the module itself all but definitions and imports count as such: they are worked out where they are needed.
        """
        inside = self.resolver.function
        body = (
            [s for s in self.resolver.module.body if not isinstance(s, _DEFINITIONS)] if inside is None else inside.body
        )
        plain = [self.resolver.constants(s) for s in body]
        local = _backwards(plain, used(expression), expression.lineno)
        self._check(local)
        outer = used(expression).union(*(used(statement) for statement in local))
        return local, outer - {name for statement in local for name in _bound(statement) if not _completes(statement)}

    def _slice(self, wanted: set[str]) -> list[ast.stmt]:
        """Statements of the module that bind the names and what these need."""
        return _backwards(self.resolver.module.body, wanted)

    def _check(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            called = {ast.unparse(n.func).rpartition(".")[2] for n in ast.walk(statement) if isinstance(n, ast.Call)}
            own = isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            if called & set(TRAINING) and not own:
                raise ConfigError(f"it needs line {statement.lineno}, which {_says(called)}")

    def _source(self, statement: ast.stmt) -> str:
        if statement.col_offset:
            return ast.unparse(statement)
        first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))])
        return "\n".join(self.source.splitlines()[first - 1 : statement.end_lineno])


def _says(called: set[str]) -> str:
    return "builds the trainer" if called & set(TRAINERS) else "reads the command line"


def _backwards(body: Sequence[ast.stmt], wanted: set[str], before: int | None = None) -> list[ast.stmt]:
    """The statements that bind what is wanted, and what those use, in their order.

    Uses may come before what they use (functions call each other), so this goes on until nothing is added.
    """
    kept: set[int] = set()
    needed = set(wanted)
    while True:
        new = [
            place
            for place, statement in enumerate(body)
            if place not in kept and (before is None or statement.lineno < before) and _bound(statement) & needed
        ]
        if not new:
            return [body[place] for place in sorted(kept)]
        kept |= set(new)
        needed = needed.union(*(used(body[place]) for place in new))


def _completes(statement: ast.stmt) -> bool:
    """Return whether a statement changes a part of what a name stands for, which is bound elsewhere."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return bool(targets) and isinstance(targets[0], (ast.Attribute, ast.Subscript))


def _bound(statement: ast.stmt) -> set[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
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
