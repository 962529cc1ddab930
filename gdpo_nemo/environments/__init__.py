"""Verifiers of completions: the contract, the tasks, their worker processes, and NeMo Gym's servers."""
