"""Text descriptions of a run: processes, batch sizes, folders, and estimates of memory and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

from gdpo_nemo.algorithms.component_weights import describe_weights
from gdpo_nemo.config.algorithm_choice import spec_of
from gdpo_nemo.config.environment_algorithms import own_configs
from gdpo_nemo.config.layout import Layout, Resolved
from gdpo_nemo.config.placement import describe_places
from gdpo_nemo.config.rollout_checks import (
    arithmetic,
    resolved_bound,
    resolved_depth,
    resolved_window,
    steps_ahead,
    valid_needed,
)
from gdpo_nemo.config.schema import ClusterConfig, Config, RunConfig
from gdpo_nemo.config.sections import PolicyConfig
from gdpo_nemo.data.packing import Budget, assign
from gdpo_nemo.data.prefixes import shared_attention_cost
from gdpo_nemo.models.description import ModelDescription
from gdpo_nemo.models.weights import parameters
from gdpo_nemo.planning.fit import best_split, changed, machine_limits, memory_shortage, smallest_change
from gdpo_nemo.planning.hardware import Device, Rates
from gdpo_nemo.planning.judge_calls import judge_lines
from gdpo_nemo.planning.memory import (
    DIFFERENCE_SHARE,
    EngineMemory,
    RankMemory,
    checkpoint_bytes,
    difference_bytes,
    engine_copy_bytes,
    engine_memory,
    host_memory,
    micro_batch_load,
    policy_memory,
    refit_bytes,
    resting_memory,
    sampling_bytes,
    token_budget,
    transport_memory,
)
from gdpo_nemo.planning.shape import expected_saving, groups_saved, model_shape, recorded_bytes, tower_parameters
from gdpo_nemo.planning.speed import (
    BANDWIDTH_SHARE,
    HOST_LAYER_S,
    PRODUCT_SHARE,
    expected_lengths,
    step_time,
    sync_work,
    utilisation,
)


def batch_arithmetic(resolved: Resolved) -> str:
    """Return the batch sizes as one line of arithmetic, from prompts to micro-batches of full-length samples."""
    config = resolved.config
    layout = resolved.layout
    longest = config.policy.max_total_sequence_length
    samples = resolved.samples_per_step
    updates = resolved.updates_per_step
    megatron = config.policy.megatron_cfg
    stages = layout.pipeline if megatron.virtual_pipeline_model_parallel_size else 1
    budget = Budget(layout.data, config.policy.micro_batch_tokens, stages)
    batches = len(assign([longest] * resolved.samples_per_update, budget)[0])
    ranks = f" on each of {layout.data} data-parallel ranks" if layout.data > 1 else ""
    prompts = config.gdpo.num_prompts_per_step
    mix = config.data.mix
    shares = [f"{name} {prompts * fraction / sum(mix.values()):.3g}" for name, fraction in mix.items()]
    mixed = f" ({', '.join(shares)})" if shares else ""
    return (
        f"{prompts} prompts{mixed} x {resolved.sequences_per_prompt} samples = {samples} "
        f"samples = {_number(updates, 'optimizer update')} of {samples // updates} = at most "
        f"{_number(batches, 'micro-batch')} of at most {config.policy.micro_batch_tokens} tokens{ranks}"
    )


def dry_run_lines(resolved: Resolved) -> list[tuple[str, str]]:
    """Return the estimates for ``--dry-run`` as (subject, text). These estimates do not depend on the GPU type."""
    config = resolved.config
    longest = config.policy.generation.max_new_tokens * config.rollout.turns.max_turns
    lines = [("arithmetic", batch_arithmetic(resolved))]
    lines += _samples_lines(resolved, "at most", min(longest, config.policy.max_total_sequence_length))
    lines += judge_lines(resolved)
    shape = model_shape(resolved)
    lines += [("note", limit) for limit in machine_limits(resolved, shape)]
    if shape is None:
        return [*lines, ("per rank", f"unknown until {config.policy.model_name} is available")]
    memory = policy_memory(resolved, shape)
    layout = resolved.layout
    vllm = config.policy.generation.vllm_cfg
    engine = f"{vllm.gpu_memory_utilization:.0%} of the GPU for engines"
    if vllm.gpu_kv_cache_memory_bytes:
        engine = f"{size(sampling_bytes(config, engine_memory(config, shape, 0), 0))} of an engine rank"
    resting = (
        f"{size(resting_memory(resolved, shape))} per policy rank remain allocated during sampling, in addition to "
        f"{engine}"
    )
    return [
        *lines,
        ("per rank", _policy_line(memory, shape)),
        *([("shared", resting)] if layout.colocated and layout.gpus else []),
        *([("refit", _refit_line(resolved, shape) + _occupies(resolved, shape))] if layout.engines else []),
    ]


def plan_lines(resolved: Resolved, shape: ModelDescription, device: Device, rates: Rates) -> list[tuple[str, str]]:
    """Return all lines of ``gdpo-nemo plan`` as (subject, text)."""
    config = resolved.config
    layout = resolved.layout
    lengths = expected_lengths(config.policy, rates)
    policy = policy_memory(resolved, shape)
    engine = engine_memory(config, shape, int(device.memory))
    link = "NVLink" if config.cluster.num_nodes == 1 else "the network"
    if layout.colocated and layout.model_ranks == 1:
        link = "the GPU's memory"
    sync = sync_work(resolved, shape, device)
    difference = difference_bytes(resolved, shape)
    shortage = memory_shortage(resolved, shape, device)
    lines = [
        (
            "device",
            f"{device.name}, {size(device.memory)}, {device.compute / 1e12:.3g} TFLOP/s, {device.bandwidth / 1e12:.3g} "
            f"TB/s ({device.source})",
        ),
        ("mesh", _mesh(config.cluster, layout)),
        ("arithmetic", batch_arithmetic(resolved)),
        ("per rank", _policy_line(policy, shape)),
        ("per engine", _engine_line(config.policy, engine, lengths.total, bool(layout.gpus))),
        ("fits", "yes" if not shortage else f"no: {shortage}"),
    ]
    if shortage:
        lines.append(
            (
                "change",
                smallest_change(resolved, shape, device)
                or "no single change or pair of changes is sufficient; use more or larger devices",
            )
        )
    lines += [
        (
            "refit",
            _refit_line(resolved, shape)
            + f": {sync.ideal:.3g} s at the peak of {link if layout.gpus else 'shared memory'}"
            f"{' and host memory' * bool(difference)}{_occupies(resolved, shape)}",
        ),
        ("time", _time_line(resolved, shape, device, rates, layout)),
        *_samples_lines(resolved, "about", lengths.completion),
        *([("checkpoint", _checkpoint_line(resolved, shape))] if config.checkpointing.enabled else []),
    ]
    if sharing := _sharing_line(resolved, shape, device, rates):
        lines.append(("sharing", sharing))
    if layout.gpus:
        lines.append(("mfu", _mfu_line(resolved, shape, device, rates, layout)))
        if faster := _logprob_line(resolved, shape, device, rates):
            lines.append(("log-probs", faster))
    if pinned := host_memory(resolved, shape):
        lines.insert(4, ("host", _host_line(config.cluster, pinned, layout, device)))
    if layout.gpus and not layout.colocated:
        lines.append(("split", _split_line(resolved, shape, device, rates)))
    if layout.gpus and layout.colocated:
        lines.insert(5, ("shared", _shared_line(resolved, shape, device)))
    return [*lines, ("assumes", rates.describe())]


def align_lines(lines: list[tuple[str, str]]) -> str:
    """Format (subject, text) pairs as aligned lines."""
    return "\n".join(f"{subject:<10} {words}" for subject, words in lines)


def size(number: float) -> str:
    """Format a number of bytes, for example as ``12.3 GB``."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.0f} B"


