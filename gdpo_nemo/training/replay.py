"""Replay of a finished run: train it again from its journal, samples, configs, and the model or a checkpoint.

Neither engines nor environments are started. ``plan_rerun`` checks that all files exist before any process starts, and
``rerun`` trains. ``compare_metrics`` and ``compare_weights`` compare the result with the original run.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpo_nemo.algorithms.weighting_rules import weighs_criteria
from gdpo_nemo.config.algorithm_choice import spec_of
from gdpo_nemo.config.changes import load_saved_config
from gdpo_nemo.config.layout import updates_per_step
from gdpo_nemo.config.load import config_to_dict, load_config
from gdpo_nemo.config.model_checks import check_creatable_folder, model_source, resolve
from gdpo_nemo.config.objective_checks import check_learning, check_recorded_advantages
from gdpo_nemo.config.requirements import check_requirements
from gdpo_nemo.config.rollout_checks import resolved_window, saves_all_groups
from gdpo_nemo.config.schema import Config, LoggerConfig
from gdpo_nemo.config.validate import check_ranges
from gdpo_nemo.data.tokenizer import load_tokenizer
from gdpo_nemo.observe.installation import require_libraries
from gdpo_nemo.observe.journal import FILE, Audit, JournalEntry, audit, read_journal
from gdpo_nemo.observe.log import RunLog
from gdpo_nemo.observe.metrics import read_metrics
from gdpo_nemo.observe.ownership import owned
from gdpo_nemo.observe.run_files import status_if_whole
from gdpo_nemo.observe.sample_images import RecordedImages
from gdpo_nemo.observe.samples import FOLDER, missing_images, rollout_files
from gdpo_nemo.rollouts.batches import read_recorded, recorded_groups
from gdpo_nemo.rollouts.user_functions import check_own_functions, load_estimator, load_shaping_rules
from gdpo_nemo.training.algorithm import Algorithm, load_algorithm
from gdpo_nemo.training.checkpoints import (
    UPDATES_UNKNOWN,
    Checkpoints,
    RunState,
    check_whole,
    model_fingerprint,
    read_state,
)
from gdpo_nemo.training.gdpo import GDPO
from gdpo_nemo.training.inputs import model_folder, starting_adapter
from gdpo_nemo.training.resume import config_files, record_config
from gdpo_nemo.utils.errors import ConfigError, RunError, first_line
from gdpo_nemo.utils.state import from_json

if TYPE_CHECKING:
    import numpy as np

    from gdpo_nemo.training.trainer import Trainer


COMPARED = ("loss", "grad_norm")
"""Metrics that are bitwise equal if weights and samples are equal."""
OBJECTIVE = (
    "gdpo.estimator", "gdpo.preset", "gdpo.options", "gdpo.rewards", "gdpo.constraints", "gdpo.schedules",
    "gdpo.weighting", "gdpo.noise", "gdpo.component_gradient_period", "gdpo.shaping", "gdpo.batch_norm", "gdpo.epsilon",
    "gdpo.credit", "gdpo.turn_baseline", "gdpo.discount", "loss_fn",
)  # fmt: skip
"""Keys and sections that a replay may change, because they do not affect the samples."""


@dataclass
class Segment:
    """Consecutive steps with the same config."""

    first: int
    last: int
    config: Config
    total_updates: int
    recorded: Config | None = None
    """Config of the original run, if the replay has another objective."""


@dataclass
class Plan:
    """Everything that is needed to train a run again up to the requested step."""

    run_dir: Path
    out: Path
    entries: list[JournalEntry]
    segments: list[Segment]
    state: RunState
    """Driver state at the start of the replay."""
    checkpoint: Path | None
    """Checkpoint to load at the start. None: start from the model."""
    model: Path
    original: Path | None
    """Checkpoint or exported model with the original weights after the last step. None if neither exists."""
    gradients: np.ndarray | None = None
    """Products of the gradients of the first step with the recorded and the other objective: float64 [2, 2]. None
    before the replay, or without another objective."""

    @property
    def last(self) -> int:
        """Last step of the replay."""
        return self.segments[-1].last


def audit_run(run_dir: Path) -> Audit:
    """Audit the journal of a run (see ``audit``) and its samples, with the run's configs and newest checkpoint.

    Raises:
        ConfigError, RunError: if files are missing or damaged.
    """
    entries = _journal(run_dir)
    files = [(first, load_saved_config(path)) for first, path in config_files(run_dir)]
    configs = [config for _, config in files]
    window = max(resolved_window(config.rollout) for config in configs)
    ledger = None
    checkpoints = _checkpoints(run_dir)
    if checkpoints.steps():
        state = read_state(checkpoints.path(checkpoints.steps()[-1]))
        ledger = state.ledger or None
    staleness = max(config.rollout.max_staleness for config in configs)
    buffers = [config.rollout.replay_buffer for config in configs]
    reuse = max(buffer.reuse if buffer.groups else 0 for buffer in buffers)
    result = audit(run_dir, staleness, window, ledger, reuse, max(buffer.max_age for buffer in buffers))
    # An unfinished run trains the steps after its newest checkpoint again, so their samples may not be written.
    finished = status_if_whole(run_dir).get("outcome") == "complete"
    _audit_samples(
        run_dir, entries, files, entries[-1].step if finished else max(checkpoints.steps(), default=0), result
    )
    return result


def _audit_samples(
    run_dir: Path, entries: Sequence[JournalEntry], configs: Sequence[tuple[int, Config]], complete: int, result: Audit
) -> None:
    """Compare the sample files with the journal, and add to ``result`` what differs and what cannot be compared.

    Args:
        configs: (first step, config) in order.
        complete: last step of which samples must exist.
    """
    paths = dict(rollout_files(run_dir))
    recorded = {entry.step for entry in entries}
    result.found += [f"{paths[step]}: journal.jsonl has no step {step}" for step in paths.keys() - recorded]
    trained = compared = hashed = 0
    for entry in entries:
        config = [config for first, config in configs if first <= entry.step][-1]
        trained += len(entry.samples)
        if entry.step not in paths:
            if config.rollout.save_samples and entry.step <= complete:
                result.found.append(f"step {entry.step}: the sample file in {run_dir / FOLDER} is missing")
            continue
        saved = replace(entry, groups=entry.groups[: config.rollout.save_groups])
        try:
            records = read_recorded(paths[entry.step])
            recorded_groups(saved, records, str(paths[entry.step]), RecordedImages(run_dir))
        except RunError as error:
            result.found.append(str(error))
        compared += len(saved.samples)
        hashed += sum(len(sample) > 3 for _, _, members in saved.groups for sample in members)
    if compared < trained:
        result.unknown.append(f"{trained - compared} of {trained} samples: they were not saved")
    if hashed < compared:
        result.unknown.append(f"tokens and rewards of {compared - hashed} samples: their hashes were not recorded")
    result.compared = compared


def plan_rerun(
    run_dir: Path,
    to: int | None,
    out: Path | None,
    start: int = 0,
    check: bool = False,
    instead: Sequence[str] = (),
) -> Plan:
    """Find all files that are needed to train the steps up to ``to`` again.

    Training starts from the newest checkpoint with at most ``start`` steps, or from the model if there is none.

    Args:
        to: last step to train; None: last step of the run.
        out: folder for the result; None: ``replay_TO`` in the run folder.
        check: True if the original weights after the last step must exist.
        instead: changes ``section.key=value`` of every step's config, of keys in ``OBJECTIVE``.

    Raises:
        ConfigError: if a file is missing, or a change is not allowed. The message contains the file or the key.
        RunError: if a file is damaged.
    """
    entries = _journal(run_dir)
    last = entries[-1].step if to is None else to
    if not 1 <= last <= entries[-1].step:
        raise ConfigError(f"--to: must be from 1 to {entries[-1].step}, the last step of {run_dir / FILE}; got {last}")
    (checkpoint, state) = _start(run_dir, min(start, last - 1))
    steps_to_train = range(state.step + 1, last + 1)
    entries = [entry for entry in entries if entry.step in steps_to_train]
    _require(run_dir, FILE, steps_to_train, {entry.step for entry in entries})
    files = dict(rollout_files(run_dir))
    _require(run_dir, "rollouts/ (rollout.save_samples)", steps_to_train, set(files))
    _require_images(run_dir, [files[step] for step in steps_to_train])
    segments = _segments(run_dir, entries)
    if instead:
        segments = [
            replace(segment, config=changed_objective(segment.config, instead), recorded=segment.config)
            for segment in segments
        ]
    for segment in segments:
        _check_segment(run_dir, segment)
    if state.updates == UPDATES_UNKNOWN:  # an older checkpoint
        state.updates = state.step * updates_per_step(segments[0].config, spec_of(segments[0].config))
    out = run_dir / f"replay_{last}" if out is None else out
    check_creatable_folder("--out", out)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out: {out} exists and is not empty; remove it or set another folder")
    original = _original(run_dir, last)
    if check and original is None:
        steps = ", ".join(map(str, _checkpoints(run_dir).steps())) or "none"
        raise ConfigError(f"--check: {run_dir} has no checkpoint of step {last}; there are: {steps}")
    model = _model(run_dir, segments[0].config)
    return Plan(run_dir, out, entries, segments, state, checkpoint, model, original)


def _check_segment(run_dir: Path, segment: Segment) -> None:
    """Check that the steps of a segment can be trained again from the recorded samples.

    Raises:
        ConfigError: if they cannot.
    """
    check_own_functions(segment.config)
    kind = load_algorithm(segment.config, spec_of(segment.config))
    if not kind.samples:
        raise ConfigError(
            f"{run_dir}: algorithm.type {segment.config.algorithm.type} does not sample, so it "
            "cannot be replayed; train again"
        )
    if not saves_all_groups(segment.config):
        raise ConfigError(
            f"{run_dir}: of the {segment.config.gdpo.num_prompts_per_step} groups of steps {segment.first} to "
            f"{segment.last} the samples of {segment.config.rollout.save_groups} were written (rollout.save_groups)"
        )
    if segment.recorded is not None:
        _check_comparable(segment, kind)


def _check_comparable(segment: Segment, kind: type[Algorithm[Any, Any]]) -> None:
    """Check that the advantages of both objectives follow from the recorded samples, so that they can be compared.

    Raises:
        ConfigError: if they do not.
    """
    try:
        check_recorded_advantages(segment.config)
        load_estimator(segment.config.gdpo), load_shaping_rules(segment.config.gdpo)
    except ConfigError as error:
        raise ConfigError(f"--instead: cannot compare advantages; {error}") from None
    for config in filter(None, (segment.config, segment.recorded)):
        if weighs_criteria(config.gdpo.rewards, config.gdpo.weighting):
            raise ConfigError(
                f"--instead: cannot compare advantages, because gdpo.weighting {config.gdpo.weighting['rule']} has "
                "factors for the criteria of each row; train again"
            )
    # The methods of a custom class have a wrapper.
    prepare, credit = (inspect.unwrap(getattr(kind, name, Algorithm.prepare)) for name in ("prepare", "_credit"))
    if (prepare, credit) != (GDPO.prepare, GDPO._credit):
        raise ConfigError(
            f"--instead: cannot compare advantages, because algorithm.type {segment.config.algorithm.type} computes "
            "its own; train again"
        )


def changed_objective(config: Config, instead: Sequence[str]) -> Config:
    """Return the config with another objective.

    Raises:
        ConfigError: if a change is invalid, or of a key outside of ``OBJECTIVE``.
    """
    for change in instead:
        key = change.partition("=")[0]
        if not any(key == known or key.startswith(known + ".") for known in OBJECTIVE):
            raise ConfigError(
                f"--instead: {key} does not belong to the objective; expected one of {', '.join(OBJECTIVE)}"
            )
    changed = load_config(config_to_dict(config), instead)
    check_ranges(changed)
    check_requirements(changed)
    check_learning(changed, spec_of(changed))
    return changed


def _journal(run_dir: Path) -> list[JournalEntry]:
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such run folder")
    entries = read_journal(run_dir)
    if not entries:
        raise ConfigError(f"{run_dir}: {FILE} not found or empty, so the samples of its steps are unknown")
    return entries


def _checkpoints(run_dir: Path) -> Checkpoints:
    return Checkpoints(run_dir / "checkpoints", 1, 0, None)


def _start(run_dir: Path, most: int) -> tuple[Path | None, RunState]:
    """Return the newest checkpoint with at most ``most`` steps and its state. If there is none, return None and an
    empty state."""
    checkpoints = _checkpoints(run_dir)
    steps = [step for step in checkpoints.steps() if step <= most]
    if not steps:
        return None, RunState()
    folder = checkpoints.path(steps[-1])
    check_whole(folder)
    return folder, read_state(folder)


def _require(run_dir: Path, what: str, required: range, found: set[int]) -> None:
    missing = [step for step in required if step not in found]
    if missing:
        more = f" and {len(missing) - 1} more steps" if len(missing) > 1 else ""
        raise ConfigError(f"{run_dir}: {what} lacks step {missing[0]}{more}; later steps cannot be replayed without it")


def _require_images(run_dir: Path, paths: Sequence[Path]) -> None:
    """Check that the run folder contains the images of the samples.

    Raises:
        ConfigError: if an image is missing.
        RunError: if a sample file cannot be read.
    """
    try:
        missing = missing_images(run_dir, paths)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{run_dir / FOLDER}: a sample file cannot be read ({first_line(error)})") from None
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(f"{run_dir}: images/ lacks image {missing[0]}{more}, which the samples to replay contain")


def _segments(run_dir: Path, entries: Sequence[JournalEntry]) -> list[Segment]:
    files = config_files(run_dir)
    for _, path in files:
        if not path.is_file():
            raise ConfigError(f"{path}: not found; it is required, because it contains the run's config")

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
    """Return the folder of the model that the run started from.

    Raises:
        ConfigError: if the model has changed since then.
    """
    folder = model_folder(config, model_source(config.policy)).absolute()
    checkpoints = _checkpoints(run_dir)
    steps = checkpoints.steps()
    known = read_state(checkpoints.path(steps[-1])).model if steps else ""
    if known and known != model_fingerprint(folder):
        raise ConfigError(f"policy.model_name: {folder} is not the model that {run_dir} started from")
    return folder


def rerun(plan: Plan) -> None:
    """Train the steps of the plan, and export the weights to ``model/`` in the output folder.

    If the original weights are in a checkpoint, they are exported to ``original/model/``.

    Raises:
        RunError: if training fails.
    """
    from gdpo_nemo.cluster.session import keep_logs, session
    from gdpo_nemo.training.setup import point_to_logs

    config = _quiet(plan.segments[0].config, plan.out)
    require_libraries(config.cluster)
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
            if segment.recorded is not None and segment is plan.segments[0]:
                plan.gradients = _compare_gradients(trainer, plan)
            while trainer.state.step < segment.last:
                trainer.step()
            if segment is plan.segments[-1]:
                _export(plan, trainer.policy)
            else:  # the original run was stopped here and resumed with another config
                trainer.save()
                checkpoint = trainer.checkpoints.path(trainer.state.step)


def _compare_gradients(trainer: Trainer, plan: Plan) -> np.ndarray:
    """Return the products of the gradients of the first step's first update at the current weights: float64 [2, 2].

    The first gradient has the recorded objective, and the second that of the replay.
    """
    first = plan.segments[0]
    assert first.recorded is not None
    made = trainer.algorithm
    for number, config in enumerate((first.recorded, first.config)):
        gdpo = replace(config.gdpo, component_gradient_period=0)
        config = _quiet(replace(config, gdpo=gdpo), plan.out)
        # A step moves the weights of constraints, so the trainer's algorithm must not prepare the step here.
        algorithm = type(made)(config, made.policy, made.tokenizer, made.log)
        algorithm.load_state(from_json(plan.state.algorithm))
        update = next(iter(algorithm.updates(algorithm.prepare(trainer.stream.get_batch(trainer.state.step)))))
        trainer.policy.component_gradients(update, [algorithm.loss], first=number == 0)
    # The arrays of a rank's result are in Ray's memory, which is unmapped when the session ends.
    return trainer.policy.gradient_products().products.copy()


def _export(plan: Plan, policy: Any) -> None:
    policy.export(plan.out / "model")
    if plan.original is not None and plan.original.name != "model":
        policy.load_checkpoint(plan.original, weights_only=True)
        policy.export(plan.out / "original" / "model")


@contextlib.contextmanager
def _trainer(plan: Plan, segment: Segment, state: RunState, checkpoint: Path | None, log: RunLog) -> Iterator[Trainer]:
    """Yield the trainer of a segment, with the policy loaded. The policy's ranks are ended when the block ends."""
    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.cluster.reservation import reserve
    from gdpo_nemo.rollouts.batches import RecordedStream
    from gdpo_nemo.training.components import RunComponents, Stop
    from gdpo_nemo.training.trainer import Trainer

    config = _quiet(segment.config, plan.out)
    record_config(config, plan.out, state.step)
    resolved = resolve(config)
    placed = resolved.with_ranks()
    parts = RunComponents(resolved, plan.out, log, Stop(), _checkpoints(plan.out), state)
    kind = load_algorithm(segment.config, resolved.algorithm)
    placement = reserve(config.cluster, placed.layout, [plan.run_dir.absolute(), plan.out.absolute(), plan.model])
    reference = any(kind.needs_reference(each) for each in (config, segment.recorded) if each is not None)
    policy = PolicyGroup(placed.config, str(plan.model), segment.total_updates, placement, reference)
    try:
        policy.ready()
        if checkpoint is not None:
            policy.load_checkpoint(checkpoint)
        elif adapter := starting_adapter(config.policy, resolved.model.source):
            policy.load_adapter(adapter)
        parts.policy = policy
        parts.algorithm = kind(config, policy, load_tokenizer(config.policy, plan.model, config.run.date), log)
        parts.algorithm.load_state(from_json(state.algorithm))
        parts.stream = RecordedStream(plan.run_dir, plan.entries)
        yield Trainer(parts)
    finally:
        policy.close()


