"""Checkpoints of model, optimizer, learning-rate schedule and random state, loadable in any parallel layout.

The checkpoints use the fully reshardable format of Megatron's ``dist_checkpointing``. Each rank writes and reads its
own share (see ``checkpoint_shards``). The caller writes to a temporary folder and renames it, so a folder with the
final name is always complete. Files may be written during training, from a copy of the rank's share in host memory.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from gdpo_nemo.megatron import checkpoint_index
from gdpo_nemo.megatron.checkpoint_shards import (
    Place,
    checksums,
    divide,
    in_host_memory,
    load_divided,
    optimizer_ranges,
    own_weights,
    place,
    read_back,
)
from gdpo_nemo.megatron.lora import load_adapters, sharded_adapters
from gdpo_nemo.megatron.optimizer import chained, optimized
from gdpo_nemo.megatron.runtime import random_state, set_random_state
from gdpo_nemo.utils.errors import RunError

_NO_SPACE = 4 << 20
_SHARDING = "fully_reshardable"
"""Megatron's name of the format in the files."""
_RANGES = "fully_sharded_model_space"
"""Megatron's name of a loaded state that contains each rank's ranges, as ``optimizer_ranges`` requests them."""

# Megatron saves in background processes, which return their results through a manager process. This module saves in
# threads instead. A plain queue avoids the manager, which takes seconds to start and is orphaned after a kill.
filesystem_async._results_queue = queue.Queue()

checkpoint_index.install()


def save(policy, folder: str | Path) -> None:
    """Write the policy's complete state and verify the weights by reading them back. This call is collective.

    Raises:
        RunError: if the state could not be written, or if the values in the files differ. The message gives the reason,
            for example a full disk.
    """
    Save(policy, folder, background=False).finish()


class Save:
    """A checkpoint in progress. The constructor and ``finish`` are collective.

    Args:
        background: True to copy the state and write the copy in a thread while the policy trains. If False, the
            constructor returns after all files of this rank are written.

    Raises:
        RunError: if the state could not be written.
    """

    def __init__(self, policy, folder: str | Path, background: bool):
        self._folder = Path(folder)
        if dist.get_rank() == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        with policy.params_synced(), policy.optimizer_on_device(), self._explained():
            _fill_moments(policy.built.optimizer)
            state = _state(policy)
            divide(state)
            self._weights = own_weights(state, [name for name, _ in _named_chunks(policy)])
            on_cpu = (part.data for part in nested_values(state) if isinstance(part, ShardedTensor))
            live = {tensor.untyped_storage().data_ptr() for tensor in on_cpu if not tensor.is_cuda}
            # Use "mcore", because the other strategy requires NVIDIA's resiliency extension, which has only GPU wheels.
            self._request = dist_checkpointing.save(
                state, str(self._folder), async_sharded_save=True, async_strategy="mcore"
            )
            arguments = list(self._request.async_fn_args)
            if self._request.async_fn is not None:
                arguments[1] = in_host_memory(arguments[1], live if background else set())
        self._sums: dict[Place, int] = {}
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()
        if not background:
            self._thread.join()

    def _write(self, *arguments) -> None:
        # Megatron's results queue passes errors to `finish`.
        if self._request.async_fn is not None:
            self._sums = checksums(arguments[1], {place(weight) for weight in self._weights})
            self._request.async_fn(*arguments)

    @property
    def is_written(self) -> bool:
        """True if this rank's files are on disk."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for all files, write the index, and compare the files with the checksums of the weights.

        Raises:
            RunError: if files could not be written, or if the values in the files differ.
        """
        self._thread.join()
        with self._explained():
            dist.barrier()  # the index lists the files of all ranks
            for function in self._request.finalize_fns:
                function()
            sums = read_back(self._weights, self._folder)
        wrong = sorted({key for key, offset in sums if sums[key, offset] != self._sums.get((key, offset))})
        if wrong:
            raise RunError(f"{len(wrong)} tensors have different values when read back, for example {wrong[0]}")
        dist.barrier()

    @contextlib.contextmanager
    def _explained(self):
        try:
            yield
        except (Exception, CheckpointException) as error:  # torch's exception derives directly from BaseException
            raise RunError(_reason(error, self._folder)) from error


def _is_extra(key: str) -> bool:
    """Return whether a key of a state dictionary names TransformerEngine's fp8 scales.

    TransformerEngine's modules have such an entry even without fp8. torch's layers have no such entry, and Megatron
    does not save the entries of attention modules.
    """
    return key.rpartition(".")[2].startswith("_extra_state")


def _reason(error: BaseException, folder: Path) -> str:
    """Return the reason for a failed write.

    A full disk is detected here, because Megatron's writer reports only the type of an error.
    """
    free = shutil.disk_usage(folder).free
    if free < _NO_SPACE:
        return f"No space left on device ({free >> 10} KiB free)"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no reason given'}"


