"""``gdpo-nemo profile``: measure the rewards of a config before training."""
