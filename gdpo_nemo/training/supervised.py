"""Algorithms that train on answers in the data: supervised fine-tuning, and preference tuning.

These algorithms do not sample, so neither engines nor environments are started. Training loop, policy, checkpoints,
resuming and export are the same as for all algorithms. The preference objectives are in
``algorithms/preference_objectives.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from gdpo_nemo.algorithms import LossSettings, token_weights
from gdpo_nemo.algorithms.losses import TOKEN_INPUTS
from gdpo_nemo.algorithms.preference_objectives import PREFERENCES, PreferenceSettings, PreferenceUpdate
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.images import Images, moved
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.data.records import Prompt, UpdateResult
from gdpo_nemo.rollouts.metrics import update_metrics
from gdpo_nemo.training.algorithm import Algorithm

if TYPE_CHECKING:
    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.data.tokenizer import Tokenizer
    from gdpo_nemo.observe.log import RunLog
    from gdpo_nemo.rollouts.batches import PromptBatch

METRICS = {
    "train/tokens": ("tokens", "Trained tokens of the step's answers, without prompts and masked tokens"),
    "validation/loss": ("nats", "Training objective on the held-out rows (for sft, the cross-entropy per token)"),
    "preference/loss": ("", "Preference loss without the rpo_alpha term, mean over pairs (kto: over answers)"),
    "preference/kl": ("nats", "KTO's estimate of the KL to the initial model, from answers to other prompts"),
    "rewards/chosen": ("", "Implicit reward of the chosen (desirable) answers: beta times their score, as TRL logs it"),
    "rewards/rejected": ("", "Implicit reward of the rejected (undesirable) answers"),
    "rewards/margins": ("", "rewards/chosen minus rewards/rejected, mean over pairs"),
    "rewards/accuracies": ("share", "Pairs whose chosen answer has the larger implicit reward", {"label": "accuracy"}),
    "logps/chosen": ("nats", "Mean log-prob of a chosen answer, summed over its tokens"),
    "logps/rejected": ("nats", "Mean log-prob of a rejected answer, summed over its tokens"),
    "rewards/mean": ("", "Mean score of all answers by the reward model"),
    "validation/margins": ("", "rewards/margins on the held-out pairs"),
    "validation/accuracies": ("share", "rewards/accuracies on the held-out pairs"),
}


class SupervisedFineTuning(Algorithm["PromptBatch", list[list[TrainSequence]]]):
    """Supervised fine-tuning: cross-entropy of the answers in the data (``algorithm.type: sft``)."""

    samples = False
    loss: LossSettings

    def __init__(self, config: Config, policy: PolicyGroup, tokenizer: Tokenizer, log: RunLog):
        super().__init__(config, policy, tokenizer, log)
        # -A log p with A = 1. reinforce is the only loss that needs no other log-probs.
        self.loss = LossSettings(type="reinforce", aggregation=config.loss_fn.aggregation)

    def prepare(self, batch: PromptBatch) -> list[list[TrainSequence]]:
        """Return the sequences of each update."""
        return _updates(sequences_of(batch.prompts), self.config)

    def updates(self, prepared: list[list[TrainSequence]]) -> Iterator[list[TrainSequence]]:
        """Yield the sequences of each update, weighted so that their loss is the mean selected by
        ``loss_fn.aggregation``."""
        for update in prepared:
            lengths = [s.num_policy_tokens for s in update]
            weights = token_weights(lengths, self.loss.aggregation)
            for sequence, weight in zip(update, weights.tolist()):
                sequence.advantage = 1.0
                sequence.weight = weight
            yield update

    def metrics(
        self, prepared: list[list[TrainSequence]], results: Sequence[UpdateResult], version: int
    ) -> dict[str, float]:
        """Return the metrics of loss, gradient norm, entropy and packing."""
        tokens = sum(map(self.count_tokens, prepared))
        return {**_update_metrics(results), "train/tokens": float(tokens)}

    def validate(self, evaluated: Sequence[Prompt]) -> dict[str, float]:
        """Return the mean cross-entropy per trained token on the held-out rows."""
        sequences = sequences_of(evaluated)
        values = [s.where_written(found) for s, found in zip(sequences, self.policy.logprobs(sequences))]
        return {"validation/loss": -float(np.concatenate(values).astype(np.float64).mean())}


@dataclass
class PreparedPairs:
    """Sequences of each update, and with KTO the KL estimate of each update."""

    updates: list[list[TrainSequence]]
    kl: list[float]


class PreferenceTuning(Algorithm["PromptBatch", PreparedPairs]):
    """Training on preferences between answers in the data (all objectives of ``PREFERENCES`` but reward_model)."""

    samples = False

    def __init__(self, config: Config, policy: PolicyGroup, tokenizer: Tokenizer, log: RunLog):
        super().__init__(config, policy, tokenizer, log)
        self.kind = config.algorithm.type
        self.settings: PreferenceSettings = config.preference
        self._estimates_kl = PREFERENCES[self.kind].estimates_kl
        self._reference = self.settings.needs_reference(self.kind)

    @classmethod
    def needs_reference(cls, config: Config) -> bool:
        """Return True if the objective compares log-probs with those of the initial model."""
        return config.preference.needs_reference(config.algorithm.type)

    def prepare(self, batch: PromptBatch) -> PreparedPairs:
        """Return the sequences of each update, with log-probs of the initial model if the objective needs them."""
        updates = _updates(_numbered(batch.prompts), self.config)
        for update in updates if self._reference else ():
            self._set_reference_logprobs(update)
        return PreparedPairs(updates, [0.0] * len(updates))

    def updates(self, prepared: PreparedPairs) -> Iterator[list[TrainSequence]]:
        """Yield the sequences of each update, and set ``loss`` to the settings that the ranks receive with it."""
        for number, update in enumerate(prepared.updates):
            if self._estimates_kl:
                prepared.kl[number] = self._kl(update)
            self.loss = self._update_settings(update, prepared.kl[number])
            yield update

    def metrics(self, prepared: PreparedPairs, results: Sequence[UpdateResult], version: int) -> dict[str, float]:
        """Return the metrics of loss, implicit rewards, log-probs of the answers, gradient norm and packing."""
        sums: dict[str, float] = {}
        for result in results:
            for name, value in result.sums.items():
                sums[name] = sums.get(name, 0.0) + value
        common = []
        for result in results:
            shared = {name: value for name, value in result.sums.items() if name in ("tokens", "entropy")}
            common.append(replace(result, sums=shared, maxima={}))
        row = {**_update_metrics(common), **preference_metrics(sums), "train/tokens": sums["tokens"]}
        if self._estimates_kl:
            row["preference/kl"] = float(np.mean(prepared.kl))
        return row

    def validate(self, evaluated: Sequence[Prompt]) -> dict[str, float]:
        """Return loss, margin and accuracy on the held-out rows, with the current weights."""
        import torch

        from gdpo_nemo.algorithms.preference_losses import preference_loss

        sequences = self._held_out(evaluated)
        now = self.policy.logprobs(sequences)
        if self._reference:
            self._set_reference_logprobs(sequences)
        settings = self._update_settings(sequences, self._kl(sequences) if self._estimates_kl else 0.0)
        values = np.concatenate([s.where_written(found) for s, found in zip(sequences, now)])
        loss, metrics = preference_loss(torch.from_numpy(values), None, _fields(sequences), settings)
        found = preference_metrics({name: float(value) for name, value in metrics.sums.items()})
        row = {"validation/loss": float(loss)}
        if "rewards/margins" in found:
            row["validation/margins"] = found["rewards/margins"]
            row["validation/accuracies"] = found["rewards/accuracies"]
        return row

    def _held_out(self, evaluated: Sequence[Prompt]) -> list[TrainSequence]:
        return _numbered(evaluated)

    def _update_settings(self, update: Sequence[TrainSequence], kl: float) -> PreferenceUpdate:
        chosen = sum(s.num_policy_tokens for s in update if s.pair > 0)
        return PreferenceUpdate(self.kind, self.settings, len({abs(s.pair) for s in update}), chosen, kl)

    def _kl(self, update: Sequence[TrainSequence]) -> float:
        """Return KTO's KL estimate of an update: the mean log-ratio of answers to other prompts, at least 0.

        This estimate is the same as in TRL, but is computed over the whole update.
        """
        limit = self.config.policy.max_total_sequence_length
        mismatched = [s for s in _mismatched(update) if len(s) <= limit]
        if not mismatched:
            return 0.0
        now = self.policy.logprobs(mismatched)
        reference = self.policy.logprobs(mismatched, reference=True)
        gaps = []
        for s, a, b in zip(mismatched, now, reference, strict=True):
            gaps.append(float((s.where_written(a) - s.where_written(b)).sum(dtype=np.float64)))
        return max(float(np.mean(gaps)), 0.0)


class RewardModelTraining(PreferenceTuning):
    """Training of a reward model on pairs of answers (``algorithm.type: reward_model``).

    The policy has a linear head that outputs the score of a sequence at its last token. One token is appended to each
    sequence, and the score is passed on as this token's "log-prob". No token of the sequence attends to the appended
    token.
    """

    def prepare(self, batch: PromptBatch) -> PreparedPairs:
        """Return the sequences of each update."""
        updates = _updates(_scored(_numbered(batch.prompts)), self.config)
        return PreparedPairs(updates, [0.0] * len(updates))

    def count_tokens(self, update: Sequence[TrainSequence]) -> int:
        """Return the number of tokens in the answers, without the appended tokens."""
        return sum(len(sequence.completion_ids) - 1 for sequence in update)

    def metrics(self, prepared: PreparedPairs, results: Sequence[UpdateResult], version: int) -> dict[str, float]:
        """Return the metrics of loss, rewards, gradient norm and packing."""
        row = super().metrics(prepared, results, version)
        row["rewards/mean"] = (row["rewards/chosen"] + row["rewards/rejected"]) / 2
        row["train/tokens"] = float(sum(map(self.count_tokens, prepared.updates)))
        return {name: value for name, value in row.items() if not name.startswith("logps/")}

    def _held_out(self, evaluated: Sequence[Prompt]) -> list[TrainSequence]:
        return _scored(_numbered(evaluated))


def _mismatched(update: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Combine each prompt of an update with the answer to another prompt. Each answer is used at most once.

    Rows are sorted by prompt, and the answers are shifted by the number of rows of the most frequent prompt. If no
    prompt is repeated, this is TRL's shift by one row. Rows that still get an answer to their own prompt are left out.
    This happens only if one prompt has more than half of the rows.
    """
    by_prompt: dict[tuple[bytes, Images], list[TrainSequence]] = {}
    for sequence in update:
        by_prompt.setdefault(_prompt_of(sequence), []).append(sequence)
    rows = list(chain.from_iterable(by_prompt.values()))
    largest = max(map(len, by_prompt.values()))
    answers = rows[-largest:] + rows[:-largest]
    found = []
    for s, other in zip(rows, answers, strict=True):
        if _prompt_of(s) != _prompt_of(other):
            prompt, answered = len(s.prompt_ids), len(other.prompt_ids)
            in_answer = tuple(placed for placed in other.images if placed.start >= answered)
            images = _prompt_of(s)[1] + moved(in_answer, prompt - answered)
            pair = TrainSequence(s.prompt_ids, other.completion_ids, other.sampler_logprobs, loss_mask=other.loss_mask)
            found.append(replace(pair, images=images))
    return found


