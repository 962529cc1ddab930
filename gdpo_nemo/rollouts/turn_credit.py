"""Credit by turn: what a turn and those after it earned, compared with the same turn of the group's other samples.

The return of turn t is G_t = r_t + discount G_(t+1), component by component. Every (trajectory, turn) is a row of the
estimator's table, so that a trajectory of one turn gets what it gets without credit by turn, to the bit. Rewards that
are not known by turn (a verdict on the whole trajectory) were earned by the last one.

``gdpo.turn_baseline`` says what a return is compared with: ``turn`` is the group's returns of the same turn (MT-GRPO,
arXiv 2505.11821, normalises each turn's reward over the group), ``group`` its returns of all turns together (as
DeepSeekMath's GRPO with process supervision, arXiv 2402.03300 section 4.1.3, pools the rewards of all steps). Both of
them add up rewards that are already normalised; here returns are normalised, so that one turn is GDPO, and a discount
is that of the rewards, as in GiGPO (arXiv 2505.10978 eq. 7).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Iterable, Mapping, Sequence

import numpy as np

from gdpo_nemo.data.records import Trajectory

if TYPE_CHECKING:
    import torch

    from gdpo_nemo.algorithms import Advantages, Diagnostics


@dataclass(frozen=True)
class TurnRows:
    """The turns of trajectories, one after the other."""

    trajectory: np.ndarray
    """int64 [turns]: place of its trajectory."""
    turn: np.ndarray
    """int64 [turns], from 0 in every trajectory."""
    tokens: np.ndarray
    """int64 [turns] that the policy wrote."""
    columns: dict[str, np.ndarray]
    """float64 [turns] by component: the discounted return; NaN in all turns of a trajectory without the component."""

    def ids(self, groups: np.ndarray, baseline: str) -> np.ndarray:
        """int64 [turns]: equal for the turns that are compared.

        Args:
            groups: int64 [trajectories], not negative.
            baseline: ``gdpo.turn_baseline``.
        """
        of_group = groups[self.trajectory]
        if baseline == "turn":
            of_group = of_group * (int(self.turn.max()) + 1) + self.turn
        return np.asarray(of_group)


def turn_rows(trajectories: Sequence[Trajectory], names: Iterable[str], discount: float) -> TurnRows:
    """The turns of ``trajectories`` with the returns of the components ``names``."""
    tokens = [t.turn_tokens or (t.num_policy_tokens,) for t in trajectories]
    counts = np.array([len(of_one) for of_one in tokens], np.int64)
    return TurnRows(
        trajectory=np.repeat(np.arange(len(trajectories)), counts),
        turn=np.concatenate([np.arange(count) for count in counts]),
        tokens=np.concatenate([np.array(of_one, np.int64) for of_one in tokens]),
        columns={
            name: np.concatenate([_returns(t, name, int(n), discount) for t, n in zip(trajectories, counts)])
            for name in names
        },
    )


def _returns(trajectory: Trajectory, name: str, turns: int, discount: float) -> np.ndarray:
    """float64 [turns]: the discounted return of a component from each turn on."""
    total = trajectory.rewards.get(name)
    if total is None:
        return np.full(turns, np.nan)
    found = earned(trajectory, name, turns)
    for turn in range(turns - 2, -1, -1):
        found[turn] += discount * found[turn + 1]
    return found


def earned(trajectory: Trajectory, name: str, turns: int) -> np.ndarray:
    """float64 [turns]: what each turn earned of a component that the trajectory has; all of it the last one where no
    turn is said to have earned any."""
    found = [rewards.get(name) for rewards in trajectory.turn_rewards]
    if all(value is None for value in found):
        found = [*[None] * (turns - 1), trajectory.rewards.get(name)]
    return np.array([0.0 if value is None else value for value in found], np.float64)


@dataclass(frozen=True)
class TurnAdvantages:
    """Advantages of the turns of a batch; as ``Advantages``, means over the tokens of a trajectory stand for it."""

    rows: TurnRows
    of_turns: Advantages
    """In the order of ``rows``."""
    totals: Mapping[str, np.ndarray]
    """float64 [trajectories] by component: the rewards of whole trajectories, NaN for "not applicable"."""
    valid: np.ndarray
    """bool [trajectories]"""

    @property
    def names(self) -> tuple[str, ...]:
        """Component names, in column order."""
        return tuple(self.totals)

    @property
    def values(self) -> torch.Tensor:
        """float64 [trajectories]; mean over the tokens that the policy wrote."""
        return self._means(self.of_turns.values)

    @property
    def components(self) -> torch.Tensor:
        """float64 [trajectories, components]; each component's weighted term, meant alike."""
        return self._means(self.of_turns.components)

    @cached_property
    def by_turn(self) -> list[np.ndarray]:
        """float64 [turns] of each trajectory."""
        starts = np.flatnonzero(self.rows.turn == 0)[1:]
        return np.split(self.of_turns.values.numpy(), starts)

    def of_sequences(self, trajectories: Sequence[Trajectory]) -> list[float | np.ndarray]:
        """What ``TrainSequence.advantage`` takes: float32 [completion tokens], 0 where the policy did not write; one
        number for a trajectory of one turn."""
        return [
            float(values[0]) if len(values) == 1 else _spread(t, values)
            for t, values in zip(trajectories, self.by_turn)
        ]

    @cached_property
    def diagnostics(self) -> Diagnostics:
        """What the rewards did to the advantages of turns; mean, deviation and share missing are of trajectories."""
        from gdpo_nemo.algorithms.diagnostics import column_statistics
        from gdpo_nemo.algorithms.table import build_table

        found = self.of_turns.diagnostics
        table = build_table(dict(self.totals), np.arange(len(self.valid)), dict.fromkeys(self.names, 1.0), self.valid)
        mean, std, saturation = column_statistics(table)
        missing = 1.0 - table.present.sum(axis=1) / max(1, self.valid.sum())
        return replace(found, mean=mean, std=std, saturation=saturation, missing=missing)

    def _means(self, values: torch.Tensor) -> torch.Tensor:
        import torch

        rows = self.rows
        count = len(self.valid)
        tokens = np.maximum(rows.tokens, 1)  # a trajectory in which the policy wrote nothing has a turn of none
        weights = tokens / np.bincount(rows.trajectory, tokens, count)[rows.trajectory]
        columns = values.numpy().reshape(len(weights), -1).T
        means = np.stack([np.bincount(rows.trajectory, weights * column, count) for column in columns], axis=1)
        return torch.from_numpy(means.reshape(count, *values.shape[1:]))


def _spread(trajectory: Trajectory, values: np.ndarray) -> np.ndarray:
    """A value of each turn at the tokens that the policy wrote in it: float32 [completion tokens], 0 elsewhere."""
    written = np.repeat(values.astype(np.float32), trajectory.turn_tokens)
    if trajectory.loss_mask is None:
        return written
    spread = np.zeros(len(trajectory.completion_ids), np.float32)
    spread[trajectory.loss_mask] = written
    return spread
