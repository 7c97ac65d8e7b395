"""Connections to one server, which are used again, and what is asked before any load."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from eet_lab.errors import SetupError
from eet_lab.serving.load.http1 import Connection
from eet_lab.serving.load.target import Target
from eet_lab.words import told, visible

PATIENCE_S = 30.0
"""The time for a server to take the first connection, and to name its models."""


class AskedModel(NamedTuple):
    """The model that requests name, and its vocabulary, where the server tells that."""

    name: str
    vocab_size: int | None = None


class Pool:
    """Idle connections, the newest first: one that waits for long is closed by its server."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._idle: list[Connection] = []
        self._address = ""
        self._ssl = ssl.create_default_context() if target.address[2] else None

    async def find(self) -> None:
        """Make the first connection, at whichever address of the host answers. Errors: SetupError."""
        host, port, _ = self._target.address
        try:
            async with asyncio.timeout(PATIENCE_S):
                for *_, where in await asyncio.get_running_loop().getaddrinfo(host, port, proto=6):
                    self._address = str(where[0])
                    with suppress(OSError):
                        self._idle.append(await self.connect())
                        return
        except (OSError, UnicodeError):  # a timeout is one, too
            pass
        raise SetupError(
            f"Nothing answers at {visible(self._target.url)}. Start a server there, such as with `eet-lab serve`, or "
            "give another URL."
        )

    async def model(self) -> AskedModel:
        """The model that shall be asked: the one that the target names, or the first that the server has.

        Errors: SetupError where none is named, and the server does not tell.
        """
        wanted = self._target.model
        if wanted is not None and not self._target.draws_below_told:
            return AskedModel(wanted)
        names, connection = _Names(), self.idle() or await self.connect()
        connection.ask(self._target.models(), names)
        try:
            status, body = await asyncio.wait_for(names.found, PATIENCE_S)
            cards = json.loads(body)["data"] if status == 200 else [{"id": None}]
            card = cards[0] if wanted is None else next(card for card in cards if card["id"] == wanted)
            found, size = card["id"], card.get("vocab_size")
        except (TimeoutError, ConnectionError, ValueError, LookupError, TypeError, AttributeError, StopIteration):
            status, found, size = 0, None, None
        if wanted is not None:
            found = wanted  # which requests name, whatever the server tells
        if not isinstance(found, str):
            why, remedy = "it gives no list" if status == 0 else f"it answers with {status}", "Say which model is meant"
            if status == 401:
                has_key = self._target.api_key is not None
                why = "it takes another API key" if has_key else "it asks for an API key, and none was given"
                remedy = "Give the server's key (api_key, or --api-key-file FILE)"
            raise SetupError(f"{visible(self._target.url)} does not tell which models it has: {why}. {remedy}.")
        return AskedModel(found, size if type(size) is int else None)

    def idle(self) -> Connection | None:
        """One that was used before and is open, as far as is known."""
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
        return None

    async def connect(self) -> Connection:
        """Another one. Errors: OSError."""
        host, port, _ = self._target.address
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self._idle.append),
            self._address,
            port,
            ssl=self._ssl,
            server_hostname=host if self._ssl else None,
        )
        return connection

    def close(self) -> None:
        """End those that are idle."""
        while (connection := self.idle()) is not None:
            connection.close()


class _Names:
    """Waits for a whole answer."""

    def __init__(self) -> None:
        self.found: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._status, self._body = 0, b""

    def headed(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self._status = status

    def got(self, data: bytes) -> None:
        self._body += data

    def completed(self) -> None:
        if not self.found.done():
            self.found.set_result((self._status, self._body))

    def lost(self, reason: str, was_silent: bool) -> None:
        if not self.found.done():
            self.found.set_exception(ConnectionError(told(reason)))
