"""TRL's trainers that read answers from the data: SFT, DPO, KTO, ORPO, CPO and reward models.

Compared with ``SFTTrainer``, ``DPOTrainer``, ``KTOTrainer`` and ``RewardTrainer`` of TRL 1.16, and with ``ORPOTrainer``
and ``CPOTrainer`` of its ``trl.experimental``.
"""

from __future__ import annotations

from typing import Any

from gdpo_nemo.algorithms.preference_settings import LOSS_TYPES
from gdpo_nemo.interop.account import Account
from gdpo_nemo.interop.rules import Act, RuleResult, combined, fixed, idle, missing, to, where
from gdpo_nemo.interop.trl.trl_run import TrlRun

_ROOM = 4096
"""Tokens of a row if neither TRL's arguments nor the model's config.json limit them."""
_NO_LENGTH = "policy.max_total_sequence_length"


def _loss_type(value: Any, run: TrlRun) -> RuleResult:
    key = "loss_fn.aggregation" if run.algorithm == "sft" else "preference.loss_type"
    return RuleResult(elsewhere=(key, "preference.rpo_alpha", "algorithm.type"))


def _simpo(act: Act) -> Act:
    return where(lambda run: run.get("loss_type") == "simpo", act, idle("of loss_type simpo"))


RULES: list[tuple[str, Act]] = [
    ("max_length", combined(_NO_LENGTH)),
    ("max_completion_length", missing("an answer is not cut; policy.max_total_sequence_length is of the whole row")),
    ("truncation_mode", idle("of max_length: rows that are too long are left out")),
    ("packing", missing("an update counts rows, and not blocks of max_length tokens")),
    ("packing_strategy", idle("of packing")),
    ("eval_packing", idle("of packing")),
    ("padding_free", idle("sequences are packed, not padded")),
    ("padding_value", idle("sequences are packed, not padded")),
    ("pad_token", idle("sequences are packed, not padded")),
    ("eos_token", missing("an answer ends with the tokenizer's own end token")),
    ("chat_template_path", missing("the tokenizer's own chat template is used")),
    ("dataset_num_proc", idle("how rows are read")),
    ("dataset_text_field", idle("of rows of plain text, which are not read")),
    ("dataset_kwargs", missing("rows are always tokenized")),
    ("shuffle_dataset", idle("rows are shuffled anyway")),
    ("train_sampling_strategy", combined("data.train.shuffle")),
    ("completion_only_loss", combined("data.train.train_on")),
    ("assistant_only_loss", combined("data.train.train_on")),
    ("activation_offloading", idle("where activations are kept")),
    ("precompute_ref_*", idle("when the reference model is asked")),
    ("label_smoothing_factor", missing("the cross-entropy has no label smoothing", 0.0)),
    ("loss_type", _loss_type),
    ("loss_weights", combined("preference.rpo_alpha")),
    ("beta", to("preference.beta", float)),
    ("label_smoothing", to("preference.label_smoothing", float)),
    ("cpo_alpha", to("preference.rpo_alpha", float)),
    ("simpo_gamma", _simpo(to("preference.simpo_gamma", float))),
    ("alpha", missing("AlphaPO's transform of the rewards is not there", 0.0)),
    ("desirable_weight", to("preference.desirable_weight", float)),
    ("undesirable_weight", to("preference.undesirable_weight", float)),
    ("center_rewards_coefficient", to("preference.center_rewards_coefficient", float)),
    ("ld_alpha", missing("tokens are not weighed by the length of the other answer", 1.0)),
    ("use_weighting", missing("pairs are not weighed by their probability")),
    ("f_divergence_type", fixed("reverse_kl", "the divergence is the reverse KL")),
    ("f_alpha_divergence_coef", idle("of f_divergence_type alpha_divergence")),
    ("discopop_tau", idle("of loss_type discopop")),
    ("generate_during_eval", idle("nothing is sampled")),
    ("is_encoder_decoder", idle("models are decoders")),
]
"""Field, or pattern -> its rule. Fields that are not listed have the rule of ``trl_keys.RULES``."""


def answers(run: TrlRun, account: Account) -> None:
    """Fill the account with the objective, the rows of an update and their length."""
    kind = _objective(run, account)
    account.set("algorithm.type", kind, run.trainer)
    if run.algorithm == "sft":
        _trained_tokens(run, account)
    _reference(run, account)
    if run.algorithm == "reward_model" and run.lora is not None:
        account.blocks("peft_config", "reward_model trains the whole model; its head would be no part of an adapter")
    rows = run.samples_per_update
    why = f"rows of an update; {run.processes} process{'es' * (run.processes > 1)} assumed"
    account.set("gdpo.num_prompts_per_step", rows, why)
    if str(run.get("train_sampling_strategy")) == "sequential":
        account.set("data.train.shuffle", False, "train_sampling_strategy sequential")
    if run.algorithm == "sft" and run.get("packing"):
        account.differs("packing", f"an update has {rows} rows; there {rows} blocks of max_length tokens")


