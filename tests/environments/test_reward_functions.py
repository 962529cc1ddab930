import asyncio
import re
import threading
from pathlib import Path

import psutil
import pytest
from environment_samples import HOSTILE, trajectories, trajectory

from gdpo_nemo.algorithms.rubrics import Criterion
from gdpo_nemo.data.records import Outcome
from gdpo_nemo.environments.base import checked_verdicts
from gdpo_nemo.environments.execution.pool import EnvironmentPool
from gdpo_nemo.environments.execution.pools import EnvironmentPools
from gdpo_nemo.environments.registry import load_environment
from gdpo_nemo.environments.tasks.reward_functions import Functions
from gdpo_nemo.utils.errors import ConfigError, RunError

PLACE = str(Path(__file__).with_name("hostile_functions.py"))
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "custom_reward.py")


def environment(**functions):
    return Functions(
        {"functions": {name: f"{PLACE}:{name}" if entry is None else entry for name, entry in functions.items()}}
    )


def rewards(environment, samples):
    return [dict(verdict.rewards) for verdict in environment.verify(samples)]


def test_functions_are_called_as_trl_calls_them_and_named_by_the_config():
    env = Functions({"functions": {"size": f"{PLACE}:lengths", "hit": f"{PLACE}:matches"}})
    assert env.reward_names == ("size", "hit")
    samples = [trajectory("a", answer="a"), trajectory("bb", answer="x", extra=1)]
    assert rewards(env, samples) == [{"size": 1.0, "hit": 1.0}, {"size": 2.0, "hit": 0.0}]


def test_chat_rows_give_message_lists():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert rewards(environment(content=None), [trajectory("hello", messages=messages)]) == [{"content": 2.0}]


def test_none_and_nan_are_not_applicable_and_a_missing_column_is_none():
    samples = [trajectory("a", answer="x"), trajectory("a", answer="nan"), trajectory("a", other=1)]
    assert rewards(environment(sometimes=None), samples) == [
        {"sometimes": 1.0},
        {"sometimes": None},
        {"sometimes": None},
    ]


RUBRIC = [{"id": "kind", "criterion": "Is it kind?", "weight": 2}, {"id": "short", "criterion": "Is it short?"}]


def test_function_of_a_family_returns_the_rewards_of_criteria_by_id():
    env = Functions({"functions": {"size": f"{PLACE}:lengths", "rubric/*": f"{PLACE}:criteria"}})
    assert env.reward_names == ("size", "rubric/*")
    samples = [
        trajectory("both", rubric=RUBRIC, found={"kind": 1, "short": float("nan")}),
        trajectory("span", rubric=RUBRIC, found={"kind": "span"}),
        trajectory("none", rubric=RUBRIC, found=None),
        trajectory("free", prompt_id="q", found={"7": 0.5, 8: 1.0}),
    ]
    verdicts = checked_verdicts(env.reward_names, samples, env.verify(samples))
    assert [verdict.rewards for verdict in verdicts] == [
        {"size": 4.0, "rubric/kind": 1.0, "rubric/short": None},
        {"size": 4.0, "rubric/kind": 1.0},
        {"size": 4.0},
        {"size": 4.0, "rubric/7": 0.5, "rubric/8": 1.0},
    ]
    assert verdicts[0].criteria == verdicts[1].criteria == {
        "rubric/kind": Criterion("Is it kind?", 2.0), "rubric/short": Criterion("Is it short?"),
    }  # fmt: skip
    assert verdicts[1].reward_spans == {"rubric/kind": ((0, 2),)}
    assert verdicts[3].criteria == {"rubric/7": Criterion(), "rubric/8": Criterion()}


