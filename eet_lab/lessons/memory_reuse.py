"""Lesson 3, memory reuse: where do the bytes of a run live, and who can share them?"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any

import plotly.graph_objects as go
import torch

from eet_lab.bench import Comparison, Ladder, Measurement, Rung
from eet_lab.bench.paired import median_interval
from eet_lab.bench.timing import took_ms
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.figures import theme
from eet_lab.figures.plans import packing
from eet_lab.labels import in_titles
from eet_lab.lessons import recorded
from eet_lab.lessons.batch import rows
from eet_lab.lessons.prediction import Prediction, after_prediction
from eet_lab.lessons.show import Shown, chosen, here, in_words, saved_words, table, there
from eet_lab.memory import PLANNERS, Plan
from eet_lab.models import Model
from eet_lab.models.config import Config
from eet_lab.models.loading import RANDOM_LABEL
from eet_lab.models.weights import random_decoder
from eet_lab.parts.kv_cache import GrowingKV
from eet_lab.technique import Recipe
from eet_lab.texts import Output
from eet_lab.words import MiB, brief, ms_words, sized

BASE = "pre_padding,mask_removal"
PROMPT_TOKENS, NEW_TOKENS = 32, 352


LOADS = {
    "cpu": (Config(2, 128, 2, 512, 256, PROMPT_TOKENS + NEW_TOKENS), 12),
    "cuda": (Config(2, 2048, 16, 8192, 256, PROMPT_TOKENS + NEW_TOKENS), 256),
}
"""A model with little weight and a batch's many rows: most of a step has to do with the KV cache."""


def small_model(like: Model) -> Model:
    """Two layers with random weights, on the device and in the dtype of `like`."""
    config, _ = LOADS[like.device]
    decoder = random_decoder(config, 0, like.decoder.device, like.decoder.dtype)
    return Model("two layers", f"{config.hidden_size}-channel {RANDOM_LABEL}", decoder, None, "random")


def prompts(small: Model) -> list[list[int]]:
    """The batch for it: rows of equal length, of tokens that mean nothing."""
    _, num_rows = LOADS[small.device]
    return [[1 + token % 200 for token in range(PROMPT_TOKENS)]] * num_rows


def predict(small: Model) -> Prediction:
    """How often is the cache copied? Reveals the count, and no time."""
    copied, final = kv_copies(small)
    return Prediction(
        f"The KV cache ends at {final / MiB:.1f} MiB. If each of the {NEW_TOKENS - 1} decode steps extends it "
        "by concatenation, how many times its final size does the whole run copy?",
        reveal=f"{copied / final:.0f} times: {copied / MiB:,.0f} MiB are read and written again, to build a cache of "
        f"{final / MiB:.1f} MiB. The next question is how many milliseconds that takes.",
        number=(0, 1000),
        unit="times its final size",
    )


def kv_copies(small: Model) -> tuple[int, int]:
    """Bytes of old keys and values that a growing cache copies in the run, and its final size."""
    column_bytes = len(prompts(small)) * small.config.kv_bytes_per_token(small.decoder.dtype.itemsize)
    end = PROMPT_TOKENS + NEW_TOKENS - 1
    return sum(range(PROMPT_TOKENS, end)) * column_bytes, end * column_bytes


def trace(model: Model, recipe: str = BASE) -> Plan:
    """Every buffer that the first pass asks for, placed as the recipe's planner places it."""
    engine = Engine(model.decoder, Recipe.parse(recipe, model.device).parts)
    engine.generate(rows(model), Settings(max_new_tokens=2))
    return engine.plans()["prefill"]


def buffers(plan: Plan, planner: str) -> Shown:
    """The same buffers, placed by one of PLANNERS; PlanError for another name."""
    plan = chosen("planner", planner, PLANNERS)(plan.lifetimes)
    words = {
        "no_reuse": "Every buffer has bytes of its own, so addresses only climb. Look at how short the rectangles are: "
        "each is needed for a moment, and its bytes are unused for the rest of the pass.",
    }.get(
        planner,
        "The same rectangles, moved down: a tensor gets the bytes of those that are no longer needed, and each layer "
        "uses those of the layer before. No two rectangles overlap; that is the only rule.",
    )
    return Shown(packing(plan), words)


