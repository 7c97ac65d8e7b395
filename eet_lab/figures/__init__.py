"""What results look like: plotly figures that stay when the kernel is gone, live charts, and pieces of HTML."""

from __future__ import annotations

from eet_lab.figures.results import plot

__all__ = ["plot"]
