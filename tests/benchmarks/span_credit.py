"""Steps until a small Qwen2 fills unconnected fields right, with credit by span and by sequence.

    python tests/benchmarks/span_credit.py --fields 16 --samples 8 --seeds 0 1 2

A prompt contains a label for each field. The model chooses one of eight values after each label, independently of the
values of the other fields, so one forward pass gives the distribution of a whole answer. Each field has one right value
and its own reward component, which is about the token of the value. The advantages are those of the package, and
torch's AdamW trains on one thread. For each seed, both kinds of credit have their own best learning rate of ``--lr``.
"""

from __future__ import annotations

import argparse
import copy
from functools import cache
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.schema import Config
from gdpo_nemo.data.records import Group, Prompt, Trajectory
from gdpo_nemo.rollouts.credit import advantages_of, by_span

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"
VALUES, VOCABULARY, START, FIRST_LABEL = 8, 64, 0, 30
PROMPT = Prompt("p", np.zeros(1, np.int32), "", "e")


def start_model(seed: int):
    """Return a random model."""
    torch.manual_seed(seed)
    shape = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
    config = Qwen2Config(vocab_size=VOCABULARY, intermediate_size=192, tie_word_embeddings=True, **shape)
    return AutoModelForCausalLM.from_config(config).float()


def value_logprobs(model, fields: int) -> torch.Tensor:
    """Return the log-probs of the values of each field: [fields, VALUES]."""
    labels = torch.arange(FIRST_LABEL, FIRST_LABEL + fields)
    logits = model(torch.cat([torch.tensor([START]), labels])[None]).logits[0, 1:, 1 : 1 + VALUES]
    return logits.log_softmax(-1)


@cache
def config_of(credit: str, fields: int) -> Config:
    """Return the config with a component of weight 1 for each field."""
    weights = ", ".join(f"f{k}: 1" for k in range(fields))
    return load_config(DEMO, [f"gdpo.credit={credit}", f"gdpo.rewards={{{weights}}}"])


def token_advantages(right: np.ndarray, credit: str) -> np.ndarray:
    """Return the advantages of all values for right and wrong values, both [samples, fields]."""
    fields = right.shape[1]
    spans = {f"f{k}": ((k, k + 1),) for k in range(fields)}
    tokens, logprobs = np.zeros(fields, np.int32), np.zeros(fields, np.float32)
    trajectories = [
        Trajectory(PROMPT, i, tokens, logprobs, 0, "", "stop",
                   {f"f{k}": float(value) for k, value in enumerate(row)}, reward_tokens=spans)
        for i, row in enumerate(right)
    ]  # fmt: skip
    found = advantages_of([Group(PROMPT, trajectories)], config_of(credit, fields))
    values = by_span(found, trajectories) if credit == "span" else found.values.tolist()
    return np.stack([np.broadcast_to(value, fields) for value in values]).astype(np.float32)


def steps_to(options: argparse.Namespace, credit: str, seed: int, model, lr: float, most: int) -> int | None:
    """Return the number of updates until the expected share of right fields reaches the threshold.

    None: not within ``most`` updates.
    """
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
    wanted = torch.from_numpy(np.random.default_rng(seed).integers(0, VALUES, options.fields))
    for step in range(most):
        logprobs = value_logprobs(model, options.fields)
        share = logprobs.exp().gather(1, wanted[:, None]).mean().item()
        if share >= options.threshold:
            return step
        values = torch.multinomial(logprobs.detach().exp(), options.samples, replacement=True)  # [fields, samples]
        advantages = torch.from_numpy(token_advantages((values == wanted[:, None]).T.numpy(), credit))
        optimizer.zero_grad()
        (-(advantages.T * logprobs.gather(1, values)).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return None


def fewest_steps(options: argparse.Namespace, credit: str, seed: int, start) -> int:
    """Return the number of steps with the best learning rate. A learning rate stops when another one was faster."""
    fewest, best = options.steps, None
    for lr in options.lr:
        found = steps_to(options, credit, seed, copy.deepcopy(start), lr, fewest)
        fewest, best = (fewest, best) if found is None else (found, lr)
    print(f"seed {seed}, credit {credit}: {fewest} steps with lr {best}", flush=True)
    return fewest


def main() -> None:
    """Print the steps for each seed and credit, and the ratio of the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fields", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="samples per step, one group")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 3e-3, 3e-4])
    parser.add_argument("--steps", type=int, default=1000, help="largest number of steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[int]] = {"span": [], "sequence": []}
    for seed in options.seeds:
        start = start_model(seed)
        for credit, steps in found.items():
            steps.append(fewest_steps(options, credit, seed, start))
    span, sequence = (float(np.median(steps)) for steps in found.values())
    print(f"medians: span {span:g}, sequence {sequence:g}, ratio {sequence / span:.2f}")


if __name__ == "__main__":
    main()
