"""Translation of other trainers' configs: rules for single keys, the resulting config, and the report on every key."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import yaml

from gdpo_nemo.config.data_files import may_be_on_the_hub
from gdpo_nemo.config.effects import keys_without_effect
from gdpo_nemo.config.load import all_keys, load_config
from gdpo_nemo.config.schema import Config
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.files import write_whole
from gdpo_nemo.utils.import_path import ImportPath
from gdpo_nemo.utils.source import find_file

SAME = "same"
DIFFERS = "differs"
CANNOT_RUN = "cannot run"
"""Results of a translation."""

TRANSLATED = "translated"
ALREADY = "already so"
DIFFERENT = "differs"
NO_EFFECT = "no effect on the result"
UNKNOWN = "unknown key"
ADDED = "added"
"""Statuses of a key in the report."""

_UNKNOWN = "unknown to this translator; check its meaning before you rely on the result"


class _Plain(yaml.SafeDumper):
    """YAML dumper that writes repeated values in full, without anchors and aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """Disable anchors."""
        return True


@dataclass
class Line:
    """Report line for one key."""

    key: str
    status: str
    text: str
    targets: tuple[str, ...] = ()
    """gdpo_nemo keys to which the key is translated."""


@dataclass
class Translation:
    """A translated config, with a report on every key of the original config."""

    content: dict[str, Any]
    lines: list[Line] = field(default_factory=list)
    differences: dict[str, str] = field(default_factory=dict)
    """Key or topic -> difference that changes the result."""
    blockers: dict[str, str] = field(default_factory=dict)
    """Key or topic -> reason why the config cannot run."""
    questions: dict[str, str] = field(default_factory=dict)
    """gdpo_nemo key -> question that the dry run answers once the required files are available."""
    variables: list[str] = field(default_factory=list)
    """Environment variables that must be set for the run."""
    files: list[str] = field(default_factory=list)
    """Files that must exist in the working directory of the run."""
    program: str = "NeMo-RL"
    command: str = "from-nemo-rl"
    source: str = ""
    """Line of the summary on the version of the original config (empty for no line)."""

    @property
    def status(self) -> str:
        """Result of the translation: ``same``, ``differs`` or ``cannot run``."""
        if self.blockers:
            return CANNOT_RUN
        return DIFFERS if self.differences else SAME

    def rename(self, change: Callable[[str], str]) -> None:
        """Apply a function to all keys and texts of the report."""
        for line in self.lines:
            line.key, line.text = change(line.key), change(line.text)
        for reasons in (self.differences, self.blockers):
            renamed = {change(key): change(text) for key, text in reasons.items()}
            reasons.clear()
            reasons.update(renamed)

    def summary(self) -> str:
        """Return the result of the translation and the reasons for it, one per line."""
        reasons = self.blockers or self.differences
        ways = "1 way" if len(self.differences) == 1 else f"{len(self.differences)} ways"
        heads = {
            SAME: f"same: every key that affects the result behaves as in {self.program}",
            DIFFERS: f"runs but differs in {ways} that {'matters' if ways == '1 way' else 'matter'}:",
            CANNOT_RUN: "cannot run:",
        }
        lines = [heads[self.status], *_indented(reasons)]
        if self.source:
            lines.append(self.source)
        if self.blockers and self.differences:
            lines += [f"and would differ in {ways}:", *_indented(self.differences)]
        if self.questions:
            lines += ["checked by the dry run:", *_indented(self.questions)]
        if self.variables:
            lines.append(f"environment variables to set for the run: {', '.join(self.variables)}")
        if self.files:
            lines.append(f"files to put in the working directory of the run: {', '.join(self.files)}")
        return "\n".join(lines)

    def to_text(self, title: str) -> str:
        """Return the config as YAML, followed by the report as comments."""
        body = yaml.dump(
            self.content, Dumper=_Plain, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110
        )
        return f"# Translated from {title} by `gdpo-nemo config {self.command}`.\n{body}\n{self.report()}\n"

    def report(self) -> str:
        """Return the summary and one line per key, as YAML comments. Keys that need attention come first, and keys
        without effect last."""
        out = [f"# {line}" for line in self.summary().splitlines()]
        for status in (UNKNOWN, DIFFERENT, ADDED, TRANSLATED, ALREADY, NO_EFFECT):
            lines = [line for line in self.lines if line.status == status]
            if lines:
                out += [f"# {status} ({len(lines)}):", *(f"#   {line.key}: {line.text}" for line in lines)]
        return "\n".join(out)


def _indented(reasons: Mapping[str, str]) -> list[str]:
    return [f"  {name}: {why}" for name, why in reasons.items()]


