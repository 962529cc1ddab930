"""Megatron without CUDA: its own functions are rewritten, torch is not."""

from __future__ import annotations

import sys
import types

import pytest
import rank_cases
import torch

from gdpo_nemo.megatron import cpu_shim


@pytest.mark.slow
def test_torch_is_left_as_it_is(on_ranks):
    assert on_ranks("TP1", rank_cases.changed_in_torch)[0] == []


@pytest.mark.slow
def test_all_groups_of_a_rank_share_one_gloo_device(on_ranks):
    """Each device has a thread that polls."""
    assert on_ranks("TP2", rank_cases.gloo_threads) == [1, 1]


def test_installing_after_megatron_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, cpu_shim._Finder)])
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    with pytest.raises(RuntimeError, match="imported before"):
        cpu_shim.install()


def test_nothing_is_installed_where_cuda_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    finders = list(sys.meta_path)
    assert cpu_shim.install() is False
    assert sys.meta_path == finders


def test_code_is_retargeted_and_its_strings_are_unchanged():
    def stock():
        return torch.cuda.current_device(), "cuda", ("cuda", "torch.cuda.FloatTensor"), "cuda_graph"

    rewritten = types.FunctionType(cpu_shim._rewrite(stock.__code__, "cpu"), {"torch": torch})
    assert rewritten() == (torch.cpu.current_device(), "cpu", ("cpu", "torch.FloatTensor"), "cuda_graph")
