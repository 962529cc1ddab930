"""``gdpo-nemo push`` with the hub's own client, against a server on this machine that speaks what an upload takes.

Not the hub's other way for large files, xet, which goes to servers of another kind.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import hub_server
import pytest

from gdpo_nemo.commands import cli

WEIGHTS = (2).to_bytes(8, "little") + b"{}" + bytes(range(256)) * 40


@pytest.fixture
def hub(monkeypatch):
    with hub_server.hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", server.token)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield server


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """A run with an exported model, and beside its files what a folder may hold otherwise."""
    folder = tmp_path / "run"
    for name, content in {
        "config.yaml": b"",
        "model/config.json": b"{}",
        "model/model.safetensors": WEIGHTS,
        "model/README.md": b"---\nlicense: mit\n---\n# Mine\n",
        "model/.cache/secret": b"no",
        "checkpoints/step_1/files.json": b"{}",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


MODEL = {"README.md", "config.json", "model.safetensors"}


def test_a_run_is_pushed_as_its_exported_model_into_a_private_repository(hub, run_dir, capsys):
    assert cli.main(["push", str(run_dir), "me/mine"]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out == f"{hub.url}/me/mine\n"
    assert hub.private == {"me/mine": True} and hub.files["me/mine"].keys() == MODEL
    assert all((run_dir / "model" / name).read_bytes() == data for name, data in hub.files["me/mine"].items())


def test_verbose_prints_the_duration_of_the_upload_and_quiet_omits_the_note(hub, run_dir, capsys):
    (run_dir / "model" / "README.md").unlink()
    assert cli.main(["push", str(run_dir), "me/mine"]) == 0
    assert capsys.readouterr().err == f"note: {run_dir / 'model'} has no model card (README.md)\n"
    assert cli.main(["push", str(run_dir), "me/mine", "--quiet"]) == 0
    assert capsys.readouterr() == (f"{hub.url}/me/mine\n", "")
    assert cli.main(["push", str(run_dir), "me/mine", "--verbose"]) == 0
    size = sum(path.stat().st_size for path in (run_dir / "model").rglob("*") if path.is_file())
    took = rf"^upload: \d+\.\d s, 2 files, {size / 1000:.1f} kB$"
    assert re.search(took, capsys.readouterr().err, re.MULTILINE)


def test_repository_is_public_only_on_request(hub, run_dir, capsys):
    assert cli.main(["push", str(run_dir / "model"), "me/open", "--public"]) == 0
    assert hub.private == {"me/open": False}
    hub.files.clear()
    assert cli.main(["push", str(run_dir / "model"), "me/open"]) == 2
    assert "me/open already exists and is public; use --public" in capsys.readouterr().err and hub.files == {}
    assert cli.main(["push", str(run_dir / "model"), "me/open", "--public"]) == 0 and hub.files["me/open"]


def test_dry_run_lists_files_and_sizes_without_network_access(hub, run_dir, capsys, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    assert cli.main(["push", str(run_dir), "me/mine", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[-1] for line in out.splitlines()[:3]] == sorted(MODEL)
    assert f"  {len(WEIGHTS) / 1e3:.1f} kB  model.safetensors" in out and "would upload to me/mine, private" in out
    assert hub.calls == [] and hub.private == {}


def test_token_is_read_from_a_file_and_a_wrong_one_gives_one_sentence(hub, run_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    file = tmp_path / "token"
    file.write_text("hf_wrong\n")
    assert cli.main(["push", str(run_dir), "me/mine", "--token-file", str(file)]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"me/mine: not pushed to {hub.url}: " in err and "401" in err and hub.files == {}
    file.write_text(f"{hub.token}\n")
    assert cli.main(["push", str(run_dir), "me/mine", "--token-file", str(file)]) == 0


def test_a_hub_that_cannot_be_reached_is_one_sentence(hub, run_dir, capsys, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert cli.main(["push", str(run_dir), "me/mine"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "me/mine: not pushed to http://127.0.0.1:9" in err


def _index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00002.safetensors"}}))


@pytest.mark.parametrize(
    "source, spoil, message",
    [
        ("absent", None, "absent: no exported model (no config.json)"),
        ("run/checkpoints/step_1", None, "is a checkpoint; convert this checkpoint with `gdpo-nemo convert --to hf`"),
        ("run", lambda d: (d / "model" / "config.json").unlink(), "no exported model (no model/ in it)"),
        ("run", lambda d: (d / "model" / "model.safetensors").unlink(), "(its *.safetensors is missing)"),
        (
            "run",
            lambda d: (d / "model" / "notes.txt").symlink_to(d.parent / "key"),
            "notes.txt: links to a file outside the",
        ),
        (
            "run",
            lambda d: (d / "model" / "notes").symlink_to(d.parent),
            "notes: links to a file outside the model's folder",
        ),
        ("run", lambda d: _index(d / "model"), "(model-00002.safetensors is missing)"),
        (
            "run",
            lambda d: (d / "model" / "model.safetensors.index.json").write_text("[]"),
            "not an index of model weights",
        ),
    ],
)
def test_folder_that_is_not_an_exported_model_is_refused(hub, run_dir, tmp_path, capsys, source, spoil, message):
    if spoil:
        spoil(run_dir)
    assert cli.main(["push", str(tmp_path / source), "me/mine"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and message in err and hub.calls == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["a b/c"], "REPO: 'a b/c' is not a valid repository name"),
        (["me/mine"], "no access token; set HF_TOKEN or use --token-file"),
        (["me/mine", "--token-file", "absent"], "--token-file: absent cannot be read"),
    ],
)
def test_a_push_that_cannot_be_is_refused_before_anything_is_sent(
    hub, run_dir, capsys, monkeypatch, arguments, message
):
    monkeypatch.delenv("HF_TOKEN")
    assert cli.main(["push", str(run_dir), *arguments]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and message in err and hub.calls == []
