"""Tools around training: translators, simulation, inspector, chat and others. Training imports none of them.

Only ``commands`` and the tools themselves import from here.
"""
