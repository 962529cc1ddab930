"""Made-up runs for the inspector: one whose texts attack the page, one of turns, and one as large as one likes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from image_samples import image_group
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from gdpo_nemo.config.load import load_config, save_config
from gdpo_nemo.data.records import Group, Outcome, Prompt, Trajectory
from gdpo_nemo.observe.metrics import MetricsLog
from gdpo_nemo.observe.sample_values import SampleValues
from gdpo_nemo.observe.samples import write_rollouts

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
HOSTILE = (
    "<script>document.title = 'harmed'</script><img src=x onerror=\"document.title = 'harmed'\">",
    "</script><script>document.title = 'harmed'</script> </pre></style>",
    "left \u202eright to left\u202c \u2066isolated\u2069 \u05e9\u05dc\u05d5\u05dd \u0627\u0644\u0633\u0644\u0627\u0645",
    "half a pair \ud800 and another \udc00 and \x00 \x1b[2J \u2028\u2029",
    "w" * 100_000,
    "__proto__ constructor ${document.title='harmed'} {{7*7}} javascript:alert(1)",
)


def hostile_run(folder: Path) -> Path:
    """A group whose completions are ``HOSTILE``, and whose names are no better."""
    prompt = Prompt("<b>__proto__", np.arange(4, dtype=np.int32), HOSTILE[0], "digit_sort")
    samples = [
        Trajectory(
            prompt=prompt,
            sample_index=number,
            completion_ids=np.arange(len(text), dtype=np.int32) % 21,
            logprobs=np.full(len(text), -0.5, np.float32),
            policy_version=0,
            text=text,
            finish_reason="stop",
            rewards={"__proto__": float(number), "<i>x": None},
            detail=text[:300],
            extra={"<u>": text[:300]},
        )
        for number, text in enumerate(HOSTILE)
    ]
    save_config(load_config(DEMO), make(folder) / "config.yaml")
    write_rollouts(folder, 1, [Group(prompt, samples)], SampleValues(np.linspace(-1, 1, len(samples))))
    return folder


WORDS = ("<unk>", "<tool_call>", "{sort: 312}", "</tool_call>", "123", "is", "sorted", "What", "of", "3", "1", "2")


def turns_run(folder: Path, steps: int = 2) -> Path:
    """Groups of samples that call a tool, hear its answer and answer themselves; a tokenizer of ``WORDS`` beside."""
    save_config(load_config(DEMO), make(folder) / "config.yaml")
    vocabulary = Tokenizer(WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=vocabulary, eos_token="<unk>").save_pretrained(folder / "model")
    random = np.random.default_rng(0)
    prompt = Prompt("sort", np.array([7, 8, 9, 10, 11], np.int32), "What of 3 1 2", "digit_sort")
    for step in range(1, steps + 1):
        samples = [_conversation(prompt, number, step, random) for number in range(4)]
        scored = [trajectory.logprobs + np.float32(0.01) for trajectory in samples]
        entropies = [-trajectory.logprobs / 2 for trajectory in samples]
        advantages = np.array([1.0, -1.0, 0.5, -0.5])
        groups = [Group(prompt, samples)]
        values = SampleValues(advantages, scored, {"a": advantages}, entropies=entropies)
        write_rollouts(folder, step, groups, values)
    return folder


def image_run(folder: Path) -> Path:
    """A step whose samples have images in the prompt, and one in a tool's answer."""
    save_config(load_config(DEMO), make(folder) / "config.yaml")
    write_rollouts(folder, 1, [image_group()], SampleValues(np.array([1.0, -1.0])))
    return folder


def make(folder: Path) -> Path:
    """The folder, which was not there."""
    folder.mkdir(parents=True)
    return folder


def _conversation(prompt: Prompt, number: int, step: int, random: np.random.Generator) -> Trajectory:
    ids = np.array([1, 2, 3, 4, 5, 4, 6], np.int32)  # a call, the tool's answer, an answer
    mask = np.array([True, True, True, False, False, True, True])
    return Trajectory(
        prompt=prompt,
        sample_index=number,
        completion_ids=ids,
        logprobs=np.where(mask, -random.exponential(size=len(ids)), np.nan).astype(np.float32),
        policy_version=step - 1,
        text=" ".join(WORDS[token] for token in ids),
        finish_reason="stop",
        rewards={"a": float(number % 2)},
        loss_mask=mask,
        turns=2,
    )


def large_run(
    folder: Path, samples: int, step_size: int = 1000, tokens: int = 100, rewards: Sequence[str] = ("a", "b")
) -> Path:
    """``samples`` samples of some ``tokens`` tokens, over steps of ``step_size``, in groups of 8."""
    save_config(load_config(DEMO), make(folder) / "config.yaml")
    log = MetricsLog(folder)
    random = np.random.default_rng(0)
    words = [f"word{number}" for number in range(500)]
    for step in range(1, samples // step_size + 1):
        groups = []
        for place in range(step_size // 8):
            number = (step * step_size // 8 + place) % 5000
            prompt = Prompt(f"p{number}", np.arange(20, dtype=np.int32), f"What is {number}?", "digit_sort")
            groups.append(Group(prompt, [_sample(prompt, n, step, tokens, random, words, rewards) for n in range(8)]))
        count = 8 * len(groups)
        trainer = [t.logprobs + np.float32(0.01) for group in groups for t in group.trajectories]
        values = SampleValues(random.normal(size=count), trainer, {"a": random.normal(size=count)})
        write_rollouts(folder, step, groups, values)
        log.append({"step": step, "reward/a/mean": step / 100, "policy/entropy": 1 / step})
    log.close()
    return folder


def _sample(
    prompt: Prompt,
    number: int,
    step: int,
    tokens: int,
    random: np.random.Generator,
    words: Sequence[str],
    rewards: Sequence[str],
) -> Trajectory:
    length = int(random.integers(1, 2 * tokens))
    return Trajectory(
        prompt=prompt,
        sample_index=number,
        completion_ids=random.integers(0, 21, length).astype(np.int32),
        logprobs=-random.exponential(size=length).astype(np.float32),
        policy_version=step - 1,
        text=" ".join(words[word] for word in random.integers(0, 500, length)),
        finish_reason="stop",
        rewards={rewards[0]: float(random.integers(0, 2)), **{name: float(random.random()) for name in rewards[1:]}},
        outcome=Outcome.TRUNCATED if length > 1.9 * tokens else Outcome.OK,
    )
