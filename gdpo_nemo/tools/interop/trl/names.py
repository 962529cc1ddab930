"""Static evaluation of names and expressions in a Python script, without running it."""

from __future__ import annotations

import ast
import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from gdpo_nemo.tools.interop.trl.arguments import called_name, keywords_of, nodes_of, parsed_kinds
from gdpo_nemo.tools.interop.trl.trainers import PARSED
from gdpo_nemo.utils.errors import ConfigError

_SWITCHES = {"get_quantization_config": ("load_in_4bit", "load_in_8bit"), "get_peft_config": ("use_peft",)}
"""TRL function -> fields of ``ModelConfig``. The function returns None unless one of the fields is on."""
_MOST_STEPS = 100_000
"""Maximum number of expressions that are evaluated in a script."""
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


@dataclass(frozen=True)
class Unresolved:
    """Source of an expression whose value is only known when the script runs."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Parsed:
    """An object that ``TrlParser``, ``HfArgumentParser`` or ``argparse`` fills from the command line."""

    kind: str
    """Class name of the object."""
    name: str
    """Variable that contains the object, used to find later assignments ``name.field = ...``."""


@dataclass(frozen=True)
class Binding:
    """Assignment of a name in a script."""

    line: int
    value: ast.expr | None
    """Assigned expression. None if the value is unknown, because the name is assigned in a branch or a loop."""
    part: int | None = None
    """Index of the name if a statement assigns several names at once (None for a single name)."""


@dataclass
class Names:
    """Names that a module or a function binds."""

    body: list[ast.stmt]
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    definitions: dict[str, ast.stmt] = field(default_factory=dict)
    """Functions, classes and imports."""
    attributes: dict[tuple[str, str], ast.expr] = field(default_factory=dict)
    """(name, field) -> value of an assignment ``name.field = value``."""

    @classmethod
    def of(cls, body: Sequence[ast.stmt]) -> Names:
        """Collect the names that statements bind, including those under ``if __name__ == "__main__"``."""
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
    """Evaluates expressions in a function of a script, or at module level.

    Args:
        module: names of the module.
        function: names of the function (None for expressions at module level).
        caller: names of the function that calls this function (None if it is called at module level).
        parameters: parameters of the function -> arguments of its only call.
        arguments: class that a parser fills -> its fields with their values, from the command line or from defaults.
        classes: class of the script, or of a module beside it, by name.
    """

    def __init__(
        self,
        module: Names,
        function: Names | None,
        caller: Names | None,
        parameters: Mapping[str, ast.expr],
        arguments: Mapping[str, Mapping[str, Any]],
        classes: Mapping[str, ast.ClassDef],
    ):
        self.module = module
        self.function = function
        self._caller = caller
        self._parameters = parameters
        self._arguments = arguments
        self._classes = classes
        self._steps = 0

    def binding(self, name: str, line: int | None = None) -> Binding | None:
        """Return the last assignment of a name before ``line``. The function is searched first, then the module, the
        caller and the parameters. Return None if the name is not assigned."""
        for names in (self.function, self.module, self._caller):
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
        """Return the statement that defines or imports a name, or None if it is not found."""
        local = self.function.definitions.get(name) if self.function else None
        return local or self.module.definitions.get(name)

    def value(self, node: ast.expr) -> Any:
        """Evaluate an expression; return ``Unresolved`` if its value is unknown. Raises ConfigError after too many
        evaluations."""
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise ConfigError("the script's values reference each other too deeply to be resolved")
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            pass  # not a literal: names and calls are resolved below
        try:
            return self._value(node)
        except (ArithmeticError, TypeError, ValueError, RecursionError):
            return Unresolved(ast.unparse(node))

    def _value(self, node: ast.expr) -> Any:  # noqa: C901
        if isinstance(node, ast.Name):
            return self._of_name(node)
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value)
            if isinstance(owner, Parsed):
                return self.field(owner, node.attr)
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            sides = [self.value(node.left), self.value(node.right)]
            if all(map(_is_known, sides)) and bounded(node.op, *sides):
                return _OPERATIONS[type(node.op)](*sides)
        elif isinstance(node, ast.BoolOp):
            return self._either(node)
        elif isinstance(node, ast.JoinedStr):
            parts = [self.value(p.value if isinstance(p, ast.FormattedValue) else p) for p in node.values]
            if all(map(_is_known, parts)):
                return "".join(map(str, parts))
        elif isinstance(node, (ast.List, ast.Tuple)):
            return list(map(self.value, node.elts))
        elif isinstance(node, ast.Dict) and all(node.keys):  # ast.Dict marks **other with the key None
            return {self.value(key): self.value(value) for key, value in zip(node.keys, node.values) if key}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "dict" and not node.args:
            return {keyword.arg: self.value(keyword.value) for keyword in node.keywords}
        elif isinstance(node, ast.Call) and called_name(node) in _SWITCHES and node.args:
            owner = self.value(node.args[0])
            switches = _SWITCHES[called_name(node)]
            if isinstance(owner, Parsed) and not any(self.field(owner, switch) for switch in switches):
                return None
        elif isinstance(node, (ast.Compare, ast.IfExp, ast.UnaryOp, ast.Call, ast.Subscript, ast.ListComp)):
            return self._compute(node)
        return Unresolved(ast.unparse(node))

    def _compute(self, node: ast.expr) -> Any:
        """Evaluate an expression if the values of its operands are known; otherwise return ``Unresolved``."""
        if isinstance(node, ast.IfExp):
            test = self.value(node.test)
            if not _is_known(test):
                return Unresolved(ast.unparse(node))
            return self.value(node.body if test else node.orelse)
        if isinstance(node, ast.ListComp):
            return self._repeated(node)
        parts = list(map(self.value, operands(node)))
        if not parts or not all(map(_is_known, parts)):
            return Unresolved(ast.unparse(node))
        found = evaluated(node, parts)
        return Unresolved(ast.unparse(node)) if found is None else found[0]

    def _repeated(self, node: ast.ListComp) -> Any:
        """Evaluate a comprehension of the form ``[value for _ in range(n)]``; otherwise return ``Unresolved``."""
        loop = node.generators[0]
        name = ast.unparse(loop.target)
        length = _length(loop.iter)
        count = None if length is None else self.value(length)
        whole = len(node.generators) == 1 and not loop.ifs and name not in used(node.elt)
        if not (whole and isinstance(count, int) and 0 <= count <= LARGEST):
            return Unresolved(ast.unparse(node))
        return [self.value(node.elt)] * count

    def _either(self, node: ast.BoolOp) -> Any:
        """Evaluate an ``and`` or ``or`` expression; return ``Unresolved`` if an operand that determines the result is
        unknown."""
        found: Any = None
        for side in node.values:
            found = self.value(side)
            if not _is_known(found):
                return Unresolved(ast.unparse(node))
            if bool(found) is isinstance(node.op, ast.Or):
                return found
        return found

    def constants[Node: ast.AST](self, node: Node) -> Node:
        """Return a copy in which known fields of parsed command-line objects are replaced by their values."""
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
        """Return the classes that a call fills from the command line, in order. The list is empty for other
        expressions."""
        if isinstance(call, ast.Subscript) and isinstance(call.slice, ast.Constant):
            kinds = parsed_kinds(call.value, self._followed)
            index = call.slice.value
            return [kinds[index]] if isinstance(index, int) and index < len(kinds) else []
        return parsed_kinds(call, self._followed)

    def _followed(self, name: str) -> ast.expr | ast.stmt | None:
        binding = self.binding(name)
        return binding.value if binding is not None and binding.value is not None else self.definition(name)

    def field(self, owner: Parsed, name: str) -> Any:
        """Return the value of ``owner.name`` from the script, the command line, or the default, in this order."""
        for names in (self.function, self.module, self._caller):
            if names is not None and (owner.name, name) in names.attributes:
                return self.value(names.attributes[owner.name, name])
        known = self._arguments.get(owner.kind, {})
        if name in known:
            return known[name]
        return self._declared(owner.kind, name, Unresolved(f"{owner.name}.{name}"))

    def fields(self, owner: Parsed) -> dict[str, Any]:
        """Return all fields of a parsed object whose values are known."""
        names = self.class_fields(owner.kind)
        for base in self._bases(owner.kind):
            if base not in self._classes:
                names |= {*PARSED.get(base.removeprefix("trl."), self._arguments.get(base, {}))}
        values = {name: self.field(owner, name) for name in sorted(names)}
        return {name: value for name, value in values.items() if _is_known(value)}

    def _declared(self, kind: str, name: str, otherwise: Any) -> Any:
        """Return the default of a field in a class of the script, or in TRL's class from which it is derived."""
        declared = self.class_defaults(kind)
        if name in declared:
            return declared[name]
        for base in self._bases(kind):
            otherwise = self._arguments.get(base, {}).get(name, otherwise)
        return otherwise

    def class_fields(self, kind: str) -> set[str]:
        """Return the fields that a class of the script and its base classes in the script declare."""
        return {ast.unparse(part.target) for part in self._annotated(kind)}

    def class_defaults(self, kind: str) -> dict[str, Any]:
        """Return the defaults that a class of the script and its base classes in the script declare."""
        found: dict[str, Any] = {}
        for part in self._annotated(kind):
            if part.value is not None:
                found[ast.unparse(part.target)] = self._default(part.value)
        return found

    def _annotated(self, kind: str) -> Iterator[ast.AnnAssign]:
        """Yield the fields of a class of the script and its base classes, base classes first."""
        for base in reversed(self._bases(kind)):
            for part in self._classes[base].body if base in self._classes else ():
                if isinstance(part, ast.AnnAssign):
                    yield part

    def is_subclass(self, kind: str, base: str) -> bool:
        """Return whether a class is TRL's class ``base`` or is derived from it."""
        return any(name.rpartition(".")[2] == base for name in self._bases(kind))

    def _bases(self, kind: str) -> list[str]:
        """Return a class and its base classes, derived classes first. A class of TRL with the name of a class of the
        script begins with ``trl.``."""
        found = [kind]
        for name in found:
            for base in self._classes[name].bases if name in self._classes else ():
                text = ast.unparse(base)
                last = text.rpartition(".")[2]
                if last not in found[1:]:
                    found.append(f"trl.{last}" if text.startswith("trl.") else last)
        return found

    def _default(self, value: ast.expr) -> Any:
        """Return the default of a dataclass field, which may be written as ``field(default=...)``."""
        if isinstance(value, ast.Call) and called_name(value) == "field":
            inner = keywords_of(value)
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


