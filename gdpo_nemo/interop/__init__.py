"""Translation of configs and scripts of other trainers to configs of this project."""
