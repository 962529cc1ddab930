"""What a run recorded before it had to start over: kept, in ``archive/NNNN/`` of its folder."""

from __future__ import annotations

import os
from pathlib import Path

from gdpo_nemo.errors import RunError
from gdpo_nemo.observe import alerts, journal, metrics, rollouts, trace

FOLDER = "archive"
_PARTS = (journal.FILE, rollouts.FOLDER, rollouts.VALIDATION, alerts.FILE, trace.FILE, metrics.FILE)
"""The metrics last: as long as they are there, a move that was interrupted is seen to be needed."""


def archive_history(run_dir: str | Path) -> str | None:
    """Move the record of the steps done away, for a run that starts at step 0 again.

    Returns:
        a sentence on where it is; None: no step was recorded.

    Raises:
        RunError: the metrics cannot be read, or the files not be moved.
    """
    run_dir = Path(run_dir)
    last = max((row["step"] for row in metrics.read_metrics(run_dir)), default=0)
    if last < 1:
        return None
    taken = [int(path.name) for path in (run_dir / FOLDER).glob("*") if path.name.isdecimal()]
    place = run_dir / FOLDER / f"{max(taken, default=0) + 1:04d}"
    try:
        place.mkdir(parents=True)
        for name in _PARTS:
            if (run_dir / name).exists():
                os.rename(run_dir / name, place / name)
    except OSError as error:
        raise RunError(f"{place} cannot be written: {error.strerror or error}") from None
    return f"no checkpoint continues the steps up to {last} that were recorded here; their record is kept in {place}"
