"""Compare the rewards of gsm8k and tool_calling with the GDPO authors' own functions, on perturbed gold answers.

``python tests/compat/gdpo_rewards.py --gdpo CHECKOUT --gsm8k train.jsonl test.jsonl --rlla sft.json test.parquet``.
The checkout is of NVlabs/GDPO; the figures are in ``docs/recipes.md``. With ``--freeze``, the script writes the
authors' verdicts on hand-made gold answers to ``tests/environments/reward_vectors.json`` instead.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet

from gdpo_nemo.data.records import Prompt, Trajectory
from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.tasks.gsm8k import Gsm8k
from gdpo_nemo.environments.tasks.tool_calling import ToolCalling

GSM8K_CODE = "trl-GDPO/open-r1/src/open_r1/gsm8k.py"
RLLA_CODE = "verl-GDPO/verl/utils/reward_score/rlla.py"
FROZEN = Path(__file__).resolve().parents[1] / "environments" / "reward_vectors.json"
STRICT_EVERY = 10
LENIENT_EVERY = 200
"""One row in so many is compared; without ``strict`` fewer, because it parses mathematics and is slow."""

Rewards = dict[str, float | None]
Judge = Callable[[str, str], Rewards]
"""(gold, text) -> reward of each component; empty where the code raises because it cannot read the gold answer."""


def functions_of(path: Path) -> dict[str, Any]:
    """Return the functions of a module without running its other statements, some of which load data."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name != "main"]
    for node in tree.body:
        node.returns = None
        for argument in (*node.args.args, *node.args.kwonlyargs):
            argument.annotation = None
        node.args.defaults = [default for default in node.args.defaults if isinstance(default, ast.Constant)]
    found: dict[str, Any] = {"re": re, "json": json, "os": os, "Counter": Counter, "Dataset": None}
    exec(compile(tree, str(path), "exec"), found)
    return found


# -- GSM8K --------------------------------------------------------------------------------------------------------


def spelled(gold: str) -> list[str]:
    """The gold answer as a model may write it, right and wrong."""
    plain = gold.replace(",", "")
    return [
        gold, plain, f"{plain}.0", f"${plain}", f"{plain} dollars", f"+{plain}", f"-{plain}", f"0{plain}", "",
        f"**{plain}**", f"\\boxed{{{plain}}}", f"{plain}.", f" {plain} ", f"{plain}\n", str(int(plain) + 1), "x",
    ]  # fmt: skip


def wrapped(answer: str) -> list[str]:
    """The answer in tags, in almost the right tags, and in none."""
    block = f"<answer>{answer}</answer>"
    return [
        f"<think>a</think>\n{block}", f"<think>a</think>{block}", f"<think>a</think> {block}",
        f"<think>a</think>\n\n{block}", f"<think>a</think>\r\n{block}", f"<think>a</think>\n{block}\n",
        f"<think>a</think>\n{block}\n\n", f" <think>a</think>\n{block}", f"\n<think>a</think>\n{block}",
        f"<think>a\nb</think>\n{block}", f"<think>a</think>\nso {block}", f"<think>a</think>\n{block} done",
        f"<think>a</think>\n<answer>1</answer>\n{block}", f"<think>a <answer>1</answer></think>\n{block}",
        f"<think>a</think>\n<answer>{answer}", f"<think>a\n{block}", f"<think></think>\n{block}", block,
        f"<Think>a</Think>\n<Answer>{answer}</Answer>", f"<think>a</think>\n{answer}", answer, f"It is {answer}",
    ]  # fmt: skip


def gsm8k_theirs(checkout: Path) -> Judge:
    """Return the three functions of the authors' demo as one."""
    code = functions_of(checkout / GSM8K_CODE)

    def judge(gold: str, text: str) -> Rewards:
        completions = [[{"content": text}]]
        answer = [code["extract_hash_answer"](gold)]
        prompts = [[{"content": ""}]]
        with contextlib.redirect_stdout(io.StringIO()):
            return {
                "correctness": code["correctness_reward_func"](prompts, completions, answer)[0],
                "integer": code["int_reward_func"](completions)[0],
                "format": code["format_reward_func"](completions)[0],
            }

    return judge


# -- tool calling -------------------------------------------------------------------------------------------------


