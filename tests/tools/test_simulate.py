"""``gdpo-nemo simulate``: a config becomes the scenario it should, and what is said about it follows from it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from bad_input import make_world

from gdpo_nemo.commands import cli
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.model_checks import resolve
from gdpo_nemo.planning.hardware import Rates, device
from gdpo_nemo.planning.shape import model_shape
from gdpo_nemo.planning.speed import Lengths, generation_work, step_time, sync_work
from gdpo_nemo.tools.simulation.engine import EngineRates
from gdpo_nemo.tools.simulation.records import LogNormal, Scenario, Trace
from gdpo_nemo.tools.simulation.report import candidates, helpful_changes, limit, occupancy
from gdpo_nemo.tools.simulation.scenarios import Overrides, scaled, scenario_from
from gdpo_nemo.tools.simulation.simulation import simulate

GPU_CONFIG = Path(__file__).resolve().parents[2] / "configs" / "gdpo_gsm8k_qwen2.5_1.5b_8gpu.yaml"
SEPARATE = ("cluster.placement=separate", "policy.generation.engines=4")
TAIL = Scenario(8, EngineRates(0.008, 0.00005), 64, 64, 8, LogNormal.from_mean(1000, 1.2, 8000), 11.2, max_staleness=1)


def test_equal_lengths_take_the_time_that_the_plan_has_for_them():
    config = load_config(GPU_CONFIG, SEPARATE)
    shape, gpu, rates = model_shape(resolve(config)), device("h100"), Rates()
    scenario = scenario_from(resolve(config), shape, gpu, rates, Overrides(mean=500, sigma=0, cap=500, prompt=200))
    result = simulate(scenario.changed(steps=4))
    lengths = Lengths(200, 500, 500)
    plan = step_time(resolve(config), shape, gpu, rates, lengths)
    assert result.step_s == pytest.approx(plan.step, rel=0.1)
    work = generation_work(resolve(config), shape, gpu, lengths)
    waited = result.trainer_idle * result.step_s
    assert waited == pytest.approx(rates.generation.seconds(work.units, work.ideal), rel=0.15)
    sync = sync_work(resolve(config), shape, gpu)
    assert scenario.publish_s == rates.sync.seconds(sync.units, sync.ideal)


def test_more_gpus_keep_the_share_that_samples_and_whole_replicas():
    config = load_config(GPU_CONFIG, [*SEPARATE, "policy.megatron_cfg.tensor_model_parallel_size=2"])
    for gpus in (2 + 2, 8, 64, 512, 1024):
        layout = scaled(resolve(config), gpus, None).layout
        assert layout.engine_ranks == gpus / 2 and layout.gpus == gpus
        assert layout.policy_ranks + layout.engine_ranks <= gpus
    assert scaled(resolve(config), 64, 0.25).layout.engines == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, "tail"),
        ({"train_s": 100.0}, "trainer"),
        ({"slots": 8}, "engines"),
        ({"verifier": LogNormal(1.0), "verify_workers": 4}, "verifiers"),
        ({"driver_s": 0.3}, "driver"),
        ({"train_s": 1.0, "publish_s": 60.0}, "publication"),
    ],
)
def test_bottleneck_is_named_and_relieving_it_makes_a_step_faster(changes, expected):
    result = simulate(TAIL.changed(**changes))
    assert limit(result) == expected
    found = helpful_changes(result, candidates(result))
    assert all(other.step_s < result.step_s for _, other in found)
    if expected != "trainer":
        assert found


def test_occupancy_over_time_adds_up_to_the_seconds_of_all_slots():
    result = simulate(TAIL.changed(steps=3, trace=True))
    start, end = 0.0, result.steps[-1].ended
    table = occupancy(result.trace, 8, start, end)
    assert table.sum() * (end - start) / table.shape[1] == pytest.approx(result.steps[-1].slot_seconds, rel=1e-6)
    assert table.min() >= 0 and table.max() <= 64
    trace = Trace([(1.0, 0, 2), (3.0, 0, 0)])
    assert occupancy(trace, 2, 0.0, 4.0)[:, [50, 150, 250, 350]].tolist() == [[0, 2, 2, 0], [0, 0, 0, 0]]
    assert np.allclose(occupancy(trace, 100, 0.0, 4.0)[0, 200], 1.0)  # two engines a track


@pytest.mark.slow
def test_command_prints_a_table_plots_and_gives_json(tmp_path, capsys):
    figure = tmp_path / "simulation.png"
    options = ["simulate", "--config", str(GPU_CONFIG), *SEPARATE, "--staleness", "0,2", "--steps", "6"]
    assert cli.main([*options, "--scheduler", "continuous,barrier", "--png", str(figure)]) == 0
    shown = capsys.readouterr().out
    assert figure.read_bytes().startswith(b"\x89PNG") and f"figure     {figure}" in shown
    assert shown.count(" continuous ") == 2 == shown.count(" barrier ") and "are the bottleneck" in shown
    assert cli.main([*options, "--gpus", "8,16", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    rows = content["rows"]
    assert [(row["gpus"], row["max_staleness"]) for row in rows] == [(8, 0), (8, 2), (16, 0), (16, 2)]
    assert rows[2]["step_s"] < rows[0]["step_s"] and len(content["scaling"]) == 1
    assert all(row["limit"] and row["staleness_max"] <= row["max_staleness"] for row in rows)


def test_separately_given_rates_need_no_model(tmp_path, capsys):
    unknown = ["policy.model_name=nobody/unknown", "policy.model_factory=null"]
    options = [*unknown, "policy.generation.engines=2", "gdpo.num_prompts_per_step=4"]
    rates = ["--decode-ms", "10", "--per-sequence-ms", "0", "--train-s", "1", "--publish-s", "0.5", "--mean", "100",
             "--sigma", "0", "--cap", "200", "--prompt", "0", "--steps", "4", "--staleness", "0", "--json"]  # fmt: skip
    assert cli.main(["simulate", *rates, *options]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert row["step_s"] == pytest.approx(1.0 + 1.0 + 0.5, abs=0.05)  # and the driver's calls


def test_a_finished_run_gives_config_speeds_and_lengths(tmp_path, capsys):
    world = make_world(tmp_path / "w")
    run = world / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"time/rollout": 2.0, "time/train": 1.0, "time/sync": 0.25, "time/idle": 2.0, "rollout/tokens": 16}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sample = json.loads((run / "rollouts" / "step_0001.jsonl").read_text().splitlines()[0])
    samples = "".join(json.dumps(sample | {"completion_ids": [3] * 8}) + "\n" for _ in range(16))
    for file in (run / "rollouts").glob("*.parquet"):
        file.unlink()
    for step in (1, 2, 3):
        (run / "rollouts" / f"step_{step:04d}.jsonl").write_text(samples)
    assert cli.main(["simulate", "--run", str(run), "--staleness", "0", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert row["train_s"] == pytest.approx(1.0) and row["publish_s"] == pytest.approx(0.25)
    assert row["step_s"] == pytest.approx(3.25, rel=0.05)
