"""``gdpo-nemo convert``: models between Hugging Face folders, checkpoints and other programs' formats.

Checkpoints are read and written by real ranks in any layout. No rank holds the model in the other format: each has its
shards, and the Hugging Face side passes tensor by tensor (the writing rank holds one shard file of at most 4 GB).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Iterator

from gdpo_nemo.checkpoints import Checkpoints, RunState, check_whole, model_fingerprint, read_state
from gdpo_nemo.commands.arguments import add_layout, add_verbosity, say, verbosity
from gdpo_nemo.config.files import check_folder_can_be, model_source
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.model_formats import Format, recognise
from gdpo_nemo.config.reading import real_path
from gdpo_nemo.config.schema import Config
from gdpo_nemo.config.standalone import standalone_config
from gdpo_nemo.errors import ConfigError, RunError
from gdpo_nemo.formats.whole_folder import whole_folder
from gdpo_nemo.observe.display import shown

if TYPE_CHECKING:
    from gdpo_nemo.cluster.policy_group import PolicyGroup

_KEY = "SOURCE"


def add(commands) -> None:
    """Register the command."""
    command = commands.add_parser("convert", help="models between Hugging Face folders, checkpoints and other formats")
    command.add_argument("--to", required=True, choices=tuple(_WRITERS), help="what to write")
    command.add_argument(
        "source",
        metavar="SOURCE",
        help="checkpoints/step_N of a run, a Hugging Face folder, a GGUF file, a PEFT adapter, a Megatron-core or "
        "NeMo 2 checkpoint",
    )
    command.add_argument("out", metavar="OUT", help="folder to write; must be new")
    command.add_argument(
        "--model",
        metavar="DIR",
        help="the Hugging Face folder that a checkpoint started from (default: the run's), that an adapter belongs to "
        "(default: the one that it names), or that describes a Megatron-core checkpoint",
    )
    add_layout(command)
    add_verbosity(command)
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Convert a model and say where the result is."""
    with shown(sys.stderr, verbosity(arguments)):
        made = _WRITERS[arguments.to](arguments)
    say(made)
    return 0


def _hf(arguments: argparse.Namespace) -> Path:
    source = recognise(Path(arguments.source), _KEY)
    if source is None or source.format is Format.CHECKPOINT:
        return to_huggingface(arguments.source, arguments.out, arguments.model, arguments.layout)
    from gdpo_nemo.formats.to_huggingface import write_folder

    out = Path(arguments.out)
    _must_be_new(out)
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
        checkpoint, config, model = _of_checkpoint(arguments.source, arguments.model, arguments.layout)
        if config.policy.lora.rank:
            raise ConfigError(f"{_KEY}: {checkpoint} holds adapters; make it --to hf first, and that --to megatron")
        return to_megatron(model, arguments.out, config, checkpoint)
    with _huggingface(arguments) as model:
        config = standalone_config(model, arguments.layout, arguments.precision)
        return to_megatron(model, arguments.out, config)


_WRITERS = {"hf": _hf, "checkpoint": _checkpoint, "peft": _peft, "megatron": _megatron}


@contextlib.contextmanager
def _huggingface(arguments: argparse.Namespace) -> Iterator[Path]:
    """The source as a Hugging Face folder, which is gone afterwards where it had to be made."""
    source = recognise(Path(arguments.source), _KEY)
    if source is None:
        yield Path(arguments.source)
        return
    if source.format is Format.CHECKPOINT:
        raise ConfigError(f"{_KEY}: {source.root} is {source.format.value} already")
    from gdpo_nemo.formats.to_huggingface import write_folder

    out = Path(arguments.out).absolute()
    _must_be_new(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".converting_") as folder:
        model = Path(folder) / "model"
        write_folder(source, model, _KEY, arguments.model)
        yield model


def to_huggingface(checkpoint: str | Path, out: str | Path, model: str | Path | None = None, layout: str = "") -> Path:
    """Write the weights of ``checkpoint`` (``.../checkpoints/step_N``) as a Hugging Face folder.

    Args:
        model: the Hugging Face folder the run started from, for architecture and tokenizer (and the frozen weights
        under
            LoRA); None takes it from ``config.yaml`` of the run that the checkpoint lies in.

    Raises:
        ConfigError: something named does not exist. RunError: the checkpoint is damaged or cannot be read.
    """
    from gdpo_nemo.cluster.session import session

    out = Path(out)
    _must_be_new(out)
    checkpoint, config, model = _of_checkpoint(checkpoint, model, layout)
    with session(config.cluster):
        export(checkpoint, out, config, model)
    _write_card(checkpoint, out, model, _run_section(checkpoint))
    return out


