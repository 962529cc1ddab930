"""Reading of NeMo-RL recipes with their parents, interpolations and defaults, and facts about the recipe's model."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gdpo_nemo.config.data_files import may_be_on_the_hub
from gdpo_nemo.config.interpolations import check_interpolations
from gdpo_nemo.config.load import MOST_FILES
from gdpo_nemo.config.model_checks import read_model_config
from gdpo_nemo.models.architectures import has_optional_experts
from gdpo_nemo.models.families import FAMILIES
from gdpo_nemo.models.family_checks import describe
from gdpo_nemo.tools.interop.nemo_rl.releases import MAIN, before, data_settings, keys_read, release_of
from gdpo_nemo.utils.errors import ConfigError, message_line
from gdpo_nemo.utils.files import check_yaml, parse_yaml, read_text

_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a // b if isinstance(a, int) and isinstance(b, int) and a % b == 0 else a / b,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "max": max,
    "min": min,
}
"""Functions that recipes may call in ``${...}``. They are registered only while a recipe is read."""
_RESOLVERS = {"${oc.env:": "${gdpo_env:", "${oc.decode:": "${gdpo_decode:"}
"""OmegaConf resolver -> replacement that keeps the values of environment variables out of the translated config."""

_FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*(\w+)")
_UNRESOLVED = re.compile("\x00(.*?)\x00")
"""Matches a reference to an environment variable that is left unresolved. In the reference, dollar signs are encoded as
\\x01."""

DEFAULTS: dict[str, Any] = {
    "grpo.num_prompts_per_step": 32,
    "grpo.num_generations_per_prompt": 16,
    "grpo.max_num_epochs": 1,
    "grpo.max_num_steps": 1000000,
    "grpo.normalize_rewards": True,
    "grpo.use_leave_one_out_baseline": True,
    "grpo.val_period": 10,
    "grpo.max_val_samples": 256,
    "grpo.seed": 42,
    "loss_fn.ratio_clip_min": 0.2,
    "loss_fn.ratio_clip_max": 0.2,
    "loss_fn.reference_policy_kl_penalty": 0.01,
    "loss_fn.reference_policy_kl_type": "k3",
    "loss_fn.kl_input_clamp_value": 20.0,
    "loss_fn.kl_output_clamp_value": 10.0,
    "loss_fn.token_level_loss": True,
    "policy.precision": "bfloat16",
}
"""Default values in NeMo-RL that differ from gdpo_nemo's."""


ALGORITHMS = {
    "grpo": "gdpo",
    "ppo": "ppo",
    "distillation": "distillation",
    "sft": "sft",
    "dpo": "dpo",
    "rm": "reward_model",
}
"""Section of a recipe that selects NeMo-RL's algorithm -> ``algorithm.type``. The first section applies."""
_OF_ROWS = {"max_num_epochs": 1, "val_at_start": True, "seed": 42}
_OTHER_DEFAULTS: dict[str, dict[str, Any]] = {
    "sft": _OF_ROWS | {"max_num_steps": 60, "val_period": 10, "val_batches": 8, "val_global_batch_size": 32},
    "dpo": _OF_ROWS
    | {"max_num_steps": 150, "val_period": 25, "val_batches": 8, "val_global_batch_size": 8}
    | {"reference_policy_kl_penalty": 0.05},
    "rm": _OF_ROWS | {"max_num_steps": -1, "val_period": 16, "val_batches": -1, "val_at_start": False},
    "ppo": {"num_prompts_per_step": 32, "num_generations_per_prompt": 16, "max_num_steps": 100000}
    | {"max_num_epochs": 100000, "val_at_start": True, "val_period": 20, "max_val_samples": 256, "seed": 42}
    | {"ppo_epochs": 4},
    "distillation": {"num_prompts_per_step": 128, "num_generations_per_prompt": 1, "max_num_steps": 1000}
    | {"max_num_epochs": 10, "val_batch_size": 64, "val_period": 20, "max_val_samples": 512, "seed": 42},
}
"""Default values of NeMo-RL's other algorithms, by section."""
_NUMBERS = (
    *dict.fromkeys(
        f"grpo.{name}" for section in _OTHER_DEFAULTS.values() for name, value in section.items() if type(value) is int
    ),
    "policy.train_global_batch_size",
    "policy.train_micro_batch_size",
    "policy.max_total_sequence_length",
    "policy.megatron_cfg.scheduler.lr_warmup_iters",
)
"""Keys whose values the translation of these algorithms uses in computations."""
_HELD_OUT = {None: 0, "ResponseDataset": 0} | dict.fromkeys(
    ("OpenMathInstruct-2", "tulu3_sft_mixture", "Nemotron-Cascade-2-SFT-Math"), 0.05
)
"""Dataset whose class holds out training rows -> default of ``split_validation_size``."""
_WHOLE = ("rope_scaling", "rope_parameters")
"""Names of mappings that are one key of a recipe, because their entries have no meaning of their own."""


