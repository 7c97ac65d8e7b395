"""Lesson 5, memory for requests of every length: what to hold on to between them, and what to give back."""

from __future__ import annotations

import random
from contextlib import closing
from functools import cache

import plotly.graph_objects as go
import torch

from eet_lab.bench import streams
from eet_lab.bench.streams import SWEEP
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.figures import theme
from eet_lab.figures.plans import POOL_HEAD, film, pool_lines
from eet_lab.lessons.memory_reuse import BASE
from eet_lab.lessons.prediction import Prediction, after, after_prediction
from eet_lab.lessons.show import Shown, chosen, here, noted, table, there
from eet_lab.memory import POOLS, RELEASES, one_after_the_other
from eet_lab.memory.buffers import FirstFitPool
from eet_lab.memory.replays import Replay, compare, pools, replay
from eet_lab.memory.workloads import Request, eet_sweep, turbo_artifact, turbo_figure
from eet_lab.models import Model
from eet_lab.technique import Recipe
from eet_lab.words import MiB, counted, sized

PUBLISHED_MIB = {"chunks, arrival, immediate": ("4.228", "0.702"), "arena, made anew": ("2.789", "2.789")}
"""What TurboTransformers' artifact prints for its 50 requests: mean held, and new in each request."""


@cache
def stream() -> tuple[Request, ...]:
    """The artifact's 50 requests."""
    return turbo_artifact()


@cache
def served() -> dict[str, Replay]:
    """Every pool on that stream."""
    return compare(stream())


def predict() -> Prediction:
    """How often must an arena grow, if it never shrinks?"""
    calls = served()["arena, grown"].calls.allocations
    return Prediction(
        f"{len(stream())} requests of random length, 5 to 250 tokens, arrive one after the other. One arena holds the "
        "activations; it grows when a request needs more than all requests before, and never shrinks. How often does "
        "it ask the driver for memory?",
        reveal=f"{calls} times. Only a request that is longer than all before it counts: a record. Records become "
        "rare, since the n-th random request is a record with probability 1/n. That adds up to 4.5 in 50 requests, and "
        "to 7.5 in a thousand.",
        number=(1, 50),
        unit="times",
    )


def lengths() -> Shown:
    """The stream, and what each request needs at the least."""
    fig = theme.figure("Fifty requests: what is alive at once in each", height=280)
    bound = served()["arena, grown"].lower_bound_bytes
    fig.add_bar(
        x=list(range(1, len(bound) + 1)), y=theme.rounded(each / MiB for each in bound),
        customdata=[each.length for each in stream()], marker={"color": theme.GAIN},
        hovertemplate="request %{x}: %{customdata} tokens, %{y} MiB<extra></extra>",
    )  # fmt: skip
    fig.update_xaxes(title="request").update_yaxes(title="MiB")
    return Shown(
        fig,
        f"The longest needs {sized(max(bound))}, the average {sized(sum(bound) / len(bound))}. A pool that always "
        "holds the maximum wastes the difference; one that holds just enough asks the driver each time.",
    )


def play(name: str = "chunks, arrival, immediate", guess: Prediction | None = None) -> Shown:
    """The stream through one of the pools that `artifact` compares, request by request; PlanError for another name.

    With a `guess`, only once the reader has made it: the film shows how often a pool grows.
    """
    found = chosen("pool", name, served())
    if guess is not None:
        return after(guess, lambda: play(name))
    words = {
        "arena, grown": "One box, which only ever grows. Watch how rarely, and how empty it stays for short requests.",
        "arena, made anew": "One box that always fits, and is freed each time: two driver calls per request.",
        "EET": "Each box is a buffer and holds one tensor at a time. None is ever given back.",
    }.get(name, "Press play. Green boxes are chunks that the request allocates, red ones are freed after it.")
    return Shown(film(found, name), words)


@after_prediction
def artifact(guess: Prediction) -> Shown:
    """Every pool on the stream, and what the paper's own program prints for two of them."""
    found = served()
    bound = found["arena, grown"].lower_bound_bytes
    same = []
    for name, (held, new) in PUBLISHED_MIB.items():
        here = found[name].mean_footprint_bytes / MiB, found[name].new_bytes_per_request / MiB
        same.append([name, held, f"{here[0]:.3f}", new, f"{here[1]:.3f}"])
    return Shown(
        trade_off(found),
        table(POOL_HEAD, pool_lines(found)),
        "Arrival and ascending are the orders in which chunks are searched for a gap: as they were made, or from the "
        "smallest to the largest. Immediate, idle and never say when an empty one is freed.",
        f"The lower left corner is best. Alive at once, on average: {sized(sum(bound) / len(bound))}. The paper "
        "compares its chunks with an arena that is made anew for each request, far on the right. An arena that grows, "
        "or is reserved for the longest, asks the driver less often than chunks and holds less at its peak; chunks "
        "hold less on average. EET's whole buffers are worse than both.",
        table(["the artifact's program", "prints: held MiB", "replayed", "prints: new MiB", "replayed"], same),
    )


