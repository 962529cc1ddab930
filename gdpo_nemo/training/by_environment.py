"""Training of environments with different algorithms in one step (``env.NAME.algorithm``).

The samples of a step are divided into parts: one for each environment with an algorithm, and one for all other
environments. The algorithm of a part prepares its samples as in a separate run, so no baseline, deviation or batch
norm contains samples of another part. The loss of an update is the mean of the parts' losses, weighted by their numbers
of trained samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gdpo_nemo.algorithms.loss_settings import LossByPart
from gdpo_nemo.algorithms.losses import part_metric
from gdpo_nemo.config.algorithm_choice import old_logprobs_source, spec_of
from gdpo_nemo.config.environment_algorithms import configs_of_parts, part_of, trained_configs
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.data.records import Group, UpdateResult
from gdpo_nemo.observe.sample_values import SampleValues
from gdpo_nemo.rollouts.metrics import check_failures, rollout_metrics, update_metrics
from gdpo_nemo.training.algorithm import Algorithm
from gdpo_nemo.training.gdpo import GDPO, ComponentAlerts, PreparedRollout
from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.utils.import_path import ImportPath

if TYPE_CHECKING:
    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.data.tokenizer import Tokenizer
    from gdpo_nemo.observe.log import RunLog
    from gdpo_nemo.rollouts.batches import Rollout

METRICS = {
    "advantage/NAME/std": ("", "Value of advantage/std for the samples of environment NAME, which has an algorithm"),
    "advantage/NAME/dead_groups": ("share", "Value of advantage/dead_groups for environment NAME with an algorithm"),
    "advantage/NAME/distinct": ("", "Value of advantage/distinct for environment NAME with an algorithm"),
    "advantage/NAME/distinct_if_summed": (
        "",
        "Value of advantage/distinct_if_summed for environment NAME with an algorithm",
    ),
    "policy/NAME/entropy": ("nats/token", "Value of policy/entropy for environment NAME with an algorithm"),
    "policy/NAME/clip_fraction": ("share", "Value of policy/clip_fraction for environment NAME with an algorithm"),
    "policy/NAME/ratio_mean": ("", "Value of policy/ratio_mean for environment NAME with an algorithm"),
    "policy/NAME/reference_kl": ("nats/token", "Value of policy/reference_kl for environment NAME with an algorithm"),
}
_OF_PARTS = (
    "advantage/NAME/std", "advantage/NAME/dead_groups", "advantage/NAME/distinct", "advantage/NAME/distinct_if_summed",
    "policy/NAME/entropy", "policy/NAME/clip_fraction", "policy/NAME/ratio_mean", "policy/NAME/reference_kl",
)  # fmt: skip
"""Metrics of a step that are also measured for each part."""


@dataclass
class PreparedParts:
    """A rollout whose parts are prepared. A part without samples in this step is absent."""

    rollout: Rollout
    parts: dict[str, PreparedRollout]
    rows: dict[str, np.ndarray]
    """Indices of each part's trajectories in the rollout: int64 [trajectories of the part]."""


