"""Modules that are imported from user files: their names, and what their import statements find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from gdpo_nemo.utils import user_modules
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.import_path import ImportPath


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        file = folder / (name.replace("__", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


REWARDS = """
import helper, kit.deep as deep
from helper import WHO
from kit import deep as again
from .helper import WHO as relative

def late():
    import second
    from kit.deep import WHO as inner
    return WHO, helper.WHO, relative, deep.WHO, again.WHO, second.WHO, inner
"""


def test_files_of_two_folders_import_the_modules_of_their_folder(tmp_path):
    """Also in functions, in packages, and in modules that a module imports."""
    found = {}
    for who in ("a", "b"):
        parts = {
            "helper": "from third import WHO",
            "second": "import third\nWHO = third.WHO",
            "third": f"WHO = {who!r}",
        }
        parts |= {"kit____init__": "", "kit__deep": "from third import WHO", "rewards": REWARDS}
        found[who] = ImportPath(f"{write(tmp_path / who, **parts)}/rewards.py:late").load()
    assert {who: set(late()) for who, late in found.items()} == {"a": {"a"}, "b": {"b"}}


def test_a_file_in_a_package_imports_modules_by_the_name_of_the_package(tmp_path):
    """Also by relative names, and modules of its folder without the name of the package."""
    write(tmp_path, package__sub__util="WHO = 1")
    for folder in ("package", "package/sub"):
        (tmp_path / folder / "__init__.py").touch()
    imports = ("from package.sub.util import WHO", "from .util import WHO as relative", "import util")
    write(tmp_path, package__sub__main="\n".join([*imports, "found = WHO, relative, util.WHO"]))
    assert ImportPath(f"{tmp_path}/package/sub/main.py:found").load() == (1, 1, 1)


def test_files_whose_paths_differ_only_in_separators_are_different_modules(tmp_path):
    write(tmp_path, a__b_c="WHO = 1", a_b__c="WHO = 2")
    (tmp_path / "a" / "c.d.py").write_text("WHO = 3")
    write(tmp_path / "a", d="WHO = 4", e="WHO = 5", e____init__="WHO = 6")
    files = ("a/b_c", "a_b/c", "a/c.d", "a/d", "a/e")
    assert [ImportPath(f"{tmp_path}/{file}.py:WHO").load() for file in files] == [1, 2, 3, 4, 5]


@given(st.text("aZ0_/.- é漢", min_size=1))
def test_a_folders_name_is_decoded_from_the_name_of_its_package(text):
    encoded = user_modules._encoded(text)
    assert f"x{encoded}".isidentifier() and user_modules._decoded(encoded) == text


def test_a_module_of_the_folder_precedes_an_imported_package_with_its_name(tmp_path):
    write(tmp_path, hypothesis="WHO = 1", rewards="import hypothesis\nWHO = hypothesis.WHO")
    assert ImportPath(f"{tmp_path}/rewards.py:WHO").load() == 1


def test_installed_packages_give_way_to_the_folder_and_the_standard_library_does_not(tmp_path):
    """A folder that is not a package hides no package, and this project is not imported a second time."""
    write(tmp_path, psutil="WHO = 1", statistics="raise OSError", gdpo_nemo____init__="raise OSError")
    write(tmp_path, yaml__rows="raise OSError", notes__rows="WHO = 2")
    text = "import psutil, statistics, yaml, gdpo_nemo, notes.rows as notes\nfound = psutil, yaml, notes"
    write(tmp_path, rewards=text)
    ours, yaml, notes = ImportPath(f"{tmp_path}/rewards.py:found").load()
    assert (ours.WHO, notes.WHO) == (1, 2) and hasattr(yaml, "safe_load")


def test_a_module_that_the_main_program_has_imported_is_not_imported_again(tmp_path, monkeypatch):
    write(tmp_path, shared_by_program="WHO = []", rewards="from shared_by_program import WHO")
    monkeypatch.syspath_prepend(tmp_path)
    import shared_by_program

    assert ImportPath(f"{tmp_path}/rewards.py:WHO").load() is shared_by_program.WHO


def test_another_process_imports_the_module_by_its_name(tmp_path):
    """The children of multiprocessing do so with every start method."""
    write(tmp_path, helper="WHO = 3", rewards="from helper import WHO\nclass Mine: who = WHO")
    made = ImportPath(f"{tmp_path}/rewards.py:Mine").load()
    program = f"from {made.__module__} import Mine; print(Mine.who, Mine.__module__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", made.__module__]


def test_a_module_that_is_missing_is_named_without_its_package(tmp_path):
    write(tmp_path, rewards="import absent_helper")
    with pytest.raises(ConfigError, match="rewards.py: ModuleNotFoundError: No module named 'absent_helper'$"):
        ImportPath(f"{tmp_path}/rewards.py:x").load()
