"""Axolotl's configs translated: nothing is lost on the way, and what comes out is a config that runs."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml

from gdpo_nemo.commands import cli
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.schema import DatasetConfig
from gdpo_nemo.data.row_formats import alpaca, alpaca_chat
from gdpo_nemo.data.rows import load_rows
from gdpo_nemo.tools.interop.axolotl.config import AxolotlConfig
from gdpo_nemo.tools.interop.axolotl.keys import RULES, result_of
from gdpo_nemo.tools.interop.axolotl.translate import translate_axolotl
from gdpo_nemo.tools.interop.translation import ADDED, CANNOT_RUN, DIFFERS, SAME, TRANSLATED
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.import_path import ImportPath

KEYS = Path(__file__).parent / "axolotl" / "keys_of_schema.txt"
REWARDS = """
def short(completions, **columns):
    return [-float(len(c[-1]["content"])) for c in completions]

def right(completions, answer, **columns):
    return [float(a in c[-1]["content"]) for c, a in zip(completions, answer)]

def gsm8k(cfg, *args, **kwargs):
    def transform(example, tokenizer=None):
        return {"prompt": [{"role": "user", "content": example["question"]}], "answer": example["answer"][-1]}
    return transform, {"remove_columns": ["question"]}
"""
COMMON = {
    "base_model": "Qwen/Qwen2.5-1.5B-Instruct",
    "sequence_len": 512,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": "5e-5",
    "optimizer": "adamw_torch_fused",
    "lr_scheduler": "cosine",
    "warmup_steps": 10,
    "max_steps": 100,
    "bf16": "auto",
    "output_dir": "./outputs/tried",
    "save_steps": 50,
}
SAMPLED = {
    **COMMON,
    "rl": "gdpo",
    "chat_template": "tokenizer_default",
    "trl": {
        "beta": 0.001,
        "num_generations": 4,
        "max_completion_length": 128,
        "temperature": 0.7,
        "reward_funcs": ["mine_ax.short", "mine_ax.right"],
        "reward_weights": [1.0, 2.0],
    },
    "datasets": [{"path": "openai/gsm8k", "name": "main", "split": "train[:1000]", "type": "mine_ax.gsm8k"}],
}
PAIRS = {**COMMON, "rl": "dpo", "datasets": [{"path": "org/pairs", "type": "chat_template.default"}]}
SFT = {**COMMON, "datasets": [{"path": "org/talks", "type": "chat_template"}]}


@pytest.fixture
def translated(tmp_path, monkeypatch):
    """content, further keys -> its translation; the folder holds the reward functions."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_ax.py").write_text(REWARDS)

    def make(content, processes=1, **more):
        merged = {**content, **more}
        for section in ("trl", "vllm", "ebft"):
            if section in more:
                merged[section] = {**content.get(section, {}), **more[section]}
        (tmp_path / "theirs.yml").write_text(yaml.safe_dump(merged))
        return translate_axolotl("theirs.yml", processes)

    return make


def value(translation, key):
    found = translation.content
    for name in key.split("."):
        found = found[name]
    return found


def test_every_key_of_axolotls_schema_has_a_rule():
    config = AxolotlConfig({}, Path("theirs.yml"))
    keys = KEYS.read_text().split()
    assert len(keys) > 440
    assert [key for key in keys if not any(fnmatchcase(key, name) for name, _ in RULES)] == []
    assert result_of("learning_rat", 1, config) is None


def test_gdpo_config_is_the_same_run(translated):
    made = translated(SAMPLED)
    assert (made.status, made.differences, made.files) == (SAME, {}, [])
    assert made.content["gdpo"] == {
        "estimator": "gdpo",
        "preset": "trl",
        "rewards": {"short": 1.0, "right": 2.0},
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 4,
        "max_num_steps": 100,
    }
    assert made.content["data"]["train"] == {
        "path": "openai/gsm8k:main",
        "split": "train[:1000]",
        "prompt_key": "prompt",
        "chat": False,
        "type": "mine_ax.py:gsm8k",
    }
    functions = {"short": "mine_ax.py:short", "right": "mine_ax.py:right"}
    assert made.content["env"] == {"functions": {"functions": functions}}
    assert value(made, "policy.generation") == {"engines": 1, "max_new_tokens": 128, "temperature": 0.7, "top_p": 1.0}
    assert value(made, "policy.megatron_cfg.scheduler") == {
        "lr_decay_style": "cosine",
        "lr_warmup_steps": 10,
        "lr_warmup_init": 0.0,
    }
    assert value(made, "policy.megatron_cfg.optimizer.lr") == 5e-5
    assert value(made, "loss_fn.reference_policy_kl_penalty") == 0.001
    assert "reference_policy_kl_gradient" not in made.content["loss_fn"]  # TRL 1.8 corrects no KL, TRL 1.16 does
    assert value(made, "policy.max_total_sequence_length") == 640


