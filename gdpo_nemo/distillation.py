"""On-policy distillation: the policy samples, and a frozen teacher says of every token what it would have given it.

What is lowered is the reverse KL of arXiv 2306.13649 (GKD with its lambda at 1) at the sampled tokens: the gradient of
E_policy[log policy - log teacher], token by token, is that of a policy gradient whose advantage is log teacher - log
policy (https://thinkingmachines.ai/blog/on-policy-distillation). Loop, engines, losses and layouts are GDPO's; the
environments' rewards are measured and train nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping, Sequence

import numpy as np

from gdpo_nemo.algorithm import GDPO, PreparedRollout
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.data.records import Group, Trajectory
from gdpo_nemo.data.results import UpdateResult
from gdpo_nemo.formats.converted import teacher_folder

if TYPE_CHECKING:
    from gdpo_nemo.algorithms import Advantages
    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.observe.log import RunLog
    from gdpo_nemo.rollouts.rollout_batch import Rollout
    from gdpo_nemo.rollouts.turn_credit import TurnAdvantages

METRICS = {
    "teacher/kl": (
        "nats",
        "Log-prob of a sampled token less the teacher's, mean over tokens: the reverse KL that is lowered, estimated",
    ),
    "validation/teacher_kl": ("nats", "teacher/kl on the samples of a validation at temperature 1"),
}


class OnPolicyDistillation(GDPO):
    """Policy gradients towards a teacher (``algorithm.type: distillation``)."""

    def __init__(self, config: Config, policy: PolicyGroup, tokenizer: Any, log: RunLog):
        super().__init__(config, policy, tokenizer, log)
        policy.load_teacher(teacher_folder(config))

    def _credit(
        self, batch: Rollout
    ) -> tuple[Advantages | TurnAdvantages, Sequence[float | np.ndarray], dict[str, float]]:
        found, _, measured = super()._credit(batch)
        gaps = self._gaps(batch.trajectories)
        trained = [gap[_written(t)] for t, gap in zip(batch.trajectories, gaps) if t.trains]
        if trained:
            measured["teacher/kl"] = -float(np.concatenate(trained).mean(dtype=np.float64))
        return found, gaps, measured

    def metrics(self, prepared: PreparedRollout, results: Sequence[UpdateResult], version: int) -> dict[str, float]:
        """As GDPO's, without what it says of advantages that were not trained."""
        row = super().metrics(prepared, results, version)
        return {name: value for name, value in row.items() if not name.startswith("advantage/")}

    def record(self, row: Mapping[str, Any], prepared: PreparedRollout) -> None:
        """The row and its samples; the advantage of a sample is the mean over its tokens."""
        sequences = [sequence for update in prepared.updates for sequence in update]
        means = np.array([s.where_written(s.token_advantages()).mean() for s in sequences], np.float64)
        self.log.step(row, prepared.rollout.groups, means, prepared.trainer_logprobs)

    def validate(self, evaluated: Sequence[Group]) -> dict[str, float]:
        """Rewards of the held-out prompts, and how far from the teacher the answers are."""
        row = super().validate(evaluated)
        answers = [t for group in evaluated for t in group.trajectories if t.trains]
        if answers and self.config.gdpo.val_temperature == 1:
            gaps = [gap[_written(t)] for t, gap in zip(answers, self._gaps(answers))]
            row["validation/teacher_kl"] = -float(np.concatenate(gaps).mean(dtype=np.float64))
        return row

    def _gaps(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """Return log teacher - log sampler of each trajectory: float32 [completion tokens], 0 for tokens that the
        policy did not write."""
        sequences = [
            TrainSequence(t.prompt.token_ids, t.completion_ids, t.logprobs, loss_mask=t.loss_mask) for t in trajectories
        ]
        found = self.policy.logprobs(sequences, teacher=True)
        sampled = self._sampled_logprobs(sequences)
        return [
            np.where(_written(t), values - before, 0.0).astype(np.float32)
            for t, values, before in zip(trajectories, found, sampled, strict=True)
        ]

    def _sampled_logprobs(self, sequences: list[TrainSequence]) -> list[np.ndarray]:
        """Return the sampler's log-prob of each token, the trainer's if the sampler gave none: float32 [completion
        tokens] for each sequence. Only sequences that lack one are scored."""
        found = [s.sampler_logprobs for s in sequences]
        lacking = [place for place, s in enumerate(sequences) if np.isnan(s.where_written(found[place])).any()]
        if lacking:
            scored = self.policy.logprobs([sequences[place] for place in lacking])
            for place, now in zip(lacking, scored, strict=True):
                found[place] = np.where(np.isnan(found[place]), now, found[place])
        return found


def _written(trajectory: Trajectory) -> np.ndarray:
    """bool [completion tokens]: those that the policy wrote."""
    mask = trajectory.loss_mask
    return np.ones(len(trajectory.completion_ids), bool) if mask is None else mask
