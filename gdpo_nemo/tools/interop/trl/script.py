"""Reading of a TRL script without running it: the trainer call with its config, functions, datasets and models."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gdpo_nemo.tools.interop.trl.arguments import (
    ARGPARSE,
    called_name,
    check_names,
    declared,
    keywords_of,
    nodes_of,
    options_of,
)
from gdpo_nemo.tools.interop.trl.code_module import DEFINITIONS, CodeModule
from gdpo_nemo.tools.interop.trl.defaults import MODEL_CONFIG, SCRIPT_ARGUMENTS
from gdpo_nemo.tools.interop.trl.names import Names, Parsed, Resolver, Unresolved, is_main_guard, settled, used
from gdpo_nemo.tools.interop.trl.releases import older_arguments, older_fields
from gdpo_nemo.tools.interop.trl.rows import rows_of
from gdpo_nemo.tools.interop.trl.run import Reward, Rows, TrlRun
from gdpo_nemo.tools.interop.trl.siblings import classes_of, module_file
from gdpo_nemo.tools.interop.trl.trainers import PARSED, TRAINERS
from gdpo_nemo.utils.errors import ConfigError
from gdpo_nemo.utils.files import read_text

_LOADERS = ("from_pretrained",)
_FUNCTIONS = ("reward_funcs", "tools", "environment_factory", "rollout_func")
"""Arguments of a trainer whose functions a run imports."""
_SPECS = {"HarborSpec": "_outcome_reward_func", "OpenRewardSpec": "_outcome_only_reward_func"}
"""Class of ``trl.experimental`` that provides rows, a factory and one reward function -> name of this function."""


def read_script(path: str | Path, arguments: Mapping[str, Any], stem: str, writes: bool = True) -> TrlRun:
    """Read the run that a TRL script would start.

    Args:
        arguments: command-line arguments of the script.
        stem: path of the config without its suffix, which is the prefix of the generated files.
        writes: True if the generated files are written. Otherwise, only required files are generated.

    Raises:
        ConfigError: if the file is not valid Python, or does not contain exactly one call of a trainer in ``TRAINERS``.
    """
    try:
        source = read_text(path)
        tree = ast.parse(source)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not valid Python ({error})") from None
    return _Reader(str(path), source, tree, arguments, stem, writes).run()


class _Reader:
    def __init__(self, path: str, source: str, tree: ast.Module, arguments: Mapping[str, Any], stem: str, writes: bool):
        self._path = path
        self._stem = stem
        self._call, around = _trainer(path, tree)
        functions = [node for node in around if isinstance(node, ast.FunctionDef)]
        guarded = any(isinstance(node, ast.If) and is_main_guard(node) for node in around)
        classes = classes_of(tree, Path(path))
        self._names = _resolver(tree, functions[-1] if functions else None, arguments, classes)
        # Rewards and rows go into separate modules, because the workers that import the rewards do not need the rows.
        self._module = CodeModule(source, Path(path).name, self._names)
        self._row_module = CodeModule(source, Path(path).name, self._names)
        self._arguments = arguments
        self._code = f"{stem}_rewards.py"
        self._row_code = f"{stem}_rows.py"
        self._kind = called_name(self._call)
        self._check_arguments(tree, classes)
        self._copies = not functions and not guarded  # importing the script would start the training
        self._writes = writes
        self._run = TrlRun({}, trainer=self._kind, stem=stem, images=images_of(tree))

    def _check_arguments(self, tree: ast.Module, classes: Mapping[str, ast.ClassDef]) -> None:
        """Raise ConfigError for command-line arguments that the script does not read."""
        config = TRAINERS[self._kind].config
        known = [*TRAINERS[self._kind].defaults, *older_arguments(config), *SCRIPT_ARGUMENTS, *MODEL_CONFIG, "datasets"]
        for definition in classes.values():
            known += [ast.unparse(part.target) for part in definition.body if isinstance(part, ast.AnnAssign)]
        known += options_of(tree)
        check_names(self._arguments, known, f"not an argument of {config} or {self._path}")

    def run(self) -> TrlRun:
        """Return the run with all arguments of the trainer call."""
        given = dict(zip(TRAINERS[self._kind].positional, self._call.args))
        for keyword in self._call.keywords:
            if keyword.arg is None:
                where = f"{self._path}:{self._call.lineno}"
                raise ConfigError(f"{where}: {self._kind}(**...) with unknown arguments is not supported")
            given[keyword.arg] = keyword.value
        functions = [node for name, node in given.items() if name in _FUNCTIONS]
        self._copies = self._copies or (self._writes and self._saves_imports(functions))
        run = self._run
        run.given = self._config(given.pop("args", None))
        run.model = self._model(given.pop("model", None))
        run.tokenizer = self._pretrained(given.pop("processing_class", given.pop("tokenizer", None)))
        run.rewards = self._rewards(given.pop("reward_funcs", None))
        run.teacher = self._pretrained(given.pop("teacher_model", None))
        run.reference = self._pretrained(given.pop("ref_model", None))
        run.reward_model = self._pretrained(given.pop("reward_model", None))
        rollout = given.pop("rollout_func", None)
        if rollout is not None and not _is_none(rollout):
            run.rollout = self._reward(rollout, 0)
        run.factory = self._factory(given.pop("environment_factory", None))
        run.tools = self._rewards(given.pop("tools", None))
        run.lora = self._lora(given.pop("peft_config", None))
        run.train = self._rows("train", given.pop("train_dataset", None))
        evaluation = given.pop("eval_dataset", None)
        if evaluation is not None and not _is_none(evaluation):
            run.evaluation = self._rows("eval", evaluation)
        fields = (*run.fields, *older_fields(TRAINERS[self._kind].config))
        moved = {name: self._names.value(given.pop(name)) for name in [*given] if name in fields}
        run.given = moved | run.given  # until TRL 0.12, some fields of the config were arguments of the trainer
        run.others = {name: ast.unparse(node) for name, node in given.items() if not self._is_off(node)}
        for name, module in ((self._code, self._module), (self._row_code, self._row_module)):
            if module:
                run.files[name] = module.text()
        return run

    def _is_off(self, node: ast.expr) -> bool:
        """Return whether an argument evaluates to None with the given command line."""
        return self._names.value(node) is None

    # -- arguments ----------------------------------------------------------------------------------------------

    def _config(self, node: ast.expr | None) -> dict[str, Any]:
        """Return the fields of the trainer's config that the script or its arguments set."""
        if node is None:
            return {}
        set_later = self._set_later(node.id) if isinstance(node, ast.Name) else {}
        found = self._names.value(node)
        kind = TRAINERS[self._kind].config
        known = (*self._run.fields, *older_fields(kind))
        if isinstance(found, Parsed):
            given = self._names.class_defaults(found.kind) | dict(self._arguments)
            return {key: value for key, value in given.items() if key in known} | set_later
        call = self._followed(node)
        name = called_name(call) if isinstance(call, ast.Call) else ""
        # The trainers accept the config of transformers.
        is_config = self._names.is_subclass(name, kind) or self._names.is_subclass(name, "TrainingArguments")
        if not (isinstance(call, ast.Call) and is_config):
            raise ConfigError(f"{self._path}:{node.lineno}: args is not a readable {kind}(...): {found}")
        given = self._names.class_defaults(name) | self._keywords(call)
        added = self._names.class_fields(name) - {*known}
        return {key: value for key, value in given.items() if key not in added} | set_later

    def _set_later(self, name: str) -> dict[str, Any]:
        """Return the values of assignments ``name.field = value``. An assignment in the function takes precedence."""
        found = {}
        for names in filter(None, (self._names.module, self._names.function)):
            for (owner, field), value in names.attributes.items():
                if owner == name:
                    found[field] = self._names.value(value)
        return found

    def _keywords(self, call: ast.Call) -> dict[str, Any]:
        given: dict[str, Any] = {}
        if call.args:
            given["output_dir"] = self._names.value(call.args[0])
        for keyword in call.keywords:
            value = self._names.value(keyword.value)
            if keyword.arg is not None:
                given[keyword.arg] = value
            elif isinstance(value, dict):
                given.update(value)
            else:
                raise ConfigError(
                    f"{self._path}:{call.lineno}: **{ast.unparse(keyword.value)} with unknown arguments is not "
                    "supported"
                )
        return given

    def _followed(self, node: ast.expr | None) -> ast.expr | None:
        """Return the expression that a name refers to, directly or through other names."""
        for _ in range(20):
            if not isinstance(node, ast.Name):
                return node
            binding = self._names.binding(node.id, node.lineno)
            if binding is None or binding.value is None or binding.part is not None:
                return node
            node = binding.value
        return node

    def _pretrained(self, node: ast.expr | None) -> Any:
        """Return the name of a model or tokenizer, written as text or as the argument of ``from_pretrained``."""
        if node is None:
            return None
        call = self._followed(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _LOADERS:
            if config := quantization_config(call, self._names):
                self._run.notes["quantization_config"] = config
            return self._names.value(call.args[0]) if call.args else Unresolved(ast.unparse(call))
        return self._names.value(node)

    def _model(self, node: ast.expr | None) -> Any:
        """Return the name of the model. If it cannot be read from a function call, use ``model_name_or_path``."""
        name = self._pretrained(node)
        given = self._arguments.get("model_name_or_path")
        if isinstance(name, Unresolved) and isinstance(given, str):
            self._run.notes["model"] = f"{name} is unknown until the script runs; model_name_or_path is used"
            return given
        return name

    def _lora(self, node: ast.expr | None) -> dict[str, Any] | None:
        if node is None or _is_none(node):
            return None
        call = self._followed(node)
        name = called_name(call) if isinstance(call, ast.Call) else ""
        if call is None or _is_none(call):
            return None
        if name == "get_peft_config":
            return lora_of_arguments(self._arguments)
        if name != "LoraConfig" or not isinstance(call, ast.Call):
            self._run.notes["peft_config"] = f"{ast.unparse(call or node)} is not a readable LoraConfig(...)"
            return None
        return {name: self._names.value(value) for name, value in keywords_of(call).items()}

    # -- rewards ------------------------------------------------------------------------------------------------

    def _rewards(self, node: ast.expr | None) -> list[Reward]:
        listed = self._followed(node)
        if node is None or listed is None or _is_none(listed):
            return []
        if isinstance(listed, ast.Attribute) and (spec := self._spec(listed)):
            return [self._of_spec(listed, _SPECS[spec])]
        if isinstance(listed, ast.Call) and (named := self._named_rewards(listed)):
            return named
        elements = listed.elts if isinstance(listed, (ast.List, ast.Tuple)) else [node or listed]
        unknown = isinstance(listed, ast.Name) and self._names.definition(listed.id) is None
        if unknown or isinstance(listed, ast.Attribute):
            return [
                Reward("reward", problem=f"the list {ast.unparse(node or listed)} is only known when the script runs")
            ]
        found: list[Reward] = []
        for element in elements:
            reward = self._reward(element, len(found))
            if any(other.name == reward.name for other in found):
                reward.name = f"{reward.name}_{len(found) + 1}"
            found.append(reward)
        return found

    def _named_rewards(self, call: ast.Call) -> list[Reward]:
        """Return the rewards of a call that selects functions by the argument ``reward_funcs`` (empty for other
        calls)."""
        selected = None
        for owner in map(self._names.value, call.args):
            if isinstance(owner, Parsed):
                selected = selected or self._names.field(owner, "reward_funcs")
        if not isinstance(selected, list):
            return []
        found = []
        for index, name in enumerate(selected):
            element = ast.copy_location(ast.Subscript(call, ast.Constant(index), ast.Load()), call)
            try:
                self._module.add_value(f"reward_{index + 1}", element)
                found.append(Reward(str(name), f"{self._code}:reward_{index + 1}"))
            except ConfigError as error:
                found.append(Reward(str(name), problem=f"cannot be extracted from the script: {error}"))
        self._run.notes["reward_funcs"] = f"{ast.unparse(call)} is assumed to return the functions in this order"
        return found

    def _saves_imports(self, arguments: Sequence[ast.expr]) -> bool:
        """Return whether a copy of the functions is preferable, because the script imports TRL and the copy does not.

        Each verification worker imports the module of its functions, and TRL takes 10 s of CPU time and 1 GB, except
        ``trl.rewards``. The copy must not depend on the location of the script.
        """
        names = set().union(*(used(self._followed(node) or node) for node in arguments))
        copied = [s for s in self._module.statements(names) if getattr(s, "module", "") != "trl.rewards"]
        try:
            self._module.check(copied)
        except ConfigError:
            return False
        packages = _imported(copied)
        if any("__file__" in used(statement) for statement in copied):
            return False
        folder = Path(self._path).parent
        for name in packages:
            if (folder / name).exists() or (folder / f"{name}.py").exists():
                return False
        executed = [statement for statement in self._names.module.body if not isinstance(statement, DEFINITIONS)]
        return "trl" in _imported(executed) - packages

    def _reward(self, node: ast.expr, number: int) -> Reward:
        if isinstance(node, ast.Name) and (definition := self._names.definition(node.id)) is not None:
            return self._defined(node.id, definition)
        value = self._names.value(node)
        if isinstance(value, str):
            return reward_model(value)
        name = _callable_name(self._followed(node), f"reward_{number + 1}")
        try:
            label = node.id if isinstance(node, ast.Name) else f"reward_{number + 1}"
            at_top = isinstance(node, ast.Name) and node.id in self._names.module.bindings
            if at_top and not self._copies:
                return Reward(name, f"{self._path}:{label}")
            self._module.add_value(label, self._followed(node) or node)
        except ConfigError as error:
            return Reward(name, problem=f"cannot be extracted from the script: {error}")
        return Reward(name, f"{self._code}:{label}")

    def _defined(self, name: str, definition: ast.stmt) -> Reward:
        if isinstance(definition, ast.ImportFrom) and definition.module:
            original = next(alias.name for alias in definition.names if (alias.asname or alias.name) == name)
            beside = module_file(Path(self._path), definition)
            return Reward(original, f"{beside}:{original}" if beside else f"{definition.module}.{original}")
        if self._names.function is not None and name in self._names.function.definitions:
            return Reward(name, problem="is defined inside a function; move it to the script's top level")
        if not self._copies:
            return Reward(name, f"{self._path}:{name}")
        try:
            self._module.add_name(name)
        except ConfigError as error:
            return Reward(name, problem=f"cannot be extracted from the script: {error}")
        return Reward(name, f"{self._code}:{name}")

    def _factory(self, node: ast.expr | None) -> Reward | None:
        """Return the class passed as ``environment_factory``. The class is copied to the reward module if a function of
        the script defines or modifies it."""
        if node is None or _is_none(node):
            return None
        inside = self._names.function
        name = node.id if isinstance(node, ast.Name) else ""
        must_copy = inside is not None and (
            name in inside.definitions or any(owner == name for owner, _ in inside.attributes)
        )
        factory = self._followed(node)
        if isinstance(factory, ast.Attribute) and self._spec(factory):
            return self._of_spec(factory, factory.attr)
        if not must_copy:
            return self._reward(node, 0)
        try:
            self._module.add_value(name, node)
        except ConfigError as error:
            return Reward(name, problem=f"cannot be extracted from the script: {error}")
        return Reward(name, f"{self._code}:{name}")

    def _spec(self, node: ast.Attribute) -> str:
        """Return the class in ``_SPECS`` whose object has the attribute (empty if another object has it)."""
        made = self._followed(node.value)
        name = called_name(made) if isinstance(made, ast.Call) else ""
        source = self._names.definition(name)
        known = isinstance(source, ast.ImportFrom) and (source.module or "").startswith("trl.")
        return name if known and name in _SPECS else ""

    def _of_spec(self, node: ast.Attribute, name: str) -> Reward:
        """Return an attribute of an object in ``_SPECS``, after adding it to the reward module."""
        try:
            self._module.add_value(node.attr, node)
        except ConfigError as error:
            return Reward(name, problem=f"cannot be extracted from the script: {error}")
        return Reward(name, f"{self._code}:{node.attr}")

    def _rows(self, split: str, node: ast.expr | None) -> Rows:
        found = rows_of(node, self._names, self._row_module, f"{self._row_code}:{split}_rows")
        if found.rows is not None:
            file = f"{self._stem}_{split}.jsonl"
            self._run.files[file] = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found.rows)
            found.path = file
        return found