@pytest.mark.parametrize("content", [SAMPLED, PAIRS, SFT], ids=["gdpo", "dpo", "sft"])
def test_every_key_reported_as_translated_is_in_the_config(content, translated):
    made = translated(content, adapter="lora", lora_r=8, lora_alpha=16, lora_target_linear=True, wandb_project="p")
    taken = 0
    for line in made.lines:
        if line.status == TRANSLATED:
            named = [
                part.strip().partition("=")[0] for part in line.text.partition(" -> ")[2].split(";")[0].split(", ")
            ]
            for key in (
                key for key in named if key.split(".")[0] in ("policy", "gdpo", "data", "loss_fn", "env", "run")
            ):
                value(made, key)
                taken += 1
        elif line.status == ADDED:
            value(made, line.key)
            taken += 1
    assert taken > 25


def test_translated_configs_load_and_their_rows_are_read(translated, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "2+3?", "answer": "5"}\n')
    made = translated(SAMPLED, datasets=[{"path": "json", "data_files": "rows.jsonl", "type": "mine_ax.gsm8k"}])
    (tmp_path / "ours.yaml").write_text(made.to_text("theirs.yml"))
    config = load_config(tmp_path / "ours.yaml")
    (row,) = load_rows(config.data.train, {}, "train", 0)
    assert row["prompt"] == [{"role": "user", "content": "2+3?"}] and row["answer"] == "5"


@pytest.mark.parametrize("mode", [{"vllm_mode": "server"}, {}])
def test_vllm_servers_become_engines_beside_the_trainer(translated, mode):
    """The mode ``server`` is axolotl's default (``GRPOVllmValidationMixin``)."""
    made = translated(
        SAMPLED,
        processes=2,
        rl="grpo",
        trl={"use_vllm": True, **mode, "vllm_server_host": "0.0.0.0", "vllm_importance_sampling_cap": 2.0},
        vllm={"tensor_parallel_size": 2, "data_parallel_size": 2, "max_model_len": 600, "gpu_memory_utilization": 0.8},
    )
    assert made.status == SAME
    assert made.content["cluster"] == {"gpus_per_node": 6}
    assert value(made, "policy.generation.engines") == 2
    assert value(made, "policy.generation.vllm_cfg") == {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.8}
    assert value(made, "policy.max_total_sequence_length") == 600
    assert value(made, "loss_fn.off_policy") == {"mode": "mask", "level": "sequence", "ratio_max": 2.0}
    assert value(made, "gdpo.estimator") == "grpo" and value(made, "gdpo.num_prompts_per_step") == 4


def test_prefetched_rollouts_run_ahead_with_separate_engines(translated):
    ahead = {"async_prefetch": True, "prefetch_depth": 2, "vllm_sync_interval": 2, "use_vllm": True}
    made = translated(SAMPLED, trl=ahead)
    assert made.status == DIFFERS and list(made.differences) == ["trl.async_prefetch"]
    assert made.content["rollout"] == {"max_staleness": 2, "sync_every": 2}
    assert value(made, "loss_fn.off_policy.mode") == "mask" and value(made, "loss_fn.old_logprobs") == "trainer"
    for unfit in ({"vllm_mode": "colocate"}, {"use_vllm": False}):
        assert "trl.vllm_mode" in translated(SAMPLED, trl={**ahead, **unfit}).blockers


def test_reward_module_may_be_a_package(translated, tmp_path):
    package = tmp_path / "rewards_ax"
    package.mkdir()
    (package / "__init__.py").write_text("from .texts import right\n")
    (package / "texts.py").write_text(REWARDS)
    (tmp_path / "rewards_ax.py").write_text("raise RuntimeError('Python prefers the package')\n")
    made = translated(SAMPLED, trl={"reward_funcs": ["rewards_ax.right", "rewards_ax.texts.short"]})
    functions = made.content["env"]["functions"]["functions"]
    assert functions == {"right": "rewards_ax/__init__.py:right", "short": "rewards_ax/texts.py:short"}
    for import_path in functions.values():
        assert callable(ImportPath(import_path).load())


