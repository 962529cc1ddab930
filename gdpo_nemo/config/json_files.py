"""JSON files that a user names or brings along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gdpo_nemo.config.reading import parse_json, read_text
from gdpo_nemo.errors import ConfigError


def read_json_object(file: Path, key: str) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        key: what the user named the file by, for messages.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        content = parse_json(read_text(file))
    except OSError as error:
        raise ConfigError(f"{key}: {file} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError(f"{key}: {file} is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{key}: {file} is not a JSON object")
    return content
