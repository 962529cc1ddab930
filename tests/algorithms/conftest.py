"""Property tests without a deadline per example: on a busy machine the clock says nothing about the code."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
