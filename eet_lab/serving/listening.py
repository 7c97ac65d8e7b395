"""The socket on which a server listens."""

from __future__ import annotations

import socket

from eet_lab.errors import SetupError
from eet_lab.words import told

LAST_PORT = 65535


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections; port 0 is any that is free. Errors: SetupError."""
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= LAST_PORT:
        raise SetupError(f"port is {told(port)}, but it must be a whole number from 0 (any free one) to {LAST_PORT:,}.")
    try:
        [family, *_, address] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise SetupError(
            f"{host}:{port} cannot be listened on: {error.strerror or error}. Choose another port, or 0 for a free one."
        ) from error
    # Connections inherit it. asyncio sets it only where a socket names its protocol, which this one does not; without
    # it, the second piece of an answer waits 40 ms for the client's acknowledgement of the first.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listening.setblocking(False)
    return listening


def url_of(listening: socket.socket) -> str:
    """Where a client finds it: the address that OpenAI's client calls `base_url` is this with /v1."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
