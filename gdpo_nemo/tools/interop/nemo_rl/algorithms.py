"""Translation of recipes for NeMo-RL's other algorithms: PPO, distillation, SFT, DPO and reward models.

``recipe.py`` renames the section of the algorithm to ``grpo``, so the rules for common keys also apply here. The
meanings are those of ``nemo_rl/algorithms`` and ``loss_functions.py``.
"""

from __future__ import annotations

from typing import Any

from gdpo_nemo.tools.interop.nemo_rl.recipe import Recipe
from gdpo_nemo.tools.interop.translation import (
    Act,
    Findings,
    RuleResult,
    expanded,
    fixed,
    idle,
    missing,
    part_of,
    required,
    to,
    where,
)

_VALUE_MODEL = (
    "the value head shares the layers and the optimizer of the policy; NeMo-RL trains a separate value model with the "
    "settings of this section"
)
_TEACHER = "the teacher only computes log-probs, on the policy's ranks and in the policy's layout"
_DIVERGENCE = (
    "the reverse KL at the sampled tokens is trained by policy gradient; NeMo-RL trains a divergence over the "
    "topk_logits_k most probable tokens of the teacher"
)
_CHATML = ("qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl", "qwen3_moe", "nemotron_h")
"""Model types whose chat templates write a line break after the end token."""


def actor_critic(recipe: Recipe, findings: Findings) -> None:
    """Set PPO's generalized advantage estimation. NeMo-RL may use one lambda for advantages and another for returns."""
    section = "grpo.adv_estimator"
    name = recipe.get(f"{section}.name", "gae")
    if name != "gae":
        findings.blocks(f"{section}.name", f"the estimator {name!r} is not supported; use gae")
    lam = recipe.get(f"{section}.gae_lambda", 0.95)
    of_policy, of_value = (recipe.get(f"{section}.gae_lambda_{part}", lam) for part in ("policy", "value"))
    findings.set("ppo.lam", float(of_policy), "gae_lambda_policy, or gae_lambda")
    if of_value != of_policy:
        findings.differs(f"{section}.gae_lambda_value", f"returns use lambda {of_policy} of the advantages")
    epochs = recipe.get("grpo.ppo_epochs", 1)
    if epochs > 1:
        findings.set("gdpo.num_iterations", epochs, "ppo_epochs")


