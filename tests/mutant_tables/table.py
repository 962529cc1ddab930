"""All mutants, in the order in which `tests/mutants.py` runs them."""

from __future__ import annotations

from mutant_tables.mutant import Mutant
from mutant_tables.mutants_of_algorithms import ALGORITHMS
from mutant_tables.mutants_of_engines import ENGINES
from mutant_tables.mutants_of_environments import ENVIRONMENTS
from mutant_tables.mutants_of_losses import LOSSES
from mutant_tables.mutants_of_megatron import MEGATRON
from mutant_tables.mutants_of_processes import PROCESSES
from mutant_tables.mutants_of_rollouts import ROLLOUTS
from mutant_tables.mutants_of_settings import SETTINGS
from mutant_tables.mutants_of_training import TRAINING

MUTANTS: tuple[Mutant, ...] = (
    *ALGORITHMS,
    *LOSSES,
    *ROLLOUTS,
    *TRAINING,
    *SETTINGS,
    *ENVIRONMENTS,
    *ENGINES,
    *PROCESSES,
    *MEGATRON,
)

__all__ = ["MUTANTS", "Mutant"]
