"""Typed configuration: one dataclass per YAML section, one docstring per field.

``gdpo-nemo explain KEY`` prints the docstring of a field, so it describes the key, its unit and the meaning of the
default. Every number declares a `Range`. `explain` prints it, and every run checks it. Sections and keys are named as
in NeMo-RL if they have the same meaning. The section `loss_fn` is the settings class that the loss itself uses, so the
two cannot differ. This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from omegaconf import MISSING

from gdpo_nemo.algorithms.loss_settings import LossSettings
from gdpo_nemo.algorithms.ppo import PPOSettings
from gdpo_nemo.algorithms.preference_objectives import PreferenceSettings
from gdpo_nemo.algorithms.ranges import Range

# Re-exported, so that all sections can be imported from this module.
from gdpo_nemo.config.sections import (
    DataConfig as DataConfig,
    DatasetConfig as DatasetConfig,
    DifficultyConfig as DifficultyConfig,
    GenerationConfig as GenerationConfig,
    LoraConfig as LoraConfig,
    MegatronConfig as MegatronConfig,
    OptimizerConfig as OptimizerConfig,
    PolicyConfig as PolicyConfig,
    SchedulerConfig as SchedulerConfig,
    StridedConfig as StridedConfig,
    VllmConfig as VllmConfig,
)

_TEN_YEARS_S = 10 * 365 * 24 * 3600


@dataclass
class RunConfig:
    """Name, folder, seed and restarts of the run."""

    name: str = "gdpo"
    """Name of the run. By default, the name is also the last part of the run folder's path."""
    dir: str = "results/${run.name}"
    """Run folder, which holds all output of the run. If the folder already contains a run, that run is resumed."""
    seed: Annotated[int, Range(0, 2**62)] = 42
    """Random seed for data order, sampling and initialization. Two runs with the same seed and layout are bitwise
    equal."""
    date: str | None = None
    """Date that chat templates write into prompts (for example those of Llama 3.2 and gpt-oss), such as 2026-11-28.
    Null: the day on which the run is started. `config.yaml` in the run folder records the date, so a resumed run has
    the same prompts."""
    max_restarts: Annotated[int, Range(0, 10**6)] = 10
    """Maximum number of times that `gdpo-nemo train` restarts the run from its last checkpoint after a process, device
    or node failure. 0: never restart. Failures caused by the config, data, user code or numerics are never retried. A
    run also ends if two attempts in a row complete no new step."""


@dataclass
class AlgorithmConfig:
    """Algorithm that computes the optimizer updates of a step."""

    type: str = "gdpo"
    """For a user-defined class, use its import path, `file.py:Name` (see `examples/custom_sft.py`). An algorithm that
    does not sample (`samples = False` in its class) needs no engines, no environments and no gdpo.rewards."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of a user-defined algorithm class, by name. The class reads these options from the config."""


@dataclass
class TeacherConfig:
    """Teacher model for distillation."""

    model_name: str | None = None
    """Hugging Face folder, or name on the hub. The teacher may have any size but must use the policy's tokenizer. The
    teacher is frozen and runs on the policy's ranks in the same parallel layout, which must also fit the teacher's
    dimensions."""


@dataclass
class DynamicSamplingConfig:
    """Dynamic sampling (DAPO): replace groups without a training signal before the update. A group has a signal if the
    estimator gives at least one of its samples an advantage, before the batch norm."""

    enabled: bool = False
    """Drop each group to which the estimator gives no advantage, with the rewards after shaping, the step's weights and
    the samples that are compared (see group_by). Other prompts are sampled in place of a dropped group. With
    rollout.max_staleness above 0, groups are replaced one at a time."""
    batch_multiplier: Annotated[float | None, Range(1)] = None
    """Number of prompts in every generation round, as a multiple of num_prompts_per_step. Surplus groups are discarded
    (DAPO, NeMo-RL). Requires rollout.max_staleness 0. Null: the first round has num_prompts_per_step prompts, and later
    rounds have as many as are still missing."""
    max_rounds: Annotated[int, Range(1)] = 4
    """Maximum number of generation rounds per step. After the last round, the step trains the groups that are
    available. With rollout.max_staleness above 0, at most (max_rounds - 1) * num_prompts_per_step groups per step are
    replaced. Further groups are trained even without a training signal."""
    before_shaping: bool = False
    """Look for a training signal in the rewards before shaping. A group that varies only because of shaping, for
    example in its lengths, is then replaced."""
    reroll_after: Annotated[int, Range(0)] = 0
    """Number of steps after which the prompt of a dropped group is sampled again, with different seeds. 0: the prompt
    is not sampled again before the next epoch."""
    max_rerolls: Annotated[int, Range(1)] = 1
    """Maximum number of times per epoch that the same prompt is sampled again."""
    leave_one_out: bool = False
    """Reproduce NeMo-RL, which drops single samples instead of whole groups with its leave-one-out baseline. A sample
    is dropped if the other samples of its group have equal rewards. The others are trained, with advantage 0. The step
    is then filled up to its number of samples, if necessary with part of a group. Requires preset nemo_rl or
    equal_peers raw in gdpo.options, and rollout.max_staleness 0."""


