"""Build model chunks, data-parallel wrappers, optimizer and learning-rate schedule for one rank of the policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from gdpo_nemo.config.layout import stage_layers
from gdpo_nemo.config.schema import LoraConfig, MegatronConfig
from gdpo_nemo.megatron.layers import (
    Attention,
    engine_options,
    layer_spec,
    select_attention,
    transformer_engine_is_usable,
)
from gdpo_nemo.megatron.logprobs import EntropyUse, fused_token_logprobs, token_logprobs, use_fused_logprobs
from gdpo_nemo.megatron.lora import attach
from gdpo_nemo.megatron.model_config import description_of, embedding_scale, layer_attentions, transformer_fields
from gdpo_nemo.megatron.optimizer import build_optimizer, mark_as_output
from gdpo_nemo.megatron.routers import freeze_expert_biases, freeze_routers, in_precision
from gdpo_nemo.megatron.vision import Vision, build_tower
from gdpo_nemo.models.description import ModelDescription
from gdpo_nemo.models.families import Family
from gdpo_nemo.utils.errors import ConfigError

# Maximum size in bytes of float32 logits. Larger logits are computed in chunks of tokens and recomputed in the backward
# pass.
_LOGIT_BYTES = 256 << 20


class PolicyModel(HybridModel):
    """A HybridModel whose last pipeline stage returns log-probs and entropies of target tokens instead of logits.

    Fused kernels (``fused``) do not store the logits. Without fused kernels, the logits are computed for one chunk of
    tokens at a time. If there are several chunks, each chunk is recomputed in the backward pass.
    """

    temperature = 1.0
    entropy: EntropyUse = "gradient"
    fused = False
    real_vocab_size: int
    embedding_scale = 1.0
    """Factor of the embeddings."""
    vision: Vision | None = None
    """Images of the model, for the chunk with the vision tower (``tower``). None for other chunks."""
    logit_cap: float | None = None
    """Soft cap c of the logits x, c * tanh(x / c), before the division by the temperature."""

    def forward(self, input_ids, packing, rows, targets):
        """Run one micro-batch.

        Args:
            input_ids: int64 [1, local tokens], or None after the first stage.
            packing: ``attention.Packing`` of the micro-batch.
            rows: int64 [targets]: index of the local token that precedes each target.
            targets: int64 [targets]: token ids of the targets.

        Returns:
            On the last stage, float32 [targets, 2] with log-prob and entropy, or [targets, 1] if ``entropy`` is none.
            On other stages, the hidden states.
        """
        embedded = self._embed(input_ids, packing) if self.pre_process else None
        angles = None
        if self.position_embedding_type == "rope":
            angles = self.rotary_pos_emb(packing.max_seqlen_q, packed_seq=True)
        hidden = self.decoder(
            hidden_states=embedded, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=packing
        )
        return self._output(hidden, rows, targets) if self.post_process else hidden

    def _embed(self, input_ids, packing):
        embedded = self.embedding(input_ids=input_ids, position_ids=None)
        if self.embedding_scale != 1.0:
            embedded = embedded * self.embedding_scale
        if self.vision is not None:
            embedded = self.vision.embed(self, embedded, packing)
        if self.training and not embedded.requires_grad:
            # LoRA freezes the embeddings, but activation recomputation needs an input that requires a gradient.
            embedded.requires_grad_()
        return embedded

    def _output(self, hidden, rows, targets):
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, group=self.pg_collection.tp)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=self.pg_collection.tp)
        return self._evaluate(hidden.squeeze(1).index_select(0, rows), targets)

    def _gathered(self, hidden):
        """Return the hidden states of all tokens, for a head that is replicated on the tensor-parallel ranks.

        Each of these ranks computes the full gradient, which must not be summed.
        """
        if not self.config.sequence_parallel:
            return hidden
        return tensor_parallel.gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=self.pg_collection.tp
        )

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
        columns = []
        for h, t in zip(hidden.split(tokens), targets.split(tokens)):
            columns.append(
                checkpoint(self._evaluate_chunk, h, weight, t, use_reentrant=False, preserve_rng_state=drops)
            )
        return torch.cat(columns)

    def _head_adapter(self):
        adapter = getattr(self.output_layer, "adapters", None)
        return adapter if adapter is not None and adapter.enabled else None

    def _evaluate_chunk(self, hidden, weight, targets):
        logits = torch.nn.functional.linear(hidden, weight)
        if (head := self._head_adapter()) is not None:
            logits = logits + head(hidden)
        if self.logit_cap is not None:
            logits = self.logit_cap * torch.tanh(logits / self.logit_cap)
        return self._columns(*token_logprobs(logits, targets, self.pg_collection.tp, **self._options()))

    def _options(self) -> dict[str, Any]:
        return dict(temperature=self.temperature, vocab_size=self.real_vocab_size, entropy=self.entropy)

    @staticmethod
    def _columns(logprobs: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
        return logprobs[:, None] if entropy is None else torch.stack((logprobs, entropy), -1)


class ScoreModel(PolicyModel):
    """A PolicyModel whose last stage returns a score for each target token instead of its log-prob.

    The score head is a linear layer without bias, as in transformers' sequence classifiers with one label.
    """

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any):
        # The score head replaces the output layer, so the last stage needs no copy of the embedding.
        super().__init__(config, *arguments, **{**options, "share_embeddings_and_output_weights": False})
        if self.post_process:
            del self.output_layer
            self.score = torch.nn.Linear(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
            mark_as_output(self.score)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Return the modules' sharded states. LanguageModule's method cannot be used: it requires the output layer."""
        return super(LanguageModule, self).sharded_state_dict(prefix, sharded_offsets, metadata)

    def _output(self, hidden, rows, targets):
        """Return the scores, float32 [targets, 1]. The token ids in ``targets`` are not used."""
        return self.score(self._gathered(hidden).squeeze(1).index_select(0, rows)).float()


