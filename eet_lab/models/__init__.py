"""Models: their shape, their weights, and the one decoder, or the one encoder, that runs them."""

from eet_lab.models.config import ENCODER_PRESETS, PRESETS, Config
from eet_lab.models.load import Model, load

__all__ = ["ENCODER_PRESETS", "PRESETS", "Config", "Model", "load"]
