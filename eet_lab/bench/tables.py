"""Results as tables: numbers for pandas, one layout in words for notebooks (HTML) and terminals (text)."""

from __future__ import annotations

import html as markup
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from eet_lab.bench.measured import ENERGY, PEAK, PERPLEXITY, STEADY_RUNS, TIMES, p50
from eet_lab.bench.paired import CUT_PAIRS, LEAST_EFFECT, LEAST_PAIRS, SURE_PAIRS, Change, memory_words
from eet_lab.bench.run_memory import MEMORY_PARTS
from eet_lab.technique import registry
from eet_lab.words import (
    MiB,
    aligned,
    amount,
    amounts,
    brief,
    counted,
    ms_words,
    percent,
    plain,
    signed,
    signed_mib,
    times,
    visible,
)

if TYPE_CHECKING:
    from eet_lab.bench.measured import Environment, Measurement, Perplexity, Spread
    from eet_lab.bench.results import Comparison, Ladder, Run, Rung

Rows = list[list[str]]
Record = dict[str, Any]

NOT_TOLD = "What the live view costs cannot be told from noise."
MEMORY_NAMES = {"peak": PEAK.name, **{key: f"  {part}" for key, part in MEMORY_PARTS.items()}}


def frame(result: Any) -> Any:
    """One row per measurement, indexed by recipe (and technique, for a ladder)."""
    if hasattr(result, "rungs"):
        return rungs_frame(map(_rung_record, result.rungs), map(_rung_record, result.left_out))
    if hasattr(result, "measurement"):
        return runs_frame({"watched": _record(result.measurement)})
    runs = {"baseline": result.baseline, "selection": result.selection}
    if result.watched is not None:
        runs["watched"] = result.watched
    return runs_frame({name: _record(m) for name, m in runs.items()})


def runs_frame(records: Mapping[str, Record]) -> Any:
    """A row for each run, by its name."""
    import pandas as pd

    return pd.DataFrame.from_records([{"run": name} | record for name, record in records.items()], index="run")


def rungs_frame(added: Iterable[Record], left_out: Iterable[Record]) -> Any:
    """A row for each rung of a ladder, which its record names by "technique"."""
    import pandas as pd

    groups = {"added": added, "left out": left_out}
    records = [{"how": how} | record for how, group in groups.items() for record in group]
    return pd.DataFrame.from_records(records, index=["how", "technique"])


def layout(result: Any) -> tuple[str, Rows, list[str]]:
    """A title, a table whose first row is its head, and remarks below it."""
    if hasattr(result, "measurement"):
        return _run(result)
    return _ladder(result) if hasattr(result, "rungs") else _comparison(result)


def text(result: Any) -> str:
    """Columns aligned by spaces. What a file may hold for a terminal to obey, such as an escape, is shown instead."""
    title, rows, remarks = layout(result)
    rows = [list(map(visible, row)) for row in rows]
    return "\n".join([visible(title), "", *aligned(rows), "", *map(visible, remarks)])


def html(result: Any) -> str:
    """The same table as HTML; everything that came from outside is escaped."""
    title, (head, *body), remarks = layout(result)
    cells = [_html_row("th", head)] + [_html_row("td", row) for row in body]
    notes = "".join(f"<li>{markup.escape(remark)}</li>" for remark in remarks)
    return (
        f'<div class="eet-result"><b>{markup.escape(title)}</b>'
        f"<table><thead>{cells[0]}</thead><tbody>{''.join(cells[1:])}</tbody></table><ul>{notes}</ul></div>"
    )


def framed(frame: Any, columns: Sequence[str], *remarks: str) -> str:
    """Columns of a DataFrame of which anything is known, as HTML, and remarks below them."""
    notes = "".join(f"<li>{markup.escape(remark)}</li>" for remark in remarks)
    known = frame[[*columns]].dropna(axis="columns", how="all")
    return f"{known.to_html(float_format=brief, na_rep='–')}<ul>{notes}</ul>"


