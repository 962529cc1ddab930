"""Where verdicts are computed: worker processes, their pool, environments on other nodes."""
