"""Load from a process of its own: what it shall send goes in, and what became of it comes out, both pickled."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import IO, Any

from eet_lab.errors import EETError, SetupError
from eet_lab.paths import PACKAGE
from eet_lab.progress import Cancel, Progress, raise_if_cancelled
from eet_lab.serving.load.open_loop import Job
from eet_lab.serving.load.result import Loaded

LOOK_S = 0.05
CHUNK = 2**16


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
                return replace(found, traffic=job.traffic)
            if isinstance(found, EETError):
                raise found
            if found is None:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(1)
                if child.poll() is not None:
                    raise SetupError(
                        f"The process that sends requests ended with {child.poll()} and no result. Its error is on the "
                        "standard error of this process."
                    )
            if found is None or isinstance(found, Exception):
                raise SetupError(
                    "The process that sends requests said what is no result, and was ended. Does something print when "
                    "Python starts (sitecustomize)?"
                )
            if progress is not None:
                progress(*found)
    except BrokenPipeError as error:
        raise SetupError("The process that sends requests ended before it had read them.") from error
    finally:
        child.kill()
        child.wait()


def _listen(stdout: IO[bytes], said: SimpleQueue[Any]) -> None:
    """Queue what the child says, and then None: it has ended; or the error of what is no answer."""
    with stdout:
        try:
            while True:
                said.put(pickle.load(stdout))
        except Exception as error:  # noqa: BLE001  whatever a pickle that is none raises
            said.put(None if isinstance(error, EOFError) else error)
        while stdout.read(CHUNK):  # or the child would end for want of a reader
            pass


def main() -> None:
    """Run the job that stdin holds; say its progress now and then, and at last its result or its error."""
    from eet_lab.serving.load.run import run_here

    def say(said: Any) -> None:
        sys.stdout.buffer.write(pickle.dumps(said))
        sys.stdout.buffer.flush()

    gc.disable()  # its pauses would count as the server's, and this process lasts for one run
    try:
        loaded = run_here(pickle.load(sys.stdin.buffer), lambda *progress: say(progress))
        say(replace(loaded, traffic=None))  # type: ignore[arg-type]  # whoever asked has it
    except EETError as error:
        say(error)
