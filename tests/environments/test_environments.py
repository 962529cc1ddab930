import contextlib
import json
import re
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from environment_samples import HOSTILE, trajectory
from hypothesis import given, settings, strategies as st

from gdpo_nemo.commands import cli
from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.records import Outcome
from gdpo_nemo.environments import registry
from gdpo_nemo.environments.execution.pool import EnvironmentPool
from gdpo_nemo.environments.registry import environment_names, load_environment
from gdpo_nemo.environments.tasks.digit_sort import DigitSort, is_held_out
from gdpo_nemo.environments.tasks.gsm8k import Gsm8k
from gdpo_nemo.environments.tasks.math import Math
from gdpo_nemo.environments.tasks.tool_calling import ToolCalling
from gdpo_nemo.utils.errors import ConfigError, RunError

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = Path(__file__).with_name("tools_for_tests.py")
COUNTER = Path(__file__).with_name("counter_for_tests.py")


def rewards(environment, text, finish_reason="stop", tokens=None, **fields):
    [verdict] = environment.verify([trajectory(text, finish_reason=finish_reason, tokens=tokens, **fields)])
    return dict(verdict.rewards)


def flags(text, **how):
    found = rewards(DigitSort(how.pop("options", {})), text, digits="39172", **how)
    return tuple(found[name] for name in ("correctness", "format", "length", "all"))


@pytest.mark.parametrize(
    "text, how, expected",
    [
        ("<t>..</t><a>12379</a>", {"tokens": 22}, (1, 1, 1, 1)),
        ("<t></t><a>12379</a>", {"tokens": 24}, (1, 1, 1, 1)),
        ("<t></t><a>12379</a>", {"tokens": 25}, (1, 1, 0, 0)),
        ("<t></t><a>12379</a>", {"tokens": 20, "finish_reason": "length"}, (0, 0, 0, 0)),
        ("<t></t><a>39172</a>", {"tokens": 20}, (0, 1, 1, 0)),
        ("<t></t>12379", {"tokens": 13}, (1, 0, 1, 0)),
        ("<t>12379</t><a>..</a>", {"tokens": 20}, (1, 1, 1, 1)),
        ("<t>12379</t><a>1</a>", {"tokens": 20}, (0, 1, 1, 0)),
        ("<t></t><a>12379</a>..", {"tokens": 22}, (1, 0, 1, 0)),
        ("<t><a></t><a>12379</a>", {"tokens": 22}, (1, 0, 1, 0)),
        ("", {"tokens": 1}, (0, 0, 1, 0)),
        ("<t></t><a>12379</a>", {"tokens": 20, "options": {"length_limit": 19}}, (1, 1, 0, 0)),
        ("<t></t><a>12379</a>", {"tokens": 20, "options": {"correctness_values": [-3, 3]}}, (3, 1, 1, 1)),
        ("<t></t><a>1</a>", {"tokens": 16, "options": {"correctness_values": [-3, 3]}}, (-3, 1, 1, 0)),
        ("<t></t><a>1</a>", {"tokens": 16, "options": {"length_if_correct": True}}, (0, 1, 0, 0)),
        ("<t></t><a>12379</a>", {"tokens": 20, "options": {"length_if_correct": True}}, (1, 1, 1, 1)),
    ],
)
def test_digit_sort_has_the_documented_rewards(text, how, expected):
    assert flags(text, **how) == expected


def test_digit_sort_keeps_the_raw_length_flag_beside_a_conditioned_one():
    env = DigitSort({"length_if_correct": True})
    assert rewards(env, "1", digits="39172")["length_flag"] == 1.0 and "length_flag" in env.reward_names


def test_digit_sort_holds_out_one_prompt_in_ten_and_repeats_its_rows():
    env = DigitSort()
    train = env.rows("train", None, 3)
    held_out = env.rows("validation", 50, 3)
    assert len(train) == len({row["id"] for row in train}) == 90_000 and len(held_out) == 50
    assert all(is_held_out(row["digits"]) for row in held_out) and not any(is_held_out(row["digits"]) for row in train)
    assert env.rows("train", 7, 3) == train[:7] != env.rows("train", 7, 4)
    assert env.rows("test", 50, 3) == held_out and train[0]["prompt"] == train[0]["digits"] + "="


