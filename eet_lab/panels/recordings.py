"""Results on disk: those recorded on a GPU that come with the package, and those that the user saved.

A file is what `result.save` writes, with one more entry beside the result: "monitor", the samples of each watched run,
{"baseline": recording, "selection": recording} as `eet_lab.monitor.record` makes them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from eet_lab.bench import Comparison, Ladder, load_result
from eet_lab.errors import MonitorError, ResultError
from eet_lab.monitor import ReplaySource
from eet_lab.panels import export
from eet_lab.paths import PACKAGE

FOLDER = "eet-lab-results"
STAMP = "%Y%m%d-%H%M%S"
SHIPPED = PACKAGE / "recorded"

Result = Comparison | Ladder


class Files:
    """The folder of saved results, and the recorded ones that come with the package."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def available(self) -> dict[str, Path]:
        """Files that can be opened, by the words that the picker shows: shipped ones first, then the newest."""
        shipped = {f"recorded: {_words(path.stem)}": path for path in sorted(SHIPPED.glob("*.json"))}
        saved = sorted(self.folder.glob("*.json"), reverse=True) if self.folder.is_dir() else []
        return shipped | {f"saved: {path.stem}": path for path in saved}

    def save(self, result: Result, monitor: Mapping[str, Any]) -> Path:
        """Write a result with its samples."""
        return save(self._new(result, ".json"), result, monitor)

    def export_csv(self, result: Result) -> Path:
        """Write the table."""
        return export.write_csv(result, self._new(result, ".csv"))

    def export_page(self, result: Result) -> Path:
        """Write the self-contained page."""
        return export.write_page(result, self._new(result, ".html"))

    def take(self, name: str, content: bytes) -> Path:
        """Keep an uploaded file, if it is a result; ResultError, which calls it by its `name`, else."""
        path = export.write(self._free(f"loaded-{time.strftime(STAMP)}", ".json"), content)
        try:
            open_file(path)
        except ResultError as error:
            path.unlink()
            raise ResultError(f"{name} cannot be used: {str(error).replace(str(path), name)}") from error
        return path

    def _new(self, result: Result, suffix: str) -> Path:
        return self._free(f"{time.strftime(STAMP)}-{type(result).__name__.lower()}", suffix)

    def _free(self, stem: str, suffix: str) -> Path:
        """A path in the folder, which is made; never one that exists."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResultError(
                f"The folder {self.folder} cannot be made: {error.strerror}. Give another: Workbench(folder=...)."
            ) from error
        paths = (self.folder / f"{stem}{f'-{n}' if n else ''}{suffix}" for n in count())
        return next(path for path in paths if not path.exists())


def save(path: Path, result: Result, monitor: Mapping[str, Any]) -> Path:
    """Write a result with its samples; ResultError where it cannot be written."""
    return result.save(path, **({"monitor": monitor} if monitor else {}))


def open_file(path: Path) -> tuple[Result, dict[str, Any]]:
    """A result, marked as recorded, and its samples; ResultError where the file cannot be read."""
    result = load_result(path)
    result = replace(result, environment=replace(result.environment, recorded=True))
    try:
        monitor = json.loads(path.read_text(encoding="utf-8")).get("monitor", {})
        for recording in monitor.values():
            ReplaySource(recording)
    except (MonitorError, AttributeError, OSError) as error:
        raise ResultError(f"{path} is damaged: {error} Measure and save it again.") from error
    return result, monitor


def _words(stem: str) -> str:
    return stem.replace("-", " ").replace("_", " ")
