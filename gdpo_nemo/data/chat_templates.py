"""Size limits for chat templates, so that a downloaded template cannot use all memory of a machine.

transformers renders templates in jinja's sandbox, which limits only ``range``: ``{{ 'x' * 10**10 }}`` takes 10 GB.
``BoundedEnvironment`` extends this sandbox. This class limits the size of every value that a template creates, and the
total size of all values and steps in one rendering. An operation with a larger result is refused before it is executed.
An operation that is not known here counts with the product of the sizes of its operands.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from markupsafe import Markup

LARGEST = 1 << 24
"""Maximum number of characters or elements in one value. A context of 4 million tokens stays below this limit."""
_TOTAL = 8
"""Maximum total size of all values in one rendering, as a multiple of the maximum size of one value."""
_STEP = 32
"""Size that a call or one iteration of a loop adds to the total. The limit on the total thus also limits time."""
_ELEMENT = 4
"""Size of an element of a collection, which takes more memory than a character, in addition to its own size."""
_LONGEST_NUMBER = 1 << 16
"""Maximum number of bits in an integer."""
_LINEAR = (
    "capitalize casefold count d decode default encode endswith find float format_map index int isalnum isalpha "
    "isdigit length lower lstrip partition removeprefix removesuffix rfind rindex rpartition rsplit rstrip split "
    "splitlines startswith strip striptags swapcase title trim truncate upper wordcount"
)
"""Methods and filters of texts whose result is not larger than the text and one argument."""
_ENCODED = {"escape": 5, "e": 5, "forceescape": 5, "urlencode": 12, "tojson": 6, "pprint": 10, "xmlattr": 5}
"""Maximum number of characters in the result for one character of the value, by filter."""
_NUMBER = re.compile(r"\d+")
_SPECIFICATION = re.compile(r"%(?:\([^)]*\))?[-+ #0-9.*]*")
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
    """Adds method calls for ``a ~ b``, slices, loops and macros, which jinja's sandbox cannot intercept."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concatenated(context, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        is_slice = isinstance(node.arg, nodes.Slice)
        self.write("environment.measured(context, " if is_slice else "")
        super().visit_Getitem(node, frame)
        self.write(")" if is_slice else "")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        super().visit_For(_counting(node), frame)

    def visit_Macro(self, node: nodes.Macro, frame: Frame) -> None:
        super().visit_Macro(_counting(node), frame)


def _counting[Body: (nodes.For, nodes.Macro)](node: Body) -> Body:
    """Begin a body with a call that adds the size of the body's text to the total."""
    size = _STEP + sum(len(text.data) for text in node.find_all(nodes.TemplateData))
    count = nodes.EnvironmentAttribute("count")
    call = nodes.Call(count, [nodes.ContextReference(), nodes.Const(size)], [], None, None)
    node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
    return node


class _Formatter(SandboxedFormatter):
    """Formatter of ``str.format`` that checks every field before and after it is formatted."""

    made = 0

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """Convert a field if its text is within the limits."""
        _check(_deep_size(value))
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        """Format a field if its width and the text so far are within the limits."""
        self.made += sum(int(number[:9]) for number in _NUMBER.findall(format_spec)) + _deep_size(value)
        _check(self.made)
        return str(super().format_field(value, format_spec))


class _MarkupFormatter(_Formatter, SandboxedEscapeFormatter):
    """``_Formatter`` for texts that are marked as safe."""


