"""Bounds for chat templates, so that one line of a downloaded template cannot take all memory of a machine.

transformers renders templates in jinja's sandbox, which bounds ``range`` and nothing else: ``{{ 'x' * 10**10 }}`` takes
10 GB. ``BoundedEnvironment`` is that sandbox with a limit on the size of every value that a template makes, and on
their sum in one rendering. Operations whose result would be larger are refused before they are carried out.
"""

from __future__ import annotations

import importlib
import re
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Callable, Iterator, Mapping

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment

LARGEST = 1 << 26
"""Characters or elements of one value; a context of 10 million tokens is below it."""
_TOTAL = 4
"""Values of the largest size that one rendering may make."""
_LONGEST_NUMBER = 1 << 16
"""Bits of an integer."""
_PADDED = ("ljust", "rjust", "center", "zfill", "expandtabs", "to_bytes", "batch", "slice", "round")
"""Methods and filters whose result has about the size that an argument tells."""
_TEXTS = ("string", "escape", "e", "forceescape", "pprint", "urlencode", "xmlattr", "safe", "list")
"""Filters that write a value of any depth as text."""
_NUMBER = re.compile(r"\d+")
_NESTED = re.compile(r"\{[^{}]*\{")
_SPECIFICATION = re.compile(r"%(?:\([^)]*\))?[-+ #0-9.*]*|\{[^{}]*:[^{}]*")
_LIMIT: ContextVar[int] = ContextVar("limit", default=LARGEST)


class TemplateTooLarge(Exception):
    """A chat template makes a value that is larger than any conversation needs."""


@contextmanager
def limited(size: int) -> Iterator[None]:
    """Allow values of at most ``size`` characters or elements inside of the block."""
    before = _LIMIT.set(size)
    try:
        yield
    finally:
        _LIMIT.reset(before)


def bound_templates() -> None:
    """Let transformers render chat templates in ``BoundedEnvironment``, in this process."""
    module: Any = importlib.import_module("transformers.utils.chat_template_utils")
    if module.ImmutableSandboxedEnvironment is not BoundedEnvironment:
        module.ImmutableSandboxedEnvironment = BoundedEnvironment
        module._compile_jinja_template.cache_clear()


class _Generator(CodeGenerator):
    """Compiles ``a ~ b`` to a method call, because jinja's sandbox cannot intercept that operator."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concatenated(context, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Context(Context):
    """The variables of one rendering, and the size of all values that it made."""

    made = 0

    def add(self, size: int) -> None:
        """Count a value. Raises TemplateTooLarge if it, or all values together, are too large."""
        self.made += size
        _check(size)
        if self.made > _TOTAL * _LIMIT.get():
            raise TemplateTooLarge(f"makes values of over {_TOTAL * _LIMIT.get():,} characters or elements")


class _Filters(dict[str, Callable[..., Any]]):
    """Filters by name, each of which checks its arguments first."""

    def __setitem__(self, name: str, act: Callable[..., Any]) -> None:
        super().__setitem__(name, _checked(name, act))


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """jinja's sandbox with bounds on sizes. Rendering raises TemplateTooLarge."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _Generator
    context_class = _Context

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options, finalize=_counted)
        filters = _Filters()
        for name, act in self.filters.items():
            filters[name] = act
        self.filters = filters
        del self.globals["lipsum"]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Carry out a binary operation whose result stays small."""
        size = _result_size(operator, left, right)
        if isinstance(context, _Context):
            context.add(size)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, called: Any, *args: Any, **options: Any) -> Any:
        """Call a function of a template, or a method of a value, whose result stays small."""
        owner = getattr(called, "__self__", None)
        if isinstance(owner, (str, bytes, int)):
            size = _call_size(str(getattr(called, "__name__", "")), owner, args, options)
            if isinstance(context, _Context):
                context.add(size)
        return super().call(context, called, *args, **options)

    def concatenated(self, context: Context, parts: tuple[Any, ...]) -> str:
        """Return the parts of ``a ~ b`` as one text."""
        if isinstance(context, _Context):
            context.add(sum(_deep_size(part) for part in parts))
        return str_join(parts)


@pass_context
def _counted(context: Context, value: Any) -> Any:
    """Count a value that is written out."""
    if isinstance(context, _Context):
        context.add(_deep_size(value))
    return value


def _checked(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that checks its arguments, behind those that jinja passes."""
    passed = 0 if getattr(act, "jinja_pass_arg", None) is None else 1

    @wraps(act)
    def checked(*args: Any, **options: Any) -> Any:
        value, *others = args[passed:] or (None,)
        _check(_call_size(name, value, tuple(others), options))
        return act(*args, **options)

    return checked


