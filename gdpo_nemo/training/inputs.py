"""Inputs of a run, which are read and checked before any process starts: environments, model, tokenizer and prompts."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from gdpo_nemo.config.data_files import is_broken_link
from gdpo_nemo.config.environment_algorithms import check_rows_of, own_configs, trained_configs
from gdpo_nemo.config.layout import Resolved
from gdpo_nemo.config.model_checks import check_continued, companion, read_model_config
from gdpo_nemo.config.rollout_checks import check_turns_kept
from gdpo_nemo.config.schema import Config, RunConfig, TeacherConfig, WeightsConfig
from gdpo_nemo.config.sections import PolicyConfig, max_prompt_tokens
from gdpo_nemo.config.transports import TRANSPORTS
from gdpo_nemo.data.end_tokens import end_token_notes
from gdpo_nemo.data.examples import source_of
from gdpo_nemo.data.mix import check_mix
from gdpo_nemo.data.prompts import PromptSource
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.data.tokenizer import Tokenizer, check_same_tokens, check_vocabulary, load_image_reader, load_tokenizer
from gdpo_nemo.environments.registry import check_rewards, load_environments
from gdpo_nemo.models.family_checks import describe
from gdpo_nemo.models.peft import read_peft_adapter
from gdpo_nemo.models.sources import DOWNLOADED, Format, Source, described_by, recognise
from gdpo_nemo.observe.display import active
from gdpo_nemo.rollouts.functions import rollout_methods
from gdpo_nemo.rollouts.user_functions import check_own_functions
from gdpo_nemo.training import model_factory
from gdpo_nemo.training.algorithm import Algorithm, load_algorithm
from gdpo_nemo.utils.errors import ConfigError, GdpoError, RunError
from gdpo_nemo.utils.files import real_path
from gdpo_nemo.utils.import_path import ImportPath
from gdpo_nemo.utils.progress import phase


@dataclass
class Inputs:
    """Checked inputs of a run."""

    sources: dict[str, PromptSource]
    """Prompts by split: train, and validation if it is configured."""
    held_out: list[Prompt]
    """Prompts that each validation uses."""
    tokenizer: Tokenizer
    algorithm: type[Algorithm[Any, Any]]
    folder: Path
    """Hugging Face folder of the model, or with ``adapter`` of its base model."""
    alerts: list[str]
    """Sentences about end tokens that disagree, and for each split about prompts that were left out."""
    adapter: Path | None = None
    """PEFT adapter that a LoRA run starts from; None: new adapters."""

    @property
    def prompts(self) -> PromptSource:
        """Training prompts."""
        return self.sources["train"]


def _check_custom_transport(weights: WeightsConfig) -> None:
    """Load a user-defined transport, to check it.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    name = weights.transport
    if name != "auto" and name not in TRANSPORTS:
        from gdpo_nemo.weights.transports.base import load_transport

        load_transport(name)


def read_inputs(resolved: Resolved, splits: Sequence[str]) -> Inputs:
    """Read and check the data of ``splits``, the environments and the model.

    Raises:
        ConfigError: if an input is missing or invalid.
        RunError: if the model factory or the server of an environment failed.
    """
    config = resolved.config
    with phase("environments"):
        environments = load_environments(config.env)
    check_rewards(config, resolved.algorithm, environments)
    with phase("model"):
        folder = model_folder(config, resolved.model.source)
    with phase("tokenizer"):
        tokenizer = load_tokenizer(config.policy, folder, config.run.date)
        found = check_tokens(config, tokenizer, folder)
        if config.teacher.model_name:
            check_same_tokens(tokenizer, teacher_folder(config.teacher), "teacher.model_name")
    for trained in trained_configs(config):
        check_own_functions(trained)
    algorithm = load_algorithm(config, resolved.algorithm)
    if algorithm.samples:
        _check_custom_transport(config.weights)
        rollout_methods(config)
    with phase("data"):
        make_source = partial(
            source_of(resolved.algorithm),
            seed=config.run.seed,
            max_prompt_tokens=max_prompt_tokens(config.policy),
            images=load_image_reader(config.data.images, folder, tokenizer),
        )
        sources = {}
        for split in splits:
            sources[split] = make_source(getattr(config.data, split), environments, tokenizer, split=split)
    if algorithm.samples and "train" in sources and own_configs(config):
        check_rows_of(config, {prompt.environment for prompt in sources["train"].one_of_each_row()})
    if config.data.mix and "train" in sources:
        check_mix(config.data, ((p.id, p.environment, p.fields) for p in sources["train"].head()))
    if algorithm.samples:
        with phase("preflight"):
            _preflight(environments, sources)
        check_rewards(config, resolved.algorithm, environments)
    for source in sources.values():
        if sentence := source.left_out():
            found.append(sentence)
    held_out = sources["validation"].head(config.gdpo.val_prompts) if "validation" in sources else []
    check_turns_kept(config, len(held_out))
    adapter = starting_adapter(config.policy, resolved.model.source)
    return Inputs(sources, held_out, tokenizer, algorithm, folder, found, adapter)


