"""``gdpo-nemo reproduce``: which runs it starts, and what its page says about them. The runs themselves are chains."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from gdpo_nemo.commands import chain, cli
from gdpo_nemo.config.changes import find_changes
from gdpo_nemo.config.load import config_to_dict, load_config, to_yaml
from gdpo_nemo.observe.metrics import MetricsLog
from gdpo_nemo.tools.reproduce import command, page
from gdpo_nemo.utils.errors import RunError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.parametrize("task", command.MODELS)
def test_control_of_reproduce_is_the_one_in_the_configs(task, tmp_path):
    words = command.words_of(task, "8gpu", "grpo", 3, tmp_path)
    (stage,) = chain.read_stages(words)
    control = load_config(CONFIGS / f"grpo_{command.MODELS[task]}_8gpu.yaml")
    changed = {change.key for change in find_changes(config_to_dict(control), stage.config)}
    assert changed == {"run.name", "run.dir", "run.seed"}
    assert stage.folder == tmp_path / "grpo_seed3" and stage.config.run.seed == 3


@pytest.mark.parametrize("task", command.MODELS)
def test_cpu_runs_share_the_warm_up_and_differ_only_in_estimator_and_seed(task, tmp_path):
    overrides = ["gdpo.max_num_steps=2", "1:gdpo.max_num_steps=5"]
    changes = {"train": "rows.json", "held_out": "held_out.parquet", "overrides": overrides}
    runs = [
        chain.read_stages(command.words_of(task, "cpu", arm, seed, tmp_path, **changes))
        for arm, seed in (("gdpo", 0), ("gdpo", 1), ("grpo", 0))
    ]
    assert len({str(warm_up.config) for warm_up, _ in runs}) == 1
    warm_up, first = runs[0]
    assert first.config.policy.model_name == str(warm_up.model) == str(tmp_path / "warm_up" / "model")
    assert (warm_up.config.gdpo.max_num_steps, first.config.gdpo.max_num_steps) == (5, 2)
    assert {warm_up.config.data.train.path, first.config.data.train.path} == {"rows.json"}
    assert first.config.data.validation.path == "held_out.parquet"
    changed = [{change.key for change in find_changes(config_to_dict(first.config), run.config)} for _, run in runs[1:]]
    assert changed[0] == {"run.name", "run.dir", "run.seed"}
    controls = {override.partition("=")[0] for override in command.CONTROLS[task]}
    assert changed[1] == {"run.name", "run.dir", *controls}


def test_dry_run_plans_every_run_at_full_size(tmp_path, capsys):
    words = ["reproduce", "gsm8k", "--scale", "8gpu", "--seeds", "0,4", "--out", str(tmp_path / "out"), "--dry-run"]
    assert cli.main([*words, "--verbose"]) == 0
    shown = capsys.readouterr().out
    assert [shown.count(f"by {estimator}, ") for estimator in ("grpo", "gdpo")] == [2, 2]
    assert shown.count("seed: 4") == 2 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("scale, devices", [("8gpu", "8 x H100 SXM 80 GB"), ("cpu", "this machine's CPU")])
def test_dry_run_prints_the_number_devices_and_total_time_of_the_runs(tmp_path, capsys, scale, devices):
    words = ["reproduce", "gsm8k", "--scale", scale, "--seeds", "0,4", "--out", str(tmp_path / "out"), "--dry-run"]
    assert cli.main(words) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    summary = dict(lines)
    assert summary["runs"].startswith("4, 0 finished") and summary["devices"] == devices
    assert ("warm-up" in summary["runs"]) == (scale == "cpu")
    hours = {text.split(": ")[0]: float(text.split()[1]) for name, text in lines if name == "run"}
    assert set(hours) == {"grpo_seed0", "gdpo_seed0", "grpo_seed4", "gdpo_seed4"}
    assert float(summary["time"].split()[0]) == pytest.approx(sum(hours.values()), rel=0.01)
    assert cli.main(["plan", "--config", command.recipe("gsm8k", scale)]) == 0
    assert f"{hours['gdpo_seed0']:g} h for" in capsys.readouterr().out


@cache
def config_text(arm: str) -> str:
    overrides = command.CONTROLS["tool_calling"] if arm == "grpo" else ()
    return to_yaml(load_config(CONFIGS / "gdpo_tool_calling_smollm2_cpu.yaml", overrides))


def arms(folder: Path, ends: dict[str, list[float]], metric: str = "format") -> dict[str, list[Path]]:
    """Finished runs of tool calling with these values of a held-out metric at the end, and 0.1 at the start."""
    found: dict[str, list[Path]] = {}
    for arm, values in ends.items():
        for seed, value in enumerate(values):
            run = folder / f"{arm}_seed{seed}"
            run.mkdir(parents=True)
            (run / "config.yaml").write_text(config_text(arm).replace("seed: 42", f"seed: {seed}"))
            log = MetricsLog(run)
            others = {f"validation/{name}": 0.5 for name in ("ast", "format", "correctness") if name != metric}
            log.append({"step": 0, f"validation/{metric}": 0.1, **others})
            log.append({"step": 1, "reward/format/mean": 0.2, "reward/correctness/mean": -1.0, "time/step": 1.0})
            log.append({"step": 1, f"validation/{metric}": value, **others})
            found.setdefault(arm, []).append(run)
    return found


@pytest.mark.parametrize(
    "grpo, gdpo, sentence",
    [
        ([0.1, 0.2, 0.3], [0.2, 0.31, 0.39], "GDPO minus GRPO is +10.00 ± 0.58 (published: +4.33). GDPO is better"),
        ([0.2, 0.31, 0.39], [0.1, 0.2, 0.3], "GRPO is better by more than 4.3 standard errors. Unlike the published"),
        ([0.1, 0.4, 0.3], [0.3, 0.1, 0.5], "Undecided: 3 seeds do not distinguish the estimators."),
        ([0.1, 0.4, 0.3], [0.15, 0.52, 0.44], "± 2.73 (published: +4.33). Undecided: 3 seeds do not distinguish"),
        ([0.1], [0.9], "GDPO minus GRPO is +80.00 (published: +4.33). One seed has no error, so nothing follows"),
    ],
)
def test_verdict_compares_the_paired_difference_with_its_error(tmp_path, grpo, gdpo, sentence):
    found = page.verdicts(page.results_of("tool_calling", arms(tmp_path, {"grpo": grpo, "gdpo": gdpo})))
    assert sentence in found[1] and ("As published." in found[1]) == (gdpo[0] == 0.2)
    assert "GDPO minus GRPO is +0.00" in found[0]


def test_lower_values_of_unwanted_metrics_are_better():
    exceed = page.PUBLISHED["math_length"][1]
    values = np.array([5.0, 6.0, 7.0])
    (sentence,) = page.verdicts([page.Result(exceed, values, values, values - np.array([2.0, 2.1, 1.9]))])
    assert "GDPO is better by more than 4.3 standard errors. As published." in sentence


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
def test_verdict_names_a_winner_in_5_percent_of_experiments_without_a_difference(seeds):
    values = np.random.default_rng(seeds).normal(size=(4000, 2, seeds))
    results = [page.Result(page.PUBLISHED["gsm8k"][0], grpo, grpo, gdpo) for grpo, gdpo in values]
    named = sum("is better" in sentence for sentence in page.verdicts(results))
    assert named / len(results) == pytest.approx(0.05, abs=0.011)  # three standard errors


def test_page_has_both_tables_the_weaknesses_and_the_settings_of_another_size(tmp_path):
    found = arms(tmp_path / "a<b>", {"grpo": [0.1, 0.2, 0.3], "gdpo": [0.2, 0.31, 0.39]})
    path = page.write("tool_calling", "cpu", tmp_path, found, command.recipe("tool_calling", "8gpu"))
    text = path.read_text(encoding="utf-8")
    row = text[text.index("<td>correct format, %") :].partition("</tr>")[0]
    cells = ["4.74", "76.33", "80.66", "10.00 ± 0.00", "20.00 ± 5.77", "30.00 ± 5.51", "+10.00 ± 0.58", "0.25", "3"]
    assert row.replace("</td>", "").split("<td>")[2:] == cells
    assert "<tr><td>gdpo.num_prompts_per_step</td><td>512</td><td>6</td></tr>" in text
    assert "only the GRPO runs have a KL penalty" in text and "neither confirms nor contradicts" in text
    assert "gdpo.estimator" not in text.partition("Settings that differ")[2]
    assert "a&lt;b&gt;/grpo_seed0" in text and "a<b>" not in text


def test_page_requires_a_validation(tmp_path):
    found = arms(tmp_path, {"grpo": [0.1], "gdpo": [0.2]}, metric="other")
    (found["gdpo"][0] / "metrics.jsonl").write_text('{"step": 1, "reward/format/mean": 0.2}\n')
    with pytest.raises(RunError, match="has no metric validation/ast"):
        page.results_of("tool_calling", found)


@pytest.mark.parametrize(
    "words, message",
    [
        (["gsm8k", "--seeds", "1,1"], "expected different numbers from 0 on"),
        (["gsm8k", "--seeds", "1,x"], "expected different numbers from 0 on"),
        (["gsm8k", "--scale", "8gpu", "2:run.seed=3"], "2:run.seed=3: stage 2 does not exist"),
        (["gsm8k", "--train", "absent.jsonl", "--dry-run"], "absent.jsonl"),
    ],
)
def test_reproduce_refuses_invalid_input_in_one_line(words, message, capsys):
    try:
        status = cli.main(["reproduce", *words])
    except SystemExit as exit:
        status = exit.code
    error = capsys.readouterr().err
    assert status == 2 and message in error and "Traceback" not in error
