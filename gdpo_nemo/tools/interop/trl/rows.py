"""Translation of a TRL script's datasets, and of trainers that read answers from the data."""

from __future__ import annotations

import ast
from typing import Any

from gdpo_nemo.algorithms.preference_objectives import PREFERENCES
from gdpo_nemo.tools.interop.translation import (
    Act,
    Findings,
    RuleResult,
    combined,
    expanded,
    fixed,
    idle,
    missing,
    to,
    where,
)
from gdpo_nemo.tools.interop.trl.code_module import CodeModule
from gdpo_nemo.tools.interop.trl.names import Resolver, Unresolved
from gdpo_nemo.tools.interop.trl.run import Rows, TrlRun
from gdpo_nemo.utils.errors import ConfigError

_DEFAULT_LENGTH = 4096
"""Maximum number of tokens in a row if neither TRL's arguments nor the model's config.json set a limit."""
_LENGTH = "policy.max_total_sequence_length"


def _loss_type(value: Any, run: TrlRun) -> RuleResult:
    key = "loss_fn.aggregation" if run.algorithm == "sft" else "preference.loss_type"
    return RuleResult(elsewhere=(key, "preference.rpo_alpha", "algorithm.type"))


def _simpo(act: Act) -> Act:
    return where(lambda run: run.get("loss_type") == "simpo", act, idle("applies only to loss_type simpo"))


RULES: list[tuple[str, Act]] = expanded([
    ("max_length", combined(_LENGTH)),
    (
        "max_completion_length",
        missing("answers are not truncated; policy.max_total_sequence_length limits the whole row"),
    ),
    ("truncation_mode", idle("rows longer than max_length are skipped instead of truncated")),
    ("packing", missing("an update counts rows, not blocks of max_length tokens")),
    ("packing_strategy eval_packing", idle("applies only if packing is enabled")),
    ("padding_free padding_value pad_token", idle("sequences are packed, not padded")),
    ("eos_token", missing("answers end with the tokenizer's end token")),
    ("chat_template_path", missing("the tokenizer's chat template is used")),
    ("dataset_num_proc", idle("affects only how rows are read")),
    ("dataset_text_field", idle("applies only to plain-text rows, which are not supported")),
    ("dataset_kwargs", missing("rows are always tokenized")),
    ("shuffle_dataset", idle("rows are always shuffled")),
    ("train_sampling_strategy", combined("data.train.shuffle")),
    ("completion_only_loss assistant_only_loss", combined("data.train.train_on")),
    ("activation_offloading", idle("affects only where activations are stored")),
    ("precompute_ref_*", idle("affects only the time at which reference log-probs are computed")),
    ("label_smoothing_factor", missing("label smoothing of the cross-entropy is not supported", 0.0)),
    ("loss_type", _loss_type),
    ("loss_weights", combined("preference.rpo_alpha")),
    ("beta", to("preference.beta", float)),
    ("label_smoothing", to("preference.label_smoothing", float)),
    ("cpo_alpha", to("preference.rpo_alpha", float)),
    ("simpo_gamma", _simpo(to("preference.simpo_gamma", float))),
    ("alpha", missing("AlphaPO's reward transform is not supported", 0.0)),
    ("desirable_weight", to("preference.desirable_weight", float)),
    ("undesirable_weight", to("preference.undesirable_weight", float)),
    ("center_rewards_coefficient", to("preference.center_rewards_coefficient", float)),
    ("ld_alpha", missing("weighting tokens by the length of the other answer is not supported", 1.0)),
    ("use_weighting", missing("weighting pairs by their probability is not supported")),
    ("f_divergence_type", fixed("reverse_kl", "only the reverse KL divergence is supported")),
    ("f_alpha_divergence_coef", idle("applies only to f_divergence_type alpha_divergence")),
    ("discopop_tau", idle("applies only to loss_type discopop")),
    ("generate_during_eval", idle("this trainer does not sample completions")),
    ("is_encoder_decoder", idle("only decoder-only models are supported")),
    ("max_target_length", idle("applies only to encoder-decoder models")),
    ("label_pad_token_id", idle("sequences are packed, not padded")),
    ("dataset_batch_size num_of_sequences chars_per_token", idle("affects only how rows are read")),
    ("base_model_attribute_name", idle("affects only the kernels of the loss")),
    ("use_*logits_to_keep", idle("affects only the memory of the output layer")),
    ("ref_model_init_kwargs", missing("the reference model uses the policy's settings")),
    ("*_adapter_name", missing("the reference model of adapters is the base model")),
    ("reference_free", missing("log-probs are always compared with those of the reference model")),
    ("force_use_ref_model", missing("the reference model of adapters is the base model")),
    ("rpo_alpha", to("preference.rpo_alpha", float)),
    ("tools", missing("tools are read from the data")),
])  # fmt: skip
"""(field or pattern, rule). For all other fields, the rules in ``keys.RULES`` apply."""


