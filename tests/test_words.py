"""Plain English in docstrings, comments, messages, docs and names of tests: hard phrases become rarer.

The patterns are those of the style rules in CONTRIBUTING.md. A count may only fall: after rewriting sentences of a
package, write the new count into ``COUNTS``.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PHRASES = {
    "negate the verb": r"\b(?:is|are|was|were|be) no\b(?! longer| more)",
    "only, not alone": r"\w alone(?=[,.;:)]|$)",
    "also, not too": r", too\b",
    "continue": r"\b(?:go|goes|going|went) on\b",
    "skip": r"\bpass(?:es|ed)? over\b",
    "name the person": r"\b(?:whoever|whomever|somebody|nobody|whom)\b",
    "name the thing": r"\b(?:of|than) (?:theirs|ours|yours|its own|one's own)\b",
    "compare with": r"\b(?:held|holds?) against\b",
    "fix": r"\bmend(?:s|ed|ing)?\b",
    "fail": r"\bcomes? to grief\b",
    "become": r"\b(?:what|which) (?:came|comes|become|became) of\b",
    "be or contain": r"\b(?:stands|stand|stood|lies) (?:in|at|on|beside|for|there|before|behind)\b",
    "if": r"\bwhere (?:it|they|there|one|that|nothing|none|neither|no) (?:is|are|was|were|has|have|can|do|does)\b",
    "scored": r"\bjudged\b",
    "in flight": r"\bunder way\b",
    "sampled": r"\bdr(?:aw|aws|awn|ew) (?:by|with|again|anew)\b",
    "name the noun": r"(?:^|[.;] )(?:Those|Theirs|Ours|Its own)\b",
    "say that": r"\bsays? of\b",
    "specify": r"\btold (?:to|what|which|where)\b",
    "hence": r"\bas (?:it|they) (?:is|are|was|were) (?:written|read|drawn|made)\b",
    "in detail": r"\bpiece by piece\b|\bone by one\b",
}
NAME_PHRASES = {
    "name the thing": r"\bwhat(?:ever)?\b|\btheirs\b|\bours\b|\bones own\b",
    "name the person": r"\bwho\b",
    "only": r"\balone\b",
    "also": r"\btoo$",
    "report, distinguish": r"\btold\b|\bsaid\b",
    "retain, store": r"\bkept\b",
    "sample, plot": r"\bdr(?:aws?|awn|ew)\b",
    "if": r"\bwhere (?:it|they|there|one|that|nothing|none|neither|no)\b",
    "others": r"\bthe rest\b",
}
"""Further phrases that a name of a test does not contain: test_SUBJECT_VERB_CONDITION."""
OPENINGS = r"^(?:What|Whether|Who|Whose|Where|Wherever|As|Of|By|Behind|Beside|Which)\b"
"""A docstring begins with a verb in the imperative or with a noun."""
COUNTS: dict[str, int] = {
    "algorithms": 0,
    "cluster": 0,
    "commands": 0,
    "config": 0,
    "data": 0,
    "docs": 0,
    "environments": 0,
    "generation": 0,
    "megatron": 0,
    "models": 0,
    "observe": 0,
    "planning": 0,
    "rollouts": 0,
    "tools": 0,
    "training": 0,
    "utils": 0,
    "weights": 0,
}
"""Sentences with such a phrase, by package, and for Markdown files together."""
ALLOWED = {
    "environments/tasks/judge.py": (
        "The prompt, the answer and, where there is one",
        "prompt of the judge model; another wording changes the scores of existing runs",
    ),
}
"""Beginnings of sentences that stay although they match a pattern, with the reason, by file."""


@cache
def texts_of(path: Path) -> tuple[tuple[str, bool], ...]:
    """Return docstrings, comments and messages of a Python file; the flag marks docstrings."""
    source = path.read_text()
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, documented)]
    docstrings = {id(statement.value) for body in bodies for statement in body if isinstance(statement, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            found.append((" ".join(node.value.split()), id(node) in docstrings))
    with tokenize.open(path) as file:
        comment = ""
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                comment += token.string.lstrip("# ") + " "
            elif comment and token.type not in (tokenize.NL, tokenize.NEWLINE):
                found.append((comment.strip(), False))
                comment = ""
    return tuple(found)


def prose(path: Path) -> str:
    """Return a Markdown page without code blocks and inline code."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    return re.sub(r"`[^`]*`", "`code`", text)


def sentences(text: str) -> list[str]:
    return [sentence for sentence in re.split(r"(?<=[.!?;])\s+|\n{2,}|\n(?=[|*#-])", text) if sentence.strip()]


def findings() -> Iterator[tuple[str, str, str]]:
    """Yield package, place and sentence of every sentence with a phrase."""
    patterns = [re.compile(pattern, re.I) for pattern in PHRASES.values()]
    opening = re.compile(OPENINGS)
    for path in sorted((REPOSITORY / "gdpo_nemo").rglob("*.py")):
        parts = path.relative_to(REPOSITORY / "gdpo_nemo").parts
        package = parts[0] if len(parts) > 1 else "top"
        for text, docstring in texts_of(path):
            for number, sentence in enumerate(sentences(text)):
                if sentence.startswith(ALLOWED.get("/".join(parts), ("\0",))[0]):
                    continue
                opens = docstring and number == 0 and opening.match(sentence)
                if opens or any(pattern.search(sentence) for pattern in patterns):
                    yield package, str(path.relative_to(REPOSITORY)), sentence
    for path in sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")]):
        if path.name == "CHANGELOG.md":
            continue
        for sentence in sentences(prose(path)):
            if any(pattern.search(sentence) for pattern in patterns):
                yield "docs", str(path.relative_to(REPOSITORY)), " ".join(sentence.split())


@cache
def found() -> Counter[str]:
    return Counter(package for package, _, _ in findings())


def test_every_counted_package_exists():
    assert set(COUNTS) >= set(found())


@pytest.mark.parametrize("package", sorted(COUNTS))
def test_unclear_phrases_become_rarer(package):
    """Equal, so that a count that fell is written down and cannot rise again."""
    assert found()[package] == COUNTS[package], f"python {Path(__file__).name} lists the sentences"


def test_names_of_tests_are_plain_english():
    pattern = re.compile("|".join([*PHRASES.values(), *NAME_PHRASES.values()]))
    unclear = []
    for path in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        for name in re.findall(r"^(?:async )?def test_(\w+)", path.read_text(), re.MULTILINE):
            if pattern.search(name.replace("_", " ")):
                unclear.append(f"{path.relative_to(REPOSITORY)}: test_{name}")
    assert unclear == []


if __name__ == "__main__":
    for package, place, sentence in findings():
        print(f"{package}  {place}: {sentence}")
    print(dict(sorted(found().items())))
