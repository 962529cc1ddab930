"""``gdpo-nemo push``: an exported model, with its card, to the Hugging Face hub. Nothing else here uploads anything."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path

from gdpo_nemo.commands.arguments import add_verbosity, say, verbosity
from gdpo_nemo.config.messages import first_line
from gdpo_nemo.config.reading import real_path
from gdpo_nemo.errors import ConfigError, RunError
from gdpo_nemo.observe.display import QUIET, covered, shown
from gdpo_nemo.phases import phase

_INDEX = "model.safetensors.index.json"


def add(commands) -> None:
    """Register the command."""
    command = commands.add_parser("push", help="upload an exported model to the Hugging Face hub, private by default")
    command.add_argument("source", metavar="FOLDER", help="an exported model, or the folder of a run that has one")
    command.add_argument("repo", metavar="REPO", help="OWNER/NAME on the hub; made where it is not there")
    command.add_argument("--public", action="store_true", help="let everybody read it")
    command.add_argument(
        "--token-file", metavar="FILE", help="that holds a token with the right to write; default: HF_TOKEN"
    )
    command.add_argument("--dry-run", action="store_true", help="list what would be uploaded, and connect to nobody")
    add_verbosity(command)
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Upload a model, or list what would be, and say where it is."""
    folder = exported_model(Path(arguments.source))
    _check_name(arguments.repo)
    files = model_files(folder)
    token = None if arguments.dry_run else _token(arguments.token_file)
    level = verbosity(arguments)
    if level != QUIET and not (folder / "README.md").is_file():
        say(f"note: {folder} has no model card (README.md)", to_stderr=True)
    if token is None:
        _list(folder, files)
        say(f"would go to {arguments.repo}, {'for everybody' if arguments.public else 'private'}")
        return 0
    size = _shown(sum((folder / name).stat().st_size for name in files)).strip()
    bars = level != QUIET and sys.stderr.isatty()
    with shown(sys.stderr, level), phase("upload", lambda: f"{len(files)} files, {size}"):
        with covered() if bars else contextlib.nullcontext():  # the hub's bars show more than a line of ours would
            page = push(folder, files, arguments.repo, token, arguments.public, bars)
    say(page)
    return 0


def exported_model(source: Path) -> Path:
    """The folder of the model that ``source`` is or has. Raises ConfigError where there is none, or not all of it."""
    if (source / "files.json").is_file():
        raise ConfigError(f"{source}: a checkpoint; `gdpo-nemo convert --to hf` makes a model of it")
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
        raise ConfigError(f"{index}: no index of a model's weights") from None


def model_files(folder: Path) -> list[str]:
    """Return the files to upload, relative to the folder, without hidden ones.

    Raises:
        ConfigError: if a link leads out of the folder. What it names may be no part of the model, a key for instance.
    """
    inside = real_path(folder)
    names = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts):
            continue
        if path.is_symlink() and not real_path(path).is_relative_to(inside):
            raise ConfigError(f"{path}: is a link out of the model's folder; replace it with the file that it names")
        if path.is_file():
            names.append(str(name))
    return names


def _check_name(repo: str) -> None:
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, but no __all__ names it

    try:
        validate_repo_id(repo)
    except ValueError as error:
        raise ConfigError(f"REPO: {repo!r} is no name on the hub ({first_line(error)})") from None


def _list(folder: Path, files: list[str]) -> None:
    sizes = {name: (folder / name).stat().st_size for name in files}
    for name, size in sizes.items():
        say(f"{_shown(size)}  {name}")
    say(f"{_shown(sum(sizes.values()))}  {len(files)} files of {folder}")


def _shown(size: int) -> str:
    """Bytes, for a column."""
    return f"{size / 1e6:10,.1f} MB" if size >= 1e5 else f"{size / 1e3:10,.1f} kB"


def _token(file: str | None) -> str:
    """The token that was given. Raises ConfigError."""
    try:
        token = Path(file).read_text(encoding="utf-8").strip() if file else os.environ.get("HF_TOKEN", "").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file: {file} cannot be read ({first_line(error)})") from None
    if not token or len(token.split()) > 1:
        raise ConfigError(
            f"--token-file: {file} holds no token"
            if file
            else "no token: set HF_TOKEN, or name a file with --token-file"
        )
    return token


def push(folder: Path, files: list[str], repo: str, token: str, public: bool = False, bars: bool = False) -> str:
    """Upload files of a folder in one commit, with the hub's ``bars`` or without; returns the page of the repository.

    Raises:
        ConfigError: the repository is there for everybody to read, and ``public`` is false. RunError: the hub cannot be
        reached, or refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # as above

    if not bars:
        disable_progress_bars()
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=token)
    try:
        page = api.create_repo(repo, private=not public, exist_ok=True)
        if not public and not api.model_info(page.repo_id).private:
            raise ConfigError(f"{page.repo_id} is there for everybody to read; --public says that this is meant")
        message = f"Upload {real_path(folder).name} with gdpo_nemo"
        api.upload_folder(repo_id=page.repo_id, folder_path=folder, allow_patterns=files, commit_message=message)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - the hub's client raises many kinds; all mean that it is not uploaded
        raise RunError(f"{repo}: not pushed to {api.endpoint}: {first_line(error)}") from error
    return str(page)
