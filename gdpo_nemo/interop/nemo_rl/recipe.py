"""Reading a NeMo-RL recipe: its parents, its interpolations, and the defaults that NeMo-RL fills in.

Held against NVIDIA-NeMo/RL at 7ea279ab: ``utils/config.py`` (inheritance, resolvers), ``GRPOConfig``,
``ClippedPGLossConfig``.
"""

from __future__ import annotations

import io
import os
import re
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Callable, Iterator, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gdpo_nemo.config.interpolation_bound import check_interpolations
from gdpo_nemo.config.load import MOST_FILES
from gdpo_nemo.config.messages import message_line
from gdpo_nemo.config.reading import check_yaml, parse_yaml, read_text
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.interop.nemo_rl.known_models import KnownModel, known_model

_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a // b if isinstance(a, int) and isinstance(b, int) and a % b == 0 else a / b,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "max": max,
    "min": min,
}
"""Functions that recipes call inside ``${...}``; they exist while a recipe is read, and in no config of ours."""
_KEEPING = {"${oc.env:": "${gdpo_env:", "${oc.decode:": "${gdpo_decode:"}
"""OmegaConf's resolvers, and those in their place, so that no value of the environment gets into a translation."""

_FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*(\w+)")
_KEPT = re.compile("\x00(.*?)\x00")
"""An interpolation of the environment, with \\x01 for its dollar signs, while the others are resolved."""

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
"""What NeMo-RL takes where a recipe says nothing, for keys whose default here is another."""


