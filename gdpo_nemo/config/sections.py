"""Config sections below `policy` and `data`. The other sections are in ``schema.py``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from omegaconf import MISSING

from gdpo_nemo.algorithms.ranges import Range


@dataclass
class OptimizerConfig:
    """AdamW or Muon as implemented by Megatron-core."""

    type: str = "adamw"
    """Optimizer of the weight matrices: adamw or muon. Muon orthogonalizes the momentum of each matrix (see
    docs/muon.md). With muon, AdamW still updates embeddings, output layers, heads, norms and biases."""
    lr: Annotated[float, Range(0)] = 1.0e-6
    """Peak learning rate."""
    min_lr: Annotated[float, Range(0)] = 0.0
    """Learning rate that a decaying schedule reaches after lr_decay_steps updates."""
    weight_decay: Annotated[float, Range(0)] = 0.0
    """Decoupled weight decay of weight matrices. Norms and biases are not decayed."""
    adam_beta1: Annotated[float, Range(0, below=1)] = 0.9
    """Decay rate of the first moment."""
    adam_beta2: Annotated[float, Range(0, below=1)] = 0.99
    """Decay rate of the second moment."""
    adam_eps: Annotated[float, Range(above=0)] = 1.0e-8
    """Constant added to the square root of the second moment."""
    clip_grad: Annotated[float, Range(0)] = 1.0
    """Maximum global gradient norm; 0 disables clipping."""
    offload: bool = False
    """Keep main weights and Adam moments in host memory between updates (bfloat16 on GPUs). On CPU this has no effect.
    """
    use_precision_aware_optimizer: bool = False
    """Allow the three data types below to be bfloat16. Requires TransformerEngine's Adam (bfloat16 models on GPUs) and
    use_distributed_optimizer."""
    exp_avg_dtype: str = "float32"
    """Data type of Adam's first moment: float32 or bfloat16."""
    exp_avg_sq_dtype: str = "float32"
    """Data type of Adam's second moment: float32 or bfloat16."""
    main_grads_dtype: str = "float32"
    """Data type in which gradients are accumulated over micro-batches and reduced over ranks: float32 or bfloat16."""
    muon_momentum: Annotated[float, Range(0, below=1)] = 0.95
    """Decay rate of Muon's momentum, which is a running mean of the gradients."""
    muon_nesterov: bool = False
    """Use Nesterov momentum in Muon."""
    muon_split_qkv: bool = True
    """Orthogonalize queries, keys and values (and gates of queries) separately. False: as one matrix. Latent attention
    has separate matrices."""
    muon_scale_mode: str = "spectral"
    """Scale of Muon's update of a matrix [rows, columns]. spectral: sqrt(max(rows, columns)). shape_scaling:
    sqrt(max(1, rows / columns)). unit_rms_norm: sqrt(rows / columns)."""
    muon_extra_scale_factor: Annotated[float, Range(above=0)] = 1.0
    """Additional factor of Muon's update. With muon_scale_mode spectral, 0.2 gives matrices about the update size of
    AdamW (arXiv 2502.16982)."""
    muon_coefficient_type: str = "quintic"
    """Coefficients of the Newton-Schulz iteration: simple, quintic, polar_express, cans, aol or deepseekv4."""
    muon_num_ns_steps: Annotated[int, Range(1, 100)] = 5
    """Number of Newton-Schulz iterations."""
    muon_fp32_matmul_prec: str | None = None
    """Precision of the Newton-Schulz iteration: highest (float32), high (TF32 on GPUs) or medium (bfloat16). Null:
    highest if policy.precision is float32, otherwise medium."""
    muon_tp_mode: str = "duplicated"
    """Orthogonalization of matrices that tensor parallelism splits. duplicated: each rank orthogonalizes the gathered
    matrix. distributed: ranks exchange sums in each iteration. blockwise: each rank orthogonalizes its own part without
    communication, which changes the updates with the number of ranks."""


