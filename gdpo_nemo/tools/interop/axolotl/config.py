"""Reading of axolotl configs, with type checks.

Based on ``utils/schemas`` and ``core/builders`` of axolotl at commit 067b021c.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from gdpo_nemo.utils.errors import ConfigError, first_line, nearest
from gdpo_nemo.utils.files import parse_yaml, read_text

SECTIONS = ("trl", "vllm", "ebft")
"""Sections whose keys are translated under dotted names, such as ``trl.beta``."""
ALGORITHMS = {
    "grpo": "gdpo",
    "gdpo": "gdpo",
    "ebft": "gdpo",
    "dpo": "dpo",
    "ipo": "dpo",
    "kto": "kto",
    "orpo": "orpo",
    "simpo": "simpo",
    "sft": "sft",
    "reward_model": "reward_model",
}
"""Value of ``rl``, or kind of training if ``rl`` is not set -> ``algorithm.type``."""
_SAMPLING = ("grpo", "gdpo", "ebft")
_COUNTS = (
    "micro_batch_size", "gradient_accumulation_steps", "batch_size", "sequence_len", "max_steps", "lora_r", "seed",
    "save_steps", "trl.num_generations", "trl.max_completion_length", "trl.generation_batch_size", "trl.top_k",
    "trl.num_iterations", "trl.prefetch_depth", "trl.vllm_sync_interval", "vllm.max_model_len",
    "vllm.tensor_parallel_size", "vllm.data_parallel_size", "ebft.stride", "ebft.context_length",
    "ebft.generate_max_len", "ebft.n_samples_per_prompt",
)  # fmt: skip
_NUMBERS = (
    "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "num_epochs",
    "warmup_steps", "warmup_ratio", "cosine_min_lr_ratio", "val_set_size", "rl_beta", "dpo_beta", "orpo_alpha",
    "simpo_gamma", "cpo_alpha", "kto_desirable_weight", "kto_undesirable_weight", "dpo_label_smoothing", "rpo_alpha",
    "center_rewards_coefficient", "lora_alpha", "lora_dropout", "trl.beta", "trl.temperature", "trl.top_p",
    "trl.epsilon", "trl.epsilon_high", "trl.ref_model_mixup_alpha", "trl.off_policy_mask_threshold",
    "trl.vllm_importance_sampling_cap", "vllm.gpu_memory_utilization", "ebft.alignment_coef", "ebft.diversity_coef",
    "ebft.ce_coef", "ebft.temperature", "ebft.top_p",
)  # fmt: skip
_LISTS = ("datasets", "test_datasets", "trl.reward_funcs", "trl.reward_weights", "lora_modules_to_save", "plugins")

_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("chat_template_kwargs", "trl.chat_template_kwargs", "lr_scheduler_kwargs"), (dict,)),
    **dict.fromkeys(
        (
            "adapter", "lr_scheduler", "trl.loss_type", "trl.importance_sampling_level", "ebft.advantage_estimator",
            "trl.multi_objective_aggregation", "trl.vllm_importance_sampling_mode", "trl.vllm_mode", "ebft.mode",
        ),
        (str,),
    ),
    **dict.fromkeys(("dpo_loss_type", "lora_target_modules"), (str, list)),
    "trl.scale_rewards": (bool, str),
}  # fmt: skip
"""Key -> allowed types."""
_AT_LEAST_ONE = (
    "micro_batch_size", "sequence_len", "lora_r", "trl.num_generations", "trl.max_completion_length", "ebft.stride",
    "trl.generation_batch_size", "ebft.context_length", "ebft.generate_max_len", "ebft.n_samples_per_prompt",
    "vllm.tensor_parallel_size", "vllm.data_parallel_size",
)  # fmt: skip


@dataclass(frozen=True)
class AxolotlConfig:
    """An axolotl config, which implements the ``Recipe`` protocol.

    Args:
        flat: values by key. Keys inside ``SECTIONS`` are dotted, such as ``trl.beta``.
        processes: number of data-parallel processes, which is set by the launcher and not in the config.
    """

    flat: Mapping[str, Any]
    path: Path
    processes: int = 1

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value at ``key``, or ``default`` if it is absent or null."""
        value = self.flat.get(key)
        return default if value is None else value

    @cached_property
    def kind(self) -> str:
        """Kind of training, a key of ``ALGORITHMS``. Raises ConfigError if ``rl`` has an unknown value."""
        rl = self.get("rl")
        if rl is None:
            return "reward_model" if self.get("reward_model") else "sft"
        known = [name for name in ALGORITHMS if name not in ("sft", "reward_model")]
        if rl not in known:
            raise ConfigError(f"{self.path}: rl: unknown value {str(rl)[:40]!r}{nearest(str(rl), known)}")
        return str(rl)

    @property
    def samples(self) -> bool:
        """True if the policy samples completions."""
        return self.kind in _SAMPLING

    @property
    def has_server(self) -> bool:
        """True if vLLM has its own GPUs. axolotl uses the mode ``server`` if ``vllm_mode`` is not set."""
        return bool(self.get("trl.use_vllm")) and self.get("trl.vllm_mode", "server") == "server"

    @property
    def accumulation(self) -> int:
        """Number of micro-batches per process in one optimizer update."""
        steps = self.get("gradient_accumulation_steps")
        if steps is None and self.get("batch_size"):
            steps = self.get("batch_size") // self.micro_batch
        return max(1, steps or 1)

    @property
    def micro_batch(self) -> int:
        """Number of rows in a micro-batch of one process."""
        return max(1, int(self.get("micro_batch_size", 1)))

    @property
    def rows_per_update(self) -> int:
        """Number of rows or samples in one optimizer update."""
        return self.micro_batch * self.accumulation * self.processes

    @property
    def sequence(self) -> int:
        """Maximum number of tokens in a sequence (``sequence_len``)."""
        return int(self.get("sequence_len", 512))

    @property
    def completion(self) -> int:
        """Maximum number of tokens in a completion. The default, 256, comes from TRL 1.8, which axolotl installs."""
        if self.get("ebft.mode") == "strided":
            return int(self.get("ebft.generate_max_len", 8))
        return int(self.get("trl.max_completion_length", 256))

    @property
    def datasets(self) -> list[Mapping[str, Any]]:
        """Entries of ``datasets``."""
        return list(self.get("datasets", ()))


