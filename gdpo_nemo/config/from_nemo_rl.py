"""NeMo-RL's GRPO and GDPO recipes as configs of this project, with what became of every key.

A recipe's ``defaults:`` chain and its ``${...}`` are resolved first; then each leaf meets the first rule of the table
(``from_nemo_rl_table``) whose pattern fits. Keys that only make sense together (rewards, data, GPUs) are worked out in
``from_nemo_rl_derived``. A key that no rule knows is listed as such: nothing is dropped silently.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Iterator

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gdpo_nemo.config.effects import keys_without_effect
from gdpo_nemo.config.from_nemo_rl_derived import derived
from gdpo_nemo.config.from_nemo_rl_table import RULES, Recipe, Said
from gdpo_nemo.config.load import all_keys, load_config
from gdpo_nemo.config.validate import validate
from gdpo_nemo.errors import ConfigError

TRANSLATED, SAME, NONE, UNKNOWN, ADDED = "translated", "already so", "no counterpart", "unknown key", "added"

_ARITHMETIC = {
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a // b if isinstance(a, int) and isinstance(b, int) and a % b == 0 else a / b,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "max": max,
    "min": min,
}
"""Functions that recipes call inside ``${...}``; they exist while a recipe is read, and in no config of ours."""


class _Plain(yaml.SafeDumper):
    """YAML that repeats a value instead of pointing at it."""

    def ignore_aliases(self, data: Any) -> bool:
        """No anchors."""
        return True


@dataclass
class Line:
    """What became of one key."""

    key: str
    verdict: str
    text: str


@dataclass
class Translation:
    """A config of ours and the account of every key of the recipe."""

    content: dict[str, Any]
    lines: list[Line] = field(default_factory=list)
    refusal: str = ""
    """Why ``--dry-run`` would refuse the content as it stands; empty where it takes it."""

    def to_text(self, title: str) -> str:
        """The config as YAML, followed by the account as comments."""
        body = yaml.dump(
            self.content, Dumper=_Plain, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110
        )
        return f"# Translated from {title} by `gdpo-nemo config from-nemo-rl`.\n{body}\n{self.account()}\n"

    def account(self) -> str:
        """One comment line a key, those that need a look first."""
        out = []
        for verdict in (UNKNOWN, NONE, ADDED, TRANSLATED, SAME):
            lines = [line for line in self.lines if line.verdict == verdict]
            if lines:
                out += [f"# {verdict} ({len(lines)}):", *(f"#   {line.key}: {line.text}" for line in lines)]
        return "\n".join(out)


def translate(path: str | Path) -> Translation:
    """Translates the recipe at ``path``.

    Raises:
        ConfigError: the recipe or one of its parents cannot be read, or is no GRPO or GDPO recipe.
    """
    path = Path(path)
    recipe = Recipe(dict(_leaves(read_recipe(path))), path)
    if not any(key.startswith("grpo.") for key in recipe.flat):
        raise ConfigError(f"{path}: has no section grpo; only GRPO and GDPO recipes can be translated")
    said = {key: _said(key, value, recipe) for key, value in recipe.flat.items()}
    values = {key: value for outcome in said.values() for key, value in outcome.values.items()}
    together = derived(recipe)
    values |= {key: value for key, (value, _) in together.items() if value is not None}
    lines = [_line(key, recipe.flat[key], outcome, values) for key, outcome in said.items()]
    for key, (value, why) in together.items():
        lines.append(Line(key, NONE, why) if value is None else Line(key, ADDED, f"{_short(value)}; {why}"))
    translation = Translation(_nested(values), lines)
    _leave_out_idle_keys(translation, values)
    return translation


def read_recipe(path: Path) -> dict[str, Any]:
    """The recipe with its parents merged in (a section with ``_override_: true`` replaces the parents') and resolved.

    Raises:
        ConfigError: names the file, and for a missing parent the file that asks for it.
    """
    merged = _merged(path, ())
    for name, function in _ARITHMETIC.items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    try:
        config = OmegaConf.create(merged)
        OmegaConf.resolve(config)
        return OmegaConf.to_container(config)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from None
    finally:
        for name in _ARITHMETIC:
            OmegaConf.clear_resolver(name)


def _merged(path: Path, children: tuple[Path, ...]) -> dict[str, Any]:
    if Path(os.path.realpath(path)) in children:
        raise ConfigError(f"{path}: inherits from itself")
    try:
        content = OmegaConf.load(path)
    except FileNotFoundError:
        asked = f", which {children[-1].name} names under defaults" if children else ""
        raise ConfigError(f"{path}: no such recipe{asked}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: cannot be read as YAML ({str(error).splitlines()[0]})") from None
    if not isinstance(content, DictConfig):
        raise ConfigError(f"{path}: expected sections, found a list")
    own = OmegaConf.to_container(content)
    parents = own.pop("defaults", None) or []
    result: dict[str, Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        result = _over(result, _merged(path.parent / parent, (*children, Path(os.path.realpath(path)))))
    return _over(result, own)


def _over(base: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """``new`` laid over ``base``."""
    if new.get("_override_"):
        base = {}
    out = dict(base)
    for key, value in new.items():
        if key == "_override_":
            continue
        if isinstance(value, dict):
            below = out.get(key)
            out[key] = _over(below if isinstance(below, dict) else {}, value)
        else:
            out[key] = value
    return out


def _leaves(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values; an empty mapping and a list are values."""
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from _leaves(value, key + ".")
        else:
            yield key, value


def _said(key: str, value: Any, recipe: Recipe) -> Said:
    for pattern, act in RULES:
        if fnmatchcase(key, pattern):
            return act(value, recipe)
    return Said({}, "not known to this translator; look it up before relying on the result", unknown=True)


def _line(key: str, value: Any, said: Said, values: dict[str, Any]) -> Line:
    """The account of one key; ``values`` are those of the whole translation."""
    if said.unknown:
        return Line(key, UNKNOWN, f"{_short(value)}; {said.text}")
    targets = [f"{k}={_short(v)}" for k, v in said.values.items()] + [k for k in said.elsewhere if _holds(values, k)]
    if targets:
        return Line(
            key, TRANSLATED, f"{_short(value)} -> {', '.join(targets)}" + (f"; {said.text}" if said.text else "")
        )
    if said.elsewhere:
        off = value is None or value is False or value == {}
        why = "not used there" if off else "does nothing beside the recipe's other keys, or cannot here"
        return Line(key, SAME if off else NONE, f"{_short(value)}; {why}; no {' or '.join(said.elsewhere)} is written")
    return Line(key, SAME if said.same else NONE, f"{_short(value)}; {said.text}")


def _holds(values: dict[str, Any], key: str) -> bool:
    """Whether something is written at ``key`` or below it."""
    return any(name == key or name.startswith(key + ".") for name in values)


def _leave_out_idle_keys(translation: Translation, values: dict[str, Any]) -> None:
    """Takes out what has no effect in the chosen mode, which a config of ours may not hold, and notes what is refused."""
    try:
        while idle := keys_without_effect(config := _loaded(translation.content)):
            key, _, why = idle[0].partition(": ")
            del values[key]
            translation.content = _nested(values)
            for line in translation.lines:
                if line.verdict == TRANSLATED and f"{key}=" in line.text:
                    line.verdict, line.text = NONE, f"{line.text}, but that {why}: left out"
        validate(config)
    except ConfigError as error:
        translation.refusal = str(error)


def _loaded(content: dict[str, Any]):
    """The content as a Config, checked as any file is."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        yaml.safe_dump(content, file, sort_keys=False)
        file.flush()
        try:
            return load_config(file.name)
        except ConfigError as error:
            raise ConfigError(str(error).replace(f" ({file.name})", "")) from None


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested mappings, in the order of the schema; mappings that are values stay whole."""
    order = {key: place for place, key in enumerate(all_keys())}
    tree: dict[str, Any] = {}
    for key in sorted(values, key=lambda k: order.get(k, len(order))):
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = values[key]
    return tree


def _short(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    text = " ".join(str(value).split())
    return text if len(text) <= 70 else text[:67] + "..."
