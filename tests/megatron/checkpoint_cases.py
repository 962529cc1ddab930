"""What the tests of checkpoints run on ranks; see ``rank_cases``."""

from __future__ import annotations

import numpy as np
from rank_cases import build_policy, exported, spread, train


def load_failure(place, folder, break_it) -> str:
    """The message with which loading fails when ``break_it(name, tensor)`` changes what the reader returns."""
    import torch
    from transformers import AutoConfig

    from gdpo_nemo.megatron.conversion import load_hf
    from gdpo_nemo.megatron.model import build_chunks
    from gdpo_nemo.models.hf_folder import open_weights

    hf = AutoConfig.from_pretrained(folder)
    _, chunks = build_chunks(hf, place.layout, torch.float32)
    read = open_weights(folder)
    try:
        load_hf(chunks, lambda name: break_it(name, read(name)), hf)
    except (KeyError, ValueError) as error:
        return str(error)
    return ""


def save_and_go_on(place, folder, batch, checkpoint, count=2, precision="float32", train_tower=False):
    """One update, a checkpoint, and ``count`` more updates."""
    from gdpo_nemo.megatron.checkpoint import save

    policy = build_policy(place, folder, precision, train_tower=train_tower)
    assignment = spread(place, batch)
    train(policy, batch, assignment, 1)
    save(policy, checkpoint)
    return train(policy, batch, assignment, count)


def save_beside_training(place, folder, batch, checkpoint, count=2):
    """As ``save_and_go_on``, but on a disk so slow that nothing is written before those updates are done."""
    import threading

    from gdpo_nemo.megatron.checkpoint import Save

    trained = threading.Event()

    class SlowDisk(Save):
        def _write(self, *arguments):
            trained.wait(300)
            super()._write(*arguments)

    policy = build_policy(place, folder)
    assignment = spread(place, batch)
    train(policy, batch, assignment, 1)
    save = SlowDisk(policy, checkpoint, background=True)
    rows = train(policy, batch, assignment, count)
    assert not save.is_written
    trained.set()
    save.finish()
    return rows


def tampered_save(place, folder, batch, checkpoint):
    """What a save says when one byte of the weights turns on its way to the disk."""
    from pathlib import Path

    from gdpo_nemo.megatron.checkpoint import Save
    from gdpo_nemo.utils.errors import RunError

    policy = build_policy(place, folder)
    save = Save(policy, checkpoint, background=False)
    weight = next(policy.chunks[0].parameters()).detach().numpy().tobytes()
    file = Path(checkpoint) / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.find(weight) + 1] ^= 64
    file.write_bytes(data)
    try:
        save.finish()
    except RunError as error:
        return str(error)
    return ""


def load_and_go_on(place, folder, batch, checkpoint, count=2, precision="float32", train_tower=False):
    """The updates after a checkpoint."""
    from gdpo_nemo.megatron.checkpoint import load_checkpoint

    policy = build_policy(place, folder, precision, train_tower=train_tower)
    load_checkpoint(policy, checkpoint)
    return train(policy, batch, spread(place, batch), count)


def rewrite(place, folder, checkpoint, target):
    """Load a checkpoint and save it again at this layout."""
    from gdpo_nemo.megatron.checkpoint import load_checkpoint, save

    policy = build_policy(place, folder)
    load_checkpoint(policy, checkpoint)
    save(policy, target)


def continuations(place, folder, batch, checkpoint, starts, precision="float32"):
    """One update and a checkpoint; then for each of ``starts``, keywords of ``build_policy``, one update from there.

    Returns:
        the weights of the checkpoint, and by start (learning rate, announced learning rate, Adam's settings by group,
        weights).
    """
    from gdpo_nemo.algorithms.policy_loss import LossSettings
    from gdpo_nemo.megatron.checkpoint import load_checkpoint, save

    policy = build_policy(place, folder, precision)
    assignment = spread(place, batch)
    train(policy, batch, assignment, 1)
    save(policy, checkpoint)
    saved = exported(policy)
    out = []
    for start in starts:
        policy = build_policy(place, folder, precision, **start)
        load_checkpoint(policy, checkpoint)
        announced = policy.next_learning_rate()
        result = policy.train(batch, assignment, LossSettings())
        groups = [(group["betas"], group["eps"], group["step"]) for group in policy.built.optimizer.param_groups]
        out.append((result.lr, announced, groups, exported(policy)))
    return saved, out


def random_streams(place, folder, checkpoint):
    """Random numbers drawn after a save and again after loading it."""
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from gdpo_nemo.megatron.checkpoint import load_checkpoint, save

    def draw():
        with get_cuda_rng_tracker().fork():
            stream = torch.rand(3)
        return torch.cat((stream, torch.rand(3), torch.from_numpy(np.random.rand(3)).float())).numpy()

    policy = build_policy(place, folder)
    draw()
    save(policy, checkpoint)
    first = draw()
    load_checkpoint(policy, checkpoint)
    return first, draw()


def checkpoint_bytes(place, folder, batch, checkpoint):
    """Bytes that this rank holds, copies to host memory, writes and reads, for one checkpoint.

    Returns:
        dict with ``share`` (its tensors divided by the number of data-parallel ranks), ``copied`` (peak of new tensors
        while a background save starts), ``written`` and ``read`` (by a complete load).
    """
    import gc
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from memory_tracker import TensorBytes
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    from gdpo_nemo.megatron.checkpoint import Save, load_checkpoint

    policy = build_policy(place, folder, "bfloat16")
    train(policy, batch, spread(place, batch), 1)
    made = TensorBytes()
    for tensor in [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]:
        made.add(tensor.untyped_storage())
    before = made.live
    with made:
        save = Save(policy, checkpoint, background=True)
    save.finish()
    files = Path(checkpoint).glob(f"__{dist.get_rank()}_*.distcp")
    written = sum(file.stat().st_size for file in files)
    read = 0
    slice_file = FileSystemReader._slice_file

    def count(self, file, info):
        nonlocal read
        read += info.length
        return slice_file(self, file, info)

    FileSystemReader._slice_file = count
    try:
        load_checkpoint(policy, checkpoint)
    finally:
        FileSystemReader._slice_file = slice_file
    size = sum(parameter.numel() for chunk in policy.chunks for parameter in chunk.parameters())
    replicas = dist.get_world_size(parallel_state.get_data_parallel_group(with_context_parallel=True))
    share = size * (2 + 12) / replicas  # bfloat16 weights; float32 main weights and two moments
    return dict(share=share, copied=made.peak - before, written=written, read=read)