GOLD = "He pays 18 * 60 = <<18*60=1080>>1080.\n#### 1,080"


def gsm8k(text, gold=GOLD, **options):
    found = rewards(Gsm8k(options), text, answer=gold)
    return found["correctness"], found["integer"], found["format"]


GSM8K_TEXTS = [
    ("<think>x</think>\n<answer>1080</answer>", (1, 1, 1), (0, 1, 1)),
    ("<think>x</think>\n<answer>1,080</answer>", (1, 0, 1), (1, 0, 1)),
    ("<think>x</think>\n<answer>1080</answer>\n", (1, 1, 1), (0, 1, 1)),
    ("<think>x</think> <answer> 1080 </answer>\n", (1, 1, 1), (0, 1, 0)),
    ("<think>x</think>\n<answer>1080.0</answer>", (1, 0, 1), (0, 0, 1)),
    ("<think>x</think>\n<answer>$1080</answer>", (1, 0, 1), (0, 0, 1)),
    ("<think>x</think>\n<answer>1081</answer>", (0, 1, 1), (0, 1, 1)),
    ("<answer>5</answer> no, <answer>1080</answer>", (1, 1, 0), (0, 1, 0)),
    ("<think>x</think>\n<answer>1080</answer> done", (1, 1, 0), (0, 1, 0)),
    ("<think>x</think>\n<answer></answer>", (0, 0, 1), (0, 0, 1)),
    ("1080", (1, 1, 0), (0, 1, 0)),
    ("<think>x</think>\n<answer>١٠٨٠</answer>", (None, 0, 1), (0, 1, 1)),
    ("", (0, 0, 0), (0, 0, 0)),
]
"""(text, rewards without ``strict``, those of the GDPO authors' demo: ``tests/compat/gdpo_rewards.py``)."""


@pytest.mark.parametrize("text, lenient, strict", GSM8K_TEXTS)
def test_gsm8k_pays_each_of_its_three_rewards_for_itself(text, lenient, strict):
    assert gsm8k(text, strict=True) == strict
    correct, integer, formatted = gsm8k(text)
    assert (integer, formatted) == lenient[1:] and lenient[0] in (None, correct)


VECTORS = json.loads(Path(__file__).with_name("reward_vectors.json").read_text())
"""Verdicts of the GDPO authors' code (NVlabs/GDPO at b080e63), by ``tests/compat/gdpo_rewards.py --freeze``."""


@pytest.mark.parametrize(
    "task, environment, gold_key, cases",
    [("gsm8k", Gsm8k({"strict": True}), "answer", 212), ("tool_calling", ToolCalling(), "ground_truth", 172)],
)
def test_rewards_equal_the_frozen_verdicts_of_the_authors_code(task, environment, gold_key, cases):
    different = []
    for gold, text, *verdict in VECTORS[task]:
        found = rewards(environment, text, **{gold_key: gold})
        if [found[name] for name in environment.reward_names] != pytest.approx(verdict, abs=1e-9):
            different.append((gold, text, found, verdict))
    assert different == [] and len(VECTORS[task]) == cases


def test_components_for_evaluation_are_returned_only_if_asked():
    text = "<think>x</think>\n<answer>1080.0</answer>"
    strict = rewards(Gsm8k({"strict": True, "math_verify": True}), text, answer=GOLD)
    assert strict == {"correctness": 0, "integer": 0, "format": 1, "math_verify": 1}
    assert "math_verify" not in Gsm8k({"strict": True}).reward_names
    for tokens, exceeds in ((4000, 0), (4001, 1)):
        (verdict,) = Math({"exceed": 4000}).verify([trajectory(r"\boxed{7}", tokens=tokens, answer="7")])
        assert verdict.rewards == {"correctness": 1, "format": 1, "exceed": exceeds}
    assert "exceed" not in Math().reward_names


