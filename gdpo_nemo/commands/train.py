"""``gdpo-nemo train``: start or resume a run. With ``--dry-run``, check config and local data, and print the plan."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gdpo_nemo.algorithms.loss_selection import is_import_path
from gdpo_nemo.commands.arguments import Commands, add_config, add_verbosity, say, verbosity
from gdpo_nemo.config.data_files import data_paths, is_local, is_rows_function, splits_to_read
from gdpo_nemo.config.environment_algorithms import check_rows_of
from gdpo_nemo.config.layout import Resolved
from gdpo_nemo.config.load import load_config, to_yaml
from gdpo_nemo.config.schema import Config, DatasetConfig, RunConfig
from gdpo_nemo.config.sections import max_prompt_tokens
from gdpo_nemo.data.mix import check_mix
from gdpo_nemo.data.rows import Row, SlowRows, environment_of_row, load_rows
from gdpo_nemo.data.tokenizer import Tokenizer, check_same_tokens, load_image_reader
from gdpo_nemo.models.sources import Format, Source, described_by
from gdpo_nemo.observe.display import process_start, shown
from gdpo_nemo.planning.report import describe
from gdpo_nemo.training.api import run as train
from gdpo_nemo.training.supervisor import FIRST_ATTEMPT, Attempt, supervised
from gdpo_nemo.training.validation import validate
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.progress import phase


def add(commands: Commands) -> None:
    """Register the command."""
    command = commands.add_parser("train", help="start a training run, or resume the run in the same folder")
    add_config(command)
    add_verbosity(command)
    command.add_argument(
        "--dry-run", action="store_true", help="validate, print the resolved config and the plan, and exit"
    )
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Validate the config, then train or, with --dry-run, print the plan."""
    if arguments.dry_run:
        config = load_config(arguments.config, arguments.overrides)
        return _dry_run(validate(config))
    level = verbosity(arguments)
    with shown(sys.stdout, level) as display, phase("config"):
        config = load_config(arguments.config, arguments.overrides)
        resolved = validate(config)

    started = process_start()

    def start(attempt: Attempt) -> int:
        with shown(sys.stdout, level, attempt.begin, None if attempt.begin else display):
            return train(resolved, replace(attempt, begin=attempt.begin or started)).status

    return supervised(config, start) if arguments.alone and config.run.max_restarts else start(FIRST_ATTEMPT)


def _dry_run(resolved: Resolved) -> int:
    """Check local data, and print the config followed by the plan as comments. The output is a valid config file."""
    from gdpo_nemo.observe.installation import missing_libraries, socket_folder_problem
    from gdpo_nemo.observe.trackers import missing_trackers

    config = resolved.config
    notes = resolved.notes
    if config.cluster.gpus_per_node == 0 and (missing := missing_libraries()):
        notes = (*notes, missing)
    if problem := socket_folder_problem():
        notes = (*notes, problem)
    notes = (*notes, *missing_trackers(config))
    output = to_yaml(config) + "\n" + plan_of(resolved, notes, check_inputs(resolved))
    say(output)
    return 0


def check_inputs(resolved: Resolved) -> list[tuple[str, str]]:
    """Read local data, load user-defined functions, and compare the config with that of the run to resume.

    Return the findings as pairs (subject, sentence).

    Raises:
        ConfigError, RunError: the errors that the run would raise.
    """

    from gdpo_nemo.rollouts.user_functions import check_own_functions
    from gdpo_nemo.training.resume import planned_changes, run_date

    config = resolved.config
    config.run.date = run_date(config, Path(config.run.dir))
    notes = check_own_functions(config)
    if is_import_path(config.algorithm.type):
        from gdpo_nemo.training.algorithm import load_algorithm

        load_algorithm(config, resolved.algorithm)
    tokenizer = _local_tokenizer(resolved)
    return [
        *check_data(resolved, tokenizer),
        *(("note", sentence) for sentence in (*notes, *_token_notes(resolved, tokenizer))),
        *(("resume", sentence) for sentence in planned_changes(config)),
    ]


