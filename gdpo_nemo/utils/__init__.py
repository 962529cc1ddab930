"""Errors, bounded file reading, progress, waits, signals and loading of user code.

The package ``utils`` does not import any other package of gdpo_nemo.
"""
