"""Models of ``gdpo-nemo chat``: conversations with an engine, and rows of a run's data as prompts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gdpo_nemo.commands.evaluate import Subject, exported, find_subject, without_policy
from gdpo_nemo.config.layout import resolve_layout
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.model_checks import check_model, check_tokenizer, model_source, read_model_config
from gdpo_nemo.config.schema import ClusterConfig, Config, DatasetConfig, LoraConfig
from gdpo_nemo.config.sections import ImagesConfig, PolicyConfig, max_prompt_tokens
from gdpo_nemo.config.validate import check_ranges
from gdpo_nemo.data.anchors import TEXT_KEY, prompts_of
from gdpo_nemo.data.conversation import Asked, Conversation, Dialogue
from gdpo_nemo.data.images import Image, largest_file, read_image
from gdpo_nemo.data.messages import Message, is_image
from gdpo_nemo.data.records import Outcome, Prompt, TrainerState, Trajectory
from gdpo_nemo.data.replies import Reply as ParsedReply, reply_parser
from gdpo_nemo.data.rows import PROMPT_KEYS, Row, load_rows
from gdpo_nemo.data.tokenizer import Tokenizer, load_image_reader, load_tokenizer
from gdpo_nemo.environments.base import Environment
from gdpo_nemo.environments.execution.pools import EnvironmentPools
from gdpo_nemo.environments.registry import load_environments
from gdpo_nemo.generation.requests import Completion, SampleRequest, Sampling
from gdpo_nemo.models.sources import ModelFacts
from gdpo_nemo.observe.installation import require_libraries
from gdpo_nemo.rollouts.batches import apply_verdicts
from gdpo_nemo.training.checkpoints import check_whole
from gdpo_nemo.training.inputs import model_folder
from gdpo_nemo.utils.errors import ConfigError, RunError
from gdpo_nemo.utils.files import read_bytes, real_path

if TYPE_CHECKING:
    from gdpo_nemo.cluster.fleet import EngineFleet
    from gdpo_nemo.data.image_reader import ImageReader


_CONTEXT = 2048
"""Maximum context of a model outside a run, in tokens, unless the model supports fewer."""
_REPLY = 256
"""Maximum tokens of a reply from a model outside a run."""


@dataclass
class Source:
    """Validated model to chat with."""

    name: str
    config: Config
    model: Path | None
    """Hugging Face folder of the model, or None if it must be exported from the checkpoint."""
    checkpoint: Path | None
    base: Path
    """Hugging Face folder with the tokenizer. For a checkpoint, this is the folder of the run's initial model."""
    tokenizer: Tokenizer
    of_a_run: bool
    """True if the config belongs to a run, so that the data and rewards are known."""
    images: ImageReader | None
    """Reader of images (None if the model has no vision tower)."""

    @property
    def chat(self) -> bool:
        """True if conversations use the tokenizer's chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None)) and self.config.data.train.chat is not False


def read_source(source: Path, config_file: str | None, step: int | None, overrides: Sequence[str]) -> Source:
    """Find and validate the model at ``source``, without starting processes.

    Raises:
        ConfigError: if ``source`` is not a run, checkpoint or model, or the config does not fit the model.
        RunError: if the checkpoint is damaged.
    """
    outside = _is_outside_run(source, config_file, step)
    subject = Subject(source / "config.json", model=source) if outside else find_subject(source, config_file, step)
    config = load_config(_default_config(source) if outside else subject.config, overrides)
    if subject.model is not None:
        config.policy.model_name = str(subject.model)
        config.policy.lora = LoraConfig()  # the engines load weights that already include the adapter
    check_ranges(config)
    model = ModelFacts(model_source(config.policy))
    check_tokenizer(config.policy, model)
    if subject.checkpoint is not None:
        check_whole(subject.checkpoint)
    base = model_folder(config, model.source)
    name = str(subject.checkpoint or subject.model)
    tokenizer = load_tokenizer(config.policy, base, config.run.date)
    return Source(
        name=name,
        config=config,
        model=subject.model,
        checkpoint=subject.checkpoint,
        base=base,
        tokenizer=tokenizer,
        of_a_run=not outside,
        images=load_image_reader(config.data.images, base, tokenizer),
    )


def _is_outside_run(source: Path, config_file: str | None, step: int | None) -> bool:
    """Return whether the source is a model folder outside a run and no config was specified."""
    run_config = real_path(source).parent / "config.yaml"
    return (source / "config.json").is_file() and config_file is None and step is None and not run_config.is_file()


def _default_config(folder: Path) -> dict[str, Any]:
    """Return a config for a model outside a run, with the data type and sampling settings of its folder."""
    content = read_model_config(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation_config = read_model_config(generation_file) if os.path.lexists(generation_file) else {}
    return {
        "policy": {
            "model_name": str(folder),
            "precision": "float32" if "float32" in _dtypes(content) else "bfloat16",
            "max_total_sequence_length": min(content.get("max_position_embeddings") or _CONTEXT, _CONTEXT),
            "generation": {
                "max_new_tokens": _REPLY,
                "temperature": generation_config.get("temperature") or 1.0,
                "top_p": generation_config.get("top_p") or 1.0,
                "top_k": generation_config.get("top_k") or -1,
            },
        },
        "gdpo": {"rewards": {"none": 1.0}},
        "cluster": {"gpus_per_node": 1},
    }


def _dtypes(content: Mapping[str, Any]) -> tuple[Any, ...]:
    # transformers writes dtype from version 5 on, and torch_dtype before.
    return content.get("dtype"), content.get("torch_dtype")


def read_picture(path: str, limits: ImagesConfig) -> Image:
    """Read an image of the user. Raises ConfigError."""
    try:
        return read_image(read_bytes(os.path.expanduser(path), largest_file(limits)), limits)
    except OSError as error:
        raise ConfigError(f"/image: {path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError(f"/image: {path} {error}") from None


def with_pictures(text: str, images: Sequence[Image]) -> str | Message:
    """Return a user's message with images before its text, or only the text without images."""
    if not images:
        return text
    parts = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def on_this_machine(sources: Sequence[Source]) -> None:
    """Configure one engine per model on this machine's GPUs.

    Engines use the CPU if the machine has no GPUs or the runs did not use GPUs.

    Raises:
        ConfigError: if there are not enough GPUs or a requirement of the engine is missing.
        RunError: if no engine is installed.
    """
    import torch

    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = available if any(source.config.cluster.gpus_per_node for source in sources) else 0
    for source in sources:
        config = source.config
        config.policy.generation.engines = 1
        vllm = config.policy.generation.vllm_cfg
        config.policy.generation.vllm_cfg = vllm if gpus else replace(vllm, tensor_parallel_size=1)
        config.cluster = ClusterConfig(gpus_per_node=gpus, cpus_per_node=config.cluster.cpus_per_node)
        without_policy(config)
        check_model(config.policy, resolve_layout(config))
        require_libraries(config.cluster)
    ranks = sum(source.config.policy.generation.vllm_cfg.tensor_parallel_size for source in sources)
    if gpus and ranks > gpus:
        raise ConfigError(f"--against: the two engines require {ranks} GPUs, found {gpus}")


