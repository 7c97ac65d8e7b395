"""The shelf: the present result, its tabs, and the files that results are kept in. Only the ui thread calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eet_lab.bench import Comparison, Ladder
from eet_lab.errors import ResultError
from eet_lab.panels.jobs import RunReport
from eet_lab.panels.memory_tab import MemoryTab
from eet_lab.panels.recordings import Files, Result, open_file
from eet_lab.panels.results_view import ResultsView
from eet_lab.panels.run_memory import RunMemory

Put = Callable[..., None]


class Shelf:
    """What was measured last, or opened; `tell` says which recording is shown."""

    def __init__(self, folder: Path, put: Put, tell: Callable[[str], None], memory: MemoryTab) -> None:
        self.files = Files(folder)
        self.view = ResultsView(put, memory)
        self.view.offer(self.files.available())
        self.result: Result | RunReport | None = None
        self._monitor: dict[str, Any] = {}
        self._tell = tell

    def put_up(
        self,
        result: Result | RunReport,
        monitor: Mapping[str, Any],
        tab: str = "",
        runs: Mapping[str, RunMemory] | None = None,
    ) -> None:
        """Show a result; `monitor` are the samples of its watched runs, to be saved with it.

        `runs` is what they did with memory, where they ran here and now. Without a `tab` it opens on the overview; who
        looks at memory goes on to do so, run by run.
        """
        self.view.memory.put_up(runs or {})
        self.result, self._monitor = result, dict(monitor)
        self.view.say("")
        stays = "memory" if runs and self.view.tabs.value == "memory" else "overview"
        self.view.show(result, tab or stays)

    def open_chosen(self) -> tuple[Result, dict[str, Any]]:
        """Show the file that is chosen in the picker; ResultError where it cannot be read."""
        return self._open(Path(self.view.files.value))

    def do_tab(self, tab: str) -> None:
        self.view.show(self.result, tab)

    def do_open(self) -> None:
        self.open_chosen()

    def do_save(self) -> None:
        self._kept(self.files.save(self._measured(), self._monitor))

    def do_export_csv(self) -> None:
        self._kept(self.files.export_csv(self._measured()))

    def do_export_page(self) -> None:
        self._kept(self.files.export_page(self._measured()))

    def do_upload(self, uploaded: Any) -> None:
        self.view.upload.value = ()  # a file's content need not be saved with the notebook
        path = self.files.take(uploaded[0]["name"], bytes(uploaded[0]["content"]))
        self._open(path)
        self._kept(path)

    def _open(self, path: Path) -> tuple[Result, dict[str, Any]]:
        result, monitor = open_file(path)
        self.put_up(result, monitor)
        kind, where = type(result).__name__.lower(), result.environment
        self._tell(f"showing a recording: {kind} of {result.workload} on {where.device}, {where.date[:10]}")
        return result, monitor

    def _kept(self, path: Path) -> None:
        self.view.say(f"Written: {path}")
        self.view.offer(self.files.available())

    def _measured(self) -> Result:
        if not isinstance(self.result, (Comparison, Ladder)):
            raise ResultError("There is no result to keep yet: press Compare or Ladder first.")
        return self.result
