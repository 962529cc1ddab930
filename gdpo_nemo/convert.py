"""``gdpo-nemo convert``: Hugging Face folders to checkpoints and back, by real ranks in any layout.

No rank holds the model in the other format: each writes or reads its shards, and the Hugging Face side passes tensor by tensor
(the writing rank holds one shard file of at most 4 GB).
"""

from __future__ import annotations

from pathlib import Path

from gdpo_nemo.checkpoints import Checkpoints, RunState, model_fingerprint
from gdpo_nemo.config.standalone import standalone_config
from gdpo_nemo.errors import ConfigError


def to_huggingface(checkpoint: str | Path, out: str | Path, model: str | Path | None = None, layout: str = "") -> Path:
    """Write the weights of ``checkpoint`` (``.../checkpoints/step_N``) as a Hugging Face folder.

    Args:
        model: the Hugging Face folder the run started from, for architecture and tokenizer (and the frozen weights under
            LoRA); None takes it from ``config.yaml`` of the run that the checkpoint lies in.

    Raises:
        ConfigError: something named does not exist. RunError: the checkpoint cannot be read.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    if not (checkpoint / "files.json").is_file():
        raise ConfigError(f"{checkpoint}: not a checkpoint (no files.json)")
    _must_be_new(out)
    precision, lora = "float32", None
    run = _run_section(checkpoint)
    if run is not None:
        model = model or run.policy.model_name
        precision, lora = run.policy.precision, run.policy.lora
    if model is None:
        raise ConfigError(f"--model: must name the model folder; {checkpoint} lies in no run folder")
    config = standalone_config(model, layout, precision)
    if lora is not None:
        config.policy.lora = lora
    with _policy(config, model) as policy:
        policy.load(checkpoint, weights_only=True)
        policy.export(out)
    return out


def to_checkpoint(model: str | Path, out: str | Path, layout: str = "", precision: str = "float32") -> Path:
    """Write the Hugging Face folder ``model`` as a checkpoint of step 0 in ``out``, its optimizer untouched.

    Raises:
        ConfigError: something named does not exist. RunError: it cannot be written.
    """
    out = Path(out)
    _must_be_new(out)
    with _policy(standalone_config(model, layout, precision), model) as policy:
        state = RunState(model=model_fingerprint(model))
        return Checkpoints(out, keep_last=1, keep_best=0, metric=None).save(state, policy.save)


def _must_be_new(out: Path) -> None:
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise ConfigError(f"{out}: exists and is not empty")


def _run_section(checkpoint: Path):
    """The config of the run a checkpoint lies in, or None."""
    from gdpo_nemo.config.load import load_config

    file = checkpoint.resolve().parent.parent / "config.yaml"
    return load_config(file) if file.is_file() else None


def _policy(config, model):
    """A policy group in a Ray session of its own, as a context manager."""
    import contextlib

    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.cluster.session import session

    @contextlib.contextmanager
    def standing():
        with session(config.cluster):
            policy = PolicyGroup(config, str(model), total_updates=1)
            policy.ready()
            yield policy

    return standing()
