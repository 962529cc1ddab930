"""The machines of a recipe: batches and lengths in memory, parallel sizes that depend on others, GPUs and engines."""

from __future__ import annotations

from gdpo_nemo.interop.account import Account
from gdpo_nemo.interop.nemo_rl.recipe import Recipe

_MEGATRON = "policy.megatron_cfg"


def machines(recipe: Recipe, account: Account) -> None:
    """Fill the account with what decides where and how it is computed, and not what."""
    _model(recipe, account)
    _batches(recipe, account)
    _lengths(recipe, account)
    _switches(recipe, account)
    _cluster(recipe, account)


def _model(recipe: Recipe, account: Account) -> None:
    if recipe.model.refusal:
        account.blocks("policy.model_name", recipe.model.refusal)
    if recipe.model.question:
        account.asks("policy.model_name", recipe.model.question)
    positions = "policy.hf_config_overrides.max_position_embeddings"
    if (recipe.get(positions) or 0) >= recipe.get("policy.max_total_sequence_length", 1024):
        account.blocks(positions, "a run has no more positions than the model's config.json gives it; change it there")
    backend = recipe.get("policy.generation.backend", "vllm")
    if backend != "vllm":
        account.blocks("policy.generation.backend", f"{backend} is not a sampling engine here; vllm is")
    if recipe.model.mixture and recipe.lora:
        account.blocks(
            recipe.lora, "the experts of a mixture cannot be adapted; name the attention's layers in target_modules"
        )


def _batches(recipe: Recipe, account: Account) -> None:
    longest = recipe.get("policy.max_total_sequence_length", 1024)
    if recipe.packed_tokens:
        account.set("policy.micro_batch_tokens", max(recipe.packed_tokens, longest), "train_mb_tokens")
        return
    size = recipe.get("policy.train_micro_batch_size", 1)
    account.set("policy.micro_batch_tokens", size * longest, f"train_micro_batch_size {size} x {longest} tokens")


def _lengths(recipe: Recipe, account: Account) -> None:
    longest = recipe.get("policy.max_total_sequence_length", 1024)
    wanted = recipe.get("policy.generation.max_new_tokens", longest)
    why = (
        "max_new_tokens"
        if wanted < longest
        else f"{wanted}: completions end with the context, and a prompt has a token"
    )
    account.set("policy.generation.max_new_tokens", min(wanted, longest - 1), why)


def _switches(recipe: Recipe, account: Account) -> None:
    """Switches that are written only where they have their partner; without it they do nothing there either."""
    trained = _MEGATRON if recipe.megatron else "policy.dtensor_cfg"
    tensor = recipe.get(f"{trained}.tensor_{'model_' if recipe.megatron else ''}parallel_size", 1)
    if tensor > 1 and (recipe.get(f"{trained}.sequence_parallel") or recipe.model.mixture):
        account.set(
            f"{_MEGATRON}.sequence_parallel", True, "sequence_parallel, which a mixture under tensor parallelism needs"
        )
    if recipe.megatron and recipe.get(f"{_MEGATRON}.activation_checkpointing"):
        account.set(
            f"{_MEGATRON}.recompute",
            recipe.get(f"{_MEGATRON}.recompute_granularity", "full"),
            "activation_checkpointing",
        )
    if not recipe.megatron:
        account.set(f"{_MEGATRON}.use_distributed_optimizer", True, "DTensor shards optimizer states, too")
        if recipe.get("policy.max_grad_norm") is not None:
            account.set(f"{_MEGATRON}.optimizer.clip_grad", recipe.get("policy.max_grad_norm"), "max_grad_norm")
        return
    section = f"{_MEGATRON}.distributed_data_parallel_config"
    if recipe.get(f"{section}.overlap_grad_reduce"):
        account.set(f"{_MEGATRON}.overlap_grad_reduce", True, "overlap_grad_reduce")
    if recipe.gathers_ahead:
        account.set(f"{_MEGATRON}.overlap_param_gather", True, "overlap_param_gather")


def _cluster(recipe: Recipe, account: Account) -> None:
    """Engines on the policy's GPUs where the recipe shares them and trains on-policy; else on GPUs of their own."""
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
    account.set("cluster.num_nodes", nodes, "num_nodes")
    if shared and not recipe.stale:
        _colocated(account, nodes, each, model, engine)
        return
    why = "engines that run ahead of training need their own GPUs" if shared else "GPUs dedicated to generation"
    if nodes * each < model + engine:
        each = -(-(model + engine) // nodes)
        why += f"; {model + engine} GPUs is the least for one replica and one engine"
    total = nodes * each
    resources = "policy.generation.colocated.resources"
    own = recipe.get(f"{resources}.num_nodes", 1 if nodes == 1 else 0) * recipe.get(f"{resources}.gpus_per_node", each)
    engines = _engines(total, model, engine, total // 2 if shared or not own else own)
    account.set("cluster.gpus_per_node", each, why)
    share = f"{engines} x {engine} of {total} GPUs sample, {total - engines * engine} train"
    account.set("policy.generation.engines", engines, share)


def _colocated(account: Account, nodes: int, each: int, model: int, engine: int) -> None:
    why = "engines and policy take turns on the GPUs"
    if nodes * each < max(model, engine):
        each = -(-max(model, engine) // nodes)
        why += f"; {max(model, engine)} GPUs is the least for one replica and one engine"
    replicas = nodes * each // model
    # Where nodes are filled from the first on, whole engines fit the ranks of each.
    ranks = [min(each, max(0, replicas * model - node * each)) for node in range(nodes)]
    engines = max(1, sum(n // engine for n in ranks))
    account.set("cluster.placement", "colocated", "colocated.enabled")
    account.set("cluster.gpus_per_node", each, why)
    account.set(
        "policy.generation.engines",
        engines,
        f"{engines} x {engine} of {nodes * each} GPUs sample when it is their turn",
    )


def _engines(total: int, model: int, engine: int, wanted: int) -> int:
    """The number of engines nearest to ``wanted`` GPUs that leaves whole replicas of the policy."""
    options = [n for n in range(1, total // engine + 1) if (total - n * engine) % model == 0 and total - n * engine > 0]
    return min(options, key=lambda n: abs(n * engine - wanted)) if options else max(1, (total - model) // engine)
