"""The section ``policy`` and those below it: model, Megatron, optimizer, LoRA, engines. See ``schema`` for the form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, List, Optional

from omegaconf import MISSING

from gdpo_nemo.algorithms.ranges import Range


@dataclass
class OptimizerConfig:
    """AdamW, as Megatron-core runs it."""

    lr: Annotated[float, Range(0)] = 1.0e-6
    """Peak learning rate."""
    min_lr: Annotated[float, Range(0)] = 0.0
    """Learning rate at the end of a decaying schedule."""
    weight_decay: Annotated[float, Range(0)] = 0.0
    """Decoupled weight decay of matrices (norms and biases have none)."""
    adam_beta1: Annotated[float, Range(0, below=1)] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[float, Range(0, below=1)] = 0.99
    """Decay of the second moment."""
    adam_eps: Annotated[float, Range(above=0)] = 1.0e-8
    """Added to the root of the second moment."""
    clip_grad: Annotated[float, Range(0)] = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    offload: bool = False
    """Between updates keep main weights and moments in host memory (bfloat16 on GPUs; on a CPU they are there
    anyway)."""


@dataclass
class SchedulerConfig:
    """Learning-rate schedule, in optimizer updates."""

    lr_decay_style: str = "constant"
    """constant, linear or cosine."""
    lr_warmup_steps: Annotated[int, Range(0)] = 0
    """Updates over which the learning rate rises linearly to lr."""
    lr_warmup_init: Annotated[Optional[float], Range(0)] = None
    """Learning rate of the first update of the warm-up, which reaches lr after lr_warmup_steps further ones. Null: lr /
    lr_warmup_steps, and the last update of the warm-up has lr."""
    lr_decay_steps: Annotated[Optional[int], Range(1)] = None
    """Updates at which the decay ends; null: the updates of the whole run."""
    lr_hold_updates: Annotated[int, Range(1)] = 1
    """Updates that share a learning rate, that of the first of them. With the updates of a step, the rate changes once
    a step, as in NeMo-RL."""


@dataclass
class MegatronConfig:
    """Parallel layout, memory and optimizer of the policy."""

    tensor_model_parallel_size: Annotated[int, Range(1, 100_000)] = 1
    """Ranks that share each matrix."""
    pipeline_model_parallel_size: Annotated[int, Range(1, 100_000)] = 1
    """Ranks that share the layers, in stages."""
    virtual_pipeline_model_parallel_size: Annotated[Optional[int], Range(1, 100_000)] = None
    """Model chunks per pipeline stage (interleaved schedule); null: one. An update then has two or more times as many
    micro-batches as stages, of which some may be empty."""
    num_layers_in_first_pipeline_stage: Annotated[Optional[int], Range(1)] = None
    """Layers of the first pipeline stage, which also has the embedding; the stages between share evenly what is
    left."""
    num_layers_in_last_pipeline_stage: Annotated[Optional[int], Range(1)] = None
    """Layers of the last pipeline stage, which also has the output layer; the stages between share evenly what is
    left."""
    context_parallel_size: Annotated[int, Range(1, 100_000)] = 1
    """Ranks that share each sequence."""
    expert_model_parallel_size: Annotated[int, Range(1, 100_000)] = 1
    """Ranks that share the experts of a mixture model."""
    expert_tensor_parallel_size: Annotated[Optional[int], Range(1, 100_000)] = None
    """Ranks that share each expert's matrices; null: tensor_model_parallel_size."""
    data_parallel_size: Annotated[Optional[int], Range(1, 100_000)] = None
    """Replicas of the model. Null: what the GPUs of the cluster leave, or 1 on CPU."""
    sequence_parallel: bool = False
    """Shard activations between tensor-parallel regions along the sequence."""
    use_distributed_optimizer: bool = False
    """Shard optimizer state over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Overlap the gradient reduction with the backward pass."""
    overlap_param_gather: bool = False
    """Overlap the parameter gather of the distributed optimizer with the forward pass."""
    recompute: str = "none"
    """Activation recomputation: none, selective (attention) or full (whole layers)."""
    recompute_layers: Annotated[Optional[int], Range(1)] = None
    """With `recompute: full`, only this many layers of each pipeline stage (or virtual stage), the first ones; null:
    all."""
    attention_backend: str = "auto"
    """auto, sdpa (torch's, in layers without TransformerEngine), or TransformerEngine's flash, fused, unfused."""
    transformer_engine: Optional[bool] = None
    """Layers of TransformerEngine. Null: when it imports and CUDA is there."""
    fused_logprobs: Optional[bool] = None
    """Log-probs and entropy by Triton kernels that never write logits to memory. Null: on GPUs with Triton, unless
    policy.lora adapts lm_head."""
    moe_router_dtype: Optional[str] = None
    """Precision in which a mixture's router scores its experts: float32 or float64 (or fp32, fp64); null:
    policy.precision."""
    freeze_moe_router: bool = False
    """Leave the routers of a mixture model as they are: they choose experts and pass gradients on, but are not
    trained."""
    fp8: Optional[str] = None
    """Matrix products of TransformerEngine in 8 bits: e4m3 or hybrid (e5m2 for gradients); null: off."""
    fp8_recipe: str = "delayed"
    """How fp8 tensors are scaled: delayed, tensorwise, blockwise or mxfp8 (the last on Blackwell)."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)


@dataclass
class VllmConfig:
    """One vLLM engine."""

    tensor_parallel_size: Annotated[int, Range(1)] = 1
    """Ranks of one engine."""
    kv_cache_memory_bytes: Annotated[int, Range(1)] = 268435456
    """KV cache of one engine on CPU, in bytes."""
    gpu_memory_utilization: Annotated[float, Range(above=0, most=1)] = 0.85
    """Share of GPU memory one engine may take (GPU only)."""
    max_num_seqs: Annotated[int, Range(1)] = 256
    """Sequences decoded at once by one engine."""
    enforce_eager: bool = False
    """Do not capture CUDA graphs (on CPU execution is always eager)."""
    head_dtype: str = "float32"
    """What a bfloat16 engine computes logits in (GPU only): float32, from the same bfloat16 products but not rounded to
    bfloat16 before the softmax, or model, rounded."""


@dataclass
class GenerationConfig:
    """How the policy is sampled."""

    backend: str = "vllm"
    """Sampling engine; vllm."""
    engines: Annotated[int, Range(1, 100_000)] = 1
    """vLLM engines (data-parallel replicas)."""
    max_new_tokens: Annotated[int, Range(1)] = 64
    """Longest completion in tokens; shorter where the context ends."""
    temperature: Annotated[float, Range(above=0)] = 1.0
    """Sampling temperature; the trainer divides its logits by the same number."""
    top_p: Annotated[float, Range(above=0, most=1)] = 1.0
    """Nucleus of sampling. Below 1 the sampler's log-probs are of another distribution than the trainer's."""
    top_k: Annotated[int, Range(1, also=(-1,))] = -1
    """Number of tokens sampled from; -1: all."""
    stop_strings: List[str] = field(default_factory=list)
    """Texts that end a completion; they stay part of it."""
    verify_weights: bool = True
    """After each weight update compare the log-probs of a few sequences between trainer and engines."""
    parity_limit: Annotated[Optional[float], Range(above=0)] = None
    """Largest mean difference that verify_weights allows, in nats a token; the run stops above it. null: four times
    what trainer and engines differ by at the start, on the model that both have loaded, and at least 1e-4 in float32,
    0.01 in bfloat16."""
    vllm_cfg: VllmConfig = field(default_factory=VllmConfig)


@dataclass
class LoraConfig:
    """Low-rank adapters: the model stays as it is, small matrices beside its linear layers are trained."""

    rank: Annotated[int, Range(0, 2**20)] = 0
    """Rank of the adapters; 0 trains the whole model."""
    alpha: Annotated[float, Range(above=0)] = 32.0
    """Adapters count alpha / rank times."""
    dropout: Annotated[float, Range(0, below=1)] = 0.0
    """Dropout before the adapters while training."""
    init: str = "uniform"
    """How A is drawn (B starts at 0): uniform, as PEFT does, or xavier (normal), as NeMo's adapters do."""
    target_modules: List[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    """Hugging Face names of the linear layers that get an adapter: those of the default (other names for some
    families, docs/models.md), and lm_head where it is not the embedding."""
    share_a: bool = False
    """Whether the layers that Megatron fuses (q, k, v; gate, up) share one A, as in NeMo's adapters; false: an A each,
    as in PEFT."""


@dataclass
class PolicyConfig:
    """The model: where it comes from, how it is trained and sampled."""

    model_name: str = MISSING
    """Folder with a Hugging Face checkpoint, or a name on the hub; or a GGUF file, a PEFT adapter, a Megatron-core or
    NeMo 2 checkpoint, of which a folder is made (docs/models.md)."""
    model_factory: Optional[str] = None
    """`file.py:function` called as function(folder, seed) when the folder model_name does not exist. A dictionary
    MODEL_CONFIGS in that file, {function: fields of config.json}, tells --dry-run and `plan` what it will make."""
    tokenizer_name: Optional[str] = None
    """Tokenizer folder or name; null: that of the model."""
    precision: str = "bfloat16"
    """float32 or bfloat16 (with float32 main weights)."""
    max_total_sequence_length: Annotated[int, Range(1, 10**9)] = 1024
    """Longest prompt plus completion in tokens."""
    train_global_batch_size: Annotated[Optional[int], Range(1)] = None
    """Sequences per optimizer update; null: all of a step, one update."""
    micro_batch_tokens: Annotated[int, Range(1)] = 8192
    """Token budget of one packed micro-batch on one data-parallel rank; never below the longest sequence."""
    skip_zero_advantage: bool = False
    """Compute no forward and backward of sequences whose advantage or weight is 0, which give no gradient; what each
    token weighs stays that of the whole update. Metrics that are means over trained tokens (entropy, ratio, clip,
    parity) are then over those of the other sequences. Refused where the loss reads all: a KL penalty, an entropy
    bonus, a function of your own that does not say that it can do without."""
    share_prompts: Any = "auto"
    """Compute tokens that samples of a prompt begin with once for those of a micro-batch: auto (where that saves a
    tenth of an update or more; on CPUs), true or false. The gradient is the same; what is counted by
    micro_batch_tokens are the tokens that are computed."""
    offload_reference: bool = True
    """Keep the weights of the KL penalty's reference in host memory and copy them to the GPU for every pass under them;
    false: keep them on the GPU, beside the policy's."""
    sync_ref_model: bool = False
    """Let the reference, which KL penalties and dpo's and kto's scores refer to, follow the policy (TR-DPO, arXiv
    2404.09656)."""
    ref_model_sync_steps: Annotated[int, Range(1)] = 512
    """Steps of the run between two such changes of the reference."""
    ref_model_mixup_alpha: Annotated[float, Range(above=0, most=1)] = 0.6
    """Share of the policy's weights in the changed reference, the rest being its own: above 0, to 1 (a copy)."""
    num_threads: Annotated[Optional[int], Range(1, 4096)] = None
    """CPU threads per policy rank; null: the cores divided by the ranks."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    megatron_cfg: MegatronConfig = field(default_factory=MegatronConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
