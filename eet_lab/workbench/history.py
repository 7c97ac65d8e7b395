"""Kept runs: every Run, Compare and Ladder as a file in the user's folder, and the recordings that come along.

A file is what `result.save` writes, with two more entries beside the result: "monitor", the samples of each watched
run, and "timeline", those of a step. Names, notes and the pin, which are the user's, stand in a small file of their
own (`Sidecar`).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from itertools import count, islice
from os.path import exists, lexists
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from eet_lab.bench.measured import placed
from eet_lab.bench.results import read_result
from eet_lab.bench.timeline import Timelines, encode, timelines_of
from eet_lab.codec import content_of
from eet_lab.errors import EETError, ResultError, first_line
from eet_lab.files import folder_path
from eet_lab.paths import PACKAGE, other_results, results_dir, write_whole
from eet_lab.words import visible
from eet_lab.workbench import export
from eet_lab.workbench.rows import KINDS, Entry, KeptRun, Result, Sidecar, Stamp, Summary, file_stem, next_number

FOLDER = results_dir()
SHIPPED = PACKAGE / "recorded"
STAMP = "%Y%m%d-%H%M%S-%f"
"""How names of files begin; two workbenches that end at once must not choose the same."""
BATCH = 16
"""Files that are read at a time; their rows then appear together."""
LONGEST_NAME, LONGEST_NOTE = 80, 400
RECORDED = "recorded:"
"""How ids of the recordings that come along begin."""
EXPORTS = "exports"
"""A folder in that of the runs, of files that are too large for a page to save."""
WORDS = "words"
"""The key of an exported result's name and note."""
UNREAD = "will be read in a moment"

Read = Mapping[str, tuple[Stamp, Summary]]
"""What was read of files, by id."""


def in_memory() -> str:
    """What becomes of runs that no file can keep."""
    return (
        "Runs are kept in memory until this kernel ends; export what you need, or open it with another folder: "
        f"{other_results()}."
    )


