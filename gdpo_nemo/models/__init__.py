"""Supported model architectures, and readers of model files. Most of the package works without torch."""
