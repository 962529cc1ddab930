"""Training loop, its algorithms, setup, resume and supervision, and the Python API."""
