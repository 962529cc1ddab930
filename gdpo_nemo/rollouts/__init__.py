"""Rollouts: sampling and verification of groups of completions, within the staleness bound."""
