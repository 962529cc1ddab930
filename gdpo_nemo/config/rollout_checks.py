"""Checks of rollout settings: sampling ahead of training, the replay buffer, prompts that are sampled again, and
multi-turn agents."""

from __future__ import annotations

import ast
import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path

from gdpo_nemo.config.layout import validations
from gdpo_nemo.config.schema import Config, GdpoConfig, RolloutConfig
from gdpo_nemo.config.sections import GenerationConfig
from gdpo_nemo.utils.errors import ConfigError, nearest

DIFFICULTIES = ("new", "hard", "medium", "easy")
"""Difficulties of prompts in ``rollout.selection.difficulties``."""


def admission_bound(groups: int, steps_ahead: int, window: int) -> int:
    """Return the bound B = (S' + 1) * P - (W - 1), the maximum number of groups in flight.

    Args:
        groups: P, the number of new groups per step.
        steps_ahead: S', the number of steps by which sampling may be ahead of training.
        window: W, the reorder window in groups.
    """
    return (steps_ahead + 1) * groups - (window - 1)


def steps_ahead(config: Config) -> int:
    """Return S', the number of steps by which sampling may be ahead of training. If it is 0, a step is sampled only
    after the previous step is trained."""
    return config.rollout.max_staleness - (config.rollout.sync_every - 1)


def new_groups(config: Config) -> int:
    """Return P, the minimum number of groups per step that are newly sampled, not replayed."""
    return config.gdpo.num_prompts_per_step - config.rollout.replay_buffer.groups


def resolved_window(rollout: RolloutConfig) -> int:
    """Return the reorder window W in groups. The window is 1 if ``rollout.window`` is null.

    A larger window reduces the bound on groups in flight, which costs more time than reordering saves. For example,
    with max_staleness 1 and a window of 0.3 steps, the groups of the next step do not fit next to the groups in
    training. The simulated time is then the same as with max_staleness 0.
    """
    return 1 if rollout.window is None else rollout.window


def _largest_window(config: Config) -> int:
    """Return the largest window W that still allows all groups of a step to be in flight."""
    return (steps_ahead(config) + 1) * new_groups(config) - config.gdpo.num_prompts_per_step + 1


def resolved_bound(config: Config) -> int:
    """Return the bound B on groups in flight for a config (see ``admission_bound``)."""
    return admission_bound(new_groups(config), steps_ahead(config), resolved_window(config.rollout))


def resolved_depth(config: Config) -> int | None:
    """Return the maximum number of groups in flight, from P to B. None: the run adapts the number within these
    limits."""
    if steps_ahead(config) == 0:
        return config.gdpo.num_prompts_per_step
    depth = config.rollout.depth
    return None if depth == "auto" else int(depth)


_MANY_ENGINES = 9
"""Minimum number of engines for which the number of their replies limits the driver."""


def engines_report_groups(generation: GenerationConfig) -> bool:
    """Return True if there are so many engines that each reports the samples of a group together.

    If an engine dies, all unreported samples of its groups are repeated. With ``rollout.group_timeout_s``, samples are
    reported individually, because a group that exceeds this limit is trained with the samples that were reported.
    Samples are also reported individually if they are verified individually.
    """
    return generation.engines >= _MANY_ENGINES


def allows_hosts(config: Config) -> bool:
    """Return True if there are many engines, and no setting requires that the driver samples and verifies groups."""
    rollout = config.rollout
    driver_needed = config.cluster.env_nodes or rollout.endpoint.enabled or rollout.function is not None
    return engines_report_groups(config.policy.generation) and not driver_needed


def valid_needed(config: Config) -> int:
    """Return the number of a group's samples that must have a reward for the group to be trained after
    ``rollout.group_timeout_s``."""
    # The product is rounded first, because 0.28 * 25 is above 7 in floating point although 7 samples are enough.
    return math.ceil(round(config.rollout.min_valid * config.gdpo.num_generations_per_prompt, 8))