@dataclass
class GdpoConfig:
    """Size and number of steps, conversion of rewards to advantages, and validation."""

    estimator: str = "gdpo"
    """Advantage estimator: gdpo, grpo, dr_grpo, rloo, ... (`gdpo-nemo explain gdpo.estimator` lists all), or the import
    path of a user-defined function, `file.py:name` (see `examples/custom_estimator.py`)."""
    preset: str | None = None
    """Published GDPO variant to reproduce exactly, including its defects: paper, trl, trl_fork, verl, ms_swift or
    nemo_rl."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the estimator, by name. All estimators: batch_rows, batch_unit, ddof, missing, singleton,
    leave_one_out, equal_peers, scale_rewards."""
    rewards: Annotated[dict[str, float], Range(-(10**12), 10**12)] = MISSING
    """Weight of each reward component used for training, by name: `{correctness: 1.0, format: 1.0}`. A name such as
    `rubric/*` is a family: each criterion of a row's rubric is a component of that row. Optional if the
    environments provide their own rewards and weights (nemo_gym)."""
    family_scale: str = "sum"
    """Scale of the criteria of a family such as `rubric/*`. sum: the weight of a criterion is divided by the sum of the
    absolute weights of its row, so that the influence of a row does not grow with its rubric. none: weights as they
    are."""
    constraints: dict[str, Any] = field(default_factory=dict)
    """Bounds on the mean of reward components over the batch: `{length: {at_least: 0.95}}`, or `at_most`. Each step
    moves the component's weight by `lr` (0.1) times the difference between bound and mean, from its weight in `rewards`
    to at most `max_weight` (10) and at least 0. With `at_most`, the weight is from -`max_weight` to 0. With
    `stop_after: N`, the weight is 0 for the rest of the run after N consecutive steps in which the mean meets the
    bound."""
    schedules: dict[str, Any] = field(default_factory=dict)
    """Weights of reward components by step, as lists of [step, weight]: `{format: [[50, 1.0], [100, 0.2]]}`. The weight
    is linear between the points, starts at step 1 with the weight in `rewards`, and is constant after the last
    point."""
    noise: dict[str, Any] = field(default_factory=dict)
    """Measurement error of reward components: its standard deviation, `{quality: 0.12}`, the error rates of a verifier
    that returns 0 or 1, `{correct: {false_positive: 0.1, false_negative: 0.2}}`, or the profile that measured it,
    `{from: results/tiny_profile/profile.json}`. The z-scores of a group are multiplied by the share of its variance
    that is not error. Rewards with error rates are corrected before shaping: (r - fp) / (1 - fp - fn)."""
    weighting: dict[str, Any] = field(default_factory=dict)
    """Rule that multiplies the weights of reward components by factors, which it computes in each step, and options of
    the rule: `{rule: saw}`. Rules: saw, ctwa, pow3r, hypervolume, tchebycheff, gradnorm, mgda, influence, or the import
    path of a user-defined function (`file.py:name`). See docs/weighting.md."""
    shaping: list[dict[str, Any]] = field(default_factory=list)
    """Transformations of reward components, applied in this order before the advantages are computed: clip, scale,
    linear, condition, length, overlong, truncated, shortest. Example: `{component: length, condition: {on: correctness,
    ge: 1.0}}`."""
    batch_norm: bool | None = None
    """Standardize the advantages over all sequences of the batch that have a training signal. The GDPO paper and
    `preset: paper` use all sequences. Null: as published."""
    credit: str = "sequence"
    """Unit that gets its own advantage: sequence, turn or span. With turn, the advantage of a turn is computed from the
    rewards of this turn and of later turns (MT-GRPO). With span, the term of a component acts only on the tokens that
    the verifier names for this component. With algorithm ppo, this selects the token that receives a
    reward: the last token of the sequence, or of the turn that earned the reward."""
    discount: Annotated[float, Range(0, 1)] = 1.0
    """Discount factor for the return of the next turn, with credit: turn. 0 uses only the rewards of the turn itself; 1
    does not discount."""
    turn_baseline: str = "turn"
    """Returns that serve as the baseline of a turn, with credit: turn. turn: the group's returns of the same turn.
    group: the returns of all turns of the group's other samples. The sample's own turns are left out, because they
    depend on its tokens."""
    kl_in_reward: Annotated[float | None, Range(above=0)] = None
    """Coefficient beta of a KL penalty in the reward, relative to the initial model. The advantage becomes A - beta (KL
    - mean KL of the group), in which KL is the summed log-ratio of a trajectory. The penalty is applied before the
    batch norm and is not normalized itself. Estimators that use the sum of the rewards include the penalty in that sum.
    Algorithm ppo subtracts beta times the log-ratio of each token from the reward of that token. Null: off. For a KL
    penalty in the loss see loss_fn.reference_policy_kl_penalty."""
    epsilon: Annotated[float, Range(above=0)] = 1.0e-6
    """Constant added to every standard deviation. With a preset, the default 1e-6 keeps the preset's value, and any
    other value replaces the preset's value."""
    num_prompts_per_step: Annotated[int, Range(1, 10**8)] = 16
    """Number of prompts per step."""
    num_generations_per_prompt: Annotated[int, Range(1, 10**6)] = 8
    """Number of samples per prompt (group size G). The minimum is 2, or 1 with algorithm ppo. If the algorithm does not
    sample, this is the number of sequences that it creates from each row."""
    num_iterations: Annotated[int, Range(1)] = 1
    """Number of times that a step trains each sample, in consecutive optimizer updates (mu in GRPO). All importance
    ratios are relative to the weights that generated the samples."""
    group_by: str = "row"
    """Samples that are compared with each other. row: the samples of the same row. prompt: the samples of all rows in
    the step whose prompts have the same tokens and images."""
    component_gradient_period: Annotated[int, Range(0)] = 0
    """Compute the gradient of each reward component every so many steps, beginning with the first step, and its effect
    on each component's expected reward (metrics `gradient/...`). The weights do not change. Such a step costs a forward
    and a backward pass for each component and for each expected reward. 0: off."""
    max_num_steps: Annotated[int, Range(1)] = 100
    """Number of steps after which training ends."""
    max_num_epochs: Annotated[int | None, Range(1)] = None
    """Number of epochs over the training prompts after which training ends, rounded down to whole steps. Training ends
    earlier if max_num_steps is reached. Null: no limit."""
    stop_when: Annotated[dict[str, float], Range(-(10**12), 10**12)] = field(default_factory=dict)
    """Goals for the held-out means of components: `{correctness: 0.9, length: 0.95}`. Training ends if a validation
    meets all goals. For a component with a negative weight, the goal is an upper bound."""
    stop_errors: Annotated[float, Range(0)] = 1.0
    """Number of standard errors by which a held-out mean must be better than its goal in stop_when."""
    stop_patience: Annotated[int, Range(1)] = 1
    """Number of consecutive validations that must meet the goals in stop_when."""
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    val_period: Annotated[int, Range(0)] = 0
    """Number of steps between validations; 0 disables validation."""
    val_at_start: bool = False
    """Also validate the untrained model before the first step."""
    val_prompts: Annotated[int | None, Range(1)] = None
    """Number of held-out prompts per validation; null uses all held-out prompts."""
    val_generations_per_prompt: Annotated[int, Range(1, 10**6)] = 1
    """Number of samples per held-out prompt. Validation metrics are means over these samples."""
    val_pass_at_k: Annotated[list[int], Range(1, 10**6)] = field(default_factory=list)
    """Values of k for which validation reports the unbiased pass@k of each component, that is, the expected best of k
    samples: the largest reward, or the smallest for a component with a negative weight. Each k is at most
    val_generations_per_prompt. Example: `[1, 4, 8]`."""
    val_temperature: Annotated[float, Range(0)] = 1.0
    """Sampling temperature for validation; 0 is greedy."""
    val_top_p: Annotated[float, Range(above=0, most=1)] = 1.0
    """Nucleus sampling threshold for validation."""
    val_top_k: Annotated[int, Range(1, also=(-1,))] = -1
    """Number of most likely tokens to sample from in validation; -1: all tokens."""
    max_skipped_steps: Annotated[int, Range(1)] = 3
    """Maximum number of consecutive steps with a non-finite loss or gradient. The run stops with an error if this
    number is exceeded."""


