"""Steps until a small Qwen2 fills 16 unconnected fields right, with credit by span and by sequence.

    python tests/benchmarks/span_credit.py --seeds 0 1 2 --threshold 0.7

The model is first trained to write 16 labels, each followed by a random one of four values. Each field has one right
value and its own reward component, which is about the token of the value. The advantages are those of the package.
``transformers`` samples, and torch's AdamW trains, on one thread.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from gdpo_nemo.config.load import load_config
from gdpo_nemo.data.records import Group, Prompt, Trajectory
from gdpo_nemo.rollouts.credit import advantages_of, by_span

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
FIELDS, VALUES, VOCABULARY, START = 16, 4, 64, 0
PROMPTS, SAMPLES, WARM_UP = 2, 16, 200
LABELS = torch.arange(30, 30 + FIELDS)
PROMPT = Prompt("p", np.zeros(1, np.int32), "", "e")


def start_model(seed: int):
    """Return a model that writes every label and a random value after it."""
    torch.manual_seed(seed)
    shape = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
    config = Qwen2Config(vocab_size=VOCABULARY, intermediate_size=192, tie_word_embeddings=True, **shape)
    model = AutoModelForCausalLM.from_config(config).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.0)
    for _ in range(WARM_UP):
        values = torch.randint(1, 1 + VALUES, (24, FIELDS))
        rows = torch.stack([LABELS.expand(24, FIELDS), values], 2).reshape(24, -1)
        update(model, optimizer, torch.cat([torch.full((24, 1), START), rows], 1), torch.ones(24, 2 * FIELDS))
    return model


def update(model, optimizer, ids: torch.Tensor, advantages: torch.Tensor) -> None:
    """Make one update on sampled tokens [samples, 1 + tokens] with advantages [samples, tokens]."""
    logprobs = model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    optimizer.zero_grad()
    (-(advantages * logprobs).mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@torch.no_grad()
def sample(model) -> torch.Tensor:
    """Sample the labels and values of every sample: [samples, 1 + tokens]."""
    ids = token = torch.full((PROMPTS * SAMPLES, 1), START)
    cache = None
    for _ in range(2 * FIELDS):
        output = model(token, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        token = torch.multinomial(output.logits[:, -1].softmax(-1), 1)
        ids = torch.cat([ids, token], 1)
    return ids


def token_advantages(right: np.ndarray, credit: str) -> np.ndarray:
    """Return the advantages of all tokens, [samples, tokens], for right and wrong values [samples, fields]."""
    weights = ", ".join(f"f{k}: 1" for k in range(FIELDS))
    config = load_config(DEMO, [f"gdpo.credit={credit}", f"gdpo.rewards={{{weights}}}"])
    spans = {f"f{k}": ((2 * k + 1, 2 * k + 2),) for k in range(FIELDS)}
    tokens, logprobs = np.zeros(2 * FIELDS, np.int32), np.zeros(2 * FIELDS, np.float32)
    trajectories = [
        Trajectory(PROMPT, i % SAMPLES, tokens, logprobs, 0, "", "stop",
                   {f"f{k}": float(value) for k, value in enumerate(row)}, reward_tokens=spans)
        for i, row in enumerate(right)
    ]  # fmt: skip
    groups = [Group(PROMPT, trajectories[i : i + SAMPLES]) for i in range(0, len(trajectories), SAMPLES)]
    found = advantages_of(groups, config)
    values = by_span(found, trajectories) if credit == "span" else found.values.tolist()
    return np.stack([np.broadcast_to(value, 2 * FIELDS) for value in values]).astype(np.float32)


def steps_to(threshold: float, credit: str, seed: int, model, lr: float, most: int) -> str:
    """Return the number of steps until the mean share of right fields of five steps reaches the threshold."""
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
    wanted = torch.from_numpy(np.random.default_rng(seed).integers(1, 1 + VALUES, FIELDS))
    shares: list[float] = []
    for step in range(1, most + 1):
        ids = sample(model)
        right = (ids[:, 2::2] == wanted).numpy()
        shares.append(float(right.mean()))
        if step >= 5 and np.mean(shares[-5:]) >= threshold:
            return f"{step} steps"
        update(model, optimizer, ids, torch.from_numpy(token_advantages(right, credit)))
    return f"not in {most} steps (share {np.mean(shares[-5:]):.3f})"


def main() -> None:
    """Print the steps for each seed and credit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threshold", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in options.seeds:
        start = start_model(seed)
        for credit in ("span", "sequence"):
            result = steps_to(options.threshold, credit, seed, copy.deepcopy(start), options.lr, options.steps)
            print(f"seed {seed}, credit {credit}: {result}", flush=True)


if __name__ == "__main__":
    main()