def _refit_line(resolved: Resolved, shape: ModelDescription) -> str:
    full = f"{size(refit_bytes(resolved, shape))} to each engine"
    if difference := difference_bytes(resolved, shape):
        return f"{full} at first, then about {size(difference)} ({DIFFERENCE_SHARE:.0%} is assumed) after every step"
    return f"{full} after every step"


def _occupies(resolved: Resolved, shape: ModelDescription) -> str:
    buffers = transport_memory(resolved, shape)
    if not buffers:
        return ""
    words = f", which occupies {size(buffers)} of host memory"
    if copy := engine_copy_bytes(resolved, shape):
        words += f" on the policy's hosts and {size(copy)} for each engine process"
        if resolved.layout.gpus:
            engines = min(resolved.config.cluster.gpus_per_node, resolved.layout.engine_ranks)
            words += f" ({size(copy * engines)} on a node with {engines})"
    return words


def _samples_lines(resolved: Resolved, how: str, tokens: float) -> list[tuple[str, str]]:
    """Return the line on the samples' disk space, for completions of ``tokens`` tokens.

    Empty if no samples are written.
    """
    groups = groups_saved(resolved)
    if not groups:
        return []
    count = groups * resolved.sequences_per_prompt
    step = recorded_bytes(resolved, tokens)
    steps = resolved.config.gdpo.max_num_steps
    words = f"{count} written per step, {how} {size(step)} per step, {size(step * steps)} for {_number(steps, 'step')}"
    return [("samples", words)]


