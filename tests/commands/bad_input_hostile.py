"""Cases of test_bad_input.py that somebody means: endless files, texts that grow, names that lead elsewhere, code that
leaves, numbers out of all range."""

from __future__ import annotations

import json
import os
from pathlib import Path

from bad_input import MODEL, Damage, gone, text, write
from bad_input_of_runs import CALIBRATE, EVAL, EXPLAIN, HEALTH, PLAN, RECIPE, REPORT, ROLLOUTS, SCRIPT, STEP, TO_HF

DRY = "train --dry-run --config {d}/good.yaml"
TRAIN = "train --config {d}/good.yaml"
ENV = "env check gsm8k --config {d}/good.yaml"
DUMP = "explain-advantages --from verl {d}/dump.jsonl"
MINE = " env.gsm8k.plugin={d}/mine.py:Mine"
DEEP = "[" * 100_000
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
LONG_NUMBER = "9" * 5000
PIPE = "it is a pipe or a device"


def pipe(name: str) -> Damage:
    """A pipe in the place of a file: opening it waits for a writer who never comes."""

    def swap(d: Path) -> None:
        if (d / name).exists():
            gone(name)(d)
        (d / name).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(d / name)

    return swap


def endless(name: str) -> Damage:
    """A device without an end in the place of a file."""

    def swap(d: Path) -> None:
        if (d / name).exists():
            gone(name)(d)
        (d / name).symlink_to("/dev/zero")

    return swap


def deep(name: str) -> Damage:
    """A hundred thousand brackets in the place of a file."""
    return text(name, DEEP + "\n")


def several(*damages: Damage) -> Damage:
    def change(d: Path) -> None:
        for damage in damages:
            damage(d)

    return change


def model(**fields) -> Damage:
    return lambda d: write(d, "model/config.json", json.dumps({**MODEL, **fields}))


def sample(**fields) -> Damage:
    """Change columns of the first sample of a run."""

    def change(d: Path) -> None:
        file = d / ROLLOUTS
        first, *others = file.read_text().splitlines(keepends=True)
        file.write_text(json.dumps({**json.loads(first), **fields}) + "\n" + "".join(others))

    return change


