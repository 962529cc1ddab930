"""The typed configuration: one dataclass per YAML section, one docstring per field.

The string under a field is what ``gdpo-nemo explain KEY`` prints, so it says what the key does, its unit and what the
default means. Every number declares its `Range`, which `explain` prints and every run checks. Section and key names
follow NeMo-RL where they mean the same. The section `loss_fn` is the class that the loss itself takes, so that no key
can be in one and not in the other. This module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Dict, List, Optional

from omegaconf import MISSING

from gdpo_nemo.algorithms.loss_settings import LossSettings
from gdpo_nemo.algorithms.ppo_settings import PPOSettings
from gdpo_nemo.algorithms.preference_settings import PreferenceSettings
from gdpo_nemo.algorithms.ranges import Range

# Imported under their own names, so that every section is found here.
from gdpo_nemo.config.data_section import (
    DataConfig as DataConfig,
    DatasetConfig as DatasetConfig,
    StridedConfig as StridedConfig,
)
from gdpo_nemo.config.policy_section import (
    GenerationConfig as GenerationConfig,
    LoraConfig as LoraConfig,
    MegatronConfig as MegatronConfig,
    OptimizerConfig as OptimizerConfig,
    PolicyConfig as PolicyConfig,
    SchedulerConfig as SchedulerConfig,
    VllmConfig as VllmConfig,
)

_TEN_YEARS_S = 10 * 365 * 24 * 3600


@dataclass
class RunConfig:
    """Identity of a run: its name, its folder, its seed."""

    name: str = "gdpo"
    """Name of the run; the last part of the default folder."""
    dir: str = "results/${run.name}"
    """Folder that receives everything the run writes. Starting again on the same folder resumes."""
    seed: Annotated[int, Range(0, 2**62)] = 42
    """Seed of data order, sampling and initialisation. Two runs with one seed and one layout are equal bit for bit."""
    max_restarts: Annotated[int, Range(0, 10**6)] = 10
    """Times that `gdpo-nemo train` starts the run again, from its last checkpoint, when processes, devices or nodes
    fail; 0: it ends then. Never again what config, data, user code or numerics made fail, nor what gained no step in
    two attempts."""


@dataclass
class AlgorithmConfig:
    """What the loop asks for the updates of a step."""

    type: str = "gdpo"
    """gdpo: samples, rewards and policy gradients, as the sections gdpo and loss_fn say. ppo: the same, with advantages
    of tokens from a value head (GAE), as the section ppo says. sft: cross-entropy of the data's answers. dpo, kto,
    orpo, simpo, cpo: preferences, as the section preference says. reward_model: a model that scores answers, from the
    same rows (Bradley-Terry). distillation: samples, and what the model of the section teacher would have given for
    each token. Or a class of your own by its place, `file.py:Name` (see `examples/custom_sft.py`). One with `samples =
    False`, as all built-in ones but gdpo, ppo and distillation, needs no engines, no environments and no
    gdpo.rewards."""
    options: Dict[str, Any] = field(default_factory=dict)
    """Options of a class of your own, which reads them from the config."""


@dataclass
class TeacherConfig:
    """The model that distillation learns from."""

    model_name: Optional[str] = None
    """Hugging Face folder, or name on the hub, of a model of any size with the policy's tokenizer. It lies frozen
    beside the policy, on the same ranks and in the same layout, which has to divide it, too."""


@dataclass
class DynamicSamplingConfig:
    """Replace groups that carry no signal before the update (DAPO), decided per component."""

    enabled: bool = False
    """Drop groups in which every weighted component, as shaped, is constant among the samples that are compared (see
    group_by) and sample further prompts instead; with rollout.max_staleness above 0, one by one as they come."""
    batch_multiplier: Annotated[Optional[float], Range(1)] = None
    """Prompts of every round, as a multiple of num_prompts_per_step; groups beyond those needed are discarded (DAPO,
    NeMo-RL). Null: a first round of num_prompts_per_step, then as many as are missing. Needs rollout.max_staleness
    0."""
    max_rounds: Annotated[int, Range(1)] = 4
    """Generation rounds after which the step goes on with the groups it has. With rollout.max_staleness above 0: of one
    step, (max_rounds - 1) * num_prompts_per_step groups are replaced at most; further ones are trained as they are."""
    before_shaping: bool = False
    """Judge the components as the environments give them, so that a group whose lengths alone differ is replaced."""
    reroll_after: Annotated[int, Range(0)] = 0
    """Steps after which the prompt of a group that was dropped is drawn again, with other seeds; 0: not before the next
    epoch."""
    max_rerolls: Annotated[int, Range(1)] = 1
    """Times that a prompt is drawn again in this way, in an epoch."""
    leave_one_out: bool = False
    """Judge each sample by the others of its group: one that differs from all others, which are alike, is dropped, and
    the step is filled to its number of samples, if need be with a part of a group (NeMo-RL, with its leave-one-out
    baseline). Needs rollout.max_staleness 0."""


@dataclass
class GdpoConfig:
    """What one step is made of, and how reward vectors become advantages."""

    estimator: str = "gdpo"
    """Advantage estimator by name: gdpo, grpo, dr_grpo, rloo, ... (`gdpo-nemo explain gdpo.estimator` lists all), or a
    function of your own by its place, `file.py:name` (see `examples/custom_estimator.py`)."""
    preset: Optional[str] = None
    """Published variant to reproduce exactly, defects included: paper, trl, trl_fork, verl, ms_swift, nemo_rl."""
    options: Dict[str, Any] = field(default_factory=dict)
    """Further options of the chosen estimator, by name (for instance `gamma` of sa_mrpo)."""
    rewards: Annotated[Dict[str, float], Range(-(10**12), 10**12)] = MISSING
    """Reward components that are trained and their weights, by name: `{correctness: 1.0, format: 1.0}`. May be left out
    where the environments list their rewards with weights (nemo_gym)."""
    shaping: List[Dict[str, Any]] = field(default_factory=list)
    """Ordered per-component transformations applied before the advantages: clip, scale, linear, condition, length,
    overlong, truncated. For instance `{component: length, condition: {on: correctness, ge: 1.0}}`."""
    batch_norm: Optional[bool] = None
    """Standardise the advantages over the sequences of the batch that carry signal (the GDPO paper: over all of them,
    which `preset: paper` does). Null: as published, on for gdpo, gd2po, sa_mrpo and dara, off for the others."""
    credit: str = "sequence"
    """What an advantage is of: sequence, or turn: of each turn by what it and those after it earned (MT-GRPO). With
    algorithm ppo, where a reward stands: at the last token of the sequence, or of the turn that earned it."""
    discount: Annotated[float, Range(0, 1)] = 1.0
    """Factor of the next turn's return in a turn's, with credit: turn; from 0, each turn by its own rewards, to 1."""
    turn_baseline: str = "turn"
    """What a turn's return is compared with, with credit: turn: turn, the group's returns of the same turn; group,
    those of all turns (as GRPO's process supervision)."""
    kl_in_reward: Annotated[Optional[float], Range(above=0)] = None
    """Coefficient beta of the KL to the starting model in the reward: A - beta (KL - mean of its group), KL being the
    summed log-ratio of a trajectory, before the batch norm and never normalised itself; estimators of the summed reward
    have it in the sum, and algorithm ppo takes beta times a token's log-ratio from its reward. Null: off.
    loss_fn.reference_policy_kl_penalty is the KL in the loss."""
    epsilon: Annotated[float, Range(above=0)] = 1.0e-6
    """Added to every standard deviation. A preset brings its own, which only a value unlike 1e-6 replaces."""
    num_prompts_per_step: Annotated[int, Range(1, 10**8)] = 16
    """Prompts in one step."""
    num_generations_per_prompt: Annotated[int, Range(1, 10**6)] = 8
    """Samples per prompt (the group size G), at least 2, with algorithm ppo 1; where the algorithm does not sample, the
    sequences that it makes of a row."""
    num_iterations: Annotated[int, Range(1)] = 1
    """Times that a step trains each of its samples (mu in GRPO), one optimizer update after the other; the ratios of
    all refer to the weights that sampled."""
    group_by: str = "row"
    """What samples are compared with: those of their row, or prompt: of all rows of the step with the same prompt
    tokens."""
    max_num_steps: Annotated[int, Range(1)] = 100
    """Steps after which the run is complete."""
    max_num_epochs: Annotated[Optional[int], Range(1)] = None
    """Passes over the training prompts, in whole steps, after which the run is complete if it has not been before.
    Null: no limit."""
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    val_period: Annotated[int, Range(0)] = 0
    """Steps between validations; 0 switches validation off."""
    val_at_start: bool = False
    """Validate the untrained model too."""
    val_prompts: Annotated[Optional[int], Range(1)] = None
    """Held-out prompts per validation; null takes them all."""
    val_generations_per_prompt: Annotated[int, Range(1, 10**6)] = 1
    """Samples per held-out prompt; the reported value is the mean."""
    val_pass_at_k: Annotated[List[int], Range(1, 10**6)] = field(default_factory=list)
    """Values of k, each at most val_generations_per_prompt, whose unbiased pass@k is reported of every component: the
    expected best of k samples. `[1, 4, 8]`."""
    val_temperature: Annotated[float, Range(0)] = 1.0
    """Sampling temperature of validation; 0 is greedy."""
    max_skipped_steps: Annotated[int, Range(1)] = 3
    """Consecutive steps with a non-finite loss or gradient after which the run stops."""


@dataclass
class TurnsConfig:
    """How far a trajectory of several turns may go."""

    max_turns: Annotated[int, Range(1, 10**6)] = 1
    """Turns that the policy may take in one trajectory; what goes on after them is truncated."""
    max_tokens: Annotated[Optional[int], Range(1)] = None
    """Tokens that the policy may write in all turns of a trajectory. Null: policy.generation.max_new_tokens in each."""


@dataclass
class EndpointConfig:
    """OpenAI-compatible HTTP endpoint of the engines, for agents that play the policy's turns."""

    enabled: bool = False
    """Serve /v1/chat/completions, /tokenize and /v1/models while the run lasts."""
    host: str = "127.0.0.1"
    """Address to listen at. Whoever reaches it can sample; there is no password."""
    port: Annotated[int, Range(0, 65_535)] = 8000
    """Port to listen at; agents have to know it. 0 takes any free one."""


@dataclass
class ReplayBufferConfig:
    """Groups that are trained again in later steps; they need loss_fn.old_logprobs: trainer."""

    groups: Annotated[int, Range(0)] = 0
    """Groups of earlier steps in every step, in place of as many new ones; 0: none. The first steps, from which there
    are too few yet, have more new ones."""
    reuse: Annotated[int, Range(1)] = 1
    """Times that a group is trained again at most."""
    max_age: Annotated[int, Range(1)] = 4
    """Largest number of steps between the weights that sampled a token of such a group and those that it trains; more
    than rollout.max_staleness."""


@dataclass
class RolloutConfig:
    """How rollouts are scheduled, and when a failing environment ends the run."""

    max_staleness: Annotated[int, Range(0, 10**6)] = 0
    """Largest number of steps between the weights that sample a token and the weights that it trains (S), a hard bound.
    0: exactly on-policy."""
    kv: str = "recompute"
    """What new weights do to samples under way, with max_staleness above 0. recompute: the rest is sampled by the new
    weights, and their cached keys and values are computed again; keep: those stay as they are, which is faster and
    cannot be replayed; drain: an engine finishes its samples first."""
    window: Annotated[Optional[int], Range(1)] = None
    """Reorder window in groups (W): a group may be overtaken by at most W - 1 later ones. Null: 1, in the order of
    the prompts. A larger one is taken off the bound."""
    depth: Any = "auto"
    """Groups under way at most, between gdpo.num_prompts_per_step (P) and the bound B = (S + 1) * P - (W - 1); auto: as
    many of them as keep the trainer from waiting."""
    sync_every: Annotated[int, Range(1)] = 1
    """Steps between two publications of weights; more than 1 needs max_staleness of at least sync_every - 1."""
    group_timeout_s: Annotated[Optional[float], Range(above=0, most=_TEN_YEARS_S)] = None
    """Seconds after which the samples of a group that are still under way are given up: they are `aborted`, and masked.
    Null: none are."""
    min_valid: Annotated[float, Range(above=0, most=1)] = 0.5
    """Share of a group's samples that must have a verdict for it to be trained after group_timeout_s; else the group is
    dropped."""
    replay_buffer: ReplayBufferConfig = field(default_factory=ReplayBufferConfig)
    max_env_failure_share: Annotated[float, Range(0, 1)] = 0.2
    """Share of a step's samples that may fail in the environment before the run stops."""
    env_timeout_s: Annotated[float, Range(above=0, most=_TEN_YEARS_S)] = 30.0
    """Seconds one verification task may take."""
    env_workers: Annotated[int, Range(1, 4096)] = 1
    """Worker processes that verify."""
    generation_timeout_s: Annotated[float, Range(above=0, most=_TEN_YEARS_S)] = 3600.0
    """Seconds that an engine with work may go without a finished sample. One that does not answer at all is replaced
    sooner: after ten times its longest answer so far, and two minutes."""
    train_timeout_s: Annotated[float, Range(above=0, most=_TEN_YEARS_S)] = 3600.0
    """Seconds one step's training may take, at most: once there were three, ten times the longest so far, and five
    minutes."""
    save_samples: bool = True
    """Write rollouts/step_*.parquet, and those of validations to validation/: every sample with its tokens, log-probs,
    rewards and advantage (docs/inspector.md says how many bytes)."""
    save_trainer_logprobs: bool = False
    """Score every sample with the trainer before the step trains it, and write its log-probs beside the sampler's: one
    more forward pass. Without, they are written where the step computes them anyhow, which is with several updates."""
    save_entropies: bool = False
    """Write the entropy of the policy at every token beside its log-probs, the trainer's among them, from the same
    forward pass."""
    save_groups: Annotated[Optional[int], Range(1)] = None
    """Groups of each step whose samples are written, the first of the batch; null: all of them, which replaying the run
    takes. The plan says how many bytes."""
    function: Optional[str] = None
    """`file.py:function` or `package.module.function` that makes trajectories of prompts in place of the built-in
    loop."""
    turns: TurnsConfig = field(default_factory=TurnsConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)


@dataclass
class WeightsConfig:
    """How new weights get from the policy to the engines."""

    transport: str = "auto"
    """memory (Ray's object store), gloo (broadcast between hosts), nccl (broadcast between GPUs), ipc (handles of the
    memory that colocated processes share), folder (safetensors on a shared disk), or a class of your own by its place
    (file.py:Class). auto: ipc where colocated, nccl on GPUs, on CPU memory on one node and gloo on several."""
    bucket_mib: Annotated[int, Range(1, 2**20)] = 256
    """MiB of one broadcast, handle or file, unless a single tensor is larger. Sender and receiver hold two of them."""


@dataclass
class ClusterConfig:
    """Machines."""

    num_nodes: Annotated[int, Range(1, 100_000)] = 1
    """Nodes of the job. More than one: they form a Ray cluster before the run starts, which the run joins."""
    env_nodes: Annotated[int, Range(0, 100_000)] = 0
    """Further nodes, without GPUs, that environment workers go to; 0: they run beside the driver."""
    address: Optional[str] = None
    """Ray cluster to join, `host:port` or `auto`; null: that of RAY_ADDRESS, else one node of the run's own."""
    gpus_per_node: Annotated[int, Range(0, 1024)] = 0
    """GPUs per node; 0 runs the same program on CPU."""
    placement: str = "separate"
    """separate: engines and policy have their own GPUs. colocated: engines sit on GPUs of the policy and sleep while it
    trains; needs rollout.max_staleness 0."""
    cpus_per_node: Annotated[Optional[int], Range(1, 65_536)] = None
    """CPU cores to use on each node; null: all that the process may use."""


@dataclass
class CheckpointingConfig:
    """When the run saves, and what it keeps."""

    enabled: bool = True
    """Write checkpoints; without them a stopped run starts again from step 0."""
    save_period: Annotated[int, Range(1)] = 10
    """Steps between checkpoints. The last step is always saved."""
    keep_last: Annotated[int, Range(1)] = 2
    """Newest checkpoints that stay."""
    keep_best: Annotated[int, Range(0)] = 1
    """Best checkpoints by metric_name that stay besides."""
    metric_name: Optional[str] = None
    """Metric that ranks checkpoints, larger is better, for instance validation/correctness."""
    async_save: bool = False
    """Write files beside training, from a copy of the state in host memory. A run that dies before they are whole
    resumes from the checkpoint before."""
    export_hf: bool = True
    """Write the final weights as a Hugging Face folder (`model/` in the run folder)."""


@dataclass
class TensorboardConfig:
    """TensorBoard events in the run folder."""

    enabled: bool = True
    """Write them."""


@dataclass
class WandbConfig:
    """Weights & Biases; needs `uv sync --group trackers`."""

    enabled: bool = False
    """Send every row of metrics there."""
    project: str = "gdpo_nemo"
    """Project of the run."""
    entity: Optional[str] = None
    """User or team that the project belongs to; null: the account's default."""
    tags: List[str] = field(default_factory=list)
    """Tags of the run."""
    id: Optional[str] = None
    """Run there to go on in, or the id of a new one. Null: one of its own, in which a resumed run goes on."""
    mode: str = "online"
    """online, or offline: written to `wandb/` in the run folder, for `wandb sync`."""


@dataclass
class MlflowConfig:
    """MLflow; needs `uv sync --group trackers`."""

    enabled: bool = False
    """Send every row of metrics there."""
    experiment: str = "gdpo_nemo"
    """Experiment of the run."""
    tags: Dict[str, str] = field(default_factory=dict)
    """Tags of the run, by name."""
    run_id: Optional[str] = None
    """Run there to go on in. Null: one of its own, in which a resumed run goes on."""
    tracking_uri: Optional[str] = None
    """Server, or `sqlite:///file.db`; null takes MLFLOW_TRACKING_URI, or else `mlflow.db` in the run folder."""


@dataclass
class PrometheusConfig:
    """The newest row of metrics, for Prometheus to fetch; needs `uv sync --group trackers`."""

    host: str = "127.0.0.1"
    """Address to listen at, on the driver's host. Every process that reaches it can read the metrics; there is no
    password. 0.0.0.0 listens at all addresses of the host."""
    port: Annotated[Optional[int], Range(1, 65_535)] = None
    """Port of `/metrics`; null: off."""


@dataclass
class LoggerConfig:
    """What is shown and written beside metrics.jsonl."""

    console: str = "auto"
    """live, plain, quiet (alerts and the end), or auto: live on a terminal."""
    plot: bool = True
    """Draw rewards.png."""
    report_period: Annotated[int, Range(0)] = 50
    """Steps between drawings of rewards.png and report.html while the run goes on, by a process beside it; 0: when it
    ends only."""
    num_completions: Annotated[int, Range(0)] = 0
    """Completions of a step, with prompt, rewards and advantage, that TensorBoard, Weights & Biases and MLflow get as a
    table; 0: none, no text leaves the run folder."""
    completions_period: Annotated[int, Range(1)] = 10
    """Steps between two such tables; the first step has one, too."""
    system_metrics: bool = False
    """Have Weights & Biases and MLflow record the load of the driver's host: CPU, memory, disk, network and GPUs."""
    aliases: List[str] = field(default_factory=list)
    """Programs whose names of metrics trackers get besides ours, so that runs of both fit in one chart: nemo_rl
    (`train/reward`, `train/probs_ratio`, ...), trl (`train/rewards/NAME/mean`, ...)."""
    tensorboard: TensorboardConfig = field(default_factory=TensorboardConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)
    prometheus: PrometheusConfig = field(default_factory=PrometheusConfig)


@dataclass
class HealthConfig:
    """What `gdpo-nemo health RUN_DIR` holds a run of this config against, and what the run itself warns of."""

    window: Annotated[int, Range(1)] = 5
    """Steps in a trailing mean, where a check does not say otherwise."""
    checks: List[Dict[str, Any]] = field(default_factory=list)
    """Thresholds: `metric`, `at` (a step, start, end or every), `min` and/or `max`, and if wanted `window`, `optional`
    (the metric may be absent), `advisory` (a miss is a warning), and `of`, which says what is judged at every step:
    value; start, how many times its start; before, how many times the 20 steps before; rise, by how many standard
    errors it is above its start. None: what holds for every run."""
    preset: Optional[str] = None
    """Thresholds of others besides: axolotl (those that its documentation gives for GRPO)."""
    alerts: bool = True
    """Say during the run where a metric that is judged at every step leaves its range, with what it means and what to
    try."""
    stop_on: List[str] = field(default_factory=list)
    """Metrics, judged at every step, that end the run with status 1 when they leave their range."""


@dataclass
class Config:
    """Everything a run is told."""

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
    env: Dict[str, Any] = field(default_factory=dict)
    """Environments by name; the value holds the options of the plugin. Those of a file under `defaults:` stay where
    they are named again, with their options."""
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
