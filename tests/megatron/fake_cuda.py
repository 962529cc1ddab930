"""A GPU that is not there: torch's fake tensors on ``cuda``, with what the driver would be asked for stubbed out.

Every operation has the shape, type and device that it would have on a GPU, and refuses partners on another device;
nothing is computed. ``Recorder`` counts what would cost time. Only for a process that imports Megatron afterwards and
does nothing else: ``torch.cuda`` and a few methods of tensors are replaced for good.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the backend "fake"
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cuda", 0)
_NO_KERNEL = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "record_stream",
    "set_",
    "lift_fresh",
    "detach",
    "alias",
)


class Stream:
    """A stream that knows what it waited for."""

    def __init__(self, *arguments: object, **options: object):
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)

    def synchronize(self) -> None:
        pass


def install() -> FakeTensorMode:
    """Let torch believe in one GPU; returns the mode in which its tensors are made."""
    torch._C._ensureCUDADeviceGuardSet()  # one that does nothing, as there is no driver
    torch._C._set_only_lift_cpu_tensors(True)
    dist.all_gather_object = lambda found, mine, group=None: found.__setitem__(0, mine)  # its bytes would be fake
    main = Stream()
    stubs: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (9, 0),
        "Stream": Stream,
        "Event": Stream,
        "current_stream": lambda *_: main,
        "stream": lambda _: contextlib.nullcontext(),
        "get_rng_state": lambda *_, **__: torch.zeros(16, dtype=torch.uint8),
    }
    for name in (
        "_lazy_init",
        "set_device",
        "synchronize",
        "empty_cache",
        "set_rng_state",
        "manual_seed",
        "_lazy_call",
    ):
        stubs[name] = lambda *_, **__: None
    for name, stub in stubs.items():
        setattr(torch.cuda, name, stub)
        if hasattr(torch.cuda.random, name):
            setattr(torch.cuda.random, name, stub)
    torch.Tensor.cuda = lambda tensor, *_, non_blocking=False, **__: tensor.to(DEVICE, non_blocking=non_blocking)
    # Megatron makes its parameters on the GPU in the policy's precision; torch cannot convert fake ones in place.
    torch.nn.Module.cuda = torch.nn.Module.bfloat16 = lambda module, *_: module
    dist._coalescing_manager = lambda *_, **__: contextlib.nullcontext()  # has no fake form
    torch.Tensor.record_stream = lambda tensor, stream: None
    plain = torch.Tensor.data

    def set_data(self: FakeTensor, value: FakeTensor) -> None:
        plain.__set__(self, value)
        self.fake_device = value.fake_device  # torch forgets it

    FakeTensor.data = property(plain.__get__, set_data)
    return FakeTensorMode(allow_non_fake_inputs=True)


class Recorder(TorchDispatchMode):
    """Counts, inside the fake mode, what happens to tensors on the GPU.

    ``counts``: ``launches`` of kernels (an operation of aten is one), ``copies`` between host and device, of these
    ``blocking`` ones, and ``syncs``, where the process waits for a value. Where a value decides what comes next, it is
    1, or true everywhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.where: list[tuple[str, str]] = []
        """What blocked, with the line of ours that asked for it."""
        self._pinned: dict[int, Any] = {}
        FakeTensor.tolist = self._reading(torch.Tensor.tolist, lambda t: np.ones(t.shape).tolist())
        torch.Tensor.numpy = self._reading(torch.Tensor.numpy, lambda t: np.ones(t.shape, _numpy_type(t.dtype)))
        made = torch.tensor

        def tensor(data: Any, **options: Any) -> torch.Tensor:
            device = torch.device(options.pop("device", None) or "cpu")
            data = torch.utils._pytree.tree_map_only(FakeTensor, lambda value: value.item(), data)
            host = made(data, **options)
            if device.type == "cpu":
                return host
            self.counts["copies"] += 1
            self._note("blocking", "torch.tensor")
            return torch.empty(host.shape, dtype=host.dtype, device=device)

        torch.tensor = tensor

    def _reading(self, plain: Any, values: Any) -> Any:
        def read(tensor: torch.Tensor, *arguments: object, **options: object) -> Any:
            if not isinstance(tensor, FakeTensor):
                return plain(tensor, *arguments, **options)
            if tensor.is_cuda:
                self._note("syncs", plain.__name__)
            return values(tensor)

        return read

    def _note(self, kind: str, what: str) -> None:
        ours = [
            f for f in traceback.extract_stack()[:-2] if "/gdpo_nemo/" in f.filename or "/megatron/core/" in f.filename
        ]
        self.counts[kind] += 1
        self.where.append((f"{kind} {what}", f"{ours[-1].filename}:{ours[-1].lineno}" if ours else ""))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        on_gpu = any(t.device.type == "cuda" for t in tensors)
        if name == "_local_scalar_dense":
            return self._scalar(tensors[0])
        if name == "_pin_memory":
            return self._keep(torch.empty_like(tensors[0]))
        if name == "index" and any(t.dtype == torch.bool for t in args[1] if t is not None):
            if on_gpu:
                self._note("syncs", "boolean mask")
            args = (args[0], [_everywhere(t) if t is not None and t.dtype == torch.bool else t for t in args[1]])
        out = func(*args, **kwargs)
        if kwargs.get("pin_memory"):
            self._keep(out)
        self._count(func, name, tensors, out, kwargs, args)
        return out

    def _scalar(self, tensor: torch.Tensor) -> Any:
        if tensor.device.type == "cuda":
            self._note("syncs", "item")
        return True if tensor.dtype == torch.bool else 1.0 if tensor.dtype.is_floating_point else 1

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def _count(self, func: Any, name: str, tensors: list, out: Any, kwargs: dict, args: tuple) -> None:
        results = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        devices = {t.device.type for t in (*tensors, *results)}
        if "cuda" not in devices:
            return
        if name in ("_to_copy", "copy_") and devices == {"cpu", "cuda"}:
            host = next(t for t in (*tensors, *results) if t.device.type == "cpu")
            waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            pinned = host.untyped_storage()._cdata in self._pinned
            self.counts["copies"] += 1
            if waits or not pinned:
                self._note("blocking", name)
        elif func.namespace != "prim" and name not in _NO_KERNEL and not func.is_view:
            self.counts["launches"] += 1


