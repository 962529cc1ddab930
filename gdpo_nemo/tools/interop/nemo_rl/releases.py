"""NeMo-RL's releases: which release a recipe belongs to, and the data settings of old releases under the current keys.

Recipes do not contain a version. The keys of the base config, which every complete recipe inherits, identify the
release. Releases before 0.6 have one flat section ``data``, and the dataset's class also defines the validation data
(``load_response_dataset``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAIN = "main"
RELEASES = ("0.4", "0.5", "0.6", "0.7", MAIN)
"""Releases that differ for the translation, in order. ``0.4`` includes older releases."""

_FLAT = ("data.dataset_name", "data.train_data_path", "data.train_jsonl_fpath")
"""Keys that define the training data before 0.6. Later releases do not read them."""
_SINCE_0_5 = {"data.env_name", "data.processor", "loss_fn.reference_policy_kl_type", "env.should_use_nemo_gym"}
_SINCE_0_6 = {"data.default.env_name", "grpo.val_at_end", "grpo.seq_logprob_error_threshold"}
_SINCE_0_7 = {"grpo.advantage_clip_low", "grpo.invalid_tool_call_advantage", "loss_fn.use_cispo"}
_SINCE_MAIN = {"grpo.val_start_at", "policy.generation.val_temperature"}
_OF_FLAT_DATA = ("env_name", "processor", "prompt_file", "system_prompt_file")

_VALIDATION: dict[str, dict[str, Any]] = {"DeepScaler": {"dataset_name": "AIME2024", "repeat": 16},
               "DAPOMath17K": {"dataset_name": "DAPOMathAIME2024"},
               **{name: {"dataset_name": name, "split": "validation"} for name in ("squad", "HelpSteer3")}}  # fmt: skip
"""Training dataset before 0.6 -> validation dataset that its class also loads."""
_OF_FILES = ("", "ResponseDataset", "PreferenceDataset", "BinaryPreferenceDataset", "openai_format")
"""Datasets before 0.6 whose class reads files."""
_READ_BY_CLASS = {
    "openmathinstruct2": ("split", "output_key"),
    "ResponseDataset": ("input_key", "output_key"),
    "BinaryPreferenceDataset": ("prompt_key", "chosen_key", "rejected_key"),
    "openai_format": ("chat_key",),
    "clevr-cogent": ("split",),
    "geometry3k": ("split",),
    "refcoco": ("split",),
}
"""Dataset before 0.6 -> keys of ``data`` that its class reads. The classes of the other datasets read none."""


def before(release: str, other: str) -> bool:
    """Return whether ``release`` is older than ``other``."""
    return RELEASES.index(release) < RELEASES.index(other)


def release_of(flat: Mapping[str, Any]) -> str:
    """Return the release that has a recipe's keys, with parents. Incomplete recipes belong to ``main``."""
    sections = any(f"{key}.".startswith("data.train.") for key in flat)
    if not sections and not flat.keys().isdisjoint(_FLAT):
        return "0.5" if _SINCE_0_5 & flat.keys() else "0.4"
    if _SINCE_MAIN & flat.keys():
        return MAIN
    if _SINCE_0_7 & flat.keys():
        return "0.7"
    return "0.6" if flat.keys() >= _SINCE_0_6 else MAIN


def data_settings(flat: Mapping[str, Any], release: str) -> dict[str, Any]:
    """Return the settings ``data.<split>.*`` that a recipe has without containing these keys.

    Since 0.6, a dataset has the settings of ``data.default`` that its own section does not contain.
    """
    if before(release, "0.6"):
        return _old_settings({key.removeprefix("data."): value for key, value in flat.items()})
    validates = any(key.startswith("data.validation.") for key in flat)
    settings = {}
    for split in ("train", "validation") if validates else ("train",):
        for key, value in flat.items():
            if key.startswith("data.default."):
                settings[key.replace("default", split, 1)] = value
    return settings


def _old_settings(old: Mapping[str, Any]) -> dict[str, Any]:
    """Return the current settings of a flat section ``data``, whose keys have no prefix in ``old``."""
    name = str(old.get("dataset_name") or "")
    train: dict[str, Any] = {"dataset_name": "OpenMathInstruct-2" if name == "openmathinstruct2" else name or None}
    validation: dict[str, Any] = {**_VALIDATION.get(name, {})}
    if name in _OF_FILES:
        train |= {
            "data_path": old.get("train_data_path", old.get("train_jsonl_fpath")),
            "split": old.get("train_split"),
        }
        validation = {"data_path": old.get("val_data_path", old.get("validation_jsonl_fpath")),
                      "split": old.get("val_split")}  # fmt: skip
    validates = any(value is not None for value in validation.values())
    settings = {}
    for split, own in (("train", train), ("validation", validation)) if validates else (("train", train),):
        for key in (*_OF_FLAT_DATA, *_READ_BY_CLASS.get(name, ())):
            if key in old:
                settings[f"data.{split}.{key}"] = old[key]
        for key, value in own.items():
            settings[f"data.{split}.{key}"] = value
    return settings


def keys_read(flat: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys of a flat section ``data`` that the class of its dataset reads."""
    name = str(flat.get("data.dataset_name") or "")
    keys = ["dataset_name", *_OF_FLAT_DATA, *_READ_BY_CLASS.get(name, ())]
    if name in _OF_FILES:
        keys += ["train_data_path", "val_data_path", "train_split", "val_split"]
        keys += ["train_jsonl_fpath", "validation_jsonl_fpath"]
    return frozenset(f"data.{key}" for key in keys)