def _policy_line(memory: RankMemory, shape: ModelDescription) -> str:
    parts = [("weights", memory.weights), ("reference", memory.reference), ("teacher", memory.teacher),
             ("gradients", memory.gradients), ("optimizer", memory.optimizer), ("activations", memory.activations),
             ("log-prob chunk", memory.logprobs), ("buffers", memory.buffers),
             ("device reserve", memory.reserve)]  # fmt: skip
    terms = " + ".join(f"{size(value)} {name}" for name, value in parts if value)
    tower = f", {tower_parameters(shape) / 1e6:,.0f} M in the vision tower, whose activations are not estimated"
    return (
        f"{size(memory.total)} on the fullest policy rank (stage {memory.stage}) = {terms}; "
        f"{parameters(shape) / 1e6:,.0f} M parameters in total{tower if shape.tower else ''}"
    )


def _engine_line(policy: PolicyConfig, memory: EngineMemory, mean: float, on_gpu: bool) -> str:
    longest = policy.max_total_sequence_length
    key = f" (gpu_kv_cache_memory_bytes: {memory.kv_cache + memory.states})" if on_gpu else ""
    return (
        f"{size(memory.weights)} weights + {size(memory.kv_cache)} KV cache{key} per engine rank: "
        f"{memory.sequences(longest)} sequences "
        f"of {longest} tokens, {memory.sequences(ceil(mean))} of the expected {mean:.0f}"
    )


def _shared_line(resolved: Resolved, shape: ModelDescription, device: Device) -> str:
    config = resolved.config
    resting = resting_memory(resolved, shape)
    used = sampling_bytes(config, engine_memory(config, shape, int(device.memory)), device.memory)
    return (
        f"during sampling, {size(resting)} of a policy rank remain, plus {size(used)} of an engine "
        f"rank = {size(resting + used)} of {size(device.memory)}"
    )


def _mesh(cluster: ClusterConfig, layout: Layout) -> str:
    sizes = f"tensor {layout.tensor} x pipeline {layout.pipeline} x context {layout.context} x data {layout.data}"
    mesh = f"{sizes} = {_number(layout.policy_ranks, 'policy rank')}"
    engines = (
        f"{_number(layout.engines, 'engine')} x {layout.engine_tensor} = {_number(layout.engine_ranks, 'engine rank')}"
    )
    if not layout.gpus:
        return f"{mesh}, {engines}, on the CPU"
    if layout.colocated:
        return f"{mesh}, {engines} on the same GPUs, in turns"
    each = cluster.gpus_per_node
    nodes = []
    for node in range(cluster.num_nodes):
        policy = max(0, min(each, layout.policy_ranks - node * each))
        taken = max(0, min(each, layout.policy_ranks + layout.engine_ranks - node * each)) - policy
        nodes.append(f"{policy} + {taken}" + (f" + {each - policy - taken} idle" if each - policy - taken else ""))
    node_counts = [(n, nodes.count(n)) for n in dict.fromkeys(nodes)]
    shares = ", ".join(f"{_number(count, 'node')} with {n}" for n, count in node_counts)
    return f"{mesh}, {engines}; policy + engine ranks per node if nodes are filled in order: {shares}"


def _time_line(resolved: Resolved, shape: ModelDescription, device: Device, rates: Rates, layout: Layout) -> str:
    config = resolved.config
    time = step_time(resolved, shape, device, rates)
    steps = config.gdpo.max_num_steps
    how = "generation during training" if config.rollout.max_staleness else "one after the other"
    verify = f", verification {time.verify:.3g} s" if time.verify else ""
    hours = time.step * steps / 3600
    cost = f" = {hours * (layout.gpus or 1):.3g} {'GPU' if layout.gpus else 'machine'} hours"
    return (
        f"generation {time.generation:.3g} s{verify}, training {time.training:.3g} s, weights {time.sync:.3g} s, "
        f"{how}: {time.step:.3g} s per step, {hours:.3g} h for {_number(steps, 'step')}{cost}; idle: policy "
        f"{time.policy_idle:.0%}, engines {time.engines_idle:.0%}, all ranks {time.idle(layout):.0%}"
    )