def _fill_moments(optimizer) -> None:
    """Create missing optimizer state, so that a checkpoint can be written before the first update.

    Parameters that have not been updated get zero moments. A group that has no parameters on this rank gets the step
    count of the other groups, because the checkpoint stores the groups of the first rank.
    """
    parts = chained(optimizer)
    groups = []
    for part in parts:
        groups += part.optimizer.param_groups
    step = max((group["step"] for group in groups if "step" in group), default=None)
    for group in groups:
        if step is not None and "betas" in group:  # Muon does not count steps
            group.setdefault("step", step)
    for part in parts:
        if part.config.use_precision_aware_optimizer:
            # Megatron's function lacks an argument that TransformerEngine's method requires.
            for p in optimized(part.optimizer):
                if not part.optimizer.state[p]:
                    part.optimizer.initialize_state(p, store_param_remainders=False)
        else:
            part.init_state_fn(part.optimizer, part.config)


def load_weights(policy, folder: str | Path) -> None:
    """Load only the weights (under LoRA: the adapters) from a checkpoint of any layout. This call is collective."""
    with checkpoint_index.reading(folder):
        requested = _model_state(policy)
        _remove_absent_extras(requested, load_sharded_metadata(str(folder)))
        _fill_model(policy, load_divided(requested, str(folder)))
    dist.barrier()


def _remove_absent_extras(requested: dict[str, Any], stored) -> None:
    """Remove fp8 scales from ``requested``, in place, if the checkpoint does not contain them.

    A checkpoint that was written without TransformerEngine contains no fp8 scales.
    """

    def is_absent(part) -> bool:
        return isinstance(part, ShardedObject) and _is_extra(part.key) and part.unique_key not in stored

    for chunk in requested.values():
        for key in [key for key, part in chunk.items() if is_absent(part)]:
            del chunk[key]


def _fill_model(policy, state: dict[str, Any]) -> None:
    for name, chunk in _named_chunks(policy):
        if policy.lora:
            load_adapters(chunk, state[name])
        else:
            for key, value in state[name].items():
                if _is_extra(key):
                    checkpoint_index.check_extra_state(value)
            result = chunk.load_state_dict(state[name], strict=False)
            wrong = [key for key in (*result.missing_keys, *result.unexpected_keys) if not _is_extra(key)]
            if wrong:
                raise RunError(f"the checkpoint does not match the model: {', '.join(wrong)}")


def load_checkpoint(policy, folder: str | Path) -> None:
    """Load the policy's complete state from a checkpoint of any layout. This call is collective."""
    with policy.optimizer_on_device(), checkpoint_index.reading(folder):
        _load(policy, folder)
    dist.barrier()


def _load(policy, folder: str | Path) -> None:
    _fill_moments(policy.built.optimizer)
    requested = _state(policy)
    stored = load_sharded_metadata(str(folder))
    _remove_absent_extras({name: requested[name] for name, _ in _named_chunks(policy)}, stored)
    # Each rank has its own random state. A checkpoint from a different number of ranks does not contain this state, so
    # the newly seeded state is used.
    if requested["random"].unique_key not in stored:
        del requested["random"]
    if not any(key.startswith(_REFERENCE) for key in stored):  # the checkpoint has no reference weights
        requested = {name: part for name, part in requested.items() if not name.startswith(_REFERENCE)}
    model_weights = _rename_main_weights(requested["optimizer"], stored)
    if not any(key.startswith(_MAIN_WEIGHTS[:2]) for key in stored):
        _read_separately(requested["optimizer"], model_weights, str(folder))
    optimizer = policy.built.optimizer
    parts = chained(optimizer)
    saved = dist_checkpointing.load_common_state_dict(str(folder))["optimizer"]
    name = "optimizer"
    if len(_saved_parts(saved)) != len(parts):
        # Under the saved name, Megatron would merge the parameter groups of parts that have the same number.
        name = "parts"
        requested[name] = requested.pop("optimizer")
    state = load_divided(requested, str(folder))
    _fill_model(policy, state)
    _fill_reference(policy, state)
    converted = _convert_optimizer_state(state[name], saved, parts)
    _restore_settings(converted, parts)
    for part_state in converted.values() if len(parts) > 1 else [converted]:
        if "param_state" in part_state:
            part_state["param_state_sharding_type"] = _RANGES
    optimizer.load_state_dict(converted)
    # The scheduler reads only the number of updates and keeps its settings (see `optimizer.make_schedule`).
    policy.built.scheduler.load_state_dict(state["scheduler"])
    if "random" in state:
        set_random_state(state["random"])