def trade_off(found: dict[str, Replay]) -> go.Figure:
    """Bytes held against calls of the driver, a point for each pool."""
    fig = theme.figure("What is held on average, and how often the driver is asked", height=430, margin={"b": 70})
    for at, (name, each) in enumerate(found.items()):
        calls, is_open = each.calls.allocations + each.calls.frees, at >= len(theme.SERIES)
        fig.add_scatter(
            x=[calls], y=[round(each.mean_footprint_bytes / MiB, 3)], mode="markers", name=name, cliponaxis=False,
            marker={
                "size": 13 + 7 * (name == "EET"), "color": theme.SERIES[at % len(theme.SERIES)],
                "symbol": "diamond-open" if is_open else "circle", "line": {"width": 3 * is_open},
            },
            hovertemplate=f"{name}: %{{y}} MiB, %{{x}} calls<extra></extra>",
        )  # fmt: skip
    fig.update_layout(legend={"x": 1.01, "xanchor": "left", "y": 1, "yanchor": "top", "orientation": "v"})
    fig.update_xaxes(title="driver calls in all (allocations and frees)", rangemode="tozero")
    return fig.update_yaxes(title="held on average (MiB)", rangemode="tozero")


def releases() -> Shown:
    """One pool, and the three moments at which it may give a chunk back."""
    found = {release: served()[f"chunks, arrival, {release}"] for release in ("immediate", "idle", "never")}
    lines = [
        theme.Curve(name, (value / MiB for value in each.footprint_bytes), color)
        for (name, each), color in zip(found.items(), theme.SERIES, strict=False)
    ]
    told = {name: _asked(each) for name, each in found.items()}
    gone = [at for at, each in enumerate(found["idle"].served, 1) if each.calls.frees]
    saved = found["never"].mean_footprint_bytes - found["idle"].mean_footprint_bytes
    return Shown(
        theme.curves("Held by the chunks after each request", lines, "request", "MiB", height=300, shape="hvh"),
        "Immediate is the paper's rule: a chunk that a request leaves empty is freed at once, and the next long "
        f"request allocates it again: {told['immediate']}. Idle waits until {RELEASES['idle']} requests in a row have "
        f"left it empty: {told['idle']}. Never: {told['never']}. In {len(stream())} requests of random length, "
        f"{RELEASES['idle']} in a row leave a chunk empty {counted(len(gone), 'time')} (idle's line falls at request "
        f"{' and at '.join(map(str, gone))}). So waiting saves nearly all calls, and gives back little: "
        f"{sized(saved)} on average. A policy is a guess about the future.",
    )


def _asked(each: Replay) -> str:
    allocations, frees = counted(each.calls.allocations, "allocation"), counted(each.calls.frees, "free")
    return f"{allocations} and {frees}, {sized(each.mean_footprint_bytes)} held on average"


def figure_6() -> Shown:
    """The example of the paper's figure 6."""
    plans = replay(POOLS["chunked"](), turbo_figure()).served
    lines = [
        [f"{each.length}", ", ".join(f"{chunk.num_bytes:,}" for chunk in each.plan.chunks), f"{each.calls.allocations}"]
        for each in plans
    ]
    return Shown(
        table(["tokens", "chunks held (bytes)", "new chunks"], lines),
        "As in the paper's figure 6: 200 tokens need a chunk of 1.2 times the largest tensor, and one of the smallest "
        "size, 2 MiB. With 40 tokens more, another chunk of 2 MiB is allocated, and the first two stay.",
    )


def eet_order() -> Shown:
    """The same prompts through EET's manager, in two orders, and what other pools hold in the end."""
    rows, buffers = [], [_buffer_bytes(sizes) for sizes in (SWEEP, SWEEP[::-1])]
    for order, sizes in (("shortest first", SWEEP), ("longest first", SWEEP[::-1])):
        workload = eet_sweep(sizes)
        for name in SHOWN_FOR_EET:
            found = replay(pools(workload)[name](), workload)
            calls = found.calls.allocations + found.calls.frees
            rows.append([order, name, sized(max(found.footprint_bytes)), f"{calls:,}"])
    return Shown(
        table(["prompts of 32 to 1,024", "pool", "most held", "driver calls"], rows),
        "EET takes the first buffer that is idle and large enough. If short prompts come first, each longer one "
        f"finds all buffers a little too small: {sized(buffers[0])} of buffers in the end. If the longest come "
        f"first, {sized(buffers[1])} are enough. (The table also counts 18 MiB of caches in both.) The model is the "
        "same; only the order of the requests differs. An arena holds the same in both orders, and only grows more "
        "often in one of them. Chunks hold more where lengths grow: old ones are kept while new ones are added.",
    )


