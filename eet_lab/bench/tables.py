"""Results as tables: numbers for pandas, one layout in words for notebooks (HTML) and terminals (text)."""

from __future__ import annotations

import html as markup
import unicodedata
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from eet_lab.bench.metrics import ENERGY, MEMORY_PARTS, PEAK, PERPLEXITY, STEADY_RUNS, TIMES, MiB
from eet_lab.words import counted, plain, signed

if TYPE_CHECKING:
    from eet_lab.bench.measured import Environment, Measurement, Perplexity, Spread
    from eet_lab.bench.results import Comparison, Ladder, Rung

Rows = list[list[str]]


def frame(result: Any) -> Any:
    """One row per measurement, indexed by recipe (and technique, for a ladder)."""
    import pandas as pd

    if hasattr(result, "rungs"):
        groups = [("added", r) for r in result.rungs] + [("left out", r) for r in result.left_out]
        records = [_rung_record(how, rung) for how, rung in groups]
        return pd.DataFrame.from_records(records, index=["how", "technique"])
    runs = {"baseline": result.baseline, "selection": result.selection}
    if result.watched is not None:
        runs["watched"] = result.watched
    return pd.DataFrame.from_records([{"run": name} | _record(m) for name, m in runs.items()], index="run")


def layout(result: Any) -> tuple[str, Rows, list[str]]:
    """A title, a table whose first row is its head, and remarks below it."""
    return _ladder(result) if hasattr(result, "rungs") else _comparison(result)


def text(result: Any) -> str:
    """Columns aligned by spaces."""
    title, rows, remarks = layout(result)
    return "\n".join([title, "", *aligned(rows), "", *remarks])


def aligned(rows: Rows) -> list[str]:
    """Lines with a rule below the first."""
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    head, *body = ("  ".join(map(_padded, row, widths, range(len(row)))).rstrip() for row in rows)
    return [head, "-" * len(head), *body]


def html(result: Any) -> str:
    """The same table as HTML; everything that came from outside is escaped."""
    title, (head, *body), remarks = layout(result)
    cells = [_html_row("th", head)] + [_html_row("td", row) for row in body]
    notes = "".join(f"<li>{markup.escape(remark)}</li>" for remark in remarks)
    return (
        f'<div class="eet-result"><b>{markup.escape(title)}</b>'
        f"<table><thead>{cells[0]}</thead><tbody>{''.join(cells[1:])}</tbody></table><ul>{notes}</ul></div>"
    )


def _comparison(result: Comparison) -> tuple[str, Rows, list[str]]:
    a, b = result.baseline, result.selection
    rows: Rows = [["", a.recipe, b.recipe, "change"]]
    for metric in TIMES:
        before, after = metric.read(a), metric.read(b)
        if before is not None and after is not None:
            told = (spread(times, unit=metric.unit) for times in (before, after))
            rows.append([metric.name, *told, _ratio(before.p50, after.p50)])
    for key, name in {"peak": PEAK.name, **{key: f"  {part}" for key, part in MEMORY_PARTS.items()}}.items():
        before, after = a.memory[key], b.memory[key]
        if before or after:
            rows.append([name, _mib(before), _mib(after), _signed_mib(after - before)])
    if a.joules_per_token is not None and b.joules_per_token is not None:
        joules = a.joules_per_token, b.joules_per_token
        rows.append([ENERGY.name, *(f"{j:.3g} {ENERGY.unit}" for j in joules), _ratio(*joules)])
    before, after = PERPLEXITY.read(a), PERPLEXITY.read(b)
    if before is not None and after is not None:
        rows.append([PERPLEXITY.name, f"{before:.2f}", f"{after:.2f}", _percent(before, after)])
    remarks = [f"Same output? {result.sameness.verdict}. {result.sameness.explanation}", *_quality(a, b)]
    if result.watching_cost_percent is not None:
        remarks.append(f"Watching it live changed a run's time by {result.watching_cost_percent:+.1f} %.")
    if b.cost is not None and b.cost.floor_ms is not None and b.tpot_ms is not None:
        remarks.append(
            f"A decode step of {b.recipe} must read at least {_mib(b.cost.step_bytes)}: {plain(b.cost.floor_ms)} ms at "
            f"the {b.cost.ceiling_gb_per_s:.0f} GB/s of a streaming read. It took "
            f"{plain(b.tpot_ms.p50)} ms, "
            f"{_share(b.cost.floor_ms / b.tpot_ms.p50)}"
        )
    remarks += dict.fromkeys(f"Warning: {warning}" for m in (a, b) for warning in m.warnings)
    return _title(result.environment, result.workload, a), rows, [*remarks, _how(a), _where(result.environment)]


