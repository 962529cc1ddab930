"""Functions of the user's own that the objective is made of, loaded and tried before any process starts.

torch is imported only where there is a loss to try: a dry run is to answer at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Callable

from gdpo_nemo.algorithms.own_functions import Functions, is_place
from gdpo_nemo.algorithms.rewards import check_shaping, creates, parse_condition, rule_name
from gdpo_nemo.config.objective_checks import check_estimator, check_skipping
from gdpo_nemo.config.objects import load_functions
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from gdpo_nemo.algorithms import LossSettings, Terms, TokenFields

_LENGTHS = (5, 1, 7, 3)
"""Tokens of the sequences that a loss is tried on: one of them alone, as the shortest answer is."""


def own_estimator(config: Config) -> Callable[..., Terms] | None:
    """The function that ``gdpo.estimator`` names by its place; None where it is one of ours. Raises ConfigError."""
    name = config.gdpo.estimator
    return load_functions("gdpo.estimator", [name])[name] if is_place(name) else None


def own_rules(config: Config) -> dict[str, Callable[..., np.ndarray]]:
    """The functions that rules of ``gdpo.shaping`` name by their places. Raises ConfigError."""
    return load_functions("gdpo.shaping", filter(is_place, map(rule_name, config.gdpo.shaping)))


def check_own_functions(config: Config) -> None:
    """Load the user's estimator, shaping rules, loss and correction, and try each on a little of its kind.

    Raises:
        ConfigError: one is not there, raises, or gives what cannot be trained on; names the key.
    """
    estimator = own_estimator(config)
    if estimator is not None:
        check_estimator(config, estimator)
    if rules := own_rules(config):
        _try_rules(config, rules)
    if places := config.loss_fn.places:
        functions = load_functions("loss_fn", places)
        _try_loss(config.loss_fn, functions)
        check_skipping(config, functions)


def _try_rules(config: Config, functions: Functions) -> None:
    """Every rule, on rewards of 0, of 1 and on a missing one."""
    rules = config.gdpo.shaping
    named = {str(rule["component"]) for rule in rules if not creates(rule)}
    named |= {str(parse_condition(rule["condition"])[0]) for rule in rules if "condition" in rule}
    try:
        check_shaping(rules, sorted(named | set(config.gdpo.rewards)), functions)
    except ValueError as error:
        raise ConfigError(f"gdpo.shaping: {error}") from None


def _try_loss(settings: LossSettings, functions: Functions) -> None:
    """Loss and correction on random tokens of a few sequences: once as sampled, once far from it."""
    import torch

    from gdpo_nemo.algorithms.policy_loss import importance_weights, policy_loss

    settings = replace(
        settings, reference_policy_kl_penalty=0.0, entropy_bonus=0.0
    )  # which have gradients of their own
    total = 0.0
    for distance in (0.0, 0.3, 3.0):
        fields, logprobs = _tokens(distance)
        try:
            loss, _ = policy_loss(logprobs, None, fields, settings, functions=functions)
            if loss.requires_grad:
                total += float(torch.autograd.grad(loss, logprobs)[0].abs().sum())
            weights = importance_weights(fields, settings.off_policy, functions)
        except (ValueError, RuntimeError) as error:
            sentence = str(error)
            named = sentence.startswith("loss_fn.")
            raise ConfigError(sentence if named else f"loss_fn.{sentence}") from None
        if is_place(settings.off_policy.correction):
            _check_weights(weights, fields, settings)
    if not total:
        raise ConfigError(
            f"loss_fn.type: {settings.type} has no gradient: nothing would be learnt (is the log-prob detached?)"
        )


def _check_weights(weights: torch.Tensor, fields: TokenFields, settings: LossSettings) -> None:
    """A correction is a weight, not negative, and where it claims to be of sequences, the same in each."""
    mode = settings.off_policy.mode
    if (weights < 0).any():
        raise ConfigError(f"loss_fn.off_policy.mode: {mode} returned a negative weight, {float(weights.min()):g}")
    unlike = not weights.allclose(fields.sequence_means(weights))
    if unlike and settings.off_policy.level != "token" and settings.type == "gspo":
        raise ConfigError(
            f"loss_fn.off_policy.mode: {mode} gives the tokens of a sequence unlike weights, which loss_fn.type gspo "
            "cannot take"
        )


def _tokens(distance: float) -> tuple[TokenFields, torch.Tensor]:
    """Log-probs of a few sequences, and what a batch brings to them, ``distance`` nats from sampler and old policy."""
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
