"""Lesson 3's views: planners side by side, three kinds of KV cache, and the lines that explain each other."""

from __future__ import annotations

from contextlib import closing
from typing import Any, NamedTuple

import plotly.graph_objects as go
import torch
from IPython.display import HTML

from eet_lab.bench.measured import device_name
from eet_lab.bench.run_memory import KVUse
from eet_lab.engine.engine import Engine
from eet_lab.engine.generation import StepEvent
from eet_lab.engine.settings import Settings
from eet_lab.figures import theme
from eet_lab.figures.memory_bar import bar, held_now
from eet_lab.figures.plans import HEAD, lines, packings
from eet_lab.lessons import recorded
from eet_lab.lessons.batch import SHORT, rows
from eet_lab.lessons.memory_reuse import BASE
from eet_lab.lessons.show import Shown, here, noted, table, there
from eet_lab.memory.replays import side_by_side
from eet_lab.models import PRESETS, Model, load
from eet_lab.models.on_device import on_its_device
from eet_lab.monitor import free_bytes_of, open_source
from eet_lab.parts.paged_kv import PAGE, Pages
from eet_lab.technique import Recipe
from eet_lab.words import GiB, MiB, counted, percent, sized
from eet_lab.workbench.forecast import in_html

SHORT_NEW = 4
"""New tokens for the short rows that pages do not pay for."""
GPU_BYTES = 24 * GiB
"""Free on the GPU that a forecast is for where there is none."""
CACHES = {"growing": BASE, "static": f"{BASE},memory_reuse", "paged": f"{BASE},memory_reuse:kv=paged"}
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
        "a millisecond. Where it does not, the optimal planner shows whether any plan could. EET's buffers need more, "
        "since EET does not know what comes next; chunks need more, since no tensor can cross a border. Chunks pay off "
        "when the next request has another length: lesson 5.",
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
    uses = {name: each.use for name, each in found.items()}
    cells = [
        [name, sized(u.held_bytes), sized(u.used_bytes), percent(u.wasted_bytes / u.held_bytes), sized(u.copied_bytes)]
        for name, u in uses.items()
    ]
    return Shown(
        _grown_figure(found),
        table(["KV cache", "held at the end", "used", "unused", "copied in the run"], cells),
        "The growing cache holds what has been read so far, pads included, and copies all of it at each step. The "
        "static one copies nothing, but holds its full length from the first step on, pads included.",
        _of_pages(found["paged"], found["static"]),
        _of_short_rows(model),
    )


def _of_pages(paged: Grown, static: Grown) -> str:
    return (
        "Pages may lie anywhere. A row takes one when it needs it, and none for columns that hold only pads; nothing "
        f"is copied. A page is {counted(PAGE, 'column')} of the padded batch, so a row wastes space at both ends: pads "
        f"at the beginning of its first page ({sized(paged.before_bytes)} in all rows) and the rest of its last "
        f"({sized(paged.after_bytes)} at the end). A row that has stopped keeps its pages until the batch ends. Pages "
        "for the batch's full length are allocated when it begins, taken or not: "
        f"{sized(paged.use.held_bytes)}, against {sized(static.use.held_bytes)} static. The price is a block table: "
        "each step looks up the place of each column in it."
    )


def _of_short_rows(model: Model) -> str:
    short = [model.encode(prompt) for prompt in SHORT]
    lengths = ", ".join(str(len(row)) for row in short)
    in_pages, in_a_slab = (
        _watched(model, short, CACHES[kind], SHORT_NEW).use.held_bytes for kind in ("paged", "static")
    )
    return (
        f"Whole pages do not pay for short rows: prompts of {lengths} tokens with {SHORT_NEW} new ones hold "
        f"{sized(in_pages)} in pages and {sized(in_a_slab)} static. One of the pages is shared by all pads."
    )


def _grown_figure(found: dict[str, Grown]) -> go.Figure:
    paged = theme.SERIES[1]
    lines = [
        theme.Curve("growing: held", found["growing"].held, theme.BASELINE),
        theme.Curve("static: held", found["static"].held, theme.SELECTION),
        theme.Curve("paged: held", found["paged"].held, paged, dash="dash"),
        theme.Curve("paged: taken by rows", found["paged"].taken, paged),
        theme.Curve("used: keys and values of tokens", found["paged"].used, theme.GAIN, dash="dot"),
    ]
    return theme.curves("What the KV cache holds as the batch grows", lines, "step", "MiB", height=330)


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


