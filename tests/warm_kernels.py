"""Kernels that begin with torch, plotly and EET Lab imported: forks of one process that has done it, 7 s sooner each.

They are processes of their own, as any kernel is: nothing that one does is seen by another. As a program this file is
either the process that forks (`serve`), or what a kernel spec calls (`kernel`): that one asks for a fork, and ends with
it. What measures until it knows enough is content with the fewest rounds that tell an effect from noise, or with fewer
where `ROUNDS` is set.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:  # `kernel` has no time to import what it does not use
    from collections.abc import Iterator
    from pathlib import Path

ROUNDS = "EET_TEST_ROUNDS"
"""A variable of a kernel's environment: how many rounds are timed, in place of so many that enough is known."""
FEW_STEPS = 20
"""Steps of the lesson's training there; that the demo learns in all of them is tested with the demos."""
FEW_TEXTS = 5
"""Of the batch that lesson 8 takes apart."""
FEW_ROWS = 3
"""Of the batch whose cache lessons have grow: as many steps and figures, of smaller tensors."""
FEW_SERVED = 3
"""Requests that lesson 5 gives to each of its engines, two thirds of whose time goes to the baseline."""
FEW_TOKENS = 16
"""Of each rung of lesson 4's ladder: as many rungs, calls and figures."""
FEW_COLUMNS = 96
"""That lesson 3 adds to its cache: as many figures, of fewer steps."""
LONGEST = 1 << 20
"""Bytes of a kernel's environment, at most."""


@contextmanager
def warm_kernels(folder: Path) -> Iterator[dict[str, str]]:
    """While it lasts, Jupyter programs with these variables in their environment start such kernels as "python3"."""
    door = folder / "door"
    words = [sys.executable, "-I", "-S", __file__, "kernel", str(door), "-f", "{connection_file}"]
    spec = {"argv": words, "display_name": "Python 3", "language": "python", "interrupt_mode": "message"}
    home = folder / "kernels" / "python3"
    home.mkdir(parents=True)
    (home / "kernel.json").write_text(json.dumps(spec | {"metadata": {"debugger": True}}))
    command = [sys.executable, __file__, "serve", str(door)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert server.stdout.readline() == b"ready\n", "the process that forks kernels did not start"
        yield {"JUPYTER_PATH": str(folder)}
    finally:
        server.stdin.close()  # which it takes as its end
        server.wait(15)


def serve(door: str) -> None:
    """Fork a kernel for each connection, until stdin is closed."""
    import gc
    import importlib
    import pkgutil
    import signal

    sys.path.pop(0)  # the folder of this file
    sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # as in conftest.py
    import ipykernel.kernelapp  # noqa: F401
    import ipywidgets  # noqa: F401
    import nbformat  # noqa: F401  # a first figure looks for it

    import eet_lab.lessons
    import eet_lab.workbench

    for module in pkgutil.iter_modules(eet_lab.lessons.__path__, "eet_lab.lessons."):
        importlib.import_module(module.name)
    signal.signal(signal.SIGCHLD, reap)
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(door)
    listener.listen(16)
    print("ready", flush=True)
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        asked, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            begin(asked)
        asked.close()


def reap(*_: object) -> None:
    """Kernels have ended; their processor time counts as that of the tests."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def begin(asked: socket.socket) -> None:
    """Become the kernel that was asked for."""
    import signal
    import threading

    data, files, _, _ = socket.recv_fds(asked, LONGEST, 3)
    while not data.endswith(b"\n"):
        data += asked.recv(LONGEST)
    told = json.loads(data)
    for number, each in enumerate(files):
        os.dup2(each, number)
        os.close(each)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(told["environ"])
    os.chdir(told["folder"])
    threading.Thread(target=end_with, args=(asked,), daemon=True).start()
    from ipykernel.kernelapp import launch_new_instance
    from ipywidgets import register_comm_target

    from eet_lab.bench import timing
    from eet_lab.lessons import decode_speed, fast_training, memory_reuse, variable_length
    from eet_lab.training import demos

    timing.LEAST_PAIRS = timing.MOST_ROUNDS = int(os.environ.get(ROUNDS, timing.LEAST_PAIRS))
    if ROUNDS in os.environ:
        demos.DEMOS["gpt2-tiny"] = demos.DEMOS["gpt2-tiny"].in_steps(FEW_STEPS)
        memory_reuse.LOADS["cpu"] = (memory_reuse.LOADS["cpu"][0], FEW_ROWS)
        memory_reuse.NEW_TOKENS = FEW_COLUMNS
        fast_training.NUM_TEXTS = FEW_TEXTS
        variable_length.NUM_SERVED = FEW_SERVED
        decode_speed.NEW_TOKENS = FEW_TOKENS
    register_comm_target()  # ipywidgets does so where it is imported in a kernel
    sys.argv = ["ipykernel_launcher", *told["words"], f"--IPKernelApp.parent_handle={os.getppid()}"]
    launch_new_instance()
    os._exit(0)


def end_with(asked: socket.socket) -> None:
    """Who asked was killed, as by a restart of the kernel."""
    asked.recv(1)
    os._exit(1)


def kernel(door: str, *words: str) -> None:
    """Ask for a kernel, and live as long as it."""
    told = {"environ": dict(os.environ), "folder": os.getcwd(), "words": words}
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(door)
        data = json.dumps(told).encode() + b"\n"
        sent = socket.send_fds(asking, [data], [0, 1, 2])
        asking.sendall(data[sent:])
        asking.recv(1)


if __name__ == "__main__":
    {"serve": serve, "kernel": kernel}[sys.argv[1]](*sys.argv[2:])
