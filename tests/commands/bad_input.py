"""What the cases of test_bad_input.py are made of: a folder with one good thing of each kind, and ways to spoil it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gdpo_nemo.data.records import Group, Prompt, Trajectory
from gdpo_nemo.observe.samples import write_rollouts

CONFIG = """\
run: {name: good, dir: "{d}/out"}
gdpo:
  {rewards: {correctness: 1.0, format: 0.5}, num_prompts_per_step: 4, num_generations_per_prompt: 4, val_at_start: true}
policy:
  model_name: {d}/model
  precision: float32
  max_total_sequence_length: 96
  generation: {max_new_tokens: 16}
data: {train: {path: "{d}/rows.jsonl"}, validation: {path: "{d}/rows.jsonl"}}
env: {gsm8k: {}}
"""
PAIRS = """\
run: {name: pairs, dir: "{d}/out"}
algorithm: {type: dpo}
gdpo: {num_prompts_per_step: 2, max_num_steps: 2}
policy: {model_name: "{d}/model", precision: float32, max_total_sequence_length: 96}
data: {train: {path: "{d}/pairs.jsonl"}, validation: {path: "{d}/pairs.jsonl"}}
"""
MODEL = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 259, "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 192, "max_position_embeddings": 2048,
}  # fmt: skip
TOKENIZER = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
EMPTY_SAFETENSORS = (2).to_bytes(8, "little") + b"{}"
_EMPTY = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
_HEADER = b'{"model.embed_tokens.weight":%b,"backbone.embeddings.weight":%b}' % (_EMPTY, _EMPTY)
EMBEDDING_ONLY = len(_HEADER).to_bytes(8, "little") + _HEADER
"""What a dry run reads of a model's weights: a header with a tensor of every family, without numbers."""
BINARY = bytes(range(128, 256)) + b"\x00\xff"


def make_world(d: Path) -> Path:
    """Two configs with their rows, a model, a recipe, thresholds, an environment, and a run with a checkpoint."""
    d.mkdir()
    write(d, "good.yaml", CONFIG.replace("{d}", str(d)))
    write(
        d,
        "rows.jsonl",
        "".join(json.dumps({"question": f"{i}+{i}?", "answer": f"#### {2 * i}"}) + "\n" for i in range(4)),
    )
    write(d, "pairs.yaml", PAIRS.replace("{d}", str(d)))
    write(d, "pairs.jsonl", (json.dumps({"prompt": "a", "chosen": "a", "rejected": "a a"}) + "\n") * 4)
    write(d, "model/config.json", json.dumps(MODEL))
    (d / "model" / "model.safetensors").write_bytes(EMBEDDING_ONLY)
    write(d, "model/tokenizer.json", json.dumps(TOKENIZER))
    write(d, "model/tokenizer_config.json", json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    write(
        d, "recipe.yaml", "grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 4}\npolicy: {model_name: a/b}\n"
    )
    write(d, "trl.py", "GRPOTrainer(args=GRPOConfig(learning_rat=1))\n")
    write(d, "limits.yaml", "checks: [{metric: reward/correctness/mean, at: end, min: 0.0}]\n")
    write(
        d,
        "mine.py",
        "class Mine:\n    reward_names = ('correctness', 'format')\n    def verify(self, t): return []\n\nnumber = 3\n",
    )
    write(d, "factory.py", "def make(folder, seed): pass\n")
    write(d, "run/config.yaml", (d / "good.yaml").read_text())
    write(d, "run/metrics.jsonl", "".join(json.dumps(row(step)) + "\n" for step in (1, 2, 3)))
    write(d, "run/rollouts/step_0001.jsonl", "".join(json.dumps(sample(i)) + "\n" for i in range(4)))
    write_rollouts(d / "run", 2, [recorded_group()])
    state = json.dumps({"step": 1, "position": 4, "data": "x", "model": "y", "metrics": {}})
    write(d, "run/checkpoints/step_1/state.json", state)
    write(d, "run/checkpoints/step_1/files.json", json.dumps({"state.json": [len(state), 0]}))
    (d / "empty").mkdir()
    return d


def row(step: int) -> dict:
    rewards = {f"reward/{name}/mean": 0.5 for name in ("correctness", "format")}
    return {"step": step, "loss": 0.1, "time/train": 1.0, "time/step": 2.0, **rewards}


def sample(index: int) -> dict:
    return {
        "prompt_id": "train/0", "prompt": "1+1?", "sample_index": index, "completion": "2", "prompt_ids": [1, 2],
        "completion_ids": [3],
        "logprobs": [-0.5], "rewards": {"correctness": float(index % 2), "format": 1.0}, "advantage": 0.0, "outcome":
        "ok",
        "policy_version": 0, "finish_reason": "stop", "environment": "gsm8k",
    }  # fmt: skip


def recorded_group() -> Group:
    prompt = Prompt("train/1", np.array([1, 2], np.int32), "2+2?", "gsm8k")
    ids = np.array([3], np.int32)
    rewards = {"correctness": 0.0, "format": 1.0}
    return Group(prompt, [Trajectory(prompt, i, ids, np.zeros(1, np.float32), 1, "4", "stop", rewards) for i in (0, 1)])


def write(d: Path, name: str, text: str) -> None:
    (d / name).parent.mkdir(parents=True, exist_ok=True)
    (d / name).write_text(text)


# -- ways to spoil a file -------------------------------------------------------------------------------------------

Damage = Callable[[Path], None]


def text(name: str, content: str) -> Damage:
    return lambda d: write(d, name, content)


def replaced(name: str, old: str, new: str) -> Damage:
    def change(d: Path) -> None:
        assert old in (d / name).read_text()
        write(d, name, (d / name).read_text().replace(old, new))

    return change


def added(name: str, content: str) -> Damage:
    return lambda d: write(d, name, (d / name).read_text() + content)


def gone(name: str) -> Damage:
    def remove(d: Path) -> None:
        path = d / name
        if path.is_dir():
            for inner in sorted(path.rglob("*"), reverse=True):
                inner.rmdir() if inner.is_dir() else inner.unlink()
            path.rmdir()
        else:
            path.unlink()

    return remove


def binary(name: str) -> Damage:
    return lambda d: (d / name).write_bytes(BINARY)


def empty(name: str) -> Damage:
    return lambda d: (d / name).write_bytes(b"")


def folder(name: str) -> Damage:
    """A folder where a file should be."""

    def swap(d: Path) -> None:
        gone(name)(d)
        (d / name).mkdir()

    return swap


def loop(name: str) -> Damage:
    """A link to itself: it is there and nobody can open it, whoever asks."""

    def swap(d: Path) -> None:
        gone(name)(d)
        (d / name).symlink_to(d / name)

    return swap


def snapshot(d: Path) -> dict[str, str]:
    """Every path below ``d`` with what it holds."""
    found = {}
    for place, folders, files in os.walk(d):
        # Python itself keeps the bytecode of what it imports, where it may.
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in (*folders, *files):
            found[f"{place}/{name}"] = _content(Path(place, name))
    return found


def _content(path: Path) -> str:
    if path.is_symlink():
        return f"link to {path.readlink()}"
    if path.is_fifo():
        return "pipe"
    return "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
