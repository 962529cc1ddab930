"""Translation of a recipe's micro-batches, lengths, parallel sizes, GPUs and engines."""

from __future__ import annotations

from gdpo_nemo.tools.interop.nemo_rl.recipe import Recipe
from gdpo_nemo.tools.interop.translation import Findings

_MEGATRON = "policy.megatron_cfg"


def machines(recipe: Recipe, findings: Findings) -> None:
    """Add the settings for hardware and parallelism to the findings. These settings do not change the result of a
    run."""
    _model(recipe, findings)
    _batches(recipe, findings)
    _switches(recipe, findings)
    if recipe.rows:
        for name in ("num_nodes", "gpus_per_node"):
            findings.set(f"cluster.{name}", recipe.get(f"cluster.{name}", 1), name)
        return
    _lengths(recipe, findings)
    _cluster(recipe, findings)


def _model(recipe: Recipe, findings: Findings) -> None:
    if recipe.model.refusal:
        findings.blocks("policy.model_name", recipe.model.refusal)
    if recipe.model.question:
        findings.asks("policy.model_name", recipe.model.question)
    positions = "policy.hf_config_overrides.max_position_embeddings"
    if (recipe.get(positions) or 0) >= recipe.get("policy.max_total_sequence_length", 1024):
        findings.blocks(positions, "the model's config.json defines the number of positions; change it there")
    scaling = "policy.hf_config_overrides.rope_scaling"
    longest = recipe.get("policy.max_total_sequence_length", 1024)
    found = recipe.get(scaling)
    original = found.get("original_max_position_embeddings") if isinstance(found, dict) else None
    if isinstance(original, int) and original < longest:
        why = f"without it, the model has {original} positions, but max_total_sequence_length is {longest}"
        findings.blocks(scaling, f"{why}; set it in the model's config.json")
    backend = recipe.get("policy.generation.backend", "vllm")
    if backend != "vllm":
        findings.blocks("policy.generation.backend", f"{backend} is not supported; use vllm")
    if recipe.model.mixture and recipe.lora:
        findings.blocks(
            recipe.lora,
            "adapters on the experts of MoE models are not translated; list attention layers in target_modules",
        )


def _batches(recipe: Recipe, findings: Findings) -> None:
    longest = recipe.get("policy.max_total_sequence_length", 1024)
    if recipe.packed_tokens:
        findings.set("policy.micro_batch_tokens", max(recipe.packed_tokens, longest), "train_mb_tokens")
        return
    size = recipe.get("policy.train_micro_batch_size", 1) * (2 if recipe.section in ("dpo", "rm") else 1)
    findings.set("policy.micro_batch_tokens", size * longest, f"{size} sequences (train_micro_batch_size) of {longest}")


def _lengths(recipe: Recipe, findings: Findings) -> None:
    longest = recipe.get("policy.max_total_sequence_length", 1024)
    wanted = recipe.get("policy.generation.max_new_tokens", longest)
    why = (
        "max_new_tokens"
        if wanted < longest
        else f"{wanted}, limited to the context length minus one token for the prompt"
    )
    findings.set("policy.generation.max_new_tokens", min(wanted, longest - 1), why)