class _Context(Context):
    """Variables of one rendering, with the total size of all values created so far."""

    made = 0

    def add(self, size: int) -> None:
        """Add the size of a value. Raise TemplateTooLarge if the value or the total is too large."""
        self.made += size
        _check(size)
        if self.made > _TOTAL * _LIMIT.get():
            raise TemplateTooLarge(f"takes more than {_TOTAL * _LIMIT.get():,} characters, elements and steps in total")


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
        self.count(context, _result_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, called: Any, *args: Any, **options: Any) -> Any:
        """Call a template function or a method of a value, if its result is within the limits."""
        if called == self.count:
            return self.count(*args)
        owner = getattr(called, "__self__", None)
        is_text = isinstance(owner, (str, bytes))
        if is_text or isinstance(owner, int):
            _check(_call_size(str(getattr(called, "__name__", "")), owner, args, options))
        result = super().call(context, called, *args, **options)
        self.count(context, _STEP + (_deep_size(result) if is_text else _size(result)))
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the method ``str.format`` with limits on the size of its result, or None for any other value."""
        if super().wrap_str_format(value) is None:
            return None
        text: str = value.__self__
        is_map = value.__name__ == "format_map"

        def limited_format(*args: Any, **options: Any) -> str:
            formatter = _MarkupFormatter(self, escape=text.escape) if isinstance(text, Markup) else _Formatter(self)
            made = formatter.vformat(text, () if is_map else args, args[0] if is_map else options)
            return type(text)(made)

        return limited_format

    def count(self, context: Context, size: int) -> None:
        """Add a size to the total of a rendering."""
        if isinstance(context, _Context):
            context.add(size)

    def measured(self, context: Context, value: Any) -> Any:
        """Return the value after adding its size to the total."""
        self.count(context, _size(value))
        return value

    def concatenated(self, context: Context, parts: tuple[Any, ...]) -> str:
        """Return the result of ``a ~ b``, which concatenates the values as text."""
        self.count(context, sum(_deep_size(part) for part in parts))
        return str_join(parts)


@pass_context
def _counted(context: Context, value: Any) -> Any:
    """Return a value of the output unchanged, after adding its size to the total."""
    if isinstance(context, _Context):
        context.add(_deep_size(value))
    return value


def _checked(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that checks the size of its result before it runs, and adds the size to the total."""
    wanted = getattr(getattr(act, "jinja_pass_arg", None), "name", None)

    @pass_context
    @wraps(act)
    def checked(context: Context, value: Any = None, *args: Any, **options: Any) -> Any:
        _check(_call_size(name, value, args, options))
        passed = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        result = act(*([passed[wanted]] if wanted else []), value, *args, **options)
        if isinstance(context, _Context):
            context.add(_STEP + _size(result))
        return result

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
        return _size(many) * max(times, 0) if isinstance(times, int) else 1
    if operator == "%" and isinstance(left, (str, bytes)):
        return _format_size(str(left), right)
    return _size(left) + _size(right)


def _call_size(name: str, owner: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> int:
    """Return the size of the result of a method or filter on ``owner``, or an upper bound."""
    arguments = (*args, *options.values())
    numbers = [abs(value) for value in arguments if isinstance(value, int)]
    widest = max([*numbers, *(len(value) for value in arguments if isinstance(value, str))], default=0)
    if name == "format":
        return _format_size(str(owner), arguments)
    if name in ("indent", "tojson"):
        lines = str(owner).count("\n") + 1 if isinstance(owner, str) else _deep_size(owner)
        return _deep_size(owner) * _ENCODED.get(name, 1) + lines * widest
    if name == "replace" and len(arguments) > 1 and isinstance(owner, str):
        return len(owner) + (owner.count(str(arguments[0])) if arguments[0] else len(owner) + 1) * _size(arguments[1])
    if name == "join":
        joined, glue = owner, arguments[0] if arguments else ""
        if isinstance(owner, str) and arguments and not isinstance(arguments[0], str):
            joined, glue = arguments[0], owner
        return _deep_size(joined) + _size(joined) * _size(glue)
    if name in _ENCODED or name in ("string", "safe", "list"):
        return _deep_size(owner) * _ENCODED.get(name, 1)
    if name in _LINEAR.split():
        return 0
    if isinstance(owner, (str, bytes, int, float)):
        return max(_size(owner), 1) * max(widest, _deep_size(arguments) if arguments else 1)
    return max(numbers, default=0)


def _format_size(text: str, arguments: Any) -> int:
    """Return an upper bound for the size of ``text % arguments``, from its field widths, fields and arguments."""
    specified = " ".join(_SPECIFICATION.findall(text))
    widths = [int(number[:9]) for number in _NUMBER.findall(specified)]
    if "*" in specified:
        values = arguments if isinstance(arguments, tuple) else (arguments,)
        widths += [abs(value) for value in values if isinstance(value, int)]
    return len(text) + sum(widths) + text.count("%") * _deep_size(arguments)


def _size(value: Any) -> int:
    """Return the number of characters in a text, or ``_ELEMENT`` for each element of a collection. Return 1 for any
    other value."""
    if isinstance(value, (str, bytes)):
        return len(value)
    return _ELEMENT * len(value) if isinstance(value, (list, tuple, dict, set)) else 1


def _deep_size(value: Any) -> int:
    """Return the number of characters and elements in a value, including nested values. Stop counting at the limit.

    A list that occurs twice inside a value counts twice, because its text is also written twice.
    """
    size, waiting = 0, [value]
    while waiting and size <= _LIMIT.get():
        found = waiting.pop()
        size += _size(found)
        if isinstance(found, Mapping):
            waiting += [*found.keys(), *found.values()]
        elif isinstance(found, (list, tuple, set)):
            waiting += found
    return size
