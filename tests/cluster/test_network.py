"""The interface that libraries are kept on."""

from __future__ import annotations

import os

import pytest

from gdpo_nemo.cluster.local_ray import interface_of, stay_on

NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP")


@pytest.fixture
def variables(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # put back afterwards, whoever sets it meanwhile
        monkeypatch.delenv(name)
    return monkeypatch


def _values(environment) -> list[str | None]:
    return [environment.get(name) for name in NAMES]


def test_on_one_machine_all_libraries_stay_on_the_loopback_interface(variables):

    lo = interface_of("127.0.0.1")
    stay_on("127.0.0.1")
    assert lo is not None and _values(os.environ) == [lo, f"={lo}", "127.0.0.1"]


def test_between_machines_nccl_chooses_its_interfaces_itself(variables):

    variables.setattr("gdpo_nemo.cluster.local_ray.interface_of", {"10.77.0.1": "ib0"}.get)
    stay_on("10.77.0.1")
    assert _values(os.environ) == ["ib0", None, "10.77.0.1"]


def test_an_interface_that_the_user_named_stays(variables):

    for name in NAMES:
        variables.setenv(name, "mine")
    stay_on("127.0.0.1")
    assert _values(os.environ) == ["mine"] * 3