class History:
    """The store of kept runs. The ui thread calls it, and only `read` is for another; none needs an engine or a widget.

    `rows` stay as they are until something is written here, or `look` is called. `problem` tells why nothing can be
    written to the folder, from the start; then this session's runs are kept in memory.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = folder_path(folder, ResultError)
        self.problem = f"{why} {in_memory()}" if (why := _not_writable(self.folder)) else ""
        self._sidecar = Sidecar(self.folder)
        self._memory: dict[str, tuple[KeptRun, Result, dict[str, Any]]] = {}
        self._known: dict[str, tuple[Stamp, Summary]] = {}
        self._shipped = {f"{RECORDED}{path.stem}": path for path in sorted(SHIPPED.glob("*.json"))}
        self._rows: list[KeptRun] | None = None
        self._unread: dict[str, Path] = {}
        self._pins_count = True

    # Reading

    def rows(self) -> list[KeptRun]:
        """All kept runs: pinned first, then the newest; recordings that come along are last."""
        if self._rows is None:
            entries, paths = self._sidecar.entries(), self._files()
            files = [self._row(id, path, entries.get(id, Entry())) for id, path in paths.items()]
            self._unread = {row.id: paths[row.id] for row in files if row.problem == UNREAD}
            kept = [_named(row, entries[row.id]) if row.id in entries else row for row, _, _ in self._memory.values()]
            newest = sorted(
                [*_told_apart(files), *kept], key=lambda row: (row.id in self._shipped, _later_first(row.id))
            )
            here = [replace(row, pinned=row.pinned and self._pins_count) for row in newest]
            self._rows = sorted(here, key=lambda row: not row.pinned)
        return self._rows

    def look(self) -> None:
        """Others may have written to the folder: the next `rows` are those of now."""
        self._rows = None

    def unread(self) -> dict[str, Path]:
        """The next files to be read, by id; empty once all have been."""
        self.rows()
        return dict(islice(self._unread.items(), BATCH))

    def read(self, files: Mapping[str, Path]) -> Read:
        """What these files hold, for `learn`. Any thread may call it."""
        found: dict[str, tuple[Stamp, Summary]] = {}
        for id, path in files.items():
            with suppress(OSError):  # it is gone, and so will be its row
                found[id] = _stamp(path), _summary(path)
        self._remember(found)
        return found

    def learn(self, found: Read) -> None:
        """Take in what was read."""
        self._known |= found
        self._rows = None

    def has(self, id: str) -> bool:
        """Whether a run is still kept."""
        return id in self._memory or id in self._files()

    def open(self, id: str) -> tuple[Result, dict[str, Any]]:
        """A kept result, and what stands beside it: "monitor" and "timeline" (Timelines), where they are there.

        ResultError where the result cannot be read.
        """
        if id in self._memory:
            return self._memory[id][1:]
        path = self._files().get(id)
        if path is None:
            raise ResultError(f"The run {visible(id[:80])} is no longer kept: its file is gone.")
        result, found = read_result(content_of(path, follow_links=False), path.name)
        return replace(result, environment=placed(result.environment)), _beside(found)

    def pinned(self) -> KeptRun | None:
        """The run whose recipe Compare is held against; None: the baseline."""
        return next((row for row in self.rows() if row.pinned and not row.problem), None)

    @property
    def warning(self) -> str:
        """Why nothing can be written, if so, and which file of names was damaged."""
        return " ".join(filter(None, [self.problem, self._sidecar.damaged]))

    def set_pins_aside(self) -> None:
        """Count no pin, nor one that is set elsewhere meanwhile, until a run is pinned here."""
        self._pins_count, self._rows = False, None

    # Writing

    def add(self, result: Result, monitor: Mapping[str, Any]) -> KeptRun:
        """Keep a result with the samples of its runs; in memory where the folder cannot be written to."""
        return self._put(_stem(result), result, {"monitor": dict(monitor)} if monitor else {}, Entry())

    def attach(self, id: str, timelines: Timelines) -> None:
        """Keep timelines beside a result."""
        result, beside = self.open(id)
        beside["timeline"] = timelines
        if id not in self._memory:
            self._keep(self._files()[id], result, beside)

    def rename(self, id: str, text: str) -> None:
        """Another name; an empty one brings back the first."""
        self._change(id, name=visible(text.strip())[:LONGEST_NAME])

    def annotate(self, id: str, text: str) -> None:
        """A note."""
        self._change(id, note=visible(text.strip())[:LONGEST_NOTE])

    def pin(self, id: str | None) -> None:
        """Pin one run, and no other; None: no run."""
        if id is not None and id not in {row.id for row in self.rows()}:
            raise ResultError("This run is no longer kept, so it cannot be pinned.")
        self._pins_count = True
        self._tell(self._sidecar.pin(id))

    def delete(self, id: str) -> None:
        """Remove a run's file; ResultError for a recording that comes along."""
        if id in self._shipped:
            raise ResultError("A recording that comes with EET Lab cannot be deleted.")
        self._rows = None
        if self._memory.pop(id, None) is None and (path := self._files().get(id)) is not None:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise ResultError(f"{path} cannot be deleted: {error.strerror}.") from error
            with self._sidecar.changing() as entries:
                entries.pop(id, None)

    def export(self, id: str, format: str) -> tuple[str, bytes]:
        """A run as a file for another place, its name and content; as "json" it brings its name and note along."""
        if format == "json" and (path := self._files().get(id)) is not None:
            content = self._with_words(id, content_of(path, follow_links=False))
            return f"{self._file_stem(id) or path.stem}.json", content
        return self.exported(*self.open(id), format, id)

    def exported(self, result: Result, beside: Mapping[str, Any], format: str, id: str = "") -> tuple[str, bytes]:
        """A result as a file, whether it is kept or not."""
        summary = Summary.of(result)
        stem = self._file_stem(id) or file_stem(f"{summary.kind} {summary.name}", summary.date)
        if format == "json":
            return f"{stem}.json", self._with_words(id, result.to_json(**_encoded(beside)).encode())
        ending, content = export.content(result, beside, format)
        return f"{stem}{ending}", content.encode()

    def put_down(self, name: str, content: bytes) -> Path:
        """Write a file that is no kept run: into a folder beside the runs, or where that cannot be, a temporary one."""
        beside, path = self.folder / EXPORTS, Path(name)
        try:
            beside.mkdir(parents=True, exist_ok=True)
            path = _free(beside, path.stem, path.suffix)
            write_whole(path, content)
        except OSError:
            try:
                path = Path(mkdtemp(prefix="eet-lab-")) / name
                path.write_bytes(content)
            except OSError as error:
                raise ResultError(f"{name} cannot be written anywhere: {error.strerror}. Free some space.") from error
        return path.absolute()

    def take(self, name: str, content: bytes) -> KeptRun:
        """Keep a file that was uploaded, if it is a result; ResultError, which calls it by its `name`, else."""
        result, found = read_result(content, name)
        words = found.get(WORDS)
        own = [words.get(key) for key in ("name", "note")] if isinstance(words, dict) else ["", ""]
        name, note = (text.strip() if isinstance(text, str) else "" for text in own)
        row = self._put(f"loaded-{datetime.now():{STAMP}}", result, _beside(found), Entry(name=name, note=note))
        return next((each for each in self.rows() if each.id == row.id), row)

    # Files

    def _put(self, stem: str, result: Result, beside: dict[str, Any], entry: Entry) -> KeptRun:
        """Keep a result under the user's own words; in memory where the folder cannot be written to."""
        try:
            row = self._keep(self._free(stem), result, beside)
            self.problem = ""
            self._write_late()
        except ResultError as error:
            summary = Summary.of(result)
            number = 1 + max((row.number for row in self.rows() if row.kind == summary.kind), default=0)
            row = _named(KeptRun(id=stem, number=number, **vars(summary)), Entry())
            self._memory[row.id] = row, result, beside
            self._tell(getattr(error.__cause__, "strerror", None) or first_line(error))
        for text, change in ((entry.name, self.rename), (entry.note, self.annotate)):
            if text:
                change(row.id, text)
        return row

    def _row(self, id: str, path: Path, entry: Entry) -> KeptRun:
        """What the list tells of a file: as it was read before, where the file is still the same."""
        try:
            stamp = _stamp(path)
        except OSError as error:
            return KeptRun(id=id, problem=f"cannot be read: {error.strerror}", name=visible(path.name))
        read = self._known.get(id, ((0, 0), None)), (entry.stamp, entry.summary)
        unread = Summary(name=visible(path.name), problem=UNREAD)
        summary = next((summary for at, summary in read if at == stamp and summary is not None), unread)
        row = KeptRun(id=id, stamp=stamp, number=entry.number, writable=id not in self._shipped, **vars(summary))
        return _named(row, entry)

    def _files(self) -> dict[str, Path]:
        """Every file by its id: what the folder holds now, and the recordings."""
        try:
            found = sorted(path for path in self.folder.glob("*.json") if not path.name.startswith("."))
        except OSError:
            found = []
        return {path.stem: path for path in found} | self._shipped

    def _keep(self, path: Path, result: Result, beside: Mapping[str, Any]) -> KeptRun:
        """Write a result's file, and know what it holds without reading it."""
        result.save(path, **_encoded(beside))
        known = {path.stem: (_stamp(path), Summary.of(result))}
        self._remember(known)
        self.learn(known)
        return self._row(path.stem, path, self._sidecar.entries().get(path.stem, Entry()))

    def _write_late(self) -> None:
        """Write what had to be kept in memory, now that the folder takes files again."""
        for id, (_, result, beside) in list(self._memory.items()):
            with suppress(ResultError):
                self._keep(self._free(id), result, beside)
                del self._memory[id]

    def _remember(self, found: Read) -> None:
        """Keep summaries and numbers for the next kernel; where they cannot be written, the files are read again."""
        own = {id: each for id, each in found.items() if id not in self._shipped}
        if not own or not self.folder.is_dir():
            return
        with suppress(ResultError), self._sidecar.changing() as entries:
            for id, (stamp, summary) in own.items():
                entry = entries.get(id, Entry())
                number = entry.number or next_number(summary.kind, entries)
                entries[id] = replace(entry, stamp=stamp, summary=summary, number=number)

    def _free(self, stem: str) -> Path:
        """A path in the folder, which is made; never one that exists."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResultError(
                f"The folder {self.folder} cannot be created: {error.strerror}. Give another: {other_results()}."
            ) from error
        return _free(self.folder, stem)

    def _file_stem(self, id: str) -> str:
        """A listed run's name as that of a file; "" of one that is not listed, or cannot be read."""
        return next((file_stem(row.name, row.date) for row in self.rows() if row.id == id and not row.problem), "")

    def _with_words(self, id: str, content: bytes) -> bytes:
        """A result's file with the user's own name and note of it."""
        entry = self._sidecar.entries().get(id, Entry())
        words = {key: value for key, value in (("name", entry.name), ("note", entry.note)) if value}
        if not words:
            return content
        read_result(content, id)  # told where it is damaged
        return json.dumps({**json.loads(content), WORDS: words}).encode()

    def _change(self, id: str, **words: Any) -> None:
        if id in self._shipped:
            raise ResultError("A recording that comes with EET Lab keeps its name: export it, and load it as your own.")
        self._tell(self._sidecar.word(id, **words))

    def _tell(self, why: str) -> None:
        """Say why nothing can be written, if so; rows are others from now on."""
        if why:
            self.problem = f"Runs cannot be kept in {self.folder}: {why.rstrip('.')}. {in_memory()}"
        self._rows = None


