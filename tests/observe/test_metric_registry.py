"""Every metric that the program writes is described beside the code that writes it, and nothing else is described."""

from __future__ import annotations

import ast
import io
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import rich.console
import torch
from demo_run import demo_row, demo_validation

from gdpo_nemo.algorithms import LossSettings, OffPolicySettings, TokenFields, compute_advantages
from gdpo_nemo.algorithms.component_weights import ComponentWeights
from gdpo_nemo.algorithms.loss_selection import corrects_by_token
from gdpo_nemo.algorithms.losses import LOSSES
from gdpo_nemo.algorithms.offpolicy import CORRECTIONS
from gdpo_nemo.algorithms.policy_loss import policy_loss
from gdpo_nemo.algorithms.weighting_rules import Pow3r
from gdpo_nemo.commands import cli
from gdpo_nemo.data.packing import measure
from gdpo_nemo.data.records import NOT_CONTIGUOUS, Group, Outcome, Prompt, Trajectory, UpdateResult
from gdpo_nemo.observe import console, health, html_report, metric_registry, plot
from gdpo_nemo.observe.console import facts
from gdpo_nemo.observe.health import check_health, findings_table, general_checks
from gdpo_nemo.observe.metric_registry import (
    NAME,
    OWN,
    PACKAGE,
    find_metric,
    metrics,
    nearest_metric,
    read_entries,
    title_of,
    unknown_metrics,
)
from gdpo_nemo.observe.metrics import History, MetricsLog
from gdpo_nemo.observe.tensorboard import TensorboardLog
from gdpo_nemo.rollouts.metrics import rollout_metrics, update_metrics, validation_metrics

SOURCES = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
GROUPS = {metric.group for metric in metrics().values()} - {""}


