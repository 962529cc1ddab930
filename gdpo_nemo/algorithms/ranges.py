"""Ranges of numbers, declared in the annotation of a field: ``lr: Annotated[float, Range(0)] = 1e-6``.

A range holds for the number, or for each number of a list or a mapping; null is allowed if the type says so. Sections
of a config are dataclasses, so `check_numbers` takes a section or a whole config. No torch here.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from typing import Any, Iterator, get_args, get_type_hints

LARGEST = 10**15
"""Default limit of every number: a petabyte, a quadrillion tokens or steps."""


@dataclasses.dataclass(frozen=True)
class Range:
    """Values that a number may have: ``least`` to ``most``, both included."""

    least: float = -LARGEST
    most: float = LARGEST
    above: float = -math.inf
    """Excluded lower bound; use `least` or `above`."""
    below: float = math.inf
    """Excluded upper bound; use `most` or `below`."""
    also: tuple[float, ...] = ()
    """Values outside that have a meaning of their own, such as -1 for all."""

    def __contains__(self, value: float) -> bool:
        """Return whether a number is in the range; NaN never is."""
        return value in self.also or (self.least <= value <= self.most and self._inside(value))

    def __str__(self) -> str:
        """The range as text that follows "must be"."""
        bounds = [self._lower(), self._upper()]
        words = " and ".join(bound for bound in bounds if bound) or "finite"
        return " or ".join([*map(_number, self.also), words])

    def demand(self, value: float) -> str:
        """Return what a number outside the range must be. The default limits are named only if they are exceeded."""
        if value > LARGEST and self.most == LARGEST and math.isinf(self.below):
            return f"at most {_number(LARGEST)}"
        if value < -LARGEST and self.least == -LARGEST and math.isinf(self.above):
            return f"at least {_number(-LARGEST)}"
        return str(self)

    def _inside(self, value: float) -> bool:
        # Infinity equals the default of an excluded bound, which excludes nothing.
        lower = math.isinf(self.above) or value > self.above
        return lower and (math.isinf(self.below) or value < self.below)

    def _lower(self) -> str:
        if not math.isinf(self.above):
            return f"more than {_number(self.above)}"
        if self.least == -LARGEST:
            return ""
        return "0 or more" if self.least == 0 else f"at least {_number(self.least)}"

    def _upper(self) -> str:
        if not math.isinf(self.below):
            return f"below {_number(self.below)}"
        unlimited = self.most == LARGEST or math.isinf(self.most)
        return "" if unlimited else f"at most {_number(self.most)}"


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of a section, as far as its numbers are concerned."""

    name: str
    range: Range | None
    """None if the field has no numbers or, which the tests refuse, no range."""
    has_numbers: bool
    section: type | None
    """Dataclass of the field if it is a section itself."""


@cache
def fields_of(section: type) -> tuple[Field, ...]:
    """Return the fields of a section in order."""
    return tuple(_field(name, hint) for name, hint in get_type_hints(section, include_extras=True).items())


def check_numbers(section: object, prefix: str = "") -> None:
    """Refuse a number outside its range, in the sections below also.

    Args:
        section: dataclass instance.
        prefix: dotted path of the section, with a dot at the end.

    Raises:
        ValueError: names the key, the range and the value.
    """
    kind: type = section.__class__
    for field in fields_of(kind):
        value = getattr(section, field.name)
        key = prefix + field.name
        if value is None:
            continue
        if field.section is not None:
            check_numbers(value, f"{key}.")
        elif field.range is not None:
            for inner, number in _numbers(key, value):
                if number not in field.range:
                    raise ValueError(f"{inner}: must be {field.range.demand(number)}, got {str(number)[:40]}")


def _field(name: str, hint: Any) -> Field:
    ranges = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Range)]
    kinds = list(_kinds(hint))
    section = next((kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)
    return Field(name, ranges[0] if ranges else None, int in kinds or float in kinds, section)


def _kinds(hint: Any) -> Iterator[Any]:
    """A type and the types that it is composed of."""
    yield hint
    for part in get_args(hint):
        yield from _kinds(part)


def _numbers(key: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        yield from ((f"{key}.{name}", number) for name, number in value.items())
    elif isinstance(value, list):
        yield from ((f"{key}[{index}]", number) for index, number in enumerate(value))
    else:
        yield key, value


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
