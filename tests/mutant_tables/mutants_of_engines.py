"""Mutants of weights, generation, cluster and Megatron."""

from __future__ import annotations

from mutant_tables.mutant import mutant

ENGINES = (
    mutant(
        "weights/manifest.py",
        "if zlib.crc32(buffer[entry.offset : stop]) != entry.crc32:",
        "if entry.crc32 is None:",
        "weights/test_packed_updates.py::test_a_changed_byte_is_refused_with_its_tensor",
        "changed bytes of a weight update are found",
    ),
    mutant(
        "weights/buckets.py",
        "        if not all(same):\n",
        "        if not any(same):\n",
        "weights/test_streams.py::test_any_changed_byte_of_a_bucket_is_found_and_its_tensor_named",
        "a changed byte of a bucket is found",
    ),
    mutant(
        "weights/checksum.py",
        "total = torch.full((), words.numel(),",
        "total = torch.full((), 0,",
        "weights/test_streams.py::test_a_checksum_is_exact_integer_arithmetic",
        "the checksum tells lengths apart",
    ),
    mutant(
        "generation/engine_failures.py",
        "        link = link.__cause__ or link.__context__\n",
        "        link = link.__cause__\n",
        "generation/test_engine_failures.py::test_an_error_of_the_device_is_found_behind_one_of_its_cleanup",
        "a failure of the device is found in the context of an exception",
    ),
    mutant(
        "cluster/network.py",
        'f"={interface}"',
        'f"{interface}"',
        "cluster/test_network.py::test_on_one_machine_all_libraries_stay_on_the_loopback_interface",
        "NCCL uses the interface of this name only",
    ),
    mutant(
        "waits.py",
        "min(self._most_s, max(self._least_s,",
        "min(self._most_s, min(self._least_s,",
        "test_waits.py::test_a_deadline_follows_what_was_measured_within_its_bounds",
        "a learnt limit is at least the least",
    ),
)