def test_gsm8k_recipe_pays_as_the_demo_it_is_taken_from():
    config = load_config(REPOSITORY / "configs" / "gdpo_gsm8k_qwen2.5_1.5b_8gpu.yaml")
    environment = load_environment("gsm8k", config.env["gsm8k"])
    for text, _, strict in GSM8K_TEXTS:
        found = rewards(environment, text, answer=GOLD)
        assert tuple(found[name] for name in Gsm8k.reward_names) == strict, text


def test_gsm8k_system_prompt_shows_the_form_that_strict_pays():
    """What stands between the prompt's blocks is what the reward demands between the completion's."""
    prompt = Gsm8k({"strict": True}).system_prompt
    blocks = re.search("<think>.*</answer>", prompt, re.DOTALL)
    assert blocks and gsm8k(blocks[0], strict=True)[2] == 1
    assert Gsm8k().system_prompt != prompt and Gsm8k.system_prompt == Gsm8k().system_prompt


def test_gsm8k_has_the_published_rewards_for_bare_answers_and_non_integers():
    assert gsm8k("42", gold="#### 42", strict=True) == (1, 1, 0)
    for text in ("", "-5", "1,080", "5.0"):
        assert gsm8k(text, gold=f"#### {text}", strict=True)[1] == 0
    assert gsm8k("-5", gold="#### -5") == (1, 1, 0)


@pytest.mark.parametrize(
    "text", ["$9^{9^{9^{9}}}$", "9**9**9**9", "(" * 5000, "x" * 300_000, "$100000000!$", "__import__('os').abort()"]
)
def test_a_hostile_answer_is_a_wrong_answer_within_the_time_limit(text):
    assert gsm8k(f"<answer>{text}</answer>", time_limit_s=1)[0] == 0
    assert (
        rewards(Math({"math_verify_impl": "hf_math_verify", "time_limit_s": 1}), text, answer="1080")["correctness"]
        == 0
    )


@pytest.mark.parametrize("options", [{}, {"math_verify_impl": "hf_math_verify"}])
def test_a_parser_that_does_not_finish_has_failed_and_gives_no_reward(monkeypatch, options):
    import math_verify

    def endless(*_, **__):
        while True:
            with contextlib.suppress(Exception):
                sum(range(1000))

    monkeypatch.setattr(math_verify, "verify", endless)
    for environment in (Math({**options, "time_limit_s": 0.1}), Gsm8k({"time_limit_s": 0.1})):
        (verdict,) = environment.verify([trajectory(r"<answer>\boxed{1080}</answer>", answer="#### 1080.5")])
        assert (verdict.outcome, verdict.rewards) == (Outcome.ENV_FAILED, {})
        assert verdict.detail == "math-verify did not finish within 0.2 s of CPU time"


def test_time_that_other_processes_take_is_not_the_parsers(monkeypatch):
    import math_verify

    def waits(*_, **__):
        time.sleep(1.0)  # as a process that gets no core
        return True

    monkeypatch.setattr(math_verify, "verify", waits)
    assert rewards(Math({"time_limit_s": 0.2}), r"\boxed{2}", answer="1")["correctness"] == 1


def test_a_row_without_the_gold_column_is_an_error_that_names_it():
    with pytest.raises(RunError, match="prompt p has no column 'answer'; did you mean 'anwser'"):
        Gsm8k().verify([trajectory("1", anwser="#### 1")])


