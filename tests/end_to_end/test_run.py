"""The whole program as a user starts it: real Ray, real Megatron ranks, a real vLLM engine, in processes of their
own."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil
import pytest
from launch import (
    CONSTRAINT,
    MIX,
    MIXED,
    START_S,
    UNDISTURBED,
    UNDISTURBED_STEPS as STEPS,
    Launch,
    OnATerminal,
    arguments,
    rows,
    timeless,
    train_here,
)
from safetensors.torch import load_file
from starting_points import LR, TARGETS, gdpo, write_adapter, write_mixture

from gdpo_nemo.commands.cli import main
from gdpo_nemo.config.model_checks import resolve
from gdpo_nemo.observe.run_files import read_alerts
from gdpo_nemo.observe.samples import read_rollouts, rollout_path
from gdpo_nemo.tools.drill.faults import FAULTS, RANK, SUPERVISOR, Target
from gdpo_nemo.tools.drill.run import DrilledRun
from gdpo_nemo.training.replay import audit_run

T = TypeVar("T")
QUICK = ("logger.plot=false", "logger.tensorboard.enabled=false")


def test_run_ends_with_status_0_and_leaves_nothing_beside_its_folder(undisturbed):
    assert undisturbed.status == 0, (undisturbed.out, undisturbed.err)
    assert undisturbed.left_behind == []


def test_run_folder_contains_the_documented_files(undisturbed):
    run_dir = undisturbed.run_dir
    model = ("model/model.safetensors", "model/README.md", "model/rewards.png")
    for name in ("config.yaml", "metrics.jsonl", "rewards.png", "report.html", "trace.json", *model):
        assert (run_dir / name).stat().st_size > 0, name
    assert re.search(r"^  date: '\d{4}-\d\d-\d\d'$", (run_dir / "config.yaml").read_text(), re.MULTILINE)
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["step_10", "step_12"]
    samples = read_rollouts(rollout_path(run_dir, STEPS))
    assert len(samples) == 4 * 8 and {"rewards", "advantage", "policy_version"} <= samples[0].keys()


def test_every_step_reports_the_contracted_metrics(undisturbed):
    trained = [row for row in rows(undisturbed.run_dir) if "loss" in row]
    assert [row["step"] for row in trained] == list(range(1, STEPS + 1))
    expected = {"loss", "grad_norm", "lr", "skipped_steps", "reward/total/mean", "throughput/tokens_per_second"}
    expected |= {f"reward/{c}/{s}" for c in ("correctness", "format", "length") for s in ("mean", "std", "missing")}
    expected |= {f"advantage/{s}" for s in ("distinct", "distinct_if_summed", "dead_groups")}
    expected |= {f"parity/{s}" for s in ("kl", "max_abs", "max_prob", "mean_abs", "probe")}
    expected |= {f"policy/{s}" for s in ("entropy", "clip_fraction", "ratio_mean", "ratio_max")}
    expected |= {"staleness/mean", "staleness/max", "rollout/tokens", "rollout/mean_length", "rollout/truncated"}
    expected |= {f"time/{s}" for s in ("step", "rollout", "verify", "train", "sync", "idle")} | {"rollout/env_failed"}
    for row in trained:
        assert expected <= row.keys(), expected - row.keys()


@pytest.mark.slow
def test_batch_arithmetic_of_the_plan_equals_that_of_the_run(undisturbed):
    from gdpo_nemo.config.load import load_config
    from gdpo_nemo.data.packing import Budget, assign
    from gdpo_nemo.planning.calibrate import calibrate, read_run
    from gdpo_nemo.planning.hardware import CPU_RATES, host
    from gdpo_nemo.planning.report import batch_arithmetic

    run_dir = undisturbed.run_dir
    config = load_config(run_dir / "config.yaml")
    first = next(row for row in rows(run_dir) if "loss" in row)
    samples = read_rollouts(rollout_path(run_dir, 1))
    prompts = len({sample["prompt_id"] for sample in samples})
    lengths = [len(sample["prompt_ids"]) + len(sample["completion_ids"]) for sample in samples]
    batches = len(assign(lengths, Budget(1, config.policy.micro_batch_tokens))[0])
    assert first["packing/micro_batches"] == batches
    assert batch_arithmetic(resolve(config)) == (
        f"{prompts} prompts (digit_sort 2.8, twin 1.2) x {len(samples) // prompts} samples = {len(samples)} samples = "
        f"1 optimizer update of {len(samples)} = at most {batches} micro-batch of at most "
        f"{config.policy.micro_batch_tokens} tokens"
    )
    # What a calibration takes from the run is what the run measured.
    run = read_run(run_dir)
    rates = calibrate([run], host(), CPU_RATES)
    tokens = sum(len(sample["completion_ids"]) for sample in samples)
    assert tokens == first["rollout/tokens"] and len(run.rows) == STEPS - 1
    assert 0 < rates.completion_share <= rates.longest_share <= 1 and rates.measured == [str(run_dir)]


def test_steps_have_the_fractions_of_the_environments_and_measure_each_of_them(undisturbed):
    """The environments have the same components, but their length limits differ."""
    trained = [row for row in rows(undisturbed.run_dir) if "loss" in row]
    taken = np.cumsum([[row[f"rollout/groups/{name}"] for name in MIX] for row in trained], axis=0)
    expected = 4 * np.outer(range(1, STEPS + 1), list(MIX.values()))
    assert (taken.sum(axis=1) == 4 * np.arange(1, STEPS + 1)).all() and np.abs(taken - expected).max() < 1
    for row in trained:
        groups = [row[f"rollout/groups/{name}"] for name in MIX]
        means = [row.get(f"reward/{name}/length/mean", 0.0) for name in MIX]
        assert np.dot(groups, means) / sum(groups) == pytest.approx(row["reward/length/mean"])


def test_trainer_and_sampler_agree_at_every_step(undisturbed):
    trained = [row for row in rows(undisturbed.run_dir) if "loss" in row]
    assert max(row["parity/max_abs"] for row in trained) < 1e-4
    assert max(row["parity/probe"] for row in trained) < 1e-4
    assert {row["staleness/max"] for row in trained} == {0.0}


@pytest.mark.slow
def test_three_rewards_are_normalised_in_their_groups_weighted_and_then_over_the_batch(undisturbed):
    run_dir = undisturbed.run_dir
    samples = read_rollouts(rollout_path(run_dir, 1))
    advantages = [sample["advantage"] for sample in samples]
    row = next(row for row in rows(run_dir) if "loss" in row)
    length = 1 + 2.0 * (0.9 - row["reward/length/mean"])  # the constraint has moved the weight before the first update
    assert row["reward/length/weight"] == length != 1
    weights = {"correctness": 1.0, "format": 1.0, "length": length}
    expected = gdpo(samples, weights, batch_norm=True)
    np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-6)
    assert np.abs(expected - gdpo(samples, weights, batch_norm=False)).max() > 0.1
    assert row["advantage/std"] == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
def test_exported_model_equals_the_last_checkpoint_and_transformers_loads_it(undisturbed):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = undisturbed.run_dir / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("31524=", return_tensors="pt").input_ids
    assert ids.shape == (1, 6) and model(ids).logits.shape[-1] == model.config.vocab_size


@pytest.mark.slow
def test_a_run_through_lost_processes_a_hang_up_and_a_flipped_bit_is_the_undisturbed_run_bit_for_bit(
    undisturbed, tmp_path, digit_model
):
    """The first start is colocated: its engines sleep while the policy trains. Its terminal closes after step 3, and a
    bit of the newest checkpoint flips on the disk. In the second start, a policy rank dies while it saves, then an
    engine, then Ray, which starts the run a third time.

    Checkpoints are saved asynchronously. SIGKILL of the driver is in `chaos/test_drill.py`, SIGTERM of a stage of a
    chain is in `test_supervised_runs.py`, and lost hosts and verifiers are in `test_two_hosts.py`.
    """
    run_dir = tmp_path / "run"
    options = (*UNDISTURBED, "checkpointing.async_save=true", *QUICK)
    dropped = OnATerminal(run_dir, digit_model, "cluster.placement=colocated", *options)
    dropped.wait_for_step(3)
    dropped.hang_up()
    assert dropped.finish()[0] == 128 + signal.SIGHUP, dropped.shown
    assert dropped.left_behind() == []
    straight = [timeless(row) for row in rows(undisturbed.run_dir)]
    colocated = rows(run_dir)
    assert all("time/sleep" in row and "time/wake" in row for row in colocated if "loss" in row)
    assert not any("time/sleep" in row for row in rows(undisturbed.run_dir))
    assert [timeless(row) for row in colocated] == straight[: len(colocated)]
    *_, before, newest = sorted((run_dir / "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:]))
    assert newest.name == f"step_{max(row['step'] for row in colocated)}"
    _flip_a_byte(max(newest.rglob("*.distcp"), key=lambda file: file.stat().st_size))

    run = DrilledRun(run_dir, arguments(run_dir, digit_model, options), START_S)
    run.log.touch()  # a fault looks at its end, and the first line is still to come
    try:
        run.start()
        outcomes = [run.disturb(fault) for fault in (RANK_IN_A_SAVE, FAULTS["engine-kill"], RAYLET)]
        assert run.finish() == 0 and run.left_behind() == []
    finally:
        run.close()
    log = run.log.read_text()
    assert not any(outcome.wrong or "None" in outcome.victim for outcome in outcomes), (outcomes, log)
    assert re.search(rf"{newest.name}.*is skipped", log), log
    assert log.count(f"resuming from {before} ") == 2, "an unfinished checkpoint was used"
    assert not list((run_dir / "checkpoints").glob(".*")), log
    _check_account_of_restarts(run_dir, log)
    assert [timeless(row) for row in rows(run_dir)] == straight
    weights = [d / "model" / "model.safetensors" for d in (undisturbed.run_dir, run_dir)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert audit_run(run_dir).found == []


def _kill_a_rank_in_a_save(target: Target) -> str:
    """Kill a rank once the folder of an unfinished checkpoint exists."""
    (rank,) = _when_there(target, lambda: target.processes.of(RANK))
    _when_there(target, lambda: list((target.run_dir / "checkpoints").glob(".writing_*")), 0.001)
    os.kill(rank, signal.SIGKILL)
    return f"policy rank {rank}"


def _kill_raylet_beside_a_stopped_engine(target: Target) -> str:
    """The run trains no further step, and cleanup meets a process that heeds no signal but SIGKILL."""
    return f"{_when_there(target, lambda: FAULTS['engine-stop'].act(target))}, {FAULTS['raylet-kill'].act(target)}"


def _when_there[T](target: Target, look: Callable[[], T], pause_s: float = 0.1) -> T:
    """Call ``look`` every ``pause_s`` seconds until it finds something, and return that."""
    while not (found := look()):
        assert target.processes.of(SUPERVISOR), "the run has ended"
        time.sleep(pause_s)
    return found


RANK_IN_A_SAVE = replace(FAULTS["rank-kill"], act=_kill_a_rank_in_a_save)
RAYLET = replace(FAULTS["raylet-kill"], act=_kill_raylet_beside_a_stopped_engine)


def _check_account_of_restarts(run_dir: Path, log: str) -> None:
    """Alerts and terminal agree on what was lost, and on how often the run was started again, in whole and in part."""
    alerts = [alert["text"] for alert in read_alerts(run_dir)]
    assert any(text.startswith("engine 0: a worker process") for text in alerts), alerts
    restarts = [text for text in alerts if "run.max_restarts" in text]
    rebuilds = [text for text in alerts if "the policy is restarted" in text]
    assert len(restarts) == 1 and [line for line in log.splitlines() if line.startswith("supervisor:")] == [
        f"supervisor: {text}" for text in restarts
    ]
    assert len(rebuilds) == 1, rebuilds
    assert log.count("complete after step") == 1 and "restarting after" not in log, "a single summary, at the end"
    assert "(raylet)" not in log and "state-dump" not in log, "what Ray says of lost processes stays in its own logs"


@pytest.mark.slow
def test_eval_of_a_checkpoint_equals_the_validation_of_the_run_after_that_step(undisturbed, tmp_path, capfd):
    """Through a Hugging Face folder and another engine, bit for bit."""
    run_dir = undisturbed.run_dir
    out = tmp_path / "eval"
    assert main(["eval", str(run_dir), "--step", str(STEPS), "--out", str(out)]) == 0
    shown = capfd.readouterr().out
    found = json.loads((out / "eval.json").read_text())
    measured = next(row for row in rows(run_dir) if row["step"] == STEPS and "loss" not in row)
    assert {f"validation/{name}": score["mean"] for name, score in found["scores"].items()} == {
        name: value for name, value in measured.items() if name.removeprefix("validation/") in found["scores"]
    }
    assert {"correctness", "format", "length"} <= found["scores"].keys() and all(
        name in shown for name in found["scores"]
    )
    assert (found["step"], found["prompts"], found["mean_length"]) == (STEPS, 8, measured["validation/mean_length"])
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert found["scores"]["format"]["mean"] == sum(s["rewards"]["format"] for s in samples) / len(samples)


@pytest.fixture(scope="module")
def one_step_stale(tmp_path_factory, digit_model) -> tuple[Path, dict]:
    """Two steps with a PEFT adapter to start from, of an agent that compacts its history and has a sub-agent. The
    second step trains mostly samples of the starting weights. Returns the run's folder and the adapter's matrices."""
    scratch = tmp_path_factory.mktemp("one_step_stale")
    start = write_adapter(scratch / "adapter", digit_model)
    run_dir = scratch / "run"
    train_here(
        run_dir,
        scratch / "adapter",
        *("--config", "configs/gdpo_turns_cpu.yaml"),
        "rollout.function=tests/rollouts/custom_rollouts.py:compacts",
        "rollout.save_trainer_logprobs=true",
        f"policy.lora={{rank: 4, alpha: 8, target_modules: [{','.join(TARGETS)}]}}",
        f"policy.megatron_cfg.optimizer.lr={LR}",
        "gdpo.rewards={format: 1.0}",
        "gdpo.batch_norm=false",
        "gdpo.dynamic_sampling={enabled: true, max_rounds: 6}",
        "loss_fn={reference_policy_kl_penalty: 0.01, entropy_bonus: 0.001, off_policy: {mode: truncate}}",
        "loss_fn.old_logprobs=trainer",
        "rollout.max_staleness=1",
        "policy.train_global_batch_size=16",
        "gdpo.num_generations_per_prompt=4",
        "gdpo.num_prompts_per_step=8",
        "gdpo.max_num_steps=2",
        "gdpo.val_period=0",
        "checkpointing.metric_name=null",
        *QUICK,
    )
    return run_dir, start


@pytest.mark.slow
def test_adapters_kl_penalty_dynamic_sampling_and_several_updates_train_one_step_stale(one_step_stale):
    """The reference is the model without the adapter. Format alone is constant in many groups, and without the batch
    normalisation one reward's advantages are GRPO's."""
    run_dir, start = one_step_stale
    first, second = [row for row in rows(run_dir) if "loss" in row]
    assert first["rollout/dropped_groups"] > 0
    assert first["reward/format/dead_groups"] == second["reward/format/dead_groups"] == 0.0
    samples = read_rollouts(rollout_path(run_dir, 1))
    advantages = [sample["advantage"] for sample in samples]
    np.testing.assert_allclose(advantages, gdpo(samples, {"format": 1.0}, batch_norm=False), rtol=1e-5, atol=1e-6)
    assert first["policy/reference_kl"] > 1e-4 and first["policy/ratio_max"] > 1.0
    assert first["time/advantages"] < 0.01 * first["time/step"]
    assert max(first["parity/probe"], second["parity/probe"]) < 1e-5
    assert [first["staleness/max"], second["staleness/max"]] == [0.0, 1.0]
    # Four updates move this model by far more than the engine's arithmetic differs from the trainer's.
    assert first["sampler_gap/mean_abs"] < 1e-5 and second["sampler_gap/mean_abs"] > 1e-3
    assert second["policy/importance_weight"] != 1
    # Engine and trainer agree on the first samples, and where the adapter is after four updates it can only have come
    # to from its own place: Adam moves a weight by about the learning rate.
    assert first["parity/max_abs"] < 1e-3
    after = load_file(run_dir / "adapter" / "adapter_model.safetensors")
    assert after.keys() == start.keys()
    assert 0 < max(float((after[name] - start[name]).abs().max()) for name in start) < 8 * LR


@pytest.mark.slow
def test_an_agent_of_several_contexts_trains_and_sampler_and_trainer_agree(one_step_stale):
    run_dir, _ = one_step_stale
    for row in (row for row in rows(run_dir) if "loss" in row):
        assert row["grad_norm"] > 0
        assert (row["rollout/contexts"], row["rollout/turns"], row["rollout/not_contiguous"]) == (2.5, 3.0, 0.0)
        for s in read_rollouts(rollout_path(run_dir, row["step"])):
            assert s["turn_parents"] == ([-1, -1, 0] if s["sample_index"] % 2 else [-1, -1, -1])
            assert [value is None for value in s["trainer_logprobs"]] == [not written for written in s["loss_mask"]]
            gaps = np.array([abs(a - b) for a, b in zip(s["trainer_logprobs"], s["logprobs"]) if a is not None])
            assert len(gaps) == sum(s["turn_tokens"])
            versions, tokens = np.transpose(s["spans"])
            current = np.repeat(versions, tokens) == row["step"] - 1
            assert gaps[current].max(initial=0.0) < 1e-4
            # In step 2, the current weights sampled only tokens of groups that replaced a dropped group.
            assert current.any() or gaps.max() > 1e-4


@pytest.fixture(scope="module")
def on_a_small_disk(tmp_path_factory, digit_model) -> tuple[Launch, int, str, list[str]]:
    """A run of a mixture that uses its sampler's experts, of two turns, with KL to the starting model as a reward. Its
    checkpoints go to a file system of their own with room for one of them (41 MB each): the launch, its status, stderr,
    and what the file system held in the end."""
    scratch = tmp_path_factory.mktemp("small_disk")
    write_mixture(scratch / "mixture", digit_model)
    folder = scratch / "run" / "checkpoints"
    folder.mkdir(parents=True)
    mount = f"mount -t tmpfs -o size=64m tmpfs {folder} && "
    listing = f"; status=$?; ls {folder} > {scratch}/kept; exit $status"
    launch = Launch(
        scratch / "run",
        scratch / "mixture",
        *("--config", "configs/gdpo_turns_cpu.yaml"),
        "gdpo.kl_in_reward=0.1",
        "policy.router_replay=sampler",
        "checkpointing.save_period=1",
        *QUICK,
        before=["unshare", "--mount", "sh", "-c", mount + '"$@"' + listing, "sh"],
    )
    status, _, err = launch.finish()
    return launch, status, err, (scratch / "kept").read_text().split()


@pytest.mark.slow
def test_full_disk_on_a_checkpoint_ends_the_run_and_keeps_the_last_good_one(on_a_small_disk):
    launch, status, err, kept = on_a_small_disk
    assert status == 1, err
    assert "checkpoint of step 2 could not be written" in err and "No space left" in err and "step 1 is the last" in err
    assert kept == ["step_1"]
    assert launch.left_behind() == []


@pytest.mark.slow
def test_two_turns_are_trained_and_sampler_and_trainer_agree(on_a_small_disk):
    run_dir = on_a_small_disk[0].run_dir
    steps = [row for row in rows(run_dir) if "loss" in row]
    assert len(steps) == 2 and all(row["parity/max_abs"] < 1e-4 for row in steps)
    assert all(row["rollout/turns"] == 2.0 and row["rollout/not_contiguous"] == 0.0 for row in steps)
    assert all(row["routing/differing"] < 0.01 and row["parity/probe_own_experts"] < 1e-4 for row in steps)
    assert len({row["grad_norm"] for row in steps}) == 2 and steps[0]["reward/first/std"] > 0
    assert any("validation/second" in row for row in rows(run_dir))
    for row in steps:
        samples = read_rollouts(rollout_path(run_dir, row["step"]))
        assert row["rollout/tokens"] == sum(sum(s["loss_mask"]) for s in samples)
        for s in samples:
            assert len(s["loss_mask"]) == len(s["completion_ids"]) == len(s["logprobs"])
            assert [value is None for value in s["logprobs"]] == [not written for written in s["loss_mask"]]
            num_routed = len(s["routing"]) - 8  # 4 layers, 2 experts
            assert [c < 0 for c in s["routing"]] == [False] * num_routed + [True] * 8
            assert s["loss_mask"].count(0) == 2 and s["turns"] == 2  # the hint: a digit (or +) and =


@pytest.mark.slow
def test_kl_to_the_starting_model_can_be_part_of_the_reward(on_a_small_disk):
    launch = on_a_small_disk[0]
    first, second = [row for row in rows(launch.run_dir) if "loss" in row]
    # Before any update sampler and reference are one model: what is left of the log-ratio is rounding.
    assert abs(first["rollout/reference_kl"]) < 1e-4
    assert second["rollout/reference_kl"] == pytest.approx(
        _log_ratio(launch.run_dir, 2, launch.run_dir.parent / "mixture"), abs=1e-4
    )
    assert abs(second["rollout/reference_kl"]) > 1e-3


def _log_ratio(run_dir: Path, step: int, model: Path) -> float:
    """Mean over a step's trajectories of log p_sampler - log p_model, the latter by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = []
    for record in read_rollouts(rollout_path(run_dir, step)):
        prompt = record["prompt_ids"]
        completion = record["completion_ids"]
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        own = torch.log_softmax(logits.double(), -1)[torch.arange(len(completion)), torch.tensor(completion)]
        written = [value for value in record["logprobs"] if value is not None]
        found.append(sum(written) - float(own[torch.tensor(record["loss_mask"]).bool()].sum()))
    return sum(found) / len(found)


