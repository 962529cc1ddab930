"""The rows of metrics as TensorBoard scalars, written with TensorBoard's own writer: no torch needed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Mapping

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from gdpo_nemo.observe.metric_registry import description_of
from gdpo_nemo.observe.metrics import clean

FOLDER = "tensorboard"


class TensorboardLog:
    """One events file per start of the run. ``start_step`` steps are done; later ones of an earlier start are
    purged."""

    def __init__(self, run_dir: str | Path, start_step: int = 0) -> None:
        self._described: set[str] = set()
        self._writer = EventFileWriter(str(Path(run_dir) / FOLDER))
        first = start_step + 1 if start_step else 0  # Step 0 is the validation of the untrained model.
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=first, session_log=start))

    def write(self, row: Mapping[str, Any]) -> None:
        """Add every number of the row under its key."""
        scalars = {k: v for k, v in clean(row).items() if k != "step" and isinstance(v, (int, float))}
        values = [
            Summary.Value(tag=key, simple_value=float(value), metadata=self._metadata(key))
            for key, value in scalars.items()
        ]
        self._writer.add_event(Event(wall_time=time.time(), step=row["step"], summary=Summary(value=values)))
        self._writer.flush()

    def _metadata(self, key: str) -> SummaryMetadata | None:
        """The description that TensorBoard shows with a chart; it reads that of a key's first value in a file."""
        if key in self._described:
            return None
        self._described.add(key)
        return SummaryMetadata(summary_description=description_of(key))

    def close(self) -> None:
        """Flushes and closes the file."""
        self._writer.close()