@pytest.mark.parametrize(
    "gold, text, expected",
    [
        (r"\frac{1}{2}", r"so it is \boxed{0.5}", (1, 1)),
        (r"$\frac{1}{2}$", r"\boxed{\frac{2}{4}}", (1, 1)),
        (r"\$18.90", r"\boxed{18.90}", (1, 1)),
        (r"\$18.90", r"\boxed{\$18.90}", (1, 1)),
        ("(0, 1]", r"$\boxed{(0,1]}$", (1, 1)),
        ("3, 4", r"\boxed{4, 3}", (None, 1)),
        ("3, 4", r"\boxed{4}", (0, 1)),
        ("Monday", r"\boxed{Monday}", (1, 1)),
        ("Monday", r"\boxed{Sunday}", (0, 1)),
        ("7", "The answer is 7.", (1, 0)),
        ("7", r"\boxed{8} and \boxed{7}", (None, 0)),
        ("7", r"\boxed{ }", (0, 0)),
        ("7", "", (0, 0)),
    ],
)
def test_math_compares_values_and_not_spellings(gold, text, expected):
    found = rewards(Math(), text, answer=gold)
    assert expected[0] in (None, found["correctness"]) and found["format"] == expected[1]


LONG = r"\boxed{18.9}" + " and so on" * 600
UNLIKE = {(r"18.9", LONG), ("Yes", "Yes")}


