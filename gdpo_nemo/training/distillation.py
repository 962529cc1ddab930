"""On-policy distillation: the policy samples, and a frozen teacher computes the log-prob of every sampled token.

The loss is the reverse KL to the teacher at the sampled tokens (GKD with lambda 1, arXiv 2306.13649). Per token, the
gradient of E_policy[log policy - log teacher] is a policy gradient with the advantage log teacher - log policy
(https://thinkingmachines.ai/blog/on-policy-distillation). Training loop, engines, losses and layouts are the same as
for GDPO. Rewards of the environments are measured, but not used for training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.contexts import by_trajectory, to_score
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.data.records import Group, Trajectory, UpdateResult
from gdpo_nemo.observe.sample_values import SampleValues
from gdpo_nemo.training.gdpo import GDPO, PreparedRollout
from gdpo_nemo.training.inputs import teacher_folder

if TYPE_CHECKING:
    from gdpo_nemo.algorithms import Advantages
    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.data.tokenizer import Tokenizer
    from gdpo_nemo.observe.log import RunLog
    from gdpo_nemo.rollouts.batches import Rollout
    from gdpo_nemo.rollouts.credit import TurnAdvantages

METRICS = {
    "teacher/kl": (
        "nats",
        "Estimated reverse KL to the teacher (minimized): mean log-prob of sampled tokens minus the teacher's",
    ),
    "validation/teacher_kl": ("nats", "Value of teacher/kl on the samples of a validation at temperature 1"),
}


class OnPolicyDistillation(GDPO):
    """Policy gradient towards the teacher's distribution (``algorithm.type: distillation``)."""

    def __init__(self, config: Config, policy: PolicyGroup, tokenizer: Tokenizer, log: RunLog):
        super().__init__(config, policy, tokenizer, log)
        policy.load_teacher(teacher_folder(config.teacher))

    def _credit(
        self, batch: Rollout
    ) -> tuple[Advantages | TurnAdvantages, Sequence[float | np.ndarray], dict[str, float]]:
        found, _, measured = super()._credit(batch)
        gaps = self._gaps(batch.trajectories)
        trained = [gap[_policy_tokens(t)] for t, gap in zip(batch.trajectories, gaps) if t.trains]
        if trained:
            measured["teacher/kl"] = -float(np.concatenate(trained).mean(dtype=np.float64))
        return found, gaps, measured

    def metrics(self, prepared: PreparedRollout, results: Sequence[UpdateResult], version: int) -> dict[str, float]:
        """Return GDPO's metrics without the metrics of advantages, because training does not use rewards."""
        row = super().metrics(prepared, results, version)
        return {name: value for name, value in row.items() if not name.startswith("advantage/")}

    def record(self, row: Mapping[str, Any], prepared: PreparedRollout) -> None:
        """Log the metrics and samples of a step."""
        self.log.step(row, prepared.rollout.groups, self.sample_values(prepared))

    def sample_values(self, prepared: PreparedRollout) -> SampleValues:
        """Return the values to save with the samples. The advantage of a sample is the mean over its tokens."""
        return SampleValues(self._mean_advantages(prepared), prepared.trainer_logprobs)

    def validate(self, evaluated: Sequence[Group]) -> dict[str, float]:
        """Return the rewards on the held-out prompts, and the KL to the teacher if the samples are from the policy's
        distribution.
        """
        row = super().validate(evaluated)
        answers = [t for group in evaluated for t in group.trajectories if t.trains]
        gdpo = self.config.gdpo
        if answers and (gdpo.val_temperature, gdpo.val_top_p, gdpo.val_top_k) == (1, 1, -1):
            gaps = [gap[_policy_tokens(t)] for t, gap in zip(answers, self._gaps(answers))]
            row["validation/teacher_kl"] = -float(np.concatenate(gaps).mean(dtype=np.float64))
        return row

    def _gaps(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """Return log teacher - log sampler for each trajectory: float32 [completion tokens].

        The value is 0 for tokens that the policy did not generate.
        """
        sequences = to_score(trajectories)
        found = self.policy.logprobs(sequences, teacher=True)
        sampled = self._sampled_logprobs(sequences)
        gaps = by_trajectory(
            sequences, [values - before for values, before in zip(found, sampled, strict=True)], trajectories
        )
        return [
            np.where(_policy_tokens(t), gaps[number], 0.0).astype(np.float32) for number, t in enumerate(trajectories)
        ]

    def _sampled_logprobs(self, sequences: list[TrainSequence]) -> list[np.ndarray]:
        """Return the sampler's log-probs, or the trainer's if the sampler did not return a log-prob.

        float32 [completion tokens] per sequence. The trainer scores only sequences with a missing log-prob.
        """
        found = [s.sampler_logprobs for s in sequences]
        incomplete = [index for index, s in enumerate(sequences) if np.isnan(s.where_written(found[index])).any()]
        if incomplete:
            scored = self.policy.logprobs([sequences[index] for index in incomplete])
            for index, now in zip(incomplete, scored, strict=True):
                found[index] = np.where(np.isnan(found[index]), now, found[index])
        return found


def _policy_tokens(trajectory: Trajectory) -> np.ndarray:
    """Return a bool array [completion tokens], True for tokens that the policy generated."""
    mask = trajectory.loss_mask
    return np.ones(len(trajectory.completion_ids), bool) if mask is None else mask
