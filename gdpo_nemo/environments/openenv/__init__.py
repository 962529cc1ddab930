"""Environments on OpenEnv servers, which run one environment per WebSocket connection."""
