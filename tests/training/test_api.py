"""A run from Python: functions and rows become sections of a config and files of the run's folder."""

from __future__ import annotations

import ast
import importlib
import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import gdpo_nemo
from gdpo_nemo import algorithms
from gdpo_nemo.config.load import load_config, save_config
from gdpo_nemo.environments.registry import load_environments
from gdpo_nemo.training.api import inline_run, written
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError, RunError
from gdpo_nemo.utils.import_path import ImportPath

ROWS = [{"prompt": "31524=", "answer": "12345"}, {"prompt": "978=", "answer": "789"}]


def made(rewards=None, data=ROWS, validation=None, config=None, **overrides):
    return inline_run(config, rewards, data, validation, {key.replace("__", "."): v for key, v in overrides.items()})


def refusal(**arguments) -> str:
    with pytest.raises(ConfigError) as caught:
        made(**arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_functions_and_rows_take_the_place_of_those_of_the_config():
    config = made({"correct": len, "short": (lambda completions: [0.0], 0.5)}).config
    assert config.gdpo.rewards == {"correct": 1.0, "short": 0.5}
    assert list(config.env) == ["functions"] and config.data.train.environment == "functions"
    assert config.data.train.split is None and config.data.train.path.startswith("results/tiny/data/train-")


def test_held_out_prompts_of_a_replaced_environment_go_and_those_of_a_file_stay(tmp_path):
    config = made({"correct": len}).config
    assert config.data.validation is None and not config.gdpo.val_at_start and not config.gdpo.val_period
    assert config.checkpointing.metric_name is None
    kept = made({"correct": len}, config={"defaults": "configs/gdpo_gsm8k_cpu.yaml"}).config
    assert kept.data.validation.path == "openai/gsm8k:main" and kept.data.validation.environment == "functions"
    own = made({"correct": len}, validation=ROWS[:1]).config
    assert own.data.validation.path.startswith("results/tiny/data/validation-") and own.gdpo.val_period == 10


def test_overrides_come_last_and_lists_of_rewards_are_all_there_are():
    config = made({"a": len, "b": len}, gdpo__rewards={"a": 3}, run__name="mine").config
    assert config.gdpo.rewards == {"a": 3.0}
    assert config.run.dir == "results/mine" and config.data.train.path.startswith("results/mine/")


def test_functions_of_a_module_are_named_by_place_and_others_are_pickled():
    run = made({"place": json.dumps, "local": lambda completions: [1.0], "name": "length", "object": Scorer(2.0)})
    entries = run.config.env["functions"]["functions"]
    assert entries["place"] == "json.dumps" and entries["name"] == "length"
    assert entries["local"] == "results/tiny/functions.pkl:local" and "functions.pkl" in run.files
    assert "functions.pkl" not in made({"place": json.dumps}).files


class Scorer:
    def __init__(self, value: float):
        self.value = value

    def __call__(self, completions, **columns):
        return [self.value for _ in completions]


def test_pickled_function_is_callable_in_another_process_without_its_module(tmp_path):
    place = tmp_path / "script.py"
    place.write_text(
        "from pathlib import Path\nfrom gdpo_nemo.training.api import inline_run\nbonus = 0.25\n"
        "def scored(completions, **columns):\n    return [bonus + len(c) for c in completions]\n"
        "files = inline_run(None, {'a': scored, 'b': lambda completions: scored(completions)}, [{'prompt': 'x'}], "
        "None, ()).files\nPath('functions.pkl').write_bytes(files['functions.pkl'])\n"
    )
    subprocess.run([sys.executable, str(place)], cwd=tmp_path, check=True)
    place.unlink()
    for name in ("a", "b"):
        assert ImportPath(f"{tmp_path / 'functions.pkl'}:{name}").load()(["xx"]) == [2.25]
    with pytest.raises(ConfigError, match="has no 'c'"):
        ImportPath(f"{tmp_path / 'functions.pkl'}:c").load()


def test_damaged_pickle_gives_one_line_with_its_requirements(tmp_path):
    (tmp_path / "functions.pkl").write_bytes(b"not a pickle")
    with pytest.raises(ConfigError, match="cannot read the objects in .*modules and the Python"):
        ImportPath(f"{tmp_path / 'functions.pkl'}:a").load()


def test_config_of_such_a_run_is_loaded_and_verifies_from_its_file_only(tmp_path):
    run = made({"short": (lambda completions, **_: [-float(len(c)) for c in completions], 0.5)}, run__dir=str(tmp_path))
    with written(tmp_path, run.files):
        save_config(run.config, tmp_path / "config.yaml")
    config = load_config(tmp_path / "config.yaml")
    assert config == run.config and [json.loads(line) for line in open(config.data.train.path)] == ROWS
    assert load_environments(config.env)["functions"].reward_names == ("short",)


def test_equal_rows_have_one_name_and_other_rows_another():
    def name(rows):
        return made({"a": len}, rows).config.data.train.path

    assert name(ROWS) == name([dict(row) for row in ROWS]) != name(ROWS[:1])


def test_a_dataset_is_taken_by_rows_and_a_path_as_it_is():
    import datasets

    table = datasets.Dataset.from_list(ROWS)
    assert made({"a": len}, table).config == made({"a": len}).config
    assert made({"a": len}, Path("rows.jsonl")).config.data.train.path == "rows.jsonl"
    assert "with the splits train, test; pass one of them" in refusal(
        data=datasets.DatasetDict(train=table, test=table)
    )


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"rewards": {}}, "rewards: expected a mapping"),
        ({"rewards": [len]}, "rewards: expected a mapping"),
        ({"rewards": {"a": 3}}, "rewards.a: expected a function, or (function, weight), got 3"),
        ({"rewards": {"a": (len, "much")}}, "rewards.a: expected a number as its weight, got 'much'"),
        ({"rewards": {"a": threading.Lock().acquire}}, "rewards.a: cannot be pickled for the verification processes"),
        ({"data": [3]}, "data: row 0: expected columns by name, got int"),
        ({"data": []}, "data: has no rows"),
        ({"data": [{"prompt": b"x"}]}, "data: row 0: prompt: expected numbers, strings, lists and mappings, got bytes"),
        ({"data": [{"prompt": "x", "counts": {1: 2}}]}, "data: row 0: counts: the name 1 must be a string"),
        ({"data": 7}, "data: expected a path or a list of rows, got int"),
        ({"config": 7}, "config: expected a YAML file or a mapping, got int"),
        ({"config": {"gdpo": {"rewardz": {}}}}, "gdpo.rewardz: unknown key (config), did you mean gdpo.rewards?"),
        ({"gdpo__max_num_step": 3}, "gdpo.max_num_step: unknown key (overrides), did you mean gdpo.max_num_steps?"),
        ({"gdpo__max_num_steps": len}, "gdpo.max_num_steps: expected an integer"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments, said):
    assert said in refusal(**arguments)


