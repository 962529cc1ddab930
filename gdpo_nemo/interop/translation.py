"""What a translation of another program's recipe comes to: a config of ours, and what became of every key."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping

import yaml

from gdpo_nemo.config.effects import keys_without_effect
from gdpo_nemo.config.files import find_file
from gdpo_nemo.config.load import all_keys, load_config
from gdpo_nemo.config.writing import write_whole
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.interop.account import Account
from gdpo_nemo.interop.rules import RuleResult, is_off
from gdpo_nemo.validation import validate

SAME = "same"
DIFFERS = "differs"
CANNOT_RUN = "cannot run"
"""What a recipe comes to."""

# fmt: skip
TRANSLATED = "translated"
ALREADY = "already so"
DIFFERENT = "differs"
NO_EFFECT = "no effect on the result"
UNKNOWN = "unknown key"
ADDED = "added"
"""What became of a key."""

_UNKNOWN = "not known to this translator; look it up before relying on the result"


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
    targets: tuple[str, ...] = ()
    """Our keys that are written for it; of translated keys."""


@dataclass
class Translation:
    """A config of ours and the account of every key of the recipe."""

    content: dict[str, Any]
    lines: list[Line] = field(default_factory=list)
    differences: dict[str, str] = field(default_factory=dict)
    """Key, or name of a matter -> what differs and changes the result."""
    blockers: dict[str, str] = field(default_factory=dict)
    """Key, or name of a matter -> why it cannot run."""
    questions: dict[str, str] = field(default_factory=dict)
    """Our key -> what the dry run checks once the files that it needs are here."""
    variables: list[str] = field(default_factory=list)
    """Environment variables that have to be set where the run starts."""
    files: list[str] = field(default_factory=list)
    """Files that have to be there where the run starts."""
    program: str = "NeMo-RL"
    command: str = "from-nemo-rl"

    @property
    def status(self) -> str:
        """``same``, ``differs`` or ``cannot run``."""
        return CANNOT_RUN if self.blockers else DIFFERS if self.differences else SAME

    def summary(self) -> str:
        """The short list: the status, and each reason for it on a line."""
        reasons = self.blockers or self.differences
        heads = {
            SAME: f"same: every key that changes the result is done as {self.program} does it",
            DIFFERS: f"runs but differs in {len(reasons)} way{'s' * (len(reasons) != 1)} that "
            f"matter{'s' * (len(reasons) == 1)}:",
            CANNOT_RUN: "cannot run:",
        }
        lines = [heads[self.status], *(f"  {name}: {why}" for name, why in reasons.items())]
        if self.blockers and self.differences:
            lines += [
                f"and would differ in {len(self.differences)}:",
                *(f"  {name}: {why}" for name, why in self.differences.items()),
            ]
        if self.questions:
            lines += ["left to the dry run:", *(f"  {key}: {what}" for key, what in self.questions.items())]
        if self.variables:
            lines.append(f"environment variables to set where it starts: {', '.join(self.variables)}")
        if self.files:
            lines.append(f"files to put where it starts: {', '.join(self.files)}")
        return "\n".join(lines)

    def to_text(self, title: str) -> str:
        """The config as YAML, followed by the summary and the account as comments."""
        body = yaml.dump(
            self.content, Dumper=_Plain, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110
        )
        return f"# Translated from {title} by `gdpo-nemo config {self.command}`.\n{body}\n{self.account()}\n"

    def account(self) -> str:
        """The summary, then one comment line a key, those that need a look first and those without effect last."""
        out = [f"# {line}" for line in self.summary().splitlines()]
        for verdict in (UNKNOWN, DIFFERENT, ADDED, TRANSLATED, ALREADY, NO_EFFECT):
            lines = [line for line in self.lines if line.verdict == verdict]
            if lines:
                out += [f"# {verdict} ({len(lines)}):", *(f"#   {line.key}: {line.text}" for line in lines)]
        return "\n".join(out)


def line_of(
    key: str,
    value: Any,
    said: RuleResult | None,
    values: Mapping[str, Any],
    removed: Mapping[str, str],
    account: Account,
) -> Line:
    """Return the account of one key.

    A key is called translated only if a value that it names is among those written.

    Args:
        values: all that the translation writes, by our dotted keys.
        removed: our keys that were left out -> why.
    """
    if said is None:
        return Line(key, UNKNOWN, f"{short(value)}; {_UNKNOWN}")
    targets = [*said.values, *said.elsewhere]
    written = {k: f"{k}={short(v)}" for k, v in said.values.items() if k in values and values[k] == v}
    written |= {k: k for k in said.elsewhere if _holds(values, k)}
    different = account.differences.get(key)
    if written:
        notes = "".join(f"; {note}" for note in (said.text, different) if note)
        return Line(key, TRANSLATED, f"{short(value)} -> {', '.join(written.values())}{notes}", tuple(written))
    if not targets:
        verdict = DIFFERENT if said.matters else ALREADY if said.same else NO_EFFECT
        return Line(key, verdict, f"{short(value)}; {said.text}")
    for target in targets:
        if target in removed:
            return Line(key, NO_EFFECT, f"{short(value)} -> {target}, but that {removed[target]}: left out")
    if said.elsewhere and is_off(value):
        return Line(key, ALREADY, f"{short(value)}; not used there")
    if not (said.needed or said.values):
        return Line(key, NO_EFFECT, f"{short(value)}; worked into what is added, which does not need this key")
    blocker = account.blocker_of(key)
    why = f"{blocker} cannot run" if blocker else different or f"nothing is written at {' or '.join(targets)}"
    return Line(key, DIFFERENT, f"{short(value)}; not taken over: {why}")


def _holds(values: Mapping[str, Any], key: str) -> bool:
    """Whether something is written at ``key`` or below it."""
    return any(name == key or name.startswith(key + ".") for name in values)


def written_values(said: Mapping[str, tuple[Any, RuleResult | None]], account: Account) -> dict[str, Any]:
    """Return the values of the rules and of the account by our dotted keys; the account's count where both have one."""
    values = {key: value for _, outcome in said.values() if outcome for key, value in outcome.values.items()}
    return values | {key: value for key, (value, _) in account.values.items()}


