"""Size limits for chat templates, so that a downloaded template cannot use all memory of a machine.

transformers renders templates in jinja's sandbox, which limits only ``range``: ``{{ 'x' * 10**10 }}`` takes 10 GB.
``BoundedEnvironment`` extends this sandbox. This class limits the size of every value that a template creates, and the
total size of all values in one rendering. An operation with a larger result is refused before it is executed.
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
"""Maximum number of characters or elements in one value. A context of 10 million tokens stays below this limit."""
_TOTAL = 4
"""Maximum total size of all values in one rendering, as a multiple of the maximum size of one value."""
_LONGEST_NUMBER = 1 << 16
"""Maximum number of bits in an integer."""
_PADDED = ("ljust", "rjust", "center", "zfill", "expandtabs", "to_bytes", "batch", "slice", "round")
"""Methods and filters whose result size depends on an argument."""
_TEXTS = ("string", "escape", "e", "forceescape", "pprint", "urlencode", "xmlattr", "safe", "list")
"""Filters that convert nested values to text."""
_NUMBER = re.compile(r"\d+")
_NESTED = re.compile(r"\{[^{}]*\{")
_SPECIFICATION = re.compile(r"%(?:\([^)]*\))?[-+ #0-9.*]*|\{[^{}]*:[^{}]*")
_LIMIT: ContextVar[int] = ContextVar("limit", default=LARGEST)


class TemplateTooLarge(Exception):
    """Raised if a single value of a chat template, or all its values together, exceed the size limits."""


@contextmanager
def limited(size: int) -> Iterator[None]:
    """Within the ``with`` block, limit every value to ``size`` characters or elements."""
    before = _LIMIT.set(size)
    try:
        yield
    finally:
        _LIMIT.reset(before)


def bound_templates() -> None:
    """Make transformers render chat templates in ``BoundedEnvironment``, in this process."""
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
    """Variables of one rendering, with the total size of all values created so far."""

    made = 0

    def add(self, size: int) -> None:
        """Add the size of a value. Raise TemplateTooLarge if the value or the total is too large."""
        self.made += size
        _check(size)
        if self.made > _TOTAL * _LIMIT.get():
            raise TemplateTooLarge(
                f"creates values with more than {_TOTAL * _LIMIT.get():,} characters or elements in total"
            )


class _Filters(dict[str, Callable[..., Any]]):
    """Filters by name. Each filter is wrapped to check the size of its result first."""

    def __setitem__(self, name: str, act: Callable[..., Any]) -> None:
        super().__setitem__(name, _checked(name, act))


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """jinja's sandbox with size limits. Rendering raises TemplateTooLarge if a limit is exceeded."""

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
        """Evaluate a binary operation if its result is within the limits."""
        size = _result_size(operator, left, right)
        if isinstance(context, _Context):
            context.add(size)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, called: Any, *args: Any, **options: Any) -> Any:
        """Call a template function or a method of a value, if its result is within the limits."""
        owner = getattr(called, "__self__", None)
        if isinstance(owner, (str, bytes, int)):
            size = _call_size(str(getattr(called, "__name__", "")), owner, args, options)
            if isinstance(context, _Context):
                context.add(size)
        return super().call(context, called, *args, **options)

    def concatenated(self, context: Context, parts: tuple[Any, ...]) -> str:
        """Return the result of ``a ~ b``, which concatenates the values as text."""
        if isinstance(context, _Context):
            context.add(sum(_deep_size(part) for part in parts))
        return str_join(parts)


@pass_context
def _counted(context: Context, value: Any) -> Any:
    """Return a value of the output unchanged, after adding its size to the total."""
    if isinstance(context, _Context):
        context.add(_deep_size(value))
    return value


def _checked(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that checks the size of its result before it runs. Arguments passed by jinja are ignored."""
    passed = 0 if getattr(act, "jinja_pass_arg", None) is None else 1

    @wraps(act)
    def checked(*args: Any, **options: Any) -> Any:
        value, *others = args[passed:] or (None,)
        _check(_call_size(name, value, tuple(others), options))
        return act(*args, **options)

    return checked


def _check(size: int) -> None:
    if size > _LIMIT.get():
        raise TemplateTooLarge(f"creates a value with more than {_LIMIT.get():,} characters or elements")


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Return the size of a binary operation's result, or an upper bound."""
    if isinstance(left, int) and isinstance(right, int):
        factor = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * max(right, 0)}
        if factor.get(operator, 0) > _LONGEST_NUMBER:
            raise TemplateTooLarge(f"computes a number with more than {_LONGEST_NUMBER:,} bits")
        return 1
    if operator == "*":
        many, times = (left, right) if hasattr(left, "__len__") else (right, left)
        return len(many) * max(times, 0) if hasattr(many, "__len__") and isinstance(times, int) else 1
    if operator == "%" and isinstance(left, (str, bytes)):
        return _format_size(str(left), right)
    return _size(left) + _size(right)


def _call_size(name: str, owner: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> int:
    """Return the size of the result of a method or filter on ``owner``, or an upper bound. Return 0 if the call does
    not enlarge the value."""
    arguments = (*args, *options.values())
    widest = max((abs(value) for value in arguments if isinstance(value, int)), default=0)
    if name in _PADDED:
        return widest * (1 + (str(owner).count("\t") if name == "expandtabs" else 0))
    if name in ("format", "format_map"):
        return _format_size(str(owner), arguments)
    if name in ("indent", "tojson"):
        lines = str(owner).count("\n") + 1 if isinstance(owner, str) else _deep_size(owner)
        width = max([widest, *(len(value) for value in arguments if isinstance(value, str))])
        return _deep_size(owner) + lines * width
    if name == "replace" and len(arguments) > 1 and isinstance(owner, str):
        return len(owner) + (owner.count(str(arguments[0])) if arguments[0] else len(owner) + 1) * _size(arguments[1])
    if name == "join":
        joined, glue = owner, arguments[0] if arguments else ""
        if isinstance(owner, str) and arguments and not isinstance(arguments[0], str):
            joined, glue = arguments[0], owner
        return _deep_size(joined) + _size(joined) * _size(glue)
    return _deep_size(owner) if name in _TEXTS else 0


def _format_size(text: str, arguments: Any) -> int:
    """Return an upper bound for the size of a formatted text, from its field widths, fields and arguments."""
    nested = _NESTED.search(text) is not None
    specified = text if nested else " ".join(_SPECIFICATION.findall(text))
    widths = [int(number[:9]) for number in _NUMBER.findall(specified)]
    if nested or "*" in specified:
        values = arguments if isinstance(arguments, tuple) else (arguments,)
        widths += [abs(value) for value in values if isinstance(value, int)]
    fields = text.count("{") + text.count("%")
    return len(text) + sum(widths) + fields * _deep_size(arguments)


def _size(value: Any) -> int:
    """Return the number of characters in a text or of elements in a collection. Return 1 for any other value."""
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict, set)) else 1


def _deep_size(value: Any) -> int:
    """Return the number of characters and elements in a value, including nested values. Stop counting at the limit.

    A list that occurs twice inside a value counts twice, because its text is also written twice.
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