def test_a_refused_run_leaves_its_folder_as_it_was(tmp_path):
    folder = tmp_path / "results" / "mine"
    arguments = dict(rewards={"a": lambda completions: [1.0]}, data=ROWS)
    with pytest.raises(ConfigError, match="gdpo.num_generations_per_prompt"):
        gdpo_nemo.train(
            **arguments, overrides={"run.dir": folder, "gdpo.num_generations_per_prompt": -1, "run.name": "mine"}
        )
    assert list(tmp_path.iterdir()) == []
    (folder / "data").mkdir(parents=True)
    (folder / "functions.pkl").write_bytes(b"of an earlier run")
    with pytest.raises(ConfigError), written(folder, {"functions.pkl": b"new", "data/rows": b"new", "more/x": b""}):
        raise ConfigError("no")
    assert (folder / "functions.pkl").read_bytes() == b"of an earlier run"
    assert sorted(path.name for path in folder.rglob("*")) == ["data", "functions.pkl"]


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """``train`` with another ``fit`` in place of the loop."""

    def with_fit(fit):
        class Trainer:
            run = staticmethod(fit)

        monkeypatch.setitem(sys.modules, "gdpo_nemo.training.trainer", Trainer)
        return gdpo_nemo.train(overrides={"run.dir": str(tmp_path / "run")})

    return with_fit


