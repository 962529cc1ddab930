"""The environment, the data, the prompts and the folders of a recipe, and how many steps its epochs are.

Held against NeMo-RL's classes in ``data/datasets/response_datasets`` and ``math_hf_data_processor``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from gdpo_nemo.config.reading import read_text, real_path
from gdpo_nemo.interop.account import Account
from gdpo_nemo.interop.nemo_rl.recipe import Recipe


class _Dataset(NamedTuple):
    """A data set that NeMo-RL knows by name."""

    path: str
    split: str = "train"
    prompt: str | None = None
    answer: str = "answer"
    rows: int | None = None
    """Rows of the split, where known."""


_DATASETS = {
    "OpenMathInstruct-2": _Dataset("nvidia/OpenMathInstruct-2", "train_1M", "problem", "expected_answer", 1_000_000),
    "DeepScaler": _Dataset("agentica-org/DeepScaleR-Preview-Dataset", "train", "problem", rows=40_315),
    "DAPOMath17K": _Dataset(
        "BytedTsinghua-SIA/DAPO-Math-17k", "train", "prompt", "reward_model.ground_truth", 1_791_700
    ),
    "DAPOMathAIME2024": _Dataset("BytedTsinghua-SIA/AIME-2024", "train", "prompt", "reward_model.ground_truth"),
    "AIME2024": _Dataset("HuggingFaceH4/aime_2024", "train", "problem"),
    "gsm8k": _Dataset("openai/gsm8k:main", "train", "question", rows=7_473),
}
"""Their names of data sets -> where they are on the hub, and their columns."""

_MATH = ("math", "math_default")
_PUZZLE = "sliding_puzzle_game"
"""Environment of ``run_grpo_sliding_puzzle.py``, which makes its own prompts whatever ``data`` says."""
_OF_DATA = ("data.default.*", "grpo.val_*generations_per_prompt", "grpo.val_batch_size", "grpo.max_val_samples",
            "policy.generation.val_temperature")  # fmt: skip
"""Keys that work on data, and not without."""


def env_name(recipe: Recipe) -> str:
    """The environment that verifies."""
    named = recipe.get("data.train.env_name") or recipe.get("data.default.env_name") or recipe.get("data.env_name")
    if recipe.get("env.should_use_nemo_gym"):
        return "nemo_gym"
    own = {key.split(".")[1] for key in recipe.flat if key.startswith("env.") and key.count(".") > 1}
    if _PUZZLE in own:
        return _PUZZLE
    return named or next(iter(sorted(own)), "math")


def components(recipe: Recipe) -> tuple[str, dict[str, Any], tuple[str, ...]] | None:
    """(our environment, its options, its components that count, sorted by name as their weights are); None: none is
    like theirs."""
    name = env_name(recipe)
    processor = str(recipe.get("data.train.processor") or recipe.get("data.default.processor") or "")
    if name == "math_multi_reward" or (name in _MATH and "gdpo" in processor):
        return "gsm8k", {"strict": True}, ("correctness", "format", "integer")
    if name not in _MATH:
        return None
    if recipe.get("data.train.dataset_name") == "gsm8k":
        return "gsm8k", {}, ("correctness",)
    # The limit is that of math-verify, which NeMo-RL leaves as it is.
    return "math", {"math_verify_impl": "hf_math_verify", "time_limit_s": 5}, ("correctness",)


def data(recipe: Recipe, account: Account) -> None:
    """Fill the account with data, prompts, folders and the length of the run."""
    found = components(recipe)
    processor = str(recipe.get("data.train.processor") or recipe.get("data.default.processor") or "")
    if processor.startswith("vlm"):
        account.blocks("data.default.processor", f"{processor} is of prompts with images; models here read text")
    for split in ("train", "validation"):
        _split(recipe, account, split, found[0] if found else env_name(recipe))
    _held_out(recipe, account)
    _length(recipe, account)
    _folders(recipe, account)
    _validation(recipe, account)


def _split(recipe: Recipe, account: Account, split: str, environment: str) -> None:
    section = f"data.{split}"
    if isinstance(recipe.get(section), list):
        account.blocks(
            section,
            f"names {len(recipe.get(section))} data sets, and one is one file here; write them into one",
            *_OF_DATA,
        )
        return
    name = recipe.get(f"{section}.dataset_name")
    path = recipe.get(f"{section}.data_path") or recipe.get(
        f"data.{'val' if split == 'validation' else split}_data_path"
    )
    if not (path or name):
        if split == "train":
            account.set("data.train.environment", environment, "the recipe names no training data")
            account.blocks("data.train", "the recipe names no training data; give its file", "data.default.*")
        return
    known = _DATASETS.get(name or "")
    if known is None and not path:
        account.blocks(
            f"{section}.dataset_name", f"the data set {name} is not known here; name its file or its place on the hub"
        )
    subset = recipe.get(f"{section}.subset")
    where = path or (known.path if known else f"unknown/{name}")
    where = f"{where.partition(':')[0]}:{subset}" if subset else where
    account.set(f"{section}.path", where, "its file" if path else f"where {name} is on the hub")
    account.set(f"{section}.environment", environment, "who verifies")
    wanted = recipe.get(f"{section}.split") or (known.split if known else None)
    if wanted:
        account.set(f"{section}.split", wanted, "split")
    prompt, answer = (_own(recipe, split, key) for key in ("input_key", "output_key"))
    prompt = prompt or (known.prompt if known else None)
    answer = answer or (known.answer if known else None)
    if path and not known:
        prompt = prompt or "input"
        answer = answer or "output"
    if prompt:
        account.set(f"{section}.prompt_key", prompt, "the column of the prompt")
    if answer and answer != "answer":
        account.set(f"{section}.columns", {"answer": answer}, "the column of the gold answer")
    _prompts(recipe, account, split)


def _own(recipe: Recipe, split: str, key: str) -> Any:
    places = (f"data.{split}.{key}", f"data.default.{key}", f"data.{key}")
    return next((recipe.get(place) for place in places if recipe.get(place)), None)


def _prompts(recipe: Recipe, account: Account, split: str) -> None:
    """System message and the text around the problem; none where the recipe has none, whatever our environment
    brings."""
    if env_name(recipe) == "nemo_gym":
        return
    system, around = (_own(recipe, split, key) for key in ("system_prompt_file", "prompt_file"))
    text = _text(recipe, system) if system else ""
    if text is None:
        account.differs(f"data.{split}.system_prompt_file", f"{system} was not found, so there is no system message")
    account.set(f"data.{split}.system_prompt", text or "", f"the text of {system}" if text else "none there")
    if not around:
        return
    text = _text(recipe, around)
    try:
        template = text.format("{prompt}") if text is not None else None
    except (IndexError, KeyError, ValueError):
        template = None
    if template is None or "{prompt}" not in template:
        account.differs(
            f"data.{split}.prompt_file", f"{around} was not found or cannot be filled in, so prompts are bare"
        )
    else:
        account.set(f"data.{split}.prompt_template", template, f"the text of {around}")


def _text(recipe: Recipe, name: str) -> str | None:
    """The text of a file, looked up in the working directory, beside the recipe, and above it."""
    for folder in (Path.cwd(), *real_path(recipe.path).parents):
        if (folder / name).is_file():
            return read_text(folder / name)
    return None


def _held_out(recipe: Recipe, account: Account) -> None:
    """Rows cut off the training data for validation, as slices of the split, which hub data sets have."""
    size = recipe.held_out
    path = account.values.get("data.train.path")
    if not size or path is None:
        return
    if recipe.names_validation:
        account.differs(
            "data.train.split_validation_size", "validation has its own data alone; there the held-out rows join it"
        )
        return
    cut = recipe.cut
    if not cut:
        what = (
            f"{size} of the training rows are not held out, so nothing is validated: write them to a file of their own"
        )
        account.differs("data.train.split_validation_size", what)
        return
    base = account.values.get("data.train.split", ("train", ""))[0]
    for key in ("path", "environment", "prompt_key", "columns", "system_prompt", "prompt_template"):
        if f"data.train.{key}" in account.values:
            account.set(f"data.validation.{key}", account.values[f"data.train.{key}"][0], "that of data.train")
    account.set("data.train.split", f"{base}[:{cut}]", f"without the held-out rows (split_validation_size {size})")
    account.set(
        "data.validation.split", f"{base}[{cut}:]", f"split_validation_size {size}; the last rows, there random ones"
    )


def _length(recipe: Recipe, account: Account) -> None:
    """max_num_steps, or the steps of max_num_epochs where those are fewer; both where the steps of an epoch are not
    known."""
    steps = recipe.get("grpo.max_num_steps")
    epochs = recipe.get("grpo.max_num_epochs")
    known = _DATASETS.get(recipe.get("data.train.dataset_name") or "")
    size = recipe.held_out
    if known is None or known.rows is None:
        account.set("gdpo.max_num_steps", steps, "max_num_steps")
        if not recipe.stale or steps >= 100_000:
            account.set("gdpo.max_num_epochs", epochs, "max_num_epochs")
        return
    if recipe.get("grpo.use_dynamic_sampling"):  # how many batches a step takes is not known
        account.set("gdpo.max_num_steps", steps, "max_num_steps")
        account.set("gdpo.max_num_epochs", epochs, "max_num_epochs")
        return
    rows = known.rows - int(-(-known.rows * size // 1) if size < 1 else size)
    limit = epochs * (rows // recipe.get("grpo.num_prompts_per_step"))
    why = f"max_num_epochs {epochs} of {rows} rows" if limit < steps else "max_num_steps"
    account.set("gdpo.max_num_steps", min(steps, limit), why)


def _folders(recipe: Recipe, account: Account) -> None:
    folder = recipe.get("checkpointing.checkpoint_dir")
    if folder:
        account.set("run.dir", folder, "checkpoint_dir; checkpoints are in its folder checkpoints")
        account.set("run.name", Path(folder).name, "the last part of checkpoint_dir")
    found = components(recipe)
    if recipe.get("checkpointing.metric_name") and found and recipe.validates:
        why = f"in place of {recipe.get('checkpointing.metric_name')}"
        account.set("checkpointing.metric_name", f"validation/{found[2][0]}", why)


def _validation(recipe: Recipe, account: Account) -> None:
    if not any(key.startswith("data.validation.path") for key in account.values):
        return
    repeat = recipe.get("data.validation.repeat", 1)
    samples = recipe.get("grpo.val_num_generations_per_prompt", 1) * repeat
    account.set("gdpo.val_generations_per_prompt", samples, "repeat and val_num_generations_per_prompt")
    most = recipe.get("grpo.max_val_samples")
    if most:
        batch = recipe.get("grpo.val_batch_size", 256)
        if most < batch:
            account.differs(
                "grpo.val_batch_size",
                f"{most} held-out prompts are asked; there none, as they fill no batch of {batch}",
            )
        most = most // batch * batch or most  # whole batches alone
        account.set(
            "gdpo.val_prompts",
            max(1, -(-most // repeat)),
            "max_val_samples" + (f", {repeat} of each prompt" if repeat > 1 else ""),
        )
    temperature = recipe.get("policy.generation.val_temperature", recipe.get("policy.generation.temperature", 1.0))
    account.set("gdpo.val_temperature", float(temperature), "val_temperature")