def _imported(statements: Sequence[ast.stmt]) -> set[str]:
    """Return the packages that statements import (an empty name for a relative import)."""
    found: set[str] = set()
    for statement in statements:
        for node in nodes_of(statement, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        for imported in nodes_of(statement, ast.ImportFrom):
            found.add("" if imported.level else str(imported.module).partition(".")[0])
    return found


def _trainer(path: str, tree: ast.Module) -> tuple[ast.Call, list[ast.AST]]:
    """Return the trainer call and the syntax nodes that contain it, from the outermost to the innermost."""
    found: list[tuple[ast.Call, list[ast.AST]]] = []

    def visit(node: ast.AST, around: list[ast.AST]) -> None:
        if isinstance(node, ast.Call) and called_name(node) in TRAINERS:
            found.append((node, around))
        for child in ast.iter_child_nodes(node):
            visit(child, [*around, node])

    visit(tree, [])
    called = {ast.unparse(call.func) for call in nodes_of(tree, ast.Call)}
    others = [name for name in called if name.endswith("Trainer")]
    if not found and others:
        raise ConfigError(f"{path}: trains with {', '.join(sorted(others))}; known: {', '.join(TRAINERS)}")
    if len(found) != 1:
        lines = f" (lines {', '.join(str(call.lineno) for call, _ in found)})" if found else ""
        raise ConfigError(f"{path}: has {len(found)} calls of TRL trainers{lines}; exactly one call is required")
    return found[0]


def _resolver(
    tree: ast.Module,
    function: ast.FunctionDef | None,
    arguments: Mapping[str, Any],
    classes: Mapping[str, ast.ClassDef],
) -> Resolver:
    """Return a resolver for the script, after simplifying ``if`` statements with known tests."""
    parsed: dict[str, Mapping[str, Any]] = {}
    for kind, known in PARSED.items():
        parsed[kind] = parsed[f"trl.{kind}"] = {**known, **arguments}
    parsed |= dict.fromkeys(classes, dict(arguments))
    caller, call = _only_call(tree, function)
    parameters = _parameters(function, call) if function and call else {}
    inside = Names.of(function.body) if function else None
    around = Names.of(caller.body) if caller else None
    names = Resolver(Names.of(tree.body), inside, around, parameters, parsed, classes)
    parsed[ARGPARSE] = declared(tree, names.value, arguments)
    names = Resolver(Names.of(settled(tree.body, names)), inside, around, parameters, parsed, classes)
    if function is None:
        return names
    return Resolver(names.module, Names.of(settled(function.body, names)), around, parameters, parsed, classes)


def _only_call(tree: ast.Module, function: ast.FunctionDef | None) -> tuple[ast.FunctionDef | None, ast.Call | None]:
    """Return the only call of a function, and the function that contains this call. Each is None if there is none."""
    if function is None:
        return None, None
    calls = [call for call in nodes_of(tree, ast.Call) if ast.unparse(call.func) == function.name]
    if len(calls) != 1:
        return None, None
    caller = None
    for definition in nodes_of(tree, ast.FunctionDef):
        if calls[0] in nodes_of(definition, ast.Call):
            caller = definition
    return caller, calls[0]


def _parameters(function: ast.FunctionDef, call: ast.Call) -> dict[str, ast.expr]:
    """Return the arguments of a call, by parameter name."""
    names = [argument.arg for argument in function.args.args]
    return dict(zip(names, call.args)) | keywords_of(call)


def _callable_name(node: ast.expr | None, otherwise: str) -> str:
    """Return TRL's name of a reward: the name of the function, which a partial may wrap, or of the object's class."""
    while isinstance(node, ast.Call):
        node = node.args[0] if ast.unparse(node.func).endswith("partial") and node.args else node.func
    name = ast.unparse(node).rpartition(".")[2] if isinstance(node, (ast.Name, ast.Attribute)) else ""
    return name or otherwise


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


_OF_IMAGES = ("AutoModelForImageTextToText", "AutoModelForVision2Seq", "AutoModelForMultimodalLM")
_IMAGE_COLUMNS = ("image", "images", "pixel_values")


def reward_model(name: str) -> Reward:
    """Return the reward for a reward model, given its folder or Hub name."""
    return Reward(name.rpartition("/")[2], "reward_model", arguments={"model": name})


def lora_of_arguments(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fields of ``LoraConfig`` that ``get_peft_config`` derives from TRL's ``ModelConfig``."""
    model = {**MODEL_CONFIG, **arguments}
    if not model["use_peft"]:
        return None
    names = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "use_rslora": "use_rslora"}
    names |= {"use_dora": "use_dora", "modules_to_save": "lora_modules_to_save"}
    return {name: model[key] for name, key in names.items()} | {"target_modules": model["lora_target_modules"]}


def images_of(tree: ast.Module) -> str:
    """Return the class or column that shows that a script reads images (empty if it does not)."""
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.Name):
            name = node.id
        if name in _OF_IMAGES:
            return name
        column = node.slice if isinstance(node, ast.Subscript) else None
        if isinstance(column, ast.Constant) and column.value in _IMAGE_COLUMNS:
            return f"the column {column.value!r}"
        for key, value in zip(node.keys, node.values) if isinstance(node, ast.Dict) else ():
            if (getattr(key, "value", None), getattr(value, "value", None)) == ("type", "image"):
                return "messages with an image"
    return ""


