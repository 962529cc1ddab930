"""Expressions of a script whose value follows from known parts: comparisons, indices, and a few functions.

Nothing of the script is called: what is computed here is listed here, and its operands are literals.
"""

from __future__ import annotations

import ast
import operator
from typing import Any, Callable, Sequence

LARGEST = 1_000_000
"""Elements or characters of a value that is worked out here."""
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
"""Methods of texts."""


def bounded(operation: ast.operator, left: Any, right: Any) -> bool:
    """Return whether the result of an arithmetic operation stays small."""
    sides = (left, right)
    sizes = [len(side) if isinstance(side, (str, list, tuple, bytes)) else None for side in sides]
    if sizes == [None, None]:
        return all(not isinstance(side, (int, float)) or abs(side) <= _LARGEST_NUMBER for side in sides)
    if isinstance(operation, ast.Mult):
        factors = [size if size is not None else side for size, side in zip(sizes, sides)]
        return all(isinstance(factor, int) for factor in factors) and factors[0] * factors[1] <= LARGEST
    return sum(size or 0 for size in sizes) <= LARGEST


def operands(node: ast.expr) -> list[ast.expr]:
    """Return the parts that have to be known; empty if the expression is none of those that are worked out."""
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
    """Return the value as a tuple of one, or None if these parts have none.

    Args:
        parts: the values of ``operands(node)``.
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
            raise ValueError("the text would be too long")
        return getattr(parts[0], node.func.attr)(*parts[1:])
    raise TypeError("not an expression that is worked out here")
