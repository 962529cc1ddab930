"""How far sampling runs ahead of training: window, bound and depth in groups, and what contradicts them.

With P new groups a step, a window W and sampling that may be S' steps ahead, B = (S' + 1) * P - (W - 1) groups may be
outstanding (``rollouts/ledger.py`` proves that no token is then trained too late). Weights that are published every
``sync_every`` steps are up to sync_every - 1 steps old when a group starts, so S' = max_staleness - (sync_every - 1).
"""

from __future__ import annotations

import math

from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError


def admission_bound(groups: int, steps_ahead: int, window: int) -> int:
    """B: groups that may be outstanding, for ``groups`` a step (P), S' steps ahead and a reorder window W."""
    return (steps_ahead + 1) * groups - (window - 1)


def steps_ahead(config: Config) -> int:
    """S': steps that sampling may be ahead of training; 0: a step's groups are sampled once the step before is
    trained."""
    return config.rollout.max_staleness - (config.rollout.sync_every - 1)


def new_groups(config: Config) -> int:
    """P: groups of a step that are trained for the first time, at least."""
    return config.gdpo.num_prompts_per_step - config.rollout.replay_buffer.groups


def resolved_window(config: Config) -> int:
    """W in groups: what the config says, or 1.

    A window is taken off the bound, which costs more than reordering gains: with 0.3 of a step and max_staleness 1 no
    second step's groups fit beside those in training, and the simulation takes as long as with 0.
    """
    return 1 if config.rollout.window is None else config.rollout.window


def _largest_window(config: Config) -> int:
    """W with which B is the groups of a step."""
    return (steps_ahead(config) + 1) * new_groups(config) - config.gdpo.num_prompts_per_step + 1


def resolved_bound(config: Config) -> int:
    """B in groups."""
    return admission_bound(new_groups(config), steps_ahead(config), resolved_window(config))


def resolved_depth(config: Config) -> int | None:
    """Groups under way at most, from P to B; None: the run finds it between the two."""
    if steps_ahead(config) == 0:
        return config.gdpo.num_prompts_per_step
    depth = config.rollout.depth
    return None if depth == "auto" else int(depth)


def valid_needed(config: Config) -> int:
    """Samples with a verdict that a group needs after ``rollout.group_timeout_s`` to be trained."""
    # Rounded first: 0.28 * 25 is above 7 in floating point, and 7 samples are enough.
    return math.ceil(round(config.rollout.min_valid * config.gdpo.num_generations_per_prompt, 8))


def replaceable_groups(config: Config) -> int:
    """Groups without signal that dynamic sampling replaces for one step at most, one by one; further ones are
    trained."""
    dynamic = config.gdpo.dynamic_sampling
    return (dynamic.max_rounds - 1) * config.gdpo.num_prompts_per_step if dynamic.enabled else 0


def arithmetic(config: Config) -> str:
    """``B = (2 + 1) * 16 - (4 - 1) = 45``, with the config's numbers."""
    rollout = config.rollout
    ahead = f"{rollout.max_staleness} - {rollout.sync_every - 1}" if rollout.sync_every > 1 else rollout.max_staleness
    window = resolved_window(config)
    return f"B = ({ahead} + 1) * {_new(config)} - ({window} - 1) = {resolved_bound(config)}"


def _new(config: Config) -> str:
    again = config.rollout.replay_buffer.groups
    groups = config.gdpo.num_prompts_per_step
    return f"({groups} - {again})" if again else str(groups)


def check_rollout_bounds(config: Config) -> None:
    """Refuse a window, depth, period or share of verdicts with which a step would never be full, or too old.

    Raises:
        ConfigError: names the key, with the arithmetic.
    """
    rollout = config.rollout
    if steps_ahead(config) < 0:
        raise ConfigError(
            f"rollout.sync_every: {rollout.sync_every} lets staleness reach sync_every - 1 = {rollout.sync_every - 1}, "
            f"above rollout.max_staleness {rollout.max_staleness}; use at most {rollout.max_staleness + 1}"
        )
    _check_window(config)
    _check_depth(config)
    _check_valid(config)


def _check_window(config: Config) -> None:
    groups = config.gdpo.num_prompts_per_step
    if resolved_bound(config) >= groups:
        return
    key = "rollout.window"
    value = resolved_window(config)
    most = _largest_window(config)
    why = ""
    if most < 1:
        key = "rollout.replay_buffer.groups"
        value = config.rollout.replay_buffer.groups
        most = groups * steps_ahead(config) // (steps_ahead(config) + 1)
        why = ", and the first has none to train again"
    raise ConfigError(
        f"{key}: {value} leaves {arithmetic(config)} groups under way, below the {groups} of a step "
        f"(gdpo.num_prompts_per_step){why}; use at most {most}, or a larger rollout.max_staleness"
    )


def _check_depth(config: Config) -> None:
    depth = config.rollout.depth
    groups = config.gdpo.num_prompts_per_step
    if depth == "auto":
        return
    if isinstance(depth, bool) or not isinstance(depth, int):
        raise ConfigError(f"rollout.depth: must be auto or a whole number of groups, got {depth!r}")
    if depth < groups:
        raise ConfigError(
            f"rollout.depth: {depth} groups under way never fill a step of {groups} (gdpo.num_prompts_per_step)"
        )
    if depth > resolved_bound(config):
        raise ConfigError(
            f"rollout.depth: {depth} is above {arithmetic(config)}, the groups that rollout.max_staleness "
            f"{config.rollout.max_staleness} lets be under way; use at most {resolved_bound(config)}, or auto"
        )


def _check_valid(config: Config) -> None:
    share = config.rollout.min_valid
    if config.rollout.group_timeout_s is None:
        return
    group = config.gdpo.num_generations_per_prompt
    alone = bool(config.gdpo.options.get("leave_one_out"))
    least = 3 if alone else 2
    if valid_needed(config) < least:
        why = "the others of a sample have a deviation (gdpo.options.leave_one_out)" if alone else "samples compare"
        raise ConfigError(
            f"rollout.min_valid: {share:g} of the {group} samples of a group is {valid_needed(config)}, and {why} from "
            f"{least} on; use more than {(least - 1) / group:g}"
        )
