"""Imports of large libraries: without the garbage collector, and without what a process does not use."""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import threading
import weakref

import pytest

from gdpo_nemo.generation.engine import CPU_ENVIRONMENT
from gdpo_nemo.utils.progress import _Providers, hidden, importing

pytestmark = pytest.mark.slow


class Circle:
    """Garbage that only the collector finds."""

    def __init__(self):
        self.itself = self


def allocate() -> None:
    """Enough for the collector to run several times, had it not been told to wait."""
    kept = [[] for _ in range(10 * gc.get_threshold()[0])]
    del kept


def followed(thing: object) -> bool:
    """Whether the collector still looks at it: ``gc.get_objects`` leaves out what is frozen."""
    return any(other is thing for other in gc.get_objects())


@pytest.fixture
def collections():
    """Phases of the garbage collections of this test. Objects that it freezes are not unfrozen.

    Threads of earlier tests, such as those of rollout hosts, may collect by themselves.
    """
    seen = []
    own = threading.get_ident()

    def note(phase, info):
        if threading.get_ident() == own:
            seen.append(phase)

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)
    gc.enable()


@pytest.mark.parametrize("freeze", [True, False])
def test_nothing_is_collected_in_the_block_and_the_collector_works_again_after_it(freeze, collections):
    with importing(freeze):
        collections.clear()  # pytest allocates as well between the fixture and the test
        allocate()
        assert collections == []
    allocate()
    assert "stop" in collections
    garbage = weakref.ref(Circle())
    gc.collect()
    assert garbage() is None


def test_objects_at_the_end_of_the_block_are_frozen_only_on_request(collections):
    kept = [[]]
    with importing(freeze=False):
        pass
    assert followed(kept)
    with importing():
        pass
    assert not followed(kept)


def test_a_collector_that_is_off_stays_off_and_an_import_that_fails_leaves_it_as_it_was(collections):
    with pytest.raises(ImportError), importing():
        raise ImportError("no")
    assert gc.isenabled()
    gc.disable()
    with importing():
        pass
    assert not gc.isenabled()


def test_hidden_modules_fail_to_import_in_the_block_only():
    with hidden("json", "no_such_module"), pytest.raises(ImportError):
        importlib.import_module("json")
    assert importlib.import_module("json") is json
    assert "no_such_module" not in sys.modules


def output_of(code: str, **environment: str) -> str:
    """What a new process prints."""
    command = [sys.executable, "-c", code]
    given = {name: value for name, value in os.environ.items() if name not in CPU_ENVIRONMENT}
    found = subprocess.run(command, env={**given, **environment}, check=True, stdout=subprocess.PIPE, text=True)
    return found.stdout.strip()


def test_transformers_is_imported_without_the_files_of_all_packages():
    code = """
import importlib.metadata as metadata
def refuse():
    raise AssertionError("it reads the files of all packages")
metadata.packages_distributions = refuse
from gdpo_nemo.utils.progress import import_transformers
import_transformers()
from transformers.utils import import_utils
print(import_utils.is_torch_available(), metadata.packages_distributions is refuse)
"""
    assert output_of(code) == "True True"


def test_transformers_lists_the_classes_of_its_models_as_if_it_had_read_them_again():
    code = """
from gdpo_nemo.utils.progress import import_transformers
import_transformers()
import transformers.models
from transformers.utils import import_utils
define = import_utils.define_import_structure
file = transformers.models.__file__
print(define(file) == import_utils.spread_import_structure(import_utils.create_import_structure_from_path(file)))
print(define(file, prefix="x").keys() == define(file).keys(), transformers.models.Qwen2Config.model_type)
"""
    assert output_of(code) == "True\nTrue qwen2"


def test_the_config_of_a_model_is_loaded_without_the_code_for_sampling():
    code = """
import sys
from gdpo_nemo.utils.progress import import_transformers
import_transformers()
from transformers import AutoConfig, Qwen2Config
print(type(AutoConfig.for_model("qwen2")) is Qwen2Config, "transformers.generation.utils" in sys.modules)
from transformers import Qwen2ForCausalLM
print(Qwen2ForCausalLM.__name__)
"""
    assert output_of(code) == "True False\nQwen2ForCausalLM"


def test_a_package_is_provided_by_the_distribution_of_its_name():
    read = importlib.metadata.packages_distributions()
    providers = _Providers(lambda: pytest.fail("read"))
    for name in ("torch", "accelerate", "torchvision", "numpy"):
        assert providers.get(name) == read[name]


def test_all_providers_are_read_for_other_names_and_for_flash_attention():
    read = {"yaml": ["PyYAML"], "flash_attn": ["flash-attn", "flash-attn-4"]}
    providers = _Providers(lambda: read)
    assert [providers.get(name) for name in ("yaml", "flash_attn", "none")] == [*read.values(), None]
    assert dict(providers) == read


@pytest.mark.parametrize(
    ("on_cpu", "before"), [(True, "sys"), (False, "sys"), (True, "torch._inductor.pattern_matcher")]
)
def test_vllm_is_imported_without_the_lowerings_of_the_compiler_only_on_cpus(on_cpu, before):
    """Unless other code has imported the module that vLLM patches."""
    code = f"""
import sys
import {before}
from gdpo_nemo.generation import vllm_core
vllm_core.import_vllm()
print("vllm" in sys.modules, "torch._inductor.lowering" in sys.modules)
"""
    without = on_cpu and before == "sys"
    assert output_of(code, **CPU_ENVIRONMENT if on_cpu else {}) == f"True {not without}"


def test_existing_objects_are_excluded_from_collections_only_in_the_block():
    """In a process of its own, because other tests exclude the modules of this one."""
    code = """
import gc
from gdpo_nemo.utils.progress import frozen
kept = [[]]
is_scanned = lambda: any(found is kept for found in gc.get_objects())
with frozen():
    made = [[]]
    print(is_scanned(), any(found is made for found in gc.get_objects()))
print(is_scanned())
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.split() == ["False", "True", "True"]