def _quiet(config: Config, out: Path) -> Config:
    """Return the config without features that do not affect training: validation, saved samples, trackers and
    environment nodes."""
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
    """Return a sentence for each metric in ``COMPARED`` and each step at which the replay differs from the run."""
    before = _training_rows(plan.run_dir)
    now = _training_rows(plan.out)
    found = []
    for step in range(plan.segments[0].first, plan.last + 1):
        if step not in before:
            found.append(f"step {step}: metrics not found in {plan.run_dir}")
            continue
        for key in COMPARED:
            if before[step].get(key) != now[step].get(key):
                found.append(f"step {step}: {key} is {now[step].get(key)!r} and was {before[step].get(key)!r}")
    return found


def _training_rows(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of each training step of a run."""
    return {row["step"]: row for row in read_metrics(folder) if "lr" in row}


def compare_weights(plan: Plan) -> list[str]:
    """Return a sentence for each tensor that is not bitwise equal after the last step, largest difference first.

    The original weights are deleted if they were exported for this comparison only.
    """
    from gdpo_nemo.models.hf_folder import differences

    if plan.original is None:
        return []
    copy = plan.out / "original"
    found = differences(copy / "model" if copy.is_dir() else plan.original, plan.out / "model")
    shutil.rmtree(copy, ignore_errors=True)
    return found
