"""The inspector's site says of every sample what the files of the run say, and runs nothing that a model wrote."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import resource
import urllib.error
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from demo_run import NASTY, demo_groups, demo_row
from image_samples import FIRST, RESULT, SECOND, image_group
from inspector_site import columns, script, shards, texts, tokens, unpacked
from PIL import Image as Pillow

from gdpo_nemo.algorithms.rubrics import Criterion
from gdpo_nemo.commands import cli
from gdpo_nemo.config.load import load_config, save_config
from gdpo_nemo.data.images import Image
from gdpo_nemo.data.records import Group, Outcome, Prompt, Trajectory
from gdpo_nemo.observe.log import RunLog
from gdpo_nemo.observe.metrics import MetricsLog
from gdpo_nemo.observe.sample_values import SampleValues
from gdpo_nemo.observe.samples import (
    read_columns,
    read_rollouts,
    remove_rollouts_after,
    rollout_files,
    rollout_path,
    validation_files,
    write_rollouts,
    write_samples,
)
from gdpo_nemo.tools.inspect import builder, rows as token_pieces, server, shards as site_shards, thumbnails
from gdpo_nemo.tools.inspect.rows import groups_of, summed_advantages

DEMO = Path(__file__).resolve().parents[2] / "configs" / "gdpo_tiny_cpu.yaml"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps of six samples, with advantages, terms and the trainer's log-probs."""
    folder = tmp_path / "run"
    folder.mkdir()
    save_config(load_config(DEMO, [f"policy.model_name={tmp_path / 'gone'}"]), folder / "config.yaml")
    log = MetricsLog(folder)
    for step in (1, 2, 3):
        log.append(demo_row(step))
        groups = demo_groups(step)
        trainer = [t.logprobs + np.float32(0.25) for group in groups for t in group.trajectories]
        values = np.linspace(-1, 1, 6) / step
        terms = {"correctness": values / 3, "format": values * 2 / 3}
        entropies = [-t.logprobs for group in groups for t in group.trajectories] if step != 2 else None
        write_rollouts(folder, step, groups, SampleValues(values, trainer, terms, entropies=entropies))
    return folder


def built(run: Path, **options) -> Path:
    return builder.build(run, run.parent / "site", **options).page.parent


def test_the_index_has_a_row_for_every_sample_in_the_order_of_the_files(run):
    found = columns(built(run))
    assert found["step"].tolist() == [1] * 6 + [2] * 6 + [3] * 6
    assert found["group"].tolist() == [0, 0, 0, 1, 1, 1] * 3 and found["sample"].tolist() == [0, 1, 2] * 6
    assert found["length"].tolist() == [3, 4, 5] * 6
    assert found["prompt"].tolist() == [p for p in range(6) for _ in range(3)]


def test_texts_rewards_and_terms_are_those_of_the_files(run):
    out = built(run)
    records = [record for step in (1, 2, 3) for record in read_rollouts(rollout_path(run, step))]
    names = script(out, "index")["rewards"]
    assert texts(out, "completion") == [record["completion"] for record in records]
    assert texts(out, "advantage") == [record["advantage"] for record in records]
    for key in ("rewards", "terms"):
        rows = [dict(zip(names, row)) for row in texts(out, key)]
        assert all(
            row.get(name) == value or (value is None and (row[name] is None or row[name] != row[name]))
            for row, record in zip(rows, records)
            for name, value in record[key].items()
        )
    assert [texts(out, "spans"), texts(out, "version")] == [[[]] * 18, [4] * 18]
    prompts = [shard["prompts"][place] for shard in shards(out, "text") for place in shard["promptOf"]]
    assert prompts == [record["prompt"] for record in records]


