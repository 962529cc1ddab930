"""Measurements of ``measure.py colocated|eight``: whole runs of a one-GPU recipe, and a policy of several ranks."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from engines import BF16, NEAR, precision, served_model
from standing import ROOT, Stand, batch_of, kept_on_failure, record

RECIPE = "configs/gdpo_smoke_qwen2.5_0.5b_1gpu.yaml"
STEPS = 3
_VOCABULARY = 288
"""So few that most sampled tokens are bytes, whose number the recipe rewards."""
_PATIENCE_S = 600.0
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "TP2+SP": ("qwen3", dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    "CP2": ("qwen3", dict(context_parallel_size=2)),
    "PP2": ("qwen3", dict(pipeline_model_parallel_size=2)),
    "mixture": ("qwen3-moe", {}),
    "EP2": ("qwen3-moe", dict(data_parallel_size=2, expert_model_parallel_size=2)),
}
"""Model of ``tiny_models`` and layout of two ranks; those without a layout are the one rank that others follow."""
_SIZES = dict(hidden_size=256, num_attention_heads=8, head_dim=32, intermediate_size=512, vocab_size=1024)


# -- a recipe ---------------------------------------------------------------------------------------------------------


def overrides(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """The recipe of one GPU for three steps and without a network, unless ``--model`` names a model with a tokenizer.

    A learning rate at which bf16 weights change; random weights earn the reward for short answers.
    """
    model = served_model(folder / "model", arguments, _VOCABULARY)
    small = ["gdpo.num_prompts_per_step=4", "policy.generation.vllm_cfg.gpu_memory_utilization=0.85",
             "cluster.gpus_per_node=0", "policy.precision=float32"]  # fmt: skip
    return [
        f"policy.model_name={model.folder}",
        f"gdpo.max_num_steps={STEPS}",
        "gdpo.val_at_start=false",
        "policy.megatron_cfg.optimizer.lr=1.0e-3",
        "checkpointing.save_period=1",
        "logger.plot=false",
        "logger.tensorboard.enabled=false",
        "logger.console=plain",
        *(small if arguments.cpu else []),
    ]


def _drilled(run_dir: Path, changes: list[str]) -> Any:
    from gdpo_nemo.tools.drill.run import DrilledRun

    return DrilledRun(run_dir, ["--config", str(ROOT / RECIPE), *changes, f"run.dir={run_dir}"], _PATIENCE_S)


def _ended(run: Any) -> None:
    """Wait for the end of a run, which has to be a good one and to leave nothing behind."""
    status = run.finish()
    if status:
        raise SystemExit(f"the run ended with status {status}:\n{run.log.read_text()[-4000:]}")
    record(f"left behind by {run.run_dir.name}", ", ".join(run.left_behind()) or "nothing")


def colocated(arguments: argparse.Namespace) -> None:
    """Three steps twice; the second run's driver is killed behind a checkpoint, and the supervisor resumes."""
    from gdpo_nemo.tools.drill.faults import FAULTS
    from gdpo_nemo.tools.drill.run import trained

    with kept_on_failure() as folder:
        changes = overrides(arguments, folder)
        undisturbed, killed = (_drilled(folder / name, changes) for name in ("undisturbed", "killed"))
        try:
            undisturbed.start()
            _ended(undisturbed)
            killed.start()
            killed.wait_for(1)
            outcome = killed.disturb(FAULTS["torn-lines"])
            if outcome.wrong or not outcome.victim:
                raise SystemExit(f"the kill of the driver: {outcome.wrong or 'there was none to kill'}")
            record("from the kill to the next step", outcome.seconds, "s", key=True)
            _ended(killed)
        finally:
            for run in (undisturbed, killed):
                if hasattr(run, "_process"):
                    run.close()
        rows = [trained(run.run_dir) for run in (undisturbed, killed)]
        record("steps that a run lacks", sum(STEPS - len(found) for found in rows), "", 0)
        _same_runs(folder, rows, arguments)
        row = rows[0][STEPS]
        record("a step", row["time/step"], "s", key=True)
        for name in ("time/sync", "time/sleep", "time/wake", "time/train", "parity/mean_abs", "parity/probe"):
            record(name, row[name], "nats" if name.startswith("parity") else "s")


def _same_runs(folder: Path, rows: list[dict[int, Any]], arguments: argparse.Namespace) -> None:
    """On a CPU bit for bit. On GPUs the last bits of a product depend on the batch, and so do a few samples."""
    from gdpo_nemo.observe.samples import read_rollouts, rollout_path

    samples = [read_rollouts(rollout_path(folder / name, STEPS)) for name in ("undisturbed", "killed")]
    prompts, drawn = (
        sum(a[key] != b[key] for a, b in zip(*samples, strict=True)) for key in ("prompt_ids", "completion_ids")
    )
    record("prompts of the last step that differ", prompts, "", 0)
    record("samples of the last step that differ", drawn / len(samples[0]), "share", 0.0 if arguments.cpu else 0.25)
    gap = max(abs(rows[0][step]["grad_norm"] / rows[1][step]["grad_norm"] - 1) for step in rows[0])
    record("gradient norms", gap, "relative", 0.0 if arguments.cpu else 0.1)
    start, one, other = (_tensors(folder / name) for name in ("model", "undisturbed/model", "killed/model"))
    moved = {name: float((one[name] - value).abs().max()) for name, value in start.items()}
    record("tensors that no step moved", sum(not step for step in moved.values()) / len(moved), "share", 0.9)
    apart = max(float((one[name] - other[name]).abs().max()) for name in one) / max(moved.values())
    limit = 0.0 if arguments.cpu else 0.5
    record("weights of the resumed run", apart, "of what the steps moved", limit, key=True)


