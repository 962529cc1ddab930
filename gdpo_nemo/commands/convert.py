"""``gdpo-nemo convert``: convert models between Hugging Face folders, checkpoints and other programs' formats.

Checkpoints are read and written by Megatron ranks in any layout, and each rank holds only its shards. Hugging Face
weights are processed tensor by tensor. The rank that writes the weights holds one shard file of at most 4 GB.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gdpo_nemo.commands.arguments import Commands, add_layout, add_verbosity, say, standalone_config, verbosity
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.model_checks import check_creatable_folder, model_source
from gdpo_nemo.config.schema import Config
from gdpo_nemo.models.sources import Format, recognise
from gdpo_nemo.observe.display import shown
from gdpo_nemo.training.checkpoints import Checkpoints, RunState, check_whole, model_fingerprint, read_state
from gdpo_nemo.utils.errors import ConfigError, RunError
from gdpo_nemo.utils.files import read_json_object, real_path, whole_folder

if TYPE_CHECKING:
    from gdpo_nemo.cluster.policy_group import PolicyGroup

_KEY = "SOURCE"


def add(commands: Commands) -> None:
    """Register the command."""
    command = commands.add_parser(
        "convert", help="convert models between Hugging Face folders, checkpoints and other formats"
    )
    command.add_argument("--to", required=True, choices=tuple(_WRITERS), help="output format")
    command.add_argument(
        "source",
        metavar="SOURCE",
        help="checkpoints/step_N of a run, Hugging Face folder, GGUF file, PEFT adapter, or Megatron-core or "
        "NeMo 2 checkpoint",
    )
    command.add_argument("out", metavar="OUT", help="output folder, which must not exist or must be empty")
    command.add_argument(
        "--model",
        metavar="DIR",
        help="Hugging Face folder of a checkpoint's initial model (default: the run's), of an adapter's base model "
        "(default: the model named in the adapter), of the model that a Megatron-core checkpoint contains, or of the "
        "image model to which --to image writes a text model back",
    )
    add_layout(command)
    add_verbosity(command)
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Convert a model and print the path of the result."""
    with shown(sys.stderr, verbosity(arguments)):
        path = _WRITERS[arguments.to](arguments)
    say(path)
    return 0


def _hf(arguments: argparse.Namespace) -> Path:
    source = recognise(Path(arguments.source), _KEY)
    if source is None or source.format is Format.CHECKPOINT:
        return to_huggingface(arguments.source, arguments.out, arguments.model, arguments.layout)
    from gdpo_nemo.training.model_conversion import write_folder

    out = Path(arguments.out)
    _check_output(out)
    write_folder(source, out, _KEY, arguments.model)
    return out


def _checkpoint(arguments: argparse.Namespace) -> Path:
    with _huggingface(arguments) as model:
        return to_checkpoint(model, arguments.out, arguments.layout, arguments.precision)


def _peft(arguments: argparse.Namespace) -> Path:
    return to_peft(arguments.source, arguments.out, arguments.model, arguments.layout)


def _megatron(arguments: argparse.Namespace) -> Path:
    source = recognise(Path(arguments.source), _KEY)
    if source is not None and source.format is Format.CHECKPOINT:
        checkpoint, config, model = _read_checkpoint(arguments.source, arguments.model, arguments.layout)
        if config.policy.lora.rank:
            raise ConfigError(
                f"{_KEY}: {checkpoint} contains adapters; use --to hf first, then --to megatron with the result"
            )
        return to_megatron(model, arguments.out, config, checkpoint)
    with _huggingface(arguments) as model:
        config = standalone_config(model, arguments.layout, arguments.precision)
        return to_megatron(model, arguments.out, config)


def _image(arguments: argparse.Namespace) -> Path:
    from gdpo_nemo.training.model_conversion import write_image_model

    image = Path(arguments.model or "")
    found = recognise(image, "--model") if arguments.model else None
    if found is None or found.format is not Format.IMAGE:
        raise ConfigError(f"--model: must be the folder of the image model that contained the text model {_KEY}")
    if read_json_object(image / "config.json", "--model").get("quantization_config"):
        raise ConfigError(f"--model: {image} has quantised weights, in which a trained text model cannot be written")
    out = Path(arguments.out)
    _check_output(out)
    with _huggingface(arguments) as model:
        write_image_model(model, image, out, _KEY)
    return out


_WRITERS = {"hf": _hf, "image": _image, "checkpoint": _checkpoint, "peft": _peft, "megatron": _megatron}


@contextlib.contextmanager
def _huggingface(arguments: argparse.Namespace) -> Iterator[Path]:
    """Yield the source as a Hugging Face folder. If the source must be converted, the folder is temporary."""
    source = recognise(Path(arguments.source), _KEY)
    if source is None:
        yield Path(arguments.source)
        return
    if source.format is Format.CHECKPOINT:
        raise ConfigError(f"{_KEY}: {source.root} is already {source.format.value}")
    from gdpo_nemo.training.model_conversion import write_folder

    out = Path(arguments.out).absolute()
    _check_output(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".converting_") as folder:
        model = Path(folder) / "model"
        write_folder(source, model, _KEY, arguments.model)
        yield model


def to_huggingface(checkpoint: str | Path, out: str | Path, model: str | Path | None = None, layout: str = "") -> Path:
    """Write the weights of ``checkpoint`` (``.../checkpoints/step_N``) as a Hugging Face folder.

    Args:
        model: Hugging Face folder of the run's initial model. It provides the architecture, the tokenizer and, with
            LoRA, the frozen weights. None means the initial model in ``config.yaml`` of the run that contains the
            checkpoint.
        layout: parallel layout of the ranks, in the format of ``parse_layout``.

    Raises:
        ConfigError: if a path does not exist, or ``out`` exists and is not empty.
        RunError: if the checkpoint is damaged or cannot be read.
    """
    from gdpo_nemo.cluster.session import session

    out = Path(out)
    _check_output(out)
    checkpoint, config, model = _read_checkpoint(checkpoint, model, layout)
    with session(config.cluster):
        export(checkpoint, out, config, model)
    _write_card(checkpoint, out, model, _run_config(checkpoint))
    return out


