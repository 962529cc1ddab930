"""gdpo_nemo: reinforcement learning with several rewards, Megatron-core to train and vLLM to sample.

    from gdpo_nemo import train

    result = train("base.yaml", rewards={"correct": correct, "short": (short, 0.5)}, data=rows)

Importing the package imports nothing else; ``docs/library.md`` says more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdpo_nemo.algorithms import compute_advantages as compute_advantages
    from gdpo_nemo.api import TrainResult as TrainResult, train as train
    from gdpo_nemo.config.load import load_config as load_config
    from gdpo_nemo.errors import ConfigError as ConfigError, GdpoError as GdpoError, RunError as RunError

    __version__: str

_PLACES = {
    "ConfigError": "errors",
    "GdpoError": "errors",
    "RunError": "errors",
    "TrainResult": "api",
    "compute_advantages": "algorithms",
    "load_config": "config.load",
    "train": "api",
}
__all__ = [*_PLACES, "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: some bring torch along."""
    if name == "__version__":
        return _version()
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = value
    return value


def _version() -> str:
    """That of pyproject.toml, as it was installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("gdpo-nemo")
    except PackageNotFoundError:  # a checkout that is only on the path
        return "unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
