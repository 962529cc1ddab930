"""Specifications of the algorithms, which a run reads before it imports their classes, and the formats of data rows."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, NamedTuple

from gdpo_nemo.algorithms.loss_selection import is_import_path, loss_entry
from gdpo_nemo.algorithms.loss_settings import LossSettings
from gdpo_nemo.algorithms.preference_objectives import PREFERENCES, PreferenceObjective
from gdpo_nemo.config.schema import Config, GdpoConfig
from gdpo_nemo.utils.errors import ConfigError, nearest
from gdpo_nemo.utils.import_path import ImportPath
from gdpo_nemo.utils.source import assigned_values

Rows = Literal["sft", "pairs", "single"]
"""Format of a data row. sft: a prompt with one answer. pairs: a prompt with a better and a worse answer. single: a
prompt with one answer and a label that is true for a good answer."""


class Unused(NamedTuple):
    """Keys of other sections, separated by blanks, that an algorithm does not use."""

    keys: str
    why: str
    """Reason, which completes the message "KEY: has no effect ..."."""


@dataclass(frozen=True)
class AlgorithmSpec:
    """Properties of an algorithm that a run needs before it imports the algorithm's class."""

    import_path: str
    """Import path of the class: ``package.module:Class``, or ``file.py:Class`` for a custom class."""
    about: str = ""
    """Short description for the reference page, which prints it after the algorithm's name and a colon."""
    samples: bool = True
    """True if the run starts engines and environments to sample completions. False if batches are rows of the data."""
    rows: Rows | None = None
    """Format of a data row if the data contains the answers (see ``data.example_rows``). None: rows contain only
    prompts."""
    head: Literal["lm", "score", "value"] = "lm"
    """Output layer of the policy. lm: next-token logits. score: one score per sequence. value: next-token logits and a
    value of each state."""
    section: str | None = None
    """Config section for this algorithm. The keys of the section have no effect with algorithms that do not use it."""
    unused: tuple[Unused, ...] = ()
    """Keys of other sections that have no effect with this algorithm."""
    check: str | None = None
    """Import path of a function ``(config, spec, layout)`` that raises ConfigError if the algorithm does not support
    the config. The function is imported only if the run uses the algorithm."""

    def sequences_per_prompt(self, gdpo: GdpoConfig) -> int:
        """Return the number of sequences that a step creates for each of its prompts."""
        if self.rows is None:
            return gdpo.num_generations_per_prompt
        return 2 if self.rows == "pairs" else 1


_CHECKS = "gdpo_nemo.config.objective_checks"
_LOSS_KEYS = " ".join(f"loss_fn.{f.name}" for f in fields(LossSettings) if f.name not in ("off_policy", "aggregation"))
"""Keys of `loss_fn`, except the section `off_policy` and the key `aggregation`, which sft also reads."""
_WITH_ANSWERS = (
    Unused(
        f"{_LOSS_KEYS} loss_fn.off_policy.mode",
        "with an algorithm that has its own loss (sft and the algorithms of the section preference)",
    ),
    Unused("gdpo.num_generations_per_prompt", "with an algorithm whose rows determine the number of answers"),
)
"""Keys that have no effect with any algorithm whose data contains the answers."""


_PREFERENCE = AlgorithmSpec(
    "gdpo_nemo.training.supervised:PreferenceTuning",
    "trains on preferences between the data's answers, without sampling; see section preference",
    samples=False,
    section="preference",
    unused=(
        *_WITH_ANSWERS,
        Unused(
            "loss_fn.aggregation", "with the algorithms of the section preference, which average over pairs or answers"
        ),
    ),
    check=f"{_CHECKS}:check_preferences",
)


def _preference(objective: PreferenceObjective) -> AlgorithmSpec:
    """Return the specification of an algorithm of the section preference."""
    spec = replace(_PREFERENCE, rows="pairs" if objective.paired else "single")
    if not objective.trains_scores:
        return spec
    return replace(
        spec,
        import_path="gdpo_nemo.training.supervised:RewardModelTraining",
        about="trains a reward model (Bradley-Terry) on rows in the format of dpo",
        head="score",
    )


