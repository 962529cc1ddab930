"""Execution of environments in worker processes and process pools."""
