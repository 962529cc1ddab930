"""Rewards from a reward model: a Hugging Face sequence classifier with one label, which scores a conversation.

``algorithm.type: reward_model`` trains and saves a model in this format, and many published reward models have the same
format. Each worker process loads a copy of the model, so give the environment one dedicated worker (``num_workers:
1``). If a score cannot be computed, the sample gets a ``Failure`` and is masked. A sample without a score never gets a
reward of 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gdpo_nemo.data.records import Outcome, Trajectory, Verdict
from gdpo_nemo.data.tokenizer import Tokenizer, continued, special_tokens
from gdpo_nemo.environments.base import Environment, Failure, read_options
from gdpo_nemo.environments.images import images_in
from gdpo_nemo.environments.tasks.reward_functions import prompt_in_trl_format
from gdpo_nemo.utils.errors import ConfigError, RunError, first_line
from gdpo_nemo.utils.files import parse_json, read_text

_OPTIONS: dict[str, Any] = dict(
    device="cpu", batch_size=16, max_tokens=None, precision="float32", num_threads=1, local_files_only=False
)
_PRECISIONS = ("float32", "bfloat16")


class Scorer:
    """Reward function that returns the score of a reward model at the last token of the conversation.

    The conversation is formatted with the chat template of the reward model's tokenizer. Without a template, prompt and
    completion must be text and are concatenated. The tokenizer's end token is appended if the formatted conversation
    does not end with a special token.

    Args:
        model: Hugging Face folder, or name of a model on the hub.
        device: cpu, or a GPU that neither the policy nor the engines use, such as ``cuda:7``.
        batch_size: maximum number of conversations in one forward pass.
        max_tokens: maximum length of a conversation in tokens. A longer conversation gets a ``Failure``. If the value
            is None, the limit is the model's maximum number of positions.
        precision: dtype of the model, float32 or bfloat16.
        num_threads: number of torch's CPU threads, if the device is cpu.
        local_files_only: True to load the model without accessing the hub.

    Raises:
        ConfigError: if an argument is invalid, or the folder is not a sequence classifier with one label.
    """

    encoded_images = True

    def __init__(
        self,
        model: str,
        *,
        device: str = "cpu",
        batch_size: int = 16,
        max_tokens: int | None = None,
        precision: str = "float32",
        num_threads: int = 1,
        local_files_only: bool = False,
    ):
        if not isinstance(model, str) or not model:
            raise ConfigError(f"model: must be a folder or a model of the Hugging Face Hub, not {model!r}")
        self._name = model
        self._device = _device(device)
        self._batch_size = _count("batch_size", batch_size)
        self._max_tokens = None if max_tokens is None else _count("max_tokens", max_tokens)
        if precision not in _PRECISIONS:
            raise ConfigError(f"precision: must be one of {', '.join(_PRECISIONS)}, not {precision!r}")
        self._precision = precision
        self._num_threads = _count("num_threads", num_threads)
        self._local = bool(local_files_only)
        self._model: Any = None
        self._tokenizer: Tokenizer
        if Path(model).is_dir():
            _check_classifier(model, parse_json(read_text(Path(model) / "config.json")))
        elif model.startswith((".", "/")) or model.count("/") > 1:
            raise ConfigError(f"model: folder not found ({model})")

    def load(self) -> None:
        """Load the model if it is not loaded yet. Raises ConfigError if loading fails."""
        if self._model is not None:
            return
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        if self._device == "cpu":
            torch.set_num_threads(self._num_threads)
        options: dict[str, Any] = dict(local_files_only=self._local)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self._name, **options)
            model = AutoModelForSequenceClassification.from_pretrained(
                self._name, dtype=getattr(torch, self._precision), use_safetensors=True, **options
            )
            _check_classifier(self._name, model.config.to_dict())
            self._model = model.to(self._device).eval()
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - files, hub and driver raise exceptions of many types
            raise ConfigError(f"model: {self._name} could not be loaded: {first_line(error)}") from error

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float | Failure]:
        """Return one score or ``Failure`` per completion. Prompts and completions are texts or lists of messages."""
        self.load()
        conversations = [self._tokens(prompt, completion) for prompt, completion in zip(prompts, completions)]
        limit = self._max_tokens or getattr(self._model.config, "max_position_embeddings", None) or math.inf
        scores: list[float | Failure] = []
        fitting = []
        for index, ids in enumerate(conversations):
            if len(ids) <= limit:
                fitting.append(index)
            scores.append(
                Failure(f"the conversation has {len(ids)} tokens, more than the reward model's limit of {limit}")
            )
        fitting.sort(key=lambda index: len(conversations[index]))
        for start in range(0, len(fitting), self._batch_size):
            batch = fitting[start : start + self._batch_size]
            for index, score in zip(batch, self._scores([conversations[index] for index in batch])):
                scores[index] = score if math.isfinite(score) else Failure(f"the reward model's score is {score}")
        return scores

    def _tokens(self, prompt: Any, completion: Any) -> list[int]:
        tokenizer = self._tokenizer
        end = tokenizer.eos_token_id
        if getattr(tokenizer, "chat_template", None):
            messages = [*_messages("user", prompt), *_messages("assistant", completion)]
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
            answer = str(messages[-1]["content"]).strip()
            after_answer = text.rpartition(answer)[2] if answer else text
            closing = tuple(special_tokens(tokenizer).values())
            ended = str(tokenizer.eos_token) in after_answer or after_answer.rstrip().endswith(closing)
        elif isinstance(prompt, str) and isinstance(completion, str):
            ids = [*tokenizer(prompt)["input_ids"], *continued(tokenizer, prompt, completion)]
            ended = ids[-1:] == [end]
        else:
            raise RunError(f"{self._name} has no chat template, and the prompts are chat messages")
        return ids if ended or end is None else [*ids, end]

    def _scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Return the scores of tokenized conversations, which are padded on the right to a common length."""
        import torch

        lengths = torch.tensor(list(map(len, texts)))
        padded = torch.zeros(len(texts), int(lengths.max()), dtype=torch.int64)
        for row, ids in zip(padded, texts):
            row[: len(ids)] = torch.tensor(ids)
        mask = torch.arange(padded.size(1)) < lengths[:, None]
        # Score the last token explicitly. The classifier's forward pass locates the last token by the padding token,
        # which may be equal to the end token.
        with torch.inference_mode():
            hidden = self._model.base_model(
                padded.to(self._device), attention_mask=mask.to(self._device), use_cache=False
            ).last_hidden_state
            last = hidden[torch.arange(len(texts)), (lengths - 1).to(hidden.device)]
            scores = self._model.score(last).float()[:, 0]
        found: list[float] = scores.tolist()
        return found


