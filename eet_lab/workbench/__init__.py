"""The workbench: one widget that toggles techniques on a model and shows what each does."""

from __future__ import annotations

from eet_lab.workbench.workbench import Workbench

__all__ = ["Workbench"]
