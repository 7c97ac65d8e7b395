"""Lesson 3's views: planners side by side, three kinds of KV cache, and the lines that explain each other."""

from __future__ import annotations

from contextlib import closing
from typing import Any, NamedTuple

import plotly.graph_objects as go
import torch
from IPython.display import HTML

from eet_lab.engine.engine import Engine
from eet_lab.engine.forecast import free_bytes_of
from eet_lab.engine.generation import StepEvent
from eet_lab.engine.paged_kv import Pages
from eet_lab.engine.settings import Settings
from eet_lab.models import PRESETS, Model
from eet_lab.models.weights import random_decoder
from eet_lab.monitor import open_source
from eet_lab.panels import theme
from eet_lab.panels.forecast_line import in_html
from eet_lab.panels.lessons.batch import rows
from eet_lab.panels.lessons.planner import BASE
from eet_lab.panels.lessons.show import Shown, table
from eet_lab.panels.lessons.where import here
from eet_lab.panels.memory_bar import bar, held_now
from eet_lab.panels.packing import packings
from eet_lab.panels.run_memory import KVUse
from eet_lab.panels.side_by_side import HEAD, lines, side_by_side
from eet_lab.technique import Recipe
from eet_lab.words import counted, sized

MiB = 2**20
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
    """A cache while a run went on: MiB held, used, and of pages those that rows have taken, after each step."""

    use: KVUse
    held: list[float]
    used: list[float]
    taken: list[float]


def kv_caches(model: Model, new_tokens: int = 128) -> Shown:
    """The same run with each kind of cache: what it holds, uses, wastes and copies."""
    found = {name: _watched(model, recipe, new_tokens) for name, recipe in CACHES.items()}
    return Shown(
        _grown_figure(found),
        table(["KV cache", "held at the end", "of it used", "for no token", "copied in the run"], _cells(found)),
        "Growing holds what it has come to, pads included, and copies it again and again. Static copies nothing, but "
        "holds its full length from the first step, pads and all. Pages lie anywhere: a row takes one when it comes to "
        "it, none for its pads, and what a row wastes is the rest of its last page. Nothing is copied. A server gives "
        "the pages that are not taken to somebody else. The price is a table in which every step looks up where a "
        "column lies.",
    )


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
    for name, (use, *_) in found.items():
        wasted = f"{use.wasted_bytes / use.held_bytes:.0%}"
        rows.append([name, sized(use.held_bytes), sized(use.used_bytes), wasted, sized(use.copied_bytes)])
    return rows


def _watched(model: Model, recipe: str, new_tokens: int) -> Grown:
    engine = Engine(model.decoder, Recipe.parse(recipe, model.device).parts)
    held, used, taken = list[float](), list[float](), list[float]()

    def look(event: StepEvent) -> None:
        cache = engine.cache
        held.append(cache.num_bytes / MiB)
        used.append(cache.used_bytes / MiB)
        if isinstance(cache, Pages):
            taken.append(cache.taken_bytes / MiB)

    with closing(engine):
        engine.generate(rows(model), Settings(max_new_tokens=new_tokens), on_step=look)
        return Grown(KVUse.of(engine.cache), held, used, taken)


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
    """What a large model would need on this device, of which nothing is loaded: two batches, and what would fit."""
    config, device = PRESETS[name], torch.device(model.device)
    decoder = random_decoder(config, 0, torch.device("meta"), torch.float16)
    engine = Engine(decoder, Recipe.parse(CACHES["static"], model.device).parts)
    things: list[Any] = [here(model)]
    for num_rows, prompt_tokens, new_tokens in ((8, 512, 128), (256, 896, 128)):
        prompts, settings = [[config.bos_id] * prompt_tokens] * num_rows, Settings(max_new_tokens=new_tokens)
        told = engine.forecast(prompts, settings, free_bytes_of(device))
        things.append(
            f"{name}, float16: {counted(num_rows, 'prompt')} of {prompt_tokens} tokens, {new_tokens} new ones"
        )
        things.append(HTML(theme.stylesheet() + f'<div class="eet-bench">{in_html(told)}</div>'))
    return Shown(
        *things,
        "The weights stay as they are, activations grow with the tokens of the first pass, and the KV cache with every "
        "token of every prompt: it is what fills a device. The workbench shows this line under Run, before you press.",
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
