"""Scripts of TRL's further trainers translated: each field arrives, and each difference is said."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json

import pytest

from gdpo_nemo.commands import cli
from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.rows import load_rows
from gdpo_nemo.environments.registry import load_environments
from gdpo_nemo.tools.interop.translation import CANNOT_RUN, DIFFERS, SAME, UNKNOWN
from gdpo_nemo.tools.interop.trl.keys import result_of
from gdpo_nemo.tools.interop.trl.run import TrlRun
from gdpo_nemo.tools.interop.trl.trainers import TRAINERS
from gdpo_nemo.tools.interop.trl.translate import COMMANDS, translate_trl
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
INSTALLED = {
    **dict.fromkeys(("GRPOTrainer", "RLOOTrainer", "SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer"), "trl"),
    "DistillationTrainer": "trl",
    "CPOTrainer": "trl.experimental.cpo",
    "ORPOTrainer": "trl.experimental.orpo",
    "GKDTrainer": "trl.experimental.gkd",
}
PAIR = {"prompt": "2 or 3?", "chosen": "3", "rejected": "2"}
ROWS = {
    "SFTTrainer": {"prompt": "2 or 3?", "completion": "3"},
    "KTOTrainer": {"prompt": "2 or 3?", "completion": "3", "label": True},
    **dict.fromkeys(("DPOTrainer", "ORPOTrainer", "CPOTrainer", "RewardTrainer"), PAIR),
    **dict.fromkeys(("RLOOTrainer", "DistillationTrainer", "GKDTrainer", "PPOTrainer"), {"prompt": "2 or 3?"}),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def script_of(trainer: str, config: str = "", more: str = "", rows: list[dict] | None = None, before: str = "") -> str:
    """The text of a script that trains when it is imported."""
    rows = rows or [ROWS[trainer]] * 4
    given = {"RLOOTrainer": ", reward_funcs=short", "DistillationTrainer": ', teacher_model="Qwen/Qwen2.5-3B-Instruct"'}
    given["GKDTrainer"] = given["DistillationTrainer"]
    given["PPOTrainer"] = ', reward_model="org/scores", value_model=None'
    return f"""
from datasets import Dataset, load_dataset
{before}
def short(completions, **columns):
    return [-float(len(c)) for c in completions]

