"""Transports of weights in a config: the registry's names, places of the user's own, what a class says it cannot do."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from gdpo_nemo.config.allowed_values import CHOICES
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.transports import (
    BASE,
    CONDITIONS,
    TRANSPORTS,
    Declared,
    check_transport,
    chosen_mode,
    chosen_transport,
    declared,
)
from gdpo_nemo.config.validate import validate
from gdpo_nemo.utils.errors import ConfigError, RunError
from gdpo_nemo.utils.import_path import ImportPath
from gdpo_nemo.weights.transports.base import Transport, errors_named, load_transport, make_transport

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = REPOSITORY / "configs" / "gdpo_tiny_cpu.yaml"
EXAMPLE = "examples/custom_transport.py"
IMPORTS = """
from gdpo_nemo.weights.transports import base as contract
from gdpo_nemo.weights.transports.collective import NcclTransport
from gdpo_nemo.weights.transports.base import Transport as Base
raise AssertionError("a check of the config ran this file")
"""


def checked(transport: str, *overrides: str):
    config = load_config(TINY, [f"weights.transport={transport}", *overrides])
    validate(config)
    return config


def written(folder: Path, text: str, imports: str = IMPORTS) -> str:
    (folder / "mine.py").write_text(imports + text)
    return f"{folder}/mine.py:Mine"


def test_the_values_of_the_config_are_auto_and_the_registry():
    assert CHOICES["weights.transport"] == ("auto", *TRANSPORTS)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_declarations_read_from_a_transports_source_equal_those_of_its_class(name):
    found = load_transport(name)
    expected = Declared(found.refuses, found.uses_buckets, found.sends_differences)
    assert declared(name) == expected
    assert ImportPath(BASE).load() is Transport


def test_auto_resolves_to_a_registered_transport_and_is_never_refused():
    for placement in ("separate", "colocated"):
        for nodes in (1, 2):
            for gpus in (0, 8):
                config = load_config(TINY, [f"cluster.placement={placement}"])
                config.cluster.num_nodes = nodes
                config.cluster.gpus_per_node = gpus
                refused = declared(chosen_transport(config)).refuses
                assert not any(CONDITIONS[condition](config) for condition in refused)


@pytest.mark.parametrize("transport", [*TRANSPORTS, f"{EXAMPLE}:CompressedTransport"])
@pytest.mark.parametrize("lora", [0, 8])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_auto_mode_sends_differences_only_over_a_network_or_a_disk(transport, lora, precision):
    config = load_config(TINY, [f"weights.transport={transport}", f"policy.precision={precision}"])
    config.policy.lora.rank = lora
    few = precision == "bfloat16" and not lora and declared(transport).sends_differences
    for nodes in (1, 2):
        config.cluster.num_nodes = nodes
        assert chosen_mode(config) == ("auto" if few and (nodes == 2 or transport == "folder") else "full")
    config.cluster.num_nodes = 1
    config.weights.mode = "difference"
    if lora or not declared(transport).sends_differences:
        with pytest.raises(ConfigError, match="^weights.mode: .*use auto"):
            check_transport(config)
    elif transport != "nccl":
        check_transport(config)
    config.weights.mode = "full"
    assert chosen_mode(config) == "full"


def test_reading_of_transport_declarations_imports_no_torch():
    code = (
        "import sys; from gdpo_nemo.config.transports import TRANSPORTS, declared; "
        f"[declared(name) for name in (*TRANSPORTS, '{EXAMPLE}:CompressedTransport')]; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0


def test_custom_transport_is_refused_if_it_declares_the_placement_unsupported():
    place = f"{EXAMPLE}:CompressedTransport"
    assert chosen_transport(checked(place)) == place
    with pytest.raises(ConfigError, match=f"^weights.transport: {place} compresses on the host"):
        checked(place, "cluster.placement=colocated")
    with pytest.raises(ConfigError, match="^weights.bucket_mib: has no effect"):
        checked(place, "weights.bucket_mib=8")


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("class Other(Base): pass", "mine.py has no class Mine; known: Other"),
        ("class Mine: pass", "must be a subclass of Transport in its source"),
        ("class Mine(Base", "mine.py is not valid Python"),
        (
            "class Mine(Base):\n    refuses = {'colocatd': 'x'}",
            "refuses of .* has 'colocatd'.*did you mean 'colocated'",
        ),
        ("class Mine(Base):\n    refuses = {'cpu': 3}", "refuses of .* has 'cpu': 3; expected {condition: reason}"),
        ("class Mine(Base):\n    refuses = dict(cpu='x')", "refuses of .* is computed; it must be a literal dict"),
        ("class Mine(contract.Transport):\n    uses_buckets = 'no'", "uses_buckets of .* is 'no'"),
        ("class Mine(Base):\n    refuses = {'cpu': 'wants a GPU'}", "Mine wants a GPU$"),
        ("class First(NcclTransport): pass\nclass Mine(First): pass", "Mine requires GPUs"),
    ],
)
def test_errors_of_a_custom_transport_are_found_without_running_it(tmp_path, text, complaint):
    with pytest.raises(ConfigError, match=rf"^weights.transport: .*{complaint}"):
        checked(written(tmp_path, text))


@pytest.mark.parametrize(
    "place, complaint",
    [
        ("nowhere.py:Mine", "no such file: nowhere.py"),
        ("nowhere.mine:Mine", "no such module: nowhere.mine"),
        ("mine.py:my class", "expected file.py:Class, got 'mine.py:my class'"),
    ],
)
def test_a_place_without_a_file_is_refused(place, complaint):
    with pytest.raises(ConfigError, match=f"^weights.transport: .*{complaint}"):
        checked(place)


def test_a_base_class_in_a_file_beside_is_followed(tmp_path):
    (tmp_path / "beside_mine.py").write_text(f"{IMPORTS}class Half(NcclTransport):\n    refuses = {{}}\n")
    imports = "import beside_mine as other\nfrom beside_mine import Half\n"
    for base in ("Half", "other.Half"):
        assert declared(written(tmp_path, f"class Mine({base}):\n    uses_buckets = False", imports)).refuses == {}


def test_a_base_class_that_gdpo_nemo_exports_is_followed(tmp_path):
    imports = "import gdpo_nemo\nfrom gdpo_nemo import Transport\n"
    for base in ("Transport", "gdpo_nemo.Transport"):
        found = declared(written(tmp_path, f"class Mine({base}):\n    refuses = {{'cpu': 'no'}}", imports))
        assert found.refuses == {"cpu": "no"} and found.uses_buckets


IMPORT = "from gdpo_nemo import Receiver, Transport\n"
WHOLE = """
class Mine(Transport):
    def prepare(self, version): return 1 / 0
    def send(self, engines): return [], []
