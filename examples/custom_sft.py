"""Custom algorithm without sampling: supervised fine-tuning on answers in the data.

    uv run examples/run_gdpo.py --config examples/custom_sft.yaml

The training loop, the Megatron policy, checkpoints, resuming, metrics and the export are the same as in other runs, but
no engine is started. An algorithm defines how a batch is prepared (``prepare``), the sequences of each optimizer update
(``updates``), and the loss.

Preference training can be implemented in the same way. Create the sequences of a pair in ``prepare``, and compute their
log-probs with ``self.policy.logprobs`` (``reference=True`` for the initial weights). Set each sequence's ``advantage``
to the derivative of the objective with respect to its log-prob, then yield the update. See ``GDPO`` in
gdpo_nemo/training/algorithm.py, which does this for TargetPO.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gdpo_nemo import Algorithm, ConfigError, LossSettings, RunError, TrainSequence, token_weights


class SupervisedFineTuning(Algorithm):
    """Cross-entropy loss on a column of the data. Option: ``target_key``, the name of the column (default: answer)."""

    samples = False
    loss: LossSettings

    def __init__(self, config, policy, tokenizer, log):
        super().__init__(config, policy, tokenizer, log)
        self.loss = replace(self.loss, type="reinforce")  # with advantages of 1 the loss is -log p
        self.target_key = config.algorithm.options.get("target_key", "answer")

    @classmethod
    def check(cls, config):
        if config.gdpo.num_generations_per_prompt != 1:
            raise ConfigError("gdpo.num_generations_per_prompt: must be 1, because a row has one answer")
        if unknown := sorted(set(config.algorithm.options) - {"target_key"}):
            raise ConfigError(f"algorithm.options: unknown option {unknown[0]!r}; known: target_key")

    def prepare(self, batch):
        sequences = [self._sequence(prompt) for prompt in batch.prompts]
        size = self.config.policy.train_global_batch_size or len(sequences)
        return [sequences[start : start + size] for start in range(0, len(sequences), size)]

    def updates(self, prepared):
        for update in prepared:
            weights = token_weights([len(s.completion_ids) for s in update], self.loss.aggregation, constant_length=1)
            for sequence, weight in zip(update, weights):
                sequence.weight = float(weight)
            yield update

    def validate(self, evaluated):
        sequences = [self._sequence(prompt) for prompt in evaluated]
        return {"validation/loss": -float(np.concatenate(self.policy.logprobs(sequences)).mean())}

    def _sequence(self, prompt) -> TrainSequence:
        if self.target_key not in prompt.fields:
            raise RunError(f"algorithm.options.target_key: row {prompt.id} has no column {self.target_key!r}")
        answer = self.tokenizer(str(prompt.fields[self.target_key]), add_special_tokens=False)["input_ids"]
        room = self.config.policy.max_total_sequence_length - len(prompt.token_ids)
        ids = np.array([*answer, self.tokenizer.eos_token_id][:room], np.int32)
        return TrainSequence(prompt.token_ids, ids, np.full(len(ids), np.nan, np.float32), advantage=1.0)
