"""Ray: the session, the policy's ranks, the fleet of engines. What dies here surfaces at the driver as one sentence."""
