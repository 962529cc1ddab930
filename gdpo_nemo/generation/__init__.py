"""Sampling with vLLM: a thread-safe engine. This package does not import Megatron."""
