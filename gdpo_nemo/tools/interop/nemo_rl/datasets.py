"""Translation of a recipe's environment, datasets, prompts, folders and number of steps.

Based on NeMo-RL's classes in ``data/datasets/response_datasets`` and its ``math_hf_data_processor``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gdpo_nemo.data import row_formats
from gdpo_nemo.environments.nemo_gym.checkout import Unknown
from gdpo_nemo.tools.interop.nemo_rl import gym
from gdpo_nemo.tools.interop.nemo_rl.recipe import Recipe, tower_missing
from gdpo_nemo.tools.interop.translation import Findings
from gdpo_nemo.utils.files import read_text, real_path


class _Dataset(NamedTuple):
    """Dataset that NeMo-RL recipes select by name."""

    path: str
    """Name of the dataset on the Hub."""
    split: str = "train"
    prompt: str | None = None
    """Column of the prompt (None uses the default columns)."""
    answer: str = "answer"
    """Column of the reference answer."""
    rows: int | None = None
    """Number of rows in the split (None if unknown)."""
    reads: tuple[str, ...] = ()
    """Keys of the dataset's section that its class reads."""
    convert: str = ""
    """Name of the function in ``data.row_formats`` that converts a row (empty if the columns are sufficient)."""
    splits: Mapping[str, str] = {}
    """Value of the recipe's key ``split`` -> name on the Hub, if NeMo-RL's splits are datasets of their own."""
    images: bool = False
    """True if each row has one image."""


_DATASETS = {
    "OpenMathInstruct-2": _Dataset(
        "nvidia/OpenMathInstruct-2", "train_1M", "problem", "expected_answer", 1_000_000, ("split", "output_key")
    ),
    "DeepScaler": _Dataset("agentica-org/DeepScaleR-Preview-Dataset", "train", "problem", rows=40_315),
    "DAPOMath17K": _Dataset(
        "BytedTsinghua-SIA/DAPO-Math-17k", "train", "prompt", "reward_model.ground_truth", 1_791_700
    ),
    "DAPOMathAIME2024": _Dataset("BytedTsinghua-SIA/AIME-2024", "train", "prompt", "reward_model.ground_truth"),
    "AIME2024": _Dataset("HuggingFaceH4/aime_2024", "train", "problem", reads=("repeat",)),
    "gsm8k": _Dataset("openai/gsm8k:main", "train", "question", rows=7_473, reads=("split", "subset")),
    "squad": _Dataset("rajpurkar/squad", reads=("split",), convert="squad"),
    "tulu3_sft_mixture": _Dataset("allenai/tulu-3-sft-mixture"),
    "Nemotron-Cascade-2-SFT-Math": _Dataset("nvidia/Nemotron-Cascade-2-SFT-Data:math", reads=("split",)),
    "HelpSteer3": _Dataset("nvidia/HelpSteer3:preference", reads=("split",), convert="helpsteer3"),
    "Tulu3Preference": _Dataset("allenai/llama-3.1-tulu-3-8b-preference-mixture", convert="tulu3_preference"),
    "clevr-cogent": _Dataset(
        "MMInstruction/Clevr_CoGenT_TrainA_70K_Complex", "train", "prompt", reads=("split",), convert="clevr",
        splits={"valA": "MMInstruction/Clevr_CoGenT_ValA", "valB": "MMInstruction/Clevr_CoGenT_ValB"}, images=True,
    ),
    "geometry3k": _Dataset(
        "hiyouga/geometry3k", "train", "prompt", rows=2_101, reads=("split",), convert="geometry3k", images=True
    ),
}  # fmt: skip
"""NeMo-RL's name of a dataset -> its name on the Hub and its columns."""

_UNSUPPORTED = dict.fromkeys(("avqa", "audiomcq", "mmau", "intent-train", "intent-bench"), "contains audio") | {
    "daily-omni": "contains video",
    "refcoco": "refers to images in an archive; write a file with the images and set its path",
    "mmpr-tiny": "refers to images in an archive; write a file with the images and set its path",
}
"""NeMo-RL's name of a dataset -> reason why it is not supported."""
_MATH = ("math", "math_default")
_PROCESSORS = ("", "default", "math_hf_data_processor", "math_gdpo_data_processor", "vlm_hf_data_processor")
"""Data processors whose prompts are the rows' problems with the recipe's prompt files."""
_ENDLESS = 1_000_000
"""Maximum number of steps of a recipe whose epochs end the run."""
_REWARD_MODULE = "gdpo_nemo.environments.tasks.vision_rewards"
_REWARDS = {"format": "has_tags", "exact_alnum": "same_text", "math_expr": "same_expression",
            "bbox_giou": "box_overlap", "geo3k": "boxed_expression"}  # fmt: skip
