"""The control plane's programs, as far as they can be seen without starting them."""

from __future__ import annotations

import socket

from deploy.lab.control_plane import listens


def test_a_port_is_somebodys_until_it_is_given_back() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"https://127.0.0.1:{server.getsockname()[1]}"
        assert listens(place)
    assert not listens(place)
