"""Bytes and seconds of one weight update, the whole model against LoRA's adapters alone, by transport.

    python tests/benchmarks/adapters.py [--size 100m] [--rank 16] [--rounds 3]

A random Qwen2 in float32, one policy rank and one engine in Ray actors on this machine. ``take`` is what keeps the
policy: gathering, packing and checksums; ``ship`` is transport, checks and the engine's reload. Medians over the
rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from policy import SHAPES, make_model


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """The tokenizer that an engine wants to see; nothing is ever encoded."""
    from transformers import Qwen2Tokenizer

    words = {f"w{number}": number for number in range(vocabulary)}
    Qwen2Tokenizer(words, merges=[], unk_token="w0", pad_token="w0", eos_token="w1").save_pretrained(folder)


def config_of(folder: Path, rank: int):
    """A CPU config with one rank and one engine."""
    from gdpo_nemo.config.schema import Config, GenerationConfig, LoraConfig, MegatronConfig, PolicyConfig

    policy = PolicyConfig(
        model_name=str(folder),
        precision="float32",
        max_total_sequence_length=128,
        lora=LoraConfig(rank=rank),
        megatron_cfg=MegatronConfig(data_parallel_size=1),
        generation=GenerationConfig(max_new_tokens=64),
    )
    return Config(policy=policy)


def measure(policy, fleet, folder: Path, rounds: int) -> dict[str, tuple[int, float, float]]:
    """(bytes, seconds to take, seconds to ship) by transport."""
    from gdpo_nemo.cluster.session import ray
    from gdpo_nemo.weights.transports.base import make_transport

    found = {}
    for name in ("memory", "gloo", "folder"):
        transport = make_transport(name, policy, folder, 256 << 20)
        taken = []
        shipped = []
        for version in range(rounds):
            start = time.perf_counter()
            transport.prepare(version)
            taken.append(time.perf_counter() - start)
            start = time.perf_counter()
            fleet.update(transport)
            shipped.append(time.perf_counter() - start)
        manifest = transport.manifest
        manifest = ray.get(manifest) if isinstance(manifest, ray.ObjectRef) else manifest
        found[name] = manifest.nbytes, statistics.median(taken), statistics.median(shipped)
        transport.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="100m")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    from gdpo_nemo.cluster.fleet import EngineFleet
    from gdpo_nemo.cluster.policy_group import PolicyGroup
    from gdpo_nemo.cluster.session import session

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        model = Path(folder) / "model"
        print(f"{arguments.size}: {make_model(model, arguments.size, 'float32', 128):,} parameters")
        write_tokenizer(model, SHAPES[arguments.size][5])
        with session(config_of(model, 0).cluster):
            fleet = EngineFleet(config_of(model, 0), str(model))
            fleet.ready()
            for what, rank in (("model", 0), ("adapters", arguments.rank)):
                policy = PolicyGroup(config_of(model, rank), str(model), 1)
                policy.ready()
                for name, (size, take, ship) in measure(
                    policy, fleet, Path(folder) / "weights", arguments.rounds
                ).items():
                    print(f"{what:<9} {name:<7} {size / 2**20:8.1f} MiB  take {take:6.2f} s  ship {ship:6.2f} s")
                policy.close()
            fleet.close()


if __name__ == "__main__":
    main()