@pytest.mark.parametrize(
    "keys, algorithm, preference",
    [
        ({}, "dpo", {"beta": 0.1}),
        ({"rl_beta": 0.3, "dpo_label_smoothing": 0.1}, "dpo", {"beta": 0.3, "label_smoothing": 0.1}),
        (
            {"trl": {"beta": 0.2}, "rl_beta": 0.3, "dpo_loss_type": ["hinge"]},
            "dpo",
            {"beta": 0.2, "loss_type": "hinge"},
        ),
        ({"rl": "ipo"}, "dpo", {"beta": 0.1, "loss_type": "ipo"}),
        ({"rl": "simpo", "simpo_gamma": 1.5}, "simpo", {"beta": 0.1, "rpo_alpha": 1.0, "simpo_gamma": 1.5}),
        ({"rl": "simpo", "cpo_alpha": 0.0, "rl_beta": 2}, "simpo", {"beta": 2.0, "rpo_alpha": 0.0}),
        ({"rl": "orpo", "orpo_alpha": 0.2}, "orpo", {"beta": 0.2}),
        ({"rl": "kto", "kto_desirable_weight": 2}, "kto", {"beta": 0.1, "desirable_weight": 2.0}),
    ],
)
def test_preferences_have_the_losses_that_axolotl_gives_trl(keys, algorithm, preference, translated):
    made = translated(PAIRS, **keys)
    assert made.content["algorithm"] == {"type": algorithm} and made.content["preference"] == preference
    assert value(made, "gdpo.num_prompts_per_step") == 8 and "env" not in made.content
    assert made.blockers == {} and list(made.differences) == (["rl"] if algorithm == "orpo" else [])


@pytest.mark.parametrize(
    "entry, expected",
    [
        ({"type": "chat_template.default", "field_chosen": "good"},
         {"type": "chat_template.default", "columns": {"chosen": "good"}}),
        ({"type": "chatml.ultra"}, {"type": "chatml.ultra"}),
        ({"type": None}, {}),
        ({"type": "mine_ax.gsm8k"}, {"type": "mine_ax.py:gsm8k"}),
        ({"type": {"field_prompt": "q", "field_system": None}}, {"type": {"field_prompt": "q"}}),
    ],
)  # fmt: skip
def test_forms_of_pairs_keep_their_names(entry, expected, translated):
    made = translated(PAIRS, datasets=[{"path": "org/pairs", **entry}])
    assert made.content["data"]["train"] == {"path": "org/pairs", **expected} and made.status == SAME


@pytest.mark.parametrize(
    "entry, expected",
    [
        ({"type": "chat_template", "field_messages": "conversations",
          "message_property_mappings": {"role": "from", "content": "value"}}, {}),
        ({"type": "chat_template", "field_messages": "talk"}, {"columns": {"messages": "talk"}}),
        ({"type": "alpaca"}, {"type": "gdpo_nemo.data.row_formats:alpaca", "chat": False}),
        ({"type": {"field_instruction": "q", "field_output": "a", "format": "Q: {instruction}\nA:"}},
         {"type": {"field_prompt": "q", "field_completion": "a", "prompt_format": "Q: {prompt}\nA:"}}),
    ],
)  # fmt: skip
def test_forms_of_supervised_rows_are_translated(entry, expected, translated):
    made = translated(SFT, datasets=[{"path": "org/talks", **entry}])
    assert made.content["algorithm"] == {"type": "sft"} and made.status == SAME
    assert made.content["data"]["train"] == {"path": "org/talks", **expected}


