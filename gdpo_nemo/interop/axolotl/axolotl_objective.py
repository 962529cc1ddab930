"""Settings that several of axolotl's keys make together: the loss, rewards and advantages, batches, the learning rate.

What samples goes through TRL's ``GRPOTrainer`` there, so it goes through ``interop/trl`` here; the defaults that TRL
1.8, which axolotl 067b021c installs, has other than TRL 1.16 are ``_OF_TRL``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gdpo_nemo.interop.account import Account
from gdpo_nemo.interop.axolotl.axolotl_config import ALGORITHMS, AxolotlConfig
from gdpo_nemo.interop.axolotl.axolotl_data import import_path
from gdpo_nemo.interop.trl.trl_objective import ENDLESS, learning as learning_of_trl
from gdpo_nemo.interop.trl.trl_run import Reward, TrlRun

_SCHEDULER = "policy.megatron_cfg.scheduler"
_OF_TRL: dict[str, Any] = {"max_completion_length": 256, "use_bias_correction_kl": False}
_GIVEN = (
    "num_generations", "generation_batch_size", "max_completion_length", "loss_type", "epsilon", "epsilon_high",
    "scale_rewards", "multi_objective_aggregation", "reward_weights", "importance_sampling_level", "use_vllm",
    "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "use_bias_correction_kl",
)  # fmt: skip
"""Keys of ``trl`` that have TRL's name and meaning."""
_NAMES = {"num_train_epochs": "num_epochs", "lr_scheduler_type": "lr_scheduler"}
"""Names that TRL has for keys of axolotl; the others are in ``trl``."""
_ESTIMATORS = {"rloo": "rloo", "group_norm": "grpo"}
_LOSSES = ("sigmoid", "hinge", "ipo", "robust")


def learning(config: AxolotlConfig, account: Account) -> None:
    """Fill the account with everything that the update is made of."""
    if config.samples:
        _sampled(config, account)
    else:
        account.set("algorithm.type", ALGORITHMS[config.kind], "rl" if config.get("rl") else "no rl")
        rows = config.rows_per_update
        account.set("gdpo.num_prompts_per_step", rows, "micro_batch_size x gradient_accumulation_steps x processes")
        _length(config, account)
        if config.kind == "sft":
            _supervised(config, account)
        else:
            _preferences(config, account)
    _schedule(config, account)


# -- what reads answers -----------------------------------------------------------------------------------------


def _supervised(config: AxolotlConfig, account: Account) -> None:
    if config.processes > 1:
        what = "the mean is over all tokens of an update; there over each process's, then over processes"
        account.differs("micro_batch_size", what)


def _preferences(config: AxolotlConfig, account: Account) -> None:
    if config.kind == "reward_model":
        return
    account.set("preference.beta", _beta(config) or 0.1, "trl.beta, rl_beta, or TRL's default")
    if config.kind == "ipo":
        account.set("preference.loss_type", "ipo", "rl ipo")
    if config.kind == "orpo":
        account.differs("rl", "orpo: the cross-entropy is of the chosen answers; there of their prompts, too")
    if config.kind == "simpo":
        why = "cpo_alpha; TRL's default of 1 adds the chosen answers' cross-entropy"
        account.set("preference.rpo_alpha", float(config.get("cpo_alpha", 1.0)), why)
    wanted = config.get("dpo_loss_type")
    names = [wanted] if isinstance(wanted, str) else list(wanted or ())
    if config.kind != "dpo" or not names:
        return
    if len(names) > 1 or names[0] not in _LOSSES:
        account.blocks("dpo_loss_type", f"{', '.join(map(str, names))}: one of {', '.join(_LOSSES)} trains")
    else:
        account.set("preference.loss_type", names[0], "dpo_loss_type")


def _beta(config: AxolotlConfig) -> float | None:
    value = config.get("trl.beta", config.get("rl_beta", config.get("dpo_beta")))
    if value is None and config.kind == "orpo":
        value = config.get("orpo_alpha")
    return None if value is None else float(value)


def _length(config: AxolotlConfig, account: Account) -> None:
    if config.get("max_steps"):
        account.set("gdpo.max_num_steps", config.get("max_steps"), "max_steps")
        return
    epochs = config.get("num_epochs", 1.0)
    account.set("gdpo.max_num_epochs", max(1, round(epochs)), "num_epochs")
    account.set("gdpo.max_num_steps", ENDLESS, "num_epochs ends the run")
    if epochs != round(epochs):
        account.differs("num_epochs", f"{max(1, round(epochs))} whole passes; there {epochs}")


# -- what samples -----------------------------------------------------------------------------------------------


