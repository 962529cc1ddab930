"""Checkpoints of model, optimizer, schedule and random state, readable in any other layout.

Megatron's ``dist_checkpointing`` in its fully reshardable format. The caller writes into a temporary folder and renames
it, so a folder with the final name is whole. Files may be written during training, from a copy in host memory.
"""

from __future__ import annotations

import contextlib
import queue
import random
import shutil
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from gdpo_nemo.errors import RunError
from gdpo_nemo.megatron import checkpoint_index
from gdpo_nemo.megatron.lora import load_adapters, sharded_adapters

_NO_SPACE = 4 << 20
_SHARDING = "fully_reshardable"

# Megatron hands write results to itself through a manager process, since its background saves are processes. Ours are
# threads: a plain queue spares the manager's start (seconds) and its orphan after a kill.
filesystem_async._results_queue = queue.Queue()

checkpoint_index.install()


def save(policy, folder: str | Path) -> None:
    """Write the policy's whole state and read the weights back; collective.

    Raises:
        RunError: it could not be written, or reads back differently; the text says why (a full disk, for example).
    """
    Save(policy, folder, background=False).finish()


class Save:
    """A checkpoint on its way to disk. Constructing it and ``finish`` are collective.

    Args:
        background: copy the state and write the copy in a thread while the policy trains on; else write now.

    Raises:
        RunError: it could not be written.
    """

    def __init__(self, policy, folder: str | Path, background: bool):
        self._policy = policy
        self._folder = Path(folder)
        if dist.get_rank() == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        with policy.params_synced(), policy.optimizer_on_device(), self._explained():
            _fill_moments(policy.built.optimizer)
            state = _state(policy, is_loading=False)
            # Of the live weights, before the next update changes them; ``finish`` compares the files with these.
            self._sums = _checksums(_weights(policy))
            # "mcore": the other strategy needs NVIDIA's resiliency extension, whose wheels are for GPUs.
            self._request = dist_checkpointing.save(
                state, str(self._folder), async_sharded_save=True, async_strategy="mcore"
            )
            arguments = list(self._request.async_fn_args)
            if self._request.async_fn is not None:
                arguments[1] = _in_host_memory(arguments[1], background)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()
        if not background:
            self._thread.join()

    def _write(self, *arguments) -> None:
        # Errors reach `finish` through Megatron's queue of results.
        if self._request.async_fn is not None:
            self._request.async_fn(*arguments)

    @property
    def is_written(self) -> bool:
        """Whether this rank's files are on disk."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for all files, write the index, and compare the files with the checksums of the weights.

        Raises:
            RunError: files could not be written, or hold other values.
        """
        self._thread.join()
        with self._explained():
            dist.barrier()  # the index lists the files of all ranks
            for function in self._request.finalize_fns:
                function()
            found = _checksums(_read_back(self._policy, self._folder))
        wrong = sorted(name for name in self._sums if found.get(name) != self._sums[name])
        if wrong:
            raise RunError(f"{len(wrong)} tensors read back with other values, the first of them {wrong[0]}")
        dist.barrier()

    @contextlib.contextmanager
    def _explained(self):
        try:
            yield
        except (Exception, CheckpointException) as error:  # torch's derives from BaseException alone
            raise RunError(_reason(error, self._folder)) from error


def _in_host_memory(buckets: list, copy: bool) -> list:
    """Megatron's write buckets with their tensors on the host; with ``copy`` none of them is a live one."""
    return [
        (path, key, (blobs, [(item, tensor.to("cpu", copy=copy)) for item, tensor in tensors]))
        for path, key, (blobs, tensors) in buckets
    ]


def _weights(policy) -> dict[str, torch.Tensor]:
    """This rank's weights (under LoRA its adapters) by chunk and name, as a checkpoint holds them."""
    state = {name: _held(policy, chunk) for name, chunk in _named_chunks(policy)}
    return {f"{name}.{key}": value for name, part in state.items() for key, value in part.items()}


def _held(policy, chunk) -> dict[str, torch.Tensor]:
    """The live tensors of one chunk that a checkpoint holds."""
    if policy.lora:
        return {key: tensor.data for key, tensor in sharded_adapters(chunk).items()}
    return _tensors(chunk.state_dict())


