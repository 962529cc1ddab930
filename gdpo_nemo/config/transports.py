"""Registry of weight transports, and checks of whether a transport supports a config.

The transport classes import torch, which is too slow for checking a config. Therefore the class attributes are read
from the source files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from gdpo_nemo.config.schema import Config
from gdpo_nemo.utils.errors import ConfigError, nearest
from gdpo_nemo.utils.import_path import ImportPath
from gdpo_nemo.utils.source import NotLiteral

_PACKAGE = "gdpo_nemo.weights.transports"
BASE = f"{_PACKAGE}.base:Transport"
TRANSPORTS = {
    "memory": f"{_PACKAGE}.memory:MemoryTransport",
    "gloo": f"{_PACKAGE}.collective:GlooTransport",
    "nccl": f"{_PACKAGE}.collective:NcclTransport",
    "ipc": f"{_PACKAGE}.ipc:IpcTransport",
    "folder": f"{_PACKAGE}.folder:FolderTransport",
}
"""Import path of the class for each value of ``weights.transport`` except ``auto``."""

CONDITIONS: dict[str, Callable[[Config], bool]] = {
    "separate": lambda config: config.cluster.placement == "separate",
    "colocated": lambda config: config.cluster.placement == "colocated",
    "cpu": lambda config: config.cluster.gpus_per_node == 0,
    "several_nodes": lambda config: config.cluster.num_nodes > 1,
    "engine_tensor_parallel": lambda config: config.policy.generation.vllm_cfg.tensor_parallel_size > 1,
    "lora": lambda config: config.policy.lora.rank > 0,
}
"""Conditions that a transport may declare as unsupported (``Transport.refuses``), each with a predicate on the config.
"""


@dataclass(frozen=True)
class Declared:
    """Class attributes of a transport that are needed to check a config. The attributes are documented in
    ``Transport``."""

    refuses: Mapping[str, str]
    uses_buckets: bool
    sends_differences: bool


def transport_import_path(name: str) -> str:
    """Return the import path of a transport's class."""
    return TRANSPORTS.get(name, name)


def chosen_transport(config: Config) -> str:
    """Return the transport of a config, with ``auto`` resolved: ipc if colocated, nccl on GPUs, otherwise memory or
    gloo."""
    name = config.weights.transport
    cluster = config.cluster
    if name != "auto":
        return name
    if cluster.placement == "colocated":
        return "ipc"
    if cluster.gpus_per_node:
        return "nccl"
    return "memory" if cluster.num_nodes == 1 else "gloo"


def chosen_mode(config: Config) -> str:
    """Return the mode of a config, with ``auto`` replaced by ``full`` if a difference cannot save time."""
    mode = config.weights.mode
    if mode != "auto":
        return mode
    transport = chosen_transport(config)
    is_remote = config.cluster.num_nodes > 1 or transport == "folder"
    # Training changes almost all weights in float32, and adapters are small.
    few_changes = config.policy.precision == "bfloat16" and not config.policy.lora.rank
    return "auto" if is_remote and few_changes and declared(transport).sends_differences else "full"


def declared(name: str) -> Declared:
    """Return the class attributes of a transport without importing it.

    Raises:
        ConfigError: if the class does not exist, is not a transport, or has invalid attributes.
    """
    return _declared_built_in(name) if name in TRANSPORTS else _declared(name)


@cache
def _declared_built_in(name: str) -> Declared:
    return _declared(name)


def _declared(name: str) -> Declared:
    try:
        source = ImportPath(transport_import_path(name)).read_class()
    except ConfigError as error:
        raise error.within("weights.transport") from None
    if BASE not in source.ancestry:
        raise ConfigError(
            f"weights.transport: {name} must be a subclass of Transport in its source (from gdpo_nemo import Transport)"
        )
    refuses = _literal(name, source.attributes, "refuses", dict)
    for condition, why in refuses.items():
        if condition not in CONDITIONS or not isinstance(why, str):
            raise ConfigError(
                f"weights.transport: refuses of {name} has {condition!r}: {why!r}; expected {{condition: reason}} "
                f"with {', '.join(CONDITIONS)}{nearest(str(condition), CONDITIONS)}"
            )
    return Declared(
        refuses,
        _literal(name, source.attributes, "uses_buckets", bool),
        _literal(name, source.attributes, "sends_differences", bool),
    )


def _literal(name: str, attributes: Mapping[str, Any], attribute: str, kind: type) -> Any:
    value = attributes[attribute]
    if not isinstance(value, kind):
        found = "is computed" if isinstance(value, NotLiteral) else f"is {value!r}"
        raise ConfigError(
            f"weights.transport: {attribute} of {name} {found}; it must be a literal {kind.__name__} that can be read "
            "without running the file"
        )
    return value


def check_transport(config: Config) -> None:
    """Check that the transport supports the mode and all conditions that apply to this config. Raises ConfigError."""
    name = chosen_transport(config)
    if config.weights.mode == "difference":
        if config.policy.lora.rank:
            raise ConfigError("weights.mode: adapters (policy.lora.rank) are always sent as a whole; use auto or full")
        if not declared(name).sends_differences:
            raise ConfigError(f"weights.mode: weights.transport {name} always sends all weights; use auto or full")
    for condition, why in declared(name).refuses.items():
        if CONDITIONS[condition](config):
            raise ConfigError(f"weights.transport: {name} {why}")
