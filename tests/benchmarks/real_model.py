"""A real model on 50 prompts: its folder against transformers' own reading of the GGUF that it was made of, and the
policy at several layouts, and what it exports there, against transformers.

    OMP_NUM_THREADS=1 python tests/benchmarks/real_model.py results/models/smollm2_pypi --gguf SmolLM2...Q4_1.gguf

SmolLM2-135M has 9 heads and 3 key-value heads, so its tensor-parallel layouts are 1 and 3. A layout needs 2.5 GB.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "megatron"))

import layouts
import rank_cases
from rank_pool import RankPool

from gdpo_nemo.data.packing import TrainSequence
from gdpo_nemo.models.hf_folder import differences

LIMIT = 1e-4
BUDGET = 1024
"""Tokens of a micro-batch."""
KINDS = (
    "Which number is larger, {a} or {b}? Answer with just the number.",
    "What is {a} plus {b}?",
    "Write a sentence about the year {a}{b}.",
    "def f(x):\n    return x * {a}  - {b}\n",
    "Übersetze  {a} und {b} ins Französische — bitte.",
)


def conversations(tokenizer, count: int) -> list[list[int]]:
    """Tokens of ``count`` prompts in the model's chat template."""
    found = []
    for number in range(count):
        text = KINDS[number % len(KINDS)].format(a=10 + 7 * number % 90, b=10 + 31 * number % 89)
        asked = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        found.append(tokenizer(rendered)["input_ids"])
    return found


@torch.inference_mode()
def logits_of(model, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Of every prompt, [tokens, vocabulary]."""
    return [model(torch.tensor([ids])).logits[0] for ids in prompts]


def logprobs_of(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Of all tokens but the first."""
    return logits[:-1].log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None])[:, 0]


def largest(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference."""
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def of_layout(place, folder: str, batch: list[TrainSequence], out: str):
    """On a rank: log-probs of the batch, and the weights exported to ``out``."""
    from gdpo_nemo.models.hf_folder import write_model

    policy = rank_cases.build_policy(place, folder)
    values = policy.logprobs(batch, rank_cases.spread(place, batch, BUDGET))
    weights = policy.weights()
    if place.rank == 0:
        write_model(out, weights, policy.built.hf_config, folder)
    else:
        for _ in weights:
            pass
    return values


def main() -> int:
    """Compare, and print a line each; status 1 where something differs by more than ``LIMIT``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="Hugging Face folder")
    parser.add_argument("--gguf", help="the file that it was made of")
    parser.add_argument("--layouts", nargs="*", default=["TP1", "TP3", "PP2"])
    parser.add_argument("--prompts", type=int, default=50)
    chosen = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(chosen.model)
    prompts = conversations(tokenizer, chosen.prompts)
    model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.float32).eval()
    wanted = logits_of(model, prompts)
    found = []
    tokens = sum(map(len, prompts))
    if chosen.gguf:
        file = Path(chosen.gguf)
        own = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
        found.append(largest(wanted, logits_of(own, prompts)))
        print(f"{chosen.model}: logits of {len(prompts)} prompts, {tokens} tokens: {found[-1]:.1e} from transformers'")
        del own
    del model
    theirs = [logprobs_of(rows, ids) for rows, ids in zip(wanted, prompts)]
    batch = [sequence(ids) for ids in prompts]
    with tempfile.TemporaryDirectory() as scratch:
        pool = RankPool(Path(scratch))
        try:
            for name in chosen.layouts:
                found.append(compare(pool, name, chosen.model, batch, theirs, prompts, wanted, Path(scratch) / name))
        finally:
            pool.close()
    return int(not all(gap <= LIMIT for gap in found))


def sequence(ids: list[int]) -> TrainSequence:
    """All tokens but the first as a completion."""
    empty = np.zeros(len(ids) - 1, np.float32)
    return TrainSequence(np.array(ids[:1], np.int32), np.array(ids[1:], np.int32), empty)


def compare(pool, name, folder, batch, theirs, prompts, wanted, out) -> float:
    """The largest difference of a layout's log-probs, and of the logits of what it exports."""
    layout = layouts.parse(name)
    shares = pool.run(of_layout, layout.ranks, layout.config, folder, batch, str(out), deadline_s=3600)
    ours = [torch.from_numpy(values) for values in rank_cases.by_sequence(shares, batch)]
    gap = largest(ours, theirs)
    exported = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    again = largest(logits_of(exported, prompts), wanted)
    bits = "bit for bit" if not differences(out, folder) else "not bit for bit"
    print(f"{name}: log-probs {gap:.1e} from transformers', logits of its export {again:.1e}, weights {bits}")
    return max(gap, again)


if __name__ == "__main__":
    sys.exit(main())
