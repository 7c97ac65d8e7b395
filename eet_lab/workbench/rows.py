"""What the list of kept runs tells of each, and the small file beside them that keeps it."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from datetime import datetime
from itertools import count
from os.path import lexists
from pathlib import Path
from typing import Any, get_type_hints
from unicodedata import normalize

from eet_lab import codec
from eet_lab.bench import Comparison, Ladder, Measurement, Run
from eet_lab.bench.measured import describe, moment, placed
from eet_lab.codec import Bytes, Ms, Name, Text, Whole, content_of
from eet_lab.errors import EETError, ResultError, first_line
from eet_lab.files import lock
from eet_lab.labels import short_form
from eet_lab.models.loading import is_demo
from eet_lab.paths import other_results, write_whole
from eet_lab.words import amount, counted, ms_words, visible

Result = Comparison | Ladder | Run
KINDS: dict[type, str] = {Comparison: "compare", Ladder: "ladder", Run: "run"}
Stamp = tuple[int, int]
"""A file's time of change in ns, and its size: while both stay, so does what it holds."""


@dataclass(frozen=True)
class Summary:
    """What follows from a run's file. Times are ms; what is not known is None. `weights` is the model's label, which
    tells a checkpoint from random weights; "" in rows kept before. `problem`: why it cannot be opened.
    """

    kind: Name = ""
    name: Name = ""
    model: Name = ""
    weights: Name = ""
    device: Name = ""
    recipe: Name = ""
    recipe_text: Name = ""
    ttft_ms: Ms | None = None
    tpot_ms: Ms | None = None
    peak_bytes: Bytes | None = None
    same: Name = ""
    date: Name = ""
    origin: Name = ""
    recorded: bool = False
    problem: Name = ""

    @classmethod
    def of(cls, result: Result) -> Summary:
        """What the list tells of a result."""
        environment = placed(result.environment)
        m, device = end(result), environment.device_kind
        done = m.recipe if m is not None else result.recipe if isinstance(result, Ladder) else ""
        against = short_form(result.baseline.recipe, device) if isinstance(result, Comparison) else "baseline"
        label = short_form(done, device)
        model = "demo" if is_demo(environment.model_label) else environment.model
        where = [_short_device(environment.device)] if environment.recorded else []
        return cls(
            kind=KINDS[type(result)],
            name=", ".join([visible(model), counted(len(result.prompts), "prompt"), *where]),
            model=visible(model),
            weights=visible(environment.model_label),
            device=visible(environment.device),
            recipe=visible(label if against == "baseline" else f"{label} against {against}"),
            recipe_text=done,
            ttft_ms=m.ttft_ms.p50 if m and m.ttft_ms else None,
            tpot_ms=m.tpot_ms.p50 if m and m.tpot_ms else None,
            peak_bytes=m.memory["peak"] if m else None,
            same=_same(result),
            date=environment.date,
            origin=visible(describe(environment)),
            recorded=environment.recorded,
        )


@dataclass(frozen=True, kw_only=True)
class KeptRun(Summary):
    """One kept run. `stamp` is that of the file which the summary was read from; `number` counts runs of its kind.

    `subject` is what was measured: `demo, 4 prompts`.
    """

    id: str
    note: str = ""
    pinned: bool = False
    writable: bool = True
    stamp: Stamp = (0, 0)
    number: int = 0
    subject: str = ""

    @property
    def first_name(self) -> str:
        """What it is called until a reader names it: `Compare 3`."""
        own = self.number and self.writable and not self.problem
        return f"{self.kind.capitalize()} {self.number}" if own else self.name

    @property
    def when(self) -> str:
        """The moment of the measurement, in words."""
        return moment(self.date).removeprefix("on ").removeprefix("at ") if self.date else ""

    @property
    def short_when(self) -> str:
        """The moment where there is little room: `14:32` of today, else the date."""
        return self.when.split(" at ")[0]

    @property
    def label(self) -> str:
        """What tells it from others of its name: `Compare 3, 14:32:05`."""
        return f"{self.name}, {when}" if (when := to_the_second(self.date)) else self.name


def to_the_second(date: str, whole: bool = False) -> str:
    """`14:32:05` of today, else or `whole` `2026-11-23 14:32:05`: local time, of an ISO date; "" of what is none."""
    try:
        then = datetime.fromisoformat(date).astimezone()
    except (ValueError, OverflowError):
        return ""
    today = then.date() == datetime.now().astimezone().date()
    return f"{then:%H:%M:%S}" if today and not whole else f"{then:%Y-%m-%d %H:%M:%S}"


MOST_NAME_BYTES = 120
"""The part of a file's name that its run gives: systems take 255 bytes with the date and the ending."""


def file_stem(name: str, date: str) -> str:
    """How a run's file is called on any system: `Compare-3-2026-11-26`. A bare name may be one of Windows' own."""
    words = re.sub(r"[^\w-]+", "-", normalize("NFC", name)).strip("-")
    words = words.encode()[:MOST_NAME_BYTES].decode(errors="ignore")
    return f"{words or 'run'}-{to_the_second(date, whole=True)[:10] or 'undated'}"


def end(result: Result) -> Measurement | None:
    """What a row tells: of the selection, the full recipe, the run; None of a ladder stopped before its first rung."""
    if isinstance(result, Comparison):
        return result.selection
    if isinstance(result, Run):
        return result.measurement
    return result.rungs[-1].measurement if result.rungs else None


