"""The rows of a config of axolotl: where they are, and the form that they have."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Mapping, Sequence

from gdpo_nemo.config.algorithm_choice import PREFERENCES
from gdpo_nemo.config.example_types import FIELDS, PREFIXES, PROMPT_COLUMNS, is_transform
from gdpo_nemo.interop.account import Account
from gdpo_nemo.interop.axolotl.axolotl_config import ALGORITHMS, AxolotlConfig

_FILE_KINDS = ("json", "csv", "parquet", "jsonl")
_REMOTE = ("s3://", "gs://", "gcs://", "adl://", "abfs://", "az://", "oci://", "http://", "https://")
_TEXTS = {"alpaca": "alpaca", "alpaca:instruct": "alpaca", "alpaca:chat": "alpaca_chat"}
"""Forms of instructions as text -> the function that writes them."""
_MAPPINGS: Sequence[Mapping[str, str]] = (
    {"role": "role", "content": "content"},
    {"role": "from", "content": "value"},
)
_RAW = "is raw text without a prompt; rows need a prompt and an answer (docs/trainers.md)"
_EBFT_COLUMNS = {"ebft_opencode.transform": {"prompt": "input", "answer": "output"}}
"""Transforms of axolotl's package that only rename: the columns here."""
_TRAINS_ASSISTANT = (None, ["assistant"], ["gpt"], ["gpt", "assistant"], ["assistant", "gpt"])


def data(config: AxolotlConfig, account: Account) -> None:
    """Fill the account with both splits."""
    if config.get("pretraining_dataset"):
        account.blocks("pretraining_dataset", _RAW)
    elif not config.datasets:
        account.blocks("datasets", "names no rows")
    else:
        _split(config, "datasets", "train", account)
    if config.get("test_datasets"):
        _split(config, "test_datasets", "validation", account)
        period = config.get("eval_steps")
        account.set("gdpo.val_period", period if isinstance(period, int) and period > 0 else 10, "eval_steps, or 10")
    if config.get("train_on_inputs") and config.kind == "sft":
        account.set("data.train.train_on", "all", "train_on_inputs")


def import_path(name: str, config: AxolotlConfig) -> tuple[str, str | None]:
    """Return the import path of ``module.function`` here, and its file if that is not on this machine.

    A module beside the config or in the working directory is named by its file, because axolotl imports from there.
    """
    module, _, function = name.rpartition(".")
    file = Path(module.replace(".", "/") + ".py")
    found = next((place for place in (file, config.path.parent / file) if place.is_file()), None)
    if found is not None:
        return f"{found}:{function}", None
    if find_spec(module.partition(".")[0]) is not None:
        return name, None
    return f"{file}:{function}", str(file)


def _split(config: AxolotlConfig, key: str, split: str, account: Account) -> None:
    entries = list(config.get(key))
    paths = [_path(entry, f"{key}[{place}]", account) for place, entry in enumerate(entries)]
    known = [path for path in paths if path is not None]
    if known:
        account.set(f"data.{split}.path", known[0] if len(known) == 1 else known, f"{key}: path, name, data_files")
    names = {str(entry.get("split") or "train") for entry in entries}
    if len(names) > 1:
        account.blocks(f"{key}.split", f"{', '.join(sorted(names))}: one split is read of all of them")
    elif names != {split}:
        account.set(f"data.{split}.split", names.pop(), f"{key}: split")
    _unread(entries, key, account)
    forms = [_without_places(entry) for entry in entries]
    if any(form != forms[0] for form in forms):
        account.blocks(f"{key}.type", "the rows have several forms; write one transform (docs/trainers.md)")
    else:
        _form(entries[0], key, split, config, account)


def _without_places(entry: Mapping[str, Any]) -> dict[str, Any]:
    places = ("path", "name", "data_files", "ds_type", "split", "revision", "trust_remote_code")
    return {name: value for name, value in entry.items() if name not in places and value is not None}


def _path(entry: Mapping[str, Any], key: str, account: Account) -> Any:
    path = entry.get("path")
    files = entry.get("data_files")
    if not isinstance(path, str) or not path:
        account.blocks(key, "names no path")
        return None
    if path.startswith(_REMOTE):
        account.blocks(key, f"{path} is elsewhere; copy it to a disk")
    if files and path in _FILE_KINDS:
        return files[0] if isinstance(files, list) and len(files) == 1 else files
    if files:
        account.blocks(key, f"data_files of {path} cannot be chosen; download them and name the files")
    return f"{path}:{entry['name']}" if entry.get("name") else path


def _unread(entries: Sequence[Mapping[str, Any]], key: str, account: Account) -> None:
    """Report settings of the entries that change the rows and are not supported here."""
    reasons = {
        "shards": "all rows are read; there a shard of them",
        "revision": "the newest revision is read",
        "chat_template": "the tokenizer's own template renders",
        "chat_template_jinja": "the tokenizer's own template renders",
        "message_field_training": "all turns of the assistant are trained",
        "message_field_training_detail": "all turns of the assistant are trained",
        "drop_system_message": "the system's message stays",
        "input_transform": "is not run",
    }
    for name, why in reasons.items():
        if any(entry.get(name) not in (None, False, "tokenizer_default", "main") for entry in entries):
            account.differs(f"{key}.{name}", why)
    if any(entry.get("roles_to_train") not in _TRAINS_ASSISTANT for entry in entries):
        account.differs(f"{key}.roles_to_train", "the assistant's turns are trained")
    if any(entry.get("train_on_eos") not in (None, "turn") for entry in entries):
        account.differs(f"{key}.train_on_eos", "each answer is trained with its end")


