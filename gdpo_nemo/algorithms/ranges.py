"""Ranges of config numbers, declared in the annotation of a field: ``lr: Annotated[float, Range(0)] = 1e-6``.

A range applies to the number, or to each number in a list or mapping. null is valid if the type allows it.
`check_numbers` checks a dataclass, which is a config section or the whole config. This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args, get_type_hints

LARGEST = 10**15
"""Default limit for the absolute value of any number. No sensible value is larger than this limit, which is a petabyte,
or a quadrillion tokens or steps."""


@dataclasses.dataclass(frozen=True)
class Range:
    """Range of valid numbers, from ``least`` to ``most`` inclusive."""

    least: float = -LARGEST
    most: float = LARGEST
    above: float = -math.inf
    """Exclusive lower bound, used instead of `least`."""
    below: float = math.inf
    """Exclusive upper bound, used instead of `most`."""
    also: tuple[float, ...] = ()
    """Valid values outside the range that have a special meaning, such as -1 for all."""

    def __contains__(self, value: float) -> bool:
        """Return True if a number is in the range. NaN is outside every range."""
        return value in self.also or (self.least <= value <= self.most and self._inside(value))

    def __str__(self) -> str:
        """Describe the range as text that can follow "must be"."""
        bounds = [self._lower(), self._upper()]
        words = " and ".join(bound for bound in bounds if bound) or "finite"
        return " or ".join([*map(_number, self.also), words])

    def demand(self, value: float) -> str:
        """Describe the valid bounds for a message about an invalid number. The default limits are only mentioned if the
        number exceeds them."""
        if value > LARGEST and self.most == LARGEST and math.isinf(self.below):
            return f"at most {_number(LARGEST)}"
        if value < -LARGEST and self.least == -LARGEST and math.isinf(self.above):
            return f"at least {_number(-LARGEST)}"
        return str(self)

    def _inside(self, value: float) -> bool:
        # Infinity is the default of an exclusive bound and excludes no number.
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
    """Field of a config section, with the properties needed to check its numbers."""

    name: str
    range: Range | None
    """Range of the field's numbers; None if it has no numbers or declares no range. A test ensures that every field
    with numbers declares a range."""
    has_numbers: bool
    """True if the type of the field contains int or float."""
    section: type | None
    """Dataclass of the field if the field is a section, otherwise None."""


@cache
def fields_of(section: type) -> tuple[Field, ...]:
    """Return the fields of a section in their order."""
    return tuple(_field(name, hint) for name, hint in get_type_hints(section, include_extras=True).items())


def check_numbers(section: object, prefix: str = "") -> None:
    """Check that all numbers of a section and its nested sections are in their ranges.

    Args:
        section: dataclass instance.
        prefix: dotted path of the section, including the final dot.

    Raises:
        ValueError: if a number is outside its range. The message contains the key, the range and the value.
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
    """Yield a type and all types that are nested in it."""
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
