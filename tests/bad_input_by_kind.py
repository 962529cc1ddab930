"""Cases of test_bad_input.py, by the kind of file: what each reader refuses, and with which words."""

from __future__ import annotations

from bad_input import text
from bad_input_of_runs import HEALTH, RECIPE

DRY = "train --dry-run --config {d}/good.yaml"
HALF = r"half of a surrogate pair (\ud83d)"
"""A lone surrogate is legal in JSON and in Python and has no bytes in UTF-8: it is refused where it comes in."""

ROW = '{"question": "a", "answer": "#### 1"}\n'
HALF_PAIRS = [
    *(
        (command, text("rows.jsonl", ROW + ROW.replace('"a"', r'"a\ud83d"')), "rows.jsonl:2: it holds " + HALF)
        for command in (DRY, "train --config {d}/good.yaml", "env check gsm8k --config {d}/good.yaml")
    ),
    (DRY, text("rows.jsonl", ROW + ROW.replace('"a"', r'"a", "\udc00": 1')), "rows.jsonl:2: it holds half"),
    (DRY + " data.train.path={d}/x.json", text("x.json", rf'[{ROW.replace("1", r"1\ud83d")}]'), "x.json: it holds half"),
    (
        "train --config {d}/good.yaml data.train.path={d}/mine.py:rows",
        text("mine.py", r"def rows(): return [{'question': 'a', 'answer': '#### 1'}, {'question': '\ud83d'}]"),
        "mine.py:rows: row 1: it holds " + HALF,
    ),
    ("train --dry-run --config {d}/pairs.yaml",
     text("pairs.jsonl", r'{"prompt": "a", "chosen": "\ud83d", "rejected": "a"}'), "pairs.jsonl:1: it holds " + HALF),
    (DRY, text("good.yaml", r'run: {name: "\ud83d"}'), "good.yaml: it holds " + HALF),
    (DRY + r""" 'run.name="\ud83d"'""", None, "run.name: it holds " + HALF),
    (DRY + " run.dir=\udcff", None, r"run.dir: it holds half of a surrogate pair (\udcff)"),
    (DRY, text("model/config.json", r'{"model_type": "\ud83d"}'), HALF),
    (HEALTH, text("limits.yaml", r'checks: [{metric: "\ud83d", at: end, min: 0.0}]'), HALF),
    (RECIPE, text("recipe.yaml", r'grpo: {x: "\ud83d"}'), HALF),
]  # fmt: skip
BY_KIND = [*HALF_PAIRS]