data = Dataset.from_list({rows!r})
args = {TRAINERS[trainer].config}("out", max_steps=4, per_device_train_batch_size=4, {config})
trainer = {trainer}(model="{MODEL}", args=args, train_dataset=data{given.get(trainer, "")}{more})
trainer.train()
"""


def ours(folder, trainer: str, **parts):
    """(translation, its config) of a script of a trainer."""
    (folder / "script.py").write_text(script_of(trainer, **parts))
    translation = translate_trl(["script.py"], "ours.yaml")
    (folder / "ours.yaml").write_text(translation.to_text("script.py"))
    return translation, load_config(folder / "ours.yaml") if translation.status != CANNOT_RUN else None


def fields_of(kind) -> dict:
    made = {}
    for field in dataclasses.fields(kind):
        factory = field.default_factory
        made[field.name] = field.default if factory is dataclasses.MISSING else factory()
        if made[field.name] is dataclasses.MISSING:
            made[field.name] = None
    return {name: getattr(value, "value", value) for name, value in made.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trainer", INSTALLED)
def test_table_of_a_trainer_equals_the_installed_class(trainer):
    module = importlib.import_module(INSTALLED[trainer])
    assert dict(TRAINERS[trainer].defaults) == fields_of(getattr(module, TRAINERS[trainer].config))
    cls = getattr(module, trainer)
    signature = inspect.signature(inspect.unwrap(cls.__init__))
    names = tuple(name for name in signature.parameters if name != "self")
    if names != ("args", "kwargs"):  # DistillationTrainer's own signature is behind a warning
        assert names[: len(TRAINERS[trainer].positional)] == TRAINERS[trainer].positional


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_field_of_every_trainer_has_a_rule(trainer):
    run = TrlRun({}, trainer=trainer)
    assert [key for key in run.fields if result_of(key, run.defaults[key], run) is None] == []
    different = {key for key in run.fields if result_of(key, run.defaults[key], run).matters}
    assert different == ({"lmbda", "temperature"} if trainer == "GKDTrainer" else set())


@pytest.mark.parametrize(
    "trainer, algorithm",
    [
        ("RLOOTrainer", "gdpo"), ("SFTTrainer", "sft"), ("DPOTrainer", "dpo"), ("KTOTrainer", "kto"),
        ("ORPOTrainer", "orpo"), ("CPOTrainer", "cpo"), ("RewardTrainer", "reward_model"), ("PPOTrainer", "ppo"),
        ("DistillationTrainer", "distillation"), ("GKDTrainer", "distillation"),
    ],
)  # fmt: skip
def test_a_script_of_each_trainer_becomes_a_config_of_its_algorithm(folder, trainer, algorithm):
    more = "" if trainer != "PPOTrainer" else "total_episodes=8"
    translation, config = ours(folder, trainer, config=more)
    assert config.algorithm.type == algorithm
    assert UNKNOWN not in {line.status for line in translation.lines}
    assert translation.status == (SAME if trainer in ("RLOOTrainer", "RewardTrainer") else DIFFERS)
    sampled = algorithm in ("gdpo", "distillation")
    assert config.gdpo.num_prompts_per_step == (2 if sampled else 4)
    assert config.gdpo.max_num_steps == (2 if trainer == "PPOTrainer" else 4)
    rows = load_rows(config.data.train, load_environments(config.env), "train", 0)
    assert ROWS[trainer].items() <= rows[0].items()
    assert validate(config) is not None


def test_a_translated_script_of_pairs_passes_the_dry_run(folder):
    ours(folder, "DPOTrainer")
    assert cli.main(["train", "--config", "ours.yaml", "--dry-run"]) == 0


CASES = [
    ("DPOTrainer", "beta=0.3, loss_type='ipo'", {"preference.beta": 0.3, "preference.loss_type": "ipo"}, DIFFERS),
    ("DPOTrainer", "loss_type=['sigmoid', 'sft'], loss_weights=[1.0, 0.2]", {"preference.rpo_alpha": 0.2}, DIFFERS),
    ("DPOTrainer", "loss_type=['sigmoid_norm']", {"preference.length_normalize": True}, DIFFERS),
    ("DPOTrainer", "loss_type=['sigmoid', 'hinge']", {}, CANNOT_RUN),
    ("DPOTrainer", "loss_type=['exo_pair']", {}, CANNOT_RUN),
    ("DPOTrainer", "label_smoothing=0.1, sync_ref_model=True", {"preference.label_smoothing": 0.1}, DIFFERS),
    ("DPOTrainer", "gradient_accumulation_steps=4", {"gdpo.num_prompts_per_step": 16}, DIFFERS),
    ("DPOTrainer", "max_length=512", {"policy.max_total_sequence_length": 512, "policy.micro_batch_tokens": 4096},
     DIFFERS),
    ("KTOTrainer", "desirable_weight=1.5", {"preference.desirable_weight": 1.5, "data.train.shuffle": False}, DIFFERS),
    ("KTOTrainer", "train_sampling_strategy='random'", {"data.train.shuffle": True}, DIFFERS),
    ("KTOTrainer", "loss_type='apo_zero_unpaired'", {}, CANNOT_RUN),
    ("CPOTrainer", "loss_type='simpo', simpo_gamma=1.0, cpo_alpha=0.0",
     {"algorithm.type": "simpo", "preference.simpo_gamma": 1.0, "preference.rpo_alpha": 0.0}, DIFFERS),
    ("CPOTrainer", "loss_type='hinge'", {"preference.loss_type": "hinge", "preference.rpo_alpha": 1.0}, DIFFERS),
    ("ORPOTrainer", "beta=0.2", {"preference.beta": 0.2}, DIFFERS),
    ("RewardTrainer", "center_rewards_coefficient=0.01", {"preference.center_rewards_coefficient": 0.01}, SAME),
    ("SFTTrainer", "completion_only_loss=True", {"data.train.train_on": "assistant"}, DIFFERS),
    ("SFTTrainer", "completion_only_loss=False", {"data.train.train_on": "all"}, DIFFERS),
    ("SFTTrainer", "loss_type='dft'", {}, CANNOT_RUN),
    ("SFTTrainer", "max_length=None", {"policy.max_total_sequence_length": 4096}, SAME),
    ("RLOOTrainer", "beta=0.1, num_generations=4", {"gdpo.kl_in_reward": 0.1, "gdpo.num_prompts_per_step": 1}, SAME),
    ("RLOOTrainer", "", {"gdpo.estimator": "rloo", "loss_fn.aggregation": "sequence_sum", "gdpo.kl_in_reward": 0.05},
     SAME),
    ("RLOOTrainer", "normalize_advantages=True", {"gdpo.batch_norm": True, "gdpo.epsilon": 1e-4}, DIFFERS),
    ("RLOOTrainer", "reward_clip_range=(-1, 1)", {}, DIFFERS),
    ("GKDTrainer", "lmbda=1.0, temperature=1.0, max_new_tokens=64", {"policy.generation.max_new_tokens": 64}, DIFFERS),
    ("PPOTrainer", "num_ppo_epochs=2, kl_coef=0.2, cliprange=0.1, vf_coef=0.3, gamma=0.9, lam=0.8, response_length=32",
     {"gdpo.num_iterations": 2, "gdpo.kl_in_reward": 0.2, "loss_fn.ratio_clip_max": 0.1, "ppo.vf_coef": 0.3,
      "ppo.gamma": 0.9, "ppo.lam": 0.8, "policy.generation.max_new_tokens": 32}, DIFFERS),
    ("PPOTrainer", "num_mini_batches=2", {"policy.train_global_batch_size": 2}, DIFFERS),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("trainer, config, wanted, status", CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_field_of_a_trainer_is_translated_or_reported(folder, trainer, config, wanted, status):
    translation, made = ours(folder, trainer, config=config)
    assert translation.status == status, translation.summary()
    for key, value in wanted.items():
        found = made
        for part in key.split("."):
            found = getattr(found, part)
        assert found == value, key


@pytest.mark.parametrize(
    "trainer, more, key",
    [
        ("RewardTrainer", ", peft_config=LoraConfig(r=4)", "peft_config"),
        ("PPOTrainer", ", peft_config=LoraConfig(r=4)", "peft_config"),
        ("DPOTrainer", ', ref_model="org/another"', "ref_model"),
        ("SFTTrainer", ", formatting_func=short", "formatting_func"),
    ],
)
def test_unsupported_options_of_a_trainer_are_refused(folder, trainer, more, key):
    assert key in ours(folder, trainer, more=more)[0].blockers


def test_rows_of_messages_are_trained_whole_by_default(folder):
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    assert ours(folder, "SFTTrainer", rows=[row])[1].data.train.train_on == "all"
    config = ours(folder, "SFTTrainer", rows=[row], config="assistant_only_loss=True")[1]
    assert config.data.train.train_on == "assistant"
    text = script_of("SFTTrainer").replace("train_dataset=data", 'train_dataset=load_dataset("a/b", split="train")')
    (folder / "hub.py").write_text(text)
    assert "data.train.train_on: all" in translate_trl(["hub.py"], "ours.yaml").differences["completion_only_loss"]


def test_a_quantised_model_cannot_run_and_a_dequantised_one_can(folder):
    loaded = f"AutoModelForCausalLM.from_pretrained('{MODEL}', quantization_config=QUANTISED)"
    text = script_of("SFTTrainer").replace(f'model="{MODEL}"', f"model={loaded}")
    for config, blocked in (("BitsAndBytesConfig(load_in_4bit=True)", True), ("Mxfp4Config(dequantize=True)", False)):
        (folder / "script.py").write_text(text.replace("QUANTISED", config))
        assert ("quantization_config" in translate_trl(["script.py"], "ours.yaml").blockers) is blocked


@pytest.mark.parametrize(
    "before, seen",
    [
        ("model = AutoModelForImageTextToText.from_pretrained('a/b')", "AutoModelForImageTextToText"),
        ("def big(example):\n    return example['image'].size[0] > 512\n", "the column 'image'"),
        ("def ask(image):\n    return [{'type': 'image', 'image': image}]\n", "messages with an image"),
    ],
)
def test_a_script_that_reads_images_cannot_run_with_a_text_model(folder, before, seen):
    assert seen in ours(folder, "RLOOTrainer", before=before)[0].blockers["images"]


LOOK = "def ask(image):\n    return [{'type': 'image', 'image': image}]\n"


@pytest.mark.parametrize(
    "trainer, more, train, differences",
    [
        ("RLOOTrainer", "", True, set()),
        ("RLOOTrainer", ", peft_config=LoraConfig(target_modules=['q_proj', 'v_proj'])", False, set()),
        ("DPOTrainer", ", peft_config=LoraConfig(target_modules='all-linear')", False,
         {"peft_config.target_modules", "max_length"}),
        ("SFTTrainer", "", True, {"max_length"}),
    ],
)  # fmt: skip
def test_a_script_that_reads_images_runs_with_a_model_of_images(folder, trainer, more, train, differences, monkeypatch):
    """PEFT's all-linear includes the layers of the tower."""
    monkeypatch.setattr(f"{__name__}.MODEL", "Qwen/Qwen2.5-VL-3B-Instruct")
    translation, config = ours(folder, trainer, more=more, before=LOOK)
    assert translation.blockers == {} and set(translation.differences) == differences
    assert config.policy.vision.train is train
    if "all-linear" in more:
        assert len(config.policy.lora.target_modules) == 7


