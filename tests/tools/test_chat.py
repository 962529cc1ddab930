"""What ``gdpo-nemo chat`` makes of a SOURCE, a row and a line, without an engine; with one: tests/end_to_end."""

from __future__ import annotations

import json
import re
import shlex
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import bad_input
import numpy as np
import pytest
import torch
from image_samples import FIRST, SECOND

from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.sections import ImagesConfig
from gdpo_nemo.data.records import Outcome, Prompt, Trajectory
from gdpo_nemo.data.tokenizer import load_tokenizer
from gdpo_nemo.generation.requests import Completion, SampleRequest
from gdpo_nemo.tools.chat import command, screen as chat_screen
from gdpo_nemo.tools.chat.screen import Answer, JsonLines, Plain, visible
from gdpo_nemo.tools.chat.speakers import (
    Question,
    Reply,
    RunRows,
    Speaker,
    on_this_machine,
    read_source,
    rewards_line,
    sampling_of,
)
from gdpo_nemo.utils.errors import ConfigError


@pytest.fixture
def world(tmp_path) -> Path:
    return bad_input.make_world(tmp_path / "w")


def test_a_model_outside_of_a_run_brings_its_own_precision_and_sampling(world):
    model = world / "model"
    (model / "config.json").write_text(json.dumps({**bad_input.MODEL, "dtype": "float32"}))
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.9, "top_k": 20}))
    source = read_source(model, None, None, ["policy.generation.max_new_tokens=33"])
    assert (source.config.policy.precision, source.config.policy.max_total_sequence_length) == ("float32", 2048)
    sampling = sampling_of(source.config.policy, None, None)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens) == (0.6, 0.9, 20, 33)
    assert not source.of_a_run and not source.chat
    (model / "config.json").write_text(json.dumps({**bad_input.MODEL, "torch_dtype": "bfloat16"}))
    assert read_source(model, None, None, []).config.policy.precision == "bfloat16"


def test_model_of_a_run_is_sampled_with_the_settings_of_the_run_by_default(world):
    source = read_source(world / "model", str(world / "good.yaml"), None, ["policy.generation.temperature=0.7"])
    assert source.of_a_run and source.model == world / "model"
    assert (sampling_of(source.config.policy, None, None).temperature, sampling_of(source.config.policy, 0.0, 5)) == (
        0.7,
        sampling_of(source.config.policy, 0.0, 5),
    )
    assert sampling_of(source.config.policy, 0.0, 5).temperature == 0.0
    assert sampling_of(source.config.policy, 0.0, 5).max_new_tokens == 5


@pytest.mark.parametrize("gpus, wanted, engines_on", [(0, 8, 0), (4, 8, 4), (4, 0, 0)])
def test_engines_take_the_gpus_that_are_there_and_else_the_cpu(world, monkeypatch, gpus, wanted, engines_on):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr("gdpo_nemo.tools.chat.speakers.require_libraries", lambda config: None)
    overrides = [f"cluster.gpus_per_node={wanted}", "policy.generation.vllm_cfg.tensor_parallel_size=2"]
    sources = [read_source(world / "model", str(world / "good.yaml"), None, overrides) for _ in range(2)]
    on_this_machine(sources)
    for source in sources:
        assert source.config.cluster.gpus_per_node == engines_on and source.config.policy.generation.engines == 1
        assert source.config.policy.generation.vllm_cfg.tensor_parallel_size == (2 if engines_on else 1)


