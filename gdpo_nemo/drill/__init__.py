"""Faults on purpose: a run is disturbed, process by process and file by file, and held against an undisturbed one."""
