"""The roofline: what a device can do at most, given how many operations there are for each byte.

B rows, T tokens, K columns of the KV cache, C channels, F FFN width, L layers, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from eet_lab.bench import Workload
from eet_lab.bench.cost import matmul_tflops, streaming_gb_per_s
from eet_lab.bench.rows import Row
from eet_lab.figures import theme
from eet_lab.labels import less_than_all
from eet_lab.lessons import recorded
from eet_lab.lessons.prediction import Prediction, after_prediction
from eet_lab.lessons.show import Shown, here, there
from eet_lab.models import Model
from eet_lab.models.config import Config
from eet_lab.models.on_device import on_its_device
from eet_lab.texts import Output
from eet_lab.words import brief

H200_GB_PER_S = 4400.0
"""The rate of a streaming read, in round numbers."""
H200_TFLOPS = 989.0
"""Dense fp16 with fp32 accumulation, from NVIDIA's data sheet; matrix products reach some three quarters of it."""

DECODE, PREFILL = "decode at best, by batch", "prefill at best, by tokens"
PLAIN, FUSED, PEERS = "EET Lab, plain PyTorch", "EET Lab, fused kernels", "peers"
COLORS = {DECODE: theme.SELECTION, PREFILL: "#a855f7", PLAIN: theme.BASELINE, FUSED: theme.GAIN, PEERS: "#f59e0b"}
"""What points stand for."""

LEAST_TFLOPS = 10.0
"""The least figure of a device that is in TFLOP/s; others are in GFLOP/s, of which a thread of a CPU has some 50."""
BATCHES = (1, 2, 4, 8, 16, 32, 64)


class Work(NamedTuple):
    """What a pass has to do."""

    flops: float
    num_bytes: float

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.flops / self.num_bytes


class Roof(NamedTuple):
    """What a device can do at most: bytes a second, operations a second."""

    gb_per_s: float
    tflops: float

    @property
    def ridge(self) -> float:
        """The intensity from which on arithmetic is the limit."""
        return self.tflops * 1e3 / self.gb_per_s

    def ms(self, work: Work) -> float:
        """The least time for it."""
        return max(work.num_bytes / self.gb_per_s / 1e6, work.flops / self.tflops / 1e9)

    def at(self, intensity: float) -> float:
        """TFLOP/s that it allows."""
        return min(self.tflops, intensity * self.gb_per_s / 1e3)


class Point(NamedTuple):
    """Something that was measured, or that is bound: points of a kind look alike, `label` stands beside one."""

    kind: str
    name: str
    work: Work
    took_ms: float
    label: str = ""

    @property
    def tflops(self) -> float:
        return self.work.flops / self.took_ms / 1e9


def step_weights(config: Config) -> int:
    """Numbers that a step reads of the weights: all but the embeddings, of which it reads a row a token."""
    outer = config.outer_shapes()
    embedded = ["position_embedding"] * config.has_position_embedding + ["token_embedding"] * (not config.tied_head)
    return config.num_params - sum(math.prod(outer[name]) for name in embedded)


def decode_work(config: Config, batch: int, columns: float, itemsize: int) -> Work:
    """A step of `batch` rows that read `columns` columns each: two operations for each weight and row."""
    weights, kv = step_weights(config), config.kv_bytes_per_token(1) * columns
    return Work(2 * batch * (weights + kv), itemsize * (weights + batch * kv))


def prefill_work(config: Config, batch: int, tokens: float, itemsize: int) -> Work:
    """A pass over prompts of `tokens` tokens, half of whose scores are the future's; the head reads the last only."""
    head = config.vocab_size * config.hidden_size
    layers, kv = step_weights(config) - head, config.kv_bytes_per_token(1) * tokens
    flops = 2 * batch * (tokens * (layers + kv / 2) + head)
    return Work(flops, itemsize * (layers + head + batch * kv))


def recorded_points() -> list[Point]:
    """What each recipe and peer reached on the H200 in decode steps, and the fastest one's time to the first token."""
    config, points = recorded.CONFIG, []
    for row in recorded.steps_of():
        load = Workload.parse(row.workload)
        if row.tpot_ms and not row.provider.startswith("recorded:"):
            work = decode_work(config, load.batch, recorded.context(load), 2)
            if row.floor_ms and row.ceiling_gb_per_s:  # what it has to read: int8 weights are half as much
                work = work._replace(num_bytes=round(row.floor_ms * row.ceiling_gb_per_s * 1e6))
            points.append(Point(_kind(row), f"{_short(row)}, {row.workload}", work, row.tpot_ms.p50))
    best = recorded.fastest()
    load = Workload.parse(best.workload)
    if best.ttft_ms:
        prefill = prefill_work(config, load.batch, load.low, 2)
        name = f"prefill of {load.low} tokens with the host's work before it, {_short(best)}"
        points.append(Point(_kind(best), name, prefill, best.ttft_ms.p50, "prefill"))
    return points


def _kind(row: Row) -> str:
    """Whose it is, and for ours whether it runs kernels of ours."""
    if row.provider != recorded.OURS:
        return PEERS
    return FUSED if "fused_kernels" in row.recipe else PLAIN


