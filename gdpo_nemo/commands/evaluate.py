"""``gdpo-nemo eval``: a run's weights, or any Hugging Face folder, on the held-out prompts, by the engines that
training uses.

The prompts, samples, seeds and verdicts are those of a run's own validation, so equal weights and an equal config give
equal scores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Sequence

import numpy as np

from gdpo_nemo.algorithms.pass_at_k import mean_pass_at_k
from gdpo_nemo.checkpoints import Checkpoints, check_whole, read_state
from gdpo_nemo.commands.arguments import add_overrides, add_verbosity, terminal, verbosity
from gdpo_nemo.config.files import check_folder_can_be
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.model_formats import Format, recognise
from gdpo_nemo.config.reading import real_path
from gdpo_nemo.config.schema import Config, LoraConfig, MegatronConfig, RolloutConfig
from gdpo_nemo.data.records import Group, Outcome
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.observe.display import active, shown
from gdpo_nemo.observe.installation import require_libraries
from gdpo_nemo.phases import phase
from gdpo_nemo.validation import validate


def add(commands) -> None:
    """Register the command."""
    command = commands.add_parser("eval", help="score a run's weights, or any model, on the held-out prompts")
    command.add_argument(
        "source",
        metavar="SOURCE",
        help="the folder of a run, one of its checkpoints, or a model as policy.model_name takes it",
    )
    command.add_argument("--config", metavar="FILE", help="default: config.yaml of the run that SOURCE lies in")
    command.add_argument("--step", type=int, metavar="N", help="the run's checkpoint of that step; default: its newest")
    command.add_argument("--out", metavar="DIR", help="new folder for eval.json and samples.jsonl")
    command.add_argument("--json", action="store_true", help="print JSON")
    add_verbosity(command)
    add_overrides(command)
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Score a run's weights or a model on the held-out prompts; a table, or JSON."""
    import json
    from dataclasses import asdict

    with shown(sys.stderr, verbosity(arguments)):
        found = evaluate(arguments.source, arguments.config, arguments.step, arguments.overrides, arguments.out)
    if arguments.json:
        print(json.dumps(asdict(found), indent=1))
    else:
        terminal().print(table(found))
    return 0


@dataclass(frozen=True)
class Score:
    """One reward component over the held-out prompts."""

    mean: float
    error: float | None
    """Standard error of the mean, from the spread between prompts; None with fewer than two."""
    best: float
    """Mean over the prompts of the best of their samples; for a reward of 0 or 1 this is pass@samples."""
    judged: int
    """Samples that have this component."""
    pass_at: dict[int, float] = field(default_factory=dict)
    """Unbiased pass@k by k, of ``gdpo.val_pass_at_k``: mean over the prompts that have k such samples."""


@dataclass
class Evaluation:
    """What ``evaluate`` found."""

    model: str
    step: int | None
    """Steps trained; None where the folder does not tell."""
    prompts: int
    samples: int
    """Per prompt."""
    temperature: float
    scores: dict[str, Score]
    mean_length: float
    """Tokens."""
    truncated: float
    env_failed: float
    """Shares of the samples."""