def alive(model: Model) -> Shown:
    """What the first pass asks for, what is alive at once, and what an arena needs."""
    plan = trace(model)
    total = sum(life.num_bytes for life in plan.lifetimes)
    lines = [
        ["sum of all requests, each with memory of its own", f"{len(plan.lifetimes)}", sized(total)],
        ["alive at once: what freeing by reference counts needs", "", sized(plan.lower_bound_bytes)],
    ]
    lines += [
        [f"arena, planner {name}", "1", sized(PLANNERS[name](plan.lifetimes).footprint_bytes)]
        for name in PLANNERS
        if name != "no_reuse"
    ]
    return Shown(
        table(["first pass", "calls to the allocator", "bytes"], lines),
        "Be fair to the baseline: Python frees a tensor when its last user is done, so its peak is also what is alive "
        "at once. A plan does not lower the peak here. It needs one call to the allocator instead of one for each "
        "tensor, and its addresses are known before the run and never move.",
    )


@torch.inference_mode()
def copy_ms(small: Model) -> list[float]:
    """The time of each decode step's copies: a growing cache is lengthened as in the run, and nothing else is done."""
    config, tries = small.config, list[list[float]]()
    for _ in range(3):
        cache = GrowingKV(config.num_layers, config.num_kv_heads, config.head_dim, small.decoder.token_embedding)
        cache.open([0] * len(prompts(small)), PROMPT_TOKENS + NEW_TOKENS)
        tries.append([_lengthen_ms(cache, max_kv) for max_kv in range(PROMPT_TOKENS, PROMPT_TOKENS + NEW_TOKENS)])
    return [median(each) for each in zip(*tries, strict=True)][1:]


def _lengthen_ms(cache: GrowingKV, max_kv: int) -> float:
    batch: Any = SimpleNamespace(max_kv=max_kv)  # all that a cache reads of one
    return took_ms(lambda: [cache.layer(number, batch) for number in range(cache.num_layers)], cache.like.device.type)


def steps_over_time(small: Model, output: Output) -> Shown:
    """Each decode step's time of one run."""
    steps = output.run.step_ms
    fig = _steps_figure([_steps(in_titles(str(output.recipe)), steps, theme.BASELINE)])
    early, _, late = _eighths(steps[1:])
    told = f"an early step took {ms_words(median(early))}, a late one {ms_words(median(late))}"
    look = "Look how the line rises" if grew(steps[1:]) else "Whether it rises cannot be told from noise here"
    said = f"{look}: {told}."
    return Shown(
        here(small),
        fig,
        f"{said} All steps compute the same linear layers. Attention reads more keys and values at each step, and the "
        "cache copies more.",
    )


def _eighths(steps: Sequence[float]) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    """The first eighth of a run's steps, the one in the middle, and the last."""
    eighth = len(steps) // 8
    middle = (len(steps) - eighth) // 2
    return steps[:eighth], steps[middle : middle + eighth], steps[-eighth:]


def grew(steps: Sequence[float]) -> bool:
    """Whether a run's steps grow by more than noise: the intervals of the medians of its eighths lie apart.

    They have to grow from the first to the middle and from there to the last: a machine that changes its pace once
    shows one of both.
    """
    early, middle, late = map(median_interval, _eighths(steps))
    return early[1] < middle[0] and middle[1] < late[0]


@after_prediction
def verdict(guess: Prediction, result: Comparison, small: Model) -> Shown:
    """The copies' time, predicted from bytes and rate, beside what memory reuse saved."""
    a, b = result.baseline, result.selection
    if not (a.total_ms and b.total_ms):
        return Shown("Some time could not be measured: run the comparison again.")
    copied, final = kv_copies(small)
    alone = copy_ms(small)
    saved = f"{brief(a.total_ms.p50 - b.total_ms.p50)} of {brief(a.total_ms.p50)} ms"
    lines = [
        ["cache copied, in final sizes: you", str(guess)],
        ["cache copied, in final sizes: counted", f"{copied / final:.0f}"],
        ["bytes read plus bytes written for it (counted)", f"{2 * copied / MiB:,.0f} MiB"],
        ["the copies alone (measured)", f"{brief(sum(alone))} ms"],
        ["saved by memory reuse in the run (measured)", saved_words(result.all_changes.get("total_ms"), saved)],
    ]
    grown = _steps(in_titles(a.recipe), a.step_ms, theme.BASELINE)
    static = _steps(in_titles(b.recipe), b.step_ms, theme.SELECTION)
    predicted = static._replace(
        name="predicted: with memory reuse, and the copies alone", y=list(map(sum, zip(static.y, alone, strict=True))),
        color=theme.LOSS, dash="dot",
    )  # fmt: skip
    return Shown(
        here(small),
        table(["in the whole run", ""], lines),
        _steps_figure([grown, static, predicted]),
        f"Look at the gap between grey and blue: {_gap_words(result)} The dotted line is blue plus the time of the "
        "copies alone. Grey may be above it: inside a step the copies also evict other data from the CPU's caches.",
        in_words(result, "total_ms", "The whole run"),
    )


