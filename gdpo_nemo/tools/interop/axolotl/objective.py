"""Translation of axolotl keys that depend on each other: loss, rewards, advantages, batches and learning rate.

axolotl samples with TRL's ``GRPOTrainer``, so this module uses ``interop/trl``. axolotl 067b021c installs TRL 1.8.
``_OF_TRL`` contains the defaults of TRL 1.8 that differ from TRL 1.16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gdpo_nemo.tools.interop.axolotl.config import ALGORITHMS, AxolotlConfig
from gdpo_nemo.tools.interop.axolotl.data import import_path
from gdpo_nemo.tools.interop.translation import Findings
from gdpo_nemo.tools.interop.trl.objective import ENDLESS, learning as learning_of_trl
from gdpo_nemo.tools.interop.trl.run import Reward, TrlRun

_SCHEDULER = "policy.megatron_cfg.scheduler"
_OF_TRL: dict[str, Any] = {"max_completion_length": 256, "use_bias_correction_kl": False}
_GIVEN = (
    "num_generations", "generation_batch_size", "max_completion_length", "loss_type", "epsilon", "epsilon_high",
    "scale_rewards", "multi_objective_aggregation", "reward_weights", "importance_sampling_level", "use_vllm",
    "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "use_bias_correction_kl",
)  # fmt: skip
"""Keys of the section ``trl`` that have the same name and meaning in TRL."""
_NAMES = {"num_train_epochs": "num_epochs", "lr_scheduler_type": "lr_scheduler"}
"""TRL name -> axolotl key outside the section ``trl``."""
_ESTIMATORS = {"rloo": "rloo", "group_norm": "grpo"}
_LOSSES = ("sigmoid", "hinge", "ipo", "robust")


def learning(config: AxolotlConfig, findings: Findings) -> None:
    """Add the settings that define the training result to the findings."""
    if config.samples:
        _sampled(config, findings)
    else:
        findings.set("algorithm.type", ALGORITHMS[config.kind], "rl" if config.get("rl") else "rl is not set")
        rows = config.rows_per_update
        findings.set("gdpo.num_prompts_per_step", rows, "micro_batch_size x gradient_accumulation_steps x processes")
        _length(config, findings)
        if config.kind == "sft":
            _supervised(config, findings)
        else:
            _preferences(config, findings)
    _schedule(config, findings)


# -- supervised and preference training -------------------------------------------------------------------------


def _supervised(config: AxolotlConfig, findings: Findings) -> None:
    if config.processes > 1:
        what = "the loss is the mean over all tokens of an update; axolotl averages per process, then over processes"
        findings.differs("micro_batch_size", what)


def _preferences(config: AxolotlConfig, findings: Findings) -> None:
    if config.kind == "reward_model":
        return
    findings.set("preference.beta", _beta(config) or 0.1, "trl.beta, rl_beta, or TRL's default")
    if config.kind == "ipo":
        findings.set("preference.loss_type", "ipo", "rl ipo")
    if config.kind == "orpo":
        findings.differs("rl", "orpo: the cross-entropy covers the chosen answers; axolotl also includes their prompts")
    if config.kind == "simpo":
        why = "cpo_alpha; TRL's default of 1 adds the cross-entropy of the chosen answers"
        findings.set("preference.rpo_alpha", float(config.get("cpo_alpha", 1.0)), why)
    wanted = config.get("dpo_loss_type")
    names = [wanted] if isinstance(wanted, str) else list(wanted or ())
    if config.kind != "dpo" or not names:
        return
    if len(names) > 1 or names[0] not in _LOSSES:
        findings.blocks(
            "dpo_loss_type", f"{', '.join(map(str, names))}: only one of {', '.join(_LOSSES)} can be trained"
        )
    else:
        findings.set("preference.loss_type", names[0], "dpo_loss_type")


def _beta(config: AxolotlConfig) -> float | None:
    value = config.get("trl.beta", config.get("rl_beta", config.get("dpo_beta")))
    if value is None and config.kind == "orpo":
        value = config.get("orpo_alpha")
    return None if value is None else float(value)


def _length(config: AxolotlConfig, findings: Findings) -> None:
    if config.get("max_steps"):
        findings.set("gdpo.max_num_steps", config.get("max_steps"), "max_steps")
        return
    epochs = config.get("num_epochs", 1.0)
    findings.set("gdpo.max_num_epochs", max(1, round(epochs)), "num_epochs")
    findings.set("gdpo.max_num_steps", ENDLESS, "the run ends after num_epochs")
    if epochs != round(epochs):
        findings.differs("num_epochs", f"{max(1, round(epochs))} whole epochs instead of {epochs}")


# -- sampling ---------------------------------------------------------------------------------------------------


def _sampled(config: AxolotlConfig, findings: Findings) -> None:
    run = _run(config, findings)
    of_trl = Findings()
    learning_of_trl(run, of_trl)
    findings.values |= of_trl.values
    for name, what in of_trl.differences.items():
        findings.differs(_axolotl_key(name), what)
    for name, why in of_trl.blockers.items():
        findings.blocks(_axolotl_key(name), why)
    strided = config.get("ebft.mode") == "strided"
    group = run.get("num_generations")
    findings.set("gdpo.num_generations_per_prompt", group, "num_generations, or n_samples_per_prompt")
    findings.set("policy.generation.max_new_tokens", config.completion, "max_completion_length, or generate_max_len")
    findings.set("loss_fn.reference_policy_kl_penalty", _beta(config) or 0.0, "trl.beta, rl_beta, or TRL's default 0")
    _sampling(config, findings, strided)
    if config.kind == "ebft":
        _features(config, findings, strided)
    if config.get("trl.sync_ref_model"):
        findings.set("policy.sync_ref_model", True, "trl.sync_ref_model")
        alpha = config.get("trl.ref_model_mixup_alpha", 0.9)
        findings.set("policy.ref_model_mixup_alpha", alpha, "trl.ref_model_mixup_alpha, or 0.9")
        steps = config.get("trl.ref_model_sync_steps", 64)
        findings.set("policy.ref_model_sync_steps", steps, "trl.ref_model_sync_steps, or 64")
    _ahead(config, findings)


def _axolotl_key(name: str) -> str:
    """Return the axolotl key of a TRL field."""
    first = name.partition(".")[0]
    return _NAMES.get(first, f"trl.{name}")


def _run(config: AxolotlConfig, findings: Findings) -> TrlRun:
    """Return the TRL run that axolotl would configure."""
    given = {**_OF_TRL, **{name: config.get(f"trl.{name}") for name in _GIVEN}}
    given = {name: value if value is not None else _OF_TRL.get(name) for name, value in given.items()}
    given |= {
        "beta": _beta(config),
        "per_device_train_batch_size": config.micro_batch,
        "gradient_accumulation_steps": config.accumulation,
        "max_steps": config.get("max_steps"),
        "num_train_epochs": config.get("num_epochs", 1.0),
        "lr_scheduler_type": "constant",  # _schedule sets the actual schedule
        "vllm_importance_sampling_clip_max": config.get("trl.vllm_importance_sampling_cap"),
    }
    if config.kind == "gdpo" and given["multi_objective_aggregation"] is None:
        given["multi_objective_aggregation"] = "normalize_then_sum"
    if config.get("ebft.mode") == "strided":
        group = config.get("ebft.n_samples_per_prompt", 4)
        given |= {"num_generations": group, "per_device_train_batch_size": group * config.micro_batch}
    run = TrlRun({name: value for name, value in given.items() if value is not None}, processes=config.processes)
    run.rewards = [_reward(str(name), config, findings) for name in config.get("trl.reward_funcs", ())]
    if config.get("trl.rollout_func"):
        function, absent = import_path(str(config.get("trl.rollout_func")), config)
        why = "trl.rollout_func; docs/turns.md lists the supported trainer attributes"
        findings.set("rollout.function", function, why)
        findings.needs(*([absent] if absent else []))
    if config.kind == "ebft":
        run.rewards = [Reward("alignment", "ebft"), Reward("diversity", "ebft")]
    return run


def _reward(name: str, config: AxolotlConfig, findings: Findings) -> Reward:
    if "." not in name or "/" in name:
        why = "is a reward model; serve it and set its address in functions: {NAME: http://host:port/score}"
        return Reward(name.rpartition("/")[2], problem=why)
    function, absent = import_path(name, config)
    if absent:
        findings.needs(absent)
    return Reward(name.rpartition(".")[2], function)


def _sampling(config: AxolotlConfig, findings: Findings, strided: bool) -> None:
    section = "ebft" if strided else "trl"
    temperature = config.get(f"{section}.temperature", 0.6 if strided else 1.0)
    findings.set("policy.generation.temperature", float(temperature), f"{section}.temperature")
    findings.set("policy.generation.top_p", float(config.get(f"{section}.top_p", 1.0)), f"{section}.top_p")
    if config.get("trl.top_k"):
        findings.set("policy.generation.top_k", config.get("trl.top_k"), "trl.top_k")


def _features(config: AxolotlConfig, findings: Findings, strided: bool) -> None:
    """Set the rewards of EBFT, and in strided mode the number of anchors in a step."""
    options: dict[str, Any] = {"model": config.get("base_model")}
    if not Path(options["model"]).is_dir():
        findings.needs(f"folder of {options['model']} (env.ebft.model)")
    names = ("feature_layers", "embed_method", "use_whitening")
    options |= {name: config.get(f"ebft.{name}") for name in names if config.get(f"ebft.{name}") is not None}
    findings.set("env", {"ebft": options}, "rl ebft; model must be a local model folder")
    weights = {name: float(config.get(f"ebft.{name}_coef", 1.0)) for name in ("alignment", "diversity")}
    findings.set("gdpo.rewards", weights, "alignment_coef and diversity_coef")
    if not strided:  # TRL's trainer computes the advantages
        if config.get("ebft.adaptive_max_tokens", True):
            what = "max_new_tokens is constant; axolotl derives it from the answer lengths in the data"
            findings.differs("ebft.adaptive_max_tokens", what)
        return
    wanted = config.get("ebft.advantage_estimator", "rloo")
    findings.set("gdpo.estimator", _ESTIMATORS.get(wanted, "rloo"), f"advantage_estimator {wanted}")
    findings.values.pop("gdpo.epsilon", None)
    if wanted not in _ESTIMATORS:
        findings.differs("ebft.advantage_estimator", f"rloo instead of {wanted}")
    span = config.sequence - config.get("ebft.context_length", 8) - config.completion
    anchors = max(1, span // config.get("ebft.stride", 8) + 1)
    findings.set(
        "gdpo.num_prompts_per_step", anchors * config.rows_per_update, f"{anchors} anchors in a text of full length"
    )
    findings.differs(
        "micro_batch_size", "a step mixes anchors of different texts; axolotl trains all anchors of a text in one step"
    )


def _ahead(config: AxolotlConfig, findings: Findings) -> None:
    """Set the number of steps that generation may run ahead of training."""
    if not (config.get("trl.async_prefetch") or config.get("trl.use_data_producer")):
        return
    steps = config.get("trl.prefetch_depth", 1)
    interval = config.get("trl.vllm_sync_interval", 1)
    findings.set("rollout.max_staleness", max(steps, interval - 1), "trl.prefetch_depth")
    findings.set("rollout.sync_every", interval, "trl.vllm_sync_interval")
    findings.differs(
        "trl.async_prefetch", "groups are sampled individually ahead of training; axolotl samples whole batches"
    )
    if "loss_fn.off_policy.mode" in findings.values:
        findings.set(
            "loss_fn.old_logprobs",
            "trainer",
            "the ratio uses the trainer's log-probs; the mismatch with the sampler's log-probs is corrected",
        )
    if not config.has_server:
        findings.blocks(
            "trl.vllm_mode", "generation during training requires engines on separate GPUs (vllm_mode server)"
        )


# -- learning rate ----------------------------------------------------------------------------------------------


def _schedule(config: AxolotlConfig, findings: Findings) -> None:
    """Set the learning-rate schedule. As in transformers, the warmup starts at 0 and ends at the full learning rate."""
    style = str(config.get("lr_scheduler", "cosine")).lower()
    shapes = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
    shapes["cosine_with_min_lr"] = "cosine"
    shape = shapes.get(style, "cosine")
    findings.set(f"{_SCHEDULER}.lr_decay_style", shape, f"lr_scheduler {style}")
    if style not in shapes:
        findings.differs("lr_scheduler", f"the learning-rate schedule is {shape} instead of {style}")
    extra = dict(config.get("lr_scheduler_kwargs") or {}) if isinstance(config.get("lr_scheduler_kwargs"), dict) else {}
    rate = float(config.get("learning_rate", 0.0))
    lowest = config.get("cosine_min_lr_ratio")
    if style == "cosine_with_min_lr":
        lowest = extra.pop("min_lr_rate", None)
        absolute = extra.pop("min_lr", None)
        lowest = float(absolute) / rate if absolute is not None and rate else lowest
    if lowest and shape == "cosine":
        why = "cosine_min_lr_ratio x learning_rate"
        findings.set("policy.megatron_cfg.optimizer.min_lr", float(lowest) * rate, why)
    if extra:
        findings.differs(
            "lr_scheduler_kwargs", f"{', '.join(sorted(map(str, extra)))}: not supported by the learning-rate schedule"
        )
    if style != "constant":
        _warm_up(config, findings)


def _warm_up(config: AxolotlConfig, findings: Findings) -> None:
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
        findings.differs(key, f"no warmup, because the number of updates is unknown ({share} of the updates); set "
                        f"{_SCHEDULER}.lr_warmup_steps")  # fmt: skip
        return
    if updates == 1:
        updates = 2  # axolotl uses at least two warmup updates
    if updates:
        findings.set(f"{_SCHEDULER}.lr_warmup_steps", updates, key)
        findings.set(
            f"{_SCHEDULER}.lr_warmup_init", 0.0, "axolotl and TRL use a learning rate of 0 for the first update"
        )
