"""Mutants of the modules of a run: supervised training, distillation, checkpoints, resume."""

from __future__ import annotations

TRAINING = ()
