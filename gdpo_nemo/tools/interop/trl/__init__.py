"""Translation of TRL scripts and their arguments to gdpo_nemo configs."""