@dataclass
class TurnsConfig:
    """Limits for multi-turn trajectories."""

    max_turns: Annotated[int, Range(1, 10**6)] = 1
    """Maximum number of policy turns in a trajectory. Longer trajectories are truncated."""
    max_tokens: Annotated[int | None, Range(1)] = None
    """Maximum number of tokens that the policy generates in a trajectory, over all turns. Null: each turn is limited by
    policy.generation.max_new_tokens only."""


@dataclass
class EndpointConfig:
    """OpenAI-compatible HTTP server in front of the engines, for agents that request the policy's turns over HTTP."""

    enabled: bool = False
    """Serve /v1/chat/completions, /v1/responses, /v1/messages, /tokenize and /v1/models during the run."""
    host: str = "127.0.0.1"
    """Address to listen on. Without `api_key_env`, every client that can reach the address can request completions."""
    port: Annotated[int, Range(0, 65_535)] = 8000
    """Port to listen on. Agents must be configured with the same port. 0 selects any free port."""
    api_key_env: str | None = None
    """Environment variable with the access token that clients must send, as a bearer token or as x-api-key. Null: no
    token."""
    allowed_hosts: list[str] = field(default_factory=list)
    """Host names by which clients reach the server, in addition to IP addresses, localhost and the machine's name. Web
    pages of these hosts may send requests, as those of localhost and loopback addresses. Other requests are refused."""