def _everywhere(mask: torch.Tensor) -> torch.Tensor:
    return torch.arange(mask.numel(), device=mask.device)


def _numpy_type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Engine:
    """Autograd's engine, node by node: torch's own asks the driver for its streams, even for fake tensors.

    Hooks of tensors do not run; of accumulated gradients those of Megatron's data parallelism do.
    """

    def __init__(self) -> None:
        self.hooks: dict[int, Any] = {}

    def record_hooks(self) -> None:
        """Before a model is wrapped."""
        from megatron.core.distributed import DistributedDataParallel

        plain = DistributedDataParallel._make_backward_post_hook

        def make(wrapper: Any, parameter: torch.nn.Parameter) -> Any:
            self.hooks[id(parameter)] = plain(wrapper, parameter)
            return self.hooks[id(parameter)]

        DistributedDataParallel._make_backward_post_hook = make

    @torch.no_grad()
    def backward(self, root: torch.Tensor, grad_tensors: Any = None, **unused: object) -> None:
        torch._C._current_graph_task_id = lambda: id(root)  # else a checkpoint recomputes for each of its tensors
        start = root.grad_fn
        waits: Counter[Any] = Counter()
        found = [start]
        for node in found:
            for child, _ in node.next_functions:
                if child is not None:
                    waits[child] += 1
                    if waits[child] == 1:
                        found.append(child)
        given: dict[Any, dict[int, torch.Tensor]] = defaultdict(dict)
        given[start][0] = torch.ones_like(root)
        ready = [start]
        while ready:
            node = ready.pop()
            gradients = self._apply(node, given.pop(node, {}))
            for (child, place), gradient in zip(node.next_functions, gradients):
                if child is None:
                    continue
                if gradient is not None:
                    before = given[child].get(place)
                    given[child][place] = gradient if before is None else before + gradient
                waits[child] -= 1
                if not waits[child]:
                    ready.append(child)

    def _apply(self, node: Any, given: dict[int, torch.Tensor]) -> tuple:
        if not given:
            return (None,) * len(node.next_functions)
        if hasattr(node, "variable"):
            node.variable.grad = given[0] if node.variable.grad is None else node.variable.grad + given[0]
            if id(node.variable) in self.hooks:
                self.hooks[id(node.variable)]()
            return ()
        values = [given.get(i) for i in range(len(node._input_metadata))]
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            values = [_zeros(m) if v is None else v for v, m in zip(values, node._input_metadata)]
            out = node.apply(*values)
        else:
            out = node(*values)
        return out if isinstance(out, tuple) else (out,)


def _zeros(metadata: Any) -> torch.Tensor:
    return torch.zeros(metadata.shape, dtype=metadata.dtype, device=metadata.device)


def make_policy(folder: Any, config: Any, keep_reference: bool = False) -> tuple[Any, FakeTensorMode, Recorder]:
    """A policy of the shape in the folder's ``config.json`` on a GPU that is not there, alone in its world.

    Returns:
        the policy, and the modes in which it is to be used.
    """
    mode = install()
    from gdpo_nemo.megatron import runtime

    here = runtime.prepare()
    dist.init_process_group("fake", rank=0, world_size=1, store=dist.HashStore())
    runtime.lay_out(config.megatron_cfg, 1)
    from gdpo_nemo.megatron import conversion
    from gdpo_nemo.megatron.policy import Policy
    from gdpo_nemo.models import hf_folder

    engine = _Engine()
    engine.record_hooks()
    torch.autograd.backward = engine.backward
    conversion.load_hf = hf_folder.open_weights = lambda *_, **__: None  # values there are none
    recorder = Recorder()
    with mode, recorder:
        return Policy(config, folder, here, 10, keep_reference=keep_reference), mode, recorder
