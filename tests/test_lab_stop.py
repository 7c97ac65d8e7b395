"""How signals and errors end the server of `eet-lab lab`."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress

from eet_lab.lab.stop import Stop


def test_under_nohup_it_outlives_the_terminal():
    stop, before = Stop(), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop.watched():
            assert (signal.getsignal(signal.SIGHUP), signal.getsignal(signal.SIGTERM)) == (signal.SIG_IGN, stop)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_error_on_our_side_leaves_no_server_behind():
    stop, handler = Stop(), signal.getsignal(signal.SIGTERM)
    with suppress(BrokenPipeError), stop.watched():
        stop.server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        raise BrokenPipeError
    assert stop.server.poll() is not None
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_server_is_asked_once_to_end_and_killed_where_it_does_not(monkeypatch):
    """A second SIGTERM would stop Jupyter's loop in the midst of ending its kernels, after which it may never end."""
    monkeypatch.setattr("eet_lab.lab.stop.PATIENCE_S", 0.5)
    stop, heard = Stop(), "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))"
    code = f"import signal, time; {heard}; print('up', flush=True); time.sleep(60)"
    with suppress(SystemExit), stop.watched():
        stop.server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert stop.server.stdout.readline() == "up\n"
        stop(signal.SIGTERM, None)
    with stop.server:
        assert stop.server.stdout.read() == "asked\n" and stop.server.wait() == -signal.SIGKILL
