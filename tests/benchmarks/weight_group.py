"""Seconds of a weight update by gloo through groups that stand, one for each rank, and through new ones each time.

    PYTHONPATH=tests/weights python tests/benchmarks/weight_group.py --engines 2 --parameters 1000000

Engines are processes that receive and compare checksums, without vLLM: what differs is the group alone.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from broadcast_members import Actor, Policy, RankPolicy

from gdpo_nemo.weights.pieces import Piece
from gdpo_nemo.weights.transports.base import TransportOptions
from gdpo_nemo.weights.transports.collective import GlooTransport


class Model(RankPolicy):
    """Eight tensors of the model's size together, in float32."""

    parameters = 0

    def pieces(self):
        """What is sent."""
        for number in range(8):
            if number % self.ranks == self.rank:
                yield Piece(f"w{number}", torch.full((self.parameters // 8,), float(number)))


def main() -> None:
    """Print the median of both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--updates", type=int, default=20)
    options = parser.parse_args()
    policy = Policy(1, options.ranks)
    policy.ranks = [Model(rank, options.ranks) for rank in range(options.ranks)]
    Model.parameters = options.parameters
    transport = GlooTransport(policy, TransportOptions(bucket_bytes=256 << 20))
    engines = {number: Actor() for number in range(options.engines)}
    try:
        for name, forget in (("stands", False), ("new each time", True)):
            seconds = []
            for version in range(1 + options.updates):
                if forget:
                    transport._engines = ()
                transport.prepare(version)
                start = time.monotonic()
                (updates, sent) = transport.send(engines)
                policy.wait(sent, "sending")
                answers = [update.answer() for update in updates]
                seconds.append(time.monotonic() - start)
                assert all(isinstance(answer, list) for answer in answers)
            print(f"{name:14s} {statistics.median(seconds[1:]) * 1000:8.1f} ms")
    finally:
        for actor in engines.values():
            actor.end()


if __name__ == "__main__":
    main()
