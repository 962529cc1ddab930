"""Configurations and formats of other programs, into ours."""