def test_two_engines_without_gpus_for_both_are_refused(world, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("gdpo_nemo.tools.chat.speakers.require_libraries", lambda config: None)
    sources = [
        read_source(world / "model", str(world / "good.yaml"), None, ["cluster.gpus_per_node=1"]) for _ in range(2)
    ]
    on_this_machine(sources[:1])
    with pytest.raises(ConfigError, match="--against: the two engines require 2 GPUs, found 1"):
        on_this_machine(sources)


@pytest.fixture
def rows(world):
    found = RunRows(load_config(world / "good.yaml"))
    yield found
    found.close()


def test_rows_are_those_of_the_run_by_their_number_and_one_after_the_other(rows):
    assert [(row.split, row.number, row.question) for row in (rows.row(), rows.row(), rows.row("train", 3))] == [
        ("validation", 0, "0+0?"),
        ("validation", 1, "1+1?"),
        ("train", 3, "3+3?"),
    ]
    assert rows.row("train").number == 0 and rows.row(None, 2).number == 2
    with pytest.raises(ConfigError, match="data.validation: row 4 does not exist; rows are 0 to 3"):
        rows.row(None, 4)
    with pytest.raises(ConfigError, match="--config: required for rows"):
        RunRows(None).row()


def test_a_row_of_raw_text_is_asked_as_its_first_anchor_and_shown_as_text(world):
    (world / "texts.jsonl").write_text(json.dumps({"text": "a " * 40}) + "\n")
    dataset = f"{{path: {world / 'texts.jsonl'}, strided: {{stride: 2, context_length: 3, generate_max_len: 16}}}}"
    config = load_config(world / "good.yaml", [f"data.{split}={dataset}" for split in ("train", "validation")])
    found = RunRows(config)
    row = found.row()
    assert row.question.startswith("a a a")
    prompt = found.prompt(row, load_tokenizer(config.policy, world / "model"))
    assert (prompt.id, len(prompt.token_ids), len(prompt.answer_ids)) == ("validation/0@3", 3, 16)
    found.close()


@pytest.mark.slow
def test_a_reply_to_a_row_has_the_verdict_of_the_runs_environment(rows):
    prompt = Prompt("validation/2", np.array([1], np.int32), "2+2?", "gsm8k", rows.row(None, 2).content)
    right = rows.verdict(prompt, np.array([1, 2], np.int32), "so <answer>4</answer>", "stop")
    wrong = rows.verdict(prompt, np.array([1, 2], np.int32), "so <answer>5</answer>", "length")
    assert right.rewards["correctness"] == 1.0 and wrong.rewards["correctness"] == 0.0
    assert (right.outcome, wrong.outcome) == (Outcome.OK, Outcome.TRUNCATED)
    assert rewards_line(right, rows.weighted).startswith("correctness 1  format ")


def test_an_environment_of_episodes_judges_no_single_reply(rows, monkeypatch):
    monkeypatch.setattr(type(rows.environments["gsm8k"]), "episode", lambda self: None)
    prompt = Prompt("validation/0", np.array([1], np.int32), "0+0?", "gsm8k", rows.row(None, 0).content)
    assert rows.verdict(prompt, np.array([1], np.int32), "", "stop") is None
    answer = Answer(reply("x"), None, [], True)
    assert answer.remarks == [chat_screen.NO_REWARDS]


def test_verdict_is_shown_by_name_and_a_failure_is_not_a_reward():
    prompt = Prompt("p", np.array([1], np.int32), "", "e")
    judged = Trajectory(prompt, 0, np.array([1], np.int32), np.zeros(1, np.float32), 0, "", "stop")
    judged.rewards = {"extra": 0.25, "brief": None, "right": 1.0}
    assert rewards_line(judged, ["right", "brief"]) == "right 1  brief -  extra 0.25"
    judged.outcome, judged.detail = Outcome.ENV_FAILED, "it took too long"
    assert rewards_line(judged, []) == "no rewards because the environment failed: it took too long"


class Letters:
    """A tokenizer of code points, of which 65,533 is half a character."""

    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids))


class Speaking:
    """A model whose engine does what the test says."""

    name = "m"
    tokenizer = Letters()

    def __init__(self):
        self.answer: Future[Completion] = Future()
        self.kept: list[list[int]] = []
        self.dialogue = SimpleNamespace(add=lambda asked, tokens: self.kept.append(tokens.tolist()))

    def begin(self, request, heard):
        self.heard = heard
        return self.answer

    def says(self, text: str, reason: str = "stop") -> None:
        ids = np.array([ord(c) for c in text], np.int32)
        self.answer.set_result(Completion(ids, np.zeros(len(ids), np.float32), reason))