_MAIN_WEIGHTS = ("optimizer.state.param.", "optimizer.state.fp32_param.", "")
"""Key prefixes of main weights: distributed optimizer, plain optimizer in bfloat16, plain optimizer in float32.

In float32, the model's weights are the main weights.
"""


def _rename_main_weights(requested: dict[str, Any], stored) -> dict[str, Any]:
    """Rename the requested main weights to their keys in the checkpoint, in place.

    The keys depend on the kind of optimizer that wrote the checkpoint.

    Returns:
        The main weights that the checkpoint stores as model weights, keyed by consecutive numbers. The model requests
        the same checkpoint keys, but a load reads each key only once. ``_read_separately`` must therefore read these
        weights.
    """
    model_weights: dict[str, Any] = {}
    for tensor in nested_values(requested):
        key = getattr(tensor, "key", "")
        prefix = next((p for p in _MAIN_WEIGHTS[:2] if key.startswith(p)), None)
        if prefix is None or key in stored:
            continue
        candidates = (other + key.removeprefix(prefix) for other in _MAIN_WEIGHTS)
        tensor.key = next((name for name in candidates if name in stored), key)
        if not tensor.key.startswith("optimizer."):
            model_weights[str(len(model_weights))] = tensor
    return model_weights


def _read_separately(requested: dict[str, Any], tensors: dict[str, Any], folder: str) -> None:
    """Load ``tensors`` from the checkpoint and replace them with their values in ``requested``, in place."""
    numbers = {id(tensor): number for number, tensor in tensors.items()}
    values = load_divided(dict(tensors), folder)

    def replace_by_value(part):
        return LocalNonpersistentObject(values[numbers[id(part)]]) if id(part) in numbers else part

    dict_list_map_inplace(replace_by_value, requested)


def _named_chunks(policy):
    chunks = policy.chunks
    return [("model" if len(chunks) == 1 else f"model{i}", chunk) for i, chunk in enumerate(chunks)]


def _metadata() -> dict[str, Any]:
    return dict(
        distrib_optim_sharding_type=_SHARDING,
        singleton_local_shards=False,
        chained_optim_avoid_prefix=True,
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
    )


def _model_state(policy) -> dict[str, Any]:
    if not policy.lora:
        return dict(sharded_weights(policy))
    # The checkpoint contains only the adapters. The frozen model stays in its original folder.
    return {name: sharded_adapters(chunk) for name, chunk in _named_chunks(policy)}


_REFERENCE = "reference."


def _reference_state(policy) -> dict[str, Any]:
    """Return the sharded reference weights by chunk, or an empty dictionary if the reference is fixed or missing."""
    if not policy.config.sync_ref_model or policy.reference is None:
        return {}
    state = {}
    for name, chunk, weights in _reference_chunks(policy):
        parts = chunk.sharded_state_dict(prefix=_REFERENCE, metadata=_metadata())
        state[name] = {key: part for key, part in parts.items() if key.removeprefix(_REFERENCE) in weights}
        for key, part in state[name].items():
            part.data = weights[key.removeprefix(_REFERENCE)]
    return state


def _reference_chunks(policy):
    """Yield (name in a checkpoint, chunk, {parameter name: reference tensor}) for every chunk."""
    tensors = iter(policy.reference.weights)
    for name, chunk in _named_chunks(policy):
        yield _REFERENCE + name, chunk, {key: next(tensors) for key, _ in chunk.named_parameters()}


def _fill_reference(policy, state: dict[str, Any]) -> None:
    if policy.reference is None:
        return
    for name, _, weights in _reference_chunks(policy):
        for key, value in state.get(name, {}).items():
            weights[key.removeprefix(_REFERENCE)].copy_(value)


def sharded_weights(policy) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, Megatron's sharded state dictionary) of every chunk, without LoRA's adapters."""
    return [(name, chunk.sharded_state_dict(metadata=_metadata())) for name, chunk in _named_chunks(policy)]


def _state(policy) -> dict[str, Any]:
    chunks = _model_state(policy)
    return {
        **chunks,
        **_reference_state(policy),
        "optimizer": _optimizer_state(policy.built.optimizer, chunks if len(chunks) > 1 else chunks["model"]),
        "scheduler": policy.built.scheduler.state_dict(),
        # The key contains the rank and the number of ranks: only as many ranks can restore their random state.
        "random": ShardedObject("random", random_state(), (dist.get_world_size(),), (dist.get_rank(),)),
    }


def _optimizer_state(optimizer: Any, model_state: dict[str, Any]) -> dict[Any, Any]:
    """Return the optimizer's sharded state. Chained optimizers have the keys 0, 1, ..."""
    parts = chained(optimizer)
    if len(parts) > 1:
        optimizer._synchronize_steps()
    states = []
    for part in parts:
        if isinstance(part, DistributedOptimizer):
            ranges = optimizer_ranges(part, model_state)
            states.append({**part.state_dict(), "param_state": ranges, "param_state_sharding_type": _SHARDING})
        else:
            states.append(part.sharded_state_dict(model_state, metadata=_metadata()))
    return dict(enumerate(states)) if len(parts) > 1 else states[0]


