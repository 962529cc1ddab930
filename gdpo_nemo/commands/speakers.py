"""Models that one talks to: what a SOURCE of ``gdpo-nemo chat`` is, and an engine with a conversation for each."""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

import numpy as np

from gdpo_nemo.checkpoints import check_whole
from gdpo_nemo.commands.evaluate import Subject, exported, find_subject, without_policy
from gdpo_nemo.config.files import check_model, check_tokenizer, read_model_config
from gdpo_nemo.config.layout import resolve_layout
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.reading import real_path
from gdpo_nemo.config.schema import ClusterConfig, Config, LoraConfig
from gdpo_nemo.config.validate import check_ranges
from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.dialogue import Dialogue
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.data.tokenizer import load_tokenizer
from gdpo_nemo.errors import ConfigError, RunError
from gdpo_nemo.generation.requests import Completion, SampleRequest, Sampling
from gdpo_nemo.inputs import model_folder
from gdpo_nemo.observe.installation import require_libraries

if TYPE_CHECKING:
    from gdpo_nemo.cluster.fleet import EngineFleet

_CONTEXT = 2048
"""Tokens of a conversation with a model outside of a run, where the model has as many."""
_REPLY = 256
"""Tokens of a reply of such a model."""


@dataclass
class Source:
    """A model to talk to, checked."""

    name: str
    config: Config
    model: Path | None
    """Its Hugging Face folder; None: it has to be made from the checkpoint."""
    checkpoint: Path | None
    base: Path
    """The folder with its tokenizer, of which a checkpoint is another set of weights."""
    tokenizer: Any
    of_a_run: bool
    """Whether the config is a run's, which says on what the model was trained."""

    @property
    def chat(self) -> bool:
        """Whether conversations are rendered by the tokenizer's chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None)) and self.config.data.train.chat is not False


def read_source(source: Path, config_file: str | None, step: int | None, overrides: Sequence[str]) -> Source:
    """Find and check what ``source`` names; starts nothing.

    Raises:
        ConfigError: it is neither a run, a checkpoint nor a model, or the config does not fit it. RunError: the
        checkpoint is damaged.
    """
    outside = _outside(source, config_file, step)
    subject = Subject(source / "config.json", model=source) if outside else find_subject(source, config_file, step)
    config = load_config(_of_model(source) if outside else subject.config, overrides)
    if subject.model is not None:
        config.policy.model_name = str(subject.model)
        config.policy.lora = LoraConfig()  # engines alone: an adapter is merged for them
    check_ranges(config)
    check_tokenizer(config)
    if subject.checkpoint is not None:
        check_whole(subject.checkpoint)
    base = model_folder(config)
    name = str(subject.checkpoint or subject.model)
    return Source(name, config, subject.model, subject.checkpoint, base, load_tokenizer(config, base), not outside)


def _outside(source: Path, config_file: str | None, step: int | None) -> bool:
    """Whether it is a model's folder that nothing says more of."""
    beside = real_path(source).parent / "config.yaml"
    return (source / "config.json").is_file() and config_file is None and step is None and not beside.is_file()


def _of_model(folder: Path) -> dict[str, Any]:
    """A config for a model outside of a run: its own precision, its ``generation_config.json``."""
    content = read_model_config(folder / "config.json")
    own = folder / "generation_config.json"
    wished = read_model_config(own) if os.path.lexists(own) else {}
    return {
        "policy": {
            "model_name": str(folder),
            "precision": "float32" if "float32" in _dtypes(content) else "bfloat16",
            "max_total_sequence_length": min(content.get("max_position_embeddings") or _CONTEXT, _CONTEXT),
            "generation": {
                "max_new_tokens": _REPLY,
                "temperature": wished.get("temperature") or 1.0,
                "top_p": wished.get("top_p") or 1.0,
                "top_k": wished.get("top_k") or -1,
            },
        },
        "gdpo": {"rewards": {"none": 1.0}},
        "cluster": {"gpus_per_node": 1},
    }


def _dtypes(content: Mapping[str, Any]) -> tuple[Any, ...]:
    # transformers calls it dtype from 5 on; files of older versions have the other name.
    return content.get("dtype"), content.get("torch_dtype")


def on_this_machine(sources: Sequence[Source]) -> None:
    """Let the configs have an engine of their own each, on this machine's GPUs, or on its CPU where it has none or the
    run had none.

    Raises:
        ConfigError: there are too few GPUs, or what an engine lacks. RunError: no engine is installed.
    """
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = there if any(source.config.cluster.gpus_per_node for source in sources) else 0
    for source in sources:
        config = source.config
        config.policy.generation.engines = 1
        vllm = config.policy.generation.vllm_cfg
        config.policy.generation.vllm_cfg = vllm if gpus else replace(vllm, tensor_parallel_size=1)
        config.cluster = ClusterConfig(gpus_per_node=gpus, cpus_per_node=config.cluster.cpus_per_node)
        without_policy(config)
        check_model(config, resolve_layout(config))
        require_libraries(config)
    ranks = sum(source.config.policy.generation.vllm_cfg.tensor_parallel_size for source in sources)
    if gpus and ranks > gpus:
        raise ConfigError(f"--against: the two engines need {ranks} GPUs, there are {gpus}")


