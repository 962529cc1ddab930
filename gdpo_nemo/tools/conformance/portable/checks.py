"""Checks of the code around the estimator: filters, KL, weights, other code paths, missing rewards and rubrics.

Each check runs functions of a trainer on one batch. The batches are small enough to follow by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .cases import TOLERANCE, Case, Estimator, Outcome, difference, error_line, evaluate
from .ports import Port
from .source import PortError

RUBRICS = Path(__file__).with_name("rubrics.json")


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    passed: bool | None
    """None if the trainer has no such option."""
    detail: str


def _batch(rewards: Sequence[Sequence[float]], sizes: list[int]) -> Case:
    """Return a batch with weights of 1."""
    columns = np.array(rewards, dtype=np.float64)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    return Case("", "", columns, groups, np.ones(columns.shape[1]), np.full(len(columns), 8), {})


PLAIN = _batch([[0, 2], [0, 1], [0, 0], [1, 0], [1, 1], [0, 1], [1, 1], [0, 1]], [4, 4])
"""Two rewards, of which all are present."""
EQUAL_SUMS = _batch([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0]], [4, 4])
"""The first group has equal sums and unequal rewards. The second group has no signal."""
EQUAL_PEERS = [(size, value) for size in (4, 8, 12, 16) for value in (0.9, 0.3, 0.6, 0.95)]
"""Sizes of groups, and first rewards of all samples but the first. float32 cannot represent the values exactly."""


def filters_use_components(port: Port) -> Finding:
    """Groups are dropped, or reported as groups without a signal, by their components and not by their sums."""
    if port.without_signal is None:
        return Finding(None, "no filter")
    share = port.without_signal(EQUAL_SUMS.rewards, EQUAL_SUMS.groups)
    meaning = {0.5: "by component", 1.0: "by the sum: drops a group whose components vary", 0.0: "finds none"}
    return Finding(share == 0.5, f"{share:.0%} of the groups instead of 50%: {meaning.get(share, 'neither')}")


def kl_is_kept(port: Port) -> Finding:
    """A KL penalty in the reward changes the advantages, or is refused."""
    if port.kl_in_reward is None:
        return Finding(None, "no KL in the reward")
    kl = np.array([0.0, 2, 0, 0, 0, 0, 0, 2])
    try:
        found = port.kl_in_reward(PLAIN.rewards, PLAIN.groups, kl)
    except Exception as error:  # an error is a refusal
        return Finding(True, error_line(error))
    gap = difference(found.tolist(), evaluate(port.advantages, PLAIN))
    return Finding(gap > TOLERANCE, "changes the advantages" if gap > TOLERANCE else "has no effect")


def weights_follow_names(port: Port) -> Finding:
    """A weight belongs to the component at its position or of its name, if names are not in alphabetical order."""
    if port.named is None:
        return Finding(None, "components have no names")
    rewards, weights = PLAIN.rewards[:4], [1.0, 0.25]
    ordered, reverse = (port.named(names, rewards, weights) for names in (["a", "b"], ["b", "a"]))
    same = difference(ordered.tolist(), reverse.tolist()) <= TOLERANCE
    return Finding(same, "kept" if same else "weights are applied in alphabetical order of the names")


def weights_are_counted(port: Port) -> Finding:
    """One weight more than there are components is an error."""
    found = evaluate(_with_weights(port.advantages, np.array([1.0, 0.5, 2.0])), PLAIN)
    return Finding(isinstance(found, str), found if isinstance(found, str) else "three weights for two components pass")


def _with_weights(estimator: Estimator, weights: np.ndarray) -> Estimator:
    def run(rewards: np.ndarray, groups: np.ndarray, _: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return estimator(rewards, groups, weights, lengths)

    return run


def missing_is_not_zero(port: Port) -> Finding:
    """A missing reward is excluded or refused. It neither counts as 0 nor spoils other samples."""
    missing = PLAIN.rewards.copy()
    missing[0, 1] = np.nan
    found = evaluate(_with_rewards(port.advantages, missing), PLAIN)
    if isinstance(found, str):
        return Finding(True, found)
    if None in found:
        return Finding(False, f"makes {found.count(None)} of {len(found)} advantages NaN")
    zero = evaluate(_with_rewards(port.advantages, np.nan_to_num(missing)), PLAIN)
    counts = difference(found, zero) <= TOLERANCE
    return Finding(not counts, "counts as 0" if counts else "excluded")


def _with_rewards(estimator: Estimator, rewards: np.ndarray) -> Estimator:
    def run(_: np.ndarray, groups: np.ndarray, weights: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return estimator(rewards, groups, weights, lengths)

    return run


def deviation_of_the_sample(port: Port) -> Finding:
    """The advantages of a batch have a sample standard deviation of 1, as in the authors' code."""
    found = evaluate(port.advantages, PLAIN)
    if isinstance(found, str) or None in found:
        return Finding(False, found if isinstance(found, str) else "NaN")
    values = np.array(found, dtype=np.float64)
    sample, population = values.std(ddof=1), values.std()
    kind = "sample" if abs(sample - 1) < 5e-3 else "population" if abs(population - 1) < 5e-3 else "neither"
    return Finding(kind == "sample", f"{kind}: {sample:.3f} over samples")