def to_peft(checkpoint: str | Path, out: str | Path, model: str | Path | None = None, layout: str = "") -> Path:
    """Write the LoRA adapters in ``checkpoint`` as a folder that PEFT and vLLM can load.

    See ``to_huggingface`` for arguments and errors.
    """
    from gdpo_nemo.cluster.session import session

    out = Path(out)
    _check_output(out)
    checkpoint, config, model = _read_checkpoint(checkpoint, model, layout)
    if not config.policy.lora.rank:
        raise ConfigError(f"{_KEY}: {checkpoint} contains a full model (policy.lora.rank is 0); use --to hf")
    base = Path(model).absolute() if Path(model).is_dir() else model  # this path is stored in the adapter's config
    with whole_folder(out) as folder, session(config.cluster), _policy(config, base) as policy:
        policy.load_checkpoint(checkpoint, weights_only=True)
        policy.export_adapter(folder)
    return out


def to_megatron(model: str | Path, out: str | Path, config: Config, checkpoint: Path | None = None) -> Path:
    """Write a model as a distributed checkpoint of Megatron-core's GPTModel.

    The weights come from ``checkpoint`` or, if it is None, from the Hugging Face folder ``model``. The weights are
    written to ``out/release``, and config.json and the tokenizer to ``out/hf``.

    Raises:
        ConfigError: if a path does not exist, or ``out`` exists and is not empty.
        RunError: if the output cannot be written.
    """
    from gdpo_nemo.cluster.session import session

    out = Path(out)
    _check_output(out)
    with whole_folder(out) as folder, session(config.cluster), _policy(config, model) as policy:
        if checkpoint is not None:
            policy.load_checkpoint(checkpoint, weights_only=True)
        policy.save_megatron(folder)
    return out


def _read_checkpoint(checkpoint: str | Path, model: str | Path | None, layout: str) -> tuple[Path, Config, str | Path]:
    """Check a checkpoint and return (path, config for reading it, model folder). Raises ConfigError, RunError."""
    checkpoint = Path(checkpoint)
    if not (checkpoint / "files.json").is_file():
        raise ConfigError(f"{checkpoint}: not a checkpoint (no files.json)")
    run = _run_config(checkpoint)
    if model is None and run is not None:
        from gdpo_nemo.training.inputs import model_folder

        source = model_source(run.policy)
        model = model_folder(run, source) if source is not None else run.policy.model_name
    if model is None:
        raise ConfigError(f"--model: must name the model folder, because {checkpoint} is not in a run folder")
    config = export_config(model, layout, run)
    check_whole(checkpoint)
    return checkpoint, config, model


def _write_card(checkpoint: Path, out: Path, model: str | Path, run: Config | None) -> None:
    """Write the model card of an exported checkpoint, with facts about its run if the run is known. Raises RunError."""
    from gdpo_nemo.observe.model_card import write_card

    run_dir = real_path(checkpoint).parent.parent if run else None
    try:
        write_card(out, str(model), run, run_dir, read_state(checkpoint).step)
    except OSError as error:
        raise RunError(f"{out}: cannot write the model card ({error.strerror or error})") from None


def export_config(model: str | Path, layout: str = "", run: Config | None = None) -> Config:
    """Return the config of a policy in ``layout`` that can read checkpoints of ``run``. Raises ConfigError."""
    config = standalone_config(model, layout, run.policy.precision if run else "float32")
    if run:
        config.policy.lora = run.policy.lora
    return config


def export(checkpoint: Path, out: Path, config: Config, model: str | Path) -> None:
    """Write the weights of ``checkpoint`` as a Hugging Face folder, using the current Ray session. Raises RunError."""
    with _policy(config, model) as policy:
        policy.load_checkpoint(checkpoint, weights_only=True)
        policy.export(out)


def to_checkpoint(model: str | Path, out: str | Path, layout: str = "", precision: str = "float32") -> Path:
    """Write the Hugging Face folder ``model`` as a checkpoint of step 0 in ``out``, with a fresh optimizer.

    Raises:
        ConfigError: if a path does not exist, or ``out`` exists and is not empty.
        RunError: if the checkpoint cannot be written.
    """
    from gdpo_nemo.cluster.session import session

    out = Path(out)
    _check_output(out)
    config = standalone_config(model, layout, precision)
    with session(config.cluster), _policy(config, model) as policy:
        state = RunState(model=model_fingerprint(model))
        return Checkpoints(out, keep_last=1, keep_best=0, metric=None).save(state, policy.save)


def _check_output(out: Path) -> None:
    check_creatable_folder(str(out), out.parent)
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise ConfigError(f"{out}: exists and is not empty")


def _run_config(checkpoint: Path) -> Config | None:
    """Return the config of the run that contains the checkpoint, or None if the checkpoint is not in a run folder."""
    file = real_path(checkpoint).parent.parent / "config.yaml"
    return load_config(file) if file.is_file() else None


@contextlib.contextmanager
def _policy(config: Config, model: str | Path) -> Iterator[PolicyGroup]:
    """Start a policy, yield it, and stop it afterwards."""
    from gdpo_nemo.cluster.policy_group import PolicyGroup

    policy = PolicyGroup(config, str(model), total_updates=1)
    try:
        policy.ready()
        yield policy
    finally:
        policy.close()