def _tensors(state: dict) -> dict[str, torch.Tensor]:
    """The weights in a state dictionary."""
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and not _is_extra(key)}


def _is_extra(key: str) -> bool:
    """Whether a key is of TransformerEngine's scales for fp8. Its modules have such an entry without fp8, too; layers
    of torch have none, and Megatron saves none of attention."""
    return key.rpartition(".")[2].startswith("_extra_state")


def _read_back(policy, folder: Path) -> dict[str, torch.Tensor]:
    """What the files hold for this rank, in fresh memory, named as in ``_weights``."""
    state = _model_state(policy)
    for part in nested_values(state):
        if isinstance(part, (ShardedTensor, ShardedTensorFactory)):
            # Fresh memory, or the load would write into the live weights; NaN, so that a tensor nobody reads is
            # noticed.
            part.data = torch.full_like(part.data, float("nan"))
    state = dist_checkpointing.load(state, str(folder))
    return {f"{name}.{key}": value for name, _ in _named_chunks(policy) for key, value in _tensors(state[name]).items()}


def _checksums(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """CRC-32 of every tensor's bytes."""
    return {
        name: zlib.crc32(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        for name, tensor in tensors.items()
    }


def _reason(error: BaseException, folder: Path) -> str:
    """Why a write failed. Megatron's writer passes on only the type of an error, so check for a full disk first."""
    free = shutil.disk_usage(folder).free
    if free < _NO_SPACE:
        return f"No space left on device ({free >> 10} KiB free)"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no reason given'}"


def _fill_moments(optimizer) -> None:
    """Give parameters without an update their (zero) moments, so that a checkpoint before the first update is
    complete, and groups of which this rank has no parameter the step count of the others: it is the first rank's that
    is written."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    groups = [group for part in parts for group in part.optimizer.param_groups]
    step = max((group["step"] for group in groups if "step" in group), default=None)
    for group in groups:
        if step is not None:
            group.setdefault("step", step)
    for part in parts:
        part.init_state_fn(part.optimizer, part.config)


def load_weights(policy, folder: str | Path) -> None:
    """Read the model alone (or its adapters) from a checkpoint written at any layout; collective."""
    with checkpoint_index.reading(folder):
        wanted = _model_state(policy)
        _leave_out_absent_extras(wanted, load_sharded_metadata(str(folder)))
        _fill_model(policy, dist_checkpointing.load(wanted, str(folder)))
    dist.barrier()


def _leave_out_absent_extras(wanted: dict, there) -> None:
    """Do not ask for fp8 scales that a checkpoint, written without TransformerEngine, lacks."""

    def is_absent(part) -> bool:
        return isinstance(part, ShardedObject) and _is_extra(part.key) and part.unique_key not in there

    for chunk in wanted.values():
        for key in [key for key, part in chunk.items() if is_absent(part)]:
            del chunk[key]


def _fill_model(policy, state: dict) -> None:
    for name, chunk in _named_chunks(policy):
        if policy.lora:
            load_adapters(chunk, state[name])
        else:
            for key, value in state[name].items():
                if _is_extra(key):
                    checkpoint_index.check_extra_state(value)
            found = chunk.load_state_dict(state[name], strict=False)
            wrong = [key for key in (*found.missing_keys, *found.unexpected_keys) if not _is_extra(key)]
            if wrong:
                raise RunError(f"the checkpoint does not fit the model: {', '.join(wrong)}")


def load_checkpoint(policy, folder: str | Path) -> None:
    """Read a checkpoint written at any layout; collective."""
    with policy.optimizer_on_device(), checkpoint_index.reading(folder):
        _load(policy, folder)
    dist.barrier()


def _load(policy, folder: str | Path) -> None:
    wanted = _state(policy, is_loading=True)
    there = load_sharded_metadata(str(folder))
    _leave_out_absent_extras({name: wanted[name] for name, _ in _named_chunks(policy)}, there)
    # Random streams belong to ranks: with another number of ranks there are none to continue, and fresh ones are used.
    if wanted["random"].unique_key not in there:
        del wanted["random"]
    if not any(key.startswith(_REFERENCE) for key in there):  # it began to follow after this checkpoint
        wanted = {name: part for name, part in wanted.items() if not name.startswith(_REFERENCE)}
    apart = _rename_main_weights(wanted["optimizer"], there)
    if not any(key.startswith(_MAIN_WEIGHTS[:2]) for key in there):
        _read_apart(wanted["optimizer"], apart, str(folder))
    state = dist_checkpointing.load(wanted, str(folder))
    _fill_model(policy, state)
    _fill_reference(policy, state)
    optimizer = policy.built.optimizer
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    saved = dist_checkpointing.load_common_state_dict(str(folder))["optimizer"]
    fitted = _fit(state["optimizer"], saved, parts)
    _keep_own_settings(fitted, parts)
    optimizer.load_state_dict(fitted)
    # Built to keep its own settings (see `model.build_optimizer`), it takes the number of updates alone.
    policy.built.scheduler.load_state_dict(state["scheduler"])
    if "random" in state:
        _set_random_state(state["random"])


_MAIN_WEIGHTS = ("optimizer.state.param.", "optimizer.state.fp32_param.", "")
"""Prefix of a weight's name among the main weights: of a distributed optimizer, of a plain one in bfloat16, and of a
plain one in float32, whose main weights are the model's."""


def _rename_main_weights(wanted: dict, there) -> dict:
    """Ask for main weights under the names that the optimizer which wrote the checkpoint gave them.

    Returns:
        by number, those that are the model's own weights in the checkpoint. The model asks for these, too, and one load
        reads a tensor only once, so they are read separately (see ``_read_apart``).
    """
    apart: dict[str, Any] = {}
    for tensor in nested_values(wanted):
        key = getattr(tensor, "key", "")
        prefix = next((p for p in _MAIN_WEIGHTS[:2] if key.startswith(p)), None)
        if prefix is None or key in there:
            continue
        names = (other + key.removeprefix(prefix) for other in _MAIN_WEIGHTS)
        tensor.key = next((name for name in names if name in there), key)
        if not tensor.key.startswith("optimizer."):
            apart[str(len(apart))] = tensor
    return apart


def _read_apart(wanted: dict, apart: dict, folder: str) -> None:
    """Read the tensors ``apart`` and leave their values where ``wanted`` has them."""
    places = {id(tensor): number for number, tensor in apart.items()}
    values = dist_checkpointing.load(dict(apart), folder)

    def settle(part):
        return LocalNonpersistentObject(values[places[id(part)]]) if id(part) in places else part

    dict_list_map_inplace(settle, wanted)


def _named_chunks(policy):
    chunks = policy.chunks
    return [("model" if len(chunks) == 1 else f"model{i}", chunk) for i, chunk in enumerate(chunks)]


def _metadata() -> dict:
    return dict(
        distrib_optim_sharding_type=_SHARDING,
        singleton_local_shards=False,
        chained_optim_avoid_prefix=True,
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
    )


def _model_state(policy) -> dict:
    return {
        # Under LoRA the model is frozen and in its own folder; the checkpoint holds the adapters alone.
        name: sharded_adapters(chunk) if policy.lora else chunk.sharded_state_dict(metadata=_metadata())
        for name, chunk in _named_chunks(policy)
    }


_REFERENCE = "reference."


def _reference_state(policy) -> dict:
    """The weights of a reference that follows the policy, described as the model's are; nothing of one that stays."""
    if not policy.config.sync_ref_model or policy.reference is None:
        return {}
    found = {}
    for name, chunk, kept in _reference_chunks(policy):
        parts = chunk.sharded_state_dict(prefix=_REFERENCE, metadata=_metadata())
        found[name] = {key: part for key, part in parts.items() if key.removeprefix(_REFERENCE) in kept}
        for key, part in found[name].items():
            part.data = kept[key.removeprefix(_REFERENCE)]
    return found


def _reference_chunks(policy):
    """(name in a checkpoint, chunk, {parameter: tensor of the reference}) of every chunk."""
    tensors = iter(policy.reference.weights)
    for name, chunk in _named_chunks(policy):
        yield _REFERENCE + name, chunk, {key: next(tensors) for key, _ in chunk.named_parameters()}


def _fill_reference(policy, state: dict) -> None:
    if policy.reference is None:
        return
    for name, _, kept in _reference_chunks(policy):
        for key, value in state.get(name, {}).items():
            kept[key.removeprefix(_REFERENCE)].copy_(value)


def sharded_weights(policy) -> list[tuple[str, dict]]:
    """The whole model by chunk, as Megatron describes its shards; under LoRA without the adapters."""
    return [(name, chunk.sharded_state_dict(metadata=_metadata())) for name, chunk in _named_chunks(policy)]


def _state(policy, is_loading: bool) -> dict:
    chunks = _model_state(policy)
    metadata = _metadata()
    model = chunks if len(chunks) > 1 else chunks["model"]
    return {
        **chunks,
        **_reference_state(policy),
        "optimizer": policy.built.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata),
        "scheduler": policy.built.scheduler.state_dict(),
        "random": _random_object(),
    }


def _fit(state: dict, saved: dict, parts: list) -> dict:
    """Convert optimizer state as it was read to the form that our optimizer, made of ``parts``, loads.

    Tensors already have our layout. What differs are the parameter groups (step count, learning rate) in ``saved``, the
    optimizer's state that is not tensors: a plain optimizer writes them with their parameters, a
    distributed one without; with expert parallelism Megatron chains two optimizers (dense and expert parameters), whose
    groups sit under 0 and 1.
    """
    sources = [saved[index] for index in (0, 1)] if 0 in saved else [saved]
    pieces = [state[index] for index in range(len(parts))] if len(parts) > 1 else [state]
    was_distributed = any("param_state_sharding_type" in source for source in sources)
    was_float32 = "param_groups" in sources[0]  # of a plain optimizer; in bfloat16 it is nested below the main weights
    same_kind = was_distributed == ("param_state" in pieces[0]) and was_float32 == ("state" in pieces[0])
    if len(sources) == len(parts) and same_kind:
        return state
    found = {_identity(group): group for source in sources for group in _groups(source)}
    fitted = [_fit_part(piece, part, found) for piece, part in zip(pieces, parts)]
    return dict(enumerate(fitted)) if len(parts) > 1 else fitted[0]


def _keep_own_settings(state: dict, parts: list) -> None:
    """Give the parameter groups in ``state`` the settings of the optimizer that loads it; in place.

    A run may be resumed with another learning rate, weight decay or Adam decay. Megatron tells groups apart by some of
    these and silently takes the others from the checkpoint; here the config's value wins, and only the step count is
    the checkpoint's.
    """
    for index, part in enumerate(parts):
        piece = state[index] if len(parts) > 1 else state
        own = {_identity(group): group for group in part.optimizer.param_groups}
        for group in _groups(piece):
            group.update({key: value for key, value in own[_identity(group)].items() if key not in ("params", "step")})


def _groups(state: dict) -> list[dict]:
    return state["param_groups"] if "param_groups" in state else state.get("optimizer", {}).get("param_groups", [])


def _fit_part(piece: dict, part, found: dict[tuple, dict]) -> dict:
    own = part.optimizer.state_dict()["param_groups"]
    mine = ("params", "is_expert_parallel")
    groups = [{**found[_identity(group)], **{key: group[key] for key in mine if key in group}} for group in own]
    if "param_state" in piece:
        groups = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        kept = {"param_state": piece["param_state"], "param_state_sharding_type": _SHARDING}
        return {"optimizer": {"param_groups": groups}, **kept}
    if "state" in piece:  # in float32 torch's own state is at the top level
        return {"param_groups": groups, "state": piece["state"]}
    rest = {key: value for key, value in piece.items() if key != "param_groups"}
    return {**rest, "optimizer": {**piece["optimizer"], "param_groups": groups}}


_STRUCTURE = ("wd_mult", "lr_mult", "is_decoupled_lr")
"""Keys that identify a parameter group. Megatron's own identity also has the settings of the schedule (``max_lr``,
``min_lr``, ...), which may change between starts, and whether the group holds experts, whose settings equal the
others'."""


def _identity(group: dict) -> tuple:
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in _STRUCTURE)


def _random_object() -> ShardedObject:
    """This rank's random state, stored under its rank; read back only where the ranks are the same."""
    return ShardedObject("random", _random_state(), (dist.get_world_size(),), (dist.get_rank(),))


def _random_state() -> dict:
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "streams": get_cuda_rng_tracker().get_states(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["streams"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
