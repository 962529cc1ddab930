"""TRL's scripts and arguments translated: nothing is lost on the way, and what comes out is a config that runs."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path

import datasets
import pytest
import yaml
from PIL import Image as PillowImage

from gdpo_nemo.commands import cli
from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.images import read_image
from gdpo_nemo.data.rows import load_rows
from gdpo_nemo.environments.registry import load_environment, load_environments
from gdpo_nemo.rollouts.trl_functions import load_rollout_function
from gdpo_nemo.tools.interop.translation import (
    ADDED,
    CANNOT_RUN,
    DIFFERENT,
    DIFFERS,
    NO_EFFECT,
    SAME,
    TRANSLATED,
    UNKNOWN,
)
from gdpo_nemo.tools.interop.trl.defaults import GRPO_CONFIG, LORA_CONFIG, MODEL_CONFIG, SCRIPT_ARGUMENTS
from gdpo_nemo.tools.interop.trl.keys import result_of
from gdpo_nemo.tools.interop.trl.run import TrlRun
from gdpo_nemo.tools.interop.trl.translate import translate_trl
from gdpo_nemo.utils.errors import ConfigError

STRANGER = Path(__file__).with_name("trl") / "stranger.py"
HEAD = """\
from datasets import Dataset, load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

def short(completions, **kwargs):
    return [-float(len(c)) for c in completions]

"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def defaults_of(kind) -> dict:
    made = {}
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            value = field.default
        else:
            value = None if field.default_factory is dataclasses.MISSING else field.default_factory()
        made[field.name] = getattr(value, "value", value)
    return made


@pytest.mark.slow
def test_our_table_of_defaults_is_that_of_the_installed_classes():
    from peft import LoraConfig
    from trl import GRPOConfig, ModelConfig, ScriptArguments

    assert defaults_of(GRPOConfig) == GRPO_CONFIG
    assert defaults_of(ModelConfig) == MODEL_CONFIG
    theirs = defaults_of(ScriptArguments)
    assert {key: SCRIPT_ARGUMENTS[key] for key in theirs} == theirs
    assert {key: value for key, value in defaults_of(LoraConfig).items() if key in LORA_CONFIG} == LORA_CONFIG


def test_every_field_of_trl_has_a_rule_and_every_default_runs():
    run = TrlRun({})
    assert [key for key in GRPO_CONFIG if result_of(key, GRPO_CONFIG.get(key), run) is None] == []
    assert [key for key, value in GRPO_CONFIG.items() if result_of(key, value, run).matters] == []


