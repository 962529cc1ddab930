"""Training a run again from its record: journal, samples, configs, and the model or a checkpoint. No engine and no
environment is started.

``plan_rerun`` finds out whether the record is whole, before any process is there; ``rerun`` trains; ``compare_metrics``
and ``compare_weights`` hold the result against the run.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, Sequence

from gdpo_nemo.algorithm import load_algorithm
from gdpo_nemo.checkpoints import UPDATES_UNKNOWN, Checkpoints, RunState, check_whole, model_fingerprint, read_state
from gdpo_nemo.config.files import check_folder_can_be
from gdpo_nemo.config.layout import updates_per_step
from gdpo_nemo.config.reuse_checks import saves_all_groups
from gdpo_nemo.config.rollout_bounds import resolved_window
from gdpo_nemo.config.saved_config import load_saved_config
from gdpo_nemo.config.schema import Config, LoggerConfig
from gdpo_nemo.data.tokenizer import load_tokenizer
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.inputs import model_folder, starting_adapter
from gdpo_nemo.observe.audit import audit
from gdpo_nemo.observe.installation import require_libraries
from gdpo_nemo.observe.journal import FILE, JournalEntry, read_journal
from gdpo_nemo.observe.log import RunLog
from gdpo_nemo.observe.metrics import read_metrics
from gdpo_nemo.observe.ownership import owned
from gdpo_nemo.observe.rollouts import rollout_files
from gdpo_nemo.resume import config_files, record_config
from gdpo_nemo.rollouts.own_objective import check_own_functions

if TYPE_CHECKING:
    from gdpo_nemo.trainer import Trainer

COMPARED = ("loss", "grad_norm")
"""Metrics that the same weights and samples give again, bit for bit."""


@dataclass
class Segment:
    """Steps under one config."""

    first: int
    last: int
    config: Config
    total_updates: int


@dataclass
class Plan:
    """A record that is whole, from the start to the last step asked for."""

    run_dir: Path
    out: Path
    entries: list[JournalEntry]
    segments: list[Segment]
    state: RunState
    """Where training starts."""
    checkpoint: Path | None
    """What is loaded there; None: the model."""
    model: Path
    original: Path | None
    """The run's checkpoint of the last step, or its exported model; None: neither is there."""

    @property
    def last(self) -> int:
        """The last step."""
        return self.segments[-1].last


def audit_run(run_dir: Path) -> list[str]:
    """``audit`` of a run by its own configs and newest checkpoint. Raises ConfigError, RunError."""
    _journal(run_dir)
    configs = [load_saved_config(path) for _, path in config_files(run_dir)]
    window = max(resolved_window(config) for config in configs)
    ledger = None
    checkpoints = _checkpoints(run_dir)
    if checkpoints.steps():
        state = read_state(checkpoints.path(checkpoints.steps()[-1]))
        ledger = state.ledger or None
    staleness = max(config.rollout.max_staleness for config in configs)
    buffers = [config.rollout.replay_buffer for config in configs]
    reuse = max(buffer.reuse if buffer.groups else 0 for buffer in buffers)
    return audit(run_dir, staleness, window, ledger, reuse, max(buffer.max_age for buffer in buffers))


def plan_rerun(run_dir: Path, to: int | None, out: Path | None, start: int = 0, check: bool = False) -> Plan:
    """Find everything that training steps up to ``to`` (None: the last) again takes, from the newest checkpoint of at
    most ``start`` steps on, or from the model.

    Args:
        out: folder of the result; None: ``replay_TO`` in the run's.
        check: whether the run's own weights after that step have to be there.

    Raises:
        ConfigError: a sentence on what is missing. RunError: a file is damaged.
    """
    entries = _journal(run_dir)
    last = entries[-1].step if to is None else to
    if not 1 <= last <= entries[-1].step:
        raise ConfigError(f"--to: must be from 1 to {entries[-1].step}, the last step of {run_dir / FILE}; got {last}")
    (checkpoint, state) = _start(run_dir, min(start, last - 1))
    wanted = range(state.step + 1, last + 1)
    entries = [entry for entry in entries if entry.step in wanted]
    _require(run_dir, FILE, wanted, {entry.step for entry in entries})
    _require(run_dir, "rollouts/ (rollout.save_samples)", wanted, {step for step, _ in rollout_files(run_dir)})
    segments = _segments(run_dir, entries)
    for segment in segments:
        check_own_functions(segment.config)
        if not load_algorithm(segment.config).samples:
            raise ConfigError(f"{run_dir}: algorithm.type {segment.config.algorithm.type} samples nothing; train again")
        if not saves_all_groups(segment.config):
            raise ConfigError(
                f"{run_dir}: of the {segment.config.gdpo.num_prompts_per_step} groups of steps {segment.first} to "
                f"{segment.last} the samples of {segment.config.rollout.save_groups} were written (rollout.save_groups)"
            )
    if state.updates == UPDATES_UNKNOWN:  # written before checkpoints knew it
        state.updates = state.step * updates_per_step(segments[0].config)
    out = run_dir / f"replay_{last}" if out is None else out
    check_folder_can_be("--out", out)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out: {out} exists and is not empty")
    original = _original(run_dir, last)
    if check and original is None:
        steps = ", ".join(map(str, _checkpoints(run_dir).steps())) or "none"
        raise ConfigError(f"--check: {run_dir} has no checkpoint of step {last}; there are: {steps}")
    model = _model(run_dir, segments[0].config)
    return Plan(run_dir, out, entries, segments, state, checkpoint, model, original)


