"""The rows of a TRL script: what ``load_dataset(...)`` and the like say, or else the script's code as a function."""

from __future__ import annotations

import ast
from typing import Any

from gdpo_nemo.errors import ConfigError
from gdpo_nemo.interop.trl.code_module import CodeModule
from gdpo_nemo.interop.trl.static_names import Resolver, Unresolved
from gdpo_nemo.interop.trl.trl_run import Rows

_FILE_KINDS = ("json", "csv", "parquet")
_LEFT_OUT = ("shuffle", "select_columns", "remove_columns", "with_format")
"""Methods of a dataset that change nothing here: rows are shuffled by the seed, columns that nobody asks for stay."""


def rows_of(node: ast.expr | None, names: Resolver, module: CodeModule, place: str) -> Rows:
    """Where the rows of the expression come from.

    Args:
        place: of the function that is added to ``module`` where they can be had by running the script's code only.
    """
    if node is None:
        return Rows(problem="the trainer gets no data set")
    node = _before_tokenizing(node, names)
    if (found := _read(node, names)) is not None:
        return found
    try:
        module.add_function(place.rpartition(":")[2], node)
    except ConfigError as error:
        return Rows(problem=f"{ast.unparse(node)} cannot be taken out of the script: {error}")
    return Rows(path=place)


def _before_tokenizing(node: ast.expr, names: Resolver) -> ast.expr:
    """The rows that a function of the script tokenizes, in place of what it returns; any other expression as it is."""
    found = node
    for _ in range(20):
        if isinstance(node, ast.Name):
            binding = names.binding(node.id, node.lineno)
            if binding is None or binding.value is None or binding.part is not None:
                return found
            node = binding.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            function = names.definition(node.func.id)
            if not (isinstance(function, ast.FunctionDef) and "input_ids" in _texts(function)):
                return found
            node = found = node.args[0]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "filter":
            node = node.func.value  # by the number of tokens, if what it filters was tokenized
        else:
            return found
    return found


def _texts(node: ast.AST) -> set[Any]:
    return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}


def _read(node: ast.expr, names: Resolver) -> Rows | None:
    """What can be read off the expression; None where only running it would tell."""
    if isinstance(node, ast.Name):
        binding = names.binding(node.id, node.lineno)
        if binding is None or binding.value is None or binding.part is not None:
            return None
        return _read(binding.value, names)
    if isinstance(node, ast.Subscript):
        inner = _read(node.value, names)
        split = names.value(node.slice)
        if inner is None or inner.split is not None or inner.rows is not None or not isinstance(split, str):
            return None
        inner.split = split
        return inner
    if not isinstance(node, ast.Call):
        return None
    name = ast.unparse(node.func).rpartition(".")[2]
    if name in ("load_dataset", "load_from_disk", "from_list", "from_dict"):
        arguments = _arguments(node, names)
        return None if arguments is None else _made(name, arguments)
    return _method(node, name, names)


def _arguments(call: ast.Call, names: Resolver) -> dict[str, Any] | None:
    """Arguments by name, positional ones as 0, 1; None where one of them cannot be read."""
    values: dict[str, Any] = {str(place): names.value(node) for place, node in enumerate(call.args)}
    for keyword in call.keywords:
        if keyword.arg is None:
            return None
        values[keyword.arg] = names.value(keyword.value)
    return None if any(_unresolved(value) for value in values.values()) else values


def _unresolved(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_unresolved(inner) for inner in value.values())
    if isinstance(value, list):
        return any(_unresolved(inner) for inner in value)
    return not isinstance(value, (str, int, float, bool, type(None), tuple)) or isinstance(value, Unresolved)


def _made(name: str, given: dict[str, Any]) -> Rows | None:
    if name == "from_list":
        rows = given.get("0", given.get("mapping"))
        return Rows(rows=rows) if isinstance(rows, list) and rows and isinstance(rows[0], dict) else None
    if name == "from_dict":
        columns = given.get("0", given.get("mapping"))
        if not isinstance(columns, dict) or not columns:
            return None
        return Rows(rows=[dict(zip(columns, values)) for values in zip(*columns.values())])
    path = given.get("0", given.get("path", given.get("dataset_path")))
    if not isinstance(path, str) or not path:
        return None
    if name == "load_from_disk":
        return Rows(path=path)
    return _loaded(path, given)


def _loaded(path: str, given: dict[str, Any]) -> Rows | None:
    """``load_dataset(path, name, data_files=..., split=...)``; None for arguments that mean more than that."""
    known = {"0", "1", "path", "name", "split", "data_files", "streaming", "token", "num_proc"}
    if set(given) - known:
        return None
    files = given.get("data_files")
    split = given.get("split")
    if path in _FILE_KINDS and files is not None:
        files = files.get(split or "train") if isinstance(files, dict) else files
        return Rows(path=files, split=split) if files else None
    if files is not None:
        return None
    configuration = given.get("1", given.get("name"))
    return Rows(path=f"{path}:{configuration}" if configuration else path, split=split)


def _method(node: ast.Call, name: str, names: Resolver) -> Rows | None:
    """What a method of a dataset makes of its rows; None for one that computes."""
    if not isinstance(node.func, ast.Attribute) or (inner := _read(node.func.value, names)) is None:
        return None
    values = [names.value(argument) for argument in node.args]
    if name in _LEFT_OUT:
        return inner
    if name == "rename_column" and len(values) == 2 and inner.rows is None:
        inner.columns[values[1]] = values[0]
        return inner
    size = _range(node, names)
    if name == "select" and size is not None and inner.size is None:
        inner.size = size
        inner.rows = None if inner.rows is None else inner.rows[:size]
        return inner
    return None


def _range(node: ast.Call, names: Resolver) -> int | None:
    """n of ``.select(range(n))``."""
    chosen = node.args[0] if len(node.args) == 1 else None
    if isinstance(chosen, ast.Call) and ast.unparse(chosen.func) == "range" and len(chosen.args) == 1:
        size = names.value(chosen.args[0])
        return size if isinstance(size, int) else None
    return None