def _check(size: int) -> None:
    if size > _LIMIT.get():
        raise TemplateTooLarge(f"makes a value of over {_LIMIT.get():,} characters or elements")


def _result_size(operator: str, left: Any, right: Any) -> int:
    """The size of the result of a binary operation, or a bound for it."""
    if isinstance(left, int) and isinstance(right, int):
        factor = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * max(right, 0)}
        if factor.get(operator, 0) > _LONGEST_NUMBER:
            raise TemplateTooLarge(f"computes a number of over {_LONGEST_NUMBER:,} bits")
        return 1
    if operator == "*":
        many, times = (left, right) if hasattr(left, "__len__") else (right, left)
        return len(many) * max(times, 0) if hasattr(many, "__len__") and isinstance(times, int) else 1
    if operator == "%" and isinstance(left, (str, bytes)):
        return _format_size(str(left), right)
    return _size(left) + _size(right)


def _call_size(name: str, owner: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> int:
    """The size of what a method or filter of this name makes of ``owner``, or a bound for it; 0 if it adds nothing."""
    given = (*args, *options.values())
    widest = max((abs(value) for value in given if isinstance(value, int)), default=0)
    if name in _PADDED:
        return widest * (1 + (str(owner).count("\t") if name == "expandtabs" else 0))
    if name in ("format", "format_map"):
        return _format_size(str(owner), given)
    if name in ("indent", "tojson"):
        lines = str(owner).count("\n") + 1 if isinstance(owner, str) else _deep_size(owner)
        width = max([widest, *(len(value) for value in given if isinstance(value, str))])
        return _deep_size(owner) + lines * width
    if name == "replace" and len(given) > 1 and isinstance(owner, str):
        return len(owner) + (owner.count(str(given[0])) if given[0] else len(owner) + 1) * _size(given[1])
    if name == "join":
        joined, glue = (given[0], owner) if isinstance(owner, str) and given and not isinstance(given[0], str) else (
            owner, given[0] if given else ""
        )  # fmt: skip
        return _deep_size(joined) + _size(joined) * _size(glue)
    return _deep_size(owner) if name in _TEXTS else 0


def _format_size(text: str, given: Any) -> int:
    """A bound for the size of a formatted text: widths that it names or is given, and its fields."""
    nested = _NESTED.search(text) is not None
    specified = text if nested else " ".join(_SPECIFICATION.findall(text))
    widths = [int(number[:9]) for number in _NUMBER.findall(specified)]
    if nested or "*" in specified:
        values = given if isinstance(given, tuple) else (given,)
        widths += [abs(value) for value in values if isinstance(value, int)]
    fields = text.count("{") + text.count("%")
    return len(text) + sum(widths) + fields * _deep_size(given)


def _size(value: Any) -> int:
    """Characters of a text, elements of a collection; 1 for any other value."""
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict, set)) else 1


def _deep_size(value: Any) -> int:
    """Characters and elements of a value at any depth, counted no further than to the limit.

    A list that contains another one twice counts it twice, as it is written twice.
    """
    size, waiting = 0, [value]
    while waiting and size <= _LIMIT.get():
        found = waiting.pop()
        size += max(_size(found), 1)
        if isinstance(found, Mapping):
            waiting += [*found.keys(), *found.values()]
        elif isinstance(found, (list, tuple, set)):
            waiting += found
    return size
