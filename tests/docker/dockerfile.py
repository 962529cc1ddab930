"""A Dockerfile as a list of instructions by stage: as much of the format as ours uses."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"


@dataclass
class Stage:
    """One FROM and what follows it."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)
    """(instruction, arguments), continuation lines joined."""

    def all(self, instruction: str) -> list[str]:
        """The arguments of every such instruction."""
        return [arguments for word, arguments in self.steps if word == instruction]


def read(path: Path = DOCKERFILE) -> tuple[dict[str, str], dict[str, Stage]]:
    """(arguments before the first FROM with their defaults, stages by name)."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()
            stage = stages[name] = Stage(name, base)
        elif stage is None:
            assert word == "ARG", line
            name, _, default = rest.partition("=")
            arguments[name] = default
        else:
            stage.steps.append((word, rest))
    return arguments, stages


def lineage(stages: dict[str, Stage], name: str) -> list[Stage]:
    """The stage and its bases, oldest first."""
    stage = stages[name]
    return [*(lineage(stages, stage.base) if stage.base in stages else []), stage]


def copied(arguments: str) -> tuple[str | None, list[str], str]:
    """(stage copied from, sources, destination) of a COPY."""
    parts = arguments.split()
    source = next((p.partition("=")[2] for p in parts if p.startswith("--from=")), None)
    *sources, destination = [p for p in parts if not p.startswith("--")]
    return source, sources, destination
