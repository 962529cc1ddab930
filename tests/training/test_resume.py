"""Where a run goes on, what its config may change there, and what is refused before anything is written."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from power_loss import SyncedDisk

from gdpo_nemo.config.load import load_config, save_config, to_yaml
from gdpo_nemo.config.model_checks import resolve
from gdpo_nemo.training.checkpoints import Checkpoints, RunState, model_fingerprint
from gdpo_nemo.training.resume import find_start, planned_changes, record_config, run_date, total_updates
from gdpo_nemo.utils.errors import ConfigError

YAML = """
run: {name: r}
gdpo:
  {rewards: {correctness: 1.0, format: 1.0}, num_prompts_per_step: 4, num_generations_per_prompt: 8, max_num_steps: 60}
policy: {model_name: m, precision: float32, megatron_cfg: {scheduler: {lr_decay_style: cosine}}}
data: {train: {environment: digit_sort}}
env: {digit_sort: {}}
"""


@pytest.fixture
def config_file(tmp_path):
    file = tmp_path / "base.yaml"
    file.write_text(YAML)
    return file


class Rows(list):
    fingerprint = "rows"


@pytest.fixture
def inputs(tmp_path):
    """What the start of a run is compared with: the data's fingerprint and a model folder."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    tokenizer = SimpleNamespace(chat_template=None)
    return SimpleNamespace(prompts=Rows(range(100)), folder=tmp_path / "model", tokenizer=tokenizer)


@pytest.fixture
def run(tmp_path, config_file, inputs):
    """``run(*overrides, state=...)``: a run folder with a checkpoint after step 12, written under those overrides."""

    def write(*overrides, keep_config=True, **state):
        folder = tmp_path / "run"
        config = load_config(config_file, overrides)
        found = {
            "step": 12,
            "position": 48,
            "updates": 12,
            "data": "rows",
            "model": model_fingerprint(inputs.folder),
            **state,
        }
        record_config(config, folder, 0)
        checkpoints = Checkpoints(folder / "checkpoints", 2, 0, None)
        checkpoints.save(RunState(**found), lambda path: keep_config and save_config(config, path / "config.yaml"))
        return folder

    return write