@dataclass
class ReplayBufferConfig:
    """Replay buffer: train groups of earlier steps again. Requires loss_fn.old_logprobs: trainer."""

    groups: Annotated[int, Range(0)] = 0
    """Number of groups in each step that are taken from earlier steps instead of being newly sampled; 0: none. The
    first steps contain more new groups, because the buffer is not full yet."""
    reuse: Annotated[int, Range(1)] = 1
    """Maximum number of times that a group is trained again."""
    max_age: Annotated[int, Range(1)] = 4
    """Maximum age in steps of a replayed token: the trained version minus the version that sampled the token. Must be
    larger than rollout.max_staleness."""


@dataclass
class SelectionConfig:
    """Selection of prompts and groups whose reward components vary within their group. Other groups train nothing."""

    enabled: bool = False
    """Sample a prompt less often if its components were constant in its last groups. The probability of a prompt that
    is next in the order is the mean of its components' running shares of varying groups, weighted by the absolute
    weights in gdpo.rewards. A prompt that was not sampled yet has probability 1. gdpo.max_num_epochs then counts
    sampled prompts: the run samples as many prompts as without selection."""
    min_rate: Annotated[float, Range(above=0, most=1)] = 0.05
    """Minimum probability of a prompt, so that every prompt is sampled again."""
    memory: Annotated[float, Range(0, below=1)] = 0.25
    """Weight of the earlier groups of a prompt in its running shares and mean rewards. 0: only the last group
    counts."""
    difficulties: Annotated[dict[str, float], Range(above=0)] = field(default_factory=dict)
    """Quotas: share of each difficulty in the sampled prompts (within each source of data.mix): new (not sampled yet),
    hard, medium and easy, divided by their sum. The last three are thirds of the range of the weighted mean reward. A
    difficulty without prompts gives its share to the others. Empty: no quotas."""
    variance_top_p: Annotated[float | None, Range(above=0, most=1)] = None
    """Train only groups that belong to the fewest groups with this share of the variance within groups, for at least
    one component (RAGEN-2, per component). gdpo.dynamic_sampling replaces the other groups. Null: no limit."""


