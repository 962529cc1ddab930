"""``gdpo-nemo env adversary``: answers that try to earn rewards which they do not deserve."""