def _ladder(result: Ladder) -> tuple[str, Rows, list[str]]:
    head = ["", "TTFT ms", "TPOT ms", "total ms", "its own ms", "peak MiB", "its own MiB", "same output"]
    rows: Rows = [head]
    rows += [_rung_row("" if i == 0 else "+ ", rung, first=i == 0) for i, rung in enumerate(result.rungs)]
    rows += [_rung_row("all but ", rung) for rung in result.left_out]
    measured = [rung.measurement for rung in (*result.rungs, *result.left_out)]
    remarks = ["Stopped early: what is here was measured, the rest is missing."] if result.partial else []
    remarks += [
        "'+' adds to the row above, and these add up; 'all but' is the full recipe without one, and these do not."
    ]
    remarks += _quality(measured[0], measured[len(result.rungs) - 1]) if measured else []
    remarks += _host_bound(result)
    remarks += dict.fromkeys(f"Warning: {warning}" for m in measured for warning in m.warnings)
    title = _title(result.environment, result.workload, measured[0] if measured else None)
    return title, rows, [*remarks, *([_how(measured[0])] if measured else []), _where(result.environment)]


def _host_bound(result: Ladder) -> list[str]:
    """What a GPU's times are worth where each token waits for the host; and the rungs that are much slower there."""
    waiting = [rung for rung in result.rungs if "cuda_graphs" not in rung.measurement.recipe]
    timed = [rung for rung in waiting if rung.measurement.tpot_ms]
    if result.environment.device_kind != "cuda" or not timed:
        return []
    said = [
        "Before CUDA graphs a token takes what the host takes to launch it, which moves with all else that runs there."
    ]
    if slower := [*filter(None, (_slower(before, rung) for before, rung in pairwise(timed)))]:
        said += [*slower, "Launches were counted on a small model; the GPU's profiler finds up to a fifth more."]
    if alike := [
        rung.title for before, rung in pairwise(timed) if _waiting(rung)[1] == _waiting(before)[1] is not None
    ]:
        said.append(
            f"As many launches a token as the rung before: {', '.join(alike)}. By what its time per token differs from "
            "that rung's, the host varies."
        )
    return said


def _slower(before: Rung, rung: Rung) -> str:
    """Why a rung takes much longer than the one before, as far as its launches tell; nothing where it does not."""
    (old_ms, old), (ms, new) = _waiting(before), _waiting(rung)
    steady = STEADY_RUNS["cuda"] * old_ms
    if ms <= steady:
        return ""
    said = f"+ {rung.title} took {plain(ms)} ms a token, the rung before {plain(old_ms)}: "
    if old is None or new is None:
        unknown = "it launches more, which was not counted, or the host slowed down"
        return f"Warning: {said}{unknown}. Measure again before you believe it."
    launches = f"{plain(new)} launches a token, where that one has {plain(old)}"
    if ms <= steady * new / old:
        return f"{said}{launches}."
    return f"Warning: {said}{launches}; the host slowed down more likely. Measure again before you believe it."


def _waiting(rung: Rung) -> tuple[float, float | None]:
    """Milliseconds a token, and how much Python launches for it."""
    measured = rung.measurement
    assert measured.tpot_ms is not None
    return measured.tpot_ms.p50, measured.cost.launches_per_token if measured.cost else None


def _quality(before: Measurement, after: Measurement) -> list[str]:
    """What a lossy recipe did to the perplexity; nothing where none is lossy."""
    a, b = before.perplexity, after.perplexity
    return [] if a is None or b is None else [perplexities(a, b)]


def perplexities(before: Perplexity, after: Perplexity) -> str:
    """One beside the other, or why that cannot be told."""
    if before.value is None or after.value is None:
        return f"Perplexity is not shown: {before.why_not or after.why_not}."
    return (
        f"Perplexity {before.value:.2f} -> {after.value:.2f} ({_percent(before.value, after.value)}) on "
        f"{after.num_tokens:,} tokens of {after.text}; lower is better."
    )


