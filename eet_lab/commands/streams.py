"""Standard output as users have it: without Unicode, on a full disk, closed, or read by a `head` that has left."""

from __future__ import annotations

import codecs
import os
import sys
from contextlib import suppress

PLAIN = str.maketrans({"×": "x", "–": "-", "—": "-", "µ": "u", "…": "...", "·": "*", "⟨": "<", "⟩": ">", "→": "->"})
"""What stands for our own characters where they cannot be shown; others are shown as their code."""


def prepare() -> None:
    """Make printing safe: no text is refused for its characters, and a stream that is closed takes what it is told."""
    codecs.register_error("eet_lab", _in_plain_words)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w", errors="replace"))  # noqa: SIM115  it stays open
        elif getattr(stream, "errors", None) in ("strict", "surrogateescape") and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="eet_lab")


def tell(message: str) -> None:
    """One message of ours on stderr, if anybody is there to read it."""
    with suppress(OSError):
        print(f"eet-lab: {message}", file=sys.stderr, flush=True)


def discard() -> None:
    """Send what stdout still holds, and all that follows, nowhere: Python would try it again at exit."""
    with suppress(OSError, ValueError):  # no real file, as in a test
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _in_plain_words(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    part = error.object[error.start : error.end].translate(PLAIN)
    return part.encode(error.encoding, "backslashreplace").decode(error.encoding), error.end