@pytest.mark.parametrize(
    "gold, text",
    [*sorted(UNLIKE), ("Monday", r"\boxed{Monday}"), (r"\$18.90", r"\boxed{18.90}"), (r"\$18.90", r"\boxed{\$18.90}"),
     ("(0, 1]", r"$\boxed{(0,1]}$"), ("3, 4", r"\boxed{4}"),
     (r"$\frac{1}{2}$", "it is 0.5"), ("7", "The answer is 7."), ("7", r"\boxed{8} and \boxed{7}"), ("7", ""), ("",
     "7"), ("1,080", "1080"),
     (r"\text{even}", r"\boxed{even}"), ("x^2+1", r"\boxed{1+x^2}"), ("50\\%", r"\boxed{0.5}"), ("7", "7" + " " * 5000
     + "8")],
)  # fmt: skip
def test_math_agrees_with_hf_math_verify_on_request(gold, text):
    """math_metric with the targets of NeMo-RL's HFVerifyWorker is the oracle; a gold that it cannot read raises there
    and is 0 then."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig
    from math_verify.metric import math_metric

    oracle = math_metric(
        gold_extraction_target=(LatexExtractionConfig(),),
        pred_extraction_target=(ExprExtractionConfig(), LatexExtractionConfig()),
    )
    try:
        expected = oracle([rf"\boxed{{{gold}}}"], [text])[0]
    except ValueError:
        expected = 0.0
    assert (
        rewards(Math({"math_verify_impl": "hf_math_verify", "time_limit_s": 5}), text, answer=gold)["correctness"]
        == expected
    )
    if (gold, text) in UNLIKE:
        assert rewards(Math(), text, answer=gold)["correctness"] != expected


def test_math_knows_its_verifiers_by_name():
    with pytest.raises(ConfigError, match="math_verify_impl must be default or hf_math_verify, not 'hf'"):
        Math({"math_verify_impl": "hf"})


def test_reasoning_gym_without_its_package_names_the_command_that_installs_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)  # as find_spec and import see an absent package
    config = [
        "env.rg={plugin: reasoning_gym, task: chain_sum}",
        "data.train.environment=rg",
        "gdpo.rewards={correctness: 1.0}",
    ]
    assert cli.main(["train", "--dry-run", *config]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "env.rg: the package reasoning-gym is not installed" in error
    assert "uv sync --extra reasoning-gym" in error and "apt-get install gcc" in error


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("gsm8", {}, "env.gsm8: unknown environment 'gsm8'; did you mean 'gsm8k'"),
        ("mine", {"plugin": "digitsort"}, "env.mine: unknown environment 'digitsort'; did you mean 'digit_sort'"),
        ("mine", {"plugin": 3}, "env.mine.plugin: must be a name or an import"),
        ("gsm8k", {"strikt": True}, "env.gsm8k: environment gsm8k: unknown option 'strikt'; did you mean 'strict'"),
        ("gsm8k", {"strict": "yes"}, "option strict must be of type bool, not 'yes'"),
        ("digit_sort", {"length_limit": 2.5}, "option length_limit must be of type int, not 2.5"),
        ("digit_sort", {"correctness_values": [1]}, "correctness_values must be two numbers"),
        ("mine", {"plugin": f"{HOSTILE}:Hostil"}, "has no 'Hostil'; did you mean 'Hostile'"),
        ("mine", {"plugin": f"{HOSTILE}:FailsToBuild"}, "could not be built: KeyError: 'model_url'"),
        ("mine", {"plugin": "collections.Counter"}, "is not an environment; define a method verify"),
        ("mine", {"plugin": "missing_file.py:Class"}, "env.mine.plugin: no such file: missing_file.py"),
        (
            "mine",
            {"plugin": "missing_package.module.Class"},
            "cannot import missing_package.module: ModuleNotFoundError",
        ),
    ],
)
def test_an_environment_that_cannot_be_had_is_refused_in_one_line(name, options, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        load_environment(name, options)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_every_built_in_environment_loads_and_names_its_rewards():
    options = {
        "nemo_gym": {"servers": {"one": "http://127.0.0.1:1"}},
        "nemo_gym_agent": {"agents": {"steps": "http://127.0.0.1:1"}, "rewards": [{"name": "accuracy"}]},
        "functions": {"functions": {"brevity": {"function": "length", "max_tokens": 3}}},
        "judge": {"base_url": "http://127.0.0.1:1", "model": "judge", "rubric": {"clear": "Is it clear?"}},
        "openenv": {"url": "http://127.0.0.1:1", "action": "message"},
        "verifiers": {"package": "a"},
        "ebft": {"model": "a/frozen/model"},
        "reward_model": {"model": "a/classifier"},
        "tools": {"tools": [f"{TOOLS}:add"], "functions": {"brevity": {"function": "length", "max_tokens": 3}}},
        "tool_class": {"make": f"{COUNTER}:Counter", "functions": {"value": f"{COUNTER}:value"}},
    }
    for name in registry.BUILT_IN.keys() - {"reasoning_gym"}:  # an extra: test_reasoning_gym.py
        assert name in environment_names()
        environment = load_environment(name, options.get(name))
        assert environment.reward_names
        environment.close()
    assert tuple(load_environment("mine", {"plugin": "gsm8k"}).reward_names) == ("correctness", "integer", "format")


def test_an_installed_plugin_is_found_by_its_entry_point(monkeypatch):
    point = EntryPoint("sorting", "gdpo_nemo.environments.tasks.digit_sort:DigitSort", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group, name=None: [point] if name in (None, "sorting") else [])
    assert isinstance(load_environment("sorting", {"length_limit": 30}), DigitSort)
    assert "sorting" in environment_names()


def test_two_packages_with_one_name_are_an_error_and_not_a_lottery(monkeypatch):
    points = [EntryPoint("sorting", f"{place}:DigitSort", registry.ENTRY_POINT_GROUP) for place in ("a", "b")]
    monkeypatch.setattr(registry, "entry_points", lambda group, name=None: points)
    with pytest.raises(ConfigError, match="several packages provide an environment 'sorting'"):
        load_environment("sorting")


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet='<>/tainkswer_clospd{}\\\n "0', max_size=80))
def test_every_environment_gives_each_text_finite_rewards_or_none(text):
    gold = '<think>t</think>\n<tool_call>\n{"name": "a", "parameters": {"b": 1}}\n</tool_call>'
    for name in ("digit_sort", "gsm8k", "math", "tool_calling"):
        env = load_environment(name)
        found = rewards(env, text, digits="12345", answer="#### 7", ground_truth=gold)
        assert set(found) == set(env.reward_names) and all(-3.0 <= value <= 3.0 for value in found.values())


@pytest.mark.slow
def test_math_in_the_pool_equals_math_in_process():
    samples = [trajectory(f"<think>x</think><answer>{i}</answer>", "gsm8k", f"p{i}", answer="#### 3") for i in range(6)]
    with EnvironmentPool({"gsm8k": {}}, timeout_s=10.0) as pool:
        assert pool.verify(samples) == Gsm8k().verify(samples)