def _buffer_bytes(lengths: tuple[int, ...]) -> int:
    """What EET's buffers come to for prompts of these lengths, its caches left out."""
    pool = FirstFitPool(repaired=False)
    replay(pool, eet_sweep(lengths))
    return sum(chunk.num_bytes for chunk in pool.buffers)


SHOWN_FOR_EET = ("arena, grown", "arena, reserved", "chunks, arrival, immediate", "EET", "EET, repaired")


NUM_REQUESTS = 12
NUM_SERVED = NUM_REQUESTS
"""So many of them are given to engines."""
NEW_TOKENS = 4
PLANNERS = ("greedy_by_size", "chunked", "eet_repaired", "no_reuse")


def requests(model: Model, count: int = NUM_REQUESTS, seed: int = 3) -> list[list[int]]:
    """Prompts of 5 to 250 tokens, drawn from the vocabulary: only their lengths matter here."""
    draw = random.Random(seed)
    vocabulary, longest = model.config.vocab_size, min(250, model.config.context - NEW_TOKENS)
    return [[draw.randrange(1, vocabulary) for _ in range(draw.randint(5, longest))] for _ in range(count)]


def traced(model: Model) -> list[Request]:
    """The same stream as lifetimes: what each request would ask for, told without running it."""
    engine = Engine(model.decoder, Recipe.parse(BASE, model.device).parts)
    settings, found = Settings(max_new_tokens=NEW_TOKENS), []
    for prompt in requests(model):
        passes = engine.lifetimes([prompt], settings).values()
        found.append(Request(len(prompt), one_after_the_other(passes)))
    return found


def on_paper(model: Model) -> Shown:
    """This model's own stream through every pool that the workbench offers."""
    stream = traced(model)
    found = {name: replay(make(), stream) for name, make in POOLS.items() if name in PLANNERS}
    return Shown(
        table(POOL_HEAD, pool_lines(found)),
        f"{len(stream)} prompts of random length on {model.name}, traced without running them. Nothing here was "
        "written by hand, unlike the tensors of the stream above.",
    )


def on_the_engine(model: Model) -> Shown:
    """The same stream for real: one engine for each planner, whose pool lives from request to request."""
    truth = [_tokens(Engine(model.decoder), prompt) for prompt in requests(model, NUM_SERVED)]
    rows = []
    for name in PLANNERS:
        calls, held_bytes, tokens = _ran(model, name)
        rows.append([name, f"{calls:,}", sized(held_bytes), "yes" if tokens == truth else "no"])
    return Shown(
        here(model),
        table(["memory_reuse:planner=", "driver calls", "held at the end", "same tokens as the baseline"], rows),
        "An engine asks the driver only if its pool has no room for a request. The same tokens show that no tensor "
        "overwrote another one that was still alive.",
    )


def _ran(model: Model, planner: str) -> tuple[int, int, list[tuple[int, ...]]]:
    """Driver calls, bytes held at the end, and the tokens of an engine that has served the stream."""
    recipe = Recipe.parse(f"{BASE},memory_reuse:planner={planner}", model.device)
    with closing(Engine(model.decoder, recipe.parts)) as engine:
        tokens = [_tokens(engine, prompt) for prompt in requests(model, NUM_SERVED)]
        calls = engine.memory.calls
        return calls.allocations + calls.frees, engine.memory.held_bytes, tokens


def _tokens(engine: Engine, prompt: list[int]) -> tuple[int, ...]:
    [tokens] = engine.generate([prompt], Settings(max_new_tokens=NEW_TOKENS)).tokens
    return tokens


def torch_allocator() -> Shown:
    """The peer on the same streams: measured where there is a GPU, else what one told."""
    if torch.cuda.is_available():
        found = streams.allocator_here()
        where = noted(f"Measured now on {found.device}, torch {found.torch}.")
    else:
        found = streams.recorded_allocator()
        where = there(f"recorded on an {found.device}, torch {found.torch}, {found.date[:10]}")
    rows = []
    for stream, settings in found.streams.items():
        for setting, each in settings.items():
            reserved, allocated = sized(max(each.reserved_bytes)), sized(each.most_allocated_bytes)
            rows.append([stream, setting, reserved, allocated, f"{each.allocations} + {each.frees}"])
    return Shown(
        where,
        table(["stream", "allocator", "most reserved", "most allocated", "allocations + frees"], rows),
        "Torch's allocator does not know what comes next. It keeps what is freed, splits blocks and joins them "
        "again. Expandable segments let a block grow in place, for streams of ever longer requests. It keeps what is "
        "reserved but not allocated for later requests.",
    )