def replaceable_groups(gdpo: GdpoConfig) -> int:
    """Return the maximum number of groups without a training signal that dynamic sampling replaces per step.

    The limit applies only if ``rollout.max_staleness`` is above 0. With 0, whole rounds are replaced instead.
    """
    dynamic = gdpo.dynamic_sampling
    return (dynamic.max_rounds - 1) * gdpo.num_prompts_per_step if dynamic.enabled else 0


def arithmetic(config: Config) -> str:
    """Return the formula of the bound with the config's numbers, such as ``B = (2 + 1) * 16 - (4 - 1) = 45``."""
    rollout = config.rollout
    ahead = f"{rollout.max_staleness} - {rollout.sync_every - 1}" if rollout.sync_every > 1 else rollout.max_staleness
    window = resolved_window(config.rollout)
    return f"B = ({ahead} + 1) * {_new_groups_text(config)} - ({window} - 1) = {resolved_bound(config)}"


def _new_groups_text(config: Config) -> str:
    replayed = config.rollout.replay_buffer.groups
    groups = config.gdpo.num_prompts_per_step
    return f"({groups} - {replayed})" if replayed else str(groups)


def check_rollout_bounds(config: Config) -> None:
    """Check that every step can be filled without exceeding ``rollout.max_staleness``.

    Raises:
        ConfigError: if sync_every, window, depth or min_valid does not allow it. The message contains the key and the
            arithmetic.
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
    _check_difficulties(config.rollout.selection.difficulties)
    _check_mix(config)


def _check_mix(config: Config) -> None:
    mix = config.data.mix
    if mix and not any(mix.values()):
        raise ConfigError("data.mix: all fractions are 0; at least one must be more than 0")
    for name in mix if config.data.mix_key is None else ():
        if name not in config.env:
            raise ConfigError(f"data.mix.{name}: env does not define {name!r}{nearest(name, config.env)}")


def _check_difficulties(quotas: Mapping[str, float]) -> None:
    key = "rollout.selection.difficulties"
    for name in quotas:
        if name not in DIFFICULTIES:
            raise ConfigError(f"{key}: unknown difficulty {name!r}{nearest(name, DIFFICULTIES)}")
    missing = [name for name in DIFFICULTIES if name not in quotas]
    if quotas and missing:
        raise ConfigError(
            f"{key}: lacks {', '.join(missing)}; a difficulty without a quota would never be sampled, so list all of "
            f"{', '.join(DIFFICULTIES)}"
        )


def _check_window(config: Config) -> None:
    groups = config.gdpo.num_prompts_per_step
    if resolved_bound(config) >= groups:
        return
    key = "rollout.window"
    value = resolved_window(config.rollout)
    most = _largest_window(config)
    why = ""
    if most < 1:
        key = "rollout.replay_buffer.groups"
        value = config.rollout.replay_buffer.groups
        most = groups * steps_ahead(config) // (steps_ahead(config) + 1)
        why = ", because the first step has no groups to replay"
    raise ConfigError(
        f"{key}: {value} allows only {arithmetic(config)} groups in flight, below the {groups} of a step "
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
            f"rollout.depth: {depth} groups in flight never fill a step of {groups} (gdpo.num_prompts_per_step)"
        )
    if depth > resolved_bound(config):
        raise ConfigError(
            f"rollout.depth: {depth} exceeds the groups in flight that "
            f"rollout.max_staleness {config.rollout.max_staleness} allows ({arithmetic(config)}); use at "
            f"most {resolved_bound(config)}, or auto"
        )


def _check_valid(config: Config) -> None:
    share = config.rollout.min_valid
    if config.rollout.group_timeout_s is None:
        return
    group = config.gdpo.num_generations_per_prompt
    leave_one_out = bool(config.gdpo.options.get("leave_one_out"))
    least = 3 if leave_one_out else 2
    if valid_needed(config) < least:
        why = "a comparison requires"
        if leave_one_out:
            why = "a leave-one-out deviation (gdpo.options.leave_one_out) requires"
        raise ConfigError(
            f"rollout.min_valid: {share:g} of the {group} samples of a group is {valid_needed(config)}, but {why} at "
            f"least {least}; use more than {(least - 1) / group:g}"
        )


_KEY = "rollout.replay_buffer"


def saves_all_groups(config: Config) -> bool:
    """Return whether ``rollout.save_groups`` covers all groups of a step."""
    saved = config.rollout.save_groups
    return saved is None or saved >= config.gdpo.num_prompts_per_step


def check_replay(config: Config) -> None:
    """Check that enough groups are available for the replay buffer, and that they are not too old. Raises
    ConfigError."""
    buffer = config.rollout.replay_buffer
    if not buffer.groups:
        return
    groups = config.gdpo.num_prompts_per_step
    staleness = config.rollout.max_staleness
    offered = max(0, new_groups(config)) * buffer.reuse
    if buffer.groups > offered:
        raise ConfigError(
            f"{_KEY}.groups: {buffer.groups} of {groups} (gdpo.num_prompts_per_step) leave {new_groups(config)} new "
            f"groups per step, which supply at most {offered} replayed groups (reuse {buffer.reuse}); use at most "
            f"{groups * buffer.reuse // (buffer.reuse + 1)}"
        )
    if staleness >= buffer.max_age:
        raise ConfigError(
            f"{_KEY}.max_age: {buffer.max_age} excludes groups that were already {staleness} steps old "
            f"(rollout.max_staleness) when first trained; use at least {staleness + 1}"
        )


def check_parsers(generation: GenerationConfig) -> None:
    """Check the names of the parsers.

    Raises:
        ConfigError: if the installed vLLM has no parser of this name.
    """
    for key, package, others in (
        ("tool_call_parser", "tool_parsers", ("none",)),
        ("reasoning_parser", "reasoning", ()),
    ):
        name = getattr(generation, key)
        if name is not None and name not in (known := (*_parser_names(package), *others)):
            raise ConfigError(
                f"policy.generation.{key}: {name!r} is not a parser of the installed vLLM{nearest(name, known)}"
            )


def _parser_names(package: str) -> list[str]:
    """Read the names of vLLM's parsers from its source, because the import would take 5 s of CPU time."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        raise ConfigError("policy.generation: vLLM is not installed; install it, or set no parser")
    source = (Path(vllm.origin).parent / package / "__init__.py").read_text()
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            names |= {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    return sorted(name for name in names if isinstance(name, str))


TURNS_KEPT = 65_536
"""Maximum number of turns of unfinished episodes that the endpoint stores. If there are more turns, the oldest turns
are removed."""


def check_turns_kept(config: Config, held_out: int | None = None) -> None:
    """Check that the endpoint can store all turns of the agents that run at the same time.

    If there were more turns, the samples whose turns are removed would fail.

    Args:
        held_out: number of prompts in a validation; None: not known yet.

    Raises:
        ConfigError: if there may be more turns. The message contains the keys and the arithmetic.
    """
    if not config.rollout.endpoint.enabled:
        return
    gdpo = config.gdpo
    turns = config.rollout.turns.max_turns
    samples = gdpo.num_generations_per_prompt
    what = "a step of"
    prompts = ("gdpo.num_prompts_per_step", gdpo.num_prompts_per_step)
    if steps_ahead(config) > 0:
        what = "a depth of"
        prompts = ("rollout.depth", resolved_depth(config) or resolved_bound(config))
    _check(what, prompts, ("gdpo.num_generations_per_prompt", samples), turns)
    if config.data.validation is None or not validations(gdpo):
        return
    known = held_out if held_out is not None else gdpo.val_prompts
    if known is not None:
        prompts = ("gdpo.val_prompts", known)
        samples = gdpo.val_generations_per_prompt
        _check("a validation of", prompts, ("gdpo.val_generations_per_prompt", samples), turns)


def _check(what: str, prompts: tuple[str, int], samples: tuple[str, int], turns: int) -> None:
    most = prompts[1] * samples[1] * turns
    if most > TURNS_KEPT:
        raise ConfigError(
            f"rollout.turns.max_turns: {what} {prompts[1]:,} prompts x {samples[1]:,} samples x {turns:,} turns has "
            f"up to {most:,} turns, but the endpoint remembers only {TURNS_KEPT:,}; lower it, {prompts[0]} "
            f"or {samples[0]}"
        )