def weights_of(source: Source) -> Path:
    """The folder that an engine loads, made where it is a checkpoint; a Ray session stands."""
    if source.checkpoint is None:
        return source.base
    return exported(source.checkpoint, source.config, source.base)


def sampling_of(config: Config, temperature: float | None, max_new_tokens: int | None) -> Sampling:
    """How replies are drawn: as the run draws its samples, but for what is given."""
    generation = config.policy.generation
    return Sampling(
        generation.temperature if temperature is None else temperature,
        generation.top_p,
        generation.top_k,
        max_new_tokens or generation.max_new_tokens,
        tuple(generation.stop_strings),
    )


@dataclass(frozen=True)
class Question:
    """A prompt with the conversation before it."""

    asked: str | Prompt
    request: SampleRequest
    forgotten: int
    """Exchanges that the model does not see any more, for want of room."""


class Speaker:
    """A model with an engine and a conversation. ``ready`` waits for the engine.

    Args:
        folder: Hugging Face folder of the weights.
        system: text of the system message, if there is to be one.
        share: of how many the machine's cores are.
    """

    def __init__(self, source: Source, folder: Path, system: str | None, sampling: Sampling, share: int):
        from gdpo_nemo.cluster.fleet import EngineFleet
        from gdpo_nemo.cluster.reservation import Placement
        from gdpo_nemo.cluster.session import cores
        from gdpo_nemo.config.placement import Places

        config = source.config
        self.name = source.name
        self.tokenizer = source.tokenizer
        conversation = Conversation(source.tokenizer, source.chat, config.data.train.chat_template_kwargs)
        context = config.policy.max_total_sequence_length
        self.dialogue = Dialogue(conversation, system, context, sampling.max_new_tokens)
        self._sampling = sampling
        cluster = replace(config.cluster, cpus_per_node=max(1, cores(config.cluster) // share))
        # Without the policy's ranks: Ray finds the engine's devices.
        self.fleet: EngineFleet = EngineFleet(
            replace(config, cluster=cluster), str(folder.absolute()), Placement(Places((), (0,)))
        )

    def ready(self) -> None:
        """Wait until the engine can sample. Raises RunError."""
        self.fleet.ready()

    def question(self, asked: str | Prompt, seed: int) -> Question:
        """What the engine is asked. Raises ConfigError where the model cannot be asked that."""
        try:
            prompt, forgotten = self.dialogue.prompt(asked)
        except RunError as error:
            raise ConfigError(f"{self.name}: {error}") from None
        return Question(asked, SampleRequest(prompt, seed), forgotten)

    def ask(self, question: Question) -> Reply:
        """Begin a reply."""
        return Reply(self, question)

    def begin(self, request: SampleRequest, heard: Callable[[Sequence[int]], None]) -> Future[Completion]:
        """Draw a completion; ``heard`` is told its tokens so far, in another thread."""

        async def draw() -> Completion:
            return await self.fleet.submit(request, self._sampling).follow(heard)

        return self.fleet.spawn(draw())

    def close(self) -> None:
        """End the engine."""
        self.fleet.close()


class Reply:
    """What a model answers, while it does and afterwards."""

    def __init__(self, speaker: Speaker, question: Question):
        self.speaker = speaker
        self.asked = question.asked
        self._heard: Sequence[int] = ()
        self._stopped = False
        self._drawn = speaker.begin(question.request, self._hear)

    def _hear(self, tokens: Sequence[int]) -> None:
        if not self._stopped:
            self._heard = tokens

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self._drawn.done()

    def wait(self) -> None:
        """Return when it is done. Raises RunError where the engine failed."""
        if not self._stopped:
            self._drawn.result()

    def stop(self) -> None:
        """Cut it here, if it is not done."""
        if not self._stopped:
            self._stopped = True  # before it is cancelled, so that nothing is heard afterwards
            self._stopped = self._drawn.cancel()

    @property
    def finish_reason(self) -> str:
        """stop, length, or stopped by whoever reads it."""
        return "stopped" if self._stopped else self._drawn.result().finish_reason

    @property
    def tokens(self) -> np.ndarray:
        """int32 [tokens] so far."""
        whole = self.done and not self._stopped
        return self._drawn.result().token_ids if whole else np.array(self._heard, np.int32)

    @property
    def text(self) -> str:
        """What it says so far, without special tokens, and without a character of which bytes are missing."""
        text: str = self.speaker.tokenizer.decode(self.tokens.tolist(), skip_special_tokens=True)
        return text if self.done else text.rstrip("\ufffd")

    def keep(self) -> None:
        """Let it be part of the conversation, if it says something."""
        if len(self.tokens):
            self.speaker.dialogue.add(self.asked, self.tokens)
