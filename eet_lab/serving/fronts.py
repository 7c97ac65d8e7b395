"""Processes that answer clients for all replicas, on one port, as the process that serves replicas sees them."""

from __future__ import annotations

import secrets
import socket
import subprocess
import time
from contextlib import ExitStack, suppress

from eet_lab.errors import SetupError
from eet_lab.serving.lifecycle import listen, url_of
from eet_lab.serving.reach import TOKEN_BYTES, Reach
from eet_lab.serving.replicas_front import DRAIN
from eet_lab.serving.split_server import PATIENCE_S, ended, start_front
from eet_lab.threads import num_cores
from eet_lab.words import counted

ENDING_S = 15.0
"""Seconds beyond the drain for a front to end."""


def num_fronts(replicas: int) -> int:
    """One for each replica, where each has two cores: a front takes some 20 us of one for a token."""
    return max(1, min(replicas, num_cores() // 2))


class Fronts:
    """Starts them. `links_host` is the address of this machine at which replicas find them.

    Errors: SetupError. Where several share a port, that another program has it may not be told.
    """

    def __init__(self, host: str, port: int, num: int, links_host: str) -> None:
        self._controls, self._processes = list[socket.socket](), list[subprocess.Popen[bytes]]()
        token, addresses = secrets.token_bytes(TOKEN_BYTES), []
        with ExitStack() as on_error:
            on_error.callback(self.close)
            for _ in range(num):
                listening = listen(host, port, is_shared=num > 1)
                self.url, self.port = url_of(listening), listening.getsockname()[1]
                port = self.port  # the next ones share it
                links = listen(links_host, 0)
                addresses.append((links_host, links.getsockname()[1]))
                ours, its = socket.socketpair()
                self._controls.append(ours)
                module = "eet_lab.serving.replicas_front"
                self._processes.append(start_front(module, (its, listening, links), str(num)))
                ours.sendall(token)
            on_error.pop_all()
        self.reach = Reach(tuple(addresses), token)

    def check(self) -> None:
        """Errors: SetupError once one has ended by itself: the others, if there are any, answer on."""
        for each in self._processes:
            if (code := each.poll()) is not None:
                raise SetupError(
                    f"A front of the server (process {each.pid} of {counted(len(self._processes), 'front')}) has ended "
                    f"with {code}, and its requests with it. Its log is on the standard error of this process. Serve "
                    "the model again."
                )

    def drain(self, drain_s: float) -> None:
        """Finish what was accepted within this time, refuse the rest, and end."""
        for control in self._controls:
            with suppress(OSError):  # it has ended
                control.sendall(DRAIN)
        self._wait(drain_s + ENDING_S)

    def close(self) -> None:
        """End them: whoever is still answered is told."""
        for control in self._controls:
            control.close()
        self._wait(PATIENCE_S)

    def _wait(self, patience_s: float) -> None:
        """Until all have ended; after so many seconds the rest is killed."""
        end = time.perf_counter() + patience_s
        for process in self._processes:
            ended(process, max(end - time.perf_counter(), 0.0))
