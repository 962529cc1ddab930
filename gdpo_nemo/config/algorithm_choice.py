"""Which algorithm a run trains with, and whether it samples: what has to be known before any of its code may run."""

from __future__ import annotations

import ast
from functools import cache

from gdpo_nemo.config.files import find_definition
from gdpo_nemo.config.schema import Config

ALGORITHMS = {"gdpo": "gdpo_nemo.algorithm:GDPO"}
"""Built-in algorithms by name: where their classes are."""


def samples(config: Config) -> bool:
    """Whether the run's algorithm samples: engines and environments are started for those that do."""
    return declares_sampling(config.algorithm.type)


def declares_sampling(name: str) -> bool:
    """Whether the algorithm of a name or place samples. Raises ConfigError: there is no such class."""
    return name in ALGORITHMS or not name.rpartition(":")[0].endswith(".py") or _declared(name)


@cache
def _declared(place: str) -> bool:
    """The class attribute ``samples``, a literal, read without running the file; True where the class does not say."""
    for node in find_definition("algorithm.type", place).body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == "samples" for target in targets):
            return bool(ast.literal_eval(node.value))
    return True


def engines(config: Config) -> int:
    """vLLM engines of the run."""
    return config.policy.generation.engines if samples(config) else 0