def row_length(run: TrlRun, account: Account, positions: int | None) -> int:
    """Set how many tokens a row may have, and return it.

    Args:
        positions: what the model's config.json allows; None if it is not known.
    """
    longest = run.get("max_length")
    if longest is None:
        longest = positions or _ROOM
        account.set(_NO_LENGTH, longest, "TRL takes rows of any length; longer ones are left out here")
        return int(longest)
    account.set(_NO_LENGTH, longest, "max_length")
    if run.algorithm != "reward_model":  # TRL leaves out its rows as well
        account.differs("max_length", f"rows of more than {longest} tokens are left out; there they are cut")
    return int(longest)


def _objective(run: TrlRun, account: Account) -> str:
    """Set the loss, and return ``algorithm.type``."""
    kind = run.algorithm
    given = run.get("loss_type")
    if kind == "sft":
        if given not in ("nll", "chunked_nll"):
            account.blocks("loss_type", f"there is no loss {given!r} of sft here; known: nll")
        account.set("loss_fn.aggregation", "token_mean", "the mean over all tokens of an update")
    elif kind == "dpo":
        _dpo(list(given) if isinstance(given, (list, tuple)) else [given], run, account)
    elif kind == "cpo" and given == "simpo":
        return "simpo"
    elif kind in ("cpo", "kto") and given != ("kto" if kind == "kto" else "sigmoid"):
        if given not in LOSS_TYPES[kind]:
            account.blocks("loss_type", f"there is no loss {given!r} of {kind} here; known: {_known(kind)}")
        else:
            account.set("preference.loss_type", given, "loss_type")
    return kind


def _known(kind: str) -> str:
    return "kto" if kind == "kto" else ", ".join((*LOSS_TYPES[kind], *(["simpo"] if kind == "cpo" else [])))


def _dpo(losses: list[Any], run: TrlRun, account: Account) -> None:
    """One loss of pairs, or one and the cross-entropy of the chosen answers."""
    weights = run.get("loss_weights") or [1.0] * len(losses)
    by_name = dict(zip(losses, weights))
    supervised = by_name.pop("sft", None)
    if len(by_name) != 1 or len(weights) != len(losses):
        account.blocks(
            "loss_type", f"{' + '.join(map(str, losses))}: one loss of pairs, and sft beside it, is possible"
        )
        return
    [(name, weight)] = by_name.items()
    if name not in (*LOSS_TYPES["dpo"], "sigmoid_norm"):
        account.blocks("loss_type", f"there is no loss {name!r} of dpo here; known: {_known('dpo')}, sigmoid_norm")
        return
    if weight != 1.0:
        account.differs("loss_weights", f"the weight of {name} is 1, there {weight}; scale the learning rate")
    if name == "sigmoid_norm":
        account.set("preference.length_normalize", True, "loss_type sigmoid_norm")
    elif name != "sigmoid":
        account.set("preference.loss_type", name, "loss_type")
    if supervised is not None:
        account.set("preference.rpo_alpha", float(supervised / weight), "loss_type sft and its loss_weights")


def _trained_tokens(run: TrlRun, account: Account) -> None:
    """Which tokens of a row are trained; TRL decides by the columns if it is not told."""
    alone = run.get("completion_only_loss")
    if run.get("assistant_only_loss") or alone:
        return  # assistant is the default
    first = run.train.rows[0] if run.train.rows else {}
    spoken = "messages" in first or "messages" in run.train.columns
    if alone is False or spoken:
        why = "completion_only_loss is false" if alone is False else "messages, all of whose tokens are trained there"
        for split in ("train", *(["validation"] if _validates(run) else [])):
            account.set(f"data.{split}.train_on", "all", why)
    elif "completion" not in first and "completion" not in run.train.columns:
        what = "answers alone are trained, as there for rows of prompt and completion; there all tokens of messages are"
        account.differs("completion_only_loss", f"{what} (data.train.train_on: all)")


def _validates(run: TrlRun) -> bool:
    strategy = str(run.get("evaluation_strategy", run.get("eval_strategy"))).rpartition(".")[2].lower()
    return run.evaluation is not None and strategy != "no"


def _reference(run: TrlRun, account: Account) -> None:
    """The reference is the model that training starts from."""
    if run.reference is None or str(run.reference) == str(run.model):
        return
    account.blocks("ref_model", f"{run.reference}: the reference is the model that training starts from")
