"""Models: their shape, their weights, and the one decoder that runs them."""

from eet_lab.models.config import PRESETS, Config
from eet_lab.models.load import Model, load

__all__ = ["PRESETS", "Config", "Model", "load"]