def _same_first_update(one: list[dict], many: list[dict]) -> None:
    one, many = (next(row for row in found if "loss" in row) for found in (one, many))
    assert one["reward/total/mean"] == many["reward/total/mean"]
    assert many["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=1e-7)
    assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)


HANGING = """
import os, time
from gdpo_nemo.environments.tasks.digit_sort import DigitSort

FLAG = __file__.replace(".py", ".hang")

class Patient(DigitSort):
    def verify(self, trajectories):
        while os.access(FLAG, os.F_OK):  # functions in C, so that this one is the innermost of any stack
            time.sleep(0.1)
        return super().verify(trajectories)
"""


@pytest.mark.slow
def test_data_and_context_ranks_make_the_same_first_update_and_a_blocking_rank_is_named(
    undisturbed, tmp_path, digit_model
):
    """One run, three faults in turn: a hanging verifier, a stopped engine, a stopped rank. The last one lasts beyond
    its deadline, and the run itself says who it was."""
    (tmp_path / "mine.py").write_text(HANGING)
    launch = Launch(
        tmp_path / "run",
        digit_model,
        *MIXED,
        f"env.digit_sort={{plugin: '{tmp_path / 'mine.py'}:Patient'}}",
        "run.max_restarts=0",
        CONSTRAINT,
        "gdpo.max_num_steps=100000",
        "gdpo.val_period=100000",
        "checkpointing.save_period=100000",
        "rollout={env_timeout_s: 600, train_timeout_s: 60}",
        "policy.megatron_cfg={data_parallel_size: 2, context_parallel_size: 2}",
        "weights.transport=gloo",
        *QUICK,
    )
    launch.wait_for_step(1)
    _listens_to_this_host(launch)
    _same_first_update(rows(undisturbed.run_dir), rows(launch.run_dir))
    flag = tmp_path / "mine.hang"
    flag.touch()
    found = _diagnosis_when(launch, "environments", 2.0)
    assert found.blocked_by == ["environments: worker 0"] and not found.lost, found.sentence
    assert "verify (" in found.sentence and "mine.py" in found.sentence
    flag.unlink()

    engine = _stop(launch, "engine 0")
    found = _diagnosis_when(launch, "engine", 1.0)
    assert found.blocked_by == ["engine 0"] and found.lost
    assert f"engine 0 (process {engine.pid}) is stopped" in found.sentence
    flag.touch()
    engine.resume()
    _let_it_wait(launch, "environments", 0.5)  # so that the next wait for ranks is for an update

    rank = _stop(launch, "policy rank 1")
    flag.unlink()
    status, out, err = launch.finish()
    assert status == 1, (out, err)
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    assert "did not answer within 60 s" in line and f"policy rank 1 (process {rank.pid}) is stopped" in line
    bundle = max((launch.run_dir / "doctor").iterdir())
    assert {"summary.txt", "stack policy rank 0.txt", "config.yaml", "versions.txt", "logs.txt"} <= {
        p.name for p in bundle.iterdir()
    }
    assert launch.survivors() == []


