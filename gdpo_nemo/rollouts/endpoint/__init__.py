"""OpenAI-compatible endpoint of the engines, for agents that play several turns."""