def _sharing_line(resolved: Resolved, shape: ModelDescription, device: Device, rates: Rates) -> str:
    """Compare tokens, memory and training seconds with and without ``policy.share_prompts``.

    Empty without a difference.
    """
    config = resolved.config
    plans = []
    for way in (False, True):
        planned = resolved.changed(replace(config, policy=replace(config.policy, share_prompts=way)))
        lengths = expected_lengths(planned.config.policy, rates)
        tokens = planned.samples_per_step * lengths.total * expected_saving(planned, *lengths.parts).tokens
        seconds = step_time(planned, shape, device, rates).training
        plans.append((tokens, policy_memory(planned, shape).total, seconds))
    (tokens, memory, seconds), (fewer, less, sooner) = plans
    if fewer == tokens:
        return ""
    on = expected_saving(resolved, *expected_lengths(config.policy, rates).parts).tokens < 1
    how = "once per group" if on else "for every sample"
    slowdown = shared_attention_cost(config)
    note = f" (FlexAttention at an assumed 1/{slowdown:g} of TransformerEngine's speed)" if slowdown > 1 else ""
    return (
        f"prompts are computed {how} (policy.share_prompts: {str(config.policy.share_prompts).lower()}); with "
        f"sharing: {fewer:,.0f} tokens per step, {size(less)} per rank, "
        f"training {sooner:.3g} s; without: {tokens:,.0f}, {size(memory)}, {seconds:.3g} s{note}"
    )


_STORAGE = 1e9
"""Assumed bytes per second that a node writes to or reads from storage."""


def _checkpoint_line(resolved: Resolved, shape: ModelDescription) -> str:
    total = checkpoint_bytes(resolved, shape)
    ranks = resolved.layout.policy_ranks
    on_node = min(ranks, resolved.config.cluster.gpus_per_node or ranks)
    line = (
        f"{size(total)}, of which each policy rank writes {size(total / ranks)}, and reads as much at a resume: "
        f"{total * on_node / ranks / _STORAGE:.3g} s at an assumed {size(_STORAGE)}/s per node"
    )
    if resolved.config.checkpointing.async_save:
        line += f"; {size(total * on_node / ranks)} of host memory per node while the files are written"
    return line


def _host_line(cluster: ClusterConfig, pinned: int, layout: Layout, device: Device) -> str:
    ranks = min(layout.policy_ranks, cluster.gpus_per_node)
    return (
        f"{size(pinned)} of pinned host memory per policy rank, {size(pinned * ranks)} on a node with {ranks}; "
        f"{pinned / device.host_link:.3g} s per direction at {size(device.host_link)}/s"
    )


def _mfu_line(resolved: Resolved, shape: ModelDescription, device: Device, rates: Rates, layout: Layout) -> str:
    """Describe the MFU of each phase in percent, and the estimated time of one micro-batch of an update."""
    mfu = utilisation(resolved, shape, device, rates)
    batch = mfu.batch
    parts = [("products", batch.products), ("norms and activations", batch.moves), ("log-probs", batch.logprobs),
             ("gradients", batch.gradients), ("routing and all-to-all", batch.routing)]  # fmt: skip
    terms = " + ".join(f"{seconds * 1e3:.3g} ms {name}" for name, seconds in parts if seconds)
    waits = ", which takes longer" if batch.host >= batch.seconds else ""
    sampling = f", generation {mfu.generation:.1%}" if layout.engines else ""
    assumed = f"{PRODUCT_SHARE:.0%} of the peak in products, {BANDWIDTH_SHARE:.0%} of the bandwidth elsewhere"
    return (
        f"training {mfu.training:.0%}, log-prob passes {mfu.evaluation:.0%}{sampling} of "
        f"{device.compute / 1e12:.3g} TFLOP/s by arithmetic: a micro-batch of {micro_batch_load(resolved, layout)} "
        f"tokens is {terms}; the host needs {batch.host * 1e3:.3g} ms for it{waits}; an "
        f"optimizer step {mfu.optimizer * 1e3:.3g} ms (assumed: {assumed}, {sum(HOST_LAYER_S) * 1e3:.2g} ms per layer "
        "on the host)"
    )


