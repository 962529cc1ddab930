"""An OpenAI-compatible endpoint before the engines, for agents that play several turns."""
