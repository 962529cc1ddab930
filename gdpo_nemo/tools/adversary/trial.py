"""``gdpo-nemo env check --adversary``: metamorphic tests of a verifier.

The right answer of every row is verified. For some rows, forms of the right answer and attacks are also verified.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, zip_longest
from typing import Any, Mapping, Sequence

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
    reward model. Texts are then compared within their row."""
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
        hacked = {row for winners in one.hacked.values() for row in winners}
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
        verify, again = (partial(_verify, environment, pool, workers, better) for pool in (first, second))
        answers = {
            str(row.get("id", i)): [*candidates(environment, row), *expected_answers(row.get(ROW, {}))]
            for i, row in enumerate(rows)
        }
        samples = [make(row, text) for row, texts in zip(rows, answers.values()) for text in dict.fromkeys(texts)]
        verdicts = verify(samples) if samples else []
        gold = _best_answers(samples, verdicts)
        chosen = _chosen_rows(rows, gold, attacked)
        golds = [text for text, _ in gold.values()]
        texts, tried = [], []
        for row in chosen:
            own = gold.get(str(row["id"]), (None, {}))[0]
            other = next((text for text in golds[golds.index(own) + 1 :] + golds if text != own), None) if own else None
            tools = row.get("tools")
            found = probes(_last_message(row, key), own, other, tools if isinstance(tools, list) else ())
            texts += [(make(row, probe.text), probe) for probe in found]
        results, repeated = (call([sample for sample, _ in texts]) for call in (verify, again))
    for (sample, probe), verdict, other_verdict in zip(texts, results, repeated):
        tried.append(Tried(sample.prompt.id, probe, verdict.rewards, other_verdict.rewards))
    failed = Counter(verdict.detail for verdict in [*verdicts, *results] if not verdict.rewards)
    failed += Counter(second.detail for first, second in zip(results, repeated) if first.rewards and not second.rewards)
    return judge(tried, {row: rewards for row, (_, rewards) in gold.items()}, failed, better)


def _verify(
    environment: Environment,
    pool: EnvironmentPools,
    workers: int,
    directions: Mapping[str, int],
    samples: Sequence[Trajectory],
) -> list[Verdict]:
    verdicts = _in_parts(environment, pool, workers, samples)
    return [replace(verdict, rewards=oriented(verdict.rewards, directions)) for verdict in verdicts]


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
    return [verdict for part in parts if part for verdict in verify(part)]


def _sample(environment: Environment, name: str, key: str | None, row: Row, text: str) -> Trajectory:
    return as_sampled(sample_of(row, text, name, 0, key), environment)


def _last_message(row: Row, key: str | None) -> str:
    sample = sample_of(row, "", "env", 0, key)
    messages = sample.prompt.messages
    return str(messages[-1].get("content")) if messages else sample.prompt.text


def _best_answers(samples: Sequence[Trajectory], verdicts: Sequence[Verdict]) -> dict[str, tuple[str, Rewards]]:
    """Return the candidate with the largest sum of rewards, and its rewards, by row."""
    found: dict[str, tuple[str, Rewards]] = {}
    for sample, verdict in zip(samples, verdicts):
        row = sample.prompt.id
        if row not in found or _total(verdict.rewards) > _total(found[row][1]):
            found[row] = (sample.text, verdict.rewards)
    return found


def _total(rewards: Rewards) -> float:
    return sum(value for value in rewards.values() if value is not None)


def _chosen_rows(rows: Sequence[Row], gold: Mapping[str, tuple[str, Rewards]], count: int) -> list[Row]:
    """Return ``count`` rows at regular distances, then rows whose right answer does not win every component."""
    spread = {round(i * len(rows) / min(count, len(rows))) for i in range(min(count, len(rows)))}
    best = _best(rewards for _, rewards in gold.values())
    for name in [name for name in best if len({rewards.get(name) for _, rewards in gold.values()}) == len(gold) > 2]:
        del best[name]  # a graded component, which is compared within a row
    losing: dict[tuple[float | None, ...], list[int]] = {}
    for i, row in enumerate(rows):
        rewards = gold[str(row["id"])][1] if i not in spread and str(row["id"]) in gold else best
        if any(not _wins(rewards, name, value) for name, value in best.items()):
            losing.setdefault(tuple(rewards.get(name) for name in best), []).append(i)
    mixed = [i for turn in zip_longest(*losing.values()) for i in turn if i is not None]  # each way to lose in turn
    return [rows[i] for i in [*sorted(spread), *mixed[:SUSPICIOUS]]]


def _best(rewards: Any) -> dict[str, float]:
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
        winning = {
            name: {one.probe.text for one in texts if _wins(one.rewards, name, value)}
            for name, value in best.items()
            if row not in components[name].flat and not components[name].graded
        }
        for a, b in combinations(winning, 2):
            if winning[a] and winning[b] and not winning[a] & winning[b]:
                exclusive.setdefault((a, b), []).append(row)
    split = {
        (a, b): sum(_wins(rewards, a, best[a]) != _wins(rewards, b, best[b]) for rewards in gold.values())
        for a, b in exclusive
    }
    for name, found in components.items():
        found.best *= (directions or {}).get(name, 1)
        found.gold_loses = {
            row: oriented({name: value}, directions or {})[name] for row, value in found.gold_loses.items()
        }
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
        result.unstable += [
            (row, one.probe.text)
            for one in texts
            if one.rewards and one.again and one.rewards.get(name) != one.again.get(name)
        ]
        if len({one.rewards.get(name) for one in texts}) == 1:
            result.flat.append(row)
            continue
        won = {one.probe.text: _wins(one.rewards, name, bounds[row][not one.probe.is_right]) for one in texts}
        right = any(one.probe.kind == "gold" and won[one.probe.text] for one in texts)
        values = {one.probe.kind: one.rewards.get(name) for one in texts}
        own, wrong = values.get("gold"), values.get("wrong")
        if own is not None and wrong is not None:
            lost[right][own > wrong] += 1
        hedges = Counter(one.probe.name for one in texts if one.probe.kind == "hedge" and won[one.probe.text])
        for one in texts:
            kind, label, text = one.probe
            # A verifier may read the first or the last answer, but two answers must not win in both orders.
            if won[text] and (kind == "attack" or (kind == "hedge" and hedges[label] == 2)):
                result.hacked.setdefault(label, {}).setdefault(row, text)
            if right and kind == "form" and not won[text]:
                result.forms.setdefault(label, []).append(row)
    counted = lost[True] or lost[False]  # rows on which the right answer loses say little
    result.reads_answer = counted[True] >= counted[False] if counted else None
    return result


def _given(name: str, texts: Sequence[Tried]) -> list[tuple[Probe, float]]:
    """Return the texts to which the component applies, with their values."""
    return [(one.probe, value) for one in texts if (value := one.rewards.get(name)) is not None]


def _is_graded(name: str, by_row: Mapping[str, list[Tried]]) -> bool:
    """See ``ComponentTrial.graded``."""
    rows = [[value for _, value in _given(name, texts)] for texts in by_row.values()]
    values = [value for row in rows for value in row]
    largest = [max(row) for row in rows if row]
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
