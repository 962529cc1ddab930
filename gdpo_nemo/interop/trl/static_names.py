"""Names of a Python script and what they stand for, found without running it."""

from __future__ import annotations

import ast
import copy
import operator
from dataclasses import dataclass, field
from typing import Any, Iterator, Mapping, Sequence, TypeVar, cast

from gdpo_nemo.errors import ConfigError
from gdpo_nemo.interop.trl.script_arguments import parsed_kinds
from gdpo_nemo.interop.trl.static_values import LARGEST, bounded, evaluated, operands

Node = TypeVar("Node", bound=ast.AST)

_SWITCHES = {"get_quantization_config": ("load_in_4bit", "load_in_8bit"), "get_peft_config": ("use_peft",)}
"""Functions of TRL that return None unless one of these fields of ``ModelConfig`` is on."""
_MOST_STEPS = 100_000
"""Expressions that are looked at in one script."""
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


@dataclass(frozen=True)
class Unresolved:
    """A value that only running the script would tell, as its source."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Parsed:
    """An object that ``TrlParser``, ``HfArgumentParser`` or ``argparse`` fills from the command line."""

    kind: str
    """Name of its class."""
    name: str
    """Of the variable, for ``name.field = ...`` further down."""


@dataclass(frozen=True)
class Binding:
    """One assignment of a name."""

    line: int
    value: ast.expr | None
    """None: in a branch, a loop or the like, so that it is not known which holds."""
    part: int | None = None
    """Which part of the value, where several names are assigned at once."""


@dataclass
class Names:
    """What the statements of a module or a function bind."""

    body: list[ast.stmt]
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    definitions: dict[str, ast.stmt] = field(default_factory=dict)
    """Functions, classes and imports."""
    attributes: dict[tuple[str, str], ast.expr] = field(default_factory=dict)
    """``name.field = value``."""

    @classmethod
    def of(cls, body: Sequence[ast.stmt]) -> Names:
        """The names of ``body``; what stands under ``if __name__ == "__main__"`` belongs to it."""
        names = cls(list(flat(body)))
        for statement in names.body:
            names._add(statement)
        return names

    def _add(self, statement: ast.stmt) -> None:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self.definitions[statement.name] = statement
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            for alias in statement.names:
                self.definitions[(alias.asname or alias.name).partition(".")[0]] = statement
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            self._assign(statement.targets[0], statement.value, statement.lineno)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            self._assign(statement.target, statement.value, statement.lineno)
        else:
            for name in stored(statement):
                self.bindings.setdefault(name, []).append(Binding(statement.lineno, None))

    def _assign(self, target: ast.expr, value: ast.expr, line: int) -> None:
        if isinstance(target, ast.Name):
            self.bindings.setdefault(target.id, []).append(Binding(line, value))
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            self.attributes[target.value.id, target.attr] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            for part, element in enumerate(target.elts):
                for name in stored(element):
                    self.bindings.setdefault(name, []).append(Binding(line, value, part))


class Resolver:
    """Values of expressions in a function of a script, or in the module itself.

    Args:
        module: the module's names.
        function: the function's names; None: the expressions stand in the module.
        parameters: the function's parameters by what its only call gives for them.
        arguments: what the command line gives to the classes that a parser fills, and their defaults, by class.
    """

    def __init__(
        self,
        module: Names,
        function: Names | None,
        parameters: Mapping[str, ast.expr],
        arguments: Mapping[str, Mapping[str, Any]],
    ):
        self.module = module
        self.function = function
        self._parameters = parameters
        self._arguments = arguments
        self._steps = 0

    def binding(self, name: str, line: int | None = None) -> Binding | None:
        """The last assignment of ``name`` before ``line`` of the function, or in the module; None where there is
        none."""
        for names in (self.function, self.module):
            if names is None:
                continue
            found = names.bindings.get(name, [])
            if line is not None and (names is self.function or self.function is None):
                found = [binding for binding in found if binding.line < line]
            if found:
                return found[-1]
        value = self._parameters.get(name)
        return None if value is None else Binding(0, value)

    def definition(self, name: str) -> ast.stmt | None:
        """The function, class or import of this name."""
        local = self.function.definitions.get(name) if self.function else None
        return local or self.module.definitions.get(name)

    def value(self, node: ast.expr) -> Any:
        """Return the value of the expression, or ``Unresolved``. Raises ConfigError if it takes too many steps."""
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise ConfigError("the script's values refer to each other too often to be worked out")
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            pass  # no literal: names and calls are resolved below
        try:
            return self._value(node)
        except (ArithmeticError, TypeError, ValueError, RecursionError):
            return Unresolved(ast.unparse(node))

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return self._of_name(node)
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value)
            if isinstance(owner, Parsed):
                return self.field(owner, node.attr)
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            sides = [self.value(node.left), self.value(node.right)]
            if not any(isinstance(side, (Unresolved, Parsed)) for side in sides) and bounded(node.op, *sides):
                return _OPERATIONS[type(node.op)](*sides)
        elif isinstance(node, ast.BoolOp):
            return self._either(node)
        elif isinstance(node, ast.JoinedStr):
            parts = [self.value(p.value if isinstance(p, ast.FormattedValue) else p) for p in node.values]
            if not any(isinstance(part, (Unresolved, Parsed)) for part in parts):
                return "".join(str(part) for part in parts)
        elif isinstance(node, (ast.List, ast.Tuple)):
            return [self.value(element) for element in node.elts]
        elif isinstance(node, ast.Dict) and all(node.keys):  # a key of None is **other
            return {self.value(key): self.value(value) for key, value in zip(node.keys, node.values) if key}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "dict" and not node.args:
            return {keyword.arg: self.value(keyword.value) for keyword in node.keywords}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _SWITCHES and node.args:
            owner = self.value(node.args[0])
            switches = _SWITCHES[ast.unparse(node.func).rpartition(".")[2]]
            if isinstance(owner, Parsed) and not any(self.field(owner, switch) for switch in switches):
                return None
        elif isinstance(node, (ast.Compare, ast.IfExp, ast.UnaryOp, ast.Call, ast.Subscript, ast.ListComp)):
            return self._worked_out(node)
        return Unresolved(ast.unparse(node))

    def _worked_out(self, node: ast.expr) -> Any:
        """The value of an expression whose parts are known; ``Unresolved`` if one of them is not."""
        if isinstance(node, ast.IfExp):
            test = self.value(node.test)
            known = not isinstance(test, (Unresolved, Parsed))
            return self.value(node.body if test else node.orelse) if known else Unresolved(ast.unparse(node))
        if isinstance(node, ast.ListComp):
            return self._repeated(node)
        parts = [self.value(part) for part in operands(node)]
        if not parts or any(isinstance(part, (Unresolved, Parsed)) for part in parts):
            return Unresolved(ast.unparse(node))
        found = evaluated(node, parts)
        return Unresolved(ast.unparse(node)) if found is None else found[0]

    def _repeated(self, node: ast.ListComp) -> Any:
        """``[value for _ in range(n)]``."""
        loop = node.generators[0]
        name = ast.unparse(loop.target)
        length = _length(loop.iter)
        count = None if length is None else self.value(length)
        whole = len(node.generators) == 1 and not loop.ifs and name not in used(node.elt)
        if not (whole and isinstance(count, int) and 0 <= count <= LARGEST):
            return Unresolved(ast.unparse(node))
        return [self.value(node.elt)] * count

    def _either(self, node: ast.BoolOp) -> Any:
        """The side that ``or`` or ``and`` comes to, as far as it is known."""
        found: Any = None
        for side in node.values:
            found = self.value(side)
            if isinstance(found, (Unresolved, Parsed)):
                return Unresolved(ast.unparse(node))
            if bool(found) is isinstance(node.op, ast.Or):
                return found
        return found

    def constants(self, node: Node) -> Node:
        """A copy with fields of the command line's objects, as far as they are known, in place of their names."""
        return cast(Node, _Constants(self).visit(copy.deepcopy(node)))

    def _of_name(self, node: ast.Name) -> Any:
        binding = self.binding(node.id, getattr(node, "lineno", None))
        if binding is None or binding.value is None:
            return Unresolved(node.id)
        kinds = self._parsed_kinds(binding.value)
        if binding.part is None:
            return Parsed(kinds[0], node.id) if kinds else self.value(binding.value)
        if binding.part < len(kinds):
            return Parsed(kinds[binding.part], node.id)
        whole = self.value(binding.value)
        known = isinstance(whole, list) and binding.part < len(whole)
        return whole[binding.part] if known else Unresolved(node.id)

    def _parsed_kinds(self, call: ast.expr) -> list[str]:
        """Classes that the expression has filled from the command line, in their order; empty for any other."""
        if isinstance(call, ast.Subscript) and isinstance(call.slice, ast.Constant):
            kinds = parsed_kinds(call.value, self._followed)
            place = call.slice.value
            return [kinds[place]] if isinstance(place, int) and place < len(kinds) else []
        return parsed_kinds(call, self._followed)

    def _followed(self, name: str) -> ast.expr | ast.stmt | None:
        binding = self.binding(name)
        return binding.value if binding is not None and binding.value is not None else self.definition(name)

    def field(self, owner: Parsed, name: str) -> Any:
        """The value of ``owner.name``: set in the script, given on the command line, or the default."""
        for names in (self.function, self.module):
            if names is not None and (owner.name, name) in names.attributes:
                return self.value(names.attributes[owner.name, name])
        known = self._arguments.get(owner.kind, {})
        if name in known:
            return known[name]
        return self._declared(owner.kind, name, Unresolved(f"{owner.name}.{name}"))

    def _declared(self, kind: str, name: str, otherwise: Any) -> Any:
        """The default of a field of a dataclass of the script, or of one that it is derived from."""
        own = self.module.definitions.get(kind)
        if not isinstance(own, ast.ClassDef):
            return self._arguments.get(kind, {}).get(name, otherwise)
        for statement in own.body:
            if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == name and statement.value:
                return self._default(statement.value)
        for base in own.bases:
            otherwise = self._declared(ast.unparse(base).rpartition(".")[2], name, otherwise)
        return otherwise

    def _default(self, value: ast.expr) -> Any:
        """A field's default, be it in ``field(default=...)``."""
        if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] == "field":
            inner = {keyword.arg: keyword.value for keyword in value.keywords}
            made = inner.get("default_factory")
            if isinstance(made, ast.Lambda):
                return self.value(made.body)
            if made is not None and ast.unparse(made) in ("list", "dict"):
                return [] if ast.unparse(made) == "list" else {}
            return self.value(inner["default"]) if "default" in inner else Unresolved(ast.unparse(value))
        return self.value(value)