@dataclass
class SchedulerConfig:
    """Learning-rate schedule, which counts optimizer updates. A step may contain several updates.

    Without a warm-up, and with lr_warmup_init, each update has the rate of transformers' schedule of the same name.
    """

    lr_decay_style: str = "constant"
    """Shape of the decay: constant, linear or cosine. Without a warm-up, the first update uses lr, and the rates of
    four updates of a linear decay to 0 are 1, 0.75, 0.5 and 0.25 times lr."""
    lr_warmup_steps: Annotated[int, Range(0)] = 0
    """Number of updates in which the learning rate rises linearly to lr."""
    lr_warmup_init: Annotated[float | None, Range(0)] = None
    """Learning rate of the first warm-up update. The rate reaches lr after lr_warmup_steps further updates, and min_lr
    after lr_decay_steps updates; 0 is transformers' schedule. Null, as in Megatron-core: warm-up and decay are one
    update ahead of that, so the first update uses lr / lr_warmup_steps and update lr_decay_steps uses min_lr."""
    lr_decay_steps: Annotated[int | None, Range(1)] = None
    """Number of updates after which the learning rate is min_lr, including the warm-up. Null: all updates of the run.
    """
    lr_hold_updates: Annotated[int, Range(1)] = 1
    """Number of consecutive updates that use the same learning rate, which is the rate of the first update. If this
    equals the number of updates per step, the rate changes once per step, as in NeMo-RL."""


