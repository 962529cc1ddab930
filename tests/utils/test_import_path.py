"""Import paths: their parts, and checks that do not run the file."""

from __future__ import annotations

import pytest

from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.import_path import ImportPath


@pytest.mark.parametrize(
    "text, module, name, is_in_file",
    [
        ("a/b.py:f", "a/b.py", "f", True),
        ("C:/a.py:f", "C:/a.py", "f", True),
        ("pkg.mod:f", "pkg.mod", "f", False),
        ("pkg.mod.f", "pkg.mod", "f", False),
        ("functions.pkl:f", "functions.pkl", "f", False),
        ("name", "", "name", False),
    ],
)
def test_parts_of_an_import_path(text, module, name, is_in_file):
    path = ImportPath(text)
    assert (path.module, path.name, path.is_in_file) == (module, name, is_in_file)
    assert ImportPath.matches(text) is bool(module)


def test_a_check_finds_definitions_without_running_the_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("raise SystemExit\ndef f(): pass\nclass C: x = 3\n")
    assert ImportPath(f"{file}:f").find_function("key") == file
    assert ImportPath(f"{file}:C").find_function("key", classes=True) == file
    assert ImportPath(f"{file}:C").read_class().attributes == {"x": 3}
    for name, message in (
        ("C", "key: C in .* is a class"),
        ("g", "has no function g"),
        ("", "expected file.py:function"),
    ):
        with pytest.raises(ConfigError, match=message):
            ImportPath(f"{file}:{name}").find_function("key")
