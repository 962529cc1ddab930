"""Wrong input to every command: status 1 or 2, one clear line on stderr, no traceback, and nothing written, changed or
removed."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import shutil
import signal

import bad_input
import pytest
from bad_input import added, binary, empty, folder, gone, loop, replaced, snapshot, text
from bad_input_by_kind import BY_KIND, STEP
from bad_input_hostile import HOSTILE
from bad_input_images import IMAGES
from bad_input_objectives import CHECK, OBJECTIVES
from bad_input_of_runs import EVAL, EXPLAIN, HEALTH, PLAN, RECIPES, ROLLOUTS, RUNS

from gdpo_nemo.commands import cli
from gdpo_nemo.utils import import_trial

pytestmark = pytest.mark.slow

DRY = "train --dry-run --config {d}/good.yaml"
TRAIN = "train --config {d}/good.yaml"
SIMULATE = "simulate --config {d}/good.yaml"
PARITY = "parity --model {d}/model"
TO_CHECKPOINT = "convert --to checkpoint {d}/model {d}/new"
ENV = "env check gsm8k --config {d}/good.yaml"

COMMAND_LINE = [
    ("", None, "COMMAND"),
    ("trian", None, "trian"),
    ("train --dryrun", None, "--dryrun"),
    ("train --config", None, "--config"),
    (DRY + " extra", None, "extra"),
    (DRY + " =3", None, "section.key=value"),
    (DRY + " gdpo..x=3", None, "section.key=value"),
    (DRY + " 'gdpo.rewards={a: 1'", None, "gdpo.rewards"),
    (DRY + " gdpo.max_num_stepz=3", None, "did you mean gdpo.max_num_steps"),
    (DRY + " gdpo.max_num_steps=x", None, "gdpo.max_num_steps: expected an integer"),
    (DRY + " gdpo.max_num_steps=2.5", None, "gdpo.max_num_steps: expected an integer"),
    (DRY + " gdpo.max_num_steps=-1", None, "at least 1"),
    (DRY + " gdpo.max_num_steps=null", None, "gdpo.max_num_steps"),
    (DRY + " gdpo.estimator=gdop", None, "did you mean gdpo"),
    (DRY + " gdpo.estimator={d}/absent.py:f", None, "absent.py"),
    (DRY + " gdpo.estimator={d}/mine.py:absent", None, "absent"),
    (DRY + " weights.transport={d}/mine.py:Mine", None, "mine.py:Mine must be a subclass of Transport"),
    (DRY + " weights.transport={d}/absent.py:Mine", None, "weights.transport: no such file"),
    (DRY + " gdpo.rewards=3", None, "gdpo.rewards: expected keys and values"),
    (DRY + " 'gdpo.rewards={correct: 1}'", None, "correct"),
    (DRY + " policy=3", None, "policy: expected keys and values"),
    (DRY + " policy.precision=float16", None, "float32, bfloat16"),
    (DRY + " policy.model_name={d}/absent", None, "neither a folder nor a hub name"),
    (DRY + " 'policy.model_name= '", None, "policy.model_name"),
    (DRY + " policy.model_name={d}/rows.jsonl", None, "policy.model_name"),
    (DRY + " policy.model_name={d}/absent policy.model_factory={d}/absent.py:make", None, "absent.py not found"),
    (DRY + " policy.model_name={d}/absent policy.model_factory={d}/factory.py:build", None, "has no function build"),
    (DRY + " policy.model_name={d}/absent policy.model_factory=factory", None, "expected file.py:function, got"),
    (DRY + " policy.tokenizer_name={d}/empty", None, "does not contain a tokenizer"),
    (DRY + " policy.lora.target_modules=[q_prj] policy.lora.rank=2", None, "did you mean q_proj"),
    (DRY + " policy.megatron_cfg.tensor_model_parallel_size=3", None, "does not divide the model's 2 heads"),
    (DRY + " run.dir=''", None, "run.dir"),
    (DRY + " rollout.window=2", None, "B = (0 + 1) * 4 - (2 - 1) = 3 groups in flight, below the 4"),
    (DRY + " rollout.max_staleness=1 rollout.window=6", None, "B = (1 + 1) * 4 - (6 - 1) = 3 groups in flight"),
    (DRY + " rollout.max_staleness=1 rollout.depth=9", None, "1 allows (B = (1 + 1) * 4 - (1 - 1) = 8); use at most 8"),
    (DRY + " rollout.max_staleness=1 rollout.depth=3", None, "depth: 3 groups in flight never fill a step of 4"),
    (DRY + " rollout.depth=deep", None, "rollout.depth: must be auto or a whole number"),
    (DRY + " rollout.sync_every=3 rollout.max_staleness=1", None, "sync_every - 1 = 2, above rollout.max_staleness 1"),
    (DRY + " rollout.kv=drian rollout.max_staleness=1", None, "did you mean drain"),
    (DRY + " rollout.kv=drain", None, "rollout.kv: has no effect"),
    (DRY + " rollout.group_timeout_s=-1", None, "rollout.group_timeout_s: must be more than 0"),
    (DRY + " rollout.group_timeout_s=9 rollout.min_valid=0.2", None, "0.2 of the 4 samples of a group is 1"),
    (DRY + " rollout.min_valid=0.9", None, "rollout.min_valid: has no effect"),
    (DRY + " rollout.replay_buffer.groups=2", None, "groups of earlier weights conflict with rollout.max_staleness 0"),
    (DRY + " rollout.replay_buffer={groups: 3} rollout.max_staleness=1", None, "rollout.replay_buffer"),
    (DRY + " rollout.max_staleness=1 rollout.replay_buffer.groups=3", None, "leave 1 new groups per step"),
    (DRY + " gdpo.dynamic_sampling.reroll_after=1", None, "gdpo.dynamic_sampling.reroll_after: has no effect"),
    (DRY + " run.name='${nothing}'", None, "run.name"),
    (DRY + " cluster.gpus_per_node=1.5", None, "cluster.gpus_per_node"),
    ("plan --sweep x", None, "--sweep"),
    (SIMULATE + " --staleness 1,x", None, "--staleness: 'x' is not a whole number"),
    (SIMULATE + " --staleness -1", None, "--staleness"),
    (SIMULATE + " --gpus 8", None, "--gpus, --split: the config has no GPUs"),
    (SIMULATE + " --gpus 0 cluster.gpus_per_node=8", None, "--gpus: must be at least 1"),
    (SIMULATE + " --gpus 2048 cluster.gpus_per_node=8", None, "--gpus: must be between 2 and 1024"),
    (SIMULATE + " --gpus 12 cluster.gpus_per_node=8", None, "not a multiple of cluster.gpus_per_node (8)"),
    (SIMULATE + " --split 1.5 cluster.gpus_per_node=8", None, "--split: must be between 0 and 1"),
    (SIMULATE + " --scheduler fifo", None, "'fifo' is not one of continuous, barrier"),
    (SIMULATE + " --depth 2 --staleness 1", None, "depth: must be between 4 (a batch) and 8 groups"),
    (SIMULATE + " --depth deep", None, "'deep' is not a whole number"),
    (SIMULATE + " --window 6 --staleness 1", None, "a window of 6 leaves room for 3 of the 4 groups"),
    (SIMULATE + " --kv throw", None, "--kv"),
    (SIMULATE + " --steps 0", None, "--steps: must be between 1 and 10000"),
    (SIMULATE + " --mean 99", None, "--mean: a mean of 99 is not between 0 and the cap of 16"),
    (SIMULATE + " --median 0", None, "lengths: mean must be more than 0 tokens"),
    (SIMULATE + " --decode-ms nan", None, "--decode-ms"),
    (SIMULATE + " --decode-ms 0", None, "a decoding step must take more than 0 s"),
    (SIMULATE + " --train-s -1", None, "--train-s: must be at least 0"),
    (SIMULATE + " --group-timeout-s 0", None, "group_timeout_s: must be more than 0"),
    (SIMULATE + " --calibration {d}/absent.json", None, "absent.json not found"),
    (SIMULATE + " --steps 2 --png {d}/absent/x.png", None, "--png"),
    (SIMULATE + " policy.model_name=nobody/unknown", None, "shape of nobody/unknown is unknown"),
    ("simulate --run {d}/absent", None, "--run: {d}/absent is not a run folder"),
    ("simulate --run {d}/run --calibration {d}/x", None, "--calibration: conflicts with --run"),
    ("plan --config {d}/absent.yaml", None, "config file not found"),
    (PLAN + " --gpu h1000 cluster.gpus_per_node=8 policy.precision=bfloat16", None, "h1000"),
    (PLAN + " --sweep 0", None, "--sweep"),
    (PLAN + " --sweep -3", None, "--sweep"),
    (PLAN + " --link 0 --gpu h100 cluster.gpus_per_node=8", None, "--link"),
    ("explain gdpo.estimater", None, "did you mean gdpo.estimator"),
    ("explain gdpo.estimator.x", None, "unknown key"),
    ("explain a b", None, "b"),
    ("explain metric/loos", None, "did you mean metric/loss"),
    ("explain metric/", None, "unknown metric"),
    ("reference --out {d}/absent", None, "is not a folder"),
    ("reference --out {d}/good.yaml", None, "is not a folder"),
    ("reference --check --out {d}/empty", None, "reference_config.md"),
    ("config", None, "WHAT"),
    ("config from-nemo", None, "from-nemo"),
    ("env", None, "ACTION"),
    ("env chekc x", None, "chekc"),
    ("doctor", None, "specify a run folder"),
    ("convert --to onnx {d}/model {d}/new", None, "onnx"),
    ("convert {d}/model {d}/new", None, "--to"),
    (PARITY + " --threshold x", None, "--threshold"),
    (EVAL + " --step x", None, "--step"),
    (EXPLAIN + " --groups x", None, "--groups"),
]
CONFIGS = [
    (DRY, gone("good.yaml"), "config file not found"),
    (DRY, empty("good.yaml"), "gdpo.rewards: must be set"),
    (DRY, binary("good.yaml"), "good.yaml"),
    (DRY, folder("good.yaml"), "good.yaml: cannot be read"),
    (DRY, loop("good.yaml"), "good.yaml"),
    (DRY, text("good.yaml", "[1, 2]"), "expected sections"),
    (DRY, text("good.yaml", "just words"), "good.yaml"),
    (DRY, text("good.yaml", "3"), "good.yaml"),
    (DRY, text("good.yaml", "gdpo: {rewards: {a: 1}\n"), "line 2: invalid YAML"),
    (DRY, text("good.yaml", "gdpo:\n\trewards: 1\n"), "line 2"),
    (DRY, text("good.yaml", "a: &a [*a]\n"), "good.yaml"),
    (DRY, text("good.yaml", "gdpo: !!python/object:os.system {}\n"), "good.yaml"),
    (DRY, text("good.yaml", "--- {}\n--- {}\n"), "good.yaml"),
    (DRY, added("good.yaml", "gdpo: {max_num_steps: 3}\n"), "duplicate key gdpo"),
    (DRY, added("good.yaml", "extra: 3\n"), "extra: unknown key"),
    (DRY, added("good.yaml", "3: 4\n"), "3: unknown key"),
    (DRY, added("good.yaml", "null: 4\n"), "good.yaml"),
    (DRY, added("good.yaml", "loss_fn:\n"), "loss_fn: is empty"),
    (DRY, added("good.yaml", "defaults: absent.yaml\n"), "config file not found"),
    (DRY, added("good.yaml", "defaults: good.yaml\n"), "inherits from itself"),
    (DRY, added("good.yaml", "defaults: [3]\n"), "defaults: expected a file name"),
    (DRY, added("good.yaml", "defaults: {a: b}\n"), "defaults: expected a file name"),
    (DRY, added("good.yaml", "defaults: empty\n"), "cannot be read"),
    (DRY, replaced("good.yaml", "name: good", "name: [1]"), "run.name"),
    (
        DRY,
        replaced("good.yaml", "correctness: 1.0", "correctness: much"),
        "gdpo.rewards.correctness: expected a number",
    ),
    (DRY, replaced("good.yaml", "correctness: 1.0", "correctness: .nan"), "gdpo.rewards.correctness"),
    (DRY, replaced("good.yaml", "correctness: 1.0", "corectness: 1.0"), "corectness"),
    (DRY, replaced("good.yaml", "env: {gsm8k: {}}", "env: {}"), "env: must not be empty"),
    (DRY, replaced("good.yaml", "env: {gsm8k: {}}", "env: [gsm8k]"), "env"),
    (DRY, replaced("good.yaml", "precision: float32", "precision: ${policy.model_name}"), "policy.precision"),
    (
        DRY,
        replaced("good.yaml", "max_total_sequence_length: 96", "max_total_sequence_length: 4096"),
        "exceeds the 2048",
    ),
    (TRAIN, replaced("good.yaml", "max_new_tokens: 16", "max_new_tokens: 96"), "leaves no room"),
    (TRAIN, gone("good.yaml"), "config file not found"),
    (TRAIN + " run.dir={d}/rows.jsonl", None, "run.dir"),
    (DRY + " run.dir={d}/rows.jsonl", None, "run.dir"),
    (DRY + " run.dir={d}/rows.jsonl/below", None, "run.dir"),
    (PLAN, binary("good.yaml"), "good.yaml"),
    (PLAN, text("model/config.json", "{}"), "has no model_type"),
    ("eval {d}/model --config {d}/good.yaml", empty("good.yaml"), "gdpo.rewards: must be set"),
    (ENV, binary("good.yaml"), "good.yaml"),
]
ROWS = [
    (DRY, gone("rows.jsonl"), "data.train.path: {d}/rows.jsonl not found"),
    (DRY, empty("rows.jsonl"), "rows.jsonl is empty"),
    (DRY, text("rows.jsonl", "\n\n"), "has no rows"),
    (DRY, binary("rows.jsonl"), "rows.jsonl:1: not valid JSON"),
    (DRY, folder("rows.jsonl"), "data.train.path"),
    (DRY, loop("rows.jsonl"), "data.train.path"),
    (DRY, added("rows.jsonl", '{"question": "x"'), "rows.jsonl:5: not valid JSON"),
    (DRY, added("rows.jsonl", "[]\n"), "rows.jsonl:5: a row must be a JSON object"),
    (DRY, added("rows.jsonl", "null\n"), "rows.jsonl:5: a row must be a JSON object"),
    (DRY, added("rows.jsonl", '{"answer": "1"}\n'), "row 4: no column 'question'"),
    (DRY, added("rows.jsonl", '{"question": null, "answer": "1"}\n'), "row 4: the column 'question' is empty"),
    (DRY, added("rows.jsonl", '{"question": 3, "answer": "1"}\n'), "row 4: 'question' must be text"),
    (DRY, text("rows.jsonl", '{"id": 1, "question": "a", "answer": "1"}\n' * 2), "the same id '1'"),
    (DRY, text("rows.jsonl", '{"messages": [{"role": "user"}], "answer": "1"}\n'), "message 0 (user) has no text"),
    (DRY, text("rows.jsonl", '{"question": "x"}\n'), "answer"),
    (DRY + " data.train.prompt_key=ask", None, "data.train.prompt_key: row 0: no column 'ask'"),
    (DRY + " 'data.train.columns={answer: anser}'", None, "did you mean 'answer'"),
    (DRY + " data.train.environment=gsm8", None, "did you mean gsm8k"),
    (DRY + " data.train.environment_key=answer", None, "data.train.environment_key: row 0"),
    (DRY + " data.train.size=0", None, "data.train.size"),
    (DRY + " data.train.path={d}/good.yaml", None, "must end with one of .jsonl"),
    (DRY + " data.train.path={d}/empty", None, "data.train.path: cannot load"),
    (DRY + " data.train.path={d}/rows.csv", text("rows.csv", "question,answer\na,b,c\n"), "not a readable CSV file"),
    (DRY + " data.train.path={d}/rows.csv", binary("rows.csv"), "not a readable CSV file"),
    (DRY + " data.train.path={d}/rows.csv", text("rows.csv", "question,answer\n"), "has no rows"),
    (DRY + " data.train.path={d}/rows.parquet", binary("rows.parquet"), "not a readable Parquet file"),
    (DRY + " data.train.path={d}/rows.json", text("rows.json", "{"), "not valid JSON"),
    (DRY + " data.train.path={d}/rows.json", text("rows.json", "{}"), "a list of JSON objects"),
    (DRY + " data.validation.path={d}/absent.jsonl", None, "data.validation.path"),
    (DRY + " data.train.path={d}/absent-*.jsonl", None, "data.train.path: no file matches"),
    (DRY + " data.train.path=[{d}/rows.jsonl,{d}/absent.jsonl]", None, "absent.jsonl not found"),
    (DRY + " data.train.path=[]", None, "data.train.path: must not be an empty list"),
    (DRY + " data.train.path=[[1]]", None, "data.train.path: must be a path or a list of paths"),
    (DRY + " data.train.path={d}/mine.py:absent", None, "has no function absent"),
    (DRY + " data.train.path={d}/rows.tsv", binary("rows.tsv"), "not a readable TSV file"),
    (DRY + " data.train.chat_template_kwargs=3", None, "data.train.chat_template_kwargs"),
    (
        DRY,
        replaced("good.yaml", "{gsm8k: {}}", "{functions: {functions: {correctness: length, format: 'http://u:p@h'}}}"),
        "must not contain a user",
    ),
    (
        DRY + " data.train.chat=true policy.tokenizer_name={d}/model",
        text("model/tokenizer.json", "{"),
        "no tokenizer in",
    ),
    (ENV, binary("rows.jsonl"), "rows.jsonl:1: not valid JSON"),
    (ENV, text("rows.jsonl", '{"quest": "x", "answer": "#### 1"}\n'), "quest"),
    ("eval {d}/model --config {d}/good.yaml", loop("rows.jsonl"), "data.train.path"),
]
MODELS = [
    (DRY, gone("model/config.json"), "has no config.json"),
    (DRY, empty("model/config.json"), "is not valid JSON"),
    (DRY, binary("model/config.json"), "is not valid JSON"),
    (DRY, folder("model/config.json"), "cannot be read"),
    (DRY, loop("model/config.json"), "config.json"),
    (DRY, text("model/config.json", "[]"), "is not a JSON object"),
    (DRY, replaced("model/config.json", "qwen2", "gpt2"), "model type 'gpt2' is not supported"),
    (DRY, replaced("model/config.json", '"model_type": "qwen2"', '"model_type": 3'), "has no model_type"),
    (DRY, replaced("model/config.json", '"hidden_size": 64', '"hidden_size": "64"'), "hidden_size"),
    (DRY, replaced("model/config.json", '"num_key_value_heads": 2', '"num_key_value_heads": 0'), "num_key_value_heads"),
    (
        DRY,
        replaced("model/config.json", '"hidden_size": 64', '"hidden_size": 64, "rope_scaling": 3'),
        "rotary parameters",
    ),
    (DRY, replaced("model/config.json", '"hidden_size": 64', '"hidden_size": 64, "architectures": 3'), "architecture"),
    (DRY, gone("model/model.safetensors"), "has no weights"),
    (DRY, empty("model/model.safetensors"), "is not a valid safetensors file"),
    (DRY, binary("model/model.safetensors"), "is not a valid safetensors file"),
    (DRY, folder("model/model.safetensors"), "model.safetensors"),
    (DRY, loop("model/model.safetensors"), "model.safetensors"),
    (DRY, text("model/model.safetensors.index.json", "{"), "is not a valid index of weights"),
    (TRAIN, empty("model/model.safetensors"), "is not a valid safetensors file"),
    (PARITY, gone("model"), "model folder not found"),
    (PARITY, empty("model/model.safetensors"), "is not a valid safetensors file"),
    (PARITY, binary("model/config.json"), "is not valid JSON"),
    (PARITY + " --layout tensor=3", None, "does not divide the model's 2 heads"),
    (PARITY + " --layout tensor=x", None, "--layout: 'tensor=x'"),
    (PARITY + " --layout tensr=2", None, "--layout: 'tensr=2'"),
    (PARITY + " --record {d}/absent.jsonl", None, "--record"),
    (PARITY + " --record {d}/rows.jsonl", None, "is not a rollout file"),
    (PARITY + " --record {d}/empty", None, "--record"),
    (PARITY + " --record {d}/" + ROLLOUTS, binary(ROLLOUTS), "is not a rollout file"),
    (PARITY + " --record {d}/" + ROLLOUTS, text(ROLLOUTS, "[1]\n"), "is not a rollout file"),
    (PARITY + " --record {d}/" + ROLLOUTS, empty(ROLLOUTS), "is empty"),
    (PARITY + " --threshold nan", None, "--threshold"),
    (PARITY + " --threshold -1", None, "--threshold"),
    (TO_CHECKPOINT, gone("model"), "model folder not found"),
    (TO_CHECKPOINT, binary("model/config.json"), "is not valid JSON"),
    (TO_CHECKPOINT, text("new", "mine"), "exists"),
    (TO_CHECKPOINT, text("new/mine", "mine"), "exists and is not empty"),
    (TO_CHECKPOINT + " --layout pipeline=5", None, "does not divide the model's 2 layers"),
    ("convert --to checkpoint {d}/model {d}/rows.jsonl/new", None, "rows.jsonl"),
]
ENVIRONMENTS = [
    ("env check nothing", None, "unknown environment 'nothing'"),
    ("env check gsm8k", None, "does not provide prompts"),
    ("env check digit_sort --rows 0", None, "--rows: must be between 1"),
    ("env check digit_sort env.x=1", None, "require --config"),
    ("env check {d}/absent.py:Mine", None, "absent.py"),
    ("env check {d}/mine.py:Absent", None, "Absent"),
    ("env check {d}/mine.py:number", None, "number"),
    ("env check gsm --config {d}/good.yaml", None, "did you mean 'gsm8k'"),
    (ENV + " env.gsm8k.plugin=3", None, "env.gsm8k.plugin"),
    (ENV + " env.gsm8k.plugin={d}/good.yaml:Mine", None, "env.gsm8k"),
    (ENV + " env.gsm8k.plugin={d}/mine.py:Mine", text("mine.py", "class Mine(:\n"), "env.gsm8k"),
    (ENV + " env.gsm8k.plugin={d}/mine.py:Mine", text("mine.py", "import no_such_package\n"), "no_such_package"),
    (ENV + " env.gsm8k.plugin={d}/mine.py:Mine", text("mine.py", "raise SystemExit(3)\n"), "env.gsm8k"),
    (ENV + " env.gsm8k.plugin={d}/mine.py:Mine", binary("mine.py"), "env.gsm8k"),
    (ENV + " env.gsm8k.plugin={d}/mine.py:Mine", folder("mine.py"), "env.gsm8k"),
    (ENV + " env.gsm8k.stric=true", None, "did you mean 'strict'"),
    (ENV + " env.gsm8k=3", None, "env.gsm8k"),
    (ENV + " env.gsm8k.num_workers=0", None, "env.gsm8k.num_workers"),
    (ENV + " rollout.env_workers=0", None, "rollout.env_workers"),
    (ENV + " rollout.env_timeout_s=0", None, "rollout.env_timeout_s"),
    (DRY + " env.gsm8k.plugin={d}/mine.py:Absent", None, "Absent"),
    (DRY + " env.gsm8k.num_workers=-1", None, "env.gsm8k.num_workers"),
    ("env new Bad-Name --dir {d}", None, "is not a valid environment name"),
    ("env new gsm8k --dir {d}", None, "the environment gsm8k already exists"),
    ("env new empty --dir {d}", None, "already exists"),
    ("env new mine --dir {d}/rows.jsonl", None, "rows.jsonl"),
]
CASES = [
    *COMMAND_LINE,
    *CONFIGS,
    *ROWS,
    *MODELS,
    *ENVIRONMENTS,
    *RUNS,
    *OBJECTIVES,
    *RECIPES,
    *HOSTILE,
    *BY_KIND,
    *IMAGES,
]
_DEADLINE_S = 300
_MOST_S = 10.0
"""Seconds of CPU that a refusal may cost, with those of child processes: time depends on the load."""


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return bad_input.make_world(tmp_path_factory.mktemp("world") / "good")


@pytest.fixture
def world(good, tmp_path, monkeypatch, request):
    """A copy of the good world at a place of its own, named in its configs; commands start in an empty folder there.

    A case without damage uses the good world itself, which its command must leave as it is.
    """
    case = getattr(request.node, "callspec", None)
    d = good if case and case.params["damage"] is None else _copy(good, tmp_path / "w")
    monkeypatch.chdir(d / "empty")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr(import_trial, "IDLE_S", 4.0)
    return d


def _copy(good, d):
    shutil.copytree(good, d)
    for name in ("good.yaml", "pairs.yaml", "run/config.yaml"):
        (d / name).write_text((d / name).read_text().replace(str(good), str(d)))
    return d


@pytest.fixture(scope="module", autouse=True)
def one_parser():
    """Build the parser of the command line once: it takes 3 ms of each case otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "_parser", functools.cache(cli._parser))
        yield