def _sampled(config: AxolotlConfig, account: Account) -> None:
    run = _run(config, account)
    theirs = Account()
    learning_of_trl(run, theirs)
    account.values |= theirs.values
    for name, what in theirs.differences.items():
        account.differs(_name(name), what)
    for name, why in theirs.blockers.items():
        account.blocks(_name(name), why)
    strided = config.get("ebft.mode") == "strided"
    group = run.get("num_generations")
    account.set("gdpo.num_generations_per_prompt", group, "num_generations, or n_samples_per_prompt")
    account.set("policy.generation.max_new_tokens", config.completion, "max_completion_length, or generate_max_len")
    account.set("loss_fn.reference_policy_kl_penalty", _beta(config) or 0.0, "trl.beta, rl_beta, or TRL's default of 0")
    _sampling(config, account, strided)
    if config.kind == "ebft":
        _features(config, account, strided)
    if config.get("trl.sync_ref_model"):
        account.set("policy.sync_ref_model", True, "trl.sync_ref_model")
        account.set("policy.ref_model_mixup_alpha", config.get("trl.ref_model_mixup_alpha", 0.9), "of the same name")
        account.set("policy.ref_model_sync_steps", config.get("trl.ref_model_sync_steps", 64), "of the same name")
    _ahead(config, account)


def _name(name: str) -> str:
    first = name.partition(".")[0]
    return _NAMES.get(first, f"trl.{name}")


def _run(config: AxolotlConfig, account: Account) -> TrlRun:
    """The run as TRL would be given it."""
    given = {**_OF_TRL, **{name: config.get(f"trl.{name}") for name in _GIVEN}}
    given = {name: value if value is not None else _OF_TRL.get(name) for name, value in given.items()}
    given |= {
        "beta": _beta(config),
        "per_device_train_batch_size": config.micro_batch,
        "gradient_accumulation_steps": config.accumulation,
        "max_steps": config.get("max_steps"),
        "num_train_epochs": config.get("num_epochs", 1.0),
        "lr_scheduler_type": "constant",  # _schedule says what it is
        "vllm_importance_sampling_clip_max": config.get("trl.vllm_importance_sampling_cap"),
    }
    if config.kind == "gdpo" and given["multi_objective_aggregation"] is None:
        given["multi_objective_aggregation"] = "normalize_then_sum"
    if config.get("ebft.mode") == "strided":
        group = config.get("ebft.n_samples_per_prompt", 4)
        given |= {"num_generations": group, "per_device_train_batch_size": group * config.micro_batch}
    run = TrlRun({name: value for name, value in given.items() if value is not None}, processes=config.processes)
    run.rewards = [_reward(str(name), config, account) for name in config.get("trl.reward_funcs", ())]
    if config.get("trl.rollout_func"):
        place, absent = import_path(str(config.get("trl.rollout_func")), config)
        account.set("rollout.function", place, "trl.rollout_func; its trainer has what docs/turns.md lists")
        account.needs(*([absent] if absent else []))
    if config.kind == "ebft":
        run.rewards = [Reward("alignment", "ebft"), Reward("diversity", "ebft")]
    return run


def _reward(name: str, config: AxolotlConfig, account: Account) -> Reward:
    if "." not in name or "/" in name:
        why = "is a reward model: serve it and name its address, functions: {NAME: http://host:port/score}"
        return Reward(name.rpartition("/")[2], problem=why)
    place, absent = import_path(name, config)
    if absent:
        account.needs(absent)
    return Reward(name.rpartition(".")[2], place)


def _sampling(config: AxolotlConfig, account: Account, strided: bool) -> None:
    section = "ebft" if strided else "trl"
    heat = config.get(f"{section}.temperature", 0.6 if strided else 1.0)
    account.set("policy.generation.temperature", float(heat), f"{section}.temperature")
    account.set("policy.generation.top_p", float(config.get(f"{section}.top_p", 1.0)), f"{section}.top_p")
    if config.get("trl.top_k"):
        account.set("policy.generation.top_k", config.get("trl.top_k"), "trl.top_k")


