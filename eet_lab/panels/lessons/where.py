"""Where a number comes from: a note above everything that was measured."""

from __future__ import annotations

from collections.abc import Sequence

from IPython.display import HTML

from eet_lab.bench import Ladder
from eet_lab.bench.environment import device_name
from eet_lab.bench.rows import Row
from eet_lab.models import Model
from eet_lab.panels import theme
from eet_lab.panels.lessons import recorded


def here(model: Model) -> HTML:
    """Measured on this machine, while the reader looks."""
    if model.device == "cuda":
        return _note(f"Measured now on {device_name('cuda')}.", "good")
    return _note(f"Measured now on the CPU: {device_name('cpu')}.", "warn")


def there(used: Sequence[Row] | Ladder) -> HTML:
    """Measured on another machine: which one, with what, and when."""
    return _note(f"Not this machine: {recorded.label(used)}.", "plain")


def _note(words: str, kind: str) -> HTML:
    return HTML(theme.stylesheet() + theme.note(words, kind))
