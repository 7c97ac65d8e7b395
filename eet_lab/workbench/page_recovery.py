"""What a cell shows in place of a page that does not come, and the script that shows one that is there after all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anywidget
from IPython import get_ipython
from traitlets import Dict

from eet_lab.figures.script import compact

RUN_AGAIN = """<style>
.jp-OutputArea:not(:has(> * > .jp-OutputArea-output.jupyter-widgets)) > .jp-OutputArea-child:has(> * > .eet-run-again) {
  display: none }
.jp-OutputArea:has(> * > * > .eet-run-again) > * > .jp-OutputArea-output.jupyter-widgets { display: none }
</style>
<p class="eet-run-again" role="status">There is no page here any more: its kernel has ended, or was restarted. Run its
cell again: click the line above it, and press Shift+Enter. Runs that were kept come back.</p>"""
"""An output of its own, seen only in place of ipywidgets' "model not found".

Such an output has the class `jupyter-widgets` itself; else what stands in it has. Only children are asked for, so that
a browser does not look through all of a page of figures after each change of it; and what a rule hides has a class in
it: a browser gives new styles to all below an output, with each token, where only `:has` says what a rule is about.
"""


class PageRecovery(anywidget.AnyWidget):
    """Shows a page that JupyterLab does not show although its widgets are there: its script tells why.

    It is drawn nowhere: the script runs when its model comes, in each window of a browser. `shown` is empty until the
    page was displayed: then its model, the data of its outputs, and the cell that displayed it, with its code.
    """

    shown = Dict().tag(sync=True)
    _esm = compact(Path(__file__).parent / "views" / "page_recovery.js")

    def displayed(self, page: str, outputs: Sequence[Mapping[str, Any]]) -> None:
        """A cell has just displayed the model `page`, in outputs with these data."""
        request: dict[str, Any] = getattr(get_ipython(), "get_parent", dict)()
        cell, code = request.get("metadata", {}).get("cellId", ""), request.get("content", {}).get("code", "")
        self.shown = {"page": page, "outputs": list(outputs), "cell": cell, "code": code}