def _features(config: AxolotlConfig, account: Account, strided: bool) -> None:
    """The rewards of EBFT, and the anchors of a step."""
    options: dict[str, Any] = {"model": config.get("base_model")}
    if not Path(options["model"]).is_dir():
        account.needs(f"a folder of {options['model']} (env.ebft.model)")
    names = ("feature_layers", "embed_method", "use_whitening")
    options |= {name: config.get(f"ebft.{name}") for name in names if config.get(f"ebft.{name}") is not None}
    account.set("env", {"ebft": options}, "rl ebft; model must be a folder of the model's files")
    weights = {name: float(config.get(f"ebft.{name}_coef", 1.0)) for name in ("alignment", "diversity")}
    account.set("gdpo.rewards", weights, "alignment_coef and diversity_coef")
    if not strided:  # whose advantages are those of TRL's trainer
        if config.get("ebft.adaptive_max_tokens", True):
            what = "max_new_tokens is one number; there it follows the length of the data's answers"
            account.differs("ebft.adaptive_max_tokens", what)
        return
    wanted = config.get("ebft.advantage_estimator", "rloo")
    account.set("gdpo.estimator", _ESTIMATORS.get(wanted, "rloo"), f"advantage_estimator {wanted}")
    account.values.pop("gdpo.epsilon", None)
    if wanted not in _ESTIMATORS:
        account.differs("ebft.advantage_estimator", f"rloo; there {wanted}")
    span = config.sequence - config.get("ebft.context_length", 8) - config.completion
    anchors = max(1, span // config.get("ebft.stride", 8) + 1)
    account.set("gdpo.num_prompts_per_step", anchors * config.rows_per_update, f"{anchors} anchors of a full text")
    account.differs("micro_batch_size", "a step has anchors of any texts; there all anchors of its texts")


def _ahead(config: AxolotlConfig, account: Account) -> None:
    """Generation beside training."""
    if not (config.get("trl.async_prefetch") or config.get("trl.use_data_producer")):
        return
    steps = config.get("trl.prefetch_depth", 1)
    interval = config.get("trl.vllm_sync_interval", 1)
    account.set("rollout.max_staleness", max(steps, interval - 1), "trl.prefetch_depth")
    account.set("rollout.sync_every", interval, "trl.vllm_sync_interval")
    account.differs("trl.async_prefetch", "groups are sampled one by one ahead of training; there whole batches are")
    if "loss_fn.off_policy.mode" in account.values:
        account.set("loss_fn.old_logprobs", "trainer", "the ratio is the trainer's; the sampler's gap is corrected for")
    if config.get("trl.vllm_mode") != "server":
        account.blocks("trl.vllm_mode", "generation beside training takes engines with GPUs of their own, mode server")


# -- learning rate ----------------------------------------------------------------------------------------------


def _schedule(config: AxolotlConfig, account: Account) -> None:
    """The warm-up begins at 0 and reaches the rate after its updates, as in transformers."""
    style = str(config.get("lr_scheduler", "cosine")).lower()
    shapes = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
    shapes["cosine_with_min_lr"] = "cosine"
    shape = shapes.get(style, "cosine")
    account.set(f"{_SCHEDULER}.lr_decay_style", shape, f"lr_scheduler {style}")
    if style not in shapes:
        account.differs("lr_scheduler", f"the learning rate follows {shape}; there {style}")
    extra = dict(config.get("lr_scheduler_kwargs") or {}) if isinstance(config.get("lr_scheduler_kwargs"), dict) else {}
    rate = float(config.get("learning_rate", 0.0))
    lowest = config.get("cosine_min_lr_ratio")
    if style == "cosine_with_min_lr":
        lowest = extra.pop("min_lr_rate", None)
        absolute = extra.pop("min_lr", None)
        lowest = float(absolute) / rate if absolute is not None and rate else lowest
    if lowest and shape == "cosine":
        account.set("policy.megatron_cfg.optimizer.min_lr", float(lowest) * rate, "cosine_min_lr_ratio x learning_rate")
    if extra:
        account.differs("lr_scheduler_kwargs", f"{', '.join(sorted(map(str, extra)))} of the schedule cannot be set")
    if style != "constant":
        _warm_up(config, account)


def _warm_up(config: AxolotlConfig, account: Account) -> None:
    total = config.get("max_steps")
    given = config.get("warmup_steps")
    key = "warmup_steps" if given is not None or config.get("warmup_ratio") is None else "warmup_ratio"
    if given is not None and (given >= 1 or given == 0):
        updates = int(given)
    elif total:
        share = given or config.get("warmup_ratio")
        updates = min(int(0.03 * total), 100) if share is None else int(share * total)
    elif config.get("warmup_ratio") == 0:
        updates = 0
    else:
        share = given or config.get("warmup_ratio", 0.03)
        account.differs(key, f"no warm-up: {share} of a number of updates that depends on the data set; set "
                        f"{_SCHEDULER}.lr_warmup_steps")  # fmt: skip
        return
    if updates == 1:
        updates = 2  # axolotl's own minimum
    if updates:
        account.set(f"{_SCHEDULER}.lr_warmup_steps", updates, key)
        account.set(f"{_SCHEDULER}.lr_warmup_init", 0.0, "the first update has a rate of 0 there")
