"""Typed configuration: schema, loading, validation. Does not import torch."""
