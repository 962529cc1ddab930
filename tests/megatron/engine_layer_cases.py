"""What the tests of TransformerEngine's layers run on ranks."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rank_cases import build_policy, spread, train

import gdpo_nemo


def names(place, folder) -> tuple[set[str], set[str], set[str]]:
    """Names in the first chunk: parameters, the state dictionary, what a checkpoint holds."""
    from gdpo_nemo.megatron.checkpoint import _metadata

    (chunk,) = build_policy(place, folder).chunks
    parameters = {name for name, _ in chunk.named_parameters()}
    return parameters, set(chunk.state_dict()), set(chunk.sharded_state_dict(metadata=_metadata()))


_FUSIONS = (
    "apply_rope_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "gradient_accumulation_fusion",
    "moe_permute_fusion",
    "softmax_scale",
)


def fusions(place, folder, lora=None) -> dict[str, Any]:
    """Megatron's flags of the built model; how many modules there are of each class of TransformerEngine's, and how
    many add to the wrapper's gradients themselves."""
    built = build_policy(place, folder, lora=lora).built
    modules = list(built.chunks[0].modules())
    kinds = Counter(
        type(m).__name__ for m in modules if type(m).__module__.startswith(("transformer_engine", _WRAPPED))
    )
    summing = sum(getattr(module, "fuse_wgrad_accumulation", False) for module in modules)
    return {**{name: getattr(built.config, name) for name in _FUSIONS}, "kinds": dict(kinds), "summing": summing}


_WRAPPED = "megatron.core.extensions.transformer_engine"


def packed_arrays(place, folder, batch) -> set[str]:
    """Names of the arrays that make the packings of an update."""
    from unittest.mock import patch

    from gdpo_nemo.megatron import micro_batch

    seen: set[str] = set()
    stock = micro_batch.packing_of

    def noted(lengths, arrays):
        packing = stock(lengths, arrays)
        seen.update(arrays)
        return packing

    with patch.object(micro_batch, "packing_of", noted):
        train(build_policy(place, folder), batch, spread(place, batch), 1)
    return seen


def on_cuda(place, folder) -> dict[str, Any]:
    """The flags of local layers where CUDA is."""
    from unittest.mock import patch

    import torch
    from transformers import AutoConfig

    from gdpo_nemo.megatron.model import transformer_config
    from gdpo_nemo.megatron.model_config import description_of

    with patch("torch.cuda.is_available", lambda: True):
        hf = AutoConfig.from_pretrained(folder)
        config = transformer_config(hf, description_of(hf), place.layout, torch.bfloat16, use_te=False)
    return {name: getattr(config, name) for name in _FUSIONS}


def kernel_calls(place, folder, batch) -> tuple[dict[str, int], int, int, list[str]]:
    """An update: calls of the extension's functions by name, layers, micro-batches, and the weights whose gradients the
    wrapper added itself."""
    from transformer_engine.pytorch.attention import rope

    calls: Counter[str] = Counter()
    policy = build_policy(place, folder)
    assignment = spread(place, batch)
    stock = {name: getattr(rope.tex, name) for name in ("fused_rope_forward", "fused_rope_backward")}

    def counted(name):
        def call(*arguments):
            calls[name] += 1
            return stock[name](*arguments)

        return call

    for name in stock:
        setattr(rope.tex, name, counted(name))
    try:
        train(policy, batch, assignment, 1)
    finally:
        for name, function in stock.items():
            setattr(rope.tex, name, function)
    (chunk,) = policy.chunks
    copied = [name for name, p in chunk.named_parameters() if p.dim() == 2 and not p.grad_added_to_main_grad]
    return dict(calls), policy.built.hf_config.num_hidden_layers, len(assignment), copied


def reads_of_bounds(place, folder, batch) -> int:
    """How often a pass reads the bounds of the sequences back from their device."""
    import torch

    policy = build_policy(place, folder)
    reads = 0
    stock = torch.Tensor.tolist

    def tolist(tensor):
        nonlocal reads
        reads += tensor.dtype == torch.int32
        return stock(tensor)

    torch.Tensor.tolist = tolist
    try:
        policy.logprobs(batch, spread(place, batch))
    finally:
        torch.Tensor.tolist = stock
    return reads