def plan_of(resolved: Resolved, notes: Sequence[str], found: Sequence[tuple[str, str]]) -> str:
    """Return the plan of a run as YAML comments. ``found`` are the findings of ``check_inputs``."""
    from gdpo_nemo.planning.report import align_lines, dry_run_lines

    lines = [*describe(resolved, notes).splitlines(), *align_lines([*dry_run_lines(resolved), *found]).splitlines()]
    return "\n".join(f"# {line}" for line in lines)


SMALL_FILE = 32 << 20
"""Maximum size of a file, in bytes, that is read completely."""
SAMPLE = 10_000
"""Number of rows to read from a larger file, and maximum number of prompts to tokenize."""


def check_data(resolved: Resolved, tokenizer: Tokenizer | None) -> list[tuple[str, str]]:
    """Read and check the local data of the splits that the run uses. Returns findings as pairs (subject, sentence).

    Args:
        tokenizer: the run's tokenizer, or None if it is not on this machine.

    Raises:
        ConfigError: if the run would reject a row, a prompt or an environment's options.
        RunError: if an environment's code fails.
    """
    found = []
    local = {}
    for split in splits_to_read(resolved.config):
        data = getattr(resolved.config.data, split)
        places = data_paths(f"data.{split}", data)
        remote = [place for place in places if not is_local(place) and not is_rows_function(place)]
        for place in remote:
            found.append(("data", f"data.{split}: {place} is on the Hub, not checked"))
        if places and not remote:
            local[split] = data
    if local:
        try:
            found += _check_local(resolved, local, tokenizer)
        except SlowRows as error:
            found.append(("data", f"{error}, not checked"))
    return found


def _check_local(
    resolved: Resolved, splits: Mapping[str, DatasetConfig], tokenizer: Tokenizer | None
) -> list[tuple[str, str]]:
    from gdpo_nemo.environments.registry import check_rewards, load_environments

    config = resolved.config
    environments = load_environments(config.env)
    check_rewards(config, resolved.algorithm, environments)
    if tokenizer is not None and config.teacher.model_name and Path(config.teacher.model_name).is_dir():
        check_same_tokens(tokenizer, config.teacher.model_name, "teacher.model_name")
    found = []
    first_rows: dict[str, tuple[Any, Any]] = {}
    for split, data in splits.items():
        rows = _with_images(resolved, split, load_rows(data, environments, split, config.run.seed, _limit(data)))
        prompts = _prompts(resolved, split, rows, environments, tokenizer)
        found.append(("data", f"data.{split}: {_row_count(rows, data)} of {data.path}; {prompts}"))
        names = [environment_of_row(row, data, environments, split, index) for index, row in enumerate(rows)]
        for name, row in zip(names, rows):
            if data.strided is None:
                first_rows.setdefault(name, (row, data.prompt_key))
        complete = _limit(data) is None or len(rows) < SAMPLE
        if split == "train" and complete:
            check_rows_of(config, names)
        if split == "train" and config.data.mix:
            sources = ((row["id"], name, row) for name, row in zip(names, rows))
            counts = check_mix(config.data, sources, complete=complete)
            found.append(
                ("data", "data.mix: " + ", ".join(f"{count} rows of {name}" for name, count in counts.items()))
            )
    if resolved.algorithm.samples:
        for name, (row, key) in first_rows.items():
            found.append(("env", _check_one_row(config, name, environments[name], row, key)))
    return found


def _with_images(resolved: Resolved, split: str, rows: list[Row]) -> list[Row]:
    """Return the rows with their images read, unless the model is known to be a text model."""
    model = resolved.model.description
    data = getattr(resolved.config.data, split)
    if data.strided is not None or (model is not None and model.tower is None):
        return rows
    from gdpo_nemo.data.row_images import rows_with_images

    return rows_with_images(rows, data, split, resolved.config.data.images, kind=resolved.algorithm.rows)


def _limit(data: DatasetConfig) -> int | None:
    """Return the number of rows to read, or None to read all rows."""
    paths = [Path(os.path.expanduser(location)) for location in data_paths("data", data)]
    if all(path.is_file() for path in paths) and sum(path.stat().st_size for path in paths) <= SMALL_FILE:
        return None
    return SAMPLE