def test_criteria_that_the_row_does_not_have_and_failures_mask_the_sample():
    env = Functions({"functions": {"rubric/*": f"{PLACE}:criteria"}})
    samples = [
        trajectory("a", rubric=RUBRIC, found={"kid": 1}),
        trajectory("b", rubric=RUBRIC, found={"kind": "failure"}),
        trajectory("c", rubric=[{"criterion": ""}], found={"1": 1}),
    ]
    found = env.verify(samples)
    assert all(verdict.outcome is Outcome.ENV_FAILED and verdict.rewards == {} for verdict in found)
    assert [verdict.detail for verdict in found] == [
        "rubric/*: reward 'rubric/kid' is not a criterion of the row's rubric; did you mean 'rubric/kind'?",
        "rubric/kind: away",
        "rubric/*: rubric: criterion 1: criterion must be a text, got ''",
    ]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (1.0, "must be a mapping from the ids of criteria to rewards, not float"),
        ({"*": 1.0}, "has the invalid id '*'"),
        ({"": 1.0}, "has the invalid id ''"),
        ({"kind": "yes"}, "criterion 'kind', is 'yes', which is not a number"),
        ({"kind": float("inf")}, "criterion 'kind', is infinite"),
    ],
)
def test_invalid_value_of_a_family_stops_the_run(found, message):
    env = Functions({"functions": {"rubric/*": f"{PLACE}:criteria"}})
    with pytest.raises(RunError, match="sample 0 of prompt p,? ?" + re.escape(message)):
        env.verify([trajectory("a", found=found)])


def test_length_band_is_that_of_the_row():
    def band(**arguments):
        samples = [
            trajectory("one two three", words=[2, 3], tokens=9),
            trajectory("one two three four", words=[2, 3]),
            trajectory("one", words=[2, None]),
            trajectory("", words=[None, 4]),
            trajectory("any", words=None),
        ]
        env = Functions({"functions": {"band": {"function": "length_band", "column": "words", **arguments}}})
        return [verdict.rewards["band"] for verdict in env.verify(samples)]

    assert band(unit="words") == [1, 0, 0, 1, None]
    assert band(unit="words", margin=4) == [1, 0.75, 0.75, 1, None]
    assert band() == [0, 0, 1, 1, None]  # in tokens: 9, 18, 3, 0 and 3


@pytest.mark.parametrize(
    ("arguments", "band", "message"),
    [
        ({}, [3, 2], "a band must ascend from 0 or more, got [3, 2]"),
        ({}, [-1, 2], "a band must ascend from 0 or more"),
        ({}, [1, float("nan")], "a band must ascend from 0 or more"),
        ({}, 7, "a band must be [shortest, longest], got 7"),
        ({}, ["a", "b"], "a band must be [shortest, longest], got ['a', 'b']"),
        ({"unit": "pages"}, [1, 2], "unit must be one of tokens, words"),
        ({"margin": -1}, [1, 2], "margin at least 0"),
        ({"column": "bnad"}, [1, 2], "the rows have no column 'bnad'"),
    ],
)
def test_an_invalid_band_stops_the_run_with_its_value(arguments, band, message):
    env = Functions({"functions": {"band": {"function": "length_band", "column": "band", **arguments}}})
    with pytest.raises(RunError, match=re.escape(message)):
        env.verify([trajectory("a", band=band)])


def test_distinct_is_the_share_of_ngrams_that_no_other_sample_of_the_prompt_has():
    texts = ["a b c d", "a b c e", "x y", "a b c d"]
    samples = [*(trajectory(text, index=i) for i, text in enumerate(texts)), trajectory("x y", prompt_id="q")]
    env = Functions({"functions": {"new": {"function": "distinct", "n": 2}}})
    found = [verdict.rewards["new"] for verdict in env.verify(samples)]
    assert found == [0, pytest.approx(1 / 3), 1, 0, None]  # the sample of q is alone, as in a retry
    assert [v.rewards["new"] for v in env.verify([trajectory(""), trajectory("a", index=1)])] == [0, 1]
    with pytest.raises(RunError, match="n must be a positive integer, got 0"):
        Functions({"functions": {"new": {"function": "distinct", "n": 0}}}).verify(samples)