@on_its_device
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
    now = HTML(theme.stylesheet() + f'<div class="eet-note">{bar(held_now(values))}</div>')
    if model.device == "cuda":
        return Shown(here(model), now, ON_A_GPU)
    return Shown(here(model), now, ON_THE_CPU, *_recorded_lines())


LINES = {
    "plan: weights, KV cache, activations": ("planned_bytes", theme.SELECTION),
    "torch allocated": ("torch_allocated_bytes", theme.GAIN),
    "torch reserved": ("torch_reserved_bytes", "#f59e0b"),
    "NVML: the whole device": ("memory_used_bytes", theme.INK),
}


def _recorded_lines() -> list[Any]:
    """What each counter of an H200 said while the baseline of GPT-2 XL ran with a growing cache."""
    result, samples = recorded.watched()
    weights, other = result.baseline.memory["weights"], result.selection.memory
    times, curves, seen = [each["t"] for each in samples], list[theme.Curve](), dict[str, list[float]]()
    for name, (counter, color) in LINES.items():
        own = weights if counter == "planned_bytes" else 0
        seen[counter] = [each["values"][counter] + own for each in samples]
        held = [num_bytes / GiB for num_bytes in seen[counter]]
        curves.append(theme.Curve(name, held, color, x=theme.rounded(times)))
    title = "GPT-2 XL, eight rows, a growing cache: memory by counter"
    fig = theme.curves(title, curves, "seconds", "GiB", height=340)
    grew = {counter: values[-1] - values[0] for counter, values in seen.items()}
    apart = seen["torch_allocated_bytes"][0] - seen["planned_bytes"][0]
    return [
        there(result),
        fig.update_layout(margin={"b": 100}),
        f"{ON_A_GPU} Here the plan grew by {sized(grew['planned_bytes'])} and torch's allocated bytes by "
        f"{sized(grew['torch_allocated_bytes'])}; reserved bytes and the device's by only "
        f"{sized(grew['torch_reserved_bytes'])}, since torch held the rest from earlier runs. The first two lines are "
        f"{round(apart / MiB)} MiB apart: the other engine of this Compare keeps "
        f"{sized(other['kv'] + other['activations'])} for its KV cache and activations, and cuBLAS its workspace.",
    ]


@on_its_device
def forecast(model: Model, name: str = "gpt2-xl") -> Shown:
    """What a large model would need on this GPU, or one of GPU_BYTES where there is none: two batches, what would fit.

    Nothing of it is loaded: its weights are shapes alone.
    """
    config = PRESETS[name]
    if model.device == "cuda":
        free_bytes = free_bytes_of(model.decoder.device)
        where = f"A forecast, nothing is measured: for {device_name('cuda')}, with {sized(free_bytes)} free now."
    else:
        free_bytes = GPU_BYTES
        where = f"A forecast, nothing is measured: for a GPU with {sized(free_bytes)} free, since there is none here."
    engine = Engine(load(name, device="meta").decoder, Recipe.parse(CACHES["static"], "cuda").parts)
    things: list[Any] = [HTML(theme.stylesheet() + noted(where).data)]
    for num_rows, prompt_tokens, new_tokens in ((8, 512, 128), (256, 896, 128)):
        prompts, settings = [[config.bos_id] * prompt_tokens] * num_rows, Settings(max_new_tokens=new_tokens)
        told = engine.forecast(prompts, settings, free_bytes)
        batch = f"{counted(num_rows, 'prompt')} of {prompt_tokens} tokens, {new_tokens} new ones"
        things += [f"{name}, float16: {batch}", HTML(f'<div class="eet-bench">{in_html(told)}</div>')]
    return Shown(
        *things,
        "The weights stay as they are. Activations grow with the tokens of the first pass, and the KV cache with every "
        "token of every prompt: the cache is what fills a device. The workspace is what cuBLAS keeps on a GPU. The "
        "workbench shows this forecast before you press Run.",
    )


ON_A_GPU = (
    "Each counter includes what the one before it counts, and more. The plan is exact: weights, KV cache, arena. Torch "
    "has allocated more than that, and reserved still more; the driver also counts the CUDA context, the kernels and "
    "all other programs on the device. nvidia-smi shows the last one."
)
ON_THE_CPU = (
    "Without a GPU there are two counters: the plan, and the process as the system sees it. The difference is Python, "
    "PyTorch and its libraries. A GPU has two more, what torch has allocated and what it has reserved:"
)