def _logprob_line(resolved: Resolved, shape: ModelDescription, device: Device, rates: Rates) -> str:
    """Suggest larger micro-batches for log-prob passes if the host limits these passes and the memory is sufficient.

    Empty if there is nothing to suggest.
    """
    forward = utilisation(resolved, shape, device, rates).forward
    tokens = micro_batch_load(resolved, resolved.layout, logprobs=True)
    now = best = step_time(resolved, shape, device, rates).training
    budget = suggested = token_budget(resolved.config.policy, logprobs=True)
    while budget == tokens:
        budget *= 2
        larger = resolved.changed(changed(resolved.config, logprob_micro_batch_tokens=budget))
        seconds = step_time(larger, shape, device, rates).training
        if seconds > 0.99 * best or memory_shortage(larger, shape, device):
            break
        best, suggested = seconds, budget
        tokens = micro_batch_load(larger, resolved.layout, logprobs=True)
    if best == now or forward.host <= forward.device:
        return ""
    return (
        f"per micro-batch, the host needs {forward.host * 1e3:.3g} ms and the GPU {forward.device * 1e3:.3g} ms; with "
        f"policy.logprob_micro_batch_tokens={suggested}, training takes {best:.3g} s instead of {now:.3g} s per step"
    )


def _split_line(resolved: Resolved, shape: ModelDescription, device: Device, rates: Rates) -> str:
    config = resolved.config
    split = best_split(resolved, shape, device, rates)
    if split is None:
        return "this layout does not fit with any number of engines"
    engines, time = split
    current = step_time(resolved, shape, device, rates).step
    each = config.policy.generation.vllm_cfg.tensor_parallel_size
    gpus = config.cluster.num_nodes * config.cluster.gpus_per_node
    change = "unchanged" if engines == config.policy.generation.engines else f"policy.generation.engines={engines}"
    return (
        f"best: {engines * each} of {gpus} GPUs for sampling ({change}): {time:.3g} s per step instead of "
        f"{current:.3g} s"
    )


