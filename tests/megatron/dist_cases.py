"""A GPTModel of Megatron-core itself and its distributed checkpoints, on ranks."""

from __future__ import annotations

from pathlib import Path

import torch


def gpt_model(place, folder, seed: int = 5):
    """Megatron-core's own GPTModel of the architecture in ``folder``, with random weights."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from transformers import AutoConfig

    from gdpo_nemo.megatron.model_config import description_of, transformer_fields

    hf = AutoConfig.from_pretrained(folder)
    model = description_of(hf)
    fields = transformer_fields(model) | dict(num_layers=hf.num_hidden_layers)
    tensor = place.layout.tensor_model_parallel_size
    config = TransformerConfig(
        **fields,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=place.layout.pipeline_model_parallel_size,
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        moe_token_dispatcher_type="alltoall",
    )
    spec = get_gpt_layer_local_spec(
        num_experts=model.experts or None, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    model = GPTModel(
        config,
        spec,
        vocab_size=-(-hf.vocab_size // tensor) * tensor,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=hf.rope_parameters["rope_theta"],
    )
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def tokens() -> torch.Tensor:
    """int64 [2, 20]"""
    return torch.arange(40).reshape(2, 20) * 7 % 99


def gpt_logits(model) -> torch.Tensor:
    """Of ``tokens``, [2, 20, padded vocabulary]."""
    positions = torch.arange(20).expand(2, 20)
    with torch.no_grad():
        return model.eval()(tokens(), positions, None).float()


def save_gpt(place, folder, checkpoint) -> torch.Tensor | None:
    """Write a GPTModel's checkpoint, as Megatron-LM lays it out; its logits, where one rank has the model."""
    from megatron.core import dist_checkpointing

    import gdpo_nemo.megatron.checkpoint  # noqa: F401 - saves then need no process of their own, which ranks cannot have

    model = gpt_model(place, folder)
    inside = Path(checkpoint) / "iter_0000007"
    if place.rank == 0:
        inside.mkdir(parents=True)
        (Path(checkpoint) / "latest_checkpointed_iteration.txt").write_text("7")
    torch.distributed.barrier()
    state = {"checkpoint_version": 3.0, "iteration": 7, **model.sharded_state_dict()}
    dist_checkpointing.save(state, str(inside))
    return gpt_logits(model) if place.ranks == 1 else None


def save_nemo_2(place, folder, checkpoint) -> torch.Tensor:
    """Write a GPTModel as NeMo 2 lays it out, names behind ``module.``; its logits."""
    from megatron.core import dist_checkpointing

    import gdpo_nemo.megatron.checkpoint  # noqa: F401 - as above

    model = gpt_model(place, folder)
    for part in ("context", "weights"):
        (Path(checkpoint) / part).mkdir(parents=True)
    (Path(checkpoint) / "context" / "model.yaml").write_text("_target_: nemo.collections.llm.Qwen3Model\n")
    dist_checkpointing.save(model.sharded_state_dict(prefix="module."), str(Path(checkpoint) / "weights"))
    return gpt_logits(model)


def load_gpt(place, folder, checkpoint) -> torch.Tensor:
    """Logits of a GPTModel that Megatron-core fills from a checkpoint with nothing missing and nothing left."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    model = gpt_model(place, folder, seed=6)
    wanted = model.sharded_state_dict()
    if model.config.num_moe_experts:  # the name under TransformerEngine, whose layers real mixtures are trained with
        for part in wanted.values():
            part.key = part.key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    state, missing, unexpected = dist_checkpointing.load(wanted, str(checkpoint), strict=StrictHandling.RETURN_ALL)
    assert not missing and not unexpected, (missing, unexpected)
    model.load_state_dict({name: state[name] for name in wanted})
    return gpt_logits(model)


def to_huggingface(place, checkpoint, out, companion) -> None:
    """What ``gdpo-nemo convert --to hf`` does, in a process that Megatron is in already."""
    from gdpo_nemo.models.sources import recognise
    from gdpo_nemo.training.model_conversion import write_folder

    write_folder(recognise(Path(checkpoint), "SOURCE"), Path(out), "SOURCE", str(companion))


def convert(place, *arguments: str) -> tuple[int, str]:
    """Exit status and stderr of ``gdpo-nemo convert --to``."""
    import contextlib
    import io

    from gdpo_nemo.commands.cli import main

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        status = main(["convert", "--to", *arguments])
    return status, said.getvalue()


def train_and_export(place, folder, batch, out, checkpoint) -> list:
    """Two updates of a policy; then its weights as a Hugging Face folder and as a Megatron-core checkpoint."""
    import rank_cases

    from gdpo_nemo.megatron.gpt_checkpoint import save_megatron
    from gdpo_nemo.models.hf_folder import write_model

    policy = rank_cases.build_policy(place, folder)
    steps = rank_cases.train(policy, batch, rank_cases.spread(place, batch), 2)
    save_megatron(policy, checkpoint)
    weights = {name: tensor.clone() for name, tensor in policy.weights()}
    if place.rank == 0:
        write_model(out, weights.items(), policy.built.hf_config, folder)
    return steps.tolist()


def lora_run(place, folder, batch, run) -> None:
    """A run folder whose checkpoint of step 2 holds adapters that two updates have changed."""
    import rank_cases

    from gdpo_nemo.config.load import save_config
    from gdpo_nemo.config.schema import Config, LoraConfig
    from gdpo_nemo.megatron import checkpoint
    from gdpo_nemo.training.checkpoints import Checkpoints, RunState, model_fingerprint

    lora = LoraConfig(rank=4, alpha=8.0)
    policy = rank_cases.build_policy(place, folder, lora=lora)
    rank_cases.train(policy, batch, rank_cases.spread(place, batch), 2)
    state = RunState(step=2, model=model_fingerprint(folder))
    kept = Checkpoints(Path(run) / "checkpoints", keep_last=1, keep_best=0, metric=None)
    kept.save(state, lambda where: checkpoint.save(policy, where))
    config = Config()
    config.run.name = "lora"
    config.policy.model_name = str(folder)
    config.policy.precision = "float32"
    config.policy.lora = lora
    config.gdpo.rewards = {"none": 1.0}
    save_config(config, Path(run) / "config.yaml")
