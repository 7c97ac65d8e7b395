"""Lesson 3's views: planners side by side, three kinds of KV cache, and the lines that explain each other."""

from __future__ import annotations

from contextlib import closing
from typing import Any, NamedTuple

import plotly.graph_objects as go
import torch
from IPython.display import HTML

from eet_lab.bench.environment import device_name
from eet_lab.engine.engine import Engine
from eet_lab.engine.generation import StepEvent
from eet_lab.engine.paged_kv import PAGE, Pages
from eet_lab.engine.settings import Settings
from eet_lab.models import PRESETS, Model, load
from eet_lab.monitor import free_bytes_of, open_source
from eet_lab.panels import theme
from eet_lab.panels.forecast_line import in_html
from eet_lab.panels.lessons.batch import SHORT, rows
from eet_lab.panels.lessons.planner import BASE
from eet_lab.panels.lessons.show import Shown, table
from eet_lab.panels.lessons.where import here, noted
from eet_lab.panels.memory_bar import bar, held_now
from eet_lab.panels.packing import packings
from eet_lab.panels.run_memory import KVUse
from eet_lab.panels.side_by_side import HEAD, lines, side_by_side
from eet_lab.technique import Recipe
from eet_lab.words import counted, sized

MiB, GiB = 2**20, 2**30
SHORT_NEW = 4
"""New tokens for the short rows that pages do not pay for."""
GPU_BYTES = 24 * GiB
"""Free on the GPU that a forecast is for where there is none."""
CACHES = {
    "growing": BASE,
    "static": f"{BASE},memory_reuse",
    "paged": f"{BASE},memory_reuse:kv=paged",
}
DRAWN = ("greedy_by_size", "optimal", "first_fit", "chunked", "eet_repaired", "no_reuse")


def planners(model: Model) -> Shown:
    """Every planner on the same trace: the first pass of the lesson's batch."""
    lifetimes = Engine(model.decoder, Recipe.parse(BASE, model.device).parts).lifetimes(rows(model))["prefill"]
    placed = side_by_side(lifetimes)
    drawn = {each.name: each.plan for each in placed if each.plan and each.name in DRAWN}
    return Shown(
        packings(drawn),
        table(HEAD, lines(placed)),
        "The dotted line is the lower bound: what is alive at once. Greedy by size often reaches it, in a fraction of "
        "a millisecond; where it does not, the optimal planner tells whether anybody could. EET's buffers pay for not "
        "knowing what comes, chunks for their borders. Why anybody would want chunks is a question about the next "
        "request: lesson 5.",
    )


class Grown(NamedTuple):
    """A cache while a run went on: MiB held, used, and of pages those that rows have taken, after each step.

    `before_bytes` and `after_bytes` are of taken pages, at the end: pads in a row's first one, the rest of its last.
    """

    use: KVUse
    held: list[float]
    used: list[float]
    taken: list[float]
    before_bytes: int = 0
    after_bytes: int = 0


def kv_caches(model: Model, new_tokens: int = 128) -> Shown:
    """The same run with each kind of cache: what it holds, uses, wastes and copies."""
    found = {name: _watched(model, rows(model), recipe, new_tokens) for name, recipe in CACHES.items()}
    return Shown(
        _grown_figure(found),
        table(["KV cache", "held at the end", "of it used", "for no token", "copied in the run"], _cells(found)),
        "Growing holds what it has come to, pads included, and copies it again and again. Static copies nothing, but "
        "holds its full length from the first step, pads and all.",
        _of_pages(found["paged"], found["static"]),
        _of_short_rows(model),
    )


def _of_pages(paged: Grown, static: Grown) -> str:
    return (
        "Pages lie anywhere: a row takes one when it comes to it, and none for columns that are all pads, so nothing "
        f"is copied. A page is {counted(PAGE, 'column')} of the padded batch, so a row wastes at both ends: pads at "
        f"the beginning of its first page ({sized(paged.before_bytes)} in all rows) and the rest of its last "
        f"({sized(paged.after_bytes)} at the end). A row that has stopped keeps its pages until the batch ends. What "
        "no row has taken is held all the same, since pages for the batch's full length are allocated when it opens: "
        f"{sized(paged.use.held_bytes)}, against {sized(static.use.held_bytes)} static. The price is a table in which "
        "every step looks up where a column lies."
    )


def _of_short_rows(model: Model) -> str:
    lengths = ", ".join(str(len(model.encode(prompt))) for prompt in SHORT)
    in_pages, in_a_slab = _short_held(model, "paged"), _short_held(model, "static")
    return (
        f"Whole pages do not pay for short rows: prompts of {lengths} tokens with {SHORT_NEW} new ones hold "
        f"{sized(in_pages)} paged and {sized(in_a_slab)} static. The page that stands for all pads is among them."
    )


def _short_held(model: Model, kind: str) -> int:
    """Bytes held for a batch of short rows."""
    return _watched(model, [model.encode(prompt) for prompt in SHORT], CACHES[kind], SHORT_NEW).use.held_bytes


