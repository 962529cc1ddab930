"""Layouts for more or fewer GPUs, ranked by the time of a step, and a figure of time and cost against GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Iterator

from gdpo_nemo.config.layout import resolve_layout, samples_per_step, samples_per_update
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.planning.fit import changed, fits
from gdpo_nemo.planning.hardware import Device, Rates
from gdpo_nemo.planning.shape import Shape
from gdpo_nemo.planning.speed import StepTime, step_time

LARGEST = 1024
_SIZES = (1, 2, 4, 8, 16)
_ENGINE_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)


@dataclass(frozen=True)
class Candidate:
    """One layout on one number of GPUs."""

    gpus: int
    tensor: int
    pipeline: int
    data: int
    engines: int
    engine_tensor: int
    time: StepTime
    idle: float
    """Share of the GPUs' time that is waiting."""

    @property
    def gpu_seconds(self) -> float:
        """What a step costs."""
        return self.gpus * self.time.step

    @property
    def name(self) -> str:
        """For tables."""
        return (
            f"tensor {self.tensor} x pipeline {self.pipeline} x data {self.data}, {self.engines} x "
            f"{self.engine_tensor} engines"
        )


def gpu_counts(largest: int, each: int) -> list[int]:
    """Numbers of GPUs to try, doubling up to ``largest``: parts of one node of ``each``, then whole nodes.

    Raises:
        ConfigError: fewer than 2 or more than ``LARGEST``.
    """
    if not 2 <= largest <= LARGEST:
        raise ConfigError(f"--sweep: must be between 2 and {LARGEST} GPUs, got {largest}")
    counts = [2]
    while counts[-1] * 2 <= largest:
        counts.append(counts[-1] * 2)
    counts = [n for n in counts if n < each or n % each == 0]
    if largest not in counts and (largest < each or largest % each == 0):
        counts.append(largest)
    return counts


def sweep(config: Config, shape: Shape, device: Device, rates: Rates, largest: int) -> list[Candidate]:
    """Every layout that fits, for every number of GPUs, fastest first within each."""
    each = config.cluster.gpus_per_node or 8
    found = [
        candidate
        for gpus in gpu_counts(largest, each)
        for candidate in _candidates(config, shape, device, rates, gpus, each)
    ]
    return sorted(found, key=lambda c: (c.gpus, c.time.step))


def _candidates(
    config: Config, shape: Shape, device: Device, rates: Rates, gpus: int, each: int
) -> Iterator[Candidate]:
    cluster = replace(config.cluster, num_nodes=max(1, gpus // each), gpus_per_node=min(gpus, each))
    base = replace(config, cluster=cluster)
    inside = [size for size in _SIZES if size <= cluster.gpus_per_node]
    for tensor in (size for size in inside if shape.groups % size == 0):
        for pipeline in (size for size in _SIZES if shape.layers % size == 0):
            for engine_tensor in (size for size in inside if shape.heads % size == 0):
                shares = (1,) if cluster.placement == "colocated" else _ENGINE_SHARES
                for engines in sorted({round(gpus * share / engine_tensor) for share in shares} - {0}):
                    candidate = _evaluated(base, shape, device, rates, gpus, tensor, pipeline, engines, engine_tensor)
                    if candidate:
                        yield candidate


def _evaluated(
    base: Config,
    shape: Shape,
    device: Device,
    rates: Rates,
    gpus: int,
    tensor: int,
    pipeline: int,
    engines: int,
    engine_tensor: int,
) -> Candidate | None:
    """The layout with its time; None where it does not divide the GPUs, leaves ranks without samples, or does not
    fit."""
    config = changed(
        base,
        megatron_cfg__tensor_model_parallel_size=tensor,
        megatron_cfg__sequence_parallel=tensor > 1,
        megatron_cfg__pipeline_model_parallel_size=pipeline,
        megatron_cfg__virtual_pipeline_model_parallel_size=None,
        megatron_cfg__num_layers_in_first_pipeline_stage=None,
        megatron_cfg__num_layers_in_last_pipeline_stage=None,
        megatron_cfg__data_parallel_size=None,
        megatron_cfg__use_distributed_optimizer=True,
        generation__engines=engines,
        generation__vllm_cfg__tensor_parallel_size=engine_tensor,
    )
    try:
        layout = resolve_layout(config)
    except ConfigError:
        return None
    if layout.data > samples_per_update(config) or engines > samples_per_step(config):
        return None
    if fits(config, shape, device):
        return None
    time = step_time(config, shape, device, rates)
    return Candidate(gpus, tensor, pipeline, layout.data, engines, engine_tensor, time, time.idle(layout))


def best_per_count(candidates: list[Candidate]) -> list[Candidate]:
    """The fastest layout of each number of GPUs."""
    best: dict[int, Candidate] = {}
    for candidate in candidates:
        best.setdefault(candidate.gpus, candidate)
    return list(best.values())


def table(candidates: list[Candidate], steps: int, shown: int = 8) -> str:
    """The fastest layout for each number of GPUs, and the ranking for the largest."""
    best = best_per_count(candidates)
    lines = [f"{'GPUs':>5} {'s a step':>9} {'GPU hours':>10} {'idle':>5}  fastest layout"]
    lines += [_row(c, steps) for c in best]
    ranked = [c for c in candidates if c.gpus == best[-1].gpus][:shown]
    lines += ["", f"the {len(ranked)} fastest on {best[-1].gpus} GPUs:", *(_row(c, steps) for c in ranked)]
    return "\n".join(lines)


def _row(c: Candidate, steps: int) -> str:
    return f"{c.gpus:>5} {c.time.step:>9.3g} {c.gpu_seconds * steps / 3600:>10.4g} {c.idle:>5.0%}  {c.name}"


def draw(candidates: list[Candidate], steps: int, title: str, path: str | Path) -> Path:
    """Write the figure: seconds per step, and GPU hours of the run, against GPUs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    best = best_per_count(candidates)
    gpus = [c.gpus for c in best]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    perfect = [best[0].time.step * gpus[0] / n for n in gpus]
    left.plot(gpus, [c.time.step for c in best], "o-", label="fastest layout")
    left.plot(gpus, perfect, "--", color="grey", label="if it scaled perfectly")
    left.set(xscale="log", yscale="log")
    left.yaxis.set_major_formatter("{x:g}")
    left.set(xlabel="GPUs", ylabel="seconds per step")
    left.legend()
    right.semilogx(gpus, [c.gpu_seconds * steps / 3600 for c in best], "o-", base=2)
    right.set(xlabel="GPUs", ylabel=f"GPU hours for {steps} steps", ylim=(0, None))
    for axes in (left, right):
        axes.set_xticks(gpus, [str(n) for n in gpus])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    path = Path(path)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