def _prompt_of(sequence: TrainSequence) -> tuple[bytes, Images]:
    """Return the tokens and the images of a sequence's prompt, which are equal only for equal prompts."""
    images = tuple(placed for placed in sequence.images if placed.start < len(sequence.prompt_ids))
    return sequence.prompt_ids.tobytes(), images


def _scored(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Return copies of the sequences with one appended token, which holds the score of the sequence."""
    found = []
    for sequence in sequences:
        count = len(sequence.completion_ids) + 1
        ids = np.append(sequence.completion_ids, np.int32(0))
        unknown = np.full(count, np.nan, np.float32)
        is_last = np.arange(count) == count - 1
        found.append(replace(sequence, completion_ids=ids, sampler_logprobs=unknown, loss_mask=is_last))
    return found


def sequences_of(prompts: Sequence[Prompt]) -> list[TrainSequence]:
    """Return the answers of all prompts as sequences. Every trained token has weight 1."""
    found = []
    for prompt in prompts:
        for answer in prompt.fields["answers"]:
            unknown = np.full(len(answer.token_ids), np.nan, np.float32)
            sequence = TrainSequence(prompt.token_ids, answer.token_ids, unknown, weight=1.0, loss_mask=answer.mask)
            sequence.images = prompt.images + moved(answer.images, len(prompt.token_ids))
            found.append(sequence)
    return found


def _numbered(prompts: Sequence[Prompt]) -> list[TrainSequence]:
    """Return the answers of all prompts as sequences. The pair number is the number of the prompt, from 1, and negative
    for rejected answers."""
    found = []
    for number, prompt in enumerate(prompts, start=1):
        for sequence, answer in zip(sequences_of([prompt]), prompt.fields["answers"]):
            sequence.pair = answer.sign * number
            found.append(sequence)
    return found


def _updates(sequences: list[TrainSequence], config: Config) -> list[list[TrainSequence]]:
    size = config.policy.train_global_batch_size or len(sequences)
    return [sequences[start : start + size] for start in range(0, len(sequences), size)]


def _update_metrics(results: Sequence[UpdateResult]) -> dict[str, float]:
    """Return ``update_metrics`` without importance ratios, because the data has no sampler log-probs."""
    row = update_metrics(results, on_policy=False)
    return {name: value for name, value in row.items() if name not in ("policy/ratio_mean", "policy/ratio_max")}


def preference_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Return means from the sums that ``preference_loss`` has measured. Metrics of answer types that do not occur are
    left out."""
    chosen = sums["chosen"]
    rejected = sums["rejected"]
    row = {}
    for name, count in (("chosen", chosen), ("rejected", rejected)):
        if count > 0.5:
            row[f"rewards/{name}"] = sums[f"rewards_{name}"] / count
            row[f"logps/{name}"] = sums[f"logps_{name}"] / count
    pairs = sums["pairs"]
    if pairs > 0.5:
        row["rewards/margins"] = sums["rewards_margins"] / pairs
        row["rewards/accuracies"] = sums["rewards_accuracies"] / pairs
    row["preference/loss"] = sums["preference_loss"] / (chosen + rejected - pairs)
    return row


def _fields(sequences: Sequence[TrainSequence]) -> Any:
    """Return ``TokenFields`` for whole sequences, in the driver."""
    import torch

    from gdpo_nemo.algorithms import TokenFields

    inputs: dict[str, Any] = {}
    for name in TOKEN_INPUTS:
        if sequences and getattr(sequences[0], name) is not None:
            parts = [s.where_written(getattr(s, name)) for s in sequences]
            inputs[name] = torch.from_numpy(np.concatenate(parts))
    ids = torch.repeat_interleave(torch.arange(len(sequences)), torch.tensor([s.num_policy_tokens for s in sequences]))
    ones = torch.ones(len(ids))
    pairs = torch.tensor([s.pair for s in sequences])[ids]
    return TokenFields(ones, ones, ids, len(sequences), pairs=pairs, **inputs)
