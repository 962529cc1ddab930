"""Cases of test_bad_input.py: supervised and preference training, distillation, and environments that hold a model."""

from __future__ import annotations

import json
from typing import Any

from bad_input import Damage, added, binary, gone, text

CHECK = "train --dry-run --config {d}/pairs.yaml"
GOOD = "train --dry-run --config {d}/good.yaml"
TAUGHT = GOOD + " algorithm.type=distillation teacher.model_name="
ANCHORED = GOOD + " 'data.train={path: {d}/rows.jsonl, prompt_key: question, %s}'"
ITERATED = GOOD + " gdpo.num_iterations="


def row(**columns: Any) -> Damage:
    return text("pairs.jsonl", json.dumps(columns) + "\n")


def pair(**columns: Any) -> Damage:
    return row(**{"prompt": "a", "chosen": "a", "rejected": "a a", **columns})


def strided(more: str = "", **keys: Any) -> str:
    section = {"stride": 8, "context_length": 8, "generate_max_len": 16, **keys}
    inner = ", ".join(f"{key}: {value}" for key, value in section.items())
    # A key that comes twice counts where it comes last.
    return (GOOD + " 'data.train={path: {d}/rows.jsonl, %s, strided: {%s}}'") % (more or "prompt_key: question", inner)


OBJECTIVES = [
    (CHECK + " algorithm.type=dop", None, "algorithm.type: 'dop' is not a valid value; did you mean dpo?"),
    (GOOD + " algorithm.type=gdop", None, "algorithm.type: 'gdop' is not a valid value; did you mean gdpo?"),
    (CHECK + " algorithm.type={d}/mine.py:absent", None, "algorithm.type: {d}/mine.py has no class absent"),
    (CHECK + " preference.beta=nan", None, "preference.beta: expected a number"),
    (CHECK + " preference.beta=0", None, "preference.beta: must be more than 0, got 0"),
    (CHECK + " preference.beta=1e300", None, "preference.beta: must be at most"),
    (CHECK + " preference.betta=1", None, "did you mean preference.beta?"),
    (CHECK + " preference.label_smoothing=0.5", None, "label_smoothing: must be 0 or more and below 0.5"),
    (CHECK + " preference.label_smoothing=-0.1", None, "label_smoothing: must be 0 or more and below 0.5"),
    (CHECK + " preference.loss_type=sigmod", None, "preference.loss_type: 'sigmod' is not supported by algorithm dpo"),
    (CHECK + " algorithm.type=sft preference.beta=0.2", None, "preference.beta: has no effect unless algorithm.type"),
    (CHECK + " rollout.max_staleness=1", None, "has no effect with an algorithm that does not sample"),
    (CHECK + " algorithm.type=simpo preference.simpo_gamma=inf", None, "preference.simpo_gamma: expected a number"),
    (CHECK + " algorithm.type=reward_model preference.center_rewards_coefficient=-1", None, "must be 0 or more"),
    (CHECK + " data.train.type=absent.py:f", None, "data.train.type: absent.py not found"),
    (CHECK + " data.train.type={d}/mine.py:absent", None, "mine.py has no function absent"),
    (CHECK + " data.train.type={d}/mine.py:number", None, "mine.py has no function number"),
    (CHECK + " data.train.type={d}/mine.py:Mine", None, "mine.py is a class; this key requires a function"),
    (CHECK + " data.train.type=chatml.nothing", None, "unknown format 'chatml.nothing'; did you mean 'chatml.intel'?"),
    (CHECK + " data.train.remove_columns=[absent]", None, "column 'absent' not found; known: chosen, prompt, rejected"),
    (CHECK + " data.train.remove_columns=[chosen]", None, "no column 'chosen'; columns: prompt, rejected"),
    (CHECK, text("pairs.jsonl", ""), "pairs.jsonl is empty"),
    (CHECK, text("pairs.jsonl", "{}\n"), "row 0: no column 'chosen'; columns: none"),
    (CHECK, added("pairs.jsonl", "{\n"), "pairs.jsonl:5: not valid JSON"),
    (CHECK, binary("pairs.jsonl"), "pairs.jsonl:1: not valid JSON"),
    (CHECK, gone("pairs.jsonl"), "pairs.jsonl not found"),
    (CHECK, pair(prompt=1), "row 0: 'prompt' must be text or a list of messages, got int"),
    (CHECK, pair(chosen=None), "row 0: the column 'chosen' must be text or messages, got empty"),
    (CHECK, pair(rejected=""), "row 0: the column 'rejected' is empty"),
    (CHECK, pair(chosen=["a"]), "row 0: chosen and rejected must both be text or both be messages"),
    (CHECK, pair(chosen=[{"role": "a"}], rejected=[{"role": "a"}]), "row 0: 'chosen': message 0 (a) has no text"),
    (CHECK, pair(prompt="a " * 500), "all 1 prompts are longer than 95 tokens (the shortest has 500)"),
    (
        CHECK + " algorithm.type=kto",
        row(prompt="a", completion="a", label="yes"),
        "'label' must be true or false, got str",
    ),
    (CHECK + " algorithm.type=kto", row(prompt="a", completion="a"), "'label' must be true or false, got empty"),
    (CHECK + " algorithm.type=sft", row(messages=[{"role": "user", "content": "a"}]), "no assistant turn after"),
    (CHECK + " algorithm.type=sft", row(prompt="a"), "row 0: no column 'completion'; columns: prompt"),
    (TAUGHT + "{d}/absent", None, "teacher.model_name: {d}/absent is not the folder of a Hugging Face model"),
    (TAUGHT + "{d}/empty", None, "teacher.model_name: {d}/empty is not the folder of a Hugging Face model"),
    (TAUGHT + "''", None, "teacher.model_name: must be set with algorithm distillation"),
    (TAUGHT + "{d}/model policy.generation.temperature=0.7", None, "policy.generation.temperature: must be 1 with"),
    (GOOD + " teacher.model_name={d}/model", None, "has no effect unless algorithm.type is distillation"),
    (
        GOOD + " env.gsm8k.plugin=reward_model",
        None,
        "env.gsm8k: model: must be a folder or a model of the Hugging Face",
    ),
    (GOOD + " 'env.gsm8k={plugin: reward_model, model: {d}/absent}'", None, "model: folder not found ({d}/absent"),
    (GOOD + " 'env.gsm8k={plugin: reward_model, model: {d}/model}'", None, "{d}/model is not a sequence classifier"),
    (GOOD + " 'env.gsm8k={plugin: ebft}'", None, "option model must be the folder of the frozen model"),
    (GOOD + " 'env.gsm8k={plugin: ebft, model: {d}/model}'", None, "gdpo.rewards.correctness: no environment returns"),
    (strided(stride=0), None, "data.train.strided.stride: must be at least 1, got 0"),
    (strided(stride=-8), None, "data.train.strided.stride: must be at least 1, got -8"),
    (strided(stride=8.5), None, "data.train.strided.stride: expected an integer, got 8.5"),
    (strided(context_length=0), None, "data.train.strided.context_length: must be at least 1"),
    (strided(context_length=10**9), None, "1000000000 tokens and the following 16 (generate_max_len) exceed"),
    (strided(context_length=10**30), None, "data.train.strided.context_length: must be at most"),
    (strided(generate_max_len=8), None, "generate_max_len: must equal policy.generation.max_new_tokens (16), got 8"),
    (strided(generate_max_len="null"), None, "data.train.strided.generate_max_len: expected an integer, got null"),
    (strided(strid=8), None, "data.train.strided.strid: unknown key"),
    (ANCHORED % "strided: {stride: 8, context_length: 8}", None, "data.train.strided.generate_max_len: must be set"),
    (ANCHORED % "strided: 8", None, "data.train.strided: expected keys and values, got 8"),
    (strided("prompt_key: text"), None, "data.train.prompt_key: row 0: no column 'text'"),
    (strided("chat: true"), None, "data.train.chat: conflicts with data.train.strided, whose text is passed"),
    (strided("system_prompt: a"), None, "data.train.system_prompt: has no effect with data.train.strided"),
    (strided('prompt_template: "a {prompt}"'), None, "prompt_template: has no effect with data.train.strided"),
    (
        strided(),
        None,
        "data.train.strided: all 4 texts are shorter than the minimum of 24 tokens for one anchor (the longest",
    ),
    (strided(), text("rows.jsonl", '{"question": 3}\n'), "row 0: 'question' must be text for anchors"),
    (
        CHECK + " algorithm.type=sft 'data.train.strided={stride: 8, context_length: 8, generate_max_len: 8}'",
        None,
        "data.train.strided: algorithm sft trains the answers in the data",
    ),
    (
        "env check gsm8k --config {d}/good.yaml "
        "'data.train.strided={stride: 8, context_length: 8, generate_max_len: 16}'",
        None,
        "data.train.strided: requires the model's tokenizer to split rows into prompts",
    ),
    (ITERATED + "0", None, "gdpo.num_iterations: must be at least 1"),
    (ITERATED + "1e9", None, "gdpo.num_iterations: expected an integer"),
    (GOOD + " policy.sync_ref_model=true", None, "has no effect without a reference model"),
    (
        GOOD + " loss_fn.type=clip_cov loss_fn.clip_cov_ratio=2",
        None,
        "clip_cov_ratio: must be more than 0 and at most 1",
    ),
    (GOOD + " loss_fn.type=kl_cov loss_fn.kl_cov_ratio=nan", None, "loss_fn.kl_cov_ratio: expected a number"),
    (GOOD + " gdpo.credit=turn", None, "gdpo.credit: has no effect while rollout.turns.max_turns is 1"),
    (GOOD + " gdpo.credit=token", None, "gdpo.credit: 'token' is not a valid value"),
    (GOOD + " gdpo.discount=0.5", None, "gdpo.discount: has no effect unless gdpo.credit is turn"),
]