@contextlib.contextmanager
def _in_time():
    """Fail where the block waits: for a writer of a pipe, for the end of a file without one."""

    def late(*_):
        pytest.fail("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(_DEADLINE_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _seconds_of_cpu() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


@pytest.mark.parametrize(
    "command, damage, expected", CASES, ids=[f"{n:03d} {case[0][:40]}" for n, case in enumerate(CASES)]
)
def test_wrong_input_is_one_line_and_changes_nothing(command, damage, expected, world, capsys):
    if damage is not None:
        damage(world)
    before = snapshot(world)
    begin = _seconds_of_cpu()
    try:
        with _in_time():
            status = cli.main(shlex.split(command.replace("{d}", str(world))))
    except SystemExit as end:  # argparse
        status = end.code
    said = capsys.readouterr()
    assert status in (1, 2)
    assert said.err.count("\n") == 1 and said.err.startswith("error: "), said.err
    assert expected.replace("{d}", str(world)) in said.err
    assert snapshot(world) == before
    assert _seconds_of_cpu() - begin < _MOST_S


def test_there_are_enough_cases_and_each_command_has_some():
    assert len(HOSTILE) >= 300 and len({(command, expected, id(damage)) for command, damage, expected in CASES}) == len(
        CASES
    )
    commands = (
        "train",
        "plan",
        "simulate",
        "doctor",
        "explain",
        "config",
        "explain-advantages",
        "health",
        "report",
        "eval",
        "chat",
        "push",
        "parity",
        "convert",
        "reference",
    )
    assert all(any(case[0].split(" ")[0] == command for case in CASES) for command in (*commands, "env"))


def test_the_world_is_good_before_it_is_spoilt(world, capsys):
    for command in (
        "train --dry-run --config {d}/good.yaml",
        CHECK,
        HEALTH,
        EXPLAIN,
        ENV,
        "plan --config {d}/good.yaml",
    ):
        assert cli.main(shlex.split(command.replace("{d}", str(world)))) == 0, capsys.readouterr().err


NASTY = "\x1b[31mred\x1b]0;owned\x07\u202e"


@pytest.mark.filterwarnings("error:Glyph")
def test_texts_of_run_files_reach_the_terminal_printable(world, capsys):
    status = {"time": 1.0, "host": NASTY, "driver": 1, "waits": [], "queues": {NASTY: NASTY}}
    (world / "run" / "status.json").write_text(json.dumps(status))
    rows = [{"step": step, f"reward/{NASTY}/mean": value} for step, value in ((1, 1e308), (2, 0.5), (3, 10**400))]
    (world / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (world / "run" / "alerts.jsonl").write_text(json.dumps({"step": 1, "text": NASTY, "level": NASTY}) + "\n")
    (world / "run").rename(world / NASTY)
    run = shlex.quote(f"{world}/{NASTY}")
    limits = f"checks: [{{metric: {json.dumps(f'reward/{NASTY}/mean')}, at: end, min: 0.0}}]"
    (world / "limits.yaml").write_text(limits)
    (world / NASTY / "journal.jsonl").write_text(
        json.dumps({**STEP, "groups": [[0, NASTY, [[0, [[5, 3]], "ok"]]]]}) + "\n"
    )
    shown = ("watch --once", f"compare --out {world}/c", f"health --thresholds {world}/limits.yaml")
    for command in (*shown, "replay --audit", "report"):
        cli.main([*command.split(), *shlex.split(run)])
        said = capsys.readouterr()
        unprintable = {letter for letter in said.out + said.err if not letter.isprintable()} - {"\n"}
        assert not unprintable, (command, unprintable)
        assert "red" in said.out, command


def test_paths_reach_the_terminal_printable(world, capsys):
    (world / NASTY).mkdir()
    shutil.copytree(world / "model", world / NASTY / "model")
    name = json.dumps(NASTY)
    for command in (
        "push {nasty}/model o/r --dry-run",
        f"plan --config {world}/good.yaml --calibrate {world}/run --out {{nasty}}/rates.json",
        f"simulate --config {world}/good.yaml --png {{nasty}}/picture.png",
        f"config from-nemo-rl {world}/recipe.yaml --out {{nasty}}/made.yaml",
        "env new {nasty}/mine",
        f"train --dry-run --config {world}/good.yaml run.name={name} run.dir={{nasty}}/run",
        f"chain --dry-run {world}/good.yaml run.name={name} run.dir={{nasty}}/run",
    ):
        with contextlib.suppress(SystemExit):
            cli.main([part.replace("{nasty}", f"{world}/{NASTY}") for part in shlex.split(command)])
        said = capsys.readouterr()
        unprintable = {letter for letter in said.out + said.err if not letter.isprintable()} - {"\n"}
        assert not unprintable, (command, unprintable)