"""NeMo-RL's name of a reward function in ``VLMEnvironment`` -> function in ``_REWARD_MODULE``."""
_PUZZLE = "sliding_puzzle_game"
"""Environment of ``run_grpo_sliding_puzzle.py``, which generates its prompts and ignores the section ``data``."""
ENVIRONMENTS = (*_MATH, "math_multi_reward", "code", "code_jaccard", "reward_model", "vlm", "clevr-cogent",
                "geometry3k", "refcoco", "mmpr-tiny", "dapo", gym.NAME, _PUZZLE)  # fmt: skip
"""Sections of ``env`` in the recipes of NeMo-RL. Other sections configure custom environments."""
_OF_DATA = ("data.default.*", "grpo.val_*generations_per_prompt", "grpo.val_batch_size", "grpo.max_val_samples",
            "policy.generation.val_temperature", "policy.generation.val_top_*")  # fmt: skip
"""Recipe keys that are not translated if the dataset cannot be translated."""


def env_name(recipe: Recipe) -> str:
    """Return NeMo-RL's name of the environment that verifies the samples.

    The programs of custom environments inherit NeMo-RL's sections and ``env_name``, and do not use them. A custom
    section therefore takes precedence. Recipes before 0.5 have no ``env_name``: the program selects the environment.
    """
    if gym.uses_gym(recipe):
        return gym.NAME
    sections = set()
    for key, value in recipe.flat.items():
        if key.startswith("env.") and _is_section(key, value):
            sections.add(key.split(".")[1])
    named = recipe.get("data.train.env_name")
    custom = sorted(sections - set(ENVIRONMENTS))
    if custom and named not in custom:
        return custom[0]
    if _PUZZLE in sections:
        return _PUZZLE
    dataset = recipe.get("data.train.dataset_name")
    usual = next((name for name in ("reward_model", "math") if name in sections), min(sections, default="math"))
    return named or (dataset if dataset in sections else usual)


def _is_section(key: str, value: Any) -> bool:
    return key.count(".") > 1 or value == {}


def image_rewards(recipe: Recipe) -> dict[str, tuple[Any, float]]:
    """Return the reward functions of NeMo-RL's ``VLMEnvironment`` as entries for the environment ``functions``, with
    their weights, by component. The largest weight is first. The result is empty for other environments.

    NeMo-RL divides the weights by their sum.
    """
    listed = recipe.get(f"env.{env_name(recipe)}.reward_functions")
    listed = listed if isinstance(listed, list) and all(map(_is_function, listed)) else []
    weights = [given.get("weight") for given in listed]
    if len({given["name"] for given in listed}) < len(listed) or not all(map(_is_positive, weights)):
        return {}
    found = {}
    for given in sorted(listed, key=lambda given: -float(given["weight"])):
        path = f"{_REWARD_MODULE}.{_REWARDS[given['name']]}"
        options = given.get("kwargs") or {}
        weight = round(given["weight"] / sum(weights), 12)
        found[given["name"]] = ({"function": path, **options} if options else path, weight)
    return found


def _is_function(given: Any) -> bool:
    return (
        isinstance(given, dict) and str(given.get("name")) in _REWARDS and isinstance(given.get("kwargs") or {}, dict)
    )


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def has_images(recipe: Recipe) -> bool:
    """Return whether the prompts contain images."""
    known = _DATASETS.get(recipe.get("data.train.dataset_name") or "")
    return known is not None and known.images