def line_of(
    key: str,
    value: Any,
    result: RuleResult | None,
    values: Mapping[str, Any],
    removed: Mapping[str, str],
    findings: Findings,
) -> Line:
    """Return the report line of one key. The key is reported as translated only if one of its target keys is written.

    Args:
        result: result of the key's rule (None if no rule matches).
        values: values in the translated config, by dotted key.
        removed: keys that were removed from the translated config -> reason.
    """
    if result is None:
        return Line(key, UNKNOWN, f"{short(value)}; {_UNKNOWN}")
    targets = [*result.values, *result.elsewhere]
    written = _written(result, values)
    different = findings.differences.get(key)
    if written:
        text = f"{short(value)} -> {', '.join(written.values())}"
        return Line(key, TRANSLATED, "; ".join(filter(None, (text, result.text, different))), tuple(written))
    if not targets:
        status = ALREADY if result.same else NO_EFFECT
        if result.matters:
            status = DIFFERENT
        return Line(key, status, f"{short(value)}; {result.text}")
    for target in targets:
        if target in removed:
            return Line(key, NO_EFFECT, f"{short(value)} -> {target}, omitted because it {removed[target]}")
    if result.elsewhere and is_off(value):
        return Line(key, ALREADY, f"{short(value)}; the original config does not use it")
    if not (result.needed or result.values):
        return Line(key, NO_EFFECT, f"{short(value)}; covered by the keys listed under added")
    blocker = findings.blocker_of(key)
    why = f"{blocker} cannot run" if blocker else different or f"{' or '.join(targets)} is not written"
    return Line(key, DIFFERENT, f"{short(value)}; not translated: {why}")


def _written(result: RuleResult, values: Mapping[str, Any]) -> dict[str, str]:
    """Return the target keys of a rule that the translated config contains, with their description."""
    written = {}
    for key, value in result.values.items():
        if key in values and values[key] == value:
            written[key] = f"{key}={short(value)}"
    for key in result.elsewhere:
        if _is_written(values, key):
            written[key] = key
    return written


def _is_written(values: Mapping[str, Any], key: str) -> bool:
    """Return whether ``values`` contains ``key`` or a key inside that section."""
    return any(f"{name}.".startswith(f"{key}.") for name in values)


def matches(key: str, pattern: str) -> bool:
    """Return whether a key matches a key or pattern of a rule. Few rules have a pattern, and fnmatch is slow."""
    return key == pattern or ("*" in pattern and fnmatchcase(key, pattern))


def expanded(
    rows: Iterable[tuple[str, Act]], section: str = "", wrap: Callable[[Act], Act] | None = None
) -> list[tuple[str, Act]]:
    """Return one rule for each key or pattern. A row may list several keys, separated by spaces.

    Args:
        section: prefix of all keys, with the dot.
        wrap: function that restricts each rule, for example to some recipes.
    """
    rules = []
    for keys, act in rows:
        rule = wrap(act) if wrap else act
        rules += [(f"{section}{key}", rule) for key in keys.split()]
    return rules


def first_match(rules: Iterable[tuple[str, Act]], key: str) -> Act | None:
    """Return the first rule whose key or pattern matches, or None."""
    return next((act for pattern, act in rules if matches(key, pattern)), None)


def values_to_write(results: Mapping[str, tuple[Any, RuleResult | None]], findings: Findings) -> dict[str, Any]:
    """Return the values of the translated config, by dotted key. The findings take precedence over the rules."""
    values: dict[str, Any] = {}
    for _, outcome in results.values():
        if outcome:
            values |= outcome.values
    return values | {key: value for key, (value, _) in findings.values.items()}


def assemble(
    results: Mapping[str, tuple[Any, RuleResult | None]], findings: Findings, program: str, command: str
) -> Translation:
    """Assemble a translation from the results of the rules and the findings on combined keys.

    Args:
        results: key of the original config -> (value, result of its rule). The result is None if no rule matches.
        program: name of the original trainer.
        command: name of the subcommand of ``gdpo-nemo config``.
    """
    values = values_to_write(results, findings)
    translation = Translation(nested(values), blockers=dict(findings.blockers), program=program, command=command)
    translation.questions = dict(findings.questions)
    removed = leave_out_idle_keys(translation, values)
    lines = [line_of(key, value, outcome, values, removed, findings) for key, (value, outcome) in results.items()]
    translation.lines = list(lines)
    for key, (value, why) in findings.values.items():
        if key in values:
            translation.lines.append(Line(key, ADDED, f"{short(value)}; {why}"))
    different = {}
    for line, (_, outcome) in zip(lines, results.values()):
        if line.status in (DIFFERENT, UNKNOWN) and not findings.blocker_of(line.key):
            topic = outcome.topic if outcome else ""
            different[topic or line.key] = outcome.text if outcome and topic else line.text
    translation.differences = different | findings.differences
    return translation