def _switches(recipe: Recipe, findings: Findings) -> None:
    """Set switches that have an effect in NeMo-RL only together with other switches."""
    trained = _MEGATRON if recipe.megatron else "policy.dtensor_cfg"
    tensor = recipe.get(f"{trained}.tensor_{'model_' if recipe.megatron else ''}parallel_size", 1)
    if tensor > 1 and (recipe.get(f"{trained}.sequence_parallel") or recipe.model.mixture):
        findings.set(
            f"{_MEGATRON}.sequence_parallel", True, "sequence_parallel, required for MoE models with tensor parallelism"
        )
    if recipe.megatron and recipe.get(f"{_MEGATRON}.activation_checkpointing"):
        findings.set(
            f"{_MEGATRON}.recompute",
            recipe.get(f"{_MEGATRON}.recompute_granularity", "full"),
            "activation_checkpointing",
        )
    if not recipe.megatron:
        findings.set(f"{_MEGATRON}.use_distributed_optimizer", True, "DTensor also shards optimizer states")
        if recipe.get("policy.max_grad_norm") is not None:
            findings.set(f"{_MEGATRON}.optimizer.clip_grad", recipe.get("policy.max_grad_norm"), "max_grad_norm")
        return
    for key, default in (("muon_tp_mode", "blockwise"), ("muon_fp32_matmul_prec", "medium")):
        if recipe.uses_muon and recipe.get(f"{_MEGATRON}.optimizer.{key}") is None:
            findings.set(f"{_MEGATRON}.optimizer.{key}", default, "default of Megatron-core")
    section = f"{_MEGATRON}.distributed_data_parallel_config"
    if recipe.get(f"{section}.overlap_grad_reduce"):
        findings.set(f"{_MEGATRON}.overlap_grad_reduce", True, "overlap_grad_reduce")
    if recipe.gathers_ahead:
        findings.set(f"{_MEGATRON}.overlap_param_gather", True, "overlap_param_gather")


def _cluster(recipe: Recipe, findings: Findings) -> None:
    """Set the number of GPUs and the placement of engines.

    Engines use the policy's GPUs if the recipe colocates them and trains on-policy. Otherwise they use separate GPUs.
    """
    nodes = recipe.get("cluster.num_nodes", 1)
    each = recipe.get("cluster.gpus_per_node", 1)
    section = "policy.dtensor_cfg"
    sizes: tuple[str, ...] = ("tensor_parallel_size", "context_parallel_size")
    if recipe.megatron:
        section = _MEGATRON
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    model = 1
    for size in sizes:
        model *= recipe.get(f"{section}.{size}", 1)
    engine = recipe.get("policy.generation.vllm_cfg.tensor_parallel_size", 1)
    shared = recipe.get("policy.generation.colocated.enabled", True)
    findings.set("cluster.num_nodes", nodes, "num_nodes")
    if shared and not recipe.stale:
        _colocated(findings, nodes, each, model, engine)
        return
    why = "generation ahead of training requires separate GPUs" if shared else "separate GPUs for generation"
    if nodes * each < model + engine:
        each = -(-(model + engine) // nodes)
        why += f"; {model + engine} GPUs are the minimum for one replica and one engine"
    total = nodes * each
    resources = "policy.generation.colocated.resources"
    own = recipe.get(f"{resources}.num_nodes", 1 if nodes == 1 else 0) * recipe.get(f"{resources}.gpus_per_node", each)
    engines = _engines(total, model, engine, total // 2 if shared or not own else own)
    findings.set("cluster.gpus_per_node", each, why)
    share = f"{engines} x {engine} of {total} GPUs for sampling, {total - engines * engine} for training"
    findings.set("policy.generation.engines", engines, share)


def _colocated(findings: Findings, nodes: int, each: int, model: int, engine: int) -> None:
    why = "engines and policy use the same GPUs in turns"
    if nodes * each < max(model, engine):
        each = -(-max(model, engine) // nodes)
        why += f"; {max(model, engine)} GPUs are the minimum for one replica and one engine"
    replicas = nodes * each // model
    # The policy's ranks are assigned to the nodes in order. An engine must fit on the ranks of one node.
    ranks = [min(each, max(0, replicas * model - node * each)) for node in range(nodes)]
    engines = max(1, sum(n // engine for n in ranks))
    findings.set("cluster.placement", "colocated", "colocated.enabled")
    findings.set("cluster.gpus_per_node", each, why)
    findings.set(
        "policy.generation.engines",
        engines,
        f"{engines} x {engine} of {nodes * each} GPUs are used for sampling and training in turns",
    )


def _engines(total: int, model: int, engine: int, wanted: int) -> int:
    """Return the number of engines that use about ``wanted`` GPUs and leave the other GPUs to complete policy
    replicas."""
    options = [n for n in range(1, total // engine + 1) if (total - n * engine) % model == 0 and total - n * engine > 0]
    return min(options, key=lambda n: abs(n * engine - wanted)) if options else max(1, (total - model) // engine)