def weights_of(source: Source) -> Path:
    """Return the model folder that an engine loads. A checkpoint is exported first, which requires a Ray session."""
    if source.checkpoint is None:
        return source.base
    return exported(source.checkpoint, source.config, source.base)


def sampling_of(policy: PolicyConfig, temperature: float | None, max_new_tokens: int | None) -> Sampling:
    """Return the run's sampling settings.

    ``temperature`` and ``max_new_tokens`` replace settings unless they are None.
    """
    generation = policy.generation
    return Sampling(
        generation.temperature if temperature is None else temperature,
        generation.top_p,
        generation.top_k,
        max_new_tokens or generation.max_new_tokens,
        tuple(generation.stop_strings),
    )


@dataclass(frozen=True)
class Question:
    """Prompt, with the engine request that includes the preceding conversation."""

    asked: Asked
    request: SampleRequest
    forgotten: int
    """Number of exchanges that were removed because the context is full."""


class Speaker:
    """Model with its engine and conversation. ``ready`` waits for the engine.

    Args:
        folder: Hugging Face folder of the weights.
        system: text of the system message, if any.
        share: number of models among which the machine's cores are divided.
    """

    def __init__(self, source: Source, folder: Path, system: str | None, sampling: Sampling, share: int):
        from gdpo_nemo.cluster.fleet import EngineFleet
        from gdpo_nemo.cluster.reservation import Placement
        from gdpo_nemo.cluster.session import cores
        from gdpo_nemo.config.placement import Places

        config = source.config
        self.name = source.name
        self.tokenizer = source.tokenizer
        self.replies = reply_parser(config, source.tokenizer)
        self.images = source.images
        template_kwargs = config.data.train.chat_template_kwargs
        self.conversation = Conversation(source.tokenizer, source.chat, template_kwargs, self.replies, source.images)
        self.limits = config.data.images
        context = config.policy.max_total_sequence_length
        self.dialogue = Dialogue(self.conversation, system, context, sampling.max_new_tokens)
        self._sampling = sampling
        cluster = replace(config.cluster, cpus_per_node=max(1, cores(config.cluster) // share))
        # Without policy ranks, Ray chooses the engine's devices.
        self.fleet: EngineFleet = EngineFleet(
            replace(config, cluster=cluster), str(folder.absolute()), Placement(Places((), (0,)))
        )

    def ready(self) -> None:
        """Wait until the engine can sample. Raises RunError."""
        self.fleet.ready()

    def question(self, asked: Asked, seed: int) -> Question:
        """Create the request for a prompt. Raises ConfigError if the model does not support the prompt."""
        try:
            prompt, images, forgotten = self.dialogue.prompt(asked)
        except RunError as error:
            raise ConfigError(f"{self.name}: {error}") from None
        if len(images) > (most := self.limits.max_per_prompt):
            raise ConfigError(
                f"{self.name}: the conversation has {len(images)} images, but the maximum is {most} "
                "(data.images.max_per_prompt); start a new conversation with /reset"
            )
        return Question(asked, SampleRequest(prompt, seed, images=images), forgotten)

    def check_reads_images(self) -> None:
        """Raise ConfigError if the model has no vision tower or no chat template."""
        if self.images is None:
            raise ConfigError(f"/image: {self.name} has no vision tower that reads images")
        if not self.conversation.chat:
            raise ConfigError(f"/image: {self.name} has no chat template, which images require")

    def ask(self, question: Question) -> Reply:
        """Start to generate the reply to a question."""
        return Reply(self, question)

    def begin(self, request: SampleRequest, heard: Callable[[Sequence[int]], None]) -> Future[Completion]:
        """Start to sample a completion. ``heard`` is called in another thread with the tokens sampled so far."""

        async def sample_completion() -> Completion:
            return await self.fleet.submit(request, self._sampling).follow(heard)

        return self.fleet.spawn(sample_completion())

    def close(self) -> None:
        """Stop the engine."""
        self.fleet.close()


class Reply:
    """Reply of a model, in progress or finished."""

    def __init__(self, speaker: Speaker, question: Question):
        self.speaker = speaker
        self.asked = question.asked
        self._heard: Sequence[int] = ()
        self._stopped = False
        self._completion = speaker.begin(question.request, self._hear)

    def _hear(self, tokens: Sequence[int]) -> None:
        if not self._stopped:
            self._heard = tokens

    @property
    def done(self) -> bool:
        """True if the reply has ended."""
        return self._completion.done()

    def wait(self) -> None:
        """Wait until the reply is complete. Raises RunError if the engine failed."""
        if not self._stopped:
            self._completion.result()

    def stop(self) -> None:
        """Stop the reply if it is not complete."""
        if not self._stopped:
            self._stopped = True  # set before cancelling, so that no later tokens are added
            self._stopped = self._completion.cancel()

    @property
    def finish_reason(self) -> str:
        """Finish reason: stop, length, or stopped by the user."""
        return "stopped" if self._stopped else self._completion.result().finish_reason

    @property
    def tokens(self) -> np.ndarray:
        """Tokens so far, int32 [tokens]."""
        complete = self.done and not self._stopped
        return self._completion.result().token_ids if complete else np.array(self._heard, np.int32)

    def parsed(self, prompt: Prompt) -> ParsedReply | None:
        """Return the reply as parsed, or None if the prompt has no tools."""
        tools = prompt.fields.get("tools")
        replies = self.speaker.replies
        return replies.parse(replies.text(self.tokens), tools) if isinstance(tools, list) and tools else None

    @property
    def text(self) -> str:
        """Text so far, without special tokens and without an incomplete character at the end."""
        text: str = self.speaker.tokenizer.decode(self.tokens.tolist(), skip_special_tokens=True)
        return text if self.done else text.rstrip("\ufffd")

    def keep(self) -> None:
        """Add the reply to the conversation unless it is empty."""
        if len(self.tokens):
            self.speaker.dialogue.add(self.asked, self.tokens)


SPLITS = ("train", "validation")


@dataclass(frozen=True)
class RunRow:
    """Row of the data, identified by its index in a split."""

    split: str
    number: int
    """Index from 0, in the order of the data."""
    content: Row
    question: str
    """Prompt as readable text."""


class RunRows:
    """Rows of a run's data and their verification. A split is read when its first row is requested.

    Args:
        config: config of the run. None means a model outside a run, for which requests for rows raise ConfigError.
    """

    def __init__(self, config: Config | None):
        self._config = config
        self._rows: dict[str, list[Row]] = {}
        self._environments: Mapping[str, Environment] | None = None
        self._pools: EnvironmentPools | None = None
        self._last = dict.fromkeys(SPLITS, -1)

    def row(self, split: str | None = None, number: int | None = None) -> RunRow:
        """Return a row of the data.

        Args:
            split: name of the split. None means validation if the run has a validation split, otherwise train.
            number: index of the row. None means the row after the previously requested row.

        Raises:
            ConfigError: if the row does not exist or the data is invalid.
        """
        config = self._of_a_run()
        split = split or ("validation" if config.data.validation else "train")
        dataset = self._dataset(split)
        if split not in self._rows:
            self._rows[split] = load_rows(dataset, self.environments, split, config.run.seed)
        rows = self._rows[split]
        number = (self._last[split] + 1) % len(rows) if number is None else number
        if not 0 <= number < len(rows):
            raise ConfigError(f"data.{split}: row {number} does not exist; rows are 0 to {len(rows) - 1}")
        self._last[split] = number
        return RunRow(split, number, rows[number], _question(rows[number], dataset))

    def prompt(self, row: RunRow, tokenizer: Tokenizer, images: ImageReader | None = None) -> Prompt:
        """Return the prompt that the run would create from the row, with tokens of ``tokenizer`` and ``images``.

        For ``strided`` data, the result is the first prompt of the text. Raises ConfigError.
        """
        config = self._of_a_run()
        source = prompts_of(
            self._dataset(row.split),
            self.environments,
            tokenizer,
            split=row.split,
            seed=config.run.seed,
            max_prompt_tokens=max_prompt_tokens(config.policy),
            rows=[row.content],
            images=images,
        )
        return source.head()[0]

    def verdict(
        self, prompt: Prompt, tokens: np.ndarray, text: str, finish_reason: str, parsed: ParsedReply | None = None
    ) -> Trajectory | None:
        """Verify a reply. Return the trajectory with its rewards, or with the error of the environment.

        Returns None if the environment scores only complete episodes, because the reply is only the first turn.

        Raises:
            RunError: if the environment's code fails.
        """
        config = self._of_a_run()
        environment = self.environments[prompt.environment]
        if config.rollout.function is not None or environment.has_turns or environment.plays_with_endpoint:
            return None
        if self._pools is None:
            rollout = config.rollout
            self._pools = EnvironmentPools(config.env, rollout.env_workers, rollout.env_timeout_s, config.run.seed)
        logprobs = np.zeros(len(tokens), np.float32)
        trajectory = Trajectory(prompt, 0, tokens, logprobs, -1, text, finish_reason)
        trajectory.reply = parsed
        apply_verdicts([trajectory], self._pools, TrainerState())
        return trajectory

    @property
    def environments(self) -> Mapping[str, Environment]:
        """Environments of the config. Raises ConfigError if an environment cannot be created."""
        if self._environments is None:
            self._environments = load_environments(self._of_a_run().env)
        return self._environments

    @property
    def weighted(self) -> list[str]:
        """Names of the reward components in the run's ``gdpo.rewards``."""
        return list(self._config.gdpo.rewards) if self._config else []

    def close(self) -> None:
        """Stop the verifiers."""
        if self._pools is not None:
            self._pools.close()

    def _of_a_run(self) -> Config:
        if self._config is None:
            raise ConfigError("--config: required for rows, because the model is not in a run folder")
        return self._config

    def _dataset(self, split: str) -> DatasetConfig:
        dataset: DatasetConfig | None = getattr(self._of_a_run().data, split)
        if dataset is None:
            raise ConfigError(f"data.{split}: is not set in the run's config")
        return dataset


def rewards_line(trajectory: Trajectory, weighted: list[str]) -> str:
    """Format the reward components, beginning with the components in ``weighted``."""
    if trajectory.outcome is Outcome.ENV_FAILED:
        return f"no rewards because the environment failed: {trajectory.detail}"
    rewards = trajectory.component_rewards
    names = dict.fromkeys([*(name for name in weighted if name in rewards), *rewards])
    values = {name: rewards[name] for name in names}
    return "  ".join(f"{name} {'-' if value is None else f'{value:.3g}'}" for name, value in values.items())


def _question(row: Row, dataset: DatasetConfig) -> str:
    keys = PROMPT_KEYS if dataset.strided is None else (TEXT_KEY,)
    key = dataset.prompt_key or next((key for key in keys if key in row), "")
    value = row.get(key)
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):
        value = value[-1].get("content")
    if isinstance(value, list):
        value = " ".join(str(part.get("text", "")) for part in value if not is_image(part))
    return str(value) if dataset.prompt_template is None else dataset.prompt_template.replace("{prompt}", str(value))
