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
        "weights/manifest.py",
        "        memory[end:stop] = 0\n",
        "",
        "weights/test_packed_updates.py::test_an_update_over_an_earlier_one_is_what_it_is_in_new_memory",
        "padding of an update is zero in reused memory",
    ),
    mutant(
        "weights/manifest.py",
        "        if not all(same):\n",
        "        if not any(same):\n",
        "weights/test_streams.py::test_any_changed_byte_of_a_bucket_is_found_and_its_tensor_named",
        "a changed byte of a bucket is found",
    ),
    mutant(
        "weights/manifest.py",
        "if not groups or size + entry.nbytes > bucket_bytes:",
        "if not groups or size > bucket_bytes:",
        "weights/test_streams.py::test_buckets_give_back_what_they_were_filled_with",
        "a bucket keeps its size",
    ),
    mutant(
        "weights/manifest.py",
        "total = torch.full((), words.numel(),",
        "total = torch.full((), 0,",
        "weights/test_streams.py::test_a_checksum_is_exact_integer_arithmetic",
        "the checksum tells lengths apart",
    ),
    mutant(
        "weights/manifest.py",
        "total = total * _CHAIN + (block",
        "total = total + (block",
        "weights/test_streams.py::test_a_checksum_is_exact_integer_arithmetic",
        "the checksum tells an exchange of blocks",
    ),
    mutant(
        "generation/engine_failures.py",
        "        link = link.__cause__ or link.__context__\n",
        "        link = link.__cause__\n",
        "generation/test_engine_failures.py::test_an_error_of_the_device_is_found_behind_one_of_its_cleanup",
        "a failure of the device is found in the context of an exception",
    ),
    mutant(
        "generation/engine_failures.py",
        "min(now - self._last_check_s, self.LOOK_S)",
        "now - self._last_check_s",
        "generation/test_engine_failures.py::test_time_that_nobody_watched_is_not_held_against_a_process",
        "time in which the process itself stood still does not count",
    ),
    mutant(
        "cluster/local_ray.py",
        'f"={interface}"',
        'f"{interface}"',
        "cluster/test_network.py::test_on_one_machine_all_libraries_stay_on_the_loopback_interface",
        "NCCL uses the interface of this name only",
    ),
    mutant(
        "utils/waits.py",
        "min(self._most_s, max(self._least_s,",
        "min(self._most_s, min(self._least_s,",
        "utils/test_waits.py::test_a_deadline_follows_what_was_measured_within_its_bounds",
        "a learnt limit is at least the least",
    ),
    mutant(
        "megatron/optimizer.py",
        "self.num_steps = ticks - (ticks - 1) % self._hold",
        "self.num_steps = ticks",
        "megatron/test_learning_rate.py::test_rates_are_those_of_nemo_rl_if_the_updates_of_a_step_share_theirs",
        "the rate is held for the updates of a step",
    ),
    mutant(
        "megatron/checkpoint_shards.py",
        "    first, last = -(-start // row), stop // row\n",
        "    first, last = -(-start // row), max(stop // row - 1, 0)\n",
        "megatron/test_checkpoint_shards.py::test_blocks_of_consecutive_ranges_are_the_elements_in_order",
        "a range misses no row",
    ),
    mutant(
        "megatron/checkpoint_shards.py",
        "            if cut.owner == dist.get_rank(group) and cut.tensor.replica_id[:2] == (0, 0):\n",
        "            if cut.owner == 0 and cut.tensor.replica_id[:2] == (0, 0):\n",
        "megatron/test_checkpoint_shards.py::test_a_rank_copies_writes_and_reads_its_share_of_a_checkpoint[DP4+DIST]",
        "each rank writes its own share",
    ),
    mutant(
        "megatron/checkpoint_shards.py",
        "                view.copy_(values)\n",
        "                pass\n",
        "megatron/test_checkpoint_resharding.py::test_continuation_at_the_same_layout_is_exact[DP2]",
        "ranks get the weights that others have read",
    ),
    mutant(
        "megatron/checkpoint_shards.py",
        "        begin, end = max(start - first, 0), min(stop - first, math.prod(tensor.local_shape))\n",
        "        begin, end = max(start - first, 0), min(stop - first - 1, math.prod(tensor.local_shape))\n",
        "megatron/test_checkpoint_resharding.py::test_continuation_at_the_same_layout_is_exact[DP2+DIST]",
        "an optimizer's range is complete",
    ),
    mutant(
        "megatron/checkpoint_shards.py",
        "        replica_id = (*model.replica_id[:2], 0)\n",
        "        replica_id = model.replica_id\n",
        "megatron/test_checkpoint_resharding.py::test_continuation_at_the_same_layout_is_exact[DP2+DIST]",
        "every data-parallel rank writes its range",
    ),
    mutant(
        "megatron/checkpoint_shards.py",
        "    return torch.frombuffer(raw_bytes(tensor).numpy(), dtype=tensor.dtype).view(tensor.shape)\n",
        "    return tensor\n",
        "megatron/test_checkpoint_shards.py::test_a_copy_in_a_shared_block_is_written_without_the_rest_of_the_block",
        "a copy is written without its block",
    ),
    mutant(
        "megatron/checkpoint_shards.py",
        "copies = {id(tensor): tensor.clone() for tensor",
        "copies = {id(tensor): tensor for tensor",
        "megatron/test_checkpoint_resharding.py::test_a_checkpoint_written_beside_training_holds_the_moment_it_began[TP1]",
        "a background save writes a copy",
    ),
)
