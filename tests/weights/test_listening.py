"""Where the sender of weights can be reached."""

from __future__ import annotations

import psutil

from gdpo_nemo.weights.broadcast_group import BroadcastServer


def _listening() -> dict[int, str]:
    connections = psutil.Process().net_connections("inet")
    return {c.laddr.port: c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}


def test_store_of_a_weight_group_listens_only_at_its_host():
    before = _listening()
    server = BroadcastServer("127.0.0.1", receivers=1, backend="gloo")
    found = {port: address for port, address in _listening().items() if port not in before}
    assert found == {server.meeting.port: "127.0.0.1"}
    server.end()
    assert server.meeting.port not in _listening()
