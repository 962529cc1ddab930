"""Build the policy's model chunks, their data-parallel wrappers, optimizer and schedule for one rank."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.optimizer import (
    OptimizerConfig as MegatronOptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from transformers import PretrainedConfig

from gdpo_nemo.config.schema import LoraConfig, MegatronConfig
from gdpo_nemo.config.stages import stage_layers
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.megatron.fused_logprobs import fused_token_logprobs, use_fused_logprobs
from gdpo_nemo.megatron.hf_mapping import head_size, layer_symbols, num_experts, rotary, transformer_fields
from gdpo_nemo.megatron.layers import layer_spec, transformer_engine_is_usable
from gdpo_nemo.megatron.learning_rate import make_schedule
from gdpo_nemo.megatron.logprobs import EntropyUse, token_logprobs
from gdpo_nemo.megatron.lora import attach
from gdpo_nemo.megatron.runtime import hidden

# Logits of one chunk of tokens may take this many bytes (float32); more tokens are recomputed chunk by chunk.
_LOGIT_BYTES = 256 << 20


class PolicyModel(HybridModel):
    """A HybridModel whose last stage returns log-probs and entropies of chosen tokens instead of logits.

    With ``fused`` kernels there are no logits. Otherwise they exist for one chunk of tokens at a time; when there are
    several chunks, each is recomputed in the backward.
    """

    temperature = 1.0
    entropy: EntropyUse = "gradient"
    fused = False
    real_vocab_size: int

    def forward(self, input_ids, packing, rows, targets):
        """One micro-batch.

        Args:
            input_ids: int64 [1, local tokens], or None past the first stage.
            packing: ``attention.Packing`` of the pack.
            rows: int64 [chosen]: local tokens whose successor is evaluated.
            targets: int64 [chosen]: those successors.

        Returns:
            Last stage: float32 [chosen, 2], log-prob and entropy, or [chosen, 1] where ``entropy`` is none. Other
            stages: hidden states.
        """
        embedded = self.embedding(input_ids=input_ids, position_ids=None) if self.pre_process else None
        if embedded is not None and self.training and not embedded.requires_grad:
            embedded.requires_grad_()  # frozen embeddings (LoRA): recomputation needs an input that carries gradients
        angles = None
        if self.position_embedding_type == "rope":
            angles = self.rotary_pos_emb(packing.max_seqlen_q, packed_seq=True)
        hidden = self.decoder(
            hidden_states=embedded, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=packing
        )
        return self._output(hidden, rows, targets) if self.post_process else hidden

    def _output(self, hidden, rows, targets):
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, group=self.pg_collection.tp)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=self.pg_collection.tp)
        return self._evaluate(hidden.squeeze(1).index_select(0, rows), targets)

    def _evaluate(self, hidden, targets):
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        weight = self.output_layer.weight if weight is None else weight
        if self.fused and not hasattr(self.output_layer, "adapters"):
            return self._columns(
                *fused_token_logprobs(hidden, weight, targets, self.pg_collection.tp, **self._options())
            )
        tokens = max(1, _LOGIT_BYTES // (4 * weight.size(0)))
        if hidden.size(0) <= tokens:
            return self._evaluate_chunk(hidden, weight, targets)
        head = self._head_adapter()
        drops = head is not None and head.drops
        return torch.cat(
            [
                torch.utils.checkpoint.checkpoint(
                    self._evaluate_chunk, h, weight, t, use_reentrant=False, preserve_rng_state=drops
                )
                for h, t in zip(hidden.split(tokens), targets.split(tokens))
            ]
        )

    def _head_adapter(self):
        adapter = getattr(self.output_layer, "adapters", None)
        return adapter if adapter is not None and adapter.enabled else None

    def _evaluate_chunk(self, hidden, weight, targets):
        logits = torch.nn.functional.linear(hidden, weight)
        if (head := self._head_adapter()) is not None:
            logits = logits + head(hidden)
        return self._columns(*token_logprobs(logits, targets, self.pg_collection.tp, **self._options()))

    def _options(self) -> dict[str, Any]:
        return dict(temperature=self.temperature, vocab_size=self.real_vocab_size, entropy=self.entropy)

    @staticmethod
    def _columns(logprobs: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
        return logprobs[:, None] if entropy is None else torch.stack((logprobs, entropy), -1)


class ScoreModel(PolicyModel):
    """A PolicyModel whose last stage returns a score of chosen tokens in place of log-probs: that of a linear layer
    without bias, as transformers' sequence classifiers of one label have it."""

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any):
        # Untied, so that no embedding is kept on the last stage for an output layer that is not there.
        super().__init__(config, *arguments, **{**options, "share_embeddings_and_output_weights": False})
        if self.post_process:
            del self.output_layer
            self.score = torch.nn.Linear(config.hidden_size, 1, bias=False, dtype=config.params_dtype)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """As of its modules: LanguageModule's own asks for the output layer."""
        return super(LanguageModule, self).sharded_state_dict(prefix, sharded_offsets, metadata)

    def _output(self, hidden, rows, targets):
        """float32 [chosen, 1]; ``targets`` are not read."""
        if self.config.sequence_parallel:
            # Each tensor-parallel rank has the whole head, and so the whole gradient already: none must be added up.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return self.score(hidden.squeeze(1).index_select(0, rows)).float()


