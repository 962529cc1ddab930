"""Subcommands of ``gdpo-nemo``, one file or folder per command.

``add`` registers a command; ``run`` executes the command and returns the exit status.

``cli.py`` lists all commands. Heavy imports happen inside ``run``, so that ``--help`` and ``train --dry-run`` start
fast.
"""