def _listens_to_this_host(launch: Launch) -> None:
    """The world of the policy's ranks, the group of the weights, Ray: on one node none is for others."""
    bound = launch.listening()
    listening = {name for name, addresses in bound.items() if addresses}
    assert {"gcs_server", "raylet"} < listening and any("PolicyRank" in name for name in listening), bound
    assert {address for addresses in bound.values() for address in addresses} == {"127.0.0.1"}, bound


def _stop(launch: Launch, role: str) -> psutil.Process:
    status = json.loads((launch.run_dir / "status.json").read_text())
    process = psutil.Process(status["roles"][role][1])
    process.suspend()
    return process


def _diagnosis_when(launch: Launch, owner: str, waited_s: float):
    """The doctor's word once the run has waited for ``owner`` so long."""
    from gdpo_nemo.observe.diagnosis import examine

    _let_it_wait(launch, owner, waited_s)
    return examine(launch.run_dir)


def _let_it_wait(launch: Launch, owner: str, waited_s: float) -> None:
    """Return once the run has waited for ``owner`` so long."""
    deadline = time.monotonic() + START_S
    while True:
        status = json.loads((launch.run_dir / "status.json").read_text())
        if any(w["owner"].startswith(owner) and status["time"] - w["since"] > waited_s for w in status["waits"]):
            return
        assert time.monotonic() < deadline and launch.process.poll() is None, status
        time.sleep(0.2)


def _flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
