"""``gdpo-nemo eval``: evaluate a run's weights or another model on held-out prompts, with vLLM as in training.

Prompts, number of samples, seeds and rewards are the same as in the run's validation. Equal weights and configs
therefore give equal scores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gdpo_nemo.algorithms.component_weights import directions
from gdpo_nemo.algorithms.diagnostics import mean_pass_at_k, present_values
from gdpo_nemo.commands.arguments import Commands, add_overrides, add_verbosity, terminal, verbosity
from gdpo_nemo.config.layout import Resolved
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.model_checks import check_creatable_folder
from gdpo_nemo.config.schema import Config, GdpoConfig, LoraConfig, MegatronConfig, RolloutConfig
from gdpo_nemo.data.records import Group, Outcome
from gdpo_nemo.models.sources import Format, recognise
from gdpo_nemo.observe.display import active, shown
from gdpo_nemo.observe.installation import require_libraries
from gdpo_nemo.rollouts.metrics import check_failures, reward_names
from gdpo_nemo.training.checkpoints import Checkpoints, check_whole, read_state
from gdpo_nemo.training.inputs import Inputs, read_inputs
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.files import real_path
from gdpo_nemo.utils.progress import phase

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gdpo_nemo.environments.execution.pools import EnvironmentPools
    from gdpo_nemo.rollouts.scheduler import RolloutScheduler


@dataclass(frozen=True)
class Suite:
    """Settings of a benchmark. The rows are those of the config's validation unless ``data.validation.path`` is set."""

    environment: str
    options: Sequence[str] = ()
    """Options of the environment, as overrides."""
    samples: int = 1
    """Samples per prompt. One sample is greedy."""
    pass_at: Sequence[int] = ()

    @property
    def overrides(self) -> list[str]:
        """Config overrides of the suite."""
        return [
            f"data.validation.environment={self.environment}",
            *(f"env.{self.environment}.{option}" for option in self.options),
            "gdpo.val_prompts=null",
            f"gdpo.val_generations_per_prompt={self.samples}",
            f"gdpo.val_temperature={0.6 if self.samples > 1 else 0.0}",
            f"gdpo.val_top_p={0.95 if self.samples > 1 else 1.0}",
            "gdpo.val_top_k=-1",
            f"gdpo.val_pass_at_k={list(self.pass_at)}",
        ]


SUITES = {
    "tool_calling": Suite("tool_calling", ["ast=true"]),
    "bfcl": Suite("bfcl", ["answers=null"]),
    "gsm8k": Suite("gsm8k", ["strict=true", "math_verify=true"]),
    "math_length": Suite("math", ["exceed=4000"], 16, (1, 4, 16)),
}
"""Benchmarks by name. ``math_length`` samples as the GDPO paper does."""


