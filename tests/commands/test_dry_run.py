"""--dry-run reads the data that is on this machine as the run will, and says of the rest that it was not read."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path

import pytest
import yaml
from bad_input import EMBEDDING_ONLY, MODEL, TOKENIZER, write

from gdpo_nemo.commands import cli, train
from gdpo_nemo.config.changes import find_changes
from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.rows import load_rows
from gdpo_nemo.environments.registry import load_environments
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = """\
gdpo: {rewards: {correctness: 1.0, format: 0.5}, num_prompts_per_step: 4, num_generations_per_prompt: 4}
policy: {model_name: organisation/model, precision: float32, max_total_sequence_length: 96}
data: {train: {path: DATA}}
env: {gsm8k: {}}
"""
ROWS = [{"question": f"What is {i} and {i}?", "answer": f"The sum.\n#### {2 * i}"} for i in range(20)]


@pytest.fixture
def config(tmp_path):
    def write(data: Path, text: str = CONFIG) -> Path:
        (tmp_path / "run.yaml").write_text(
            text.replace("DATA", str(data)).replace("max_total_sequence_length: 96", MOST_TOKENS)
        )
        return tmp_path / "run.yaml"

    return write


MOST_TOKENS = "max_total_sequence_length: 96, generation: {max_new_tokens: 16}"


def jsonl(path: Path, rows=ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def dry(config: Path, *overrides: str) -> int:
    return cli.main(["train", "--dry-run", "--config", str(config), *overrides])


MIXED = ["env.strict={plugin: gsm8k, strict: true}", "data.train.environment_key=task"]


@pytest.fixture
def mixed(config, tmp_path):
    """Config whose rows have two environments."""
    rows = [{**row, "task": "strict" if index < 5 else "gsm8k"} for index, row in enumerate(ROWS)]
    return config(jsonl(tmp_path / "train.jsonl", rows))


@pytest.mark.slow
def test_good_data_passes_and_the_plan_lists_the_rows_read(mixed, capsys):
    assert dry(mixed, *MIXED, "data.mix={gsm8k: 0.5, strict: 0.3}") == 0
    said = capsys.readouterr().out
    assert "# data       data.train: 20 rows of" in said and "not tokenized" in said
    assert "# env        env.gsm8k: verified" in said and "masked" not in said
    assert "# arithmetic 4 prompts (gsm8k 2.5, strict 1.5) x 4 samples = 16 samples" in said
    assert "# data       data.mix: 5 rows of strict, 15 rows of gsm8k" in said


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ([MIXED[1], "data.mix={gsm8k: 1}"], "data.mix: row 'train/0' of data.train has the environment 'strict'"),
        (["data.train.environment=gsm8k", "data.mix={gsm8k: 1, strict: 1}"], "data.mix.strict: no row of data.train"),
        (["data.train={path: null}"], "several environments: gsm8k, strict; or list their fractions in data.mix"),
    ],
)  # fmt: skip
def test_mix_that_does_not_fit_the_rows_is_refused(mixed, overrides, expected, capsys):
    assert dry(mixed, MIXED[0], *overrides) == 2
    said = capsys.readouterr()
    assert expected in said.err and said.err.count("\n") == 1 and said.out == ""


@pytest.mark.parametrize(
    "damage, overrides, expected",
    [
        (lambda text: text.replace('"answer"', '"answer', 1), [], "train.jsonl:1: not valid JSON"),
        (lambda text: text + "[1]\n", [], "train.jsonl:21: a row must be a JSON object, got list"),
        (lambda text: text, ["data.train.prompt_key=questoin"], "data.train.prompt_key: row 0: no column 'questoin'; "
                                                                "did you mean 'question'?"),
        (lambda text: text.replace('"question"', '"ask"'), [], "data.train.prompt_key: none of messages, prompt, "
                                                               "question, problem"),
        (lambda text: text + '{"question": "", "answer": "1"}\n', [], "data.train: row 20: the column 'question' is "
                                                                      "empty"),
        (lambda text: text, ["data.train.columns={gold: anwser}"], "row 0 has no column 'anwser'; did you mean "
                                                                   "'answer'"),
        (lambda text: text, ["env.gsm8k.stric=true"], "env.gsm8k"),
        (lambda text: text, ["data.train.environment_key=question"], "environment_key: row 0: env does not define"),
    ],
)  # fmt: skip
def test_bad_rows_are_refused_with_their_place(damage, overrides, expected, config, tmp_path, capsys):
    path = jsonl(tmp_path / "train.jsonl")
    path.write_text(damage(path.read_text()))
    assert dry(config(path), *overrides) == 2
    said = capsys.readouterr()
    assert expected in said.err and said.err.count("\n") == 1 and said.out == ""


GYM = """\
gdpo: {num_prompts_per_step: 4, num_generations_per_prompt: 4}
policy: {model_name: organisation/model, precision: float32, max_total_sequence_length: 96}
data: {train: {path: DATA}}
env: {nemo_gym: {servers: SERVERS, rewards: [{name: correctness, weight: 1.0}]}}
"""
AGENTS = """\
gdpo: {rewards: {correctness: 1.0}, num_prompts_per_step: 4, num_generations_per_prompt: 4}
policy: {model_name: organisation/model, precision: float32, max_total_sequence_length: 96}
rollout: {endpoint: {enabled: true}, turns: {max_turns: 2}}
data: {train: {path: DATA}}
env: {nemo_gym_agent: {agents: SERVERS}}
"""
TWO = "{sums: 'http://127.0.0.1:9', tools: 'http://127.0.0.1:9'}"


@pytest.mark.parametrize("text", [GYM, AGENTS], ids=["servers", "agents"])
@pytest.mark.parametrize(
    "reference, servers, status, message",
    [
        ({}, TWO, 2, "data.train: row 1 has no agent_ref, which is required to choose between sums, tools"),
        (
            {"name": "tool"},
            TWO,
            2,
            "data.train: row 1 names the unknown agent 'tool'; did you mean 'tools",
        ),
        ({"name": "tools"}, TWO, 0, ""),
        ({}, "{sums: 'http://127.0.0.1:9'}", 0, ""),
    ],
)
def test_a_row_that_names_none_of_several_servers_is_found(
    text, reference, servers, status, message, config, tmp_path, capsys
):
    row = {"responses_create_params": {"input": "What is 1 and 1?"}}
    rows = [{**row, "agent_ref": {"name": "sums"}}, {**row, **({"agent_ref": reference} if reference else {})}]
    path = jsonl(tmp_path / "train.jsonl", rows)
    found = dry(config(path, text.replace("SERVERS", servers)))
    said = capsys.readouterr()
    assert found == status, said.err
    assert message in said.err and said.err.count("\n") == (status > 0)


@pytest.mark.slow
def test_a_row_that_the_environment_cannot_verify_is_found(config, tmp_path, capsys):
    status = dry(config(jsonl(tmp_path / "train.jsonl", [{"question": "What is 1 and 1?"}])))
    said = capsys.readouterr()
    assert status in (1, 2) and "answer" in said.err and said.err.count("\n") == 1


STRIDED = """\
gdpo: {rewards: {alignment: 1.0}, num_prompts_per_step: 4, num_generations_per_prompt: 4}
policy: {model_name: MODEL, precision: float32, max_total_sequence_length: 16, generation: {max_new_tokens: 3}}
data: {train: {path: DATA, strided: {stride: 2, context_length: 3, generate_max_len: 3}}}
env: {ebft: {model: MODEL}}
"""


def test_anchors_of_raw_texts_are_counted_and_so_are_texts_without(tmp_path, capsys):
    write(tmp_path, "model/config.json", json.dumps(MODEL))
    write(tmp_path, "model/tokenizer.json", json.dumps(TOKENIZER))
    write(tmp_path, "model/tokenizer_config.json", json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (tmp_path / "model" / "model.safetensors").write_bytes(EMBEDDING_ONLY)
    texts = jsonl(tmp_path / "texts.jsonl", [{"text": "a " * tokens} for tokens in (5, 7, 9, 11)])
    config = tmp_path / "run.yaml"
    config.write_text(STRIDED.replace("MODEL", str(tmp_path / "model")).replace("DATA", str(texts)))
    # Anchors at 3 of 7 tokens, 3 and 5 of 9, and 3, 5 and 7 of 11.
    assert dry(config) == 0
    said = capsys.readouterr().out
    assert f"data.train: 4 rows of {texts}; 6 anchors, each with 3 prompt tokens and 3 answer tokens; " in said
    assert "1 texts are shorter than the minimum of 6 tokens for one anchor and are skipped" in said
    # Verdicts are of prompts, and no row is one.
    config.write_text(config.read_text().partition("env:")[0].replace("alignment", "format") + "env: {gsm8k: {}}\n")
    assert dry(config) == 0
    assert "verified" not in capsys.readouterr().out


@pytest.mark.slow
def test_csv_and_folders_are_read_by_the_run_and_by_its_dry_run_alike(config, tmp_path, capsys):
    (tmp_path / "train.csv").write_text('question,answer\n"What is 1, and 1?","The sum.\n#### 2"\n')
    (tmp_path / "folder").mkdir()
    jsonl(tmp_path / "folder" / "train.jsonl")
    for path, rows in ((tmp_path / "train.csv", 1), (tmp_path / "folder", 20)):
        config_file = config(path)
        assert dry(config_file) == 0
        assert f"data.train: {rows} rows of {path}" in capsys.readouterr().out
        section = load_config(config_file)
        assert len(load_rows(section.data.train, load_environments(section.env), "train", 0)) == rows


@pytest.mark.parametrize(
    "name, content", [("a.txt", "hello"), ("a.csv", "a,b\n1,2\n1,2,3\n"), ("a.parquet", "PAR1 no"), ("a.json", "{}")]
)
def test_dry_run_refuses_data_with_the_sentence_of_the_loader(name, content, config, tmp_path, capsys):
    (tmp_path / name).write_text(content)
    config_file = config(tmp_path / name)
    section = load_config(config_file)
    with pytest.raises(ConfigError) as refusal:
        load_rows(section.data.train, load_environments(section.env), "train", 0)
    assert dry(config_file) == 2
    assert capsys.readouterr().err == f"error: {refusal.value}\n"


@pytest.mark.slow
def test_only_the_beginning_of_a_large_file_is_read(config, tmp_path, capsys, monkeypatch):
    path = jsonl(tmp_path / "train.jsonl")
    path.write_text(path.read_text() + "not JSON\n")
    monkeypatch.setattr(train, "SMALL_FILE", 100)
    monkeypatch.setattr(train, "SAMPLE", 8)
    assert dry(config(path)) == 0
    assert "data.train: the first 8 rows of" in capsys.readouterr().out


@pytest.mark.slow
def test_prompts_are_tokenised_if_the_tokenizer_is_local_and_long_ones_counted(config, tmp_path, capsys, byte_model):
    rows = [*ROWS, {"question": "long " * 40, "answer": "#### 1"}]
    path = jsonl(tmp_path / "train.jsonl", rows)
    model = f"policy.model_name={byte_model}"
    system = "data.train.system_prompt=''"
    assert dry(config(path), model, system) == 0
    assert "1 longer than 95 are skipped" in capsys.readouterr().out
    assert dry(config(jsonl(path, rows[-1:])), model, system) == 2
    assert "all 1 prompts are longer than 95 tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_notes_compare_end_tokens_with_the_model_and_another_vocabulary_is_refused(
    config, tmp_path, capsys, byte_model
):
    data = config(jsonl(tmp_path / "train.jsonl"))
    system = "data.train.system_prompt=''"
    model = tmp_path / "model"
    shutil.copytree(byte_model, model)
    assert dry(data, system, f"policy.model_name={model}", f"policy.tokenizer_name={byte_model}") == 0
    assert "end token" not in (said := capsys.readouterr().out) and "eos" not in said
    settings = json.loads((model / "tokenizer_config.json").read_text())
    write(tmp_path, "model/tokenizer_config.json", json.dumps({**settings, "eos_token": "<|pad|>"}))
    write(tmp_path, "model/generation_config.json", json.dumps({"eos_token_id": [0, 40]}))
    assert dry(data, system, f"policy.model_name={model}") == 0
    said = capsys.readouterr().out
    assert (
        f"# note       {model}: the chat template ends a turn with '<|end|>', but engines stop only at '<|pad|>'"
        in said
    )
    assert f"# note       {model}: eos_token_id 40 is the ordinary token " in said
    content = json.loads((model / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    write(tmp_path, "other/tokenizer.json", json.dumps(content))
    shutil.copy(byte_model / "tokenizer_config.json", tmp_path / "other")
    assert dry(data, system, f"policy.model_name={model}", f"policy.tokenizer_name={tmp_path}/other") == 2
    assert "policy.tokenizer_name: 2 tokens differ from the tokenizer in the model's folder" in capsys.readouterr().err


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "bytes"
    command = [sys.executable, str(REPOSITORY / "examples" / "make_tiny_model.py"), str(folder), "--random"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def test_dataset_on_the_hub_is_not_read_and_the_dry_run_reports_this(config, tmp_path, capsys, monkeypatch):
    assert dry(config(Path("openai/gsm8k:main"))) == 0
    assert "data.train: openai/gsm8k:main is on the Hub, not checked" in capsys.readouterr().out
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert dry(config(Path("openai/gsm8k:main")), "policy.model_name=unsloth/Some-7B") == 0
    assert (
        "unsloth/Some-7B (from the Hugging Face Hub, model family not checked before the download)"
        in capsys.readouterr().out
    )


@pytest.mark.slow
def test_a_dataset_with_several_configurations_needs_one_and_lists_them(config, tmp_path, capsys):
    folder = tmp_path / "several"
    folder.mkdir()
    for name, rows in (("main", ROWS), ("socratic", ROWS[:5])):
        jsonl(folder / f"{name}.jsonl", rows)
    parts = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}.jsonl\n"
        for name in ("main", "socratic")
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{parts}---\n")
    assert dry(config(folder)) == 2
    said = capsys.readouterr().err
    assert (
        f"data.train.path: {folder} has several configurations (main, socratic); "
        f"select a configuration, for example {folder}:main" in said
    )
    assert said.count("\n") == 1
    assert dry(config(Path(f"{folder}:socratic"))) == 0
    assert f"data.train: 5 rows of {folder}:socratic" in capsys.readouterr().out
    assert dry(config(Path(f"{folder}:mian"))) == 2
    assert "has no configuration 'mian'; did you mean 'main'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "recipe", sorted((REPOSITORY / "configs").glob("gdpo_gsm8k*.yaml")), ids=lambda path: path.stem
)
def test_the_gsm8k_recipes_name_the_configuration(recipe):
    config = load_config(recipe)
    validate(config)
    assert {config.data.train.path, config.data.validation.path} == {"openai/gsm8k:main"}


def test_gsm8k_recipe_has_the_settings_of_the_demo_it_is_taken_from():
    """NVlabs/GDPO at b080e63: recipes/Qwen2.5-1.5B-Instruct/gdpo_gsm8k, zero3.yaml, and what TRL 0.18 fills in."""
    config = load_config(REPOSITORY / "configs" / "gdpo_gsm8k_qwen2.5_1.5b_8gpu.yaml")
    gdpo = config.gdpo
    assert (gdpo.preset, gdpo.rewards) == ("trl_fork", {"correctness": 1.0, "integer": 1.0, "format": 1.0})
    assert gdpo.num_prompts_per_step * gdpo.num_generations_per_prompt == 8 * 16 * 4  # processes, batch, accumulation
    assert gdpo.max_num_steps == 7473 // gdpo.num_prompts_per_step
    megatron = config.policy.megatron_cfg
    # transformers rounds the share of the updates up, and its first update has a rate of 0.
    assert megatron.scheduler.lr_warmup_steps == math.ceil(0.1 * gdpo.max_num_steps)
    assert (megatron.scheduler.lr_warmup_init, megatron.scheduler.lr_decay_style) == (0.0, "cosine")
    optimizer = megatron.optimizer
    assert (optimizer.lr, optimizer.min_lr, optimizer.weight_decay) == (5e-6, 0.0, 0.0)
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (0.9, 0.999, 1e-8)
    loss = config.loss_fn
    assert (loss.reference_policy_kl_penalty, loss.reference_policy_kl_type) == (0.04, "k3")
    assert (loss.reference_policy_kl_gradient, loss.mask_truncated) == ("estimator", False)


def test_recipes_have_the_settings_of_the_table_in_the_docs():
    """A value that differs from the authors' has the number of its explanation."""
    page = (REPOSITORY / "docs" / "paper.md").read_text(encoding="utf-8")
    names = ("tool_calling_qwen2.5_1.5b", "gsm8k_qwen2.5_1.5b", "math_length_r1_1.5b")
    recipes = [load_config(REPOSITORY / "configs" / f"gdpo_{name}_8gpu.yaml") for name in names]
    rows = re.findall(r"^\| `([\w.]+)` \|((?: [^|]+ \|){6})$", page, re.MULTILINE)
    for key, cells in rows:
        texts = [cell.strip() for cell in cells.strip().strip("|").split("|")]
        for config, ours, theirs in zip(recipes, texts[::2], texts[1::2]):
            value, mark, number = theirs.partition(" [")
            assert yaml.safe_load(ours) == attrgetter(key)(config), (key, config.run.name)
            assert value in (ours, "?") or mark, (key, config.run.name)
            assert not mark or f"\n{number.rstrip(']')}. " in page
    assert len(rows) == 25


@pytest.mark.parametrize("name", ["tool_calling_qwen2.5_1.5b", "gsm8k_qwen2.5_1.5b", "math_length_r1_1.5b"])
def test_control_differs_from_its_recipe_only_in_the_estimator(name):
    ours, control = (load_config(REPOSITORY / "configs" / f"{kind}_{name}_8gpu.yaml") for kind in ("gdpo", "grpo"))
    changed = {change.key for change in find_changes(asdict(ours), control)}
    allowed = {"run.name", "run.dir", "gdpo.kl_in_reward", "gdpo.epsilon"}
    assert changed - allowed == {"gdpo.preset", "gdpo.estimator"}
    assert (ours.gdpo.estimator, control.gdpo.estimator) == ("gdpo", "grpo")
    assert validate(control).layout.colocated