def _journal(run_dir: Path) -> list[JournalEntry]:
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such run folder")
    entries = read_journal(run_dir)
    if not entries:
        raise ConfigError(f"{run_dir}: holds no {FILE}, or an empty one: nothing says what its steps trained")
    return entries


def _checkpoints(run_dir: Path) -> Checkpoints:
    return Checkpoints(run_dir / "checkpoints", 1, 0, None)


def _start(run_dir: Path, most: int) -> tuple[Path | None, RunState]:
    """The newest checkpoint of at most ``most`` steps, and its state; without one the model's."""
    checkpoints = _checkpoints(run_dir)
    steps = [step for step in checkpoints.steps() if step <= most]
    if not steps:
        return None, RunState()
    folder = checkpoints.path(steps[-1])
    check_whole(folder)
    return folder, read_state(folder)


def _require(run_dir: Path, what: str, wanted: range, found: set[int]) -> None:
    missing = [step for step in wanted if step not in found]
    if missing:
        more = f" and {len(missing) - 1} further steps" if len(missing) > 1 else ""
        raise ConfigError(f"{run_dir}: {what} lacks step {missing[0]}{more}; without it nothing later can be replayed")


def _segments(run_dir: Path, entries: Sequence[JournalEntry]) -> list[Segment]:
    files = config_files(run_dir)
    for _, path in files:
        if not path.is_file():
            raise ConfigError(f"{path}: is missing; without it nothing says how the run was trained")

    def under(entry: JournalEntry) -> tuple[Path, int]:
        fitting = [path for first, path in files if first <= entry.step]
        if not fitting:
            raise ConfigError(f"{run_dir}: config_history/ has no config of step {entry.step}")
        return fitting[-1], entry.total_updates

    segments = []
    for (path, total), group in itertools.groupby(entries, under):
        steps = [entry.step for entry in group]
        segments.append(Segment(steps[0], steps[-1], load_saved_config(path), total))
    return segments


def _original(run_dir: Path, step: int) -> Path | None:
    checkpoints = _checkpoints(run_dir)
    if step in checkpoints.steps():
        check_whole(checkpoints.path(step))
        return checkpoints.path(step)
    exported = run_dir / "model"
    last = max((row["step"] for row in read_metrics(run_dir)), default=0)
    return exported if step == last and any(exported.glob("*.safetensors")) else None


def _model(run_dir: Path, config: Config) -> Path:
    """The model that the run started from. Raises ConfigError: it is another one by now."""
    folder = model_folder(config).absolute()
    checkpoints = _checkpoints(run_dir)
    steps = checkpoints.steps()
    known = read_state(checkpoints.path(steps[-1])).model if steps else ""
    if known and known != model_fingerprint(folder):
        raise ConfigError(f"policy.model_name: {folder} is not the model that {run_dir} started from")
    return folder


def rerun(plan: Plan) -> None:
    """Train the steps of the plan, and export the weights as ``model/`` of its folder, and those of the run's
    checkpoint in ``original/`` there. Raises RunError."""
    from gdpo_nemo.cluster.session import keep_logs, session
    from gdpo_nemo.setup import point_to_logs

    config = _quiet(plan.segments[0].config, plan.out)
    require_libraries(config)
    outcome = "failed"
    with owned(plan.out) as owner:
        log = RunLog(config, plan.out, plan.state.step, plan.last, owner.check)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(session(config.cluster))
                stack.push(lambda kind, error, trace: point_to_logs(error, keep_logs, plan.out))
                _train(plan, log)
                log.card(plan.out / "model", plan.last)
            outcome = "complete"
        finally:
            log.close(outcome)


