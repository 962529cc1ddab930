"""A few sequences that show whether an engine holds the policy's weights, or whether the two only round differently.

Policy and engine compute with different kernels, so their log-probs differ slightly even with equal weights: by some
1e-6 in float32, by a few 1e-2 in bfloat16, whose spacing between 16 and 32 is an eighth. How much depends on the model
and the machine, so it is measured: at the start both have loaded the model's folder, each with its own loader, and
nothing was published. The same tokens are compared after every publication, and a difference several times that large
is not rounding.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np

from gdpo_nemo.cluster.fleet import EngineFleet
from gdpo_nemo.cluster.policy_group import PolicyGroup
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.errors import NumericsFailed, RunError
from gdpo_nemo.generation.requests import SampleRequest, Sampling

PROMPTS = 4
_LONGEST_PROMPT = 128
_SAMPLED = 16
_DRAWN = 8
"""Tokens of a probe: the end of a prompt, the model's continuation, and uniform draws from the vocabulary."""
_CAP = 1.0
"""Largest difference in nats that one token may contribute: a router that picks another expert on a near tie makes an
outlier, not another model."""
MARGIN = 4.0
"""Times the difference at the start: rounding varies with the weights, so the next difference may exceed the first."""
LEAST = {"float32": 1e-4, "bfloat16": 1e-2}
"""The smallest limit: ``MARGIN`` times a floor near 0 would be a few units of the last place."""
MOST = {"float32": 1e-2, "bfloat16": 2.5e-1}
"""The largest difference accepted at the start: swapping two middle layers of a 135 M model makes 0.4 to 0.6."""


class Probe:
    """Sequences and the limit of their mean difference.

    Args:
        sequences: what trainer and engines score.
        limit: largest mean difference allowed; None until ``calibrate`` has measured one.
    """

    def __init__(self, sequences: Sequence[TrainSequence], limit: float | None = None):
        self.sequences = list(sequences)
        self.limit = limit
        self.floor: float | None = None
        """The mean difference at the start, once it is measured."""
        self._loaded: dict[int, np.ndarray] = {}

    @classmethod
    def sampled(cls, fleet: EngineFleet, prompts: Sequence[np.ndarray], vocabulary: int, longest: int) -> Probe:
        """Make a probe from prompts (int32 [tokens] each), continued by the engines, and record the engines' log-probs.

        Training sees the model's own continuations, but their probabilities approach 1 and they cover little of the
        vocabulary; so tokens drawn uniformly from all of it follow.

        Args:
            longest: tokens that fit into the engines' context.
        """
        room = longest - 1  # vLLM samples one token more when it scores a prompt
        cut = [prompt[-min(_LONGEST_PROMPT, max(1, room // 2)) :] for prompt in prompts]
        sampling = Sampling(1.0, 1.0, -1, max(1, min(_SAMPLED, room // 3)))
        requests = [SampleRequest(prompt, seed) for seed, prompt in enumerate(cut)]
        continued = [c.token_ids for c in fleet.generate(requests, sampling, engine=0).completions]
        rng = np.random.default_rng(0)
        sequences = []
        for prompt, written in zip(cut, continued):
            drawn = rng.integers(0, vocabulary, min(_DRAWN, room - len(prompt) - len(written))).astype(np.int32)
            completion = np.concatenate([written, drawn])
            sequences.append(TrainSequence(prompt, completion, np.zeros(len(completion), np.float32)))
        probe = cls(sequences)
        probe._loaded = probe.by_engines(fleet)
        return probe

    def by_engines(self, fleet: EngineFleet) -> dict[int, np.ndarray]:
        """By the number of each engine float32 [tokens]: log-probs of all completions."""
        asked = [np.concatenate([s.prompt_ids, s.completion_ids]) for s in self.sequences]
        return {
            engine: np.concatenate([values[-len(s.completion_ids) :] for s, values in zip(self.sequences, scores)])
            for engine, scores in fleet.score(asked).items()
        }

    def by_policy(self, policy: PolicyGroup) -> np.ndarray:
        """float32 [tokens]: log-probs of all completions, at temperature 1, at which the engines score."""
        return np.concatenate(policy.logprobs(self.sequences, temperature=1.0))

    def calibrate(self, policy: PolicyGroup, config: Config) -> None:
        """Measure how far policy and engines differ on the model that both have loaded, and set the limit.

        Raises:
            RunError: too far for the same model computed alike.
        """
        precision = config.policy.precision
        given = config.policy.generation.parity_limit
        mine = self.by_policy(policy)
        self.floor = max(difference(mine, theirs) for theirs in self._loaded.values())
        most = MOST[precision] if given is None else given
        if not self.floor <= most:
            raise NumericsFailed(
                "policy and engines disagree on the model as both loaded it: their log-probs differ by "
                f"{self.floor:.3g} on average, {most:g} is allowed in {precision}; `gdpo-nemo parity --engine` shows "
                "where (policy.generation.parity_limit)"
            )
        self.limit = max(LEAST[precision], MARGIN * self.floor) if given is None else given

    def verify(self, policy: PolicyGroup, fleet: EngineFleet, version: int) -> float:
        """Return the mean difference of the engine farthest from the policy.

        Raises:
            RunError: it is above the limit, or no limit is known yet.
        """
        if self.limit is None:
            raise RunError("the probe has no limit yet; calibrate it on the model that both loaded")
        mine = self.by_policy(policy)
        worst = 0.0
        for index, theirs in self.by_engines(fleet).items():
            found = difference(mine, theirs)
            if not found <= self.limit:  # NaN fails, too
                raise NumericsFailed(
                    f"engine {index} does not hold the weights of version {version}: {self._sentence(found)}"
                )
            worst = max(worst, found)
        return worst

    def _sentence(self, found: float) -> str:
        at_start = "" if self.floor is None else f"; {self.floor:.3g} at the start"
        return (
            f"its log-probs differ by {found:.3g} from the trainer's on average (limit {self.limit:.3g}{at_start}; "
            "policy.generation.parity_limit)"
        )


def difference(mine: np.ndarray, theirs: np.ndarray) -> float:
    """Mean difference of log-probs [tokens], no token counting more than ``_CAP``; NaN where one is NaN."""
    return float(np.minimum(np.abs(mine.astype(np.float64) - theirs), _CAP).mean())
