"""The models that examples/make_tiny_model.py makes: their tokenizers, their warm-up texts, their files."""

import hashlib
import importlib.util
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from gdpo_nemo.config.load import load_config
from gdpo_nemo.environments.tasks.digit_sort import is_held_out
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.source import REPOSITORY

SCRIPT = REPOSITORY / "examples" / "make_tiny_model.py"
_spec = importlib.util.spec_from_file_location("make_tiny_model", SCRIPT)
makers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(makers)
CHARACTERS = makers.character_tokenizer()
BYTES = makers.byte_tokenizer()


@pytest.fixture(scope="module", params=["built", "read"])
def tokenizers(request, tmp_path_factory):
    """The character and the byte tokenizer, as built and as transformers reads them from a model folder."""
    if request.param == "built":
        return CHARACTERS, BYTES
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, tokenizer in (("characters", CHARACTERS), ("bytes", BYTES)):
        fields = {"model_type": "qwen2", **SMALL, "vocab_size": len(tokenizer)}
        makers._write_random(folder / name, tokenizer, 0, fields)
    return tuple(AutoTokenizer.from_pretrained(folder / name) for name in ("characters", "bytes"))


SMALL = dict(
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    intermediate_size=8,
    max_position_embeddings=8,
)
FORMS = {
    "well-formed": r"<t>(\.*)</t><a>(\d{5})</a>",
    "no </t>": r"<t>(\.*)<a>(\d{5})</a>",
    "no <t>": r"(\.*)</t><a>(\d{5})</a>",
    "no <a>": r"<t>(\.*)</t>(\d{5})",
    "no </a>": r"<t>(\.*)</t><a>(\d{5})",
    "text behind </a>": r"<t>(\.*)</t><a>(\d{5})</a>\.\.",
}


def fresh_process(code, *arguments, **options):
    """A Python process like the one in which the trainer calls a factory; it can import the repository."""
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{SCRIPT.parent}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, **options)


def texts(count, seed=0):
    return list(itertools.islice(makers.warm_up_texts(seed), count))


def parsed(completion):
    """(form, body, answer) of a warm-up completion."""
    ((form, match),) = [(name, m) for name, pattern in FORMS.items() if (m := re.fullmatch(pattern, completion))]
    return form, *match.groups()


# -- tokenizers -----------------------------------------------------------------------------------------------------


@given(st.text(makers.ALPHABET, max_size=60))
@settings(deadline=None)
def test_every_text_over_the_alphabet_is_one_token_per_character_and_comes_back(tokenizers, text):
    characters, _ = tokenizers
    ids = characters(text)["input_ids"]
    assert len(ids) == len(text) and not {makers.PAD, makers.EOS} & set(ids)
    assert characters.decode(ids) == text
    assert characters.decode([*ids, makers.EOS], skip_special_tokens=True) == text


def test_training_rows_hold_the_tokens_that_the_tokenizer_gives(tokenizers):
    characters, _ = tokenizers
    prompt, completion = texts(1)[0]
    (row,) = makers._sequences([next(makers._character_rows(0))])
    assert row.prompt_ids.tolist() == characters(prompt)["input_ids"]
    assert row.completion_ids.tolist() == [*characters(completion)["input_ids"], characters.eos_token_id]
    assert (characters.pad_token_id, characters.eos_token_id, len(characters)) == (makers.PAD, makers.EOS, 21)


def test_games_of_rounds_learn_only_the_answers_and_fit_their_config(tokenizers):
    characters, _ = tokenizers
    config = load_config("configs/gdpo_rounds_cpu.yaml").policy
    for row in itertools.islice(makers._round_rows(0), 50):
        written = np.array([False] * len(row.prompt) + row.written)
        ids = np.array(row.prompt + row.completion)
        assert len(ids) <= config.max_total_sequence_length
        starts = np.flatnonzero(np.diff(written.astype(int)) == 1) + 1
        answers = [ids[start:end] for start, end in zip(starts, [*(starts[1:] - 6), None])]
        assert len(answers) == makers.ROUNDS and written.sum() == sum(map(len, answers))
        assert all(a[-1] == makers.EOS and len(a) <= config.generation.max_new_tokens for a in answers)
        questions = [characters.decode(ids[start - 6 : start]) for start in starts]
        assert all(q[:5].isdigit() and q[5] == "=" and not is_held_out(q[:5]) for q in questions)
        (sequence,) = makers._sequences([row])
        assert sequence.weight == pytest.approx(1 / written.sum())