def add(commands: Commands) -> None:
    """Register the command."""
    command = commands.add_parser("eval", help="evaluate a run's weights or any model on held-out prompts")
    command.add_argument(
        "source",
        metavar="SOURCE",
        help="run folder, checkpoint, or model in any form that policy.model_name accepts",
    )
    command.add_argument(
        "--config", metavar="FILE", help="config file (default: config.yaml of the run that contains SOURCE)"
    )
    command.add_argument("--step", type=int, metavar="N", help="step of the run's checkpoint (default: the newest)")
    command.add_argument(
        "--suite",
        choices=tuple(SUITES),
        help="benchmark that sets environment, components, samples and temperature (default: those of the config)",
    )
    command.add_argument("--out", metavar="DIR", help="new folder for eval.json and samples.jsonl")
    command.add_argument("--json", action="store_true", help="print JSON")
    add_verbosity(command)
    add_overrides(command)
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate a model on held-out prompts, and print a table or JSON."""
    import json
    from dataclasses import asdict

    with shown(sys.stderr, verbosity(arguments)):
        overrides = [*(SUITES[arguments.suite].overrides if arguments.suite else ()), *arguments.overrides]
        found = evaluate(arguments.source, arguments.config, arguments.step, overrides, arguments.out)
    if arguments.json:
        print(json.dumps(asdict(found), indent=1))
    else:
        terminal().print(table(found))
    return 0


@dataclass(frozen=True)
class Score:
    """Statistics of one reward component over the held-out prompts that have it. All prompts have the same weight."""

    mean: float
    """Mean over the prompts of the mean over the samples of a prompt."""
    error: float | None
    """Standard error of the mean, from the variance between prompts. None if there are fewer than two prompts."""
    best: float
    """Mean of the best reward per prompt: the largest, or the smallest of a component with a negative weight. For
    rewards of 0 or 1, this is pass@samples."""
    judged: int
    """Number of samples that have a reward of this component."""
    pass_at: dict[int, float] = field(default_factory=dict)
    """Unbiased pass@k for each k in ``gdpo.val_pass_at_k``: mean over prompts with at least k scored samples."""


@dataclass
class Evaluation:
    """Result of ``evaluate``."""

    model: str
    step: int | None
    """Training step of the weights. None if the step is unknown."""
    prompts: int
    samples: int
    """Samples per prompt."""
    temperature: float
    scores: dict[str, Score]
    mean_length: float
    """Mean completion length in tokens."""
    truncated: float
    """Fraction of samples that were truncated."""
    env_failed: float
    """Fraction of samples whose environment failed."""


@dataclass(frozen=True)
class Subject:
    """Model to evaluate: either a model, or a checkpoint that must be exported first."""

    config: Path
    model: Path | None = None
    checkpoint: Path | None = None
    step: int | None = None


def evaluate(
    source: str | Path,
    config_file: str | Path | None = None,
    step: int | None = None,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
) -> Evaluation:
    """Sample and verify the held-out prompts of a config.

    Args:
        source: run folder, checkpoint, or model. For a run folder, evaluate the newest checkpoint or the checkpoint of
            ``step``.
        config_file: config file. None means ``config.yaml`` of the run that contains ``source``.
        step: step of the checkpoint, if ``source`` is a run folder.
        out: new folder for ``eval.json`` and ``samples.jsonl``.

    Raises:
        ConfigError: if a path does not exist, ``out`` already exists, or the config has no held-out prompts.
        RunError: if the checkpoint is damaged, an engine, rank or environment fails, or more verifications fail than
            ``rollout.max_env_failure_share`` allows.
    """
    subject = find_subject(Path(source), config_file, step)
    config = load_config(subject.config, overrides)
    if config.data.validation is None:
        raise ConfigError("data.validation: eval requires held-out prompts; set for example data.validation.path=FILE")
    if out is not None and Path(out).exists():
        raise ConfigError(f"--out: {out} already exists")
    if out is not None:
        check_creatable_folder("--out", Path(out).parent)
    if subject.model is not None:
        config.policy.model_name = str(subject.model)
        config.policy.lora = LoraConfig()  # the engines load weights that already include the adapter
    without_policy(config)
    resolved = validate(config)
    require_libraries(config.cluster)
    if subject.checkpoint is not None:
        check_whole(subject.checkpoint)
    groups = _sample(resolved, subject)
    found = scored(groups, config.gdpo, str(subject.checkpoint or subject.model), subject.step)
    if out is not None:
        _write(Path(out), found, groups)
    return found


def without_policy(config: Config) -> None:
    """Change ``config`` in place so that engines run without a policy and may use all devices.

    Settings for the policy's layout, staleness and weight sync are reset.

    Raises:
        ConfigError: if there are fewer devices than the engines need.
    """
    engines = config.policy.generation.engines * config.policy.generation.vllm_cfg.tensor_parallel_size
    devices = config.cluster.num_nodes * config.cluster.gpus_per_node
    if devices and devices < engines:
        raise ConfigError(
            f"policy.generation.engines: the engines require {engines} GPUs, found {devices}; use fewer engines"
        )
    config.policy.megatron_cfg = MegatronConfig(data_parallel_size=engines)
    config.cluster.placement = "colocated"
    config.cluster.env_nodes = 0
    ahead = ("max_staleness", "kv", "window", "depth", "sync_every", "replay_buffer")
    defaults = RolloutConfig()
    config.rollout = replace(config.rollout, **{key: getattr(defaults, key) for key in ahead})
    config.weights.transport = "auto"


def find_subject(source: Path, config_file: str | Path | None = None, step: int | None = None) -> Subject:
    """Find the model and the config that ``source`` refers to. Raises ConfigError."""
    if config_file is not None and not Path(config_file).is_file():
        raise ConfigError(f"--config: {config_file} does not exist")
    recognised = recognise(source, "SOURCE")
    if (source / "config.json").is_file() or (recognised is not None and recognised.format is not Format.CHECKPOINT):
        config = Path(config_file) if config_file else real_path(source).parent / "config.yaml"
        if step is not None:
            raise ConfigError(f"--step: {source} is a model folder; specify the run folder instead")
        if not config.is_file():
            raise ConfigError(f"--config: required, because {source} is not in a run folder")
        return Subject(config, model=source)
    if (source / "files.json").is_file():
        config = _run_config_file(real_path(source).parent.parent, config_file)
        return Subject(config, checkpoint=source, step=read_state(source).step)
    config = _run_config_file(source, config_file)
    checkpoints = Checkpoints(source / "checkpoints", 0, 0, None)
    known = checkpoints.steps()
    if step is not None and step not in known:
        raise ConfigError(
            f"--step: {source} has no checkpoint of step {step}; existing steps: {', '.join(map(str, known)) or 'none'}"
        )
    if known:
        path = checkpoints.path(known[-1] if step is None else step)
        return Subject(config, checkpoint=path, step=read_state(path).step)
    if (source / "model" / "config.json").is_file():  # the run has no checkpoints
        return Subject(config, model=source / "model")
    raise ConfigError(f"{source}: has no checkpoint or exported model yet")


def _run_config_file(run_dir: Path, config_file: str | Path | None) -> Path:
    config = Path(config_file) if config_file else run_dir / "config.yaml"
    if not config.is_file():
        raise ConfigError(f"{run_dir}: not a run, checkpoint or model folder ({config.name} not found)")
    return config


def _sample(resolved: Resolved, subject: Subject) -> list[Group]:
    """Sample and verify the held-out prompts."""
    config = resolved.config
    inputs = read_inputs(resolved, ("validation",))
    for line in inputs.alerts:
        say(line)
    with sampler(resolved, inputs, "validation", subject.checkpoint) as (stream, _):
        say(f"sampling {len(inputs.held_out)} held-out prompts x {config.gdpo.val_generations_per_prompt}")
        with phase("samples", stream.progress):
            groups = stream.evaluate(inputs.held_out).result()
    check_failures([t for group in groups for t in group.trajectories], config.rollout.max_env_failure_share)
    return groups


@contextlib.contextmanager
def sampler(
    resolved: Resolved, inputs: Inputs, split: str, checkpoint: Path | None = None
) -> Iterator[tuple[RolloutScheduler, EnvironmentPools]]:
    """Start engines and environments without a policy, and yield the scheduler and the environment pools.

    Engines may use the whole machine, or all GPUs of the Ray cluster.

    Args:
        checkpoint: checkpoint to sample with. None means the model in ``inputs``.
    """
    with phase("imports"):
        from gdpo_nemo.cluster.fleet import EngineFleet
        from gdpo_nemo.cluster.reservation import Placement
        from gdpo_nemo.cluster.session import session
        from gdpo_nemo.config.placement import Places
        from gdpo_nemo.environments.execution.pools import EnvironmentPools
        from gdpo_nemo.rollouts.ledger import RunPosition
        from gdpo_nemo.rollouts.scheduler import RolloutScheduler

    config = resolved.config
    with session(config.cluster), contextlib.ExitStack() as stack:
        folder = inputs.folder if checkpoint is None else exported(checkpoint, config, inputs.folder)
        pool = EnvironmentPools(config.env, config.rollout.env_workers, config.rollout.env_timeout_s, config.run.seed)
        stack.callback(pool.close)
        # Without policy ranks, Ray chooses the engines' devices on any node.
        places = Places((), (0,) * config.policy.generation.engines)
        fleet = EngineFleet(config, str(folder.absolute()), Placement(places))
        fleet.ready()
        source = inputs.sources[split]
        stream = RolloutScheduler(
            config, RunPosition(), prompts=source, fleet=fleet, pool=pool, tokenizer=inputs.tokenizer
        )
        stack.callback(stream.close)
        yield stream, pool


def exported(checkpoint: Path, config: Config, model: Path) -> Path:
    """Export a checkpoint to a temporary Hugging Face folder, which is removed together with the Ray session."""
    from gdpo_nemo.commands.convert import export, export_config

    say(f"reading {checkpoint}")
    folder = Path(tempfile.mkdtemp(dir=os.environ["TMPDIR"]))
    export(checkpoint, folder, export_config(model, run=config), model)
    return folder


def say(line: str) -> None:
    """Print a progress line to stderr."""
    if display := active():
        display.write(line)
    else:
        print(line, file=sys.stderr, flush=True)


def scored(groups: Sequence[Group], gdpo: GdpoConfig, model: str, step: int | None) -> Evaluation:
    """Compute the scores of verified samples."""
    trajectories = [t for group in groups for t in group.trajectories]
    outcomes = [t.outcome for t in trajectories]
    better = directions(gdpo.rewards, gdpo.constraints, gdpo.schedules, (step or 0) + 1)
    scores = {}
    for name in reward_names(trajectories):
        rewards = []
        for group in groups:
            rewards.append([t.component_rewards.get(name) for t in group.trajectories])
        if score := _score(rewards, gdpo.val_pass_at_k, better.get(name, 1)):
            scores[name] = score
    return Evaluation(
        model=model,
        step=step,
        prompts=len(groups),
        samples=gdpo.val_generations_per_prompt,
        temperature=gdpo.val_temperature,
        scores=scores,
        mean_length=float(np.mean([t.num_policy_tokens for t in trajectories])),
        truncated=outcomes.count(Outcome.TRUNCATED) / len(outcomes),
        env_failed=float(np.mean([not t.trains for t in trajectories])),
    )


def _score(rows: Sequence[Sequence[float | None]], pass_at: Sequence[int], direction: int) -> Score | None:
    """Compute the score of a component from its values [prompts][samples], of which the largest is the best, or the
    smallest if ``direction`` is -1.

    Return None if no sample has the component.
    """
    present = present_values(rows)
    if not present:
        return None
    means = np.array([np.mean(values) for values in present])
    return Score(
        mean=float(means.mean()),
        error=float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else None,
        best=float(np.mean(list(map(max if direction > 0 else min, present)))),
        judged=sum(map(len, present)),
        pass_at={k: found for k in pass_at if (found := mean_pass_at_k(rows, k, direction)) is not None},
    )


def _write(out: Path, found: Evaluation, groups: Sequence[Group]) -> None:
    from gdpo_nemo.observe.samples import write_samples

    out.mkdir(parents=True)
    write_samples(out / "samples.jsonl", groups)
    (out / "eval.json").write_text(json.dumps(asdict(found), indent=1) + "\n")


def table(found: Evaluation) -> RenderableType:
    """Return the scores as a rich renderable for the terminal."""
    from rich import box
    from rich.console import Group as Lines
    from rich.table import Table

    step_text = "" if found.step is None else f", step {found.step}"
    several = found.samples > 1
    passes = {f"pass@{k}": k for score in found.scores.values() for k in sorted(score.pass_at)}
    grid = Table(box=box.SIMPLE_HEAD)
    best_heading = [f"best of {found.samples}"] if several else []
    for name in ("component", "mean", "± error", *best_heading, *passes, "scored"):
        grid.add_column(name, justify="left" if name == "component" else "right")
    for name, score in found.scores.items():
        cells = [name, f"{score.mean:.3f}", "-" if score.error is None else f"{score.error:.3f}"]
        if several:
            cells.append(f"{score.best:.3f}")
        for k in passes.values():
            cells.append(f"{score.pass_at[k]:.3f}" if k in score.pass_at else "-")
        grid.add_row(*cells, str(score.judged))
    return Lines(
        f"{found.model}{step_text}: {found.prompts} prompts x {found.samples}, temperature {found.temperature:g}",
        grid,
        f"{found.mean_length:.1f} tokens per sample, {found.truncated:.1%} truncated, {found.env_failed:.1%} failed",
    )
