"""Comparisons and ladders of training as tables, in words."""

from __future__ import annotations

from html import escape

from eet_lab.bench.paired import memory_words
from eet_lab.bench.train_compare import TrainComparison, TrainedSide, TrainLadder, TrainRung
from eet_lab.figures import theme
from eet_lab.technique import known
from eet_lab.words import amount, brief, visible

SAME = {"identical": "good", "within rounding": "good", "different": "bad"}


def comparison_table(found: TrainComparison, where: str = "") -> str:
    """Milliseconds a step of both, whether they can be told apart, and whether their losses are the same.

    `where` is a badge beside the times.
    """
    change = found.change
    sides = {"no technique": found.baseline, visible(found.selection.recipe.replace(",", ", ")): found.selection}
    times = {} if change is None else dict(zip(sides, (change.before, change.after), strict=True))
    on_gpu = found.baseline.peak_bytes is not None
    rows = [[name, *_cells(side, times.get(name))] for name, side in sides.items()]
    return theme.table(("", "ms a step", "tokens/s", *["peak memory"] * on_gpu), rows, _told(found, where))


def _told(found: TrainComparison, where: str) -> str:
    """What a comparison says, in lines: of a step, of memory, of the loss."""
    change = found.change
    words = [] if change is None else [f"A step: {theme.badge(change.words('ms'), change.kind)} {where}"]
    if found.baseline.peak_bytes is not None and found.selection.peak_bytes is not None:
        less = memory_words(found.baseline.peak_bytes, found.selection.peak_bytes)
        words.append(f"Peak memory: {theme.badge(less)}")
    words.append(f"Same loss curve? {theme.badge(found.verdict, SAME[found.verdict])} {escape(found.explanation)}")
    return "".join(f"<div>{line}</div>" for line in words)


def ladder_table(found: TrainLadder, where: str = "") -> str:
    """What each technique brings a step on the way up, and what the full recipe is without it; then all beside none."""
    none, change = found.whole.baseline, found.whole.change
    on_gpu = none.peak_bytes is not None
    first = [brief(change.before) if change else "–", "", *[amount(none.peak_bytes or 0)] * on_gpu, ""]
    told = ("ms a step", "change", *["peak memory"] * on_gpu, "same loss curve?")
    added = theme.table(("added one by one", *told), [["no technique", *first], *map(_rung, found.rungs)])
    left_out = [_rung(rung, without=True) for rung in found.left_out]
    whole = f"<div>All of them beside none:</div>{_told(found.whole, where)}"
    return added + (theme.table(("all of them but", *told), left_out, whole) if left_out else whole)


def _rung(rung: TrainRung, without: bool = False) -> list[str]:
    """A technique's line: what it is compared with has all else that is there."""
    found, along = rung.found, [known(name).title for name in rung.along]
    name = " and ".join([rung.title, *along])
    times = ["–", "–"] if found.change is None else [brief(found.change.after), found.change.words("ms")]
    peak = found.selection.peak_bytes
    return [name if without else f"+ {name}", *times, *([] if peak is None else [amount(peak)]), found.verdict]


def _cells(side: TrainedSide, ms: float | None) -> list[str]:
    num_tokens = side.steps[-1].num_tokens if side.steps else 0
    cells = ["–", "–"] if ms is None else [brief(ms), brief(num_tokens / ms * 1e3)]
    return cells + ([] if side.peak_bytes is None else [amount(side.peak_bytes)])
