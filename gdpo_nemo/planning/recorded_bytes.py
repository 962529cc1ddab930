"""What a run's samples take on the disk (``rollout.save_samples`` and the keys beside it)."""

from __future__ import annotations

from gdpo_nemo.config.algorithm_choice import samples, sequences_per_prompt
from gdpo_nemo.config.schema import Config

_PER_FILE = 7000.0
"""Bytes of a file of no tokens: names and statistics of its columns."""
_PER_SAMPLE = 20.0
_PER_TOKEN = 7.0
"""Of a token of a completion: its id, its text and the sampler's log-prob, compressed. 5.5 in the demo, whose
vocabulary is small."""
_PER_FLOAT = 3.6
"""Of each further number of a token: the trainer's log-prob, the entropy."""


def groups_saved(config: Config) -> int:
    """Groups of a step whose samples are written."""
    if not (samples(config) and config.rollout.save_samples):
        return 0
    groups = config.gdpo.num_prompts_per_step
    return groups if config.rollout.save_groups is None else min(groups, config.rollout.save_groups)


def recorded_bytes(config: Config, tokens: float) -> float:
    """Bytes of the samples of one step whose completions have ``tokens`` tokens on average."""
    rollout = config.rollout
    further = (rollout.save_trainer_logprobs or rollout.save_entropies) + rollout.save_entropies
    count = groups_saved(config) * sequences_per_prompt(config)
    return _PER_FILE + count * (_PER_SAMPLE + tokens * (_PER_TOKEN + further * _PER_FLOAT)) if count else 0.0