def test_alpaca_rows_are_the_texts_that_alpaca_has(tmp_path):
    row = {"instruction": "Add.", "input": "2 3", "output": "5"}
    head = "Below is an instruction that describes a task, paired with an input that provides further context. "
    rest = "Write a response that appropriately completes the request."
    prompt = f"{head}{rest}\n\n### Instruction:\nAdd.\n\n### Input:\n2 3\n\n### Response:\n"
    assert alpaca(row) == {"prompt": prompt, "completion": "5"}
    bare = f"Below is an instruction that describes a task. {rest}"
    for empty in ({"input": ""}, {"input": None}):
        asked = alpaca({**row, **empty})["prompt"]
        assert asked == f"{bare}\n\n### Instruction:\nAdd.\n\n### Response:\n"
    assert alpaca_chat(row)["prompt"] == f"SYSTEM: {head}{rest}\nUSER: Add.\n2 3\nASSISTANT:"
    (tmp_path / "rows.jsonl").write_text('{"instruction": "Add.", "input": "2 3", "output": "5"}\n')
    data = DatasetConfig(path=str(tmp_path / "rows.jsonl"), type="gdpo_nemo.data.row_formats:alpaca")
    (found,) = load_rows(data, {}, "train", 0)
    assert found["prompt"] == prompt and found["completion"] == "5"


@pytest.mark.parametrize(
    "keys, key, expected",
    [
        ({"warmup_steps": None}, "scheduler.lr_warmup_steps", 3),  # 3 % of 100
        ({"warmup_steps": None, "warmup_ratio": 0.1}, "scheduler.lr_warmup_steps", 10),
        ({"warmup_steps": 0.2}, "scheduler.lr_warmup_steps", 20),
        ({"warmup_steps": 1}, "scheduler.lr_warmup_steps", 2),
        ({"cosine_min_lr_ratio": 0.1}, "optimizer.min_lr", 5e-6),
        ({"lr_scheduler": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}}, "optimizer.min_lr", 1e-6),
        ({"weight_decay": "1e-2"}, "optimizer.weight_decay", 0.01),
        ({}, "optimizer.adam_beta2", 0.999),
    ],
)
def test_learning_rates_are_those_that_axolotl_works_out(keys, key, expected, translated):
    made = translated(SFT, **keys)
    assert value(made, f"policy.megatron_cfg.{key}") == pytest.approx(expected) and made.status == SAME


