"""``gdpo-nemo explain-advantages --from``: rollout dumps of TRL, written by its GRPOTrainer, and of verl."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

from gdpo_nemo.commands import cli
from gdpo_nemo.tools.interop.rollout_dumps import read_dump
from gdpo_nemo.utils.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
TRAIN = """
import sys
import torch
torch.set_num_threads(1)
from datasets import Dataset
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, sys.argv[1])
import make_tiny_model
make_tiny_model.make_random_model("bytes", 0)
tokenizer = AutoTokenizer.from_pretrained("bytes")
sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1)
model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), num_hidden_layers=1, **sizes))

def first(completions, **columns):
    return [float(len(text.encode()) % 3) for text in completions]

def second(completions, **columns):
    return [None if number % 5 == 0 else number % 4 / 2 for number, _ in enumerate(completions)]

config = GRPOConfig(
    output_dir="out", per_device_train_batch_size=16, num_generations=4, max_completion_length=6, max_steps=1,
    log_completions=True, logging_steps=1, multi_objective_aggregation="normalize_then_sum", reward_weights=[1.0, 0.5],
    use_cpu=True, report_to=[], save_strategy="no", bf16=False, seed=3,
)
rows = Dataset.from_dict({"prompt": ["a", "b", "c", "d"]})
GRPOTrainer(model, [first, second], args=config, train_dataset=rows, processing_class=tokenizer).train()
"""


@pytest.mark.slow
def test_a_dump_of_trl_gives_the_advantages_that_trl_recorded(tmp_path, capsys):
    command = [sys.executable, "-W", "ignore", "-c", TRAIN, str(REPOSITORY / "examples")]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    path = tmp_path / "out" / "completions" / "completions_00001.parquet"
    groups, advantages = read_dump("trl", path)
    assert [len(group.trajectories) for group in groups] == [4] * 4 and np.isfinite(advantages).all()
    assert sum(t.rewards["second"] is None for group in groups for t in group.trajectories) == 4
    weights = "gdpo.rewards={first: 1.0, second: 0.5}"
    assert cli.main(["explain-advantages", str(path), "--from", "trl", "gdpo.preset=trl", weights]) == 0
    assert "The run recorded the same advantages" in capsys.readouterr().out
    assert cli.main(["explain-advantages", str(path), "--from", "trl"]) == 0
    assert "The advantages recorded by the run differ by up to" in capsys.readouterr().out
    assert cli.main(["explain-advantages", str(path.parent), "--from", "trl"]) == 2
    message = f"{path.parent}: is a folder; specify the dump of one step, for example {path}"
    assert message in capsys.readouterr().err


def normalised_in_float32(rewards: np.ndarray, size: int, epsilon: float) -> np.ndarray:
    """The formula of TRL's ``normalize_then_sum``, in float32: rewards [samples, components]."""
    groups = torch.tensor(rewards, dtype=torch.float32).view(-1, size, rewards.shape[1])
    z = (groups - groups.mean(dim=1, keepdim=True)) / (groups.std(dim=1, keepdim=True) + epsilon)
    total = z.sum(dim=2).flatten()
    return ((total - total.mean()) / (total.std() + epsilon)).numpy()