@dataclass
class RolloutConfig:
    """Scheduling of rollouts, timeouts, and files with samples."""

    max_staleness: Annotated[int, Range(0, 10**6)] = 0
    """Maximum staleness S in steps: the trained version of the weights minus the version that sampled a token. No
    trained token exceeds this limit. 0: exactly on-policy."""
    kv: str = "recompute"
    """Treatment of samples in flight at a weight update, with max_staleness above 0. recompute: recompute the cached
    keys and values, and sample the remaining tokens with the new weights. keep: reuse the cached keys and values, which
    is faster but cannot be replayed. drain: let each engine finish its samples before the update."""
    window: Annotated[int | None, Range(1)] = None
    """Reorder window W, in groups: at most W - 1 later groups may be trained before an earlier group. Null: 1, so that
    groups are trained in the order of the prompts. A larger window allows fewer groups in flight (see depth)."""
    depth: Any = "auto"
    """Maximum number of groups in flight. The number is between P = gdpo.num_prompts_per_step and the bound B = (S + 1)
    * P - (W - 1). auto: the number is adapted during the run so that the trainer does not wait for samples."""
    sync_every: Annotated[int, Range(1)] = 1
    """Number of steps between weight updates of the engines. Values above 1 require max_staleness of at least
    sync_every - 1."""
    group_timeout_s: Annotated[float | None, Range(above=0, most=_TEN_YEARS_S)] = None
    """Seconds after which the unfinished samples of a group are stopped. Stopped samples have the outcome `aborted` and
    are not trained. Null: no limit."""
    min_valid: Annotated[float, Range(above=0, most=1)] = 0.5
    """Fraction of a group's samples that must have a reward when group_timeout_s expires. A group in which fewer
    samples have a reward is dropped."""
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    replay_buffer: ReplayBufferConfig = field(default_factory=ReplayBufferConfig)
    max_env_failure_share: Annotated[float, Range(0, 1)] = 0.2
    """Maximum fraction of a step's samples that may fail in the environment. The run stops if a larger fraction fails.
    """
    env_timeout_s: Annotated[float, Range(above=0, most=_TEN_YEARS_S)] = 30.0
    """Time limit of one verification task, in seconds."""
    env_workers: Annotated[int, Range(1, 4096)] = 1
    """Number of worker processes for verification."""
    generation_timeout_s: Annotated[float, Range(above=0, most=_TEN_YEARS_S)] = 3600.0
    """Maximum time, in seconds, that an engine with pending requests may take without finishing a sample. An engine
    that does not respond at all is replaced sooner: after ten times its longest response time so far, plus two minutes.
    """
    train_timeout_s: Annotated[float, Range(above=0, most=_TEN_YEARS_S)] = 3600.0
    """Time limit for the training of one step, in seconds. After three steps, the limit is lowered to ten times the
    longest step so far plus five minutes, if that is less."""
    save_samples: bool = True
    """Write every sample with its tokens, log-probs, rewards and advantage to rollouts/step_*.parquet. Validation
    samples are written to validation/. For the size of these files see docs/inspector.md."""
    save_trainer_logprobs: bool = False
    """Compute the trainer's log-probs of every sample before it is trained, and save them next to the sampler's
    log-probs. Computing these log-probs costs one additional forward pass. If false, these log-probs are saved only if
    the step computes them anyway, as it does with several updates per step."""
    save_entropies: bool = False
    """Save the policy's entropy at every token. The trainer's log-probs are computed in the same forward pass and are
    also saved."""
    save_groups: Annotated[int | None, Range(1)] = None
    """Number of groups per step whose samples are saved, counted from the start of the batch. Null: all groups, which
    is required for replaying the run. `gdpo-nemo plan` shows the size in bytes."""
    function: str | None = None
    """Custom rollout function, `file.py:function` or `package.module.function`, that creates trajectories from prompts.
    The function replaces the built-in generation loop."""
    turns: TurnsConfig = field(default_factory=TurnsConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)


