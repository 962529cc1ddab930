"""The transports of weights by name, and which of them a config can have.

The classes need torch, which a config must not wait for; what they declare is read from their source.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Callable, Mapping

from gdpo_nemo.config.class_source import NotLiteral, read_class
from gdpo_nemo.config.messages import nearest
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError

_PACKAGE = "gdpo_nemo.weights.transports"
BASE = f"{_PACKAGE}.transport:Transport"
TRANSPORTS = {
    "memory": f"{_PACKAGE}.memory:MemoryTransport",
    "gloo": f"{_PACKAGE}.collective:GlooTransport",
    "nccl": f"{_PACKAGE}.collective:NcclTransport",
    "ipc": f"{_PACKAGE}.ipc:IpcTransport",
    "folder": f"{_PACKAGE}.folder:FolderTransport",
}
"""Values of ``weights.transport`` besides ``auto`` -> place of their class."""

CONDITIONS: dict[str, Callable[[Config], bool]] = {
    "separate": lambda config: config.cluster.placement == "separate",
    "colocated": lambda config: config.cluster.placement == "colocated",
    "cpu": lambda config: config.cluster.gpus_per_node == 0,
    "several_nodes": lambda config: config.cluster.num_nodes > 1,
    "engine_tensor_parallel": lambda config: config.policy.generation.vllm_cfg.tensor_parallel_size > 1,
    "lora": lambda config: config.policy.lora.rank > 0,
}
"""What a transport may refuse (``Transport.refuses``) -> whether a config has it."""


@dataclass(frozen=True)
class Declared:
    """The attributes of a transport's class that a config is checked by; ``Transport`` says what they mean."""

    refuses: Mapping[str, str]
    uses_buckets: bool


def transport_place(name: str) -> str:
    """Where the class of a transport is."""
    return TRANSPORTS.get(name, name)


def chosen_transport(config: Config) -> str:
    """What ``weights.transport: auto`` chooses: ipc on shared devices, nccl between GPUs, else memory or gloo."""
    name = config.weights.transport
    cluster = config.cluster
    if name != "auto":
        return name
    if cluster.placement == "colocated":
        return "ipc"
    if cluster.gpus_per_node:
        return "nccl"
    return "memory" if cluster.num_nodes == 1 else "gloo"


def declared(name: str) -> Declared:
    """What a transport says of itself, without importing it.

    Raises:
        ConfigError: it is not there, is no transport, or what it says makes no sense.
    """
    return _declared_built_in(name) if name in TRANSPORTS else _declared(name)


@cache
def _declared_built_in(name: str) -> Declared:
    return _declared(name)


def _declared(name: str) -> Declared:
    try:
        source = read_class(transport_place(name))
    except ConfigError as error:
        raise ConfigError(f"weights.transport: {error}") from None
    if BASE not in source.ancestry:
        raise ConfigError(
            f"weights.transport: {name} is no subclass of Transport as far as its source shows "
            f"(from {BASE.partition(':')[0]} import Transport)"
        )
    refuses = _literal(name, source.attributes, "refuses", dict)
    for condition, why in refuses.items():
        if condition not in CONDITIONS or not isinstance(why, str):
            raise ConfigError(
                f"weights.transport: {name} refuses {condition!r}: {why!r}; write {{condition: why}} with "
                f"{', '.join(CONDITIONS)}{nearest(str(condition), CONDITIONS)}"
            )
    return Declared(refuses, _literal(name, source.attributes, "uses_buckets", bool))


def _literal(name: str, attributes: Mapping[str, Any], attribute: str, kind: type) -> Any:
    value = attributes[attribute]
    if not isinstance(value, kind):
        found = "is computed" if isinstance(value, NotLiteral) else f"is {value!r}"
        raise ConfigError(
            f"weights.transport: {attribute} of {name} {found}; it must be a literal {kind.__name__}, because it is "
            "read without running the file"
        )
    return value


def check_transport(config: Config) -> None:
    """Refuse a transport that says it cannot work with this config. Raises ConfigError."""
    name = chosen_transport(config)
    for condition, why in declared(name).refuses.items():
        if CONDITIONS[condition](config):
            raise ConfigError(f"weights.transport: {name} {why}")