def leave_out_idle_keys(translation: Translation, values: dict[str, Any]) -> dict[str, str]:
    """Remove keys that have no effect in the selected mode from the content and ``values``, and validate the config.

    A config must not contain keys without effect. An invalid config is recorded as a blocker.

    Returns:
        Removed key -> reason.
    """
    removed: dict[str, str] = {}
    try:
        config = _loaded(translation.content)
        while sentences := keys_without_effect(config):
            for sentence in sentences:
                key, _, why = sentence.partition(": ")
                del values[key]
                removed[key] = why
            translation.content = nested(values)
            config = _loaded(translation.content)
        validate(config)
    except ConfigError as error:
        if not translation.blockers:
            translation.blockers["--dry-run"] = str(error)
    return removed


def _loaded(content: dict[str, Any]) -> Config:
    """Load and check the content as a ``Config``. Missing files are first replaced by Hub names
    (``_as_on_the_hub``)."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        yaml.safe_dump(_as_on_the_hub(content), file, sort_keys=False)
        file.flush()
        try:
            return load_config(file.name)
        except ConfigError as error:
            raise ConfigError(str(error).replace(f" ({file.name})", "")) from None


def _as_on_the_hub(content: dict[str, Any]) -> dict[str, Any]:
    """Return a copy for the checks, in which missing files are replaced by Hub names and settings of NeMo Gym's servers
    are absent. A model's name on the Hub remains, because its config.json may be in the local cache."""
    copy = deepcopy(content)
    sections = [copy.get("policy", {}), *(copy.get("data", {}).get(split) or {} for split in ("train", "validation"))]
    for section in sections:
        for key in ("model_name", "tokenizer_name", "path"):
            name = section.get(key)
            if isinstance(name, str) and not (Path(name).exists() or (key == "model_name" and may_be_on_the_hub(name))):
                section[key] = "organisation/name"
    for section in sections[1:]:
        if _is_absent(section.get("type")):
            del section["type"]
    for options in copy.get("env", {}).values():
        (options or {}).pop("global_config", None)  # environment variables in it need not be set here
        functions = (options or {}).get("functions", {})
        functions |= {name: "length" for name, import_path in functions.items() if _is_absent(import_path)}
    if isinstance(copy.get("run", {}).get("dir"), str) and "${" in copy["run"]["dir"]:
        copy["run"] = {"dir": "results/name", "name": "name"}
    return copy


def _is_absent(import_path: Any) -> bool:
    """Return whether an import path refers to a file that is not on this machine."""
    path = ImportPath(import_path if isinstance(import_path, str) else "")
    return path.is_in_file and find_file(path.module) is None


def nested(values: dict[str, Any]) -> dict[str, Any]:
    """Convert dotted keys to nested mappings, in the order of the schema. Values that are mappings are not changed."""
    known = [key for key in all_keys() if key in values]
    tree: dict[str, Any] = {}
    for key in dict.fromkeys([*known, *values]):
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = values[key]
    return tree


def short(value: Any) -> str:
    """Return a value as text of at most 70 characters, for the report."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    text = " ".join(str(value).split())
    return text if len(text) <= 70 else text[:67] + "..."


def write_text(name: str, text: str) -> None:
    """Write a file for the option --out. Raises ConfigError if the file cannot be written."""
    try:
        write_whole(name, text)
    except OSError as error:
        raise ConfigError(f"--out: {name} cannot be written ({error.strerror})") from None


class Recipe(Protocol):
    """Interface through which rules read a config or run of another trainer."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value at ``key``, or ``default`` if it is not set."""
        ...


@dataclass
class RuleResult:
    """Result of a rule for one key of the original config."""

    values: dict[str, Any] = field(default_factory=dict)
    """gdpo_nemo key -> value to write."""
    text: str = ""
    """Note on the translation, or the reason why the key is not translated."""
    same: bool = False
    """True if gdpo_nemo already behaves as the value specifies, so no key needs to be written."""
    matters: bool = False
    """True if the value is not supported and the result changes."""
    elsewhere: tuple[str, ...] = ()
    """gdpo_nemo keys that the key determines together with other keys."""
    needed: bool = False
    """True if the key is reported as different when none of ``elsewhere`` is written."""
    topic: str = ""
    """Name of a difference that several keys describe, which is counted once (empty for the key)."""


Act = Callable[[Any, Any], RuleResult]
"""Rule: (value, recipe) -> result for the key. The type of the recipe depends on the translator."""


def is_off(value: Any, *off: Any) -> bool:
    """Return whether a value disables a feature: null, false, empty, or one of ``off``."""
    return value is None or value is False or value in ({}, [], "") or any(value == other for other in off)


