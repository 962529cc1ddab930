"""The plan as text: mesh, memory, batches, refit, time, the best split, what would make it fit."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from gdpo_nemo.config.algorithm_choice import sequences_per_prompt
from gdpo_nemo.config.layout import Layout, resolve_layout, samples_per_step, samples_per_update, updates_per_step
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.packing import assign
from gdpo_nemo.planning.fit import best_split, fits, machine_limits, smallest_change
from gdpo_nemo.planning.footprint import (
    EngineMemory,
    RankMemory,
    engine_memory,
    host_memory,
    micro_batch_load,
    policy_memory,
    refit_bytes,
    resting_memory,
    transport_memory,
)
from gdpo_nemo.planning.hardware import Device, Rates
from gdpo_nemo.planning.recorded_bytes import groups_saved, recorded_bytes
from gdpo_nemo.planning.shape import Shape, model_shape
from gdpo_nemo.planning.sharing import expected_saving
from gdpo_nemo.planning.speed import expected_lengths, step_time, sync_work
from gdpo_nemo.planning.utilisation import BANDWIDTH_SHARE, LAUNCH_S, PRODUCT_SHARE, utilisation


def worked_batch(config: Config) -> str:
    """The batch sizes as one line of arithmetic, from prompts to micro-batches of full-length samples."""
    layout = resolve_layout(config)
    longest = config.policy.max_total_sequence_length
    samples = samples_per_step(config)
    updates = updates_per_step(config)
    megatron = config.policy.megatron_cfg
    multiple = layout.pipeline if megatron.virtual_pipeline_model_parallel_size else 1
    batches = len(
        assign([longest] * samples_per_update(config), layout.data, config.policy.micro_batch_tokens, multiple)[0]
    )
    ranks = f" on each of {layout.data} data-parallel ranks" if layout.data > 1 else ""
    return (
        f"{config.gdpo.num_prompts_per_step} prompts x {sequences_per_prompt(config)} samples = {samples} "
        f"samples = {_count(updates, 'optimizer update')} of {samples // updates} = at most "
        f"{_count(batches, 'micro-batch')} of at most {config.policy.micro_batch_tokens} tokens{ranks}"
    )


def brief(config: Config) -> list[tuple[str, str]]:
    """The lines that --dry-run shows: nothing that needs a GPU's figures. Without the model's shape, that it is
    missing."""
    longest = config.policy.generation.max_new_tokens * config.rollout.turns.max_turns
    lines = [("arithmetic", worked_batch(config))]
    lines += _samples_lines(config, "at most", min(longest, config.policy.max_total_sequence_length))
    shape = model_shape(config)
    lines += [("note", limit) for limit in machine_limits(config, shape)]
    if shape is None:
        return [*lines, ("per rank", f"not known before {config.policy.model_name} is here")]
    memory = policy_memory(config, shape)
    layout = resolve_layout(config)
    share = config.policy.generation.vllm_cfg.gpu_memory_utilization
    stays = (
        f"{size(resting_memory(config, shape))} of a policy rank stay while engines sample, beside {share:.0%} of "
        "the GPU for these"
    )
    return [
        *lines,
        ("per rank", _policy_line(memory, shape)),
        *([("shared", stays)] if layout.colocated and layout.gpus else []),
        *([("refit", _refit_line(config, shape))] if layout.engines else []),
    ]


def full(config: Config, shape: Shape, device: Device, rates: Rates) -> list[tuple[str, str]]:
    """Every line of ``gdpo-nemo plan``."""
    layout = resolve_layout(config)
    lengths = expected_lengths(config, rates)
    policy = policy_memory(config, shape)
    engine = engine_memory(config, shape, int(device.memory))
    link = "NVLink" if config.cluster.num_nodes == 1 else "the network"
    if layout.colocated and layout.model_ranks == 1:
        link = "the GPU's memory"
    sync = sync_work(config, shape, device)
    verdict = fits(config, shape, device)
    lines = [
        (
            "device",
            f"{device.name}, {size(device.memory)}, {device.compute / 1e12:.3g} TFLOP/s, {device.bandwidth / 1e12:.3g} "
            f"TB/s ({device.source})",
        ),
        ("mesh", _mesh(config, layout)),
        ("arithmetic", worked_batch(config)),
        ("per rank", _policy_line(policy, shape)),
        ("per engine", _engine_line(config, engine, lengths.whole)),
        ("fits", "yes" if not verdict else f"no: {verdict}"),
    ]
    if verdict:
        lines.append(
            (
                "change",
                smallest_change(config, shape, device)
                or "no single change or pair of changes is enough: more or larger devices",
            )
        )
    lines += [
        (
            "refit",
            f"{size(refit_bytes(config, shape))} to each engine: {sync.ideal:.3g} s at the peak of "
            f"{link if layout.gpus else 'shared memory'}",
        ),
        ("time", _time_line(config, shape, device, rates, layout)),
        *_samples_lines(config, "about", lengths.completion),
    ]
    if sharing := _sharing_line(config, shape, device, rates):
        lines.append(("sharing", sharing))
    if layout.gpus:
        lines.append(("mfu", _mfu_line(config, shape, device, rates, layout)))
    if pinned := host_memory(config, shape):
        lines.insert(4, ("host", _host_line(config, pinned, layout, device)))
    if layout.gpus and not layout.colocated:
        lines.append(("split", _split_line(config, shape, device, rates)))
    if layout.gpus and layout.colocated:
        lines.insert(5, ("shared", _shared_line(config, shape, device)))
    return [*lines, ("assumes", rates.describe())]


def text(lines: list[tuple[str, str]]) -> str:
    """Aligned lines, one subject a line."""
    return "\n".join(f"{subject:<10} {words}" for subject, words in lines)


def size(number: float) -> str:
    """Bytes for a person: 12.3 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.0f} B"


