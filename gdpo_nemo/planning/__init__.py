"""Estimates of the memory, time and best layout of a config before a run. This package does not import torch."""
