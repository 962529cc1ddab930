"""The record of a run: durable rows, clean numbers, truncation on resume; TensorBoard, rollouts and traces beside
it."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from gdpo_nemo.observe.metrics import MetricsLog, read_metrics
from gdpo_nemo.observe.run_files import TraceLog, read_trace
from gdpo_nemo.utils.errors import RunError

numbers = st.one_of(st.integers(-(2**53), 2**53), st.floats(), st.none())


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.dictionaries(st.text(min_size=1, max_size=8), numbers, max_size=4), max_size=4))
def test_rows_read_back_exactly_without_infinite_values(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("run")
    rows = [{**row, "step": n} for n, row in enumerate(rows)]
    log = MetricsLog(folder)
    for row in rows:
        log.append(row)
    finite = [{k: v for k, v in row.items() if v is not None and math.isfinite(v)} for row in rows]
    assert read_metrics(folder) == finite
    for line in (folder / "metrics.jsonl").read_text().split("\n")[:-1]:
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_numpy_numbers_are_written_as_numbers(tmp_path):
    MetricsLog(tmp_path).append({"step": np.int64(3), "a": np.float32(0.1), "b": np.float64("nan")})
    assert read_metrics(tmp_path) == [{"step": 3, "a": float(np.float32(0.1))}]


@pytest.mark.parametrize("torn", ["", '{"step": 4, "loss": 0.', '{"step": 4}', "\x00\x00"])
def test_a_resumed_log_equals_one_that_was_never_torn(tmp_path, torn):
    log = MetricsLog(tmp_path)
    rows = [
        {"step": 0, "validation/a": 1.0},
        {"step": 1, "loss": 0.1},
        {"step": 2, "loss": 0.2},
        {"step": 2, "validation/a": 2.0},
    ]
    for row in [*rows, {"step": 3, "loss": 0.3}]:
        log.append(row)
    log.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(torn)
    log = MetricsLog(tmp_path)
    log.truncate_after(2)
    log.append({"step": 3, "loss": 0.3})
    assert read_metrics(tmp_path) == [*rows, {"step": 3, "loss": 0.3}]


def test_broken_line_inside_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(RunError, match="line 2"):
        read_metrics(tmp_path)


def test_a_folder_that_cannot_be_written_is_a_run_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        MetricsLog(tmp_path / "file")


def test_full_disk_is_a_run_error_that_names_the_cause(tmp_path):
    log = MetricsLog(tmp_path)
    log._file = open("/dev/full", "w")
    with pytest.raises(RunError, match="No space left"):
        log.append({"step": 1})


@pytest.mark.parametrize("torn", [False, True])
def test_a_trace_is_json_once_closed_and_continues_after_a_crash(tmp_path, torn):
    first = TraceLog(tmp_path)
    first.add("trainer", "train", 10.0, 10.5, step=1)
    first.add("engine 0", "generate", 9.0, 10.0)
    if torn:
        path = tmp_path / "trace.json"
        path.write_text(path.read_text() + '{"ph": "X", "na')
    else:
        first.close()
    second = TraceLog(tmp_path)
    second.add("trainer", "train", 11.0, 11.25)
    second.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    spans = [e for e in events if e["ph"] == "X"]
    assert [(e["name"], e["dur"]) for e in spans] == [("train", 500_000), ("generate", 1_000_000), ("train", 250_000)]
    assert spans[0]["tid"] == spans[2]["tid"] != spans[1]["tid"] and spans[0]["args"] == {"step": 1}
    assert read_trace(tmp_path / "trace.json") == [e for e in events if e["name"] != "process_name"]


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from gdpo_nemo.observe.tensorboard import TensorboardLog

    first = TensorboardLog(tmp_path)
    for step in (1, 2, 3, 4):
        first.write({"step": step, "reward/a/mean": step / 10, "lost": float("nan")})
    first.close()
    # TensorBoard reads the files of one second by a counter, as text: the tenth of a process before its ninth.
    time.sleep(1.1)
    second = TensorboardLog(tmp_path, start_step=2)
    second.write({"step": 3, "reward/a/mean": 9.0})
    second.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/a/mean"]
    assert [(e.step, round(e.value, 4)) for e in events.Scalars("reward/a/mean")] == [(1, 0.1), (2, 0.2), (3, 9.0)]
