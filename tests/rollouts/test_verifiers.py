"""Episodes that a package of real verifiers 0.4 plays with the run's endpoint. Completions are scripted."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scripted_engines import completion_of, letters
from verifiers_world import TALK, open_world

from gdpo_nemo.data.records import Outcome
from gdpo_nemo.utils.errors import ConfigError, RunError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    options = {"package": "verifiers-package", "rewards": {"right": "mistaken"}}
    with open_world(tmp_path_factory.mktemp("run"), "0.4.0", **options) as made:
        yield made


def test_description_names_components_and_rows_contain_the_system_prompt(world):
    environment = world.environment
    assert environment.reward_names == ("right", "short") and not environment.open_rewards
    assert environment.component_origins == {"short": "verifiers-package"}
    system, user = world.rows["good"]["prompt"]
    assert system == {"role": "system", "content": "Be brief."} and user["role"] == "user"
    with pytest.raises(ConfigError, match=r"^select.validation: 2 tasks are also in the split train"):
        environment.rows("validation", 2, 0)


def test_episodes_have_the_sampled_tokens_all_components_and_the_metrics(world):
    first = len(world.engines.requests)
    group = world.play("good")["good"]
    sampled = {completion_of(r, letters, 0).token_ids.tobytes(): r for r, _, _ in world.engines.requests[first:]}
    assert len(sampled) == 2
    for t in group:
        assert t.trains and t.turns == 1, t.detail
        request = sampled[t.completion_ids.tobytes()]
        assert np.array_equal(t.prompt.token_ids, request.prompt_ids)
        assert "Be brief." in t.prompt.text
        assert t.rewards == {"right": 0.5, "short": pytest.approx(1 / (1 + len(t.text)))}
        assert t.metrics == {"words": 1.0, "characters": float(len(t.text))}


MASKED = {
    "raises": "reward function mistaken raised ZeroDivisionError: division by zero",
    "list": "reward function mistaken returned '[1.0]' of type list, which is not a finite number",
    "text": "reward function mistaken returned '0.5' of type str, which is not a finite number",
    "infinite": "reward function mistaken returned 'inf' of type float, which is not a finite number",
    "own_loop": "reward function mistaken raised RuntimeError: asyncio.run() cannot be called from a running event",
}


def test_faulty_reward_function_masks_its_sample_with_name_and_reason(world):
    played = world.play("none", "nan", *MASKED)
    for mistake in ("none", "nan"):
        assert all(t.trains and t.rewards["right"] is None and t.rewards["short"] > 0 for t in played[mistake])
    for mistake, detail in MASKED.items():
        for t in played[mistake]:
            assert t.outcome is Outcome.ENV_FAILED and not t.rewards
            assert t.detail.startswith(f"verifier: verifiers-package: {detail}"), t.detail


def test_failed_model_call_masks_its_sample_and_a_full_context_truncates_it(world):
    service = world.runner.endpoint.service
    budgets = service.budgets
    sizes = {mistake: len(TALK.prompt(row["prompt"])[1]) for mistake, row in world.rows.items()}
    assert sizes["good"] < sizes["infinite"]
    try:
        service.budgets = replace(budgets, max_sequence=sizes["good"] + 2)
        played = world.play("good", "infinite")
    finally:
        service.budgets = budgets
    assert {t.outcome for t in played["good"]} <= {Outcome.OK, Outcome.TRUNCATED}
    assert all(t.rewards["right"] == 0.5 for t in played["good"])
    assert all(t.outcome is Outcome.ENV_FAILED for t in played["infinite"])
    environment = world.environment
    url = environment._url
    try:
        environment._url = f"{url}/missing"
        [one, _] = world.play("good")["good"]
    finally:
        environment._url = url
    assert one.outcome is Outcome.ENV_FAILED and "upstream 404" in one.detail, one.detail


def test_changed_task_stops_the_run(world):
    with pytest.raises(RunError, match="verifiers-package: ValueError: task 0 has changed since the run read it"):
        world.play("good", hash="0")


def test_worker_that_dies_or_hangs_masks_its_samples_and_is_replaced(world):
    process = world.environment._worker._process
    world.environment.close()
    assert process.returncode == 0  # it ends by itself when its pipe is closed
    world.environment._options.deadline_s = 1.0
    [one, _] = world.play("hangs")["hangs"]
    assert one.outcome is Outcome.ENV_FAILED and one.detail.endswith("the episode exceeded 1 s")
    [one, _] = world.play("dies")["dies"]
    assert one.outcome is Outcome.ENV_FAILED and "its process ended with status 3" in one.detail
    [one, _] = world.play("blocks")["blocks"]
    assert one.outcome is Outcome.ENV_FAILED
    assert "the event loop was blocked by block (verifiers_package.py:" in one.detail, one.detail
    [child] = re.findall(r"^child (\d+)$", world.log.read_text(), re.M)
    state = Path("/proc", child, "stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
