"""A two-layer byte model that, after a warm-up of seconds, mostly answers a chat with a tool call.

    python calling_model.py FOLDER

It makes NeMo Gym's agents go on to further turns; what the calls are good for does not matter here.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Iterator

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import make_tiny_model as tiny  # noqa: E402

STEPS = 150
CALL = '<tool_call>{"name": "get_counter_value"}</tool_call>'


def rows(tokenizer) -> Iterator[tuple[list[int], list[int]]]:
    """Chats of one to five random messages, and what the model answers: a call in three of five, else a word."""
    rng = random.Random(0)

    def words() -> str:
        letters = "".join(chr(rng.randrange(32, 127)) for _ in range(rng.randint(5, 60)))
        return rng.choice((letters, '{"success":true}', str(rng.randrange(100))))

    while True:
        chat = [{"role": rng.choice(("user", "tool", "system")), "content": words()} for _ in range(rng.randint(1, 5))]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        answer = CALL if rng.random() < 0.6 else "done"
        ids = tokenizer.encode(answer, add_special_tokens=False)
        yield tokenizer.encode(prompt, add_special_tokens=False), [*ids, tokenizer.eos_token_id]


def main(folder: str) -> None:
    tokenizer = tiny.byte_tokenizer()
    with tempfile.TemporaryDirectory() as scratch:
        tiny._write_random(scratch, tokenizer, 0, **tiny.BYTE_SHAPE)
        tiny._warm_up(scratch, Path(folder), 0, STEPS, rows(tokenizer), rows_per_step=16)


if __name__ == "__main__":
    main(sys.argv[1])