def test_async_functions_run_concurrently():
    env = environment(
        one=f"{PLACE}:meeting", two=f"{PLACE}:meeting", three=f"{PLACE}:meeting", four=f"{PLACE}:instance"
    )
    assert rewards(env, [trajectory("a")]) == [{"one": 2.0, "two": 2.0, "three": 2.0, "four": 3.0}]


def test_all_coroutines_of_a_process_share_one_event_loop():
    """Those of functions, of a method ``load``, and those that a function returns; other functions may get a loop."""
    env = environment(where=None, returns_a_coroutine=None, gets_loop=None, loaded=f"{PLACE}:Loaded")
    env.prepare()
    asyncio.run(asyncio.sleep(0))  # removes the main thread's loop, as code of other functions may
    found = [rewards(env, [trajectory("a")])[0] for _ in range(2)] + rewards(environment(where=None), [trajectory("a")])
    assert (
        len({reward for row in found for name, reward in row.items() if name in ("where", "returns_a_coroutine")}) == 1
    )
    assert [(row["gets_loop"], row["loaded"]) for row in found[:2]] == [(1.0, 1.0)] * 2


@pytest.mark.slow
def test_a_worker_has_one_event_loop_and_ends_with_the_processes_of_its_functions():
    names = ("where", "gets_loop", "pooled", "pool_of_processes")
    functions = {"plugin": "functions", "functions": {name: f"{PLACE}:{name}" for name in names}}
    with EnvironmentPool({"mine": functions}, timeout_s=240) as pool:
        found = [pool.verify(trajectories(["abc", "ab"], "mine")) for _ in range(2)]
        children = [psutil.Process(int(verdict.rewards["pool_of_processes"])) for verdict in found[0]]
    assert [verdict.rewards for verdict in found[0]] == [verdict.rewards for verdict in found[1]]
    assert [verdict.rewards["pooled"] for verdict in found[0]] == [1.5, 1.0]
    assert psutil.wait_procs(children, timeout=60)[1] == [], "the processes end with the pool"


def test_function_cannot_change_the_input_of_the_next_one():
    samples = [trajectory("a", answer="a"), trajectory("b", answer="c")]
    assert rewards(environment(greedy=None, matches=None), samples) == rewards(
        environment(greedy=None, matches=None), samples
    )
    assert rewards(environment(greedy=None, matches=None), samples)[0]["matches"] == 1.0
    assert samples[0].prompt.fields == {"answer": "a"}


def test_arguments_can_be_fixed_in_the_config():
    env = environment(
        half={"function": f"{PLACE}:scaled", "factor": 0.5}, double={"function": f"{PLACE}:scaled", "factor": 2}
    )
    assert rewards(env, [trajectory("a", factor=9)]) == [{"half": 0.5, "double": 2.0}]


@pytest.mark.parametrize(
    "function, message",
    [
        ("short", "reward function 'short' (PLACE:short) returned 1 rewards for 2 completions"),
        ("raising", "reward function 'raising' (PLACE:raising) raised LookupError: no"),
        ("raising_slowly", "reward function 'raising_slowly' (PLACE:raising_slowly) raised LookupError: not now"),
        ("quitting", "reward function 'quitting' (PLACE:quitting) raised SystemExit: 3"),
        (
            "infinite",
            "the value of reward function 'infinite' (PLACE:infinite) for sample 1 of prompt p is infinite (-inf)",
        ),
        (
            "words",
            "the value of reward function 'words' (PLACE:words) for sample 0 of prompt p is 'good', "
            "which is not a number",
        ),
        ("nothing", "reward function 'nothing' (PLACE:nothing) must return a list of rewards, not NoneType"),
        (
            "scaled",
            "reward function 'scaled' (PLACE:scaled) raised TypeError: "
            "scaled() missing 1 required positional argument: 'factor'",
        ),
    ],
)
def test_a_wrong_function_is_an_error_that_names_it(function, message):
    with pytest.raises(RunError) as error:
        environment(lengths=None, **{function: None}).verify([trajectory("a"), trajectory("b", index=1)])
    assert str(error.value) == message.replace("PLACE", PLACE)


