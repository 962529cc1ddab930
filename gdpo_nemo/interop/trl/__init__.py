"""Translation of TRL scripts and their arguments to configs of this project."""
