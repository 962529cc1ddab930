"""This machine's network interfaces, for libraries that choose one by name."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct

_SIOCGIFADDR = 0x8915
"""From <linux/sockios.h>; the standard library has no name for it."""


def interface_of(address: str) -> str | None:
    """Name of the interface that has this IPv4 address; None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
            # struct ifreq: 16 bytes of name, then sockaddr_in, whose address starts at its byte 4.
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def stay_on(address: str) -> None:
    """Keep gloo, NCCL and vLLM in this process, and in those that it starts, on the interface of ``address``, unless
    their own variables say otherwise.

    By default gloo takes the address that the host's name resolves to, and NCCL every interface. Between machines NCCL
    keeps that choice: several interfaces carry more than one.
    """
    os.environ.setdefault("VLLM_HOST_IP", address)
    interface = interface_of(address)
    if interface is None:
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if ipaddress.ip_address(address).is_loopback:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without "=" it is a prefix
