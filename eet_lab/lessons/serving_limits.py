"""Lesson 7, second part: answers of many tokens, what policies ignore, and TurboTransformers' kernels."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from eet_lab.bench.rows import Row
from eet_lab.figures.served_batches import batches
from eet_lab.lessons import recorded
from eet_lab.lessons.prediction import Prediction, after_prediction
from eet_lab.lessons.show import Shown, table, there
from eet_lab.lessons.variable_length_serving import (
    LOAD,
    NAIVE,
    PACKED,
    POLICIES,
    ROWS,
    example,
    served,
    traffic,
    where,
)
from eet_lab.scheduling.cost import Costs, CostTable
from eet_lab.scheduling.cost_files import load_cost
from eet_lab.scheduling.policies import ContinuousBatching, TokenBudget
from eet_lab.scheduling.policy import BasePolicy, Plan, W
from eet_lab.scheduling.served import Served
from eet_lab.scheduling.simulator import simulate_traffic
from eet_lab.scheduling.traffic import Gamma, LogNormal, make_traffic
from eet_lab.words import brief, percent

GROUPS, JOINING = "Packed groups", "Continuous batching"
ANSWERING = {
    GROUPS: TokenBudget(budget=1024, max_rows=ROWS),
    JOINING: ContinuousBatching(max_rows=ROWS, budget=256, chunk=128),
}
ASKED = make_traffic(150, Gamma(2.5), LogNormal(40, 0.8, 300), LogNormal(40, 0.9, 300))
"""Questions to a model that generates: prompts and answers are short mostly, and long at times."""
WINDOW_MS = (8000.0, 11000.0)
DEADLINE_MS = 2000.0
OVER = 1.3
BURSTS = 4.0


@cache
def generating() -> CostTable:
    """What passes of the demo model took on a CPU."""
    return load_cost("demo-cpu")


@cache
def answered(name: str) -> Served:
    """The questions as one of ANSWERING serves them."""
    return simulate_traffic(ASKED, ANSWERING[name], generating())


@after_prediction
def continuous(guess: Prediction) -> Shown:
    """Groups that end with their longest answer, and requests that join, on the same questions."""
    runs = {name: answered(name) for name in ANSWERING}
    rows = []
    for name, run in runs.items():
        first, token, end = (run.percentiles[key] for key in ("ttft_ms", "tpot_ms", "e2e_ms"))
        rows.append([name, *(brief(each[p]) for each in (first, token, end) for p in ("p50", "p99"))])
    groups, joining = (run.percentiles for run in runs.values())
    slower = joining["tpot_ms"]["p50"] / groups["tpot_ms"]["p50"] - 1
    price = ""
    if slower > 0:
        price = f"The median time per token is {percent(slower)} longer: prompts are read beside answers."
    head = ["", *(f"{name} {p} ms" for name in ("TTFT", "TPOT", "end to end") for p in ("p50", "p99"))]
    return Shown(
        where(generating()),
        batches(runs, "Rows of each pass: three seconds of the same questions", WINDOW_MS, height="rows"),
        table(head, rows),
        "A model that generates makes a pass for each token of an answer. A packed group has no pads, but it ends with "
        "its longest answer: its boxes become lower, and those who come meanwhile wait. With continuous batching a "
        "request joins as soon as a row is free (lesson 6), so the first token of half of the requests comes after "
        f"{brief(joining['ttft_ms']['p50'])} ms and not {brief(groups['ttft_ms']['p50'])}, and of 99 of 100 after "
        f"{brief(joining['ttft_ms']['p99'])} and not {brief(groups['ttft_ms']['p99'])}. {price}",
    )


@dataclass(frozen=True)
class ShortestFirst(BasePolicy):
    """Run the shortest of all that wait together, packed.

    It optimizes how soon most are served; long requests starve.
    """

    name: ClassVar[str] = "shortest_first"
    title: ClassVar[str] = "Shortest first"
    is_packed: ClassVar[bool] = True

    def next(self, waiting: Collection[W], now_ms: float, costs: Costs) -> Plan[W]:
        return Plan([sorted(waiting, key=lambda each: each.length)[:ROWS]])


def by_length(run: Served) -> tuple[float, float]:
    """The longest that one of the shortest tenth took, and one of the longest tenth, in ms."""
    low, high = np.percentile(run.traffic.lengths, (10, 90))
    short, long = run.traffic.lengths <= low, run.traffic.lengths >= high
    return float(run.e2e_ms[short].max()), float(run.e2e_ms[long].max())


@cache
def shortest_first() -> Served:
    """The lesson's texts, far more than can be served, the shortest first."""
    return simulate_traffic(traffic(OVER), ShortestFirst(), example())


