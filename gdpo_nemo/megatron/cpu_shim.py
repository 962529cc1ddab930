"""Import hook that lets the installed megatron-core run without CUDA.

Functions of megatron-core refer to CUDA by literals such as ``device="cuda"`` and by attributes such as
``torch.cuda.current_device``. Patching torch would affect every other library in the process. Instead, the hook
rewrites the *code objects* of megatron-core's functions while its modules are imported. The hook does not change
module-level code, which refers to classes that exist only under ``torch.cuda``. torch still reports that CUDA is not
available.

If CUDA is available, ``install`` does nothing, so GPU runs execute stock megatron-core.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

_PACKAGE = "megatron.core"
# Modules that are not rewritten: they never run on CPU, and some cannot be imported without their CUDA literals.
_EXCLUDED = tuple(
    f"{_PACKAGE}.{name}"
    for name in ("inference", "export", "resharding", "distributed.fsdp", "energy_monitor", "nccl_allocator")
)
# Replacement of torch.cuda by module (default: torch.cpu). torch.random contains the functions for random states.
_REPLACEMENTS = {f"{_PACKAGE}.tensor_parallel.random": "random"}
_NOT_COMPILED = (_PACKAGE, "emerging_optimizers")
_FOR_GPUS = ("transformer_engine", "apex")
"""Libraries whose optimizers and kernels megatron-core uses if they are installed, but which require a GPU."""


def install() -> bool:
    """Install the import hook and return True, or return False if CUDA is available.

    Call this function before ``import megatron.core``.

    Raises:
        RuntimeError: if megatron.core is already imported, because its functions can then no longer be rewritten.
    """
    if torch.cuda.is_available():
        return False
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return True
    if _PACKAGE in sys.modules:
        raise RuntimeError("megatron.core was imported before gdpo_nemo.megatron.runtime.prepare()")
    for name in _FOR_GPUS:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # from now on, the import fails
    sys.meta_path.insert(0, _Finder())
    _use_cpu_random_states()
    _pad_uneven_collectives()
    _skip_token_count_sync()
    _fix_shape_exchange_of_two_stages()
    return True


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith(_PACKAGE + ".") or fullname.startswith(_EXCLUDED):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):
        module = super().get_code(fullname)
        if module is None:
            raise ImportError(f"the source of {fullname} was not found", name=fullname)
        replacement = _REPLACEMENTS.get(fullname, "cpu")
        constants = tuple(_rewrite(c, replacement) if isinstance(c, types.CodeType) else c for c in module.co_consts)
        return module.replace(co_consts=constants)

    def exec_module(self, module):
        with _compilation_disabled():
            super().exec_module(module)
        if module.__name__ == f"{_PACKAGE}.jit":
            # torch.compile on CPU needs a C++ compiler and minutes of warm-up. The fused kernels exist only for CUDA.
            module.disable_jit_fuser()


@contextlib.contextmanager
def _compilation_disabled() -> Iterator[None]:
    """Make ``torch.compile`` return functions of megatron-core and its optimizers unchanged in this block.

    megatron-core compiles one function, in a router for inference, and ``emerging_optimizers``, which it imports, those
    of optimizers other than Muon. The compilation imports torch's compiler, which takes 2 s of CPU time.
    """
    stock = torch.compile

    def compile_others(model: Any = None, **options: Any) -> Any:
        module = getattr(model, "__module__", None) or ""
        return model if module.startswith(_NOT_COMPILED) else stock(model, **options)

    torch.compile = compile_others
    try:
        yield
    finally:
        torch.compile = stock


def _rewrite(code: types.CodeType, replacement: str) -> types.CodeType:
    """Replace CUDA literals in a function's code with CPU literals, and ``torch.cuda`` with ``replacement``."""

    def constant(value):
        if isinstance(value, types.CodeType):
            return _rewrite(value, replacement)
        if isinstance(value, str) and value == "cuda":
            return "cpu"
        if isinstance(value, str) and value.startswith("torch.cuda.") and value.endswith("Tensor"):
            return "torch." + value.removeprefix("torch.cuda.")
        if isinstance(value, tuple):
            return tuple(constant(v) for v in value)
        return value

    return code.replace(
        co_consts=tuple(constant(c) for c in code.co_consts),
        co_names=tuple(replacement if name == "cuda" else name for name in code.co_names),  # includes torch.cuda
    )


