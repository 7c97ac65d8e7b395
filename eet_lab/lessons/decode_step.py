"""One decode step: op by op on this machine and on an H200, and rung by rung as predicted and as measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from operator import add
from statistics import median
from typing import NamedTuple

import plotly.graph_objects as go
from IPython.display import HTML

from eet_lab.bench import Ladder, Spread
from eet_lab.bench.cost import LaunchCost, step_ms
from eet_lab.bench.launches import StepLaunches, around_each, decode_calls, num_kernels
from eet_lab.bench.rows import Row
from eet_lab.bench.timing import Stopwatch
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.figures import theme
from eet_lab.lessons import recorded
from eet_lab.lessons.show import table
from eet_lab.models import Model
from eet_lab.models.config import Config
from eet_lab.models.on_device import on_its_device
from eet_lab.parts import Parts
from eet_lab.technique import Recipe, names_in_all
from eet_lab.techniques import DependentLaunch
from eet_lab.words import MiB, brief, percent

LAYER = ("norm_linear", "attention", "linear_residual", "norm_linear", "linear_residual")
"""The ops of a layer, in order; the first attends to queries, keys and values, the second is the FFN's."""


def everything_on() -> Recipe:
    """All that is not lossy, as on a GPU, whether or not there is one."""
    return Recipe.parse(",".join(names_in_all()), "cuda")


class Timed(NamedTuple):
    """An op of a step: when it began and how long it took, in microseconds, and the bytes that it has to move."""

    op: str
    start_us: float
    took_us: float
    num_bytes: int