REWARDS = {
    "binary": lambda rng: (rng.random((60, 2)) < 0.4).astype(float),
    "far from 0": lambda rng: 1000 + rng.normal(size=(60, 2)),
    "constant groups": lambda rng: np.stack([np.repeat(rng.random(10), 6), rng.random(60)], axis=1),
    "small": lambda rng: 1e-3 * rng.random((60, 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REWARDS)
def test_rounding_of_float32_is_not_a_difference_but_another_rule_is(kind, tmp_path, capsys):
    rewards = REWARDS[kind](np.random.default_rng(0)).astype(np.float32)
    path = tmp_path / "completions_00001.parquet"

    def report(advantages: np.ndarray) -> str:
        columns = {"prompt": [f"{i // 6}" for i in range(60)], "completion": ["c"] * 60}
        parquet.write_table(
            pa.table({**columns, "a": rewards[:, 0], "b": rewards[:, 1], "advantage": advantages}), path
        )
        assert cli.main(["explain-advantages", str(path), "--from", "trl", "gdpo.preset=trl", "--groups", "0"]) == 0
        return capsys.readouterr().out

    recorded = normalised_in_float32(rewards, 6, 1e-4)
    assert "The run recorded the same advantages" in report(recorded)
    assert "differ by up to" in report(normalised_in_float32(rewards * [1, 1.5], 6, 1e-1))
    if kind == "binary":
        assert "differ by up to" in report(normalised_in_float32(rewards, 6, 1e-6))
        assert "differ by up to" in report(recorded + np.float32(1e-4) * (np.arange(60) == 5))


def test_a_folder_without_dumps_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"is a folder without dumps of verl \(\*.jsonl\)"):
        read_dump("verl", tmp_path)


def verl_dump(folder: Path, *changes: dict) -> Path:
    """Rows as verl writes them: sorted by length, so that the samples of a prompt are apart."""
    rewards = [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.0, 0.0)]
    rows = [
        {
            "input": prompt,
            "output": f"{sample}",
            "gts": "1",
            "score": acc + style,
            "step": 1,
            "acc": acc,
            "style": style,
        }
        for sample, (acc, style) in enumerate(rewards)
        for prompt in ("p", "q")
    ]
    for row, change in zip(rows, changes):
        row.update(change)
    path = folder / "1.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_samples_of_a_prompt_are_one_group_in_every_order_of_verl(tmp_path, capsys):
    groups, advantages = read_dump("verl", verl_dump(tmp_path))
    assert [group.prompt.text for group in groups] == ["p", "q"] and np.isnan(advantages).all()
    assert [t.rewards for t in groups[0].trajectories][:2] == [{"acc": 1.0, "style": 0.0}, {"acc": 0.0, "style": 1.0}]
    assert cli.main(["explain-advantages", str(tmp_path / "1.jsonl"), "--from", "verl"]) == 0
    out = capsys.readouterr().out
    assert "2 groups, 8 samples; 1 acc + 1 style by gdpo" in out and "does not contain advantages" in out


def test_nan_of_a_dump_is_a_missing_reward(tmp_path):
    groups, _ = read_dump("verl", verl_dump(tmp_path, {"acc": float("nan")}))
    assert groups[0].trajectories[0].rewards == {"acc": None, "style": 0.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "verl", "gdpo.preset=verl"], "contains no tokens; statistics over tokens"),
        (["--from", "verl", "gdpo.credit=turn"], "contains no tokens"),
        (["--from", "slime"], "--from: 'slime' is not supported; use one of trl, verl"),
        (["--from", "trl"], "1.jsonl: is not a Parquet file"),
        (["--from", "verl", "gdpo.rewards={accuracy: 1.0}"], "gdpo.rewards.accuracy"),
    ],
)
def test_settings_that_need_missing_columns_of_a_dump_are_refused(arguments, message, tmp_path, capsys):
    assert cli.main(["explain-advantages", str(verl_dump(tmp_path)), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_files_that_are_not_a_dump_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="acc must be a number, got 'high'"):
        read_dump("verl", verl_dump(tmp_path, {"acc": "high"}))
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table({"step": [1], "prompt": ["p"]}), path)
    with pytest.raises(ConfigError, match=r"is not a rollout dump of trl \(sample 1 has no completion\)"):
        read_dump("trl", path)
    parquet.write_table(pa.table({"prompt": ["p"], "completion": ["c"], "advantage": [0.0]}), path)
    with pytest.raises(ConfigError, match="contains no rewards by component"):
        read_dump("trl", path)
    for name, text, message in [
        ("a", "{", "is not a JSONL file"),
        ("b", "[1]\n", "every line"),
        ("c", "", "no samples"),
    ]:
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_dump("verl", tmp_path / name)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_dump("verl", tmp_path / "absent")
