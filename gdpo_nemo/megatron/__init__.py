"""The policy on one rank: Megatron-core model, log-probs, train step, Hugging Face conversion, checkpoints. No Ray.

Call ``gdpo_nemo.megatron.runtime.prepare()`` before anything here that imports megatron.core.
"""