def _is_known(value: Any) -> bool:
    return not isinstance(value, (Unresolved, Parsed))


def _length(node: ast.expr) -> ast.expr | None:
    """Return the argument n of ``range(n)``, or None for other expressions."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "range" and len(node.args) == 1:
        return node.args[0]
    return None


def settled(body: Sequence[ast.stmt], resolver: Resolver) -> list[ast.stmt]:
    """Simplify statements: replace an ``if`` whose test is known by the branch that is taken, and a ``with`` by its
    body."""
    found: list[ast.stmt] = []
    for statement in flat(body):
        if isinstance(statement, ast.If):
            test = resolver.value(statement.test)
            if _is_known(test):
                found += settled(statement.body if test else statement.orelse, resolver)
                continue
        if isinstance(statement, ast.With) and not any(item.optional_vars for item in statement.items):
            found += settled(statement.body, resolver)
            continue
        found.append(statement)
    return found


def flat(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements. ``if __name__ == "__main__"`` is replaced by its body."""
    for statement in body:
        if isinstance(statement, ast.If) and is_main_guard(statement):
            yield from flat(statement.body)
        else:
            yield statement


def is_main_guard(statement: ast.If) -> bool:
    """Return whether an ``if`` statement tests ``__name__``."""
    return any(node.id == "__name__" for node in nodes_of(statement.test, ast.Name))


