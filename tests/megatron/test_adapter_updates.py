"""Adapters that travel alone end as the same weights, bit for bit, as a merged export would have."""

from __future__ import annotations

import dataclasses

import adapter_cases
import numpy as np
import pytest
import tiny_models
import torch

from gdpo_nemo.config.schema import LoraConfig
from gdpo_nemo.models.architectures import last_name, linear_layers
from gdpo_nemo.models.families import FAMILIES
from gdpo_nemo.models.hf_folder import open_weights, weight_names
from gdpo_nemo.utils.errors import RunError
from gdpo_nemo.weights.adapters import merged_into, modules_of, peft_name
from gdpo_nemo.weights.manifest import unpack

pytestmark = pytest.mark.slow

HEAD = LoraConfig(rank=4, alpha=8.0, target_modules=["k_proj", "v_proj", "lm_head"], share_a=True)
CPU = torch.device("cpu")


def every_linear_layer(name: str) -> LoraConfig:
    """All that can be adapted in the tiny model ``name``, except the output layer."""
    fields = tiny_models.MODELS[name]
    family = FAMILIES[fields["model_type"]]
    absent = {last_name(family.modules.head)}
    if family.latent:
        absent.add("q_proj" if fields["q_lora_rank"] else "q_b_proj")
    linear = [module for module in linear_layers(family) if module not in absent]
    return LoraConfig(rank=4, alpha=8.0, target_modules=linear)


ATTENTION = LoraConfig(rank=3, alpha=1.0, target_modules=["q_proj", "v_proj", "o_proj"])
MODELS = {name: every_linear_layer(name) for name in tiny_models.MODELS} | {"qwen2": HEAD}


def received(folder, manifest, buffer) -> dict[str, torch.Tensor]:
    """What a receiver with the model folder makes of an update."""
    scale = manifest.adapters.scale
    return dict(merged_into(weight_names(folder), open_weights(folder), dict(unpack(manifest, buffer)), scale, CPU))


@pytest.mark.parametrize("layout, precision", [("TP2+SP", "float32"), ("TP2xETP1+SP", "float32"), ("TP1", "bfloat16")])
def test_receiver_merges_the_weights_that_the_policy_would_export_bit_for_bit(
    on_ranks, model_folder, layout, precision
):
    """For every family, fused and split; in bfloat16 the folder is float32, which the policy has rounded before it
    merges."""
    names = ["qwen2-tied"]
    if precision == "float32":  # biases of experts are not split
        names = [name for name in MODELS if (name == "gpt-oss") == ("ETP1" in layout)]
    wanted = {name: (model_folder(name), tiny_models.make_batch(2), MODELS[name]) for name in names}
    found = on_ranks(layout, adapter_cases.lora_shipments, wanted, precision)[0]
    for name, (exported, (manifest, buffer)) in found.items():
        folder = model_folder(name)
        still = set()
        ours = received(folder, manifest, buffer)
        base = open_weights(folder)
        assert ours.keys() == exported.keys()
        adapted = {f"{module}.weight" for module in modules_of(exported, MODELS[name].target_modules)}
        manifest.check_names(peft_name(key.removesuffix(".weight"), letter) for key in adapted for letter in "AB")
        for key, tensor in ours.items():
            dtype = getattr(torch, precision)
            np.testing.assert_array_equal(tensor.to(dtype).float().numpy(), exported[key], err_msg=f"{name} {key}")
            if torch.equal(tensor.to(dtype), base(key).to(dtype)):
                still.add(key)
        assert still >= exported.keys() - adapted and manifest.nbytes < sum(v.nbytes for v in exported.values()) / 2
        still &= adapted
        assert all(".experts." in key for key in still) and len(still) < len(adapted) / 4  # experts without tokens


@pytest.fixture(scope="module")
def shipment(on_ranks, model_folder):
    """(folder, manifest, buffer) of one update of adapters."""
    folder = model_folder("qwen2-tied")
    asked = {"it": (folder, tiny_models.make_batch(2), ATTENTION)}
    return folder, *on_ranks("TP1", adapter_cases.lora_shipments, asked, "float32")[0]["it"][1]


def test_a_flipped_bit_of_an_adapter_is_named_before_anything_is_merged(shipment):
    folder, manifest, buffer = shipment
    entry = manifest.entries[-1]
    damaged = buffer.copy()
    damaged[entry.offset] ^= 1
    with pytest.raises(RunError, match=f"checksum of {entry.name} differs"):
        received(folder, manifest, damaged)


def test_a_lost_adapter_is_refused_by_name_and_again_when_it_is_merged(shipment):
    folder, manifest, buffer = shipment
    names = [entry.name for entry in manifest.entries]
    short = dataclasses.replace(manifest, entries=manifest.entries[1:])
    with pytest.raises(RunError, match=f"1 tensors missing, for instance {names[0]}"):
        short.check_names(names)
    with pytest.raises(RunError, match="has only one of the matrices A and B"):
        received(folder, short, buffer)


@pytest.mark.parametrize("change, why", [("name", "no weight for 2 matrices"), ("shape", "do not match the weight")])
def test_an_adapter_of_another_model_is_refused(shipment, change, why):
    folder, manifest, buffer = shipment
    strange = []
    for entry in manifest.entries:
        if change == "name":
            entry = dataclasses.replace(
                entry, name=entry.name.replace("layers.3.self_attn.o_proj", "layers.9.self_attn.o_proj")
            )
        elif entry.name.endswith("layers.3.self_attn.o_proj.lora_B.weight"):
            entry = dataclasses.replace(entry, shape=entry.shape[::-1])
        strange.append(entry)
    with pytest.raises(RunError, match=why):
        received(folder, dataclasses.replace(manifest, entries=tuple(strange)), buffer)