def check_tokens(config: Config, tokenizer: Tokenizer, folder: Path) -> list[str]:
    """Compare the policy's tokenizer with the model in ``folder``. Return sentences about end tokens that disagree.

    Raises:
        ConfigError: if the tokenizer has another vocabulary than the model.
    """
    if config.policy.tokenizer_name:
        check_vocabulary(tokenizer, folder)
    data = config.data.train
    template_kwargs = None if data.chat is False else data.chat_template_kwargs
    return end_token_notes(tokenizer, folder, config.policy.generation.stop_strings, template_kwargs)


def _preflight(environments: Mapping[str, Any], sources: Mapping[str, PromptSource]) -> None:
    """Let environments that use servers check that the servers are available and accept the run's rows.

    Raises:
        GdpoError: if a check fails.
    """
    for name, environment in environments.items():
        if not environment.has_preflight:
            continue
        try:
            prompts = chain.from_iterable(source.one_of_each_row() for source in sources.values())
            environment.preflight([prompt for prompt in prompts if prompt.environment == name])
        except GdpoError as error:
            raise type(error)(f"env.{name}: {error}") from None
        finally:
            environment.close()


def model_folder(config: Config, source: Source | None) -> Path:
    """Return the model's Hugging Face folder, after checking that the model family is supported.

    If the folder is missing, the model factory creates it, or the model is downloaded from the hub. Other formats are
    converted. For a LoRA run that starts from an adapter, this is the folder of the base model.

    Args:
        source: the model, if it has another format than Hugging Face's (``model_source``); otherwise None.

    Raises:
        ConfigError: if the model is not available or not supported.
        RunError: if the model factory or the conversion failed.
    """
    name = config.policy.model_name
    if source is not None:
        return _from_source(config, source)
    if not Path(name).is_dir() and config.policy.model_factory:
        _make_model(config)
    if is_broken_link(Path(name)):
        raise ConfigError(f"policy.model_name: {name} is a broken symbolic link")
    folder = Path(name) if Path(name).is_dir() else from_hub(name)
    downloaded = recognise(folder)
    if downloaded is not None and downloaded.format in DOWNLOADED:
        return huggingface_folder(config.run, downloaded)
    describe(read_model_config(folder / "config.json"))
    return folder


def _from_source(config: Config, source: Source) -> Path:
    if source.format is not Format.PEFT:
        return huggingface_folder(config.run, source, companion(config.policy, source))
    key = "policy.model_name"
    adapter = read_peft_adapter(source.path, key)
    base = described_by(source, key) or from_hub(adapter.base)
    if not config.policy.lora.rank:
        return huggingface_folder(config.run, source, str(base))
    check_continued(adapter, config.policy.lora, base, key)
    describe(read_model_config(base / "config.json"))
    return base


def starting_adapter(policy: PolicyConfig, source: Source | None) -> Path | None:
    """Return the PEFT adapter that a LoRA run starts from, or None."""
    if source is None or source.format is not Format.PEFT or not policy.lora.rank:
        return None
    return source.path.absolute()