ALGORITHMS = {
    "gdpo": AlgorithmSpec(
        "gdpo_nemo.training.gdpo:GDPO",
        "samples completions and trains with rewards and policy gradients; see sections gdpo and loss_fn",
    ),
    "ppo": AlgorithmSpec(
        "gdpo_nemo.training.ppo:PPO",
        "like gdpo, with token-level advantages from a value head (GAE); see section ppo",
        head="value",
        section="ppo",
        unused=(
            Unused(
                "gdpo.estimator gdpo.preset gdpo.batch_norm gdpo.epsilon gdpo.options gdpo.noise "
                "gdpo.component_gradient_period gdpo.discount gdpo.turn_baseline",
                "with algorithm ppo, which computes advantages from its value head",
            ),
        ),
        check=f"{_CHECKS}:check_ppo",
    ),
    "distillation": AlgorithmSpec(
        "gdpo_nemo.training.distillation:OnPolicyDistillation",
        "samples completions and trains toward the teacher's probability of each token; see section teacher",
        section="teacher",
        unused=(
            Unused(
                "gdpo.estimator gdpo.preset gdpo.constraints gdpo.schedules gdpo.weighting gdpo.batch_norm "
                "gdpo.epsilon gdpo.options gdpo.noise gdpo.component_gradient_period gdpo.kl_in_reward gdpo.credit "
                "gdpo.dynamic_sampling.enabled rollout.selection.enabled",
                "with algorithm distillation, which computes advantages from the teacher",
            ),
        ),
        check=f"{_CHECKS}:check_teacher",
    ),
    "sft": AlgorithmSpec(
        "gdpo_nemo.training.supervised:SupervisedFineTuning",
        "trains on the cross-entropy of the data's answers, without sampling",
        samples=False,
        rows="sft",
        unused=_WITH_ANSWERS,
        check=f"{_CHECKS}:check_supervised",
    ),
    **{name: _preference(objective) for name, objective in PREFERENCES.items()},
}
"""Built-in algorithms by name. A new algorithm only needs an entry here, and a preference objective only one in
`PREFERENCES`."""


def about_algorithms() -> str:
    """Return the descriptions of all built-in algorithms, one sentence each. Algorithms with the same description share
    a sentence."""
    names: dict[str, list[str]] = {}
    for name, spec in ALGORITHMS.items():
        names.setdefault(spec.about, []).append(name)
    return " ".join(f"{', '.join(group)}: {about}." for about, group in names.items())


def spec_named(name: str) -> AlgorithmSpec:
    """Return the specification of the algorithm with this name or import path.

    Raises:
        ConfigError: if the file of a custom class does not define it.
    """
    return ALGORITHMS.get(name) or _custom_spec(name)


@cache
def _custom_spec(import_path: str) -> AlgorithmSpec:
    """Return the specification of a custom class, without executing its file."""
    path = ImportPath(import_path)
    return AlgorithmSpec(import_path, samples=not path.is_in_file or _class_samples(path))


def spec_of(config: Config) -> AlgorithmSpec:
    """Return the specification of the algorithm in a config.

    Raises:
        ConfigError: if the file of a custom class does not define it.
    """
    return spec_named(config.algorithm.type)


def _class_samples(import_path: ImportPath) -> bool:
    """Return the class attribute ``samples``, read from the source without executing the file. The attribute is True
    unless the class sets it to a literal False."""
    for node in import_path.find_class("algorithm.type").body:
        for name, value in assigned_values(node):
            if name == "samples":
                return value is not False
    return True


def old_logprobs_source(config: Config) -> str:
    """Return the source of the old log-probs in the importance ratio: ``sampler`` or ``trainer``."""
    loss = config.loss_fn
    if loss.old_logprobs:
        return loss.old_logprobs
    stale = config.rollout.max_staleness > 0 and loss_entry(loss.type).has_ratio
    return "sampler" if stale else "trainer"


