"""Sampling with vLLM: one engine, and the fleet of them. No Megatron."""