def _use_cpu_random_states() -> None:
    """Replace Megatron's named CUDA random streams (dropout, initialisation) with streams of the CPU generator."""
    from megatron.core.tensor_parallel import random as megatron_random

    class CpuRandomStates(megatron_random.CudaRNGStatesTracker):
        """Named random streams on the CPU generator."""

        def add(self, name, seed):
            self._is_initialized = True
            if seed in self.seeds_ or name in self.states_:
                raise ValueError(f"random stream {name!r} with seed {seed} already exists")
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name=megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME):
            if name not in self.states_:
                raise KeyError(f"random stream {name!r} was never added")
            # Replace the state of the global generator and restore it afterwards, like Megatron's tracker for CUDA.
            global_state = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(global_state)

    megatron_random.CudaRNGStatesTracker = CpuRandomStates
    megatron_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _pad_uneven_collectives() -> None:
    """Pad uneven collectives (expert token exchange) to parts of equal size, because gloo requires equal parts."""
    from megatron.core.tensor_parallel import mappings

    stock_gather = mappings._gather_along_first_dim
    stock_scatter = mappings._reduce_scatter_along_first_dim

    def padded(x: torch.Tensor, rows: int) -> torch.Tensor:
        return F.pad(x, (0, 0) * (x.dim() - 1) + (0, rows - x.size(0))).contiguous()

    def gather(x, group, output_split_sizes=None, use_global_buffer=False):
        if output_split_sizes is None or group.size() == 1:
            return stock_gather(x, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        parts = [x.new_empty((max(sizes), *x.shape[1:])) for _ in sizes]
        dist.all_gather(parts, padded(x, max(sizes)), group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes)])

    def reduce_scatter(x, group, input_split_sizes=None, use_global_buffer=False):
        if input_split_sizes is None or group.size() == 1:
            return stock_scatter(x, group, input_split_sizes, use_global_buffer)
        sizes = [int(size) for size in input_split_sizes]
        parts = [padded(part, max(sizes)) for part in x.split(sizes)]
        local = torch.empty_like(parts[0])
        dist.reduce_scatter(local, parts, group=group)
        return local[: sizes[group.rank()]].contiguous()

    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = reduce_scatter


def _skip_token_count_sync() -> None:
    """Remove the MoE dispatcher's wait for token counts on a CUDA stream. On CPU, it is not needed."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    def convert_counts(self, point, tokens_per_expert=None):
        if not self.drop_and_pad and point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                value = getattr(self, name)
                if torch.is_tensor(value):
                    setattr(self, name, value.numpy())
        return tokens_per_expert

    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = convert_counts


def _fix_shape_exchange_of_two_stages() -> None:
    """Exchange tensor shapes correctly if the previous and the next pipeline stage are the same rank.

    Megatron posts (send prev, receive prev, send next, receive next), and messages between two ranks are matched in
    order. The peer would therefore mistake a message to the previous stage for a message from *its* previous stage.
    This happens in interleaved pipelines of two stages, and gloo then aborts because the sizes are wrong.
    """
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    stock = P2PCommunicator._communicate_shapes

    def exchange(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next):
        if self.prev_rank != self.next_rank:
            return stock(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next)
        peer = self.next_rank
        group = self.pp_group
        sent = [torch.tensor(t.size()) for t in (tensor_send_prev, tensor_send_next) if t is not None]
        sources = [name for name, expected in (("next", recv_next), ("prev", recv_prev)) if expected]
        received = {name: torch.empty(3, dtype=torch.int64) for name in sources}
        pending = [dist.isend(shape, peer, group=group) for shape in sent]
        pending += [dist.irecv(shape, peer, group=group) for shape in received.values()]
        for request in pending:
            if request is not None:  # torch returns None only on ranks outside the group
                request.wait()
        return tuple(received[name].tolist() if name in received else [0, 0, 0] for name in ("prev", "next"))

    P2PCommunicator._communicate_shapes = exchange
