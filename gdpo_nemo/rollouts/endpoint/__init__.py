"""OpenAI-compatible endpoint of the engines, for agents with multi-turn conversations."""
