"""The samples of a step on the disk: nothing is lost or rounded on the way, and older files are read as before."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from demo_run import NASTY, demo_groups
from hypothesis import HealthCheck, given, settings, strategies as st
from image_samples import FIRST, RESULT, SECOND, image_group

from gdpo_nemo.commands import cli
from gdpo_nemo.data.records import Group, Outcome, Prompt, Trajectory
from gdpo_nemo.observe import sample_images, samples as sample_files
from gdpo_nemo.observe.sample_columns import SCHEMA, table_of, values_of
from gdpo_nemo.observe.sample_images import with_labels
from gdpo_nemo.observe.sample_values import SampleValues
from gdpo_nemo.observe.samples import (
    iter_rollouts,
    missing_images,
    read_columns,
    read_rollouts,
    remove_rollouts_after,
    rollout_files,
    rollout_path,
    write_rollouts,
    write_samples,
)

float32s = st.floats(width=32)
values = st.one_of(st.none(), st.floats())
names = st.sampled_from(["correct", "short", "safe"])
texts = st.text(st.characters(), max_size=6)  # half surrogate pairs among them


@st.composite
def trajectories(draw, prompt: Prompt, sample: int) -> Trajectory:
    logprobs = draw(st.lists(float32s, max_size=5))
    count = len(logprobs)
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count))
    made = Trajectory(
        prompt=prompt,
        sample_index=sample,
        completion_ids=np.array(ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        policy_version=draw(st.integers(0, 2**40)),
        text=draw(texts),
        finish_reason="stop",
        rewards=draw(st.dictionaries(names, values)),
        outcome=draw(st.sampled_from(Outcome)),
        detail=draw(texts),
        loss_mask=draw(st.one_of(st.none(), st.just(np.arange(count) % 2 == 0))),
        turns=draw(st.integers(1, 9)),
        extra=draw(st.dictionaries(texts, texts, max_size=2)),
    )
    made.spans = ((3, 1), (4, count)) if draw(st.booleans()) else ()
    tokens = len(prompt.token_ids) + count
    made.routing = np.arange(-1, 4 * tokens - 1, dtype=np.int8).reshape(tokens, 4) if draw(st.booleans()) else None
    return made


@st.composite
def batches(draw) -> list[Group]:
    groups = []
    for place in range(draw(st.integers(0, 3))):
        prompt = Prompt(draw(texts), np.arange(draw(st.integers(0, 3)), dtype=np.int32), draw(texts), "digit_sort")
        group = Group(prompt, [draw(trajectories(prompt, sample)) for sample in range(draw(st.integers(0, 3)))])
        group.position = place if draw(st.booleans()) else -1
        groups.append(group)
    return groups


def bits(column: pa.ChunkedArray | np.ndarray, kind: type) -> list[int]:
    return np.asarray(column, dtype=np.dtype(kind)).view(f"u{np.dtype(kind).itemsize}").tolist()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(groups=batches(), data=st.data(), tokens=st.sampled_from([1, 3, 1 << 22]))
def test_every_field_of_a_sample_reads_back_bit_for_bit(tmp_path_factory, monkeypatch, groups, data, tokens):
    monkeypatch.setattr(sample_files, "_TOKENS_AT_ONCE", tokens)  # of one, several and all groups in a row group
    samples = [(group, t) for group in groups for t in group.trajectories]
    column = st.lists(st.floats(), min_size=len(samples), max_size=len(samples)).map(np.array)
    advantages = data.draw(column)
    terms = {"correct": data.draw(column), "short": data.draw(column)}
    trainer = [t.logprobs * np.float32(0.5) for _, t in samples]
    entropies = [-t.logprobs for _, t in samples]
    values = SampleValues(advantages, trainer, terms, entropies=entropies)
    path = write_rollouts(tmp_path_factory.mktemp("run"), 1, groups, values)
    table = read_columns(path, SCHEMA.names)
    assert bits(table["advantage"], np.float64) == bits(advantages, np.float64)
    expected = {"logprobs": [t.logprobs for _, t in samples], "trainer_logprobs": trainer, "entropies": entropies}
    for name, wanted in expected.items():
        assert [bits(row, np.float32) for row in values_of(table[name])] == [bits(row, np.float32) for row in wanted]
    for row, (_, t) in zip(values_of(table["rewards"]), samples, strict=True):
        assert [(k, str(v)) for k, v in row.items()] == [(k, str(v)) for k, v in t.rewards.items()]
    assert [str(row["short"]) for row in values_of(table["terms"])] == [str(v) for v in terms["short"].tolist()]
    records = read_rollouts(path)
    for record, (group, t) in zip(records, samples, strict=True):
        assert (record["prompt_id"], record["prompt"]) == (t.prompt.id, t.prompt.text)
        assert (record["completion"], record["detail"], record.get("extra", {})) == (t.text, t.detail, t.extra)
        assert record["completion_ids"] == t.completion_ids.tolist()
        assert record["prompt_ids"] == t.prompt.token_ids.tolist()
        assert record.get("routing") == (None if t.routing is None else t.routing.ravel().tolist())
        assert record["loss_mask"] == (None if t.loss_mask is None else t.loss_mask.astype(int).tolist())
        assert (record["policy_version"], record["turns"], record["outcome"]) == (t.policy_version, t.turns, t.outcome)
        assert (record["position"], record["spans"]) == (group.position, [list(span) for span in t.spans])
    assert json.loads(json.dumps(records), parse_constant=float) == records


def test_missing_rewards_nan_and_0_are_three_things_in_the_file(tmp_path):
    (group,) = demo_groups(prompts=1)
    group.trajectories[0].rewards = {"a": 0.0, "b": None, "c": float("nan")}
    path = write_rollouts(tmp_path, 1, [group])
    first, second, _ = values_of(read_columns(path, ["rewards"])["rewards"])
    assert first["a"] == 0.0 and first["b"] is None and math.isnan(first["c"]) and "a" not in second
    assert read_rollouts(path)[0]["rewards"] == {"a": 0.0, "b": None, "c": None}


def test_missing_value_is_absent_from_a_record_and_null_in_the_file(tmp_path):
    path = write_rollouts(tmp_path, 1, demo_groups())
    optional = {"advantage", "terms", "trainer_logprobs", "entropies", "extra"}
    assert not optional & read_rollouts(path)[0].keys()
    assert all(read_columns(path, [name])[name].null_count == 6 for name in optional)


def test_a_step_of_no_samples_is_a_file_of_none(tmp_path):
    assert read_rollouts(write_rollouts(tmp_path, 1, [])) == []


def test_any_reader_of_parquet_sees_plain_columns(tmp_path):
    values = SampleValues(np.arange(6.0), terms={"format": np.ones(6)})
    path = write_rollouts(tmp_path, 7, demo_groups(7), values)
    assert path.name == "step_0007.parquet"
    frame = pq.read_table(path).to_pandas()
    assert frame["advantage"].tolist() == [0, 1, 2, 3, 4, 5] and dict(frame["terms"][0]) == {"format": 1.0}
    assert frame["completion_ids"][1].dtype == np.int32 and frame["logprobs"][1].dtype == np.float32
    assert frame["completion"][0] == NASTY.encode("utf-8", "replace").decode()
    assert read_rollouts(path)[0]["completion"] == NASTY


@pytest.mark.parametrize("name", ["advantages", "trainer_logprobs", "entropies", "terms"])
def test_columns_that_do_not_match_the_trajectories_are_refused(tmp_path, name):
    column = np.zeros(5)
    values = SampleValues(**{name: {"format": column} if name == "terms" else column})
    with pytest.raises(ValueError, match="5 entries for 6"):
        write_rollouts(tmp_path, 1, demo_groups(), values)
    assert list(rollout_files(tmp_path)) == []


def test_rollouts_of_steps_that_will_be_redone_are_removed(tmp_path):
    for step in (1, 2, 10):
        write_rollouts(tmp_path, step, demo_groups(step))
    for name in ("step_0003.jsonl", "step_0002.parquet.partial", "step_mine.jsonl"):
        (tmp_path / "rollouts" / name).write_text("")
    remove_rollouts_after(tmp_path, 2)
    assert [step for step, _ in rollout_files(tmp_path)] == [1, 2]
    names = {"step_0001.parquet", "step_0002.parquet", "step_mine.jsonl"}
    assert {path.name for path in (tmp_path / "rollouts").iterdir()} == names


def test_a_write_that_fails_leaves_the_step_as_it_was(tmp_path, monkeypatch):
    path = write_rollouts(tmp_path, 1, demo_groups(1))
    before = path.read_bytes()

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sample_files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_rollouts(tmp_path, 1, demo_groups(2))
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_images_are_stored_once_by_hash_and_listed_with_their_places(tmp_path):
    groups = [image_group(0), image_group(1), *demo_groups(prompts=1)]
    path = write_rollouts(tmp_path, 1, groups)
    stored = {file: file.stat().st_mtime_ns for file in (tmp_path / "images").iterdir()}
    names = [f"{FIRST.sha256}.png", f"{SECOND.sha256}.jpg", f"{RESULT.sha256}.png"]
    assert {file.name: file.read_bytes() for file in stored} == dict(zip(names, [FIRST.data, SECOND.data, RESULT.data]))
    write_rollouts(tmp_path, 2, groups)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "images").iterdir()} == stored
    places = [(FIRST, 1, 3), (SECOND, 5, 2), (RESULT, 10, 4)]
    rows = [
        {"sha256": i.sha256, "width": i.width, "height": i.height, "start": start, "tokens": tokens}
        for i, start, tokens in places
    ]
    assert [record.get("images") for record in read_rollouts(path)[:5]] == [rows[:2], rows, rows[:2], rows, None]
    exported = write_samples(tmp_path / "eval" / "samples.jsonl", groups)
    assert [json.loads(line) for line in exported.read_text().splitlines()] == read_rollouts(path)
    assert {file.name for file in (exported.parent / "images").iterdir()} == set(names)


def test_samples_without_images_have_no_column_and_no_folder_of_images(tmp_path):
    path = write_rollouts(tmp_path, 1, demo_groups())
    assert "images" not in pq.read_schema(path).names and not (tmp_path / "images").exists()
    assert missing_images(tmp_path, [path]) == []


def test_a_write_that_lacks_room_for_an_image_leaves_no_samples(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sample_images, "write_whole", full)
    with pytest.raises(OSError, match="No space left"):
        write_rollouts(tmp_path, 1, [image_group()])
    assert list(rollout_files(tmp_path)) == []


def test_only_placeholders_of_images_are_replaced_by_labels():
    prompt = image_group().prompt
    shown = f"A [image 64×48 {FIRST.sha256[:4]}…] and [image 32×200 {SECOND.sha256[:4]}…]?"
    assert with_labels(prompt.text, prompt.images) == shown
    assert with_labels(prompt.text.replace("<|image_pad|>", "<|image_pad|>" * 256), prompt.images) == shown
    assert with_labels(prompt.text, ()) == prompt.text
    spare = with_labels(prompt.text, prompt.images[:1])
    assert spare.startswith("A [image 64×48") and spare.endswith("and <|vision_start|><|image_pad|><|vision_end|>?")


# -- readers --------------------------------------------------------------------------------------------------------


def older(path: Path, groups: list[Group]) -> Path:
    """A file as runs wrote it before they wrote Parquet."""
    keys = (
        "prompt_id", "sample_index", "environment", "prompt", "completion", "rewards", "outcome", "detail",
        "finish_reason", "policy_version", "prompt_ids", "completion_ids", "logprobs", "turns", "loss_mask",
    )  # fmt: skip
    path.parent.mkdir(exist_ok=True)
    records = [json.loads(line) for line in write_samples(path, groups).read_text().splitlines()]
    path.write_text("".join(json.dumps({key: record[key] for key in keys}) + "\n" for record in records))
    return path


def test_files_of_older_runs_have_the_same_columns(tmp_path):
    groups = demo_groups()
    groups[0].trajectories[1].loss_mask = np.array([True, False, True, True])
    groups[0].trajectories[1].logprobs[1] = np.nan
    old = older(tmp_path / "rollouts" / "step_0001.jsonl", groups)
    new = write_rollouts(tmp_path, 2, groups)
    assert list(rollout_files(tmp_path)) == [(1, old), (2, new)] and rollout_path(tmp_path, 1) == old
    columns = [name for name in SCHEMA.names if name != "not_utf8"]
    one, two = (read_columns(path, columns).to_pydict() for path in (old, new))
    for name in columns:
        assert repr(one[name]).replace("nan", "None") == repr(two[name]).replace("nan", "None"), name
    assert [{**record, "position": -1, "spans": []} for record in read_rollouts(old)] == read_rollouts(new)


def test_first_rows_are_read_without_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_files, "_TOKENS_AT_ONCE", 1)
    path = write_rollouts(tmp_path, 1, demo_groups(prompts=5))
    assert pq.ParquetFile(path).num_row_groups == 5
    whole = path.read_bytes()
    middle = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    footer = int.from_bytes(whole[-8:-4], "little") + 8
    path.write_bytes(whole[:middle] + bytes(len(whole) - middle - footer) + whole[-footer:])
    assert read_columns(path, ["prompt_id"], 3)["prompt_id"].to_pylist() == ["p1-0"] * 3
    with pytest.raises(ValueError, match="damaged"):
        read_columns(path, ["prompt_id"])


def test_a_file_is_read_a_few_samples_at_a_time(tmp_path):
    groups = demo_groups(prompts=50)
    reader = iter_rollouts(write_rollouts(tmp_path, 1, groups))
    assert [record["prompt_id"] for record in reader] == [g.prompt.id for g in groups for _ in g.trajectories]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1"])
def test_a_damaged_file_is_a_value_error_of_one_line(tmp_path, content):
    (tmp_path / "step_0001.parquet").write_bytes(content)
    for read in (read_rollouts, lambda path: read_columns(path, ["prompt_id"])):
        with pytest.raises(ValueError) as error:
            read(tmp_path / "step_0001.parquet")
        assert "\n" not in str(error.value)


def test_other_parquet_file_is_not_a_file_of_rollouts(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "step_0001.parquet")
    with pytest.raises(ValueError, match="no column prompt_id"):
        read_rollouts(tmp_path / "step_0001.parquet")


def test_tables_share_the_memory_of_their_tokens():
    table = table_of(demo_groups(prompts=100))
    first, second, *_ = values_of(table["completion_ids"].combine_chunks())
    assert second.ctypes.data == first.ctypes.data + first.nbytes


# -- the command ----------------------------------------------------------------------------------------------------


def test_the_export_is_the_records_with_their_step(tmp_path, capsys):
    older(tmp_path / "rollouts" / "step_0001.jsonl", demo_groups(1))
    for step in (2, 3):
        write_rollouts(tmp_path, step, demo_groups(step), SampleValues(np.arange(6.0)))
    assert cli.main(["rollouts", str(tmp_path)]) == 0
    wanted = [{"step": step, **r} for step, path in rollout_files(tmp_path) for r in read_rollouts(path)]
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == wanted
    assert cli.main(["rollouts", str(tmp_path), "--step", "3", "--step", "1", "--out", str(tmp_path / "some")]) == 0
    lines = (tmp_path / "some").read_text().split("\n")[:-1]
    assert [json.loads(line) for line in lines] == [r for r in wanted if r["step"] != 2]
    assert capsys.readouterr() == ("", "")


def test_an_export_that_fails_midway_leaves_no_file(tmp_path, capsys):
    write_rollouts(tmp_path, 1, demo_groups(1))
    (tmp_path / "rollouts" / "step_0002.parquet").write_bytes(b"torn")
    assert cli.main(["rollouts", str(tmp_path), "--out", str(tmp_path / "some")]) == 2
    assert "step_0002.parquet: is not a rollout file (ValueError" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts"]
