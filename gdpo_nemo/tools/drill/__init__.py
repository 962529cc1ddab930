"""Fault-injection tests: inject faults into the processes and files of a run, and check the result."""