def stored(node: ast.AST) -> set[str]:
    """Return all names that a statement or target assigns, including nested statements."""
    return {name.id for name in nodes_of(node, ast.Name) if isinstance(name.ctx, ast.Store)}


def used(node: ast.AST) -> set[str]:
    """Return the names that a statement or expression reads but does not define itself."""
    loads = {name.id for name in nodes_of(node, ast.Name) if isinstance(name.ctx, ast.Load)}
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


LARGEST = 1_000_000
"""Maximum number of elements or characters in an evaluated value."""
_LARGEST_NUMBER = 10**15
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_SIGNS: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.Not: operator.not_, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"str": str, "int": int, "float": float, "bool": bool, "len": len}
_METHODS = ("split", "rsplit", "replace", "strip", "lstrip", "rstrip", "lower", "upper", "removeprefix", "removesuffix")
"""String methods that can be evaluated."""


def bounded(operation: ast.operator, left: Any, right: Any) -> bool:
    """Return whether the result of an arithmetic operation is within the size limits."""
    sides = (left, right)
    sizes = [len(side) if isinstance(side, (str, list, tuple, bytes)) else None for side in sides]
    if sizes == [None, None]:
        return all(not isinstance(side, (int, float)) or abs(side) <= _LARGEST_NUMBER for side in sides)
    if isinstance(operation, ast.Mult):
        factors = [size if size is not None else side for size, side in zip(sizes, sides)]
        return all(isinstance(factor, int) for factor in factors) and factors[0] * factors[1] <= LARGEST
    return sum(size or 0 for size in sizes) <= LARGEST


def operands(node: ast.expr) -> list[ast.expr]:
    """Return the operands of an expression that can be evaluated (empty if the expression is not supported)."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return [node.left, node.comparators[0]]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice):
        return [node.value, node.slice]
    if isinstance(node, ast.Call) and not node.keywords:
        if isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and len(node.args) == 1:
            return list(node.args)
        if isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
            return [node.func.value, *node.args]
    return []


def evaluated(node: ast.expr, parts: Sequence[Any]) -> tuple[Any] | None:
    """Evaluate an expression. Return a tuple with its value, or None if the evaluation fails.

    Args:
        parts: values of ``operands(node)``.
    """
    try:
        return (_value(node, parts),)
    except (ArithmeticError, TypeError, ValueError, LookupError, AttributeError):
        return None


def _value(node: ast.expr, parts: Sequence[Any]) -> Any:
    if isinstance(node, ast.Compare):
        return _COMPARISONS[type(node.ops[0])](*parts)
    if isinstance(node, ast.UnaryOp):
        return _SIGNS[type(node.op)](parts[0])
    if isinstance(node, ast.Subscript):
        return parts[0][parts[1]]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _FUNCTIONS[node.func.id](parts[0])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(parts[0], str):
        if len(parts[0]) * max((len(str(part)) for part in parts[1:]), default=1) > LARGEST:
            raise ValueError("the text is too long")
        return getattr(parts[0], node.func.attr)(*parts[1:])
    raise TypeError("not a supported expression")
