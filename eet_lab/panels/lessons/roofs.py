"""Lesson 4's two roofs: the H200's, with GPT-2 XL under it, and that of the present machine."""

from __future__ import annotations

from eet_lab.models import Model
from eet_lab.panels.lessons import recorded
from eet_lab.panels.lessons.prediction import Prediction
from eet_lab.panels.lessons.roofline import (
    BATCHES,
    DECODE,
    H200_TFLOPS,
    PLAIN,
    PREFILL,
    Point,
    Roof,
    decode_work,
    figure,
    prefill_work,
    recorded_points,
)
from eet_lab.panels.lessons.roofline import roof_here as measured_roof
from eet_lab.panels.lessons.show import Shown, after
from eet_lab.panels.lessons.where import here, there
from eet_lab.texts import Output


def roof(guess: Prediction) -> Shown:
    """The H200's roofline with GPT-2 XL's passes, once the reader has predicted."""
    return after(guess, _roof)


def _roof() -> Shown:
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
        f"Look left of the ridge: there, only the slope counts, and the slope is memory. A step of one row does one "
        f"operation for each byte, {limits.ridge:.0f} times too few to keep the arithmetic busy. Rows share the "
        f"weights but each reads keys and values of its own, so at {columns:.0f} columns decode never gets beyond "
        f"{limit:.0f}. Full points below the roof are time that neither side explains. Hover over them: those of a "
        "workload stand on one vertical line, and techniques move them up. Int8 moves to the right, for it reads less.",
    )


def roof_here(model: Model, output: Output) -> Shown:
    """The same for this machine and the baseline that was just run."""
    limits, itemsize = measured_roof(model.device), model.decoder.dtype.itemsize
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
        f"The same roof in another place: here the ridge is at {limits.ridge:.3g} operations a byte. The demo model's "
        f"numbers have {itemsize} bytes.",
    )
