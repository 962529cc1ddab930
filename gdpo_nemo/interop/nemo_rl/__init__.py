"""NeMo-RL's recipes into configs of ours: translate.py is the entry, keys.py the table of every key."""
