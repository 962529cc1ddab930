"""What the tests of adapters run on ranks; see ``rank_cases``."""

from __future__ import annotations

import numpy as np
from rank_cases import build_policy, exported, limited_logits, spread, train


def starting_a(place, init) -> np.ndarray:
    """[64, 192]: a starting A."""
    from gdpo_nemo.megatron.adapter_layers import initial_a

    return initial_a("self_attn.q_proj", 64, 192, 3, init).numpy()


def lora_updates(place, folder, batch, lora, adapter_folder=None):
    """Two updates of adapters: what each measured, and the merged weights."""
    from gdpo_nemo.weights.adapters import write_adapter

    policy = build_policy(place, folder, lora=lora)
    steps = train(policy, batch, spread(place, batch), 2)
    matrices = dict(policy.update())
    if adapter_folder and place.rank == 0:
        write_adapter(adapter_folder, matrices, policy.adapters)
    return steps, exported(policy)


def lora_reference(place, folder, batch, lora):
    """Log-probs before an update of adapters and after it, with the adapters and without; whether no copy is kept."""
    policy = build_policy(place, folder, lora=lora, keep_reference=True)
    assignment = spread(place, batch)
    start = policy.logprobs(batch, assignment)
    train(policy, batch, assignment, 1)
    moved = policy.logprobs(batch, assignment)
    return start, moved, policy.logprobs(batch, assignment, reference=True), policy._reference is None


def lora_shipments(place, folders, precision):
    """Per model folder, after an update of adapters: the merged weights that an export gives, and the packed
    adapters."""
    from gdpo_nemo.weights.manifest import pack

    found = {}
    for name, (folder, batch, lora) in folders.items():
        policy = build_policy(place, folder, precision, lora=lora)
        train(policy, batch, spread(place, batch), 1)
        found[name] = exported(policy), pack(policy.update(), 1, policy.adapters)
    return found if place.rank == 0 else {}


def lora_checkpoint(place, folder, batch, lora, checkpoint, saves):
    """Saves after one update, or loads; then two more updates."""
    from gdpo_nemo.megatron.checkpoint import load_checkpoint, save

    policy = build_policy(place, folder, lora=lora)
    assignment = spread(place, batch)
    if saves:
        train(policy, batch, assignment, 1)
        save(policy, checkpoint)
    else:
        load_checkpoint(policy, checkpoint)
    return train(policy, batch, assignment, 2)


def lora_targets_refused(place, folder, lora):
    """The error of adapters that cannot be."""
    from gdpo_nemo.utils.errors import ConfigError

    try:
        build_policy(place, folder, lora=lora)
    except ConfigError as error:
        return str(error)
    return ""


def lora_head_gradients(place, folder, lora) -> tuple[np.ndarray, np.ndarray]:
    """The gradient of A of lm_head's adapter: with logits in chunks that are computed twice, and with the same chunks
    kept."""
    import torch

    (model,) = build_policy(place, folder, lora=lora).chunks
    (pair,) = model.output_layer.adapters.pairs
    model.train()
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(12, pair.a.size(1), generator=generator)
    targets = torch.randint(0, model.real_vocab_size, (12,), generator=generator)
    with torch.no_grad():
        pair.b.normal_(0.0, 1.0, generator=generator)

    def gradient(evaluate):
        torch.manual_seed(11)
        (found,) = torch.autograd.grad(evaluate()[:, 0].sum(), [pair.a])
        return found.numpy().copy()

    weight = model.output_layer.weight
    with limited_logits(4 * 5 * weight.size(0)):
        again = gradient(lambda: model._evaluate(hidden, targets))
    chunks = zip(hidden.split(5), targets.split(5))
    return again, gradient(lambda: torch.cat([model._evaluate_chunk(h, weight, t) for h, t in chunks]))


def lora_start(place, folder, lora):
    """The pairs of matrices before any update, by Hugging Face module."""
    return build_policy(place, folder, lora=lora).adapter()


def continued_adapters(place, folder, adapter, batch, settings):
    """Log-probs of a policy that starts with the matrices of the PEFT folder ``adapter``; these as the policy has
    them, and after an update."""
    from pathlib import Path

    from gdpo_nemo.models.peft import read_peft_adapter
    from gdpo_nemo.weights.adapters import read_pairs

    policy = build_policy(place, folder, lora=settings, optimizer=dict(lr=1e-6))
    policy.start_adapters(read_pairs(read_peft_adapter(Path(adapter), "adapter"), Path(folder), "adapter"))
    assignment = spread(place, batch)
    found = [policy.logprobs(batch, assignment, reference=reference) for reference in (False, True)]
    kept = []
    for _ in range(2):
        kept.append({module: tuple(m.clone() for m in pair) for module, pair in policy.adapter().items()})
        train(policy, batch, assignment, 1)
    return found, kept
