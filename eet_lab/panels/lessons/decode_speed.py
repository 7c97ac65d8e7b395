"""Lesson 4, decode speed: why does one token take so long?"""

from __future__ import annotations

import math

from eet_lab.bench import Ladder, Workload
from eet_lab.bench.calls import counted, num_kernels
from eet_lab.bench.cost import step_cost, streaming_gb_per_s
from eet_lab.bench.measured import Spread
from eet_lab.models import Model
from eet_lab.panels.lessons import recorded, rungs, timeline
from eet_lab.panels.lessons.floor_exercise import exercise
from eet_lab.panels.lessons.left_over import left_over
from eet_lab.panels.lessons.prediction import Prediction
from eet_lab.panels.lessons.roofline import H200_TFLOPS, decode_work
from eet_lab.panels.lessons.roofs import roof, roof_here
from eet_lab.panels.lessons.show import Shown, after, table
from eet_lab.panels.lessons.step_calls import LAYER, everything_on, timed
from eet_lab.panels.lessons.where import here, there
from eet_lab.parts import Parts
from eet_lab.technique import Recipe
from eet_lab.texts import Output

PROMPT = "An iterator is an object that represents a stream of data. Each call of its method returns"
"""One row: the plainest case there is, and the hardest to make fast."""

THREE = "pre_padding,mask_removal,memory_reuse"
COLUMNS = ("baseline", "three headline toggles", "everything on (GPU)")
NEW_TOKENS = 64
GB_PER_S = 4400.0
"""Of an H200, in round numbers."""


def predict() -> Prediction:
    """How long should a token take? Reveals the floor, and nothing that was measured."""
    config = recorded.CONFIG
    work = decode_work(config, 1, recorded.context(Workload.parse(recorded.ONE_ROW)), 2)
    return Prediction(
        f"GPT-2 XL: {config.num_params / 1e9:.2f} billion weights, 2 bytes each. The GPU reads 4.4 TB/s and computes "
        f"{H200_TFLOPS:.0f} TFLOP/s. One prompt. How many milliseconds should each new token take?",
        reveal=f"A step reads {work.num_bytes / 1e9:.2f} GB of weights, keys and values: at {GB_PER_S:,.0f} GB/s that "
        f"is {work.num_bytes / GB_PER_S / 1e6:.2f} ms. Its arithmetic would take {work.flops / H200_TFLOPS / 1e9:.3f} "
        "ms. The first number is the floor. What do real programs take? Guess again, silently, and read on.",
        number=(0, 1000),
        unit="ms",
    )


def floor(model: Model, output: Output) -> Shown:
    """The bytes of a step of this run, the rate at which this machine reads, the floor, and what a step took."""
    took = output.run.tpot_ms
    if took is None:
        return Shown("A time per token needs at least two tokens: raise max_new_tokens and run this cell again.")
    rows = [model.encode(prompt) for prompt in output.prompts]
    cost = step_cost(model.decoder, rows, len(output.run.tokens[0]), Spread(took, took, took))
    lines = [
        ["weights that a step reads", f"{cost.weight_bytes / 1e6:.2f} MB"],
        ["keys and values, half-way", f"{cost.kv_bytes / 1e6:.2f} MB"],
        ["rate of a streaming read here (measured)", f"{cost.ceiling_gb_per_s:.4g} GB/s"],
        ["floor: bytes / rate", f"{cost.floor_ms or 0:.3g} ms"],
        ["time per token (measured)", f"{took:.3g} ms"],
        ["floor / measured", f"{(cost.floor_ms or 0) / took:.0%}"],
    ]
    return Shown(
        here(model),
        table(["one token, the baseline", ""], lines),
        "Look at the last line: that is how well the memory is used. This lesson is about where the rest of the time "
        "goes. (So small a model may stay in a CPU's caches, which are faster than its memory: then the floor is "
        "not quite one.)",
    )


def calls(model: Model) -> Shown:
    """What a step hands to the device, op by op: the baseline, the headline toggles, and fused kernels."""
    recipes = dict(zip(COLUMNS, (Recipe(), Recipe.parse(THREE, "cuda"), everything_on()), strict=True))
    found = {name: counted(recipe.parts, [8], model.config.num_layers) for name, recipe in recipes.items()}
    lines = [
        [f"{part} ({op})", *(f"{each.layer[place][1]}" for each in found.values())]
        for place, (part, op) in enumerate(zip(timeline.PARTS, LAYER, strict=True))
    ]
    lines.append(["beside them: embedding, head, choice, bookkeeping", *(f"{each.beside}" for each in found.values())])
    lines.append([f"a step of {model.config.num_layers} layers", *(f"{each.total}" for each in found.values())])
    xl = [num_kernels(recipe.parts, (8,), recorded.CONFIG) for recipe in recipes.values()]
    lines.append(["a step of GPT-2 XL, 48 layers", *map(str, xl)])
    return Shown(
        table(["things handed to the device, one row", *found], lines),
        "Counted while a tiny decoder runs, views left out; for kernels of ours it is what they declare, and a test "
        "holds the code to that. On a GPU each of them has a start and an end, in which no byte moves. "
        "(The last line is no multiple of the one before: for one or two rows of a model as large as GPT-2 XL "
        "persistent_layers makes two kernels of a layer's five.)",
    )