def _make_model(config: Config) -> None:
    """Call ``policy.model_factory`` in a separate process.

    The user's function can train a model, and can import libraries that the driver must not import. Raises RunError if
    the function fails.
    """
    name = config.policy.model_name
    if config.policy.model_factory is None:
        raise ConfigError("policy.model_factory: must include a function name")
    factory = ImportPath(config.policy.model_factory)
    path, function = factory.find_function("policy.model_factory"), factory.name
    threads = str(config.cluster.cpus_per_node or len(os.sched_getaffinity(0)))
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
    environment.setdefault("TQDM_DISABLE", "1")  # Progress bars on stderr would disturb the display.
    display = active()
    write = display.write if display else partial(print, flush=True)
    write(f"{name} does not exist; creating it with {path.name}:{function}")
    with tempfile.TemporaryDirectory() as scratch:
        failure = Path(scratch) / "error"
        arguments = [str(path), function, name, str(config.run.seed), str(failure)]
        command = [sys.executable, "-W", "ignore", "-m", model_factory.__name__, *arguments]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, errors="replace")
        try:
            for line in process.stdout or ():
                write(line.rstrip("\n"))
            status = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if status and failure.exists():
            raise RunError(f"policy.model_factory: {path.name}:{function}: {failure.read_text(encoding='utf-8')}")
    if status:
        raise RunError(f"policy.model_factory: {path.name}:{function} ended with status {status}")
    if not Path(name).is_dir():  # Otherwise the name would be looked up on the hub.
        raise RunError(f"policy.model_factory: {path.name}:{function} succeeded without creating the folder {name}")


_KEY = "policy.model_name"
_CHUNK_BYTES = 1 << 16
_CHUNKS = 256
"""Number of chunks that are read from a large file. Files up to 16 MiB are read completely. Of larger files, 256 chunks
at regular positions are read."""


def converted_path(run: RunConfig, source: Source, companion: str | None) -> Path:
    """Return the path of the folder that ``source`` is converted to. The folder may not exist yet.

    The folder is in ``models/`` next to the run folder. The folder's name contains a checksum of the source files.

    Args:
        companion: folder that describes the model, for formats that need one (``described_by``).
    """
    value = hashlib.blake2b(digest_size=4)
    files = [source.path] if source.path.is_file() else _files(source.path)
    described = described_by(source, _KEY, companion)
    for file in [*files, *(_files(described) if described is not None else [])]:
        _hash_file(value, file)
    name = re.sub(r"[^\w.-]+", "_", source.root.stem if source.root.is_file() else real_path(source.root).name)
    return Path(run.dir).parent / "models" / f"{name}-{value.hexdigest()}"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def _hash_file(value: hashlib.blake2b, file: Path) -> None:
    size = file.stat().st_size
    value.update(f"{file.name} {size} ".encode())
    with file.open("rb") as stream:
        if size <= _CHUNK_BYTES * _CHUNKS:
            value.update(stream.read())
            return
        for index in range(_CHUNKS):
            stream.seek((size - _CHUNK_BYTES) * index // (_CHUNKS - 1))
            value.update(stream.read(_CHUNK_BYTES))


def huggingface_folder(run: RunConfig, source: Source, companion: str | None = None) -> Path:
    """Return the Hugging Face folder of ``source``. The source is converted first if the folder does not exist.

    Args:
        companion: folder that describes the model, for formats that need one (``described_by``).

    Raises:
        ConfigError: if the source cannot be read.
        RunError: if the folder cannot be written.
    """
    folder = converted_path(run, source, companion)
    if (folder / "config.json").is_file():
        return folder
    print(f"{source.root} is {source.format.value}; converting it to {folder}", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "gdpo_nemo", "convert", "--to", "hf", str(source.root), str(folder)]
    described = described_by(source, _KEY, companion)
    if described is not None:
        command += ["--model", str(described)]
    # The conversion runs in a separate process, which frees its memory and keeps Megatron out of the driver.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode and not (folder / "config.json").is_file():  # Another run may have created it.
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        reason = done.stderr.strip()[-400:]
        if errors:
            reason = errors[-1].removeprefix("error: ").removeprefix("SOURCE: ")
        raise (ConfigError if done.returncode == 2 else RunError)(f"{_KEY}: {source.root}: {reason}")
    return folder


def teacher_folder(teacher: TeacherConfig) -> Path:
    """Return the folder of the teacher, downloaded from the hub if necessary.

    Raises:
        ConfigError: if the teacher is not set or not available.
    """
    name = teacher.model_name
    if name is None:
        raise ConfigError("teacher.model_name: must be set with algorithm distillation")
    return (Path(name) if Path(name).is_dir() else from_hub(name, "teacher.model_name")).absolute()


def from_hub(name: str, key: str = "policy.model_name") -> Path:
    """Download a model from the hub and return its folder.

    Raises:
        ConfigError: if it is not available.
    """
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "README.md"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # noqa: BLE001 - any exception of the hub client means that the model is unavailable
        raise ConfigError(
            f"{key}: {name} is not a folder and cannot be reached on the hub ({type(error).__name__})"
        ) from None