def quantization_config(call: ast.Call, names: Resolver) -> str:
    """Return the source text of ``quantization_config`` in ``from_pretrained(...)`` (empty if the model is not
    quantized)."""
    nodes = keywords_of(call)
    for keyword in call.keywords:
        if keyword.arg is None:  # **kwargs
            nodes |= _keywords_in(keyword.value, names)
    node = nodes.get("quantization_config")
    if node is None or names.value(node) is None or _is_dequantized(node, names):
        return ""
    return ast.unparse(node)


def _keywords_in(node: ast.expr, names: Resolver) -> dict[str, ast.expr]:
    """Return the entries of ``dict(...)`` or ``{...}``, which may be assigned to a name."""
    made = _assigned_expression(node, names)
    if isinstance(made, ast.Call) and ast.unparse(made.func) == "dict":
        return keywords_of(made)
    if isinstance(made, ast.Dict):
        return {str(key.value): value for key, value in zip(made.keys, made.values) if isinstance(key, ast.Constant)}
    return {}


def _is_dequantized(node: ast.expr, names: Resolver) -> bool:
    """Return whether quantized weights are dequantized when they are loaded."""
    made = _assigned_expression(node, names)
    value = keywords_of(made).get("dequantize") if isinstance(made, ast.Call) else None
    return value is not None and names.value(value) is True


def _assigned_expression(node: ast.expr, names: Resolver) -> ast.expr:
    """Return the expression assigned to a name; any other expression is returned unchanged."""
    binding = names.binding(node.id, node.lineno) if isinstance(node, ast.Name) else None
    return binding.value if binding is not None and binding.value is not None else node