def begun(speaker: Speaking) -> Reply:
    return Reply(speaker, Question("?", SampleRequest(np.array([1], np.int32), 0), 0))


def reply(text: str, reason: str = "stop") -> Reply:
    speaker = Speaking()
    found = begun(speaker)
    speaker.says(text, reason)
    return found


class Looking(Speaking):
    """A model that reads images, and replies at once."""

    limits = ImagesConfig()
    check_reads_images = Speaker.check_reads_images
    images = conversation = SimpleNamespace(chat=True)
    fleet = SimpleNamespace(take_events=list)

    def __init__(self):
        super().__init__()
        self.asked = []
        self.dialogue.reset = lambda: None

    def question(self, asked, seed):
        self.asked.append(asked)
        return Question(asked, SampleRequest(np.array([1], np.int32), seed), 0)

    def ask(self, question):
        self.answer = Future()
        self.says("yes")
        return Reply(self, question)


def test_images_belong_to_the_next_question_only(tmp_path, capsys):
    (tmp_path / "a picture.png").write_bytes(FIRST.data)
    (tmp_path / "b.jpg").write_bytes(SECOND.data)
    speakers = [Looking(), Looking()]
    chat = command.Chat(speakers, RunRows(None), JsonLines(), 0)
    chat.answer(iter([f"/image {tmp_path}/a picture.png\n", f"/image {tmp_path}/b.jpg", "what?", "why?"]))
    chat.answer(iter([f"/image {tmp_path}/b.jpg", "/reset", "how?"]))
    shown = capsys.readouterr()
    labels = [f"[image 64×48 {FIRST.sha256[:4]}…]", f"[image 32×200 {SECOND.sha256[:4]}…]"]
    assert [json.loads(line)["prompt"] for line in shown.out.splitlines()] == [
        " ".join([*labels, "what?"]),
        "why?",
        "how?",
    ]
    assert shown.err.splitlines()[0] == f"{labels[0]} is part of the next question"
    for speaker in speakers:
        first, *later = speaker.asked
        *images, text = first["content"]
        assert [part["image"] for part in images] == [FIRST, SECOND] and text == {"type": "text", "text": "what?"}
        assert later == ["why?", "how?"]


def test_image_that_cannot_be_read_is_named_in_one_line(tmp_path, monkeypatch):
    chat = command.Chat([Looking()], RunRows(None), JsonLines(), 0)
    (tmp_path / "text.png").write_text("no image")
    monkeypatch.chdir(tmp_path)
    for path, problem in (
        ("", "expected /image PATH"),
        ("gone.png", "gone.png cannot be read (No such file"),
        (".", ". cannot be read (Is a directory"),
        ("text.png", "text.png is not an image"),
    ):
        with pytest.raises(ConfigError, match=f"^/image: {re.escape(problem)}"):
            chat.answer(iter([f"/image {path}"]))
    monkeypatch.setattr(Looking, "images", None)
    with pytest.raises(ConfigError, match="^/image: m has no vision tower that reads images"):
        chat.answer(iter(["/image text.png"]))


def test_half_a_character_is_not_shown_before_its_other_half():
    speaker = Speaking()
    found = begun(speaker)
    speaker.heard([97, 0xFFFD])
    assert found.text == "a" and not found.done
    speaker.says("a\u00e9")
    assert (found.text, found.finish_reason) == ("a\u00e9", "stop")


def test_stopped_reply_is_its_partial_text_and_stays_in_the_conversation():
    speaker = Speaking()
    found = begun(speaker)
    speaker.heard([97, 98])
    found.stop()
    speaker.heard([97, 98, 99])
    found.keep()
    assert (found.text, found.finish_reason, found.done, speaker.kept) == ("ab", "stopped", True, [[97, 98]])
    silent = begun(Speaking())
    silent.stop()
    silent.keep()
    assert silent.speaker.kept == [] and Answer(silent, None, [], True).remarks == ["(stopped)"]


