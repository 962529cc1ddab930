"""Mutants of environments and reward functions."""

from __future__ import annotations

ENVIRONMENTS = ()
