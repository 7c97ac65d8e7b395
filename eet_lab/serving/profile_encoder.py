"""An encoder's cost table: a pass for each length and batch, none of whose texts has pads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from itertools import product

from eet_lab.bench.encoding import encoded
from eet_lab.bench.timing import Tally
from eet_lab.bench.workloads import FIRST_TOKEN
from eet_lab.engine.encode import EncoderEngine
from eet_lab.errors import CostError
from eet_lab.models import Model
from eet_lab.models.on_device import on_its_encoders_device
from eet_lab.parts.passes import Batching
from eet_lab.progress import Cancel, Progress
from eet_lab.scheduling.cost import EncoderCost, Provenance
from eet_lab.scheduling.whole import check_whole
from eet_lab.serving.sizes import Timed, median_of, noted, powers
from eet_lab.technique import Recipe


def encoder_axes(model: Model) -> tuple[tuple[int, ...], ...]:
    """Lengths up to the context, and batches."""
    return powers(16, 2, model.config.context), powers(1, 2, 64 if model.device == "cpu" else 256)


@on_its_encoders_device
def measured_encoder(
    model: Model,
    recipe: Recipe,
    axes: Sequence[tuple[int, ...]],
    source: Provenance,
    repeats: int,
    progress: Progress | None,
    cancel: Cancel | None,
) -> EncoderCost:
    """Passes over random texts, the largest first, from lists of token ids to vectors on the host."""
    lengths, batches = axes
    EncoderCost(lengths, batches, [[1.0] * len(batches)] * len(lengths), source)  # type: ignore[arg-type]  # axes
    check_whole(CostError, "the longest text", lengths[-1], 1, model.config.context)
    draw, vocab, times = random.Random(0), model.config.vocab_size, {}
    with closing(EncoderEngine(model.encoder, recipe.parts)) as engine:
        engine.prepare(progress, cancel)
        tally = Tally(len(lengths) * len(batches), progress)
        for length, batch in sorted(product(lengths, batches), key=lambda size: -size[0] * size[1]):
            tally.say(f"{batch:,} x {length:,} tokens")
            rows = [[draw.randrange(FIRST_TOKEN, vocab) for _ in range(length)] for _ in range(batch)]
            work = partial(_pass_ms, engine, rows, Batching(length * batch), cancel)
            times[length, batch] = median_of(work, repeats, cancel)
            tally.finish()
    table = tuple(tuple(times[length, batch].ms for batch in batches) for length in lengths)
    return EncoderCost(lengths, batches, table, noted(source, times.values()))


def _pass_ms(engine: EncoderEngine, rows: Sequence[Sequence[int]], batching: Batching, cancel: Cancel | None) -> Timed:
    read = encoded(engine, rows, batching, cancel)
    return Timed(read.total_s * 1e3, read.was_disturbed)