def trains_stale_samples_as_new(config: Config, algorithm: AlgorithmSpec) -> bool:
    """Return whether ``loss_fn.off_policy`` is the only setting that can account for the age of the samples.

    A ratio relative to the sampler's log-probs also accounts for the age, as do the coefficients of target_po.
    """
    stale = algorithm.samples and config.rollout.max_staleness > 0 and old_logprobs_source(config) == "trainer"
    return stale and not loss_entry(config.loss_fn.type).by_group


def resolved_loss(config: Config, algorithm: AlgorithmSpec) -> LossSettings:
    """Return ``loss_fn`` with null values resolved if samples may be stale, otherwise ``loss_fn`` unchanged.

    For a custom loss, a null off-policy mode means none, because the loss may include a correction.
    """
    loss = config.loss_fn
    if not algorithm.samples or config.rollout.max_staleness == 0:
        return loss
    off_policy = loss.off_policy
    if off_policy.mode is None:
        corrects = trains_stale_samples_as_new(config, algorithm) and not is_import_path(loss.type)
        off_policy = replace(off_policy, mode="truncate" if corrects else "none")
        if corrects and loss_entry(loss.type).by_sequence and off_policy.level == "token":
            off_policy = replace(off_policy, level="geometric")
    return replace(loss, old_logprobs=old_logprobs_source(config), off_policy=off_policy)


FIELDS = {"sft": ("completion",), "pairs": ("chosen", "rejected"), "single": ("completion", "label")}
"""Columns of each row format in addition to the prompt."""
PREFIXES = ("chatml", "llama3", "chat_template")
"""First part of a format name. The first part selects a fixed chat template or the tokenizer's chat template."""
PROMPT_COLUMNS: dict[str, str | None] = {
    "argilla": "instruction",
    "argilla_chat": None,
    "icr": "input",
    "intel": "question",
    "prompt_pairs": "prompt",
    "ultra": "prompt",
}
"""Name of the prompt column for each second part of a format name. None: the answers are conversations that begin with
the prompt."""
FORMATS = {"argilla": {"chosen": "chosen_response", "rejected": "rejected_response"}}
"""Formats whose answers are in columns with names other than chosen and rejected."""
_USER_DEFINED = ("field_prompt", "field_system", "prompt_format")
TRAINED = ("assistant", "last", "all")
"""Accepted values of ``data.<split>.train_on``."""


def is_transform(how: Any) -> bool:
    """Return whether the value of ``data.<split>.type`` is the import path of a function to call with each row.

    The import path has the form ``file.py:function``, ``package.module:function``, or ``module.function`` in axolotl's
    notation. A dotted name that contains a known format part is a format name, possibly misspelt.
    """
    if not isinstance(how, str) or ":" in how:
        return isinstance(how, str)
    first, dot, rest = how.partition(".")
    return bool(first and rest) and first not in PREFIXES and rest not in (*PROMPT_COLUMNS, "default")


def check_example_type(split: str, how: Any, kind: str) -> None:
    """Check that rows of the format ``kind`` support the value of ``data.<split>.type``. Raises ConfigError."""
    key = f"data.{split}.type"
    if how is None or is_transform(how):
        return
    if isinstance(how, dict):
        known = [*_USER_DEFINED, *(f"field_{name}" for name in FIELDS[kind]), *_formats(kind)]
        for name, value in how.items():
            if name not in known:
                raise ConfigError(f"{key}.{name}: unknown key{nearest(name, known)}")
            if not isinstance(value, str):
                raise ConfigError(f"{key}.{name}: must be text, got {value!r}")
        return
    if kind == "sft":
        raise ConfigError(
            f"{key}: preference formats do not apply to sft, which detects the format from the columns; remove the key"
        )
    known = [f"{prefix}.{form}" for prefix in PREFIXES for form in PROMPT_COLUMNS] + ["chat_template.default"]
    if how not in known and not (how == "chat_template"):
        raise ConfigError(f"{key}: unknown format {how!r}{nearest(str(how), known)}")


def _formats(kind: str) -> list[str]:
    return [f"{name}_format" for name in FIELDS[kind] if name != "label"]
