import base64
import hashlib
import io
import json
import socket
import struct
import threading
import zlib
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
from PIL import Image as Pillow
from tiny_vision import KINDS, picture, write_tiny_vision
from transformers import AutoProcessor
from trl.data_utils import prepare_multimodal_messages

from gdpo_nemo.config.schema import DatasetConfig
from gdpo_nemo.config.sections import ImagesConfig
from gdpo_nemo.data.conversation import Conversation
from gdpo_nemo.data.examples import ExampleSource
from gdpo_nemo.data.image_processor import decoded
from gdpo_nemo.data.images import Image, read_image
from gdpo_nemo.data.prompts import PromptSource
from gdpo_nemo.data.rows import load_rows
from gdpo_nemo.data.tokenizer import load_image_reader, load_tokenizer
from gdpo_nemo.environments.registry import load_environments
from gdpo_nemo.training.supervised import _mismatched, _numbered, sequences_of
from gdpo_nemo.utils.errors import ConfigError, RunError

LIMITS = ImagesConfig()
DIGITS = load_environments({"digit_sort": {}})
ROTATED = 6
"""Orientation of a picture that has to be turned by 90 degrees."""


def encoded(image, kind="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def data_url(image):
    return f"data:image/png;base64,{base64.b64encode(encoded(image)).decode()}"


def bomb(side, rows=None):
    """A PNG of 1 bit per pixel, a few kilobytes large. Only its first ``rows`` rows have pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = bytes(1 + (side + 7) // 8)
    squeeze = zlib.compressobj(9)
    pixels = b"".join(squeeze.compress(row) for _ in range(rows or side)) + squeeze.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_file_in_rgb_is_retained_in_every_form(kind, tmp_path):
    data = encoded(picture(40, 24, 0), kind)
    (tmp_path / "a.img").write_bytes(data)
    text = base64.b64encode(data).decode()
    forms = [data, {"bytes": data, "path": None}, {"bytes": None, "path": "a.img"}, "a.img", str(tmp_path / "a.img")]
    forms += [text, f"data:image/png;base64,{text}", {"url": f"data:image/png;base64,{text}"}, bytearray(data)]
    found = {read_image(form, LIMITS, tmp_path) for form in forms}
    assert found == {Image(hashlib.sha256(data).hexdigest(), 40, 24, data)}
    assert read_image(data, LIMITS).data is data and read_image(next(iter(found)), LIMITS) in found


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16", "F", "YCbCr"])
def test_image_of_another_mode_is_converted_to_rgb(mode):
    given = Pillow.fromarray(np.full((9, 7), 300, np.uint16)) if mode == "I;16" else picture(9, 7, 1).convert(mode)
    image = read_image(given, LIMITS)
    assert decoded(image).tobytes() == given.convert("RGB").tobytes()
    assert (image.width, image.height) == given.size and image.data.startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP"])
def test_image_is_rotated_according_to_its_exif_data(kind):
    exif = Pillow.Exif()
    exif[0x0112] = ROTATED
    lossless = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(picture(40, 24, 2), kind, exif=exif, **lossless)
    plain = encoded(picture(40, 24, 2), kind, **lossless)
    wanted = Pillow.open(io.BytesIO(plain)).convert("RGB").transpose(Pillow.Transpose.ROTATE_270)
    image = read_image(data, LIMITS)
    assert (image.width, image.height) == (24, 40) and decoded(image).tobytes() == wanted.tobytes()
    assert not Pillow.open(io.BytesIO(image.data)).getexif()


def test_animation_becomes_its_first_frame():
    frames = [Pillow.new("RGB", (8, 8), color) for color in ("red", "blue")]
    image = read_image(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]), LIMITS)
    assert decoded(image).getpixel((3, 3)) == (255, 0, 0)


def hostile(folder, address):
    """Return 40 values that are not images, with a part of the message for each."""
    outside = folder.parent / "outside.png"
    outside.write_bytes(encoded(picture(8, 8, 0)))
    (folder / "link.png").symlink_to(outside)
    (folder / "loop.png").symlink_to("loop.png")
    (folder / "zero.png").symlink_to("/dev/zero")
    (folder / "directory.png").mkdir()
    (folder / "empty.png").write_bytes(b"")
    jpeg, png, gif = (encoded(picture(64, 64, 3), kind) for kind in ("JPEG", "PNG", "GIF"))
    (folder / "truncated.jpg").write_bytes(jpeg[:-40])
    broken = bytearray(png)
    broken[100:140] = bytes(40)
    return [
        (bomb(13_000), "13000 x 13000 pixels"), (bomb(14_000), "too many pixels"), (bomb(20_000), "pixels"),
        (base64.b64encode(bomb(13_000)).decode(), "13000 x"), ({"bytes": bomb(14_000)}, "too many pixels"),
        (bomb(2**20, rows=1), "pixels"), (Pillow.new("1", (5000, 5000)), "5000 x 5000"),
        (jpeg[:-40], "truncated"), (png[:-40], "truncated"), (png[:500], "truncated"),
        (png[:20], "damaged|not an image"),
        (gif[: len(gif) // 2], "damaged"), (encoded(picture(64, 64, 3), "WEBP")[:-100], "damaged"),
        (encoded(picture(64, 64, 3), "TIFF")[:300], "damaged"), (bytes(broken), "damaged"),
        ("truncated.jpg", "truncated"), ("empty.png", "not an image"), (b"", "not an image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"), (b"%!PS-Adobe-3.0 EPSF-3.0\n", "not an image"),
        (Pillow.new("RGB", (1, 201)), "at least 4"), (Pillow.new("RGB", (10, 4000)), "aspect ratio"),
        (encoded(Pillow.new("RGB", (3, 3))), "at least 4"), (encoded(Pillow.new("RGB", (800, 4))), "aspect ratio"),
        ("link.png", "outside the folder"), (str(outside), "outside the folder"), ("../outside.png", "outside"),
        ("zero.png", "outside the folder"), ("loop.png", "cannot be read"), ("directory.png", "cannot be read"),
        ("missing.png", "is not a file"), ("a\0b.png", "is not a file"), ("x" * 5000, "not an image"),
        (address, "download"), ({"url": address.upper()}, "download"), (f"data:text/html,{address}", "without base64"),
        ("data:image/png;base64," + "A" * 100_000_000, "more than 64 MiB"), ("data:image/png;base64,@@@", "invalid"),
        (7, "got int"), ({"path": None}, "got NoneType"),
    ]  # fmt: skip


def peak_mb():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def test_forty_hostile_images_are_refused_in_little_memory_and_without_a_connection(tmp_path):
    (tmp_path / "rows").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        values = hostile(tmp_path / "rows", f"http://127.0.0.1:{listener.getsockname()[1]}/a.png")
        assert len(values) == 40
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")
        start = peak_mb()
        for value, expected in values:
            with pytest.raises(ValueError, match=expected):
                read_image(value, LIMITS, tmp_path / "rows")
        assert peak_mb() - start < 200
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_images_are_downloaded_only_if_the_config_allows_it():
    data = encoded(picture(8, 8, 5))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/a.png" else 404)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert read_image(f"{address}/a.png", ImagesConfig(download=True)).data == data
        with pytest.raises(ValueError, match="cannot be downloaded .*404"):
            read_image(f"{address}/b.png", ImagesConfig(download=True))
        with pytest.raises(ValueError, match=r"more than 0 MiB, 4 bytes per pixel"):
            read_image(bytes(70_000), ImagesConfig(max_pixels=100))
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    return write_tiny_vision(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.fixture(scope="module")
def reader(model):
    return load_image_reader(LIMITS, model, load_tokenizer(None, model))


def prompts(model, reader, rows, **dataset):
    rows = [{"id": str(index), **row} for index, row in enumerate(rows)]
    tokenizer = load_tokenizer(None, model)
    options = {"split": "train", "seed": 0, "max_prompt_tokens": 400, "images": reader}
    return PromptSource(DatasetConfig(**{"path": "rows.jsonl", **dataset}), DIGITS, tokenizer, rows=rows, **options)


def user(*parts):
    return {"role": "user", "content": [text(part) if isinstance(part, str) else part for part in parts]}


def text(content):
    return {"type": "text", "text": content}


def place(**image):
    return {"type": "image", **image}


A, B = picture(56, 112, 0), picture(100, 90, 1)
SAID = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one?"}]
SAID += [{"role": "assistant", "content": "1"}, {"role": "user", "content": "and two?"}]
TRL_ROWS = [
    {"prompt": [{"role": "user", "content": "what?"}], "image": A},
    {"prompt": [{"role": "user", "content": "what?"}], "images": [B, A]},
    {"prompt": SAID, "images": [A, B]},
    {"prompt": [user("left", place(), "right", place())], "images": [B, A]},
    {"prompt": [user(place(image=A), "left", place(), "right")], "images": [B]},
    {"prompt": [user("no image", "at all")], "images": []},
]


@pytest.mark.parametrize("number", range(len(TRL_ROWS)))
def test_prompt_has_the_tokens_of_trl_and_transformers(number, model, reader):
    row = TRL_ROWS[number]
    given = row.get("images", [row.get("image")])
    messages = prepare_multimodal_messages(row["prompt"], given)
    pictures = [part["image"] for m in messages for part in m["content"] if part["type"] == "image"]
    processor = AutoProcessor.from_pretrained(model)
    rendered = processor.apply_chat_template(messages, add_generation_prompt=True)
    wanted = processor(text=[rendered], images=pictures or None)["input_ids"][0]
    [prompt] = prompts(model, reader, [row]).head()
    assert prompt.token_ids.tolist() == list(wanted) and prompt.text == rendered
    assert [decoded(placed.image).tobytes() for placed in prompt.images] == [p.tobytes() for p in pictures]
    is_image = np.zeros(len(wanted), bool)
    for placed in prompt.images:
        is_image[placed.start : placed.stop] = True
    assert np.array_equal(is_image, reader.is_placeholder(prompt.token_ids))
    assert sum(part == {"type": "image"} for m in prompt.messages for part in m["content"]) == len(pictures)


def test_all_forms_of_a_picture_make_the_same_prompt(model, reader, tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    (tmp_path / "a.png").write_bytes(encoded(A))
    url = data_url(A)
    rows = [
        {"prompt": [user("what?", place(image=url))]},
        {"prompt": [user("what?", {"type": "image_url", "image_url": {"url": url}})]},
        {"prompt": [user("what?", {"type": "input_image", "image_url": url, "detail": "auto"})]},
        {"prompt": [user("what?", place())], "image": "a.png"},
        {"prompt": [user("what?", place())], "images": [str(tmp_path / "a.png")]},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = [{"prompt": [user("what?", place())], "images": [{"bytes": encoded(A), "path": None}]}]
    parquet.write_table(pa.Table.from_pylist(table), tmp_path / "rows.parquet")
    paths = [str(tmp_path / "rows.jsonl"), str(tmp_path / "rows.parquet")]
    found = prompts(model, reader, load_rows(DatasetConfig(path=paths), DIGITS, "train", 0), path=paths).head()
    assert len({(prompt.token_ids.tobytes(), prompt.images) for prompt in found}) == 1
    assert len({id(placed.image) for prompt in found for placed in prompt.images}) == 1  # the bytes are held once
    assert [*found[3].fields.values()] == [found[3].images[0].image] and len(found) == 6


def test_fingerprint_depends_on_the_pixels_of_a_file(model, reader, tmp_path):
    rows = [{"prompt": "what?", "image": "a.png"}]

    def fingerprint(image):
        (tmp_path / "a.png").write_bytes(encoded(image))
        (tmp_path / "rows.jsonl").touch()
        return prompts(model, reader, rows, path=str(tmp_path / "rows.jsonl")).fingerprint

    first = fingerprint(A)
    assert first == fingerprint(A) != fingerprint(picture(56, 112, 9))
    assert (
        prompts(model, reader, [{"prompt": "?", "image": A}]).fingerprint
        == prompts(model, reader, [{"prompt": "?", "image": A.copy()}]).fingerprint
    )


def test_length_of_a_prompt_counts_all_placeholders(model, reader):
    source = prompts(
        model, reader, [{"prompt": "short", "image": A}, {"prompt": "long", "image": picture(900, 900, 4)}]
    )
    longer = source.head()[1]
    assert len(longer.token_ids) > longer.images[0].tokens > 60
    limited = PromptSource(
        DatasetConfig(path="rows.jsonl"), DIGITS, load_tokenizer(None, model), split="train", seed=0,
        max_prompt_tokens=len(longer.token_ids) - 1, rows=[{"id": "0", "prompt": "short", "image": A},
        {"id": "1", "prompt": "long", "image": picture(900, 900, 4)}], images=reader,
    )  # fmt: skip
    assert [refused.id for refused in limited.refused] == ["1"] and len(limited) == 1


def test_prompt_template_and_system_prompt_surround_the_text_and_not_the_image(model, reader):
    rows = [{"prompt": "what?", "image": A}, {"prompt": [user(place(), "what?")], "image": A}]
    first, second = prompts(model, reader, rows, prompt_template="Look: {prompt} Go", system_prompt="be brief").head()
    assert first.text == second.text and "<|vision_end|>Look: what? Go<|im_end|>" in first.text
    assert first.messages[0] == {"role": "system", "content": "be brief"}


WRONG_ROWS = [
    ({"prompt": [user(place(), place())], "images": [A]}, r"2 placeholders of images, but 1 image (column 'images')"),
    ({"prompt": [user(place())], "images": [A, B]}, r"1 placeholder of images, but 2 images (column 'images')"),
    ({"prompt": [user(place())]}, "1 placeholder of images, but 0 images (no column 'images' or 'image')"),
    ({"prompt": "a", "images": [A] * 9}, "9 images (column 'images'), but data.images.max_per_prompt is 8"),
    ({"prompt": [user(place(image=A))] * 9}, "9 images (column 'prompt'), but data.images.max_per_prompt is 8"),
    ({"prompt": "a <|image_pad|>"}, "column 'prompt': a text contains the placeholder of an image, <|image_pad|>"),
    ({"prompt": [user("<|image_pad|>", place())], "image": A}, "a text contains the placeholder"),
    ({"prompt": SAID[:1], "image": A}, "column 'prompt' has no user message for 1 image"),
    ({"prompt": "a", "images": [A, "b.png"]}, "column 'images': image 1 is neither base64 nor a data URL"),
    ({"prompt": [user(place(image=7))]}, "column 'prompt': the image must be an image"),
    ({"prompt": [user(place(image=A)), "oops"]}, "'prompt' must be text or a list of messages"),
    (
        {"prompt": [user("q"), {"role": "tool", "content": [place(image=A), {"type": "other"}]}]},
        "message 1 (tool) has content other than text",
    ),
    ({"prompt": "a", "video": "a.mp4"}, "contains video, but only text and images are supported"),
    ({"prompt": [user({"type": "audio"})]}, "contains audio, but only text and images are supported"),
]


@pytest.mark.parametrize("number", range(len(WRONG_ROWS)))
def test_wrong_row_with_images_is_refused_by_row_and_column(number, model, reader):
    row, expected = WRONG_ROWS[number]
    with pytest.raises(ConfigError) as raised:
        prompts(model, reader, [{"prompt": "fine", "image": A}, row])
    assert str(raised.value).startswith("data.train: row 1: ") and expected in str(raised.value)


def sequences(model, reader, rows, kind, **dataset):
    rows = [{"id": str(index), **row} for index, row in enumerate(rows)]
    options = {"split": "train", "seed": 0, "max_prompt_tokens": 400, "images": reader, "kind": kind}
    source = ExampleSource(
        DatasetConfig(path="rows.jsonl", **dataset), {}, load_tokenizer(None, model), rows=rows, **options
    )
    found = (sequences_of if kind == "sft" else _numbered)(source.head())
    for sequence in found:
        is_image = np.zeros(len(sequence), bool)
        for placed in sequence.images:
            is_image[placed.start : placed.stop] = True
        whole = np.concatenate((sequence.prompt_ids, sequence.completion_ids))
        assert np.array_equal(is_image, reader.is_placeholder(whole))
    return found


def answer(content):
    return {"role": "assistant", "content": [text(content)]}


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_supervised_row_with_images_in_several_turns_has_the_tokens_of_transformers(train_on, model, reader):
    turns = [user(place(), "q"), answer("a"), user("z", place()), answer("b")]
    rows = [{"messages": turns, "images": [A, B]}, {"prompt": "q", "completion": "c", "image": A}]
    first, second = sequences(model, reader, rows, "sft", train_on=train_on)
    processor = AutoProcessor.from_pretrained(model)
    rendered = processor.apply_chat_template(turns).rstrip("\n")
    wanted = processor(text=[rendered], images=[A, B])["input_ids"][0]
    assert [*first.prompt_ids, *first.completion_ids] == list(wanted)
    assert [decoded(placed.image).tobytes() for placed in first.images] == [A.tobytes(), B.tobytes()]
    trained = load_tokenizer(None, model).decode(first.completion_ids[first.loss_mask].tolist())
    assert trained == {"assistant": "a<|im_end|>b<|im_end|>", "last": "b<|im_end|>"}.get(train_on, trained)
    assert "<|image_pad|>" not in trained and len(second.images) == 1


def test_answers_to_twin_prompts_with_other_images_are_answers_to_other_prompts(model, reader):
    twin = picture(56, 112, 7)
    rows = [{"prompt": [user(place(), "q")], "chosen": [answer("x")], "rejected": [answer("y")], "images": [one]}
            for one in (A, twin)]  # fmt: skip
    pairs = sequences(model, reader, rows, "pairs")
    assert len({sequence.prompt_ids.tobytes() for sequence in pairs}) == 1
    mismatched = _mismatched(pairs)
    assert len(mismatched) == 4
    assert [s.images for s in mismatched] == [s.images for s in pairs]
    # Conversations without a column prompt have their images before the common beginning.
    whole = {"chosen": [SAID[1], answer("x")], "rejected": [SAID[1], answer("y")], "images": [A]}
    assert all(len(sequence.images) == 1 for sequence in sequences(model, reader, [whole], "pairs"))


def test_images_in_answers_and_text_models_are_refused(model, reader):
    rows = [{"messages": [SAID[1], {"role": "assistant", "content": [place(image=A)]}]}]
    with pytest.raises(ConfigError, match="row 0: a message in 'messages' has no text"):
        sequences(model, reader, rows, "sft")
    with pytest.raises(ConfigError, match="row 0: no column 'completion'"):
        sequences(model, reader, [{"prompt": "q", "image": A}], "sft")
    for wrong in ({"prompt": "q", "completion": "c", "image": A}, {"messages": [user(place(image=A)), answer("a")]}):
        with pytest.raises(ConfigError, match="row 0: contains image, but only text is supported"):
            ExampleSource(
                DatasetConfig(path="rows.jsonl"), {}, load_tokenizer(None, model), split="train", seed=0,
                max_prompt_tokens=99, kind="sft", rows=[{"id": "0", **wrong}],
            )  # fmt: skip


def test_observation_with_images_continues_a_conversation(model, reader):
    tokenizer = load_tokenizer(None, model)
    talk = Conversation(tokenizer, True, images=reader)
    observation = [
        {"role": "tool", "content": [text("seen <|image_pad|>"), place(image=A)]},
        user("and", place(image=B)),
    ]
    ids, images = talk.continuation_with_images(talk.messages("look"), observation, -1)
    assert [decoded(placed.image).tobytes() for placed in images] == [A.tobytes(), B.tobytes()]
    is_image = np.zeros(len(ids), bool)
    for placed in images:
        is_image[placed.start : placed.stop] = True
    assert np.array_equal(is_image, reader.is_placeholder(ids))  # the placeholder in the text is not an image
    assert tokenizer.decode(ids[~is_image].tolist()).startswith("<|im_end|>\n<|im_start|>tool\nseen < |image_pad|>")
    assert talk.messages(observation)[1]["content"] == [text("and"), {"type": "image"}]
    with pytest.raises(RunError, match="image 0 of an observation must be an image"):
        talk.continuation_with_images(None, [user(place())], -1)
    with pytest.raises(RunError, match="a path requires data.images.folder"):
        talk.prompt_with_images([user(place(image="/etc/passwd"))])
    with pytest.raises(RunError, match="has content other than text"):
        Conversation(tokenizer, True).messages(observation[1:])


def test_reader_is_none_for_a_text_model(tmp_path):
    fields = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    fields |= {"num_key_value_heads": 2, "intermediate_size": 192, "vocab_size": 259, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert load_image_reader(LIMITS, tmp_path, None) is None
