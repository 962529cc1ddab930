"""Weight transports. ``config/transports.py`` maps the values of ``weights.transport`` to their classes."""