@on_its_device
def timed(model: Model, parts: Parts, prompt: Sequence[int], new_tokens: int = 24) -> list[Timed]:
    """Each op of a decode step of one row, in order, timed while the engine runs: the medians of some steps.

    On a GPU by events around each op, so that what is seen is when the device had got there.
    """
    marks: list[tuple[str, int, int]] = []
    clock = Stopwatch(model.device)

    @contextmanager
    def watched(name: str) -> Iterator[None]:
        start = clock.mark()
        yield
        marks.append((name.removeprefix("masked_"), start, clock.mark()))

    engine = Engine(model.decoder, replace(parts, ops=around_each(parts.ops, watched)))
    engine.generate([list(prompt)], Settings(max_new_tokens=new_tokens))
    steps = _steps(marks, clock)[-new_tokens + 4 :]
    moved = decode_calls(model.config, parts, 1, len(prompt) + new_tokens // 2, model.decoder.dtype)
    sizes = [call.read_bytes for call in moved if call.op != "torch"]
    step, end_us = list[Timed](), 0.0
    for size, *each in zip(sizes, *steps, strict=True):
        took_us, start_us = median(mark.took_us for mark in each), end_us + median(mark.gap_us for mark in each)
        step.append(Timed(each[0].op, start_us, took_us, size))
        end_us = start_us + took_us
    return step


class _Mark(NamedTuple):
    op: str
    gap_us: float  # since the end of the op before, within the step
    took_us: float


def _steps(marks: Sequence[tuple[str, int, int]], clock: Stopwatch) -> list[list[_Mark]]:
    """The ops of each step, which begins with its embedding."""
    steps: list[list[_Mark]] = []
    before = 0
    for op, start, end in marks:
        if op == "embed":
            steps.append([])
            before = start
        steps[-1].append(_Mark(op, *(1e3 * clock.between_ms(*pair) for pair in ((before, start), (start, end)))))
        before = end
    return steps


PARTS = ("norm + QKV", "attention", "projection + residual", "norm + FC1 + GELU", "FC2 + residual")
"""The five calls of a layer, in order."""


def step_figure(step: Sequence[Timed], gb_per_s: float) -> go.Figure:
    """Each op of a step as a bar where it ran; what its bytes alone would take is green."""
    names = list(dict.fromkeys(op.op for op in step))
    fig = theme.figure(f"One decode step, {len(step)} ops, as measured here", height=120 + 34 * len(names))
    bytes_us = [min(op.num_bytes / gb_per_s / 1e3, op.took_us) for op in step]
    starts, rest_us = [op.start_us for op in step], [op.took_us - us for op, us in zip(step, bytes_us, strict=True)]
    for name, base, widths, color in (
        ("its bytes, at the streaming rate", starts, bytes_us, theme.GAIN),
        ("the rest of its time", list(map(add, starts, bytes_us)), rest_us, "#f59e0b"),
    ):
        fig.add_bar(
            y=[op.op for op in step], x=theme.rounded(widths), base=theme.rounded(base), orientation="h", name=name,
            marker={"color": color, "line": {"width": 0}}, text=[f"{op.num_bytes / MiB:.2f} MiB" for op in step],
            textposition="none", hovertemplate="%{y}: %{x} µs of " + name + ", %{text}<extra></extra>",
        )  # fmt: skip
    fig.update_layout(barmode="overlay", bargap=0.3)
    fig.update_yaxes(autorange="reversed", categoryorder="array", categoryarray=names, showgrid=False)
    return fig.update_xaxes(title="microseconds since the step began", rangemode="tozero")


def layer_ops() -> list[tuple[str, tuple[Row, ...]]]:
    """The five calls of a GPT-2 XL layer at one row, each with the rows of all who were measured at it."""
    C, F, H = recorded.CONFIG.hidden_size, recorded.CONFIG.ffn_size, recorded.CONFIG.num_heads
    workloads = (
        f"norm_linear/t1/n{3 * C}/c{C}",
        f"decode_attention/b1/kv1024/h{H}/d{C // H}",
        f"linear_residual/t1/n{C}/c{C}",
        f"norm_linear/t1/n{F}/c{C}/gelu_tanh",
        f"linear_residual/t1/n{C}/c{F}",
    )
    rows = recorded.rows()
    return [
        (part, tuple(row for row in rows if row.workload == f"op:{name}"))
        for part, name in zip(PARTS, workloads, strict=True)
    ]


def layer_figure() -> go.Figure:
    """A layer of GPT-2 XL on an H200, op by op in a graph: the bytes, our kernels, PyTorch's best for the same."""
    fig = theme.figure("A layer of GPT-2 XL, one row, on an H200: microseconds", height=260)
    lanes = ("floor: its bytes", "five fused kernels", "PyTorch's kernels")
    ends = dict.fromkeys(lanes, 0.0)
    for (part, rows), color in zip(layer_ops(), theme.SERIES, strict=False):
        times = dict(zip(lanes, (floor_us(rows), ours_us(rows), _torch_us(rows)), strict=True))
        fig.add_bar(
            y=list(lanes), x=theme.rounded(times.values()), base=theme.rounded(ends.values()), orientation="h",
            name=part, marker_color=color, hovertemplate="%{y}, " + part + ": %{x} µs<extra></extra>",
            text=[f"{brief(us)}" if us > 1 else "" for us in times.values()], **theme.inside(color),
        )  # fmt: skip
        ends = {lane: ends[lane] + times[lane] for lane in lanes}
    for lane, end in ends.items():
        fig.add_annotation(
            x=end, y=lane, text=f" <b>{brief(end)} µs</b>", xanchor="left", showarrow=False, font={"size": 12}
        )
    fig.update_layout(barmode="overlay", bargap=0.35, margin={"b": 90})
    fig.update_layout(legend={"x": 0, "xanchor": "left", "y": -0.3, "yanchor": "top", "traceorder": "normal"})
    fig.update_yaxes(autorange="reversed", showgrid=False)
    return fig.update_xaxes(rangemode="tozero", range=[0, max(ends.values()) * 1.12])


def floor_us(rows: Sequence[Row]) -> float:
    """The op's bytes at the rate of a streaming read."""
    return 1e3 * max(row.floor_ms or 0.0 for row in rows)


def ours_us(rows: Sequence[Row]) -> float:
    """What our kernel took."""
    return min(_us(row) for row in rows if row.provider == recorded.OURS)


def _torch_us(rows: Sequence[Row]) -> float:
    """What PyTorch's kernels took for the whole op; a bare linear leaves out a norm or a residual."""
    whole = [row for row in rows if row.provider.startswith("torch-") and row.provider != "torch-linear"]
    return min(map(_us, whole))


def _us(row: Row) -> float:
    return row.total_ms.p50 * 1e3 if row.total_ms else float("inf")


H200 = LaunchCost(kernel_us=0.902, launch_us=7.34)
"""Measured by a run of its own, on another host than the recorded ladder's (benchmarks/h200-machine.json)."""


class Rise(NamedTuple):
    """One rung. `launches` is what the host hands over in a step, `kernels` what the device runs."""

    title: str
    launches: int
    kernels: int
    floor_ms: float
    predicted_ms: float
    measured: Spread


def rises(result: Ladder, config: Config, price: LaunchCost | None) -> list[Rise]:
    """The rungs of a ladder that have a time per token. `price` is None on the CPU, where a call is waited for."""
    device, found = result.environment.device_kind, []
    for number, rung in enumerate(result.rungs):
        cost, tpot = rung.measurement.cost, rung.measurement.tpot_ms
        if cost is None or cost.floor_ms is None or tpot is None:
            continue
        parts = Recipe.parse(rung.measurement.recipe.removeprefix("baseline"), device).parts
        noted = cost.launches_per_token  # by the code that was timed, which may be older than this
        if parts.is_captured or noted is None:
            kernels = num_kernels(parts, result.prompt_lengths, config)
        else:
            kernels = round(noted)
        launches = 1 if parts.is_captured else kernels
        predicted = step_ms(cost.floor_ms, StepLaunches(launches, kernels), price)
        title = f"+ {rung.title}" if number else rung.title
        found.append(Rise(title, launches, kernels, cost.floor_ms, predicted, tpot))
    return found


def unsteady(found: Sequence[Rise], what: str) -> str:
    """How far two times of one step are apart, whose every kernel Python launches: that is the measurement's error.

    `what` varied so much.
    """
    same = [
        (before, after)
        for before, after in pairwise(found)
        if before.launches == before.kernels == after.launches == after.kernels and before.floor_ms == after.floor_ms
    ]
    if not same:
        return ""
    apart = max(same, key=lambda pair: abs(math.log(pair[1].measured.p50 / pair[0].measured.p50)))
    times = sorted(rise.measured.p50 for rise in apart)
    names = " and ".join(rise.title.removeprefix("+ ") for rise in apart)
    return (
        f"{names} make the same calls in a step, and took {brief(times[0])} and {brief(times[1])} ms: {what} varied by "
        f"so much. A difference below a factor of {times[1] / times[0]:.2f} says nothing."
    )


def early_start(result: Ladder) -> str:
    """What the prediction does not know of dependent launch, with a space ahead; nothing where that is on no rung."""
    for rung, before in zip(result.rungs[1:], result.rungs, strict=False):
        took, took_before = rung.measurement.tpot_ms, before.measurement.tpot_ms
        if rung.technique == DependentLaunch.name and took and took_before:
            along = "" if rung.along else ": only the measurement moves"
            return (
                f" Dependent launch lets a kernel begin early, which the prediction does not include{along}, from "
                f"{brief(took_before.p50)} to {brief(took.p50)} ms."
            )
    return ""


def rungs_figure(found: Sequence[Rise], title: str) -> go.Figure:
    """A line for each rung from the predicted time (open) to the measured one (full), and the floor across all."""
    fig = theme.figure(title, height=190 + 42 * len(found), legend=theme.LEGEND_BELOW, margin={"t": 58})
    names = [rise.title for rise in found]
    gaps = [(rise.predicted_ms, rise.measured.p50) for rise in found]
    fig.add_scatter(
        x=[x for pair in gaps for x in (*theme.rounded(pair), None)],
        y=[y for name in names for y in (name, name, None)],
        mode="lines", line={"color": theme.GRID, "width": 6}, hoverinfo="skip", showlegend=False,
    )  # fmt: skip
    fig.add_scatter(
        x=theme.rounded(rise.predicted_ms for rise in found), y=names, mode="markers", name="predicted",
        marker={"symbol": "circle-open", "size": 11, "color": theme.SELECTION, "line": {"width": 2}},
        hovertemplate="%{y}: predicted %{x} ms<extra></extra>",
    )  # fmt: skip
    fig.add_scatter(
        x=theme.rounded(rise.measured.p50 for rise in found), y=names, mode="markers", name="measured",
        legendgroup="measured", marker={"size": 11, "color": theme.GAIN},
        hovertemplate="%{y}: measured %{x} ms<extra></extra>",
    )  # fmt: skip
    fig.add_scatter(
        x=theme.rounded(max(pair) for pair in gaps), y=names, mode="text", cliponaxis=False, hoverinfo="skip",
        text=[f"   {brief(rise.measured.p50)} ms" for rise in found], textposition="middle right",
        name="measured", legendgroup="measured", showlegend=False,
    )  # fmt: skip
    floor = min(rise.floor_ms for rise in found)
    fig.add_vline(x=floor, line={"color": theme.INK, "dash": "dot", "width": 1.5})
    fig.add_annotation(
        x=math.log10(floor), y=1, yref="paper", xanchor="left", yanchor="bottom", showarrow=False,
        text=f"dotted: the floor, {brief(floor)} ms", font={"size": 11},
    )  # fmt: skip
    fig.update_yaxes(autorange="reversed", showgrid=False)
    low, high = 0.92 * floor, 1.1 * max(map(max, gaps))
    room = (high / low) ** 0.12  # for the words beside the last marker
    return fig.update_xaxes(theme.log_axis(low, high * room, "ms per token"))


def rungs_table(found: Sequence[Rise]) -> HTML:
    """The same in numbers."""
    rows = []
    for rise in found:
        launches = f"{rise.launches:,}" if rise.launches == rise.kernels else f"1 (a graph of {rise.kernels:,})"
        times = brief(rise.predicted_ms), brief(rise.measured.p50)
        rows.append([rise.title, launches, *times, percent(rise.floor_ms / rise.measured.p50)])
    return table(["rung", "launches a step (counted)", "predicted ms", "measured ms", "floor / measured"], rows)
