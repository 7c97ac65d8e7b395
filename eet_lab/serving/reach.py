"""How a replica reaches fronts: where they are, the token that they ask for, and sockets and clocks of two machines."""

from __future__ import annotations

import asyncio
import platform
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

TOKEN_BYTES = 32
GONE_MS = 30_000
"""Milliseconds without a sign of the other end after which a link is lost, which without it takes a quarter of an hour
where something was sent: keep-alive probes are for a link that is idle.
"""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Reach:
    """Where fronts take replicas, and the token that these bring."""

    addresses: tuple[tuple[str, int], ...]
    token: bytes = field(repr=False)


async def connected(address: tuple[str, int]) -> socket.socket:
    """A socket to there."""
    loop = asyncio.get_running_loop()
    [family, kind, *_, found] = (await loop.getaddrinfo(*address, type=socket.SOCK_STREAM))[0]
    end = socket.socket(family, kind)
    end.setblocking(False)
    try:
        await loop.sock_connect(end, found)
    except BaseException:
        end.close()
        raise
    return as_link(end)


def as_link(end: socket.socket) -> socket.socket:
    """Itself: its frames go at once, and its other end is missed when that machine is gone."""
    end.setblocking(False)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    settings = ("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5), ("TCP_USER_TIMEOUT", GONE_MS)
    for name, value in settings:
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return end


async def received(end: socket.socket, num_bytes: int) -> bytes:
    """So many bytes, or fewer where the other end says no more."""
    got = b""
    while len(got) < num_bytes and (more := await asyncio.get_running_loop().sock_recv(end, num_bytes - len(got))):
        got += more
    return got


def clock() -> tuple[str, float]:
    """This machine since it started, and the time of its clock, which all its processes share."""
    machine = BOOT_ID.read_text().strip() if BOOT_ID.exists() else platform.node()
    return machine, time.perf_counter()


def ahead_s(theirs: tuple[str, float] | None) -> float:
    """How much another clock is ahead of this one, but for the time on the way; 0 of the same machine."""
    machine, now = clock()
    return 0.0 if theirs is None or theirs[0] == machine else theirs[1] - now