def _run(result: Run) -> tuple[str, Rows, list[str]]:
    m = result.measurement
    rows: Rows = [["", m.recipe]]
    rows += [
        [each.name, spread(times, unit=each.unit, number=brief)]
        for each in TIMES
        if (times := each.read(m)) is not None
    ]
    rows += [[name, amount(m.memory[key])] for key, name in MEMORY_NAMES.items() if m.memory[key]]
    remarks = ["It was stopped; what had been generated stays."] if result.stopped else []
    remarks += ["One watched run, neither checked nor repeated. Use Compare to measure."]
    return _title(result.environment, result.workload, None), rows, [*remarks, _how(m), _where(result.environment)]


def _comparison(result: Comparison) -> tuple[str, Rows, list[str]]:
    a, b = result.baseline, result.selection
    rows: Rows = [["", a.recipe, b.recipe, "change"]]
    for metric in TIMES:
        before, after = metric.read(a), metric.read(b)
        if before is not None and after is not None:
            cells = (spread(times, unit=metric.unit, number=brief) for times in (before, after))
            change = result.all_changes.get(metric.key)
            rows.append([metric.name, *cells, change.words(metric.key) if change else "–"])
    for key, name in MEMORY_NAMES.items():
        before, after = a.memory[key], b.memory[key]
        if before or after:
            rows.append([name, *amounts(before, after), memory_words(before, after)])
    if a.joules_per_token is not None and b.joules_per_token is not None:
        joules = a.joules_per_token, b.joules_per_token
        rows.append([ENERGY.name, *(f"{brief(j)} {ENERGY.unit}" for j in joules), _ratio(*joules)])
    before, after = PERPLEXITY.read(a), PERPLEXITY.read(b)
    if before is not None and after is not None:
        rows.append([PERPLEXITY.name, f"{before:,.2f}", f"{after:,.2f}", _percent(before, after)])
    remarks = [f"Same output? {result.parity.verdict}. {result.parity.explanation}", *_quality(a, b)]
    if result.watching_cost_percent is not None:
        remarks.append(_watching(result.watching_cost_percent, result.watched, b))
    if b.cost is not None and b.cost.floor_ms is not None and b.tpot_ms is not None:
        remarks.append(
            f"A decode step of {b.recipe} must read at least {amount(b.cost.step_bytes)}: {ms_words(b.cost.floor_ms)} "
            f"at the {brief(b.cost.ceiling_gb_per_s or 0.0)} GB/s of a streaming read. It took "
            f"{ms_words(b.tpot_ms.p50)}, {_share(b.cost.floor_ms / b.tpot_ms.p50)}"
        )
    remarks += dict.fromkeys(f"Warning: {warning}" for m in (a, b) for warning in m.warnings)
    how = [_how(a), _how_paired(result.changes), *_few_pairs(result.changes.values())]
    remarks += [*filter(None, how), _where(result.environment)]
    return _title(result.environment, result.workload, a), rows, remarks


def _how_paired(changes: Mapping[str, Change], differences: bool = False) -> str:
    """What an interval is, and what is needed for one; of a table of ratios, or of differences."""
    found = next(iter(changes.values()), None)
    if found is None:
        return "Changes are those of the medians: these runs were not paired, so there are no intervals."
    moved = not differences and any(change.is_of_pairs for change in changes.values())
    pairs = "; where a drift has moved the medians, the median of the pairs' own ratios" if moved else ""
    if not found.is_enough:
        few = f"{counted(found.num_pairs, 'pair')} of runs cannot tell a change from noise: that takes {LEAST_PAIRS}."
        return f"{few} Changes are ratios of the medians{pairs}." if moved else few
    same = "0" if differences else "1 ×"
    wider = (
        f"is widened by {percent(LEAST_EFFECT)} at both ends, because even two engines of one recipe can differ by "
        f'2 %. If it contains {same}, we say "cannot tell apart".'
    )
    if found.num_pairs < SURE_PAIRS:
        wider += f" With fewer than {SURE_PAIRS} pairs we also say so if it is wider than its gap to {same}."
    if differences:
        return (
            f"What is its own is the difference of the medians of {found.num_pairs} pairs, timed in turn. The interval "
            f"comes from a sign test on the pairs, and {wider}"
        )
    return (
        f"Changes are ratios of the medians of {found.num_pairs} pairs, timed in turn{pairs}. The interval comes "
        f"from a sign test on the ratio of each pair, and {wider}"
    )


