"""``gdpo-nemo chat`` as a person and as a script use it: real Ray, a real vLLM engine, a terminal of its own.

The model says letters for ever when it is greedy: its embedding, which is its output layer, is zero for all else.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import select
import shutil
import signal
import string
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import torch

from gdpo_nemo.commands.cli import main
from gdpo_nemo.models.hf_folder import open_weights, save_tensors, weight_names

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_S = 600
EMBEDDING = "model.embed_tokens.weight"
CONFIG = """\
run: {{name: talk, dir: {run}}}
gdpo: {{rewards: {{correctness: 1.0, format: 0.5}}, num_prompts_per_step: 4, num_generations_per_prompt: 4}}
policy:
  model_name: {run}/model
  precision: float32
  max_total_sequence_length: 2048
  generation: {{max_new_tokens: 1800, vllm_cfg: {{kv_cache_memory_bytes: 67108864, max_num_seqs: 8}}}}
data: {{train: {{path: {run}/rows.jsonl}}, validation: {{path: {run}/rows.jsonl}}}}
env: {{gsm8k: {{}}}}
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """A run that has exported its model, and nothing else."""
    folder = tmp_path_factory.mktemp("talk") / "run"
    folder.mkdir()
    sys.path.insert(0, str(REPOSITORY / "examples"))
    import make_tiny_model

    make_tiny_model.make_random_model(str(folder / "model"), seed=0)
    _letters_alone(folder / "model")
    (folder / "config.yaml").write_text(CONFIG.format(run=folder))
    rows = [{"question": f"{i} and {i}?", "answer": f"#### {2 * i}"} for i in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _letters_alone(model: Path) -> None:
    from transformers import AutoTokenizer

    read = open_weights(model)
    tensors = {name: read(name) for name in weight_names(model)}
    letters = AutoTokenizer.from_pretrained(model)(string.ascii_letters)["input_ids"]
    only = torch.zeros_like(tensors[EMBEDDING])
    only[letters] = tensors[EMBEDDING][letters]
    save_tensors({**tensors, EMBEDDING: only}, model / "model.safetensors", metadata={"format": "pt"})


def _greedy(model: Path, ids: list[int], tokens: int) -> list[int]:
    """What transformers draws."""
    from transformers import AutoModelForCausalLM

    causal = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        for _ in range(tokens):
            ids = [*ids, int(causal(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids[-tokens:]


def test_a_script_gets_replies_of_two_models_with_history_rows_and_rewards(run_dir, tmp_path, monkeypatch, capfd):
    """What the models say is what ``transformers`` makes of the chat template, turn after turn."""
    from transformers import AutoTokenizer

    other = tmp_path / "copy"
    shutil.copytree(run_dir / "model", other)
    command = ["chat", str(run_dir), "--against", str(other), "--json"]
    options = ["--temperature", "0", "--max-new-tokens", "6", "--system", "Be kind."]
    lines = "hi\nand you?\n/row 1\n/reset\n\nhi\n/quit\nnever asked\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    status = main([*command, *options])
    out, err = capfd.readouterr()
    assert status == 0, (out, err)
    found = [json.loads(line) for line in out.splitlines()]
    assert [record["prompt"] for record in found] == ["hi", "and you?", "1 and 1?", "hi"]
    names = [[reply["model"] for reply in record["replies"]] for record in found]
    assert names == [[str(run_dir / "model"), str(other)]] * 4
    texts = [{reply["text"] for reply in record["replies"]} for record in found]
    assert all(len(text) == 1 for text in texts) and texts[0] == texts[3], "equal models say the same"
    row = found[2]
    assert (row["split"], row["row"], row["id"]) == ("validation", 1, "validation/1")
    assert all(reply["rewards"] == dict.fromkeys(("correctness", "integer", "format"), 0.0) for reply in row["replies"])
    assert "rewards" not in found[0]["replies"][0] and found[0]["replies"][0]["finish_reason"] == "length"
    tokenizer = AutoTokenizer.from_pretrained(other)
    spoken = [{"role": "system", "content": "Be kind."}]
    for record in found[:2]:
        spoken.append({"role": "user", "content": record["prompt"]})
        prompt = tokenizer.apply_chat_template(spoken, tokenize=False, add_generation_prompt=True)
        reply = tokenizer.decode(_greedy(other, tokenizer(prompt)["input_ids"], 6))
        assert record["replies"][0]["text"] == reply and re.fullmatch("[A-Za-z]{6}", reply)
        spoken.append({"role": "assistant", "content": reply})
    (phases,) = re.findall(r"^ready after [\d.]+ s \((.*)\)$", err, re.MULTILINE)
    assert re.search(r"\bRay \d.*\bengines \d", phases) and "Traceback" not in err


class OnATerminal:
    """A program on a terminal of 24 lines and 80 columns, whose job in the foreground it is. It inherits that Ctrl-C is
    ignored, as from a test suite that runs in a shell's background."""

    def __init__(self, *command: str):
        self._master, terminal = os.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
            env={**os.environ, "TERM": "dumb", "PYTHONUNBUFFERED": "1"},
        )
        os.close(terminal)
        self.shown = ""
        self._read_up_to = 0

    def wait_for(self, pattern: str, again: str = "") -> str:
        """Return what is shown up to the next place that matches.

        Args:
            again: what a person types once more where nothing happens. Python does not notice a Ctrl-C that comes just
                before it begins to wait for a line.
        """
        deadline = time.monotonic() + DEADLINE_S
        retyped = time.monotonic()
        while not (found := re.compile(pattern).search(self.shown, self._read_up_to)):
            assert self.process.poll() is None or self._take(), f"ended before {pattern!r}: {self.shown!r}"
            assert time.monotonic() < deadline, f"{pattern!r} did not come: {self.shown!r}"
            self._take()
            if again and time.monotonic() - retyped > 10:
                self.type(again)
                retyped = time.monotonic()
        before = self._read_up_to
        self._read_up_to = found.end()
        return self.shown[before : found.end()]

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def finish(self) -> int:
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None and time.monotonic() < deadline:
            self._take()
        return self.process.wait(1)

    def _take(self) -> bool:
        if not select.select([self._master], [], [], 0.2)[0]:
            return False
        with contextlib.suppress(OSError):  # EIO: the program has gone
            text = os.read(self._master, 4096).decode(errors="replace")
            self.shown += text
            return bool(text)
        return False


def test_a_person_stops_a_reply_asks_a_row_and_ends_on_a_terminal(run_dir):
    """Ctrl-C in a reply ends that alone, at the prompt the line alone; Ctrl-D ends the program."""
    chat = OnATerminal(sys.executable, "-m", "gdpo_nemo", "chat", str(run_dir), "--temperature", "0")
    try:
        chat.wait_for(r"ready after [\d.]+ s \(.*Ray.*engines.*\)\r\n")
        chat.wait_for("> ")
        chat.type("hello\n")
        chat.wait_for(r"hello\r*\n(\x1b\[\?2004l\r?)?[A-Za-z]{20}")  # as it comes, long before all 1,800 are there
        chat.type("\x03")
        reply = chat.wait_for(r"\(stopped\)")
        assert len(re.findall("[A-Za-z]", reply)) < 1800
        chat.wait_for("> ")
        chat.type("half a li\x03")
        chat.wait_for(r"\(Ctrl-D or /quit to exit\)\r\n", again="\x03")
        chat.type("/row 99\n")
        chat.wait_for("error: data.validation: row 99 does not exist; rows are 0 to 3")
        chat.type("/nonsense\n")
        chat.wait_for("error: /nonsense is not a command")
        chat.type("/row 2\n")
        chat.wait_for(r"row 2 of validation\r\n2 and 2\?\r\n[A-Za-z]")
        chat.wait_for(r"correctness 0  format 0  integer 0\r\n")
        chat.wait_for("> ")
        chat.type("\x04")
        assert chat.finish() == 0, chat.shown
        assert "Traceback" not in chat.shown
    finally:
        chat.process.kill()
        chat.process.wait()
