"""Which algorithm a run trains with, whether it samples, and how it corrects stale samples: what has to be known before
any of its code may run."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import cache

from gdpo_nemo.algorithms.loss_settings import LossSettings
from gdpo_nemo.algorithms.own_functions import is_place, loss_entry
from gdpo_nemo.config.files import find_definition
from gdpo_nemo.config.schema import Config

PREFERENCES = {
    "dpo": "pairs",
    "cpo": "pairs",
    "simpo": "pairs",
    "orpo": "pairs",
    "kto": "single",
    "reward_model": "pairs",
}
"""Algorithms of the section `preference`, and what their rows are: pairs of answers, or single ones with a label."""
ROWS = {"sft": "sft", **PREFERENCES}
"""What a row is to each built-in algorithm that does not sample (``data.example_rows``)."""
DISTILLATION = "distillation"
"""Name of the algorithm that reads the section `teacher`."""
PPO = "ppo"
"""Name of the algorithm that reads the section `ppo`."""
ALGORITHMS = {
    "gdpo": "gdpo_nemo.algorithm:GDPO",
    PPO: "gdpo_nemo.ppo:PPO",
    DISTILLATION: "gdpo_nemo.distillation:OnPolicyDistillation",
    "sft": "gdpo_nemo.supervised:SupervisedFineTuning",
    **dict.fromkeys(PREFERENCES, "gdpo_nemo.supervised:PreferenceTuning"),
    "reward_model": "gdpo_nemo.supervised:RewardModelTraining",
}
"""Built-in algorithms by name: where their classes are."""


def rows_of(config: Config) -> str | None:
    """What a row is to the run's algorithm (see ``ROWS``); None where it reads prompts."""
    return ROWS.get(config.algorithm.type)


def has_score_head(config: Config) -> bool:
    """Whether the policy ends in one score of a sequence in place of its next token's distribution."""
    return config.algorithm.type == "reward_model"


def has_value_head(config: Config) -> bool:
    """Whether the policy has a second head, which says what the state before each token is worth."""
    return config.algorithm.type == PPO


def sequences_per_prompt(config: Config) -> int:
    """Sequences that a step makes of each of its prompts."""
    kind = rows_of(config)
    return config.gdpo.num_generations_per_prompt if kind is None else 2 if kind == "pairs" else 1


def samples(config: Config) -> bool:
    """Whether the run's algorithm samples: engines and environments are started for those that do."""
    return declares_sampling(config.algorithm.type)


def declares_sampling(name: str) -> bool:
    """Whether the algorithm of a name or place samples. Raises ConfigError: there is no such class."""
    if name in ALGORITHMS:
        return name not in ROWS
    return not name.rpartition(":")[0].endswith(".py") or _declared(name)


@cache
def _declared(place: str) -> bool:
    """The class attribute ``samples``, a literal, read without running the file; True where the class does not say."""
    for node in find_definition("algorithm.type", place).body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == "samples" for target in targets):
            return not (isinstance(node.value, ast.Constant) and node.value.value is False)
    return True


def engines(config: Config) -> int:
    """vLLM engines of the run."""
    return config.policy.generation.engines if samples(config) else 0


def old_logprobs_source(config: Config) -> str:
    """Return the source of the ratio's denominator: ``sampler`` or ``trainer``."""
    loss = config.loss_fn
    stale = config.rollout.max_staleness > 0 and loss_entry(loss.type).has_ratio
    return loss.old_logprobs or ("sampler" if stale else "trainer")


def trains_stale_samples_as_new(config: Config) -> bool:
    """Return whether nothing in the loss accounts for the age of the samples, unless ``loss_fn.off_policy`` does.

    A ratio that starts from the sampler's log-probs accounts for it, and so do the coefficients of target_po.
    """
    stale = samples(config) and config.rollout.max_staleness > 0 and old_logprobs_source(config) == "trainer"
    return stale and not loss_entry(config.loss_fn.type).by_group


def resolved_loss(config: Config) -> LossSettings:
    """Return ``loss_fn`` with the values that null stands for if samples may be stale; ``loss_fn`` itself if not.

    A custom loss may correct by itself, so null leaves it without a correction.
    """
    loss = config.loss_fn
    if not samples(config) or config.rollout.max_staleness == 0:
        return loss
    off_policy = loss.off_policy
    if off_policy.mode is None:
        corrects = trains_stale_samples_as_new(config) and not is_place(loss.type)
        off_policy = replace(off_policy, mode="truncate" if corrects else "none")
        if corrects and loss_entry(loss.type).by_sequence and off_policy.level == "token":
            off_policy = replace(off_policy, level="geometric")
    return replace(loss, old_logprobs=old_logprobs_source(config), off_policy=off_policy)