def is_entries(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "METRICS"


def code_of(tree: ast.Module) -> list[ast.AST]:
    """Nodes of a module, without its METRICS and without docstrings."""
    nodes = [node for statement in tree.body if not is_entries(statement) for node in ast.walk(statement)]
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return [node for node in nodes if id(node) not in docs]


def text_of(node: ast.AST | None) -> str | None:
    """A string, with NAME for what an f-string puts in; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else NAME for part in node.values)
    return None


def written_keys(tree: ast.Module) -> set[str]:
    """What a module makes a key of: of a dictionary, or by assignment to an item; only what looks like a metric."""
    keys: list[ast.AST | None] = []
    for node in code_of(tree):
        if isinstance(node, ast.Dict):
            keys += node.keys
        elif isinstance(node, ast.DictComp):
            keys.append(node.key)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            keys.append(node.slice)
    return {text for key in keys if (text := text_of(key)) and text.partition("/")[0] in GROUPS and "/" in text}


def fits(key: str, pattern: str) -> bool:
    """Whether a key with placeholders may be one that the pattern describes."""
    return re.fullmatch(re.escape(key).replace(NAME, ".+"), pattern) is not None


def test_every_key_that_is_written_has_an_entry():
    strange = {
        f"{path.relative_to(PACKAGE)}: {key}"
        for path, tree in SOURCES.items()
        if "interop" not in path.parts
        for key in written_keys(tree)
        if find_metric(key) is None and not any(fits(key, pattern) for pattern in metrics())
    }
    assert strange == set()


def test_every_entry_is_in_the_file_that_writes_it():
    """The key itself, or its last part (a measurement that gets its group elsewhere), is a string of that file."""
    unwritten = []
    for metric in metrics().values():
        tree = SOURCES[PACKAGE.parent / metric.source]
        texts = {text for node in code_of(tree) if (text := text_of(node))}
        last = metric.pattern.rpartition("/")[2]
        if metric.pattern not in texts and (last == NAME or last not in texts):
            unwritten.append(metric.pattern)
    assert unwritten == []


def test_no_key_is_described_twice():
    described = [key for path in SOURCES for key in read_entries(path.read_text(), str(path))]
    assert sorted(described) == sorted(metrics())


def every_measurement_of_a_loss() -> tuple[dict[str, float], dict[str, float]]:
    """Sums and maxima of all types of loss under all corrections."""
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    ones = torch.ones(4)
    logprobs = dict(old_logprobs=-ones, sampler_logprobs=-1.1 * ones, reference_logprobs=-1.2 * ones)
    fields = TokenFields(ones, ones, torch.tensor([0, 0, 1, 1]), 2, **logprobs)
    for kind, mode, level in product(LOSSES, CORRECTIONS, ("token", "sequence")):
        correction = OffPolicySettings(mode=mode, level=level, sequence_mask_threshold=0.05)
        if kind == "gspo" and corrects_by_token(correction):
            continue
        settings = LossSettings(type=kind, ratio_clip_c=3.0, reference_policy_kl_penalty=0.1, off_policy=correction)
        _, found = policy_loss(-ones, ones, fields, settings)
        sums |= {name: float(value) for name, value in found.sums.items()}
        maxima |= {name: float(value) for name, value in found.maxima.items()}
    return sums, maxima


def samples(**changes) -> list[Trajectory]:
    prompt = Prompt("p", np.arange(2, dtype=np.int32), "p", "toy")
    tokens = np.arange(3, dtype=np.int32)
    mask = np.array([True, False, True])
    values = dict(policy_version=0, text="", finish_reason="stop", loss_mask=mask, turns=2, detail=NOT_CONTIGUOUS)
    return [
        Trajectory(prompt, i, tokens, tokens.astype(np.float32), rewards={"a": float(i)}, **{**values, **changes})
        for i in range(2)
    ]


def rows_of_the_real_functions() -> list[dict[str, float]]:
    sums, maxima = every_measurement_of_a_loss()
    sums |= {"routing_decisions": 8.0, "routing_differing": 2.0, "tower_images": 3.0}
    packing = measure([[[0, 1]]], [3, 4], 1, 1, 0.0)
    update = UpdateResult(0.1, 1.0, 1e-4, False, sums, maxima, packing, sequences=2, skipped_sequences=1)
    rewards = {"a": [0.0, 1.0, 1.0, 1.0], "b": [1.0, 0.0, 1.0, 1.0]}
    advantages = compute_advantages(rewards, [0] * 4, noise={"a": 0.1})
    family = compute_advantages({"rubric/*": [[0.0, 1.0], [1.0, 1.0]]}, [0] * 2).diagnostics.metrics()
    trajectories = [*samples(), *samples(outcome=Outcome.ENV_FAILED)]
    group = Group(trajectories[0].prompt, samples())
    bounds = {"a": {"at_least": 1}, "b": {"at_most": 1}}
    weights = ComponentWeights({"a": 0.0, "b": 0.0, "c": 1.0}, bounds, {}, Pow3r())
    weights.update(1, {})
    return [
        weights.metrics,
        family,
        update_metrics([update], on_policy=True) | advantages.diagnostics.metrics() | rollout_metrics(trajectories, 1),
        validation_metrics([group, group], [1], errors_of=["a"]),
    ]


def test_every_measured_key_is_described_and_every_described_one_is_measured():
    rows = rows_of_the_real_functions()
    assert unknown_metrics(rows) == []
    described = {find_metric(key).pattern for row in rows for key in row}
    elsewhere = (
        "gdpo.py",
        "trainer.py",
        "weight_sync.py",
        "shards.py",
        "fleet.py",
        "scheduler.py",
        "supervisor.py",
        "supervised.py",
        "distillation.py",
        "ppo.py",
        "component_gradients.py",
        "prompt_pools.py",
        "environment_metrics.py",
        "by_environment.py",
    )  # tests/end_to_end, tests/test_trainer, tests/rollouts
    computed = {m.pattern for m in metrics().values() if Path(m.source).name not in elsewhere}
    assert described == computed - {"policy/NAME"}  # which is for losses of a user's own


def test_the_made_up_rows_of_these_tests_have_no_key_that_a_run_has_not():
    assert unknown_metrics([demo_row(1), demo_validation(1)]) == []


def test_a_key_without_entry_is_found_and_a_users_own_is_not_asked_for():
    rows = [{"step": 1, "rollout/surprise": 1.0, f"{OWN}mine": 2.0, "loss": 0.0}, {"rollout/surprise": 2.0}]
    assert unknown_metrics(rows) == ["rollout/surprise"]


@pytest.mark.parametrize(
    "key, pattern",
    [
        ("reward/total/mean", "reward/total/mean"),
        ("reward/correctness/mean", "reward/NAME/mean"),
        ("rollout/env_failed", "rollout/env_failed"),
        ("rollout/env_failed/math", "rollout/env_failed/NAME"),
        ("validation/mean_length", "validation/mean_length"),
        ("validation/format", "validation/NAME"),
        ("reward/correctness/median", None),
        ("reward//mean", None),
        ("losses", None),
    ],
)
def test_a_key_finds_its_own_entry_before_a_pattern(key, pattern):
    found = find_metric(key)
    assert (found.pattern if found else None) == pattern


def test_the_longest_of_two_patterns_that_fit_describes_a_key(monkeypatch):
    text = 'METRICS = {"a/NAME": ("", "short"), "a/NAME/b": ("", "of NAME"), "a/x": ("", "its own")}'
    entries = read_entries(text, "x.py")
    monkeypatch.setattr(metric_registry, "metrics", lambda: entries)
    assert metric_registry.about_of("a/c/b") == "of c" and metric_registry.about_of("a/c") == "short"
    assert metric_registry.about_of("a/x") == "its own"


@pytest.mark.parametrize(
    "entry", ['"s"', '("s",)', '("s", 3)', '("s", "x", {"unit": "s"})', '("s", "x", {"colour": "red"})']
)
def test_an_entry_that_is_not_written_as_one_names_its_file_and_key(entry):
    with pytest.raises(ValueError, match=r"x\.py: METRICS\['a/b'\]"):
        read_entries(f'METRICS = {{"a/b": {entry}}}', "x.py")


def test_every_entry_is_one_line_and_every_bound_has_a_reason():
    for metric in metrics().values():
        assert metric.about and "\n" not in metric.about and len(metric.about) <= 110, metric.pattern
        assert metric.is_checked == bool(metric.why) and metric.at in ("every", "end"), metric.pattern
        assert "NAME" in metric.pattern or "NAME" not in metric.about, metric.pattern


def test_a_bound_may_depend_on_the_precision_of_the_run():
    metric = find_metric("parity/mean_abs")
    assert metric.limits("float32") == (None, 0.001) and metric.limits("bfloat16") == (None, 0.05)
    assert metric.bounds == "at most 0.001 in float32, 0.05 in bfloat16"
    assert find_metric("policy/entropy").bounds == "at least 0.02"


def test_displays_call_a_metric_by_its_label_and_unit():
    assert title_of("policy/entropy") == "entropy [nats/token]" and title_of("grad_norm") == "grad norm"
    assert title_of("reward_function/mine") == "reward_function/mine"


def test_explain_describes_a_metric_and_suggests_similar_names(capsys):
    assert cli.main(["explain", "metric/reward/correctness/dead_groups"]) == 0
    said = capsys.readouterr().out
    for part in (
        "metric/reward/correctness/dead_groups\n",
        "key      reward/NAME/dead_groups\n",
        "unit     share\n",
        "healthy  at most 0.999, at the end\n",
        "written  by gdpo_nemo/algorithms/diagnostics.py\n",
        "Groups in which component correctness is constant",
    ):
        assert part in said, part
    assert cli.main(["explain", "metric/grad_norm"]) == 0
    said = capsys.readouterr().out
    assert "unit     a plain number" in said and "at most 100, at every step" in said and "key " not in said
    for wrong, hint in (("grad_nrm", "did you mean metric/grad_norm?"), ("x", "explain metric lists all metrics")):
        assert cli.main(["explain", f"metric/{wrong}"]) == 2
        assert hint in capsys.readouterr().err
    assert cli.main(["explain", f"metric/{OWN}x"]) == 0
    assert "pass to log_metric under the name x." in capsys.readouterr().out
    assert nearest_metric("rollout/mean_lenght") == "rollout/mean_length"


def test_explain_metric_lists_all_of_them_with_their_units(capsys):
    assert cli.main(["explain", "metric"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {m.pattern}" in said and m.about.split()[0] in said for m in metrics().values())
    assert "\n  rollout/tokens [tokens]\n" in said and "\n  loss\n" in said
    assert (
        said.index("\n  step ") < said.index("\n  loss") < said.index("\n  reward/NAME/mean") < said.index("\n  time/")
    )


def registered_as(monkeypatch, **changes):
    """Let displays believe another entry of a metric."""
    entries = dict(metrics())
    entries["policy/entropy"] = replace(entries["policy/entropy"], **changes)
    monkeypatch.setattr(metric_registry, "metrics", lambda: entries)
    monkeypatch.setattr(health, "metrics", lambda: entries)


def test_console_plot_report_and_health_use_the_text_of_the_entry(monkeypatch, run_dir):
    registered_as(monkeypatch, label="surprise", unit="bits", about="What <it> is", min=3.0)
    log = MetricsLog(run_dir)
    for step in range(1, 8):
        log.append({**demo_row(step), "gradient/format/change/length": -0.25, "gradient/format/change/format": 0.5})
    titles = []
    monkeypatch.setattr(
        plot, "png_of", lambda figure: titles.extend(a.get_title(loc="left") for a in figure.axes) or b""
    )
    page = html_report.write_report(run_dir).read_text()
    assert "surprise [bits]" in titles and "grad norm" in titles
    assert "change of format by" in titles and "Gradients by component" in page
    assert "estimated change of mean format: by itself +3.500, by length -1.750 (sum of 7 steps)" in page
    assert "<dt>surprise [bits]</dt><dd>What &lt;it&gt; is</dd>" in page
    assert any(part.startswith("surprise 0.") for part in console.health(demo_row(1)))
    checks = {check.metric: check for check in general_checks(None, ["a", "b"]) if check.of == "value"}
    assert checks["policy/entropy"].min == 3.0 and checks["policy/entropy"].optional
    shown = io.StringIO()
    rich.console.Console(file=shown, width=120).print(findings_table(check_health(run_dir, list(checks.values()))))
    (line,) = [line for line in shown.getvalue().splitlines() if "policy/entropy" in line]
    assert "bits" in line and "at least 3" in line and "fail" in line


def test_the_checks_of_every_run_are_the_bounds_of_the_metrics():
    checks = [check for check in general_checks(None, ["a", "b"]) if check.of == "value"]
    expected = {
        ("grad_norm", "every", None, 100.0, False),
        ("policy/entropy", "every", 0.02, None, True),
        ("policy/clip_fraction", "every", None, 0.3, True),
        ("parity/mean_abs", "every", None, 0.05, True),
        ("rollout/env_failed", "every", None, 0.05, True),
        ("advantage/dead_groups", "every", None, 0.9, True),
        ("rollout/truncated", "every", None, 0.5, True),
        ("rollout/aborted", "every", None, 0.2, True),
        ("rollout/duplicates", "every", None, 0.95, True),
        ("policy/reference_kl", "every", None, 1.0, True),
        ("policy/ratio_max", "every", None, 100.0, True),
        ("policy/ratio_min", "every", 0.0001, None, True),
        ("policy/clip_low", "every", None, 0.2, True),
        ("policy/clip_high", "every", None, 0.2, True),
        ("policy/importance_masked", "every", None, 0.5, True),
        ("idle/trainer", "every", None, 0.95, True),
        ("gradient/residual", "every", None, 0.01, True),
        ("reward/a/dead_groups", "end", None, 0.999, False),
        ("reward/b/dead_groups", "end", None, 0.999, False),
    }
    assert {(c.metric, c.at, c.min, c.max, c.optional) for c in checks} == expected
    failures = {check.metric for check in checks if check.at == "every" and not check.advisory}
    sure = {"grad_norm", "policy/entropy", "policy/clip_fraction", "parity/mean_abs", "rollout/env_failed"}
    assert failures == sure
    drifts = [check for check in general_checks(None, []) if check.of != "value"]
    assert len(drifts) >= 5 and all(check.advisory and check.optional for check in drifts)


def test_tensorboard_is_given_the_meaning_of_every_key_once(tmp_path):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    log = TensorboardLog(tmp_path)
    log.write({"step": 1, "policy/entropy": 0.5, "reward_function/mine": 1.0})
    log.write({"step": 2, "policy/entropy": 0.4, "reward_function/mine": 2.0})
    log.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    values = [value for event in EventFileLoader(str(file)).Load() for value in event.summary.value]
    told = [(value.tag, value.metadata.summary_description) for value in values]
    entropy = ("policy/entropy", "Mean entropy of the policy at the trained tokens [nats/token]")
    assert told == [entropy, ("reward_function/mine", ""), ("policy/entropy", ""), ("reward_function/mine", "")]


def test_the_summary_counts_every_skipped_step():
    rows = [{**demo_row(step), "skipped_steps": float(step in (2, 5))} for step in range(1, 8)]
    assert any(fact.startswith("skipped     2 steps") for fact in facts(History.of(rows)))
    rows = [{**row, "skipped_steps": 0.0} for row in rows]
    assert not any("skipped" in fact for fact in facts(History.of(rows)))