class ByEnvironment(Algorithm["Rollout", PreparedParts]):
    """Trains each part of a step with its own algorithm, which is ``GDPO`` or a subclass."""

    loss: LossByPart

    def __init__(self, config: Config, policy: PolicyGroup, tokenizer: Tokenizer, log: RunLog):
        super().__init__(config, policy, tokenizer, log)
        self.algorithms: dict[str, GDPO] = {}
        for name, part_config in configs_of_parts(config).items():
            algorithm = ImportPath(spec_of(part_config).import_path).load()(part_config, policy, tokenizer, log)
            algorithm.component_alerts = ComponentAlerts(log, name)
            self.algorithms[name] = algorithm
        self.loss = LossByPart(tuple(algorithm.loss for algorithm in self.algorithms.values()))

    @classmethod
    def needs_reference(cls, config: Config) -> bool:
        """Return True if a part needs the log-probs of the initial model."""
        return any(ImportPath(spec_of(c).import_path).load().needs_reference(c) for c in trained_configs(config))

    def prepare(self, batch: Rollout) -> PreparedParts:
        """Prepare each part of the batch. A part of which no sample can be trained is left out.

        Raises:
            RunError: if too many verifications failed in the whole batch, or no sample of a part has a reward.
        """
        check_failures(batch.trajectories, self.config.rollout.max_env_failure_share)
        groups: dict[str, list[Group]] = {}
        rows: dict[str, list[int]] = {}
        count = 0
        for group in batch.groups:
            name = part_of(self.config, group.prompt.environment)
            groups.setdefault(name, []).append(group)
            rows.setdefault(name, []).extend(range(count, count + len(group.trajectories)))
            count += len(group.trajectories)
        parts = {}
        for name, algorithm in self.algorithms.items():
            part = replace(batch, groups=groups.get(name, []), measured={})
            if any(trajectory.trains for trajectory in part.trajectories):
                parts[name] = algorithm.prepare_part(part)
        if not parts:
            raise RunError("advantages: no sample of the step can be trained")
        return PreparedParts(batch, parts, {name: np.array(rows[name]) for name in parts})

    def updates(self, prepared: PreparedParts) -> Iterator[list[TrainSequence]]:
        """Yield the sequences of all parts, for each iteration of the step."""
        # ``zip`` resumes the updates of every part before the next one, so their code after a yield runs in time.
        updates = (self.algorithms[name].updates(part) for name, part in prepared.parts.items())
        for update in zip(*updates, strict=True):
            yield self._joined(dict(zip(prepared.parts, update)))

    def metrics(self, prepared: PreparedParts, results: Sequence[UpdateResult], version: int) -> dict[str, float]:
        """Return the metrics of the whole step, and those of each environment with an algorithm."""
        rollout = prepared.rollout
        parity = all(t.policy_version == version for t in rollout.trajectories) and all(
            old_logprobs_source(algorithm.config) == "trainer" for algorithm in self.algorithms.values()
        )
        row = {
            **update_metrics([_of_part(result, None) for result in results], parity),
            **rollout_metrics(rollout.trajectories, version),
            "rollout/dropped_groups": float(rollout.dropped_groups),
            **rollout.measured,
            "time/rollout": rollout.generation_s,
            "time/verify": rollout.verify_s,
            **self._measured(prepared),
            **self._reward_metrics(prepared),
        }
        for number, name in enumerate(self.algorithms):
            if name not in prepared.parts:
                continue
            of_part = update_metrics([_of_part(result, number) for result in results], on_policy=False)
            row |= _named(of_part, name)
        return row

    def record(self, row: Mapping[str, Any], prepared: PreparedParts) -> None:
        """Log the metrics and samples of a step, and report reward components that train nothing."""
        count = len(prepared.rollout.trajectories)
        values = {name: self.algorithms[name].sample_values(part) for name, part in prepared.parts.items()}
        self.log.step(row, prepared.rollout.groups, _merged(values, prepared.rows, count))
        for name, part in prepared.parts.items():
            if not self._has_teacher(name):
                self.algorithms[name].component_alerts.update(part.advantages.diagnostics)

    def validate(self, evaluated: Sequence[Any]) -> dict[str, float]:
        """Return the metrics of all held-out samples, and further metrics of the parts' algorithms."""
        row = super().validate(evaluated)
        for name, algorithm in self.algorithms.items():
            if type(algorithm).validate is not Algorithm.validate:
                groups = [group for group in evaluated if part_of(self.config, group.prompt.environment) == name]
                row |= {key: value for key, value in algorithm.validate(groups).items() if key not in row}
        return row

    def state(self) -> dict[str, Any]:
        """Return the state of each part's algorithm."""
        states = {name: algorithm.state() for name, algorithm in self.algorithms.items()}
        return {"parts": {name: state for name, state in states.items() if state}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that ``state`` returned. A part that it does not contain starts anew."""
        for name, saved in state.get("parts", {}).items():
            if name in self.algorithms:
                self.algorithms[name].load_state(saved)

    @property
    def _directions(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for algorithm in self.algorithms.values():
            found |= algorithm._directions
        return found

    def _joined(self, updates: Mapping[str, list[TrainSequence]]) -> list[TrainSequence]:
        """Return copies of the sequences of all parts, with the weights and trajectory numbers of the whole update."""
        numbers = list(self.algorithms)
        trained = {name: _count_trained(update) for name, update in updates.items()}
        total = max(sum(trained.values()), 1)
        joined: list[TrainSequence] = []
        first = 0
        for name, update in updates.items():
            number = np.int32(numbers.index(name))
            for s in update:
                part = np.broadcast_to(number, len(s.completion_ids))
                weight = s.weight * trained[name] / total
                joined.append(replace(s, weight=weight, trajectory=first + s.trajectory, part=part))
            first += 1 + max(s.trajectory for s in update)
        self._complete(joined)
        return joined

    def _complete(self, sequences: Sequence[TrainSequence]) -> None:
        """Set log-probs that only some parts need, because all sequences of an update must have the same fields."""
        missing = [s for s in sequences if s.old_logprobs is None]
        if 0 < len(missing) < len(sequences):
            for s, logprobs in zip(missing, self.policy.logprobs(missing), strict=True):
                s.old_logprobs = logprobs
        if any(s.reference_logprobs is not None for s in sequences):
            for s in sequences:
                if s.reference_logprobs is None:  # of a part without a KL penalty, which must not read it
                    s.reference_logprobs = np.full(len(s.completion_ids), np.nan, np.float32)

    def _measured(self, prepared: PreparedParts) -> dict[str, float]:
        """Return the parts' measurements. Times are added, and other values have the name of one of several parts."""
        row: dict[str, float] = {}
        for name, part in prepared.parts.items():
            for key, value in part.measured.items():
                if key.startswith("time/"):
                    row[key] = row.get(key, 0.0) + value
                else:
                    row[key if key not in row else f"{key}/{name}"] = value
        return row

    def _reward_metrics(self, prepared: PreparedParts) -> dict[str, float]:
        """Return the metrics of rewards and advantages.

        The metrics of a component in a single part are also those of the step. If several parts have a component, only
        its mean over all of their samples is.
        """
        row: dict[str, float] = {}
        named: dict[str, float] = {}
        values: dict[str, list[tuple[float, float]]] = {}
        total = dead = 0.0
        groups = samples = 0
        for name, part in prepared.parts.items():
            diagnostics = part.advantages.diagnostics
            found = diagnostics.metrics()
            if self._has_teacher(name):  # its advantages do not come from the rewards
                found = {key: value for key, value in found.items() if not key.startswith("advantage/")}
            else:
                groups += len(part.rollout.groups)
                dead += len(part.rollout.groups) * diagnostics.all_dead
            named |= _named(found, name)
            valid = sum(t.trains for t in part.rollout.trajectories)
            for component, mean, missing in zip(diagnostics.names, diagnostics.mean, diagnostics.missing):
                values.setdefault(component, []).append((mean, valid * (1.0 - missing)))
            samples += valid
            total += valid * float(np.nansum(diagnostics.weight * diagnostics.mean))
            row |= {key: value for key, value in found.items() if key.startswith("reward/")}
        for component, means in values.items():
            if len(means) > 1:
                for key in [key for key in row if key.rpartition("/")[0] == f"reward/{component}"]:
                    del row[key]
                counts = sum(count for _, count in means)
                if counts:
                    row[f"reward/{component}/mean"] = sum(mean * count for mean, count in means if count) / counts
        if groups:
            row["advantage/dead_groups"] = dead / groups
        row["reward/total/mean"] = total / max(samples, 1)
        return row | named

    def _has_teacher(self, name: str) -> bool:
        return spec_of(self.algorithms[name].config).section == "teacher"


def _count_trained(sequences: Sequence[TrainSequence]) -> int:
    """Return the number of trajectories with a weight."""
    return len({s.trajectory for s in sequences if s.weight})


def _named(metrics: Mapping[str, float], name: str) -> dict[str, float]:
    """Return the metrics of a part, with its name in their keys: all rewards, and those in ``_OF_PARTS``."""
    row = {}
    for pattern in _OF_PARTS:
        key = pattern.replace("/NAME", "")
        if key in metrics:
            row[pattern.replace("NAME", name)] = metrics[key]
    for key, value in metrics.items():
        if key.startswith("reward/"):
            row[f"reward/{name}/{key.removeprefix('reward/')}"] = value
    return row


def _of_part(result: UpdateResult, number: int | None) -> UpdateResult:
    """Return a result with the metrics of one part of ``LossByPart``, or of all tokens."""
    prefix = "" if number is None else part_metric(number, "")

    def chosen(metrics: Mapping[str, float]) -> dict[str, float]:
        found = {}
        for name, value in metrics.items():
            if name.startswith(prefix) and ":" not in name.removeprefix(prefix):
                found[name.removeprefix(prefix)] = value
        return found

    return replace(result, sums=chosen(result.sums), maxima=chosen(result.maxima))


def _merged(values: Mapping[str, SampleValues], rows: Mapping[str, np.ndarray], count: int) -> SampleValues:
    """Combine the values of all parts in the order of the step's trajectories. Terms of other parts are 0."""
    advantages = np.zeros(count)
    terms: dict[str, np.ndarray] = {}
    lists: dict[str, list[Any]] = {}
    for name, part in values.items():
        if part.advantages is not None:
            advantages[rows[name]] = part.advantages
        for component, column in (part.terms or {}).items():
            terms.setdefault(component, np.zeros(count))[rows[name]] = column
        for key in ("trainer_logprobs", "criterion_terms", "turn_advantages", "entropies"):
            column = getattr(part, key)
            if column is not None:
                merged = lists.setdefault(key, [{} if key == "criterion_terms" else None] * count)
                for index, entry in zip(rows[name].tolist(), column, strict=True):
                    merged[index] = entry
    return SampleValues(advantages, terms=terms or None, **lists)