def _train(plan: Plan, log: RunLog) -> None:
    checkpoint = plan.checkpoint
    state = plan.state
    for segment in plan.segments:
        with _trainer(plan, segment, state, checkpoint, log) as trainer:
            while trainer.state.step < segment.last:
                trainer.step()
            if segment is plan.segments[-1]:
                _export(plan, trainer.policy)
            else:  # as the run did, which was stopped and resumed under another config here
                trainer.save()
                checkpoint = trainer.checkpoints.path(trainer.state.step)


def _export(plan: Plan, policy: Any) -> None:
    policy.export(plan.out / "model")
    if plan.original is not None and plan.original.name != "model":
        policy.load_checkpoint(plan.original, weights_only=True)
        policy.export(plan.out / "original" / "model")


@contextlib.contextmanager
def _trainer(plan: Plan, segment: Segment, state: RunState, checkpoint: Path | None, log: RunLog) -> Iterator[Trainer]:
    """The loop of a segment, its policy loaded; the ranks are gone afterwards."""
    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.cluster.reservation import reserve
    from gdpo_nemo.rollouts.recorded_stream import RecordedStream
    from gdpo_nemo.setup import RunComponents, Stop, with_ranks
    from gdpo_nemo.trainer import Trainer

    config = _quiet(segment.config, plan.out)
    record_config(config, plan.out, state.step)
    placed = with_ranks(config)
    parts = RunComponents(config, plan.out, log, Stop(), _checkpoints(plan.out), state)
    kind = load_algorithm(segment.config)
    placement = reserve(placed, [plan.run_dir.absolute(), plan.out.absolute(), plan.model])
    policy = PolicyGroup(placed, str(plan.model), segment.total_updates, placement, kind.needs_reference(config))
    try:
        policy.ready()
        if checkpoint is not None:
            policy.load_checkpoint(checkpoint)
        elif adapter := starting_adapter(segment.config):
            policy.load_adapter(adapter)
        parts.policy = policy
        parts.algorithm = kind(config, policy, load_tokenizer(config, plan.model), log)
        parts.algorithm.load_state(state.algorithm)
        parts.stream = RecordedStream(plan.run_dir, plan.entries)
        yield Trainer(config, parts, state)
    finally:
        policy.close()


def _quiet(config: Config, out: Path) -> Config:
    """The config without what is not trained: validation, samples, trackers, nodes for environments."""
    return replace(
        config,
        run=replace(config.run, dir=str(out)),
        gdpo=replace(config.gdpo, val_period=0, val_at_start=False),
        rollout=replace(config.rollout, save_samples=False, save_trainer_logprobs=False, save_entropies=False),
        cluster=replace(config.cluster, env_nodes=0),
        checkpointing=replace(config.checkpointing, enabled=True, async_save=False),
        logger=LoggerConfig(console=config.logger.console, plot=config.logger.plot),
    )


def compare_metrics(plan: Plan) -> list[str]:
    """A sentence for each of ``COMPARED`` of each step that is another number than the run's."""
    before, now = (
        {row["step"]: row for row in read_metrics(folder) if "lr" in row} for folder in (plan.run_dir, plan.out)
    )
    found = []
    for step in range(plan.segments[0].first, plan.last + 1):
        if step not in before:
            found.append(f"step {step}: {plan.run_dir} has no metrics of it")
            continue
        for key in COMPARED:
            if before[step].get(key) != now[step].get(key):
                found.append(f"step {step}: {key} is {now[step].get(key)!r} and was {before[step].get(key)!r}")
    return found


def compare_weights(plan: Plan) -> list[str]:
    """A sentence for each tensor that is not, bit for bit, the run's after the last step; the largest difference first.
    The run's copy is removed where it was made for this."""
    from gdpo_nemo.weights.model_folder import differences

    if plan.original is None:
        return []
    copy = plan.out / "original"
    found = differences(copy / "model" if copy.is_dir() else plan.original, plan.out / "model")
    shutil.rmtree(copy, ignore_errors=True)
    return found
