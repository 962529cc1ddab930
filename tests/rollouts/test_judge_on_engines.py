"""The LLM judge before a real language model in a real vLLM engine, which mostly writes nonsense."""

from __future__ import annotations

import pytest
from environment_samples import trajectory

from gdpo_nemo.data.records import Outcome
from gdpo_nemo.environments.tasks.reward_functions import Functions
from gdpo_nemo.generation.requests import Sampling
from gdpo_nemo.rollouts.endpoint.service import Budgets

pytestmark = pytest.mark.slow

ANSWERS = [f"Dear reader, the answer is {n}." for n in range(32)]


def verdicts(endpoint, **arguments):
    judge = {"function": "llm_judge", "base_url": f"{endpoint.url}/v1", "model": "policy", "question": "Is it polite?"}
    environment = Functions({"functions": {"polite": {**judge, **arguments}}})
    return environment.verify([trajectory(answer, prompt_id=f"p{i}") for i, answer in enumerate(ANSWERS)])


def test_model_output_is_a_score_or_a_typed_failure(resting_endpoint, monkeypatch):
    service = resting_endpoint.service
    wrote = []
    service.budgets = Budgets(1, 80, 2000)
    keep = service.history.keep
    monkeypatch.setattr(service.history, "keep", lambda session, turn: (wrote.append(turn), keep(session, turn)))
    with service.phase(Sampling(0.5, 1.0, -1, 24), 3):
        found = verdicts(resting_endpoint, temperature=0.5, max_tokens=24)
        refused = verdicts(resting_endpoint)  # at its usual temperature, which this server does not sample with
    texts = [service.conversation.text(turn.completion.token_ids) for turn in wrote]
    scored = [verdict for verdict in found if verdict.outcome is Outcome.OK]
    assert len(texts) == len(ANSWERS) and 0 < len(scored) == sum("SCORE: 7" in text for text in texts) < len(ANSWERS)
    assert all(verdict.rewards == {"polite": 0.7} for verdict in scored)
    for verdict in found:
        if verdict not in scored:
            assert (verdict.outcome, verdict.rewards) == (Outcome.ENV_FAILED, {})
            assert verdict.detail.startswith("polite: the judge's reply contains no score from 0 to 10: ")
    assert all(verdict.detail.startswith("polite: the judge answered with HTTP 400: ") for verdict in refused)