@pytest.mark.slow
def test_pool_also_names_the_environment():
    section = {"mine": {"plugin": "functions", "functions": {"short": f"{PLACE}:short"}}}
    with (
        EnvironmentPool(section) as pool,
        pytest.raises(RunError, match="^environment 'mine': reward function 'short' "),
    ):
        pool.verify([trajectory("a", "mine"), trajectory("b", "mine", index=1)])


@pytest.fixture(scope="module")
def pool():
    """Functions that use signals, hang or crash, each an environment, two of them with processes of their own."""
    section = {
        name: {"plugin": "functions", "functions": {"value": f"{PLACE}:{name}", "other": f"{PLACE}:lengths"}}
        for name in ("limited", "untidy", "misbehaving", "asking")
    }
    section["untidy"]["num_workers"] = section["misbehaving"]["num_workers"] = 1
    with EnvironmentPools(section, timeout_s=2.0) as pool:
        yield pool


def values(verdicts):
    return [verdict.rewards.get("value") for verdict in verdicts]


def lengths(verdicts):
    return [verdict.rewards.get("length") for verdict in verdicts]


@pytest.mark.slow
def test_a_function_may_use_signals(pool):
    assert values(pool.verify(trajectories(["a", "slow", "b"], "limited"))) == [1.0, None, 1.0]


@pytest.mark.slow
def test_timers_and_handlers_left_by_a_function_do_not_reach_the_next_one(pool):
    # One worker, one group to a shard: both calls meet in one process.
    assert values(pool.verify([trajectory("arm", "untidy")])) == [1.0]
    assert values(pool.verify([trajectory("next", "untidy")])) == [1.0]


@pytest.mark.slow
def test_a_function_that_hangs_or_crashes_costs_its_own_sample_only(pool):
    mixed = [*trajectories(["a", "hang", "ccc", "crash"], "misbehaving"), *trajectories(["dd", "slow"], "limited")]
    found = pool.verify(mixed)
    assert values(found) == [1.0, None, 3.0, None, 1.0, None]
    for verdict, detail in ((found[1], "exceeded 2 s"), (found[3], "died (exit code")):
        assert verdict.outcome is Outcome.ENV_FAILED and detail in verdict.detail and verdict.rewards == {}
    assert [verdict.outcome for verdict in (found[0], found[2], *found[4:])] == [Outcome.OK] * 4


@pytest.mark.slow
def test_a_failure_in_the_place_of_a_reward_masks_the_sample_and_no_other(pool):
    [good, failed] = pool.verify(trajectories(["up", "down"], "asking"))
    assert good.rewards == {"value": 1.0, "other": 2.0}
    assert (failed.outcome, failed.detail, failed.rewards) == (Outcome.ENV_FAILED, "value: server is down", {})


@pytest.mark.slow
def test_an_environment_with_its_own_workers_waits_for_no_other(tmp_path):
    section = {
        "env": {"plugin": f"{HOSTILE}:Hostile", "num_workers": 2, "meeting": str(tmp_path)},
        "misbehaving": {"plugin": "functions", "functions": {"value": f"{PLACE}:misbehaving"}},
    }
    ended = []

    def hang():
        with pytest.raises(RunError, match="closed during verification"):
            pools.verify([trajectory("hang", "misbehaving")])
        ended.append(True)

    with EnvironmentPools(section, workers=1, timeout_s=30.0) as pools:
        assert lengths(pools.verify(trajectories(["meet", "meet"], group=1))) == [4.0, 4.0]
        with pytest.raises(RunError, match="its environment 'nowhere' is not defined in env"):
            pools.verify([trajectory("x", "nowhere")])
        stuck = threading.Thread(target=hang)
        stuck.start()
        assert lengths(pools.verify([trajectory("good")])) == [4.0] and not ended
    stuck.join(120)
    assert ended