@dataclass
class MegatronConfig:
    """Parallel layout, memory options and optimizer of the policy."""

    tensor_model_parallel_size: Annotated[int, Range(1, 100_000)] = 1
    """Number of ranks over which each weight matrix is sharded."""
    pipeline_model_parallel_size: Annotated[int, Range(1, 100_000)] = 1
    """Number of pipeline stages, into which the layers are divided."""
    virtual_pipeline_model_parallel_size: Annotated[int | None, Range(1, 100_000)] = None
    """Number of model chunks per pipeline stage, for the interleaved schedule; null: one. An update then has at least
    twice as many micro-batches as stages, some of which may be empty."""
    num_layers_in_first_pipeline_stage: Annotated[int | None, Range(1)] = None
    """Number of layers in the first pipeline stage, which also holds the embedding. Stages without a configured number
    divide the remaining layers evenly."""
    num_layers_in_last_pipeline_stage: Annotated[int | None, Range(1)] = None
    """Number of layers in the last pipeline stage, which also holds the output layer. Stages without a configured
    number divide the remaining layers evenly."""
    context_parallel_size: Annotated[int, Range(1, 100_000)] = 1
    """Number of ranks over which each sequence is split."""
    expert_model_parallel_size: Annotated[int, Range(1, 100_000)] = 1
    """Number of ranks over which the experts of an MoE model are distributed."""
    expert_tensor_parallel_size: Annotated[int | None, Range(1, 100_000)] = None
    """Number of ranks over which the matrices of each expert are sharded; null: tensor_model_parallel_size."""
    data_parallel_size: Annotated[int | None, Range(1, 100_000)] = None
    """Number of model replicas. Null: as many as fit on the remaining GPUs of the cluster, or 1 on CPU."""
    sequence_parallel: bool = False
    """Shard activations outside the tensor-parallel regions along the sequence dimension."""
    use_distributed_optimizer: bool = False
    """Shard the optimizer state over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Overlap gradient reduction with the backward pass."""
    overlap_param_gather: bool = False
    """Overlap the distributed optimizer's parameter all-gather with the forward pass."""
    recompute: str = "none"
    """Activation recomputation: none, selective (only `recompute_modules`) or full (whole layers)."""
    recompute_modules: list[str] = field(default_factory=lambda: ["core_attn"])
    """Parts of each layer to recompute with `recompute: selective`, by Megatron's names: core_attn (attention between
    queries and keys) or mlp (dense MLP, not experts)."""
    recompute_layers: Annotated[int | None, Range(1)] = None
    """Number of layers to recompute in each pipeline stage (or virtual stage), counted from its first layer, with
    `recompute: full`. Null: all layers."""
    attention_backend: str = "auto"
    """Attention implementation: auto, sdpa (PyTorch, only in layers without TransformerEngine), flex (PyTorch's
    FlexAttention, only on GPUs), or one of flash, fused and unfused (TransformerEngine). Except with sdpa, packs with
    shared prompts use FlexAttention on GPUs."""
    transformer_engine: bool | None = None
    """Use TransformerEngine layers. Null: use these layers if TransformerEngine can be imported and CUDA is available.
    """
    fused_logprobs: bool | None = None
    """Compute log-probs and entropy with Triton kernels that do not store the logits in memory. Null: use the kernels
    on GPUs with Triton, unless policy.lora adapts lm_head."""
    moe_router_dtype: str | None = None
    """Precision in which the router of an MoE model scores the experts: float32 or float64 (or fp32, fp64). Null:
    policy.precision."""
    freeze_moe_router: bool = False
    """Freeze the router weights of an MoE model. The routers still select experts, and gradients still flow through
    them."""
    fp8: str | None = None
    """FP8 format for the matrix products of TransformerEngine: e4m3, or hybrid (e5m2 for gradients); null: off."""
    fp8_recipe: str = "delayed"
    """FP8 scaling recipe: delayed, tensorwise, blockwise or mxfp8 (on Blackwell)."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)


@dataclass
class VllmConfig:
    """Settings of one vLLM engine."""

    tensor_parallel_size: Annotated[int, Range(1)] = 1
    """Tensor-parallel ranks per engine."""
    kv_cache_memory_bytes: Annotated[int, Range(1)] = 268435456
    """Size of the KV cache of one engine in bytes (CPU only)."""
    gpu_memory_utilization: Annotated[float, Range(above=0, most=1)] = 0.85
    """Fraction of GPU memory that one engine may use (GPU only). It must be free when the engine starts."""
    gpu_kv_cache_memory_bytes: Annotated[int | None, Range(1)] = None
    """Size of the KV cache of one engine rank in bytes (GPU only). With a size, vLLM does not profile memory when it
    starts, which other processes on the GPU may disturb, and does not limit the KV cache by gpu_memory_utilization.
    Null: the memory that gpu_memory_utilization leaves. `plan` prints this size."""
    max_num_seqs: Annotated[int, Range(1)] = 256
    """Maximum number of sequences that one engine decodes concurrently."""
    enforce_eager: bool = False
    """Disable CUDA graphs. On CPU, execution is always eager."""
    head_dtype: str = "float32"
    """Precision of the logits of a bfloat16 engine (GPU only). The matrix product uses bfloat16 with both settings.
    float32: keep the result of the matrix product in float32 for the softmax. model: round the result of the matrix
    product to bfloat16 before the softmax."""


@dataclass
class GenerationConfig:
    """Sampling from the policy."""

    backend: str = "vllm"
    """Sampling engine: vllm."""
    engines: Annotated[int, Range(1, 100_000)] = 1
    """Number of vLLM engines (data-parallel replicas)."""
    max_new_tokens: Annotated[int, Range(1)] = 64
    """Maximum number of tokens per completion. A completion also ends when it reaches the context length."""
    temperature: Annotated[float, Range(above=0)] = 1.0
    """Sampling temperature. The trainer divides its logits by the same temperature."""
    top_p: Annotated[float, Range(above=0, most=1)] = 1.0
    """Nucleus sampling threshold. With a value below 1, the sampler's log-probs belong to a truncated distribution,
    which the trainer does not reproduce."""
    top_k: Annotated[int, Range(1, also=(-1,))] = -1
    """Number of most likely tokens to sample from; -1: all tokens."""
    stop_strings: list[str] = field(default_factory=list)
    """Strings that end a completion. A stop string remains part of the completion."""
    tool_call_parser: str | None = None
    """Parser of the policy's tool calls, by the name of vLLM's option --tool-call-parser, such as hermes, qwen3_xml,
    llama3_json, mistral, deepseek_v3, glm45 or openai; none: do not parse tool calls. Null: the parser for the format
    in the model's chat template, or hermes."""
    reasoning_parser: str | None = None
    """Parser that separates reasoning from the answer, by the name of vLLM's option --reasoning-parser, such as qwen3,
    deepseek_r1 or mistral. Null: reasoning remains in the text, except with the tool-call parser openai."""
    verify_weights: bool = True
    """Check every weight update by comparing the log-probs of a few sequences between trainer and engines."""
    parity_limit: Annotated[float | None, Range(above=0)] = None
    """Maximum mean log-prob difference in the verify_weights check, in nats per token. The run stops if this difference
    is exceeded. Null: four times the difference measured at the start, when trainer and engines have the same initial
    weights. This automatic limit is at least 1e-4 in float32 and 0.01 in bfloat16."""
    vllm_cfg: VllmConfig = field(default_factory=VllmConfig)


