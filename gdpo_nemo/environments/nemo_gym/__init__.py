"""Environments that use NeMo Gym servers over HTTP. NeMo Gym itself is not imported."""
