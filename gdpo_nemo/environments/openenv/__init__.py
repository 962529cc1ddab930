"""Environments of OpenEnv: servers that hold one environment for each WebSocket connection."""