def _refit_line(config: Config, shape: Shape) -> str:
    kept = transport_memory(config, shape)
    return f"{size(refit_bytes(config, shape))} to each engine after every step" + (
        f", {size(kept)} of host memory for it" if kept else ""
    )


def _samples_lines(config: Config, how: str, tokens: float) -> list[tuple[str, str]]:
    """What the samples take on the disk where completions have ``tokens`` tokens; nothing where none are written."""
    groups = groups_saved(config)
    if not groups:
        return []
    count = groups * sequences_per_prompt(config)
    step = recorded_bytes(config, tokens)
    steps = config.gdpo.max_num_steps
    words = (
        f"{count} of a step are written, {how} {size(step)} a step, {size(step * steps)} for {_count(steps, 'step')}"
    )
    return [("samples", words)]


def _policy_line(memory: RankMemory, shape: Shape) -> str:
    parts = [("weights", memory.weights), ("reference", memory.reference), ("teacher", memory.teacher),
             ("gradients", memory.gradients), ("optimizer", memory.optimizer), ("activations", memory.activations),
             ("log-prob chunk", memory.logprobs), ("buffers", memory.buffers),
             ("device reserve", memory.reserve)]  # fmt: skip
    terms = " + ".join(f"{size(value)} {name}" for name, value in parts if value)
    return (
        f"{size(memory.total)} on the fullest policy rank (stage {memory.stage}) = {terms}; "
        f"{shape.parameters / 1e6:,.0f} M parameters in all"
    )


def _engine_line(config: Config, memory: EngineMemory, mean: float) -> str:
    longest = config.policy.max_total_sequence_length
    return (
        f"{size(memory.weights)} weights + {size(memory.kv_cache)} KV cache on each engine rank: "
        f"{memory.sequences(longest)} sequences "
        f"of {longest} tokens, {memory.sequences(ceil(mean))} of the expected {mean:.0f}"
    )


def _shared_line(config: Config, shape: Shape, device: Device) -> str:
    stays = resting_memory(config, shape)
    share = config.policy.generation.vllm_cfg.gpu_memory_utilization
    return (
        f"while engines sample, {size(stays)} of a policy rank stay beside {size(share * device.memory)} of an engine "
        f"rank = {size(stays + share * device.memory)} of {size(device.memory)}"
    )


def _mesh(config: Config, layout: Layout) -> str:
    sizes = f"tensor {layout.tensor} x pipeline {layout.pipeline} x context {layout.context} x data {layout.data}"
    mesh = f"{sizes} = {_count(layout.policy_ranks, 'policy rank')}"
    engines = (
        f"{_count(layout.engines, 'engine')} x {layout.engine_tensor} = {_count(layout.engine_ranks, 'engine rank')}"
    )
    if not layout.gpus:
        return f"{mesh}, {engines}, on the CPU"
    if layout.colocated:
        return f"{mesh}, {engines} on the same GPUs: they take turns"
    each = config.cluster.gpus_per_node
    nodes = []
    for node in range(config.cluster.num_nodes):
        policy = max(0, min(each, layout.policy_ranks - node * each))
        taken = max(0, min(each, layout.policy_ranks + layout.engine_ranks - node * each)) - policy
        nodes.append(f"{policy} + {taken}" + (f" + {each - policy - taken} idle" if each - policy - taken else ""))
    runs = [(n, nodes.count(n)) for n in dict.fromkeys(nodes)]
    shares = ", ".join(f"{_count(count, 'node')} with {n}" for n, count in runs)
    return f"{mesh}, {engines}; policy + engine ranks when nodes are filled in that order: {shares}"


