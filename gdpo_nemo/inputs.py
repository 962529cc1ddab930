"""What a run reads before it starts any process: prompts, environments, tokenizer, model. What can be wrong with it is
found here."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Mapping, Sequence

from gdpo_nemo.algorithm import Algorithm, load_algorithm
from gdpo_nemo.config.architectures import check_model_content
from gdpo_nemo.config.files import companion, find_function, leads_nowhere, model_source, read_model_config
from gdpo_nemo.config.model_formats import Format, Source
from gdpo_nemo.config.model_sources import described_by
from gdpo_nemo.config.peft_config import read_peft_adapter
from gdpo_nemo.config.peft_matrices import check_continued
from gdpo_nemo.config.schema import Config
from gdpo_nemo.config.transports import TRANSPORTS
from gdpo_nemo.config.turn_limits import check_turns_kept
from gdpo_nemo.data.examples import source_of
from gdpo_nemo.data.prompts import PromptSource
from gdpo_nemo.data.records import Prompt
from gdpo_nemo.data.splits import room_for_prompts
from gdpo_nemo.data.tokenizer import check_same_tokens, load_tokenizer
from gdpo_nemo.environments.registry import check_rewards, load_environments
from gdpo_nemo.errors import ConfigError, GdpoError, RunError
from gdpo_nemo.formats.converted import from_hub, huggingface_folder, teacher_folder
from gdpo_nemo.observe.display import active
from gdpo_nemo.phases import phase
from gdpo_nemo.rollouts.functions import rollout_methods
from gdpo_nemo.rollouts.own_objective import check_own_functions

# An error that the factory means for the user comes back as a text: it is the run's one line on stderr.
_CALL_FACTORY = """
import importlib.util, pathlib, sys
from gdpo_nemo.errors import GdpoError
from gdpo_nemo.startup import quiet_torch
quiet_torch()
path, function, folder, seed, said = sys.argv[1:]
spec = importlib.util.spec_from_file_location("model_factory", path)
module = importlib.util.module_from_spec(spec)
sys.modules["model_factory"] = module
try:
    spec.loader.exec_module(module)
    getattr(module, function)(folder, int(seed))
except GdpoError as error:
    pathlib.Path(said).write_text(str(error), encoding="utf-8")
    sys.exit(1)
"""


@dataclass
class Inputs:
    """Checked and ready."""

    sources: dict[str, PromptSource]
    """By split: train, and validation where there is one."""
    held_out: list[Prompt]
    """What a validation asks."""
    tokenizer: Any
    algorithm: type[Algorithm]
    folder: Path
    """The model's Hugging Face folder."""
    refused: list[str]
    """A line per split on prompts that were left out."""
    adapter: Path | None = None
    """The PEFT adapter whose matrices a LoRA run starts with."""

    @property
    def prompts(self) -> PromptSource:
        """The training prompts."""
        return self.sources["train"]


def _check_own_transport(config: Config) -> None:
    """Load a transport of the user's own. Raises ConfigError."""
    name = config.weights.transport
    if name != "auto" and name not in TRANSPORTS:
        from gdpo_nemo.weights.transports.transport import load_transport

        load_transport(name)


def read_inputs(config: Config, splits: Sequence[str]) -> Inputs:
    """Read and check what ``splits`` of the data, the environments and the model are.

    Raises:
        ConfigError: something is missing or does not fit. RunError: the model's factory, or an environment's server,
        failed.
    """
    with phase("environments"):
        environments = load_environments(config.env)
    check_rewards(config, environments)
    with phase("model"):
        folder = model_folder(config)
    with phase("tokenizer"):
        tokenizer = load_tokenizer(config, folder)
        if config.teacher.model_name:
            check_same_tokens(tokenizer, teacher_folder(config), "teacher.model_name")
    check_own_functions(config)
    algorithm = load_algorithm(config)
    if algorithm.samples:
        _check_own_transport(config)
        rollout_methods(config)
    room = room_for_prompts(config)
    with phase("data"):
        sources = {
            split: source_of(config)(
                getattr(config.data, split),
                environments,
                tokenizer,
                split=split,
                seed=config.run.seed,
                max_prompt_tokens=room,
            )
            for split in splits
        }
    if algorithm.samples:
        with phase("preflight"):
            _preflight(environments, sources)
        check_rewards(config, environments)
    refused = [sentence for sentence in (source.left_out() for source in sources.values()) if sentence]
    held_out = sources["validation"].head(config.gdpo.val_prompts) if "validation" in sources else []
    check_turns_kept(config, len(held_out))
    return Inputs(sources, held_out, tokenizer, algorithm, folder, refused, starting_adapter(config))


