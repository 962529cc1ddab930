"""Which layers stand on which stage of the pipeline: one rule for the check, the plan, and the model that is built."""

from __future__ import annotations

from gdpo_nemo.config.schema import MegatronConfig
from gdpo_nemo.errors import ConfigError

_PREFIX = "policy.megatron_cfg"


def stage_layers(layers: int, stages: int, first: int | None = None, last: int | None = None) -> list[range]:
    """The layers of every stage, virtual stages being stages: evenly, as far as it goes.

    Args:
        layers: of the Hugging Face model.
        first, last: ``num_layers_in_first_pipeline_stage`` and ``..._last_...``; the stages between share the rest.
    """
    between = stages - (first is not None) - (last is not None)
    start = first or 0
    rest = layers - (first or 0) - (last or 0)
    cuts = [start + round(i * rest / between) for i in range(between + 1)] if between else [start]
    ends = ([0] if first is not None else []) + cuts + ([layers] if last is not None else [])
    return [range(start, stop) for start, stop in zip(ends, ends[1:])]


def check_stages(layers: int | None, layout: MegatronConfig) -> None:
    """Refuses a pipeline that the model's layers do not fill.

    Args:
        layers: of the model; None where they are not known; then only what does not need them is checked.

    Raises:
        ConfigError: names the key and what is possible.
    """
    pipeline = layout.pipeline_model_parallel_size
    virtual = layout.virtual_pipeline_model_parallel_size
    given = {
        f"{_PREFIX}.num_layers_in_{end}_pipeline_stage": count
        for end, count in (
            ("first", layout.num_layers_in_first_pipeline_stage), ("last", layout.num_layers_in_last_pipeline_stage),
        )
        if count is not None and pipeline > 1
    }  # fmt: skip
    if given and virtual:
        raise ConfigError(f"{next(iter(given))}: cannot go with virtual_pipeline_model_parallel_size")
    if not isinstance(layers, int):
        return
    if not given:
        _check_even(layers, pipeline, virtual)
        return
    between = pipeline - len(given)
    rest = layers - sum(given.values())
    key = next(iter(given))
    told = " and ".join(str(count) for count in given.values())
    if not between and rest:
        raise ConfigError(f"{key}: the two stages hold {told} layers together, the model has {layers}")
    if between and (rest < between or rest % between):
        raise ConfigError(
            f"{key}: {told} of the model's {layers} layers leave {rest} for the {between} other stages of "
            f"{_PREFIX}.pipeline_model_parallel_size {pipeline}, which must share them evenly"
        )


def _check_even(layers: int, pipeline: int, virtual: int | None) -> None:
    if layers % pipeline:
        works = ", ".join(str(n) for n in range(1, layers + 1) if layers % n == 0)
        raise ConfigError(
            f"{_PREFIX}.pipeline_model_parallel_size: {pipeline} does not divide the model's {layers} layers; "
            f"possible: {works}, or set num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage"
        )
    if virtual and layers // pipeline % virtual:
        works = ", ".join(str(n) for n in range(1, layers // pipeline + 1) if layers // pipeline % n == 0)
        raise ConfigError(
            f"{_PREFIX}.virtual_pipeline_model_parallel_size: {virtual} does not divide the model's "
            f"{layers // pipeline} layers in each of {pipeline} stages; possible: {works}"
        )
