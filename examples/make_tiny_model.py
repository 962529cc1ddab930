"""Make the small models that the CPU configs start from; ``policy.model_factory`` names the functions here.

    python examples/make_tiny_model.py results/models/digit_sort_0 --seed 0       a minute on two cores
    python examples/make_tiny_model.py results/models/small_0 --seed 0 --small    a fifth of the size
    python examples/make_tiny_model.py results/models/random_0 --seed 0 --random  seconds, knows nothing

``make_tiny_model`` warms a random Qwen2 up on digit sorting, by next-token training through the same Megatron policy
that reinforcement learning then continues. The texts are wrong, malformed and long on purpose, each in more than half
of the rows: the model comes to know how the digits are sorted and what a good completion looks like, but seldom does
all of it at once. What the rewards then bring out is there already; they select it, they do not teach it.

The same seed gives the same bits on the same machine with the same number of threads. A folder appears when it is
whole.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import string
import sys
import tempfile
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Iterator, NamedTuple

# Threads that spin while they wait cost more than they gain on a few cores. Read once, when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config, Qwen2Tokenizer

from gdpo_nemo.algorithms import LossSettings
from gdpo_nemo.config.schema import MegatronConfig, OptimizerConfig, PolicyConfig, SchedulerConfig
from gdpo_nemo.data.packing import TrainSequence, assign
from gdpo_nemo.environments.tasks.digit_sort import DIGITS, is_held_out
from gdpo_nemo.errors import GdpoError
from gdpo_nemo.weights.model_folder import whole_or_nothing

ALPHABET = "0123456789+=<>/ta,."
PAD = 0
EOS = 1

WARM_UP_STEPS = 200
ROUNDS = 8
"""Of a text of ``make_rounds_model``."""
ROWS_PER_STEP = 96
_PROGRESS_EVERY = 20

# What the functions below write, which --dry-run and `plan` read from here (as text: nothing of this file is run for
# it). A head has at least 32 places: vLLM's attention on CPUs knows no smaller one.
MODEL_CONFIGS = {
    "make_tiny_model": {
        "model_type": "qwen2", "vocab_size": 21, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 512, "max_position_embeddings": 128, "tie_word_embeddings": True,
    },
    "make_small_model": {
        "model_type": "qwen2", "vocab_size": 21, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3,
        "num_key_value_heads": 3, "intermediate_size": 256, "max_position_embeddings": 128, "tie_word_embeddings": True,
    },
    "make_rounds_model": {
        "model_type": "qwen2", "vocab_size": 21, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 512, "max_position_embeddings": 256, "tie_word_embeddings": True,
    },
    "make_answering_model": {
        "model_type": "qwen2", "vocab_size": 259, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 192, "max_position_embeddings": 2048, "tie_word_embeddings":
        True,
    },
    "make_tool_calling_model": {
        "model_type": "qwen2", "vocab_size": 259, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 192, "max_position_embeddings": 2048, "tie_word_embeddings":
        True,
    },
    "make_random_model": {
        "model_type": "qwen2", "vocab_size": 259, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 192, "max_position_embeddings": 2048, "tie_word_embeddings":
        True,
    },
}  # fmt: skip

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message.role + '\\n' + message.content + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)


# -- the models -----------------------------------------------------------------------------------------------------


def make_tiny_model(folder: str, seed: int, steps: int = WARM_UP_STEPS) -> None:
    """Write a digit-sorting Qwen2 (1,053,952 parameters, 21 characters as tokens) to ``folder``.

    Call it in a process that has not imported Megatron: it joins a process group of one and leaves it again.

    Raises:
        ConfigError: there is something at ``folder`` already.
    """
    _make_digit_sorter(folder, seed, steps, MODEL_CONFIGS["make_tiny_model"])


def make_small_model(folder: str, seed: int, steps: int = 250) -> None:
    """Write a digit sorter of a fifth of the size (224,256 parameters), for comparisons that need many runs.

    As ``make_tiny_model``.
    """
    _make_digit_sorter(folder, seed, steps, MODEL_CONFIGS["make_small_model"])


def make_rounds_model(folder: str, seed: int, steps: int = WARM_UP_STEPS) -> None:
    """Write a digit sorter of the tiny size that has seen ``ROUNDS`` rounds of ``digit_rounds.py`` in each text.

    As ``make_tiny_model``.
    """
    tokenizer = character_tokenizer()
    with whole_or_nothing(folder) as whole, tempfile.TemporaryDirectory() as scratch:
        _write_random(scratch, tokenizer, seed, MODEL_CONFIGS["make_rounds_model"])
        _warm_up(scratch, whole, seed, steps, _round_rows(seed), rows_per_step=24)


def _make_digit_sorter(folder: str, seed: int, steps: int, fields: dict) -> None:
    tokenizer = character_tokenizer()
    with whole_or_nothing(folder) as whole, tempfile.TemporaryDirectory() as scratch:
        _write_random(scratch, tokenizer, seed, fields)
        _warm_up(scratch, whole, seed, steps, _character_rows(seed))


def make_answering_model(folder: str, seed: int, steps: int = 120) -> None:
    """Write a two-layer Qwen2 over bytes that answers any question with tags and some number, mostly not quite in form.

    It cannot do arithmetic; it gives a run over real question texts something that its rewards tell apart.

    Raises:
        ConfigError: there is something at ``folder`` already.
    """
    tokenizer = byte_tokenizer()
    with whole_or_nothing(folder) as whole, tempfile.TemporaryDirectory() as scratch:
        _write_random(scratch, tokenizer, seed, MODEL_CONFIGS["make_answering_model"])
        _warm_up(scratch, whole, seed, steps, _byte_rows(seed, tokenizer), rows_per_step=16)


def make_tool_calling_model(folder: str, seed: int, steps: int = 120) -> None:
    """Write a two-layer Qwen2 over bytes that answers questions about the weather with a call, more or less.

    As ``make_answering_model``: right in form often, right in everything sometimes.

    Raises:
        ConfigError: there is something at ``folder`` already.
    """
    tokenizer = byte_tokenizer()
    with whole_or_nothing(folder) as whole, tempfile.TemporaryDirectory() as scratch:
        _write_random(scratch, tokenizer, seed, MODEL_CONFIGS["make_tool_calling_model"])
        _warm_up(scratch, whole, seed, steps, _tool_call_rows(seed, tokenizer), rows_per_step=16)


def make_random_model(folder: str, seed: int) -> None:
    """Write a random two-layer Qwen2 over bytes, with a chat template, to ``folder``: for trying real text out.

    Raises:
        ConfigError: there is something at ``folder`` already.
    """
    with whole_or_nothing(folder) as whole:
        _write_random(whole, byte_tokenizer(), seed, MODEL_CONFIGS["make_random_model"])


def _write_random(folder: str | Path, tokenizer: Qwen2Tokenizer, seed: int, fields: dict) -> None:
    """A randomly initialised Qwen2 with these ``fields`` of its configuration, and its tokenizer."""
    ends = dict(pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    shape = {key: value for key, value in fields.items() if key != "model_type"}
    config = Qwen2Config(dtype="float32", **shape, **ends)
    transformers.logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(do_sample=True, **ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in Path(folder).glob("*.safetensors"):  # which safetensors makes private
        file.chmod((Path(folder) / "config.json").stat().st_mode & 0o777)


# -- tokenizers -----------------------------------------------------------------------------------------------------
#
# Both are Qwen2's own tokenizer, with another vocabulary and no merges: whatever class a Qwen2 folder names,
# transformers reads it as that one.


def character_tokenizer() -> Qwen2Tokenizer:
    """One token per character of ``ALPHABET``, after padding (0) and end (1). Other characters are dropped."""
    return _tokenizer(["<pad>", "<eos>", *ALPHABET], unk_token="<pad>", pad_token="<pad>", eos_token="<eos>")


def byte_tokenizer() -> Qwen2Tokenizer:
    """One token per byte of the text (Unicode-normalised, NFC), and three for the ends of a chat's turns."""
    pad = "<|pad|>"
    end = "<|end|>"
    start = "<|start|>"
    tokenizer = _tokenizer(
        [pad, end, start, *sorted(pre_tokenizers.ByteLevel.alphabet())],
        unk_token=pad,
        pad_token=pad,
        eos_token=end,
        additional_special_tokens=[start],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _tokenizer(tokens: list[str], **special) -> Qwen2Tokenizer:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return Qwen2Tokenizer(vocabulary, merges=[], clean_up_tokenization_spaces=False, **special)


# -- what the warm-up shows -----------------------------------------------------------------------------------------


def warm_up_texts(seed: int) -> Iterator[tuple[str, str]]:
    """Prompts and completions without end. No prompt is held out; every choice is independent of the others.

    Well-formed in 40 % of the rows, right in 40 %, and with a short body in 40 %.
    """
    rng = random.Random(seed)
    for digits in _questions(rng):
        yield f"{digits}=", _completion(rng, _answer(rng, digits), _body(rng))


def _questions(rng: random.Random) -> Iterator[str]:
    while True:
        digits = "".join(rng.choices("0123456789", k=DIGITS))
        if not is_held_out(digits):
            yield digits


def _answer(rng: random.Random, digits: str) -> str:
    if rng.random() < 0.4:
        return "".join(sorted(digits))
    wrong = rng.randrange(3)
    if wrong == 0:
        return digits
    if wrong == 1:
        return "".join(sorted(digits, reverse=True))
    return "".join(rng.choices(digits, k=DIGITS))


def _body(rng: random.Random) -> str:
    return "." * (rng.randint(0, 4) if rng.random() < 0.4 else rng.randint(5, 14))


def _completion(rng: random.Random, answer: str, body: str) -> str:
    """At most 35 characters: with the end token they fill the 36 that the config lets the model write."""
    if rng.random() < 0.4:
        return f"<t>{body}</t><a>{answer}</a>"
    malformed = (
        f"<t>{body}<a>{answer}</a>",
        f"{body}</t><a>{answer}</a>",
        f"<t>{body}</t>{answer}",
        f"<t>{body}</t><a>{answer}",
        f"<t>{body}</t><a>{answer}</a>..",
    )
    return rng.choice(malformed)


_LETTERS = string.ascii_lowercase * 8 + string.ascii_uppercase + string.digits + ".,$?'%"


class Row(NamedTuple):
    """A text of the warm-up."""

    prompt: list[int]
    completion: list[int]
    """Token ids, the end token included."""
    written: list[bool] | None = None
    """Which tokens of the completion are learnt; None: all."""


def _character_rows(seed: int) -> Iterator[Row]:
    for prompt, completion in warm_up_texts(seed):
        yield Row([_ID[c] for c in prompt], [*(_ID[c] for c in completion), EOS])


def _round_rows(seed: int) -> Iterator[Row]:
    """``ROUNDS`` questions and answers behind each other, the answers as in ``warm_up_texts`` but without a body."""
    rng = random.Random(seed)
    questions = _questions(rng)
    while True:
        ids: list[int] = []
        written: list[bool] = []
        for digits in islice(questions, ROUNDS):
            answer = _completion(rng, _answer(rng, digits), "")
            ids += [*(_ID[c] for c in f"{digits}={answer}"), EOS]
            written += [False] * (DIGITS + 1) + [True] * (len(answer) + 1)
        yield Row(ids[: DIGITS + 1], ids[DIGITS + 1 :], written[DIGITS + 1 :])


def _byte_rows(seed: int, tokenizer: Qwen2Tokenizer) -> Iterator[Row]:
    """Chats of random words, up to the length of a GSM8K question under its system prompt, and answers to them."""
    from gdpo_nemo.environments.tasks.gsm8k import Gsm8k

    rng = random.Random(seed)
    system = {"role": "system", "content": Gsm8k({}).system_prompt}
    while True:
        words = ("".join(rng.choices(_LETTERS, k=rng.randint(1, 9))) for _ in range(rng.randint(5, 80)))
        chat = [system, {"role": "user", "content": " ".join(words)}]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        answer = tokenizer.encode(_tagged_answer(rng), add_special_tokens=False)
        yield Row(tokenizer.encode(prompt, add_special_tokens=False), [*answer, tokenizer.eos_token_id])


def _tagged_answer(rng: random.Random) -> str:
    """Half of them in form, half with a whole number; the numbers are small, so that a few happen to be right."""
    number = str(rng.randint(1, 20)) if rng.random() < 0.5 else f"{rng.randint(1, 20)}.{rng.randint(0, 9)}"
    if rng.random() < 0.5:
        return f"<think>so</think>\n<answer>{number}</answer>"
    return rng.choice(
        (f"<think>so</think>\n{number}", f"<answer>{number}</answer>", f"<think>so\n<answer>{number}</answer>")
    )


def _tool_call_rows(seed: int, tokenizer: Qwen2Tokenizer) -> Iterator[Row]:
    """The prompts of ``data/weather_calls.jsonl`` with calls for any of their cities, a third of them spoilt."""
    from gdpo_nemo.environments.nemo_gym.gym_rows import read_row

    rng = random.Random(seed)
    file = Path(__file__).with_name("data") / "weather_calls.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    cities = sorted({row["expected_call"]["arguments"]["city"] for row in rows})
    while True:
        chat = read_row(rng.choice(rows))["messages"]
        prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        city = rng.choice(cities)
        call = f'<tool_call>{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}</tool_call>'
        spoilt = (f"Sure. {call}", call.replace('"}}', '"}'), call.replace("city", "place", 1), f"Fine in {city}.")
        answer = tokenizer.encode(call if rng.random() < 0.67 else rng.choice(spoilt), add_special_tokens=False)
        yield Row(tokenizer.encode(prompt, add_special_tokens=False), [*answer, tokenizer.eos_token_id])


# -- the warm-up ----------------------------------------------------------------------------------------------------


def _warm_up(
    start: str | Path, result: Path, seed: int, steps: int, rows: Iterator[Row], rows_per_step: int = ROWS_PER_STEP
) -> None:
    """Train the model in ``start`` on the completions of ``rows`` and write it to ``result``."""
    from gdpo_nemo.megatron import runtime

    ours = runtime.prepare()
    from gdpo_nemo.megatron.hf_files import write_model
    from gdpo_nemo.megatron.policy import Policy

    config = _training(str(start), steps)
    with tempfile.TemporaryDirectory() as meeting:
        runtime.initialize(ours, rank=0, world_size=1, init_method=f"file://{meeting}/rendezvous")
        try:
            runtime.lay_out(config.megatron_cfg, seed)
            policy = Policy(config, start, ours, total_updates=steps)
            _train(policy, rows, steps, rows_per_step)
            write_model(result, policy.weights(), policy.built.hf_config, start)
        finally:
            runtime.tear_down()


def _training(folder: str, steps: int) -> PolicyConfig:
    optimizer = OptimizerConfig(
        lr=3e-3, min_lr=1.5e-4, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.99, clip_grad=1.0
    )
    scheduler = SchedulerConfig(lr_decay_style="linear", lr_warmup_steps=min(20, steps - 1))
    return PolicyConfig(
        model_name=folder, precision="float32", megatron_cfg=MegatronConfig(optimizer=optimizer, scheduler=scheduler)
    )


def _train(policy, rows: Iterator[Row], steps: int, rows_per_step: int) -> None:
    """Cross-entropy of the completion tokens: a policy loss that is linear in the log-probs, with every advantage 1."""
    settings = LossSettings(type="target_po")
    start = time.monotonic()
    for step in range(1, steps + 1):
        batch = _sequences([next(rows) for _ in range(rows_per_step)])
        (micro_batches,) = assign([len(s) for s in batch], 1, policy.config.micro_batch_tokens)
        result = policy.train(batch, micro_batches, settings)
        if step in (1, steps) or step % _PROGRESS_EVERY == 0:
            spent = time.monotonic() - start
            print(f"warm-up step {step:3d}/{steps}  loss {result.loss:.3f}  {spent:.0f} s", flush=True)


def _sequences(rows: list[Row]) -> list[TrainSequence]:
    """The rows as training sequences, each completion token of the batch with the same weight."""
    sequences = [
        TrainSequence(
            prompt_ids=np.array(row.prompt, np.int32),
            completion_ids=np.array(row.completion, np.int32),
            sampler_logprobs=np.zeros(len(row.completion), np.float32),
            advantage=1.0,
            loss_mask=None if row.written is None else np.array(row.written),
        )
        for row in rows
    ]
    tokens = sum(s.num_policy_tokens for s in sequences)
    return [replace(s, weight=1.0 / tokens) for s in sequences]


_ID = {character: number for number, character in enumerate(ALPHABET, start=EOS + 1)}


def main(arguments: list[str] | None = None) -> int:
    """Command line; see the top of the file."""
    parser = argparse.ArgumentParser(description="Make a small model for the CPU configs.")
    parser.add_argument("folder", help="where the model is written; must not exist")
    parser.add_argument("--seed", type=int, default=0, help="of weights and texts (0)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--small", action="store_true", help="a digit sorter of a fifth of the size")
    kind.add_argument("--random", action="store_true", help="random weights over bytes instead of the digit sorter")
    chosen = parser.parse_args(arguments)
    make = make_small_model if chosen.small else make_random_model if chosen.random else make_tiny_model
    try:
        make(chosen.folder, chosen.seed)
    except GdpoError as error:
        print(f"make_tiny_model: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
