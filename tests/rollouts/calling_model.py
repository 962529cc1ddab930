"""A two-layer byte model that, after a warm-up of seconds, mostly answers a chat with a tool call.

    python calling_model.py FOLDER

It makes NeMo Gym's agents go on to further turns. Which call it writes is chance: it reads nothing of the prompt.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import make_tiny_model as tiny  # noqa: E402

STEPS = 150
POSITIONS = 8192
OPEN = '<tool_call>{"name": "'
GET = 'get_synonym_value", "arguments": {"synonym": "'
EXTRACT = 'extract_synonym_values", "arguments": {'
CALLS = (
    f'{OPEN}get_counter_value"}}</tool_call>',
    f'{OPEN}{GET}Warm"}}}}</tool_call>',
    f'{OPEN}{EXTRACT}"synonym_values": [711, 407]}}}}</tool_call>',
)
"""The first is of the server example_session_state_mgmt, the others of example_multi_step, whose example rows all
expect 711 and 407."""
WORDS = ("done", "SCORE: 7")
"""What ends an episode; the second is also what a judge is asked for."""
WHOLE = (
    *("The term '", "' has a synonym '", "'.\n"),
    *(OPEN, GET, 'Warm"}}</tool_call>', EXTRACT, '"synonym_values": [', "711", "407", "]}}</tool_call>"),
)
"""Text that is one token: prompts of example_multi_step are 9,000 bytes, behind which so small a model spells no long
call."""


def rows(tokenizer) -> Iterator[tuple[list[int], list[int]]]:
    """Chats of one to five random messages, and what the model answers: a call in three of five, else words."""
    rng = random.Random(0)

    def words() -> str:
        letters = "".join(chr(rng.randrange(32, 127)) for _ in range(rng.randint(5, 60)))
        return rng.choice((letters, '{"success":true}', str(rng.randrange(100))))

    while True:
        chat = [{"role": rng.choice(("user", "tool", "system")), "content": words()} for _ in range(rng.randint(1, 5))]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        answer = rng.choice(CALLS if rng.random() < 0.6 else WORDS)
        ids = tokenizer.encode(answer, add_special_tokens=False)
        yield tiny.Row(tokenizer.encode(prompt, add_special_tokens=False), [*ids, tokenizer.eos_token_id])


def main(folder: str) -> None:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_tokens(list(WHOLE))
    with tempfile.TemporaryDirectory() as scratch:
        sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": POSITIONS}
        tiny._write_random(scratch, tokenizer, 0, {**tiny.MODEL_CONFIGS["make_random_model"], **sizes})
        tiny._warm_up(scratch, Path(folder), 0, STEPS, rows(tokenizer), rows_per_step=16)


if __name__ == "__main__":
    main(sys.argv[1])
