"""Fault-injection tests: a run with faults in its processes and files is compared with an undisturbed run."""
