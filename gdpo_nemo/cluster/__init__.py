"""All code that uses Ray: the session, the policy's ranks, and the engine fleet.

The driver reports each failure in one sentence.
"""