def test_tokens_and_log_probs_keep_their_bits_however_they_are_cut(run, monkeypatch):
    for most in (1, 7, 1 << 17):
        monkeypatch.setattr(site_shards, "TOKENS", most)
        monkeypatch.setattr(site_shards, "CHARACTERS", 40 * most)
        out = built(run)
        for key, column, kind in (
            ("ids", "completion_ids", "int32"),
            ("logprobs", "logprobs", "float32"),
            ("trainer", "trainer_logprobs", "float32"),
        ):
            parts = [read_columns(rollout_path(run, step), [column]).column(column) for step in (1, 2, 3)]
            expected = np.concatenate([part.combine_chunks().flatten().to_numpy() for part in parts])
            assert tokens(out, key, kind).tobytes() == expected.astype(kind).tobytes()
        logprobs = tokens(out, "logprobs", "float32")
        found = [
            unpacked(shard["entropy"], "float32")
            if shard["entropy"]
            else np.full(unpacked(shard["lengths"], "int32").sum(), np.nan)
            for shard in shards(out, "tokens")
        ]
        # Those of step 2, the second third, were not recorded.
        expected = np.where(np.arange(len(logprobs)) // (len(logprobs) // 3) == 1, np.nan, -logprobs)
        np.testing.assert_array_equal(np.concatenate(found), expected)
        assert most != 1 or {shard["entropy"] for shard in shards(out, "tokens")[6:12]} == {""}
        assert tokens(out, "lengths", "int32").tolist() == [3, 4, 5] * 6
        assert tokens(out, "written", "uint8").all()
        counts = [len(unpacked(shard["lengths"], "int32")) for shard in shards(out, "tokens")]
        assert script(out, "index")["starts"][1] == np.cumsum([0, *counts[:-1]]).tolist()
        assert most != 1 or set(counts) == {1}
        sizes = [len(shard["completion"]) for shard in shards(out, "text")]
        assert script(out, "index")["starts"][0] == np.cumsum([0, *sizes[:-1]]).tolist()


def test_environment_tokens_and_unknown_trainer_logprobs_are_distinguished(tmp_path):
    prompt = Prompt("p", np.arange(2, dtype=np.int32), "2=", "digit_sort")

    def sample(number, mask):
        logprobs = np.where(mask, np.float32(-1), np.float32(np.nan)).astype(np.float32)
        ids = np.arange(len(mask), dtype=np.int32)
        return Trajectory(prompt, number, ids, logprobs, 2, "t", "stop", {"a": 1.0}, loss_mask=np.array(mask), turns=2)

    samples = [sample(0, [True, False, True]), sample(1, [True, True])]
    samples[0].spans = ((2, 1), (3, 1))
    samples[1].loss_mask = None
    trainer = [np.array([-1.5, np.nan, -1.0], np.float32), np.full(2, np.nan, np.float32)]
    write_rollouts(tmp_path / "run", 1, [Group(prompt, samples)], SampleValues(trainer_logprobs=trainer))
    out = built(tmp_path / "run")
    assert tokens(out, "written", "uint8").tolist() == [1, 0, 1, 1, 1]
    assert texts(out, "spans") == [[2, 1, 3, 1], []]
    np.testing.assert_array_equal(columns(out)["gap"], np.array([0.5, np.nan], np.float32))
    np.testing.assert_array_equal(columns(out)["logprob"], np.array([-1, -1], np.float32))


def test_each_image_has_one_thumbnail_and_samples_have_their_places(tmp_path, monkeypatch):
    monkeypatch.setattr(thumbnails, "CHARACTERS", 1)  # a shard per image
    run = tmp_path / "run"
    for step in (1, 2):
        write_rollouts(run, step, [image_group(step), *demo_groups(prompts=1)], SampleValues(np.zeros(5)))
    out = built(run)
    assert texts(out, "images") == [[0, -7, 3, 1, -3, 2], [0, -7, 3, 1, -3, 2, 2, 2, 4], None, None, None] * 2
    assert script(out, "index")["starts"][2] == [0, 1, 2]
    for (entry,), image, size in zip(
        shards(out, "images"), (FIRST, SECOND, RESULT), ((64, 48), (26, 160), (160, 40)), strict=True
    ):
        assert entry[:3] == [image.sha256, image.width, image.height]
        with Pillow.open(io.BytesIO(base64.b64decode(entry[3]))) as shown:
            assert (shown.format, shown.size) == ("PNG", size)
    assert shards(out, "text")[0]["prompts"][0].startswith("A [image 64×48 ")


def test_page_of_missing_and_hostile_images_shows_the_samples_and_decodes_none(tmp_path, capsys):
    run = tmp_path / "run"
    bomb, other_size = encoded(13_000), encoded(100)
    images = (
        Image(hashlib.sha256(bomb).hexdigest(), 13_000, 13_000, bomb),
        Image(hashlib.sha256(other_size).hexdigest(), 50, 50, other_size),
    )
    write_rollouts(run, 1, [image_group(), image_group(images=images)])
    (run / "images" / f"{FIRST.sha256}.png").write_bytes(RESULT.data)
    (run / "images" / f"{SECOND.sha256}.jpg").unlink()
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert cli.main(["inspect", str(run)]) == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start < 100 << 10  # in KiB; decoded: 169 MB
    assert "4 images are missing or damaged" in capsys.readouterr().out
    assert [bool(entry[3]) for shard in shards(run / "inspect", "images") for entry in shard] == [
        *[False] * 2,
        True,
        *[False] * 2,
    ]


def encoded(side: int) -> bytes:
    """Return a PNG with one bit per pixel, which is small even with many pixels."""
    out = io.BytesIO()
    Pillow.new("1", (side, side)).save(out, "PNG")
    return out.getvalue()


def test_files_of_json_lines_are_shown_as_those_of_parquet(run, tmp_path):
    old = tmp_path / "old"
    (old / "rollouts").mkdir(parents=True)
    for step in (1, 2, 3):
        write_samples(old / "rollouts" / f"step_{step:04d}.jsonl", demo_groups(step))
    new = builder.build(run, tmp_path / "a").page.parent
    out = builder.build(old, tmp_path / "b").page.parent
    assert texts(out, "completion") == texts(new, "completion")
    assert tokens(out, "logprobs", "float32").tobytes() == tokens(new, "logprobs", "float32").tobytes()
    assert np.isnan(columns(out)["advantage"]).all()


def test_advantage_of_grpo_follows_its_formula():
    rewards = {"a": np.array([1.0, 0, 0, 1, 1]), "b": np.array([0.0, 0, 1, np.nan, 5])}
    groups = np.array([0, 0, 0, 1, 1], np.int32)
    found = summed_advantages(rewards, groups, ["ok"] * 4 + ["aborted"], {"a": 1.0, "b": 0.5})
    total = np.array([1.0, 0, 0.5])
    np.testing.assert_allclose(found[:3], (total - total.mean()) / (total.std(ddof=1) + 1e-6), rtol=1e-6)
    assert found[3] == 0 and np.isnan(summed_advantages(rewards, groups, ["ok"] * 5, {})).all()


def test_equal_completions_of_a_group_are_counted(run):
    assert columns(built(run))["equal"].tolist() == [1, 2, 2] * 6


def test_a_prompt_that_comes_twice_in_a_row_makes_two_groups(tmp_path):
    group = demo_groups(prompts=1)[0]
    write_rollouts(tmp_path, 1, [group, group])
    table = read_columns(rollout_path(tmp_path, 1), ["prompt_id", "position", "sample_index"])
    assert groups_of(table).tolist() == [0, 0, 0, 1, 1, 1]


class Page(HTMLParser):
    """Scripts, styles and the policy of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] in ("script", "style"):
            self.inside.setdefault(self.tags[-1][0], data)


@pytest.mark.slow
def test_the_policy_of_the_page_runs_its_own_script_and_no_other(run):
    page = Page((built(run) / "index.html").read_text())
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        assert [t for t, _ in page.tags].count(tag) == 1
        digest = base64.b64encode(hashlib.sha256(page.inside[tag].encode()).digest()).decode()
        assert rules[rule].removesuffix(" 'strict-dynamic'") == f"'sha256-{digest}'"
    assert rules["default-src"] == "'none'" and "unsafe" not in policy
    assert not any(name.startswith("on") or name == "style" for _, attributes in page.tags for name in attributes)


def test_script_of_the_page_inserts_model_output_as_text_only(run):
    source = Page((built(run) / "index.html").read_text()).inside["script"]
    unsafe = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|srcdoc|javascript:"
    assert not re.search(unsafe, source)


def test_data_are_plain_values_in_ascii_for_all_model_output(tmp_path):
    texts_written = [NASTY, "\u202eevil\u2066", "\udc00 half", "</script>\u2028", "__proto__", "a" * 100_000]
    prompt = Prompt("__proto__", np.arange(2, dtype=np.int32), NASTY, "constructor")
    ids = np.arange(1, dtype=np.int32)
    samples = [
        Trajectory(prompt, n, ids, np.zeros(1, np.float32), 0, text, "stop", {"__proto__": 1.0}, detail=text)
        for n, text in enumerate(texts_written)
    ]
    write_rollouts(tmp_path / "run", 1, [Group(prompt, samples)])
    out = built(tmp_path / "run")
    assert texts(out, "completion") == texts_written == texts(out, "detail")
    for path in (out / "data").glob("*.js"):
        content = path.read_text("ascii")
        assert "\n" not in content[:-1] and "<script" not in (out / "index.html").read_text().split("<script>", 1)[1]
        # A key of an object literal could be __proto__; only names of the site's own are keys.
        keys = json_keys(json.loads(content[content.index(",") + 1 : -3]))
        assert "__proto__" not in keys and all(re.fullmatch(r"[a-zA-Z]+\d*", key) for key in keys)


def json_keys(value) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {key for item in value.values() for key in json_keys(item)}
    return {key for item in value for key in json_keys(item)} if isinstance(value, list) else set()


def test_a_runs_name_is_escaped(tmp_path):
    run = tmp_path / "<script>alert(1)<"
    write_rollouts(run, 1, demo_groups())
    page = (built(run) / "index.html").read_text()
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page


def test_a_site_written_again_leaves_no_shard_of_before(run, monkeypatch):
    monkeypatch.setattr(site_shards, "TOKENS", 1)
    out = built(run)
    assert (out / "data" / "tokens-0017.js").exists()
    monkeypatch.undo()
    built(run)
    names = sorted(path.name for path in (out / "data").iterdir())
    assert names == ["index.js", "snippets.js", "stamp.js", "text-0000.js", "tokens-0000.js", "vocabulary.js"]


def test_stamp_changes_only_with_the_samples(run):
    first = builder.stamp_of(run)
    (run / "metrics.jsonl").write_text("")
    assert builder.stamp_of(run) == first
    write_rollouts(run, 4, demo_groups(4))
    assert first != builder.stamp_of(run) == script(built(run), "stamp")


class Letters:
    """A tokenizer of five tokens: text, a half of a character twice, a word of SentencePiece, a byte of it."""

    names = ["ab", "â", "Ĥ", "\u2581the", "<0xE2>"]

    def __len__(self):
        return len(self.names)

    def convert_ids_to_tokens(self, ids):
        return [self.names[token] for token in ids]

    def decode(self, ids, **options):
        return ["ab", "\ufffd", "\ufffd", "the", "\ufffd"][ids[0]]


def test_parts_of_characters_are_given_as_bytes_and_unknown_tokens_as_none():
    found = token_pieces.pieces_of(np.array([0, 1, 2, 3, 4, 9], np.int32), Letters())
    assert found == ["ab", [0xE2], [0x82], " the", [0xE2], None]


def test_command_prints_the_path_of_the_page_and_warns_of_tokens_without_text(run, capsys):
    assert cli.main(["inspect", str(run)]) == 0
    out = capsys.readouterr().out
    assert f"{run / 'inspect' / 'index.html'} (18 samples" in out and "tokens are shown as IDs" in out
    assert script(run / "inspect", "index")["live"] is False


@pytest.mark.parametrize(
    "content, said",
    [(b"", "is not a rollout file"), (b"PAR1 and no more", "is not a rollout file")],
)
def test_a_damaged_file_of_samples_is_named_in_one_line(run, capsys, content, said):
    rollout_path(run, 2).write_bytes(content)
    assert cli.main(["inspect", str(run)]) == 1
    error = capsys.readouterr().err
    assert "step_0002.parquet" in error and said in error and error.count("\n") == 1


def test_the_server_gives_the_site_to_this_machine_and_to_no_other_name(run):
    out = built(run)
    with server.serving(out, 0) as address:
        assert address and address.startswith("http://127.0.0.1:")
        assert urllib.request.urlopen(address).read() == (out / "index.html").read_bytes()
        assert urllib.request.urlopen(address + "data/index.js?1").status == 200
        for path, host in (("", "evil.example:80"), ("data/", None), ("../run/config.yaml", None)):
            request = urllib.request.Request(address + path, headers={"Host": host} if host else {})
            with pytest.raises(urllib.error.HTTPError, match="40[34]"):
                urllib.request.urlopen(request)


def test_following_rewrites_the_site_when_the_run_has_more_samples(run, monkeypatch):
    out = built(run, live=True)

    class Enough(Exception):
        pass

    def sleep(_seconds):
        if script(out, "index")["rows"] > 18:
            raise Enough
        write_rollouts(run, 4, demo_groups(4))

    monkeypatch.setattr(server.time, "sleep", sleep)
    with pytest.raises(Enough):
        server.follow(run, out, 1.0)
    assert script(out, "index")["rows"] == 24 and script(out, "index")["live"] is True


def test_outcomes_and_environments_are_shown_by_name(run):
    out = built(run)
    names = script(out, "index")["names"]
    found = [names[0][code] for code in columns(out)["outcome"]]
    assert found == [Outcome.TRUNCATED, Outcome.OK, Outcome.OK] * 6 and names[1:] == [["digit_sort"], ["stop"]]


@pytest.mark.slow
def test_samples_of_a_validation_are_stored_and_distinguished_from_those_of_steps(config, run_dir):
    log = RunLog(config, run_dir)
    log.validation({"step": 0, "validation/format": 0.5}, demo_groups(9))
    log.step(demo_row(1), demo_groups(1))
    log.validation({"step": 1, "validation/format": 0.5}, demo_groups(8, samples=1))
    log.close("complete")
    assert [step for step, _ in validation_files(run_dir)] == [0, 1] and [s for s, _ in rollout_files(run_dir)] == [1]
    out = builder.build(run_dir, run_dir.parent / "site").page.parent
    assert (
        columns(out)["kind"].tolist() == [0] * 6 + [1] * 8
        and columns(out)["step"].tolist() == [1] * 6 + [0] * 6 + [1] * 2
    )
    remove_rollouts_after(run_dir, 0)
    assert [step for step, _ in validation_files(run_dir)] == [0] and not list(rollout_files(run_dir))


def test_a_family_is_one_column_and_a_sample_has_a_table_of_its_criteria(tmp_path):
    """Rows with 30 and with 2 criteria; the rubric of a row is written once."""
    groups, terms = [], []
    for row, count in (("long", 30), ("short", 2)):
        rubric = {f"rubric/{k}": Criterion(f"<b>{row} {k}", 1.0 + k, required=k == 0) for k in range(count)}
        prompt = Prompt(row, np.arange(2, dtype=np.int32), row, "toy")
        tokens = np.arange(4, dtype=np.int32)
        samples = []
        for index in range(3):
            sample = Trajectory(prompt, index, tokens, np.full(4, -0.5, np.float32), 0, "abcd", "stop", criteria=rubric)
            sample.rewards = {"format": 0.5, **{name: float(index > 0) for name in rubric}, "rubric/1": None}
            sample.reward_tokens = {"rubric/0": ((0, 1), (2, 4))}
            samples.append(sample)
            terms.append({name: number + 0.25 * index for number, name in enumerate(rubric)})
        groups.append(Group(prompt, samples))
    run = tmp_path / "run"
    run.mkdir()
    totals = {"format": np.arange(6.0), "rubric/*": -np.arange(6.0)}
    write_rollouts(run, 1, groups, SampleValues(np.arange(6.0), terms=totals, criterion_terms=terms))
    out = built(run)
    index, (shard,) = script(out, "index"), shards(out, "text")
    assert index["rewards"] == ["format", "rubric/*"]
    assert columns(out)["reward1"].tolist() == [0, 1, 1, 0, 1, 1] and columns(out)["term1"].tolist() == [
        -0.0,
        -1,
        -2,
        -3,
        -4,
        -5,
    ]
    assert shard["rewards"][1] == [0.5, 1.0] and shard["terms"][1] == [1.0, -1.0]
    assert shard["rubricOf"] == [0, 0, 0, 1, 1, 1]
    assert shard["rubrics"][1] == [["rubric/*", "0", "<b>short 0", 1, True], ["rubric/*", "1", "<b>short 1", 2, False]]
    assert shard["verdicts"][4] == [[1, 0.25, 0, 1, 2, 4], [None, 1.25]]
    assert [len(verdicts) for verdicts in shard["verdicts"]] == [30] * 3 + [2] * 3
