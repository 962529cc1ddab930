"""gdpo_nemo: reinforcement learning with several rewards, using Megatron-core for training and vLLM for sampling.

    from gdpo_nemo import train

    result = train("base.yaml", rewards={"correct": correct, "short": (short, 0.5)}, data=rows)

User files (environments, algorithms, losses, transports) should import names only from ``gdpo_nemo`` itself, because
its modules may move. A public name is imported on first access, so that ``import gdpo_nemo`` is fast. See
``docs/library.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdpo_nemo.algorithms.advantages import compute_advantages as compute_advantages
    from gdpo_nemo.algorithms.estimators import Terms as Terms, weighted_terms as weighted_terms, z_scores as z_scores
    from gdpo_nemo.algorithms.loss_settings import LossSettings as LossSettings, OffPolicySettings as OffPolicySettings
    from gdpo_nemo.algorithms.losses import (
        TokenFields as TokenFields,
        importance_ratio as importance_ratio,
        token_weights as token_weights,
    )
    from gdpo_nemo.algorithms.rewards import ShapingContext as ShapingContext
    from gdpo_nemo.algorithms.settings import Settings as Settings
    from gdpo_nemo.algorithms.table import RewardTable as RewardTable
    from gdpo_nemo.algorithms.weighting import (
        StepAdvantages as StepAdvantages,
        StepGradients as StepGradients,
        StepRewards as StepRewards,
    )
    from gdpo_nemo.commands.env.check import check_environment as check_environment, sample_of as sample_of
    from gdpo_nemo.config.load import load_config as load_config
    from gdpo_nemo.config.schema import Config as Config
    from gdpo_nemo.data.packing import TrainSequence as TrainSequence
    from gdpo_nemo.data.records import (
        Outcome as Outcome,
        Prompt as Prompt,
        Trajectory as Trajectory,
        UpdateResult as UpdateResult,
        Verdict as Verdict,
    )
    from gdpo_nemo.data.tokenizer import Tokenizer as Tokenizer
    from gdpo_nemo.environments.base import (
        Environment as Environment,
        Failure as Failure,
        SpanReward as SpanReward,
        read_options as read_options,
    )
    from gdpo_nemo.environments.episodes import EpisodeFailed as EpisodeFailed
    from gdpo_nemo.environments.registry import load_environment as load_environment
    from gdpo_nemo.generation.requests import SampleRequest as SampleRequest
    from gdpo_nemo.observe.metrics import read_metrics as read_metrics
    from gdpo_nemo.observe.samples import read_rollouts as read_rollouts
    from gdpo_nemo.rollouts.context import RolloutContext as RolloutContext, Transcript as Transcript
    from gdpo_nemo.training.algorithm import Algorithm as Algorithm
    from gdpo_nemo.training.api import TrainResult as TrainResult, train as train
    from gdpo_nemo.utils.errors import ConfigError as ConfigError, GdpoError as GdpoError, RunError as RunError
    from gdpo_nemo.weights.manifest import Manifest as Manifest, pack as pack, unpack as unpack
    from gdpo_nemo.weights.transports.base import Receiver as Receiver, Sender as Sender, Transport as Transport
    from gdpo_nemo.weights.transports.memory import MemoryReceiver as MemoryReceiver

    __version__: str

_HOMES = {
    "algorithms.advantages": ("compute_advantages",),
    "algorithms.estimators": ("Terms", "weighted_terms", "z_scores"),
    "algorithms.loss_settings": ("LossSettings", "OffPolicySettings"),
    "algorithms.losses": ("TokenFields", "importance_ratio", "token_weights"),
    "algorithms.rewards": ("ShapingContext",),
    "algorithms.settings": ("Settings",),
    "algorithms.table": ("RewardTable",),
    "algorithms.weighting": ("StepAdvantages", "StepGradients", "StepRewards"),
    "commands.env.check": ("check_environment", "sample_of"),
    "config.load": ("load_config",),
    "config.schema": ("Config",),
    "data.packing": ("TrainSequence",),
    "data.records": ("Outcome", "Prompt", "Trajectory", "UpdateResult", "Verdict"),
    "data.tokenizer": ("Tokenizer",),
    "environments.base": ("Environment", "Failure", "SpanReward", "read_options"),
    "environments.episodes": ("EpisodeFailed",),
    "environments.registry": ("load_environment",),
    "generation.requests": ("SampleRequest",),
    "observe.metrics": ("read_metrics",),
    "observe.samples": ("read_rollouts",),
    "rollouts.context": ("RolloutContext", "Transcript"),
    "training.algorithm": ("Algorithm",),
    "training.api": ("TrainResult", "train"),
    "utils.errors": ("ConfigError", "GdpoError", "RunError"),
    "weights.manifest": ("Manifest", "pack", "unpack"),
    "weights.transports.base": ("Receiver", "Sender", "Transport"),
    "weights.transports.memory": ("MemoryReceiver",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
__all__ = [*sorted(_HOME), "__version__"]


if not TYPE_CHECKING:  # A type checker would assign the type Any to every unknown name.

    def __getattr__(name: str) -> Any:
        """Import a public name on first access, because some modules import torch."""
        if name == "__version__":
            return _version()
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def _version() -> str:
    """Return the version of the installed package."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("gdpo-nemo")
    except PackageNotFoundError:  # the package is a source checkout on sys.path, which is not installed
        return "unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
