"""One task a file: the place to add an environment."""