def _grown_figure(found: dict[str, Grown]) -> go.Figure:
    fig = theme.figure("What the KV cache holds as the batch grows", height=330, legend=theme.LEGEND_BELOW)
    paged = theme.SERIES[1]
    curves = [
        ("growing: held", found["growing"].held, theme.BASELINE, "solid"),
        ("static: held", found["static"].held, theme.SELECTION, "solid"),
        ("paged: held", found["paged"].held, paged, "dash"),
        ("paged: taken by rows", found["paged"].taken, paged, "solid"),
        ("used: keys and values of tokens", found["paged"].used, theme.GAIN, "dot"),
    ]
    for name, values, color, dash in curves:
        line = {"color": color, "width": 2, "dash": dash}
        fig.add_scatter(x=list(range(1, len(values) + 1)), y=theme.rounded(values), name=name, line=line)
    return fig.update_xaxes(title="step").update_yaxes(title="MiB", rangemode="tozero")


def _cells(found: dict[str, Grown]) -> list[list[str]]:
    rows = []
    for name, use in ((name, each.use) for name, each in found.items()):
        wasted = f"{use.wasted_bytes / use.held_bytes:.0%}"
        rows.append([name, sized(use.held_bytes), sized(use.used_bytes), wasted, sized(use.copied_bytes)])
    return rows


def _watched(model: Model, prompts: list[list[int]], recipe: str, new_tokens: int) -> Grown:
    engine = Engine(model.decoder, Recipe.parse(recipe, model.device).parts)
    held, used, taken = list[float](), list[float](), list[float]()

    def look(event: StepEvent) -> None:
        cache = engine.cache
        held.append(cache.num_bytes / MiB)
        used.append(cache.used_bytes / MiB)
        if isinstance(cache, Pages):
            taken.append(cache.taken_bytes / MiB)

    with closing(engine):
        engine.generate(prompts, Settings(max_new_tokens=new_tokens), on_step=look)
        cache = engine.cache
        if not isinstance(cache, Pages):
            return Grown(KVUse.of(cache), held, used, taken)
        longest = max(map(len, prompts))
        before = cache.column_bytes * sum((longest - len(row)) % cache.page for row in prompts)
        return Grown(KVUse.of(cache), held, used, taken, before, cache.taken_bytes - cache.used_bytes - before)


def three_lines(model: Model) -> Shown:
    """What is planned, what torch holds, and what the device counts, while an engine stands."""
    engine = Engine(model.decoder, Recipe.parse(CACHES["static"], model.device).parts)
    with closing(engine), closing(open_source(model.device)) as source:
        engine.generate(rows(model), Settings(max_new_tokens=8))
        planned = engine.activation_bytes + engine.kv_bytes
        values: dict[str, float] = {"weights_bytes": engine.model.weight_bytes, "planned_bytes": planned}
        if model.device == "cuda":
            values["torch_allocated_bytes"] = torch.cuda.memory_allocated()
            values["torch_reserved_bytes"] = torch.cuda.memory_reserved()
        values |= source.read()
    words = ON_A_GPU if model.device == "cuda" else ON_THE_CPU
    return Shown(here(model), HTML(theme.stylesheet() + f'<div class="eet-note">{bar(held_now(values))}</div>'), words)


def forecast(model: Model, name: str = "gpt2-xl") -> Shown:
    """What a large model would need on this GPU, or one of GPU_BYTES where there is none: two batches, what would fit.

    Nothing of it is loaded: its weights are shapes alone.
    """
    config = PRESETS[name]
    if model.device == "cuda":
        free_bytes = free_bytes_of(torch.device("cuda"))
        where = (
            f"A forecast, nothing is measured: for {device_name('cuda')}, of which {sized(free_bytes)} are free now."
        )
    else:
        free_bytes = GPU_BYTES
        where = f"A forecast, nothing is measured: for a GPU with {sized(free_bytes)} free, since there is none here."
    engine = Engine(load(name, device="meta").decoder, Recipe.parse(CACHES["static"], "cuda").parts)
    things: list[Any] = [noted(where, "gpu" if model.device == "cuda" else "cpu")]
    for num_rows, prompt_tokens, new_tokens in ((8, 512, 128), (256, 896, 128)):
        prompts, settings = [[config.bos_id] * prompt_tokens] * num_rows, Settings(max_new_tokens=new_tokens)
        told = engine.forecast(prompts, settings, free_bytes)
        things.append(
            f"{name}, float16: {counted(num_rows, 'prompt')} of {prompt_tokens} tokens, {new_tokens} new ones"
        )
        things.append(HTML(theme.stylesheet() + f'<div class="eet-bench">{in_html(told)}</div>'))
    return Shown(
        *things,
        "The weights stay as they are, activations grow with the tokens of the first pass, and the KV cache with every "
        "token of every prompt: it is what fills a device. The workspace is what cuBLAS keeps on a GPU. The "
        "workbench shows this line under Run, before you press.",
    )


ON_A_GPU = (
    "From left to right, each counter sees what the one before it sees, and more. The plan is exact: weights, cache, "
    "arena. Torch has allocated more, and reserved more than that; the driver counts the context, the kernels and "
    "whoever else is on the device. Whoever compares an engine's plan with nvidia-smi compares the ends."
)
ON_THE_CPU = (
    "Here is no GPU, so there are two counters: the plan, and the process as the system sees it. What lies between is "
    "Python, PyTorch and its libraries. On a GPU two more lines stand between them: what torch has allocated, and what "
    "it has reserved."
)