@dataclass
class LoraConfig:
    """LoRA: freeze the model and train low-rank adapters next to its linear layers."""

    rank: Annotated[int, Range(0, 2**20)] = 0
    """Rank of the adapters; 0 disables LoRA and trains the whole model."""
    alpha: Annotated[float, Range(above=0)] = 32.0
    """LoRA scaling: the output of an adapter is multiplied by alpha / rank."""
    dropout: Annotated[float, Range(0, below=1)] = 0.0
    """Dropout probability of the adapter inputs during training."""
    init: str = "uniform"
    """Initialization of matrix A: uniform, as in PEFT, or xavier (normal), as in NeMo's adapters. Matrix B starts at 0.
    """
    target_modules: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    """Hugging Face names of the linear layers that get an adapter. The default names are supported (some model families
    use other names, see docs/models.md), and so is lm_head if it is not tied to the embedding."""
    share_a: bool = False
    """Use one shared matrix A for the layers that Megatron fuses (q, k and v, or gate and up), as in NeMo's adapters.
    False: a separate matrix A for each layer, as in PEFT."""


@dataclass
class VisionConfig:
    """Images of a vision-language policy."""

    train: bool = False
    """Train the vision tower as well. False: the tower is frozen, each image is processed once, and updates of the
    engines leave the tower out."""


