"""Imports of every rank, done once in the process that ranks are forked from, and torch as it was before them."""

import gc

gc.disable()  # A collection would look at a million new objects, all of which stay.

from rank_pool import torch_names  # noqa: E402

from gdpo_nemo.megatron import runtime  # noqa: E402

TORCH_BEFORE = torch_names()
RUNTIME = runtime.prepare()

import gdpo_nemo.megatron.checkpoint  # noqa: E402, F401 - as the next one, with what it imports
import gdpo_nemo.megatron.policy  # noqa: E402, F401

gc.freeze()  # Collections between cases need not look at them either.
gc.enable()
