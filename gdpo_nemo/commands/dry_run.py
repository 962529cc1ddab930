"""What ``train --dry-run`` reads besides the config: the data that lies on this machine, as the run will read it.

Rows are loaded and checked, prompts are rendered and tokenised where the tokenizer lies here, too, and each environment
verifies the completions that ``gdpo-nemo env check`` would try, on the first of its rows. Datasets on the hub and rows
that an environment makes are left to the run.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Mapping, Sequence

from gdpo_nemo.config.algorithm_choice import samples
from gdpo_nemo.config.files import data_places, is_local, is_rows_function, model_source
from gdpo_nemo.config.model_formats import Format, Source
from gdpo_nemo.config.model_sources import described_by
from gdpo_nemo.config.schema import Config, DatasetConfig
from gdpo_nemo.data.rows import Row, environment_of_row, load_rows
from gdpo_nemo.data.splits import room_for_prompts, wanted_splits
from gdpo_nemo.data.tokenizer import check_same_tokens, special_tool_calls
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.formats.converted import converted_path

SMALL_FILE = 32 << 20
"""Bytes up to which a file is read whole."""
SAMPLE = 10_000
"""Rows that are read of a larger file, and prompts that are rendered and tokenised of any."""


def check_data(config: Config) -> list[tuple[str, str]]:
    """Read the local data of the splits that the run reads, and return what was found, a (subject, sentence) each.

    Raises:
        ConfigError: what the run would refuse: a row, a prompt, an environment's options. RunError: an environment's
        code fails.
    """
    splits = {split: getattr(config.data, split) for split in wanted_splits(config)}
    places = {split: data_places(f"data.{split}", data) for split, data in splits.items()}
    absent = {split: [place for place in found if not is_local(place)] for split, found in places.items()}
    local = {split: data for split, data in splits.items() if places[split] and not absent[split]}
    found = [
        ("data", f"data.{split}: {place} is {'made by code' if is_rows_function(place) else 'on the hub'}, unchecked")
        for split, names in absent.items()
        for place in names
    ]
    if local:
        found += _check_local(config, local)
    return [*found, *_lost_tool_calls(config)]


def _check_local(config: Config, splits: Mapping[str, DatasetConfig]) -> list[tuple[str, str]]:
    from gdpo_nemo.environments.registry import check_rewards, load_environments

    environments = load_environments(config.env)
    check_rewards(config, environments)
    tokenizer = _local_tokenizer(config)
    if tokenizer is not None and config.teacher.model_name and Path(config.teacher.model_name).is_dir():
        check_same_tokens(tokenizer, config.teacher.model_name, "teacher.model_name")
    found = []
    first: dict[str, tuple[Any, Any]] = {}
    for split, data in splits.items():
        rows = load_rows(data, environments, split, config.run.seed, _limit(data))
        found.append(
            (
                "data",
                f"data.{split}: {_amount(rows, data)} of {data.path}; "
                f"{_prompts(config, split, rows, environments, tokenizer)}",
            )
        )
        for index, row in enumerate(rows):
            name = environment_of_row(row, data, environments, split, index)
            if data.strided is None:
                first.setdefault(name, (row, data.prompt_key))
    if not samples(config):
        return found
    return [
        *found,
        *(("env", _verdicts(config, name, environments[name], row, key)) for name, (row, key) in first.items()),
    ]


def _limit(data: DatasetConfig) -> int | None:
    """Rows to read; None: all of them."""
    paths = [Path(os.path.expanduser(place)) for place in data_places("data", data)]
    return None if all(path.is_file() for path in paths) and _size(paths) <= SMALL_FILE else SAMPLE


def _size(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def _amount(rows: list[Row], data: DatasetConfig) -> str:
    return f"{len(rows)} rows" if _limit(data) is None or len(rows) < SAMPLE else f"the first {len(rows)} rows"


def _local_tokenizer(config: Config) -> Any:
    """Return the tokenizer if its folder is on this machine, else None."""
    folder = _tokenizer_folder(config)
    if folder is None:
        return None
    from gdpo_nemo.data.tokenizer import load_tokenizer

    return load_tokenizer(config, folder)


def _tokenizer_folder(config: Config) -> Path | None:
    """Return the folder with the run's tokenizer if it is on this machine, else None."""
    source = model_source(config)
    place: str | Path | None = config.policy.tokenizer_name or config.policy.model_name
    if source is not None and config.policy.tokenizer_name is None:
        place = _folder_of(config, source)
    return Path(place) if place is not None and Path(place).is_dir() else None


def _lost_tool_calls(config: Config) -> list[tuple[str, str]]:
    """Return a note if the model writes its tool calls with special tokens, which completions are decoded without."""
    folder = _tokenizer_folder(config) if samples(config) else None
    names = special_tool_calls(folder) if folder is not None else []
    if not names:
        return []
    sentence = (
        f"policy.model_name: {', '.join(names)}: special tokens of tool calls; completions are decoded without special "
        "tokens, so no environment sees a tool call of this model"
    )
    return [("model", sentence)]


def _folder_of(config: Config, source: Source) -> Path | None:
    """The folder with the tokenizer of a model in another format, as far as there is one before the run."""
    if source.format is Format.GGUF:
        return converted_path(config, source, None)
    return described_by(source, "policy.model_name")


def _prompts(config: Config, split: str, rows: list[Row], environments: Mapping[str, Any], tokenizer: Any) -> str:
    """A line on the prompts: tokens where there is a tokenizer, else that there is a prompt in every
    row."""
    from gdpo_nemo.data.examples import check_rows, source_of

    data = getattr(config.data, split)
    check_rows(config, rows, data, split)
    if tokenizer is None:
        return "prompts not tokenised, the tokenizer is not here yet"
    room = room_for_prompts(config)
    source = source_of(config)(
        data, environments, tokenizer, split=split, seed=config.run.seed, max_prompt_tokens=room, rows=rows[:SAMPLE]
    )
    return source.summary(None if len(rows) <= SAMPLE else SAMPLE)


def _verdicts(config: Config, name: str, environment: Any, row: Row, key: str | None) -> str:
    """The environment's own check on one row, unless it needs more than worker processes."""
    from gdpo_nemo.commands.env_check import check_environment

    if environment.plays_with_endpoint or environment.has_preflight:
        return f"env.{name}: needs the servers of the run, unchecked"
    options = config.env[name] or {}
    rollout = config.rollout
    try:
        check = check_environment(
            name, options, environment, [row], workers=1, timeout_s=rollout.env_timeout_s, key=key
        )
    except ConfigError as error:
        raise ConfigError(f"env.{name}: {error}") from None
    details = "; ".join(dict.fromkeys(verdict.detail for verdict in check.verdicts if verdict.detail))
    failed = f", {check.failed} would be masked ({details})" if check.failed else ""
    return f"env.{name}: verified {len(check.samples)} completions to row {row['id']} in {check.start_s:.1f} s{failed}"
