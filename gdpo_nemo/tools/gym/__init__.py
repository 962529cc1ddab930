"""``gdpo-nemo gym``: start the NeMo Gym servers of a config, and classify the servers of a checkout."""