class Told(Receiver):
    def receive(self, manifest, device, worker): return iter(())
"""


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("class Mine(Transport):\n    def prepare(self, version): pass", "mine.py:Mine does not define send"),
        ("Mine = 3", "mine.py:Mine is not a subclass of"),
        ("import nothing_of_that_name", "cannot import .*nothing_of_that_name"),
    ],
)
def test_a_transport_that_is_none_is_refused_when_it_is_loaded(tmp_path, text, complaint):
    with pytest.raises(ConfigError, match=f"^weights.transport: .*{complaint}"):
        load_transport(written(tmp_path, text, IMPORT))


def test_errors_of_a_custom_transport_are_one_sentence_and_config_errors_are_unchanged(tmp_path):
    own = make_transport(written(tmp_path, WHOLE, IMPORT), None, tmp_path, 1)
    with pytest.raises(RunError, match="^weights.transport: Mine.prepare: ZeroDivisionError: division by zero$"):
        with errors_named(type(own), "prepare"):
            own.prepare(1)
    with pytest.raises(ConfigError, match="^as it is$"), errors_named(type(own), "send"):
        raise ConfigError("as it is")
    with pytest.raises(ZeroDivisionError), errors_named(Transport, "send"):
        _ = 1 / 0


def test_a_receiver_from_a_file_reaches_a_process_that_never_loaded_it(tmp_path):
    """As engines do: the module has no name there that could be imported."""
    receiver = ImportPath(written(tmp_path, WHOLE, IMPORT).replace(":Mine", ":Told")).load()()
    receiver.number = 7
    (tmp_path / "pickled").write_bytes(pickle.dumps(receiver))
    code = f"import pickle; print(pickle.load(open({str(tmp_path / 'pickled')!r}, 'rb')).number)"
    shown = subprocess.run([sys.executable, "-c", code], cwd="/", check=True, capture_output=True, text=True)
    assert shown.stdout == "7\n"
