"""What an engine tells vLLM's scheduler in a process of its own: plain values, for which vLLM unpickles nothing."""

from __future__ import annotations

import pickle

import pytest

pytestmark = pytest.mark.slow

BLOB = pickle.dumps({"manifest": list(range(100))})
CALLS = (
    ("collective_rpc", ("init_weight_transfer_engine", None, (), {"init_info": {}})),
    ("collective_rpc", ("update_weights", None, (), {"update_info": {"update": BLOB}})),
    ("collective_rpc", ("close_receiver", None, (BLOB,), None)),
    ("sleep", (0, "keep")),
    ("wake_up", (["scheduling"],)),
)


def test_no_call_or_answer_of_an_engine_needs_vllms_insecure_serialization(monkeypatch):
    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
    from vllm.v1.engine import UtilityOutput
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

    from gdpo_nemo.generation.engine import CPU_ENVIRONMENT, ENVIRONMENT

    assert not [name for name in {**ENVIRONMENT, **CPU_ENVIRONMENT} if "INSECURE" in name]
    encoder = MsgpackEncoder()
    for method, arguments in CALLS:
        assert MsgpackDecoder().decode(encoder.encode((0, 1, method, arguments)))[2] == method
    for answer in ([None], [BLOB], None, True):  # ``Worker.update_error`` and the others
        message = encoder.encode(UtilityOutput(call_id=1, result=UtilityResult(answer)))
        assert MsgpackDecoder(UtilityOutput).decode(message).result.result == answer
    with pytest.raises(TypeError, match="not serializable"):
        encoder.encode((0, 1, "collective_rpc", (lambda worker: None,)))
