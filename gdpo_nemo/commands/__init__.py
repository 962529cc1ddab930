"""One command a file: ``add`` registers it, ``run`` does it and returns the exit status. ``cli.py`` lists them.

Heavy imports happen inside ``run``, so that ``--help`` and ``train --dry-run`` stay instant.
"""
