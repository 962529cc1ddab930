"""``gdpo-nemo env check --adversary``: metamorphic tests of a verifier.

The right answer of every row is verified. For some rows, forms of the right answer and attacks are also verified.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, combinations, product, zip_longest
from typing import Any

from gdpo_nemo.algorithms.rubrics import is_family
from gdpo_nemo.commands.env.check import as_sampled, candidates, refuse_agents, sample_of, verifier_of
from gdpo_nemo.data.records import Trajectory, Verdict
from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.execution.pools import EnvironmentPools
from gdpo_nemo.environments.nemo_gym.rows import ROW
from gdpo_nemo.tools.adversary.attacks import Probe, probes
from gdpo_nemo.tools.gym.trial import expected_answers

SUSPICIOUS = 20
"""Maximum number of additional rows to attack: rows whose right answer does not win in every component."""
_PER_WORKER = 8
"""Number of texts that a worker verifies at once. The texts of a row are one group if verdicts depend on other
samples."""
_EPSILON = 1e-9
_FEW_VALUES = 8
"""Number of distinct values up to which a component is not graded."""
_SHOWN_ROWS = 3
_CAPTION = (
    "A text wins a component if no text gets a better reward. Hackability: share of the tested rows on which a text "
    "wins that is not the right answer. ?: every text gets the same reward, so nothing was tested."
)
_GRADED = "graded: texts are compared within their row, and a wrong text wins if the right answer does not get more"

type Rewards = Mapping[str, float | None]
type Row = Mapping[str, Any]


@dataclass(frozen=True)
class Tried:
    """A verified text."""

    row: str
    probe: Probe
    rewards: Rewards
    again: Rewards
    """Rewards of a second verification, with another seed."""


@dataclass
class ComponentTrial:
    """Result of the tests for one component."""

    best: float
    """Best value of any text: the largest, or the smallest of a component with a negative weight."""
    graded: bool = False
    """True if most texts have different values, and every attacked row another largest value, like the scores of a
    reward model, and for a family of criteria, because rows have different rubrics. Texts are then compared within
    their row."""
    reads_answer: bool | None = None
    """True if the right answer of another row gets less than the row's own on at least half of the rows. None if no
    right answer is known."""
    gold_loses: dict[str, float | None] = field(default_factory=dict)
    """Rows on which the right answer does not have the best value, with its value."""
    flat: list[str] = field(default_factory=list)
    """Attacked rows on which every text has the same value."""
    hacked: dict[str, dict[str, str]] = field(default_factory=dict)
    """First winning text by attack and row."""
    forms: dict[str, list[str]] = field(default_factory=dict)
    """Rows on which a form of the right answer loses although the right answer wins, by form."""
    unstable: list[tuple[str, str]] = field(default_factory=list)
    """(row, text) of texts whose reward changes in a second verification, unless one of the two failed."""


@dataclass
class Trial:
    """Result of ``put_on_trial``."""

    rows: int
    """Number of rows whose right answer was verified. 0 if no right answer is known."""
    attacked: list[str]
    texts: int
    failed: Counter[str]
    """Number of texts whose verification failed, so that a run would mask them, by reason."""
    components: dict[str, ComponentTrial]
    exclusive: dict[tuple[str, str], list[str]]
    """Attacked rows on which each of two components is won by a text, but no text wins both."""
    split: dict[tuple[str, str], int] = field(default_factory=dict)
    """Number of rows whose right answer wins only one of the two components."""

    def hackability(self, component: str) -> float | None:
        """Return the share of tested rows on which an attack wins the component. None: no row could be tested, because
        every text of a row has the same value."""
        one = self.components[component]
        hacked = set(chain.from_iterable(one.hacked.values()))
        tested = len(self.attacked) - len(one.flat)
        return len(hacked) / tested if tested else None


def put_on_trial(
    name: str,
    options: Mapping[str, Any],
    environment: Environment,
    rows: Sequence[Row],
    attacked: int,
    *,
    workers: int = 1,
    timeout_s: float = 30.0,
    key: str | None = None,
    directions: Mapping[str, int] | None = None,
) -> Trial:
    """Verify the right answers of all rows, and forms and attacks on ``attacked`` rows and on suspicious rows.

    Args:
        name, options, environment, workers, timeout_s, key: see ``check_environment``.
        rows: rows from ``load_rows``.
        attacked: number of rows to attack, spread over all rows.
        directions: result of ``component_weights.directions``. None: larger rewards are better in all components.

    The environment's examples, the column ``answer`` and the expected answers of NeMo Gym's rows are candidates for the
    right answer of a row. The candidate with the largest rewards is used.

    Raises:
        RunError: if the environment's code fails or its servers are not reachable.
        ConfigError: if a row has no prompt, or the environment requires the model of a run.
    """
    refuse_agents(name, environment)
    make = partial(_sample, environment, name, key)
    with (
        EnvironmentPools({name: options}, workers, timeout_s) as first,
        EnvironmentPools({name: options}, workers, timeout_s, seed=1) as second,
    ):
        better = directions or {}
        samples: list[Trajectory] = []
        for row in rows:
            texts = dict.fromkeys([*candidates(environment, row), *expected_answers(row.get(ROW, {}))])
            samples += [make(row, text) for text in texts]
        verdicts = _verify(environment, first, workers, better, samples) if samples else []
        answers, gold = _best_answers(samples, verdicts)
        attacks: list[Trajectory] = []
        tested: list[Probe] = []
        for row in _chosen_rows(rows, gold, attacked):
            own, tools = answers.get(str(row["id"])), row.get("tools")
            other = _another(own, list(answers.values())) if own else None
            found = probes(_last_message(row, key), own, other, tools if isinstance(tools, list) else ())
            tested += found
            attacks += [make(row, probe.text) for probe in found]
        results, repeated = (_verify(environment, pool, workers, better, attacks) for pool in (first, second))
    failed = Counter(verdict.detail for verdict in [*verdicts, *results] if not verdict.rewards)
    tried = []
    for sample, probe, verdict, again in zip(attacks, tested, results, repeated):
        tried.append(Tried(sample.prompt.id, probe, verdict.rewards, again.rewards))
        if verdict.rewards and not again.rewards:
            failed[again.detail] += 1
    return judge(tried, gold, failed, better)


def _another(own: str, answers: list[str]) -> str | None:
    """Return the next right answer that differs from a row's own."""
    after = answers.index(own) + 1
    return next((text for text in answers[after:] + answers if text != own), None)


