"""Translation of NeMo-RL recipes: ``translate.py`` is the entry point, and ``keys.py`` contains the rules for single
keys."""
