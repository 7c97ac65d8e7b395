"""Lesson 4, decode speed: why does one token take so long?"""

from __future__ import annotations

import math

from eet_lab.bench import Ladder, Workload
from eet_lab.bench.cost import launch_cost, step_cost, streaming_gb_per_s
from eet_lab.bench.launches import counted, num_kernels
from eet_lab.bench.measured import Spread, p50
from eet_lab.devices import present
from eet_lab.lessons import decode_step, recorded
from eet_lab.lessons.prediction import Prediction, after_prediction
from eet_lab.lessons.roofline import H200_GB_PER_S, H200_TFLOPS, decode_work
from eet_lab.lessons.show import Shown, here, table, there
from eet_lab.models import Model
from eet_lab.models.on_device import on_its_device
from eet_lab.parts import Parts
from eet_lab.technique import Recipe, registry
from eet_lab.texts import Output
from eet_lab.words import brief, percent

PROMPT = "An iterator is an object that represents a stream of data. Each call of its method returns"
"""One row: the plainest case there is, and the hardest to make fast."""

THREE = "pre_padding,mask_removal,memory_reuse"
COLUMNS = ("baseline", "first three techniques", "everything on (GPU)")
NEW_TOKENS = 64


def predict() -> Prediction:
    """How long should a token take? Reveals the floor, and nothing that was measured."""
    config = recorded.CONFIG
    work = decode_work(config, 1, recorded.context(Workload.parse(recorded.ONE_ROW)), 2)
    return Prediction(
        f"GPT-2 XL: {config.num_params / 1e9:.2f} billion weights, 2 bytes each. The GPU reads "
        f"{brief(H200_GB_PER_S / 1e3)} TB/s and computes {H200_TFLOPS:.0f} TFLOP/s. One prompt. How many "
        "milliseconds should each new token take?",
        reveal=f"A step reads {work.num_bytes / 1e9:.2f} GB of weights, keys and values: at {H200_GB_PER_S:,.0f} GB/s "
        f"that is {work.num_bytes / H200_GB_PER_S / 1e6:.2f} ms, the floor. Its arithmetic would take "
        f"{work.flops / H200_TFLOPS / 1e9:.3f} ms. What do real programs take? Read on.",
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
        ["rate of a streaming read here (measured)", f"{brief(cost.ceiling_gb_per_s or 0)} GB/s"],
        ["floor: bytes / rate", f"{brief(cost.floor_ms or 0)} ms"],
        ["time per token (measured)", f"{brief(took)} ms"],
        ["floor / measured", percent((cost.floor_ms or 0) / took)],
    ]
    return Shown(
        here(model),
        table(["one token, the baseline", ""], lines),
        "Look at the last line: it is the share of the time that the bytes explain. (A CPU may keep such a small model "
        "in its caches, which are faster than its memory.)",
    )


def calls(model: Model) -> Shown:
    """What a step hands to the device, op by op: the baseline, the first three techniques, and fused kernels."""
    recipes = dict(zip(COLUMNS, (Recipe(), Recipe.parse(THREE, "cuda"), decode_step.everything_on()), strict=True))
    found = {name: counted(recipe.parts, [8], model.config.num_layers) for name, recipe in recipes.items()}
    lines = [
        [f"{part} ({op})", *(f"{each.layer[place][1]:,}" for each in found.values())]
        for place, (part, op) in enumerate(zip(decode_step.PARTS, decode_step.LAYER, strict=True))
    ]
    xl = [num_kernels(recipe.parts, (8,), recorded.CONFIG) for recipe in recipes.values()]
    lines += [
        ["other: embedding, LM head, sampling, bookkeeping", *(f"{each.beside:,}" for each in found.values())],
        [f"a step of {model.config.num_layers} layers, one row", *(f"{each.total:,}" for each in found.values())],
        ["a step of GPT-2 XL, 48 layers, one row", *(f"{number:,}" for number in xl)],
    ]
    return Shown(
        table(["launches, or calls on a CPU", *found], lines),
        "Counted, not timed. On a GPU each launch has a start and an end, in which no byte moves. (GPT-2 XL's last "
        "column has fewer than five per layer: there persistent layers make two of five.)",
    )


@on_its_device
def step(model: Model) -> Shown:
    """One decode step of the baseline on this machine, op by op, as measured."""
    found = decode_step.timed(model, Parts(), model.encode(PROMPT))
    busy, total = sum(op.took_us for op in found), found[-1].start_us + found[-1].took_us
    attention = sum(op.took_us for op in found if op.op == "attention") / busy
    rate, most = streaming_gb_per_s(model.device), max(found, key=lambda op: op.num_bytes)
    name = "The LM head, in next_token," if most.op == "next_token" else most.op
    own = min(most.num_bytes / rate / 1e3 / most.took_us, 1.0)  # a cache may be faster than memory
    return Shown(
        here(model),
        decode_step.step_figure(found, rate),
        f"Look at attention: it reads hardly any bytes and takes {percent(attention)} of the time, because it makes "
        f"the most calls. {name} has the most bytes, and they account for {percent(own)} of its time. "
        f"{percent(1 - busy / total)} of the step lies between the ops: Python.",
    )


@after_prediction
def layer(guess: Prediction) -> Shown:
    """One layer on the H200, op by op."""
    rows = [row for _, each in decode_step.layer_ops() for row in each]
    return Shown(
        there(rows),
        decode_step.layer_figure(),
        "All three lanes read the same bytes, without any Python. Look at the projection: it has the smallest "
        "matrix, and most of its time is start and end.",
    )