def _verify(
    environment: Environment,
    pool: EnvironmentPools,
    workers: int,
    directions: Mapping[str, int],
    samples: Sequence[Trajectory],
) -> list[Verdict]:
    verdicts = _in_parts(environment, pool, workers, samples)
    return [replace(verdict, rewards=oriented(verdict.component_rewards, directions)) for verdict in verdicts]


def oriented(rewards: Rewards, directions: Mapping[str, int]) -> dict[str, float | None]:
    """Return the rewards with the sign with which larger is better, so that penalties are negated."""
    return {name: None if value is None else value * directions.get(name, 1) for name, value in rewards.items()}


def _in_parts(
    environment: Environment, pool: EnvironmentPools, workers: int, samples: Sequence[Trajectory]
) -> list[Verdict]:
    """Verify a few samples at a time. The time limit applies to all samples that a worker or judge gets at once."""
    verify = verifier_of(environment, pool)
    if environment.remote and environment.by_sample:  # The server's time limit is for each sample.
        return verify(samples)
    parts: list[list[Trajectory]] = [[]]
    for sample in samples:
        splits = environment.by_sample or not parts[-1] or sample.prompt.id != parts[-1][-1].prompt.id
        if splits and len(parts[-1]) >= _PER_WORKER * workers:
            parts.append([])
        parts[-1].append(sample)
    verdicts: list[Verdict] = []
    for part in filter(None, parts):
        verdicts += verify(part)
    return verdicts


