"""TRL scripts and arguments of 2024 and 2025: old names, the defaults of then, and dataclasses in other modules."""

from __future__ import annotations

import re

import pytest
import yaml

from gdpo_nemo.tools.interop.translation import DIFFERS, SAME
from gdpo_nemo.tools.interop.trl.defaults import MODEL_CONFIG, SCRIPT_ARGUMENTS
from gdpo_nemo.tools.interop.trl.keys import result_of
from gdpo_nemo.tools.interop.trl.releases import (
    changed_before,
    defaults_of,
    older_arguments,
    older_fields,
    release_of,
    with_present_names,
)
from gdpo_nemo.tools.interop.trl.run import TrlRun
from gdpo_nemo.tools.interop.trl.trainers import TRAINERS
from gdpo_nemo.tools.interop.trl.translate import translate_trl
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.import_path import ImportPath

CONFIGS = """\
from dataclasses import dataclass, field
from typing import Optional
import trl

@dataclass
class ScriptArguments(trl.ScriptArguments):
    dataset_prompt_column: str = field(default="prompt")

@dataclass
class GRPOConfig(trl.GRPOConfig):
    temperature: float = 0.7
    benchmarks: list[str] = field(default_factory=lambda: [])
    system_prompt: Optional[str] = None
"""
SCRIPT = """\
from trl import GRPOTrainer, ModelConfig, TrlParser
from lab.configs import GRPOConfig, ScriptArguments
from lab.rewards import short

def main(script_args, training_args, model_args):
    model, tokenizer = get_model(model_args)
    trainer = GRPOTrainer(model=model, reward_funcs=[short], args=training_args, train_dataset=rows)

rows = [{"prompt": "a"}]
if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    main(script_args, training_args, model_args)
"""
RECIPE = {
    "model_name_or_path": "Qwen/Qwen2.5-1.5B-Instruct",
    "torch_dtype": "bfloat16",
    "dataset_prompt_column": "problem",
    "system_prompt": "Think.",
    "bf16": True,
    "use_vllm": True,
    "vllm_device": "auto",
    "vllm_max_model_len": 900,
    "vllm_gpu_memory_utilization": 0.7,
    "warmup_ratio": 0.1,
    "max_steps": 100,
    "per_device_train_batch_size": 16,
}


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """Recipe -> translation by a script of the package ``lab``, whose folder is not on the search path."""
    folder = tmp_path / "src" / "lab"
    folder.mkdir(parents=True)
    (folder / "configs.py").write_text(CONFIGS)
    (folder / "rewards.py").write_text("def short(completions, **kwargs):\n    return [0.0 for _ in completions]\n")
    (folder / "grpo.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)

    def translate(**recipe):
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        return translate_trl(["src/lab/grpo.py", "recipe.yaml"], "mine.yaml")

    return translate


def test_old_recipe_has_the_meaning_and_the_defaults_of_its_release(lab):
    made = lab(**RECIPE)
    assert made.status == DIFFERS, made.blockers
    policy = made.content["policy"]
    assert policy["model_name"] == RECIPE["model_name_or_path"]
    assert "model_name_or_path is used" in made.differences["model"]
    assert policy["generation"]["temperature"] == 0.7  # of the lab's class
    assert policy["generation"]["top_k"] == 50 and policy["generation"]["max_new_tokens"] == 256
    assert policy["max_total_sequence_length"] == 512 + 256  # vLLM's limit of 900 is higher
    assert made.content["loss_fn"]["reference_policy_kl_penalty"] == 0.04
    assert made.content["cluster"] == {"gpus_per_node": 2}  # vllm_mode server
    assert made.content["env"]["functions"]["functions"] == {"short": "src/lab/rewards.py:short"}
    assert not set(made.differences) & {"beta", "temperature", "top_k", "loss_type", "torch_dtype"}


def test_defaults_that_an_old_name_does_not_determine_are_reported(lab):
    recipe = {key: value for key, value in RECIPE.items() if not key.startswith("vllm_")}
    differences = lab(**recipe).differences
    assert "0.04 until TRL 0.18" in differences["beta"] and "bnpo until TRL 0.21" in differences["loss_type"]
    assert "temperature" not in differences  # the lab's class sets it
    assert not {"beta", "loss_type"} & set(lab(**recipe, beta=0.0, loss_type="grpo").differences)


def test_all_unknown_names_are_reported_at_once(lab):
    with pytest.raises(ConfigError) as error:
        lab(**RECIPE, learning_rat=1, system_promt="x", no_such_thing=3)
    (line,) = str(error.value).splitlines()
    for name in ("learning_rat (did you mean 'learning_rate'?)", "system_promt (did you mean 'system_prompt'?)"):
        assert name in line
    assert "no_such_thing" in line


def test_class_derived_from_trls_config_is_read_at_its_call(lab, tmp_path):
    text = SCRIPT.replace("args=training_args", "args=GRPOConfig('out', benchmarks=['x'], max_steps=3)")
    (tmp_path / "src/lab/grpo.py").write_text(text)
    made = lab(model_name_or_path="org/model")
    assert made.content["gdpo"]["max_num_steps"] == 3 and made.content["policy"]["generation"]["temperature"] == 0.7


@pytest.mark.parametrize("trainer", TRAINERS)
def test_old_field_has_a_rule_and_is_not_a_present_field(trainer):
    config = TRAINERS[trainer].config
    run = TrlRun({}, trainer=trainer)
    names = with_present_names(config, dict.fromkeys(older_fields(config)))
    assert [name for name in names if result_of(name, None, run) is None] == []
    present = {*TRAINERS[trainer].defaults, *SCRIPT_ARGUMENTS, *MODEL_CONFIG} - {"trust_remote_code"}  # it has moved
    assert not set(older_arguments(config)) & present
    oldest = defaults_of(config, (0, 12))
    assert set(oldest) == set(changed_before(config, (9, 9))) and "bf16" in oldest
    assert all(value != TRAINERS[trainer].defaults.get(field) for field, value in oldest.items())


def test_release_is_the_last_that_has_all_names():
    assert release_of("GRPOConfig", ["beta", "warmup_ratio"]) is None
    assert release_of("GRPOConfig", ["max_prompt_length", "torch_dtype"]) == (0, 26)
    assert release_of("GRPOConfig", ["max_prompt_length", "vllm_dtype"]) == (0, 17)


def test_old_file_of_a_command_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"model_name_or_path": "org/model", "dataset_name": "org/rows", "max_seq_length": 2048, "packing": False}
    given |= {"torch_dtype": "bfloat16", "bf16": True, "use_liger": True, "gradient_checkpointing_use_reentrant": False}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(given))
    made = translate_trl(["sft", "sft.yaml"], "mine.yaml")
    assert made.status in (SAME, DIFFERS), made.blockers
    assert made.content["policy"]["max_total_sequence_length"] == 2048
    (tmp_path / "dpo.yaml").write_text(yaml.safe_dump({**given, "max_seq_length": 1, "rpo_alpha": 1.0}))
    with pytest.raises(ConfigError, match=re.escape("max_seq_length")):
        translate_trl(["dpo", "dpo.yaml"], "mine.yaml")


