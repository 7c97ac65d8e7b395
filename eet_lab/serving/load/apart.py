"""Load from a process of its own: what it shall send goes in as JSON, and what became of it comes out."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from dataclasses import asdict, fields
from queue import Empty, SimpleQueue
from typing import IO, Any

import numpy as np

import eet_lab.errors
from eet_lab.errors import EETError, SetupError
from eet_lab.paths import PACKAGE
from eet_lab.progress import Cancel, Progress, raise_if_cancelled
from eet_lab.scheduling.traffic import Traffic
from eet_lab.serving.load.open_loop import Job
from eet_lab.serving.load.result import Loaded
from eet_lab.serving.load.target import Target

LOOK_S = 0.05
ARRAYS = ("first_ms", "last_ms", "sent_ms", "ended_ms", "told", "prompt_tokens")


def run_apart(job: Job, progress: Progress | None = None, cancel: Cancel | None = None) -> Loaded:
    """Run a job in a child. Errors: those of the job; SetupError for a child that ends without a word."""
    command = [sys.executable, "-c", "from eet_lab.serving.load.apart import main; main()"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=PACKAGE.parent)
    assert child.stdin is not None and child.stdout is not None
    lines: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(child.stdout, lines), daemon=True).start()
    try:
        child.stdin.write(json.dumps(_packed(job)).encode())
        child.stdin.close()
        while True:
            raise_if_cancelled(cancel, "The load")
            try:
                line = lines.get(timeout=LOOK_S)
            except Empty:
                continue
            if not line:
                raise SetupError(f"The process that sends requests ended with {child.wait()} and no result.")
            found = json.loads(line)
            if "progress" in found and progress is not None:
                progress(*found["progress"])
            if "error" in found:
                raise getattr(eet_lab.errors, found["error"], EETError)(found["said"])
            if "result" in found:
                return _unpacked(job, found["result"])
    except BrokenPipeError as error:
        raise SetupError("The process that sends requests ended before it had read them.") from error
    finally:
        child.kill()
        child.wait()


def _read(stdout: IO[bytes], lines: SimpleQueue[bytes]) -> None:
    for line in stdout:
        lines.put(line)
    lines.put(b"")


def _packed(job: Job) -> dict[str, Any]:
    traffic = {field.name: _plain(getattr(job.traffic, field.name)) for field in fields(Traffic)}
    return job._asdict() | {"target": asdict(job.target), "traffic": traffic}


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _unpacked(job: Job, found: dict[str, Any]) -> Loaded:
    known: dict[str, Any] = {name: np.array(found.pop(name)) for name in ARRAYS}
    known |= {name: value and tuple(value) for name, value in found.items()}
    return Loaded(job.traffic, job.target.url, **known)


def main() -> None:
    """Run the job that stdin holds; a line for its progress now and then, and one for its result."""
    from eet_lab.serving.load.run import run_here

    def say(**said: Any) -> None:
        print(json.dumps(said), flush=True)

    gc.disable()  # its pauses would count as the server's, and this process lasts for one run
    given = json.loads(sys.stdin.buffer.read())
    traffic = given.pop("traffic")
    arrays = {name: np.array(value) for name, value in traffic.items() if name != "name"}
    job = Job(**given | {"target": Target(**given["target"]), "traffic": Traffic(**arrays, name=traffic["name"])})
    try:
        loaded = run_here(job, lambda *progress: say(progress=progress))
    except EETError as error:
        say(error=type(error).__name__, said=str(error))
        return
    names = (*ARRAYS, "outcome", "reason", "texts")
    say(result={name: _plain(getattr(loaded, name)) for name in names})