def _rung_row(sign: str, rung: Rung, first: bool = False) -> list[str]:
    m = rung.measurement
    along = f" (with {', '.join(rung.along)})" if rung.along else ""
    times = [plain(s.p50) if s else "–" for s in (m.ttft_ms, m.tpot_ms, m.total_ms)]
    own = "" if first or rung.delta_ms is None else signed(rung.delta_ms.p50)
    peak, own_bytes = f"{m.memory['peak'] / MiB:.1f}", "" if first else _signed(rung.delta_bytes / MiB)
    return [f"{sign}{rung.title}{along}", *times, own, peak, own_bytes, rung.sameness.verdict]


def _record(m: Measurement) -> dict[str, Any]:
    record: dict[str, Any] = {"recipe": m.recipe}
    for name in ("ttft_ms", "tpot_ms", "total_ms", "tokens_per_s"):
        record |= {name: _p50(getattr(m, name))}
        record |= {f"{name}_{p}": getattr(getattr(m, name), p, None) for p in ("p20", "p80")}
    record |= {f"{key}_bytes": num_bytes for key, num_bytes in m.memory.items()}
    record |= {"joules_per_token": m.joules_per_token, "perplexity": PERPLEXITY.read(m)}
    return record | {"prepare_s": m.prepare_s, "repeats": m.repeats}


def _rung_record(how: str, rung: Rung) -> dict[str, Any]:
    own: dict[str, Any] = {"how": how, "technique": rung.technique or "baseline", "along": ", ".join(rung.along)}
    own |= {name: _p50(getattr(rung, name)) for name in ("delta_ms", "delta_ttft_ms", "delta_tpot_ms")}
    return own | {"delta_bytes": rung.delta_bytes, "verdict": rung.sameness.verdict} | _record(rung.measurement)


def _p50(spread: Spread | None) -> float | None:
    return None if spread is None else spread.p50


def spread(times: Spread, scale: float = 1, unit: str = "") -> str:
    """The median and the range, which a single repeat does not have."""
    p20, p50, p80 = (plain(value * scale) for value in (times.p20, times.p50, times.p80))
    median = f"{p50} {unit}".rstrip()
    return median if p20 == p80 else f"{median} ({p20}–{p80})"


def _title(environment: Environment, workload: str, m: Measurement | None) -> str:
    repeats = f", {counted(m.repeats, 'repeat')}" if m else ""
    recorded = f", recorded {environment.date[:10]}" if environment.recorded else ""
    where = f"{environment.dtype} on {environment.device}"
    return f"{environment.model_label}: {workload}, {where}{repeats}{recorded}"


def _how(m: Measurement) -> str:
    counted = {"measured": "as torch's counters saw it", "planned": "what the engine asks for, by plan"}
    times = "medians with the middle 60 % of the repeats" if m.repeats > 1 else "those of a single repeat"
    return f"Times are {times}; memory is {counted[m.memory_source]}."


def _where(environment: Environment) -> str:
    return f"{'Recorded' if environment.recorded else 'Measured'} on {environment.origin}."


def _share(reached: float) -> str:
    if reached <= 1:
        return f"{reached:.0%} of that rate."
    return "faster than that: caches hold a part of it, or the processor was shared when the rate was measured."


def _ratio(before: float, after: float) -> str:
    return f"× {after / before:.3g}" if before else "–"


def _percent(before: float, after: float) -> str:
    return f"{(after / before - 1) * 100:+.2f} %"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MiB:.1f} MiB"


def _signed_mib(num_bytes: int) -> str:
    return f"{_signed(num_bytes / MiB)} MiB" if num_bytes else "0"


def _signed(value: float) -> str:
    """To one decimal; what would then be nothing keeps its first digit, so that a change is seen as one."""
    if not value:
        return "0"
    return f"{value:+.1f}" if abs(value) >= 0.05 else f"{value:+.1g}"


def _html_row(tag: str, cells: list[str]) -> str:
    first, *rest = (markup.escape(cell) for cell in cells)
    if tag == "th":
        rest = [cell.replace(",", ",<wbr>") for cell in rest]  # recipes break between techniques
    indent = "1.5em" if cells[0].startswith("  ") else "0.5em"
    name = f'<th style="text-align:left;padding-left:{indent}">{first.strip()}</th>'
    return f"<tr>{name}{''.join(f'<{tag}>{cell}</{tag}>' for cell in rest)}</tr>"


def _width(cell: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in cell)


def _padded(cell: str, width: int, column: int) -> str:
    """The first column stands on the left, numbers on the right."""
    space = " " * (width - _width(cell))
    return space + cell if column else cell + space
