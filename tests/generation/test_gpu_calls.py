"""What an engine on GPUs asks of vLLM, bound against vLLM's own signatures: its Python is the same on CPUs and GPUs but
for three files that have none of these."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import numpy as np
import pytest
from tiny_models import MIXTURES

from gdpo_nemo.config.schema import VllmConfig
from gdpo_nemo.generation import vllm_core
from gdpo_nemo.generation.engine import CPU_ENVIRONMENT
from gdpo_nemo.generation.requests import SampleRequest, Sampling
from gdpo_nemo.generation.vllm_core import (
    EngineOptions,
    VllmCore,
    _device_arguments,
    sampling_parameters,
    scoring_parameters,
)
from gdpo_nemo.models.families import FAMILIES
from gdpo_nemo.models.hf_folder import open_weights, weight_names
from gdpo_nemo.weights.manifest import pack
from gdpo_nemo.weights.transports.memory import MemoryReceiver

pytestmark = pytest.mark.slow

RANKS = (1, 4)


@pytest.fixture(params=RANKS)
def core(request, engine_model, monkeypatch):
    """With vLLM's classes replaced by such that check how they are called and do nothing."""
    import vllm
    from vllm.v1.engine.core_client import SyncMPClient
    from vllm.v1.engine.llm_engine import LLMEngine

    # vLLM has read the variable for good once an engine was made in this process.
    monkeypatch.setattr(vllm_core, "in_process", lambda config: False)
    llm = create_autospec(vllm.LLM)
    made = llm.return_value
    made.llm_engine = create_autospec(LLMEngine, instance=True)
    made.llm_engine.engine_core = create_autospec(SyncMPClient, instance=True)
    made.llm_engine.engine_core.outputs_queue = SimpleNamespace(empty=lambda: True)
    made.llm_engine.has_unfinished_requests.return_value = False
    made.llm_engine.output_processor = SimpleNamespace(request_states={})
    made.collective_rpc.return_value = [None]
    made.wake_up.side_effect = lambda tags: tags != ["weights"]
    monkeypatch.setattr(vllm, "LLM", llm)
    config = VllmConfig(tensor_parallel_size=request.param)
    core = VllmCore(EngineOptions(str(engine_model), config, "bfloat16", 256, 0, on_cpu=False, sleeps=True))
    core.asked = llm.call_args.kwargs
    core.made = made
    return core


def test_every_argument_is_one_of_vllms(core):
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    assert core.asked.keys() <= known | set(inspect.signature(LLM.__init__).parameters)
    assert core.asked["enable_sleep_mode"] is True
    assert core.asked["worker_extension_cls"] == "gdpo_nemo.weights.vllm_receiver.Worker"


def test_vllms_cuda_platform_decides_the_same_for_every_family(tmp_path):
    """Graphs, scheduling, sleep and attention as an H100 would have them: by vLLM's own code, without a GPU."""
    program = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("cuda_platform.py")), str(tmp_path / "out")]
    # Engines on CPUs that ran in this process have set CPU_ENVIRONMENT.
    environment = {name: value for name, value in os.environ.items() if name not in CPU_ENVIRONMENT}
    done = subprocess.run(program, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "out").read_text())
    expected = {
        "device": "cuda", "attention": "FLASH_ATTN", "graphs": "FULL_AND_PIECEWISE", "sizes": 51, "sleep": True,
        "chunked prefill": True, "asynchronous scheduling": True, "prefix cache": True, "head": "torch.float32",
        "executor": "uni", "transfer": "gdpo_nemo", "FlashInfer's sampler": False,
    }  # fmt: skip
    reloads = {name: decided.pop("reload") for name, decided in found.items() if "reload" in decided}
    assert {decided.pop("family") for decided in found.values()} == {*FAMILIES}
    latent = {"attention": "FLASH_ATTN_MLA"}
    special = {"gpt-oss": {"sizes": 83}, "deepseek-v3": latent, "glm4-flash": latent}  # more sizes for gpt-oss
    special["glm5"] = {"attention": "FLASH_ATTN_MLA_SPARSE"}
    special["gemma4"] = special["gemma4-moe"] = {"attention": "TRITON_ATTN"}  # heads of two sizes
    assert [(name, decided) for name, decided in found.items() if decided != expected | special.get(name, {})] == []
    assert reloads.keys() == {*MIXTURES} - {"gemma4-moe"}
    lost = reloads.pop("gpt-oss")
    assert lost["memory kept"] and not lost["equal"], "vLLM loads new weights of gpt-oss: set Family.engine_updates"
    for name, reload in reloads.items():  # a layer of four experts has 12 matrices, which become three
        assert reload["equal"] and reload["memory kept"], name
        calls = name not in special  # for latent attention, vLLM's model loads the experts without their layer's method
        assert reload["together"]["operations"] < (0.9 if calls else 1.01) * reload["usual"]["operations"], name


@pytest.mark.parametrize(
    "dtype,head,expected",
    [
        ("bfloat16", "float32", "torch.float32"),
        ("bfloat16", "model", "torch.bfloat16"),
        ("float32", "float32", "torch.float32"),
    ],
)
def test_logits_are_not_rounded_unless_asked_for(engine_model, dtype, head, expected):
    from vllm.engine.arg_utils import EngineArgs

    placed = _device_arguments(
        EngineOptions(str(engine_model), VllmConfig(head_dtype=head), dtype, 256, 0, on_cpu=False)
    )
    found = EngineArgs(model=str(engine_model), dtype=dtype, **placed).create_model_config()
    assert str(found.head_dtype) == expected and str(found.dtype) == f"torch.{dtype}"
    here = _device_arguments(EngineOptions(str(engine_model), VllmConfig(head_dtype=head), dtype, 256, 0, on_cpu=True))
    assert "hf_overrides" not in here  # a CPU would cast the head's weights at every step


def test_an_update_a_sleep_and_requests_are_calls_that_vllm_has(core, engine_model):
    read = open_weights(str(engine_model))
    manifest, buffer = pack(((name, read(name)) for name in weight_names(str(engine_model))), 3)
    sampling = Sampling(1.0, 0.9, 20, 8, ("stop",))
    requests = [("a", [1, 2], sampling_parameters(SampleRequest(np.arange(2), 1), sampling, 8), None)]
    core.add([*requests, ("b", [1, 2], scoring_parameters(), None)])
    assert core.hold() == [] and core.unstarted() == set()
    core.update(manifest, MemoryReceiver(), [buffer], keep=False)
    core.release()
    core.abort(["a"])
    core.sleep()
    core.wake("weights")
    assert core.asleep
    core.wake("kv_cache")
    assert not core.asleep and core.version == 3
    core.close_receiver(MemoryReceiver())
    made = core.made
    core.close()

    ((update,), _) = made.update_weights.call_args
    sent, receiver, _ = pickle.loads(update["update_info"]["update"])
    assert sent == manifest and receiver.buffer is None and receiver.path.startswith("/dev/shm/gdpo_nemo_weights_")
    assert made.llm_engine.engine_core.shutdown.called
    assert [call.args[0] for call in made.llm_engine.add_request.call_args_list] == ["a", "b"]


def test_functions_that_an_update_calls_in_the_workers_exist():
    """``collective_rpc`` takes names: of the worker, or of the extension that it is given."""
    from vllm.v1.worker.gpu_worker import Worker

    from gdpo_nemo.weights.vllm_receiver import Worker as Extension

    for name in ("update_error", "close_receiver"):
        assert hasattr(Extension, name) and not hasattr(Worker, name)
    for name in ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"):
        assert hasattr(Worker, name)
