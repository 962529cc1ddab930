"""This machine's network interfaces, for libraries that choose one by name."""

from __future__ import annotations

import fcntl
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