@dataclass
class WeightsConfig:
    """Transfer of updated weights from the policy to the engines."""

    transport: str = "auto"
    """memory: Ray's object store. gloo: broadcast between hosts. nccl: broadcast between GPUs. ipc: handles of memory
    that colocated processes share. folder: files on a shared disk. A user-defined class is named by its
    import path (file.py:Class). auto: ipc if colocated, otherwise nccl on GPUs. On CPU, auto selects memory on one node
    and gloo on several nodes."""
    mode: str = "auto"
    """full: every update sends all weights. difference: after a first full update, only the changes since the version
    that the engines hold, which requires a copy of the weights in the host memory of each engine process and of each
    policy rank's share. The engines verify a checksum of every resulting tensor, and an engine that cannot apply a
    difference gets all weights. auto: difference for bfloat16 without LoRA if the weights are sent over a network or a
    shared disk (several nodes, or transport folder), and full from then on if three differences in a row were larger
    than half of the weights; otherwise full."""
    bucket_mib: Annotated[int, Range(1, 2**20)] = 256
    """Bucket size in MiB: the size of one broadcast or memory handle. A tensor that is larger gets a separate bucket of
    the tensor's size. If several ranks broadcast, they share this size, down to 4 MiB each. Sender and receiver each
    hold two buffers."""


@dataclass
class ClusterConfig:
    """Nodes, GPUs and CPUs that the run uses."""

    num_nodes: Annotated[int, Range(1, 100_000)] = 1
    """Number of nodes. With several nodes, a Ray cluster that contains the nodes must be started first. The run then
    joins this cluster."""
    env_nodes: Annotated[int, Range(0, 100_000)] = 0
    """Number of additional nodes without GPUs for the environment workers. 0: the workers run on the driver's host."""
    address: str | None = None
    """Address of the Ray cluster to join, `host:port` or `auto`. Null: the cluster in RAY_ADDRESS. If RAY_ADDRESS is
    not set, a new cluster is started on this node."""
    gpus_per_node: Annotated[int, Range(0, 1024)] = 0
    """GPUs per node. 0: run on CPU."""
    placement: str = "separate"
    """separate: engines and policy use different GPUs. colocated: engines share the policy's GPUs and sleep during
    training, which requires rollout.max_staleness 0."""
    cpus_per_node: Annotated[int | None, Range(1, 65_536)] = None
    """Number of CPU cores to use on each node. Null: all cores that are available to the process."""


@dataclass
class CheckpointingConfig:
    """Writing and retention of checkpoints."""

    enabled: bool = True
    """Write checkpoints. Without checkpoints, a run that was stopped restarts from step 0."""
    save_period: Annotated[int, Range(1)] = 10
    """Number of steps between checkpoints. A checkpoint is always written after the last step."""
    keep_last: Annotated[int, Range(1)] = 2
    """Number of most recent checkpoints to keep."""
    keep_best: Annotated[int, Range(0)] = 1
    """Number of best checkpoints by metric_name to keep in addition to the most recent checkpoints."""
    metric_name: str | None = None
    """Metric that ranks the checkpoints, for example validation/correctness. Larger is better, or smaller for a reward
    component with a negative weight."""
    async_save: bool = False
    """Write checkpoint files during training, from a copy of the state in host memory. If the run fails before all
    files are written, it resumes from the previous checkpoint."""
    export_hf: bool = True
    """Export the final weights as a Hugging Face folder, `model/` in the run folder."""


@dataclass
class TensorboardConfig:
    """TensorBoard events in the run folder."""

    enabled: bool = True
    """Write TensorBoard event files."""


@dataclass
class WandbConfig:
    """Logging to Weights & Biases. Requires `uv sync --group trackers`."""

    enabled: bool = False
    """Send all metrics to Weights & Biases."""
    project: str = "gdpo_nemo"
    """Name of the Weights & Biases project."""
    entity: str | None = None
    """User or team that owns the project. Null: the default of the account."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run."""
    id: str | None = None
    """Id of an existing run to continue, or the id for a new run. Null: a new id is generated. A resumed training run
    continues the same Weights & Biases run."""
    mode: str = "online"
    """online: send metrics during the run. offline: write them to `wandb/` in the run folder, for a later `wandb sync`.
    """


@dataclass
class MlflowConfig:
    """Logging to MLflow. Requires `uv sync --group trackers`."""

    enabled: bool = False
    """Send all metrics to MLflow."""
    experiment: str = "gdpo_nemo"
    """Name of the MLflow experiment."""
    tags: dict[str, str] = field(default_factory=dict)
    """Tags of the run, by name."""
    run_id: str | None = None
    """Id of an existing MLflow run to continue. Null: a new MLflow run is created. A resumed training run continues the
    same MLflow run."""
    tracking_uri: str | None = None
    """URI of the tracking server, or `sqlite:///file.db`. Null: MLFLOW_TRACKING_URI if set, otherwise `mlflow.db` in
    the run folder."""


