"""Estimates of the memory, time and best layout of a config before a run. Does not import torch."""