class ValueModel(PolicyModel):
    """A PolicyModel with an additional linear value head on the same hidden states.

    The head is initialised to 0, so that the first advantages depend only on the rewards.
    """

    values = True
    """True to return the values in an additional column."""

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any):
        super().__init__(config, *arguments, **options)
        if self.post_process:
            self.value_head = torch.nn.Linear(config.hidden_size, 1, dtype=config.params_dtype)
            torch.nn.init.zeros_(self.value_head.weight)
            torch.nn.init.zeros_(self.value_head.bias)
            mark_as_output(self.value_head)

    def _output(self, hidden, rows, targets):
        """Return the columns of PolicyModel and, if ``values`` is true, an additional column, in float32.

        The additional column contains the value of the state in which each target was generated.
        """
        selected = self._gathered(hidden).squeeze(1).index_select(0, rows)
        # The backward pass of this function sums the gradient that comes from the output layer.
        shared = tensor_parallel.copy_to_tensor_model_parallel_region(selected, group=self.pg_collection.tp)
        columns = self._evaluate(shared, targets)
        if not self.values:
            return columns
        head = self.value_head
        # Compute the value in float32, because bfloat16 rounds a value near 1 by up to 0.004.
        values = torch.nn.functional.linear(selected.float(), head.weight.float(), head.bias.float())
        return torch.cat((columns, values), -1)


@dataclasses.dataclass
class BuiltModel:
    """Model and training state of one rank."""

    hf_config: PretrainedConfig
    config: TransformerConfig
    chunks: list[PolicyModel]
    """Model chunks without wrappers: one, or one per virtual pipeline stage."""
    wrapped: list[Any]
    """The chunks inside mixed-precision and DDP wrappers. A model that is not trained has no DDP wrappers."""
    optimizer: Any = None
    """Megatron's MegatronOptimizer, or None for a model that is not trained."""
    scheduler: Any = None
    """Learning-rate schedule (``UpdateSchedule``), or None for a model that is not trained."""
    vision: Vision | None = None
    """Images of the model, or None for a text model."""


def transformer_config(
    hf: PretrainedConfig,
    model: ModelDescription,
    layout: MegatronConfig,
    dtype: torch.dtype,
    use_te: bool,
    attention: Attention = Attention.PACKED,
) -> TransformerConfig:
    """Return Megatron's TransformerConfig for the model ``hf`` in a parallel layout.

    Args:
        use_te: True to build TransformerEngine's layers.
        attention: attention of the layers.
    """
    recompute: dict[str, dict[str, Any]] = {
        "none": {},
        "selective": dict(recompute_granularity="selective", recompute_modules=list(layout.recompute_modules)),
        "full": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    }
    options = recompute[layout.recompute]
    if layout.recompute_layers is not None:
        hybrid_layers = len(model.symbols[0]) * layout.recompute_layers
        options |= dict(recompute_method="block", recompute_num_layers=hybrid_layers)
    if use_te:
        options |= engine_options(hf, model, layout, attention)
    if layout.fp8:
        options |= dict(fp8=layout.fp8, fp8_recipe=layout.fp8_recipe)
    kind = MLATransformerConfig if model.family.latent else TransformerConfig
    return kind(
        **{**transformer_fields(model), **options},
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
        # The weights are loaded later, but initialisation also sets their tensor-parallel attributes. Without these
        # attributes, the gradient norm would include only one rank's shard.
        perform_initialization=True,
        use_cpu_initialization=False,
        # With this setting, Megatron's linear layers would require apex. For TransformerEngine's layers, see
        # `_accumulate_into_main_grad`.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=model.family.activation == "silu" and (use_te or torch.cuda.is_available()),
        bias_dropout_fusion=use_te or torch.cuda.is_available(),
        batch_p2p_comm=False,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        moe_router_dtype=layout.moe_router_dtype and layout.moe_router_dtype.replace("float", "fp"),
        moe_grouped_gemm=use_te,
        calculate_per_token_loss=True,
        finalize_model_grads_func=_finalize,
    )