class ValueModel(PolicyModel):
    """A PolicyModel with a second head on the same hidden states: a linear one, which says what a token's state is
    worth. It starts at 0, so that the first advantages are of the rewards alone."""

    values = True
    """Whether the value stands behind the other columns."""

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any):
        super().__init__(config, *arguments, **options)
        if self.post_process:
            self.value_head = torch.nn.Linear(config.hidden_size, 1, dtype=config.params_dtype)
            torch.nn.init.zeros_(self.value_head.weight)
            torch.nn.init.zeros_(self.value_head.bias)

    def _output(self, hidden, rows, targets):
        """float32 [chosen, 2 or 3]: as of the PolicyModel, and the value of the state in which the target was chosen;
        without it unless ``values``."""
        if self.config.sequence_parallel:
            # Each tensor-parallel rank has the whole value head, and so the whole of its gradient: none is to be added
            # up. The other head adds up its own (``copy_to_tensor_model_parallel_region``).
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        chosen = hidden.squeeze(1).index_select(0, rows)
        shared = tensor_parallel.copy_to_tensor_model_parallel_region(chosen, group=self.pg_collection.tp)
        columns = self._evaluate(shared, targets)
        if not self.values:
            return columns
        head = self.value_head
        # In float32, or bfloat16 would round a value of 1 to some thousandths.
        values = torch.nn.functional.linear(chosen.float(), head.weight.float(), head.bias.float())
        return torch.cat((columns, values), -1)


@dataclasses.dataclass
class BuiltModel:
    """Everything one rank trains with. ``chunks`` are bare models, ``wrapped`` the same inside precision and DDP
    wrappers; without the latter where the model is not trained."""

    hf_config: PretrainedConfig
    config: TransformerConfig
    chunks: list[PolicyModel]
    wrapped: list[Any]
    optimizer: Any = None
    scheduler: Any = None
    """Megatron's MegatronOptimizer and OptimizerParamScheduler; None for a model that is not trained."""


def transformer_config(
    hf: PretrainedConfig, layout: MegatronConfig, dtype: torch.dtype, use_te: bool
) -> TransformerConfig:
    """Megatron's configuration of the architecture ``hf`` in ``layout``; fused kernels on GPUs only."""
    recompute: dict[str, dict[str, Any]] = {
        "none": {},
        "selective": dict(recompute_granularity="selective", recompute_modules=["core_attn"]),
        "full": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    }
    options = recompute[layout.recompute]
    if layout.recompute_layers is not None:
        # A layer of the model is two of the Hybrid stack: attention and MLP.
        options |= dict(recompute_method="block", recompute_num_layers=2 * layout.recompute_layers)
    if use_te:
        options |= _engine_options(hf, layout)
    if layout.fp8:
        options |= dict(fp8=layout.fp8, fp8_recipe=layout.fp8_recipe)
    return TransformerConfig(
        **transformer_fields(hf),
        **options,
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        expert_model_parallel_size=layout.expert_model_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        attention_softmax_in_fp32=True,
        # Weights come from a checkpoint, but this is also what marks them as tensor-parallel: without the mark the
        # gradient norm counts one rank's shard only.
        perform_initialization=True,
        use_cpu_initialization=False,
        # Of Megatron's own linear layers, which would need apex; for TransformerEngine's see `_sum_gradients_in_place`.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=use_te or torch.cuda.is_available(),
        bias_dropout_fusion=use_te or torch.cuda.is_available(),
        batch_p2p_comm=False,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        moe_router_dtype=layout.moe_router_dtype and layout.moe_router_dtype.replace("float", "fp"),
        moe_grouped_gemm=use_te,
        calculate_per_token_loss=True,
        finalize_model_grads_func=_finalize,
    )


