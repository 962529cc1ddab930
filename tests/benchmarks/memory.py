"""The plan's memory per rank beside what real ranks hold on a CPU: their tensors, and the growth of their resident
memory.

    python tests/benchmarks/memory.py [--layouts DP1,TP2+SP,PP2,CP2,DP2+DIST,DP1+FULL] [--sizes 10M,60M,MoE]

Two updates of random sequences in packs of at most 2,048 tokens, float32. "tensors" is the largest sum of live
storages, seen after every operation of forward and backward; "resident" is the high-water mark of the process less what
it held before the model was built, with large blocks going back to the system as soon as they are free. What an
operation allocates inside itself is in the second only. The fullest rank is shown.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "megatron")]
SIZES = {
    "10M": dict(hidden_size=256, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=1024, vocab_size=8192),
    "60M": dict(hidden_size=512, num_hidden_layers=10, num_attention_heads=8, num_key_value_heads=4,
    intermediate_size=2048, vocab_size=16384),
    "MoE": dict(
        hidden_size=256, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
        intermediate_size=1024,
        vocab_size=8192, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256, norm_topk_prob=True,
        router_aux_loss_coef=0.0,
    ),
}  # fmt: skip
BUDGET = 2048


def main() -> None:
    """Prints one line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default="DP1,TP2+SP,PP2,CP2,DP2+DIST,DP1+FULL")
    parser.add_argument("--sizes", default="10M,60M")
    arguments = parser.parse_args()
    os.environ.update(
        MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="65536", MALLOC_ARENA_MAX="1", OMP_NUM_THREADS="1"
    )
    from rank_pool import RankPool

    print(f"{'layout':<10}{'size':<6}{'predicted MB':>14}{'tensors MB':>12}{'ratio':>8}{'resident MB':>13}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.sizes.split(","):
            for layout in arguments.layouts.split(","):
                pool = RankPool(Path(folder))  # new processes, so that what one case leaves is not the next one's
                try:
                    print(_case(pool, Path(folder), layout, name), flush=True)
                finally:
                    pool.close()


def _case(pool, folder: Path, layout_name: str, size: str) -> str:
    import memory_tracker
    import tiny_models
    from layouts import parse

    model, content = _model(folder / size, size)
    layout = parse(layout_name)
    batch = tiny_models.make_batch(64, longest=400)
    found = pool.run(memory_tracker.peak_of_update, layout.ranks, layout.config, model, batch, BUDGET, deadline_s=200)
    guess = _predicted(content, layout.config, max(r["tokens"] for r in found), max(r["rows"] for r in found))
    tensors = max(r["tensors"] for r in found)
    resident = max(r["rss"] for r in found)
    return (
        f"{layout_name:<10}{size:<6}{guess / 1e6:>14.1f}{tensors / 1e6:>12.1f}{guess / tensors:>8.3f}"
        f"{resident / 1e6:>13.1f}{guess / resident:>8.3f}"
    )


def _model(folder: Path, size: str):
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig, logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    family = Qwen3MoeConfig if "num_experts" in SIZES[size] else Qwen2Config
    config = family(**SIZES[size], max_position_embeddings=512, tie_word_embeddings=False)
    if not folder.exists():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder, config.to_dict()


def _predicted(content: dict, megatron, tokens: int, rows: int) -> int:
    from gdpo_nemo.config.model_checks import resolve
    from gdpo_nemo.config.schema import Config
    from gdpo_nemo.models.family_checks import describe
    from gdpo_nemo.planning.memory import policy_memory

    config = Config()
    config.policy.precision = "float32"
    config.policy.megatron_cfg = megatron
    return policy_memory(resolve(config), describe(content), tokens, rows).total


if __name__ == "__main__":
    main()