@dataclass(frozen=True)
class Subject:
    """What is evaluated: a Hugging Face folder, or a checkpoint to be made into one."""

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
        source: the folder of a run (its newest checkpoint), one of its checkpoints, or a Hugging Face folder.
        config_file: for a folder outside a run, where there is no ``config.yaml`` to go by.
        step: of the run's checkpoint.
        out: a new folder for ``eval.json`` and ``samples.jsonl``.

    Raises:
        ConfigError: something named does not exist, or the config has no held-out prompts. RunError: the checkpoint is
        damaged,
            engines, ranks or environments failed; too many failed verdicts (``rollout.max_env_failure_share``) are a
            failure, too.
    """
    subject = find_subject(Path(source), config_file, step)
    config = load_config(subject.config, overrides)
    if config.data.validation is None:
        raise ConfigError(
            "data.validation: eval needs held-out prompts; name them, for instance data.validation.path=FILE"
        )
    if out is not None and Path(out).exists():
        raise ConfigError(f"--out: {out} exists")
    if out is not None:
        check_folder_can_be("--out", Path(out).parent)
    if subject.model is not None:
        config.policy.model_name = str(subject.model)
        config.policy.lora = LoraConfig()  # engines alone: an adapter is merged for them
    without_policy(config)
    validate(config)
    require_libraries(config)
    if subject.checkpoint is not None:
        check_whole(subject.checkpoint)
    groups = _sampled(config, subject)
    found = scored(groups, config, str(subject.checkpoint or subject.model), subject.step)
    if out is not None:
        _write(Path(out), found, groups)
    return found


def without_policy(config: Config) -> None:
    """Make it a config whose engines have all devices: the policy's layout, and how weights reach the engines, count no
    more.

    Raises:
        ConfigError: there are fewer devices than the engines need.
    """
    engines = config.policy.generation.engines * config.policy.generation.vllm_cfg.tensor_parallel_size
    devices = config.cluster.num_nodes * config.cluster.gpus_per_node
    if devices and devices < engines:
        raise ConfigError(f"policy.generation.engines: the engines need {engines} GPUs, there are {devices}; set fewer")
    config.policy.megatron_cfg = MegatronConfig(data_parallel_size=engines)
    config.cluster.placement = "colocated"
    config.cluster.env_nodes = 0
    ahead = ("max_staleness", "kv", "window", "depth", "sync_every", "replay_buffer")
    defaults = RolloutConfig()
    config.rollout = replace(config.rollout, **{key: getattr(defaults, key) for key in ahead})
    config.weights.transport = "auto"


def find_subject(source: Path, config_file: str | Path | None = None, step: int | None = None) -> Subject:
    """What ``source`` names. Raises ConfigError."""
    if config_file is not None and not Path(config_file).is_file():
        raise ConfigError(f"--config: {config_file} does not exist")
    foreign = recognise(source, "SOURCE")
    if (source / "config.json").is_file() or (foreign is not None and foreign.format is not Format.CHECKPOINT):
        config = Path(config_file) if config_file else real_path(source).parent / "config.yaml"
        if step is not None:
            raise ConfigError(f"--step: {source} is a model; name the folder of the run")
        if not config.is_file():
            raise ConfigError(f"--config: must say on what to evaluate {source}, which lies in no run folder")
        return Subject(config, model=source)
    if (source / "files.json").is_file():
        return Subject(
            _of_run(real_path(source).parent.parent, config_file), checkpoint=source, step=read_state(source).step
        )
    config = _of_run(source, config_file)
    checkpoints = Checkpoints(source / "checkpoints", 0, 0, None)
    known = checkpoints.steps()
    if step is not None and step not in known:
        raise ConfigError(
            f"--step: {source} has no checkpoint of step {step}; there are {', '.join(map(str, known)) or 'none'}"
        )
    if known:
        path = checkpoints.path(known[-1] if step is None else step)
        return Subject(config, checkpoint=path, step=read_state(path).step)
    if (source / "model" / "config.json").is_file():  # of a run without checkpoints
        return Subject(config, model=source / "model")
    raise ConfigError(f"{source}: no checkpoint and no exported model yet")


def _of_run(run_dir: Path, config_file: str | Path | None) -> Path:
    config = Path(config_file) if config_file else run_dir / "config.yaml"
    if not config.is_file():
        raise ConfigError(f"{run_dir}: neither a run, a checkpoint nor a model folder (no {config.name})")
    return config


def _sampled(config: Config, subject: Subject) -> list[Group]:
    """The judged samples of the held-out prompts. The engines get the machine, or Ray's GPUs, to themselves."""
    with phase("imports"):
        from gdpo_nemo.cluster.fleet import EngineFleet
        from gdpo_nemo.cluster.reservation import Placement
        from gdpo_nemo.cluster.session import session
        from gdpo_nemo.config.placement import Places
        from gdpo_nemo.environments.execution.dispatch import EnvironmentPools
        from gdpo_nemo.inputs import read_inputs
        from gdpo_nemo.rollouts.scheduler import RolloutScheduler
        from gdpo_nemo.rollouts.step_metrics import check_failures

    inputs = read_inputs(config, ("validation",))
    for line in inputs.refused:
        say(line)
    with session(config.cluster), contextlib.ExitStack() as stack:
        folder = inputs.folder if subject.checkpoint is None else exported(subject.checkpoint, config, inputs.folder)
        say(f"sampling {len(inputs.held_out)} held-out prompts x {config.gdpo.val_generations_per_prompt}")
        pool = EnvironmentPools(config.env, config.rollout.env_workers, config.rollout.env_timeout_s, config.run.seed)
        stack.callback(pool.close)
        # Without the policy's ranks: Ray finds the engines' devices, on whatever nodes it has.
        places = Places((), (0,) * config.policy.generation.engines)
        fleet = EngineFleet(config, str(folder.absolute()), Placement(places))
        fleet.ready()
        source = inputs.sources["validation"]
        stream = RolloutScheduler(config, source, fleet, pool, inputs.tokenizer, {}, 0, 0)
        stack.callback(stream.close)
        with phase("samples", stream.progress):
            groups = stream.evaluate(inputs.held_out).result()
    check_failures([t for group in groups for t in group.trajectories], config.rollout.max_env_failure_share)
    return groups