def gathered_order(place, lengths, size) -> list[int]:
    """The tokens of a pack, numbered in its order, as context ranks hold and gather them, put back in order."""
    import numpy as np

    from gdpo_nemo.megatron.packing import local_positions, packing_arrays

    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    gathered = np.concatenate(
        [start + local_positions(length, rank, size) for rank in range(size) for start, length in zip(starts, lengths)]
    )
    return gathered[packing_arrays(lengths, 0, size, rectangles=True)["order"]].tolist()


def bind_calls(place) -> tuple[list[str], int]:
    """Bind every call of the policy's code into Megatron and TransformerEngine to the signature of what is called.

    Returns:
        the calls that do not fit, and the number of those that were bound.
    """
    wrong = []
    bound = 0
    for file in sorted((Path(gdpo_nemo.__file__).parent / "megatron").glob("*.py")):
        tree = ast.parse(file.read_text())
        imported = _imported(tree)
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            target = _called(call.func, imported)
            if target is None:
                continue
            try:
                _bind(call, target)
            except TypeError as error:
                wrong.append(f"{file.name}:{call.lineno}: {error}")
            bound = bound + 1
    return wrong, bound


def _imported(tree: ast.Module) -> dict[str, Any]:
    """What a file imports from the two libraries, by the name that it has there."""
    found = {}
    for module, alias in _imports(tree):
        owner = importlib.import_module(module)
        name = alias.name
        if not hasattr(owner, name):
            importlib.import_module(f"{module}.{name}")
        found[alias.asname or name] = getattr(owner, name)
    return found


def _imports(tree: ast.Module) -> Iterator[tuple[str, ast.alias]]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith(("megatron", "transformer_engine"))
        ):
            yield from ((node.module, alias) for alias in node.names)


def _called(func: ast.expr, imported: dict[str, Any]) -> Any:
    path = []
    while isinstance(func, ast.Attribute):
        path.append(func.attr)
        func = func.value
    if not isinstance(func, ast.Name) or func.id not in imported:
        return None
    target = imported[func.id]
    for name in reversed(path):
        target = getattr(target, name)
    return target


def _bind(call: ast.Call, target: Any) -> None:
    signature = inspect.signature(target)
    positional = [argument for argument in call.args if not isinstance(argument, ast.Starred)]
    keywords = {keyword.arg: keyword for keyword in call.keywords if keyword.arg}
    is_whole = len(positional) == len(call.args) and len(keywords) == len(call.keywords)
    (signature.bind if is_whole else signature.bind_partial)(*positional, **keywords)


def optimizer_methods(place, folder) -> dict[str, list[str]]:
    """Parameters without a default of the optimizer's methods that only GPUs call."""
    optimizer = build_policy(place, folder).built.optimizer
    parts = [optimizer, *getattr(optimizer, "chained_optimizers", [])]
    return {
        f"{type(part).__name__}.{name}": [
            p.name for p in inspect.signature(getattr(part, name)).parameters.values() if p.default is p.empty
        ]
        for part in parts
        for name in ("offload_to_cpu", "restore_from_cpu")
    }


HALF = dict(
    use_precision_aware_optimizer=True,
    exp_avg_dtype="bfloat16",
    exp_avg_sq_dtype="bfloat16",
    main_grads_dtype="bfloat16",
)


def precision_aware(place, folder, batch, out) -> dict[str, Any]:
    """Two updates in bfloat16 with and without the precision-aware optimizer, and two more from the checkpoint of the
    other one: (loss, gradient norm, entropy) of each, and the types of what the optimizer holds."""
    from gdpo_nemo.megatron.checkpoint import load_checkpoint, save

    assignment = spread(place, batch)
    found: dict[str, Any] = {}
    for name, settings in (("plain", {}), ("half", HALF)):
        policy = build_policy(place, folder, "bfloat16", optimizer=settings)
        steps = train(policy, batch, assignment, 2)
        save(policy, out / name)
        found[name] = np.concatenate([steps, train(policy, batch, assignment, 2)])
    optimizer = policy.built.optimizer
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in part.optimizer.state.values():
            found |= {key: str(value.dtype) for key, value in state.items() if hasattr(value, "dtype")}
    found["gradients"] = str(next(policy.chunks[0].parameters()).main_grad.dtype)
    for name, other, settings in (("plain", "half", {}), ("half", "plain", HALF)):
        policy = build_policy(place, folder, "bfloat16", optimizer=settings)
        load_checkpoint(policy, out / other)
        found[f"{name} from {other}"] = train(policy, batch, assignment, 2)
    return found
