"""Template of the plugin package that ``gdpo-nemo env new`` creates.

The package is minimal, passes its test and can be trained.

The demo's model can learn the environment's task: write the largest digit of the prompt, in few characters.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from gdpo_nemo.environments.registry import environment_names
from gdpo_nemo.utils.errors import ConfigError

_NAME = re.compile(r"[a-z][a-z0-9_]*")

_PYPROJECT = """\
[project]
name = "gdpo-nemo-@DASHED@"
version = "0.1.0"
description = "The environment @NAME@ for gdpo_nemo"
requires-python = ">=3.12"
dependencies = []  # packages that verify requires; gdpo_nemo is not listed, because it loads this package

[project.entry-points."gdpo_nemo.environments"]
@NAME@ = "gdpo_nemo_@NAME@:@CLASS@"

[build-system]
requires = ["setuptools>=70"]
build-backend = "setuptools.build_meta"

[tool.setuptools]
py-modules = ["gdpo_nemo_@NAME@"]

[tool.pytest.ini_options]
addopts = "--import-mode=importlib"
testpaths = ["tests"]
pythonpath = ["."]
"""

_MODULE = '''\
"""Environment @NAME@: write the largest digit of the prompt, in few tokens."""

from __future__ import annotations

import random
import re
from typing import Any, Mapping, Sequence

from gdpo_nemo import Environment, Trajectory, Verdict, read_options


class @CLASS@(Environment):
    """Components: ``correctness`` (0 or 1: the last digit written is the largest) and ``brevity`` (1 to 0).

    Option: ``longest``, the number of tokens at which ``brevity`` reaches 0 (40).
    """

    reward_names = ("correctness", "brevity")

    def __init__(self, options: Mapping[str, Any] | None = None):
        self._longest = read_options("@NAME@", options, longest=40).longest

    def rows(self, split: str, size: int | None, seed: int) -> list[Mapping[str, Any]]:
        """Return prompts such as ``31524=``. Omit this method if the prompts come from a file."""
        draw = random.Random(f"{split}/{seed}")
        numbers = [f"{draw.randrange(100_000):05d}" for _ in range(size or 1000)]
        return [{"id": f"{split}/{i}", "prompt": f"{number}=", "digits": number} for i, number in enumerate(numbers)]

    def examples(self, row: Mapping[str, Any]) -> list[str]:
        """Return completions for `gdpo-nemo env check`: a correct one and a wrong one."""
        return [max(row["digits"]), "no idea"]

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return one verdict per trajectory, in order. A reward of None means that the component does not apply."""
        return [Verdict(self._rewards(trajectory)) for trajectory in trajectories]

    def _rewards(self, trajectory: Trajectory) -> dict[str, float | None]:
        written = re.findall("[0-9]", trajectory.text)
        right = bool(written) and written[-1] == max(trajectory.prompt.fields["digits"])
        return {
            "correctness": float(right),
            "brevity": max(0.0, 1.0 - len(trajectory.completion_ids) / self._longest),
        }
'''

_TEST = """\
from gdpo_nemo import check_environment, load_environment, sample_of

PLACE = "gdpo_nemo_@NAME@.@CLASS@"


def rewards(text, longest=40):
    environment = load_environment("@NAME@", {"plugin": PLACE, "longest": longest})
    [verdict] = environment.verify([sample_of({"prompt": "31524=", "digits": "31524"}, text)])
    return verdict.rewards


def test_correctness_is_1_if_the_last_digit_is_the_largest():
    assert rewards("so it is 5.")["correctness"] == 1.0
    assert rewards("5 or 4")["correctness"] == rewards("")["correctness"] == 0.0


def test_brevity_falls_to_0():
    assert [rewards("x" * length, longest=4)["brevity"] for length in (0, 1, 4, 9)] == [1.0, 0.75, 0.0, 0.0]


def test_worker_processes_verify_every_prompt():
    options = {"plugin": PLACE}
    environment = load_environment("@NAME@", options)
    rows = environment.rows("train", 3, 0)
    found = check_environment("@NAME@", options, environment, rows)
    best = dict.fromkeys((row["id"] for row in rows), 0.0)
    for sample, verdict in zip(found.samples, found.verdicts):
        best[sample.prompt.id] = max(best[sample.prompt.id], verdict.rewards["correctness"])
    assert list(best.values()) == [1.0, 1.0, 1.0] and found.failed == 0 and found.repeated
"""

_CONFIG = """\
# Trains the small model of the demo on the environment @NAME@.
defaults: configs/gdpo_tiny_cpu.yaml
run: {name: @NAME@}
gdpo: {rewards: {correctness: 1.0, brevity: 0.5}, max_num_steps: 3, val_at_start: false, val_period: 0}
data: {train: {environment: @NAME@}, validation: null}
env:
  @NAME@: {longest: 40}
checkpointing: {metric_name: null}
"""

_README = """\
# @NAME@

An environment for gdpo_nemo. Replace PATH by the path of this folder. Put `uv run` before each command if gdpo_nemo
is a checkout installed by uv:

```bash
pip install -e PATH                   # or uv pip install -e PATH: registers the entry point
python -m pytest PATH                 # its test
gdpo-nemo env list                    # lists it
gdpo-nemo env check @NAME@
gdpo-nemo train --config PATH/@NAME@.yaml --dry-run
gdpo-nemo train --config PATH/@NAME@.yaml
```

`gdpo_nemo_@NAME@.py` contains the environment. gdpo_nemo's `docs/environments.md` describes the interface.
"""

_FILES = {
    "pyproject.toml": _PYPROJECT,
    "gdpo_nemo_@NAME@.py": _MODULE,
    "tests/test_@NAME@.py": _TEST,
    "@NAME@.yaml": _CONFIG,
    "README.md": _README,
}


def write_plugin(name: str, directory: str | Path = ".") -> Path:
    """Create the package in ``directory/name`` and return this folder.

    Raises:
        ConfigError: if the name is invalid or in use, or the target folder exists or is not writable.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a valid environment name; use lower-case letters, digits and _, starting with a letter"
        )
    if name in environment_names():
        raise ConfigError(f"the environment {name} already exists; gdpo-nemo env list shows all environments")
    folder = Path(os.path.expanduser(directory)) / name
    class_name = "".join(part.capitalize() for part in name.split("_"))
    words = {"@NAME@": name, "@DASHED@": name.strip("_").replace("_", "-"), "@CLASS@": class_name}
    try:
        folder.mkdir(parents=True)
        for file, text in _FILES.items():
            path = folder / _filled(file, words)
            path.parent.mkdir(exist_ok=True)
            path.write_text(_filled(text, words), encoding="utf-8")
    except FileExistsError:
        raise ConfigError(f"{folder} already exists; use another name or --dir") from None
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror})") from None
    return folder


def _filled(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text
