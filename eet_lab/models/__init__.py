"""Models: their shape, their weights, and the one decoder, or the one encoder, that runs them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eet_lab.models.config import ENCODER_PRESETS, PRESETS, SEQ2SEQ_PRESETS, Config
    from eet_lab.models.loading import Model, load

__all__ = ["ENCODER_PRESETS", "PRESETS", "SEQ2SEQ_PRESETS", "Config", "Model", "load"]

_CONFIG = ("ENCODER_PRESETS", "PRESETS", "SEQ2SEQ_PRESETS", "Config")


def __getattr__(name: str) -> Any:
    """Import what is asked for, when it is asked for: texts become tokens, and tokens texts, without torch."""
    if name not in __all__:
        raise AttributeError(f"module 'eet_lab.models' has no attribute {name!r}")
    return getattr(import_module(f"eet_lab.models.{'config' if name in _CONFIG else 'loading'}"), name)
