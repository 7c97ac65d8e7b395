"""The program: `eet-lab`, which is also `python -m eet_lab`. It answers Ctrl+C before anything else is imported."""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """Run the command that was typed; its exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from eet_lab import cli

    return cli.main()


def _leave(number: int, frame: object) -> None:
    """Ctrl+C before a command's own handler is there: libraries swallow a KeyboardInterrupt while they are imported."""
    try:
        sys.stdout.flush()
    finally:
        os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
