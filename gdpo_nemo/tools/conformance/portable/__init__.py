"""Checks of GDPO implementations that need only NumPy: the module ``gdpo_conformance`` of the distribution in
``conformance/``. The files import each other only, so that they run in the environment of any trainer."""
