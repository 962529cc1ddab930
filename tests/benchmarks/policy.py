"""One policy update, forward, backward and step, beside ``transformers`` on the same batch: speed and memory.

    python tests/benchmarks/policy.py [--size 8m] [--size 100m] [--rounds 5] [--threads 2]
    python tests/benchmarks/policy.py --size 7b --tokens 32768 --precision bfloat16 --ours-only   # with a GPU: MFU,
    peak memory
    python tests/benchmarks/policy.py --size 8m --ours-only --beside CHECKOUT     # another commit, installed there
    python tests/benchmarks/policy.py --groups [--size 8m]    # groups that share their prompts, beside the same without

The batch is what rollouts look like: prompts of 32 to 128 tokens, completions of log-normal length (median 120, at most
512). Ours packs them into micro-batches of ``--micro-batch`` tokens; the other side pads, as trainers on
``transformers`` do: prompts left, completions right, eight sequences at a time in the order they came, SDPA attention,
logits of the completions only, torch's fused AdamW, gradients clipped at 1. Both start from the same weights and both
report the loss.

Each side lives in a process of its own and the sides take turns, so that other work on the machine hits both; medians
over the rounds after a first one. ``tokens/s`` counts real tokens. Compare CPU seconds where the machine is shared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {
    # name: (hidden, layers, heads, key-value heads, MLP width, vocabulary, tied)
    "8m": (256, 8, 4, 2, 768, 8192, True),
    "100m": (768, 12, 12, 4, 2048, 32000, True),
    "135m": (576, 30, 9, 3, 1536, 49152, True),
    # Experts: each token visits the last but one of the last.
    "100m-moe": (512, 8, 8, 2, 512, 16384, True, 2, 8),
    "0.5b": (896, 24, 14, 2, 4864, 151936, True),
    "1.5b": (1536, 28, 12, 2, 8960, 151936, True),
    "7b": (3584, 28, 28, 4, 18944, 152064, False),
}
PADDED_BATCH = 8
LEARNING_RATE = 1e-5


def make_model(folder: Path, size: str, precision: str, longest: int) -> int:
    """Write a random Qwen2, or Qwen3-MoE, of that shape; returns its parameters."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig, logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    hidden, layers, heads, groups, width, vocabulary, tied, *experts = SHAPES[size]
    mixture = dict(num_experts_per_tok=experts[0], num_experts=experts[1]) if experts else {}
    config = (Qwen3MoeConfig if experts else Qwen2Config)(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=width,
        max_position_embeddings=longest,
        tie_word_embeddings=tied,
        dtype=precision,
        **(mixture and dict(**mixture, moe_intermediate_size=width, head_dim=hidden // heads, norm_topk_prob=True)),
    )
    torch.set_default_dtype(getattr(torch, precision))
    model = AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    return model.num_parameters()


def make_batch(tokens: int, vocabulary: int, longest: int | None):
    """Sequences of about ``tokens`` tokens together; ``longest`` fixes the length of each instead."""
    import numpy as np

    from gdpo_nemo.algorithms import token_weights
    from gdpo_nemo.data.packing import TrainSequence

    draw = np.random.default_rng(0)
    pairs = []
    while sum(map(sum, pairs)) < tokens:
        pair = int(draw.integers(32, 129)), int(np.clip(draw.lognormal(np.log(120), 0.9), 8, 512))
        pairs.append((longest // 4, longest - longest // 4) if longest else pair)
    weights = token_weights([completion for _, completion in pairs], "token_mean").tolist()
    return [
        TrainSequence(
            draw.integers(0, vocabulary, prompt).astype(np.int32),
            draw.integers(0, vocabulary, completion).astype(np.int32),
            np.full(completion, -9.0, np.float32),
            advantage=float(draw.normal()),
            weight=weight,
        )
        for (prompt, completion), weight in zip(pairs, weights)
    ]


# -- the two sides: each builds itself and returns a function that does one update -----------------------------------


def ours(folder: Path, arguments):
    """A Policy on one rank."""
    from gdpo_nemo.megatron import runtime

    chosen = runtime.prepare()
    import torch

    from gdpo_nemo.algorithms import LossSettings
    from gdpo_nemo.config.schema import MegatronConfig, OptimizerConfig, PolicyConfig
    from gdpo_nemo.data.packing import Budget, attention_cost
    from gdpo_nemo.data.prefixes import choose_layout
    from gdpo_nemo.data.shares import Share
    from gdpo_nemo.models.family_checks import describe

    runtime.initialize(chosen, 0, 1, f"file://{folder}/meeting")
    layout = MegatronConfig(
        data_parallel_size=1,
        recompute=arguments.recompute,
        optimizer=OptimizerConfig(lr=LEARNING_RATE, adam_beta2=0.999, clip_grad=1.0),
    )
    runtime.lay_out(layout, 0)
    from gdpo_nemo.megatron.policy import Policy

    config = PolicyConfig(precision=arguments.precision, megatron_cfg=layout)
    policy = Policy(config, folder / "model", chosen, total_updates=1000)
    quadratic = attention_cost(describe(json.loads((folder / "model/config.json").read_text())))

    def lay_out(batch, sharing: bool | None):
        budget = max(arguments.micro_batch, max(len(s) for s in batch))
        return choose_layout(sharing, batch, Budget(1, budget, quadratic=quadratic))

    def update(batch, sharing: bool | None = False) -> float:
        found = lay_out(batch, sharing)
        lengths = [len(s) for s in batch]
        fullest = max(found.assignment[0], key=lambda members: sum(lengths[i] - found.shared[i] for i in members))
        load = [sum(lengths[i] - found.shared[i] for i in fullest), sum(len(batch[i].completion_ids) for i in fullest)]
        update.predicted = predicted(folder / "model", config, *load)
        share = Share.of(batch, found.assignment[0], shared=found.shared)
        result = policy.train(share.sequences(), share.micro_batches, LossSettings())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return result.loss

    update.layout = lay_out
    return update


def predicted(model: Path, policy, tokens: int, rows: int) -> dict:
    """The plan's bytes for one rank with that fullest micro-batch, item by item."""
    import torch

    from gdpo_nemo.config.model_checks import resolve
    from gdpo_nemo.config.schema import Config
    from gdpo_nemo.models.family_checks import describe
    from gdpo_nemo.planning.memory import policy_memory

    config = Config()
    config.cluster.gpus_per_node = int(torch.cuda.is_available())  # GPUs keep other activations
    config.policy.generation.engines = 0
    config.policy.precision = policy.precision
    config.policy.share_prompts = False  # ``tokens`` are those that are computed
    config.policy.megatron_cfg = policy.megatron_cfg
    memory = policy_memory(resolve(config), describe(json.loads((model / "config.json").read_text())), tokens, rows)
    return {**{key: value for key, value in vars(memory).items() if key != "stage"}, "total": memory.total}


def theirs(folder: Path, arguments):
    """transformers with padding, and torch's AdamW."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, arguments.precision)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="sdpa", dtype=dtype).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.999), weight_decay=0.0, fused=True
    )

    def share(part) -> torch.Tensor:
        left = max(len(s.prompt_ids) for s in part)
        right = max(len(s.completion_ids) for s in part)
        ids = torch.zeros(len(part), left + right, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        weight = torch.zeros(len(part), right)
        for row, s in enumerate(part):
            start = left - len(s.prompt_ids)
            stop = left + len(s.completion_ids)
            ids[row, start:left] = torch.from_numpy(s.prompt_ids)
            ids[row, left:stop] = torch.from_numpy(s.completion_ids)
            mask[row, start:stop] = 1
            weight[row, : len(s.completion_ids)] = s.weight * s.advantage
        ids = ids.to(device)
        mask = mask.to(device)
        weight = weight.to(device)
        logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=right + 1, use_cache=False).logits[:, :-1]
        flat = logits.flatten(0, 1).float()
        targets = ids[:, left:].flatten()
        logprobs = -torch.nn.functional.cross_entropy(flat, targets, reduction="none").view_as(weight)
        return -((logprobs - logprobs.detach()).exp() * weight).sum()

    def update(batch) -> float:
        optimizer.zero_grad()
        total = 0.0
        for start in range(0, len(batch), PADDED_BATCH):
            loss = share(batch[start : start + PADDED_BATCH])
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return update


def serve(side: str, folder: Path, arguments) -> None:
    """Build one side, then do one update per line read; answers go out as JSON lines."""
    import torch

    torch.set_num_threads(arguments.threads)
    # What does not belong to the model: the libraries of that side, loaded before memory is measured.
    __import__("gdpo_nemo.megatron.runtime").megatron.runtime.prepare() if side == "ours" else __import__(
        "transformers"
    )
    before = memory(torch, "VmRSS")
    shape = SHAPES[arguments.size]
    batch = make_batch(arguments.tokens, shape[5], arguments.length)
    update = (ours if side == "ours" else theirs)(folder, arguments)
    held = memory(torch, "VmRSS") - before
    if arguments.groups:
        import groups  # beside this file, which is not on the path where it is loaded as a module

        groups.race(shape, lambda: batch, update, arguments, lambda: memory(torch, "VmHWM") - before)
        return
    for _ in sys.stdin:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        wall = time.perf_counter()
        cpu = time.process_time()
        loss = update(batch)
        row = dict(loss=loss, wall=time.perf_counter() - wall, cpu=time.process_time() - cpu)
        row["lengths"] = [len(s) for s in batch]
        row["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        row |= dict(peak=memory(torch, "VmHWM") - before, held=held, tokens=sum(map(len, batch)))
        row["predicted"] = getattr(update, "predicted", None)
        print(json.dumps(row), flush=True)


def memory(torch, field: str) -> int:
    """Bytes: on a GPU what the allocator held (its peak for VmHWM), else the process's resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() if field == "VmHWM" else torch.cuda.memory_allocated()
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field)]
    return int(line.split()[1]) << 10


def compare_groups(size: str, arguments) -> None:
    """Groups with and without sharing, in one process."""
    import groups

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        parameters = make_model(folder / "model", size, arguments.precision, 2048)
        print(f"\n{size}: {parameters:,} parameters, {arguments.precision}, {arguments.threads} threads", flush=True)
        process = _start("ours", size, folder, arguments)
        process.stdin.close()
        for line in process.stdout:
            groups.show(line)
        if process.wait():
            raise SystemExit(f"the updates ended with status {process.returncode}")


# -- the race -------------------------------------------------------------------------------------------------------


def compare(size: str, arguments) -> None:
    """Run both sides on one model, in turns, and print what came out."""
    sides = ["ours"] + ["before"] * bool(arguments.beside) + ["theirs"] * (not arguments.ours_only)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        parameters = make_model(folder / "model", size, arguments.precision, max(1024, arguments.length or 0))
        (folder / "before").mkdir()  # ranks meet in a file of their folder
        (folder / "before" / "model").symlink_to(folder / "model")
        processes = {side: _start(side, size, folder, arguments) for side in sides}
        rows: dict[str, list[dict]] = {side: [] for side in sides}
        try:
            for _ in range(arguments.rounds + 1):
                for side, process in processes.items():
                    process.stdin.write("go\n")
                    process.stdin.flush()
                    line = process.stdout.readline()
                    if not line:
                        raise SystemExit(f"{side} ended with status {process.wait()}")
                    rows[side].append(json.loads(line))
        finally:
            for process in processes.values():
                process.stdin.close()
                process.wait()
    _show(size, parameters, rows, arguments)


def _start(side: str, size: str, folder: Path, arguments) -> subprocess.Popen:
    root, python = ROOT, sys.executable
    if side == "before":
        root, side, folder = arguments.beside.resolve(), "ours", folder / "before"
        python = str(root / ".venv" / "bin" / "python")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(arguments.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        # Large blocks go back to the system when they are freed, so that the peak is what was needed at once.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }
    program = str(root / "tests" / "benchmarks" / "policy.py")
    command = [python, "-W", "ignore", program, "--side", side, "--folder", str(folder), "--size", size]
    for option in (
        "threads",
        "tokens",
        "micro_batch",
        "precision",
        "recompute",
        "rounds",
        *(["length"] if arguments.length else []),
    ):
        command += [f"--{option.replace('_', '-')}", str(getattr(arguments, option))]
    command += ["--groups"] * arguments.groups
    for case in arguments.case or ():
        command += ["--case", case]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


NAMES = {"ours": "gdpo_nemo", "before": "beside", "theirs": "transformers"}
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bfloat16, from NVIDIA's data sheets."""


def model_flops(size: str, parameters: int, lengths: list[int]) -> float:
    """Multiplications and additions of one update: 6 a parameter and token, and causal attention's 6 x layers x hidden
    x n^2."""
    hidden, layers, heads, *_ = SHAPES[size]
    return 6.0 * parameters * sum(lengths) + sum(6.0 * layers * hidden * n * n for n in lengths)


def _show(size: str, parameters: int, rows: dict, arguments) -> None:
    tokens = rows["ours"][0]["tokens"]
    print(
        f"\n{size}: {parameters:,} parameters, {tokens:,} real tokens, {arguments.precision}, {arguments.threads} "
        "threads"
    )
    print(f"{'':14s}{'wall s':>9s}{'CPU s':>9s}{'tokens/s':>10s}{'per CPU s':>11s}{'peak MiB':>10s}{'loss':>12s}")
    rate = {}
    for side, done in rows.items():
        wall, cpu = (statistics.median(row[key] for row in done[1:]) for key in ("wall", "cpu"))
        rate[side] = tokens / wall, tokens / cpu
        name = NAMES[side]
        peak = max(row["peak"] for row in done) >> 20
        print(
            f"{name:14s}{wall:9.2f}{cpu:9.2f}{tokens / wall:10.0f}{tokens / cpu:11.0f}{peak:10d}{done[0]['loss']:12.6f}"
        )
    first = rows["ours"][0]
    top = next((flops for name, flops in PEAK_FLOPS.items() if name in first["gpu"]), None)
    if top:
        seconds = tokens / rate["ours"][0]
        print(
            f"MFU on {first['gpu']}: {model_flops(size, parameters, first['lengths']) / seconds / top:.3f} of "
            f"{top / 1e12:.0f} TFLOP/s"
        )
    plan = rows["ours"][0]["predicted"]
    peak = max(row["peak"] for row in rows["ours"])
    items = ", ".join(f"{name} {size >> 20}" for name, size in plan.items() if size and name != "total")
    print(f"planned for gdpo_nemo: {plan['total'] >> 20} MiB ({items}); peak / plan {peak / plan['total']:.3f}")
    for other in rate.keys() - {"ours"}:
        by_wall, by_cpu = (rate["ours"][i] / rate[other][i] for i in (0, 1))
        print(f"gdpo_nemo / {NAMES[other]}: {by_wall:.2f} x by wall, {by_cpu:.2f} x by CPU seconds")


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", action="append", choices=SHAPES, help="model shape, repeatable (8m and 100m)")
    parser.add_argument("--rounds", type=int, default=5, help="updates that are counted (5)")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of each side (2)")
    parser.add_argument("--tokens", type=int, default=6000, help="tokens of the batch, about (6000)")
    parser.add_argument("--length", type=int, help="all sequences of this length instead of rollout-like ones")
    parser.add_argument("--micro-batch", type=int, default=2048, help="tokens of one packed micro-batch (2048)")
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--recompute", default="none", help="none, selective or full (ours)")
    parser.add_argument("--ours-only", action="store_true", help="leave transformers out")
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="another commit, installed: updates in turns")
    parser.add_argument("--groups", action="store_true", help="groups that share their prompts, with and without")
    parser.add_argument("--case", action="append", metavar="RATIO:SAMPLES", help="of --groups, repeatable: 4:16 (all)")
    parser.add_argument("--side", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        arguments.size = arguments.size[0]
        serve(arguments.side, Path(arguments.folder), arguments)
        return
    for size in arguments.size or ["8m", "100m"]:
        (compare_groups if arguments.groups else compare)(size, arguments)


if __name__ == "__main__":
    main()
