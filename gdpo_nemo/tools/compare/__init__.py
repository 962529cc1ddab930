"""``gdpo-nemo compare``: tables and plots that compare runs."""