def _time_line(config: Config, shape: Shape, device: Device, rates: Rates, layout: Layout) -> str:
    time = step_time(config, shape, device, rates)
    steps = config.gdpo.max_num_steps
    how = "generation during training" if config.rollout.max_staleness else "in turn"
    verify = f", verification {time.verify:.3g} s" if time.verify else ""
    hours = time.step * steps / 3600
    cost = f" = {hours * (layout.gpus or 1):.3g} {'GPU' if layout.gpus else 'machine'} hours"
    return (
        f"generation {time.generation:.3g} s{verify}, training {time.training:.3g} s, weights {time.sync:.3g} s, "
        f"{how}: {time.step:.3g} s a step, {hours:.3g} h for {_count(steps, 'step')}{cost}; idle: policy "
        f"{time.policy_idle:.0%}, engines {time.engines_idle:.0%}, all ranks {time.idle(layout):.0%}"
    )


def _sharing_line(config: Config, shape: Shape, device: Device, rates: Rates) -> str:
    """Tokens, memory and seconds of training with and without ``policy.share_prompts``; empty where it changes
    nothing."""
    if resolve_layout(config).gpus:
        return ""
    plans = []
    for way in (False, True):
        planned = replace(config, policy=replace(config.policy, share_prompts=way))
        lengths = expected_lengths(planned, rates)
        tokens = samples_per_step(planned) * lengths.whole * expected_saving(planned, *lengths.parts).tokens
        seconds = step_time(planned, shape, device, rates).training
        plans.append((tokens, policy_memory(planned, shape).total, seconds))
    (tokens, memory, seconds), (fewer, less, sooner) = plans
    if fewer == tokens:
        return ""
    on = expected_saving(config, *expected_lengths(config, rates).parts).tokens < 1
    how = "once for a group" if on else "for every sample"
    return (
        f"prompts are computed {how} (policy.share_prompts: {str(config.policy.share_prompts).lower()}); with "
        f"sharing {fewer:,.0f} tokens a step, {size(less)} on a rank, "
        f"training {sooner:.3g} s; without {tokens:,.0f}, {size(memory)}, {seconds:.3g} s"
    )


def _host_line(config: Config, pinned: int, layout: Layout, device: Device) -> str:
    ranks = min(layout.policy_ranks, config.cluster.gpus_per_node)
    return (
        f"{size(pinned)} of pinned host memory for each policy rank, {size(pinned * ranks)} on a node of {ranks}; "
        f"{pinned / device.host_link:.3g} s one way at {size(device.host_link)}/s"
    )


def _mfu_line(config: Config, shape: Shape, device: Device, rates: Rates, layout: Layout) -> str:
    """Percent of the peak by phase, and the arithmetic of one micro-batch of an update."""
    found = utilisation(config, shape, device, rates)
    batch = found.batch
    parts = [("products", batch.products), ("norms and activations", batch.moves), ("log-probs", batch.logprobs),
             ("gradients", batch.gradients)]  # fmt: skip
    terms = " + ".join(f"{seconds * 1e3:.3g} ms {name}" for name, seconds in parts)
    waits = ", which is longer" if batch.host >= batch.seconds else ""
    sampling = f", generation {found.generation:.1%}" if layout.engines else ""
    assumed = f"{PRODUCT_SHARE:.0%} of the peak in products, {BANDWIDTH_SHARE:.0%} of the bandwidth elsewhere"
    return (
        f"training {found.training:.0%}, log-prob passes {found.evaluation:.0%}{sampling} of "
        f"{device.compute / 1e12:.3g} TFLOP/s by arithmetic: a micro-batch of {micro_batch_load(config, layout)} "
        f"tokens is {terms}; the host launches its {batch.launches} kernels in {batch.host * 1e3:.3g} ms{waits}; an "
        f"optimizer step {found.optimizer * 1e3:.3g} ms (assumed: {assumed}, {LAUNCH_S * 1e6:.2g} us a launch)"
    )


def _split_line(config: Config, shape: Shape, device: Device, rates: Rates) -> str:
    found = best_split(config, shape, device, rates)
    if found is None:
        return "no number of engines makes this layout fit"
    engines, time = found
    now = step_time(config, shape, device, rates).step
    each = config.policy.generation.vllm_cfg.tensor_parallel_size
    gpus = config.cluster.num_nodes * config.cluster.gpus_per_node
    change = "as it is" if engines == config.policy.generation.engines else f"policy.generation.engines={engines}"
    return f"best: {engines * each} of {gpus} GPUs sample ({change}): {time:.3g} s a step instead of {now:.3g} s"


def _count(number: int, noun: str) -> str:
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural}"
