"""Prompts become samples, samples get verdicts, groups become complete; within the staleness bound."""
