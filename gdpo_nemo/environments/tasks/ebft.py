"""Energy-based fine-tuning (EBFT, arXiv 2603.12248): rewards from the hidden states of a frozen model.

The reward of the j-th of n answers to a prompt is 2 f(y_j) f(y) - 2 / (n - 1) * sum over k != j of f(y_j) f(y_k)
(equation 7). In this equation, y is the reference answer, and f(y) is a vector of hidden states from a few layers,
normalized to length 1. The two terms of the reward are separate components. The weights of these components in
``gdpo.rewards`` correspond to alignment_coef and diversity_coef.

The reference answer is a column of the row (structured mode), or the tokens after an anchor in a text (strided mode,
``data.<split>.strided``). The cross-entropy of the reference answer (ce_coef) and rollouts of later turns are not
implemented.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gdpo_nemo.data.end_tokens import turn_end
from gdpo_nemo.data.records import Prompt, Trajectory, Verdict
from gdpo_nemo.data.tokenizer import continued
from gdpo_nemo.environments.base import Environment, read_options
from gdpo_nemo.environments.tasks.answers import column
from gdpo_nemo.utils.errors import ConfigError, first_line

if TYPE_CHECKING:
    from gdpo_nemo.data.tokenizer import Tokenizer

POOLS = ("last_token", "mean_pooling", "completion_mean", "concat")
_SMALLEST_SINGULAR = 1e-5
"""Whitening drops directions whose singular value is smaller than this fraction of the largest one."""
_BATCH = 16
"""Maximum number of sequences in one forward pass."""


class Ebft(Environment):
    """Environment with the rewards of energy-based fine-tuning.

    The frozen model runs on the CPU, with a copy in each of the ``num_workers`` processes.

    Components:
        alignment: twice the cosine similarity between the features of the answer and of the reference answer.
        diversity: minus twice the mean dot product with the features of the group's other answers, or None for a group
            with one answer.

    Options, with the same names as in axolotl:
        model: Hugging Face folder of the frozen model, usually the run's initial model. A different model must have the
            same tokenizer.
        feature_layers ([0.25, 0.5, 0.75]): layers of the features, as fractions of the model's depth.
        embed_method (last_token): pooling of the hidden states: last_token, mean_pooling, completion_mean or concat.
        use_whitening (false): true to decorrelate the features over the answers of a group.
        gold_key (answer): column with the reference answer, which is not used in strided mode.
    """

    instant = True

    reward_names = ("alignment", "diversity")

    def __init__(self, options: Mapping[str, Any] | None = None):
        chosen = read_options(
            "ebft", options, model="", feature_layers=[0.25, 0.5, 0.75], embed_method="last_token",
            use_whitening=False, gold_key="answer",
        )  # fmt: skip
        if not chosen.model:
            raise ConfigError("environment ebft: option model must be the folder of the frozen model")
        if chosen.embed_method not in POOLS:
            raise ConfigError(
                f"environment ebft: embed_method must be one of {', '.join(POOLS)}, not {chosen.embed_method!r}"
            )
        if not chosen.feature_layers or not all(_is_depth(depth) for depth in chosen.feature_layers):
            raise ConfigError(
                f"environment ebft: feature_layers must be depths from 0 to 1, not {list(chosen.feature_layers)}"
            )
        self._folder = Path(chosen.model)
        self._depths = [float(depth) for depth in chosen.feature_layers]
        self._pool: str = chosen.embed_method
        self._whitens: bool = chosen.use_whitening
        self._gold_key: str = chosen.gold_key
        self._model: Any = None
        self._tokenizer: Tokenizer

    def preflight(self, prompts: Sequence[Prompt]) -> None:
        """Check that the model exists and every row has a reference answer. Raises ConfigError."""
        if not (self._folder / "config.json").is_file():
            raise ConfigError(f"model: {self._folder} is not the folder of a Hugging Face model")
        for prompt in prompts:
            if prompt.answer_ids is None and not isinstance(column(prompt, self._gold_key), str):
                raise ConfigError(f"gold_key: column {self._gold_key!r} of prompt {prompt.id} is not text")

    def prepare(self) -> None:
        """Load the model. Raises ConfigError."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)  # the policy and the engines use the other threads
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self._folder)
            # *.bin files are pickles, which may run code. transformers initializes missing weights randomly.
            model, found = AutoModelForCausalLM.from_pretrained(
                self._folder, dtype=torch.float32, use_safetensors=True, output_loading_info=True
            )
        except Exception as error:  # noqa: BLE001 - damaged files raise exceptions of many types
            raise ConfigError(f"environment ebft: model: cannot load {self._folder} ({first_line(error)})") from error
        if missing := sorted(found["missing_keys"]):
            raise ConfigError(
                f"environment ebft: model: {self._folder} lacks {len(missing)} of the model's tensors, for example "
                f"{missing[0]}; use a complete model"
            )
        self._ends = self._tokenizer.eos_token_id, turn_end(self._tokenizer)
        self._model = model.eval()

    def token_ids(self, text: str) -> np.ndarray:
        """Return the text's token ids in the vocabulary of the frozen model, which is that of the policy."""
        if self._model is None:
            self.prepare()
        return np.array(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return one verdict per trajectory. The samples of a prompt must be consecutive."""
        verdicts: list[Verdict] = []
        for _, members in groupby(trajectories, key=lambda t: t.prompt.id):
            verdicts += self._verdicts(list(members))
        return verdicts

    def _verdicts(self, group: Sequence[Trajectory]) -> list[Verdict]:
        if self._model is None:
            self.prepare()
        prompt = group[0].prompt
        answers = [self._without_end(t.completion_ids) for t in group]
        answers.append(self._without_end(self._gold(prompt)))
        features = self._features(prompt.token_ids, answers)
        alignment, diversity = feature_matching(features[:-1], features[-1], self._whitens)
        verdicts = []
        for index in range(len(group)):
            rewards: dict[str, float | None] = {"alignment": float(alignment[index]), "diversity": None}
            if diversity is not None:
                rewards["diversity"] = float(diversity[index])
            verdicts.append(Verdict(rewards))
        return verdicts

    def _gold(self, prompt: Prompt) -> np.ndarray:
        """Return the tokens of the reference answer."""
        if prompt.answer_ids is not None:
            return prompt.answer_ids
        return np.array(continued(self._tokenizer, prompt.text, column(prompt, self._gold_key)), np.int64)

    def _without_end(self, ids: np.ndarray) -> np.ndarray:
        """Return the tokens without a final end token, because reference answers rarely have an end token."""
        return ids[:-1] if len(ids) and ids[-1] in self._ends else ids

    def _features(self, prompt: np.ndarray, answers: Sequence[np.ndarray]) -> np.ndarray:
        """Return the features of the prompt followed by each answer. Shape: float64 [answers, features]."""
        import torch

        found = []
        for start in range(0, len(answers), _BATCH):
            batch = [np.concatenate([prompt, answer]).astype(np.int64) for answer in answers[start : start + _BATCH]]
            width = max(map(len, batch))
            ids = torch.zeros(len(batch), width, dtype=torch.int64)
            mask = torch.zeros(len(batch), width, dtype=torch.int64)
            for row, tokens in enumerate(batch):
                ids[row, : len(tokens)] = torch.from_numpy(tokens)
                mask[row, : len(tokens)] = 1
            with torch.no_grad():
                states = self._model.base_model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
            layers = [int(depth * self._model.config.num_hidden_layers) for depth in self._depths]
            hidden = torch.cat([states[layer] for layer in layers], -1).double().numpy()
            found += [
                pool_hidden_states(row[: len(tokens)], len(prompt), self._pool) for row, tokens in zip(hidden, batch)
            ]
        return np.stack(found)


def pool_hidden_states(hidden: np.ndarray, prompt_tokens: int, method: str) -> np.ndarray:
    """Pool hidden states to one vector.

    Args:
        hidden: hidden states of a prompt followed by its answer. Shape: [tokens, features].
        prompt_tokens: number of tokens of the prompt.
        method: one of ``POOLS``.
    """
    length = len(hidden)
    if method == "last_token":
        return np.asarray(hidden[-1])
    if method == "mean_pooling":
        return np.asarray(hidden.mean(0))
    if method == "completion_mean":
        answer = hidden[prompt_tokens:]
        return np.asarray(answer.mean(0)) if len(answer) else np.zeros(hidden.shape[1])
    return np.concatenate([hidden[length // 4], hidden[length // 2], hidden[3 * length // 4]])


def feature_matching(answers: np.ndarray, gold: np.ndarray, whiten: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the two terms of equation 7 for the answers to one prompt.

    Args:
        answers: features of the answers. Shape: float64 [answers, features], at least one answer.
        gold: features of the reference answer. Shape: float64 [features].
        whiten: True to decorrelate the features over the answers first. In this case, the diversity is computed from
            whitened features that are not normalized.

    Returns:
        (alignment, diversity). Shape: [answers] each. The diversity is None for a single answer.
    """
    whiten = whiten and len(answers) > 1
    if whiten:
        directions, singular, _ = np.linalg.svd(answers.T, full_matrices=False)
        large = singular > _SMALLEST_SINGULAR * singular.max()
        inverse = np.divide(1.0, singular, out=np.zeros_like(singular), where=large)
        matrix = (directions * inverse) @ directions.T
        answers, gold = answers @ matrix, gold @ matrix
    unit, unit_gold = _unit(answers), _unit(gold[None])[0]
    alignment = 2 * unit @ unit_gold
    if len(answers) == 1:
        return alignment, None
    compared = answers if whiten else unit
    products = compared @ compared.T
    return alignment, -2 * (products.sum(1) - np.diag(products)) / (len(answers) - 1)


def _unit(rows: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: np.ndarray = np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)
    return unit


def _is_depth(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1