def _preflight(environments: Mapping[str, Any], sources: Mapping[str, PromptSource]) -> None:
    """Let environments with servers find out whether these are there and take the run's rows. Raises GdpoError."""
    for name, environment in environments.items():
        if not environment.has_preflight:
            continue
        try:
            environment.preflight([p for s in sources.values() for p in s.one_of_each_row() if p.environment == name])
        except GdpoError as error:
            raise type(error)(f"env.{name}: {error}") from None
        finally:
            environment.close()


def model_folder(config: Config) -> Path:
    """The model's folder, made by the factory or of a model in another format, or fetched from the hub when it is
    absent, and of a supported family; where a LoRA run starts from an adapter (``starting_adapter``), that of its
    base."""
    name = config.policy.model_name
    source = model_source(config)
    if source is not None:
        return _from_source(config, source)
    if not Path(name).is_dir() and config.policy.model_factory:
        _make_model(config)
    if leads_nowhere(Path(name)):
        raise ConfigError(f"policy.model_name: {name} is a link that leads nowhere")
    folder = Path(name) if Path(name).is_dir() else from_hub(name)
    check_model_content(read_model_config(folder / "config.json"))
    return folder


def _from_source(config: Config, source: Source) -> Path:
    if source.format is not Format.PEFT:
        return huggingface_folder(config, source, companion(config, source))
    key = "policy.model_name"
    adapter = read_peft_adapter(source.path, key)
    base = described_by(source, key) or from_hub(adapter.base)
    if not config.policy.lora.rank:
        return huggingface_folder(config, source, str(base))
    check_continued(adapter, config.policy.lora, base, key)
    check_model_content(read_model_config(base / "config.json"))
    return base


def starting_adapter(config: Config) -> Path | None:
    """The PEFT adapter with whose matrices a LoRA run starts; its ``model_folder`` is then the base of that. Raises
    ConfigError."""
    source = model_source(config)
    if source is None or source.format is not Format.PEFT or not config.policy.lora.rank:
        return None
    return source.path.absolute()


def _make_model(config: Config) -> None:
    """Run ``policy.model_factory`` in a process of its own: making a model may train it, with imports the driver must
    not have."""
    name = config.policy.model_name
    if config.policy.model_factory is None:
        raise ConfigError("policy.model_factory: names no function")
    path, function = find_function("policy.model_factory", config.policy.model_factory)
    threads = str(config.cluster.cpus_per_node or len(os.sched_getaffinity(0)))
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}
    environment.setdefault("TQDM_DISABLE", "1")  # its bars on stderr would go across the phases
    display = active()
    write = display.write if display else partial(print, flush=True)
    write(f"{name} does not exist: making it with {path.name}:{function}")
    with tempfile.TemporaryDirectory() as scratch:
        failure = Path(scratch) / "error"
        arguments = [str(path), function, name, str(config.run.seed), str(failure)]
        command = [sys.executable, "-W", "ignore", "-c", _CALL_FACTORY, *arguments]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, errors="replace")
        try:
            for said in process.stdout or ():
                write(said.rstrip("\n"))
            status = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if status and failure.exists():
            raise RunError(f"policy.model_factory: {path.name}:{function}: {failure.read_text(encoding='utf-8')}")
    if status:
        raise RunError(f"policy.model_factory: {path.name}:{function} ended with status {status}")
    if not Path(name).is_dir():  # or the name would be asked for on the hub
        raise RunError(f"policy.model_factory: {path.name}:{function} ended well and made no folder {name}")
