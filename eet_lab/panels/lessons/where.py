"""Where a number comes from: a note above everything that was measured."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from IPython.display import HTML

from eet_lab.bench import Ladder
from eet_lab.bench.environment import device_name
from eet_lab.bench.rows import Row
from eet_lab.models import Model
from eet_lab.panels.lessons import recorded
from eet_lab.panels.lessons.show import stylesheet


def here(model: Model) -> HTML:
    """Measured on this machine, while the reader looks."""
    if model.device == "cuda":
        return noted(f"Measured now on {device_name('cuda')}.", "gpu")
    return noted(f"Measured now on the CPU: {device_name('cpu')}.", "cpu")


def there(used: Sequence[Row] | Ladder) -> HTML:
    """Measured on another machine: which one, with what, and when."""
    return noted(f"Not this machine: {recorded.label(used)}.", "recorded")


def noted(words: str, kind: str) -> HTML:
    """A note of where numbers come from: `kind` is "gpu", "cpu" or "recorded"."""
    return HTML(f'{stylesheet()}<div class="eet-where eet-{kind}">{escape(words)}</div>')
