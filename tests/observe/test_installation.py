"""Whether a machine is fit for a run: what is wrong is found before anything is started."""

from __future__ import annotations

import resource

import pytest

from gdpo_nemo.observe import installation
from gdpo_nemo.observe.installation import check_installation


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    return {check.name: check for check in check_installation(tmp_path_factory.mktemp("runs"))}


def test_this_machine_is_fit_and_every_check_says_what_it_saw(checks):
    assert [name for name, check in checks.items() if check.passed is False and name != "GPUs"] == []
    assert "megatron-core 0.19.2" in checks["packages"].text and "vllm" in checks["engine"].text
    assert all(check.text for check in checks.values())


def test_a_folder_that_takes_no_files_is_found(tmp_path):
    (tmp_path / "file").write_text("in the way")
    (check,) = installation._folder(tmp_path / "file" / "runs")
    assert check.passed is False and "file/runs" in check.text


def test_a_low_limit_of_open_files_is_found():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        assert installation._open_files().passed is False
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_absent_package_is_named(monkeypatch):
    monkeypatch.setattr(installation, "_NEEDED", ("torch", "no-such-package"))
    packages, _ = installation._packages()
    assert packages.passed is False and packages.text == "missing: no-such-package"