@dataclass(frozen=True)
class Recipe:
    """A resolved recipe: values by dotted key, and the path of its file.

    The keys of the algorithm's section begin with ``grpo.`` for all algorithms (see ``as_written``).
    """

    flat: dict[str, Any]
    path: Path
    gym_checkout: Path | None = None
    """Folder of NeMo Gym that the user specified, or None."""
    release: str = MAIN
    """NeMo-RL's release that the recipe belongs to."""
    section: str = "grpo"
    """Section of the algorithm, a key of ``ALGORITHMS``."""

    @property
    def rows(self) -> bool:
        """True if the algorithm trains on the answers in the data instead of samples."""
        return self.section in ("sft", "dpo", "rm")

    @property
    def prompts(self) -> int:
        """Number of prompts or rows in a step."""
        key = "policy.train_global_batch_size" if self.rows else "grpo.num_prompts_per_step"
        return int(self.get(key, 1))

    def as_written(self, text: str) -> str:
        """Return a key or a text with keys, with the name of the algorithm's section in the recipe."""
        if self.section == "grpo":
            return text
        text = re.sub(r"\bgrpo\.(?=\w)", f"{self.section}.", text)
        return text.replace(f"{self.section}.async_grpo", f"{self.section}.async_{self.section}")

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value at ``key``, or ``default`` if it is absent, null or unset (``???``)."""
        value = self.flat[key] if key in self.flat else self._data.get(key)
        return default if value is None or value == "???" else value

    @cached_property
    def _data(self) -> Mapping[str, Any]:
        return data_settings(self.flat, self.release)

    def before(self, release: str) -> bool:
        """Return whether the recipe belongs to a release older than ``release``."""
        return before(self.release, release)

    def reads(self, key: str) -> bool:
        """Return whether the recipe's release reads a key of the flat section ``data`` (before 0.6)."""
        return self.before("0.6") and key in keys_read(self.flat)

    @property
    def megatron(self) -> bool:
        """True if the training backend is Megatron (False for DTensor)."""
        return bool(self.get("policy.megatron_cfg.enabled", False))

    @property
    def staleness(self) -> int:
        """Number of steps that generation may run ahead of training."""
        if self.get("grpo.async_grpo.enabled"):
            steps: int = self.get("grpo.async_grpo.max_trajectory_age_steps", 1)
            return steps
        if not self.single_controller:
            return 0
        key = "max_lookahead_versions" if self.sampler == "in_order" else "max_staleness_versions"
        lookahead: int = self.get(f"async_rl.sampler.{key}", 1)
        return lookahead

    @property
    def single_controller(self) -> bool:
        """True for recipes of ``run_grpo_single_controller.py``, which reads async_rl instead of grpo.async_grpo."""
        return any(key.startswith("async_rl.") for key in self.flat) and not self.get("grpo.async_grpo.enabled")

    @property
    def sampler(self) -> str:
        """Sampler that selects a step's groups in the single controller. ``InOrderSamplerConfig`` is the default."""
        return str(self.get("async_rl.sampler.name", "in_order"))

    @property
    def kv(self) -> str:
        """Value of ``rollout.kv`` if generation runs ahead of training.

        NeMo-RL's ``AsyncTrajectoryCollector.prepare_for_refit`` waits for in-flight samples unless
        in_flight_weight_updates is on. ``SingleControllerActor._sync_weights`` never waits.
        """
        section = "async_rl" if self.single_controller else "grpo.async_grpo"
        if not (self.single_controller or self.get(f"{section}.in_flight_weight_updates")):
            return "drain"
        return "recompute" if self.get(f"{section}.recompute_kv_cache_after_weight_updates") else "keep"

    @property
    def stale(self) -> bool:
        """True if generation may run ahead of training."""
        return self.staleness > 0

    @property
    def updates(self) -> int:
        """Number of optimizer updates per step. PPO may repeat them (``ppo_epochs``)."""
        if self.rows:
            return 1
        samples: int = self.get("grpo.num_prompts_per_step") * self.get("grpo.num_generations_per_prompt")
        size: int = self.get("policy.train_global_batch_size", samples)
        return max(1, round(samples / size))

    @property
    def kl_in_loss(self) -> bool:
        """True if the loss contains a KL penalty. ``use_kl_in_reward`` removes it from the loss."""
        return bool(self.get("loss_fn.reference_policy_kl_penalty")) and not self.get("loss_fn.use_kl_in_reward")

    @property
    def model(self) -> KnownModel:
        """Facts about the model."""
        return known_model(str(self.get("policy.model_name", "")))

    @property
    def lora(self) -> str:
        """Section of the enabled adapters (empty if adapters are disabled)."""
        section = "policy.megatron_cfg.peft" if self.megatron else "policy.dtensor_cfg.lora_cfg"
        return section if self.get(f"{section}.enabled") else ""

    @property
    def freezes_tower(self) -> bool:
        """True if only the language model is trained."""
        key = "megatron_cfg.freeze_config.freeze_vision_model"
        if not self.megatron:
            key = "dtensor_cfg.automodel_kwargs.freeze_config.freeze_vision_tower"
        return bool(self.get(f"policy.{key}"))

    @property
    def packed_tokens(self) -> int:
        """Maximum number of tokens in a micro-batch with packing or dynamic batching (0 if a micro-batch has a fixed
        number of sequences)."""
        for section in ("policy.sequence_packing", "policy.dynamic_batching"):
            if self.get(f"{section}.enabled") and self.get(f"{section}.train_mb_tokens"):
                return int(self.get(f"{section}.train_mb_tokens"))
        return 0

    @property
    def uses_muon(self) -> bool:
        """True if Muon updates the weight matrices."""
        name = self.get("policy.megatron_cfg.optimizer.optimizer")
        return bool(self.megatron) and name in ("muon", "dist_muon")

    @property
    def gathers_ahead(self) -> bool:
        """True if Megatron overlaps parameter gathering with computation, which requires two other settings."""
        section = "policy.megatron_cfg"
        switches = (f"{section}.distributed_data_parallel_config.overlap_grad_reduce",
                    f"{section}.distributed_data_parallel_config.overlap_param_gather",
                    f"{section}.optimizer.use_distributed_optimizer")  # fmt: skip
        return not self.uses_muon and all(self.get(switch) for switch in switches)

    @property
    def held_out(self) -> float | int:
        """Fraction (below 1) or number of training rows that NeMo-RL's dataset class holds out (0 if no rows are held
        out).

        Most dataset classes ignore ``split_validation_size``.
        """
        name = self.get("data.train.dataset_name")
        if name not in _HELD_OUT:
            return 0
        size: float | int = self.get("data.train.split_validation_size", _HELD_OUT[name])
        return size

    @property
    def cut(self) -> str:
        """Start of the held-out rows, as a slice bound for a Hub dataset's split: ``-100`` or ``95%``, for example.

        Empty if no rows are held out, or if a slice bound cannot express the start.
        """
        size = self.held_out
        if not size or self.get("data.train.data_path"):
            return ""
        if size >= 1:
            return f"-{int(size)}"
        percent = round(100 * (1 - size), 6)
        return f"{int(percent)}%" if percent == int(percent) else ""

    @property
    def names_validation(self) -> bool:
        """True if the recipe specifies a validation dataset."""
        names = ("data.validation.dataset_name", "data.validation.data_path")
        return any(self.get(name) for name in names)

    @property
    def validates(self) -> bool:
        """True if the translated config has validation data: a validation dataset or held-out training rows."""
        return self.names_validation or bool(self.cut)