def components(recipe: Recipe) -> tuple[str, dict[str, Any], tuple[str, ...]] | None:
    """Return (gdpo_nemo environment, its options, its reward components), or None if gdpo_nemo has no equivalent.

    The components are sorted by name, which is also the order of NeMo-RL's weights, or by weight (``image_rewards``).
    """
    name = env_name(recipe)
    if rewards := image_rewards(recipe):
        return "functions", {"functions": {key: entry for key, (entry, _) in rewards.items()}}, tuple(rewards)
    if name == gym.NAME:
        try:
            found = gym.find_gym(recipe)
        except Unknown:
            return None
        return gym.NAME, gym.environment(recipe, found), found.names
    processor = str(recipe.get("data.train.processor", ""))
    if name == "math_multi_reward" or (name in _MATH and "gdpo" in processor):
        return "gsm8k", {"strict": True}, ("correctness", "format", "integer")
    if name not in _MATH:
        return None
    if recipe.get("data.train.dataset_name") == "gsm8k":
        return "gsm8k", {}, ("correctness",)
    # The time limit is math-verify's default, which NeMo-RL uses.
    return "math", {"math_verify_impl": "hf_math_verify", "time_limit_s": 5}, ("correctness",)


def data(recipe: Recipe, findings: Findings) -> None:
    """Add the settings for datasets, prompts, folders and the length of the run to the findings."""
    found = None if recipe.rows else components(recipe)
    processor = str(recipe.get("data.train.processor", ""))
    if has_images(recipe):
        _images(recipe, findings)
    if found and found[0] != gym.NAME and processor not in _PROCESSORS:
        key = next(key for key in ("data.train", "data.default", "data") if recipe.flat.get(f"{key}.processor"))
        findings.differs(f"{key}.processor", f"{processor} may use the rows in another way than math_hf_data_processor")
    for split in ("train", "validation"):
        _split(recipe, findings, split, found[0] if found else env_name(recipe))
    _held_out(recipe, findings)
    _length(recipe, findings)
    _folders(recipe, findings)
    _validation(recipe, findings)


def _images(recipe: Recipe, findings: Findings) -> None:
    """Set the number of images in a prompt, and block a model whose vision tower is not supported."""
    findings.set("data.images.max_per_prompt", 1, "each row has one image")
    model = recipe.model
    if model.images or model.refusal or model.question:
        return
    findings.blocks(
        "policy.model_name", f"the prompts contain images, and {tower_missing(recipe.get('policy.model_name'))}"
    )


def _split(recipe: Recipe, findings: Findings, split: str, environment: str) -> None:
    section = f"data.{split}"
    if isinstance(recipe.get(section), list):
        findings.blocks(
            section,
            f"contains {len(recipe.get(section))} datasets, but only one is supported; combine them into one file",
            *_OF_DATA,
        )
        return
    name = recipe.get(f"{section}.dataset_name")
    path = recipe.get(f"{section}.data_path")
    if not (path or name):
        if split == "train":
            if not recipe.rows:
                findings.set("data.train.environment", environment, "the recipe has no training data")
            findings.blocks("data.train", "the recipe has no training data; set a data file", "data.default.*")
        return
    known = _DATASETS.get(name or "")
    if known is None and not path:
        why = _UNSUPPORTED.get(str(name), "is unknown; set its file or its Hub name")
        findings.blocks(f"{section}.dataset_name", f"the dataset {name} {why}")
    where, wanted = _location(recipe, split, known)
    findings.set(f"{section}.path", where, "the recipe's file" if path else f"Hub name of {name}")
    if not recipe.rows:
        findings.set(f"{section}.environment", environment, "environment that verifies the samples")
    convert = known.convert if known else "preference" if name == "PreferenceDataset" else ""
    if convert:
        findings.set(f"{section}.type", f"{row_formats.__name__}:{convert}", f"converts the rows of {name}")
    if wanted:
        findings.set(f"{section}.split", wanted, "split")
    _columns(recipe, findings, split, known, bool(path))
    _prompts(recipe, findings, split)


def _location(recipe: Recipe, split: str, known: _Dataset | None) -> tuple[str, str | None]:
    """Return the file or Hub name of a split's rows, and the name of their split (None if it is not specified)."""
    path, subset = recipe.get(f"data.{split}.data_path"), setting(recipe, split, "subset")
    wanted = setting(recipe, split, "split") or (known.split if known else None)
    where = known.path if known else f"unknown/{recipe.get(f'data.{split}.dataset_name')}"
    if path:
        where = gym.rows_path(recipe, path)
    elif known and str(wanted) in known.splits:
        where, wanted = known.splits[str(wanted)], known.split
    return f"{where.partition(':')[0]}:{subset}" if subset else where, wanted


