"""The small file beside kept runs: the user's words on each, and a summary, so that a long list is quick.

Two workbenches change it in turn, under a lock, each entry by itself, so that the last word on a run holds.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from eet_lab import codec
from eet_lab.codec import Name, Text, Whole, content_of
from eet_lab.errors import EETError, ResultError
from eet_lab.paths import write_whole
from eet_lab.workbench.rows import Summary

SIDECAR, LOCK = ".eet-lab-runs.json", ".eet-lab-runs.lock"
PATIENCE_S = 2.0
"""How long is waited for another workbench to write its names, which takes milliseconds."""
AGAIN = {errno.EAGAIN, errno.ELOOP}
"""Errors that tell nothing of the folder: another workbench writes, or there is a link in place of a file."""


@dataclass(frozen=True)
class Entry:
    """What is known of a run: its name, note and pin, its number, and the summary of its file as it was at `stamp`."""

    name: Name = ""
    note: Text = ""
    pinned: bool = False
    number: Whole = 0
    stamp: tuple[Whole, Whole] = (0, 0)
    summary: Summary | None = None

    @classmethod
    def of(cls, data: Any) -> Entry:
        """The entry as it stands in the file; a field that is damaged counts as not written."""
        known: dict[str, Any] = {}
        for name in FIELDS.keys() & (data.keys() if isinstance(data, Mapping) else ()):
            with suppress(ValueError):
                known[name] = codec.decode(FIELDS[name], data[name])
        return cls(**known)


FIELDS = {f.name: get_type_hints(Entry, include_extras=True)[f.name] for f in fields(Entry)}


class Sidecar:
    """Entries by the ids of runs, in a folder that need not be there. Any thread may call it.

    Words that cannot be written stay in memory, as runs do, and are written with the next that can.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unwritten: dict[str, Entry] = {}
        self._known: tuple[Any, Mapping[str, Entry]] = None, {}

    def entries(self) -> Mapping[str, Entry]:
        """The entries as they are now; the file is decoded again only when it has changed."""
        try:
            status = (self._folder / SIDECAR).lstat()
        except OSError:
            return dict(self._unwritten)
        stamp = status.st_mtime_ns, status.st_size, status.st_ino
        if self._known[0] != stamp:
            self._known = stamp, self._read()
        return self._with_unwritten(self._known[1])

    def word(self, id: str, **words: Any) -> str:
        """Another name or note; returns why it stands only in memory, or "". ResultError while another writes."""
        return self._change(lambda entries: entries.update({id: replace(entries.get(id, Entry()), **words)}))

    def pin(self, id: str | None) -> str:
        """Pin one run and no other, or none; returns and raises as `word` does."""

        def edit(entries: dict[str, Entry]) -> None:
            for other in [other for other, entry in entries.items() if entry.pinned]:
                entries[other] = replace(entries[other], pinned=False)
            if id is not None:
                entries[id] = replace(entries.get(id, Entry()), pinned=True)

        return self._change(edit)

    def _change(self, edit: Callable[[dict[str, Entry]], None]) -> str:
        try:
            with self.changing() as entries:
                edit(entries)
        except ResultError as error:
            why = error.__cause__
            if not isinstance(why, OSError) or why.errno in AGAIN:
                raise
            before = self.entries()
            entries = dict(before)
            edit(entries)
            self._unwritten |= {id: entry for id, entry in entries.items() if entry != before.get(id)}
            return why.strerror or str(why)
        return ""

    @contextmanager
    def changing(self) -> Iterator[dict[str, Entry]]:
        """The entries, to be changed while nobody else writes; ResultError where they cannot be written."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with locked(self._folder / LOCK):
                entries = self._with_unwritten(self._read())
                yield entries
                if (path := self._folder / SIDECAR).is_symlink():
                    path.unlink()  # what it points to is somebody else's
                write_whole(path, json.dumps({id: _plain(entry) for id, entry in entries.items()}))
                self._unwritten = {}
        except OSError as error:
            raise ResultError(
                f"The names of runs cannot be written to {self._folder}: {error.strerror}. Give another folder: "
                "Workbench(folder=...)."
            ) from error

    def _with_unwritten(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """With the words that stand in memory; what else is known of a run stays."""
        return {**entries} | {
            id: replace(entries.get(id, own), name=own.name, note=own.note, pinned=own.pinned)
            for id, own in self._unwritten.items()
        }

    def _read(self) -> dict[str, Entry]:
        try:
            found = codec.parse(content_of(self._folder / SIDECAR, follow_links=False))
        except (EETError, ValueError):
            return {}
        return {id: Entry.of(data) for id, data in found.items()} if isinstance(found, dict) else {}


def _plain(entry: Entry) -> dict[str, Any]:
    """What there is of it, for JSON."""
    return {name: value for name, value in codec.encode(entry).items() if value}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on a file; OSError where another holds it for longer than `PATIENCE_S`."""
    flags = (
        os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    )  # neither a link nor a wait for a pipe
    lock, since = os.open(path, flags, 0o600), time.monotonic()
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > since + PATIENCE_S:
                    raise OSError(errno.EAGAIN, "another workbench keeps them locked") from None
                time.sleep(0.01)
        yield
    finally:
        os.close(lock)