def empty_response_counts_once(port: Port) -> Finding:
    """A response without tokens keeps its rewards in the statistics of its group, and changes no other advantage."""
    lengths = np.array([8, 8, 8, 8, 8, 8, 8, 0])
    before = evaluate(port.advantages, PLAIN)
    after = evaluate(_with_lengths(port.advantages, lengths), PLAIN)
    if isinstance(after, str) or isinstance(before, str):
        return Finding(False, after if isinstance(after, str) else str(before))
    gap = difference(before[:-1], after[:-1])
    return Finding(gap <= TOLERANCE, "no effect" if gap <= TOLERANCE else f"changes other advantages by {gap:.2g}")


def _with_lengths(estimator: Estimator, lengths: np.ndarray) -> Estimator:
    def run(rewards: np.ndarray, groups: np.ndarray, weights: np.ndarray, _: np.ndarray) -> np.ndarray:
        return estimator(rewards, groups, weights, lengths)

    return run


def other_paths_agree(port: Port) -> Finding:
    """Code for requests of several turns and for streamed groups computes the same advantages."""
    if not port.paths:
        return Finding(None, "one path")
    expected = evaluate(port.advantages, PLAIN)
    gaps = {name: difference(evaluate(path, PLAIN), expected) for name, path in port.paths.items()}
    unlike = [f"{name} differs by {gap:.2g}" for name, gap in gaps.items() if gap > TOLERANCE]
    return Finding(not unlike, "; ".join(unlike) or f"equal: {', '.join(gaps)}")


def equal_peers_do_not_dominate(port: Port) -> Finding:
    """With a leave-one-out baseline, a sample whose peers are equal does not make another component vanish."""
    if port.leave_one_out is None:
        return Finding(None, "no leave-one-out baseline")
    gaps = []
    for size, value in EQUAL_PEERS:
        batch = _batch([[0, 1]] + [[value, k % 2] for k in range(size - 1)], [size])
        found = evaluate(port.leave_one_out, batch)
        if isinstance(found, str) or None in found:
            return Finding(False, found if isinstance(found, str) else "NaN")
        # The second and third sample differ in the second reward only.
        gaps.append(difference(found[1:2], found[2:3]))
    vanished = sum(gap < 0.1 for gap in gaps)
    return Finding(vanished == 0, f"a component vanishes in {vanished} of {len(gaps)} batches")


def rubrics_are_by_criterion(port: Port) -> Finding:
    """Criteria that only one prompt has are components of that prompt's group, not summands of one reward."""
    record = json.loads(RUBRICS.read_text(encoding="utf-8"))[0]
    rewards = np.array(record["rewards"], dtype=np.float64)
    groups = np.repeat(np.arange(len(record["sizes"])), record["sizes"])
    batch = Case("", "", rewards, groups, np.ones(rewards.shape[1]), np.full(len(rewards), 8), {})
    found = evaluate(port.advantages, batch)
    if isinstance(found, str):
        return Finding(False, found)
    expected: dict[str, Outcome] = record["advantages"]
    kinds = ("by criterion, unscaled", "sum of criteria")
    equal = [name for name in kinds if difference(found, expected[name]) <= TOLERANCE]
    nan = "NaN" if None in found else "neither by criterion nor the sum of criteria"
    return Finding("by criterion, unscaled" in equal, ", ".join(equal) or nan)


CHECKS: dict[str, Callable[[Port], Finding]] = {
    "groups without signal": filters_use_components,
    "KL in the reward": kl_is_kept,
    "weights by name": weights_follow_names,
    "number of weights": weights_are_counted,
    "missing reward": missing_is_not_zero,
    "standard deviation": deviation_of_the_sample,
    "empty response": empty_response_counts_once,
    "other code paths": other_paths_agree,
    "equal peers": equal_peers_do_not_dominate,
    "rubric": rubrics_are_by_criterion,
}
"""Checks by name. The first line of each docstring is the rule."""


def run_checks(port: Port) -> dict[str, Finding]:
    """Run all checks. An error of the trainer's code fails the check.

    Raises:
        PortError: if the trainer's code uses names that the adapter does not know.
    """
    found = {}
    for name, check in CHECKS.items():
        try:
            found[name] = check(port)
        except NameError as error:
            raise PortError(f"--port: {port.title} is not supported ({name}: {error_line(error)})") from None
        except Exception as error:  # any error of a trainer is its result
            found[name] = Finding(False, error_line(error))
    return found