HELPERS = """\
REGISTRY = {"short": lambda completions, **kwargs: [-1.0], "long": lambda completions, **kwargs: [1.0]}

def get_reward_funcs(script_args):
    return [REGISTRY[name] for name in script_args.reward_funcs]

def get_dataset(script_args):
    return {script_args.dataset_train_split: [{script_args.dataset_prompt_column: script_args.dataset_name}]}
"""


def test_functions_that_receive_the_parsed_arguments_are_called_with_their_values(lab, tmp_path, monkeypatch):
    (tmp_path / "src/lab/helpers.py").write_text(HELPERS)
    text = SCRIPT.replace("from lab.rewards import short", "from lab.helpers import get_dataset, get_reward_funcs")
    text = text.replace("reward_funcs=[short]", "reward_funcs=get_reward_funcs(script_args)")
    text = text.replace("train_dataset=rows", "train_dataset=get_dataset(script_args)[script_args.dataset_train_split]")
    (tmp_path / "src/lab/grpo.py").write_text(text)
    given = {"dataset_name": "org/rows", "dataset_train_split": "main", "hub_token": "secret"}
    made = lab(**RECIPE, **given, reward_funcs=["long", "short"], reward_weights=[1.0, 2.0])
    assert made.status == DIFFERS and "this order" in made.differences["reward_funcs"]
    assert made.content["gdpo"]["rewards"] == {"long": 1.0, "short": 2.0}
    monkeypatch.syspath_prepend(tmp_path / "src")
    functions = made.content["env"]["functions"]["functions"]
    assert {name: ImportPath(path).load()([""]) for name, path in functions.items()} == {"long": [1.0], "short": [-1.0]}
    assert ImportPath(made.content["data"]["train"]["path"]).load()() == [{"problem": "org/rows"}]
    assert not [file for file in tmp_path.glob("mine*") if "secret" in file.read_text()]


def test_trainer_arguments_of_trl_0_12_are_fields_of_the_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.py").write_text(
        "from datasets import Dataset\nfrom transformers import AutoTokenizer, TrainingArguments\n"
        "from trl import SFTTrainer\n\n"
        "trainer = SFTTrainer(\n"
        "    model='org/model', tokenizer=AutoTokenizer.from_pretrained('org/tokenizer'), max_seq_length=700,\n"
        "    train_dataset=Dataset.from_list([{'prompt': 'a', 'completion': 'b'}]),\n"
        "    args=TrainingArguments('out', max_steps=3, bf16=True),\n)\n"
    )
    made = translate_trl(["old.py"], "mine.yaml")
    assert made.status == DIFFERS, made.blockers
    assert made.content["policy"]["max_total_sequence_length"] == 700
    assert made.content["policy"]["tokenizer_name"] == "org/tokenizer"


def test_script_may_parse_in_the_function_that_calls_the_training(lab, tmp_path):
    text = SCRIPT.replace('if __name__ == "__main__":', "def start():") + "\nif __name__ == '__main__':\n    start()\n"
    (tmp_path / "src/lab/grpo.py").write_text(text)
    made = lab(**RECIPE)
    assert made.status == DIFFERS and made.content["policy"]["generation"]["max_new_tokens"] == 256