def _tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: value.float() for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


# -- several ranks ----------------------------------------------------------------------------------------------------


def eight(arguments: argparse.Namespace) -> None:
    """Layouts of two ranks against one rank; the transport of separate engines to up to four of them."""
    import torch

    gpus = torch.cuda.device_count()
    if not arguments.cpu and gpus < 2:
        record("skipped", f"needs 2 GPUs, and there is {gpus}")
        return
    with kept_on_failure() as folder:
        _layouts(folder, arguments)
        engines = 2 if arguments.cpu else min(4, gpus - 1)
        _separate_engines(folder, engines, arguments)


def _layouts(folder: Path, arguments: argparse.Namespace) -> None:
    """Two processes that go through ``LAYOUTS``; the first one writes what both computed."""
    sys.path[:0] = [str(ROOT / "tests" / "megatron")]
    import tiny_models

    for name in {model for model, _ in LAYOUTS.values()}:
        experts = dict(moe_intermediate_size=128) if name.endswith("moe") else {}
        tiny_models.write_model(name, folder / name, **_SIZES, **experts)
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("measure.py")), "rank"]
    command += ["--model", str(folder), *(["--cpu"] if arguments.cpu else [])]
    processes = [
        subprocess.Popen([*command, "--rank", str(rank)], env={**os.environ, "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    statuses = [process.wait() for process in processes]
    if any(statuses):
        raise SystemExit(f"the ranks ended with {statuses}; see the log")


def rank(arguments: argparse.Namespace) -> None:
    """One of two ranks: two updates in every layout, of which the first rank records how far they are from one rank."""
    from gdpo_nemo.megatron import runtime

    folder = Path(arguments.model)
    alone: dict[str, tuple[np.ndarray, dict[str, Any]]] = {}
    exact, close = (1e-5, 1e-5) if arguments.cpu else (0.02, 0.03)
    for name, (model, layout) in LAYOUTS.items():
        ranks = 2 if layout else 1
        if arguments.rank >= ranks:
            continue
        (folder / name).mkdir(exist_ok=True)
        stand = Stand(folder / name, arguments.rank, ranks, **layout)
        steps, weights = _two_updates(stand, folder / model, precision(arguments), layout)
        runtime.tear_down()
        if ranks == 1:
            alone[model] = steps, weights
        elif arguments.rank == 0:
            expected, theirs = alone[model]
            loss, norm = np.abs(steps / expected - 1).max(0)
            backend = stand.runtime.backend
            record(f"{name} over {backend}, loss", float(loss), "relative to one rank", exact, key=True)
            record(f"{name} over {backend}, gradient norm", float(norm), "relative to one rank", close)
            largest = max(float((weights[n] - theirs[n]).abs().max()) for n in theirs)
            record(f"{name} over {backend}, weights", largest, "", 1e-5 if arguments.cpu else None)


def _two_updates(
    stand: Stand, folder: Path, precision: str, layout: dict[str, Any]
) -> tuple[np.ndarray, dict[str, Any]]:
    """(loss, gradient norm) of each update; all Hugging Face tensors afterwards."""
    from megatron.core import parallel_state
    from standing import Model

    from gdpo_nemo.algorithms import LossSettings
    from gdpo_nemo.config.schema import OptimizerConfig
    from gdpo_nemo.data.packing import Budget, assign

    # With a small eps, Adam's first steps would turn the rounding of a small gradient into whole ones.
    optimizer = OptimizerConfig(lr=1e-2, adam_eps=1e-3, clip_grad=1.0)
    policy = stand.policy(Model(folder, (0,) * 7, 0), precision, optimizer=optimizer, **layout)
    batch = batch_of([40, 25, 61, 33, 48, 30], 1000)
    shares = assign([len(s) for s in batch], Budget(parallel_state.get_data_parallel_world_size(), 128))
    mine = shares[parallel_state.get_data_parallel_rank()]
    results = [policy.train(batch, mine, LossSettings()) for _ in range(2)]
    weights = {name: tensor.detach().float().cpu().clone() for name, tensor in policy.weights()}
    return np.array([(result.loss, result.grad_norm) for result in results]), weights


def _separate_engines(folder: Path, engines: int, arguments: argparse.Namespace) -> None:
    """A run whose engines have devices of their own, which get every update over ``nccl``, or ``gloo`` on a CPU."""
    from gdpo_nemo.tools.drill.run import trained

    transport = "gloo" if arguments.cpu else "nccl"
    changes = [*overrides(arguments, folder), "cluster.placement=separate", f"policy.generation.engines={engines}",
               f"weights.transport={transport}"]  # fmt: skip
    if not arguments.cpu:
        changes.append(f"cluster.gpus_per_node={engines + 1}")
    run = _drilled(folder / "separate", changes)
    try:
        run.start()
        _ended(run)
    finally:
        run.close()
    row = trained(run.run_dir)[STEPS]
    near = NEAR["float32" if arguments.cpu else BF16]
    record(f"{transport} to {engines} engines, policy against engines", row["parity/probe"], "nats", near, key=True)
    record(f"{transport} to {engines} engines, an update", row["time/sync"], "s")