@dataclass
class PolicyConfig:
    """The trained model: source, precision, batching, training and sampling."""

    model_name: str = MISSING
    """Folder with a Hugging Face checkpoint, or a name on the hub. Other formats are first converted to a Hugging Face
    folder: a GGUF file, a PEFT adapter, or a Megatron-core or NeMo 2 checkpoint (docs/models.md)."""
    model_factory: str | None = None
    """`file.py:function` that creates the model, called as function(folder, seed) if the folder model_name does not
    exist. A dictionary MODEL_CONFIGS in the file, {function: fields of config.json}, describes the model for --dry-run
    and `gdpo-nemo plan`."""
    tokenizer_name: str | None = None
    """Tokenizer folder, or name on the hub. Null: the model's tokenizer."""
    precision: str = "bfloat16"
    """float32 or bfloat16 (with float32 main weights)."""
    max_total_sequence_length: Annotated[int, Range(1, 10**9)] = 1024
    """Maximum number of tokens of a prompt plus its completion."""
    train_global_batch_size: Annotated[int | None, Range(1)] = None
    """Number of sequences per optimizer update. Null: all sequences of a step in one update."""
    micro_batch_tokens: Annotated[int, Range(1)] = 8192
    """Maximum number of tokens in a packed micro-batch of one data-parallel rank. The value must be at least
    max_total_sequence_length."""
    logprob_micro_batch_tokens: Annotated[int | None, Range(1)] = None
    """Maximum number of tokens in a micro-batch of a log-prob pass, which requires less memory than an update. Null:
    micro_batch_tokens. With another value, log-probs before an update may differ from the update's by rounding."""
    skip_zero_advantage: bool = False
    """Skip the forward and backward pass of sequences whose advantage or weight is 0, because they have no gradient.
    The token weights of the other sequences do not change. Metrics that are means over trained tokens (entropy, ratio,
    clip, parity) then cover only the other sequences. Not supported if the loss also depends on the skipped sequences:
    with a KL penalty, an entropy bonus, or a user-defined function that does not declare support."""
    share_prompts: Any = "auto"
    """Compute the common prefix of the samples of a prompt only once per micro-batch. The gradient does not change.
    Accepted values: true, false, or auto. auto shares prompts only if this saves at least a tenth of an update. On
    GPUs, auto counts the slower attention of shared prompts. With shared prefixes, micro_batch_tokens counts only the
    computed tokens."""
    router_replay: Any = False  # YAML reads off as false
    """Experts that an MoE policy uses for sampled sequences, in updates and log-probs: off (its own choice), or sampler
    (the choice of the engine that sampled them, called rollout routing replay, R3, in arXiv 2510.11370). Routers are
    still trained. The reference model always uses its own choice."""
    offload_reference: bool = True
    """Keep the weights of the KL penalty's reference model in host memory and copy them to the GPU for each forward
    pass. False: keep these weights on the GPU next to the policy."""
    sync_ref_model: bool = False
    """Update the reference model with the policy's weights during training (TR-DPO, arXiv 2404.09656). The reference
    model is used by KL penalties and by the scores of dpo and kto."""
    ref_model_sync_steps: Annotated[int, Range(1)] = 512
    """Number of steps between updates of the reference model, with sync_ref_model."""
    ref_model_mixup_alpha: Annotated[float, Range(above=0, most=1)] = 0.6
    """Mixing weight of the policy in an update of the reference model: new reference = alpha * policy + (1 - alpha) *
    old reference. 1 copies the policy."""
    num_threads: Annotated[int | None, Range(1, 4096)] = None
    """Number of CPU threads per policy rank. Null: the available cores divided by the number of ranks."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    vision: VisionConfig = field(default_factory=VisionConfig)
    megatron_cfg: MegatronConfig = field(default_factory=MegatronConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)


def max_prompt_tokens(policy: PolicyConfig) -> int:
    """Return the maximum number of tokens in a prompt, which leaves one token for the completion."""
    return policy.max_total_sequence_length - 1


def replays_router(policy: PolicyConfig) -> bool:
    """Return whether the policy uses the experts that the sampler chose (``policy.router_replay``)."""
    return bool(policy.router_replay == "sampler")


@dataclass
class StridedConfig:
    """Strided prompts for EBFT: prompts are cut out of raw text at regular distances, and the text after a prompt is
    its answer."""

    stride: Annotated[int, Range(1)] = MISSING
    """Distance in tokens between two anchors in a text. The first anchor is at token context_length. The last anchor
    still has a complete answer after it, as in axolotl."""
    context_length: Annotated[int, Range(1)] = MISSING
    """Number of tokens before an anchor that form its prompt."""
    generate_max_len: Annotated[int, Range(1)] = MISSING
    """Number of tokens after an anchor that form the answer in the data. The policy generates the same number of
    tokens, so policy.generation.max_new_tokens must have the same value."""


@dataclass
class DifficultyConfig:
    """Selection and order of rows by the pass rates that `gdpo-nemo profile` measured."""

    path: str = MISSING
    """File rows.jsonl of a profile. Rows that are not in the file are left out."""
    component: str | None = None
    """Component whose pass rate counts. Null: the share of samples that pass all weighted components."""
    min: Annotated[float, Range(0, most=1)] = 0.0
    """Smallest pass rate of a row."""
    max: Annotated[float, Range(0, most=1)] = 1.0
    """Largest pass rate of a row."""
    order: str | None = None
    """easy_first or hard_first sorts the rows by pass rate, and requires shuffle: false. Null: keep the order of the
    data."""


@dataclass
class DatasetConfig:
    """One split of the prompts: a file, a dataset on the hub, or prompts generated by an environment."""

    path: Any = None
    """Source of the rows. A JSONL, JSON, CSV, TSV or Parquet file, or a pattern for such files (`rows-*.jsonl`, read in
    the order of their names). A folder or hub name that Hugging Face's `datasets` can read; append a configuration as
    `name:configuration`, for example openai/gsm8k:main. A function `file.py:function` that returns the rows. A list of
    such sources is also accepted and is concatenated."""
    split: str | None = None
    """Split of the hub dataset, or the split name passed to the environment."""
    environment: str | None = None
    """Name of the environment in `env` that verifies the rows, and that generates the prompts if path is not set. Null:
    the only environment of the config, or with data.mix and without a path, all environments of the config."""
    environment_key: str | None = None
    """Column that names the environment in `env` that verifies each row, so that a batch can mix environments. Rows
    without a value use `environment`."""
    size: Annotated[int | None, Range(1)] = None
    """Number of rows to read from the start of the file, or to generate with each environment."""
    prompt_key: str | None = None
    """Column that contains the prompt (text or chat messages). Null: the first existing column of messages, prompt,
    question, problem. With strided, this is the column that contains the raw text, and null means the column `text`."""
    columns: dict[str, str] = field(default_factory=dict)
    """Columns to rename when the data is loaded: {new name: old name}."""
    system_prompt: str | None = None
    """System message to add before each prompt. Null: the environment's system message, if it has one. "": no system
    message."""
    prompt_template: str | None = None
    """Template for each prompt, in which `{prompt}` is replaced by the prompt. In a conversation, the template applies
    to the last message."""
    chat: bool | None = None
    """Render prompts with the tokenizer's chat template. False: text prompts are passed to the model unchanged (as in
    TRL), but chat messages are still rendered. Null selects true if the tokenizer has a chat template, and false
    otherwise."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Additional arguments for the chat template, such as `{enable_thinking: false}`. A column with this name sets
    arguments for a single row."""
    shuffle: bool = True
    """Shuffle the rows, in a different order in every epoch."""
    remove_columns: list[str] = field(default_factory=list)
    """Columns to remove from each row, as with `map` of Hugging Face's `datasets`. The transform in `type` still
    receives these columns. Columns that the transform returns are kept, even if they have the name of a removed column.
    """
    type: Any = None
    """Transform of rows, or the name of a row format. A transform is a user-defined `file.py:function` that takes a row
    and returns its new columns, also for rows that are prompts. An axolotl function, `function(cfg)`, which returns
    such a transform and `{"remove_columns": [...]}`, is also accepted. For dpo, kto, orpo, simpo, cpo and reward_model,
    the value may be an axolotl format name: a prefix (`chatml.`, `llama3.`, or `chat_template.` for the tokenizer's
    template) and argilla, argilla_chat, icr, intel, prompt_pairs or ultra. For these algorithms and sft, the value may
    be a mapping with keys such as field_prompt, field_chosen and prompt_format. Null: the columns that TRL expects."""
    train_on: str = "assistant"
    """Tokens of a conversation that sft trains on: assistant (all turns of the assistant), last (only its last turn) or
    all (all tokens except the first)."""
    strided: StridedConfig | None = None
    """Cut prompts out of raw text: each anchor in a row is a separate prompt. Null: each row is one prompt."""
    difficulty: DifficultyConfig | None = None
    """Select and order the rows by measured pass rates. Null: use all rows."""


@dataclass
class ImagesConfig:
    """Images in the rows of all splits."""

    max_pixels: Annotated[int, Range(1)] = 16_777_216
    """Maximum number of pixels of an image. The size is read from the file's header, before the image is decoded."""
    max_per_prompt: Annotated[int, Range(1)] = 8
    """Maximum number of images in a prompt. Engines reserve room for this number."""
    folder: str | None = None
    """Folder below which the paths of images must be. Null: the folder of the split's file."""
    download: bool = False
    """Download images whose row contains an http or https address. False: such rows are refused."""


@dataclass
class DataConfig:
    """Training and held-out prompts."""

    train: DatasetConfig = field(default_factory=DatasetConfig)
    validation: DatasetConfig | None = None
    mix: Annotated[dict[str, float], Range(0)] = field(default_factory=dict)
    """Fraction of each environment in the sampled training prompts, `{math: 0.5, code: 0.3, chat: 0.2}`, divided by
    their sum. All environments of the training rows must be listed; 0 leaves the rows of an environment out. After any
    number of prompts, the number from an environment differs from its fraction by less than 1. Each environment has its
    own epochs. Empty: as many prompts as the rows have."""
    images: ImagesConfig = field(default_factory=ImagesConfig)
    mix_key: str | None = None
    """Column of the training rows that contains the name for `mix`, for example the row's dataset. Null: the
    environment that verifies the row."""
