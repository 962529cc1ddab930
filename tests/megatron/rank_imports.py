"""Imports of every rank, done once in the process that ranks are forked from, and torch as it was before them."""

import gc

from rank_pool import torch_names

from gdpo_nemo.megatron import runtime

TORCH_BEFORE = torch_names()
RUNTIME = runtime.prepare()

import gdpo_nemo.megatron.checkpoint  # noqa: E402, F401 - as the next one, with what it imports
import gdpo_nemo.megatron.policy  # noqa: E402, F401

gc.freeze()  # Collections between cases need not look at a million objects of imported modules.
