"""The errors a person is meant to read. Every message is one line."""


class GdpoError(Exception):
    """An error whose message says all there is to say; no traceback is shown for it."""


class ConfigError(GdpoError):
    """What was asked for is impossible or misspelt; the program ends with exit status 2."""


class RunError(GdpoError):
    """Something failed while running; the program ends with exit status 1."""