def answers(run: TrlRun, findings: Findings) -> None:
    """Set the objective and the batch size of a trainer that reads answers from the data."""
    kind = _objective(run, findings)
    findings.set("algorithm.type", kind, run.trainer)
    if run.algorithm == "sft":
        _trained_tokens(run, findings)
    _reference(run, findings)
    if run.algorithm == "reward_model" and run.lora is not None:
        findings.blocks("peft_config", "reward_model trains the whole model, because adapters do not include its head")
    rows = run.samples_per_update
    why = f"rows per update; {run.processes} process{'es' * (run.processes > 1)} assumed"
    findings.set("gdpo.num_prompts_per_step", rows, why)
    if str(run.get("train_sampling_strategy")) == "sequential":
        findings.set("data.train.shuffle", False, "train_sampling_strategy sequential")
    if run.algorithm == "sft" and run.get("packing"):
        findings.differs(
            "packing", f"an update has {rows} rows; an update of TRL has {rows} blocks of max_length tokens"
        )


def row_length(run: TrlRun, findings: Findings, positions: int | None) -> int:
    """Set the maximum number of tokens in a row, and return it.

    Args:
        positions: maximum number of positions in the model's config.json (None if it is unknown).
    """
    longest = run.get("max_length")
    if longest is None:
        longest = positions or _DEFAULT_LENGTH
        findings.set(_LENGTH, longest, "longer rows are skipped; TRL does not limit the length of rows")
        return int(longest)
    findings.set(_LENGTH, longest, "max_length")
    if run.algorithm != "reward_model":  # TRL's reward trainer also skips longer rows
        findings.differs("max_length", f"rows of more than {longest} tokens are skipped; TRL truncates them")
    return int(longest)


def _objective(run: TrlRun, findings: Findings) -> str:
    """Set the loss, and return ``algorithm.type``."""
    kind = run.algorithm
    given = run.get("loss_type")
    if kind == "sft":
        if given not in ("nll", "chunked_nll"):
            findings.blocks("loss_type", f"the loss {given!r} is not supported for sft; known: nll")
        findings.set("loss_fn.aggregation", "token_mean", "mean over all tokens of an update")
    elif kind == "dpo":
        _dpo(list(given) if isinstance(given, (list, tuple)) else [given], run, findings)
    elif kind == "cpo" and given == "simpo":
        return "simpo"
    elif kind in ("cpo", "kto") and given != ("kto" if kind == "kto" else "sigmoid"):
        if given not in PREFERENCES[kind].loss_types:
            findings.blocks("loss_type", f"the loss {given!r} is not supported for {kind}; known: {_known(kind)}")
        else:
            findings.set("preference.loss_type", given, "loss_type")
    return kind


def _known(kind: str) -> str:
    if kind == "kto":
        return "kto"
    others = ("simpo",) if kind == "cpo" else ()
    return ", ".join((*PREFERENCES[kind].loss_types, *others))


