"""Energy-based fine-tuning (arXiv 2603.12248): answers are judged by how a frozen model represents them.

The reward of the j-th of n answers to a prompt is 2 f(y_j) f(y) - 2 / (n - 1) * sum over the others of f(y_j) f(y_k)
(equation 7), with y the answer of the data and f the hidden states of a few layers, of length 1. Its two terms are two
components here, so that an estimator sees them by name; ``gdpo.rewards`` holds alignment_coef and diversity_coef.

The data's answer is a column of the row (structured mode), or the tokens behind the anchor of a text (strided mode,
``data.<split>.strided``). Left out: the cross-entropy of the data's answer (ce_coef), and rollouts of the turns that
follow.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any, Mapping, Sequence

import numpy as np

from gdpo_nemo.config.messages import first_line
from gdpo_nemo.data.records import Prompt, Trajectory, Verdict
from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.options import read_options
from gdpo_nemo.environments.tasks.answers import column
from gdpo_nemo.errors import ConfigError

POOLS = ("last_token", "mean_pooling", "completion_mean", "concat")
_SMALLEST_SINGULAR = 1e-5
"""Of the largest singular value: directions below it are dropped by the whitening."""
_BATCH = 16
"""Sequences in one forward pass."""


class Ebft(Environment):
    """The environment.

    Components: ``alignment``, twice the cosine between the features of the answer and of the data's, and ``diversity``,
    minus twice the mean dot product with those of the group's other answers (null for an answer that has no others).

    Options, as axolotl calls them: ``model`` (Hugging Face folder of the frozen model: the one that the run starts
    from, or another of its tokenizer), ``feature_layers`` ([0.25, 0.5, 0.75], depths), ``embed_method`` (last_token,
    mean_pooling, completion_mean or concat), ``use_whitening`` (false); and ``gold_key`` (column with the data's
    answer, where rows are no texts with anchors). The model runs on the CPU, in each of ``num_workers`` processes.
    """

    instant = True

    reward_names = ("alignment", "diversity")

    def __init__(self, options: Mapping[str, Any] | None = None):
        chosen = read_options(
            "ebft", options, model="", feature_layers=[0.25, 0.5, 0.75], embed_method="last_token",
            use_whitening=False, gold_key="answer",
        )  # fmt: skip
        if not chosen.model:
            raise ConfigError("environment ebft: option model must name the folder of the frozen model")
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
        self._tokenizer: Any = None

    def preflight(self, prompts: Sequence[Prompt]) -> None:
        """The model is there, and every row has an answer. Raises ConfigError."""
        if not (self._folder / "config.json").is_file():
            raise ConfigError(f"model: {self._folder} is no folder of a Hugging Face model")
        for prompt in prompts:
            if prompt.answer_ids is None and not isinstance(column(prompt, self._gold_key), str):
                raise ConfigError(f"gold_key: the column {self._gold_key!r} of prompt {prompt.id} is no text")

    def prepare(self) -> None:
        """Load the model. Raises ConfigError."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)  # the policy and the engines have the others
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self._folder)
            # A *.bin is a pickle, which may run code; weights that a folder lacks would be drawn at random.
            model, found = AutoModelForCausalLM.from_pretrained(
                self._folder, dtype=torch.float32, use_safetensors=True, output_loading_info=True
            )
        except Exception as error:  # noqa: BLE001 - damaged files raise many kinds
            raise ConfigError(f"environment ebft: model: cannot load {self._folder} ({first_line(error)})") from error
        if missing := sorted(found["missing_keys"]):
            raise ConfigError(
                f"environment ebft: model: {self._folder} lacks {len(missing)} of the model's tensors, "
                f"{missing[0]} first; use a complete model"
            )
        self._model = model.eval()

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """One verdict per trajectory; the samples of a prompt stand together."""
        groups = [list(members) for _, members in groupby(trajectories, key=lambda t: t.prompt.id)]
        return [verdict for group in groups for verdict in self._judged(group)]

    def _judged(self, group: Sequence[Trajectory]) -> list[Verdict]:
        if self._model is None:
            self.prepare()
        prompt = group[0].prompt
        answers = [self._spoken(ids) for ids in (*(t.completion_ids for t in group), self._gold(prompt))]
        features = self._features(prompt.token_ids, answers)
        alignment, diversity = feature_matching(features[:-1], features[-1], self._whitens)
        return [
            Verdict({"alignment": float(a), "diversity": None if diversity is None else float(diversity[place])})
            for place, a in enumerate(alignment)
        ]

    def _gold(self, prompt: Prompt) -> np.ndarray:
        """The tokens of the data's answer: those of an anchor's text as they were cut, else the column's."""
        if prompt.answer_ids is not None:
            return prompt.answer_ids
        return np.array(
            self._tokenizer(column(prompt, self._gold_key), add_special_tokens=False)["input_ids"], np.int64
        )

    def _spoken(self, ids: np.ndarray) -> np.ndarray:
        """The tokens without the end of the text, which the data's answer seldom has."""
        return ids[:-1] if len(ids) and ids[-1] == self._tokenizer.eos_token_id else ids

    def _features(self, prompt: np.ndarray, answers: Sequence[np.ndarray]) -> np.ndarray:
        """float64 [answers, features] of the prompt with each answer."""
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
            found += [pooled(row[: len(tokens)], len(prompt), self._pool) for row, tokens in zip(hidden, batch)]
        return np.stack(found)


def pooled(hidden: np.ndarray, prompt_tokens: int, how: str) -> np.ndarray:
    """One vector of the hidden states [tokens, features] of a prompt with its answer; ``how`` is one of ``POOLS``."""
    length = len(hidden)
    if how == "last_token":
        return hidden[-1]
    if how == "mean_pooling":
        return np.asarray(hidden.mean(0))
    if how == "completion_mean":
        answer = hidden[prompt_tokens:]
        return np.asarray(answer.mean(0)) if len(answer) else np.zeros(hidden.shape[1])
    return np.concatenate([hidden[length // 4], hidden[length // 2], hidden[3 * length // 4]])


def feature_matching(answers: np.ndarray, gold: np.ndarray, whiten: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """Alignment and diversity [answers] of one prompt's answers: the terms of equation 7.

    Args:
        answers: float64 [answers, features], at least one.
        gold: float64 [features]
        whiten: decorrelate the features over the answers first; dot products are then of whitened features, and only
            the alignment is a cosine.

    Returns:
        The second is None where there is one answer alone.
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
    return np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)


def _is_depth(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1
