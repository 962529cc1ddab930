"""Recipes of NeMo-RL's algorithms other than GRPO: what a change of each comes to, their rows, and their dry runs.

``test_nemo_rl_recipes.py`` has the values that the unchanged recipes arrive with.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from gdpo_nemo.commands import cli
from gdpo_nemo.config.schema import DatasetConfig
from gdpo_nemo.data.example_rows import ExampleReader
from gdpo_nemo.data.rows import load_rows
from gdpo_nemo.tools.interop.nemo_rl.translate import translate
from gdpo_nemo.tools.interop.translation import CANNOT_RUN, DIFFERS, SAME, UNKNOWN
from gdpo_nemo.utils.import_path import ImportPath

FOLDER = Path(__file__).with_name("nemo_rl")
REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("length, status", [(2048, DIFFERS), (4096, CANNOT_RUN)])
def test_rope_scaling_is_one_difference_and_blocks_a_context_that_needs_it(tmp_path, length, status):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"defaults: {FOLDER / 'base.yaml'}\npolicy: {{max_total_sequence_length: {length}, hf_config_overrides: "
        "{rope_scaling: {rope_type: yarn, factor: 2.0, original_max_position_embeddings: 2048, beta_fast: 32}}}\n"
        "data: {default: {prompt_file: null}}\n"
    )
    translation = translate(path)
    key = "policy.hf_config_overrides.rope_scaling"
    assert translation.status == status
    assert [line.key for line in translation.lines if line.key.startswith(key)] == [key]
    assert {name for name in {**translation.differences, **translation.blockers} if "rope" in name} == {key}
    assert ("the model has 2048 positions" in translation.summary()) == (status == CANNOT_RUN)


def test_context_beyond_the_positions_of_a_cached_config_cannot_run(tmp_path, monkeypatch):
    folder = tmp_path / "hub" / "models--Qwen--Qwen2.5-1.5B" / "snapshots" / "1"
    folder.mkdir(parents=True)
    content = dict(model_type="qwen2", vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                   num_key_value_heads=4, intermediate_size=128, max_position_embeddings=256)  # fmt: skip
    (folder / "config.json").write_text(json.dumps(content))
    assert translate(FOLDER / "base.yaml").status == SAME
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    summary = translate(FOLDER / "base.yaml").summary()
    assert "policy.max_total_sequence_length: 512 exceeds the 256 positions of the model" in summary


@pytest.mark.slow
@pytest.mark.parametrize(
    "base, change, key, status",
    [
        ("sft", "data: {add_generation_prompt: false}", "data.add_generation_prompt", DIFFERS),
        ("sft", "policy: {tokenizer: {chat_template: '{{ messages }}'}}", "policy.tokenizer.chat_template", DIFFERS),
        ("sft", "policy: {tokenizer: {chat_template: null}}", "policy.tokenizer.chat_template", DIFFERS),
        ("sft", "policy: {model_name: Qwen/Qwen3-8B}", "policy.tokenizer.name", DIFFERS),
        ("sft", "data: {train: {max_samples: 5}}", "data.train.max_samples", DIFFERS),
        ("dpo", "dpo: {preference_average_log_probs: true}", "dpo.preference_average_log_probs", DIFFERS),
        ("dpo", "dpo: {sft_average_log_probs: false}", "dpo.sft_average_log_probs", DIFFERS),
        ("dpo", "dpo: {preference_loss_weight: 0.5}", "dpo.preference_loss_weight", DIFFERS),
        ("dpo", "data: {train: {dataset_name: Mine}}", "data.train.dataset_name", CANNOT_RUN),
        ("ppo", "ppo: {policy_training_start_step: 5}", "ppo.policy_training_start_step", DIFFERS),
        ("ppo", "ppo: {adv_estimator: {length_adaptive_alpha: 0.05}}", "ppo.adv_estimator.length_adaptive_alpha",
         DIFFERS),
        ("ppo", "ppo: {adv_estimator: {name: raw_reward}}", "ppo.adv_estimator.name", CANNOT_RUN),
        ("distillation", "teacher: {precision: float32}", "teacher.precision", DIFFERS),
        ("distillation", "teacher: {model_name: null}", "teacher.model_name", CANNOT_RUN),
        ("distillation", "teachers: [{model_name: a, weight: 1.0}]", "teachers", CANNOT_RUN),
    ],
)  # fmt: skip
def test_setting_of_another_algorithm_without_an_equivalent_is_named(tmp_path, base, change, key, status):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"defaults: {FOLDER / base}.yaml\n{change}\n")
    translation = translate(path)
    found = translation.blockers if status == CANNOT_RUN else translation.differences
    assert translation.status == status and key in found
    assert not any(line.status == UNKNOWN for line in translation.lines)


ROWS = {
    "squad": ({"context": "c", "question": "q", "answers": {"text": ["a", "b"], "answer_start": [0, 1]}},
              [("system", "c"), ("user", "q"), ("assistant", "a")]),
    "helpsteer3": ({"context": [{"role": "user", "content": "q"}], "response1": "one", "response2": "two",
                    "overall_preference": 2}, [("user", "q"), ("assistant", "two"), ("assistant", "one")]),
    "tulu3_preference": ({"prompt": "q", "chosen": [{"role": "user", "content": "q"}, {"role": "assistant",
                          "content": "good"}], "rejected": [{"role": "user", "content": "q"}, {"role": "assistant",
                          "content": "bad"}]}, [("user", "q"), ("assistant", "good"), ("assistant", "bad")]),
    "preference": ({"context": [{"role": "user", "content": "q"}], "completions": [
                    {"rank": 1, "completion": [{"role": "assistant", "content": "bad"}]},
                    {"rank": 0, "completion": [{"role": "assistant", "content": "good"}]}]},
                   [("user", "q"), ("assistant", "good"), ("assistant", "bad")]),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_named_datasets_become_those_of_nemo_rls_classes(name, tmp_path):
    row, expected = ROWS[name]
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    data = DatasetConfig(path=str(path), type=f"gdpo_nemo.data.row_formats:{name}")
    [found] = load_rows(data, {}, "train", 0)
    [example] = ExampleReader("train", "sft" if name == "squad" else "pairs", data.type)(0, found)
    messages = [*example["prompt"], *(message for answer, _ in example["answers"] for message in answer)]
    assert [(message["role"], message["content"]) for message in messages] == expected


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "bytes"
    ImportPath(f"{REPOSITORY / 'examples' / 'make_tiny_model.py'}:make_random_model").load()(str(folder), 0)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, rows",
    [
        ("sft", "sorted_digits.jsonl"),
        ("dpo", "digit_pairs.jsonl"),
        ("rm", "digit_pairs.jsonl"),
        ("ppo", "sorted_digits.jsonl"),
        ("distillation", "sorted_digits.jsonl"),
    ],
)
def test_translated_recipe_of_each_algorithm_passes_the_dry_run_with_a_model(name, rows, byte_model, tmp_path, capsys):
    content = translate(FOLDER / f"{name}.yaml").content
    data = {"path": str(REPOSITORY / "examples" / "data" / rows)}
    if name == "sft":
        data["columns"] = {"completion": "answer"}
    if name in ("ppo", "distillation"):
        data["environment"] = "math"
    content["data"] = {"train": data, "validation": data}
    ours = tmp_path / "ours.yaml"
    ours.write_text(yaml.safe_dump(content))
    words = [f"policy.model_name={byte_model}", f"run.dir={tmp_path / 'run'}"]
    if name == "distillation":
        words += [f"teacher.model_name={byte_model}", "policy.max_total_sequence_length=2048"]
        words.append("policy.generation.max_new_tokens=1024")
    assert cli.main(["train", "--config", str(ours), "--dry-run", *words]) == 0, capsys.readouterr().err
    assert f"rows of {data['path']}" in capsys.readouterr().out
