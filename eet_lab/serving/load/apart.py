"""Load from a process of its own: what it shall send goes in, and what became of it comes out, both pickled."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import IO, Any

from eet_lab.errors import EETError, SetupError
from eet_lab.paths import PACKAGE
from eet_lab.progress import Cancel, Progress, raise_if_cancelled
from eet_lab.serving.load.open_loop import Job
from eet_lab.serving.load.result import Loaded

LOOK_S = 0.05


def run_apart(job: Job, progress: Progress | None = None, cancel: Cancel | None = None) -> Loaded:
    """Run a job in a child. Errors: those of the job; SetupError for a child that ends without a word."""
    command = [sys.executable, "-c", "from eet_lab.serving.load.apart import main; main()"]
    # In a session of its own: a notebook's Stop interrupts its whole group, and not only the cell that runs.
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=PACKAGE.parent, start_new_session=True
    )
    assert child.stdin is not None and child.stdout is not None
    said: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_listen, args=(child.stdout, said), daemon=True).start()
    try:
        child.stdin.write(pickle.dumps(job))
        child.stdin.close()
        while True:
            raise_if_cancelled(cancel, "The load")
            try:
                found = said.get(timeout=LOOK_S)
            except Empty:
                continue
            if isinstance(found, Loaded):
                return found
            if isinstance(found, EETError):
                raise found
            if found is None:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(1)
                raise SetupError(f"The process that sends requests ended with {child.poll()} and no result.")
            if progress is not None:
                progress(*found)
    except BrokenPipeError as error:
        raise SetupError("The process that sends requests ended before it had read them.") from error
    finally:
        child.kill()
        child.wait()


def _listen(stdout: IO[bytes], said: SimpleQueue[Any]) -> None:
    """Queue what the child says, and then None: it has ended, or says what is no answer."""
    with suppress(Exception):
        while True:
            said.put(pickle.load(stdout))
    said.put(None)


def main() -> None:
    """Run the job that stdin holds; say its progress now and then, and at last its result or its error."""
    from eet_lab.serving.load.run import run_here

    def say(said: Any) -> None:
        sys.stdout.buffer.write(pickle.dumps(said))
        sys.stdout.buffer.flush()

    gc.disable()  # its pauses would count as the server's, and this process lasts for one run
    try:
        say(run_here(pickle.load(sys.stdin.buffer), lambda *progress: say(progress)))
    except EETError as error:
        say(error)