def open_recipe(path: str | Path, gym_checkout: Path | None = None, release: str | None = None) -> Recipe:
    """Read the recipe at ``path``.

    Args:
        gym_checkout: folder of NeMo Gym whose files the recipe refers to, or None.
        release: NeMo-RL's release that the recipe belongs to. None determines it from the recipe's keys.

    Raises:
        ConfigError: if the recipe or one of its parents cannot be read, or it has no section of ``ALGORITHMS``.
    """
    path = Path(path)
    flat = dict(_leaves(read_recipe(path)))
    sections = {key.partition(".")[0] for key in flat}
    section = next((name for name in ALGORITHMS if name in sections), None)
    if section is None:
        raise ConfigError(f"{path}: expected one of the sections {', '.join(ALGORITHMS)}")
    flat = {_common_key(key, section): value for key, value in flat.items()}
    release = release or release_of(flat)
    flat = {**_defaults(section, release), **flat}
    recipe = Recipe(flat, path, gym_checkout, release, section)
    for key in _NUMBERS if section != "grpo" else ():
        value = recipe.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{path}: {recipe.as_written(key)}: must be an integer ({str(value)[:40]!r})")
    return recipe


def _common_key(key: str, section: str) -> str:
    if not key.startswith(f"{section}."):
        return key
    return f"grpo.{key.partition('.')[2]}".replace(f"grpo.async_{section}", "grpo.async_grpo")


