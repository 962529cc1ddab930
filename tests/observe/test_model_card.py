"""The card of an exported model: what the hub reads of it, and the figures that it takes from the run."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.model_checks import model_source
from gdpo_nemo.observe.log import RunLog
from gdpo_nemo.observe.model_card import write_card
from gdpo_nemo.training.inputs import model_folder

CARD = "---\nlicense: other\nlicense_name: mine\nlicense_link: LICENSE\nbase_model: org/ancestor\n---\n# Base\n"


def base(tmp_path: Path, card: str | None = CARD, **fields) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    if card is not None:
        (folder / "README.md").write_text(card)
    return folder


def settings(model, **overrides):
    rewards = {"rewards": {"correct": 1.0, "brief": 0.5}}
    config = {"run": {"name": "mine", "dir": "results/mine"}, "gdpo": rewards, "policy": {"model_name": str(model)}}
    return load_config({**config, "env": {"gsm8k": {}}, **overrides})


def run(tmp_path: Path) -> Path:
    fixed = {"reward/correct/weight": 1.0}
    fixed |= {"reward/math/brief/mean": 0.4}
    rows = [
        {"step": 0, "validation/correct": 0.1, "validation/brief": 0.2},
        {"step": 1, "reward/correct/mean": 0.3, "reward/brief/mean": 0.4, "reward/brief/weight": 0.5, **fixed},
        {"step": 2, "reward/correct/mean": 0.3, "reward/brief/mean": 0.4, "reward/brief/weight": 0.3149, **fixed},
        {"step": 2, "validation/correct": 0.625, "validation/brief": 0.75, "validation/math/brief": 0.25},
        {"step": 4, "validation/correct": 0.9, "validation/brief": 0.99},
    ]
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def exported(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


def test_the_hub_reads_base_licence_and_tags_of_the_card(exported, tmp_path):
    model = base(tmp_path)
    data = {"train": {"path": "openai/gsm8k:main"}, "validation": {"path": "rows/held_out.jsonl"}}
    write_card(exported, str(model), settings(model, data=data), run(tmp_path), 2)
    read = ModelCard.load(exported / "README.md").data.to_dict()
    assert (read["base_model"], read["library_name"], read["datasets"]) == (
        "org/ancestor",
        "transformers",
        ["openai/gsm8k"],
    )
    assert (read["license"], read["license_name"], read["license_link"]) == ("other", "mine", "LICENSE")
    assert read["tags"] == ["gdpo_nemo", "reinforcement-learning", "gdpo"]


@pytest.mark.parametrize(
    "kind, task, classes",
    [
        ("qwen3", "text-generation", "AutoModelForCausalLM, AutoTokenizer"),
        ("qwen3_vl", "image-text-to-text", "AutoModelForImageTextToText, AutoProcessor"),
    ],
)
def test_card_names_the_task_and_classes_of_the_model(exported, tmp_path, kind, task, classes):
    (exported / "config.json").write_text(json.dumps({"model_type": kind}))
    card = write_card(exported, str(base(tmp_path)), None, None, 2)
    assert ModelCard.load(card).data.pipeline_tag == task
    assert f"from transformers import {classes}\n" in card.read_text()


def test_the_card_has_weights_and_means_of_validation_up_to_its_own_step(exported, tmp_path):
    model = base(tmp_path)
    text = write_card(exported, str(model), settings(model), run(tmp_path), 2).read_text()
    assert "| reward | weight | mean on held-out prompts, step 0 | step 2 |" in text
    assert "| correct | 1 | 0.100 | 0.625 |\n| brief | 0.5 to 0.315 | 0.200 | 0.750 |" in text
    assert "| math/brief | 0.5 | 0.250 | 0.250 |" in text
    assert "![reward curves](rewards.png)" in text and (exported / "rewards.png").read_bytes()[:4] == b"\x89PNG"
    settings_block = text.partition("```yaml\n")[2].partition("```")[0]
    assert yaml.safe_load(settings_block)["policy.megatron_cfg.optimizer.lr"] == 1e-6
    assert "\nrun.seed: 42\n" in settings_block


@pytest.mark.parametrize(
    "card, fields, licence",
    [
        (None, {}, "Unknown; see the base model"),
        (None, {"license": "mit"}, "mit, as"),
        ("no front matter", {}, "Unknown; see the base model"),
        ("---\n{[\n---\n", {}, "Unknown; see the base model"),
    ],
)
def test_unstated_licence_is_not_invented(exported, tmp_path, card, fields, licence):
    model = base(tmp_path, card, **fields)
    text = write_card(exported, str(model), settings(model), None, 2).read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    assert licence in text and front["license"] == fields.get("license", "unknown")
    assert "base_model" not in front and "`base`, trained with gdpo_nemo for 2 steps" in text


@pytest.mark.parametrize("fetched", [True, False])
def test_a_model_of_the_hub_is_named_as_it_is_there_with_the_licence_of_its_card(
    exported, tmp_path, monkeypatch, fetched
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    if fetched:
        cache = tmp_path / "models--org--model"
        for name, content in {"refs/main": "abc", "snapshots/abc/README.md": "---\nlicense: apache-2.0\n---\n"}.items():
            (cache / name).parent.mkdir(parents=True)
            (cache / name).write_text(content)
    text = write_card(exported, "org/model", settings("org/model"), None, 2).read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    assert (front["base_model"], front["license"]) == ("org/model", "apache-2.0" if fetched else "unknown")
    assert "[org/model](https://huggingface.co/org/model), trained with gdpo_nemo for 2 steps" in text


def test_fetched_model_includes_its_card_with_the_licence(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    asked = []

    def download(name, allow_patterns):
        asked.extend(pattern for pattern in allow_patterns if fnmatch("README.md", pattern))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("gdpo_nemo.training.inputs.describe", lambda content: None)
    assert model_folder(settings("org/model"), model_source(settings("org/model").policy)) == tmp_path and asked


def test_equal_runs_have_equal_cards_and_no_path_of_this_machine_is_in_them(exported, tmp_path):
    model, run_dir = base(tmp_path), run(tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    config = settings(model, data={"train": {"path": str(rows)}})
    files = []
    for _ in range(2):
        write_card(exported, str(model), config, run_dir, 2)
        files.append([(exported / name).read_bytes() for name in ("README.md", "rewards.png")])
    assert files[0] == files[1]
    text = files[0][0].decode()
    assert str(tmp_path) not in text and "* Training prompts: `rows.jsonl`" in text


def test_checkpoint_outside_its_run_has_a_card_with_the_known_facts(exported, tmp_path):
    text = write_card(exported, str(base(tmp_path)), None, None, 7).read_text()
    assert "after 7 steps" in text and "## Rewards" not in text and "## Versions" in text


def test_a_card_that_cannot_be_written_is_an_alert_and_no_end_of_the_run(tmp_path):
    model = base(tmp_path)
    config = settings(model, logger={"tensorboard": {"enabled": False}, "console": "plain"})
    log = RunLog(config, tmp_path / "log")
    log.card(tmp_path / "absent", 2)
    log.close("complete")
    assert "the model card failed" in (tmp_path / "log" / "alerts.jsonl").read_text()