@pytest.mark.parametrize(
    "fields",
    [
        {"per_device_train_batch_size": 8},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 8},
        {"per_device_train_batch_size": 8, "generation_batch_size": 32},
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "steps_per_generation": 1},
    ],
)
def test_batches_are_those_that_trls_own_class_works_out(fields):
    from trl import GRPOConfig

    theirs = GRPOConfig(output_dir="out", use_cpu=True, bf16=False, **fields)
    run = TrlRun(fields)
    assert run.samples_per_generation == theirs.generation_batch_size
    accumulated = theirs.per_device_train_batch_size * theirs.world_size * theirs.gradient_accumulation_steps
    assert run.samples_per_update == accumulated
    assert run.updates == max(1, theirs.steps_per_generation // theirs.gradient_accumulation_steps)


def write_script(folder: Path, config: str = "", trainer: str = "", before: str = "", data: str | None = None) -> str:
    data = data or 'Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])'
    trainer = trainer or 'model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=short'
    text = f"{HEAD}{before}\ndata = {data}\nargs = GRPOConfig(output_dir='out', max_steps=4, {config})\n"
    text += f"trainer = GRPOTrainer({trainer}, args=args, train_dataset=data)\ntrainer.train()\n"
    (folder / "script.py").write_text(text)
    return "script.py"


def ours(folder: Path, **parts: str):
    """(translation, its config) of a script with these parts."""
    translation = translate_trl([write_script(folder, **parts)], "ours.yaml")
    (folder / "ours.yaml").write_text(translation.to_text("script.py"))
    return translation, load_config(folder / "ours.yaml")


@pytest.mark.slow
def test_a_script_in_the_style_of_trls_documentation_means_the_same_here(folder):
    (folder / "stranger.py").write_text(STRANGER.read_text().replace('"MODEL"', '"Qwen/Qwen2.5-0.5B-Instruct"'))
    assert cli.main(["config", "from-trl", "stranger.py", "--out", "ours.yaml"]) == 0
    config = load_config("ours.yaml")
    gdpo = config.gdpo
    assert (gdpo.estimator, gdpo.preset, gdpo.rewards) == ("gdpo", "trl", {"some_of_it": 1.0, "plain": 0.5})
    assert (gdpo.num_prompts_per_step, gdpo.num_generations_per_prompt, gdpo.max_num_steps) == (2, 4, 2)
    assert (config.loss_fn.aggregation, config.loss_fn.ratio_clip_max) == ("token_mean", 0.2)
    assert config.loss_fn.reference_policy_kl_gradient == "score" and config.loss_fn.kl_input_clamp_value is None
    optimizer = config.policy.megatron_cfg.optimizer
    assert (optimizer.lr, optimizer.adam_beta2, optimizer.clip_grad) == (1e-3, 0.999, 1.0)
    scheduler = config.policy.megatron_cfg.scheduler
    assert (scheduler.lr_decay_style, scheduler.lr_warmup_steps, scheduler.lr_warmup_init) == ("cosine", 1, 0.0)
    lora = config.policy.lora
    assert (lora.rank, lora.alpha, lora.target_modules) == (8, 16.0, ["q_proj", "v_proj"])
    assert (config.policy.precision, config.cluster.gpus_per_node) == ("float32", 0)
    rows = load_rows(config.data.train, load_environments(config.env), "train", 0)
    assert [row["solution"] for row in rows] == ["13", "24", "5", "6"] and rows[2]["prompt"][0]["role"] == "system"
    taken = (folder / "ours_rewards.py").read_text()
    assert "GRPOTrainer" not in taken and "trainer.train()" not in taken and "load" not in taken
    assert cli.main(["train", "--config", "ours.yaml", "--dry-run"]) == 0


UNDER_A_GUARD = """
def main():
    size = 2
    data = Dataset.from_dict({"prompt": ["a", "b", "c"]}).select(range(size))
    trainer = GRPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", [short], GRPOConfig("out", max_steps=2 * size), data)
    trainer.train()

if __name__ == "__main__":
    main()
"""


def test_functions_of_a_script_under_a_guard_are_copied_without_the_import_of_trl(folder):
    (folder / "script.py").write_text(HEAD + UNDER_A_GUARD)
    translation = translate_trl(["script.py"], "ours.yaml")
    assert translation.status == SAME and "import" not in (folder / "ours_rewards.py").read_text()
    assert translation.content["env"]["functions"]["functions"] == {"short": "ours_rewards.py:short"}
    assert translation.content["gdpo"]["max_num_steps"] == 4
    assert (folder / "ours_train.jsonl").read_text().splitlines() == ['{"prompt": "a"}', '{"prompt": "b"}']


@pytest.mark.parametrize(
    "top, body",
    [
        ("", "[0.0 for _ in GRPOConfig.__mro__]"),
        ("", "len(__file__)"),
        ("import mine", "mine.beside(completions)"),
        ("from settings import parse_args\nPARSED = parse_args()", "[PARSED]"),
        ("HEAD", "[]"),
    ],
    ids=["needs trl", "needs its path", "imports a file beside it", "reads the command line", "does not import trl"],
)
def test_functions_that_a_copy_would_not_make_lighter_remain_in_the_script(folder, top, body):
    head = HEAD.replace("from trl import GRPOConfig, GRPOTrainer", "") if top == "HEAD" else f"{HEAD}\n{top}\n"
    late = "def main():\n    from trl import GRPOConfig, GRPOTrainer" if top == "HEAD" else "def main():"
    (folder / "mine.py").write_text("def beside(texts):\n    return [1.0] * len(texts)\n")
    function = f"def other(completions, **columns):\n    return {body}\n"
    text = head + function + UNDER_A_GUARD.replace("def main():", late).replace("[short]", "[short, other]")
    (folder / "script.py").write_text(text)
    translation = translate_trl(["script.py"], "ours.yaml")
    assert translation.status == SAME and not (folder / "ours_rewards.py").exists()
    functions = translation.content["env"]["functions"]["functions"]
    assert functions == {"short": "script.py:short", "other": "script.py:other"}


def test_functions_remain_in_the_script_without_out(folder):
    (folder / "script.py").write_text(
        HEAD
        + UNDER_A_GUARD.replace(
            'Dataset.from_dict({"prompt": ["a", "b", "c"]}).select(range(size))', 'load_dataset("a/b")'
        )
    )
    translation = translate_trl(["script.py"], None)
    assert translation.content["env"]["functions"]["functions"] == {"short": "script.py:short"}


def test_rows_that_code_makes_are_made_by_that_code_and_nothing_else_is_run(folder):
    before = """
SYSTEM = "Be short."
source = Dataset.from_list([{"question": "q"}])

def ask(row):
    return {"prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}]}
"""
    translation, config = ours(folder, before=before, data="source.map(ask)")
    assert translation.status == SAME and config.data.train.path == "ours_rows.py:train_rows"
    [row] = load_rows(config.data.train, load_environments(config.env), "train", 0)
    assert row["prompt"][0]["content"] == "Be short." and row["question"] == "q"


def test_images_of_a_script_are_filtered_and_converted_by_its_code(folder):
    """The transforms of TRL's grpo_vlm.py."""
    rows = []
    for size, mode in ((64, "L"), (512, "RGB"), (56, "RGB")):
        encoded = io.BytesIO()
        PillowImage.new(mode, (size, 64)).save(encoded, "PNG")
        rows.append({"image": {"bytes": encoded.getvalue(), "path": None}, "problem": f"{size}?"})
    features = datasets.Features({"image": datasets.Image(), "problem": datasets.Value("string")})
    datasets.Dataset.from_list(rows, features=features).to_parquet("rows.parquet")
    before = """
data = load_dataset("parquet", data_files="rows.parquet", split="train")

def ask(example):
    return {"prompt": [{"role": "user", "content": example["problem"]}]}

def is_small(example):
    image = example["image"]
    return image.size[0] < 512 and image.size[1] < 512

def convert_to_rgb(example):
    image = example["image"]
    if image.mode != "RGB":
        image = image.convert("RGB")
    example["image"] = image
    return example
"""
    trainer = 'model="Qwen/Qwen2.5-VL-3B-Instruct", reward_funcs=short'
    code = "data.map(ask).filter(is_small).map(convert_to_rgb)"
    translation, config = ours(folder, trainer=trainer, before=before, data=code)
    assert translation.status == SAME and config.data.train.path == "ours_rows.py:train_rows"
    found = load_rows(config.data.train, load_environments(config.env), "train", 0)
    images = [read_image(row["image"], config.data.images) for row in found]
    assert [(image.width, row["prompt"][0]["content"]) for image, row in zip(images, found)] == [
        (64, "64?"),
        (56, "56?"),
    ]


@pytest.mark.parametrize(
    "data, path, more",
    [
        ('load_dataset("openai/gsm8k", "main", split="train[:10]")', "openai/gsm8k:main", {"split": "train[:10]"}),
        ('load_dataset("trl-lib/tldr", name="x")["test"]', "trl-lib/tldr:x", {"split": "test"}),
        ('load_dataset("a/b", split="train").rename_column("question", "prompt")', "a/b",
         {"columns": {"prompt": "question"}}),
        ('load_dataset("a/b", split="train").shuffle(seed=1).select(range(7))', "a/b", {"size": 7}),
        ('load_dataset("json", data_files=["one.jsonl", "two.jsonl"], split="train")', ["one.jsonl", "two.jsonl"], {}),
    ],
)  # fmt: skip
def test_data_sets_are_named_as_the_script_names_them(folder, data, path, more):
    for name in ("one.jsonl", "two.jsonl"):
        (folder / name).write_text('{"prompt": "a"}\n')
    translation, config = ours(folder, data=data)
    assert translation.status == SAME and config.data.train.path == path
    for key, value in more.items():
        assert getattr(config.data.train, key) == value


CASES = [
    ("epsilon_high=0.28, delta=1.5", {"loss_fn.ratio_clip_max": 0.28, "loss_fn.ratio_clip_c": 1.5}, SAME),
    ('loss_type="grpo"', {"loss_fn.aggregation": "sequence_mean"}, SAME),
    ('loss_type="dr_grpo", scale_rewards=False', {"loss_fn.constant_length": 512, "gdpo.estimator": "dr_grpo"}, SAME),
    ('loss_type="cispo", epsilon_high=5.0', {"loss_fn.type": "cispo", "loss_fn.ratio_clip_max": 4.0}, SAME),
    ('loss_type="cispo"', {}, CANNOT_RUN),
    ('loss_type="vespo"', {}, CANNOT_RUN),
    ('loss_type="sapo", sapo_temperature_neg=1.2',
     {"loss_fn.type": "examples/sapo.py:sapo", "loss_fn.options": {"tau_pos": 1.0, "tau_neg": 1.2},
      "loss_fn.aggregation": "sequence_mean"}, SAME),
    ('loss_type="sapo", importance_sampling_level="sequence"', {}, DIFFERS),
    ('loss_type="bnpo", gradient_accumulation_steps=2', {"loss_fn.aggregation": "token_mean"}, DIFFERS),
    ('importance_sampling_level="sequence"', {"loss_fn.type": "gspo"}, SAME),
    ('scale_rewards="batch"', {"gdpo.estimator": "grpo", "gdpo.options": {"scale_rewards": "batch"}}, SAME),
    ('loss_type="luspo", importance_sampling_level="sequence"',
     {"loss_fn.type": "gspo", "loss_fn.aggregation": "sequence_sum"}, SAME),
    ("steps_per_generation=4", {"gdpo.num_prompts_per_step": 4, "policy.train_global_batch_size": 8}, DIFFERS),
    ('steps_per_generation=4, loss_type="grpo"', {"gdpo.max_num_steps": 1}, SAME),
    ("gradient_accumulation_steps=4", {"gdpo.num_prompts_per_step": 4}, SAME),
    ("num_generations=3", {}, CANNOT_RUN),
    ("num_iterations=2", {}, DIFFERS),
    ("use_vllm=True", {"loss_fn.off_policy.mode": "mask", "loss_fn.off_policy.level": "sequence"}, SAME),
    ('use_vllm=True, vllm_mode="server"', {"cluster.gpus_per_node": 2}, SAME),
    ("use_vllm=True, vllm_importance_sampling_correction=False", {"loss_fn.off_policy.mode": "none"}, SAME),
    ("top_k=50, temperature=0.7", {"policy.generation.top_k": 50, "policy.generation.temperature": 0.7}, SAME),
    ("min_p=0.1", {}, DIFFERS),
    ('generation_kwargs={"stop": ["\\n"]}', {"policy.generation.stop_strings": ["\n"]}, SAME),
    ('chat_template_kwargs={"enable_thinking": False}', {"data.train.chat_template_kwargs": {"enable_thinking": False}},
     SAME),
    ('lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1}',
     {"policy.megatron_cfg.optimizer.min_lr": 1e-7}, SAME),
    ('lr_scheduler_type="polynomial"', {"policy.megatron_cfg.scheduler.lr_decay_style": "constant"}, DIFFERS),
    ("warmup_ratio=0.5", {"policy.megatron_cfg.scheduler.lr_warmup_steps": 2}, SAME),
    ("save_steps=2, save_total_limit=3", {"checkpointing.save_period": 2, "checkpointing.keep_last": 3}, SAME),
    ('save_strategy="no"', {"checkpointing.enabled": False}, SAME),
    ("max_prompt_length=100, max_completion_length=50", {"policy.max_total_sequence_length": 150}, DIFFERS),
    ("mask_truncated_completions=True", {"loss_fn.mask_truncated": True}, SAME),
    ('report_to=["wandb"], project="p"', {"logger.wandb.enabled": True, "logger.wandb.project": "p"}, SAME),
    ("sync_ref_model=True, ref_model_sync_steps=64, beta=0.1",
     {"policy.sync_ref_model": True, "policy.ref_model_sync_steps": 64}, SAME),
    ("use_adaptive_entropy=True, entropy_target=0.4",
     {"loss_fn.use_adaptive_entropy": True, "loss_fn.entropy_target": 0.4}, SAME),
    ("beta=0.1, use_bias_correction_kl=False", {"loss_fn.reference_policy_kl_gradient": "estimator"}, SAME),
    ("learning_rate=compute()", {"policy.megatron_cfg.optimizer.lr": 1e-6}, DIFFERS),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("config, wanted, status", CASES, ids=[case[0] for case in CASES])
def test_each_field_arrives_at_a_key_of_the_same_meaning_or_its_difference_is_reported(folder, config, wanted, status):
    translation = translate_trl([write_script(folder, config=config)], "ours.yaml")
    assert translation.status == status, translation.summary()
    named = {keyword.partition("=")[0] for keyword in re.split(r", (?=\w+=)", config)}
    lines = {line.key: line.status for line in translation.lines}
    assert named <= set(lines) and UNKNOWN not in lines.values()
    if status != CANNOT_RUN:
        (folder / "ours.yaml").write_text(translation.to_text("script.py"))
        made = load_config(folder / "ours.yaml")
        for key, value in wanted.items():
            found = made
            for part in key.split("."):
                found = getattr(found, part)
            assert found == value, key


REWARDS = [
    ("[short]", {"short": "ours_rewards.py:short"}, SAME),
    ("short", {"short": "ours_rewards.py:short"}, SAME),
    ("[accuracy_reward]", {"accuracy_reward": "trl.rewards.accuracy_reward"}, SAME),
    ("[beside]", {"beside": "mine.py:beside"}, SAME),
    ("[Length()]", {"Length": "ours_rewards.py:reward_1"}, SAME),
    ("[functools.partial(scaled, factor=2)]", {"scaled": "ours_rewards.py:reward_1"}, SAME),
    ("[named]", {"scaled": "ours_rewards.py:named"}, SAME),
    ("[short, lambda completions, **kwargs: [0.0 for _ in completions]]",
     {"short": "ours_rewards.py:short", "reward_2": "ours_rewards.py:reward_2"}, SAME),
    ("chosen", {"short": "ours_rewards.py:short", "Length": "ours_rewards.py:reward_2"}, SAME),
    ('"org/reward-model"', {"reward-model": {"function": "reward_model", "model": "org/reward-model"}}, SAME),
    ("[tied]", {}, CANNOT_RUN),
]  # fmt: skip


@pytest.mark.parametrize("funcs, wanted, status", REWARDS, ids=[case[0] for case in REWARDS])
def test_every_form_of_reward_function_gets_a_place_that_can_be_imported(folder, funcs, wanted, status):
    (folder / "mine.py").write_text("def beside(completions, **kwargs):\n    return [1.0 for _ in completions]\n")
    before = """
import functools
from mine import beside
from trl.rewards import accuracy_reward

def scaled(completions, factor, **kwargs):
    return [factor * len(c) for c in completions]

class Length:
    def __call__(self, completions, **kwargs):
        return [float(len(c)) for c in completions]

named = functools.partial(scaled, factor=3)
chosen = [short, Length()]
other = GRPOTrainer
late = other.make()

def tied(completions, **kwargs):
    return [made.score(c) for c in completions]

made = parser.parse_args()
"""
    trainer = f'model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs={funcs}'
    translation = translate_trl([write_script(folder, before=before, trainer=trainer)], "ours.yaml")
    assert translation.status == status, translation.summary()
    found = translation.content.get("env", {}).get("functions", {}).get("functions", {})
    assert found == wanted
    if status == SAME and "accuracy_reward" not in funcs:
        environment = load_environment("functions", {"functions": found})
        assert environment.reward_names == tuple(wanted)


def test_weights_that_do_not_fit_and_unsupported_fields_are_reported(folder):
    trainer = 'model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=[short], rollout_worker=short, callbacks=[short]'
    translation = translate_trl([write_script(folder, "reward_weights=[1, 2]", trainer)], "ours.yaml")
    assert {"reward_weights", "rollout_worker"} <= set(translation.blockers)
    assert translation.differences["callbacks"] == "[short] is not executed"


def test_rollout_function_at_the_top_of_a_script_is_used_and_a_nested_one_is_reported(folder):
    before = "def play(prompts, trainer):\n    return {}\n"
    trainer = 'model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=[short], rollout_func=play'
    script = write_script(folder, "", trainer, before)
    translation = translate_trl([script], "ours.yaml")
    place = translation.content["rollout"]["function"]
    assert place.endswith(":play") and "rollout_func" not in translation.blockers
    load_rollout_function(place)
    body = "\n".join(f"    {line}" for line in Path(script).read_text().splitlines())
    Path("nested.py").write_text(f"def main():\n{body}\n\nif __name__ == '__main__':\n    main()\n")
    nested = translate_trl(["nested.py"], "ours.yaml")
    assert "inside a function; move it to the script's top level" in nested.blockers["rollout_func"]
    off = translate_trl([write_script(folder, "", trainer.replace("=play", "=None"), before)], "ours.yaml")
    assert "function" not in off.content.get("rollout", {}) and "rollout_func" not in off.blockers


def test_arguments_without_a_script_are_those_of_trl_grpo(folder):
    arguments = {
        "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct", "dataset_name": "openai/gsm8k", "dataset_config": "main",
        "reward_funcs": ["think_format_reward"], "use_peft": True, "lora_r": 4, "output_dir": "out",
        "num_train_epochs": 2, "_n_gpu": 1,
    }  # fmt: skip
    (folder / "args.json").write_text(json.dumps(arguments))
    translation = translate_trl(["args.json"], None)
    content = translation.content
    assert content["data"]["train"]["path"] == "openai/gsm8k:main"
    assert (content["policy"]["lora"]["rank"], content["policy"]["lora"]["dropout"]) == (4, 0.05)
    assert (content["gdpo"]["max_num_epochs"], content["gdpo"]["max_num_steps"]) == (2, 1_000_000)
    assert content["env"]["functions"]["functions"] == {"think_format_reward": "trl.rewards.think_format_reward"}
    assert translation.status == SAME, translation.summary()


def test_saved_arguments_with_every_field_are_accounted_for_line_by_line(folder):
    saved = {**GRPO_CONFIG, "output_dir": "out", "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct"}
    saved |= {"dataset_name": "a/b", "reward_funcs": ["think_format_reward"], "max_steps": 3}
    (folder / "args.yaml").write_text(yaml.safe_dump(saved))
    translation = translate_trl(["args.yaml"], None)
    assert {line.key for line in translation.lines if line.status != ADDED} >= set(GRPO_CONFIG)
    assert UNKNOWN not in {line.status for line in translation.lines}
    assert translation.status == SAME, translation.summary()


def test_saved_arguments_with_a_model_of_an_unknown_name_leave_its_family_to_the_dry_run(folder):
    saved = {"output_dir": "out", "model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct", "max_steps": 3}
    saved |= {"dataset_name": "a/b", "reward_funcs": ["think_format_reward"]}
    (folder / "args.yaml").write_text(yaml.safe_dump(saved))
    translation = translate_trl(["args.yaml"], None)
    assert (translation.status, set(translation.questions)) == (SAME, {"policy.model_name"}), translation.summary()


def test_a_script_that_reads_its_command_line_takes_a_file_of_arguments(folder):
    text = """
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from datasets import load_dataset

def short(completions, **kwargs):
    return [1.0 for _ in completions]

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    training_args.gradient_checkpointing = False
    data = load_dataset(script_args.dataset_name or "a/b", split=script_args.dataset_train_split)
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path, reward_funcs=short, args=training_args, train_dataset=data,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
"""
    (folder / "script.py").write_text(text)
    assert "model_name_or_path" in translate_trl(["script.py"], None).blockers["model"]
    (folder / "args.yaml").write_text("{model_name_or_path: Qwen/Qwen3-8B, learning_rate: 2.0e-5, use_peft: true}")
    translation = translate_trl(["script.py", "args.yaml"], None, processes=2)
    assert translation.status == SAME, translation.summary()
    content = translation.content
    assert content["policy"]["model_name"] == "Qwen/Qwen3-8B" and content["policy"]["lora"]["rank"] == 16
    assert content["policy"]["megatron_cfg"]["optimizer"]["lr"] == 2e-5
    assert content["policy"]["megatron_cfg"]["recompute"] == "none"
    assert (content["data"]["train"]["path"], content["gdpo"]["num_prompts_per_step"]) == ("a/b", 2)


def test_files_that_belong_to_the_config_are_written_with_out_only(folder, capsys):
    write_script(folder)
    assert cli.main(["config", "from-trl", "script.py"]) == 1
    assert "which --out writes to the" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["script.py"]
    assert cli.main(["config", "from-trl", "script.py", "--out", "ours.yaml", "--strict"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        "ours.yaml", "ours_rewards.py", "ours_train.jsonl", "script.py"]  # fmt: skip
    verdicts = (folder / "ours.yaml").read_text()
    assert "# translated (" in verdicts and "TRL's default" in verdicts


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.py", "x = 1\n", "has 0 calls of TRL trainers; exactly"),
        ("a.py", "def f(:\n", "is not valid Python"),
        (
            "a.py",
            "BCOTrainer(model='a')\n",
            "trains with BCOTrainer; known: GRPOTrainer, AsyncGRPOTrainer, RLOOTrainer, SFTTrainer",
        ),
        ("a.py", "GRPOTrainer(**x)\n", "GRPOTrainer(**...) with unknown arguments"),
        ("a.py", "GRPOTrainer(args=make())\n", "args is not a readable GRPOConfig(...): make()"),
        ("a.py", "GRPOTrainer(args=GRPOConfig(**make()))\n", "**make() with unknown arguments"),
        (
            "a.py",
            "GRPOTrainer(args=GRPOConfig(learning_rat=1))\n",
            "learning_rat: GRPOConfig does not have this field; did you",
        ),
        ("a.py", "AsyncGRPOTrainer(args=GRPOConfig())\n", "args is not a readable AsyncGRPOConfig(...): GRPOConfig()"),
        ("a.py", "GRPOTrainer(args=AsyncGRPOConfig())\n", "args is not a readable GRPOConfig(...): AsyncGRPOConfig()"),
        (
            "a.py",
            "AsyncGRPOTrainer(args=AsyncGRPOConfig(max_stalenes=1))\n",
            "max_stalenes: AsyncGRPOConfig does not have this field; did you mean 'max_staleness'",
        ),
        (
            "a.py",
            "GRPOTrainer(args=GRPOConfig(max_staleness=1))\n",
            "max_staleness: GRPOConfig does not have this field",
        ),
        ("a.py", "GRPOTrainer()\nGRPOTrainer()\n", "has 2 calls of TRL trainers (lines 1, 2)"),
        ("a.yaml", "learning_rat: 1\n", "learning_rat: not an option of GRPOConfig or `trl grpo`; did you mean"),
        ("a.yaml", "- 1\n", "expected a mapping with fields of GRPOConfig"),
        ("a.json", "{", "is neither JSON nor YAML"),
        ("a.ipynb", "{}", "one script (.py) is supported"),
    ],
)
def test_unreadable_script_is_refused_in_one_line(folder, name, text, message):
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        translate_trl([name], None)
    assert "\n" not in str(error.value)


def test_verdicts_of_keys_describe_their_translation(folder):
    translation, _ = ours(folder, config="num_iterations=2, logging_steps=1, learning_rate=1e-5")
    found = {line.key: line.status for line in translation.lines}
    assert (found["num_iterations"], found["logging_steps"], found["learning_rate"]) == (
        DIFFERENT, NO_EFFECT, TRANSLATED)  # fmt: skip