def _engine_options(hf: PretrainedConfig, layout: MegatronConfig) -> dict[str, Any]:
    """What is particular to TransformerEngine's layers."""
    options: dict[str, Any] = dict(attention_backend=AttnBackend[layout.attention_backend], apply_rope_fusion=True)
    scaling = rotary(hf)[1]
    if scaling != 1.0:
        # Its rotary kernel takes no factor on queries and keys (YaRN's); the scores take both at once.
        options |= dict(softmax_scale=scaling**2 / math.sqrt(head_size(hf)))
    if num_experts(hf):
        options |= dict(moe_permute_fusion=True)
    return options


def _finalize(model, num_tokens=None, **kwargs):
    """Megatron's gradient reduction without its division: our loss carries global weights already."""
    finalize_model_grads(model, None, **kwargs)


def layer_pattern(symbols: list[str], layout: MegatronConfig) -> str:
    """The Hybrid layers, with ``|`` between the pipeline's stages (or between their virtual stages)."""
    stages = layout.pipeline_model_parallel_size * (layout.virtual_pipeline_model_parallel_size or 1)
    ends = layout.num_layers_in_first_pipeline_stage, layout.num_layers_in_last_pipeline_stage
    cuts = stage_layers(len(symbols), stages, *(ends if stages > 1 else ()))
    return "|".join("".join(symbols[layer] for layer in stage) for stage in cuts)


