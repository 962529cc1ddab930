"""Mutants of weights, generation, cluster and Megatron."""

from __future__ import annotations

ENGINES = ()