def _few_pairs(changes: Iterable[Change]) -> list[str]:
    """What would settle a change that cannot be told apart although the medians differ; nothing where none does."""
    pairs = min((change.num_pairs for change in changes if change.needs_pairs), default=0)
    if not pairs:
        return []
    more = f'repeats={CUT_PAIRS}; --repeats {CUT_PAIRS} on the command line; "Pairs of runs" on the page'
    return [f"One slow run widens an interval of {pairs} pairs: more pairs of runs could tell ({more})."]


def _ladder(result: Ladder) -> tuple[str, Rows, list[str]]:
    head = ["", "TTFT ms", "TPOT ms", "total ms", "its own ms", "peak MiB", "its own MiB", "same output"]
    rows: Rows = [head]
    rows += [_rung_row("" if i == 0 else "+ ", rung, first=i == 0) for i, rung in enumerate(result.rungs)]
    rows += [_rung_row("all without ", rung) for rung in result.left_out]
    measured = [rung.measurement for rung in (*result.rungs, *result.left_out)]
    remarks = ["Stopped early: what is here was measured, the rest is missing."] if result.partial else []
    remarks += [
        "'+' adds to the row above, and these add up; 'all without' is the full recipe without one, and these do not."
    ]
    remarks += _quality(measured[0], measured[len(result.rungs) - 1]) if measured else []
    remarks += _details(result)
    remarks += _host_bound(result)
    remarks += dict.fromkeys(f"Warning: {warning}" for m in measured for warning in m.warnings)
    title = _title(result.environment, result.workload, measured[0] if measured else None)
    if measured:
        paired = next((rung.changes for rung in result.rungs[1:]), result.changes)
        own = (rung.change for rung in (*result.rungs[1:], *result.left_out))
        remarks += [_how(measured[0]), _how_paired(paired, differences=True), *_few_pairs(filter(None, own))]
    return title, rows, [*remarks, _where(result.environment)]


def _details(result: Ladder) -> list[str]:
    """What can be told of a rung although its whole run cannot be told apart."""
    signs = [("+", rung) for rung in result.rungs[1:]] + [("all without", rung) for rung in result.left_out]
    told = [
        f"{sign} {rung.title}: {rung.details}, though not the whole run."
        for sign, rung in signs
        if rung.told and rung.change and rung.change.verdict == "cannot tell apart"
    ]
    return [*told, "Each of these two times is judged at half of the level of a whole run."] if told else []


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
            f"As many launches a token as the rung before: {', '.join(alike)}. So what differs in their times per "
            "token is the host's own variation."
        )
    return said


def _slower(before: Rung, rung: Rung) -> str:
    """Why a rung takes much longer than the one before, as far as its launches tell; nothing where it does not."""
    (old_ms, old), (ms, new) = _waiting(before), _waiting(rung)
    steady = STEADY_RUNS["cuda"] * old_ms
    if ms <= steady:
        return ""
    said = f"+ {rung.title} took {ms_words(ms)} a token, the rung before {brief(old_ms)}: "
    if old is None or new is None:
        unknown = "it launches more, which was not counted, or the host slowed down"
        return f"Warning: {said}{unknown}. Measure again before you believe it."
    launches = f"{plain(new)} launches a token, where that one has {plain(old)}"
    if ms <= steady * new / old:
        return f"{said}{launches}."
    return f"Warning: {said}{launches}; more likely, the host slowed down. Measure again before you believe it."


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
        f"Perplexity {before.value:,.2f} -> {after.value:,.2f} ({_percent(before.value, after.value)}) on "
        f"{after.num_tokens:,} tokens of {after.text}; lower is better."
    )


def _rung_row(sign: str, rung: Rung, first: bool = False) -> list[str]:
    m = rung.measurement
    names = [rung.title, *(registry()[name].title if name in registry() else name for name in rung.along)]
    title = sign + " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    times = [brief(s.p50) if s else "–" for s in (m.ttft_ms, m.tpot_ms, m.total_ms)]
    own = "" if first else own_ms(rung)
    peak, own_bytes = brief(m.memory["peak"] / MiB), "" if first else signed_mib(rung.delta_bytes)
    return [title, *times, own, peak, own_bytes, rung.parity.verdict]


