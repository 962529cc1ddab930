"""Translation of configs and scripts of other trainers to gdpo_nemo configs."""
