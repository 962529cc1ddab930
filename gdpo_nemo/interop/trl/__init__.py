"""TRL: its GRPO scripts and arguments as configs of this project."""