def in_time(run: Served) -> float:
    """The share of the requests that are answered before the deadline."""
    return float((run.e2e_ms <= DEADLINE_MS).mean())


@after_prediction
def ignored(guess: Prediction) -> Shown:
    """Starvation, deadlines and bursts: what policies do not look at."""
    runs = {name: served(name, OVER) for name in POLICIES if name != NAIVE} | {ShortestFirst.title: shortest_first()}
    rows = []
    for name, run in runs.items():
        bursts = percent(in_time(served(name, LOAD, BURSTS))) if name in POLICIES else ""
        half = brief(run.percentiles["e2e_ms"]["p50"])
        rows.append([name, half, *map(brief, by_length(run)), percent(in_time(run)), bursts])
    _, starved = by_length(shortest_first())
    packed = float(runs[PACKED].e2e_ms.max())
    return Shown(
        table(
            [
                f"load {percent(OVER)}", "p50 ms", "longest of the shortest tenth, ms",
                "longest of the longest tenth, ms", f"within {DEADLINE_MS / 1e3:.0f} s",
                f"within {DEADLINE_MS / 1e3:.0f} s, load {percent(LOAD)} in bursts",
            ],
            rows,
        ),
        f"Starvation: of far more than can be served, the shortest first answers {percent(in_time(shortest_first()))} "
        f"in time, more than all others. A long text pays for it: it waits for up to {brief(starved / 1e3)} s, until "
        f"no shorter one comes. Packed in the order of arrival, none takes more than {brief(packed / 1e3)} s. No "
        "policy of this lab starves anybody: the oldest is in every plan. But the dynamic program runs all batches of "
        "a plan before it looks again, so what comes meanwhile waits for the whole plan.",
        "Deadlines: no policy here knows any. Under more load than can be served they all go on to answer texts whose "
        f"reader has left; a server refuses such requests at the door instead. Bursts: the last column is the lower "
        f"load, but texts come in bursts (their gaps vary by {brief(BURSTS)} times their mean). The same number of "
        "texts a second is answered, and far fewer in time: an average load says little about a tail.",
    )  # fmt: skip


OPS = tuple(
    [f"norm/{size}" for size in ("t64/c1600", "t8192/c768", "t8192/c1600", "t8192/c4096", "t8192/c12288")]
    + [f"softmax/{size}" for size in ("t64/c1600", "t8192/c768", "t8192/c1600", "t8192/c4096")]
)
ROWS_AT_ONCE = ("eet_lab", "eet_lab-2-rows", "eet_lab-4-rows")


def row_kernels() -> dict[str, dict[str, Row]]:
    """Rows of the H200 by op and provider: ours with 1, 2 and 4 rows at once, and torch."""
    return {op: {row.provider: row for row in recorded.rows() if row.workload == f"op:{op}"} for op in OPS}


def kernels() -> Shown:
    """TurboTransformers' batch reduction: several rows at once, beside one row and torch."""
    found, lines = row_kernels(), []
    ratios, gains = list[float](), list[float]()
    for op, of in found.items():
        us = {name: 1e3 * row.total_ms.p50 for name, row in of.items() if row.total_ms}
        (one, *several), torch = (us[name] for name in ROWS_AT_ONCE), us[f"torch-{op.partition('/')[0]}"]
        floor = of[recorded.OURS].floor_ms or 0.0
        lines.append([op, *map(brief, (one, *several, torch, 1e3 * floor))])
        ratios.append(torch / one)
        gains.append(1 - min(several) / one)
    num_gains = sum(gain > 0 for gain in gains)
    return Shown(
        there([row for of in found.values() for row in of.values()]),
        table(["op (t rows of c)", "1 row at once, us", "2 rows", "4 rows", "torch", "its bytes alone"], lines),
        "TurboTransformers' first idea was a kernel that reduces several rows at once: each shuffle of a reduction "
        "waits for the one before, and a second row gives the processor something to do meanwhile. Our kernels have "
        f"the number of rows as a knob. On this GPU, 2 or 4 rows at once save {percent(max(gains))} at best; in "
        f"{num_gains} of {len(gains)} sizes they save anything, and in the others they lose. With thousands of rows "
        "there are other warps to run while one waits. Read once and kept in registers, one row at a time is "
        f"{brief(min(ratios))} to {brief(max(ratios))} times as fast as torch's kernel. And the softmax of attention, "
        "for which the idea was made, is no kernel of its own any more: fused attention keeps no scores.",
    )
