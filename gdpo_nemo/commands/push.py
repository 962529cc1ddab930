"""``gdpo-nemo push``: upload an exported model and its model card to the Hugging Face Hub.

No other command uploads files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path

from gdpo_nemo.commands.arguments import Commands, add_verbosity, say, verbosity
from gdpo_nemo.observe.display import QUIET, covered, shown
from gdpo_nemo.utils.errors import ConfigError, RunError, first_line
from gdpo_nemo.utils.files import real_path
from gdpo_nemo.utils.progress import phase

_INDEX = "model.safetensors.index.json"


def add(commands: Commands) -> None:
    """Register the command."""
    command = commands.add_parser("push", help="upload an exported model to the Hugging Face Hub, private by default")
    command.add_argument(
        "source", metavar="FOLDER", help="exported model, or run folder that contains an exported model"
    )
    command.add_argument("repo", metavar="REPO", help="repository OWNER/NAME on the Hub; created if it does not exist")
    command.add_argument("--public", action="store_true", help="make the repository public")
    command.add_argument(
        "--token-file",
        metavar="FILE",
        help="file with a write token for the Hub (default: the environment variable HF_TOKEN)",
    )
    command.add_argument(
        "--dry-run", action="store_true", help="list the files that would be uploaded, without network access"
    )
    add_verbosity(command)
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Upload a model and print its address, or list the files that would be uploaded."""
    folder = exported_model(Path(arguments.source))
    _check_name(arguments.repo)
    files = model_files(folder)
    token = None if arguments.dry_run else _token(arguments.token_file)
    level = verbosity(arguments)
    if level != QUIET and not (folder / "README.md").is_file():
        say(f"note: {folder} has no model card (README.md)", to_stderr=True)
    if token is None:
        _list(folder, files)
        say(f"would upload to {arguments.repo}, {'public' if arguments.public else 'private'}")
        return 0
    size = _format_size(sum((folder / name).stat().st_size for name in files)).strip()
    bars = level != QUIET and sys.stderr.isatty()
    with (
        shown(sys.stderr, level),
        phase("upload", lambda: f"{len(files)} files, {size}"),
        covered() if bars else contextlib.nullcontext(),  # the Hub's progress bars replace the status line
    ):
        page = push(folder, files, arguments.repo, token, public=arguments.public, bars=bars)
    say(page)
    return 0


def exported_model(source: Path) -> Path:
    """Return the model folder: ``source`` or its folder ``model``.

    Raises ConfigError if the model is missing or incomplete.
    """
    if (source / "files.json").is_file():
        raise ConfigError(f"{source}: is a checkpoint; convert this checkpoint with `gdpo-nemo convert --to hf`")
    folder = source / "model" if (source / "config.yaml").is_file() else source
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{source}: no exported model (no {'config.json' if folder == source else 'model/ in it'})")
    index = folder / _INDEX
    shards = set(_shards(index)) if index.is_file() else set()
    missing = sorted(name for name in shards if not (folder / name).is_file())
    if missing or not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder}: no exported model ({missing[0] if missing else 'its *.safetensors'} is missing)")
    return folder


def _shards(index: Path) -> list[str]:
    try:
        return list(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{index}: is not an index of model weights") from None


def model_files(folder: Path) -> list[str]:
    """Return the paths of the files to upload, relative to the folder. Hidden files are excluded.

    Raises:
        ConfigError: if a link points outside the folder, because its target could be a private file.
    """
    inside = real_path(folder)
    names = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts):
            continue
        if path.is_symlink() and not real_path(path).is_relative_to(inside):
            raise ConfigError(f"{path}: links to a file outside the model's folder; replace the link with the file")
        if path.is_file():
            names.append(str(name))
    return names


def _check_name(repo: str) -> None:
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, but missing in __all__

    try:
        validate_repo_id(repo)
    except ValueError as error:
        raise ConfigError(f"REPO: {repo!r} is not a valid repository name ({first_line(error)})") from None


def _list(folder: Path, files: list[str]) -> None:
    sizes = {name: (folder / name).stat().st_size for name in files}
    for name, size in sizes.items():
        say(f"{_format_size(size)}  {name}")
    say(f"{_format_size(sum(sizes.values()))}  {len(files)} files of {folder}")


def _format_size(size: int) -> str:
    """Format a number of bytes for a table column."""
    return f"{size / 1e6:10,.1f} MB" if size >= 1e5 else f"{size / 1e3:10,.1f} kB"


def _token(file: str | None) -> str:
    """Return the access token from ``file`` or, if ``file`` is None, from HF_TOKEN. Raises ConfigError."""
    try:
        token = Path(file).read_text(encoding="utf-8").strip() if file else os.environ.get("HF_TOKEN", "").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file: {file} cannot be read ({first_line(error)})") from None
    if not token or len(token.split()) > 1:
        if file:
            raise ConfigError(f"--token-file: {file} does not contain a token")
        raise ConfigError("no access token; set HF_TOKEN or use --token-file")
    return token


def push(folder: Path, files: list[str], repo: str, token: str, public: bool = False, bars: bool = False) -> str:
    """Upload files of a folder in one commit and return the URL of the repository. ``bars`` enables progress bars.

    Raises:
        ConfigError: if the repository is public and ``public`` is false.
        RunError: if the Hub cannot be reached or refuses the upload.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # missing in __all__

    if not bars:
        disable_progress_bars()
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=token)
    try:
        page = api.create_repo(repo, private=not public, exist_ok=True)
        if not public and not api.model_info(page.repo_id).private:
            raise ConfigError(
                f"{page.repo_id} already exists and is public; use --public to upload to a public repository"
            )
        message = f"Upload {real_path(folder).name} with gdpo_nemo"
        api.upload_folder(repo_id=page.repo_id, folder_path=folder, allow_patterns=files, commit_message=message)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - the Hub's client raises many exceptions for a failed upload
        raise RunError(f"{repo}: not pushed to {api.endpoint}: {first_line(error)}") from error
    return str(page)
