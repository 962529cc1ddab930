"""Scripts of TRL with tools or an environment factory translated onto the environments ``tools`` and ``tool_class``."""

from __future__ import annotations

import pytest

from gdpo_nemo.environments.registry import load_environment
from gdpo_nemo.tools.interop.trl.translate import translate_trl
from gdpo_nemo.utils.import_path import ImportPath

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
    assert options["tools"] == ["ours_rewards.py:add"] and list(options["functions"]) == ["value"]
    assert options.get("max_tool_calling_iterations") == (3 if config else None)


def test_tools_beside_an_environment_factory_cannot_run(folder):
    text = PLAYING.replace("TOP", ADD + COUNTER).replace("INSIDE", "")
    (folder / "script.py").write_text(
        text.replace("environment_factory=Counter", "tools=[add], environment_factory=Counter")
    )
    assert "tools" in translate_trl(["script.py"], "ours.yaml").blockers


@pytest.mark.parametrize(
    "top, inside",
    [
        (COUNTER, ""),
        (COUNTER, "Counter.places = iter(args.places)"),
        ("", COUNTER),
    ],
    ids=["at the top", "completed in main", "in main"],
)
def test_an_environment_factory_becomes_the_environment_tool_class(folder, top, inside):
    indented = "".join(f"    {line}\n" for line in inside.splitlines())
    (folder / "script.py").write_text(PLAYING.replace("TOP", top).replace("INSIDE", indented))
    translation = translate_trl(["script.py"], "ours.yaml")
    assert set(translation.differences) == {"max_completion_length"}, translation.summary()
    options = translation.content["env"]["tool_class"]
    assert options == {"make": "ours_rewards.py:Counter", "functions": {"value": "ours_rewards.py:value"}}
    environment = load_environment("tool_class", options)
    [tool] = environment.read_row({})["tools"]
    assert tool["function"]["parameters"]["properties"]["amount"]["type"] == "integer"
    if inside.startswith("Counter.places"):
        assert next(ImportPath("ours_rewards.py:Counter").load().places) == "here"
    environment.close()


FROM_A_SPEC = """
import argparse
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.harbor import HarborSpec

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dataset", default="suite")
    parser.add_argument("--env", dest="environment_type", default="docker")
    args = parser.parse_args()
    spec = HarborSpec(args.dataset, environment_type=args.environment_type, num_tasks=2)
    GRPOTrainer("Qwen/Qwen3-0.6B", args=GRPOConfig("out", max_steps=1), train_dataset=spec.train_dataset,
                environment_factory=spec.environment_factory, reward_funcs=spec.reward_funcs).train()

if __name__ == "__main__":
    main()
"""


def test_a_spec_of_trl_becomes_rows_an_environment_and_a_reward(folder):
    for number in range(3):
        task = folder / f"suite/tasks/{number}"
        task.mkdir(parents=True)
        (task / "task.toml").write_text(f'[metadata]\ngold_answer = "{number}"\n')
    (folder / "script.py").write_text(FROM_A_SPEC)
    translation = translate_trl(["script.py"], "ours.yaml", 8, ["--env", "e2b"])
    assert set(translation.differences) == {"max_completion_length"}, translation.summary()
    assert translation.content["gdpo"]["rewards"] == {"_outcome_reward_func": 1.0}
    [made] = [ImportPath(translation.content["data"]["train"]["path"]).load()()]
    assert [row["gold_answer"] for row in made] == ["0", "1"]
    options = translation.content["env"]["tool_class"]
    assert options["make"] == "ours_rewards.py:environment_factory"
    assert ImportPath(options["make"]).load().keywords == {"environment_type": "e2b"}
    environment = load_environment("tool_class", options)
    assert environment.reward_names == ("_outcome_reward_func",)
    [tool] = environment.read_row(made[0])["tools"]
    assert tool["function"]["name"] == "bash"
    environment.close()


def test_a_list_of_rewards_of_an_unknown_class_cannot_run(folder):
    unknown = FROM_A_SPEC.replace("from trl.experimental.harbor import", "from elsewhere import")
    (folder / "script.py").write_text(unknown)
    blockers = translate_trl(["script.py"], "ours.yaml", 8).blockers
    assert blockers["reward_funcs.reward"] == "the list spec.reward_funcs is only known when the script runs"
