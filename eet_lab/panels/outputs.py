"""Putting things into an Output widget from any thread, without a cell and without plotly's own renderers.

Those embed plotly.js (5 MB) or fetch it from the network; JupyterLab and Voila draw the bare JSON.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

import plotly.graph_objects as go

PLOTLY = "application/vnd.plotly.v1+json"
CONFIG = {"responsive": True, "displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"]}


def rendered(thing: Any) -> dict[str, Any]:
    """One output of a cell: a figure as JSON, a text as a paragraph, else what the thing says of itself."""
    if isinstance(thing, go.Figure):
        data = {PLOTLY: {**json.loads(thing.to_json()), "config": CONFIG}, "text/plain": _title(thing)}
    elif isinstance(thing, str):
        data = {"text/html": f"<p>{escape(thing)}</p>", "text/plain": thing}
    else:
        data = _bundle(thing)
    return {"output_type": "display_data", "data": data, "metadata": {}}


def _bundle(thing: Any) -> dict[str, Any]:
    data = {"text/plain": repr(thing)}
    if hasattr(thing, "_repr_html_"):
        data["text/html"] = thing._repr_html_()
    return data


def _title(fig: go.Figure) -> str:
    return f"Figure: {fig.layout.title.text or 'untitled'}"
