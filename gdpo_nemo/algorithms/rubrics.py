"""Rubrics: criteria that belong to a row, each of which is a reward component of that row's samples.

A name in ``gdpo.rewards`` that ends with ``/*`` is a family of components. The reward of a criterion has the name of
the family with the id of the criterion in place of ``*``: the family ``rubric/*`` has the components ``rubric/polite``
and ``rubric/2``. A row's criteria are only compared within the row's own group, so different rows may use one id for
different criteria.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gdpo_nemo.algorithms.rubric_formats import canonical, listed
from gdpo_nemo.utils.errors import ConfigError, nearest

ALL = "/*"
"""End of the name of a family."""
MOST_CRITERIA = 1000
"""Largest number of criteria of a row. The judges' rubrics of public datasets have up to about 50."""
LONGEST_TEXT = 65_536
"""Largest number of characters of a criterion."""
LONGEST_ID = 200
"""Largest number of characters of a criterion's id."""


@dataclass(frozen=True)
class Criterion:
    """A criterion of a row's rubric."""

    text: str = ""
    """Text of the criterion, for judges and reports."""
    weight: float = 1.0
    """Weight within the row's rubric. Negative for a criterion that describes a fault."""
    required: bool = False
    """True if the row's criteria with a positive weight count only if this one is met, which means a reward of 1."""
    scale: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest score that a judge may give. The reward is scaled to the range from 0 to 1."""
    factor: float = 1.0
    """Factor of ``gdpo.weighting`` in the advantages of the step. Scores and metrics do not contain it."""


def is_family(name: str) -> bool:
    """Return True if a name in ``gdpo.rewards`` is the name of a family."""
    return name.endswith(ALL) and len(name) > len(ALL)


def family_of(component: str, names: Iterable[str]) -> str | None:
    """Return the family in ``names`` that a component belongs to, or None: ``rubric/*`` for ``rubric/polite``."""
    stem, separator, criterion = component.partition("/")
    family = stem + ALL
    return family if separator and criterion and criterion != "*" and family in names else None


def family_name(component: str) -> str:
    """Return the family of a criterion: ``rubric/*`` for the component ``rubric/polite``."""
    return component.partition("/")[0] + ALL


def is_known(component: str, names: Iterable[str]) -> bool:
    """Return True if ``names`` contains a component or its family."""
    return (component in names and not is_family(component)) or family_of(component, names) is not None


def member(family: str, criterion: str) -> str:
    """Return the component of a criterion: ``rubric/polite`` for the family ``rubric/*``."""
    return family.removesuffix("*") + criterion


def criterion_id(component: str) -> str:
    """Return the id of a criterion from the name of its component: ``polite`` for ``rubric/polite``."""
    return component.partition("/")[2]


def criteria_of(
    fields: Mapping[str, Any], components: Iterable[str], given: Mapping[str, Criterion] | None = None
) -> dict[str, Criterion]:
    """Return the criteria of a sample by component: of all families of its rewards.

    The rubric of the family ``rubric/*`` is ``given`` by the verifier, or is in the row's column ``rubric``. Without a
    rubric, each reward is a criterion of weight 1.

    Args:
        fields: columns of the row.
        components: rewards of the sample.

    Raises:
        ConfigError: if a rubric is invalid, or does not have the criterion of a reward.
    """
    found: dict[str, Criterion] = {}
    rubrics: dict[str, Mapping[str, Criterion]] = {}
    for component in components:
        stem, separator, _ = component.partition("/")
        if not separator:
            continue
        if stem not in rubrics:
            rubrics[stem] = _rubric(stem, fields, given or {})
            found |= rubrics[stem]
        if rubrics[stem] and component not in rubrics[stem]:
            raise ConfigError(f"reward {component!r} is not a criterion of the row's rubric{nearest(component, found)}")
        found.setdefault(component, Criterion())
    return found


def _rubric(stem: str, fields: Mapping[str, Any], given: Mapping[str, Criterion]) -> dict[str, Criterion]:
    """Return the rubric of a family by component. Empty if there is none."""
    known = {component: criterion for component, criterion in given.items() if component.startswith(stem + "/")}
    if known or fields.get(stem) is None:
        return known
    try:
        rubric = read_rubric(fields[stem])
    except ConfigError as error:
        raise error.within(stem) from error
    return {member(stem + ALL, name): criterion for name, criterion in rubric.items()}


def read_rubric(value: Any) -> dict[str, Criterion]:
    """Return the criteria of a row's rubric by id. A criterion without an id gets its position, counted from 1.

    A rubric is a list. Each criterion is a text, or a mapping with the keys criterion, weight (1), id, required (false)
    and scale ([0, 1]), or with the keys of a public format (`rubric_formats`).

    Raises:
        ConfigError: if the rubric is invalid. The message begins with the criterion.
    """
    value = listed(value)
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"must be a list of criteria, got {type(value).__name__}")
    if len(value) > MOST_CRITERIA:
        raise ConfigError(f"has {len(value)} criteria, more than {MOST_CRITERIA}")
    found: dict[str, Criterion] = {}
    for position, given in enumerate(value, 1):
        entry = {"criterion": given} if isinstance(given, str) else given
        subject = f"criterion {position}"
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{subject}: must be a text or a mapping, got {type(given).__name__}")
        try:
            entry = canonical(entry)
        except ConfigError as error:
            raise error.within(subject) from None
        identity = entry.get("id")
        name = str(position) if identity is None else str(identity)
        if not name or len(name) > LONGEST_ID:
            raise ConfigError(f"{subject}: id must have 1 to {LONGEST_ID} characters, got {len(name)}")
        if name in found:
            raise ConfigError(f"{subject}: id {name!r} is not unique")
        found[name] = _criterion(entry, subject)
    if found and not any(criterion.weight for criterion in found.values()):
        raise ConfigError("every criterion has the weight 0")
    return found


def _criterion(entry: Mapping[str, Any], subject: str) -> Criterion:
    text = entry.get("criterion")
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{subject}: criterion must be a text, got {str(text)[:40]!r}")
    if len(text) > LONGEST_TEXT:
        raise ConfigError(f"{subject}: criterion has {len(text)} characters, more than {LONGEST_TEXT}")
    weight = entry.get("weight", 1.0)
    if not _is_number(weight):
        raise ConfigError(f"{subject}: weight must be a finite number, got {str(weight)[:40]!r}")
    required = entry.get("required") or False
    if not isinstance(required, bool):
        raise ConfigError(f"{subject}: required must be true or false, got {str(required)[:40]!r}")
    scale = entry.get("scale") or (0.0, 1.0)
    if not isinstance(scale, (list, tuple)) or len(scale) != 2 or not all(map(_is_number, scale)):
        raise ConfigError(f"{subject}: scale must be [lowest, highest], got {str(scale)[:40]!r}")
    if not scale[0] < scale[1]:
        raise ConfigError(f"{subject}: scale must ascend, got {list(scale)}")
    return Criterion(text, float(weight), required, (float(scale[0]), float(scale[1])))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def gates(rewards: Mapping[str, float | None], criteria: Mapping[str, Criterion], family: str) -> dict[str, float]:
    """Return the factor of each criterion of a family for one sample, by component.

    The factor of required criteria and of faults (criteria with a negative weight) is 1. The factor of the other
    criteria is 1 if all required criteria are met, 0 if one is not, and NaN if the reward of one is missing.
    """
    members = {name: criterion for name, criterion in criteria.items() if family_name(name) == family}
    values = [rewards.get(name) for name, criterion in members.items() if criterion.required]
    factor = math.nan if None in values else 1.0
    if any(value is not None and value < 1 for value in values):
        factor = 0.0
    return {name: 1.0 if c.required or c.weight <= 0 else factor for name, c in members.items()}


def gated(rewards: Mapping[str, float | None], criteria: Mapping[str, Criterion], family: str) -> dict[str, float]:
    """Return the rewards of a family's criteria times their `gates`, NaN if missing."""
    found = {}
    for name, factor in gates(rewards, criteria, family).items():
        reward = rewards.get(name)
        found[name] = math.nan if reward is None else reward * factor
    return found


def restored(criteria: Mapping[str, Mapping[str, Any]]) -> dict[str, Criterion]:
    """Return criteria from the JSON of a sample file."""
    found = {}
    for name, criterion in criteria.items():
        found[name] = Criterion(**{**criterion, "scale": tuple(criterion["scale"])})
    return found


def with_scores(rewards: Mapping[str, float | None], criteria: Mapping[str, Criterion]) -> dict[str, float | None]:
    """Return the rewards of a sample by component, with one score for each family (`algorithms.table.score`)."""
    found: dict[str, float | None] = {}
    families: dict[str, None] = {}
    for name, reward in rewards.items():
        if name in criteria:
            families[family_name(name)] = None
        else:
            found[name] = reward
    for family in families:
        values = gated(rewards, criteria, family)
        present = [name for name, value in values.items() if not math.isnan(value)]
        size = math.fsum(abs(criteria[name].weight) for name in present)
        total = math.fsum(criteria[name].weight * values[name] for name in present)
        found[family] = total / size if size else None
    return found