def _row_count(rows: list[Row], data: DatasetConfig) -> str:
    return f"{len(rows)} rows" if _limit(data) is None or len(rows) < SAMPLE else f"the first {len(rows)} rows"


def _local_tokenizer(resolved: Resolved) -> Tokenizer | None:
    """Return the tokenizer, or None if its folder is not on this machine."""
    folder = _tokenizer_folder(resolved)
    if folder is None:
        return None
    from gdpo_nemo.data.tokenizer import load_tokenizer

    return load_tokenizer(resolved.config.policy, folder, resolved.config.run.date)


def _token_notes(resolved: Resolved, tokenizer: Tokenizer | None) -> list[str]:
    """Compare the tokenizer with the model, if both are on this machine. See ``inputs.check_tokens``."""
    from gdpo_nemo.training.inputs import check_tokens

    policy, source = resolved.config.policy, resolved.model.source
    folder: Path | None = Path(policy.model_name)
    if source is not None:
        folder = None if policy.tokenizer_name else _converted_tokenizer_folder(resolved.config.run, source)
    if tokenizer is None or folder is None or not (folder / "config.json").is_file():
        return []
    return check_tokens(resolved.config, tokenizer, folder)


def _tokenizer_folder(resolved: Resolved) -> Path | None:
    """Return the folder with the run's tokenizer, or None if the folder is not on this machine."""
    config = resolved.config
    source = resolved.model.source
    location: str | Path | None = config.policy.tokenizer_name or config.policy.model_name
    if source is not None and config.policy.tokenizer_name is None:
        location = _converted_tokenizer_folder(config.run, source)
    return Path(location) if location is not None and Path(location).is_dir() else None


def _converted_tokenizer_folder(run: RunConfig, source: Source) -> Path | None:
    """Return the tokenizer folder of a model in another format, or None if only the run creates the folder."""
    if source.format is Format.GGUF:
        from gdpo_nemo.training.inputs import converted_path

        return converted_path(run, source, None)
    return described_by(source, "policy.model_name")


def _prompts(
    resolved: Resolved, split: str, rows: list[Row], environments: Mapping[str, Any], tokenizer: Tokenizer | None
) -> str:
    """Check the prompts and describe their lengths in tokens.

    Without a tokenizer, only check that each row has a prompt.
    """
    from gdpo_nemo.data.examples import check_rows, source_of

    config = resolved.config
    data = getattr(config.data, split)
    check_rows(resolved.algorithm, rows, data, split)
    if tokenizer is None:
        return "prompts are not tokenized, because the tokenizer is not available yet"
    model = Path(config.policy.model_name)
    images = load_image_reader(config.data.images, model, tokenizer) if (model / "config.json").is_file() else None
    prompt_limit = max_prompt_tokens(config.policy)
    source = source_of(resolved.algorithm)(
        data,
        environments,
        tokenizer,
        split=split,
        seed=config.run.seed,
        max_prompt_tokens=prompt_limit,
        rows=rows[:SAMPLE],
        images=images,
    )
    return source.summary(None if len(rows) <= SAMPLE else SAMPLE)


def _check_one_row(config: Config, name: str, environment: Any, row: Row, key: str | None) -> str:
    """Verify completions for one row and describe the result. Environments that require servers are not checked."""
    from gdpo_nemo.commands.env.check import check_environment
    from gdpo_nemo.environments.registry import plugin_of

    needs_servers = environment.has_preflight and plugin_of(name, config.env[name]) != "tool_class"
    if environment.plays_with_endpoint or needs_servers:
        return f"env.{name}: not checked, because it requires the servers of the run"
    options = config.env[name] or {}
    rollout = config.rollout
    try:
        check = check_environment(name, options, environment, [row], timeout_s=rollout.env_timeout_s, key=key)
    except ConfigError as error:
        raise error.within(f"env.{name}") from None
    failed = f", {check.failed} would be masked ({check.reasons})" if check.failed else ""
    return f"env.{name}: verified {len(check.samples)} completions for row {row['id']} in {check.start_s:.1f} s{failed}"
