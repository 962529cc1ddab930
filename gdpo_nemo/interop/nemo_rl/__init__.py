"""Translation of NeMo-RL recipes: ``translate.py`` is the entry point, and ``keys.py`` has a rule for every key."""