def _columns(recipe: Recipe, findings: Findings, split: str, known: _Dataset | None, is_file: bool) -> None:
    """Set the prompt and answer columns from the recipe, the known dataset, or NeMo-RL's defaults for files."""
    if env_name(recipe) == gym.NAME:  # its rows contain the prompts, and its servers read the other columns
        return
    section = f"data.{split}"
    if recipe.section in ("dpo", "rm"):
        _pair_columns(recipe, findings, split)
        return
    messages = setting(recipe, split, "chat_key")
    if messages or (recipe.rows and known and known.prompt is None):  # rows with conversations
        if messages not in (None, "messages"):
            findings.set(f"{section}.columns", {"messages": messages}, "chat_key")
        return
    prompt = setting(recipe, split, "input_key")
    answer = setting(recipe, split, "output_key")
    if known:
        prompt = prompt or known.prompt
        answer = answer or known.answer
    elif is_file:
        prompt = prompt or "input"
        answer = answer or "output"
    if prompt:
        findings.set(f"{section}.prompt_key", prompt, "prompt column")
    column = "completion" if recipe.rows else "answer"
    if answer and answer != column:
        findings.set(f"{section}.columns", {column: answer}, "answer column")


def _pair_columns(recipe: Recipe, findings: Findings, split: str) -> None:
    """Set the columns of NeMo-RL's ``BinaryPreferenceDataset``."""
    prompt = setting(recipe, split, "prompt_key")
    if prompt not in (None, "prompt"):
        findings.set(f"data.{split}.prompt_key", prompt, "prompt_key")
    keys = {name: setting(recipe, split, f"{name}_key") for name in ("chosen", "rejected")}
    columns = {name: key for name, key in keys.items() if key not in (None, name)}
    if columns:
        findings.set(f"data.{split}.columns", columns, "chosen_key and rejected_key")


def reads(recipe: Recipe, split: str, key: str) -> bool:
    """Return whether the class of a split's dataset reads ``key``. The class of files reads all keys but ``repeat``."""
    known = _DATASETS.get(recipe.get(f"data.{split}.dataset_name") or "")
    return key in known.reads if known else key != "repeat"


def setting(recipe: Recipe, split: str, key: str) -> Any:
    """Return a setting of a split's dataset (None if it is not set, or the dataset's class does not read it)."""
    return recipe.get(f"data.{split}.{key}") if reads(recipe, split, key) else None


def _prompts(recipe: Recipe, findings: Findings, split: str) -> None:
    """Set the system message and the prompt template. If the recipe has no system message, set an empty one."""
    if env_name(recipe) == gym.NAME:
        return
    system, template_file = (recipe.get(f"data.{split}.{key}") for key in ("system_prompt_file", "prompt_file"))
    text = _text(recipe, system) if system and not (recipe.before("0.6") or recipe.rows) else ""
    if text is None:
        findings.differs(f"data.{split}.system_prompt_file", f"{system} was not found; prompts have no system message")
    if not recipe.rows:
        findings.set(
            f"data.{split}.system_prompt", text or "", f"text of {system}" if text else "NeMo-RL uses no system message"
        )
    if not template_file:
        return
    text = _text(recipe, template_file)
    try:
        template = text.format("{prompt}") if text is not None else None
    except (IndexError, KeyError, ValueError):
        template = None
    if template is None or "{prompt}" not in template:
        findings.differs(
            f"data.{split}.prompt_file",
            f"{template_file} was not found or is not a valid template; prompts are used unchanged",
        )
    else:
        findings.set(f"data.{split}.prompt_template", template, f"text of {template_file}")


def _text(recipe: Recipe, name: str) -> str | None:
    """Search for a file in the working directory, the recipe's folder and its parents. Return the file's text, or None
    if it is not found."""
    for folder in (Path.cwd(), *real_path(recipe.path).parents):
        if (folder / name).is_file():
            return read_text(folder / name)
    return None


