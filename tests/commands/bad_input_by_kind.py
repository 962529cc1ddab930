"""Cases of test_bad_input.py, by the kind of file: what each reader refuses, and with which words."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

from bad_input import EMBEDDING_ONLY, EMPTY_SAFETENSORS, Damage, replaced, text, write
from bad_input_of_runs import CALIBRATE, HEALTH, RECIPE, REPORT

DRY = "train --dry-run --config {d}/good.yaml"
HALF = r"half of a surrogate pair (\ud83d)"
"""A lone surrogate is legal in JSON and in Python and has no bytes in UTF-8: it is refused where it comes in."""


def weights(content: bytes) -> Damage:
    def write_weights(d: Path) -> None:
        (d / "model" / "model.safetensors").write_bytes(content)

    return write_weights


def tokenizer(**fields: object) -> Damage:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **fields}
    return text("model/tokenizer_config.json", json.dumps(settings))


def embedding(kind: str, value: bytes) -> Damage:
    """An embedding of one number, as its bytes."""
    entry = {"dtype": kind, "shape": [1], "data_offsets": [0, len(value)]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    return weights(len(header).to_bytes(8, "little") + header + value)


ROW = '{"question": "a", "answer": "#### 1"}\n'
HALF_WRITTEN = r"{% for message in messages %}{{ message.content }}{{ '\ud83d' }}{% endfor %}"
HALF_PAIRS = [
    *(
        (command, text("rows.jsonl", ROW + ROW.replace('"a"', r'"a\ud83d"')), "rows.jsonl:2: it contains " + HALF)
        for command in (DRY, "train --config {d}/good.yaml", "env check gsm8k --config {d}/good.yaml")
    ),
    (DRY, text("rows.jsonl", ROW + ROW.replace('"a"', r'"a", "\udc00": 1')), "rows.jsonl:2: it contains half"),
    (DRY, text("rows.jsonl", ROW + ROW.replace('"a"', '"a", "x": 1, "x": 2')), "it contains the key 'x' twice"),
    (DRY + " data.train.path={d}/x.json", text("x.json", '["{}"]'.format(r"\udc00")), "x.json: it contains half"),
    (
        DRY + " data.train.path={d}/mine.py:rows",
        text("mine.py", "def rows():\n    return [{'question': None, 'answer': 1}]"),
        "row 0: the column 'question' is empty",
    ),
    (
        "env check gsm8k --config {d}/good.yaml data.train.path={d}/x.jsonl",
        text("x.jsonl", '{"question": 5, "answer": "1"}'),
        "'question' must be text or a list of messages, got int",
    ),
    (
        "train --config {d}/good.yaml data.train.path={d}/mine.py:rows",
        text("mine.py", r"def rows(): return [{'question': 'a', 'answer': '#### 1'}, {'question': '\ud83d'}]"),
        "mine.py:rows: row 1: it contains " + HALF,
    ),
    ("train --dry-run --config {d}/pairs.yaml",
     text("pairs.jsonl", r'{"prompt": "a", "chosen": "\ud83d", "rejected": "a"}'),
     "pairs.jsonl:1: it contains " + HALF),
    (DRY + " data.train.chat=true", tokenizer(chat_template=HALF_WRITTEN),
     "row 0: the chat template rejected the row: HalfPair: it contains " + HALF),
    (DRY, text("good.yaml", r'run: {name: "\ud83d"}'), "good.yaml: it contains " + HALF),
    (DRY + r""" 'run.name="\ud83d"'""", None, "run.name: it contains " + HALF),
    (DRY + " run.dir=\udcff", None, r"run.dir: it contains half of a surrogate pair (\udcff)"),
    (DRY, text("model/config.json", r'{"model_type": "\ud83d"}'), HALF),
    (HEALTH, text("limits.yaml", r'checks: [{metric: "\ud83d", at: end, min: 0.0}]'), HALF),
    (RECIPE, text("recipe.yaml", r'grpo: {x: "\ud83d"}'), HALF),
]  # fmt: skip
WEIGHTS = [
    *((DRY, embedding(kind, value), "model.embed_tokens.weight contains NaN or infinite values")
      for kind, value in (("F32", struct.pack("<f", float("nan"))), ("F32", struct.pack("<f", float("-inf"))),
                          ("F16", struct.pack("<e", float("nan"))), ("BF16", b"\xc0\x7f"))),
    (DRY, weights(EMPTY_SAFETENSORS), "has no tensor model.embed_tokens.weight of a qwen2 model; the folder contains"),
    (DRY, weights(EMBEDDING_ONLY.replace(b"embed_tokens", b"other_tokens")), "for example backbone.embeddings"),
]  # fmt: skip


def doubled_parents(name: str, key: str) -> Damage:
    """A file with two parents, each with two, 22 times."""

    def write_parents(d: Path) -> None:
        for level in range(22):
            write(d, f"p{level}.yaml", f"defaults: [p{level + 1}.yaml, p{level + 1}.yaml]\n")
        write(d, "p22.yaml", key)
        write(d, name, "defaults: p0.yaml\n")

    return write_parents


def doubled(first: str, second: str, section: str) -> str:
    """A section whose every value is the one before twice, from ``first`` on, 40 times."""
    lines = [f"a0: {first}", *(f"a{n}: {second.replace('A', '${' + f'{section}a{n - 1}' + '}')}" for n in range(1, 41))]
    return "{" + ", ".join(lines) + "}"


def gguf_of_arrays(d: Path) -> None:
    """A GGUF file whose only value is an array of arrays, 100,000 deep."""
    nested = struct.pack("<IQ", 9, 1) * 100_000 + struct.pack("<IQ", 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    (d / "model.gguf").write_bytes(head + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9) + nested)


LARGE = "expand to more than 1,000,000 characters"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
NO_HUB_NAMES = ("~nobody/x", "a/../b", "org/", "o/..", "o/a--b", "'o rg/x'")
BOMBS = [
    (DRY, doubled_parents("good.yaml", "run: {}"), "good.yaml inherits from more than 100 files"),
    (RECIPE, doubled_parents("recipe.yaml", "grpo: {}"), "recipe.yaml: inherits from more than 100 files"),
    *(
        (DRY, replaced("good.yaml", "env: {gsm8k: {}}", f"env: {{gsm8k: {doubled(first, second, section)}}}"), LARGE)
        for first, second, section in (
            ("xxxxxxxxxx", "'AA'", "env.gsm8k."),
            ("xxxxxxxxxx", "'AA'", "."),
            ("{x: y}", "{x: 'A', y: 'A'}", "env.gsm8k."),
            ("xxxxxxxxxx", "['A', 'A']", "env.gsm8k."),
        )
    ),
    (RECIPE, text("recipe.yaml", f"grpo: {doubled('x', chr(39) + 'AA' + chr(39), 'grpo.')}"), LARGE),
    (DRY + "".join(f" 'env.gsm8k.b{n}=${{env.${{run.name}}}}'" for n in range(9)), None, "nested references such as"),
    (DRY + " policy.model_name={d}/model.gguf", gguf_of_arrays, "arrays are nested more than 8 deep"),
    (DRY + " data.train.chat=true", tokenizer(chat_template=LOOPS), "elements and steps in total for one message"),
    *((DRY + " data.train.chat=true", tokenizer(chat_template=made), "creates a value with more than 1,000,000")
      for made in ("{{ 'x' * 10**10 }}", "{{ '%1000000000d' % 1 }}", "{{ '{:>9999999999}'.format(1) }}")),
    *((DRY + f" policy.model_name={name}", None, "is neither a folder nor a hub name") for name in NO_HUB_NAMES),
    *((DRY, tokenizer(model_max_length=value), "tokenizer") for value in ("x", [1], {"a": 1}, True)),
    *((DRY, replaced("model/config.json", "{", f'{{"layer_types": {value}, '), "layer_types must be a list")
      for value in ("5", '"x"', "true")),
]  # fmt: skip
DOCTOR = "doctor {d}/run"
STATUS = {"time": 1.0, "host": "h", "driver": 1, "waits": []}
WAIT = {"what": "a", "owner": "b", "since": 1.0, "deadline": None}
ROW_OF_METRICS = {"step": 2, "loss": 0.1, "time/train": 1.0}


def status(**fields: object) -> Damage:
    return text("run/status.json", json.dumps({**STATUS, **fields}))


def metrics(**fields: object) -> Damage:
    rows = [{**ROW_OF_METRICS, "step": 1}, {**ROW_OF_METRICS, **fields}]
    return text("run/metrics.jsonl", "".join(json.dumps(row) + "\n" for row in [*rows, {**ROW_OF_METRICS, "step": 3}]))


RUN_FILES = [
    *(
        (DOCTOR, status(**{key: value}), f"is not a valid run status ({key}")
        for key, value in (
            ("time", None), ("time", [1]), ("time", float("nan")), ("time", 1e300), ("host", 3), ("driver", "x"),
            ("driver", -1), ("driver", 10**30), ("driver", True), ("waits", {"a": 1}), ("waits", [3]),
            ("waits", [{**WAIT, "since": "x"}]), ("waits", [{**WAIT, "deadline": []}]), ("waits", [{"what": 1}]),
            ("roles", []), ("roles", {"a": 3}), ("roles", {"a": ["h", -1]}), ("queues", [1]), ("queues", {"a": []}),
            ("logs", 5), ("outcome", []), ("step", "x"),
        )
    ),
    (DOCTOR, text("run/status.json", "[1]"), "is not a valid run status"),
    (DOCTOR, text("run/status.json", "{"), "is not a valid run status ("),
    *(
        (f"{command} {{d}}/run", text("run/config.yaml", content), "config.yaml is not a config")
        for command in ("watch --once", "compare")
        for content in ("3", "gdpo: 3", "gdpo:", "1: {}", "[a]")
    ),
    *(
        (
            REPORT,
            text("run/alerts.jsonl", json.dumps({"step": 1, "text": "a", **wrong}) + "\n"),
            "line 1: not a valid alert",
        )
        for wrong in ({"step": "x"}, {"step": -1}, {"step": 1e300}, {"text": 3}, {"level": 3}, {"time": "x"})
    ),
    *((REPORT, metrics(step=value), "line 2: not a valid metrics row") for value in (-1, True, 10**30, 1.5)),
    *(
        (CALIBRATE, metrics(**{name: value}), f"metrics.jsonl: {name} of step 2 must be")
        for name, value in (("time/train", -1), ("time/train", 10**400), ("time/rollout", 0), ("rollout/tokens", 0))
    ),
]  # fmt: skip
AUDIT = "replay {d}/run --audit"
STEP = {"step": 1, "groups": [[0, "train/0", [[0, [[0, 3]], "ok"]]]], "dropped": [], "position": 1, "published": 1,
        "total_updates": 1, "again": []}  # fmt: skip


def journal(**fields: object) -> Damage:
    lines = [json.dumps({**STEP, **fields}), json.dumps({**STEP, "step": 2})]
    return text("run/journal.jsonl", "\n".join(lines) + "\n")


def ledger(content: object) -> Damage:
    def write_both(d: Path) -> None:
        journal()(d)
        replaced("run/checkpoints/step_1/state.json", "{", f'{{"ledger": {json.dumps(content)}, ')(d)

    return write_both


JOURNALS = [
    *(
        (command, journal(**{key: value}), f"journal.jsonl, line 1: not a valid step of a journal ({key})")
        for command in (AUDIT, "replay {d}/run")
        for key, value in (("step", "x"), ("groups", 3), ("position", None))
    ),
    *(
        (AUDIT, journal(**{key: value}), f"journal.jsonl, line 1: not a valid step of a journal ({key})")
        for key, value in (
            ("step", -1), ("step", 1.5), ("step", True), ("step", 10**30), ("groups", {"a": 1}), ("groups", [3]),
            ("groups", [[0, "a"]]), ("groups", [["0", "a", []]]), ("groups", [[0, 3, []]]), ("groups", [[0, "a", [3]]]),
            ("groups", [[0, "a", [[0, [["x", 1]], "ok"]]]]), ("groups", [[0, "a", [[0, [[0, 1, 2]], "ok"]]]]),
            ("groups", [[0, "a", [[0, [], 3]]]]), ("groups", [[0, "a", [[0, [], "ok", 3]]]]),
            ("dropped", [3]), ("dropped", [["x", "a"]]), ("dropped", {}),
            ("position", float("nan")), ("published", "x"), ("total_updates", []), ("again", [[]]), ("again", 3),
        )
    ),
    *((AUDIT, ledger(value), "step_1 is damaged (state.json is not readable")
      for value in ({"a": 1}, {"position": "x", "dropped": [], "retired": []},
                    {"position": 1, "dropped": [3], "retired": []}, {"position": 1, "dropped": [], "retired": ["x"]},
                    {"position": 10**18, "dropped": [], "retired": []})),
]  # fmt: skip


def looped(d: Path) -> None:
    """Two links that name each other."""
    (d / "l1").symlink_to("l2")
    (d / "l2").symlink_to("l1")


def pipe(d: Path) -> None:
    """A pipe without a reader, which opening for writing waits for."""
    os.mkfifo(d / "pipe")


ODD_PATHS = [
    (RECIPE + " --out {d}/pipe", pipe, "pipe cannot be written"),
    *((command.replace("LOOP", "{d}/l1"), looped, "l1")
      for command in ("chat LOOP", "eval LOOP", "convert --to hf LOOP {d}/new", "inspect LOOP", "report LOOP",
                      "push LOOP o/r --dry-run", "watch --once LOOP", "compare LOOP", "explain-advantages LOOP",
                      "replay LOOP", "train --dry-run --config LOOP")),
    *((f"{command} 'a\0b'", None, "an argument contains a NUL character")
      for command in ("train --dry-run --config", "watch --once", "report", "health", "inspect", DRY + " run.dir=x")),
]  # fmt: skip
BY_KIND = [*JOURNALS, *ODD_PATHS, *HALF_PAIRS, *WEIGHTS, *BOMBS, *RUN_FILES]
