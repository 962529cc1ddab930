"""Calls and tokens of judge models in a run, as upper bounds."""

from __future__ import annotations

from gdpo_nemo.config.layout import Resolved, prompts_per_round, validations
from gdpo_nemo.config.schema import DatasetConfig, GdpoConfig
from gdpo_nemo.environments.registry import plugin_of


def judge_lines(resolved: Resolved) -> list[tuple[str, str]]:
    """Return a line with the calls and tokens of each judge model in the config, as (subject, text).

    The calls are those without retries, if no request is in the cache.

    Raises:
        ConfigError: if an option of a judge is invalid.
    """
    from gdpo_nemo.environments.tasks.judge import requests_of

    config = resolved.config
    groups = _groups_per_step(resolved)
    longest = config.policy.max_total_sequence_length
    lines = []
    for name, options in config.env.items() if groups else ():
        for judge in requests_of(f"env.{name}", plugin_of(name, options), options or {}):
            group = resolved.sequences_per_prompt
            step = groups * judge.requests * (1 if judge.by_group else group) * _uses(config.data.train, name)
            run = step * config.gdpo.max_num_steps
            held_out = _validation_groups(config.gdpo) if _uses(config.data.validation, name) else 0
            validation = config.gdpo.val_generations_per_prompt
            run += judge.requests * (held_out or 0) * (1 if judge.by_group else validation)
            subject = "for each criterion of a row, " if judge.by_criterion else ""
            text = f"{judge.key}: {subject}at most {step:,} calls per step and {run:,} in the run"
            text += ", plus validations" if held_out is None else ""
            if judge.tokens is None:
                tokens = "the replies have no token limit (max_tokens)"
            else:
                shown = longest * max(group, validation if held_out else 0) if judge.by_group else longest
                call = shown + judge.tokens
                of = "the samples of a group" if judge.by_group else "a sample"
                tokens = (
                    f"at most {step * call:,} and {run * call:,} tokens ({shown} of {of} + {judge.tokens} of a reply)"
                )
            lines.append(("judge", f"{text}; {tokens}, without instructions, references and retries"))
    return lines


def _groups_per_step(resolved: Resolved) -> int:
    """Return the maximum number of groups of a step, with all rounds of dynamic sampling."""
    gdpo = resolved.config.gdpo
    if not resolved.algorithm.samples:
        return 0
    return prompts_per_round(gdpo) * (gdpo.dynamic_sampling.max_rounds if gdpo.dynamic_sampling.enabled else 1)


def _validation_groups(gdpo: GdpoConfig) -> int | None:
    """Return the number of groups of all validations, or None if the number of prompts is not known."""
    count = validations(gdpo)
    if not count:
        return 0
    return None if gdpo.val_prompts is None else count * gdpo.val_prompts


def _uses(data: DatasetConfig | None, name: str) -> bool:
    """Return whether rows of a split may use the environment."""
    return data is not None and (data.environment in (None, name) or data.environment_key is not None)