def ladder_here(result: Ladder, model: Model) -> Shown:
    """The rungs just measured on this machine: predicted beside measured."""
    with present(model.decoder.device):
        found = decode_step.rises(result, model.config, launch_cost(model.device))
    how = {
        "cpu": "The prediction is the floor plus a cost for each call, measured with a call that does almost nothing.",
        "cuda": "The prediction is the slower of two: the device (bytes, and a cost for each kernel) and the host (a "
        f"cost for each launch), both costs measured here.{decode_step.early_start(result)}",
    }[model.device]
    return Shown(
        here(model),
        decode_step.rungs_figure(found, "Time per token, rung by rung, on this machine"),
        decode_step.rungs_table(found),
        f"{how} One row has no pads, so pre-padding and packed prefill leave its steps as they are. "
        f"{decode_step.unsteady(found, 'this machine')}",
    )


@after_prediction
def verdict(guess: Prediction) -> Shown:
    """The ladder of one row on the H200, beside the reader's prediction."""
    result, rows = recorded.ladder(), recorded.one_row()
    floor_ms, price = recorded.fastest().floor_ms or math.nan, decode_step.H200
    found = decode_step.rises(result, recorded.CONFIG, price)
    plain = found[0]
    lines = [["you", str(guess), ""]]
    for row in rows:
        took = row.tpot_ms.p50 if row.tpot_ms else math.nan
        lines.append([recorded.who(row), f"{brief(took)} ms", percent((row.floor_ms or floor_ms) / took)])
    lines.append(["floor: bytes at the rate of a streaming read there", f"{brief(floor_ms)} ms", "100 %"])
    return Shown(
        there(rows),
        table(["GPT-2 XL, one row, 128 + 128 tokens", "a token", "its own floor / measured"], lines),
        there(result),
        decode_step.rungs_figure(found, "Time per token on an H200, GPT-2 XL, one row"),
        decode_step.rungs_table(found),
        f"The prediction counts {brief(price.launch_us, 2)} µs of host time for a launch and "
        f"{brief(price.kernel_us, 2)} µs of device time between two kernels. It is far off for the baseline, "
        f"where Python takes {plain.measured.p50 / plain.launches * 1e3:.0f} µs for each of {plain.launches:,} calls."
        f"{decode_step.early_start(result)} {decode_step.unsteady(found, 'the host')} (The floor above the figure and "
        "the one in it come from two recordings, and each measured its own streaming read.)",
    )


@after_prediction
def left_over(guess: Prediction) -> Shown:
    """Where the rest of a step of our fastest recipe goes, and what attacks it."""
    best, apart = recorded.fastest(), recorded.fastest(without="persistent_layers")
    recipe, layers = Recipe.parse(apart.recipe, "cuda"), recorded.CONFIG.num_layers
    measured, together = (p50(row.tpot_ms) or math.nan for row in (apart, best))
    floor_ms = apart.floor_ms or math.nan
    ops = [rows for _, rows in decode_step.layer_ops()]
    beyond = sum(decode_step.ours_us(rows) - decode_step.floor_us(rows) for rows in ops) * layers / 1e3
    head = recorded.op(f"norm_linear/t1/n{recorded.CONFIG.vocab_size}/c{recorded.CONFIG.hidden_size}")
    beyond_head = (p50(head.total_ms) or math.nan) - (head.floor_ms or math.nan)
    alone = floor_ms + beyond + beyond_head
    lines = [
        ["weights, keys and values at the rate of a streaming read", f"{brief(floor_ms)} ms"],
        [f"the layers' {5 * layers} kernels, beyond their bytes", f"{brief(beyond)} ms"],
        ["the LM head, beyond its bytes", f"{brief(beyond_head, 2)} ms"],
        ["sum of these, each op timed alone", f"{brief(alone)} ms"],
        ["the whole step (measured)", f"{brief(measured)} ms"],
    ]
    return Shown(
        there([apart, head]),
        table(["a token of GPT-2 XL, one row, our fastest recipe of five kernels a layer", ""], lines),
        table(["what costs time", "what reduces it", "by"], [[*words, _by(name, recipe)] for *words, name in ATTACKS]),
        f"Compare the last two lines: the ops alone sum to {percent(alone / measured - 1)} more than the whole step, "
        f"so about {brief(alone - measured, 2)} ms of them are hidden by starting early. (Attention was timed at 1,024 "
        "columns, so the sum is not exact.)",
        f"Persistent layers replace those {5 * layers} kernels by {2 * layers + 1}, and a token takes "
        f"{brief(together)} ms. Most of the rest above the floor is blocks waiting for each other's results.",
    )


ATTACKS = (
    ("Python and PyTorch between launches", "record the step once, replay it with one call", "cuda_graphs"),
    ("a start and an end for each launch", "fewer launches: one kernel does the work of several", "fused_kernels"),
    ("a dozen small launches around the layers", "embed, sample and advance in one launch each", "fused_sampling"),
    ("end of one kernel, start of the next, its first instructions",
     "let the next kernel start early and prefetch its weights before it waits (programmatic dependent launch)",
     "dependent_launch"),
    ("four products of a layer that wait for each other's last block",
     "one kernel that runs through all four, with one stream of weights", "persistent_layers"),
    ("the bytes themselves", "smaller weights: the floor moves", "int8_weights"),
    ("all weights are read for a single row", "more rows per step: see the exercise", ""),
)  # fmt: skip
"""Where a step's time goes beside arithmetic, what is done about it, and by which technique."""


def _by(name: str, recipe: Recipe) -> str:
    """The technique's title, marked if the recipe has it already."""
    if not name:
        return "more prompts"
    return f"{registry()[name].title}{' (on already)' if name in recipe.names else ''}"