def facts(m: Measurement) -> dict[str, str]:
    """What two runs are held side by side by."""
    times = {"time to first token": m.ttft_ms, "time per token": m.tpot_ms, "end to end": m.total_ms}
    told = {name: "–" if spread is None else ms_words(spread.p50) for name, spread in times.items()}
    return {**told, "peak memory": amount(m.memory["peak"])}


def _same(result: Result) -> str:
    if isinstance(result, Comparison):
        return result.parity.verdict
    return result.rungs[-1].parity.verdict if isinstance(result, Ladder) and result.rungs else ""


def _short_device(device: str) -> str:
    """ "NVIDIA H200" is "H200"."""
    return visible(device.removeprefix("NVIDIA ").split(" (")[0])


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


def next_number(kind: str, entries: Mapping[str, Entry]) -> int:
    """The number of a new run of this kind; 0 of a file that holds none. A number stays, whatever runs are deleted."""
    numbers = (entry.number for entry in entries.values() if entry.summary and entry.summary.kind == kind)
    return 1 + max(numbers, default=0) if kind else 0


class Sidecar:
    """Entries by the ids of runs, in a folder that need not be there. Any thread may call it.

    Words that cannot be written stay in memory, as runs do, and are written with the next that can.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._damaged: tuple[Path, str] | None = None  # a file that could not be read, where it is now, and why
        self._unwritten: dict[str, Entry] = {}
        self._known: tuple[Any, Mapping[str, Entry]] = None, {}

    @property
    def damaged(self) -> str:
        """What is to be told of a file that could not be read, as long as it is there; "" of none."""
        if self._damaged is None or not lexists(self._damaged[0]):
            return ""
        path, why = self._damaged
        where = "is damaged" if path.name == SIDECAR else f"was damaged, and is kept as {path.name}"
        return f"Names, notes and pins are missing: {SIDECAR} {where} ({why})."

    def entries(self) -> Mapping[str, Entry]:
        """The entries as they are now; the file is decoded again only when it has changed."""
        try:
            status = (self._folder / SIDECAR).lstat()
        except OSError:
            return dict(self._unwritten)
        stamp = status.st_mtime_ns, status.st_size, status.st_ino
        if self._known[0] != stamp:
            self._known = stamp, self._read()[0]
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
            own = {id: entry for id, entry in entries.items() if entry != before.get(id)}
            self._unwritten = self._unwritten | own  # another one: a thread may be walking through the old one
            return why.strerror or str(why)
        return ""

    @contextmanager
    def changing(self) -> Iterator[dict[str, Entry]]:
        """The entries, to be changed while nobody else writes; ResultError where they cannot be written."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with locked(self._folder / LOCK):
                (found, why), path = self._read(), self._folder / SIDECAR
                if why:
                    self._set_aside(path, why)
                entries = self._with_unwritten(found)
                yield entries
                if path.is_symlink():
                    path.unlink()  # what it points to is somebody else's
                write_whole(path, json.dumps({id: _plain(entry) for id, entry in entries.items()}))
                self._unwritten = {}
        except OSError as error:
            raise ResultError(
                f"The names of runs cannot be written to {self._folder}: {error.strerror}. Give another folder: "
                f"{other_results()}."
            ) from error

    def _with_unwritten(self, entries: Mapping[str, Entry]) -> dict[str, Entry]:
        """With the words that stand in memory; what else is known of a run stays."""
        return {**entries} | {
            id: replace(entries.get(id, own), name=own.name, note=own.note, pinned=own.pinned)
            for id, own in self._unwritten.items()
        }

    def _read(self) -> tuple[dict[str, Entry], str]:
        """What the file holds, and why it holds no entries where it is damaged; "" else. A link is not ours."""
        path = self._folder / SIDECAR
        if path.is_symlink() or not path.exists():
            return {}, ""
        try:
            found = codec.parse(content_of(path, follow_links=False))
            if not isinstance(found, dict):
                raise ValueError("it holds no entries")
        except (EETError, ValueError) as error:
            self._damaged = path, (why := first_line(error))
            return {}, why
        if self._damaged is not None and self._damaged[0] == path:
            self._damaged = None  # it was mended
        return {id: Entry.of(data) for id, data in found.items()}, ""

    def _set_aside(self, path: Path, why: str) -> None:
        """Keep what cannot be read under another name, for the user to mend; OSError where that cannot be."""
        numbers = (f".{n}" if n else "" for n in count())
        aside = next(each for n in numbers if not lexists(each := path.with_name(f"{path.name}.damaged{n}")))
        path.rename(aside)
        self._damaged = aside, why


def _plain(entry: Entry) -> dict[str, Any]:
    """What there is of it, for JSON."""
    return {name: value for name, value in codec.encode(entry).items() if value}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on a file; OSError where another holds it for longer than `PATIENCE_S`."""
    flags = (
        os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    )  # neither a link nor a wait for a pipe
    opened, since = os.open(path, flags, 0o600), time.monotonic()

    def wait() -> None:
        if time.monotonic() > since + PATIENCE_S:
            raise OSError(errno.EAGAIN, "another workbench keeps them locked") from None

    try:
        lock(opened, wait)
        yield
    finally:
        os.close(opened)
