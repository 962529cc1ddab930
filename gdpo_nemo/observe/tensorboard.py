"""TensorBoard event files: metrics as scalars, the config as text and hyperparameters, completions as text.

The files are written with TensorBoard's own writer, which does not require torch. The import is slow, so only runs that
log to TensorBoard import this module.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.metadata import (
    NULL_TENSOR,
    SESSION_END_INFO_TAG,
    SESSION_START_INFO_TAG,
    create_summary_metadata as hparams_metadata,
)
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo
from tensorboard.plugins.text.metadata import create_summary_metadata as text_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from gdpo_nemo.config.changes import flattened
from gdpo_nemo.config.load import config_to_dict
from gdpo_nemo.config.schema import Config
from gdpo_nemo.observe.metric_registry import description_of
from gdpo_nemo.observe.metrics import clean
from gdpo_nemo.observe.trackers import CompletionTable, markdown

FOLDER = "tensorboard"


class TensorboardLog:
    """TensorBoard log, with one event file per process of the run.

    Args:
        start_step: number of finished steps. TensorBoard hides later steps that an earlier process logged.
        settings: printable config. If ``settings`` is empty, neither text nor hyperparameters are written.
    """

    def __init__(self, run_dir: str | Path, start_step: int = 0, settings: Mapping[str, Any] | None = None) -> None:
        self._described: set[str] = set()
        self._writer = EventFileWriter(str(Path(run_dir) / FOLDER))
        first = start_step + 1 if start_step else 0  # Step 0 is the validation of the untrained model.
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=first, session_log=start))
        self._settings = settings or {}
        if settings:
            yaml = OmegaConf.to_yaml(OmegaConf.create(dict(settings)))
            self._add(start_step, _text("config", f"```yaml\n{yaml}```"), _hparams(settings))

    def write(self, row: Mapping[str, Any]) -> None:
        """Log each number of the row under its key."""
        scalars = {k: v for k, v in clean(row).items() if k != "step" and isinstance(v, (int, float))}
        values = [
            Summary.Value(tag=key, simple_value=float(value), metadata=self._metadata(key))
            for key, value in scalars.items()
        ]
        self._add(row["step"], *values)

    def completions(self, step: int, table: CompletionTable) -> None:
        """Log the samples of a step as a Markdown table."""
        self._add(step, _text("completions", markdown(table)))

    def _add(self, step: int, *values: Summary.Value) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def _metadata(self, key: str) -> SummaryMetadata | None:
        """Return the description that TensorBoard shows with a chart.

        Only the first value of a key requires a description, so the description is None for later values.
        """
        if key in self._described:
            return None
        self._described.add(key)
        return SummaryMetadata(summary_description=description_of(key))

    def close(self, status: str = "complete") -> None:
        """Write the final status and close the file. A stopped run stays "running", because it may be resumed."""
        ends = {"complete": Status.STATUS_SUCCESS, "failed": Status.STATUS_FAILURE}
        if self._settings and status in ends:
            end = SessionEndInfo(status=ends[status], end_time_secs=time.time())
            self._add(0, _hparams_value(SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=end)))
        self._writer.close()


def _text(tag: str, text: str) -> Summary.Value:
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=TensorShapeProto())
    return Summary.Value(tag=tag, tensor=tensor, metadata=text_metadata(display_name=tag, description=""))


def _hparams(settings: Mapping[str, Any]) -> Summary.Value:
    """Return the settings that differ from the defaults as hyperparameters.

    TensorBoard shows each of them in a column.
    """
    defaults = flattened(config_to_dict(Config()))
    start = SessionStartInfo(start_time_secs=time.time())
    for key, value in flattened(settings).items():
        if key in defaults and defaults[key] == value:
            continue
        entry = start.hparams[key]
        if isinstance(value, bool):
            entry.bool_value = value
        elif isinstance(value, (int, float)):
            entry.number_value = value
        else:
            entry.string_value = str(value)
    return _hparams_value(SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=start))


def _hparams_value(tag: str, data: HParamsPluginData) -> Summary.Value:
    return Summary.Value(tag=tag, tensor=NULL_TENSOR, metadata=hparams_metadata(data))