def _stem(result: Result) -> str:
    """How a result's file is named: by the moment, and by what it holds."""
    return f"{datetime.now():{STAMP}}-{KINDS[type(result)]}"


def _free(folder: Path, stem: str, suffix: str = ".json") -> Path:
    """A path in a folder that is there; never one that exists."""
    paths = (folder / f"{stem}{f'-{n}' if n else ''}{suffix}" for n in count())
    return next(path for path in paths if not lexists(path))


def _not_writable(folder: Path) -> str:
    """Why files cannot be put into a folder, or the folder cannot be made; "" where they can, as far as can be told."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if exists(path))
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return ""
    why = "is read-only, or not yours to write to" if there.is_dir() else "is a file"
    return f"Runs cannot be kept in {folder}: {'it' if there == folder.absolute() else there} {why}."


def _stamp(path: Path) -> Stamp:
    status = path.lstat()
    return status.st_mtime_ns, status.st_size


def _summary(path: Path) -> Summary:
    """What a file holds, or why it cannot be read."""
    try:
        return Summary.of(read_result(content_of(path, follow_links=False), path.name)[0])
    except EETError as error:
        reason = first_line(error).removeprefix(f"{visible(str(path))} ")  # the row tells the name
        return Summary(name=visible(path.name), problem=reason)


def _beside(found: Mapping[str, Any]) -> dict[str, Any]:
    """What a file holds beside its result, of what is kept there; timelines that are damaged count as none."""
    kept = {"monitor": found["monitor"]} if found.get("monitor") else {}
    with suppress(ResultError):
        if (timelines := timelines_of(found)) is not None:
            kept["timeline"] = timelines
    return kept


def _encoded(beside: Mapping[str, Any]) -> Mapping[str, Any]:
    """What stands beside a result, as JSON takes it."""
    return {**beside, "timeline": encode(beside["timeline"])} if "timeline" in beside else beside


def _named(row: KeptRun, entry: Entry) -> KeptRun:
    """A row under the user's name, with note and pin; one of the user's own is "Compare 3" at first."""
    name = visible(entry.name)[:LONGEST_NAME] or row.first_name
    note = visible(entry.note)[:LONGEST_NOTE]
    return replace(row, name=name, subject=row.subject or row.name, note=note, pinned=entry.pinned)


def _told_apart(rows: Sequence[KeptRun]) -> list[KeptRun]:
    """Recordings of one name under names that say what differs: their kind, and where that is the same, the recipe."""

    def longer(rows: Sequence[KeptRun], more: Callable[[KeptRun], str]) -> list[KeptRun]:
        count = Counter(row.name for row in rows if not (row.writable or row.problem))
        return [
            replace(row, name=f"{row.name}, {more(row)}") if count[row.name] > 1 and not row.writable else row
            for row in rows
        ]

    return longer(longer(rows, lambda row: row.kind), lambda row: row.recipe)


def _later_first(id: str) -> tuple[int, ...]:
    """Ids begin with their date, so the later of two is larger, or longer; "loaded-" does not count."""
    return *(-ord(letter) for letter in id.removeprefix("loaded-")), 1
