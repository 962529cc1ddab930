"""The ways of new weights from the policy to the engines, one file each; the names in a config are in
``config/transports.py``."""
