"""How a rank of the policy streams its weights out, bucket by bucket, while all ranks gather them."""

from __future__ import annotations

import contextlib

from gdpo_nemo.cluster.session import ray


class StreamingRank:
    """What a policy rank that has its ``rank`` and a built ``policy`` can stream, inside a Ray actor."""

    def outline_weights(self):
        """The manifest of the weights without checksums, on rank 0; the values may change after that, but not the
        form."""
        from gdpo_nemo.weights.manifest import outline

        with self._gathered() as tensors:
            return outline(tensors, -1, self.policy.adapters) if self.rank == 0 else None

    @contextlib.contextmanager
    def _gathered(self):
        """An iterator over what an update consists of (``Policy.update``). What is not taken from it passes by: the
        other ranks gather along."""
        tensors = self.policy.update()
        try:
            yield tensors
        finally:
            for _ in tensors:
                pass

    def open_sender(self, backend: str) -> tuple[str, int]:
        """(host, port) where receivers of the next broadcast find this rank."""
        from gdpo_nemo.weights.broadcast import Sender

        host = ray.util.get_node_ip_address()
        self._sender = Sender(host, backend)
        return host, self._sender.port

    def broadcast_weights(self, manifest, receivers: int, bucket_bytes: int, backend: str, keep: bool) -> None:
        """Broadcast the current weights from rank 0 to receivers that were told of ``open_sender``, as they are
        gathered.

        ``keep``: rank 0 keeps them in host memory for ``broadcast_kept``.
        """
        with self._gathered() as tensors:
            if self.rank == 0:
                from gdpo_nemo.weights.buckets import filled

                device = self.policy.runtime.device if backend == "nccl" else "cpu"
                self._kept = []
                self._send(self._keeping(filled(manifest, tensors, bucket_bytes, device), keep), receivers)

    def _keeping(self, buckets, keep: bool):
        for bucket in buckets:
            if keep:
                self._kept.append(bucket.to("cpu", copy=True))
            yield bucket

    def broadcast_kept(self, receivers: int, backend: str) -> None:
        """Broadcast what was kept, from this rank alone."""
        device = self.policy.runtime.device if backend == "nccl" else "cpu"
        self._send((bucket.to(device) for bucket in self._kept), receivers)

    def _send(self, buckets, receivers: int) -> None:
        try:
            self._sender.send(buckets, receivers)
        finally:
            # With its store the receivers' wait ends, too.
            del self._sender
            for _ in buckets:  # what is kept is kept whole
                pass

    def open_door(self) -> tuple[str, bytes]:
        """Where, and with which key, the engine process beside this rank comes for ``lend_weights``."""
        from gdpo_nemo.weights.handles import Lender

        self._lender = Lender()
        return self._lender.door

    def lend_weights(self, manifest, bucket_bytes: int, visited: bool) -> None:
        """Pass the current weights to the process that was told of ``open_door``; without a visitor only gather
        along."""
        with self._gathered() as tensors:
            if visited:
                lender = self._lender
                del self._lender
                lender.lend(manifest, tensors, bucket_bytes, self.policy.runtime.device)
