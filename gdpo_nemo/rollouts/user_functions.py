"""Custom estimators, shaping rules, losses and corrections: loading and testing before any process starts.

torch is imported only if there is a custom loss or correction to test, so that a dry run stays fast.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Callable

from gdpo_nemo.algorithms.loss_selection import Functions, is_import_path, loss_import_paths
from gdpo_nemo.algorithms.rewards import check_shaping, creates, parse_condition, rule_name
from gdpo_nemo.config.objective_checks import check_estimator, check_skipping
from gdpo_nemo.config.schema import Config, GdpoConfig
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.user_code import exits_contained, load_functions

if TYPE_CHECKING:
    import numpy as np
    import torch

    from gdpo_nemo.algorithms import LossSettings, Terms, TokenFields

_LENGTHS = (5, 1, 7, 3)
"""Lengths in tokens of the sequences for the test of a loss. The minimum length is a single token."""


def load_estimator(gdpo: GdpoConfig) -> Callable[..., Terms] | None:
    """Load the custom estimator in ``gdpo.estimator``. Return None for a built-in estimator.

    Raises:
        ConfigError: if the function cannot be loaded.
    """
    name = gdpo.estimator
    return exits_contained()(load_functions("gdpo.estimator", [name])[name]) if is_import_path(name) else None


def load_shaping_rules(gdpo: GdpoConfig) -> dict[str, Callable[..., np.ndarray]]:
    """Load the custom functions of the rules in ``gdpo.shaping``, by import path.

    Raises:
        ConfigError: if a function cannot be loaded.
    """
    found = load_functions("gdpo.shaping", filter(is_import_path, map(rule_name, gdpo.shaping)))
    return {name: exits_contained()(function) for name, function in found.items()}


def check_own_functions(config: Config) -> None:
    """Load the custom estimator, shaping rules, loss and correction, and test each on a small input.

    Raises:
        ConfigError: if a function cannot be loaded, raises an exception or returns invalid values. The message names
            the config key.
    """
    estimator = load_estimator(config.gdpo)
    if estimator is not None:
        check_estimator(config.gdpo, estimator)
    if rules := load_shaping_rules(config.gdpo):
        _try_rules(config.gdpo, rules)
    if paths := loss_import_paths(config.loss_fn):
        functions = load_functions("loss_fn", paths)
        _try_loss(config.loss_fn, functions)
        check_skipping(config, functions)


def _try_rules(gdpo: GdpoConfig, functions: Functions) -> None:
    """Test every shaping rule with rewards of 0 and 1 and with a missing reward."""
    rules = gdpo.shaping
    named = {str(rule["component"]) for rule in rules if not creates(rule)}
    named |= {str(parse_condition(rule["condition"])[0]) for rule in rules if "condition" in rule}
    try:
        check_shaping(rules, sorted(named | set(gdpo.rewards)), functions)
    except ValueError as error:
        raise ConfigError(f"gdpo.shaping: {error}") from None


def _try_loss(settings: LossSettings, functions: Functions) -> None:
    """Test loss and correction with random log-probs. The log-probs are equal to, near or far from the sampler's
    log-probs."""
    import torch

    from gdpo_nemo.algorithms.policy_loss import importance_weights, policy_loss

    # The gradients of KL penalty and entropy bonus would hide that the loss has no gradient.
    settings = replace(settings, reference_policy_kl_penalty=0.0, entropy_bonus=0.0)
    total = 0.0
    for distance in (0.0, 0.3, 3.0):
        fields, logprobs = _tokens(distance)
        try:
            loss, _ = policy_loss(logprobs, None, fields, settings, functions=functions)
            if loss.requires_grad:
                total += float(torch.autograd.grad(loss, logprobs)[0].abs().sum())
            weights = importance_weights(fields, settings.off_policy, functions)
        except (ValueError, RuntimeError) as error:
            message = str(error)
            has_key = message.startswith("loss_fn.")
            raise ConfigError(message if has_key else f"loss_fn.{message}") from None
        if is_import_path(settings.off_policy.correction):
            _check_weights(weights, fields, settings)
    if not total:
        raise ConfigError(
            f"loss_fn.type: {settings.type} has no gradient, so the policy cannot learn; check whether the log-prob "
            "is detached"
        )


def _check_weights(weights: torch.Tensor, fields: TokenFields, settings: LossSettings) -> None:
    """Check that a correction's weights are not negative. The loss type gspo also requires that all weights in a
    sequence are equal."""
    mode = settings.off_policy.mode
    if (weights < 0).any():
        raise ConfigError(f"loss_fn.off_policy.mode: {mode} returned a negative weight, {float(weights.min()):g}")
    differs_by_token = not weights.allclose(fields.sequence_means(weights))
    if differs_by_token and settings.off_policy.level != "token" and settings.type == "gspo":
        raise ConfigError(f"loss_fn.off_policy.mode: the per-token weights of {mode} conflict with loss_fn.type gspo")


def _tokens(distance: float) -> tuple[TokenFields, torch.Tensor]:
    """Return the batch fields and log-probs of a few random sequences.

    Args:
        distance: standard deviation in nats of the differences from the log-probs of sampler, old policy and reference.
    """
    import torch

    from gdpo_nemo.algorithms import TokenFields, token_weights

    generator = torch.Generator().manual_seed(0)
    ids = torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS))
    count = len(ids)
    logprobs = -torch.rand(count, generator=generator) * 3
    noise = [distance * torch.randn(count, generator=generator) for _ in range(3)]
    fields = TokenFields(
        advantages=torch.tensor([1.0, -0.5, 0.0, -1.5])[ids],
        weights=torch.from_numpy(token_weights(_LENGTHS, "token_mean")).float()[ids],
        sequence_ids=ids,
        num_sequences=len(_LENGTHS),
        staleness=(torch.arange(count) % 3).int(),
        old_logprobs=logprobs + noise[0],
        sampler_logprobs=logprobs + noise[1],
        reference_logprobs=logprobs + noise[2],
    )
    return fields, logprobs.requires_grad_()
