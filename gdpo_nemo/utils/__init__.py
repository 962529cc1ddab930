"""Errors, bounded file reading, progress, waits, signals and loading of user code. Imports no other package."""
