"""Finished results: one tab at a time, static figures, and what can be done with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import ipywidgets as W

from eet_lab.bench import Comparison, Ladder
from eet_lab.panels import summary
from eet_lab.panels.figures import kinds, plot
from eet_lab.panels.jobs import RunReport
from eet_lab.panels.memory_tab import MemoryTab
from eet_lab.panels.outputs import rendered

Put = Callable[..., None]

TITLES = {
    "overview": "Overview",
    "latency": "Latency",
    "tokens": "Tokens over time",
    "waterfall": "Who saves what",
    "left_out": "Left out",
    "memory": "Memory",
    "sameness": "Same output?",
}


class ResultsView:
    """Tabs over one Output: a figure is drawn when its tab is open, so a saved notebook carries one and not five."""

    def __init__(self, put: Put, memory: MemoryTab) -> None:
        self.memory = memory
        self.tabs = W.ToggleButtons(options=[("Overview", "overview")]).add_class("eet-tabs")
        self._put, self._setting_tabs = put, False
        self.tabs.observe(self._on_tab, "value")
        self._words = W.HTML()
        self.figure = W.Output().add_class("eet-figure")
        self.save = _button("Save (JSON)", "save", "Everything, to open and replay later", put)
        self.csv = _button("Table (CSV)", "export_csv", "The numbers, for a spreadsheet or pandas", put)
        self.page = _button("Page (HTML)", "export_page", "One page with tables and figures; it works offline", put)
        self.files = W.Dropdown(options=[("no saved results yet", "")], tooltip="Saved and recorded results")
        self.open = _button("Open", "open", "Show it here", put)
        self.replay = _button("Replay", "replay", "Play it again in the live view; nothing is measured", put)
        self.upload = W.FileUpload(accept=".json", multiple=False, description="Load a file…").add_class("eet-quiet")
        self.upload.add_class("eet-upload")
        self.upload.observe(lambda change: put("upload", change.new) if change.new else None, "value")
        self.said = W.HTML()
        keep = W.HBox([self.save, self.csv, self.page]).add_class("eet-buttons")
        again = W.HBox([self.files, self.open, self.replay, self.upload]).add_class("eet-buttons")
        files = W.HBox([keep, again]).add_class("eet-files")
        self.box = W.VBox(
            [
                W.HTML('<div class="eet-section">Results</div>'),
                self.tabs, self._words, self.figure, self.memory.box, files, self.said,
            ]
        ).add_class("eet-panel")  # fmt: skip
        self.show(None)

    def show(self, result: Comparison | Ladder | RunReport | None, tab: str = "overview") -> None:
        """Show a tab of a result (one that it does not have: the overview); None: there is no result yet."""
        can_keep = isinstance(result, (Comparison, Ladder))
        names = ["overview", *_more_tabs(result)]
        tab = tab if tab in names else "overview"
        self._set_tabs(names, tab)
        self.save.disabled = self.csv.disabled = self.page.disabled = not can_keep
        self._words.value = _words(result, tab)
        if isinstance(result, (Comparison, Ladder)) and tab != "overview":
            self.figure.outputs = (rendered(plot(result, tab)),)
        else:
            self.figure.outputs = ()
        (self.memory.open if tab == "memory" else self.memory.close)()

    def _set_tabs(self, names: Sequence[str], tab: str) -> None:
        """New options choose the first of them, and then `tab` is chosen: neither is what a reader has clicked."""
        self._setting_tabs = True
        if names != [name for _, name in self.tabs.options]:
            self.tabs.options = [(TITLES[name], name) for name in names]
        self.tabs.value = tab
        self._setting_tabs = False

    def _on_tab(self, change: Any) -> None:
        if not self._setting_tabs:
            self._put("tab", change.new)

    def offer(self, files: dict[str, Any]) -> None:
        """What can be opened."""
        options = [(name, str(path)) for name, path in files.items()] or [("no saved results yet", "")]
        if options != list(self.files.options):
            self.files.options = options

    def update(self, busy: bool) -> None:
        """Nothing is replayed while something runs."""
        nothing = not self.files.value
        self.open.disabled = self.replay.disabled = busy or nothing
        self.upload.disabled = busy

    def say(self, text: str) -> None:
        self.said.value = f'<div class="eet-dim">{escape(text)}</div>' if text else ""


def _more_tabs(result: Any) -> Sequence[str]:
    if isinstance(result, (Comparison, Ladder)):
        return list(kinds(result))
    return [] if result is None else ["memory"]


def _words(result: Any, tab: str) -> str:
    if result is None:
        return (
            '<div class="eet-empty">Nothing measured yet. <b>Run</b> shows one recipe at work; <b>Compare</b> measures '
            "it against the baseline; <b>Ladder</b> tells which technique saves what.</div>"
        )
    if tab == "overview":
        return summary.overview(result)
    return summary.sameness_story(result) if tab == "sameness" else ""


def _button(label: str, command: str, tip: str, put: Put) -> W.Button:
    button = W.Button(description=label, tooltip=tip).add_class("eet-quiet")
    button.on_click(lambda _: put(command))
    return button
