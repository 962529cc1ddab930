"""A reward model's score is transformers' own, of the text that it was trained on; a failure is never a score."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from environment_samples import trajectory
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast, Qwen2Config

from gdpo_nemo.config.schema import DatasetConfig
from gdpo_nemo.data.examples import ExampleSource
from gdpo_nemo.data.records import Outcome
from gdpo_nemo.environments.execution.pool import EnvironmentPool
from gdpo_nemo.environments.registry import load_environment
from gdpo_nemo.environments.tasks.reward_functions import Functions
from gdpo_nemo.environments.tasks.reward_model import Scorer
from gdpo_nemo.utils.errors import ConfigError, RunError

TEMPLATE = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% if m.role == 'assistant' %}<end>|{% endif %}"
TEMPLATE += "{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
CHARACTERS = "0123456789=[]aubc|"


def tokenizer(chat: bool) -> PreTrainedTokenizerFast:
    vocabulary = {token: number for number, token in enumerate(["<end>", "<unk>", *CHARACTERS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    # Padding is the end token, as it is for many published models.
    found = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="<end>", pad_token="<end>")
    found.chat_template = TEMPLATE if chat else None
    return found


def write(folder, chat=True, **fields):
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=24, **{"num_labels": 1, **fields},
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    tokenizer(chat).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    return write(tmp_path_factory.mktemp("chatty"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write(tmp_path_factory.mktemp("plain"), chat=False)


def expected(folder, *texts):
    """Scores of the written-out texts, one at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    model.config.pad_token_id = None
    with torch.no_grad():
        ids = [tokenizer(False)(text, add_special_tokens=False, return_tensors="pt")["input_ids"] for text in texts]
        return [model(row).logits.item() for row in ids]


def asked(content):
    return [{"role": "user", "content": content}]


def test_scores_are_those_of_transformers_of_the_chat_templates_text(chatty):
    completions = [[{"role": "assistant", "content": "b"}], [{"role": "assistant", "content": "cab12"}]]
    texts = ["[u]1=[a]b<end>|", "[u]345=[a]cab12<end>|"]
    for size in (1, 2):
        found = Scorer(str(chatty), batch_size=size)([asked("1="), asked("345=")], completions)
        assert found == pytest.approx(expected(chatty, *texts), rel=1e-5) and abs(found[0] - found[1]) > 1e-3
    assert Scorer(str(chatty))(["1="], ["b"]) == pytest.approx(expected(chatty, texts[0]), rel=1e-5)


def test_text_without_a_template_ends_with_the_end_token(plain):
    found = Scorer(str(plain))(["1=", "2="], ["b", "cc"])
    assert found == pytest.approx(expected(plain, "1=b<end>", "2=cc<end>"), rel=1e-5)
    with pytest.raises(RunError, match="has no chat template, and the prompts are chat messages"):
        Scorer(str(plain))([asked("1=")], [[{"role": "assistant", "content": "b"}]])


@pytest.mark.parametrize("chat", [True, False])
def test_the_tokens_that_are_scored_are_those_that_a_reward_model_is_trained_on(chat, chatty, plain):
    scorer = Scorer(str(chatty if chat else plain))
    scorer.load()
    rows = [{"id": "0", "prompt": "12=", "chosen": "b", "rejected": "cab"}]
    source = ExampleSource(
        DatasetConfig(path="rows"), {}, tokenizer(chat), split="train", seed=0, max_prompt_tokens=30, kind="pairs",
        keep_suffix=True, rows=rows,
    )  # fmt: skip
    (prompt,) = source.head(1)
    for answer, text in zip(prompt.fields["answers"], ("b", "cab")):
        assert np.concatenate((prompt.token_ids, answer.token_ids)).tolist() == scorer._tokens("12=", text)


def test_sample_that_cannot_be_scored_fails_without_a_reward(chatty):
    environment = load_environment("judge", {"plugin": "reward_model", "model": str(chatty), "component": "liked"})
    assert environment.reward_names == ("liked",)
    fine, long = environment.verify([trajectory("b"), trajectory("b" * 40)])
    assert fine.outcome is Outcome.OK and set(fine.rewards) == {"liked"}
    assert long.outcome is Outcome.ENV_FAILED and long.rewards == {} and "the reward model's limit of 24" in long.detail
    environment._scorer._model.score.weight.data.fill_(float("nan"))
    (broken,) = environment.verify([trajectory("b")])
    assert broken.outcome is Outcome.ENV_FAILED and broken.rewards == {} and broken.detail.endswith("score is nan")


@pytest.mark.slow
def test_it_is_a_reward_beside_others_and_loads_before_the_time_limit_runs(chatty):
    functions = {
        "liked": {"function": "reward_model", "model": str(chatty)},
        "form": {"function": "regex", "pattern": "b+"},
    }
    made = Functions({"functions": functions})
    made.prepare()
    assert made._functions[0].call._model is not None
    with EnvironmentPool({"mine": {"plugin": "functions", "functions": functions}}, 1, 60.0) as pool:
        verdicts = pool.verify([trajectory("bb", environment="mine"), trajectory("c", environment="mine")])
    assert [v.rewards["form"] for v in verdicts] == [1.0, 0.0]
    alone = Scorer(str(chatty))([t.prompt.text for t in [trajectory("bb")]], ["bb"])
    assert verdicts[0].rewards["liked"] == pytest.approx(alone[0], rel=1e-5)


REFUSED = [
    (dict(model=""), "model: must be a folder"),
    (dict(model="results/none/such"), "model: folder not found"),
    (dict(device="gpu"), "device: must be cpu or a GPU such as cuda:7"),
    (dict(batch_size=0), "batch_size: must be a whole number of at least 1"),
    (dict(max_tokens=2.5), "max_tokens: must be a whole number"),
    (dict(num_threads=float("nan")), "num_threads"),
    (dict(precision="float16"), "precision: must be one of float32, bfloat16, not 'float16'"),
    (dict(models="x"), "unknown option 'models'"),
]


@pytest.mark.parametrize("options, sentence", REFUSED, ids=[next(iter(case[0])) for case in REFUSED])
def test_options_that_cannot_be_used_are_refused_by_name(chatty, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_environment("judge", {"plugin": "reward_model", "model": str(chatty), **options})


def test_folder_that_is_not_a_reward_model_is_refused_before_loading(tmp_path):
    two = write(tmp_path / "two", num_labels=2)
    with pytest.raises(ConfigError, match="expected one label, got 2"):
        Scorer(str(two))
    content = json.loads((two / "config.json").read_text())
    (two / "config.json").write_text(json.dumps({**content, "architectures": ["Qwen2ForCausalLM"]}))
    with pytest.raises(ConfigError, match="is not a sequence classifier .architecture Qwen2ForCausalLM"):
        Scorer(str(two))