def test_adapters_have_the_rank_alpha_and_layers_of_axolotl(translated):
    qlora = {"adapter": "qlora", "load_in_4bit": True, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
    made = translated(SFT, **qlora, lora_target_linear=True, peft_use_rslora=True)
    lora = made.content["policy"]["lora"]
    assert (lora["rank"], lora["alpha"], lora["dropout"]) == (16, 128.0, 0.05)
    assert "q_proj" in lora["target_modules"] and "lm_head" not in lora["target_modules"]
    assert list(made.differences) == ["load_in_4bit"]
    some = translated(SFT, adapter="lora", lora_target_modules=["q_proj", "router"])
    assert some.content["policy"]["lora"]["target_modules"] == ["q_proj"]
    assert "router" in some.differences["lora_target_modules"]


TEXT_MODEL = r"model.language_model.layers.[\d]+.(mlp|cross_attn|self_attn).(up|down|gate|q|k|v|o)_proj"


@pytest.mark.parametrize(
    "keys, train, differences",
    [
        ({}, True, set()),
        ({"freeze_mm_modules": True}, False, set()),
        ({"adapter": "lora", "lora_target_modules": TEXT_MODEL}, False, set()),
        ({"adapter": "lora", "lora_target_modules": ["q_proj", "up_proj"]}, False, {"lora_target_modules"}),
        ({"image_size": 512}, True, {"image_size"}),
    ],
)
def test_configs_with_images_train_the_parameters_of_axolotl(keys, train, differences, translated):
    made = translated(SFT, base_model="Qwen/Qwen2.5-VL-7B-Instruct", processor_type="AutoProcessor", **keys)
    assert made.blockers == {} and set(made.differences) == {"sequence_len"} | differences
    assert made.content["policy"].get("vision", {}).get("train", False) is train
    layers = made.content["policy"].get("lora", {}).get("target_modules", ())
    assert "adapter" not in keys or len(layers) == (7 if keys["lora_target_modules"] == TEXT_MODEL else 2)


@pytest.mark.parametrize(
    "model, key", [("Qwen/Qwen3.5-9B", "processor_type"), ("HuggingFaceTB/SmolVLM2-2.2B", "base_model")]
)
def test_configs_with_images_cannot_run_with_another_model(model, key, translated):
    assert list(translated(SFT, base_model=model, processor_type="AutoProcessor").blockers) == [key]


@pytest.mark.parametrize(
    "keys, name",
    [
        ({"optimizer": "muon"}, "optimizer"),
        ({"chat_template": "llama3"}, "chat_template"),
        ({"val_set_size": 0.05}, "val_set_size"),
        ({"sample_packing": True}, "sample_packing"),
        ({"special_tokens": {"eos_token": "<|im_end|>"}}, "special_tokens"),
        ({"max_steps": None, "warmup_steps": None}, "warmup_steps"),
        ({"loraplus_lr_ratio": 16}, "loraplus_lr_ratio"),
        ({"plugins": ["axolotl.integrations.diffusion.DiffusionPlugin"]}, "plugins"),
        ({"learning_rat": 1}, "learning_rat"),
    ],
)
def test_unsupported_keys_that_change_the_result_are_named(keys, name, translated):
    made = translated(SFT, **keys)
    assert made.status == DIFFERS and list(made.differences) == [name]


@pytest.mark.parametrize(
    "keys",
    [
        {"special_tokens": {"pad_token": "<pad>"}},
        {"special_tokens": None},
        {"attn_implementation": "flash_attention_2", "gradient_checkpointing": True, "tf32": True},
        {"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_rope": True},
        {"fsdp_config": {"state_dict_type": "x"}, "deepspeed": "zero3.json", "wandb_watch": None},
        {"trl": {"num_generations": 3}},
    ],
)
def test_keys_without_effect_are_not_a_difference(keys, translated):
    assert translated(SFT, **keys).status == SAME


@pytest.mark.parametrize(
    "content, keys, name",
    [
        (SAMPLED, {"trl": {"reward_funcs": []}}, "trl.reward_funcs"),
        (SAMPLED, {"trl": {"reward_funcs": ["org/reward-model", "mine_ax.short"]}}, "trl.reward_funcs.reward-model"),
        (SAMPLED, {"trl": {"loss_type": "vespo"}}, "trl.loss_type"),
        (SAMPLED, {"nemo_gym_enabled": True, "datasets": None}, "nemo_gym_enabled"),
        (PAIRS, {"dpo_loss_type": ["sigmoid", "sft"]}, "dpo_loss_type"),
        (PAIRS, {"datasets": [{"path": "org/pairs", "type": "alpaca"}]}, "datasets.type"),
        (SFT, {"datasets": [{"path": "org/texts", "type": "completion"}]}, "datasets.type"),
        (SFT, {"datasets": [{"path": "a/b", "type": "alpaca"}, {"path": "c/d", "type": "chat_template"}]},
         "datasets.type"),
        (SFT, {"datasets": [{"path": "s3://bucket/rows.jsonl", "type": "chat_template"}]}, "datasets[0]"),
        (SFT, {"datasets": []}, "datasets"),
        (SFT, {"adapter": "llama-adapter"}, "adapter"),
        (SFT, {"learning_rate": None}, "learning_rate"),
        (SFT, {"base_model": "Qwen/Qwen2-VL-7B-Instruct"}, "base_model"),
    ],
)  # fmt: skip
def test_configs_that_cannot_run_are_named_with_the_reason(content, keys, name, translated):
    made = translated(content, **keys)
    assert made.status == CANNOT_RUN and list(made.blockers) == [name]


def test_functions_that_are_not_here_are_named_and_stop_nothing(translated, tmp_path, monkeypatch):
    (tmp_path / "elsewhere" / "inner").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")  # a folder of the same name is not yet the module
    rows = [{"path": "org/rows", "type": "inner.absent_ax.transform"}]
    made = translated(SAMPLED, datasets=rows, trl={"reward_funcs": ["absent_ax.short", "absent_ax.right"]})
    assert made.status == SAME and made.files == ["absent_ax.py", "inner/absent_ax.py"]
    assert "files to put in the working directory of the run: absent_ax.py, inner/absent_ax.py" in made.summary()
    assert value(made, "env.functions.functions.short") == "absent_ax.py:short"


def test_ebft_configs_have_features_and_anchors(translated):
    ebft = {"embed_method": "mean_pooling", "diversity_coef": 0.5, "use_whitening": True}
    rows = [{"path": "org/code", "type": "ebft_opencode.transform"}]
    structured = translated(SAMPLED, rl="ebft", datasets=rows, ebft=ebft, trl={"reward_funcs": None})
    assert list(structured.differences) == ["ebft.adaptive_max_tokens"]
    options = {"model": COMMON["base_model"], "embed_method": "mean_pooling", "use_whitening": True}
    assert structured.content["env"] == {"ebft": options}
    assert value(structured, "gdpo.rewards") == {"alignment": 1.0, "diversity": 0.5}
    assert value(structured, "data.train.columns") == {"prompt": "input", "answer": "output"}
    assert structured.files == [f"folder of {COMMON['base_model']} (env.ebft.model)"]
    strided = {"mode": "strided", "stride": 8, "context_length": 16, "generate_max_len": 8, "n_samples_per_prompt": 4}
    rows = [{"path": "org/texts", "type": "ebft_pretrain.transform"}]
    made = translated(COMMON, rl="ebft", datasets=rows, ebft=strided)
    assert list(made.differences) == ["micro_batch_size"]
    assert value(made, "data.train.strided") == {"stride": 8, "context_length": 16, "generate_max_len": 8}
    assert value(made, "gdpo.estimator") == "rloo" and value(made, "gdpo.num_generations_per_prompt") == 4
    assert value(made, "gdpo.num_prompts_per_step") == 8 * 62  # (512 - 16 - 8) / 8 + 1 anchors of eight texts
    assert value(made, "policy.generation")["max_new_tokens"] == 8
    assert value(made, "policy.generation")["temperature"] == 0.6


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: [", "is not YAML"),
        ("- 1\n", "expected an axolotl config with the key base_model"),
        ("model_name: x\n", "expected an axolotl config with the key base_model"),
        ("base_model: 3\n", "expected an axolotl config with the key base_model"),
        ("base_model: x\nrl: gdop\n", "rl: unknown value 'gdop'; did you mean 'gdpo'?"),
        ("base_model: x\nlearning_rate: fast\n", "learning_rate: must be a finite number ('fast')"),
        ("base_model: x\nmicro_batch_size: 0\n", "micro_batch_size: must be at least 1 (0)"),
        ("base_model: x\nmicro_batch_size: two\n", "micro_batch_size: must be an integer ('two')"),
        ("base_model: x\nwarmup_steps: .inf\n", "warmup_steps: must be a finite number ('inf')"),
        ("base_model: x\nebft: {stride: 0}\n", "ebft.stride: must be at least 1 (0)"),
        ("base_model: x\ntrl: {loss_type: [dapo]}\n", "trl.loss_type: must be text (\"['dapo']\")"),
        ("base_model: x\nchat_template_kwargs: 5\n", "chat_template_kwargs: must be a mapping ('5')"),
        ("base_model: x\ndpo_loss_type: 5\n", "dpo_loss_type: must be text or a list ('5')"),
        ("base_model: x\ntrl: 3\n", "trl: expected a mapping ('3')"),
        ("base_model: x\ndatasets: rows.jsonl\n", "datasets: must be a list ('rows.jsonl')"),
        ("base_model: x\ndatasets: [rows.jsonl]\n", "datasets: must be a list of mappings with path and type"),
        ("base_model: x\ntrl: {reward_weights: 1}\n", "trl.reward_weights: must be a list ('1')"),
    ],
)
def test_unreadable_configs_are_refused_in_one_line(text, message, tmp_path):
    path = tmp_path / "theirs.yml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        translate_axolotl(path)
    assert str(refused.value).startswith(f"{path}: {message}") and "\n" not in str(refused.value)


def test_command_writes_the_config_and_tells_its_status(translated, tmp_path, capsys):
    translated(PAIRS)
    assert cli.main(["config", "from-axolotl", "theirs.yml", "--out", "ours.yaml"]) == 0
    assert capsys.readouterr().out.startswith("same: every key that affects the result behaves as in axolotl")
    assert load_config("ours.yaml").algorithm.type == "dpo"
    translated(PAIRS, optimizer="lion")
    assert cli.main(["config", "from-axolotl", "theirs.yml", "--strict"]) == 3
    translated(PAIRS, adapter="other")
    assert cli.main(["config", "from-axolotl", "theirs.yml"]) == 1
    assert cli.main(["config", "from-axolotl", "absent.yml"]) == 2
    assert cli.main(["config", "from-axolotl", "theirs.yml", "--num-processes", "0"]) == 2