def open_axolotl(path: str | Path, processes: int = 1) -> AxolotlConfig:
    """Read the config at ``path``.

    Raises:
        ConfigError: if the file cannot be read, is not an axolotl config, or has a value of the wrong type.
    """
    path = Path(path)
    try:
        content = parse_yaml(read_text(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: is not YAML ({first_line(error)})") from None
    if not isinstance(content, Mapping) or not isinstance(content.get("base_model"), str):
        raise ConfigError(f"{path}: expected an axolotl config with the key base_model")
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if key in SECTIONS and value is not None:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{path}: {key}: expected a mapping ({str(value)[:40]!r})")
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            flat[str(key)] = value
    return AxolotlConfig(_checked(flat, path), path, processes)


def _checked(flat: dict[str, Any], path: Path) -> dict[str, Any]:
    """Check the types of all values, and convert numbers that YAML reads as text, such as 5e-5."""
    for key, value in flat.items():
        if value is None:
            continue
        if key in _COUNTS and (isinstance(value, bool) or not isinstance(value, int)) and not _is_share(key, value):
            raise ConfigError(f"{path}: {key}: must be an integer ({str(value)[:40]!r})")
        if key in _NUMBERS:
            flat[key] = _number(value, f"{path}: {key}")
        if key in _LISTS and not isinstance(value, list):
            raise ConfigError(f"{path}: {key}: must be a list ({str(value)[:40]!r})")
        if key in ("datasets", "test_datasets") and not all(isinstance(entry, Mapping) for entry in value):
            raise ConfigError(f"{path}: {key}: must be a list of mappings with path and type")
        if key in _KINDS and not isinstance(value, _KINDS[key]):
            names = {dict: "a mapping", str: "text", list: "a list", bool: "true or false"}
            expected = " or ".join(names[kind] for kind in _KINDS[key])
            raise ConfigError(f"{path}: {key}: must be {expected} ({str(value)[:40]!r})")
    for key in _AT_LEAST_ONE:
        if flat.get(key) is not None and flat[key] < 1:
            raise ConfigError(f"{path}: {key}: must be at least 1 ({flat[key]})")
    return flat


def _is_share(key: str, value: Any) -> bool:
    """Return whether the value is a fraction of the run. Only ``save_steps`` may be a fraction."""
    return key == "save_steps" and isinstance(value, float)


def _number(value: Any, where: str) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value) if not isinstance(value, int) else value
        if not math.isfinite(number):
            raise ValueError
        return number
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: must be a finite number ({str(value)[:40]!r})") from None
