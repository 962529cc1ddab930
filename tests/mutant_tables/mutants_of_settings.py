"""Mutants of config, observation, commands, planning and imported recipes."""

from __future__ import annotations

SETTINGS = ()