def to_peft(checkpoint: str | Path, out: str | Path, model: str | Path | None = None, layout: str = "") -> Path:
    """Write the adapters of a LoRA run's ``checkpoint`` as a folder that PEFT and vLLM load.

    Args and errors: as ``to_huggingface``.
    """
    from gdpo_nemo.cluster.session import session

    out = Path(out)
    _must_be_new(out)
    checkpoint, config, model = _of_checkpoint(checkpoint, model, layout)
    if not config.policy.lora.rank:
        raise ConfigError(f"{_KEY}: {checkpoint} holds a whole model (policy.lora.rank is 0); make it --to hf")
    base = Path(model).absolute() if Path(model).is_dir() else model  # the adapter names it, wherever that is read
    with whole_folder(out) as folder, session(config.cluster), _policy(config, base) as policy:
        policy.load_checkpoint(checkpoint, weights_only=True)
        policy.export_adapter(folder)
    return out


def to_megatron(model: str | Path, out: str | Path, config: Config, checkpoint: Path | None = None) -> Path:
    """Write the Hugging Face folder ``model``, or a ``checkpoint`` of it, as a distributed checkpoint of
    Megatron-core's GPTModel: ``release`` in ``out``, with config.json and tokenizer in ``hf`` beside it.

    Raises:
        ConfigError: something named does not exist. RunError: it cannot be written.
    """
    from gdpo_nemo.cluster.session import session

    out = Path(out)
    _must_be_new(out)
    with whole_folder(out) as folder, session(config.cluster), _policy(config, model) as policy:
        if checkpoint is not None:
            policy.load_checkpoint(checkpoint, weights_only=True)
        policy.save_megatron(folder)
    return out


def _of_checkpoint(checkpoint: str | Path, model: str | Path | None, layout: str) -> tuple[Path, Config, str | Path]:
    """The whole checkpoint, the config of a policy that reads it, and the model's folder. Raises ConfigError,
    RunError."""
    checkpoint = Path(checkpoint)
    if not (checkpoint / "files.json").is_file():
        raise ConfigError(f"{checkpoint}: not a checkpoint (no files.json)")
    run = _run_section(checkpoint)
    if model is None and run is not None:
        from gdpo_nemo.inputs import model_folder

        model = model_folder(run) if model_source(run) is not None else run.policy.model_name
    if model is None:
        raise ConfigError(f"--model: must name the model folder; {checkpoint} lies in no run folder")
    config = export_config(model, layout, run)
    check_whole(checkpoint)
    return checkpoint, config, model


def _write_card(checkpoint: Path, out: Path, model: str | Path, run: Config | None) -> None:
    """The model card of a checkpoint, with what is known of its run. Raises RunError."""
    from gdpo_nemo.observe.model_card import write_card

    run_dir = real_path(checkpoint).parent.parent if run else None
    try:
        write_card(out, str(model), run, run_dir, read_state(checkpoint).step)
    except OSError as error:
        raise RunError(f"{out}: the model card could not be written: {error.strerror or error}") from None


def export_config(model: str | Path, layout: str = "", run: Config | None = None) -> Config:
    """The config of a policy that reads checkpoints of ``run`` in ``layout``. Raises ConfigError."""
    config = standalone_config(model, layout, run.policy.precision if run else "float32")
    if run:
        config.policy.lora = run.policy.lora
    return config


def export(checkpoint: Path, out: Path, config: Config, model: str | Path) -> None:
    """Write the weights of ``checkpoint`` as a Hugging Face folder, by ranks in the Ray session that stands. Raises
    RunError."""
    with _policy(config, model) as policy:
        policy.load_checkpoint(checkpoint, weights_only=True)
        policy.export(out)


def to_checkpoint(model: str | Path, out: str | Path, layout: str = "", precision: str = "float32") -> Path:
    """Write the Hugging Face folder ``model`` as a checkpoint of step 0 in ``out``, its optimizer untouched.

    Raises:
        ConfigError: something named does not exist. RunError: it cannot be written.
    """
    from gdpo_nemo.cluster.session import session

    out = Path(out)
    _must_be_new(out)
    config = standalone_config(model, layout, precision)
    with session(config.cluster), _policy(config, model) as policy:
        state = RunState(model=model_fingerprint(model))
        return Checkpoints(out, keep_last=1, keep_best=0, metric=None).save(state, policy.save)


def _must_be_new(out: Path) -> None:
    check_folder_can_be(str(out), out.parent)
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise ConfigError(f"{out}: exists and is not empty")


def _run_section(checkpoint: Path) -> Config | None:
    """The config of the run a checkpoint lies in, or None."""
    file = real_path(checkpoint).parent.parent / "config.yaml"
    return load_config(file) if file.is_file() else None


@contextlib.contextmanager
def _policy(config: Config, model: str | Path) -> Iterator[PolicyGroup]:
    """A policy that is gone afterwards."""
    from gdpo_nemo.cluster.policy_group import PolicyGroup

    policy = PolicyGroup(config, str(model), total_updates=1)
    try:
        policy.ready()
        yield policy
    finally:
        policy.close()
