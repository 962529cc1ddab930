"""Simulation of a run's schedule from recorded or assumed times."""