@dataclass
class PrometheusConfig:
    """HTTP endpoint from which Prometheus reads the latest metrics. Requires `uv sync --group trackers`."""

    host: str = "127.0.0.1"
    """Address to listen on, on the driver's host. The endpoint has no authentication, so every client that can reach
    the address can read the metrics. 0.0.0.0 listens on all addresses of the host."""
    port: Annotated[int | None, Range(1, 65_535)] = None
    """Port on which `/metrics` is served; null: off."""


@dataclass
class LoggerConfig:
    """Console output, plots, reports and experiment trackers."""

    console: str = "auto"
    """Console output: live (a display that is updated in place), plain (lines of text), quiet (only alerts and the
    result), or auto (live on a terminal, otherwise plain)."""
    plot: bool = True
    """Draw rewards.png, a plot of the rewards."""
    report_period: Annotated[int, Range(0)] = 50
    """Number of steps between updates of rewards.png and report.html during the run. A separate process draws both
    files. 0: draw both files only at the end."""
    num_completions: Annotated[int, Range(0)] = 0
    """Number of completions per table that is sent to TensorBoard, Weights & Biases and MLflow, with prompts, rewards
    and advantages. 0: send no completions, so that texts stay in the run folder."""
    completions_period: Annotated[int, Range(1)] = 10
    """Number of steps between tables of completions. A table is also sent after the first step."""
    system_metrics: bool = False
    """Send system metrics of the driver's host to Weights & Biases and MLflow: CPU, memory, disk, network and GPU load.
    """
    aliases: list[str] = field(default_factory=list)
    """Programs whose metric names are also used when metrics are sent to trackers, so that runs of several programs can
    share a chart. nemo_rl: `train/reward`, `train/probs_ratio` and others. trl: `train/rewards/NAME/mean` and others.
    """
    tensorboard: TensorboardConfig = field(default_factory=TensorboardConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)
    prometheus: PrometheusConfig = field(default_factory=PrometheusConfig)


@dataclass
class HealthConfig:
    """Health checks of metrics: alerts during the run, and `gdpo-nemo health RUN_DIR`."""

    window: Annotated[int, Range(1)] = 5
    """Number of steps that the trailing mean of a metric covers, unless a check sets its own window."""
    checks: list[dict[str, Any]] = field(default_factory=list)
    """Checks of a metric against thresholds. Required keys: `metric`, `at` (a step, start, end or every), and `min` or
    `max` or both. Optional keys: `window`, `optional` (the metric may be absent), `advisory` (a violation is only a
    warning) and `of`. `of` selects the quantity to check: value (the metric itself); start (ratio of the metric to its
    value at the start); before (ratio of the metric to the 20 steps before); rise (increase of the metric since the
    start, in standard errors). The default checks for every run also apply. A check of the same metric, `at` and `of`
    replaces a default check."""
    disabled: list[str] = field(default_factory=list)
    """Metrics whose default checks do not apply."""
    preset: str | None = None
    """Published set of additional thresholds: axolotl (from axolotl's GRPO documentation)."""
    alerts: bool = True
    """Show an alert when a metric that is checked at every step leaves its range. The alert explains the metric and
    suggests a remedy."""
    stop_on: list[str] = field(default_factory=list)
    """Metrics that stop the run with exit status 1 when they leave their range. These metrics must be checked at every
    step."""


@dataclass
class Config:
    """The complete configuration of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    gdpo: GdpoConfig = field(default_factory=GdpoConfig)
    loss_fn: LossSettings = field(default_factory=LossSettings)
    preference: PreferenceSettings = field(default_factory=PreferenceSettings)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    ppo: PPOSettings = field(default_factory=PPOSettings)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    data: DataConfig = field(default_factory=DataConfig)
    env: dict[str, Any] = field(default_factory=dict)
    """Environments by name. Each value contains the options of the environment's plugin. An environment that a config
    inherits through `defaults:` and names again keeps its inherited options."""
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
