"""Inspector: a run's samples as a static site, from step to group to sample to token."""
