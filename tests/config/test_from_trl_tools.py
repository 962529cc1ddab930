"""Scripts of TRL with tools or an environment factory translated onto the environments ``tools`` and ``tool_class``."""

from __future__ import annotations

import pytest

from gdpo_nemo.config.objects import load_object
from gdpo_nemo.environments.registry import load_environment
from gdpo_nemo.interop.trl.from_trl import translate_trl

ADD = '''
def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b
'''
COUNTER = '''
class Counter:
    places = None
    def reset(self, **columns):
        self.value = 0
    def add(self, amount: int) -> str:
        """
        Adds to the counter.

        Args:
            amount: What is added, of {place}.
        """
        self.value += amount
        return str(self.value)
'''
PLAYING = """
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
import argparse
TOP
def value(environments, **columns):
    return [float(environment.value) for environment in environments]

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--places", nargs="+", default=["here"])
    args = parser.parse_args()
INSIDE
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": "Count."}]] * 4})
    GRPOTrainer("Qwen/Qwen3-0.6B", value, GRPOConfig("out", max_steps=1), data, environment_factory=Counter).train()

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("config, turns", [("max_tool_calling_iterations=3", 4), ("", 32)])
def test_tools_of_a_script_become_the_environment_tools(folder, config, turns):
    text = PLAYING.replace("TOP", ADD).replace("INSIDE", "").replace("environment_factory=Counter", "tools=[add]")
    (folder / "script.py").write_text(text.replace("max_steps=1", f"max_steps=1, {config}"))
    translation = translate_trl(["script.py"], "ours.yaml")
    assert set(translation.differences) == {"max_completion_length"}, translation.summary()
    assert translation.content["rollout"]["turns"] == {"max_turns": turns, "max_tokens": 512}
    [options] = translation.content["env"].values()
    assert options["tools"] == ["script.py:add"] and list(options["functions"]) == ["value"]
    assert options.get("max_tool_calling_iterations") == (3 if config else None)


def test_tools_beside_an_environment_factory_cannot_run(folder):
    text = PLAYING.replace("TOP", ADD + COUNTER).replace("INSIDE", "")
    (folder / "script.py").write_text(
        text.replace("environment_factory=Counter", "tools=[add], environment_factory=Counter")
    )
    assert "tools" in translate_trl(["script.py"], "ours.yaml").blockers


@pytest.mark.parametrize(
    "top, inside, place",
    [
        (COUNTER, "", "script.py:Counter"),
        (COUNTER, "Counter.places = iter(args.places)", "ours_rewards.py:Counter"),
        ("", COUNTER, "ours_rewards.py:Counter"),
    ],
    ids=["at the top", "completed in main", "in main"],
)
def test_an_environment_factory_becomes_the_environment_tool_class(folder, top, inside, place):
    indented = "".join(f"    {line}\n" for line in inside.splitlines())
    (folder / "script.py").write_text(PLAYING.replace("TOP", top).replace("INSIDE", indented))
    translation = translate_trl(["script.py"], "ours.yaml")
    assert set(translation.differences) == {"max_completion_length"}, translation.summary()
    options = translation.content["env"]["tool_class"]
    assert options == {"make": place, "functions": {"value": "script.py:value"}}
    environment = load_environment("tool_class", options)
    [tool] = environment.read_row({})["tools"]
    assert tool["function"]["parameters"]["properties"]["amount"]["type"] == "integer"
    if inside.startswith("Counter.places"):
        assert next(load_object(place).places) == "here"
    environment.close()
