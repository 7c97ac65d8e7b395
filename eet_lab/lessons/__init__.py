"""Lessons: what they are made of (predictions, pictures, source, exercises), and one module for each notebook."""

from __future__ import annotations

from eet_lab.lessons.exercise import Exercise
from eet_lab.lessons.prediction import Prediction, measured
from eet_lab.lessons.show import Shown, source

__all__ = ["Exercise", "Prediction", "Shown", "measured", "source"]