def from_teacher(recipe: Recipe, findings: Findings) -> None:
    """Set the teacher, and report a recipe with several teachers or other tokenizers."""
    if recipe.flat.get("teachers"):
        findings.blocks(
            "teachers", "off-policy distillation from several teachers or other tokenizers is not supported"
        )
    elif not recipe.get("teacher.model_name"):
        findings.blocks("teacher.model_name", "is not set")
    prompts, group = recipe.prompts, recipe.get("grpo.num_generations_per_prompt")
    if group < 2:
        prompts, group = max(1, prompts // 2), 2
        what = "two answers to half as many prompts, because 2 is the smallest supported group size"
        findings.differs("grpo.num_generations_per_prompt", what)
    findings.set("gdpo.num_prompts_per_step", prompts, "the number of samples in a step is that of NeMo-RL")
    findings.set("gdpo.num_generations_per_prompt", group, "num_generations_per_prompt, at least 2")


def from_rows(recipe: Recipe, findings: Findings) -> None:
    """Set the batch and the validation of an algorithm that trains on the answers in the data."""
    rows = recipe.get("policy.train_global_batch_size")
    if rows:
        findings.set("gdpo.num_prompts_per_step", rows, "train_global_batch_size")
    batches = recipe.get("grpo.val_batches", 0)
    if recipe.validates and batches > 0:
        rows = batches * recipe.get("grpo.val_global_batch_size")
        findings.set("gdpo.val_prompts", rows, "val_batches x val_global_batch_size")
    if recipe.get("grpo.only_unmask_final"):
        for split in ("train", *(["validation"] if recipe.validates else [])):
            findings.set(f"data.{split}.train_on", "last", "only_unmask_final")
    # NeMo-RL masks by message, which includes the text that the template writes before and after the message.
    if recipe.model.model_type in _CHATML and recipe.section != "rm" and _uses_own_template(recipe):
        what = "the line break that its chat template writes after the end token is not trained; NeMo-RL trains it"
        findings.differs("policy.tokenizer.name", what)
    if recipe.get("grpo.preference_average_log_probs"):
        what = "the mean is over the tokens of the answer; NeMo-RL includes the tokens that begin the reply"
        findings.differs("grpo.preference_average_log_probs", what)


def _uses_own_template(recipe: Recipe) -> bool:
    """Return whether NeMo-RL uses the chat template of the tokenizer."""
    return bool(recipe.flat.get("policy.tokenizer.chat_template", "default") == "default")


def _including_null(key: str) -> Act:
    """Return the rule for a key with the same meaning as gdpo_nemo's ``key``. The value null is also written."""
    return lambda value, recipe: RuleResult({key: None if value is None else float(value)})


def of_validation(act: Act) -> Act:
    """Return a rule that applies ``act`` only if the recipe has validation data."""
    return where(lambda r: r.validates, act, idle("the recipe has no validation data"))


def _begins_reply(value: Any, recipe: Recipe) -> RuleResult:
    """Translate add_generation_prompt, which leaves out the beginning of a reply from the trained text."""
    if not _uses_own_template(recipe):
        return idle("the chat template is reported by policy.tokenizer.chat_template")(value, recipe)
    return fixed(True, "the beginning of a reply in the chat template is not trained")(value, recipe)


def _column(name: str) -> Act:
    """Return the rule for the name of a column, which is ``name`` unless the config renames it."""

    def act(value: Any, recipe: Recipe) -> RuleResult:
        if value == name:
            return fixed(name, f"the column {name} is read")(value, recipe)
        return required("data.train.prompt_key" if name == "prompt" else "data.train.columns")(value, recipe)

    return act


_COUNT = of_validation(where(
    lambda r: r.get("grpo.val_batches", 0) > 0, required("gdpo.val_prompts"),
    idle("all validation rows are used")))  # fmt: skip
_UNRANKED = idle("the most recent checkpoints are retained; losses do not rank checkpoints")

_ROWS: list[tuple[str, Act]] = expanded([
    ("grpo.val_batches grpo.val_global_batch_size", _COUNT),
    ("grpo.val_micro_batch_size", idle("validation uses the micro-batches of training")),
    ("grpo.only_unmask_final", where(
        lambda r: r.get("grpo.only_unmask_final"), required("data.train.train_on"),
        idle("all turns of the assistant are trained"))),
    ("grpo.reference_policy_kl_penalty", to("preference.beta", float)),
    ("grpo.preference_average_log_probs", to("preference.length_normalize")),
    ("grpo.sft_loss_weight", to("preference.rpo_alpha", float)),
    ("grpo.sft_average_log_probs", where(
        lambda r: r.get("grpo.sft_loss_weight"), fixed(True, "the cross-entropy is the mean over an answer's tokens"),
        idle("no effect: sft_loss_weight is 0"))),
    ("grpo.preference_loss_weight", fixed(1, "the weight of the preference loss is 1")),
    ("policy.train_global_batch_size", required("gdpo.num_prompts_per_step")),
    ("policy.reward_model_cfg.enabled", idle("algorithm.type selects the head of the model")),
    ("policy.reward_model_cfg.reward_model_type", fixed("bradley_terry", "the loss is that of Bradley-Terry")),
    ("policy.dequantize_base_checkpoint", idle("weights are read in policy.precision")),
    ("policy.generation*", idle("no completions are sampled")),
    ("data.add_bos", idle("the chat template writes the begin token")),
    ("data.add_eos", idle("the end token of an answer is always trained")),
    ("data.add_generation_prompt", _begins_reply),
    ("data.*processor", fixed("sft_processor", "rows are converted to messages")),
    ("data.*system_prompt_file", idle("NeMo-RL's processor of rows with answers does not use it")),
    ("data.*max_samples", missing("all rows are used; set data.train.split to a slice")),
    ("data.seed", idle("applies to NeMo-RL's random split of rows")),
    ("data.*chat_key", required("data.train.columns")),
    ("data.*system_key data.*system_prompt data.*tool_key",
     missing("not translated; write a function for data.train.type (docs/trainers.md)")),
    ("data.*use_preserving_dataset", idle("rows are always read without a common schema")),
    *((f"data.*{name}_key", _column(name)) for name in ("prompt", "chosen", "rejected")),
    ("data.val_data_paths*", missing("only one validation dataset is supported")),
    ("checkpointing.metric_name checkpointing.higher_is_better checkpointing.keep_top_k", _UNRANKED),
])  # fmt: skip

_PPO: list[tuple[str, Act]] = expanded([
    ("grpo.ppo_epochs", where(
        lambda r: r.get("grpo.ppo_epochs", 1) > 1, required("gdpo.num_iterations"), idle("a step is trained once"))),
    ("grpo.policy_training_start_step", missing("the policy is trained from the first step", 0)),
    ("grpo.adv_estimator.name", fixed("gae", "advantages are estimated with GAE")),
    ("grpo.adv_estimator.gae_gamma", to("ppo.gamma", float)),
    ("grpo.adv_estimator.gae_lambda grpo.adv_estimator.gae_lambda_policy grpo.adv_estimator.gae_lambda_value",
     required("ppo.lam")),
    ("grpo.adv_estimator.length_adaptive_alpha", missing("lambda does not depend on the length", 0, 0.0)),
    ("grpo.adv_estimator.normalize_advantages", to("ppo.whiten_advantages")),
    ("grpo.async_grpo.warmup_generation_lead_steps", idle("applies only before policy_training_start_step")),
    ("grpo.async_grpo.drop_incomplete_targets_on_restore", idle("applies only to a resumed run")),
    ("value_loss_fn.scale", to("ppo.vf_coef", float)),
    ("value_loss_fn.cliprange", _including_null("ppo.cliprange_value")),
    ("value.*", part_of("value", _VALUE_MODEL)),
])  # fmt: skip

_DISTILLATION: list[tuple[str, Act]] = expanded([
    ("teacher.model_name", to("teacher.model_name")),
    ("teacher.precision", fixed(lambda r: r.get("policy.precision"), "the teacher uses policy.precision")),
    ("teacher.tokenizer.*", idle("the run is refused if the teacher's tokenizer differs from the policy's")),
    ("teacher.hf_config_overrides.router_aux_loss_coef", idle(_TEACHER)),
    ("teacher.hf_config_overrides*", missing("the teacher's config.json defines the architecture")),
    ("teacher*", idle(_TEACHER)),
    ("grpo.num_prompts_per_step", required("gdpo.num_prompts_per_step")),
    ("grpo.num_generations_per_prompt", required("gdpo.num_generations_per_prompt")),
    ("grpo.topk_logits_k loss_fn.*", part_of("loss_fn", _DIVERGENCE)),
    ("data.train.characters_per_sample data.train.data_files data.train.text_key",
     missing("applies to off-policy distillation, which is not supported")),
])  # fmt: skip

RULES: dict[str, list[tuple[str, Act]]] = {
    "grpo": [],
    "ppo": _PPO,
    "distillation": _DISTILLATION,
    **dict.fromkeys(("sft", "dpo", "rm"), _ROWS),
}
"""Section of the algorithm -> rules that take precedence over those of GRPO."""