def test_look_ups_are_conversations_of_the_code_book_that_learn_only_the_replies():
    tokenizer = makers.digit_chat_tokenizer()
    assert len(tokenizer) == makers.MODEL_CONFIGS["make_digit_chat_model"]["vocab_size"]
    call = f"{re.escape(makers.CALL[0])}[0-9]{{2}}{re.escape(makers.CALL[1])}<eos>"
    calls = set()
    for row in itertools.islice(makers._chat_rows(0, tokenizer), 1, 100, 2):
        text = tokenizer.decode(row.prompt + row.completion)
        talk = re.fullmatch(rf"\+[0-9]{{2}}=((?:{call}>[0-9]{{3}}=)*)(<a>[0-9]{{3}}</a>|[0-9]{{3}})<eos>", text)
        calls.add(talk[1].count("<tool_call>"))
        replies = tokenizer.decode([token for token, kept in zip(row.completion, row.written) if kept])
        assert replies == re.sub(r">[0-9]{3}=", "", talk[1]) + f"{talk[2]}<eos>"
    assert calls == {0, 1, 2}
    contents = {"user": "+47=", "assistant": None, "tool": "282"}
    messages = [{"role": role, "content": content} for role, content in contents.items()]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "+47=<eos>>282="


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60).filter(lambda text: "<|" not in text))
@settings(deadline=None)
def test_any_text_is_one_token_per_byte_and_comes_back(tokenizers, text):
    _, bytewise = tokenizers
    text = unicodedata.normalize("NFC", text)
    ids = bytewise(text)["input_ids"]
    assert len(ids) == len(text.encode()) and bytewise.decode(ids) == text


def test_chat_opens_and_closes_every_turn_with_a_special_token(tokenizers):
    _, bytewise = tokenizers
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    text = bytewise.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|start|>system\nBe brief.<|end|>\n<|start|>user\n2+2?<|end|>\n<|start|>assistant\n"
    ids = bytewise(text)["input_ids"]
    assert ids.count(bytewise.convert_tokens_to_ids("<|start|>")) == 3 and ids.count(bytewise.eos_token_id) == 2


# -- warm-up texts --------------------------------------------------------------------------------------------------


def test_warm_up_never_shows_a_held_out_prompt():
    prompts = [prompt for prompt, _ in texts(20_000)]
    assert all(re.fullmatch(r"\d{5}=", prompt) and not is_held_out(prompt[:5]) for prompt in prompts)


def test_warm_up_has_every_form_defect_and_body_length_in_the_measured_shares():
    rows = [(prompt[:5], *parsed(completion)) for prompt, completion in texts(20_000)]
    share = {form: sum(row[1] == form for row in rows) / len(rows) for form in FORMS}
    assert share.pop("well-formed") == pytest.approx(0.4, abs=0.015)
    assert list(share.values()) == pytest.approx([0.12] * 5, abs=0.01)
    assert sum(len(body) <= 4 for _, _, body, _ in rows) / len(rows) == pytest.approx(0.4, abs=0.015)
    assert {len(body) for _, _, body, _ in rows} == set(range(15))
    right = sum(answer == "".join(sorted(digits)) for digits, _, _, answer in rows) / len(rows)
    assert right == pytest.approx(0.42, abs=0.02)  # 0.40, and "wrong" answers that happen to be right
    assert all(set(answer) <= set(digits) for digits, _, _, answer in rows)


def test_warm_up_fits_the_completion_length_of_the_demo_and_reaches_it():
    assert max(len(completion) + 1 for _, completion in texts(5_000)) == 36


def test_warm_up_texts_depend_on_the_seed_only():
    assert texts(50, seed=3) == texts(50, seed=3) != texts(50, seed=4)


# -- files ----------------------------------------------------------------------------------------------------------

MAKE_THREE = """
import sys
from make_tiny_model import make_tiny_model
for folder in sys.argv[1:3]:
    make_tiny_model(folder, seed=5, steps=3)
make_tiny_model(sys.argv[3], 0)
"""


@pytest.fixture(scope="module")
def made_in_a_process(tmp_path_factory):
    """Two folders made from one seed, one after the other in one process, which is killed while it makes a third; and
    what it printed."""
    root, third = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("killed") / "model"
    process = fresh_process(MAKE_THREE, root / "a", root / "b", third, stdout=subprocess.PIPE, text=True)
    printed = list(itertools.takewhile(lambda line: "1/200" not in line, process.stdout))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=240)
    assert process.returncode == -signal.SIGKILL, printed
    return root / "a", root / "b", third, "".join(printed)


@pytest.fixture
def warmed_up(made_in_a_process):
    """The two folders of one seed, and what was printed."""
    first, second, _, printed = made_in_a_process
    return first, second, printed


def digest(folder):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.mark.slow
def test_the_same_seed_gives_the_same_files_bit_for_bit(warmed_up):
    first, second, _ = warmed_up
    assert digest(first) == digest(second)
    assert sorted(p.name for p in first.parent.iterdir()) == ["a", "b"]


@pytest.mark.slow
def test_warm_up_lowers_and_reports_the_loss(warmed_up):
    assert "warm-up on the device cpu\n" in warmed_up[2] or torch.cuda.is_available()
    lines = re.findall(r"warm-up step +(\d+)/3 +loss ([\d.]+)", warmed_up[2])
    assert [step for step, _ in lines] == ["1", "3", "1", "3"]
    losses = [float(loss) for _, loss in lines]
    assert losses[0] == pytest.approx(3.04, abs=0.15)  # log 21, as a model that knows nothing has it
    assert losses[1] < losses[0] and losses[:2] == losses[2:]