def _saved_parts(saved: dict[Any, Any]) -> list[dict[str, Any]]:
    """Return the states of the optimizers in a checkpoint. Only those of chained optimizers have numbers."""
    numbers = sorted(key for key in saved if isinstance(key, int))
    return [saved[number] for number in numbers] or [saved]


def _convert_optimizer_state(state: dict[Any, Any], saved: dict[Any, Any], parts: list[Any]) -> dict[Any, Any]:
    """Convert loaded optimizer state to the structure that this run's optimizer expects.

    The tensors already have this run's layout. Only the structure of the parameter groups (step count, learning rate)
    may differ. A plain optimizer saves groups with their parameters, and a distributed optimizer saves them without.
    With expert parallelism, Megatron chains optimizers for dense and for expert parameters, and with Muon also for
    matrices and for other parameters. The states of these optimizers have the keys 0, 1, ...

    Args:
        state: loaded optimizer state, in this run's layout.
        saved: optimizer state in the checkpoint, without tensors.
        parts: this run's chained optimizers, or its only optimizer.
    """
    is_chained = len(parts) > 1
    saved_parts = _saved_parts(saved)
    states = [state[index] for index in range(len(parts))] if is_chained else [state]
    was_distributed = any("param_state_sharding_type" in saved_part for saved_part in saved_parts)
    was_float32 = "param_groups" in saved_parts[0]  # a plain float32 optimizer has this key at the top level
    is_distributed = "param_state" in states[0]
    is_float32 = "state" in states[0]
    if len(saved_parts) == len(parts) and (was_distributed, was_float32) == (is_distributed, is_float32):
        return state
    saved_groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for saved_part in saved_parts:
        saved_groups |= {_identity(group): group for group in _groups(saved_part)}
    converted = [_convert_part(part_state, part, saved_groups) for part_state, part in zip(states, parts)]
    return dict(enumerate(converted)) if is_chained else converted[0]


def _restore_settings(state: dict[Any, Any], parts: list[Any]) -> None:
    """Replace the settings of the parameter groups in ``state`` with those of this run's optimizer, in place.

    A run may be resumed with another learning rate, weight decay or Adam decay. Megatron identifies groups by some of
    these settings, and silently loads the others from the checkpoint. In this function, the config takes precedence,
    and only the step count comes from the checkpoint.
    """
    for index, part in enumerate(parts):
        part_state = state[index] if len(parts) > 1 else state
        settings = {_identity(group): group for group in part.optimizer.param_groups}
        for group in _groups(part_state):
            for key, value in settings[_identity(group)].items():
                if key not in ("params", "step"):
                    group[key] = value


def _groups(state: dict[str, Any]) -> list[dict[str, Any]]:
    return state["param_groups"] if "param_groups" in state else state.get("optimizer", {}).get("param_groups", [])


def _convert_part(
    state: dict[str, Any], optimizer, saved_groups: dict[tuple[Any, ...], dict[str, Any]]
) -> dict[str, Any]:
    """Convert the state of one of the chained optimizers (see ``_convert_optimizer_state``).

    Args:
        saved_groups: parameter groups in the checkpoint, by ``_identity``.
    """
    is_distributed = "param_state" in state
    groups = []
    for group in optimizer.optimizer.state_dict()["param_groups"]:
        converted = dict(saved_groups[_identity(group)])
        for key in ("params", "is_expert_parallel"):  # these keys depend on the run's layout
            if key in group:
                converted[key] = group[key]
        if is_distributed:
            converted.pop("params", None)
        groups.append(converted)
    if is_distributed:
        return {
            "optimizer": {"param_groups": groups},
            "param_state": state["param_state"],
            "param_state_sharding_type": _SHARDING,
        }
    if "state" in state:  # in float32, the state of torch's optimizer is at the top level
        return {"param_groups": groups, "state": state["state"]}
    others = {key: value for key, value in state.items() if key != "param_groups"}
    return {**others, "optimizer": {**state["optimizer"], "param_groups": groups}}


_IDENTITY_KEYS = ("wd_mult", "lr_mult", "is_decoupled_lr", "optimizer")
"""Keys that identify a parameter group. Only groups that Adam updates in a run with Muon have the key ``optimizer``.

Megatron also identifies groups by the schedule's settings (``max_lr``, ``min_lr``, ...), which may change when a run is
resumed. The flag for expert groups also identifies a group in Megatron, although expert groups have the same settings
as the other groups.
"""


def _identity(group: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in _IDENTITY_KEYS)
