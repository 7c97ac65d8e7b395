"""The process that serves JupyterLab: it ends when its launcher does, however that ends.

`python -m eet_lab.lab.child`: a line on stdin has JupyterLab's words as JSON (the token is among them, and other users
can read the words of a process); when stdin closes after that, the launcher is gone.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress

import psutil

GRACE_S = 2.0
"""Time for kernels to end by themselves, and once more for the server."""


def main() -> None:
    """Serve until told to stop."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            return
        line += byte
    threading.Thread(target=_end_with_the_launcher, daemon=True).start()
    # jsonschema does without: it would make a grammar of all internationalized addresses, in 2 s, and nobody gives one.
    sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
    from jupyterlab.labapp import LabApp  # type: ignore[import-untyped]

    sys.argv[:] = ["jupyter-lab"]
    logging.captureWarnings(True)  # JupyterLab's, of old settings that it looks at itself
    LabApp.launch_instance(json.loads(line))


def _end_with_the_launcher() -> None:
    """Stop as at SIGTERM, which ends kernels and removes files; help along what has not ended in time."""
    os.read(0, 1)
    me = psutil.Process()
    kernels = me.children(recursive=True)
    os.kill(me.pid, signal.SIGTERM)
    for process in psutil.wait_procs(kernels, GRACE_S)[1]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    time.sleep(GRACE_S)
    me.kill()


if __name__ == "__main__":
    main()
