"""GGUF files, written by the ``gguf`` package, as Hugging Face folders."""

from __future__ import annotations

import gguf
import pytest
import tiny_gguf
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from tiny_models import MODELS, VOCABULARY, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from gdpo_nemo.models.gguf import BLOCKS, read_gguf_header, read_gguf_model
from gdpo_nemo.models.hf_folder import open_weights, weight_names
from gdpo_nemo.models.sources import recognise
from gdpo_nemo.training.model_conversion import write_folder
from gdpo_nemo.utils.errors import ConfigError

# llama.cpp has no mixture with dense layers between, and always lets the chosen experts' shares add up to 1.
NAMES = [name for name, fields in MODELS.items() if fields["model_type"] in tiny_gguf.ARCHITECTURES]
NAMES = [name for name in NAMES if not name.endswith(("-mixed", "-window"))]


def logits(folder) -> torch.Tensor:
    """Of a few tokens, by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(2 * 40).reshape(2, 40) * 7 % VOCABULARY
    with torch.no_grad():
        return model(tokens).logits


def converted(file, out):
    write_folder(recognise(file, "SOURCE"), out, "SOURCE")
    return out


@pytest.mark.parametrize("name", NAMES)
def test_a_gguf_file_gives_the_logits_of_the_model_it_was_made_of(name, tmp_path):
    model = write_model(name, tmp_path / "model")
    file = tiny_gguf.write_gguf(model, tmp_path / "tiny.gguf")
    torch.testing.assert_close(logits(converted(file, tmp_path / "hf")), logits(model), atol=1e-5, rtol=0)
    read, again = open_weights(model), open_weights(tmp_path / "hf")
    assert set(weight_names(tmp_path / "hf")) == set(weight_names(model))
    assert all(torch.equal(read(n), again(n)) for n in weight_names(model))


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.BF16, Kind.F16])
def test_quantised_weights_become_the_values_that_they_encode(kind, tmp_path):
    model = write_model("mixtral", tmp_path / "model", intermediate_size=64)
    file = tiny_gguf.write_gguf(model, tmp_path / "tiny.gguf", kind)
    read, original = open_weights(converted(file, tmp_path / "hf")), open_weights(model)
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    wanted = dequantize(quantize(original(name).numpy(), kind), kind)
    assert torch.equal(read(name).float(), torch.from_numpy(wanted))
    assert read(name).dtype == {Kind.BF16: torch.bfloat16, Kind.F16: torch.float16}.get(kind, torch.float32)


def test_sizes_of_blocks_are_those_of_the_gguf_package():
    for number, (name, values, size) in BLOCKS.items():
        assert Kind(number).name == name
        assert gguf.GGML_QUANT_SIZES[Kind(number)] == (values, size)


def test_every_type_that_is_read_can_be_dequantised():
    for name, values, size in BLOCKS.values():
        if name not in ("F32", "F16"):
            row = torch.zeros(1, size, dtype=torch.uint8).numpy()
            assert dequantize(row, Kind[name]).shape == (1, values if name != "BF16" else 1)


def test_the_tokenizer_has_the_merges_template_and_first_token_of_the_file(tmp_path):
    model = write_model("llama", tmp_path / "model")
    converted(tiny_gguf.write_gguf(model, tmp_path / "tiny.gguf"), tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("the theta").tokens() == ["<begin>", "the", "Ġthe", "t", "a"]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<begin>", "<end>")
    chat = tokenizer.apply_chat_template([dict(role="user", content="be")], tokenize=False)
    assert tokenizer(chat, add_special_tokens=False).tokens() == ["b", "e", "<end>"]
    assert len(tokenizer) == VOCABULARY


def test_smollm_cuts_every_digit_apart_as_its_merges_were_learnt(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_gguf, "MERGES", ["1 2", *tiny_gguf.MERGES])
    monkeypatch.setattr(tiny_gguf, "TOKENS", [*tiny_gguf.TOKENS, "12"])
    original = gguf.GGUFWriter.add_tokenizer_pre
    monkeypatch.setattr(gguf.GGUFWriter, "add_tokenizer_pre", lambda writer, _: original(writer, "smollm"))
    model = write_model("llama", tmp_path / "model")
    converted(tiny_gguf.write_gguf(model, tmp_path / "tiny.gguf"), tmp_path / "hf")
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("the 12").tokens() == ["the", "Ġ", "1", "2"]


def test_a_scaling_of_frequencies_that_is_not_llama_3s_is_refused(tmp_path, monkeypatch):
    divisors = tiny_gguf._divisors
    monkeypatch.setattr(tiny_gguf, "_divisors", lambda config: divisors(config)[::-1].copy())
    file = tiny_gguf.write_gguf(write_model("llama", tmp_path / "model"), tmp_path / "tiny.gguf")
    with pytest.raises(ConfigError, match="differ from Llama 3's rule"):
        read_gguf_model(file, "SOURCE")


def test_a_window_without_its_layers_is_refused(tmp_path, monkeypatch):
    original = gguf.GGUFWriter.add_block_count
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_block_count", lambda writer, n: (original(writer, n), writer.add_sliding_window(8))
    )
    file = tiny_gguf.write_gguf(write_model("qwen2", tmp_path / "model"), tmp_path / "tiny.gguf")
    with pytest.raises(ConfigError, match="has a sliding window without its layers"):
        read_gguf_model(file, "SOURCE")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    return tiny_gguf.write_gguf(write_model("qwen2", folder / "model"), folder / "tiny.gguf")


@pytest.mark.parametrize(
    "before, after, message",
    [
        (b"\x08\0\0\0\x05\0\0\0\0\0\0\0qwen2", b"\x08\0\0\0\x05\0\0\0\0\0\0\0mamba",
         "architecture 'mamba' is not supported; supported: llama, qwen2"),
        (b"llama-bpe", b"other-bpe", "has pre-tokenizer 'other-bpe', which is not supported"),
        (b"attn_norm.weight", b"attn_nerm.weight", "lacks 1 tensors of the model, for example blk.0.attn_norm.weight"),
        (b"GGUF\x03", b"GGUF\x01", "has GGUF version 1"),
        (b"qwen2.block_count\x04\0\0\0\x04", b"qwen2.block_count\x04\0\0\0\x00", "qwen2.block_count 0"),
        (b"\x04\0\0\0\0\0\0\0gpt2", b"\x04\0\0\0\0\0\0\0bert", "tokenizer of type 'bert'"),
        (b"qwen2.block_count\x04\0\0\0", b"qwen2.block_count\x63\0\0\0",
         "not a complete GGUF file .a value has the unknown type 99"),
    ],
)  # fmt: skip
def test_a_gguf_file_that_cannot_be_read_is_refused_by_name(before, after, message, whole, tmp_path):
    data = whole.read_bytes()
    assert before in data and len(before) == len(after)
    file = tmp_path / "other.gguf"
    file.write_bytes(data.replace(before, after, 1))
    with pytest.raises(ConfigError, match=message):
        read_gguf_model(file, "SOURCE")


@pytest.mark.parametrize("kept", [3, 11, 200, 3000, -1])
def test_a_gguf_file_that_is_cut_off_is_refused(kept, whole, tmp_path):
    file = tmp_path / "cut.gguf"
    file.write_bytes(whole.read_bytes()[:kept])
    with pytest.raises(ConfigError, match="not a complete GGUF file|is truncated"):
        read_gguf_header(file, "SOURCE")


def test_a_quantisation_that_is_not_read_is_named(tmp_path, whole):
    model = write_model("qwen2", tmp_path / "model", hidden_size=256, intermediate_size=256)
    file = tiny_gguf.write_gguf(model, tmp_path / "tiny.gguf", Kind.TQ1_0)
    with pytest.raises(ConfigError, match="is quantised as GGML type 34, which is not supported; supported: F32"):
        read_gguf_header(file, "SOURCE")