# (command, file, what its message names); each gets a pipe, a device, a text too deep
READ = [
    (DRY, "good.yaml"), (DRY, "model/config.json"), (DRY, "model/model.safetensors.index.json"),
    (HEALTH, "limits.yaml"), (HEALTH, "run/metrics.jsonl"),
    (REPORT, "run/alerts.jsonl"), (REPORT, ROLLOUTS), ("doctor {d}/run", "run/status.json"),
    ("replay {d}/run", "run/journal.jsonl"), (EXPLAIN, "run/config.yaml"), (EXPLAIN, ROLLOUTS),
    (CALIBRATE, "run/metrics.jsonl"), (EVAL, STEP + "/files.json"), (EVAL, "run/config.yaml"),
    (TO_HF, STEP + "/files.json"), (RECIPE, "recipe.yaml"), (SCRIPT, "trl.py"),
    (PLAN + " --calibration {d}/c.json", "c.json"), ("config from-trl {d}/recipe.yaml", "recipe.yaml"),
    ("config from-axolotl {d}/recipe.yaml", "recipe.yaml"),
    ("chat {d}/model", "model/generation_config.json"), ("chat {d}/run", "run/config.yaml"), (DRY, "rows.jsonl"),
    ("parity --model {d}/model", "model/config.json"),
    ("convert --to checkpoint {d}/model {d}/new", "model/config.json"),
    (DRY, "model/model.safetensors"), ("rollouts {d}/run --out {d}/x", ROLLOUTS),
    ("parity --model {d}/model --record {d}/" + ROLLOUTS, ROLLOUTS),
    (DRY + " gdpo.estimator={d}/mine.py:number", "mine.py"), (ENV + MINE, "mine.py"),
    ("eval {d}/model --config {d}/good.yaml", "good.yaml"), (DRY + " policy.model_name={d}/absent "
     "policy.model_factory={d}/factory.py:make", "factory.py"),
]  # fmt: skip
FILES = [
    (command, damage(name), "")
    for command, name in READ
    for damage in (pipe, endless, lambda name: text(name, DEEP + "\n"))
]
YAMLS = [
    (command, text(name, content), said)
    for command, name in (
        (DRY, "good.yaml"), (HEALTH, "limits.yaml"), (RECIPE, "recipe.yaml"), ("eval {d}/run", "run/config.yaml"),
        ("config from-trl {d}/recipe.yaml", "recipe.yaml"), (EXPLAIN, "run/config.yaml"),
        ("config from-axolotl {d}/recipe.yaml", "recipe.yaml"),
    )
    for content, said in (
        (BOMB, "it contains more than 1,000,000 values"),
        ("a: " + "{b: " * 70 + "1" + "}" * 70, "nested more than 64 levels deep"),
        ("a: &a\n  <<: *a\n", ""),
        (f"a: {LONG_NUMBER}\n", ""),
        ("a: 2026-13-45\n", ""),
        ("a: !!binary x\n", ""),
        ("? [1, 2]\n: 3\n", ""),
        ("? {a: 1}\n: 3\n", ""),
        ("a: !!python/object/apply:os.system [touch /tmp/x]\n", ""),
        ("a: \x00\n", ""),
        ("%YAML 9.9\n---\na: 1\n", ""),
        ("a: *b\n", ""),
    )
]  # fmt: skip
NUMBERS = [
    (f"{DRY} {key}={value}", None, key)
    for key in (
        "gdpo.max_num_steps", "gdpo.num_prompts_per_step", "gdpo.epsilon", "gdpo.rewards.correctness", "run.seed",
        "policy.megatron_cfg.optimizer.lr", "policy.generation.temperature", "policy.max_total_sequence_length",
        "rollout.env_workers", "rollout.env_timeout_s", "cluster.num_nodes", "rollout.max_staleness",
        "policy.megatron_cfg.tensor_model_parallel_size", "weights.bucket_mib", "loss_fn.ratio_clip_max",
    )
    for value in (".nan", ".inf", "-.inf", "1e300", "-1e300", "1" + "0" * 23, "-1" + "0" * 23, LONG_NUMBER)
]  # fmt: skip
OPTIONS = [
    (DRY + " rollout.env_workers=100000", None, "rollout.env_workers: must be at least 1 and at most 4,096"),
    (DRY + " env.gsm8k.num_workers=100000", None, "env.gsm8k.num_workers"),
    (ENV + " env.gsm8k.num_workers=1" + "0" * 30, None, "env.gsm8k.num_workers"),
    (DRY + " 'gdpo.x=" + DEEP + "'", None, "gdpo.x"),
    (DRY + " 'gdpo.rewards={correctness: *a}'", None, "gdpo.rewards"),
    (PLAN + " --link nan", None, "--link"),
    (PLAN + " --link inf --gpu h100 cluster.gpus_per_node=8", None, "--link"),
    (PLAN + " --link 1e300", None, "--link"),
    (PLAN + " --sweep 1" + "0" * 23, None, "--sweep"),
    ("simulate --config {d}/good.yaml --steps 1" + "0" * 23, None, "--steps"),
    ("simulate --config {d}/good.yaml --mean inf", None, "--mean"),
    ("simulate --config {d}/good.yaml --decode-ms inf", None, "--decode-ms"),
    ("simulate --config {d}/good.yaml --train-s 1e300", None, "train_s: must be at most"),
    ("drill --config {d}/good.yaml --faults engine-kil", None, "--faults: 'engine-kil' is not one of driver-kill"),
    ("drill --config {d}/good.yaml --steps 0", None, "--steps: must be between 1 and 1000"),
    ("drill --config {d}/good.yaml --patience nan", None, "--patience: must be between 1"),
    ("drill --config {d}/good.yaml --seed -1", None, "--seed: must be between 0"),
    ("drill --config {d}/good.yaml --out {d}/model", None, "--out: {d}/model already exists"),
    ("drill --config {d}/absent.yaml", None, "absent.yaml"),
    ("drill --config {d}/good.yaml gdpo.num_prompts_per_step=0", None, "gdpo.num_prompts_per_step"),
    ("chat {d}/model --temperature inf", None, "--temperature"),
    ("chat {d}/model --max-new-tokens 1" + "0" * 23, None, "--max-new-tokens"),
    ("chat {d}/model --seed 1" + "0" * 30, None, "--seed"),
    ("parity --model {d}/model --threshold inf", None, "--threshold"),
    ("parity --model {d}/model --layout tensor=1" + "0" * 23, None, "does not divide"),
    ("env check digit_sort --rows 1" + "0" * 23, None, "--rows"),
    (EVAL + " --step -1", None, "--step"),
    ("replay {d}/run --to 1" + "0" * 30, None, ""),
    ("rollouts {d}/run --step -5", None, ""),
    (EXPLAIN + " --groups 1" + "0" * 5000, None, "--groups"),
    (HEALTH, text("limits.yaml", "checks: [{metric: x, at: end, min: .nan}]"), "limits.yaml"),
    (HEALTH, text("limits.yaml", "checks: [{metric: x, at: end, min: 1, window: 1e300}]"), "limits.yaml"),
    (HEALTH, text("run/metrics.jsonl", '{"step": ' + LONG_NUMBER + "}\n\n"), "metrics.jsonl"),
    (HEALTH, text("run/metrics.jsonl", '{"step": -4, "loss": 1}\n\n'), "metrics.jsonl"),
    (DRY, text("rows.jsonl", '{"question": ' + DEEP + "\n"), "rows.jsonl:1"),
    (DRY, text("rows.jsonl", '{"question": "a", "answer": ' + LONG_NUMBER + "}\n"), "rows.jsonl:1"),
    *(
        (
            DRY,
            text("rows.jsonl", '{"question": "a", "answer": "1", "x": ' + value + "}\n"),
            "row 0: the column 'x' is nest",
        )
        for value in ("[" * 900 + "]" * 900, '{"a": ' * 65 + "1" + "}" * 65)
    ),
    (
        TRAIN + " data.train.path={d}/mine.py:rows",
        text("mine.py", "def rows():\n x = 1\n for _ in range(5000): x = [x]\n return [{'question': 'a', 'x': x}]"),
        "mine.py:rows: row 0: the column 'x' is nested more than 64 levels deep",
    ),
    (DRY, text("good.yaml", "defaults: [" + "good.yaml, " * 5 + "]"), "inherits from itself"),
    (DRY, model(num_hidden_layers=10**9), "num_hidden_layers must be at most"),
    (PLAN + " policy.model_name={d}/model", model(num_hidden_layers=10**9), "num_hidden_layers must be at most"),
    (DRY, model(rms_norm_eps=float("nan")), "rms_norm_eps in the model's config.json must be a positive number"),
    (DRY, model(rope_theta=-1.0), "rope_theta in the model's config.json must be a positive number"),
    (DRY, model(num_key_value_heads=3), "must be a multiple of num_key_value_heads"),
    (DUMP, text("dump.jsonl", '{"input": "a", "output": "b", "r": 1}\n{"output": "b", "r": 0}\n'), "has no input"),
    (
        DUMP,
        text("dump.jsonl", '{"input": "a", "output": "b", "r": 1, "advantage": "x"}\n'),
        "dump.jsonl: sample 1: advantage must be a number",
    ),
    (
        DUMP,
        text("dump.jsonl", '{"input": "a", "output": "b", "r": 1}\n[1]\n'),
        "dump.jsonl:2: is not a JSONL file",
    ),
    *(
        ("inspect {d}/run --out {d}/page", sample(**{name: None}), f"rollout file (ValueError: {name} of sample 1 is")
        for name in ("outcome", "finish_reason", "environment", "sample_index")
    ),
    (DUMP, text("dump.jsonl", '{"input": "a", "r": 1, "r": 0}\n'), "dump.jsonl:1: is not a JSONL file"),
    (DUMP, pipe("dump.jsonl"), PIPE),
    *(
        ("conformance {d}/mine.py:f", text("mine.py", f"def f(*_, **__):\n {body}\n"), "FUNCTION: worked example")
        for body in ("return [[1]]", "return 'x'", "return object()")
    ),
    (DUMP, text("dump.jsonl", '{"input": "a", "output": "b", "r": ' + "9" * 400 + "}\n"), "r must be a number"),
]
MODELS = [
    (DRY, model(**{key: value}), "")
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings",
                "intermediate_size")
    for value in (10**23, -1, 1e300, True, None, [1], "64")
    if (key, value) != ("max_position_embeddings", None)  # a model that names none has no bound
]  # fmt: skip
PATHS = [
    (DRY + " run.name=../.. run.dir=results/x", None, "run.name"),
    (DRY + " run.name=../x", None, "run.name"),
    (DRY + " run.name=a/../../x", None, "run.name"),
    (DRY + " run.name=/etc/x", None, "run.name"),
    (DRY + " run.dir=/etc/passwd", None, "run.dir"),
    (DRY + " run.dir=/etc", None, "run.dir: /etc is a system folder"),
    (TRAIN + " run.dir=/etc/gdpo", None, "run.dir: /etc/gdpo is a system folder"),
    (TRAIN + " run.dir=/", None, "run.dir"),
    (TRAIN + " run.dir=/proc/1/x", None, "run.dir"),
    (TRAIN + " run.dir=/dev/null", None, "run.dir"),
    (TRAIN + " run.dir=" + "x" * 5000, None, "run.dir: is longer than"),
    (TRAIN + " run.dir=" + "x" * 300, None, "run.dir"),
    (TRAIN + " run.dir={d}/rows.jsonl/x", None, "run.dir"),
    (
        TRAIN + " policy.model_name=some/loop",
        lambda d: _loop(d / "empty" / "some" / "loop"),
        "is a broken symbolic link",
    ),
    (DRY + " policy.model_name=some/loop", lambda d: _loop(d / "empty" / "some" / "loop"), "is a broken symbolic link"),
    (DRY + " policy.tokenizer_name={d}/tok", lambda d: _loop(d / "tok"), "is a broken symbolic link"),
    (DRY + " data.train.path={d}/x.jsonl", lambda d: _loop(d / "x.jsonl"), "is a broken symbolic link"),
    (DRY + " data.train.path={d}/x.jsonl", lambda d: os.mkfifo(d / "x.jsonl"), "not a file"),
    (DRY + " data.train.path=/dev/zero", None, "not a file"),
    (DRY + " policy.model_name=/dev/zero", None, "policy.model_name"),
    ("report /dev/zero", None, ""),
    ("report /proc/self", None, ""),
    ("health /dev", None, ""),
    ("doctor /", None, "status.json"),
    ("push /dev/zero me/mine", None, ""),
    ("convert --to hf /dev/zero {d}/new", None, ""),
    ("env new ../x --dir {d}", None, "is not a valid environment name"),
    ("rollouts {d}/run --out /proc/x/y", None, "--out"),
]


