"""Policy on one rank: Megatron-core model, log-probs, training, Hugging Face conversion and checkpoints.

This package does not use Ray.

Call ``gdpo_nemo.megatron.runtime.prepare()`` before you import a module of this package that imports megatron.core.
"""