def assembled(
    said: Mapping[str, tuple[Any, RuleResult | None]], account: Account, program: str, command: str
) -> Translation:
    """Return the translation that the rules' answers and the account of what keys make together come to.

    Args:
        said: key of the recipe -> (its value, what its rule answers; None: no rule knows it).
    """
    values = written_values(said, account)
    translation = Translation(nested(values), blockers=dict(account.blockers), program=program, command=command)
    translation.questions = dict(account.questions)
    removed = leave_out_idle_keys(translation, values)
    lines = [line_of(key, value, outcome, values, removed, account) for key, (value, outcome) in said.items()]
    added = ((key, value, why) for key, (value, why) in account.values.items() if key in values)
    translation.lines = [*lines, *(Line(key, ADDED, f"{short(value)}; {why}") for key, value, why in added)]
    different = {
        line.key: line.text
        for line in lines
        if line.verdict in (DIFFERENT, UNKNOWN) and not account.blocker_of(line.key)
    }
    translation.differences = different | account.differences
    return translation


def leave_out_idle_keys(translation: Translation, values: dict[str, Any]) -> dict[str, str]:
    """Take out of content and ``values`` what has no effect in the chosen mode, which a config of ours may not hold,
    and note what is refused. Return the keys taken out -> why."""
    removed: dict[str, str] = {}
    try:
        while idle := keys_without_effect(config := _loaded(translation.content)):
            for sentence in idle:
                key, _, why = sentence.partition(": ")
                del values[key]
                removed[key] = why
            translation.content = nested(values)
        validate(config)
    except ConfigError as error:
        if not translation.blockers:
            translation.blockers["--dry-run"] = str(error)
    return removed


def _loaded(content: dict[str, Any]):
    """The content as a Config, checked as any file is, with names in place of files that are not on this machine."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        yaml.safe_dump(_as_on_the_hub(content), file, sort_keys=False)
        file.flush()
        try:
            return load_config(file.name)
        except ConfigError as error:
            raise ConfigError(str(error).replace(f" ({file.name})", "")) from None


def _as_on_the_hub(content: dict[str, Any]) -> dict[str, Any]:
    """A copy whose absent files are names on the hub: that they are absent says nothing about the translation."""
    copy = yaml.safe_load(yaml.safe_dump(content))
    sections = [copy.get("policy", {}), *(copy.get("data", {}).get(split) or {} for split in ("train", "validation"))]
    for section in sections:
        for key in ("model_name", "tokenizer_name", "path"):
            if isinstance(section.get(key), str) and not Path(section[key]).exists():
                section[key] = "organisation/name"
    for section in sections[1:]:
        if _is_absent(section.get("type")):
            del section["type"]
    for options in copy.get("env", {}).values():
        functions = (options or {}).get("functions", {})
        functions |= {name: "length" for name, place in functions.items() if _is_absent(place)}
    if isinstance(copy.get("run", {}).get("dir"), str) and "${" in copy["run"]["dir"]:
        copy["run"] = {"dir": "results/name", "name": "name"}
    return copy


def _is_absent(place: Any) -> bool:
    """Return whether an import path names a file that is not on this machine."""
    file = place.rpartition(":")[0] if isinstance(place, str) else ""
    return file.endswith(".py") and find_file(file) is None


def nested(values: dict[str, Any]) -> dict[str, Any]:
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


def short(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    text = " ".join(str(value).split())
    return text if len(text) <= 70 else text[:67] + "..."


def write_text(name: str, text: str) -> None:
    """Write a file that the option --out asks for. Raises ConfigError where that cannot be."""
    try:
        write_whole(name, text)
    except OSError as error:
        raise ConfigError(f"--out: {name} cannot be written ({error.strerror})") from None