class RewardModel(Environment):
    """Environment whose only component is the score of a reward model.

    To combine the score with other rewards, use the environment ``functions`` with the function ``{function:
    reward_model, model: ...}``.

    Options:
        component (score): name of the component.
        model and all other arguments of ``Scorer``: see ``Scorer``. ``model`` is required.
    """

    def __init__(self, options: Mapping[str, Any] | None = None):
        chosen = vars(read_options("reward_model", options, component="score", model="", **_OPTIONS))
        self.reward_names = (chosen.pop("component"),)
        self._scorer = Scorer(**chosen)

    def prepare(self) -> None:
        """Load the model."""
        self._scorer.load()

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return one verdict per trajectory."""
        prompts = [prompt_in_trl_format(trajectory.prompt) for trajectory in trajectories]
        verdicts = []
        for score in self._scorer(prompts, [t.text for t in trajectories]):
            if isinstance(score, Failure):
                verdicts.append(Verdict({}, Outcome.ENV_FAILED, score.detail))
            else:
                verdicts.append(Verdict({self.reward_names[0]: score}))
        return verdicts


def _messages(role: str, content: Any) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if images_in(content):
        raise RunError("reward_model: images are not supported; use a judge, or a reward function")
    return list(map(dict, content))


def _check_classifier(name: str, config: Any) -> None:
    """Raise ConfigError if a model is not a sequence classifier with one label according to its configuration."""
    content = config if isinstance(config, Mapping) else {}
    kinds = content.get("architectures") or []
    labels = content.get("id2label") or {0: "", 1: ""}  # transformers assumes two labels if the key is absent
    if not any(str(kind).endswith("ForSequenceClassification") for kind in kinds):
        raise ConfigError(f"model: {name} is not a sequence classifier (architecture {', '.join(map(str, kinds))})")
    if len(labels) != 1:
        raise ConfigError(f"model: expected one label, got {len(labels)} ({name})")


def _device(name: Any) -> str:
    kind, _, number = str(name).partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()) or (kind == "cpu" and number):
        raise ConfigError(f"device: must be cpu or a GPU such as cuda:7, not {name!r}")
    return str(name)


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**9:
        raise ConfigError(f"{name}: must be a whole number of at least 1, not {value!r:.40}")
    return value
