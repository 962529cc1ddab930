"""Verdicts from NeMo Gym resource servers, over HTTP alone: nothing of NeMo Gym is imported."""
