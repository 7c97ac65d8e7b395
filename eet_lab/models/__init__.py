"""Models: their shape, their weights, and the one decoder, or the one encoder, that runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eet_lab.imports import on_demand

if TYPE_CHECKING:
    from eet_lab.models.config import ENCODER_PRESETS, PRESETS, SEQ2SEQ_PRESETS, Config
    from eet_lab.models.loading import Model, load

__all__ = ["ENCODER_PRESETS", "PRESETS", "SEQ2SEQ_PRESETS", "Config", "Model", "load"]

_HOMES = {
    **dict.fromkeys(("ENCODER_PRESETS", "PRESETS", "SEQ2SEQ_PRESETS", "Config"), "eet_lab.models.config"),
    **dict.fromkeys(("Model", "load"), "eet_lab.models.loading"),
}
"""What needs torch, without which texts become tokens, and tokens texts."""

__getattr__ = on_demand(__name__, _HOMES)
