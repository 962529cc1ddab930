"""Host memory for what the GPU has no room for: values go there and come back as they were, and nothing else moves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gdpo_nemo.megatron.optimizer import GroupStepAdam, OptimizerOffload, Reference
from gdpo_nemo.weights.host_memory import _ALIGNMENT, HostCopies, host_memory_like


def test_tensors_in_host_memory_have_their_own_aligned_bytes():
    like = [torch.empty(shape, dtype=dtype) for shape, dtype in (((3, 5), torch.float32), ((7,), torch.bfloat16))] * 3
    memory = host_memory_like(like, pinned=False)
    for number, (host, tensor) in enumerate(zip(memory, like)):
        assert (host.shape, host.dtype) == (tensor.shape, tensor.dtype)
        assert host.storage_offset() * host.element_size() % _ALIGNMENT == 0
        host.fill_(number)
    assert [int(host.flatten()[0]) for host in memory] == list(range(6))
    assert len({host.untyped_storage()._cdata for host in memory}) == 1


def test_copies_in_host_memory_are_of_the_last_buffers_and_reuse_the_memory():
    copies = HostCopies(torch.device("cpu"))
    places = []
    for version in range(2):
        buffers = [torch.full((size,), version, dtype=torch.uint8) for size in (5, 300)]
        copies.begin([5, 300])
        for buffer in buffers:
            copies.add(buffer)
        places.append([copy.data_ptr() for copy in copies.in_host_memory()])
        assert all(map(torch.equal, copies.in_host_memory(), buffers))
        assert not {buffer.data_ptr() for buffer in buffers} & {*places[-1]}
        for buffer in buffers:
            buffer.fill_(9)  # the sender uses the memory again
        assert [int(copy.max()) for copy in copies.in_host_memory()] == [version, version]
    assert places[0] == places[1]
    copies.begin([5])
    assert list(copies.in_host_memory()) == []


@pytest.fixture
def trained():
    """A bfloat16 weight with its main weight, and a float32 weight that is its own; after one update."""
    torch.manual_seed(0)
    model = [torch.nn.Parameter(torch.randn(4, 3, dtype=torch.bfloat16)), torch.nn.Parameter(torch.randn(5))]
    main = model[0].detach().float()
    optimizer = GroupStepAdam([main, model[1]], lr=0.1)
    for p in (main, model[1]):
        p.grad = torch.randn_like(p)
    optimizer.step()
    return model, main, optimizer


def test_offloaded_weights_and_moments_come_back_bit_for_bit(trained):
    model, main, optimizer = trained
    offload = OptimizerOffload(SimpleNamespace(optimizer=optimizer), model, torch.device("cpu"))
    before = [t.clone() for t in (main, *optimizer.state[main].values(), *optimizer.state[model[1]].values())]
    own = model[1].data_ptr()
    for _ in range(2):
        offload.send()
        away = main.data_ptr()
        offload.fetch()
        offload.wait()
        after = [main, *optimizer.state[main].values(), *optimizer.state[model[1]].values()]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        assert main.data_ptr() != away
    assert model[1].data_ptr() == own, "a weight of the model itself was moved"


def test_offloading_frees_the_gradients_of_offloaded_weights(trained):
    model, main, optimizer = trained
    OptimizerOffload(SimpleNamespace(optimizer=optimizer), model, torch.device("cpu")).send()
    assert main.grad is None


def test_weights_of_the_policy_come_back_when_a_pass_under_the_reference_fails():
    weight = torch.nn.Parameter(torch.arange(3.0))
    reference = Reference([weight], on_host=True)
    with torch.no_grad():
        weight.add_(1)
    place = weight.data_ptr()
    with pytest.raises(KeyError), reference.as_parameters():
        assert weight.tolist() == [0, 1, 2]
        raise KeyError
    assert weight.tolist() == [1, 2, 3]
    assert weight.data_ptr() == place


def test_an_update_by_adam_copies_nothing_from_the_host(trained, monkeypatch):
    model, main, optimizer = trained
    monkeypatch.setattr(torch, "tensor", None)  # on a GPU, a copy for which the process waits
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 2