def exported(checkpoint: Path, config: Config, model: Path) -> Path:
    """A checkpoint as a Hugging Face folder that goes with the Ray session, however that ends."""
    from gdpo_nemo.commands.convert import export, export_config

    say(f"reading {checkpoint}")
    folder = Path(tempfile.mkdtemp(dir=os.environ["TMPDIR"]))
    export(checkpoint, folder, export_config(model, run=config), model)
    return folder


def say(line: str) -> None:
    """A line for who waits, beside the command's output."""
    if display := active():
        display.write(line)
    else:
        print(line, file=sys.stderr, flush=True)


def scored(groups: Sequence[Group], config: Config, model: str, step: int | None) -> Evaluation:
    """The figures of judged samples."""
    trajectories = [t for group in groups for t in group.trajectories]
    outcomes = [t.outcome for t in trajectories]
    names = dict.fromkeys(name for t in trajectories for name in t.rewards)
    columns = {name: [[t.rewards.get(name) for t in group.trajectories] for group in groups] for name in names}
    return Evaluation(
        model=model,
        step=step,
        prompts=len(groups),
        samples=config.gdpo.val_generations_per_prompt,
        temperature=config.gdpo.val_temperature,
        scores={name: score for name, rows in columns.items() if (score := _score(rows, config.gdpo.val_pass_at_k))},
        mean_length=float(np.mean([t.num_policy_tokens for t in trajectories])),
        truncated=outcomes.count(Outcome.TRUNCATED) / len(outcomes),
        env_failed=float(np.mean([not t.trains for t in trajectories])),
    )


def _score(rows: Sequence[Sequence[float | None]], pass_at: Sequence[int] = ()) -> Score | None:
    """The score of a component from its values [prompts][samples]; None where no sample has it."""
    present = [values for row in rows if (values := [v for v in row if v is not None])]
    if not present:
        return None
    means = np.array([np.mean(values) for values in present])
    return Score(
        mean=float(np.mean(np.concatenate(present))),
        error=float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else None,
        best=float(np.mean([max(values) for values in present])),
        judged=sum(map(len, present)),
        pass_at={k: found for k in pass_at if (found := mean_pass_at_k(rows, k)) is not None},
    )


def _write(out: Path, found: Evaluation, groups: Sequence[Group]) -> None:
    from gdpo_nemo.observe.rollouts import write_samples

    out.mkdir(parents=True)
    write_samples(out / "samples.jsonl", groups)
    (out / "eval.json").write_text(json.dumps(asdict(found), indent=1) + "\n")


def table(found: Evaluation):
    """The scores for the terminal, as something that rich prints."""
    from rich import box
    from rich.console import Group as Lines
    from rich.table import Table

    of_step = "" if found.step is None else f", step {found.step}"
    several = found.samples > 1
    passes = {f"pass@{k}": k for score in found.scores.values() for k in sorted(score.pass_at)}
    grid = Table(box=box.SIMPLE_HEAD)
    for name in ("component", "mean", "± error", *([f"best of {found.samples}"] if several else []), *passes, "judged"):
        grid.add_column(name, justify="left" if name == "component" else "right")
    for name, score in found.scores.items():
        error = "-" if score.error is None else f"{score.error:.3f}"
        best = [f"{score.best:.3f}"] if several else []
        at_k = [f"{score.pass_at[k]:.3f}" if k in score.pass_at else "-" for k in passes.values()]
        grid.add_row(name, f"{score.mean:.3f}", error, *best, *at_k, str(score.judged))
    return Lines(
        f"{found.model}{of_step}: {found.prompts} prompts x {found.samples}, temperature {found.temperature:g}",
        grid,
        f"{found.mean_length:.1f} tokens a sample, {found.truncated:.1%} truncated, {found.env_failed:.1%} failed",
    )