def _number(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    if number == 1:
        plural = ""
    return f"{number} {noun}{plural}"


def describe(resolved: Resolved, notes: Sequence[str] = ()) -> str:
    """Return the run's settings as aligned lines, one subject per line, with the notes last."""
    config = resolved.config
    layout = resolved.layout
    several = config.cluster.num_nodes + config.cluster.env_nodes > 1
    lines = [
        ("run", _folder(config.run)),
        ("model", _model(resolved)),
        ("policy", _policy(config, layout)),
        ("engines", _engines(resolved, layout)),
        *([("nodes", describe_places(config, layout))] if several else []),
        ("batch", _batch(resolved)),
        ("memory", _micro_batch(config.policy)),
        ("length", _length(resolved)),
        ("rewards", _rewards(resolved)),
        ("staleness", _staleness(config)),
        *(("note", note) for note in notes),
    ]
    return "\n".join(f"{subject:<10} {text}" for subject, text in lines)


def _folder(run: RunConfig) -> str:
    folder = Path(run.dir)
    started = (folder / "metrics.jsonl").exists() or (folder / "checkpoints").exists()
    return f"{run.name} in {folder} ({'exists: resumes' if started else 'new'}), seed {run.seed}"


def _hub(resolved: Resolved) -> str:
    unchecked = resolved.model.fields is None
    return "from the Hugging Face Hub" + ", model family not checked before the download" * unchecked


def _model(resolved: Resolved) -> str:
    policy = resolved.config.policy
    checkpoint = resolved.model.source
    if checkpoint is not None:
        source = checkpoint.format.value
    elif Path(policy.model_name).is_dir():
        source = "local folder"
    else:
        source = f"created by {policy.model_factory}" if policy.model_factory else _hub(resolved)
    return (
        f"{policy.model_name} ({source}), {policy.precision}, sequences of at most "
        f"{policy.max_total_sequence_length} tokens"
    )


def _policy(config: Config, layout: Layout) -> str:
    device = f"{layout.policy_ranks} of {layout.gpus} GPUs" if layout.gpus else "CPU"
    mesh = f"tensor {layout.tensor} x pipeline {layout.pipeline} x context {layout.context} x data {layout.data}"
    experts = f", expert {layout.expert}" if layout.expert > 1 else ""
    return f"{_count(layout.policy_ranks, 'Megatron rank')} on {device} = {mesh}{experts}"


def _engines(resolved: Resolved, layout: Layout) -> str:
    config = resolved.config
    generation = config.policy.generation
    if not resolved.algorithm.samples:
        return f"none, {config.algorithm.type} does not sample"
    device = f"{layout.engine_ranks} of {layout.gpus} GPUs" if layout.gpus else "CPU"
    if layout.colocated:
        device += " shared with policy ranks, asleep during training"
    each = f" of {layout.engine_tensor} ranks" if layout.engine_tensor > 1 else ""
    return (
        f"{_count(layout.engines, 'vLLM engine')}{each} on {device}, at most {generation.max_new_tokens} new tokens "
        f"at temperature {generation.temperature:g}"
    )


def _batch(resolved: Resolved) -> str:
    samples = resolved.samples_per_step
    updates = resolved.updates_per_step
    return (
        f"{resolved.config.gdpo.num_prompts_per_step} prompts x {resolved.sequences_per_prompt} samples = {samples} "
        f"samples = {_count(updates, 'optimizer update')} of {resolved.samples_per_update}"
    )


def _micro_batch(policy: PolicyConfig) -> str:
    tokens = policy.micro_batch_tokens
    longest = policy.max_total_sequence_length
    return f"micro-batches of at most {tokens} tokens, enough for {tokens // longest} sequences of full length"


def _length(resolved: Resolved) -> str:
    config = resolved.config
    gdpo = config.gdpo
    saving = config.checkpointing
    steps = gdpo.max_num_steps
    parts = [
        f"{_count(steps, 'step')} = {steps * resolved.samples_per_step} samples, {steps * resolved.updates_per_step} "
        "updates"
    ]
    if gdpo.max_num_epochs is not None:
        parts[0] = f"at most {parts[0]}, and {_count(gdpo.max_num_epochs, 'epoch')} of the training prompts"
    prompts = "all" if gdpo.val_prompts is None else gdpo.val_prompts
    when = [f"every {gdpo.val_period} steps"] * bool(gdpo.val_period) + ["at the start"] * gdpo.val_at_start
    parts.append(f"validation {' and '.join(when)} on {prompts} held-out prompts" if when else "no validation")
    parts.append(f"checkpoint every {saving.save_period} steps" if saving.enabled else "no checkpoints")
    return "; ".join(parts)


def _rewards(resolved: Resolved) -> str:
    if not resolved.algorithm.samples:
        return f"none, {resolved.config.algorithm.type} does not sample"
    own = own_configs(resolved.config)
    parts = [] if own and len(own) == len(resolved.config.env) else [_objective(resolved.config)]
    return "; ".join([*parts, *(f"{name}: {_objective(config)}" for name, config in own.items())])


def _objective(config: Config) -> str:
    """Describe the rewards with which samples are trained, the estimator and the loss."""
    weights = describe_weights(config.gdpo.rewards, config.gdpo.constraints, config.gdpo.schedules)
    rule = config.gdpo.weighting.get("rule")
    weights += f" with factors of {rule}" * bool(rule)
    preset = f", preset {config.gdpo.preset}" if config.gdpo.preset else ""
    spec = spec_of(config)
    estimator = config.algorithm.type if spec.head == "value" or spec.section == "teacher" else config.gdpo.estimator
    credit = f"credit {config.gdpo.credit}"
    return f"{weights} by {estimator}{preset}, {credit}, loss {config.loss_fn.type} ({config.loss_fn.aggregation})"


def _staleness(config: Config) -> str:
    rollout = config.rollout
    parts = ["0, on-policy" if rollout.max_staleness == 0 else _ahead(config)]
    if rollout.group_timeout_s is not None:
        least = f"{valid_needed(config)} of {config.gdpo.num_generations_per_prompt}"
        parts.append(
            f"after {rollout.group_timeout_s:g} s a group is trained if at least {least} samples have reward results, "
            "otherwise the group is dropped"
        )
    buffer = rollout.replay_buffer
    if buffer.groups:
        parts.append(
            f"{buffer.groups} of the {config.gdpo.num_prompts_per_step} groups of a step come from earlier steps, "
            f"each used at most {_count(buffer.reuse, 'time')} and at most {_count(buffer.max_age, 'step')} old"
        )
    return "; ".join(parts)


def _ahead(config: Config) -> str:
    rollout = config.rollout
    depth = resolved_depth(config)
    fewest = config.gdpo.num_prompts_per_step
    parts = [
        f"at most {_count(rollout.max_staleness, 'step')}",
        f"bound {arithmetic(config)} groups",
        f"window {resolved_window(config.rollout)}",
        f"depth auto ({fewest} to {resolved_bound(config)})" if depth is None else f"depth {depth}",
        "new weights every " + ("step" if rollout.sync_every == 1 else f"{rollout.sync_every} steps"),
    ]
    if steps_ahead(config) > 0:
        parts.append(f"kv {rollout.kv}")
    return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
