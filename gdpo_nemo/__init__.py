"""gdpo_nemo: reinforcement learning with several rewards, Megatron-core to train and vLLM to sample."""

__version__ = "0.1.0"