def _sample(environment: Environment, name: str, key: str | None, row: Row, text: str) -> Trajectory:
    return as_sampled(sample_of(row, text, name, 0, key), environment)


def _last_message(row: Row, key: str | None) -> str:
    sample = sample_of(row, "", "env", 0, key)
    messages = sample.prompt.messages
    return str(messages[-1].get("content")) if messages else sample.prompt.text


def _best_answers(
    samples: Sequence[Trajectory], verdicts: Sequence[Verdict]
) -> tuple[dict[str, str], dict[str, Rewards]]:
    """Return the candidate with the largest sum of rewards by row, and its rewards by row."""
    texts: dict[str, str] = {}
    gold: dict[str, Rewards] = {}
    for sample, verdict in zip(samples, verdicts):
        row = sample.prompt.id
        if row not in gold or _total(verdict.rewards) > _total(gold[row]):
            texts[row], gold[row] = sample.text, verdict.rewards
    return texts, gold


def _total(rewards: Rewards) -> float:
    return sum(value for value in rewards.values() if value is not None)


def _chosen_rows(rows: Sequence[Row], gold: Mapping[str, Rewards], count: int) -> list[Row]:
    """Return ``count`` rows at regular distances, then rows whose right answer does not win every component."""
    count = min(count, len(rows))
    spread = {round(i * len(rows) / count) for i in range(count)}
    best = _best(gold.values())
    for name in list(best):
        if is_family(name) or len({rewards.get(name) for rewards in gold.values()}) == len(gold) > 2:
            del best[name]  # a graded component, which is compared within a row
    losing: dict[tuple[float | None, ...], list[Row]] = {}
    for i, row in enumerate(rows):
        rewards = best if i in spread else gold.get(str(row["id"]), best)
        if not all(_wins(rewards, name, value) for name, value in best.items()):
            losing.setdefault(tuple(map(rewards.get, best)), []).append(row)
    each_way_in_turn = chain.from_iterable(zip_longest(*losing.values()))
    mixed = [row for row in each_way_in_turn if row is not None]
    return [*(rows[i] for i in sorted(spread)), *mixed[:SUSPICIOUS]]


def _best(rewards: Iterable[Rewards]) -> dict[str, float]:
    """Return the largest value of each component."""
    best: dict[str, float] = {}
    for found in rewards:
        for name, value in found.items():
            if value is not None:
                best[name] = max(value, best.get(name, value))
    return best


def _wins(rewards: Rewards, component: str, best: float) -> bool:
    value = rewards.get(component)
    return value is not None and value >= best - _EPSILON


def judge(
    tried: Sequence[Tried],
    gold: Mapping[str, Rewards],
    failed: Counter[str] | None = None,
    directions: Mapping[str, int] | None = None,
) -> Trial:
    """Evaluate the verdicts, whose rewards are ``oriented``.

    A text wins a component if it has the largest value of any text on any row. If the component is graded, the right
    answer and its forms win if they get more than all wrong texts of the row, and a wrong text wins if it gets at least
    as much as the right answer. On a row on which every text has the same value, the component is not tested.

    Args:
        tried: verified texts of the attacked rows.
        gold: rewards of the right answer by row, also for rows that are not attacked.
        failed: number of texts whose verification failed, by reason.
        directions: directions of the rewards, which restore their signs in the result.
    """
    best = _best([*(one.rewards for one in tried), *gold.values()])
    by_row: dict[str, list[Tried]] = {}
    for one in tried:
        by_row.setdefault(one.row, []).append(one)
    components = {name: _component(name, value, by_row, gold) for name, value in best.items()}
    exclusive: dict[tuple[str, str], list[str]] = {}
    for row, texts in by_row.items():
        winning: dict[str, set[str]] = {}
        for name, value in best.items():
            if row not in components[name].flat and not components[name].graded:
                winning[name] = {one.probe.text for one in texts if _wins(one.rewards, name, value)}
        for a, b in combinations(winning, 2):
            if winning[a] and winning[b] and not winning[a] & winning[b]:
                exclusive.setdefault((a, b), []).append(row)
    split = dict.fromkeys(exclusive, 0)
    for (a, b), rewards in product(exclusive, gold.values()):
        split[a, b] += _wins(rewards, a, best[a]) != _wins(rewards, b, best[b])
    for name, found in components.items():
        sign = (directions or {}).get(name, 1)
        found.best *= sign
        for row, lost in found.gold_loses.items():
            found.gold_loses[row] = None if lost is None else lost * sign
    return Trial(len(gold), list(by_row), len(tried), failed or Counter(), components, exclusive, split)


