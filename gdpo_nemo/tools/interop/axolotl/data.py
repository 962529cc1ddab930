"""Translation of an axolotl config's datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gdpo_nemo.config.algorithm_choice import FIELDS, PREFIXES, PROMPT_COLUMNS, is_transform, spec_named
from gdpo_nemo.data import row_formats
from gdpo_nemo.tools.interop.axolotl.config import ALGORITHMS, AxolotlConfig
from gdpo_nemo.tools.interop.translation import Findings

_FILE_KINDS = ("json", "csv", "parquet", "jsonl")
_REMOTE = ("s3://", "gs://", "gcs://", "adl://", "abfs://", "az://", "oci://", "http://", "https://")
_TEXTS = {"alpaca": "alpaca", "alpaca:instruct": "alpaca", "alpaca:chat": "alpaca_chat"}
"""Name of an instruction format -> function in ``data.row_formats`` that implements it."""
_MAPPINGS: Sequence[Mapping[str, str]] = (
    {"role": "role", "content": "content"},
    {"role": "from", "content": "value"},
)
_RAW = "is raw text without a prompt; rows require a prompt and an answer (docs/trainers.md)"
_EBFT_COLUMNS = {"ebft_opencode.transform": {"prompt": "input", "answer": "output"}}
"""axolotl transforms that only rename columns -> value of ``data.<split>.columns``."""
_TRAINS_ASSISTANT = (None, ["assistant"], ["gpt"], ["gpt", "assistant"], ["assistant", "gpt"])


def data(config: AxolotlConfig, findings: Findings) -> None:
    """Add the settings of both dataset splits to the findings."""
    if config.get("pretraining_dataset"):
        findings.blocks("pretraining_dataset", _RAW)
    elif not config.datasets:
        findings.blocks("datasets", "contains no datasets")
    else:
        _split(config, "datasets", "train", findings)
    if config.get("test_datasets"):
        _split(config, "test_datasets", "validation", findings)
        period = config.get("eval_steps")
        findings.set("gdpo.val_period", period if isinstance(period, int) and period > 0 else 10, "eval_steps, or 10")
    if config.get("train_on_inputs") and config.kind == "sft":
        findings.set("data.train.train_on", "all", "train_on_inputs")


def import_path(name: str, config: AxolotlConfig) -> tuple[str, str | None]:
    """Convert axolotl's ``module.function`` to an import path. Also return the path of its file if the file is missing.

    axolotl also imports modules and packages from the working directory and from the config's folder. Functions in
    these modules are converted to ``file.py:function``.
    """
    module, _, function = name.rpartition(".")
    file = Path(module.replace(".", "/") + ".py")
    package = file.with_suffix("") / "__init__.py"  # takes precedence over the file, as in Python
    places = (package, file, config.path.parent / package, config.path.parent / file)
    found = next((path for path in places if path.is_file()), None)
    if found is not None:
        return f"{found}:{function}", None
    if _is_installed(module):
        return name, None
    return f"{file}:{function}", str(file)


def _is_installed(module: str) -> bool:
    """Return whether Python finds the module or the regular package that contains it, without importing anything."""
    top, *below = module.split(".")
    spec = find_spec(top)
    # A namespace package may be any folder on the search path, so its content must be checked.
    while spec is not None and spec.origin is None and below:
        path, top = spec.submodule_search_locations, f"{top}.{below.pop(0)}"
        spec = PathFinder.find_spec(top, path)
    return spec is not None


def _split(config: AxolotlConfig, key: str, split: str, findings: Findings) -> None:
    entries = list(config.get(key))
    paths = [_path(entry, f"{key}[{index}]", findings) for index, entry in enumerate(entries)]
    known = [path for path in paths if path is not None]
    if known:
        findings.set(f"data.{split}.path", known[0] if len(known) == 1 else known, f"{key}: path, name, data_files")
    names = {str(entry.get("split") or "train") for entry in entries}
    if len(names) > 1:
        findings.blocks(f"{key}.split", f"{', '.join(sorted(names))}: only one split can be read from all datasets")
    elif names != {split}:
        findings.set(f"data.{split}.split", names.pop(), f"{key}: split")
    _unread(entries, key, findings)
    forms = [_without_source(entry) for entry in entries]
    if any(form != forms[0] for form in forms):
        findings.blocks(
            f"{key}.type", "the datasets have different formats; write one transform for all of them (docs/trainers.md)"
        )
    else:
        _form(entries[0], key, split, config, findings)


def _without_source(entry: Mapping[str, Any]) -> dict[str, Any]:
    source = ("path", "name", "data_files", "ds_type", "split", "revision", "trust_remote_code")
    return {name: value for name, value in entry.items() if name not in source and value is not None}


def _path(entry: Mapping[str, Any], key: str, findings: Findings) -> Any:
    path = entry.get("path")
    files = entry.get("data_files")
    if not isinstance(path, str) or not path:
        findings.blocks(key, "path is missing")
        return None
    if path.startswith(_REMOTE):
        findings.blocks(key, f"{path} is remote; copy it to a local disk")
    if files and path in _FILE_KINDS:
        return files[0] if isinstance(files, list) and len(files) == 1 else files
    if files:
        findings.blocks(key, f"data_files of {path} cannot be selected; download them and list the files")
    return f"{path}:{entry['name']}" if entry.get("name") else path


def _unread(entries: Sequence[Mapping[str, Any]], key: str, findings: Findings) -> None:
    """Report unsupported dataset settings that change the rows."""
    reasons = {
        "shards": "all rows are read; axolotl reads one shard",
        "revision": "the latest revision is read",
        "chat_template": "the tokenizer's chat template is used",
        "chat_template_jinja": "the tokenizer's chat template is used",
        "message_field_training": "all assistant turns are trained",
        "message_field_training_detail": "all assistant turns are trained",
        "drop_system_message": "system messages are retained",
        "input_transform": "the transform is not executed",
    }
    usual: dict[str, tuple[Any, ...]] = dict.fromkeys(reasons, (None, False, "tokenizer_default", "main"))
    reasons["roles_to_train"] = "only the assistant's turns are trained"
    usual["roles_to_train"] = _TRAINS_ASSISTANT
    reasons["train_on_eos"] = "the end token of each answer is trained"
    usual["train_on_eos"] = (None, "turn")
    for name, why in reasons.items():
        if any(entry.get(name) not in usual[name] for entry in entries):
            findings.differs(f"{key}.{name}", why)


def _form(entry: Mapping[str, Any], key: str, split: str, config: AxolotlConfig, findings: Findings) -> None:
    how = entry.get("type")
    section = f"data.{split}"
    if config.kind == "ebft":
        _of_ebft(how, key, section, config, findings)
        return
    if config.samples:
        findings.set(f"{section}.prompt_key", "prompt", "TRL uses this column")
        findings.set(
            f"{section}.chat", False, "TRL applies the chat template to messages only; text is passed unchanged"
        )
    if config.samples or (is_transform(how) and how not in _TEXTS):
        if how is not None:
            _transform(how, key, section, config, findings)
    elif config.kind == "sft":
        _supervised(entry, key, section, findings)
    else:
        _preferences(entry, key, section, config, findings)


def _transform(how: Any, key: str, section: str, config: AxolotlConfig, findings: Findings) -> None:
    if not is_transform(how) or ":" in how:
        findings.blocks(f"{key}.type", f"{str(how)[:60]!r} is not an import path of a function (module.function)")
        return
    function, absent = import_path(how, config)
    findings.set(f"{section}.type", function, f"{key}: type")
    if absent:
        findings.needs(absent)


def _of_ebft(how: Any, key: str, section: str, config: AxolotlConfig, findings: Findings) -> None:
    """Translate an EBFT dataset type. Raw text is translated only in strided mode. Transforms in ``_EBFT_COLUMNS``
    become renamed columns."""
    if config.get("ebft.mode") == "strided":
        if how != "ebft_pretrain.transform":
            findings.blocks(
                f"{key}.type", f"{how}: strided mode is supported only for raw text, not for rows with answers"
            )
        names = {"stride": 8, "context_length": 8, "generate_max_len": 8}
        strided = {name: config.get(f"ebft.{name}", default) for name, default in names.items()}
        findings.set(f"{section}.strided", strided, "ebft: mode, stride, context_length, generate_max_len")
    elif how in _EBFT_COLUMNS:
        findings.set(f"{section}.columns", dict(_EBFT_COLUMNS[how]), f"{key}: type {how}")
        findings.set(f"{section}.prompt_key", "prompt", "prompt column")
    elif str(how).startswith("ebft_"):
        findings.blocks(
            f"{key}.type", f"{how} is an axolotl function, which is not executed; use rows with a prompt and an answer"
        )
    elif how is not None:
        _transform(how, key, section, config, findings)


def _supervised(entry: Mapping[str, Any], key: str, section: str, findings: Findings) -> None:
    how = entry.get("type")
    if how in ("chat_template", "chat_template.default"):
        _conversation(entry, key, section, ("messages",), findings)
    elif isinstance(how, str) and how in _TEXTS:
        findings.set(f"{section}.type", f"{row_formats.__name__}:{_TEXTS[how]}", f"{key}: type {how}")
        findings.set(f"{section}.chat", False, "the prompt is plain text, as in axolotl")
    elif isinstance(how, Mapping):
        _user_defined(how, key, section, findings)
    elif how in (None, "completion", "pretrain"):
        findings.blocks(f"{key}.type", f"{how or 'no type'} {_RAW}")
    else:
        findings.blocks(f"{key}.type", f"{str(how)[:60]} is not supported; write a transform (docs/trainers.md)")


def _conversation(entry: Mapping[str, Any], key: str, section: str, names: Sequence[str], findings: Findings) -> None:
    """Set the columns of a conversation, and report message formats that are not supported."""
    given = entry.get("message_property_mappings")
    mapping: Mapping[str, Any] = {} if given else _MAPPINGS[0]
    if isinstance(given, Mapping):
        mapping = given
    legacy = {"role": entry.get("message_field_role"), "content": entry.get("message_field_content")}
    mapping = {**mapping, **{name: value for name, value in legacy.items() if value}}
    if {name: mapping.get(name) for name in ("role", "content")} not in _MAPPINGS:
        findings.blocks(
            f"{key}.message_property_mappings", "messages must have the fields role and content, or from and value"
        )
    columns = {name: str(entry.get(f"field_{name}") or name) for name in names}
    renamed = {name: column for name, column in columns.items() if name != column}
    if renamed.get("messages") == "conversations" and len(names) == 1:
        renamed = {}  # the row reader also accepts the column conversations
    if renamed:
        findings.set(f"{section}.columns", renamed, f"{key}: field_*")


def _user_defined(how: Mapping[str, Any], key: str, section: str, findings: Findings) -> None:
    """Translate a user-defined axolotl format. Formats with an input or a system text are not supported."""
    text = str(how.get("no_input_format") or how.get("format") or "{instruction}")
    if "{input}" in text or how.get("system_prompt") or how.get("field_input"):
        findings.blocks(
            f"{key}.type",
            "formats with an input or a system text are not supported; write a transform (docs/trainers.md)",
        )
        return
    form = {
        "field_prompt": str(how.get("field_instruction") or "instruction"),
        "field_completion": str(how.get("field_output") or "output"),
        "prompt_format": text.replace("{instruction}", "{prompt}"),
    }
    findings.set(f"{section}.type", form, f"{key}: type")


def _preferences(entry: Mapping[str, Any], key: str, section: str, config: AxolotlConfig, findings: Findings) -> None:
    how = entry.get("type")
    kind = spec_named(ALGORITHMS[config.kind]).rows
    assert kind is not None
    answers = [name for name in FIELDS[kind] if name != "label"]
    if isinstance(how, Mapping):
        findings.set(f"{section}.type", {name: value for name, value in how.items() if value}, f"{key}: type")
        return
    if how in (None, "passthrough", "passthrough.default"):
        return
    if how in ("bradley_terry.chat_template", "bradley_terry.chat_template.default"):
        how = "chat_template.icr"
    first, _, form = str(how).partition(".")
    if first == "chat_template" and form in ("", "default"):
        _conversation(entry, key, section, ("messages", *answers), findings)
        findings.set(f"{section}.type", "chat_template.default", f"{key}: type")
    elif first in PREFIXES and form in PROMPT_COLUMNS:
        findings.set(f"{section}.type", how, f"{key}: type")
    else:
        findings.blocks(f"{key}.type", f"{str(how)[:60]} is not supported; write a transform (docs/trainers.md)")
