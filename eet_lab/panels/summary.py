"""A result in words and large numbers, as HTML. Whatever came from outside is escaped."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

from eet_lab.bench import Comparison, Ladder, Measurement, Sameness, Spread
from eet_lab.panels import theme
from eet_lab.panels.jobs import RunReport

MiB = 2**20

VERDICTS = {"identical": "good", "within rounding": "plain", "different": "bad"}

Read = Callable[[Measurement], "Spread | float | None"]

TILES: list[tuple[str, str, Read, bool]] = [
    ("time to first token", "ms", lambda m: m.ttft_ms, False),
    ("time per output token", "ms", lambda m: m.tpot_ms, False),
    ("end to end", "ms", lambda m: m.total_ms, False),
    ("throughput", "tokens/s", lambda m: m.tokens_per_s, True),
    ("peak memory", "MiB", lambda m: m.memory["peak"] / MiB, False),
    ("energy", "J/token", lambda m: m.joules_per_token, False),
]
"""(what, unit, where it stands, whether more is better)"""


def overview(result: Comparison | Ladder | RunReport) -> str:
    """What a reader should see first."""
    if isinstance(result, RunReport):
        return _run(result)
    if isinstance(result, Ladder):
        return _ladder(result)
    verdict = f'<div class="eet-same">{_verdict(result.sameness)}</div>'
    tiles = _tiles(result.baseline, result.selection, _watching(result))
    return _section(_recorded(result) + tiles + verdict + result._repr_html_())


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
        "and may be off only by what another order of the same sums explains."
    )
    return _section(f'{found}<p class="eet-dim">{how}</p>')


def texts(result: Comparison | Ladder) -> str:
    """What each prompt became."""
    last = result.selection if isinstance(result, Comparison) else result.rungs[-1].measurement
    rows = (
        f'<div class="eet-text"><span class="eet-dim">{escape(prompt)}</span>{escape(text)}</div>'
        for prompt, text in zip(result.prompts, last.texts, strict=False)
    )
    return f"<h3>Text of {escape(last.recipe)}</h3>{''.join(rows)}"


def _ladder(result: Ladder) -> str:
    first, last = result.rungs[0].measurement, result.rungs[-1].measurement
    tiles = _tiles(first, last) if len(result.rungs) > 1 else ""
    return _section(_recorded(result) + tiles + result._repr_html_())


def _run(report: RunReport) -> str:
    run = report.generation
    values: list[tuple[str, float | None, str]] = [
        ("time to first token", run.ttft_ms, "ms"),
        ("time per output token", run.tpot_ms, "ms"),
        ("end to end", run.total_ms, "ms"),
        ("throughput", run.tokens_per_s, "tokens/s"),
        ("arena plan + KV cache", report.planned_bytes / MiB, "MiB"),
    ]
    tiles = "".join(
        f'<div class="eet-tile"><span>{name}</span><b>{value:.4g}</b> {unit}</div>'
        for name, value, unit in values
        if value is not None
    )
    end = "It was stopped; what had been generated stays." if run.cancelled else ""
    note = f"One watched run of {report.recipe}: for numbers to compare, press Compare. {end}"
    return _section(f'<div class="eet-tiles">{tiles}</div>{theme.note(note, "warn" if end else "plain")}')


def _verdict(sameness: Sameness) -> str:
    return theme.badge(f"same output: {sameness.verdict}", VERDICTS[sameness.verdict])


def _tiles(before: Measurement, after: Measurement, more: str = "") -> str:
    tiles = (_tile(name, unit, _number(read(before)), _number(read(after)), more) for name, unit, read, more in TILES)
    return f'<div class="eet-tiles">{"".join(tiles)}{more}</div>'


def _tile(name: str, unit: str, before: float | None, after: float | None, more_is_better: bool) -> str:
    if before is None or after is None:
        return ""
    ratio = (after / before if more_is_better else before / after) if before and after else 1.0
    kind = "good" if ratio > 1.02 else "bad" if ratio < 0.98 else "plain"
    word = f"{ratio:.3g}× better" if kind == "good" else f"{1 / ratio:.3g}× worse" if kind == "bad" else "as before"
    return (
        f'<div class="eet-tile"><span>{name}</span><b>{after:.4g}</b> {unit}'
        f"<em>from {before:.4g} {theme.badge(word, kind)}</em></div>"
    )


def _watching(result: Comparison) -> str:
    if result.watching_cost_percent is None:
        return ""
    return (
        f'<div class="eet-tile"><span>what watching cost</span><b>{result.watching_cost_percent:+.1f}</b> %'
        "<em>the numbers are from runs that nobody watched</em></div>"
    )


def _recorded(result: Comparison | Ladder) -> str:
    e = result.environment
    return (
        theme.note(f"Recorded on {e.device}, {e.date[:10]}; not measured on this machine.", "warn")
        if e.recorded
        else ""
    )


def _number(value: Any) -> float | None:
    return value.p50 if isinstance(value, Spread) else value


def _section(html: str) -> str:
    return f'<div class="eet-overview">{html}</div>'