def _finalize(model, num_tokens=None, **kwargs):
    """Reduce the gradients without Megatron's division by the token count: the loss is already weighted globally."""
    finalize_model_grads(model, None, **kwargs)


def layer_pattern(symbols: Sequence[str], layout: MegatronConfig) -> str:
    """Return Megatron's Hybrid layer pattern, with ``|`` between (virtual) pipeline stages.

    Args:
        symbols: Hybrid layers of each Hugging Face layer (``ModelDescription.symbols``).
    """
    stages = layout.pipeline_model_parallel_size * (layout.virtual_pipeline_model_parallel_size or 1)
    first, last = layout.num_layers_in_first_pipeline_stage, layout.num_layers_in_last_pipeline_stage
    if stages == 1:
        first = last = None
    patterns = []
    for layers in stage_layers(len(symbols), stages, first, last):
        patterns.append("".join(symbols[layer] for layer in layers))
    return "|".join(patterns)


def _uses_engine(layout: MegatronConfig, family: Family) -> bool:
    """Return whether to build TransformerEngine's layers.

    Raises:
        ConfigError: if TransformerEngine is required, but not available or not supported for the family.
    """
    use_te = transformer_engine_is_usable() if layout.transformer_engine is None else layout.transformer_engine
    use_te = use_te and layout.attention_backend != "sdpa"
    if family.biases:
        if layout.transformer_engine:
            raise ConfigError(
                f"policy.megatron_cfg.transformer_engine: true is not supported for {family.model_type} models"
            )
        use_te = False
    if layout.fp8 and not use_te:
        raise ConfigError("policy.megatron_cfg.fp8: requires TransformerEngine, which is not available")
    return use_te


def build_chunks(
    hf: PretrainedConfig,
    layout: MegatronConfig,
    dtype: torch.dtype,
    *,
    model_class: type[PolicyModel] = PolicyModel,
    temperature: float = 1.0,
    adapted: bool = False,
    sharing: bool = False,
) -> tuple[TransformerConfig, list[PolicyModel]]:
    """Return Megatron's configuration and this rank's randomly initialised model chunks, on its device.

    There is one chunk, or one per virtual pipeline stage.

    Args:
        model_class: class of the chunks, which determines the head.
        temperature: sampling temperature, by which logits are divided.
        adapted: True to prepare the layers for adapters (see ``layer_spec``).
        sharing: True if packs may contain shared prompts.

    Raises:
        ConfigError: if fp8 or fused log-probs are required but not available.
    """
    description = description_of(hf)
    text = hf.get_text_config()
    use_te = _uses_engine(layout, description.family)
    layers = layer_attentions(text, description)
    special, latent = description.special_attention, description.family.latent is not None
    attention = select_attention(layout.attention_backend, use_te, sharing, special, latent)
    config = transformer_config(text, description, layout, dtype, use_te, attention)
    fused = use_fused_logprobs(layout.fused_logprobs, description.logit_cap)
    # Only TransformerEngine's attention uses the model's rotary angles. The others compute their angles.
    rotary = layers[0].rotary if attention is Attention.ENGINE else None
    virtual = layout.virtual_pipeline_model_parallel_size
    tensor_size = layout.tensor_model_parallel_size
    chunks = []
    for stage in range(virtual) if virtual else [None]:
        model = model_class(
            config,
            layer_spec(description, config, layers, use_te, attention, adapted=adapted, sharing=sharing),
            vocab_size=-(-text.vocab_size // tensor_size) * tensor_size,
            max_sequence_length=text.max_position_embeddings,
            hybrid_layer_pattern=layer_pattern(description.symbols, layout),
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=description.tied,
            position_embedding_type="rope" if rotary else "none",
            vp_stage=stage,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            scatter_embedding_sequence_parallel=description.tower is None,
        )
        if description.tower and model.pre_process:
            model.tower = build_tower(hf, dtype)
        if rotary:
            model.rotary_pos_emb.inv_freq = rotary[0]
            model.rotary_pos_emb.rotary_interleaved = config.rotary_interleaved
        model.temperature = temperature
        model.fused = fused
        model.real_vocab_size = text.vocab_size
        model.embedding_scale = embedding_scale(description, dtype)
        model.logit_cap = description.logit_cap
        freeze_expert_biases(model)
        chunks.append(model.cuda() if torch.cuda.is_available() else model)
    return config, chunks


def wrap(config: TransformerConfig, chunks: list[PolicyModel], layout: MegatronConfig) -> list[DistributedDataParallel]:
    """Wrap the chunks for mixed precision and data parallelism."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=layout.optimizer.main_grads_dtype == "float32",
        use_distributed_optimizer=layout.use_distributed_optimizer,
        overlap_grad_reduce=layout.overlap_grad_reduce,
        overlap_param_gather=layout.overlap_param_gather,
    )
    inner = [in_precision(config, chunk) for chunk in chunks]
    wrapped = []
    for index, module in enumerate(inner):
        wrapped.append(DistributedDataParallel(config, ddp, module, disable_bucketing=index > 0))
    _accumulate_into_main_grad(chunks)
    if layout.overlap_grad_reduce:
        config.no_sync_func = [m.no_sync for m in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
    return wrapped


def _accumulate_into_main_grad(chunks: list[PolicyModel]) -> None:
    """Make TransformerEngine's layers add weight gradients directly to the wrapper's float32 buffers.

    ``gradient_accumulation_fusion`` would also do this, but Megatron's output layer would then require apex's kernel.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True


def _read_config(folder: str | Path) -> PretrainedConfig:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder)