def perturbed_calls(gold: str) -> list[str]:
    """The gold text, right and wrong in its form, its calls, and their parameters."""
    forms = [
        gold, gold + "\n", gold + " ", f" {gold}", gold[: len(gold) // 2], gold.replace("</think>\n", "</think> "),
        gold.replace("</think>\n", "</think>\n\n"), gold.replace("<tool_call>\n", "<tool_call>"),
        gold.replace("\n</tool_call>", "</tool_call>"), gold.replace("</tool_call>", ""), gold.partition("\n")[2],
        gold + "\n<response> x </response>", gold + "\n<tool_call>\n{}\n</tool_call>", "", "x", gold.replace('"', "'"),
        gold.replace("think>", "thought>"), gold + "x",
    ]  # fmt: skip
    before, found, rest = gold.partition("<tool_call>\n")
    if not found:
        return forms
    body, _, after = rest.partition("\n</tool_call>")
    try:
        calls = [json.loads(line) for line in body.strip().split("\n")]
    except ValueError:
        return forms
    lists = [json.dumps(calls, indent=1), "\n\n".join(map(json.dumps, calls))]
    lists += ["\n".join(map(json.dumps, made)) for made in _changed(calls)]
    return forms + [f"{before}<tool_call>\n{text}\n</tool_call>{after}" for text in lists]


def _changed(calls: list[dict[str, Any]]) -> Iterator[list[Any]]:
    """Lists of calls that are almost the gold ones."""
    first, *others = calls
    parameters = first.get("parameters")
    parameters = parameters if isinstance(parameters, dict) else {}
    yield calls[::-1]
    yield calls[:-1]
    yield [*calls, first]
    yield [*calls, {"name": "other", "parameters": {}}]
    yield [{**first, "name": "other"}, *others]
    yield [{"parameters": parameters}, *others]
    yield [{"name": first.get("name")}, *others]
    yield [{**first, "parameters": []}, *others]
    yield [7, *others]
    for changed in ({**parameters, "extra": 1}, dict(list(parameters.items())[1:]), {}):
        yield [{**first, "parameters": changed}, *others]
    yield [{**first, "parameters": {name: str(value) for name, value in parameters.items()}}, *others]
    yield [{**first, "parameters": dict.fromkeys(parameters)}, *others]


def rlla_theirs(checkout: Path) -> Judge:
    """Return the authors' scoring of a tool-calling sample."""
    code = functions_of(checkout / RLLA_CODE)
    os.environ["EXPERIMENT_NAME"] = "qwen"

    def judge(gold: str, text: str) -> Rewards:
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                _, formatted, correctness, _ = code["compute_score"](text, gold)
            except ValueError:  # the gold calls are not JSON
                return {}
        return {"correctness": correctness, "format": formatted}

    return judge


# -- comparison ---------------------------------------------------------------------------------------------------


def ours(environment: Environment, key: str, batch: Sequence[tuple[str, str]]) -> list[Rewards]:
    """Return the environment's rewards of (gold, text) pairs."""
    ids = np.zeros(1, np.int32)
    trajectories = []
    for gold, text in batch:
        prompt = Prompt("train/0", ids, "", "environment", {key: gold})
        trajectories.append(Trajectory(prompt, 0, ids, np.zeros(1, np.float32), 0, text, "stop"))
    return [dict(verdict.rewards) for verdict in environment.verify(trajectories)]


def compared(environment: Environment, key: str, theirs: Judge, batch: Sequence[tuple[str, str]]) -> str:
    """Return a line: the pairs compared, and for each component how many differ."""
    differing = Counter(dict.fromkeys(environment.reward_names, 0))
    examples: dict[str, str] = {}
    unread = 0
    for (gold, text), found in zip(batch, ours(environment, key, batch)):
        wanted = theirs(gold, text)
        unread += not wanted
        for name, value in wanted.items():
            if (value is None) != (found.get(name) is None) or abs((value or 0.0) - (found.get(name) or 0.0)) > 1e-9:
                differing[name] += 1
                examples.setdefault(name, f"{text[-120:]!r}: {value} there, {found.get(name)} here")
    shares = (f"{name} {count} ({100 * count / len(batch):.0f} %)" for name, count in sorted(differing.items()))
    lines = [f"{len(batch)} texts ({unread} of gold answers that are unreadable there), different: {', '.join(shares)}"]
    return "\n".join([*lines, *(f"    {name}: {example}" for name, example in examples.items())])


def gsm8k_pairs(files: Sequence[Path], every: int) -> list[tuple[str, str]]:
    """Return the (gold, perturbed text) pairs of every so-many-th row."""
    rows = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    pairs = []
    for row in rows[::every]:
        gold = row["answer"].rpartition("####")[2].strip()
        pairs += [(row["answer"], text) for answer in spelled(gold) for text in wrapped(answer)]
    return pairs


def rlla_pairs(files: Sequence[Path]) -> list[tuple[str, str]]:
    """Return the (gold, perturbed text) pairs of RLLA files, JSON or Parquet."""
    golds: list[str] = []
    for file in files:
        if file.suffix == ".parquet":
            golds += [row["ground_truth"] for row in parquet.read_table(file)["reward_model"].to_pylist()]
        else:
            golds += [row["output"] for row in json.loads(file.read_text(encoding="utf-8"))]
    return [(gold, text) for gold in golds for text in perturbed_calls(gold)]


def frozen_calls(*calls: tuple[str, dict[str, Any]], response: str = "") -> str:
    """Return a gold answer of RLLA's form."""
    lines = "\n".join(json.dumps({"name": name, "parameters": parameters}) for name, parameters in calls)
    blocks = ["<think> The user asks for it. </think>"]
    blocks += [f"<tool_call>\n{lines}\n</tool_call>"] * bool(calls) + [f"<response> {response} </response>"] * bool(
        response
    )
    return "\n".join(blocks)


FROZEN_CALLS = (
    frozen_calls(("weather", {"city": "Oslo"})),
    frozen_calls(("weather", {"city": "Oslo", "days": 3}), ("weather", {"city": "Rome", "days": 1})),
    frozen_calls(
        ("now", {}), ("add", {"x": 1, "y": 2.5, "exact": True}), ("find", {"tags": ["a", "b"], "by": {"k": 1}})
    ),
    frozen_calls(("book", {"id": "7", "name": "", "when": None}), response="It is booked."),
    frozen_calls(response="Which city?"),
    frozen_calls(),
)


def freeze(checkout: Path) -> None:
    """Write the authors' verdicts: [gold, text, correctness, integer, format] and [gold, text, correctness, format]."""
    solutions = ["18 * 4 = 72\n#### 72", "18 * 60\n#### 1,080", "3 - 8\n#### -5"]
    texts = [
        (gold, text) for gold in solutions for answer in spelled(gold.split("#### ")[1]) for text in wrapped(answer)
    ]
    pairs = {
        "gsm8k": texts[::5],
        "tool_calling": [(gold, text) for gold in FROZEN_CALLS for text in perturbed_calls(gold)],
    }
    judges = {"gsm8k": gsm8k_theirs(checkout), "tool_calling": rlla_theirs(checkout)}
    content = {task: [[gold, text, *judges[task](gold, text).values()] for gold, text in pairs[task]] for task in pairs}
    lines = [f'"{task}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]" for task, rows in content.items()]
    FROZEN.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")


def main() -> None:
    """Print a comparison for each environment whose data is given."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gdpo", type=Path, required=True, metavar="DIR", help="a checkout of NVlabs/GDPO")
    parser.add_argument("--gsm8k", type=Path, nargs="+", default=[], metavar="FILE", help="GSM8K's JSONL files")
    parser.add_argument("--rlla", type=Path, nargs="+", default=[], metavar="FILE", help="RLLA's JSON, Parquet files")
    parser.add_argument("--freeze", action="store_true", help="only write the frozen verdicts")
    arguments = parser.parse_args()
    if arguments.freeze:
        freeze(arguments.gdpo)
        return
    if arguments.gsm8k:
        theirs = gsm8k_theirs(arguments.gdpo)
        pairs = gsm8k_pairs(arguments.gsm8k, STRICT_EVERY)
        print("gsm8k, strict:", compared(Gsm8k({"strict": True}), "answer", theirs, pairs))
        pairs = gsm8k_pairs(arguments.gsm8k, LENIENT_EVERY)
        print("gsm8k:", compared(Gsm8k(), "answer", theirs, pairs))
    if arguments.rlla:
        pairs = rlla_pairs(arguments.rlla)
        print("tool_calling:", compared(ToolCalling(), "ground_truth", rlla_theirs(arguments.gdpo), pairs))


if __name__ == "__main__":
    main()
