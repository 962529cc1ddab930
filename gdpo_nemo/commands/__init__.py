"""Commands, one file or folder each. ``add`` registers a command; ``run`` executes it and returns the exit status.

``cli.py`` lists all commands. Heavy imports happen inside ``run``, so that ``--help`` and ``train --dry-run`` start
fast.
"""
