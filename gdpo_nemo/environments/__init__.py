"""Environments, which score completions: base class, built-in tasks, worker processes, and clients of NeMo Gym and
OpenEnv servers."""
