"""Model card of an exported model (``README.md``), in the format of Hugging Face: base model, rewards and results.

The content does not depend on the time or the path, so that equal runs write equal files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from gdpo_nemo.config.algorithm_choice import spec_of
from gdpo_nemo.config.data_files import DATA_SUFFIXES, is_local, is_rows_function, may_be_on_the_hub
from gdpo_nemo.config.effects import value_of
from gdpo_nemo.config.model_checks import read_model_config
from gdpo_nemo.config.schema import Config, DatasetConfig, GdpoConfig
from gdpo_nemo.config.sections import DataConfig
from gdpo_nemo.models.families import FAMILIES
from gdpo_nemo.observe.console import number
from gdpo_nemo.observe.installation import version, versions
from gdpo_nemo.observe.metrics import History, read_metrics
from gdpo_nemo.utils.files import parse_yaml

FILE = "README.md"
CURVE = "rewards.png"
_UNKNOWN = "unknown"
_SHOWN = (
    "gdpo.estimator", "gdpo.num_prompts_per_step", "gdpo.num_generations_per_prompt", "gdpo.kl_in_reward",
    "loss_fn.type", "loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max", "loss_fn.reference_policy_kl_penalty",
    "policy.precision", "policy.max_total_sequence_length", "policy.megatron_cfg.optimizer.lr",
    "policy.megatron_cfg.scheduler.lr_decay_style", "policy.lora.rank", "policy.generation.temperature",
    "policy.generation.max_new_tokens", "rollout.max_staleness", "run.seed",
)  # fmt: skip
"""Config keys that the card lists, because they are needed to interpret the results."""


def write_card(folder: str | Path, base_model: str, config: Config | None, run_dir: Path | None, step: int) -> Path:
    """Write the model card of an exported model. The reward curves are included if ``logger.plot`` is set.

    Args:
        base_model: folder or hub name of the model that training started from.
        config: config of the run. None if unknown.
        run_dir: run folder, from which the metrics up to ``step`` are read. None omits the results.

    Raises:
        OSError: if the file cannot be written.
        RunError: if the run's metrics are damaged.
    """
    folder = Path(folder)
    rows = read_metrics(run_dir) if run_dir else []
    history = History.of(row for row in rows if row["step"] <= step)
    has_plot = bool(config and config.logger.plot and history.components)
    if config and has_plot:
        from gdpo_nemo.observe.plot import rewards_png  # Importing matplotlib takes a second.

        (folder / CURVE).write_bytes(rewards_png(history, config.run.name))
    card = _card(base_model, config, history, step, has_plot=has_plot, reads_images=_reads_images(folder))
    (folder / FILE).write_text(card, encoding="utf-8")
    return folder / FILE


def _reads_images(folder: Path) -> bool:
    """Return whether an exported model has a vision tower."""
    file = folder / "config.json"
    family = FAMILIES.get(str(read_model_config(file).get("model_type"))) if file.is_file() else None
    return family is not None and family.tower is not None


def _card(
    base_model: str, config: Config | None, history: History, step: int, *, has_plot: bool, reads_images: bool
) -> str:
    base = _base_metadata(base_model)
    parent = _hub_name(base_model, base)
    parts = [
        _front_matter(config, base, parent, "image-text-to-text" if reads_images else "text-generation"),
        f"# {config.run.name if config else 'Converted model'}",
        _origin(base_model, parent, config, step),
        *([_data(config), _rewards(config.gdpo, history)] if config else []),
        *([f"![reward curves]({CURVE})"] if has_plot else []),
        *([_settings(config)] if config else []),
        _versions(),
        _use(config is not None and spec_of(config).head == "score", reads_images),
        _licence(base, parent),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(config: Config | None, base: dict[str, Any], parent: str | None, task: str) -> str:
    """Return the YAML front matter with the metadata for the hub."""
    fields: dict[str, Any] = {"base_model": parent} if parent else {}
    fields |= {"library_name": "transformers", "pipeline_tag": task}
    fields["license"] = base.get("license") or _UNKNOWN
    fields |= {key: base[key] for key in ("license_name", "license_link") if key in base}
    named = _hub_datasets(config.data) if config else []
    fields |= {"datasets": named} if named else {}
    tags = ["gdpo_nemo", "reinforcement-learning"]
    if config and ":" not in config.gdpo.estimator:
        tags.append(config.gdpo.estimator)
    fields["tags"] = tags
    return f"---\n{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)}---"


def _origin(base_model: str, parent: str | None, config: Config | None, step: int) -> str:
    shown = f"[{parent}](https://huggingface.co/{parent})" if parent else f"`{Path(base_model).name}`"
    if config is None:
        return f"Weights of a checkpoint after {step} steps, trained from {shown} with gdpo_nemo."
    how = "all weights" if not config.policy.lora.rank else f"LoRA of rank {config.policy.lora.rank}, merged"
    return f"{shown}, trained with gdpo_nemo for {step} steps of reinforcement learning with several rewards ({how})."


def _data(config: Config) -> str:
    lines = ["## Data", ""]
    for split, dataset in (("Training", config.data.train), ("Validation", config.data.validation)):
        if dataset is not None:
            lines.append(f"* {split} prompts: {_source(dataset, config)}")
    lines.append(f"* Verified by: {', '.join(f'`{name}`' for name in config.env) or 'no environment'}")
    return "\n".join(lines)


def _source(dataset: DatasetConfig, config: Config) -> str:
    """Describe the source of the prompts. Paths of local files are shown without folders."""
    if dataset.path is None:
        return f"generated by the environment `{dataset.environment or next(iter(config.env), '')}`"
    return ", ".join(f"`{Path(path).name if _is_local_source(path) else path}`" for path in _paths(dataset))


def _paths(dataset: DatasetConfig) -> list[str]:
    paths = dataset.path if isinstance(dataset.path, (list, tuple)) else [dataset.path]
    return [str(path) for path in paths if path]


def _is_local_source(path: str) -> bool:
    return is_local(path) or is_rows_function(path) or Path(path).suffix in DATA_SUFFIXES


def _hub_datasets(data: DataConfig) -> list[str]:
    every = [*_paths(data.train), *(_paths(data.validation) if data.validation else [])]
    return list(dict.fromkeys(path.partition(":")[0] for path in every if not _is_local_source(path)))


def _rewards(gdpo: GdpoConfig, history: History) -> str:
    """Return a Markdown table of the reward components with their weight, first and last mean.

    Means come from validations or, if the run has no validation, from training batches.
    """
    held_out = {name: history.curve(f"validation/{name}") for name in (*gdpo.rewards, *history.components)}
    validated = any(steps for steps, _ in held_out.values())
    curves = held_out if validated else {name: history.curve(f"reward/{name}/mean") for name in held_out}
    measured = next((steps for steps, _ in curves.values() if steps), None)
    if measured is None:
        rows = [f"| {name} | {weight:g} |" for name, weight in gdpo.rewards.items()]
        return "\n".join(["## Rewards", "", "| reward | weight |", "|---|---:|", *rows])
    what = "held-out prompts" if validated else "the training batch"
    ends = f"mean on {what}, step {measured[0]} | step {measured[-1]}"
    lines = ["## Rewards", "", f"| reward | weight | {ends} |", "|---|---:|---:|---:|"]
    for name, (_, values) in curves.items():
        if values:
            weight = gdpo.rewards.get(name, gdpo.rewards.get(name.partition("/")[2]))  # <environment>/<component>
            shown = "measured only" if weight is None else f"{weight:g}"
            used = history.curve(f"reward/{name}/weight")[1]
            if len(set(used)) > 1:
                shown = f"{used[0]:.3g} to {used[-1]:.3g}"
            lines.append(f"| {name} | {shown} | {number(values[0])} | {number(values[-1])} |")
    if validated:
        lines += ["", _validation(gdpo)]
    return "\n".join(lines)


def _validation(gdpo: GdpoConfig) -> str:
    prompts = "all held-out prompts" if gdpo.val_prompts is None else f"{gdpo.val_prompts} prompts"
    samples = gdpo.val_generations_per_prompt
    each = "1 sample" if samples == 1 else f"{samples} samples"
    return f"Validation: {prompts}, {each} each, temperature {gdpo.val_temperature:g}."


def _settings(config: Config) -> str:
    values = {key: value_of(config, key) for key in _SHOWN}
    if config.policy.lora.rank:
        values |= {key: value_of(config, key) for key in ("policy.lora.alpha", "policy.lora.target_modules")}
    text = yaml.safe_dump(values, sort_keys=False, width=1000)
    return f"## Settings\n\n```yaml\n{text}```"


def _versions() -> str:
    found = {"gdpo_nemo": version("gdpo-nemo") or "unknown", **versions()}
    return f"## Versions\n\n{', '.join(f'{name} {text}' for name, text in found.items())}"


def _use(scores: bool, reads_images: bool) -> str:
    kind, reader = "AutoModelForCausalLM", "AutoTokenizer"
    if scores:
        kind = "AutoModelForSequenceClassification"
    elif reads_images:
        kind, reader = "AutoModelForImageTextToText", "AutoProcessor"
    code = (
        f"from transformers import {kind}, {reader}\n\n"
        f'model = {kind}.from_pretrained("FOLDER")  # this folder, or its name on the hub\n'
        f'{reader.removeprefix("Auto").lower()} = {reader}.from_pretrained("FOLDER")'
    )
    other = "as a reward: `{function: reward_model, model: FOLDER}`" if scores else "`gdpo-nemo chat FOLDER`"
    return f"## Use\n\n```python\n{code}\n```\n\nOr {other}."


def _licence(base: dict[str, Any], parent: str | None) -> str:
    stated = base.get("license")
    source = parent or "the base model"
    return f"## Licence\n\n{stated}, as stated by {source}." if stated else "## Licence\n\nUnknown; see the base model."


def _base_metadata(model: str) -> dict[str, Any]:
    """Return the metadata of the base model's card.

    A license that the card does not specify is read from ``config.json``.
    """
    folder = Path(model)
    card = _cached(model, FILE) if _on_the_hub(model) else folder / FILE
    front = _parsed_front(card.read_text(encoding="utf-8", errors="replace")) if card and card.is_file() else {}
    file = folder / "config.json"
    if file.is_file() and "license" not in front:
        content = read_model_config(file)
        front |= {key: content[key] for key in ("license",) if isinstance(content.get(key), str)}
    return front


def _on_the_hub(model: str) -> bool:
    return not Path(model).is_dir() and may_be_on_the_hub(model)


def _cached(name: str, file: str) -> Path | None:
    """Return the path of a hub model's file in the local cache, or None if the file is not cached."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, file)
    return Path(found) if isinstance(found, str) else None


def _parsed_front(text: str) -> dict[str, Any]:
    """Parse the YAML front matter of a card. The result is empty if the front matter is missing or invalid."""
    if not text.startswith("---\n"):
        return {}
    try:
        front = parse_yaml(text[4:].partition("\n---")[0])
    except yaml.YAMLError:
        return {}
    return front if isinstance(front, dict) else {}


def _hub_name(model: str, base: dict[str, Any]) -> str | None:
    """Return the hub name of the base model or of the model it was derived from, or None if unknown."""
    if _on_the_hub(model):
        return model
    named = base.get("base_model")
    return named if isinstance(named, str) else None