def _gap_words(result: Comparison) -> str:
    """What became of the gap between the steps of both runs, as far as it can be told from noise."""
    change = result.all_changes.get("total_ms")
    if change and change.verdict == "cannot tell apart":
        return "here it cannot be told from noise, since pairs of whole runs differ by more."
    pairs = zip(result.baseline.step_ms[1:], result.selection.step_ms[1:], strict=False)
    gaps = [grown - static for grown, static in pairs]
    early, _, late = _eighths(gaps)
    told = f"from {ms_words(median(early))} in early steps to {ms_words(median(late))} in late ones"
    if grew(gaps):
        return f"it grows with the cache, {told}."
    return f"whether it grows cannot be told from noise here. It goes {told}, and not steadily."


@after_prediction
def on_the_h200(guess: Prediction) -> Shown:
    """Memory reuse on an H200, where copies are small."""
    one, eight = recorded.ladder(), recorded.batch()
    lines = []
    for name, ladder in (("one row, 128 + 128 tokens", one), ("eight rows, 16 to 128 + 64 tokens", eight)):
        grown, rung = _rungs(ladder)
        static = rung.measurement
        copied, rate = _copied_a_step(ladder, grown), grown.cost.ceiling_gb_per_s if grown.cost else None
        if grown.tpot_ms and static.tpot_ms and rate:
            saved = f"{brief(grown.tpot_ms.p50 - static.tpot_ms.p50, 2)} ms"
            saved = saved_words(rung.changes.get("tpot_ms"), saved)
            times = f"{brief(grown.tpot_ms.p50)} ms", f"{brief(static.tpot_ms.p50)} ms"
            lines.append([name, *times, saved, f"{brief(2 * copied / rate / 1e6, 2)} ms"])
    grown, rung = _rungs(one)
    launches = [m.cost.launches_per_token or 0 for m in (grown, rung.measurement) if m.cost]
    untold = all(line[3] == "cannot tell apart" for line in lines)
    noise = " What they save in time cannot be told from noise: runs on that host differed by more." if untold else ""
    return Shown(
        there(one),
        table(["GPT-2 XL, per token", "growing", "memory reuse", "saved", "copies, from bytes and rate"], lines),
        "On this GPU the copies take almost no time, since its memory is so fast. But each copy is a launch and a call "
        f"to the allocator, both made by Python: {launches[0]:,.0f} launches per step with a growing cache, "
        f"{launches[1]:,.0f} with memory reuse (one row).{noise} Lesson 4 is about the time of launches.",
    )


def _rungs(ladder: Ladder) -> tuple[Measurement, Rung]:
    """Of a ladder: the run with a growing cache, and the next rung up, with memory reuse."""
    place = next(i for i, rung in enumerate(ladder.rungs) if rung.technique == "memory_reuse")
    return ladder.rungs[place - 1].measurement, ladder.rungs[place]


def _copied_a_step(ladder: Ladder, grown: Measurement) -> float:
    """Bytes that a growing cache copies in its middle step."""
    end = max(ladder.prompt_lengths) + max(map(len, grown.tokens)) - 1
    return grown.memory["kv"] * (max(ladder.prompt_lengths) + end) / 2 / end


def _steps_figure(lines: list[theme.Curve]) -> go.Figure:
    title = "Time of each decode step as the cache grows (median of 9 neighbours)"
    fig = theme.curves(title, lines, "columns in the cache", "ms per step", height=340)
    return fig.update_layout(margin={"b": 100})


def _steps(name: str, step_ms: Sequence[float], color: str) -> theme.Curve:
    """The decode steps, each as the median of its neighbours, over the columns that it finds in the cache."""
    steps = [median(step_ms[max(i - 4, 1) : i + 5]) for i in range(1, len(step_ms))]
    return theme.Curve(name, steps, color, x=range(PROMPT_TOKENS, PROMPT_TOKENS + len(steps)))