class _Constants(ast.NodeTransformer):
    def __init__(self, resolver: Resolver):
        self._resolver = resolver

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        owner = self._resolver.value(node.value)
        value = self._resolver.field(owner, node.attr) if isinstance(owner, Parsed) else owner
        if isinstance(owner, Parsed) and isinstance(value, (str, int, float, bool, type(None))):
            return ast.copy_location(ast.Constant(value), node)
        if isinstance(owner, Parsed) and isinstance(value, list) and all(isinstance(part, str) for part in value):
            parts: list[ast.expr] = [ast.Constant(part) for part in value]
            return ast.fix_missing_locations(ast.copy_location(ast.List(parts, ast.Load()), node))
        return self.generic_visit(node)


def _length(node: ast.expr) -> ast.expr | None:
    """n of ``range(n)``."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "range" and len(node.args) == 1:
        return node.args[0]
    return None


def settled(body: Sequence[ast.stmt], resolver: Resolver) -> list[ast.stmt]:
    """The statements, with the branch that is taken in place of an ``if`` whose test is known, and what stands in a
    ``with`` in place of it."""
    found: list[ast.stmt] = []
    for statement in flat(body):
        if isinstance(statement, ast.If):
            test = resolver.value(statement.test)
            if not isinstance(test, (Unresolved, Parsed)):
                found += settled(statement.body if test else statement.orelse, resolver)
                continue
        if isinstance(statement, ast.With) and not any(item.optional_vars for item in statement.items):
            found += settled(statement.body, resolver)
            continue
        found.append(statement)
    return found


def flat(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements, those under ``if __name__ == "__main__"`` in its place."""
    for statement in body:
        if isinstance(statement, ast.If) and is_main_guard(statement):
            yield from flat(statement.body)
        else:
            yield statement


def is_main_guard(statement: ast.If) -> bool:
    """Whether this is ``if __name__ == "__main__"``."""
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test))


def stored(node: ast.AST) -> set[str]:
    """Names that a statement or target binds, at any depth but in functions and classes of its own."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def used(node: ast.AST) -> set[str]:
    """Names that a statement or expression takes from outside."""
    loads = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    inner: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            arguments = part.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            inner |= {argument.arg for argument in every if argument is not None}
        elif isinstance(part, ast.comprehension):
            inner |= stored(part.target)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        inner |= stored(node)
    return loads - inner
