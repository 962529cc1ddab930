"""Built-in environments, one per file. Add new environments to this package."""
