"""``gdpo-nemo env``: list, check and create environments."""
