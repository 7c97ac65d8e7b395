"""A result in words and large numbers, as HTML. Whatever came from outside is escaped."""

from __future__ import annotations

from html import escape
from typing import Any

from eet_lab.bench import Comparison, Ladder, Measurement, Sameness, Spread
from eet_lab.bench.metrics import METRICS, TIMES, Metric, MiB
from eet_lab.panels import theme
from eet_lab.panels.jobs import RunReport
from eet_lab.words import plain

VERDICTS = {
    "identical": ("same output: identical", "good"),
    "within rounding": ("same output: within rounding", "plain"),
    "lossy": ("output: lossy, within its bound", "warn"),
    "different": ("output: different", "bad"),
}
"""The words and the colour of a badge."""


def overview(result: Comparison | Ladder | RunReport) -> str:
    """What a reader should see first."""
    if isinstance(result, RunReport):
        return _run(result)
    if isinstance(result, Ladder):
        return _ladder(result)
    verdict = f'<div class="eet-same">{_verdict(result.sameness)}</div>'
    tiles = _tiles(result.baseline, result.selection, _watching(result))
    return _section(_recorded(result) + tiles + _grown(result) + verdict + result._repr_html_())


def same_output(sameness: Sameness) -> str:
    """The verdict and why."""
    return f'<div class="eet-same">{_verdict(sameness)} {escape(sameness.explanation)}</div>'


def sameness_story(result: Comparison | Ladder) -> str:
    """How the check was made, and what it found for each recipe."""
    if isinstance(result, Comparison):
        found = same_output(result.sameness)
    else:
        rows = (f"<dt>{escape(r.title)}</dt><dd>{same_output(r.sameness)}</dd>" for r in result.rungs[1:])
        found = f"<dl>{''.join(rows)}</dl>"
    how = (
        "A faster engine that says something else is no optimization. Each recipe runs before any timing; its logits, "
        "with the baseline's tokens forced on it where they part, are held against a reference in higher precision, "
        "and may be off only by what another order of the same sums explains. A lossy recipe changes the weights: it "
        "has to compute what plain PyTorch computes with them, and may be off from the baseline by a stated bound."
    )
    return _section(f'{found}<p class="eet-dim">{how}</p>')


def texts(result: Comparison | Ladder) -> str:
    """What each prompt became."""
    if isinstance(result, Ladder) and not result.rungs:
        return ""
    last = result.selection if isinstance(result, Comparison) else result.rungs[-1].measurement
    rows = (
        f'<div class="eet-text"><span class="eet-dim">{escape(prompt)}</span>{escape(text)}</div>'
        for prompt, text in zip(result.prompts, last.texts, strict=False)
    )
    return f"<h3>Text of {escape(last.recipe)}</h3>{''.join(rows)}"


def _ladder(result: Ladder) -> str:
    measured = [rung.measurement for rung in result.rungs]
    tiles = _tiles(measured[0], measured[-1]) if len(measured) > 1 else ""
    return _section(_recorded(result) + tiles + result._repr_html_())


def _run(report: RunReport) -> str:
    run = report.generation
    values: list[tuple[str, float | None, str]] = [(each.name, each.read(run), each.unit) for each in TIMES]
    values.append(("arena plan + KV cache", report.planned_bytes / MiB, "MiB"))
    tiles = "".join(
        f'<div class="eet-tile"><span>{name}</span><b>{plain(value)}</b> {unit}</div>'
        for name, value, unit in values
        if value is not None
    )
    end = "It was stopped; what had been generated stays." if run.cancelled else ""
    note = f"One watched run of {report.recipe}: for numbers to compare, press Compare. {end}"
    return _section(f'<div class="eet-tiles">{tiles}</div>{theme.note(note, "warn" if end else "plain")}')


def _verdict(sameness: Sameness) -> str:
    return theme.badge(*VERDICTS[sameness.verdict])


def _tiles(before: Measurement, after: Measurement, more: str = "") -> str:
    tiles = (_tile(metric, _number(metric.read(before)), _number(metric.read(after))) for metric in METRICS)
    return f'<div class="eet-tiles">{"".join(tiles)}{more}</div>'


def _tile(metric: Metric, before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return ""
    ratio = (after / before if metric.more_is_better else before / after) if before and after else 1.0
    kind = "good" if ratio > 1.02 else "bad" if ratio < 0.98 else "plain"
    word = f"{_times(ratio)} better" if kind == "good" else f"{_times(1 / ratio)} worse"
    word = "as before" if kind == "plain" else word
    return (
        f'<div class="eet-tile"><span>{metric.name}</span><b>{plain(after)}</b> {metric.unit}'
        f"<em>from {plain(before)} {theme.badge(word, kind)}</em></div>"
    )


def _times(ratio: float) -> str:
    return f"{plain(float(f'{ratio:.3g}'))}×"


def _grown(result: Comparison) -> str:
    """Why the peak is higher, where activations are: a technique that saves time may pay with memory."""
    before, after = result.baseline.memory, result.selection.memory
    grown = after.get("activations", 0) - before.get("activations", 0)
    if after["peak"] < 1.02 * before["peak"] or grown < (after["peak"] - before["peak"]) / 2:
        return ""
    return theme.note(
        f"Activations take {grown / MiB:.3g} MiB more: a pass over whole prompts is wider than one over single tokens. "
        "Ladder tells which technique saves and which one pays."
    )


def _watching(result: Comparison) -> str:
    if result.watching_cost_percent is None:
        return ""
    percent = result.watching_cost_percent
    cost = f"<b>{percent:+.1f}</b> %" if percent > 0 else "<b>none</b> seen"
    return (
        f'<div class="eet-tile"><span>what watching cost</span>{cost}'
        "<em>the numbers are from runs that nobody watched</em></div>"
    )


def _recorded(result: Comparison | Ladder) -> str:
    e = result.environment
    if not e.recorded:
        return ""
    return theme.note(f"Recorded on {e.origin}; not measured on this machine.", "warn")


def _number(value: Any) -> float | None:
    return value.p50 if isinstance(value, Spread) else value


def _section(html: str) -> str:
    return f'<div class="eet-overview">{html}</div>'