def build_frozen(folder: str | Path, layout: MegatronConfig, dtype: torch.dtype, sharing: bool = False) -> BuiltModel:
    """Load the model in a Hugging Face folder for forward passes only, without gradients or an optimizer.

    Args:
        sharing: True if packs may contain shared prompts.
    """
    from gdpo_nemo.megatron.conversion import load_hf
    from gdpo_nemo.models.hf_folder import open_weights

    hf = _read_config(folder)
    config, chunks = build_chunks(hf, layout, dtype, sharing=sharing)
    load_hf(list(chunks), open_weights(folder, finite=True), hf)
    vision = _prepare_images(folder, hf, chunks, trained=False)
    for chunk in chunks:
        chunk.requires_grad_(False)
    inner = [in_precision(config, chunk) for chunk in chunks]
    return BuiltModel(hf, config, chunks, inner, vision=vision)


def _prepare_images(
    folder: str | Path, hf: PretrainedConfig, chunks: Sequence[PolicyModel], trained: bool
) -> Vision | None:
    """Make the chunk with the vision tower process images. Return None for a text model."""
    description = description_of(hf)
    if description.tower is None:
        return None
    vision = Vision(folder, description, trained)
    for chunk in chunks:
        if chunk.pre_process:
            vision.attach(chunk)
    return vision


def build(
    folder: str | Path,
    layout: MegatronConfig,
    dtype: torch.dtype,
    temperature: float,
    total_updates: int,
    *,
    lora: LoraConfig | None = None,
    seed: int = 0,
    scores: bool = False,
    value_lr_mult: float | None = None,
    sharing: bool = False,
    train_tower: bool = False,
) -> BuiltModel:
    """Load the model in a Hugging Face folder for training, with wrappers, optimizer and schedule of this rank.

    Args:
        temperature: sampling temperature, by which logits are divided.
        total_updates: total number of updates of the run, after which the learning-rate decay ends by default.
        lora: settings of the adapters to train with frozen weights, or None to train the weights.
        seed: random seed of the initial adapters, and of a missing score head.
        scores: True for a reward model. If the folder contains no score head, the head is initialised randomly.
        value_lr_mult: learning-rate multiplier of a value head, or None for no value head.
        sharing: True if packs may contain shared prompts.
        train_tower: True to train the vision tower.
    """
    from gdpo_nemo.megatron.conversion import load_hf, with_score_head
    from gdpo_nemo.models.hf_folder import open_weights

    hf = _read_config(folder)
    model_class = PolicyModel if value_lr_mult is None else ValueModel
    if scores:
        model_class = ScoreModel
    options: dict[str, bool] = dict(adapted=lora is not None, sharing=sharing)
    config, chunks = build_chunks(hf, layout, dtype, model_class=model_class, temperature=temperature, **options)
    modules: list[torch.nn.Module] = list(chunks)
    read = open_weights(folder, finite=True)
    load_hf(modules, with_score_head(read, hf, seed) if scores else read, hf)
    vision = _prepare_images(folder, hf, chunks, train_tower)
    if lora:
        attach(modules, hf, lora, seed)
    elif layout.freeze_moe_router:
        freeze_routers(chunks)
    wrapped = wrap(config, chunks, layout)
    # Do not set ``config.grad_scale_func``: float32 and bfloat16 losses are not scaled. Setting it would create a
    # reference cycle of model, optimizer and process groups through autograd nodes, which Python's garbage collector
    # cannot see.
    optimizer, scheduler = build_optimizer(layout, dtype, wrapped, total_updates, value_lr_mult)
    return BuiltModel(hf, config, chunks, wrapped, optimizer, scheduler, vision)