def test_a_reply_that_was_done_before_it_was_stopped_is_whole():
    found = reply("abc")
    found.stop()
    assert (found.text, found.finish_reason) == ("abc", "stop")


def test_model_output_cannot_control_the_terminal():
    assert visible("a\x1b[2Jb\r\x07\n\tc\u009b") == "a\ufffd[2Jb\ufffd\ufffd\n\tc\ufffd"


def test_a_pipe_gets_text_with_remarks_apart_or_an_object_a_prompt(capsys, rows):
    row = rows.row(None, 1)
    answers = [Answer(reply("yes"), None, [], False), Answer(reply("no", "length"), None, [], False)]
    plain = Plain()
    plain.asked("1+1?", row)
    plain.show(answers)
    plain.show(answers[:1])
    cut = "# (truncated by --max-new-tokens or by the context length)"
    assert capsys.readouterr().out == f"# row 1 of validation: 1+1?\n# m\nyes\n# m\nno\n{cut}\nyes\n"
    objects = JsonLines()
    objects.asked("1+1?", row)
    objects.show(answers[:1])
    record = json.loads(capsys.readouterr().out)
    assert record["replies"] == [{"model": "m", "text": "yes", "tokens": 3, "finish_reason": "stop"}]
    assert (record["prompt"], record["split"], record["row"], record["id"]) == ("1+1?", "validation", 1, "validation/1")


@pytest.mark.parametrize("wide", [True, False])
def test_wide_terminal_shows_two_replies_in_columns(monkeypatch, capsys, wide):
    monkeypatch.setenv("COLUMNS", "120" if wide else "60")
    screen = chat_screen.Terminal()
    replies = [reply("left side"), reply("right side")]
    screen.follow(replies, chat_screen.threading.Event())
    screen.show([Answer(one, None, [], False) for one in replies])
    lines = capsys.readouterr().out.splitlines()
    assert any("left side" in line and "right side" in line for line in lines) == wide
    assert all(sum(side in line for line in lines) == 1 for side in ("left side", "right side"))


@pytest.mark.parametrize(
    "words, place",
    [([], (None, None)), (["7"], (None, 7)), (["train"], ("train", None)), (["train", "7"], ("train", 7))],
)
def test_a_row_is_named_by_split_and_number(words, place):
    assert command._parse_row(words) == place


@pytest.mark.parametrize("words", ["x", "-1", "1 2", "train validation", "test 1"])
def test_malformed_row_number_is_refused(words):
    with pytest.raises(ConfigError, match=r"expected /row \[train\|validation\] \[N\]"):
        command._parse_row(shlex.split(words))


@pytest.mark.parametrize(
    "option, environment, system",
    [(None, "Be brief.", "Be brief."), ("Mine.", "Be brief.", "Mine."), ("", "Be brief.", ""), (None, None, None)],
)
def test_the_system_message_is_the_given_one_or_that_of_the_runs_prompts(world, rows, option, environment, system):
    source = read_source(world / "model", str(world / "good.yaml"), None, [])
    rows.environments["gsm8k"].system_prompt = environment
    assert command._system(option, source, rows) == system
    source.config.data.train.system_prompt = "Of the data."
    assert command._system(option, source, rows) == ("Of the data." if option is None else option)


def test_a_run_whose_environment_is_gone_can_be_talked_to_all_the_same(world, capsys):
    source = read_source(world / "model", str(world / "good.yaml"), None, [])
    source.config.env = {"gone": {"plugin": "absent.py:Gone"}}
    assert command._system(None, source, RunRows(source.config)) is None
    assert capsys.readouterr().err.startswith("note: cannot read the system message of the run's environments: ")