def _component(
    name: str, best: float, by_row: Mapping[str, list[Tried]], gold: Mapping[str, Rewards]
) -> ComponentTrial:
    result = ComponentTrial(best, _is_graded(name, by_row))
    bounds = {row: _bounds(name, texts) if result.graded else (best, best) for row, texts in by_row.items()}
    for row, rewards in gold.items():
        bound = bounds[row][0] if row in bounds else best
        if not _wins(rewards, name, bound) and (row in bounds or not result.graded):
            result.gold_loses[row] = rewards.get(name)
    lost: dict[bool, Counter[bool]] = {True: Counter(), False: Counter()}
    for row, texts in by_row.items():
        won: dict[str, bool] = {}
        values: dict[str, float | None] = {}
        for one in texts:
            if one.rewards and one.again and one.rewards.get(name) != one.again.get(name):
                result.unstable.append((row, one.probe.text))
            won[one.probe.text] = _wins(one.rewards, name, bounds[row][not one.probe.is_right])
            values[one.probe.kind] = one.rewards.get(name)
        if len({one.rewards.get(name) for one in texts}) == 1:
            result.flat.append(row)
            continue
        right = _record_winners(result, row, [one.probe for one in texts], won)
        own, wrong = values.get("gold"), values.get("wrong")
        if own is not None and wrong is not None:
            lost[right][own > wrong] += 1
    counted = lost[True] or lost[False]  # rows on which the right answer loses say little
    result.reads_answer = counted[True] >= counted[False] if counted else None
    return result


def _record_winners(result: ComponentTrial, row: str, texts: Sequence[Probe], won: Mapping[str, bool]) -> bool:
    """Record the attacks that win on a row and the forms that lose. Return whether the right answer wins."""
    winners = [probe for probe in texts if won[probe.text]]
    right = any(probe.kind == "gold" for probe in winners)
    hedges = Counter(probe.name for probe in winners if probe.kind == "hedge")
    for kind, label, text in texts:
        # A verifier may read the first or the last answer, but two answers must not win in both orders.
        if won[text] and (kind == "attack" or (kind == "hedge" and hedges[label] == 2)):
            result.hacked.setdefault(label, {}).setdefault(row, text)
        if right and kind == "form" and not won[text]:
            result.forms.setdefault(label, []).append(row)
    return right


def _given(name: str, texts: Sequence[Tried]) -> list[tuple[Probe, float]]:
    """Return the texts to which the component applies, with their values."""
    return [(one.probe, value) for one in texts if (value := one.rewards.get(name)) is not None]


def _is_graded(name: str, by_row: Mapping[str, list[Tried]]) -> bool:
    """See ``ComponentTrial.graded``."""
    if is_family(name):
        return True
    values: list[float] = []
    largest: list[float] = []
    for texts in by_row.values():
        if row := [value for _, value in _given(name, texts)]:
            values += row
            largest.append(max(row))
    return len(set(values)) > max(_FEW_VALUES, len(values) / 2) and len(set(largest)) == len(largest)


def _bounds(name: str, texts: Sequence[Tried]) -> tuple[float, float]:
    """Return the values with which right and wrong texts of a row win a graded component."""
    values = _given(name, texts)
    wrong = max((value for probe, value in values if not probe.is_right), default=-math.inf)
    gold = max((value for probe, value in values if probe.kind == "gold"), default=wrong)
    return wrong + 2 * _EPSILON, gold