def own_ms(rung: Rung) -> str:
    """What a rung takes away or adds: `-367 (-390 to -341)`, or that it cannot be told from noise."""
    delta, change = rung.delta_ms, rung.change
    if delta is None or change is None:  # the baseline, or a file without pairs
        return "" if delta is None else signed(delta.p50, 3)
    if not change.is_enough:
        return f"{signed(delta.p50, 3)}, too few rounds to tell"
    ends = f"{signed(delta.p20, 3)} to {signed(delta.p80, 3)}"
    if change.verdict == "cannot tell apart":
        return f"cannot tell apart ({ends})"
    return f"{signed(delta.p50, 3)} ({ends})"


def _record(m: Measurement) -> Record:
    record: Record = {"recipe": m.recipe}
    for name in ("ttft_ms", "tpot_ms", "total_ms", "tokens_per_s"):
        record |= spread_record(name, getattr(m, name))
    record |= {f"{key}_bytes": num_bytes for key, num_bytes in m.memory.items()}
    record |= {"joules_per_token": m.joules_per_token, "perplexity": PERPLEXITY.read(m)}
    return record | {"prepare_s": m.prepare_s, "repeats": m.repeats}


def spread_record(name: str, found: Spread | None) -> Record:
    """The median by this name, and the range beside it."""
    return {name: p50(found)} | {f"{name}_{p}": getattr(found, p, None) for p in ("p20", "p80")}


def _rung_record(rung: Rung) -> Record:
    own: Record = {"technique": rung.technique or "baseline", "along": ", ".join(rung.along)}
    own |= {name: p50(getattr(rung, name)) for name in ("delta_ms", "delta_ttft_ms", "delta_tpot_ms")}
    own |= {"delta_ms_low": getattr(rung.delta_ms, "p20", None), "delta_ms_high": getattr(rung.delta_ms, "p80", None)}
    own |= {"change": rung.change.verdict if rung.change else None}
    return own | {"delta_bytes": rung.delta_bytes, "verdict": rung.parity.verdict} | _record(rung.measurement)


def spread(times: Spread, scale: float = 1, unit: str = "", number: Callable[[float], str] = plain) -> str:
    """The median and the range, which a single repeat does not have."""
    p20, p50, p80 = (number(value * scale) for value in (times.p20, times.p50, times.p80))
    median = f"{p50} {unit}".rstrip()
    return median if p20 == p80 else f"{median} ({p20} to {p80})"


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
        return f"{percent(reached)} of that rate."
    return "faster than that: caches hold a part of it, or the processor was shared when the rate was measured."


def _watching(cost_percent: float, watched: Measurement | None, unwatched: Measurement) -> str:
    """One watched run beside those that nobody watched: what lies within these, or is even quicker, is noise."""
    if watched is None or watched.total_ms is None or unwatched.total_ms is None:
        return NOT_TOLD
    took, others = watched.total_ms.p50, unwatched.total_ms
    low, high = took / others.p80 / (1 + LEAST_EFFECT), took / others.p20 * (1 + LEAST_EFFECT)
    if low <= 1:
        return NOT_TOLD
    return (
        f"One run had the live view. It took {percent(cost_percent / 100)} longer than the median of the runs without "
        f"it ({brief(100 * (low - 1), 2)} to {percent(high - 1)} longer than most of them). One run is too few to tell "
        "what the live view costs."
    )


def _ratio(before: float, after: float) -> str:
    if not (before and after):
        return "–"
    return f"{times(after / before)} more" if after > before else f"{times(before / after)} less"


def _percent(before: float, after: float) -> str:
    return f"{(after / before - 1) * 100:+.2f} %"


def _html_row(tag: str, cells: list[str]) -> str:
    first, *rest = (markup.escape(cell) for cell in cells)
    if tag == "th":
        rest = [cell.replace(",", ",<wbr>") for cell in rest]  # recipes break between techniques
    indent = "1.5em" if cells[0].startswith("  ") else "0.5em"
    name = f'<th style="text-align:left;padding-left:{indent}">{first.strip()}</th>'
    return f"<tr>{name}{''.join(f'<{tag}>{cell}</{tag}>' for cell in rest)}</tr>"