@pytest.mark.parametrize("model", ["HuggingFaceTB/SmolLM2-135M-Instruct", "unsloth/Qwen3-4B", "anyone/model-of-mine"])
def test_a_hub_name_in_no_table_is_a_question_for_the_dry_run(folder, model):
    (folder / "script.py").write_text(script_of("RLOOTrainer").replace(MODEL, model))
    translation = translate_trl(["script.py"], "ours.yaml")
    assert translation.status == SAME, translation.summary()
    assert (
        f"the family of {model} is unknown until its config.json is read" in translation.questions["policy.model_name"]
    )


def test_a_model_of_a_family_that_is_not_supported_is_refused_by_its_name(folder):
    (folder / "script.py").write_text(script_of("RLOOTrainer").replace(MODEL, "google/gemma-3n-E2B-it"))
    assert "not supported" in translate_trl(["script.py"], "ours.yaml").blockers["model"]


def test_rows_are_those_before_a_script_tokenizes_them(folder):
    before = """
def prepare(rows, tokenizer):
    def tokenize(row):
        return {"input_ids": tokenizer(row["prompt"])["input_ids"], "lengths": 1}
    return rows.map(tokenize)
"""
    text = script_of("PPOTrainer", before=before).replace(
        "train_dataset=data", "train_dataset=prepare(data, tokenizer).filter(lambda row: row['lengths'] <= 512)"
    )
    (folder / "script.py").write_text(text)
    translate_trl(["script.py"], "ours.yaml")
    assert json.loads((folder / "ours_train.jsonl").read_text().splitlines()[0]) == {"prompt": "2 or 3?"}


