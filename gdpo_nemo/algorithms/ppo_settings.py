"""The settings of PPO with a value head: the configuration section `ppo`, and what the ranks compute an update with.

The string under a field is what ``gdpo-nemo explain ppo.KEY`` prints. No torch here: a configuration is checked with
this before anything else is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Optional

from gdpo_nemo.algorithms.loss_settings import LossSettings
from gdpo_nemo.algorithms.own_functions import Functions
from gdpo_nemo.algorithms.ranges import Range, check_numbers


@dataclass
class PPOSettings:
    """Advantages and value loss of `algorithm.type` ppo. Names and defaults are those of TRL's PPOTrainer."""

    gamma: Annotated[float, Range(0, 1)] = 1.0
    """Discount of the next token's value and of the rewards to come, from 0 to 1 (1: none)."""
    lam: Annotated[float, Range(0, 1)] = 0.95
    """Lambda of generalized advantage estimation, from 0, which trusts the values alone, to 1, the rewards alone (arXiv
    1506.02438)."""
    vf_coef: Annotated[float, Range(0)] = 0.1
    """Weight of the value loss beside the loss of loss_fn."""
    head_lr_mult: Annotated[float, Range(above=0)] = 10.0
    """Learning rate of the value head, which starts at 0, over that of the policy (Megatron's name); the recipes of
    verl have 10."""
    cliprange_value: Annotated[Optional[float], Range(above=0)] = 0.2
    """Distance from the value before the step beyond which an update does not follow a token's value; null: not
    clipped."""
    whiten_advantages: bool = True
    """Whether the advantages of all trained tokens of a step are brought to mean 0 and standard deviation 1."""

    def check(self) -> None:
        """Refuse values that mean nothing. Raises ValueError; the message begins with the key."""
        check_numbers(self)


@dataclass
class ActorCriticSettings(LossSettings):
    """The loss of a policy with a value head: that of ``LossSettings``, and beside it the value loss."""

    vf_coef: float = PPOSettings.vf_coef
    """As in ``PPOSettings``."""
    cliprange_value: Optional[float] = PPOSettings.cliprange_value
    """As in ``PPOSettings``."""

    @classmethod
    def of(cls, loss: LossSettings, ppo: PPOSettings) -> ActorCriticSettings:
        """The settings of both sections together."""
        given: dict[str, Any] = {field.name: getattr(loss, field.name) for field in fields(LossSettings)}
        return cls(**given, vf_coef=ppo.vf_coef, cliprange_value=ppo.cliprange_value)

    def why_all_sequences(self, functions: Functions | None = None) -> str:
        """As the method of ``LossSettings``: no sequence may be left out."""
        return "the value head learns from every sequence"
