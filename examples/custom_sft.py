"""An algorithm of one's own, one that samples nothing: supervised fine-tuning on answers that the data holds.

    uv run examples/run_gdpo.py --config examples/custom_sft.yaml

The loop, the Megatron policy, checkpoints, resuming, metrics and the export are those of every run; no engine is
started. An algorithm says what a batch becomes (``prepare``), the sequences of each optimizer update (``updates``), and
which loss the ranks compute. Preference training is built in the same way: make the sequences of a pair in ``prepare``,
ask ``self.policy.logprobs`` for theirs (``reference=True``: under the starting weights), and put the derivative of the
objective by each sequence's log-prob into ``advantage`` before the update is yielded; see ``GDPO`` in
gdpo_nemo/algorithm.py, which does that for TargetPO.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gdpo_nemo.algorithm import Algorithm
from gdpo_nemo.algorithms import token_weights
from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.errors import ConfigError, RunError


class SupervisedFineTuning(Algorithm):
    """Cross-entropy of a column of the data. Option: ``target_key`` (answer), the column."""

    samples = False

    def __init__(self, config, policy, tokenizer, log):
        super().__init__(config, policy, tokenizer, log)
        self.loss = replace(self.loss, type="reinforce")  # with advantages of 1: -log p
        self.target_key = config.algorithm.options.get("target_key", "answer")

    @classmethod
    def check(cls, config):
        if config.gdpo.num_generations_per_prompt != 1:
            raise ConfigError("gdpo.num_generations_per_prompt: must be 1, a row has one answer")
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
