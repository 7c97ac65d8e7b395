"""What `eet-lab simulate` prints: a line for each policy."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from eet_lab.scheduling.cost import CostTable
from eet_lab.scheduling.served import Served
from eet_lab.scheduling.sweep import FULL
from eet_lab.scheduling.traffic import Traffic
from eet_lab.words import aligned, brief, counted, visible

FEW = 30
"""Requests below which the last ones' own time may take much of the whole."""


def served_table(found: Sequence[Served], traffic: Traffic, table: CostTable, limit_ms: float | None) -> str:
    """Policies on one traffic."""
    times = {"TTFT": "ttft_ms", "TPOT": "tpot_ms"} if table.kind == "decoder" else {}
    times["end to end"] = "e2e_ms"
    head = ["", "requests/s", "tokens/s", "busy %", "pads %", "rows a pass"]
    head += [f"{name} ms p50 / p95 / p99" for name in times]
    cells = [head + ([f"within {brief(limit_ms)} ms, /s"] if limit_ms else [])]
    for each in found:
        rates = [brief(each.requests_per_s), brief(each.tokens_per_s)]
        shares = [f"{100 * each.busy:.0f}", f"{100 * each.waste:.0f}", brief(float(each.passes.rows.mean()))]
        waits = [" / ".join(map(brief, each.percentiles[key].values())) or "–" for key in times.values()]
        good = [brief(each.goodput(e2e_ms=limit_ms))] if limit_ms else []
        cells.append([each.policy, *rates, *shares, *waits, *good])
    is_told = len(traffic) >= FEW
    behind = [each for each in found if is_told and each.busy > FULL and each.requests_per_s < traffic.rate]
    names = ", ".join(each.policy for each in behind)
    said = f"Busy near 100 % ({names}): more came than could be served, and waiting grows for as long as it lasts."
    came = f"{counted(len(traffic), 'request')} came"
    came = f"{came}, {brief(traffic.rate)} a second" if isfinite(traffic.rate) else came
    return "\n".join(
        [
            visible(traffic.name),
            "",
            *aligned(cells),
            "",
            f"{came}. Simulated with times of {table.source}.",
            *([said] if behind else []),
        ]
    )
