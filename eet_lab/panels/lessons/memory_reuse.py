"""Lesson 3, memory reuse: where do the bytes of a run live, and who can share them?"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import plotly.graph_objects as go
import torch

from eet_lab.bench import Comparison
from eet_lab.bench.timing import took_ms
from eet_lab.memory import PLANNERS, Plan
from eet_lab.models import Model
from eet_lab.panels import theme
from eet_lab.panels.lessons.batch import PROMPTS, lengths
from eet_lab.panels.lessons.planner import BASE, exercise, trace
from eet_lab.panels.lessons.prediction import Prediction
from eet_lab.panels.lessons.show import Shown, after, chosen, table
from eet_lab.panels.packing import packing
from eet_lab.texts import Output

MiB = 2**20
NEW_TOKENS = 128


def predict(model: Model) -> Prediction:
    """How often is the cache copied? Reveals the count, and no time."""
    copied, final = kv_copies(model)
    return Prediction(
        f"The KV cache ends at {final / MiB:.1f} MiB. If each of the {NEW_TOKENS - 1} decode steps lengthens it "
        "by concatenation, how many times its final size is copied in the whole run?",
        reveal=f"{copied / final:.0f} times: {copied / MiB:,.0f} MiB are read and written again, to append "
        f"{final / MiB:.1f} MiB. The next question is what that takes in milliseconds.",
        number=(0, 1000),
        unit="times its final size",
    )


def _columns(model: Model) -> tuple[int, int, int]:
    """Rows, columns after the first pass, columns at the end."""
    longest = max(lengths(model))
    return len(PROMPTS), longest, longest + NEW_TOKENS - 1


def kv_copies(model: Model) -> tuple[int, int]:
    """Bytes of old keys and values that a growing cache copies in the run, and its final size."""
    num_rows, begin, end = _columns(model)
    column_bytes = num_rows * model.config.kv_bytes_per_token(model.decoder.dtype.itemsize)
    return sum(range(begin, end)) * column_bytes, end * column_bytes


def buffers(plan: Plan, planner: str) -> Shown:
    """The same buffers, placed by one of PLANNERS; PlanError for another name."""
    plan = chosen("planner", planner, PLANNERS)(plan.lifetimes)
    words = {
        "no_reuse": "Every buffer has bytes of its own, so addresses only climb. Look at how short the rectangles are: "
        "each is needed for a moment, and its bytes lie idle for the rest of the pass.",
    }.get(
        planner,
        "The same rectangles, moved down: what is dead gives its bytes to what comes next, and each layer uses those "
        "of the layer before. No two rectangles overlap; that is the only rule.",
    )
    return Shown(packing(plan), words)


def alive(model: Model) -> Shown:
    """What the first pass asks for, what is alive at once, and what an arena needs."""
    plan = trace(model)
    total = sum(life.num_bytes for life in plan.lifetimes)
    lines = [
        ["sum of all requests, each with memory of its own", f"{len(plan.lifetimes)}", f"{total / MiB:.2f} MiB"],
        ["alive at once: what freeing by reference counts needs", "", f"{plan.lower_bound_bytes / MiB:.2f} MiB"],
    ]
    lines += [
        [f"arena, planner {name}", "1", f"{PLANNERS[name](plan.lifetimes).footprint_bytes / MiB:.2f} MiB"]
        for name in PLANNERS
        if name != "no_reuse"
    ]
    return Shown(
        table(["first pass", "trips to the allocator", "bytes"], lines),
        "Be fair to the baseline: Python frees a tensor when its last user is done, so it, too, lives with what is "
        "alive at once. A plan brings no smaller peak here. It brings one trip to the allocator instead of one for "
        "each tensor, and addresses that are known before the run and never move.",
    )


@torch.inference_mode()
def copy_gb_per_s(model: Model) -> float:
    """The rate, read plus written, at which this device concatenates a cache of this run's middle size."""
    num_rows, begin, end = _columns(model)
    config, like = model.config, model.decoder.words
    shape = (num_rows, config.num_heads, (begin + end) // 2, config.head_dim)
    cache = [like.new_zeros(shape) for _ in range(2 * config.num_layers)]
    new = like.new_zeros(*shape[:2], 1, shape[3])

    def concatenate() -> list[torch.Tensor]:
        return [torch.cat((old, new), 2) for old in cache]

    num_bytes = 2 * sum(old.nbytes for old in cache)
    return num_bytes / median(took_ms(concatenate, like.device.type) for _ in range(7)) / 1e6


def verdict(guess: Prediction, result: Comparison, model: Model) -> Shown:
    """The copies' time, predicted from bytes and rate, beside what memory reuse saved."""
    return after(guess, lambda: _verdict(guess, result, model))


def _verdict(guess: Prediction, result: Comparison, model: Model) -> Shown:
    a, b = result.baseline, result.selection
    if not (a.total_ms and b.total_ms and a.tpot_ms and b.tpot_ms):
        return Shown("Some time could not be measured: run the comparison again.")
    copied, final = kv_copies(model)
    rate = copy_gb_per_s(model)
    predicted_ms = 2 * copied / rate / 1e6
    saved_ms = a.total_ms.p50 - b.total_ms.p50
    lines = [
        ["cache copied, in final sizes: you", str(guess)],
        ["cache copied, in final sizes: counted", f"{copied / final:.0f}"],
        ["bytes read and written for it (counted)", f"{2 * copied / MiB:,.0f} MiB"],
        ["rate of concatenation here (measured)", f"{rate:.3g} GB/s"],
        ["time of the copies (bytes / rate)", f"{predicted_ms:.3g} ms"],
        ["saved by memory_reuse in the run (measured)", f"{saved_ms:.3g} ms of {a.total_ms.p50:.4g}"],
    ]
    num_rows, begin, end = _columns(model)
    column_bytes = num_rows * model.config.kv_bytes_per_token(model.decoder.dtype.itemsize)
    columns = list(range(begin, end))
    fig = _steps_figure()
    for m, color in ((a, theme.BASELINE), (b, theme.SELECTION)):
        _add_steps(fig, m.recipe, m.step_ms, begin, color)
    flat = _smoothed(b.step_ms[1:])
    fig.add_scatter(
        x=columns, y=[round(ms + 2 * n * column_bytes / rate / 1e6, 3) for ms, n in zip(flat, columns, strict=False)],
        name="predicted: memory_reuse + the copy", line={"color": theme.LOSS, "dash": "dot", "width": 1.5},
    )  # fmt: skip
    return Shown(
        table(["in the whole run", ""], lines),
        fig,
        "Look at the gap between grey and blue, and at the dotted line: it is what the copies alone would make of "
        "blue. Where dotted and grey differ, it is because the growing cache also clears its new column, asks the "
        "allocator for new tensors in every layer and step, and pushes other data out of the caches, while the arena "
        "saves the trips of all other buffers. A difference of two noisy times is noisy itself: on a busy machine, "
        f"run the comparison again. Same output? {result.sameness.verdict}.",
    )


def steps_over_time(output: Output, model: Model) -> Shown:
    """Each decode step's time as the cache grows."""
    steps, (_, begin, _) = output.run.step_ms, _columns(model)
    fig = _steps_figure()
    _add_steps(fig, str(output.recipe), steps, begin, theme.BASELINE)
    quarter = len(steps) // 4
    early, late = median(steps[1 : 1 + quarter]), median(steps[-quarter:])
    return Shown(
        fig,
        f"Look whether the line rises: the first quarter of the steps took {early:.3g} ms each, the last {late:.3g}. "
        "Every step does the same arithmetic but for attention, whose keys become more.",
    )


def _steps_figure() -> go.Figure:
    fig = theme.figure(
        "Each decode step's time as the cache grows (median of 9 neighbours)", height=340, legend=theme.LEGEND_BELOW
    )
    fig.update_xaxes(title="columns in the cache")
    fig.update_yaxes(title="ms per step", rangemode="tozero")
    return fig.update_layout(margin={"b": 100}, showlegend=True)


def _add_steps(fig: go.Figure, name: str, step_ms: Sequence[float], begin: int, color: str) -> None:
    steps = [round(ms, 3) for ms in _smoothed(step_ms[1:])]
    fig.add_scatter(x=list(range(begin, begin + len(steps))), y=steps, name=name, line={"color": color, "width": 2})


def _smoothed(steps: Sequence[float], reach: int = 4) -> list[float]:
    """The median of each step and its neighbours."""
    windows = (sorted(steps[max(i - reach, 0) : i + reach + 1]) for i in range(len(steps)))
    return [window[len(window) // 2] for window in windows]


__all__ = [
    "BASE",
    "NEW_TOKENS",
    "PROMPTS",
    "alive",
    "buffers",
    "exercise",
    "predict",
    "steps_over_time",
    "trace",
    "verdict",
]