def contents(folder):
    """Every file below ``folder`` with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


ALLOWED = {
    "policy.megatron_cfg.optimizer.lr=5e-5": "policy.megatron_cfg.optimizer.lr: 1e-06 -> 5e-05 from step 13 on",
    "policy.megatron_cfg.optimizer.weight_decay=0.1": "policy.megatron_cfg.optimizer.weight_decay: 0 -> 0.1 from step "
    "13 on",
    "policy.megatron_cfg.scheduler.lr_warmup_steps=20": "policy.megatron_cfg.scheduler.lr_warmup_steps: 0 -> 20 from "
    "step 13 on",
    "policy.megatron_cfg.scheduler.lr_decay_style=linear": "policy.megatron_cfg.scheduler.lr_decay_style: cosine -> "
    "linear from step 13 on",
    "gdpo.max_num_steps=120": "gdpo.max_num_steps: 60 -> 120 from step 13 on",
    "gdpo.num_prompts_per_step=8": "gdpo.num_prompts_per_step: 4 -> 8 from step 13 on",
    "gdpo.estimator=grpo": "gdpo.estimator: gdpo -> grpo from step 13 on",
    "gdpo.rewards.length=0.5": "gdpo.rewards.length: absent -> 0.5 from step 13 on",
    "gdpo.rewards={correctness: 1.0}": "gdpo.rewards.format: 1 -> absent from step 13 on",
    "loss_fn.reference_policy_kl_penalty=0.01": "loss_fn.reference_policy_kl_penalty: 0 -> 0.01 from step 13 on",
    "policy.megatron_cfg.tensor_model_parallel_size=2": "policy.megatron_cfg.tensor_model_parallel_size: 1 -> 2 from "
    "step 13 on",
    "checkpointing.async_save=true": "checkpointing.async_save: false -> true from step 13 on",
    "run.seed=7": "run.seed: 42 -> 7 from step 13 on; the order of prompts changes at this step",
}


@pytest.mark.parametrize("override", ALLOWED)
def test_a_change_is_announced_with_its_values_and_its_first_step(run, config_file, inputs, override):
    folder = run()
    start = find_start(resolve(load_config(config_file, [override])), folder, inputs)
    resuming, *announced = start.remarks
    assert resuming == f"resuming from {folder / 'checkpoints' / 'step_12'} after step 12"
    assert len(announced) == 1 and announced[0].startswith(ALLOWED[override])


def test_moved_run_is_continued_in_the_folder_of_its_config(run, config_file, tmp_path, monkeypatch):
    """Also under a relative path, as a copy, and by a config of its history. An override of run.dir has priority."""
    monkeypatch.chdir(tmp_path)
    function = "env={functions: {functions: {correctness: 'run/functions.pkl:correctness', format: 'runs.py:format'}}}"
    before = run(f"run.dir={tmp_path}/run/", function.replace("run/", f"{tmp_path}/run/"), "data.train.path=[run/a, b]")
    assert load_config("run/config.yaml").run.dir == f"{tmp_path}/run/", "a run in its place has the config as written"
    for moved in (before.rename(tmp_path / "archive"), shutil.copytree(tmp_path / "archive", tmp_path / "copy")):
        for file in (
            moved / "config.yaml",
            moved.name + "/config.yaml",
            moved / "config_history" / "0001_from_step_1.yaml",
        ):
            config = load_config(file)
            assert Path(config.run.dir) == moved
            functions = config.env["functions"]["functions"]
            assert functions == {"correctness": f"{moved}/functions.pkl:correctness", "format": "runs.py:format"}
        announced = planned_changes(config)
        assert announced[0] == f"run.dir: {tmp_path}/run/ -> {moved}/ from step 13 on" and len(announced) == 2
        assert load_config(moved / "config.yaml", ["run.dir=elsewhere"]).run.dir == "elsewhere"
        record_config(config, moved, 12)
        assert load_config(moved / "config.yaml") == config
    shutil.copy(tmp_path / "copy" / "config_history" / "0001_from_step_1.yaml", tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml").run.dir == f"{tmp_path}/run/", (
        "the file alone is a config of a new run"
    )


@pytest.mark.parametrize(
    "override, position, key",
    [
        ("gdpo.max_num_steps=12", 48, "gdpo.max_num_steps (12)"),
        ("gdpo.max_num_steps=13", 48, None),
        ("gdpo.max_num_epochs=1", 97, "gdpo.max_num_epochs (1)"),
        ("gdpo.max_num_epochs=1", 96, None),
    ],
)
def test_a_complete_run_names_the_key_to_raise(run, config_file, inputs, override, position, key):
    resolved = resolve(load_config(config_file, [override]))
    start = find_start(resolved, run(override, position=position), inputs)
    end = f"; to continue, raise {key}" if key else "after step 12"
    assert start.remarks[0].endswith(end) and ("nothing is trained" in start.remarks[0]) == bool(key)


def test_an_unchanged_config_announces_nothing(run, config_file, inputs):
    start = find_start(resolve(load_config(config_file)), run(), inputs)
    assert start.changes == [] and len(start.remarks) == 1


LORA = "policy.lora={rank: 8, alpha: 16}"
REFUSED = {
    "a LoRA rank": ((LORA,), ("policy.lora={rank: 16, alpha: 16}",), "policy.lora.rank: cannot change from 8 to 16"),
    "LoRA off": ((LORA,), ("policy.lora={rank: 0, alpha: 16}",), "policy.lora.rank: cannot change from 8 to 0"),
    "LoRA on": ((), (LORA,), "policy.lora.rank: cannot change from 0 to 8"),
    "LoRA's alpha": ((LORA,), ("policy.lora={rank: 8, alpha: 32}",), "policy.lora.alpha: cannot change from 16 to 32"),
    "LoRA's modules": (
        (LORA,),
        (LORA, "policy.lora.target_modules=[q_proj]"),
        "policy.lora.target_modules: cannot change",
    ),
    "a shared A": (
        (LORA,),
        (LORA, "policy.lora.share_a=true"),
        "policy.lora.share_a: cannot change from false to true",
    ),
    "frozen routers": (
        (),
        ("policy.megatron_cfg.freeze_moe_router=true",),
        "freeze_moe_router: cannot change from false to true",
    ),
    "a vision tower": (
        (),
        ("policy.vision.train=true",),
        "policy.vision.train: cannot change from false to true",
    ),
    "the optimizer": (
        (),
        ("policy.megatron_cfg.optimizer.type=muon",),
        "optimizer.type: cannot change from adamw to muon",
    ),
    "no checkpoints": (
        (),
        ("checkpointing.enabled=false",),
        "checkpointing.enabled: .* holds checkpoints up to step 12",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_setting_that_cannot_change_on_resume_is_refused_and_nothing_is_written(run, config_file, inputs, case):
    before, now, sentence = REFUSED[case]
    folder = run(*before)
    found = contents(folder)
    with pytest.raises(ConfigError, match=sentence):
        find_start(resolve(load_config(config_file, now)), folder, inputs)
    with pytest.raises(ConfigError, match=sentence):
        planned_changes(load_config(config_file, [*now, f"run.dir={folder}"]))
    assert contents(folder) == found


def test_dry_run_reports_the_changes_of_a_resume(run, config_file, tmp_path):
    folder = run()
    config = load_config(config_file, ["gdpo.estimator=grpo", f"run.dir={folder}"])
    assert planned_changes(config)[1:] == ["gdpo.estimator: gdpo -> grpo from step 13 on"]
    assert planned_changes(load_config(config_file, [f"run.dir={tmp_path / 'new'}"])) == []


@pytest.mark.parametrize("content", [b"- a\n- b\n", b"run: [\n", b"\xff\xfe"])
def test_a_damaged_config_of_the_run_is_named(run, config_file, inputs, content):
    folder = run(keep_config=False)
    (folder / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match="config.yaml: "):
        find_start(resolve(load_config(config_file)), folder, inputs)


@pytest.mark.parametrize("state", [{"data": "other rows"}, {"model": "other weights"}])
def test_another_model_and_other_data_are_refused(run, config_file, inputs, state):
    with pytest.raises(ConfigError, match="was started with different (training data|model)"):
        find_start(resolve(load_config(config_file)), run(**state), inputs)


def test_a_run_keeps_the_date_of_its_first_start(tmp_path, run, config_file, inputs):
    fresh = load_config(config_file)
    assert run_date(fresh, tmp_path / "run") == date.today().isoformat()
    folder = run("run.date=2026-11-28")
    assert run_date(fresh, folder) == "2026-11-28"  # it was not given again
    fresh.run.date = run_date(fresh, folder)
    assert find_start(resolve(fresh), folder, inputs).changes == []
    assert run_date(load_config(config_file, ["run.date=2026-12-24"]), folder) == "2026-12-24"


def test_run_without_recorded_dates_is_refused_with_the_remedy(run, config_file, inputs):
    folder = run(data="rows of another day")
    older = load_config(config_file)
    assert run_date(older, folder) is None
    inputs.tokenizer = SimpleNamespace(chat_template="{{ strftime_now('%d') }}")
    with pytest.raises(ConfigError, match="different training data.*set run.date to the day on which it was started"):
        find_start(resolve(older), folder, inputs)


def test_changes_are_compared_with_the_checkpoint_and_not_with_a_failed_start(run, config_file, inputs):
    folder = run()
    changed = load_config(config_file, ["gdpo.estimator=grpo"])
    record_config(changed, folder, 12)  # and then no step was taken
    assert [change.key for change in find_start(resolve(changed), folder, inputs).changes] == ["gdpo.estimator"]
    assert find_start(resolve(load_config(config_file)), folder, inputs).changes == []


def test_a_checkpoint_without_a_config_is_compared_with_the_last_start(run, config_file, inputs):
    folder = run(keep_config=False, updates=None)
    start = find_start(resolve(load_config(config_file, ["policy.train_global_batch_size=16"])), folder, inputs)
    assert [change.key for change in start.changes] == ["policy.train_global_batch_size"]
    assert start.state.updates == 24


def test_the_config_file_keeps_a_history_of_every_start_that_differed(tmp_path, config_file):
    folder = tmp_path / "run"
    first = load_config(config_file, [f"run.dir={folder}"])
    second = load_config(config_file, [f"run.dir={folder}", "gdpo.estimator=grpo"])
    for config, step in ((first, 0), (first, 4), (second, 6), (first, 6)):
        record_config(config, folder, step)
    history = sorted(path.name for path in (folder / "config_history").iterdir())
    assert history == ["0001_from_step_1.yaml", "0002_from_step_7.yaml", "0003_from_step_7.yaml"]
    assert load_config(folder / "config_history" / history[1]) == second
    assert load_config(folder / "config.yaml") == first


def test_the_config_of_a_folder_without_a_history_is_its_first_entry(tmp_path, config_file):
    folder = tmp_path / "run"
    save_config(load_config(config_file), folder / "config.yaml")
    record_config(load_config(config_file, ["gdpo.estimator=grpo"]), folder, 6)
    estimators = [
        yaml.safe_load(p.read_text())["gdpo"]["estimator"] for p in sorted((folder / "config_history").iterdir())
    ]
    assert estimators == ["gdpo", "grpo"]


@pytest.mark.parametrize(
    "override, horizon",
    [("gdpo.max_num_steps=60", 60), ("gdpo.max_num_steps=120", 120), ("policy.train_global_batch_size=8", 204)],
)
def test_the_horizon_is_the_updates_done_and_those_to_come(config_file, override, horizon):
    """12 steps of one update are done; the batch size makes four updates of each of the other 48 steps."""
    config = load_config(config_file, [override])
    done = RunState(step=12, updates=12)
    assert total_updates(resolve(config), done, prompts=100) == horizon
    assert total_updates(resolve(replace(config, gdpo=replace(config.gdpo, max_num_steps=6))), done, prompts=100) == 12


def test_horizon_ends_with_the_epochs_if_they_end_first(config_file):
    """Each of two epochs of 100 prompts has 6 steps of 16; where 12 steps took 3 batches more, 3 steps fewer are
    left."""
    config = load_config(config_file, ["gdpo.max_num_epochs=2", "gdpo.num_prompts_per_step=16"])
    assert total_updates(resolve(config), RunState(), prompts=100) == 12
    assert total_updates(resolve(config), RunState(step=4, updates=4, position=(4 + 3) * 16), prompts=100) == 9
    assert total_updates(resolve(config), RunState(step=12, updates=12, position=192), prompts=100) == 12
    assert total_updates(resolve(config), RunState(), prompts=10_000) == 60


def test_run_whose_checkpoints_are_all_damaged_is_refused_before_anything_is_written(run, config_file, inputs):
    folder = run()
    (folder / "checkpoints" / "step_12" / "state.json").write_text("")
    before = sorted(folder.rglob("*"))
    config = load_config(config_file, [])
    with pytest.raises(
        ConfigError, match=r"run.dir: every checkpoint in .*run/checkpoints is damaged; .*step 0 \(chec"
    ):
        find_start(resolve(config), folder, inputs)
    assert sorted(folder.rglob("*")) == before
    shutil.rmtree(folder / "checkpoints")
    assert find_start(resolve(config), folder, inputs).state.step == 0


def test_config_of_a_run_is_whole_when_power_is_lost_at_any_moment(tmp_path, config_file, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    disk = SyncedDisk(folder)
    texts = []
    seen = set()

    def moment():
        for eager in (False, True):
            file = disk.survivor(tmp_path / "left", eager) / "config.yaml"
            seen.add(file.read_text() if file.exists() else None)
            assert seen <= {None, *texts}
            assert None not in seen or len(texts) == 1

    with monkeypatch.context() as watched:
        disk.watch(watched, moment)
        for lr in ("0.1", "0.2"):
            config = load_config(config_file, [f"policy.megatron_cfg.optimizer.lr={lr}"])
            texts.append(to_yaml(config))
            record_config(config, folder, 0)
            seen.clear()
            disk.examine(moment)
            assert seen == {texts[-1]}
    disk.close()
