"""A run with images, from rows to weights: the model and environment of the demo, and functions that see images."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from launch import REPOSITORY, rows, train_here

from gdpo_nemo.observe.samples import read_rollouts, rollout_path

pytestmark = pytest.mark.slow

FUNCTIONS = """
def shown(image, rgb, completion_ids, **columns):
    colours = [{colour for _, colour in picture.getcolors()} for picture in image]
    return [float(tuple(wanted) in found) for found, wanted in zip(colours, rgb)]


def varied(completion_ids, **columns):
    return [len(set(ids)) / len(ids) for ids in completion_ids]
"""
"""A reward of 1 if a row's image, as a PIL image, has its colour, and a reward that differs between random samples."""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """Two steps of the demo with images from files. Half of the rows have the demo's rewards, the others functions."""
    sys.path.insert(0, str(REPOSITORY / "examples"))
    import coloured_dots
    import make_tiny_model

    folder = tmp_path_factory.mktemp("images")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            make_tiny_model,
            "_warm_up",
            lambda start, result, *_, **__: shutil.copytree(start, result, dirs_exist_ok=True),
        )
        make_tiny_model.make_dots_model(str(folder / "model"), 0)
    with (folder / "rows.jsonl").open("w") as file:
        for number, row in enumerate(coloured_dots.ColouredDots().rows("train", 8, 0)):
            row["image"].save(folder / f"{number}.png")
            rgb = coloured_dots.RGB[row["colour"]]
            row = {**row, "image": f"{number}.png", "rgb": rgb, "task": ("dots", "functions")[number % 2]}
            file.write(json.dumps(row) + "\n")
    (folder / "rewards.py").write_text(FUNCTIONS)
    train_here(
        folder / "run",
        folder / "model",
        *("--config", "configs/gdpo_dots_cpu.yaml"),
        f"data.train={{path: {folder}/rows.jsonl, environment: null, environment_key: task, size: null}}",
        "data.validation.size=8",
        f"env.functions={{functions: {{shown: '{folder}/rewards.py:shown', varied: '{folder}/rewards.py:varied'}}}}",
        "gdpo.rewards={count: 1, colour: 1, place: 1, shown: 1, varied: 1}",
        "gdpo.max_num_steps=2",
        "gdpo.val_period=2",
        "gdpo.val_at_start=false",
        "logger.plot=false",
        "logger.tensorboard.enabled=false",
    )
    return folder / "run"


def test_trainer_and_sampler_agree_on_prompts_with_images(run_dir):
    trained = [row for row in rows(run_dir) if "loss" in row]
    assert [row["step"] for row in trained] == [1, 2]
    for row in trained:
        assert row["parity/max_abs"] < 1e-5 and row["parity/probe"] < 1e-5 and row["grad_norm"] > 0
        assert row["rollout/env_failed"] == 0
    # The frozen tower processes each image once in the run. The comparison of weights uses some of them first.
    assert sum(row["vision/tower_images"] for row in trained) == 8


def test_rewards_of_the_demo_and_of_functions_see_the_image_of_the_row(run_dir):
    (first, second) = (read_rollouts(rollout_path(run_dir, step)) for step in (1, 2))
    by_task = {task: [s for s in first + second if s["environment"] == task] for task in ("dots", "functions")}
    assert {task: len(samples) for task, samples in by_task.items()} == {"dots": 32, "functions": 32}
    assert {frozenset(s["rewards"]) for s in by_task["dots"]} == {frozenset({"count", "colour", "place", "all"})}
    assert {s["rewards"]["shown"] for s in by_task["functions"]} == {1.0}
    assert len({s["rewards"]["varied"] for s in by_task["functions"]}) > 1