@dataclass(frozen=True)
class Recipe:
    """A resolved recipe: its leaves by dotted key, and the file."""

    flat: dict[str, Any]
    path: Path

    def get(self, key: str, default: Any = None) -> Any:
        """The value at ``key``; ``default`` where it is absent, null or still to be given (``???``)."""
        value = self.flat.get(key)
        return default if value is None or value == "???" else value

    @property
    def megatron(self) -> bool:
        """Whether Megatron trains in this recipe; the alternative is DTensor."""
        return bool(self.get("policy.megatron_cfg.enabled", False))

    @property
    def staleness(self) -> int:
        """Steps that generation may run ahead of training."""
        if self.get("grpo.async_grpo.enabled"):
            return self.get("grpo.async_grpo.max_trajectory_age_steps", 1)
        if not self.single_controller:
            return 0
        key = "max_lookahead_versions" if self.sampler == "in_order" else "max_staleness_versions"
        return self.get(f"async_rl.sampler.{key}", 1)

    @property
    def single_controller(self) -> bool:
        """Whether ``run_grpo_single_controller.py`` runs it, which has async_rl in place of grpo.async_grpo."""
        return any(key.startswith("async_rl.") for key in self.flat) and not self.get("grpo.async_grpo.enabled")

    @property
    def sampler(self) -> str:
        """The single controller's choice of groups for a step; ``InOrderSamplerConfig`` where a recipe names none."""
        return str(self.get("async_rl.sampler.name", "in_order"))

    @property
    def kv(self) -> str:
        """``rollout.kv`` of a recipe whose generation runs ahead.

        ``AsyncTrajectoryCollector.prepare_for_refit`` waits for what is under way unless weights arrive in flight;
        ``SingleControllerActor._sync_weights`` never waits.
        """
        section = "async_rl" if self.single_controller else "grpo.async_grpo"
        if not (self.single_controller or self.get(f"{section}.in_flight_weight_updates")):
            return "drain"
        return "recompute" if self.get(f"{section}.recompute_kv_cache_after_weight_updates") else "keep"

    @property
    def stale(self) -> bool:
        """Whether generation may run ahead of training."""
        return self.staleness > 0

    @property
    def updates(self) -> int:
        """Optimizer updates in a step."""
        samples = self.get("grpo.num_prompts_per_step") * self.get("grpo.num_generations_per_prompt")
        return max(1, round(samples / self.get("policy.train_global_batch_size", samples)))

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss has a KL penalty; ``use_kl_in_reward`` takes it out."""
        return bool(self.get("loss_fn.reference_policy_kl_penalty")) and not self.get("loss_fn.use_kl_in_reward")

    @property
    def model(self) -> KnownModel:
        """What is known of the model."""
        return known_model(str(self.get("policy.model_name", "")))

    @property
    def lora(self) -> str:
        """The section of the adapters that are on; empty where there are none."""
        section = "policy.megatron_cfg.peft" if self.megatron else "policy.dtensor_cfg.lora_cfg"
        return section if self.get(f"{section}.enabled") else ""

    @property
    def packed_tokens(self) -> int:
        """Tokens of a micro-batch that packs or batches sequences by length; 0: it has a number of sequences."""
        for section in ("policy.sequence_packing", "policy.dynamic_batching"):
            if self.get(f"{section}.enabled") and self.get(f"{section}.train_mb_tokens"):
                return int(self.get(f"{section}.train_mb_tokens"))
        return 0

    @property
    def gathers_ahead(self) -> bool:
        """Return whether Megatron gathers parameters while it computes, which needs two other switches."""
        section = "policy.megatron_cfg"
        switches = (f"{section}.distributed_data_parallel_config.overlap_grad_reduce",
                    f"{section}.distributed_data_parallel_config.overlap_param_gather",
                    f"{section}.optimizer.use_distributed_optimizer")  # fmt: skip
        return all(self.get(switch) for switch in switches)

    @property
    def held_out(self) -> float | int:
        """Share (below 1) or number of the training rows that the data set's class holds out; 0: none.

        ``OpenMathInstruct2Dataset`` and ``ResponseDataset`` do; most other classes take the key and ignore it.
        """
        if self.get("data.train.dataset_name") not in (None, "OpenMathInstruct-2", "ResponseDataset"):
            return 0
        default = 0.05 if self.get("data.train.dataset_name") == "OpenMathInstruct-2" else 0
        return self.get("data.train.split_validation_size", default)

    @property
    def cut(self) -> str:
        """Where ``held_out`` cuts the training rows, as a slice of a hub data set's split has it; empty: no such
        slice."""
        size = self.held_out
        if not size or self.get("data.train.data_path"):
            return ""
        if size >= 1:
            return f"-{int(size)}"
        percent = round(100 * (1 - size), 6)
        return f"{int(percent)}%" if percent == int(percent) else ""

    @property
    def names_validation(self) -> bool:
        """Whether the recipe names held-out data."""
        names = ("data.validation.dataset_name", "data.validation.data_path", "data.val_data_path")
        return any(self.get(name) for name in names)

    @property
    def validates(self) -> bool:
        """Whether there is held-out data here: named, or cut off the training data."""
        return self.names_validation or bool(self.cut)


def open_recipe(path: str | Path) -> Recipe:
    """The recipe at ``path``.

    Raises:
        ConfigError: the recipe or one of its parents cannot be read, or is no GRPO or GDPO recipe.
    """
    path = Path(path)
    flat = dict(_leaves(read_recipe(path)))
    if not any(key.startswith("grpo.") for key in flat):
        raise ConfigError(f"{path}: has no section grpo; only GRPO and GDPO recipes can be translated")
    return Recipe({**DEFAULTS, **flat}, path)


def read_recipe(path: Path) -> dict[str, Any]:
    """The recipe with its parents merged in (a section with ``_override_: true`` replaces the parents') and resolved.

    ``${oc.env:NAME}`` stays as it is: the recipe is another person's, and may ask for any secret of the environment.
    A number in the environment counts as one where the recipe computes with it.

    Raises:
        ConfigError: names the file, and for a missing parent the file that asks for it.
    """
    merged = _map_texts(_merged(path, (), count()), _with_own_resolvers)
    resolvers = {name: _computed(function) for name, function in _ARITHMETIC.items()}
    resolvers |= {"gdpo_env": _kept_variable, "gdpo_decode": _decoded}
    for name, function in resolvers.items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    try:
        check_interpolations(merged)
        config = OmegaConf.create(merged)
        OmegaConf.resolve(config)
        return _map_texts(OmegaConf.to_container(config), _as_written)
    except (OmegaConfBaseException, TypeError, ValueError, ZeroDivisionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {_as_written(message_line(error))}") from None
    finally:
        for name in resolvers:
            OmegaConf.clear_resolver(name)


def _with_own_resolvers(text: str) -> str:
    for name, own in _KEEPING.items():
        text = text.replace(name, own)
    return text


def _as_written(text: str) -> str:
    return _KEPT.sub(lambda found: found[1].replace("\x01", "$"), text)


def _kept_variable(name: str, *default: Any) -> str:
    arguments = ["null" if part is None else str(part) for part in (name, *default)]
    return f"\x00\x01{{oc.env:{','.join(arguments)}}}\x00"


def _decoded(text: Any) -> Any:
    variable = _KEPT.fullmatch(text) if isinstance(text, str) else None
    if variable:
        return f"\x00\x01{{oc.decode:{variable[1]}}}\x00"
    return parse_yaml(text) if isinstance(text, str) else text


def _computed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, of numbers in place of variables of the environment."""
    return lambda *values: function(*map(_number_of, values))


def _number_of(value: Any) -> Any:
    kept = _KEPT.fullmatch(value) if isinstance(value, str) else None
    if kept is None:
        return value
    number = parse_yaml(str(OmegaConf.create({"it": _as_written(value)}).it))
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise ValueError(f"computes with {_as_written(value)}, which is not a number here")
    return number


def variables_of(value: Any) -> set[str]:
    """Environment variables that the text still asks for, at any depth."""
    if isinstance(value, dict):
        return set().union(*(variables_of(v) for v in value.values())) if value else set()
    if isinstance(value, list):
        return set().union(*(variables_of(v) for v in value)) if value else set()
    return set(_FROM_ENVIRONMENT.findall(value)) if isinstance(value, str) else set()


def _map_texts(node: Any, change) -> Any:
    if isinstance(node, dict):
        return {key: _map_texts(value, change) for key, value in node.items()}
    if isinstance(node, list):
        return [_map_texts(value, change) for value in node]
    return change(node) if isinstance(node, str) else node


def _merged(path: Path, children: tuple[Path, ...], read: Iterator[int]) -> dict[str, Any]:
    if Path(os.path.realpath(path)) in children:
        raise ConfigError(f"{path}: inherits from itself")
    if next(read) == MOST_FILES:
        raise ConfigError(f"{children[0]}: inherits from more than {MOST_FILES} files, repetitions counted")
    try:
        text = read_text(path)
        check_yaml(text)
        content = OmegaConf.load(io.StringIO(text))
    except FileNotFoundError:
        asked = f", which {children[-1].name} names under defaults" if children else ""
        raise ConfigError(f"{path}: no such recipe{asked}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: cannot be read as YAML ({message_line(error)})") from None
    if not isinstance(content, DictConfig):
        raise ConfigError(f"{path}: expected sections, found a list")
    own = cast(dict[str, Any], OmegaConf.to_container(content))  # of a DictConfig
    parents = own.pop("defaults", None) or []
    result: dict[str, Any] = {}
    for parent in [parents] if isinstance(parents, str) else parents:
        result = _over(result, _merged(path.parent / parent, (*children, Path(os.path.realpath(path))), read))
    return _over(result, own)


def _over(base: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """``new`` laid over ``base``."""
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
    """Dotted keys and their values; an empty mapping and a list are values."""
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from _leaves(value, key + ".")
        else:
            yield key, value