def test_a_class_is_built_once_with_its_arguments():
    env = environment(count={"function": f"{PLACE}:Counting", "step": 2, "start": 1.0})
    assert [rewards(env, [trajectory("a")])[0]["count"] for _ in range(2)] == [3.0, 5.0]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"functions": {"a": f"{PLACE}:Counting"}}, "Counting could not be built: TypeError"),
        ({"functions": {"a": f"{PLACE}:Uncallable"}}, "Uncallable are not callable"),
        (
            {"functions": {"a": {"function": f"{PLACE}:Counting", "stop": 1}}},
            "argument 'stop'; did you mean 'step'",
        ),
        (
            {"functions": {"a": f"{PLACE}:lengths"}, "num_workers": 0},
            "env.mine.num_workers: must be a number of processes",
        ),
        ({}, "at least one reward function"),
        ({"function": {}}, "unknown option 'function'; did you mean 'functions'"),
        ({"functions": {"a": "lenght"}}, "functions.a: unknown reward function 'lenght'; did you mean 'length'"),
        ({"functions": {"a": {"max_tokens": 3}}}, "functions.a: must be a function"),
        ({"functions": {"a": f"{PLACE}:lenghts"}}, "has no 'lenghts'; did you mean 'lengths'"),
        ({"functions": {"a": f"{PLACE}:np"}}, "is not callable"),
        ({"functions": {"a": "missing_rewards.py:f"}}, "no such file: missing_rewards.py"),
        ({"functions": {"a": "no_such_package.f"}}, "cannot import no_such_package: ModuleNotFoundError"),
        (
            {"functions": {"a": {"function": f"{PLACE}:matches", "anwser": 1}}},
            "accept the argument 'anwser'; did you mean 'answer'",
        ),
    ],
)
def test_a_function_that_cannot_be_had_is_refused_before_the_run(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_environment("mine", {"plugin": "functions", **options})


def test_the_example_of_the_documentation_works():
    env = Functions({"functions": {"correctness": f"{EXAMPLE}:correctness", "brevity": f"{EXAMPLE}:brevity"}})
    samples = [
        trajectory("it is 42.", tokens=50, answer=42),
        trajectory("41", tokens=300, answer=42),
        trajectory("?", tokens=0),
    ]
    expected = [(1.0, 0.75), (0.0, 0.0), (None, 1.0)]
    assert rewards(env, samples) == [{"correctness": c, "brevity": b} for c, b in expected]


def form(function, completions, tokens=(), **arguments):
    env = Functions({"functions": {"form": {"function": function, **arguments}}})
    tokens = tokens or [len(completion) for completion in completions]
    return [v.rewards["form"] for v in env.verify([trajectory(c, tokens=n) for c, n in zip(completions, tokens)])]


def test_a_regular_expression_must_match_the_whole_completion():
    assert form("regex", ["ab", " a\nb\n", "xab", "ab x", ""], pattern="a.?b") == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_json_is_checked_against_the_schema():
    texts = ['{"a": 1}', '{"a": "1"}', "{}", "{", "", "[" * 100_000, '{"a": 1} and more']
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    assert form("json_schema", texts, schema=schema) == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert form("json_schema", texts) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert form("json_schema", ["NaN", '{"a": Infinity}', "1" * 9999]) == [0.0, 0.0, 0.0]


def test_length_pays_in_full_up_to_the_limit_and_then_nothing_or_less_and_less():
    assert form("length", ["x"] * 3, tokens=[9, 10, 11], max_tokens=10) == [1.0, 1.0, 0.0]
    assert form("length", ["x"] * 4, tokens=[10, 15, 20, 25], max_tokens=10, cut_off=20) == [1.0, 0.5, 0.0, 0.0]