def to(key: str, convert: Callable[[Any], Any] = lambda value: value, note: str = "") -> Act:
    """Return the rule for a key with the same meaning as gdpo_nemo's ``key``. In both configs, null means that the
    key is not set.

    Args:
        convert: function that converts the value.
        note: note for the report.
    """

    def act(value: Any, recipe: Recipe) -> RuleResult:
        if value is None:
            return RuleResult(text=f"not set; the default of {key} applies", same=True)
        return RuleResult({key: convert(value)}, note)

    return act


def combined(*keys: str) -> Act:
    """Return the rule for a recipe key that determines ``keys`` together with other recipe keys. The report lists
    ``keys`` under "added"."""
    return lambda value, recipe: RuleResult(elsewhere=keys)


def required(*keys: str) -> Act:
    """Return a rule like ``combined``, but report a difference if none of ``keys`` is written."""
    return lambda value, recipe: RuleResult(elsewhere=keys, needed=True)


def fixed(supported: Any, why: str) -> Act:
    """Return the rule for a key with only one supported value. Other values are reported as a difference.

    Args:
        supported: the supported value, or a function of the recipe that returns it.
        why: description of the behavior, for the report.
    """

    def act(value: Any, recipe: Recipe) -> RuleResult:
        expected = supported(recipe) if callable(supported) else supported
        same = value is None or value == expected
        return RuleResult(text=why, same=same, matters=not same)

    return act


def idle(why: str) -> Act:
    """Return the rule for a key that does not change the result. The key may affect speed, memory or logs."""
    return lambda value, recipe: RuleResult(text=why)


def missing(why: str, *off: Any) -> Act:
    """Return the rule for a feature that is not supported and would change the result.

    Args:
        why: description of the limitation, for the report.
        off: values that disable the feature, besides null, false and empty values.
    """

    def act(value: Any, recipe: Recipe) -> RuleResult:
        unused = is_off(value, *off)
        return RuleResult(
            text=f"{why}{'; the original config does not use it' if unused else ''}", same=unused, matters=not unused
        )

    return act


def part_of(topic: str, why: str) -> Act:
    """Return the rule for a key that describes a difference together with other keys. See ``RuleResult.topic``."""
    return lambda value, recipe: RuleResult(text=why, matters=True, topic=topic)


def where(condition: Callable[[Any], Any], act: Act, otherwise: Act) -> Act:
    """Return a rule that applies ``act`` if ``condition`` is true for the recipe, otherwise ``otherwise``."""
    return lambda value, recipe: (act if condition(recipe) else otherwise)(value, recipe)


def gated(switch: str, act: Act) -> Act:
    """Return a rule that applies ``act`` only if the key ``switch`` of the recipe is on."""
    return where(lambda recipe: recipe.get(switch), act, idle(f"no effect: {switch} is off"))


@dataclass
class Findings:
    """Translated values, differences and blockers that depend on several keys of a recipe."""

    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """gdpo_nemo key -> (value, reason)."""
    differences: dict[str, str] = field(default_factory=dict)
    """Key of the recipe or topic -> difference that changes training or validation results."""
    blockers: dict[str, str] = field(default_factory=dict)
    """Key of the recipe or topic -> reason why the recipe cannot run."""
    covered: dict[str, str] = field(default_factory=dict)
    """Pattern of recipe keys -> name of the blocker that prevents their translation."""
    questions: dict[str, str] = field(default_factory=dict)
    """gdpo_nemo key -> question that only the run's files can answer. The dry run answers the question."""
    files: set[str] = field(default_factory=set)
    """Files that the config refers to and that are not on this machine."""

    def set(self, key: str, value: Any, why: str) -> None:
        """Set a key of the translated config."""
        self.values[key] = (value, why)

    def differs(self, name: str, what: str) -> None:
        """Record a difference that changes the results. ``name`` is a recipe key or a topic."""
        self.differences[name] = what

    def asks(self, key: str, what: str) -> None:
        """Record a question that only the dry run can answer. ``key`` is a gdpo_nemo config key."""
        self.questions[key] = what

    def blocks(self, name: str, why: str, *keys: str) -> None:
        """Record a reason why the recipe cannot run.

        Args:
            name: key of the recipe, or topic.
            keys: patterns of recipe keys that are not translated for this reason.
        """
        self.blockers[name] = why
        self.covered |= dict.fromkeys(keys, name)

    def blocker_of(self, key: str) -> str:
        """Return the name of the blocker that prevents the translation of a recipe key (empty if no blocker does)."""
        if key in self.blockers:
            return key
        return next((name for pattern, name in self.covered.items() if matches(key, pattern)), "")

    def needs(self, *files: str) -> None:
        """Record files that must exist in the working directory of the run."""
        self.files.update(files)
