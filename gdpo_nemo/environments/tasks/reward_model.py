"""A reward model as a judge: the score that a Hugging Face sequence classifier of one label gives a conversation.

Such a folder is what ``algorithm.type: reward_model`` writes, and how others publish theirs. It is loaded in the worker
processes, each of which has its own copy: give the environment one worker of its own (``num_workers: 1``). Whatever
keeps a score from being had is a ``Failure``, which masks the sample; it is never a reward of 0.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Mapping, Sequence

from gdpo_nemo.config.messages import first_line
from gdpo_nemo.config.reading import parse_json, read_text
from gdpo_nemo.data.records import Outcome, Trajectory, Verdict
from gdpo_nemo.environments.base import Environment, Failure
from gdpo_nemo.environments.options import read_options
from gdpo_nemo.errors import ConfigError, RunError

_OPTIONS: dict[str, Any] = dict(
    device="cpu", batch_size=16, max_tokens=None, precision="float32", num_threads=1, local_files_only=False
)
_PRECISIONS = ("float32", "bfloat16")


class Scorer:
    """The score of a sequence classifier with one label, at the last token of prompt and completion together.

    They are written with the chat template of the classifier's own tokenizer; without one, prompts of text stand before
    their completion as they are. The tokenizer's end token follows where the template writes no end.

    Arguments:
        model: a folder, or a name on the hub.
        device: cpu, or a GPU that neither policy nor engines use, such as ``cuda:7``.
        batch_size: conversations that are computed at once.
        max_tokens: longer conversations fail; null: those that have more than the model's positions.
        precision: float32 or bfloat16.
        num_threads: of a CPU.
        local_files_only: ask no hub.

    Raises:
        ConfigError: an argument that cannot be used, or a folder that holds no such classifier.
    """

    def __init__(
        self,
        model: str,
        device: str = "cpu",
        batch_size: int = 16,
        max_tokens: int | None = None,
        precision: str = "float32",
        num_threads: int = 1,
        local_files_only: bool = False,
    ):
        if not isinstance(model, str) or not model:
            raise ConfigError(f"model: must name a folder or a model of the hub, not {model!r}")
        self._name = model
        self._device = _device(device)
        self._batch_size = _count("batch_size", batch_size)
        self._max_tokens = None if max_tokens is None else _count("max_tokens", max_tokens)
        if precision not in _PRECISIONS:
            raise ConfigError(f"precision: unknown {precision!r}; known: {', '.join(_PRECISIONS)}")
        self._precision = precision
        self._num_threads = _count("num_threads", num_threads)
        self._local = bool(local_files_only)
        self._model: Any = None
        self._tokenizer: Any = None
        if Path(model).is_dir():
            _check_classifier(model, parse_json(read_text(Path(model) / "config.json")))
        elif model.startswith((".", "/")) or model.count("/") > 1:
            raise ConfigError(f"model: there is no folder {model}")

    def load(self) -> None:
        """Load the model, once. Raises ConfigError where that fails."""
        if self._model is not None:
            return
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        if self._device == "cpu":
            torch.set_num_threads(self._num_threads)
        how: dict[str, Any] = dict(local_files_only=self._local)
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self._name, **how)
            model = AutoModelForSequenceClassification.from_pretrained(
                self._name, dtype=getattr(torch, self._precision), use_safetensors=True, **how
            )
            _check_classifier(self._name, model.config.to_dict())
            self._model = model.to(self._device).eval()
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - files, hub and driver raise many kinds
            raise ConfigError(f"model: {self._name} could not be loaded: {first_line(error)}") from error

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float | Failure]:
        """One score or failure for each completion; text, or messages, as ``Functions`` gives them."""
        self.load()
        texts = [self._tokens(prompt, completion) for prompt, completion in zip(prompts, completions)]
        limit = self._max_tokens or getattr(self._model.config, "max_position_embeddings", None) or math.inf
        found: list[float | Failure] = [
            Failure(f"the conversation has {len(ids)} tokens, the reward model takes {limit}") for ids in texts
        ]
        fitting = sorted((i for i, ids in enumerate(texts) if len(ids) <= limit), key=lambda i: len(texts[i]))
        for start in range(0, len(fitting), self._batch_size):
            places = fitting[start : start + self._batch_size]
            for place, score in zip(places, self._scores([texts[place] for place in places])):
                found[place] = score if math.isfinite(score) else Failure(f"the reward model's score is {score}")
        return found

    def _tokens(self, prompt: Any, completion: Any) -> list[int]:
        tokenizer = self._tokenizer
        end = tokenizer.eos_token_id
        if getattr(tokenizer, "chat_template", None):
            said = [*_messages("user", prompt), *_messages("assistant", completion)]
            text = tokenizer.apply_chat_template(said, tokenize=False)
            ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
            answer = str(said[-1]["content"]).strip()
            behind = text.rpartition(answer)[2] if answer else text
            closing = tuple(tokenizer.all_special_tokens)
            ended = end is None or tokenizer.eos_token in behind or behind.rstrip().endswith(closing)
        elif isinstance(prompt, str) and isinstance(completion, str):
            ids = [*tokenizer(prompt)["input_ids"], *tokenizer(completion, add_special_tokens=False)["input_ids"]]
            ended = end is None or ids[-1:] == [end]
        else:
            raise RunError(f"{self._name} has no chat template, and the prompts are chat messages")
        return ids if ended else [*ids, end]

    def _scores(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """The scores of texts of any lengths, which are padded behind their last token."""
        import torch

        lengths = torch.tensor([len(ids) for ids in texts])
        padded = torch.zeros(len(texts), int(lengths.max()), dtype=torch.int64)
        for row, ids in zip(padded, texts):
            row[: len(ids)] = torch.tensor(ids)
        mask = torch.arange(padded.size(1)) < lengths[:, None]
        # Not the classifier's own choice of a token: that goes by a padding token, which may be the end token.
        with torch.inference_mode():
            hidden = self._model.base_model(
                padded.to(self._device), attention_mask=mask.to(self._device), use_cache=False
            ).last_hidden_state
            last = hidden[torch.arange(len(texts)), (lengths - 1).to(hidden.device)]
            scores = self._model.score(last).float()[:, 0]
        return [float(score) for score in scores.cpu()]


class RewardModel(Environment):
    """The score of a reward model as an environment's only component.

    Options: ``component`` (``score``: its name) and the arguments of ``Scorer``, ``model`` above all. To have it beside
    other rewards, name it among the functions of a ``functions`` environment: ``{function: reward_model, model: ...}``.
    """

    def __init__(self, options: Mapping[str, Any] | None = None):
        chosen = vars(read_options("reward_model", options, component="score", model="", **_OPTIONS))
        self.reward_names = (chosen.pop("component"),)
        self._scorer = Scorer(**chosen)

    def prepare(self) -> None:
        """Load the model."""
        self._scorer.load()

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """One verdict per trajectory."""
        prompts = [t.prompt.text if t.prompt.messages is None else list(t.prompt.messages) for t in trajectories]
        return [
            Verdict({}, Outcome.ENV_FAILED, score.detail)
            if isinstance(score, Failure)
            else Verdict({self.reward_names[0]: score})
            for score in self._scorer(prompts, [t.text for t in trajectories])
        ]


def _messages(role: str, said: Any) -> list[Mapping[str, Any]]:
    return [{"role": role, "content": said}] if isinstance(said, str) else [dict(message) for message in said]


def _check_classifier(name: str, config: Any) -> None:
    """A configuration is that of a sequence classifier with one label. Raises ConfigError."""
    content = config if isinstance(config, Mapping) else {}
    kinds = content.get("architectures") or []
    labels = content.get("id2label") or {0: "", 1: ""}  # without it transformers takes two
    if not any(str(kind).endswith("ForSequenceClassification") for kind in kinds):
        raise ConfigError(f"model: {name} is no sequence classifier (its architecture is {', '.join(map(str, kinds))})")
    if len(labels) != 1:
        raise ConfigError(f"model: {name} gives {len(labels)} labels, a reward model one")


def _device(name: Any) -> str:
    kind, _, number = str(name).partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()) or (kind == "cpu" and number):
        raise ConfigError(f"device: must be cpu or a GPU such as cuda:7, not {name!r}")
    return str(name)


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**9:
        raise ConfigError(f"{name}: must be a whole number of at least 1, not {value!r:.40}")
    return value
