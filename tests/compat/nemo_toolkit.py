"""Compare gdpo_nemo with NeMo 2 checkpoints that nemo-toolkit writes, and train one step from each:

    uv venv --python 3.12 nemo
    uv pip install --no-config --python nemo/bin/python "nemo-toolkit[nlp,run]==2.7.3" megatron-core==0.15.3 \
        torch==2.13.0 "pyarrow<21" "datasets<4"
    python tests/compat/nemo_toolkit.py --nemo nemo/bin/python

nemo-toolkit runs in a process of its own on a CPU, without TransformerEngine. It builds tiny Llama and Qwen2 models,
gets the weights of a random Hugging Face model and saves them with its own code. The script converts each checkpoint
with ``gdpo-nemo convert``, compares the weights with the Hugging Face model bit for bit, and trains one step with
``policy.model_name`` set to the checkpoint. (NeMo's model computes nothing without a GPU.)
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
SIZES: dict[str, Any] = {
    "vocab_size": 21, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = ("llama", "qwen2")


def save_with_nemo(family: str, folder: str, out: str) -> None:
    """Save a Hugging Face model as a NeMo 2 checkpoint. Needs nemo-toolkit."""
    from nemo.collections import llm
    from safetensors.torch import load_file

    names = {"llama": (llm.LlamaModel, llm.LlamaConfig), "qwen2": (llm.Qwen2Model, llm.Qwen2Config)}
    model_class, config_class = names[family]
    kernels = ("gradient_accumulation_fusion", "masked_softmax_fusion", "bias_dropout_fusion", "bias_activation_fusion",
               "persist_layer_norm", "apply_rope_fusion")  # fmt: skip
    config = config_class(
        num_layers=SIZES["num_hidden_layers"],
        hidden_size=SIZES["hidden_size"],
        ffn_hidden_size=SIZES["intermediate_size"],
        num_attention_heads=SIZES["num_attention_heads"],
        num_query_groups=SIZES["num_key_value_heads"],
        layernorm_epsilon=SIZES["rms_norm_eps"],
        rotary_base=10_000,
        vocab_size=SIZES["vocab_size"],
        seq_length=SIZES["max_position_embeddings"],
        **dict.fromkeys(kernels, False),  # kernels for GPUs
    )
    model = model_class(config)
    saver = model_class.importer(f"hf://{folder}")
    trainer = saver.nemo_setup(model, ckpt_async_save=False)
    # Megatron-core 0.15 calls these functions when it saves, also on a CPU.
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    state = megatron_weights(load_file(Path(folder, "model.safetensors")), model.module.state_dict())
    model.module.load_state_dict(state, strict=True, assign=True)
    saver.nemo_save(Path(out), trainer)


def megatron_weights(state: dict[str, torch.Tensor], names: dict[str, Any]) -> dict[str, Any]:
    """Return a Hugging Face model's weights under the names of Megatron-core's layers without TransformerEngine."""
    found = {name: value for name, value in names.items() if "_extra_state" in name}

    def qkv(layer: str, kind: str) -> torch.Tensor:
        groups = SIZES["num_key_value_heads"]
        parts = [state[f"{layer}self_attn.{part}_proj.{kind}"] for part in "qkv"]
        return torch.cat([chunk for group in zip(*(part.chunk(groups) for part in parts)) for chunk in group])

    for name in (name for name in names if "_extra_state" not in name):
        prefix, _, rest = name.rpartition("decoder.layers.")
        number, _, rest = rest.partition(".")
        layer, kind = f"model.layers.{number}.", rest.rpartition(".")[2]
        if name.endswith(("word_embeddings.weight", "output_layer.weight", "final_layernorm.weight")):
            short = {"word_embeddings": "model.embed_tokens", "output_layer": "lm_head"}.get(name.split(".")[-2])
            found[name] = state[f"{short or 'model.norm'}.weight"]
        elif "linear_qkv" in rest:
            found[name] = qkv(layer, kind)
        elif "linear_fc1" in rest:
            found[name] = torch.cat([state[f"{layer}mlp.{part}_proj.weight"] for part in ("gate", "up")])
        else:
            other = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm",
                     "linear_proj": "self_attn.o_proj", "linear_fc2": "mlp.down_proj"}  # fmt: skip
            found[name] = state[f"{layer}{other[rest.split('.')[-2]]}.{kind}"]
    return found


def huggingface_model(family: str, folder: Path) -> None:
    """Write a random model with the tokenizer of the demo."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sys.path.insert(0, str(REPOSITORY / "examples"))
    import make_tiny_model

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES), dtype=torch.float32)
    for parameter in model.parameters():  # norms and biases also differ from their usual start values
        parameter.data += 0.05 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    make_tiny_model.character_tokenizer().save_pretrained(folder)


def compare(family: str, nemo: Path, work: Path) -> str:
    """Write, convert and train one family, and return a line with the result. Raises AssertionError."""
    from safetensors.torch import load_file

    folder, saved, out = (work / f"{family}_{name}" for name in ("hf", "nemo", "out"))
    huggingface_model(family, folder)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TORCH_CUDA_ARCH_LIST": "9.0", "HF_HUB_OFFLINE": "1"}
    command = [str(nemo), "-W", "ignore", __file__, "--save", family, str(folder), str(saved)]
    subprocess.run(command, check=True, env=environment, cwd=work)
    program = [sys.executable, "-m", "gdpo_nemo"]
    subprocess.run([*program, "convert", "--to", "hf", saved, out, "--model", folder], check=True, cwd=REPOSITORY)
    before, after = (load_file(path / "model.safetensors") for path in (folder, out))
    assert before.keys() == after.keys(), before.keys() ^ after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    overrides = [f"policy.model_name={saved}", f"policy.tokenizer_name={folder}", "policy.model_factory=null",
                 "gdpo.max_num_steps=1", "gdpo.val_at_start=false", "gdpo.val_period=0",
                 f"run.dir={work / family}"]  # fmt: skip
    command = [*program, "train", "--config", "configs/gdpo_tiny_cpu.yaml", *overrides]
    subprocess.run(command, check=True, cwd=REPOSITORY)
    step = json.loads((work / family / "metrics.jsonl").read_text().splitlines()[-1])
    values = ", ".join(f"{name} {step[name]:.2g}" for name in ("loss", "grad_norm", "parity/max_abs"))
    return f"{family}: {len(before)} tensors equal, one step: {values}"


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Compare with NeMo 2 checkpoints that nemo-toolkit writes.")
    parser.add_argument("--nemo", type=Path, help="Python with nemo-toolkit")
    parser.add_argument("--save", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.save:
        save_with_nemo(*arguments.save)
        return
    with tempfile.TemporaryDirectory() as work:
        for family in FAMILIES:
            print(compare(family, arguments.nemo.absolute(), Path(work)), flush=True)


if __name__ == "__main__":
    main()