def step(model: Model) -> Shown:
    """One decode step of the baseline on this machine, op by op, as measured."""
    found = timed(model, Parts(), model.encode(PROMPT))
    busy, total = sum(op.took_us for op in found), found[-1].start_us + found[-1].took_us
    attention = sum(op.took_us for op in found if op.op == "attention") / busy
    rate, most = streaming_gb_per_s(model.device), max(found, key=lambda op: op.num_bytes)
    own = min(most.num_bytes / rate / 1e3 / most.took_us, 1.0)  # a cache may be faster than memory
    return Shown(
        here(model),
        timeline.step_figure(found, rate),
        f"Look at attention: it has hardly any bytes to read, and takes {attention:.0%} of the time, since it is the "
        "op of most calls. The greener an op, the nearer it is to what memory allows. "
        f"{_named(most.op)} has the most bytes of all, and they account for {own:.0%} of its time. "
        f"{1 - busy / total:.0%} of the step lies between the ops: Python.",
    )


def _named(op: str) -> str:
    return "The LM head, in next_token," if op == "next_token" else op


def layer(guess: Prediction) -> Shown:
    """One layer on the H200, op by op, once the reader has predicted."""
    return after(guess, _layer)


def _layer() -> Shown:
    rows = [row for _, each in timeline.layer_ops() for row in each]
    return Shown(
        there(rows),
        timeline.layer_figure(),
        "All three lanes have the same bytes to read. Each op was timed alone in a CUDA graph, so no Python is in the "
        "way; attention at 1,024 columns. Look at how little the projection's time has to do with its bytes: it is the "
        "smallest matrix, and most of its time is coming and going.",
    )


def ladder_here(result: Ladder, model: Model) -> Shown:
    """The rungs just measured on this machine: predicted beside measured."""
    found = rungs.rises(result, model.config, rungs.price_here(model.device))
    how = {
        "cpu": "On a CPU nothing runs ahead: the prediction is the floor plus a price for each call, measured with one "
        f"that does next to nothing. {rungs.above_prediction(found)}",
        "cuda": "The prediction is the slower of two: the device (bytes, and a price for each kernel) and the host (a "
        f"price for each launch), both prices measured here.{rungs.early_start(result)}",
    }[model.device]
    return Shown(
        here(model),
        rungs.figure(found, "Time per token, rung by rung, on this machine"),
        rungs.listing(found),
        f"{how} With one row there are no pads, so of the headline toggles only fewer calls are left.",
        "Rungs are timed one after the other, each after a run to warm up: a busy moment of the machine hits one of "
        "them alone. For one row neither pre-padding nor packed prefill changes a decode step. "
        f"{rungs.unsteady(found, 'this machine')}",
    )


def verdict(guess: Prediction) -> Shown:
    """The ladder of one row on the H200, beside the reader's prediction."""
    return after(guess, lambda: _verdict(guess))


def _verdict(guess: Prediction) -> Shown:
    result, rows = recorded.ladder(), recorded.one_row()
    floor_ms, price = recorded.fastest().floor_ms or math.nan, rungs.H200
    found = rungs.rises(result, recorded.CONFIG, price)
    plain = found[0]
    lines = [["you", str(guess), ""]]
    for row in rows:
        took = row.tpot_ms.p50 if row.tpot_ms else math.nan
        lines.append([recorded.who(row), f"{took:.3g} ms", f"{(row.floor_ms or floor_ms) / took:.0%}"])
    lines.append(["floor: bytes at the rate of a streaming read there", f"{floor_ms:.3g} ms", "100%"])
    return Shown(
        there(rows),
        table(["GPT-2 XL, one row, 128 + 128 tokens", "a token", "its own floor / measured"], lines),
        there(result),
        rungs.figure(found, "Time per token on an H200, GPT-2 XL, one row"),
        rungs.listing(found),
        f"The prediction takes {price.launch_us:.2g} us of the host for a launch and {price.kernel_us:.2g} us for the "
        "gap between two kernels, as measured beside another H200. "
        "Look at where it is far off: in the baseline Python has to make "
        f"{plain.launches} calls, and each takes {plain.measured.p50 / plain.launches * 1e3:.0f} us instead. With a "
        "graph Python is gone, and still kernels take longer than their bytes and a gap: that is the next section."
        f"{rungs.early_start(result)} "
        "One row has no pads: pre-padding and packed prefill leave its steps as they are, and shorten the first pass. "
        f"{rungs.unsteady(found, 'the host, which others use too')}",
    )


__all__ = [
    "NEW_TOKENS",
    "PROMPT",
    "calls",
    "exercise",
    "floor",
    "ladder_here",
    "layer",
    "left_over",
    "predict",
    "roof",
    "roof_here",
    "step",
    "verdict",
]
