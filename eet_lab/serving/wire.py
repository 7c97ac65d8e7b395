"""Frames between a front's process and its engine's, on a local socket: all news of a step are one.

So do vLLM's API server and its EngineCore, by ZMQ with msgspec's messages (vllm/v1/engine/core_client.py).
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from eet_lab.models.tokenizer import Tokenizer, Written
from eet_lab.serving.errors import ApiError
from eet_lab.serving.jobs import Card, Job, Load, News
from eet_lab.serving.options import Options
from eet_lab.words import type_of

BUFFER_BYTES = 1 << 20
LENGTH_BYTES = 8


class Hello(msgspec.Struct):
    """The first frame that a front gets. `clock`: the machine of an engine that may be on another, and its clock."""

    card: Card
    options: Options
    clock: tuple[str, float] | None = None


class ToFront(msgspec.Struct, array_like=True):
    """What the engine's process tells. "leave": it takes no more jobs, and asks to be told which was the last.

    `others` are the jobs inside that other fronts wait for; None: as many as were told last.
    """

    news: list[News] = []
    dead: ApiError | None = None
    load: Load | None = None
    order: Literal["start", "drain", "leave"] | None = None
    others: int | None = None


class ToEngine(msgspec.Struct, array_like=True):
    """What a front asks for. `leaves` are answers of earlier jobs, or of these.

    Jobs are encoded one by one (`ENCODER`, `JOB`): one that no frame can have takes no other one with it.
    """

    jobs: list[msgspec.Raw] = []
    leaves: list[int] = []
    wants_load: bool = False
    is_up: bool = False
    sends_no_more: bool = False


class Channel:
    """One end of a socket. Frames are read on a loop; they are sent from any thread, and sending never waits.

    What the other end has not read yet is kept, in its order: a front that is late must not hold up the engine.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        self._end, self._lock = end, threading.Lock()
        self._kept = bytearray()
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def send(self, message: msgspec.Struct) -> None:
        """Send it, or keep it until there is room. Where the other end is gone, nothing happens: `frames` ends."""
        body = ENCODER.encode(message)
        data = memoryview(len(body).to_bytes(LENGTH_BYTES, "little") + body)
        with self._lock:
            if self._is_closed:
                return
            was_empty = not self._kept
            sent = self._sent(data) if was_empty else 0
            self._kept += data[sent:]
            if was_empty and self._kept and self._loop is not None:
                with suppress(RuntimeError):  # the loop is closed: nobody reads any more
                    self._loop.call_soon_threadsafe(self._watch)

    async def frames(self) -> AsyncIterator[bytes]:
        """What comes, until the other end is closed or its process is gone."""
        self._loop = asyncio.get_running_loop()
        self._watch()
        got = bytearray()
        with suppress(ConnectionError):
            while more := await self._loop.sock_recv(self._end, BUFFER_BYTES):
                got += more
                at = 0
                while len(got) - at >= LENGTH_BYTES:
                    begin = at + LENGTH_BYTES
                    end = begin + int.from_bytes(got[at:begin], "little")
                    if len(got) < end:
                        break
                    yield bytes(got[begin:end])
                    at = end
                del got[:at]

    def close(self) -> None:
        """The other end is told; what was kept is lost. On the loop of `frames`."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            # Else the loop would take the next socket that gets this number for this one, and fail to watch it.
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_writer(self._end)
            self._end.close()

    def _sent(self, data: memoryview | bytearray) -> int:
        try:
            return self._end.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def _watch(self) -> None:
        with self._lock:
            if self._kept and not self._is_closed and self._loop is not None:
                self._loop.add_writer(self._end, self._flush)

    def _flush(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            del self._kept[: self._sent(self._kept)]
            if not self._kept and self._loop is not None:
                self._loop.remove_writer(self._end)


def _written(value: Any) -> Any:
    if isinstance(value, ApiError):
        return [value.status, value.message, value.param, value.code, value.retry_after_s]
    if isinstance(value, Tokenizer):
        return value.written()
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"no frame has {type_of(value)}")


def _read(kind: type, value: Any) -> Any:
    if kind is ApiError:
        return ApiError(*value)
    if kind is Tokenizer:
        return msgspec.convert(value, Written).read()
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"no frame has a {kind.__name__}")


ENCODER = msgspec.msgpack.Encoder(enc_hook=_written)
HELLO: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Hello, dec_hook=_read)
JOB: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job, dec_hook=_read)
TO_FRONT: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront, dec_hook=_read)
TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine, dec_hook=_read)