def _defaults(section: str, release: str) -> dict[str, Any]:
    """Return NeMo-RL's default values for the algorithm of a section."""
    sections = {"grpo": ("grpo", "loss_fn", "policy"), "ppo": ("loss_fn", "policy")}.get(section, ("policy",))
    defaults = {key: value for key, value in DEFAULTS.items() if key.partition(".")[0] in sections}
    defaults |= {f"grpo.{key}": value for key, value in _OTHER_DEFAULTS.get(section, {}).items()}
    if "loss_fn" in sections and before(release, "0.5"):
        defaults["loss_fn.kl_output_clamp_value"] = None
    return defaults


def read_recipe(path: Path) -> dict[str, Any]:
    """Read a recipe, merge it with its parents, and resolve its interpolations.

    A section with ``_override_: true`` replaces the parents' section. ``${oc.env:NAME}`` is not resolved, because an
    untrusted recipe could read any secret. The exception is a numeric variable that is used in a computation.

    Raises:
        ConfigError: if a file cannot be read or is invalid, or an interpolation fails.
    """
    merged = _map_texts(_merged(path, (), count()), _replace_resolvers)
    resolvers = {name: _computed(function) for name, function in _ARITHMETIC.items()}
    resolvers |= {"gdpo_env": _kept_variable, "gdpo_decode": _decoded}
    for name, function in resolvers.items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    try:
        check_interpolations(merged)
        config = OmegaConf.create(merged)
        OmegaConf.resolve(config)
        resolved: dict[str, Any] = _map_texts(OmegaConf.to_container(config), _as_written)
        return resolved
    except (OmegaConfBaseException, TypeError, ValueError, ZeroDivisionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {_as_written(message_line(error))}") from None
    finally:
        for name in resolvers:
            OmegaConf.clear_resolver(name)


def _replace_resolvers(text: str) -> str:
    for name, replacement in _RESOLVERS.items():
        text = text.replace(name, replacement)
    return text


def _as_written(text: str) -> str:
    """Return the text with the original form of its unresolved references."""
    return _UNRESOLVED.sub(lambda found: found[1].replace("\x01", "$"), text)


def _kept_variable(name: str, *default: Any) -> str:
    arguments = ["null" if part is None else str(part) for part in (name, *default)]
    return f"\x00\x01{{oc.env:{','.join(arguments)}}}\x00"


def _decoded(text: Any) -> Any:
    variable = _UNRESOLVED.fullmatch(text) if isinstance(text, str) else None
    if variable:
        return f"\x00\x01{{oc.decode:{variable[1]}}}\x00"
    return parse_yaml(text) if isinstance(text, str) else text


def _computed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that replaces environment variables among its arguments by numbers and then calls
    ``function``."""
    return lambda *values: function(*map(_number_of, values))


def _number_of(value: Any) -> Any:
    if not isinstance(value, str) or _UNRESOLVED.fullmatch(value) is None:
        return value
    number = parse_yaml(str(OmegaConf.create({"it": _as_written(value)}).it))
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise ValueError(f"uses {_as_written(value)} in a computation, but its value is not a number")
    return number


def variables_of(value: Any) -> set[str]:
    """Return the names of the environment variables in a value and its nested values."""
    if isinstance(value, dict):
        return set().union(*(variables_of(v) for v in value.values())) if value else set()
    if isinstance(value, list):
        return set().union(*(variables_of(v) for v in value)) if value else set()
    return set(_FROM_ENVIRONMENT.findall(value)) if isinstance(value, str) else set()


def _map_texts(node: Any, change: Callable[[str], str]) -> Any:
    if isinstance(node, dict):
        return {key: _map_texts(value, change) for key, value in node.items()}
    if isinstance(node, list):
        return [_map_texts(value, change) for value in node]
    return change(node) if isinstance(node, str) else node


def _merged(path: Path, children: tuple[Path, ...], read: Iterator[int]) -> dict[str, Any]:
    if Path(os.path.realpath(path)) in children:
        raise ConfigError(f"{path}: inherits from itself")
    if next(read) == MOST_FILES:
        raise ConfigError(f"{children[0]}: inherits from more than {MOST_FILES} files, including repetitions")
    try:
        text = read_text(path)
        check_yaml(text)
        content = OmegaConf.load(io.StringIO(text))
    except FileNotFoundError:
        parent_of = f", which is listed under defaults in {children[-1].name}" if children else ""
        raise ConfigError(f"{path}: recipe not found{parent_of}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: cannot be read as YAML ({message_line(error)})") from None
    if not isinstance(content, DictConfig):
        raise ConfigError(f"{path}: expected a mapping of sections, got a list")
    own = cast(dict[str, Any], OmegaConf.to_container(content))  # of a DictConfig
    parents = own.pop("defaults", None) or []
    result: dict[str, Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        result = _over(result, _merged(path.parent / parent, (*children, Path(os.path.realpath(path))), read))
    return _over(result, own)


def _over(base: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Merge ``new`` into ``base`` recursively and return the result. Values of ``new`` take precedence."""
    if new.get("_override_"):
        base = {}
    out = dict(base)
    for key, value in new.items():
        if key == "_override_":
            continue
        if isinstance(value, dict):
            below = out.get(key)
            out[key] = _over(below if isinstance(below, dict) else {}, value)
        else:
            out[key] = value
    return out


def _leaves(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every leaf. Lists, empty mappings and the mappings in ``_WHOLE`` are leaves."""
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and name not in _WHOLE:
            yield from _leaves(value, key + ".")
        else:
            yield key, value


class KnownModel(NamedTuple):
    """Facts about a model that its name or folder determines."""

    model_type: str
    """``model_type`` of config.json (empty if the name does not determine it)."""
    mixture: bool = False
    """True for a mixture-of-experts model."""
    refusal: str = ""
    """Reason why the model is not supported (empty if it is supported)."""
    tied: bool | None = None
    """True if the output layer shares the weights of the embedding (None if this is unknown)."""
    question: str = ""
    """Question that only the config.json of an unknown Hub model can answer (empty for a known model)."""
    images: bool = False
    """True if the model's vision tower is supported."""


_MULTIMODAL = re.compile(
    r".*((VL|Omni|Vision|Audio)(?![a-z])|LLaVA|Idefics|SmolVLM|PaliGemma|Pixtral|MiniCPM-[VO]).*", re.IGNORECASE
)
_UNSUPPORTED = (
    (r"Qwen/Qwen3\.5-.*", "qwen3_5 with quantised weights", True),
    (r"Qwen/Qwen3-Next-.*", "qwen3_next with quantised weights", True),
    (r"Qwen/(Qwen1\.5-MoE|Qwen2-57B-A14B).*", "qwen2_moe with quantised weights", True),
    (r"deepseek-ai/DeepSeek-.*", "another DeepSeek family", True),
    (r"meta-llama/Llama-4-.*", "llama4", True),
    (r"mistralai/.*", "a newer Mistral family", False),
    (r"google/gemma-(3n|4-E\d+B).*", "a Gemma family with embeddings per layer", False),
    (r"google/gemma-.*", "another Gemma family", False),
    (r"((openai-community/)?gpt2|distilbert/distilgpt2|distilgpt2)(-(medium|large|xl))?", "gpt2", False),
    (r"nvidia/(NVIDIA-)?Nemotron-.*", "another Nemotron family", True),
    (r"zai-org/GLM-.*", "another GLM family", True),
    (r"MiniMaxAI/.*", "another MiniMax family", True),
    (r"microsoft/Phi-4-mini-.*", "phi3 with partial rotary embeddings", False),
)
"""(pattern of the Hub name, model_type, True for MoE) of models that are not supported. The first match applies."""

_TIED = (
    (r"Qwen/Qwen3-(VL-)?(0\.6|1\.7|2|4)B.*", True),
    (r"Qwen/Qwen3-(VL-)?(8|14|30|32|235)B.*", False),
    (r"Qwen/Qwen2\.5-(VL-)?(0\.5|1\.5|3)B.*", True),
    (r"Qwen/Qwen2\.5-(VL-)?(7|14|32|72)B.*", False),
    (r"meta-llama/Llama-3\.2-[13]B.*", True),
    (r"meta-llama/(Meta-)?Llama-3(\.[13])?-(8|70|405)B.*", False),
    (r"mistralai/(?!Ministral-3-).*", False),
    (r"google/gemma-.*", True),
    (r"openai/gpt-oss-.*", False),
)
"""(pattern of the Hub name, True if config.json has tie_word_embeddings). The first match applies."""


def known_model(name: str) -> KnownModel:
    """Return the facts about a model, given its folder or its name on the Hub."""
    if (Path(name) / "config.json").is_file():
        return _of_folder(Path(name))
    of_media = _MULTIMODAL.fullmatch(name)
    for family in FAMILIES.values():
        if re.fullmatch(family.hub_names, name) and (family.tower or not of_media):
            tied = next((tied for pattern, tied in _TIED if re.fullmatch(pattern, name)), None)
            # The layers of some families may or may not include experts. Names of mixtures contain their active size.
            optional = has_optional_experts(family)
            mixture = family.experts is not None and (not optional or bool(re.search(r"-A\d+B", name)))
            return KnownModel(family.model_type, mixture, tied=tied, images=family.tower is not None)
    if of_media:
        return _unsupported(name, "another image model, or a model of audio or video")
    for pattern, kind, mixture in _UNSUPPORTED:
        if re.fullmatch(pattern, name):
            return _unsupported(name, kind, mixture)
    supported = f"supported: {', '.join(sorted(FAMILIES))}"
    if may_be_on_the_hub(name):
        question = (
            f"the family of {name} is unknown until its config.json is read; a dense model is assumed; {supported}"
        )
        return KnownModel("", question=question)
    return KnownModel("", refusal=f"{name!r} is not a local folder or a name on the Hub; {supported}")


def _unsupported(name: str, kind: str, mixture: bool = False) -> KnownModel:
    supported = ", ".join(sorted(FAMILIES))
    return KnownModel(kind, mixture, f"{name!r} is {kind}, which is not supported; supported: {supported}")


def _of_folder(folder: Path) -> KnownModel:
    try:
        content = read_model_config(folder / "config.json")
        model = describe(content)
    except ConfigError as error:
        return KnownModel("", refusal=error.problem)
    images = model.family.tower is not None
    return KnownModel(model.family.model_type, model.experts > 0, tied=model.tied, images=images)


def tower_missing(name: str) -> str:
    """Return the reason why a model whose text model is supported cannot be trained on images."""
    towers = ", ".join(kind for kind, family in FAMILIES.items() if family.tower)
    return f"{name!r} is supported only without images; supported with images: {towers}"


def tower_adapters(model: KnownModel, names: Iterable[str] | None) -> str:
    """Return the difference of adapters that PEFT also adds to the vision tower (empty if it adds none).

    Args:
        names: last names of the layers with adapters, or None for all linear layers.
    """
    tower = FAMILIES[model.model_type].tower if model.images else None
    shared = {name.rpartition(".")[2] for name in tower.mlp} if tower else set()
    if names is not None:
        shared &= set(names)
    return (
        f"only the text model gets adapters; PEFT also adds them to {', '.join(sorted(shared))} of the tower"
        if shared
        else ""
    )
