"""Which stages of a chain are done, and what is refused before the first one starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bad_input import EMBEDDING_ONLY

from gdpo_nemo.commands import chain, cli, train
from gdpo_nemo.config.load import load_config, save_config

REPOSITORY = Path(__file__).resolve().parents[2]
STAGES = [f"configs/{name}_tiny_cpu.yaml" for name in ("sft", "dpo", "gdpo")]


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The words that put each stage of ``STAGES`` into a folder of its own."""
    monkeypatch.chdir(REPOSITORY)
    return [f"{number}:run.dir={tmp_path}/{number}" for number in (1, 2, 3)]


STATUS = {"time": 1.0, "host": "here", "driver": 1, "waits": []}


def pretend(stage: chain.Stage, outcome: str) -> None:
    """Leave what a run of the stage would."""
    save_config(stage.config, stage.folder / "config.yaml")
    (stage.folder / "status.json").write_text(json.dumps({**STATUS, "outcome": outcome}))
    if outcome == "complete":
        stage.model.mkdir(exist_ok=True)
        (stage.model / "config.json").write_text(json.dumps(DIGITS))
        (stage.model / "model.safetensors").write_bytes(EMBEDDING_ONLY)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (stage.model / name).write_text("{}")


DIGITS = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 32, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 128,
    "max_position_embeddings": 128,
}  # fmt: skip


def trained(monkeypatch, *words) -> list[tuple[str, str]]:
    """(file, model) of the stages that a chain trains, each pretended to be done."""
    done = []

    def pretended(arguments):
        config = load_config(arguments.config, arguments.overrides)
        done.append((arguments.config, config.policy.model_name))
        pretend(chain.Stage("", arguments.config, arguments.overrides, config), "complete")
        return 0

    monkeypatch.setattr(train, "run", pretended)
    monkeypatch.setattr(train, "check_inputs", lambda config: [])
    assert cli.main(["chain", *STAGES, *words]) == 0
    return done


@pytest.mark.slow
def test_each_stage_trains_the_model_of_the_one_before_and_is_not_trained_twice(folders, tmp_path, monkeypatch, capsys):
    models = ["results/models/digit_sort_0", f"{tmp_path}/1/model", f"{tmp_path}/2/model"]
    expected = list(zip(STAGES, models))
    assert trained(monkeypatch, *folders) == expected
    assert trained(monkeypatch, *folders, "logger.console=plain") == []
    assert capsys.readouterr().out.count(", finished") == 3
    (tmp_path / "3" / "status.json").write_text(json.dumps({**STATUS, "outcome": "stopped"}))
    assert trained(monkeypatch, *folders) == expected[2:]


def test_words_with_a_number_change_one_stage_and_the_model_given_is_the_first_ones(folders):
    words = [
        *STAGES,
        *folders,
        "gdpo.max_num_steps=7",
        "2:gdpo.max_num_steps=9",
        "policy.model_name=organisation/model",
    ]
    stages = chain.read_stages(words)
    assert [stage.config.gdpo.max_num_steps for stage in stages] == [7, 9, 7]
    models = [stage.config.policy.model_name for stage in stages]
    assert models == ["organisation/model", str(stages[0].model), str(stages[1].model)]
    assert stages[0].config.policy.model_factory and not stages[1].config.policy.model_factory


def test_a_failed_stage_ends_the_chain_with_its_status(folders, monkeypatch):
    monkeypatch.setattr(train, "check_inputs", lambda config: [])
    monkeypatch.setattr(train, "run", lambda arguments: 143 if "sft" in arguments.config else pytest.fail("went on"))
    assert cli.main(["chain", *STAGES, *folders]) == 143


REFUSED = [
    ([], [], "specify the config file of each stage"),
    (STAGES, ["9:run.name=x"], "9:run.name=x: stage 9 does not exist; the number of stages is 3"),
    (STAGES, ["0:run.name=x"], "stage 0 does not exist"),
    ([*STAGES, "absent.yaml"], [], "stage 4 of 4 (absent.yaml): absent.yaml: config file not found"),
    (STAGES, ["run.dir=results/one"], "stage 2 of 3 (configs/dpo_tiny_cpu.yaml): run.dir: stage 1 of 3"),
    (STAGES, ["2:checkpointing.export_hf=false"], "stage 2 of 3 (configs/dpo_tiny_cpu.yaml): checkpointing.export_hf"),
    (STAGES, ["3:gdpo.max_num_stepz=1"], "stage 3 of 3 (configs/gdpo_tiny_cpu.yaml): gdpo.max_num_stepz: unknown key"),
    (STAGES, ["2:preference.beta=-1"], "stage 2 of 3 (configs/dpo_tiny_cpu.yaml): preference.beta: must be more"),
    (STAGES, ["2:data.train.path=examples/data/sorted_digits.jsonl"], "data.train: row 0: no column 'chosen'"),
    (STAGES, ["2:policy.megatron_cfg.tensor_model_parallel_size=3"], "stage 2 of 3 (configs/dpo_tiny_cpu.yaml): "),
]


@pytest.mark.slow
@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=["dry", "real"])
@pytest.mark.parametrize("files, words, sentence", REFUSED, ids=[str(case[1]) for case in REFUSED])
def test_errors_of_any_stage_are_refused_before_the_first_starts(
    files, words, sentence, dry, folders, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(train, "run", lambda arguments: pytest.fail("a stage was started"))
    places = folders if files and not any(word.startswith("run.dir=") for word in words) else []
    assert cli.main(["chain", *files, *places, *words, *dry]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and sentence in err and err.count("\n") == 1
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "outcomes, words, sentence",
    [
        (
            ["complete"],
            ["1:policy.megatron_cfg.optimizer.lr=0.5"],
            "/1 is already finished with 0.0002, not 0.5; use another",
        ),
        (["stopped", "complete"], [], "/2 contains a run that did not start from stage 1 of 3"),
        (
            ["complete", "complete"],
            ["1:gdpo.max_num_steps=99"],
            "/2 contains a run that did not start from stage 1 of 3",
        ),
        (
            ["complete", "complete"],
            ["1:run.dir=DIR/other"],
            "/2 contains a run from DIR/1/model, not from DIR/other/model",
        ),
    ],
)
def test_folders_of_earlier_runs_that_do_not_fit_are_refused(
    outcomes, words, sentence, folders, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(train, "run", lambda arguments: pytest.fail("a stage was started"))
    for stage, outcome in zip(chain.read_stages([*STAGES, *folders]), outcomes):
        pretend(stage, outcome)
    assert cli.main(["chain", *STAGES, *folders, *(word.replace("DIR", str(tmp_path)) for word in words)]) == 2
    err = capsys.readouterr().err
    assert sentence.replace("DIR", str(tmp_path)) in err and err.count("\n") == 1


def test_dry_run_plans_every_stage_from_the_start_of_the_chain(folders, capsys):
    assert cli.main(["chain", *STAGES, *folders, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.count("---\n# stage ") == 3 and said.count("# per rank   ") == 3 and "unknown until" not in said
    assert said.count("which does not exist yet; planned as results/models/digit_sort_0") == 2