def _short(row: Row) -> str:
    """A recipe by the little that it lacks of all, or by its last technique, which stands for those before it."""
    if row.provider == recorded.OURS and (whole := less_than_all(row.recipe)).count(",") < 3:
        return whole
    first, _, last = row.name.rpartition(",")
    return f"… {last}" if first else last


def figure(title: str, roof: Roof, bounds: Sequence[Point], measured: Sequence[Point]) -> go.Figure:
    """Both sides of the roof, what is bound by it (open circles), and what was measured (full ones)."""
    fig = theme.figure(title, height=460, legend=theme.LEGEND_BELOW, margin={"b": 100})
    spots = [point.work.intensity for point in (*bounds, *measured)]
    corner = [min(spots) / 2, roof.ridge, max(*spots, roof.ridge) * 3]
    unit, scale = ("TFLOP/s", 1.0) if roof.tflops >= LEAST_TFLOPS else ("GFLOP/s", 1e3)
    fig.add_scatter(
        x=theme.rounded(corner), y=theme.rounded(scale * roof.at(place) for place in corner), mode="lines",
        name="the roof", hoverinfo="skip", line={"color": theme.INK, "width": 2},
    )  # fmt: skip
    for kind in dict.fromkeys(point.kind for point in (*bounds, *measured)):
        points = [point for point in (*bounds, *measured) if point.kind == kind]
        at_best = points[0] in bounds
        fig.add_scatter(
            x=theme.rounded(point.work.intensity for point in points),
            y=theme.rounded(scale * point.tflops for point in points),
            text=[point.label for point in points], customdata=[[p.name, float(f"{p.took_ms:.4g}")] for p in points],
            mode="markers+text", name=kind, textposition="top left" if at_best else "middle right", cliponaxis=False,
            marker={
                "symbol": "circle-open" if at_best else "circle", "size": 9, "color": COLORS[kind],
                "line": {"width": 1.8 if at_best else 0},
            },
            hovertemplate="%{customdata[0]}<br>%{x} FLOP/byte, %{y} " + unit + ", %{customdata[1]} ms<extra></extra>",
        )  # fmt: skip
    fig.add_vline(x=roof.ridge, line={"color": theme.INK, "width": 1, "dash": "dot"})
    fig.add_annotation(
        x=math.log10(roof.ridge), y=0.02, yref="paper", yanchor="bottom", xanchor="right", showarrow=False,
        text=f"ridge: {brief(roof.ridge)} FLOP/byte ", font={"size": 11},
    )  # fmt: skip
    low, high = scale * min(point.tflops for point in (*bounds, *measured)), scale * roof.tflops
    fig.update_xaxes(theme.log_axis(corner[0], corner[-1], "arithmetic intensity: FLOP for each byte read"))
    return fig.update_yaxes(theme.log_axis(low / 2, high * 2, unit))


@after_prediction
def roof(guess: Prediction) -> Shown:
    """The H200's roofline with GPT-2 XL's passes."""
    limits = Roof(recorded.ceiling_gb_per_s(), H200_TFLOPS)
    columns, config = 192.0, recorded.CONFIG
    steps = [(f"decode, batch {batch}", decode_work(config, batch, columns, 2), f"{batch}") for batch in BATCHES]
    passes = [
        (f"prefill, {batch} × {tokens} tokens", prefill_work(config, batch, tokens, 2), f"{batch} × {tokens}")
        for batch, tokens in ((1, 128), (1, 1024), (8, 1024))
    ]
    kinds = {DECODE: steps, PREFILL: passes}
    bounds = [
        Point(kind, name, work, limits.ms(work), label) for kind, each in kinds.items() for name, work, label in each
    ]
    limit = decode_work(config, 10**6, columns, 2).intensity
    fig = figure("The H200's roof, and where GPT-2 XL's passes lie", limits, bounds, recorded_points())
    return Shown(
        there(recorded.steps_of()),
        fig,
        f"Look left of the ridge: there memory is the limit. One row gives one operation for each byte, "
        f"{limits.ridge:.0f} times too few to keep the arithmetic busy. Each row reads its own keys and values, so at "
        f"{columns:.0f} columns no batch has an intensity above {limit:.0f}. Techniques move the filled points up; "
        "int8 weights move them to the right, because a step reads fewer bytes.",
    )


@on_its_device
def roof_here(model: Model, output: Output) -> Shown:
    """The same for this machine, a streaming read and a large product, and the baseline that was just run."""
    dtype = model.decoder.dtype
    limits, itemsize = Roof(streaming_gb_per_s(model.device), matmul_tflops(model.device, dtype)), dtype.itemsize
    length = len(model.encode(output.prompts[0]))
    columns = length + len(output.run.tokens[0]) / 2
    steps = [(batch, decode_work(model.config, batch, columns, itemsize)) for batch in BATCHES]
    bounds = [Point(DECODE, f"decode, batch {batch}", work, limits.ms(work), f"{batch}") for batch, work in steps]
    took = output.run.tpot_ms or output.run.total_ms
    measured = [Point(PLAIN, "the baseline, batch 1", steps[0][1], took)]
    fig = figure("The roof of this machine, both sides measured", limits, bounds, measured)
    return Shown(
        here(model),
        fig,
        f"On this machine the ridge is at {brief(limits.ridge)} operations per byte. Each number of the demo model has "
        f"{itemsize} bytes.",
    )