def _dpo(losses: list[Any], run: TrlRun, findings: Findings) -> None:
    """Set the preference loss of DPO, and optionally the cross-entropy of the chosen answers."""
    weights = run.get("loss_weights") or [1.0] * len(losses)
    by_name = dict(zip(losses, weights))
    supervised = by_name.pop("sft", None)
    if len(by_name) != 1 or len(weights) != len(losses):
        findings.blocks(
            "loss_type", f"{' + '.join(map(str, losses))}: only one preference loss, optionally with sft, is supported"
        )
        return
    [(name, weight)] = by_name.items()
    if name not in (*PREFERENCES["dpo"].loss_types, "sigmoid_norm"):
        findings.blocks(
            "loss_type", f"the loss {name!r} is not supported for dpo; known: {_known('dpo')}, sigmoid_norm"
        )
        return
    if weight != 1.0:
        findings.differs(
            "loss_weights", f"the weight of {name} is 1 instead of {weight}; scale the learning rate instead"
        )
    if name == "sigmoid_norm":
        findings.set("preference.length_normalize", True, "loss_type sigmoid_norm")
    elif name != "sigmoid":
        findings.set("preference.loss_type", name, "loss_type")
    if supervised is not None:
        findings.set("preference.rpo_alpha", float(supervised / weight), "weight of the loss sft in loss_weights")


def _trained_tokens(run: TrlRun, findings: Findings) -> None:
    """Set which tokens of a row are trained. In TRL, the default depends on the dataset's columns."""
    completion_only = run.get("completion_only_loss")
    if run.get("assistant_only_loss") or completion_only:
        return  # the default of data.train.train_on
    first = run.train.rows[0] if run.train.rows else {}
    has_messages = "messages" in first or "messages" in run.train.columns
    if completion_only is False or has_messages:
        why = "completion_only_loss is false" if completion_only is False else "TRL trains all tokens of messages"
        for split in ("train", *(["validation"] if run.validates else [])):
            findings.set(f"data.{split}.train_on", "all", why)
    elif "completion" not in first and "completion" not in run.train.columns:
        what = (
            "only answers are trained, as in TRL for rows with prompt and completion; TRL trains all tokens of messages"
        )
        findings.differs("completion_only_loss", f"{what} (data.train.train_on: all)")


def _reference(run: TrlRun, findings: Findings) -> None:
    """Record a blocker if the reference model is not the initial model."""
    if run.reference is None or str(run.reference) == str(run.model):
        return
    findings.blocks("ref_model", f"{run.reference} is not supported; the reference model is always the initial model")


_FILE_KINDS = ("json", "csv", "parquet")
_IGNORED_METHODS = ("shuffle", "select_columns", "remove_columns", "with_format")
"""Dataset methods that are ignored: rows are shuffled with the seed, and unused columns do not matter."""


def rows_of(node: ast.expr | None, names: Resolver, module: CodeModule, import_path: str) -> Rows:
    """Return the source of the rows that an expression evaluates to.

    Args:
        import_path: import path of a function that is added to ``module`` if the rows require the script's code.
    """
    if node is None:
        return Rows(problem="the trainer has no dataset")
    node = _before_tokenizing(node, names)
    if (found := _read(node, names)) is not None:
        return found
    try:
        module.add_function(import_path.rpartition(":")[2], node)
    except ConfigError as error:
        return Rows(problem=f"{ast.unparse(node)} cannot be extracted from the script: {error}")
    return Rows(path=import_path)


def _before_tokenizing(node: ast.expr, names: Resolver) -> ast.expr:
    """If a function of the script tokenizes the rows, return the input of this function. Otherwise return ``node``."""
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
            node = node.func.value  # filters tokenized rows, for example by length
        else:
            return found
    return found


def _texts(node: ast.AST) -> set[Any]:
    return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}


def _read(node: ast.expr, names: Resolver) -> Rows | None:
    """Return the source of the rows, or None if it is only known at run time."""
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
    """Return the arguments by name, or by index ("0", "1", ...) if positional. Return None if a value is unknown."""
    values: dict[str, Any] = {str(index): names.value(node) for index, node in enumerate(call.args)}
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
    """Translate ``load_dataset(path, name, data_files=..., split=...)``. Return None if the call has other
    arguments."""
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
    """Apply a dataset's method call to the source of its rows. Return None if the method is not supported."""
    if not isinstance(node.func, ast.Attribute) or (inner := _read(node.func.value, names)) is None:
        return None
    values = [names.value(argument) for argument in node.args]
    if name in _IGNORED_METHODS:
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
    """Return the number n in ``.select(range(n))`` (None for other arguments)."""
    chosen = node.args[0] if len(node.args) == 1 else None
    if isinstance(chosen, ast.Call) and ast.unparse(chosen.func) == "range" and len(chosen.args) == 1:
        size = names.value(chosen.args[0])
        return size if isinstance(size, int) else None
    return None