def _loop(place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(place)


WHOLE = """
class Mine:
    reward_names = ("correctness", "format")
    def verify(self, t): return []
def mine(table, settings): return None
"""
CODE = [
    (command, text("mine.py", content + WHOLE), said)
    for content, said in (
        ("import os\nos._exit(0)\n", "it calls os._exit(0)"),
        ("import sys\nsys.exit(0)\n", "SystemExit"),
        ("raise SystemExit\n", "SystemExit"),
        ("raise BaseException('x')\n", ""),
        ("import mine\nmine.x\n", ""),
        ("x = " + "(" * 300 + "\n", ""),
        ("def f(): f()\nf()\n", ""),
    )
    for command in (ENV + MINE, TRAIN + MINE, DRY + " gdpo.estimator={d}/mine.py:mine")
] + [
    (command, text("mine.py", content + WHOLE), said)
    for command, content, said in (
        (TRAIN + MINE, "import ctypes\nctypes.string_at(0)\n", "a process that imports it is killed by SIGSEGV"),
        (
            DRY + " gdpo.estimator={d}/mine.py:mine",
            "import os\nos.abort()\n",
            "a process that imports it is killed by SIG",
        ),
        (ENV + MINE, "import os\nos.kill(os.getpid(), 9)\n", "a process that imports it is killed by SIGKILL"),
        (ENV + MINE, "import ctypes\nctypes.CDLL(None)._exit(0)\n", "a process that imports it exits with status 0"),
        (ENV + MINE, "import os\nos.kill(os.getpid(), 15)\n", "a process that imports it is killed by SIGTERM"),
        (
            TRAIN + MINE,
            "import threading\nthreading.Event().wait()\n",
            "its import is stuck: no CPU time or I/O for 4 s",
        ),
    )
]
HOSTILE = [*FILES, *YAMLS, *NUMBERS, *OPTIONS, *MODELS, *PATHS, *CODE]
