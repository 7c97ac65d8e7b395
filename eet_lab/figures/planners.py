"""Planners and pools side by side on one trace: what each holds, how far from the lower bound, at what price."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import plotly.graph_objects as go

from eet_lab.errors import EETError, first_line
from eet_lab.figures import theme
from eet_lab.memory import POOLS, DriverCalls, Lifetime, Plan
from eet_lab.memory.replays import Replay
from eet_lab.words import MiB, ms_words, sized

POOL_HEAD = ("pool", "mean held", "most held", "× lower bound", "allocations + frees", "new bytes per request")
HEAD = ("planner", "held", "× lower bound", "driver calls", "bytes allocated", "planning")


@dataclass(frozen=True)
class Placed:
    """One request, placed by a fresh pool. `plan` is None where the pool cannot, and `why` says why not."""

    name: str
    plan: Plan | None
    calls: DriverCalls
    planning_ms: float
    why: str = ""


def side_by_side(lifetimes: Sequence[Lifetime], names: Iterable[str] = tuple(POOLS)) -> list[Placed]:
    """The same lifetimes, placed by a fresh pool of each name. Takes as long as the slowest of them."""
    return [_placed(name, lifetimes) for name in names]


def _placed(name: str, lifetimes: Sequence[Lifetime]) -> Placed:
    with suppress(EETError):
        POOLS[name]().place(lifetimes[:2])  # what only the first call of a process takes, such as a solver's import
    pool, begun = POOLS[name](), time.perf_counter()
    try:
        plan, why = pool.place(lifetimes), ""
    except EETError as error:  # a pool that ends here, or a solver that is not installed
        plan, why = None, first_line(error)
    return Placed(name, plan, pool.calls, (time.perf_counter() - begun) * 1e3, why)


def lines(placed: Sequence[Placed]) -> list[list[str]]:
    """A table's rows, under HEAD."""
    rows = []
    for each in placed:
        if each.plan is None:
            rows.append([each.name, each.why, "", "", "", ""])
            continue
        held, bound = each.plan.footprint_bytes, each.plan.lower_bound_bytes
        calls = each.calls.allocations + each.calls.frees
        asked, took = sized(each.calls.allocated_bytes), ms_words(each.planning_ms)
        rows.append([each.name, sized(held), f"{held / max(bound, 1):,.3f}", f"{calls:,}", asked, took])
    return rows


def pool_lines(replays: Mapping[str, Replay]) -> list[list[str]]:
    """A table's rows, under POOL_HEAD: pools on one stream of requests."""
    rows = []
    for name, each in replays.items():
        most, bound = max(each.footprint_bytes, default=0), max(each.lower_bound_bytes, default=0)
        ended = f" (ended at request {len(each.served) + 1})" if each.ended else ""
        calls = f"{each.calls.allocations:,} + {each.calls.frees:,}"
        mean, new = (sized(each.mean_footprint_bytes), sized(each.new_bytes_per_request)) if each.served else ("", "")
        rows.append([name + ended, mean, sized(most), f"{most / max(bound, 1):,.2f}", calls, new])
    return rows


def footprints(placed: Sequence[Placed], title: str = "") -> go.Figure:
    """A bar for each planner, against the bytes that are alive at once; what is far off runs out of the figure."""
    done = [each for each in placed if each.plan is not None]
    held = {each.name: each.plan.footprint_bytes for each in done if each.plan}
    bound = max((each.plan.lower_bound_bytes for each in done if each.plan), default=0)
    fig = theme.figure(
        title or f"Held by each planner; alive at once: {sized(bound)}", height=120 + 30 * len(done), bargap=0.35
    )
    end = 1.3 * max((size for size in held.values() if size <= 3 * bound), default=bound) / MiB
    fig.add_bar(
        y=list(held), x=theme.rounded(size / MiB for size in held.values()), orientation="h",
        marker={"color": [theme.GAIN if size == bound else theme.SELECTION for size in held.values()]},
        hovertemplate=f"%{{y}}: %{{x:{theme.DIGITS}}} MiB<extra></extra>", showlegend=False,
    )  # fmt: skip
    for name, size in held.items():
        fits = size / MiB < 0.86 * end
        fig.add_annotation(
            y=name, x=size / MiB if fits else end, text=f"{sized(size)}{'' if fits else ' ▸'}", showarrow=False,
            xanchor="left" if fits else "right", xshift=4 if fits else -4,
            font={"color": None if fits else "#fff", "size": 11},
        )  # fmt: skip
    fig.add_vline(x=bound / MiB, line={"color": theme.INK, "dash": "dot", "width": 2})
    fig.update_yaxes(autorange="reversed", showgrid=False)
    return fig.update_xaxes(title="MiB; dotted: the lower bound", range=[0, end])