def findings(trial: Trial) -> list[str]:
    """Return the results in words. Attacks and forms are reported for components that read the answer."""
    lines = []
    if not trial.rows:
        lines.append("no right answer is known: examples(row) is empty and the rows have no column answer")
    for name, one in trial.components.items():
        if one.gold_loses and trial.rows:
            lines.append(_gold_line(name, one, trial.rows))
        if one.unstable:
            row, text = one.unstable[0]
            lines.append(
                f"{name}: {len(one.unstable)} of {trial.texts} texts get another reward in a second verification, for "
                f"example {_short(text)} on {row}"
            )
        if one.flat:
            lines.append(
                f"{name}: not tested on {len(one.flat)} of {len(trial.attacked)} attacked rows, on which every text "
                f"has the same value ({_some(one.flat)})"
            )
        for attack, winners in one.hacked.items() if one.reads_answer is not False else ():
            row, text = min(winners.items(), key=lambda item: len(item[1]))
            lines.append(
                f"{name}: {attack} wins on {len(winners)} of {len(trial.attacked)} attacked rows, for example "
                f"{_short(text)} on {row}"
            )
        if one.forms and one.reads_answer:
            lines.append(f"{name}: these forms of the right answer lose: {', '.join(one.forms)}")
    for (a, b), rows in trial.exclusive.items():
        lines.append(
            f"{a} and {b} exclude each other on {len(rows)} of {len(trial.attacked)} attacked rows ({_some(rows)}): no "
            f"text wins both; the right answer wins only one of them on {trial.split[a, b]} of {trial.rows} rows"
        )
    if trial.failed:
        reasons = "; ".join(f"{reason or 'no reward'} ({count})" for reason, count in trial.failed.most_common(3))
        lines.append(f"{trial.failed.total()} verifications failed; a run would mask these samples: {reasons}")
    return lines


def _gold_line(name: str, one: ComponentTrial, rows: int) -> str:
    if one.graded:
        lost = list(one.gold_loses)
        return f"{name}: a wrong text gets at least as much as the right answer on {len(lost)} rows ({_some(lost)})"
    by_value: dict[str, list[str]] = {}
    for row, value in one.gold_loses.items():
        by_value.setdefault("no verdict" if value is None else f"{value:.4g}", []).append(row)
    common = sorted(by_value.items(), key=lambda item: -len(item[1]))[:3]
    return (
        f"{name}: the right answer does not get {one.best:.4g} on {len(one.gold_loses)} of {rows} rows: "
        + ", ".join(f"{value} on {len(found)} ({_some(found)})" for value, found in common)
    )


def _some(rows: Sequence[str]) -> str:
    return ", ".join(rows[:_SHOWN_ROWS]) + (", ..." if len(rows) > _SHOWN_ROWS else "")


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def table(name: str, trial: Trial) -> Any:
    """Return a table with a row per component."""
    from rich.table import Table
    from rich.text import Text

    title = f"{name}: {trial.texts} texts on {len(trial.attacked)} rows"
    graded = [component for component, one in trial.components.items() if one.graded]
    caption = f"{_CAPTION} {', '.join(graded)}: {_GRADED}." if graded else _CAPTION
    result = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for head in ("component", "reads the answer", "right answer wins", "hackability", "winning attacks"):
        result.add_column(head, overflow="fold")
    for component, one in trial.components.items():
        reads = {True: "yes", False: "no", None: "?"}[one.reads_answer]
        tested = trial.rows and len(one.flat) < len(trial.attacked)
        rows = len(trial.attacked) if one.graded else trial.rows
        wins = f"{rows - len(one.gold_loses)} of {rows}" if tested else "?"
        share = trial.hackability(component)
        attacks = ", ".join(one.hacked) or ("?" if share is None else "none")
        cells = (component, reads, wins, "?" if share is None else f"{share:.0%}", attacks)
        result.add_row(*map(Text, cells))
    return result
