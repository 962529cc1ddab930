"""Prompts in, trajectories through, packed batches out."""
