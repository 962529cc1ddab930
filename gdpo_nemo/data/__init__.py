"""Training data: prompts, trajectories and packed batches."""