def build_chunks(
    hf: PretrainedConfig,
    layout: MegatronConfig,
    dtype: torch.dtype,
    temperature: float = 1.0,
    adapted: bool = False,
    scores: bool = False,
    values: bool = False,
) -> tuple[TransformerConfig, list[PolicyModel]]:
    """This rank's model chunks (one, or one per virtual pipeline stage), on its device, randomly initialised;
    ``adapted``: for adapters (see ``layer_spec``); ``scores``: with the head of a reward model; ``values``: with a
    value head."""
    use_te = transformer_engine_is_usable() if layout.transformer_engine is None else layout.transformer_engine
    use_te = use_te and layout.attention_backend != "sdpa"
    if layout.fp8 and not use_te:
        raise ConfigError("policy.megatron_cfg.fp8: needs TransformerEngine, which is not usable here")
    config = transformer_config(hf, layout, dtype, use_te)
    fused = use_fused_logprobs(layout.fused_logprobs)
    frequencies = rotary(hf)
    virtual = layout.virtual_pipeline_model_parallel_size
    tensor_size = layout.tensor_model_parallel_size
    kind = ScoreModel if scores else ValueModel if values else PolicyModel
    chunks = []
    for stage in range(virtual) if virtual else [None]:
        model = kind(
            config,
            layer_spec(config, frequencies, use_te, adapted),
            vocab_size=-(-hf.vocab_size // tensor_size) * tensor_size,
            max_sequence_length=hf.max_position_embeddings,
            hybrid_layer_pattern=layer_pattern(layer_symbols(hf), layout),
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=hf.tie_word_embeddings,
            # Local layers rotate inside their attention; only TransformerEngine's need the model's angles.
            position_embedding_type="rope" if use_te else "none",
            vp_stage=stage,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        if use_te:
            model.rotary_pos_emb.inv_freq = frequencies[0]
        model.temperature = temperature
        model.fused = fused
        model.real_vocab_size = hf.vocab_size
        chunks.append(model.cuda() if torch.cuda.is_available() else model)
    return config, chunks


def freeze_routers(chunks: list[PolicyModel]) -> None:
    """Leave the mixtures' routers untrained. Before the wrappers, which give a gradient buffer to what is trained."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".mlp.router." in name:
                parameter.requires_grad_(False)


def wrap(config: TransformerConfig, chunks: list[PolicyModel], layout: MegatronConfig) -> list[DistributedDataParallel]:
    """Precision and data-parallel wrappers around the chunks."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=layout.use_distributed_optimizer,
        overlap_grad_reduce=layout.overlap_grad_reduce,
        overlap_param_gather=layout.overlap_param_gather,
    )
    inner = [Float16Module(config, chunk) if config.bf16 else chunk for chunk in chunks]
    wrapped = [
        DistributedDataParallel(config, ddp, module, disable_bucketing=index > 0) for index, module in enumerate(inner)
    ]
    _sum_gradients_in_place(chunks)
    if layout.overlap_grad_reduce:
        config.no_sync_func = [m.no_sync for m in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    return wrapped


def _sum_gradients_in_place(chunks: list[PolicyModel]) -> None:
    """Have TransformerEngine's matrix products add to the wrapper's float32 gradients themselves.

    Set here and not by ``gradient_accumulation_fusion``, with which Megatron's output layer asks for apex's kernel.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True


def build_optimizer(
    layout: MegatronConfig,
    dtype: torch.dtype,
    wrapped: list,
    total_updates: int,
    value_lr_mult: float | None = None,
):
    """Megatron's AdamW with its learning-rate schedule, counted in updates; that of a value head ``value_lr_mult``
    times as high."""
    o = layout.optimizer
    config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=o.lr,
        min_lr=o.min_lr,
        weight_decay=o.weight_decay,
        adam_beta1=o.adam_beta1,
        adam_beta2=o.adam_beta2,
        adam_eps=o.adam_eps,
        clip_grad=o.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=layout.use_distributed_optimizer,
        overlap_param_gather=layout.overlap_param_gather,
    )
    overrides = None
    if value_lr_mult is not None:
        # Marked, because a group is known on loading by its marks: its learning rate may change between starts.
        own: Any = dict(is_decoupled_lr=True, max_lr=value_lr_mult * o.lr, min_lr=value_lr_mult * o.min_lr)
        overrides = {**get_standard_config_overrides(config), ParamKey(name="*value_head.*"): own}
    optimizer = get_megatron_optimizer(config, wrapped, overrides)
    return optimizer, make_schedule(optimizer, layout, total_updates)


def _read_config(folder: str | Path) -> PretrainedConfig:
    from transformers import AutoConfig

    # For the docstring of a config class transformers imports all that its models and their generation need, torch's
    # compiler among it, 1 s of a core, and does without if it is not there.
    with hidden("transformers.models.auto.modeling_auto"):
        return AutoConfig.from_pretrained(folder)


def build_frozen(folder: str | Path, layout: MegatronConfig, dtype: torch.dtype) -> BuiltModel:
    """The model in the Hugging Face ``folder`` for forward passes alone: no gradients, no optimizer."""
    from gdpo_nemo.megatron.conversion import load_hf
    from gdpo_nemo.weights.model_folder import open_weights

    hf = _read_config(folder)
    config, chunks = build_chunks(hf, layout, dtype)
    load_hf(list(chunks), open_weights(folder), hf)
    for chunk in chunks:
        chunk.requires_grad_(False)
    inner = [Float16Module(config, chunk) if config.bf16 else chunk for chunk in chunks]
    return BuiltModel(hf, config, chunks, inner)


def build(
    folder: str | Path,
    layout: MegatronConfig,
    dtype: torch.dtype,
    temperature: float,
    total_updates: int,
    lora: LoraConfig | None = None,
    seed: int = 0,
    scores: bool = False,
    value_lr_mult: float | None = None,
) -> BuiltModel:
    """Model, wrappers, optimizer and schedule of this rank, with the weights of the Hugging Face ``folder``.

    With ``lora`` those are frozen, and adapters drawn from ``seed`` are trained; with ``scores`` it ends in the head of
    a reward model, drawn from ``seed`` where the folder has none; with ``value_lr_mult`` it has a value head, too,
    whose learning rate is that times the others'.
    """
    from gdpo_nemo.megatron.conversion import load_hf
    from gdpo_nemo.megatron.reward_head import with_score_head
    from gdpo_nemo.weights.model_folder import open_weights

    hf = _read_config(folder)
    heads = dict(scores=scores, values=value_lr_mult is not None)
    config, chunks = build_chunks(hf, layout, dtype, temperature, adapted=lora is not None, **heads)
    modules: list[torch.nn.Module] = list(chunks)
    read = open_weights(folder)
    load_hf(modules, with_score_head(read, hf, seed) if scores else read, hf)
    if lora:
        attach(modules, hf, lora, seed)
    elif layout.freeze_moe_router:
        freeze_routers(chunks)
    wrapped = wrap(config, chunks, layout)
    # ``config.grad_scale_func`` stays empty: float32 and bfloat16 losses are not scaled, and with it model and
    # optimizer would hold each other, groups and all, through autograd nodes that Python's collector cannot see.
    optimizer, scheduler = build_optimizer(layout, dtype, wrapped, total_updates, value_lr_mult)
    return BuiltModel(hf, config, chunks, wrapped, optimizer, scheduler)