@pytest.mark.slow
def test_the_warmed_up_model_is_the_architecture_that_was_announced(warmed_up):
    model = AutoModelForCausalLM.from_pretrained(warmed_up[0])
    tokenizer = AutoTokenizer.from_pretrained(warmed_up[0])
    assert sum(p.numel() for p in model.parameters()) == 1_053_952
    assert model.config.model_type == "qwen2" and model.config.tie_word_embeddings
    ends = {(c.eos_token_id, c.pad_token_id) for c in (model.config, model.generation_config, tokenizer)}
    assert ends == {(makers.EOS, makers.PAD)}
    written = model.generate(**tokenizer("39172=", return_tensors="pt"), max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(written[0]).startswith("39172=")


@pytest.mark.slow
def test_warm_up_moves_every_matrix_away_from_its_start(warmed_up, tmp_path):
    makers._write_random(tmp_path, CHARACTERS, 5, makers.MODEL_CONFIGS["make_tiny_model"])
    before, after = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (tmp_path, warmed_up[0]))
    assert before.keys() == after.keys()
    assert not [name for name in before if before[name].dim() == 2 and torch.equal(before[name], after[name])]


def test_the_random_model_loads_with_its_chat_template_and_depends_on_the_seed(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        makers.make_random_model(str(tmp_path / name), seed)
    assert digest(tmp_path / "a") == digest(tmp_path / "b") != digest(tmp_path / "c")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert model.config.max_position_embeddings == 2048 and model.config.vocab_size == len(tokenizer)
    assert tokenizer.chat_template == makers.CHAT_TEMPLATE
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_folder_with_files_is_refused_and_not_changed(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="already exists; remove it"):
        makers.make_random_model(tmp_path / "model", 0)
    assert digest(tmp_path / "model").keys() == {"notes.txt"}


def test_a_failed_making_leaves_nothing(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(makers.Qwen2Tokenizer, "save_pretrained", full)
    with pytest.raises(OSError, match="No space"):
        makers.make_random_model(tmp_path / "models" / "model", 0)
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.slow
def test_a_killed_making_leaves_no_model_under_the_name(made_in_a_process):
    folder = made_in_a_process[2]
    assert not folder.exists()
    makers.make_random_model(folder, 0)
    assert (folder / "model.safetensors").exists()


def test_the_command_line_makes_the_model_and_reports_a_taken_folder_in_one_line(tmp_path, capfd):
    arguments = [str(tmp_path / "model"), "--random", "--seed", "3"]
    assert makers.main(arguments) == 0
    makers.make_random_model(str(tmp_path / "same"), 3)
    assert digest(tmp_path / "model") == digest(tmp_path / "same")
    capfd.readouterr()
    assert makers.main(arguments) == 2
    printed = capfd.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and "already exists" in printed.err


@pytest.mark.parametrize("function", sorted(makers.MODEL_CONFIGS))
def test_every_factory_writes_the_configuration_that_it_promises(function, tmp_path, monkeypatch):
    monkeypatch.setattr(
        makers, "_warm_up", lambda start, result, *rest, **how: shutil.copytree(start, result, dirs_exist_ok=True)
    )
    getattr(makers, function)(str(tmp_path / "model"), 0)
    written = AutoConfig.from_pretrained(tmp_path / "model")
    promised = makers.MODEL_CONFIGS[function]
    assert _matches(written, promised)
    assert written.get_text_config().vocab_size == len(AutoTokenizer.from_pretrained(tmp_path / "model"))


def _matches(config, promised):
    """Return whether a config and the configs in it have the values of ``promised``."""
    pairs = [(getattr(config, key), value) for key, value in promised.items()]
    return all(_matches(found, value) if hasattr(found, "to_dict") else found == value for found, value in pairs)


def test_the_small_model_is_the_demos_with_another_shape(tmp_path, monkeypatch):
    asked = {}

    def no_warm_up(start, result, seed, steps, rows, **_):
        asked["steps"] = steps
        shutil.copytree(start, result, dirs_exist_ok=True)

    monkeypatch.setattr(makers, "_warm_up", no_warm_up)
    makers.make_small_model(str(tmp_path / "small"), 0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert sum(p.numel() for p in model.parameters()) == 224_256 and asked == {"steps": 250}


def test_routers_of_the_near_tie_model_are_frozen_and_choose_others_in_bfloat16(tmp_path, monkeypatch):
    asked = {}

    def no_warm_up(start, result, *_, **how):
        asked.update(how)
        shutil.copytree(start, result, dirs_exist_ok=True)

    monkeypatch.setattr(makers, "_warm_up", no_warm_up)
    makers.make_near_tie_model(str(tmp_path / "model"), 0)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    routers = [weight for name, weight in weights.items() if name.endswith("mlp.gate.weight")]
    hidden = torch.randn(1000, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    for router in routers:
        assert torch.equal(router, router.bfloat16().float())
        exact = (hidden.float() @ router.T).argmax(-1)
        rounded = (hidden @ router.bfloat16().T).argmax(-1)
        assert 0.2 < (exact != rounded).float().mean() < 0.7
    assert len(routers) == 4 and asked == {"freeze_routers": True}