def _form(entry: Mapping[str, Any], key: str, split: str, config: AxolotlConfig, account: Account) -> None:
    how = entry.get("type")
    section = f"data.{split}"
    if config.kind == "ebft":
        _of_ebft(how, key, section, config, account)
        return
    if config.samples:
        account.set(f"{section}.prompt_key", "prompt", "TRL's column")
        account.set(f"{section}.chat", False, "TRL renders messages, and gives text to the model as it is")
    if config.samples or (is_transform(how) and how not in _TEXTS):
        if how is not None:
            _transform(how, key, section, config, account)
    elif config.kind == "sft":
        _supervised(entry, key, section, account)
    else:
        _preferences(entry, key, section, config, account)


def _transform(how: Any, key: str, section: str, config: AxolotlConfig, account: Account) -> None:
    if not is_transform(how) or ":" in how:
        account.blocks(f"{key}.type", f"{str(how)[:60]!r} is not the import path of a function, module.function")
        return
    place, absent = import_path(how, config)
    account.set(f"{section}.type", place, f"{key}: type")
    if absent:
        account.needs(absent)


def _of_ebft(how: Any, key: str, section: str, config: AxolotlConfig, account: Account) -> None:
    """Axolotl's own transforms become columns; ``ebft_pretrain`` is raw text."""
    if config.get("ebft.mode") == "strided":
        if how != "ebft_pretrain.transform":
            account.blocks(f"{key}.type", f"{how}: anchors lie in raw text here, not in the answers of rows")
        names = {"stride": 8, "context_length": 8, "generate_max_len": 8}
        strided = {name: config.get(f"ebft.{name}", default) for name, default in names.items()}
        account.set(f"{section}.strided", strided, "ebft: mode, stride, context_length, generate_max_len")
    elif how in _EBFT_COLUMNS:
        account.set(f"{section}.columns", dict(_EBFT_COLUMNS[how]), f"{key}: type {how}")
        account.set(f"{section}.prompt_key", "prompt", "the column of the prompt")
    elif str(how).startswith("ebft_"):
        account.blocks(f"{key}.type", f"{how} is a function of axolotl's; write a prompt and an answer into the rows")
    elif how is not None:
        _transform(how, key, section, config, account)


def _supervised(entry: Mapping[str, Any], key: str, section: str, account: Account) -> None:
    how = entry.get("type")
    if how in ("chat_template", "chat_template.default"):
        _conversation(entry, key, section, ("messages",), account)
    elif isinstance(how, str) and how in _TEXTS:
        account.set(f"{section}.type", f"{__package__}.axolotl_rows:{_TEXTS[how]}", f"{key}: type {how}")
        account.set(f"{section}.chat", False, "the prompt is text, as there")
    elif isinstance(how, Mapping):
        _user_defined(how, key, section, account)
    elif how in (None, "completion", "pretrain"):
        account.blocks(f"{key}.type", f"{how or 'no type'} {_RAW}")
    else:
        account.blocks(f"{key}.type", f"{str(how)[:60]} is not known here; write a transform (docs/trainers.md)")


def _conversation(entry: Mapping[str, Any], key: str, section: str, names: Sequence[str], account: Account) -> None:
    """Columns of messages, renamed where they have other names."""
    given = entry.get("message_property_mappings")
    mapping = given if isinstance(given, Mapping) else {} if given else _MAPPINGS[0]
    legacy = {"role": entry.get("message_field_role"), "content": entry.get("message_field_content")}
    mapping = {**mapping, **{name: value for name, value in legacy.items() if value}}
    if {name: mapping.get(name) for name in ("role", "content")} not in _MAPPINGS:
        account.blocks(f"{key}.message_property_mappings", "messages have role and content, or from and value, here")
    columns = {name: str(entry.get(f"field_{name}") or name) for name in names}
    renamed = {name: column for name, column in columns.items() if name != column}
    if renamed.get("messages") == "conversations" and len(names) == 1:
        renamed = {}  # a name that is also read here
    if renamed:
        account.set(f"{section}.columns", renamed, f"{key}: field_*")


def _user_defined(how: Mapping[str, Any], key: str, section: str, account: Account) -> None:
    """A format of axolotl's with an instruction and no input."""
    text = str(how.get("no_input_format") or how.get("format") or "{instruction}")
    if "{input}" in text or how.get("system_prompt") or how.get("field_input"):
        account.blocks(f"{key}.type", "a format with input or a system's text; write a transform (docs/trainers.md)")
        return
    form = {
        "field_prompt": str(how.get("field_instruction") or "instruction"),
        "field_completion": str(how.get("field_output") or "output"),
        "prompt_format": text.replace("{instruction}", "{prompt}"),
    }
    account.set(f"{section}.type", form, f"{key}: type")


def _preferences(entry: Mapping[str, Any], key: str, section: str, config: AxolotlConfig, account: Account) -> None:
    how = entry.get("type")
    kind = PREFERENCES[ALGORITHMS[config.kind]]
    answers = [name for name in FIELDS[kind] if name != "label"]
    if isinstance(how, Mapping):
        account.set(f"{section}.type", {name: value for name, value in how.items() if value}, f"{key}: type")
        return
    if how in (None, "passthrough", "passthrough.default"):
        return
    if how in ("bradley_terry.chat_template", "bradley_terry.chat_template.default"):
        how = "chat_template.icr"
    first, _, form = str(how).partition(".")
    if first == "chat_template" and form in ("", "default"):
        _conversation(entry, key, section, ("messages", *answers), account)
        account.set(f"{section}.type", "chat_template.default", f"{key}: type")
    elif first in PREFIXES and form in PROMPT_COLUMNS:
        account.set(f"{section}.type", how, f"{key}: type")
    else:
        account.blocks(f"{key}.type", f"{str(how)[:60]} is not known here; write a transform (docs/trainers.md)")