def test_the_result_holds_the_status_the_last_rows_and_the_model(trained, tmp_path):
    def fit(resolved, attempt):
        folder = Path(resolved.config.run.dir)
        folder.mkdir()
        rows = [{"step": 0, "validation/a": 0.5}, {"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return 0

    result = trained(fit)
    assert result.complete and result.run_dir == tmp_path / "run" and result.model == tmp_path / "run" / "model"
    assert result.metrics["loss"] == 1.0 and result.validation["validation/a"] == 0.5 and len(result.history()) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_a_signal_ended_returns_instead_of_ending_the_process(trained, number):
    def ended(config, attempt):
        raise SystemExit(128 + number)

    result = trained(ended)
    assert (result.status, result.complete, result.model, result.metrics) == (128 + number, False, None, {})


def test_sys_exit_in_a_run_is_an_error_and_a_second_run_at_once_is_refused(trained):
    def leave(config, begin):
        raise SystemExit("enough")

    with pytest.raises(RunError, match="sys.exit.'enough'."):
        trained(leave)
    with pytest.raises(RunError, match="this process already has a run in flight"):
        trained(lambda config, begin: trained(lambda config, begin: 0).status)
    assert trained(lambda config, begin: 0).complete


def test_importing_the_package_imports_nothing_else_and_its_names_are_there():
    program = (
        "import sys; before = set(sys.modules); import gdpo_nemo; new = set(sys.modules) - before; "
        "assert not {name for name in new if '.' not in name} - {'gdpo_nemo', 'typing', '__future__'} "
        "& {'torch', 'numpy', 'omegaconf', 'ray'}, new; "
        "assert not [name for name in new if name.startswith('gdpo_nemo.')], new; "
        "from gdpo_nemo import *; train, load_config, compute_advantages, __version__"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(AttributeError):
        gdpo_nemo.trian  # noqa: B018


REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("module", [gdpo_nemo, algorithms], ids=["gdpo_nemo", "algorithms"])
def test_every_public_name_is_importable_and_found_by_type_checkers(module):
    """Lazy imports hide types from a checker, which sees the blocks under TYPE_CHECKING only; mypy checks those."""
    tree = ast.parse(Path(module.__file__).read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [(line.module, name) for line in block.body if isinstance(line, ast.ImportFrom) for name in line.names]
    seen = {name.asname: importlib.import_module(home) for home, name in imports if name.asname == name.name}
    declared = {line.target.id for line in block.body if isinstance(line, ast.AnnAssign)}
    assert seen.keys() | declared == set(module.__all__)
    assert [name for name, home in seen.items() if getattr(module, name) is not getattr(home, name)] == []
    assert all(hasattr(module, name) for name in declared)


@pytest.mark.parametrize("page", ["README.md", "docs/library.md"])
def test_example_of_train_in_the_documentation_is_a_run_that_validates(page, tmp_path, monkeypatch):
    """The first Python block that calls ``train``, with its arguments as printed, from an empty folder."""
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / page).read_text(), re.DOTALL)
    tree = ast.parse(next(block for block in blocks if "result = train(" in block))
    calls = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    rest = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.Assign)) and node not in calls]
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(ast.Module(rest, []), page, "exec"), names)
    [call] = calls
    [config] = [ast.literal_eval(argument) for argument in call.value.args]
    given = {keyword.arg: eval(ast.unparse(keyword.value), names) for keyword in call.value.keywords}
    run = inline_run(config, given["rewards"], given["data"], None, given["overrides"])
    assert run.config.run.name == "mine" and run.config.gdpo.rewards == {"correct": 1.0, "short": 0.5}
    with written(Path(run.config.run.dir), run.files):
        validate(run.config)


def test_missing_config_gives_one_sentence_that_lists_existing_configs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        gdpo_nemo.train("base.yaml", rewards={"correct": len}, data=ROWS)
    assert str(caught.value) == (
        "base.yaml: config file not found in the working directory or the package; "
        "the demo is configs/gdpo_tiny_cpu.yaml"
    )
