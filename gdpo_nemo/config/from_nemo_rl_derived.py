"""The parts of a recipe that several keys make together: estimator, rewards and shaping, batches, GPUs, data, folders.

Every function returns {our key: (value, why)}; the reasons are shown to the user. None: the user has to fill that in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gdpo_nemo.config.from_nemo_rl_table import Recipe

Derived = dict[str, tuple[Any, str]]

_ENVIRONMENTS = {
    "math": ("math", ("correctness",)),
    "math_default": ("math", ("correctness",)),
    "math_multi_reward": ("gsm8k", ("correctness", "format", "integer")),
}
"""Their environment -> ours and the components it gives there, sorted by name as their list of weights is."""

_DATASETS = {
    "gsm8k": "openai/gsm8k",
    "OpenMathInstruct-2": "nvidia/OpenMathInstruct-2",
    "DeepScaler": "agentica-org/DeepScaleR-Preview-Dataset",
    "DAPOMath17K": "BytedTsinghua-SIA/DAPO-Math-17k",
    "AIME2024": "HuggingFaceH4/aime_2024",
}
"""Their names of datasets -> names on the Hugging Face hub."""

_COLUMNS = {
    "OpenMathInstruct-2": ("problem", "expected_answer"),
    "DeepScaler": ("problem", "answer"),
    "AIME2024": ("problem", "answer"),
}
"""Dataset -> columns of the prompt and of the gold answer, where they are not the defaults."""


def derived(recipe: Recipe) -> Derived:
    """Everything that no single key decides."""
    parts = (
        _estimator,
        _rewards,
        _loss,
        _off_policy,
        _staleness,
        _batches,
        _lengths,
        _recompute,
        _lora,
        _cluster,
        _data,
        _folders,
    )
    out: Derived = {}
    for part in parts:
        out |= part(recipe)
    return out


def _estimator(recipe: Recipe) -> Derived:
    def setting(name: str, default: Any) -> Any:
        return recipe.get(f"grpo.adv_estimator.{name}", recipe.get(f"grpo.{name}", default))

    name = recipe.get("grpo.adv_estimator.name", "grpo")
    normalize, leave_one_out = setting("normalize_rewards", True), setting("use_leave_one_out_baseline", True)
    if name == "gdpo":
        out = {
            "gdpo.estimator": (
                "gdpo",
                "normalize_rewards is always on; `gdpo.preset: nemo_rl` reproduces its numerics, defects included",
            )
        }
        if leave_one_out:
            out["gdpo.options"] = ({"leave_one_out": True}, "use_leave_one_out_baseline")
        return out
    if name == "reinforce_plus_plus":
        return {
            "gdpo.estimator": (
                "dr_grpo",
                "reinforce_plus_plus is the group's mean subtracted and the batch standardised",
            ),
            "gdpo.batch_norm": (True, "over sequences, where it weighs tokens"),
        }
    if name != "grpo":
        return {"gdpo.estimator": ("grpo", f"there is no estimator {name!r} here; choose one")}
    if normalize:
        warning = (
            "; without its leave-one-out statistics, which explode where one member differs" if leave_one_out else ""
        )
        return {"gdpo.estimator": ("grpo", f"normalize_rewards{warning}")}
    if leave_one_out:
        return {"gdpo.estimator": ("rloo", "leave-one-out baseline, no division")}
    return {"gdpo.estimator": ("dr_grpo", "mean baseline, no division")}


# -- rewards ----------------------------------------------------------------------------------------------------


def _env_name(recipe: Recipe) -> str:
    named = recipe.get("data.train.env_name") or recipe.get("data.default.env_name") or recipe.get("data.env_name")
    own = {key.split(".")[1] for key in recipe.flat if key.startswith("env.") and key.count(".") > 1}
    return named or next(iter(sorted(own)), "math")


def _dataset_name(recipe: Recipe) -> str:
    return recipe.get("data.train.dataset_name") or recipe.get("data.dataset_name") or ""


def _environment(recipe: Recipe) -> tuple[str, tuple[str, ...]] | None:
    """Our environment and the components that count, or None where there is none like theirs."""
    found = _ENVIRONMENTS.get(_env_name(recipe))
    processor = recipe.get("data.default.processor") or recipe.get("data.train.processor") or ""
    if found and "gdpo" in str(processor):
        return _ENVIRONMENTS["math_multi_reward"]
    if found and _dataset_name(recipe) == "gsm8k" and found[0] == "math":
        return "gsm8k", found[1]
    return found


def _rewards(recipe: Recipe) -> Derived:
    found = _environment(recipe)
    if found is None:
        why = f"there is no environment {_env_name(recipe)!r} here: name yours under env and its components under gdpo.rewards"
        if _env_name(recipe) == "nemo_gym":
            why = "start NeMo Gym's servers and name them under env.nemo_gym.servers (or head_server); rewards come from them"
        return {"gdpo.rewards": (None, why), "env": (None, why)}
    plugin, names = found
    weights = recipe.get("grpo.adv_estimator.reward_weights") or [1.0] * len(names)
    why = f"components of {_env_name(recipe)}"
    if len(weights) != len(names):
        why, weights = (
            f"{len(weights)} reward_weights do not fit the components {', '.join(names)}; set them",
            [1.0] * len(names),
        )
    rewards = {name: float(weight) for name, weight in zip(names, weights)}
    out: Derived = {"env": ({plugin: {}}, f"in place of {_env_name(recipe)}")}
    rules = _shaping(recipe, names)
    if any("overlong" in rule for rule in rules):
        rewards["overlong"] = 1.0
    if any("kl" in rule for rule in rules):
        rewards["kl"] = 1.0
    if rules:
        out["gdpo.shaping"] = (rules, "reward_scaling, reward_shaping and use_kl_in_reward, per component")
    workers = recipe.get(f"env.{_env_name(recipe)}.num_workers")
    if workers:
        out["rollout.env_workers"] = (workers, f"env.{_env_name(recipe)}.num_workers")
    return {"gdpo.rewards": (rewards, why), **out}


def _shaping(recipe: Recipe, names: tuple[str, ...]) -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = []
    scaling, shaping = "grpo.reward_scaling", "grpo.reward_shaping"
    if recipe.get(f"{scaling}.enabled"):
        source, target = ([recipe.get(f"{scaling}.{side}_{end}", default) for end, default in (("min", 0.0), ("max", 1.0))]
                          for side in ("source", "target"))  # fmt: skip
        for name in names:
            rules += [
                {"component": name, "clip": source},
                {"component": name, "linear": {"from": source, "to": target}},
            ]
    if recipe.get(f"{shaping}.enabled") and recipe.get(f"{shaping}.overlong_buffer_length"):
        options = {
            "buffer": recipe.get(f"{shaping}.overlong_buffer_length"),
            "penalty": recipe.get(f"{shaping}.overlong_buffer_penalty", 1.0),
        }
        if recipe.get(f"{shaping}.max_response_length"):
            options["max_length"] = recipe.get(f"{shaping}.max_response_length")
        rules.append({"component": "overlong", "overlong": options})
    if recipe.get("loss_fn.use_kl_in_reward"):
        rules.append({"component": "kl", "kl": {"coefficient": recipe.get("loss_fn.reference_policy_kl_penalty", 0.0)}})
    return rules


# -- loss -------------------------------------------------------------------------------------------------------


def _loss(recipe: Recipe) -> Derived:
    if recipe.get("loss_fn.use_cispo"):
        return {"loss_fn.type": ("cispo", "use_cispo")}
    if recipe.get("loss_fn.sequence_level_importance_ratios"):
        return {"loss_fn.type": ("gspo", "sequence_level_importance_ratios")}
    return {}


def _off_policy(recipe: Recipe) -> Derived:
    if recipe.stale or not recipe.get("loss_fn.use_importance_sampling_correction"):
        return {}
    prefix = "loss_fn.truncated_importance_sampling"
    kind, high, low = (recipe.get(f"{prefix}_{name}") for name in ("type", "ratio", "ratio_min"))
    mode = {"icepop": "icepop", "seq-mask-tis": "mask"}.get(kind, "truncate")
    out: Derived = {
        "loss_fn.off_policy.mode": (mode, f"importance sampling correction, type {kind or 'not truncated'}")
    }
    if mode == "mask":
        out["loss_fn.off_policy.level"] = ("geometric", "seq-mask-tis judges sequences")
    if high is not None:
        out["loss_fn.off_policy.ratio_max"] = (float(high), "truncated_importance_sampling_ratio")
    if low is not None and mode != "truncate":
        out["loss_fn.off_policy.ratio_min"] = (float(low), "truncated_importance_sampling_ratio_min")
    return out


def _staleness(recipe: Recipe) -> Derived:
    if not recipe.stale:
        return {}
    return {"rollout.max_staleness": (recipe.get("grpo.async_grpo.max_trajectory_age_steps", 1), "async_grpo")}


# -- batches and lengths ----------------------------------------------------------------------------------------


def _batches(recipe: Recipe) -> Derived:
    longest = recipe.get("policy.max_total_sequence_length", 1024)
    for section in ("sequence_packing", "dynamic_batching"):
        tokens = recipe.get(f"policy.{section}.train_mb_tokens")
        if recipe.get(f"policy.{section}.enabled") and tokens:
            return {
                "policy.micro_batch_tokens": (
                    max(int(tokens), longest),
                    f"{section}.train_mb_tokens; packing is always on",
                )
            }
    size = recipe.get("policy.train_micro_batch_size", 1)
    return {
        "policy.micro_batch_tokens": (
            size * longest,
            f"train_micro_batch_size {size} x {longest} tokens; packing is always on",
        )
    }


def _lengths(recipe: Recipe) -> Derived:
    longest = recipe.get("policy.max_total_sequence_length", 1024)
    wanted = recipe.get("policy.generation.max_new_tokens", longest)
    if wanted < longest:
        return {"policy.generation.max_new_tokens": (wanted, "max_new_tokens")}
    return {
        "policy.generation.max_new_tokens": (
            longest - 1,
            f"{wanted} leaves no room for a prompt; completions end with the context",
        )
    }


def _recompute(recipe: Recipe) -> Derived:
    prefix = "policy.megatron_cfg"
    if not recipe.megatron or not recipe.get(f"{prefix}.activation_checkpointing"):
        return {}
    granularity = recipe.get(f"{prefix}.recompute_granularity", "full")
    return {f"{prefix}.recompute": (granularity, "activation_checkpointing and recompute_granularity")}


def _lora(recipe: Recipe) -> Derived:
    prefix = "policy.megatron_cfg.peft"
    if not recipe.get(f"{prefix}.enabled"):
        return {}
    return {"policy.lora.rank": (recipe.get(f"{prefix}.dim", 8), "peft.enabled and peft.dim")}


# -- machines ---------------------------------------------------------------------------------------------------


def _cluster(recipe: Recipe) -> Derived:
    """Engines on the policy's GPUs where the recipe shares them and trains on-policy; else on GPUs of their own."""
    nodes, each = recipe.get("cluster.num_nodes", 1), recipe.get("cluster.gpus_per_node", 1)
    sizes = ("tensor", "pipeline") if recipe.megatron else ()
    model = recipe.get("policy.megatron_cfg.context_parallel_size", 1) if recipe.megatron else (
        recipe.get("policy.dtensor_cfg.tensor_parallel_size", 1) * recipe.get("policy.dtensor_cfg.context_parallel_size", 1))  # fmt: skip
    for size in sizes:
        model *= recipe.get(f"policy.megatron_cfg.{size}_model_parallel_size", 1)
    engine = recipe.get("policy.generation.vllm_cfg.tensor_parallel_size", 1)
    shared = recipe.get("policy.generation.colocated.enabled", True)
    if shared and not recipe.stale:
        return _colocated(nodes, each, model, engine)
    why = "engines that run ahead of training need their own GPUs" if shared else "GPUs dedicated to generation"
    needed = model + engine
    if nodes * each < needed:
        each = -(-needed // nodes)
        why += f"; {needed} GPUs is the least for one replica and one engine"
    total = nodes * each
    resources = "policy.generation.colocated.resources"
    own = recipe.get(f"{resources}.num_nodes", 1 if nodes == 1 else 0) * recipe.get(f"{resources}.gpus_per_node", each)
    engines = _engines(total, model, engine, total // 2 if shared or not own else own)
    return {
        "cluster.num_nodes": (nodes, "num_nodes"),
        "cluster.gpus_per_node": (each, why),
        "policy.generation.engines": (
            engines,
            f"{engines} x {engine} of {total} GPUs sample, {total - engines * engine} train",
        ),
    }


def _colocated(nodes: int, each: int, model: int, engine: int) -> Derived:
    why = "engines and policy take turns on the GPUs"
    if nodes * each < max(model, engine):
        each = -(-max(model, engine) // nodes)
        why += f"; {max(model, engine)} GPUs is the least for one replica and one engine"
    replicas = nodes * each // model
    # Where nodes are filled from the first on, whole engines fit the ranks of each.
    ranks = [min(each, max(0, replicas * model - node * each)) for node in range(nodes)]
    engines = max(1, sum(n // engine for n in ranks))
    return {
        "cluster.placement": ("colocated", "colocated.enabled"),
        "cluster.num_nodes": (nodes, "num_nodes"),
        "cluster.gpus_per_node": (each, why),
        "policy.generation.engines": (engines, f"{engines} x {engine} of {nodes * each} GPUs sample when it is their turn"),
    }


def _engines(total: int, model: int, engine: int, wanted: int) -> int:
    """The number of engines nearest to ``wanted`` GPUs that leaves whole replicas of the policy."""
    options = [n for n in range(1, total // engine + 1) if (total - n * engine) % model == 0 and total - n * engine > 0]
    return min(options, key=lambda n: abs(n * engine - wanted)) if options else max(1, (total - model) // engine)


# -- data and folders -------------------------------------------------------------------------------------------


def _data(recipe: Recipe) -> Derived:
    found = _environment(recipe)
    environment = found[0] if found else _env_name(recipe)
    out: Derived = {}
    for split, flat in (("train", "train_data_path"), ("validation", "val_data_path")):
        name = recipe.get(f"data.{split}.dataset_name") or (
            recipe.get("data.dataset_name") if split == "train" else None
        )
        path = recipe.get(f"data.{split}.data_path") or recipe.get(f"data.{flat}")
        if not (path or name):
            continue
        known = _DATASETS.get(name or "")
        why = (
            "its file"
            if path
            else f"where {name} is on the hub"
            if known
            else f"the dataset {name} is not known here; name its file or its place on the hub"
        )
        out[f"data.{split}.path"] = (path or known or name, why)
        out[f"data.{split}.environment"] = (environment, "who verifies")
        wanted = recipe.get(f"data.{split}.split") or ("train" if split == "train" and known else None)
        if wanted:
            out[f"data.{split}.split"] = (wanted, "split")
        prompt, answer = _keys(recipe, split, name)
        if prompt:
            out[f"data.{split}.prompt_key"] = (prompt, "input_key")
        if answer and answer != "answer":
            out[f"data.{split}.columns"] = ({"answer": answer}, "output_key")
        out |= _system_prompt(recipe, split)
    if not any(key.startswith("data.train") for key in out):
        out["data.train.environment"] = (environment, "the recipe names no training data")
    return out


def _keys(recipe: Recipe, split: str, name: str | None) -> tuple[str | None, str | None]:
    given = [recipe.get(f"data.{split}.{key}") or recipe.get(f"data.default.{key}") or recipe.get(f"data.{key}")
             for key in ("input_key", "output_key")]  # fmt: skip
    known = _COLUMNS.get(name or "", (None, None))
    return given[0] or known[0], given[1] or known[1]


def _system_prompt(recipe: Recipe, split: str) -> Derived:
    """The text of the system prompt's file, looked up beside the recipe, above it, and in the working directory."""
    keys = (f"data.{split}.system_prompt_file", "data.default.system_prompt_file", "data.system_prompt_file")
    name = next((recipe.get(key) for key in keys if recipe.get(key)), None)
    if name is None:
        return {}
    for folder in (Path.cwd(), *recipe.path.resolve().parents):
        if (folder / name).is_file():
            return {
                f"data.{split}.system_prompt": (
                    (folder / name).read_text(encoding="utf-8").strip(),
                    f"the text of {name}",
                )
            }
    return {f"data.{split}.system_prompt": (None, f"{name} was not found, so the environment's own wording counts")}


def _folders(recipe: Recipe) -> Derived:
    out: Derived = {}
    folder = recipe.get("checkpointing.checkpoint_dir")
    if folder:
        out["run.dir"] = (folder, "checkpoint_dir; checkpoints are in its folder checkpoints")
        out["run.name"] = (Path(folder).name, "the last part of checkpoint_dir")
    found = _environment(recipe)
    if recipe.get("checkpointing.metric_name") and found and recipe.validates:
        why = f"in place of {recipe.get('checkpointing.metric_name')}, which sums all components"
        out["checkpointing.metric_name"] = (f"validation/{found[1][0]}", why)
    return out