# -- what the command line would give ---------------------------------------------------------------------------

ARGPARSE = """
import argparse
from trl import GRPOConfig, GRPOTrainer
from datasets import Dataset

def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-id", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--lr", dest="learning_rate", type=float, default=5e-6)
    parser.add_argument("--vllm-mode", choices=["colocate", "server"], default="colocate")
    parser.add_argument("--size", type=int, default=3)
    parser.add_argument("--lora", action="store_true")
    return parser.parse_args()

def short(completions, **columns):
    return [-float(len(c)) for c in completions]

def main():
    args = parse_args()
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": "Play."}] for _ in range(args.size)]})
    peft_config = None
    if args.lora:
        peft_config = LoraConfig(r=4)
    config = GRPOConfig(f"{args.model_id.split('/')[-1]}-run", learning_rate=args.learning_rate, max_steps=2,
                        use_vllm=True, vllm_mode=args.vllm_mode,
                        vllm_server_base_url="http://a" if args.vllm_mode == "server" else None)
    GRPOTrainer(args.model_id, short, config, rows, peft_config=peft_config).train()

if __name__ == "__main__":
    main()
"""


def test_defaults_of_argparse_apply_unless_options_are_given(folder):
    (folder / "script.py").write_text(ARGPARSE)
    content = translate_trl(["script.py"], "ours.yaml").content
    assert content["policy"]["model_name"] == "Qwen/Qwen3-0.6B" and content["run"]["dir"] == "Qwen3-0.6B-run"
    assert content["policy"]["megatron_cfg"]["optimizer"]["lr"] == 5e-6 and "lora" not in content["policy"]
    assert len((folder / "ours_train.jsonl").read_text().splitlines()) == 3
    command = ["config", "from-trl", "script.py", "--out", "given.yaml", "--", "--model-id", "Qwen/Qwen3-8B", "--lora"]
    assert cli.main([*command, "--lr=1e-5", "--size", "5", "--vllm-mode", "server"]) == 0
    config = load_config("given.yaml")
    assert (config.policy.model_name, config.policy.megatron_cfg.optimizer.lr) == ("Qwen/Qwen3-8B", 1e-5)
    assert (config.policy.lora.rank, config.cluster.gpus_per_node) == (4, 2)
    assert len((folder / "given_train.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize("tail", ["", "[0]"])
def test_defaults_of_a_dataclass_equal_those_of_hfargumentparser(folder, tail):
    text = script_of("SFTTrainer").replace(f'"{MODEL}"', "own.model").replace("from datasets", """
from dataclasses import dataclass, field
@dataclass
class Base:
    model: str = "Qwen/Qwen3-0.6B"
@dataclass
class Own(Base):
    lr: float = field(default=3e-5, metadata={"help": "the rate"})
    parts: list = field(default_factory=lambda: ["a", "b"])
parser = HfArgumentParser(Own)
PARSED
from datasets""", 1)  # fmt: skip
    parsed = (
        f"own = parser.parse_args_into_dataclasses(){tail}" if tail else "(own,) = parser.parse_args_into_dataclasses()"
    )
    (folder / "script.py").write_text(text.replace("PARSED", parsed).replace("max_steps=4", "learning_rate=own.lr"))
    content = translate_trl(["script.py"], "ours.yaml").content
    assert content["policy"]["model_name"] == "Qwen/Qwen3-0.6B"
    assert content["policy"]["megatron_cfg"]["optimizer"]["lr"] == 3e-5
    assert translate_trl(["script.py"], "ours.yaml", 1, ["--model", "a/b"]).content["policy"]["model_name"] == "a/b"


@pytest.mark.parametrize("command", COMMANDS)
def test_arguments_without_a_script_are_those_of_the_named_command(folder, command):
    options = ["--model_name_or_path", MODEL, "--dataset_name", "a/b", "--learning_rate", "3e-5", "--bf16", "false"]
    if command in ("grpo", "rloo"):
        options += ["--reward_model_name_or_path", "org/scores", "--num_generations", "4"]
    if command == "distillation":
        options += ["--teacher_model_name_or_path", "Qwen/Qwen2.5-3B-Instruct"]
    translation = translate_trl([command], "ours.yaml", 1, options)
    assert translation.status != CANNOT_RUN, translation.summary()
    assert translation.content["policy"]["megatron_cfg"]["optimizer"]["lr"] == 3e-5
    assert translation.content["policy"]["precision"] == "float32"
    (folder / "args.yaml").write_text("learning_rate: 1.0e-4\n")
    both = translate_trl([command, "args.yaml"], "ours.yaml", 1, options)
    assert both.content == translation.content  # options win over a file


@pytest.mark.parametrize(
    "sources, options, message",
    [
        (["dpo"], ["--learning_rat", "1"], "learning_rat: not an option of DPOConfig or `trl dpo`; did you mean"),
        (["script.py"], ["--learning_rat", "1"], "learning_rat: not an argument of SFTConfig or script.py; did you"),
        (["script.py"], ["1"], "1: expected a script option (--NAME VALUE)"),
        (["dpo", "script.py"], [], "dpo: only allowed with argument files; script.py already defines its trainer"),
        (["sft"], ["--num_generations", "4"], "num_generations: not an option of SFTConfig or `trl sft`"),
    ],
)
def test_unknown_option_is_refused_in_one_line(folder, sources, options, message):
    (folder / "script.py").write_text(script_of("SFTTrainer"))
    with pytest.raises(ConfigError) as error:
        translate_trl(sources, "ours.yaml", 1, options)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "x = 'a' * 10**12",
        "x = ['a'] * 10**12",
        "x = ['a' for _ in range(10**12)]",
        "a = 'aaaaaaaaaa'\n" + "a = a + a\n" * 60 + "x = a",
        "a = 10**9\n" + "a = a * a\n" * 40 + "x = a",
    ],
    ids=["text", "list", "comprehension", "doubling", "squares"],
)
def test_a_value_that_would_not_fit_is_left_to_the_run(folder, code):
    text = script_of("SFTTrainer", config="run_name=x").replace("data =", f"{code}\ndata =")
    (folder / "script.py").write_text(text)
    try:
        found = translate_trl(["script.py"], "ours.yaml")
    except ConfigError as error:
        assert "too deeply" in str(error)
    else:
        assert "only known when the script runs" in next(line.text for line in found.lines if line.key == "run_name")
