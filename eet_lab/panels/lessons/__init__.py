"""Lessons: what they are made of (predictions, pictures, source, exercises), and one module for each notebook."""

from __future__ import annotations

from eet_lab.panels.lessons.exercise import Exercise, Verdict
from eet_lab.panels.lessons.prediction import Prediction
from eet_lab.panels.lessons.show import Shown, source
from eet_lab.panels.packing import packing
from eet_lab.panels.pictures import mask_heatmap, token_matrix

__all__ = [
    "Exercise",
    "Prediction",
    "Shown",
    "Verdict",
    "mask_heatmap",
    "packing",
    "source",
    "token_matrix",
]
