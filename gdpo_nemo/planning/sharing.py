"""What samples of a prompt save by computing it once (``policy.share_prompts``), for samples of expected lengths."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from gdpo_nemo.config.algorithm_choice import sequences_per_prompt
from gdpo_nemo.config.layout import resolve_layout, samples_per_update
from gdpo_nemo.config.prompt_sharing import prompt_sharing
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.prefixes import LEAST_GAIN, LEAST_SHARE


@dataclass(frozen=True)
class Saving:
    """Shares of what training without sharing takes."""

    tokens: float = 1.0
    """Computed tokens: matrix products, activations."""
    pairs: float = 1.0
    """Pairs of tokens that attention multiplies."""


NOTHING = Saving()


def expected_saving(config: Config, prompt: float, completion: float) -> Saving:
    """What is computed of a step whose samples have prompts and completions of these lengths, as the driver lays them
    out: a piece of a group takes one prompt and what fits of its completions into ``micro_batch_tokens``."""
    sharing = prompt_sharing(config)
    whole = prompt + completion
    samples = sequences_per_prompt(config)
    if sharing is False or samples == 1 or prompt < LEAST_SHARE * whole:
        return NOTHING
    room = config.policy.micro_batch_tokens - prompt
    # Completions of no length, which a given median may round to, all fit.
    together = samples if room >= samples * completion else max(1, int(room // completion))
    groups = max(1.0, samples_per_update(config) / samples)
    # Ranks that would have no group get a part of one.
    pieces = min(samples, max(ceil(samples / together), ceil(resolve_layout(config).data / groups)))
    again = 1 - pieces / samples
    found = Saving(1 - again * prompt / whole, 1 - again * (prompt / whole) ** 2)
    return NOTHING if sharing is None and found.tokens > 1 - LEAST_GAIN else found