def _held_out(recipe: Recipe, findings: Findings) -> None:
    """Set the training rows that are held out for validation, as slices of a Hub dataset's split."""
    size = recipe.held_out
    path = findings.values.get("data.train.path")
    if not size or path is None:
        return
    if recipe.names_validation:
        findings.differs(
            "data.train.split_validation_size",
            "validation uses only the validation dataset; NeMo-RL adds held-out training rows",
        )
        return
    cut = recipe.cut
    if not cut:
        what = f"{size} of the training rows cannot be held out for validation; write them to a separate file"
        findings.differs("data.train.split_validation_size", what)
        return
    base = findings.values.get("data.train.split", ("train", ""))[0]
    for key in ("path", "environment", "prompt_key", "columns", "system_prompt", "prompt_template", "type"):
        if f"data.train.{key}" in findings.values:
            findings.set(f"data.validation.{key}", findings.values[f"data.train.{key}"][0], "same as data.train")
    findings.set("data.train.split", f"{base}[:{cut}]", f"without the held-out rows (split_validation_size {size})")
    findings.set(
        "data.validation.split",
        f"{base}[{cut}:]",
        f"split_validation_size {size}; holds out the last rows instead of random rows",
    )


def _length(recipe: Recipe, findings: Findings) -> None:
    """Set max_num_steps, limited to the number of steps in max_num_epochs. If this number is unknown, set both keys.
    A negative number does not limit the run."""
    steps = recipe.get("grpo.max_num_steps")
    steps = _ENDLESS if isinstance(steps, int) and steps < 1 else steps
    epochs = recipe.get("grpo.max_num_epochs")
    epochs = None if isinstance(epochs, int) and epochs < 1 else epochs
    known = _DATASETS.get(recipe.get("data.train.dataset_name") or "")
    is_whole = known and setting(recipe, "train", "split") in (None, known.split)
    # With dynamic sampling, the number of batches per step is unknown.
    if known is None or known.rows is None or epochs is None or not is_whole or recipe.get("grpo.use_dynamic_sampling"):
        findings.set("gdpo.max_num_steps", steps, "max_num_steps")
        if epochs is not None and (known and known.rows or not recipe.stale or steps >= 100_000):
            findings.set("gdpo.max_num_epochs", epochs, "max_num_epochs")
        return
    size = recipe.held_out
    rows = known.rows - int(-(-known.rows * size // 1) if size < 1 else size)
    limit = epochs * (rows // recipe.prompts)
    why = f"max_num_epochs {epochs} with {rows} rows" if limit < steps else "max_num_steps"
    findings.set("gdpo.max_num_steps", min(steps, limit), why)


def _folders(recipe: Recipe, findings: Findings) -> None:
    folder = recipe.get("checkpointing.checkpoint_dir")
    if folder:
        findings.set("run.dir", folder, "checkpoint_dir; checkpoints are in its subfolder checkpoints")
        findings.set("run.name", Path(folder).name, "folder name from checkpoint_dir")
    found = None if recipe.rows else components(recipe)
    if recipe.get("checkpointing.metric_name") and found and recipe.validates:
        why = f"instead of {recipe.get('checkpointing.metric_name')}"
        findings.set("checkpointing.metric_name", f"validation/{found[2][0]}", why)


def _validation(recipe: Recipe, findings: Findings) -> None:
    if recipe.rows or not any(key.startswith("data.validation.path") for key in findings.values):
        return
    repeat = setting(recipe, "validation", "repeat") or 1
    if reads(recipe, "validation", "repeat") and recipe.get("data.validation.repeat") is None:
        repeat = 16 if recipe.release in ("0.6", "0.7") else 1
    samples = recipe.get("grpo.val_num_generations_per_prompt", 1) * repeat
    findings.set("gdpo.val_generations_per_prompt", samples, "repeat x val_num_generations_per_prompt")
    most = recipe.get("grpo.max_val_samples")
    if most:
        batch = recipe.get("grpo.val_batch_size", 256)
        if most < batch:
            findings.differs(
                "grpo.val_batch_size",
                f"{most} validation prompts are used; NeMo-RL uses 0, because they do not fill a batch of {batch}",
            )
        most = most // batch * batch or most  # NeMo-RL validates only whole batches
        findings.set(
            "gdpo.val_prompts",
            max(1, -(-most // repeat)),
            "max_val_samples" + (f", {repeat} samples per prompt" if repeat > 1 else ""),
        )
    temperature = recipe.get("policy.generation.val_temperature", recipe.get("policy.generation.temperature", 1.0))
    findings.set("gdpo.val_temperature", float(temperature), "val_temperature")
    for name, usual in (("top_p", 1.0), ("top_k", -1)):
        value = recipe.get(f"policy.generation.val_{name}", recipe.get(f"policy.generation.{name}"))
        findings.set(f"gdpo.val_{name}", usual if value is None else type(usual)(value), f"val_{name}")
