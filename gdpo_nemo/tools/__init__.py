"""Tools around training: translators, simulation, inspector, chat and others. Training does not need them.

Only ``commands`` and the tools themselves import from here. A translated config may name functions of ``interop`` that
convert rows.
"""
