"""When a decode step does what: live on the present machine, and a layer's kernels as an H200 ran them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import plotly.graph_objects as go

from eet_lab.bench.rows import Row
from eet_lab.panels import theme
from eet_lab.panels.lessons import recorded
from eet_lab.panels.lessons.step_calls import Timed

PARTS = ("norm + QKV", "attention", "projection + residual", "norm + FC1 + GELU", "FC2 + residual")
"""The five calls of a layer, in order."""


def step_figure(step: Sequence[Timed], gb_per_s: float) -> go.Figure:
    """Each op of a step as a bar where it ran; what its bytes alone would take is green."""
    names = list(dict.fromkeys(op.op for op in step))
    fig = theme.figure(f"One decode step, {len(step)} ops, as measured here", height=120 + 34 * len(names))
    bytes_us = [op.num_bytes / gb_per_s / 1e3 for op in step]
    for name, starts, widths, color in (
        ("its bytes, at the streaming rate", [op.start_us for op in step],
         [min(us, op.took_us) for us, op in zip(bytes_us, step, strict=True)], theme.GAIN),
        ("the rest of its time", [op.start_us + min(us, op.took_us) for us, op in zip(bytes_us, step, strict=True)],
         [max(op.took_us - us, 0) for us, op in zip(bytes_us, step, strict=True)], "#f59e0b"),
    ):  # fmt: skip
        fig.add_bar(
            y=[op.op for op in step], x=_digits(widths), base=_digits(starts), orientation="h", name=name,
            marker={"color": color, "line": {"width": 0}}, text=[f"{op.num_bytes / 2**20:.2f} MiB" for op in step],
            textposition="none", hovertemplate="%{y}: %{x} us of " + name + ", %{text}<extra></extra>",
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
    lanes = ("bytes at the ceiling", "five fused kernels", "PyTorch's kernels")
    ends = dict.fromkeys(lanes, 0.0)
    for (part, rows), color in zip(layer_ops(), theme.SERIES, strict=False):
        times = dict(zip(lanes, (floor_us(rows), ours_us(rows), _torch_us(rows)), strict=True))
        fig.add_bar(
            y=list(lanes), x=_digits(times.values()), base=_digits(ends.values()), orientation="h", name=part,
            marker_color=color, hovertemplate="%{y}, " + part + ": %{x} us<extra></extra>",
            text=[f"{us:.3g}" if us > 1 else "" for us in times.values()], insidetextanchor="middle", textangle=0,
            textfont={"color": "white"},
        )  # fmt: skip
        ends = {lane: ends[lane] + times[lane] for lane in lanes}
    for lane, end in ends.items():
        fig.add_annotation(
            x=end, y=lane, text=f" <b>{end:.3g} us</b>", xanchor="left", showarrow=False, font={"size": 12}
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


def _digits(values: Iterable[float]) -> list[float]:
    """Four digits: a saved notebook need not carry more."""
    return [float(f"{value:.4g}") for value in values]
